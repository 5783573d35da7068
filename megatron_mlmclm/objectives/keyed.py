"""Keyed randomness: every draw is a function of its key alone (DESIGN, invariants 2 and 3).

A key is hashed (BLAKE2b) and never added, so neighbouring seeds, samples or epochs share no stream. The counter-based
Philox generator needs no state to be saved. Raw 64-bit words are used because numpy guarantees their stream across
versions, which it does not for `Generator` methods.
"""

import hashlib
import threading
from functools import lru_cache

import numpy as np

KeyPart = int | str
WORD = 2**64 - 1


class _Stream(threading.local):
    """A generator for each thread, set to a key at each draw: a new one first gathers entropy, which takes longer."""

    def __init__(self) -> None:
        self.philox = np.random.Philox(key=0)

    def begin(self, key: int, block: int) -> np.random.Philox:
        """The generator before block number `block` (four words each) of the stream named by `key`."""
        self.philox.state = {
            "bit_generator": "Philox",
            "state": {"counter": (block, 0, 0, 0), "key": (key & WORD, key >> 64)},
            "buffer": (0, 0, 0, 0),
            "buffer_pos": 4,  # none of it is left
            "has_uint32": 0,
            "uinteger": 0,
        }
        return self.philox


_stream = _Stream()


def hash_key(*parts: KeyPart, bits: int = 128) -> int:
    """Hash `parts` (order and type matter) to an integer of `bits` bits.

    Raises:
        TypeError: a part is neither int nor str; numpy's integers print in a way of their own and would be other keys.
    """
    for part in parts:
        if type(part) not in (int, str):
            raise TypeError(f"key part {part!r} is a {type(part).__name__}; only int and str have a fixed form")
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=bits // 8)
    return int.from_bytes(digest.digest(), "little")


def draw_u64(key: int, count: int, start: int = 0) -> np.ndarray:
    """Words `start` to `start + count` - 1 of the stream named by `key` (128 bits): uniform uint64 [count]."""
    block, skipped = divmod(start, 4)
    return _stream.begin(key, block).random_raw(skipped + count)[skipped:]


@lru_cache(maxsize=64)
def threshold_u64(probability: float) -> np.uint64:
    """The word below which a uniform uint64 falls with `probability` (1.0 maps to the largest word)."""
    return np.uint64(min(int(probability * 2.0**64), 2**64 - 1))


def draw_share(key: int, low: float, high: float) -> float:
    """A number drawn evenly from [low, high]: the first word of the stream named by `key`, as a share of 2^64."""
    share = int(draw_u64(key, 1)[0]) / 2.0**64
    return min(low + (high - low) * share, high)
