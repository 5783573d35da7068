"""A run that starts from a Hugging Face folder: each rank reads its own slices into its part of the model."""

from functools import partial

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.transformer.module import MegatronModule

from megatron_mlmclm.convert.families.base import Entry
from megatron_mlmclm.convert.mapping import blocks, entries, fused
from megatron_mlmclm.convert.source import Source
from megatron_mlmclm.model.init import sharded_tensors
from megatron_mlmclm.recipe.schema import ModelSection


def fill_weights(
    chunks: list[MegatronModule], source: Source, model: ModelSection, vocab_size: int
) -> list[MegatronModule]:
    """Copy the weights in `source` into `chunks`, in place. A `pre_wrap_hook` of `GPTModelConfig`.

    `source` has passed `check_source`. Beside the model one slice of one tensor is held at a time. Rows that pad the
    vocabulary are zero.
    """
    by_name = {entry.ours: entry for entry in entries(model)}
    for chunk in chunks:
        for tensor in sharded_tensors(chunk):
            _fill(tensor, by_name[tensor.key], source, model, vocab_size)
    return chunks


@torch.no_grad()
def _fill(tensor: ShardedTensor, entry: Entry, source: Source, model: ModelSection, vocab_size: int) -> None:
    lead = tensor.prepend_axis_num
    layer = tensor.global_offset[0] if lead else None
    theirs = tuple(name.format(i=layer) for name in entry.theirs)
    start, *column = tensor.global_offset[lead:]
    rows, *width = tensor.local_shape
    columns = slice(column[0], column[0] + width[0]) if column else slice(None)
    parts = blocks(entry, theirs, model, vocab_size)
    last = min(start + rows, sum(part.stop - part.start for part in parts))
    read = partial(fused, parts, columns=columns, read=source.rows)
    if start < last:
        tensor.data[: last - start].copy_(read(start, last))
    tensor.data[max(last - start, 0) :].zero_()
