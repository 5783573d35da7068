"""Invariant 6: attention is what the phase says, alone and packed, before and after a switch, on every layout."""

import math
from dataclasses import replace

import pytest
import torch
from transformers import EuroBertForMaskedLM

from megatron_mlmclm.convert.mapping import to_hugging_face
from megatron_mlmclm.loop.datasets import train_dataset
from megatron_mlmclm.loop.request import read_request
from tests.attention import dense
from tests.parallel.attention_probe import CHANGED, LENGTH, PATTERNS, extents
from tests.parallel.fixed import VOCAB_SIZE, documents_of, fixed_sequences
from tests.parallel.test_reference import llama, stack, stacked

pytestmark = pytest.mark.slow

LAYERS = 4
MODELS = ["attention-tp1", "attention-tp2"]
LAYOUTS = [
    *((run, layout) for run in ("attention", "documents", "window") for layout in ("tp2", "cp2", "cp4", "tp2-cp2-sp")),
    *((run, "pp2-recompute") for run in ("documents", "window")),
    ("documents", "cp2-pp2"),
]
PHASES = {"attention": (1, 3, 5), "documents": (1, 3, 5), "window": (1, 3)}  # a step of each phase


@pytest.fixture(scope="module", params=MODELS)
def found(worlds, request):
    return torch.load(worlds.folder / request.param / "patterns_0.pt")


def request_of(worlds):
    return read_request(str(worlds.folder / "attention.yaml"), [], 1)


def reach(name: str, extent) -> torch.Tensor:
    """Which output (row) hangs on which token (column) after all layers: each hands on what it has seen."""
    reached = torch.eye(LENGTH, dtype=torch.bool)
    for layer in range(1, LAYERS + 1):
        seen = dense.visible(PATTERNS[name], extent, LENGTH, layer) | torch.eye(LENGTH, dtype=torch.bool)
        reached = (seen.float() @ reached.float()) > 0
    return reached


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", PATTERNS)
def test_outputs_move_exactly_where_the_pattern_allows(found, name, batch, padded):
    """A token of the first sequence changes; nothing of the second moves."""
    expected = torch.zeros(len(CHANGED), batch, LENGTH, dtype=torch.bool)
    expected[:, 0] = reach(name, extents(padded)[0])[:, CHANGED].t()
    assert torch.equal(found["moved"][name, batch, padded], expected)


@pytest.mark.parametrize("name", PATTERNS)
def test_likewise_after_the_model_was_switched_to_the_others(found, name):
    assert torch.equal(found["again"][name, 1, False], found["moved"][name, 1, False])


@pytest.mark.parametrize("name", [name for name in PATTERNS if PATTERNS[name].documents])
def test_packed_documents_are_separate_ones(found, name):
    """Outputs and gradients. Rotary embeddings know distances only: going on or starting anew at a document is one."""
    output_error, gradient_error = found["packed"][name]
    assert output_error < 1e-5
    assert gradient_error < 1e-5


@pytest.mark.parametrize("name", [name for name in PATTERNS if PATTERNS[name].global_every is None])
def test_logits_are_those_of_transformers_under_an_explicit_mask(worlds, found, name):
    model = llama(stacked(worlds.weights("attention-tp1", 2)), request_of(worlds).recipe.model).eval()
    own = extents(padded=True)
    seen = torch.stack([dense.visible(PATTERNS[name], extent, LENGTH) for extent in own])
    seen |= torch.eye(LENGTH, dtype=torch.bool)  # padding sees itself there, lest its softmax be 0 / 0
    with torch.no_grad():
        expected = model(fixed_sequences(LENGTH), attention_mask=_additive(seen)).logits
    for ours, theirs, extent in zip(found["logits"][name], expected, own, strict=True):
        assert (ours[: extent.length, :VOCAB_SIZE] - theirs[: extent.length]).abs().max() < 1e-5


