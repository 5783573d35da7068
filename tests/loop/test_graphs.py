"""CUDA graphs keep the attention that was set when they were captured: recipes with more than one are refused."""

import pytest

from megatron_mlmclm.errors import UserError
from megatron_mlmclm.loop.request import check_flags
from megatron_mlmclm.recipe import parse_recipe
from tests.recipe.test_recipe import VALUES

GRAPHS = ["--cuda-graph-impl", "local"]
MLM = {"objective": "mlm", "steps": 5, "mask_ratio": 0.4}
CLM = {"objective": "clm", "steps": 5}
PREFIX = CLM | {"attention": "prefix", "prefix": [0.2, 0.8]}
MIXED = {
    "objective": "mixed",
    "steps": 5,
    "parts": [{**CLM, "steps": None, "share": 1}, {**MLM, "steps": None, "share": 1}],
}
NONE = {"objectives": None}


@pytest.mark.parametrize(
    ("phases", "validation", "said"),
    [
        ([CLM, MLM], NONE, "the phases and their validation need causal and bidirectional"),
        ([MLM], {"objectives": ["clm"]}, "need bidirectional and causal"),
        ([PREFIX], {"objectives": ["clm"]}, "a pattern per sequence, which phases.0 (clm) needs"),
        ([MLM, MIXED], NONE, "a pattern per sequence, which phases.1 (mixed) needs"),
    ],
)
def test_refused_by_name(phases, validation, said):
    recipe = parse_recipe({**VALUES, "phases": phases, "validation": validation}, "r.yaml")
    with pytest.raises(UserError) as refused:
        check_flags(GRAPHS, recipe)
    assert said in str(refused.value)


def test_documents_are_refused(monkeypatch):
    recipe = parse_recipe({**VALUES, "phases": [MLM]}, "r.yaml")
    monkeypatch.setattr(type(recipe.data), "blocks_documents", property(lambda _: True))
    with pytest.raises(UserError, match="the documents of each sequence"):
        check_flags(GRAPHS, recipe)


def test_one_pattern_is_fine():
    check_flags(
        GRAPHS,
        parse_recipe(
            {**VALUES, "phases": [MLM, {**CLM, "attention": "bidirectional"}], "validation": {"objectives": ["mlm"]}},
            "r.yaml",
        ),
    )
