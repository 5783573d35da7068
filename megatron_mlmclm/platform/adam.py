"""AdamW for the CPU with the state layout of Transformer Engine's and Apex's FusedAdam."""

import importlib
from collections.abc import Callable, Iterable
from typing import Any

import torch

# torch.optim hides these two modules behind the classes' names.
_ADAMW: Callable[..., None] = importlib.import_module("torch.optim.adamw").adamw
_ADAM: Callable[..., None] = importlib.import_module("torch.optim.adam").adam


class FusedLayoutAdam(torch.optim.Optimizer):
    """Adam or AdamW whose state is `exp_avg` and `exp_avg_sq` only, with one integer `step` per parameter group.

    Megatron's distributed optimizer saves and loads that layout, so checkpoints of CPU and GPU runs have one form.
    The arithmetic is torch's own fused CPU kernel.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        bias_correction: bool = True,
        capturable: bool = False,
    ) -> None:
        if not bias_correction or capturable:
            raise ValueError("the CPU Adam always corrects its bias and is never captured in a CUDA graph")
        self.adam_w_mode = adam_w_mode
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update of every parameter that has a gradient; `group["step"]` counts updates."""
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            group["step"] = int(group.get("step", 0)) + 1
            self._update(group, params)
        return loss

    def _update(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        for p in params:
            if not self.state[p]:
                self.state[p] = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        beta1, beta2 = group["betas"]
        update = _ADAMW if self.adam_w_mode else _ADAM
        update(
            params,
            [p.grad for p in params],
            [self.state[p]["exp_avg"] for p in params],
            [self.state[p]["exp_avg_sq"] for p in params],
            [],
            # The kernel adds one to the step it is given.
            [torch.tensor(float(group["step"] - 1)) for _ in params],
            fused=True,
            foreach=False,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
