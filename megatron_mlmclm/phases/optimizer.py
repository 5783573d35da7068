"""What a phase may ask of the optimizer: a fresh start, the recipe's betas and eps, weights that stand still.

Works on Megatron's optimizers around Adam: FP32Optimizer, Float16OptimizerWithFloat16Params, DistributedOptimizer and a
ChainedOptimizer of these. The Adam inside is torch's, Transformer Engine's, Apex's or platform/adam.py.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import (
    ChainedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    MegatronOptimizer,
)
from megatron.core.utils import unwrap_model


def reset_optimizer(optimizer: MegatronOptimizer) -> None:
    """Zero both moments of every parameter and the step count: the next step is that of a new optimizer.

    Weights stay, the fp32 main weights among them (`master_param` in Transformer Engine's state); so does fp16's loss
    scale.
    """
    for part in _parts(optimizer):
        for group in part.optimizer.param_groups:
            if "step" in group:  # one for all in Transformer Engine's, Apex's and our Adam; torch's is in the state
                group["step"] = 0
        for state in part.optimizer.state.values():
            for name in state.keys() & {"exp_avg", "exp_avg_sq", "step"}:
                state[name].zero_()


def set_hyperparameters(optimizer: MegatronOptimizer, *, betas: tuple[float, float], eps: float) -> None:
    """Give Adam the recipe's betas and eps: loading a checkpoint brings those of the run that wrote it.

    The learning rate and weight decay are the scheduler's, which sets them at each step.
    """
    for part in _parts(optimizer):
        for group in part.optimizer.param_groups:
            group["betas"], group["eps"] = betas, eps


def units_of(chunk: torch.nn.Module) -> dict[torch.nn.Parameter, str]:
    """The unit of each parameter of a (wrapped or bare) GPT model chunk, by the names that `Freezer.freeze` takes.

    "embedding", "head" (the output layer), "final_norm", and "layers.I", I from 0 over the whole model. With tied
    embeddings the head's weight is an "embedding", also the last pipeline stage's copy of it.
    """
    model = unwrap_model(chunk)
    modules = [
        ("embedding", getattr(model, "embedding", None)),
        ("embedding" if _is_tied(chunk) else "head", getattr(model, "output_layer", None)),
        ("final_norm", model.decoder.final_layernorm),
        # layer_number counts from 1 over all pipeline stages and virtual chunks.
        *((f"layers.{layer.layer_number - 1}", layer) for layer in model.decoder.layers),
    ]
    return {p: unit for unit, module in modules if module is not None for p in module.parameters()}


class Freezer:
    """Freezes units of the model from one step to the next: weights, moments and weight decay stand still.

    Parameter groups cannot do it: Megatron finds a checkpoint's groups by their learning rates and weight decay, so
    groups that differ between phases would not load. Nor can `requires_grad`, once Megatron's DDP has its buffers.
    Instead `finalize` takes frozen weights out of the gradient norm, and a hook on each torch optimizer hides their
    gradients, because every Adam in use skips a parameter without one.

    Use: `config.finalize_model_grads_func = freezer.finalize` before `pretrain`, `attach` once when the optimizer
    exists, `freeze` at the start of any step. With nothing frozen, training is bit for bit that without a Freezer.
    """

    def __init__(self) -> None:
        self.frozen: frozenset[str] = frozenset()
        self._units: dict[torch.nn.Parameter, str] = {}
        self._known: frozenset[str] = frozenset()
        self._tied = False

    def __deepcopy__(self, memo: dict[int, Any]) -> "Freezer":
        # Megatron copies its config in places, and the copy of a bound method would freeze for nobody.
        return self

    def attach(self, optimizer: MegatronOptimizer, chunks: Sequence[torch.nn.Module]) -> None:
        """Hook this rank's torch optimizers, once. ValueError where Adam is spread over devices or is a CUDA graph."""
        if self._known:
            raise RuntimeError("the Freezer is attached already")
        for part in _parts(optimizer):
            if part.config.optimizer_cpu_offload or part.config.optimizer_cuda_graph:
                raise ValueError("freezing knows neither --optimizer-cpu-offload nor --optimizer-cuda-graph")
        for chunk in chunks:
            self._units |= units_of(chunk)
        self._tied = _is_tied(chunks[0])
        layers = unwrap_model(chunks[0]).config.num_layers
        self._known = frozenset(["embedding", "head", "final_norm", *(f"layers.{i}" for i in range(layers))])
        for part in _parts(optimizer):
            mains = [(main, self._units[model]) for model, main in main_params(part) if model in self._units]
            guard = _Guard(part, mains, lambda: self.frozen)
            part.optimizer.register_step_pre_hook(guard.before_step)
            part.optimizer.register_step_post_hook(guard.after_step)

    def freeze(self, units: Collection[str]) -> None:
        """Freeze these units and no others from this step on; the same on every rank, after `attach`.

        With tied embeddings "head" and "embedding" both mean the shared weight. ValueError for a name that the model
        does not have.
        """
        if unknown := sorted(set(units) - self._known):
            raise ValueError(f"the model has no {', '.join(unknown)} to freeze")
        self.frozen = frozenset("embedding" if self._tied and unit == "head" else unit for unit in units)

    def finalize(
        self, model: list[torch.nn.Module], num_tokens: torch.Tensor | None = None, *args: Any, **kwargs: Any
    ) -> None:
        """Megatron's `finalize_model_grads`, then no gradient for frozen weights, so that the norm is without them.

        The distributed optimizer reads its shard from the same `main_grad`, into which the gradients were reduced.
        """
        finalize_model_grads(model, num_tokens, *args, **kwargs)
        if self.frozen:
            for p, unit in self._units.items():
                if unit in self.frozen:
                    p.main_grad.zero_()


@dataclass
class _Guard:
    """Keeps one torch optimizer off the frozen weights. `mains` are the tensors that it updates, with their units."""

    part: MegatronOptimizer
    mains: list[tuple[torch.Tensor, str]]
    frozen: Callable[[], frozenset[str]]
    steps_before: int = 0

    def before_step(self, inner: torch.optim.Optimizer, *_: Any) -> None:
        """Hide the gradients of frozen weights; upstream sets them anew for each step."""
        if not self.frozen():
            return
        self.steps_before = _step_count(inner)
        for main in self._frozen_mains():
            main.grad = None
            if hasattr(main, "decoupled_grad"):  # the precision-aware optimizer's
                main.decoupled_grad = None

    def after_step(self, inner: torch.optim.Optimizer, *_: Any) -> None:
        """Leave what a checkpoint needs: moments for every parameter, and one step count for all on all ranks.

        Only Transformer Engine's FusedAdam does both by itself. Megatron saves one count and asserts that there is no
        other; a weight that thaws thus has the age of the rest.
        """
        if not self.frozen():
            return
        if not all(inner.state[main] for main in self._frozen_mains()):
            self.part.init_state_fn(inner, self.part.config)
        _set_step_count(inner, self.steps_before + 1)

    def _frozen_mains(self) -> Iterator[torch.Tensor]:
        frozen = self.frozen()
        return (main for main, unit in self.mains if unit in frozen)


def main_params(part: MegatronOptimizer) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
    """(model parameter, tensor that Adam updates in its place) for all that a Megatron optimizer updates on this rank.

    The tensor is the parameter itself (fp32), an fp32 copy (16 bits), or this rank's flat shard of either, which the
    distributed optimizer keeps in lists that run side by side; a parameter without a shard here is not in them.
    TypeError for another optimizer.
    """
    if isinstance(part, DistributedOptimizer):
        # Transformer Engine's precision-aware Adam keeps the fp32 weights itself and is given the 16-bit shards.
        inside = part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
        shards = part.shard_float16_groups if inside else part.shard_fp32_from_float16_groups
        lists = [(part.model_float16_groups, shards), (part.model_fp32_groups, part.shard_fp32_groups)]
    elif isinstance(part, Float16OptimizerWithFloat16Params):
        same = part.fp32_from_fp32_groups
        lists = [(part.float16_groups, part.fp32_from_float16_groups), (same, same)]
    elif isinstance(part, FP32Optimizer):
        same = [group["params"] for group in part.optimizer.param_groups]
        lists = [(same, same)]
    else:
        raise TypeError(f"cannot tell which weights {type(part).__name__} updates")
    flat = chain.from_iterable
    return [pair for models, mains in lists for pair in zip(flat(models), flat(mains), strict=True)]


def _parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """The Megatron optimizers with one torch optimizer each; a rank with nothing to train has none."""
    parts = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    return [part for part in parts if part.optimizer is not None]


def _is_tied(chunk: torch.nn.Module) -> bool:
    return unwrap_model(chunk).share_embeddings_and_output_weights


def _step_count(inner: torch.optim.Optimizer) -> int:
    """Updates so far: per group in Transformer Engine's, Apex's and our Adam, per parameter in torch's."""
    keepers = chain(inner.param_groups, inner.state.values())
    return max((int(keeper["step"]) for keeper in keepers if "step" in keeper), default=0)


def _set_step_count(inner: torch.optim.Optimizer, steps: int) -> None:
    for group in inner.param_groups:
        if isinstance(inner, torch.optim.Adam):  # torch's AdamW is one
            for p in group["params"]:
                inner.state[p]["step"] = torch.tensor(float(steps))
        elif group["params"]:
            group["step"] = steps
