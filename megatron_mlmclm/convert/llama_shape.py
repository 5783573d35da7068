"""The mapping table of Llama-shaped models (Llama, EuroBERT): pre-norm, RMSNorm, SwiGLU, fused QKV in Megatron."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_mlmclm.recipe.schema import ModelSection

# Megatron's name -> the Hugging Face name or names it is split into. `{i}` runs over the stacked layers.
WHOLE = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
LAYERS = {
    "decoder.layers.self_attention.linear_qkv.layer_norm_weight": "model.layers.{i}.input_layernorm.weight",
    "decoder.layers.self_attention.linear_proj.weight": "model.layers.{i}.self_attn.o_proj.weight",
    "decoder.layers.mlp.linear_fc1.layer_norm_weight": "model.layers.{i}.post_attention_layernorm.weight",
    "decoder.layers.mlp.linear_fc2.weight": "model.layers.{i}.mlp.down_proj.weight",
}
QKV = "decoder.layers.self_attention.linear_qkv.weight"
QKV_PARTS = tuple(f"model.layers.{{i}}.self_attn.{part}_proj.weight" for part in "qkv")
GATED = "decoder.layers.mlp.linear_fc1.weight"
GATED_PARTS = tuple(f"model.layers.{{i}}.mlp.{part}_proj.weight" for part in ("gate", "up"))
VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")


@dataclass(frozen=True)
class Heads:
    """How the rows of a fused QKV weight are laid out: per group, its query heads, then its key, then its value."""

    heads: int
    groups: int
    head_dim: int

    @classmethod
    def of(cls, model: ModelSection) -> "Heads":
        return cls(model.num_attention_heads, model.kv_heads, model.head_dim)

    def split(self, fused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[(heads + 2 * groups) * head_dim, h] -> q [heads * head_dim, h], k and v [groups * head_dim, h]."""
        per_group = self.heads // self.groups
        grouped = fused.reshape(self.groups, per_group + 2, self.head_dim, -1)
        q, k, v = grouped.split([per_group, 1, 1], dim=1)
        return tuple(part.reshape(-1, fused.shape[-1]).contiguous() for part in (q, k, v))

    def fuse(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The inverse of `split`."""
        parts = [part.reshape(self.groups, -1, self.head_dim, q.shape[-1]) for part in (q, k, v)]
        return torch.cat(parts, dim=1).reshape(-1, q.shape[-1])


def to_hugging_face(weights: dict[str, Tensor], model: ModelSection, vocab_size: int) -> dict[str, Tensor]:
    """Rename, split and cut Megatron's tensors. `weights` is emptied on the way, so that each is held once.

    Raises:
        KeyError: a tensor of the table is missing.
    """
    heads, out = Heads.of(model), {}
    for ours, theirs in WHOLE.items():
        if ours == "output_layer.weight" and model.tie_embeddings:
            continue
        tensor = weights.pop(ours)
        out[theirs] = tensor[:vocab_size].clone() if ours in VOCABULARY else tensor  # Megatron's padding goes
    for ours, theirs in LAYERS.items():
        for i, tensor in enumerate(weights.pop(ours)):
            out[theirs.format(i=i)] = tensor.clone()
    for i, tensor in enumerate(weights.pop(QKV)):
        out.update(zip((name.format(i=i) for name in QKV_PARTS), heads.split(tensor), strict=True))
    for i, tensor in enumerate(weights.pop(GATED)):
        parts = (part.clone() for part in tensor.chunk(2))
        out.update(zip((name.format(i=i) for name in GATED_PARTS), parts, strict=True))
    return out
