import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_mlmclm.data.order import permute
from megatron_mlmclm.objectives.keyed import hash_key


@given(st.integers(1, 700), st.integers(0, 2**128 - 1))
@settings(max_examples=60, deadline=None)
def test_bijection(size, key):
    assert sorted(permute(i, size, key) for i in range(size)) == list(range(size))


@given(st.integers(1, 2**50), st.data())
@settings(deadline=None)
def test_stays_in_range_and_keeps_neighbours_apart(size, data):
    start = data.draw(st.integers(0, size - 1))
    found = [permute(i, size, 7) for i in range(start, min(start + 20, size))]
    assert all(0 <= place < size for place in found)
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("size", [2, 3, 5, 8, 12, 31])
def test_every_index_goes_everywhere_alike_over_keys(size):
    trials = 400 * size
    keys = [hash_key("test", i) for i in range(trials)]
    for index in {0, size // 2, size - 1}:
        counts = [0] * size
        for key in keys:
            counts[permute(index, size, key)] += 1
        chi_squared = sum((count - 400) ** 2 / 400 for count in counts)
        assert chi_squared < size - 1 + 5 * (2 * size) ** 0.5, (index, counts)


def test_order_looks_random():
    size = 1_000_003
    places = [permute(i, size, hash_key("look")) for i in range(20_000)]
    assert abs(sum(places) / len(places) / size - 0.5) < 0.01
    rising = sum(a < b for a, b in zip(places, places[1:], strict=False))
    assert abs(rising / len(places) - 0.5) < 0.02
    tenths = [sum(place * 10 // size == t for place in places) for t in range(10)]
    assert max(tenths) - min(tenths) < 350


def test_recorded_values():
    """A run's order must outlive a release: these are fixed for ever."""
    key = hash_key(1234, "order", 0, 0)
    assert [permute(i, 1000, key) for i in range(6)] == [292, 896, 95, 91, 201, 805]


def test_outside_is_an_error():
    for index in (-1, 5):
        with pytest.raises(IndexError):
            permute(index, 5, 0)
