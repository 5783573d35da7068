"""Which data a phase reads, and from where."""

import pytest

from megatron_mlmclm.recipe import courses, parse_recipe, place_after
from tests.recipe.test_recipe import VALUES

OTHER = [{"path": "other"}]
CLM = {"objective": "clm", "steps": 10}


def recipe(*data: object, **changes):
    phases = [{**CLM, "data": entry} for entry in data]
    return parse_recipe({**VALUES, "phases": phases, **changes}, "r.yaml")


def read(each) -> list[tuple[str, int]]:
    return [(course.sources[0].path, course.place) for course in courses(each)]


def test_a_stream_goes_on_where_the_last_phase_that_read_it_stood():
    """Batches of 8: phases of 80 samples. A replay moves nothing; other sources count for themselves."""
    each = recipe("continue", OTHER, "continue", "replay", OTHER, "continue")
    a = "data/a"
    assert read(each) == [(a, 0), ("other", 0), (a, 80), (a, 0), ("other", 80), (a, 160)]


@pytest.mark.parametrize(("sample", "place"), [(0, 0), (50, 50), (80, 80), (100, 80), (160, 80), (170, 90), (240, 160)])
def test_how_far_the_runs_own_stream_has_been_read(sample, place):
    assert place_after(recipe("continue", OTHER, "continue"), sample) == place


@pytest.mark.parametrize(("data", "place"), [("continue", 90), ("restart", 0)])
def test_a_branch_begins_where_its_trunk_stood_or_at_the_start(data, place):
    start = {"from": "trunk", "data": data, "step": 20, "sample": 170, "place": 90}
    each = recipe("continue", "continue", start=start)
    assert read(each) == [("data/a", place), ("data/a", place + 80)]
    assert [stretch.first_sample for stretch in each.stretches] == [170, 250]
    assert (each.first_step, each.last_step, each.steps) == (21, 40, 20)


def test_phases_with_their_own_batch_size_have_their_own_lengths():
    phases = [{"objective": "clm", "tokens": 1000}, {**CLM, "batch": {"micro_batch_size": 2, "global_batch_size": 4}}]
    each = parse_recipe({**VALUES, "phases": [*phases, {"objective": "clm", "samples": 17}]}, "r.yaml")
    # 1,000 tokens are 3.9 steps of 8 x 32; 17 samples 2.1 steps of 8
    assert [(s.first_step, s.steps, s.first_sample) for s in each.stretches] == [(1, 4, 0), (5, 10, 32), (15, 3, 72)]
    assert [(s.first_step, s.last_step) for s in (each.segment_after(n) for n in (0, 3, 4, 14, 17))] == [
        (1, 4),
        (1, 4),
        (5, 14),
        (15, 17),
        (15, 17),
    ]
