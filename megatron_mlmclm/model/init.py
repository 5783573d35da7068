"""Initial weights that do not know the layout (DESIGN, invariant 1).

Each parameter is drawn whole, from a generator keyed by (seed, its global name, its layer), and then sliced. Megatron's
own CPU initialization agrees across tensor parallel sizes but not across pipeline parallel ones.
"""

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.transformer.module import MegatronModule

from megatron_mlmclm.objectives import hash_key

# Axis 0 of these is the vocabulary, which Megatron pads to a size that depends on the layout.
VOCABULARY_WEIGHTS = ("embedding.word_embeddings.weight", "output_layer.weight")


def init_weights(chunks: list[MegatronModule], seed: int, std: float, vocab_size: int) -> list[MegatronModule]:
    """Draw N(0, std) for matrices, ones for norms, zeros for biases, in place. A `pre_wrap_hook` of `GPTModelConfig`.

    Source: the paper's code draws all matrices alike, without depth scaling. Padded vocabulary rows are zero.
    """
    for chunk in chunks:
        for tensor in sharded_tensors(chunk):
            _fill(tensor, seed, std, vocab_size)
    return chunks


def sharded_tensors(chunk: MegatronModule) -> list[ShardedTensor]:
    """Every parameter of a model chunk with its global name, shape and offset; the data are views of the parameters."""
    state = chunk.sharded_state_dict(prefix="")
    apply_factories(state)
    return [value for value in nested_values(state) if isinstance(value, ShardedTensor)]


@torch.no_grad()
def _fill(tensor: ShardedTensor, seed: int, std: float, vocab_size: int) -> None:
    lead = tensor.prepend_axis_num  # the layer's index, where layers are saved as one stacked tensor
    shape = list(tensor.global_shape[lead:])
    vocabulary = tensor.key.endswith(VOCABULARY_WEIGHTS)
    drawn_shape = [vocab_size, *shape[1:]] if vocabulary else shape
    full = _draw(tensor.key, tuple(tensor.global_offset[:lead]), drawn_shape, seed, std)
    if vocabulary and shape[0] > vocab_size:
        full = torch.cat([full, full.new_zeros(shape[0] - vocab_size, *shape[1:])])
    window = [slice(o, o + n) for o, n in zip(tensor.global_offset[lead:], tensor.local_shape, strict=True)]
    tensor.data.copy_(full[tuple(window)])


def _draw(key: str, layer: tuple[int, ...], shape: list[int], seed: int, std: float) -> torch.Tensor:
    if "norm" in key:
        return torch.zeros(shape) if key.endswith("bias") else torch.ones(shape)
    if key.endswith("bias"):
        return torch.zeros(shape)
    generator = torch.Generator().manual_seed(hash_key("init", seed, key, *layer, bits=64) >> 1)
    return torch.empty(shape).normal_(0.0, std, generator=generator)
