"""Who may see whom, as one value."""

from dataclasses import dataclass
from typing import Literal, get_args

from megatron_mlmclm.errors import UserError

Direction = Literal["causal", "bidirectional", "prefix"]
MASK_TYPES = {"causal": "causal", "bidirectional": "no_mask", "prefix": "arbitrary"}


@dataclass(frozen=True)
class Pattern:
    """The attention pattern of a sequence.

    `direction` over the whole of it; under "prefix" the first `prefix` tokens see each other in both directions, and
    the others are causal.
    """

    direction: Direction
    prefix: int = 0

    def __post_init__(self) -> None:
        if self.direction not in get_args(Direction):
            raise UserError(f"attention {self.direction!r} is not one of {', '.join(get_args(Direction))}")

    @property
    def attn_mask_type(self) -> str:
        """The name of megatron's `AttnMaskType` for it. `no_mask` is full attention: a sample has no padding."""
        return MASK_TYPES[self.direction]
