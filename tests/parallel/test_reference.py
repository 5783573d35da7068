"""Loss and gradient of every objective against plain PyTorch: transformers' Llama under an explicit mask."""

import math

import pytest
import torch
from transformers import LlamaForCausalLM

from megatron_mlmclm.convert.checkpoint import read_weights
from megatron_mlmclm.convert.llama_shape import to_hugging_face
from megatron_mlmclm.loop.datasets import train_dataset, validation_dataset
from megatron_mlmclm.loop.request import read_request

pytestmark = pytest.mark.slow

VOCABULARY = 1003
STEPS = [*(("five", step) for step in (1, 5, 9, 13, 17)), *(("every", step) for step in range(1, 19))]


@pytest.fixture(scope="module")
def requests(worlds):
    return {name: read_request(str(worlds.folder / f"{name}.yaml"), [], 1) for name in ("five", "every")}


def llama(weights: dict[str, torch.Tensor], model, kind=LlamaForCausalLM):
    """transformers' model of these weights; `kind` may be another of the same shape."""
    reference = kind(
        kind.config_class(
            vocab_size=VOCABULARY,
            hidden_size=model.hidden_size,
            intermediate_size=model.ffn_hidden_size,
            num_hidden_layers=model.num_layers,
            num_attention_heads=model.num_attention_heads,
            num_key_value_heads=model.kv_heads,
            rms_norm_eps=model.layernorm_epsilon,
            rope_parameters={"rope_type": "default", "rope_theta": float(model.rotary_base)},
            attn_implementation="eager",
            pad_token_id=None,
        )
    )
    reference.load_state_dict(to_hugging_face(dict(weights), model, VOCABULARY))
    return reference.double()


def stacked(named: dict[tuple, torch.Tensor]) -> dict[str, torch.Tensor]:
    """{(name, layer): tensor} as `read_weights` gives it: the layers of a stack on axis 0."""
    names = {key[0] for key in named}
    return {
        name: torch.stack([named[key] for key in sorted(k for k in named if k[0] == name)])
        if (name, 0) in named
        else named[(name,)]
        for name in names
    }


def mask(pattern, prefix: int, length: int) -> torch.Tensor:
    """What is added to the scores, [1, s, s], written out position by position."""
    allowed = [
        [
            pattern.direction == "bidirectional" or column <= row or (pattern.direction == "prefix" and column < prefix)
            for column in range(length)
        ]
        for row in range(length)
    ]
    return torch.zeros(1, length, length, dtype=torch.float64).masked_fill(~torch.tensor(allowed), -math.inf)


def stack(samples: list[dict], name: str) -> torch.Tensor:
    return torch.stack([torch.from_numpy(sample[name]) for sample in samples])


def reference_losses(model: LlamaForCausalLM, samples: list[dict], views) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross entropies of a batch where it is predicted, weighted, and the logits: what all comes down to."""
    column = {name: torch.as_tensor([s[name] for s in samples]) for name in ("weight", "prefix", "view")}
    row = {name: stack(samples, name) for name in ("inputs", "labels", "predicted")}
    length = row["inputs"].shape[1]
    patterns = [views[number].pattern for number in column["view"].tolist()]
    masks = [mask(pattern, prefix, length) for pattern, prefix in zip(patterns, column["prefix"].tolist(), strict=True)]
    logits = model(row["inputs"], attention_mask=torch.stack(masks)).logits
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), row["labels"], reduction="none")
    return (losses * column["weight"][:, None])[row["predicted"]], logits


@pytest.mark.parametrize(("name", "step"), STEPS)
def test_loss_and_gradient(worlds, requests, name, step):
    request = requests[name]
    recipe, run = request.recipe, f"{name}-tp1"
    stretch = recipe.stretch_at(step)
    first = stretch.first_sample + (step - stretch.first_step) * stretch.batch.global_batch_size
    dataset = train_dataset(request)
    samples = [dataset[n] for n in range(first, first + stretch.batch.global_batch_size)]
    model = llama(stacked(worlds.weights(run, step)), recipe.model)
    losses, _ = reference_losses(model, samples, request.views)
    loss = losses.sum() / len(losses)  # the mean over predicted tokens, whatever their weights
    loss.backward()
    assert worlds.losses(run)[step - 1] == pytest.approx(loss.item(), rel=1e-5)
    found = to_hugging_face(stacked(worlds.gradients(run, step)), recipe.model, VOCABULARY)
    frozen = stretch.phase.frozen
    for key, parameter in model.named_parameters():
        if "embedding" in frozen and "embed_tokens" in key or any(f".{unit}." in key for unit in frozen):
            assert not found[key].any(), key
        else:
            error = (found[key] - parameter.grad).norm() / parameter.grad.norm()
            assert error < 5e-4, f"{key}: relative error {error:.1e}"


def test_validation_measures_what_it_says(worlds, requests):
    """Losses, accuracies and perplexities of the last evaluation, on the weights of the last checkpoint."""
    request = requests["five"]
    dataset = validation_dataset(request)
    weights = read_weights(worlds.folder / "five-tp1" / "checkpoints" / "iter_0000020")
    model = llama(weights, request.recipe.model).eval()
    found = worlds.metrics("five-tp1", "valid")[-1]
    for place, name in enumerate(("clm", "mlm", "pll")):
        count = 32 if name == "pll" else 8
        samples = [dataset[n] for n in range(8 * place, 8 * place + count)]
        with torch.no_grad():
            losses, logits = reference_losses(model, samples, request.views)
        if name == "pll":
            assert found["perplexities"]["pseudo"] == pytest.approx(math.exp(losses.mean()), rel=1e-4)
            continue
        assert found["losses"][name] == pytest.approx(float(losses.mean()), rel=1e-5)
        right = (logits.argmax(-1) == stack(samples, "labels"))[stack(samples, "predicted")]
        assert found["accuracies"][name] == pytest.approx(float(right.float().mean()), abs=1e-9)
    assert found["perplexities"]["clm"] == pytest.approx(math.exp(found["losses"]["clm"]))
