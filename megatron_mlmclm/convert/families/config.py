"""config.json of a Hugging Face folder <-> the model section of a recipe. Nothing in the folder is executed."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_mlmclm.convert.families import BY_ARCHITECTURE, Family
from megatron_mlmclm.errors import UserError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from megatron_mlmclm.recipe.schema import ModelSection

ROPE_KEYS = {  # of each kind that Megatron gets from us, what its parameters are called
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def read_config(folder: str | Path) -> tuple[Family, "PretrainedConfig"]:
    """The family and config of the Hugging Face model in `folder`, by config.json alone.

    Raises:
        UserError: no such file, an architecture that is not known, values that transformers refuses.
    """
    path = Path(folder) / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        architecture = values["architectures"][0]
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read ({error.strerror}); name a Hugging Face model folder (of a GGUF file or an import,"
            " start with from: the folder that `mlmclm import-hf` wrote)"
        ) from None
    except (ValueError, KeyError, IndexError, TypeError):
        raise UserError(f"{path}: no JSON object with `architectures`; is it a model's config?") from None
    if architecture not in BY_ARCHITECTURE:
        raise UserError(
            f"{path}: architecture {architecture} is not known; known: {', '.join(sorted(BY_ARCHITECTURE))}"
        )
    family = BY_ARCHITECTURE[architecture]
    if values.get("quantization_config"):
        raise UserError(f"{path}: the weights are quantized (quantization_config); name a folder with plain ones")
    return family, _parsed(path, family, values)


def _parsed(path: Path, family: Family, values: dict[str, Any]) -> "PretrainedConfig":
    """Defaults that config.json leaves out are transformers' own."""
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    try:
        return getattr(transformers, family.config).from_dict(values)
    except (StrictDataclassError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path}: {error}") from None


def model_values(folder: str | Path) -> dict[str, Any]:
    """What `folder`'s config.json says, as keys of a recipe's `model`; `seq_length` is the longest that it allows.

    Raises:
        UserError: names the key that Megatron's GPT stack has no equal of.
    """
    family, config = read_config(folder)
    path = Path(folder) / "config.json"
    for key, wanted in (("hidden_act", "silu"), ("mlp_bias", False)):
        if getattr(config, key, wanted) != wanted:
            raise UserError(f"{path}: {key} is {getattr(config, key)}, only {wanted} converts")
    if config.num_attention_heads % config.num_key_value_heads:
        raise UserError(
            f"{path}: num_attention_heads ({config.num_attention_heads}) is not divisible by num_key_value_heads"
            f" ({config.num_key_value_heads})"
        )
    theta, scaling = _rope(path, config.rope_parameters)
    window = getattr(config, "sliding_window", None)
    return {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.num_key_value_heads,
        "kv_channels": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "seq_length": min(config.max_position_embeddings, window or config.max_position_embeddings),
        "rotary_base": theta,
        "rope_scaling": scaling,
        "layernorm_epsilon": config.rms_norm_eps,
        "init_method_std": config.initializer_range,
        "tie_embeddings": config.tie_word_embeddings,
        "vocab_size": config.vocab_size,
        "add_qkv_bias": _has_qkv_bias(family, config),
        "qk_layernorm": family.qk_norm,
    }


def read_model(folder: str | Path) -> "ModelSection":
    """`model_values` as the section of a recipe.

    Raises:
        UserError: as there; or a size is no size.
    """
    from pydantic import ValidationError

    from megatron_mlmclm.recipe.schema import ModelSection

    try:
        return ModelSection.model_validate(model_values(folder))
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{Path(folder) / 'config.json'}: {first['loc'][0]}: {first['msg']}") from None


def is_causal(folder: str | Path) -> bool:
    """Whether the model in `folder` attends causally: by its family, unless its config says otherwise."""
    family, config = read_config(folder)
    return family.decoder and getattr(config, "is_causal", True)


def _has_qkv_bias(family: Family, config: "PretrainedConfig") -> bool:
    return family.qkv_bias == "always" or (family.qkv_bias == "config" and config.attention_bias)


def _rope(path: Path, rope: dict[str, Any]) -> tuple[int, dict[str, Any] | None]:
    """(rotary base, the recipe's `rope_scaling`)."""
    kind, theta = rope.get("rope_type", "default"), rope["rope_theta"]
    if kind not in ROPE_KEYS:
        raise UserError(f"{path}: rope scaling of type {kind} is not supported; supported: {', '.join(ROPE_KEYS)}")
    if theta != int(theta):
        raise UserError(f"{path}: rope_theta is {theta}, Megatron takes a whole number")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UserError(f"{path}: partial_rotary_factor is {rope['partial_rotary_factor']}, only 1.0 converts")
    missing = [key for key in ROPE_KEYS[kind] if rope.get(key) is None]
    if missing:
        raise UserError(f"{path}: rope scaling of type {kind} lacks {missing[0]}")
    if kind == "default":
        return int(theta), None
    return int(theta), {"rope_type": kind, **{key: rope[key] for key in ROPE_KEYS[kind]}}


def to_config(family: Family, model: "ModelSection", **more: Any) -> "PretrainedConfig":
    """`model` as a config of `family`; `more` are its further keys (vocab_size, special ids, ...).

    Raises:
        UserError: the family lacks something that the model has.
    """
    import transformers

    if model.qk_layernorm != family.qk_norm:
        has = "has norms on queries and keys" if model.qk_layernorm else "has no norms on queries and keys"
        other = "qwen3" if model.qk_layernorm else "eurobert or llama"
        raise UserError(f"the model {has}, which {family.architecture} cannot say: export it --as {other}")
    expected = {"always": True, "never": False}.get(family.qkv_bias, model.add_qkv_bias)
    if model.add_qkv_bias != expected:
        has = "has" if model.add_qkv_bias else "has no"
        raise UserError(
            f"the model {has} biases on Q, K and V, which {family.architecture} cannot say: export --as llama"
        )
    if model.window_size is not None:
        raise UserError(
            f"the model sees a window of {list(model.window_size)} (model.window_size), which {family.architecture}"
            " has no place for: it cannot be exported"
        )
    scaling = model.rope_scaling
    rope = {"rope_type": "default"} if scaling is None else scaling.model_dump(exclude_none=True)
    if family.qkv_bias == "config":
        more["attention_bias"] = model.add_qkv_bias
    if family.name == "mistral":
        more["sliding_window"] = None
    return getattr(transformers, family.config)(
        architectures=[family.architecture],
        hidden_size=model.hidden_size,
        intermediate_size=model.ffn_hidden_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.kv_heads,
        head_dim=model.head_dim,
        max_position_embeddings=model.seq_length,
        rms_norm_eps=model.layernorm_epsilon,
        rope_parameters={**rope, "rope_theta": float(model.rotary_base)},
        initializer_range=model.init_method_std,
        tie_word_embeddings=model.tie_embeddings,
        **more,
    )
