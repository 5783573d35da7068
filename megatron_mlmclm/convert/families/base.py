"""What a family of models is to us: where its tensors go in Megatron, and what its config.json may say.

Every family here is Llama-shaped: pre-norm RMSNorm, SwiGLU, rotary embeddings. A conversion is a table of names and two
special cases, the fused QKV and the gated MLP. Imports neither torch nor megatron.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """A tensor of Megatron's and the Hugging Face tensors whose rows it holds.

    Attributes:
        ours: Megatron's global name; layers are stacked under one name that begins with `decoder.layers.`.
        theirs: Hugging Face names; `{i}` is the layer.
        rows: how many rows each of `theirs` has, as the name of a size (`mapping.sizes`).
        columns: likewise, of all of them; None for vectors.
        grouped: rows stand group by group (QKV: of each group its queries, its key, its value), not one after another.
    """

    ours: str
    theirs: tuple[str, ...]
    rows: tuple[str, ...]
    columns: str | None
    grouped: bool = False

    @property
    def layered(self) -> bool:
        """Whether there is one in each layer."""
        return self.ours.startswith("decoder.layers.")


EMBEDDING = "embedding.word_embeddings.weight"
HEAD = "output_layer.weight"
_LAYER, _THEIRS = "decoder.layers", "model.layers.{i}"
_QKV = tuple(f"{_THEIRS}.self_attn.{part}_proj" for part in "qkv")
_QKV_ROWS = ("queries", "keys", "keys")

LLAMA = (
    Entry(EMBEDDING, ("model.embed_tokens.weight",), ("vocabulary",), "hidden"),
    Entry(
        f"{_LAYER}.self_attention.linear_qkv.layer_norm_weight",
        (f"{_THEIRS}.input_layernorm.weight",),
        ("hidden",),
        None,
    ),
    Entry(
        f"{_LAYER}.self_attention.linear_qkv.weight",
        tuple(f"{name}.weight" for name in _QKV),
        _QKV_ROWS,
        "hidden",
        grouped=True,
    ),
    Entry(
        f"{_LAYER}.self_attention.linear_proj.weight", (f"{_THEIRS}.self_attn.o_proj.weight",), ("hidden",), "queries"
    ),
    Entry(
        f"{_LAYER}.mlp.linear_fc1.layer_norm_weight", (f"{_THEIRS}.post_attention_layernorm.weight",), ("hidden",), None
    ),
    Entry(
        f"{_LAYER}.mlp.linear_fc1.weight",
        (f"{_THEIRS}.mlp.gate_proj.weight", f"{_THEIRS}.mlp.up_proj.weight"),
        ("ffn", "ffn"),
        "hidden",
    ),
    Entry(f"{_LAYER}.mlp.linear_fc2.weight", (f"{_THEIRS}.mlp.down_proj.weight",), ("hidden",), "ffn"),
    Entry("decoder.final_layernorm.weight", ("model.norm.weight",), ("hidden",), None),
    Entry(HEAD, ("lm_head.weight",), ("vocabulary",), "hidden"),
)
# Of models with biases on Q, K and V, and of those with a norm on each head's queries and keys.
QKV_BIAS = (
    Entry(
        f"{_LAYER}.self_attention.linear_qkv.bias",
        tuple(f"{name}.bias" for name in _QKV),
        _QKV_ROWS,
        None,
        grouped=True,
    ),
)
QK_NORM = tuple(
    Entry(
        f"{_LAYER}.self_attention.{part}_layernorm.weight",
        (f"{_THEIRS}.self_attn.{part}_norm.weight",),
        ("head",),
        None,
    )
    for part in "qk"
)
OUTPUT_BIAS = f"{_THEIRS}.self_attn.o_proj.bias"  # comes with `attention_bias`; Megatron has none there: zeros only


@dataclass(frozen=True)
class Family:
    """A Hugging Face architecture that converts in both directions.

    Attributes:
        name: what `--as` calls it.
        architecture: of `architectures` in config.json, and transformers' class.
        config: transformers' class of its config.
        qkv_bias: "always", "never", or "config": where `attention_bias` says so (then also a bias after attention).
        qk_norm: whether its queries and keys have norms.
        decoder: whether its attention is causal unless its config says otherwise.
    """

    name: str
    architecture: str
    config: str
    qkv_bias: str = "config"
    qk_norm: bool = False
    decoder: bool = True


def table(*, qkv_bias: bool, qk_norm: bool, tied: bool) -> tuple[Entry, ...]:
    """The names of a model with or without each of the options."""
    entries = (*LLAMA, *(QKV_BIAS if qkv_bias else ()), *(QK_NORM if qk_norm else ()))
    return tuple(entry for entry in entries if not (tied and entry.ours == HEAD))
