"""A keyed permutation of range(size), computed one index at a time: nothing is stored, whatever the size."""

from functools import lru_cache

from megatron_mlmclm.objectives.keyed import hash_key

ROUNDS = 6
MIN_BITS = 4  # on 3 bits six rounds prefer some places (measured over keys for sizes 5 to 7); from 4 on they do not
_WORD = 2**64 - 1
# Odd multipliers with well-spread bits (those of MurmurHash3's 64-bit finish).
_SPREAD, _STIR = 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53

_Schedule = tuple[int, int, int, tuple[tuple[int, int], ...]]


@lru_cache(maxsize=8192)
def _schedule(size: int, key: int) -> _Schedule:
    """Width of the right half, shifts that cut a word to the left and right half, and round keys in pairs."""
    bits = max(MIN_BITS, (size - 1).bit_length())
    right = bits // 2
    stretched = hash_key("feistel", key, bits=64 * ROUNDS)
    words = [(stretched >> 64 * i) & _WORD for i in range(ROUNDS)]
    return right, 64 - (bits - right), 64 - right, tuple(zip(words[::2], words[1::2], strict=True))


def permute(index: int, size: int, key: int) -> int:
    """Where `index` goes in the permutation of range(size) named `key`. IndexError unless 0 <= index < size.

    A Feistel network over the least power of two, from 16, that holds `size` (its halves may differ by a bit, so the
    domain is under 2 x size); a value outside range(size) is sent through again until it falls inside, which keeps it
    a bijection.
    """
    if not 0 <= index < size:
        raise IndexError(f"index {index} of {size}")
    width, left_shift, right_shift, pairs = _schedule(size, key)
    mask = (1 << width) - 1
    while True:
        left, right = index >> width, index & mask
        for left_key, right_key in pairs:
            word = ((right ^ left_key) * _SPREAD) & _WORD
            left ^= (((word ^ (word >> 32)) * _STIR) & _WORD) >> left_shift
            word = ((left ^ right_key) * _SPREAD) & _WORD
            right ^= (((word ^ (word >> 32)) * _STIR) & _WORD) >> right_shift
        index = left << width | right
        if index < size:
            return index
