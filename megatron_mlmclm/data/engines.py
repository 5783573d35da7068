"""Who makes the shards: processes of this machine, or a Ray cluster whose machines share the files."""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from megatron_mlmclm.data.shards import Job, Made, Shard, ShardMaker
from megatron_mlmclm.data.sources import STDIN
from megatron_mlmclm.data.workers import in_order
from megatron_mlmclm.errors import UserError

# (job, shards, workers, address of the cluster) -> each shard with what it came to, in any order
Engine = Callable[[Job, list[Shard], int, str | None], Iterable[tuple[Shard, Made]]]
PER_WORKER = 2  # tasks a Ray worker has before it


def local(job: Job, shards: list[Shard], workers: int, _address: str | None) -> Iterator[tuple[Shard, Made]]:
    """By at most `workers` processes; by this one where it is the only one, or text comes from its standard input."""
    if not shards:
        return
    if any(shard.part.source.path == STDIN for shard in shards):
        workers = 1
    yield from zip(shards, in_order(ShardMaker, (job,), shards, min(workers, len(shards))), strict=True)


def on_ray(job: Job, shards: list[Shard], workers: int, address: str | None) -> Iterator[tuple[Shard, Made]]:
    """By the tasks of a Ray cluster: the one at `address`, else a local one with `workers` CPUs.

    Errors: UserError of the first bad record, where Ray is missing or cannot be reached, and where a task dies often.
    """
    try:
        import ray
    except ImportError as error:
        raise UserError("--engine ray: Ray is not installed; pip install 'megatron_mlmclm[ray]'") from error
    if any(shard.part.source.path == STDIN for shard in shards):
        raise UserError("-: standard input is read by this process alone; use --engine local")
    settings = (
        {"address": address} if address else {"address": "local", "num_cpus": workers, "include_dashboard": False}
    )
    try:
        ray.init(**settings, log_to_driver=False, logging_level="error")
    except Exception as error:
        raise UserError(f"--engine ray: cannot reach a cluster: {' '.join(str(error).split())[:200]}") from error
    try:
        yield from _ray_tasks(ray, job, shards)
    finally:
        ray.shutdown()


def _ray_tasks(ray, job: Job, shards: list[Shard]) -> Iterator[tuple[Shard, Made]]:  # noqa: ANN001 (a module)
    make = ray.remote(num_cpus=1, max_retries=3)(_make)
    # UserError tells of the text, not of the machine: a task that raises it is not tried again.
    waiting = iter(shards)
    under_way = {}
    while True:
        room = PER_WORKER * max(1, int(ray.cluster_resources().get("CPU", 1))) - len(under_way)
        for shard in islice(waiting, room):
            under_way[make.remote(job, shard)] = shard
        if not under_way:
            return
        done, _ = ray.wait(list(under_way))
        shard = under_way.pop(done[0])
        try:
            yield shard, ray.get(done[0])
        except ray.exceptions.RayTaskError as error:
            raise (error.cause if isinstance(error.cause, UserError) else error) from None
        except ray.exceptions.RayError as error:
            raise UserError(f"--engine ray: {' '.join(str(error).split())[:200]}") from error


_MAKERS: dict[Job, ShardMaker] = {}  # of this process: Ray calls a function many times in one


def _make(job: Job, shard: Shard) -> Made:
    if job not in _MAKERS:
        _MAKERS.clear()
        _MAKERS[job] = ShardMaker(job)
    return _MAKERS[job](shard)


ENGINES: dict[str, Engine] = {"local": local, "ray": on_ray}
