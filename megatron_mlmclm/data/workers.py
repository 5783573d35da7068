"""Worker processes that hold one function each; a killed one ends the work with an error, never with a wait.

Each worker has a pipe of its own whose other end no one else keeps open: where a worker is killed in the midst of an
answer, its pipe ends and the reader sees it. (The standard library's pools share one pipe among all workers: half an
answer leaves their reader waiting for the rest for ever.)
"""

import os
import queue
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection

from megatron_mlmclm.errors import UserError

PER_WORKER = 2  # items under way: one in the worker's hands, one ready to be sent


def in_order[Item, Answer](
    make: Callable[..., Callable[[Item], Answer]], args: tuple, items: Iterable[Item], workers: int
) -> Iterator[Answer]:
    """`make(*args)(item)` of each item, in the order of the items, by `workers` processes.

    `make` runs once in each process. One worker means this process. At most PER_WORKER items per worker are under way.
    Errors: what the function raised; UserError when a worker was killed.
    """
    if workers == 1:
        yield from map(make(*args), items)
        return
    pool = _Workers(make, args, workers)
    under_way: deque[Future[Answer]] = deque()
    # Threads only wait for pipes: each lends a free worker to one item.
    threads = ThreadPoolExecutor(workers)
    try:
        for item in items:
            under_way.append(threads.submit(pool.ask, item))
            if len(under_way) >= PER_WORKER * workers:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
    finally:
        pool.end()
        threads.shutdown(wait=True, cancel_futures=True)


class _Workers:
    """Started processes and those of them that are free."""

    def __init__(self, make: Callable, args: tuple, count: int) -> None:
        # "spawn": a forked child would inherit the tokenizer's threads in whatever state they were.
        context = get_context("spawn")
        self.processes = []
        self.free: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, make, args), daemon=True)
            process.start()
            theirs.close()  # the worker's is the last: its end is the pipe's end
            self.processes.append(process)
            self.free.put(ours)

    def ask(self, item: object) -> object:
        connection = self.free.get()
        try:
            answer = ask(connection, item)
        finally:
            self.free.put(connection)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def end(self) -> None:
        """Kill what is left: each worker owns nothing but its memory."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()


def ask(connection: Connection, item: object) -> object:
    """The answer of the worker behind `connection`. Errors: UserError where it is gone."""
    try:
        connection.send(item)
        return connection.recv()
    except (EOFError, OSError) as error:
        raise UserError("a worker process was killed (out of memory?); run again with fewer --workers") from error


def _serve(connection: Connection, make: Callable, args: tuple) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent alone answers it
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    function = None
    while True:
        item = connection.recv()
        try:
            function = function or make(*args)
            answer = function(item)
        except Exception as error:  # the parent raises it
            answer = error
        connection.send(answer)


def _leave_with_parent() -> None:
    """End this worker when its parent is gone, however it went (SIGKILL runs no clean-up)."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
