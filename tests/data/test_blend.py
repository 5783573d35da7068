import time
from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_mlmclm.data import Blend
from megatron_mlmclm.data.blend import BLOCK
from megatron_mlmclm.errors import UserError

EQUAL, ZIPF = [1.0] * 1000, [1 / (i + 1) for i in range(1000)]
weights_strategy = st.lists(st.floats(0.001, 10.0), min_size=1, max_size=8)


def order_of(blend, stop, start=0):
    return [blend.locate(n) for n in range(start, stop)]


@given(weights_strategy, st.integers(0, 3 * BLOCK), st.integers(0, 2**63))
@settings(max_examples=25, deadline=None)
def test_counts_are_what_locate_gives(weights, n, seed):
    blend = Blend([10**9] * len(weights), weights, seed)
    seen = Counter(sample.source for sample in order_of(blend, n))
    assert blend.counts(n) == [seen[source] for source in range(len(weights))]


@pytest.mark.parametrize("weights", [[0.001, 0.999], [3, 1, 4, 1, 5], EQUAL, ZIPF])
def test_counters_are_contiguous(weights):
    """By a block's edge a source has given its samples 0, 1, 2 ... each once: whole epochs hold every index once."""
    size = 50
    blend = Blend([size] * len(weights), weights, 11)
    given_out = defaultdict(list)
    for sample in order_of(blend, 8 * BLOCK):
        given_out[sample.source].append(sample)
    for samples in given_out.values():
        assert len(set(samples)) == len(samples)
        epochs = Counter(sample.epoch for sample in samples)
        whole, part = divmod(len(samples), size)
        assert epochs == Counter({**dict.fromkeys(range(whole), size), **({whole: part} if part else {})})


@pytest.mark.parametrize(("weights", "bar"), [([0.001, 0.999], 2), (EQUAL, 2), (ZIPF, 3)])
def test_shares_hold_at_block_edges(weights, bar):
    blend, total = Blend([100] * len(weights), weights, 3), sum(weights)
    for blocks in [*range(1, 65), 99]:
        n = blocks * BLOCK
        counts = blend.counts(n)
        assert sum(counts) == n
        assert max(abs(c - w / total * n) for c, w in zip(counts, weights, strict=True)) <= bar


def test_shares_hold_for_ever():
    blend = Blend([100] * 1000, ZIPF, 3)
    n, total = 10**12 // BLOCK * BLOCK, sum(ZIPF)
    assert max(abs(c - w / total * n) for c, w in zip(blend.counts(n), ZIPF, strict=True)) < 12


@given(weights_strategy, st.integers(0, 2**40), st.integers(0, 99))
@settings(deadline=None)
def test_stateless(weights, n, seed):
    """The n-th sample is the same whatever was asked before, and by whichever object."""
    sizes = [7 + i for i in range(len(weights))]
    blend = Blend(sizes, weights, seed)
    sample = blend.locate(n)
    blend.locate(n + 1)
    assert Blend(sizes, [w * 4 for w in weights], seed).locate(n) == blend.locate(n) == sample
    assert 0 <= sample.index < sizes[sample.source]


def test_one_source_runs_through_epochs():
    blend = Blend([10], [0.3], 5)
    samples = order_of(blend, 30)
    assert [s.epoch for s in samples] == [n // 10 for n in range(30)]
    orders = [[s.index for s in samples[e * 10 : e * 10 + 10]] for e in range(3)]
    assert all(sorted(order) == list(range(10)) for order in orders)
    assert orders[0] != orders[1] != orders[2]
    assert blend.counts(17) == [17]


def test_seeds_and_sources_have_orders_of_their_own():
    orders = [[s.index for s in order_of(Blend([100], [1], seed), 100)] for seed in range(20)]
    assert len({tuple(order) for order in orders}) == 20
    blend = Blend([100, 100], [1, 1], 0)
    by_source = defaultdict(list)
    for sample in order_of(blend, 200):
        by_source[sample.source].append(sample.index)
    assert by_source[0][:50] != by_source[1][:50]


def test_sources_do_not_alternate():
    sources = [s.source for s in order_of(Blend([10**6] * 2, [1, 1], 1), 4096)]
    changes = sum(a != b for a, b in zip(sources, sources[1:], strict=False))
    assert 0.45 < changes / 4095 < 0.55


def test_recorded_values():
    """A run's order must outlive a release: these are fixed for ever."""
    assert order_of(Blend([10, 1000, 30], [1, 2, 0.5], 1234), 5) == [
        (1, 0, 788),
        (0, 16, 7),
        (1, 0, 593),
        (2, 4, 0),
        (1, 0, 154),
    ]


@pytest.mark.parametrize(
    ("sizes", "weights", "message"),
    [
        ([], [], "0 sources"),
        ([1, 2], [1.0], "2 sources but 1 weights"),
        ([1], [0.0], "weight 0.0 of source 0"),
        ([1, 1], [1.0, -0.5], "weight -0.5 of source 1"),
        ([1], [float("nan")], "weight nan"),
        ([1], [float("inf")], "weight inf"),
        ([1, 0], [1.0, 1.0], "source 1 has 0 samples"),
        ([1, 1], [1e-30, 1.0], "too small"),
    ],
)
def test_bad_blends_are_refused(sizes, weights, message):
    with pytest.raises(UserError, match=message):
        Blend(sizes, weights, 0)


def test_negative_sample_is_an_error():
    for weights in ([1.0], [1.0, 1.0]):
        with pytest.raises(IndexError):
            Blend([4] * len(weights), weights, 0).locate(-1)


def test_fast_enough():
    """30 to 80 microseconds on a quiet machine; the bar is loose, for a busy one."""
    blend = Blend([1000] * 1000, ZIPF, 0)
    begun = time.process_time()
    for n in range(10**9, 10**9 + 1000):
        blend.locate(n)
    assert (time.process_time() - begun) / 1000 < 500e-6
