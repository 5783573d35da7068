"""Ray makes the same bytes as local processes, on a cluster of two nodes too, and says what goes wrong in one line."""

from pathlib import Path

import pytest

from megatron_mlmclm.data.preprocess import Options, preprocess
from megatron_mlmclm.errors import UserError

pytest.importorskip("ray")


@pytest.fixture
def text(tmp_path, corpus):
    path = tmp_path / "a.txt"
    path.write_text("".join(f"{document}\n" for document in corpus))
    return str(path)


@pytest.fixture(scope="module")
def cluster():
    """Two raylets, each a node of its own with one CPU."""
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 80 << 20})
    made.add_node(num_cpus=1, object_store_memory=80 << 20)
    yield made
    made.shutdown()


def contents(prefix: Path) -> list[bytes]:
    return [prefix.with_name(prefix.name + suffix).read_bytes() for suffix in (".bin", ".idx")]


def test_same_bytes_local_and_ray(tmp_path, text, tokenizer_folder, cluster):
    ways = {
        "local": Options(),
        "ray": Options(engine="ray", workers=2, shard_bytes=3000),
        "cluster": Options(engine="ray", ray_address=cluster.address, shard_bytes=1000),
    }
    for name, options in ways.items():
        (done,) = preprocess([text], str(tokenizer_folder), f"{tmp_path}/{name}", options)
        assert done.documents == 400
    assert contents(tmp_path / "local") == contents(tmp_path / "ray") == contents(tmp_path / "cluster")
    assert not list(tmp_path.glob("*.parts"))


def test_a_bad_line_ends_a_ray_run_in_one_line(tmp_path, text, tokenizer_folder, cluster):
    Path(text).rename(tmp_path / "a.jsonl")
    options = Options(engine="ray", ray_address=cluster.address, shard_bytes=1000)
    with pytest.raises(UserError, match=r"a.jsonl:1: not JSON") as raised:
        preprocess([f"{tmp_path}/a.jsonl"], str(tokenizer_folder), f"{tmp_path}/d", options)
    assert "\n" not in str(raised.value)
    assert not list(tmp_path.glob("d*"))


def test_no_cluster_there(tmp_path, text, tokenizer_folder, monkeypatch):
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "1")
    options = Options(engine="ray", ray_address="ray://127.0.0.1:9")
    with pytest.raises(UserError, match="--engine ray: cannot reach a cluster"):
        preprocess([text], str(tokenizer_folder), f"{tmp_path}/d", options)
    with pytest.raises(UserError, match="standard input is read by this process alone"):
        preprocess(["-"], str(tokenizer_folder), f"{tmp_path}/d", Options(engine="ray"))
