"""Real documents, blocked where they are cut or packed whole: every layout agrees, and so does transformers."""

import math

import pytest
import torch

from megatron_mlmclm.convert.llama_shape import to_hugging_face
from megatron_mlmclm.loop.datasets import train_dataset
from megatron_mlmclm.loop.request import read_request
from tests.parallel.fixed import VOCAB_SIZE
from tests.parallel.test_reference import llama, stack, stacked

pytestmark = pytest.mark.slow

PACKINGS = ["documents", "packed"]


@pytest.mark.parametrize("layout", ["cp2", "tp2-pp2"])
@pytest.mark.parametrize("packing", PACKINGS)
def test_every_loss_is_the_same(worlds, packing, layout):
    reference, name = f"{packing}-packing-tp1", f"{packing}-packing-{layout}"
    assert len(worlds.losses(reference)) == 4
    assert worlds.losses(name) == pytest.approx(worlds.losses(reference), rel=1e-5)
    for ours, theirs in zip(worlds.metrics(name, "valid"), worlds.metrics(reference, "valid"), strict=True):
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-5)


def document_mask(documents: torch.Tensor, causal: bool) -> torch.Tensor:
    """What is added to the scores, [b, 1, s, s]. Padding sees itself, so that its unused rows are numbers."""
    alike = documents[:, :, None] == documents[:, None, :]
    if causal:
        alike &= torch.ones(documents.shape[1], documents.shape[1], dtype=torch.bool).tril()
    return torch.zeros(alike.shape, dtype=torch.float64).masked_fill(~alike, -math.inf)[:, None]


@pytest.mark.parametrize("step", [1, 3])  # clm, mlm
@pytest.mark.parametrize("packing", PACKINGS)
def test_loss_and_gradient_are_those_of_documents_alone(worlds, packing, step):
    """A run was really cut into documents, and each is seen and predicted as if it were alone."""
    run = f"{packing}-packing-tp1"
    request = read_request(str(worlds.folder / run / "recipe.yaml"), [], 1)
    dataset = train_dataset(request)
    samples = [dataset[n] for n in range(8 * (step - 1), 8 * step)]
    documents, predicted = stack(samples, "documents"), stack(samples, "predicted")
    assert documents.max() > 0
    assert (documents < 0).any() == (packing == "packed")
    model = llama(stacked(worlds.weights(run, step)), request.recipe.model)
    logits = model(stack(samples, "inputs"), attention_mask=document_mask(documents, causal=step == 1)).logits
    loss = torch.nn.functional.cross_entropy(logits[predicted], stack(samples, "labels")[predicted])
    loss.backward()
    assert worlds.losses(run)[step - 1] == pytest.approx(loss.item(), rel=1e-5)
    found = to_hugging_face(stacked(worlds.gradients(run, step)), request.recipe.model, VOCAB_SIZE)
    for key, parameter in model.named_parameters():
        error = (found[key] - parameter.grad).norm() / parameter.grad.norm()
        assert error < 5e-4, f"{key}: relative error {error:.1e}"
