"""Invariant 7: imported weights give transformers' logits and come back bit for bit, for every family and option."""

import pytest
import torch

from megatron_mlmclm.cli import dispatch
from tests.hf_models import LONG, MODELS, classes
from tests.parallel.fixed import LAST_POSITIONS, fixed_sequences
from tests.worlds import LAYOUTS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def expected(started):
    """transformers' logits of a model at the last positions, computed once: name -> [1, LAST_POSITIONS, vocabulary]."""
    done = {}

    def logits(name: str) -> torch.Tensor:
        if name not in done:
            family, options = MODELS[name]
            model = classes(family)[1].from_pretrained(started.folder / "models" / name).eval()
            length = LONG if options.get("max_position_embeddings") == LONG else 32
            with torch.no_grad():
                done[name] = model(fixed_sequences(length)[:1]).logits[:, -LAST_POSITIONS:]
        return done[name]

    return logits


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_transformers(started, expected, name, layout):
    reference = expected(name)
    found = torch.load(started.folder / f"{name}-{layout}" / "logits.pt")[..., : reference.shape[-1]]
    assert reference.std() > 0.1  # else nothing is compared
    torch.testing.assert_close(found, reference, atol=1e-4, rtol=0)


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_an_imported_checkpoint_starts_a_run(started, expected, layout):
    reference = expected("qwen2")
    found = torch.load(started.folder / f"qwen2-imported-{layout}" / "logits.pt")[..., : reference.shape[-1]]
    torch.testing.assert_close(found, reference, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["llama", "smollm"])
def test_round_trip_is_bit_equal(worlds, tmp_path, name):
    """Untied and tied, vocabulary 1003, by way of TP2 x PP2 with sequence parallelism."""
    dispatch(["export-hf", str(worlds.folder / f"{name}-tp2-pp2"), "--output", str(tmp_path / "out"), "--as", "llama"])
    _, model_class = classes("llama")
    before, after = (model_class.from_pretrained(path) for path in (worlds.folder / "models" / name, tmp_path / "out"))
    assert after.config.tie_word_embeddings == (name == "smollm")
    theirs, ours = before.state_dict(), after.state_dict()
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        assert torch.equal(ours[key], tensor), key
    assert (tmp_path / "out" / "LICENSE").read_text() == "The terms of the source.\n"
    card = (tmp_path / "out" / "README.md").read_text()
    assert "license: apache-2.0" in card and f"From {worlds.folder / 'models' / name}" in card
