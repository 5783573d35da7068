"""Masked diffusion: masked language modelling where each sequence draws its own ratio."""

import math
from dataclasses import dataclass

import numpy as np

from megatron_mlmclm.errors import UserError
from megatron_mlmclm.objectives.base import Sample, of_inputs
from megatron_mlmclm.objectives.corruption import Corruption
from megatron_mlmclm.objectives.keyed import draw_share, hash_key


@dataclass(frozen=True)
class Diffusion:
    """LLaDA's objective (arXiv 2502.09992): a ratio drawn evenly from [low, high], then `corruption` as for `Mlm`.

    `weighted`: the losses of a sequence count 1 / ratio, which makes their sum a bound on its likelihood; else 1.

    Raises:
        UserError: not 0 < low <= high <= 1.
    """

    corruption: Corruption
    low: float
    high: float
    weighted: bool
    name: str = "diffusion"
    direction: str = "bidirectional"

    def __post_init__(self) -> None:
        if not 0.0 < self.low <= self.high <= 1.0:
            raise UserError(f"mask_ratio {self.low} to {self.high}: diffusion needs 0 < low <= high <= 1")

    def make(
        self,
        tokens: np.ndarray,
        key: int,
        step: int = 0,  # noqa: ARG002 - the same at every step
        documents: np.ndarray | None = None,
    ) -> Sample:
        """See `Objective.make`. The stream's next token (the last of `tokens`) is not used."""
        labels, ratio = tokens[:-1], self.ratio(key)
        chosen = self.corruption.choose(labels, key, ratio, of_inputs(documents))
        inputs = self.corruption.replace(labels, chosen, key)
        return Sample(inputs, labels, chosen, weight=1.0 / ratio if self.weighted else 1.0)

    def ratio(self, key: int) -> float:
        """The ratio of the sequence named by `key`. Its stream is another than the tokens': it disturbs no choice."""
        return draw_share(hash_key("ratio", key), self.low, self.high)

    def capacity(self, positions: int) -> int:
        """A quarter of the rows at `high`, to a multiple of 64: counts vary widely, and multiples of it are taken."""
        return min(positions, math.ceil(positions * self.high / 4 / 64) * 64)
