"""Worker processes: a killed one is an error wherever it was in its answer."""

import os
import signal
import struct
from multiprocessing import Pipe

import pytest

from megatron_mlmclm.data.workers import ask, in_order
from megatron_mlmclm.errors import UserError


def test_half_an_answer_is_an_error():
    """A worker killed between an answer's length and its bytes: the reader must not wait for the rest."""
    ours, theirs = Pipe()
    os.write(theirs.fileno(), struct.pack("!i", 100_000) + b"the first bytes")
    theirs.close()
    with pytest.raises(UserError, match="worker process was killed"):
        ask(ours, "item")


class Doer:
    """Answers of many pages, so that a kill often falls into one; dies, or fails, where told."""

    def __call__(self, item):
        if item == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if item == "fail":
            raise UserError("a.txt:7: no")
        return item * 1_000_000


def test_answers_come_in_order_and_errors_as_they_were_raised():
    assert [len(a) for a in in_order(Doer, (), ["x", "xx", "xxx"], 2)] == [1_000_000, 2_000_000, 3_000_000]
    with pytest.raises(UserError, match=r"a\.txt:7: no"):
        list(in_order(Doer, (), ["x", "fail", "x"], 2))
    with pytest.raises(UserError, match="worker process was killed"):
        list(in_order(Doer, (), ["x", "x", "die"] + ["x"] * 20, 2))
