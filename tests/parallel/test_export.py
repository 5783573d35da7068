"""Invariant 7: an exported encoder gives Megatron's logits, whatever the layout of its checkpoint."""

import pytest
import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer, pipeline

from megatron_mlmclm.cli import dispatch
from megatron_mlmclm.errors import UserError
from tests.parallel.fixed import fixed_sequences

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def exported(worlds, tmp_path_factory):
    """Exports a run once: name -> (model, folder)."""
    folder, done = tmp_path_factory.mktemp("exported"), {}

    def export(name: str):
        if name not in done:
            dispatch(["export-hf", str(worlds.folder / name), "--output", str(folder / name)])
            done[name] = (AutoModelForMaskedLM.from_pretrained(folder / name).eval(), folder / name)
        return done[name]

    return export


@pytest.mark.parametrize(
    ("layout", "reference"),
    [
        ("tp1", "tp1"),
        ("tp2", "tp2"),
        ("tp2-sp", "tp2-sp"),
        ("tied-tp1", "tied-tp1"),
        ("pp2", "tp1"),
        ("tp2-pp2", "tp1"),
    ],
)
def test_logits_are_megatrons(exported, worlds, layout, reference):
    model, _ = exported(layout)
    assert type(model).__name__ == "EuroBertForMaskedLM"
    with torch.no_grad():
        ours = model(fixed_sequences(32)).logits
    megatrons = torch.load(worlds.folder / reference / "logits.pt")
    assert ours.shape[-1] == 1003  # the tokenizer's size: Megatron's padding is gone
    torch.testing.assert_close(ours, megatrons[..., :1003], atol=1e-4, rtol=0)


def test_the_tied_head_is_tied_and_learned(exported):
    model, _ = exported("tied-tp2-pp2")
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert model.config.tie_word_embeddings


def test_fill_mask_works_at_once(exported):
    model, folder = exported("tp1")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    fills = pipeline("fill-mask", model=model, tokenizer=tokenizer)("the people of the [MASK] states")
    assert len(fills) == 5
    assert all(fill["sequence"] for fill in fills)


def test_the_card_names_recipe_and_losses(exported, worlds):
    _, folder = exported("tp1")
    card = (folder / "README.md").read_text()
    assert f"{worlds.losses('tp1')[-1]:.4f}" in card
    assert "mask_ratio: 0.4" in card
    assert "After 20 of 20 steps: 5,120 tokens" in card
    assert "pipeline_tag: fill-mask" in card


def test_what_cannot_be_exported_is_said(worlds, tmp_path):
    from megatron_mlmclm.errors import UserError

    with pytest.raises(UserError, match="no Megatron checkpoint"):
        dispatch(["export-hf", str(tmp_path), "--output", str(tmp_path / "out")])
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine").write_text("keep")
    with pytest.raises(UserError, match="exists already"):
        dispatch(["export-hf", str(worlds.folder / "tp1"), "--output", str(tmp_path)])
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_model_with_a_window_is_not_exported_as_one_without(worlds, tmp_path):
    with pytest.raises(UserError, match=r"window of \[5, 3\]"):
        dispatch(["export-hf", str(worlds.folder / "window-tp1"), "--output", str(tmp_path / "out")])
    assert list(tmp_path.iterdir()) == []
