"""Who may see whom, as values: `Pattern` belongs to a phase, `Extent` to one sequence. Nothing heavy is imported."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from megatron_mlmclm.errors import UserError

Direction = Literal["causal", "bidirectional", "prefix"]
Window = tuple[int, int]
MASK_TYPES = {"causal": "causal", "bidirectional": "no_mask", "prefix": "arbitrary"}
UNBOUNDED = -1


@dataclass(frozen=True)
class Pattern:
    """The attention pattern of a phase. A position sees another if all that is set here allows it.

    Attributes:
        direction: "causal" sees itself and what is before; "bidirectional" all; under "prefix" the first tokens of a
            sequence (`Extent.prefix`) see each other in both directions, and the others are causal.
        documents: a document's positions see that document alone (`Extent.cu_seqlens`).
        window: how many positions to the left and to the right may be seen beside one's own; -1 is no bound.
        global_every: with a window, layers 1, 1 + k, 1 + 2k, ... (Megatron counts from 1) see without it, as
            ModernBERT's do (arXiv 2412.13663, 2.1.2).

    Errors: UserError.
    """

    direction: Direction
    documents: bool = False
    window: Window | None = None
    global_every: int | None = None

    def __post_init__(self) -> None:
        if self.direction not in get_args(Direction):
            raise UserError(f"attention {self.direction!r} is not one of {', '.join(get_args(Direction))}")
        if self.window is not None:
            _check_window(self.window, self.direction)
        if self.global_every is not None and (self.window is None or self.global_every < 1):
            raise UserError(f"global_every {self.global_every} needs a window, and must be 1 or more")

    @property
    def attn_mask_type(self) -> str:
        """The name of megatron's `AttnMaskType` for it, documents and window apart."""
        return MASK_TYPES[self.direction]

    @property
    def window_size(self) -> Window:
        """(left, right) in Transformer Engine's terms: (-1, -1) is no window, and a causal one has 0 to its right."""
        left, right = self.window or (UNBOUNDED, UNBOUNDED)
        return left, 0 if self.direction == "causal" else right

    def of_layer(self, number: int) -> "Pattern":
        """The pattern of layer `number` (from 1): with its window, or without."""
        if self.global_every is None:
            return self
        is_global = (number - 1) % self.global_every == 0
        return replace(self, window=None if is_global else self.window, global_every=None)

    @property
    def travels(self) -> bool:
        """Whether it needs what only a batch can say: where documents end, how long a prefix is."""
        return self.documents or self.direction == "prefix"


@dataclass(frozen=True)
class Extent:
    """What one sequence of a batch adds to its pattern.

    Attributes:
        length: real tokens, which come first: what follows is padding, sees nothing and is seen by nothing.
        cu_seqlens: where its documents begin, and `length` at the end; () is one document.
        prefix: how many first tokens see each other in both directions, under a pattern of direction "prefix".

    Errors: UserError.
    """

    length: int
    cu_seqlens: tuple[int, ...] = ()
    prefix: int = 0

    def __post_init__(self) -> None:
        if self.length < 0:
            raise UserError(f"a sequence of {self.length} tokens: the length must be 0 or more")
        if not 0 <= self.prefix <= self.length:
            raise UserError(f"prefix {self.prefix} does not fit a sequence of {self.length} tokens")
        if self.cu_seqlens:
            check_cu_seqlens(self.cu_seqlens, self.length)

    def documents(self, pattern: Pattern) -> tuple[tuple[int, int], ...]:
        """(start, end) of the stretches whose positions may see each other at all under `pattern`."""
        edges = self.cu_seqlens if pattern.documents and self.cu_seqlens else (0, self.length)
        return tuple((start, end) for start, end in zip(edges, edges[1:], strict=False) if end > start)


def check_cu_seqlens(cu_seqlens: Sequence[int], length: int) -> None:
    """Refuse boundaries that are not those of documents laid end to end over `length` tokens.

    Raises:
        UserError: they do not start at 0, do not rise, or do not end at the length.
    """
    if cu_seqlens[0] != 0:
        raise UserError(f"cu_seqlens starts at {cu_seqlens[0]}: the first document starts at 0")
    for place, (start, end) in enumerate(zip(cu_seqlens, cu_seqlens[1:], strict=False)):
        if end <= start:
            raise UserError(f"cu_seqlens[{place + 1}] is {end} after {start}: boundaries must rise")
    if cu_seqlens[-1] != length:
        raise UserError(f"cu_seqlens ends at {cu_seqlens[-1]}: it must end at the sequence's length, {length}")


def _check_window(window: Window, direction: str) -> None:
    if direction == "prefix":
        raise UserError(
            f"window {list(window)} with attention: prefix: a prefix is seen whole; leave one of the two out"
        )
    if len(window) != 2 or min(window) < UNBOUNDED:
        raise UserError(f"window {list(window)}: give [left, right], each 0 or more, or -1 for no bound")