def test_bidirectional_logits_are_those_of_eurobert(worlds, found):
    """Whose own attention is bidirectional: it is given the padding alone."""
    weights = stacked(worlds.weights("attention-tp1", 2))
    model = llama(weights, request_of(worlds).recipe.model, EuroBertForMaskedLM).eval()
    own = extents(padded=True)
    mask = torch.tensor([[int(place < extent.length) for place in range(LENGTH)] for extent in own])
    with torch.no_grad():
        expected = model(fixed_sequences(LENGTH), attention_mask=mask).logits
    for ours, theirs, extent in zip(found["logits"]["bidirectional"], expected, own, strict=True):
        assert (ours[: extent.length, :VOCAB_SIZE] - theirs[: extent.length]).abs().max() < 1e-5


def _additive(seen: torch.Tensor) -> torch.Tensor:
    return torch.zeros(seen.shape).masked_fill(~seen, -math.inf)[:, None]


@pytest.mark.parametrize(("run", "layout"), LAYOUTS)
def test_every_loss_is_the_same(worlds, run, layout):
    reference = worlds.losses(f"{run}-tp1")
    assert worlds.losses(f"{run}-{layout}") == pytest.approx(reference, rel=1e-5)
    for ours, expected in zip(
        worlds.metrics(f"{run}-{layout}", "valid"), worlds.metrics(f"{run}-tp1", "valid"), strict=True
    ):
        assert ours["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        assert ours["accuracies"] == pytest.approx(expected["accuracies"], abs=1e-9)


@pytest.mark.parametrize(("run", "layout"), LAYOUTS)
def test_every_gradient_is_the_same(worlds, run, layout):
    for step in PHASES[run]:
        expected, found = worlds.gradients(f"{run}-tp1", step), worlds.gradients(f"{run}-{layout}", step)
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            rows = (
                min(len(gradient), len(found[name]), VOCAB_SIZE) if "embed" in name[0] or "output" in name[0] else None
            )
            error = (found[name][:rows] - gradient[:rows]).norm() / gradient.norm()
            assert error < 2e-5, f"step {step}, {name}: relative error {error:.1e}"


@pytest.mark.parametrize("step", PHASES["documents"])
def test_loss_and_gradient_of_packed_documents_are_those_of_transformers(worlds, step):
    """The whole path, against Llama under a mask of its own for each sequence."""
    request = request_of(worlds)
    dataset = train_dataset(request)
    samples = [dataset[n] for n in range(8 * (step - 1), 8 * step)]
    column = {name: stack(samples, name) for name in ("inputs", "labels", "predicted")}
    documents = documents_of(column["inputs"])
    masks = []
    for sample, numbers in zip(samples, documents, strict=True):
        pattern = replace(request.views[sample["view"]].pattern, documents=True)
        edges = [at for at in range(1, LENGTH) if numbers[at] > numbers[at - 1]]
        length = int((numbers >= 0).sum())
        extent = dense.extent(length, tuple(edges), min(sample["prefix"], length))
        masks.append(dense.visible(pattern, extent, LENGTH) | torch.eye(LENGTH, dtype=torch.bool))
    model = llama(stacked(worlds.weights("documents-tp1", step)), request.recipe.model)
    logits = model(column["inputs"], attention_mask=_additive(torch.stack(masks))).logits
    chosen = column["predicted"] & (documents >= 0)
    loss = torch.nn.functional.cross_entropy(logits[chosen], column["labels"][chosen])
    loss.backward()
    assert worlds.losses("documents-tp1")[step - 1] == pytest.approx(float(loss), rel=2e-5)
    found = to_hugging_face(stacked(worlds.gradients("documents-tp1", step)), request.recipe.model, VOCAB_SIZE)
    for key, parameter in model.named_parameters():
        error = (found[key] - parameter.grad).norm() / parameter.grad.norm()
        assert error < 1e-4, f"{key}: relative error {error:.1e}"
