"""Names to tensors, in both directions: which rows of Hugging Face tensors make up which rows of Megatron's."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_mlmclm.convert.families.base import OUTPUT_BIAS, Entry, table
from megatron_mlmclm.recipe.schema import ModelSection


@dataclass(frozen=True)
class Block:
    """Rows [start, stop) of the Hugging Face tensor `name`."""

    name: str
    start: int
    stop: int


def entries(model: ModelSection) -> tuple[Entry, ...]:
    """The table of names of `model`."""
    return table(qkv_bias=model.add_qkv_bias, qk_norm=model.qk_layernorm, tied=model.tie_embeddings)


def sizes(model: ModelSection, vocab_size: int) -> dict[str, int]:
    """What the names of sizes in a table come to."""
    return {
        "hidden": model.hidden_size,
        "queries": model.num_attention_heads * model.head_dim,
        "keys": model.kv_heads * model.head_dim,
        "head": model.head_dim,
        "ffn": model.ffn_hidden_size,
        "vocabulary": vocab_size,
    }


def names(entry: Entry, model: ModelSection) -> Iterator[tuple[int | None, tuple[str, ...]]]:
    """(layer, Hugging Face names) of each tensor that `entry` stands for; the layer is None outside of the layers."""
    if not entry.layered:
        yield None, entry.theirs
        return
    for layer in range(model.num_layers):
        yield layer, tuple(name.format(i=layer) for name in entry.theirs)


def shapes(model: ModelSection, vocab_size: int) -> dict[str, tuple[int, ...]]:
    """Every tensor that a Hugging Face folder of `model` must hold (but zero biases), with its shape."""
    size, found = sizes(model, vocab_size), {}
    for entry in entries(model):
        for _, theirs in names(entry, model):
            for name, rows in zip(theirs, entry.rows, strict=True):
                found[name] = (size[rows],) if entry.columns is None else (size[rows], size[entry.columns])
    return found


def output_biases(model: ModelSection) -> dict[str, tuple[int, ...]]:
    """The biases after attention that a Hugging Face model with `attention_bias` has and Megatron has not."""
    if not model.add_qkv_bias:
        return {}
    return {OUTPUT_BIAS.format(i=layer): (model.hidden_size,) for layer in range(model.num_layers)}


def global_shape(entry: Entry, model: ModelSection, vocab_size: int) -> tuple[int, ...]:
    """The shape of Megatron's tensor, of one layer and without padding."""
    size = sizes(model, vocab_size)
    rows = sum(size[part] for part in entry.rows)
    return (rows,) if entry.columns is None else (rows, size[entry.columns])


def blocks(entry: Entry, theirs: tuple[str, ...], model: ModelSection, vocab_size: int) -> list[Block]:
    """What Megatron's tensor is made of, from its first row to its last."""
    size = sizes(model, vocab_size)
    groups = model.kv_heads if entry.grouped else 1
    found = []
    for group in range(groups):
        for name, rows in zip(theirs, entry.rows, strict=True):
            width = size[rows] // groups
            found.append(Block(name, group * width, (group + 1) * width))
    return found


ReadRows = Callable[[str, int, int, slice], Tensor]  # (name, first row, row past the last, columns)


def fused(parts: list[Block], start: int, stop: int, columns: slice, read: ReadRows) -> Tensor:
    """Rows [start, stop), those below the last block's end, and `columns` of Megatron's tensor.

    `read` gives rows of one Hugging Face tensor, of which only these are asked.
    """
    found, first = [], 0
    for block in parts:
        last = first + block.stop - block.start
        low, high = max(start, first), min(stop, last)
        if low < high:
            found.append(read(block.name, block.start + low - first, block.start + high - first, columns))
        first = last
    return found[0] if len(found) == 1 else torch.cat(found)


def parted(parts: list[Block], name: str, tensor: Tensor) -> Tensor:
    """The inverse: the Hugging Face tensor `name`, contiguous, out of one of Megatron's (padded or not)."""
    found, first = [], 0
    for block in parts:
        last = first + block.stop - block.start
        if block.name == name:
            found.append(tensor[first:last])
        first = last
    return torch.cat(found)


def to_hugging_face(weights: dict[str, Tensor], model: ModelSection, vocab_size: int) -> dict[str, Tensor]:
    """All of Megatron's tensors (the layers of a stack on axis 0) as Hugging Face ones.

    Raises:
        KeyError: a tensor of the table is missing.
    """
    out = {}
    for entry in entries(model):
        stack = weights[entry.ours]
        for layer, theirs in names(entry, model):
            parts = blocks(entry, theirs, model, vocab_size)
            out |= {name: parted(parts, name, stack if layer is None else stack[layer]) for name in theirs}
    return out
