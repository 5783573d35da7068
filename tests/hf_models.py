"""Tiny random Hugging Face models, one of each family and option that converts."""

import shutil
from pathlib import Path

import torch

LONG = 9216  # positions; those past 9,000 tell scaled rotary embeddings apart
SHAPE = {
    "vocab_size": 1003,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "attn_implementation": "sdpa",
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 6.0,
    "low_freq_factor": 1.5,
    "high_freq_factor": 5.0,
    "original_max_position_embeddings": 512,
}
SMALL = {"hidden_size": 32, "num_attention_heads": 2, "max_position_embeddings": LONG}
# name -> (family, what differs from SHAPE). The names are those of the cases in the worlds.
MODELS: dict[str, tuple[str, dict]] = {
    "llama": ("llama", {"num_hidden_layers": 4}),
    "llama-mha": ("llama", {"num_key_value_heads": 4, "attention_bias": True}),
    "llama3": ("llama", {**SMALL, "rope_parameters": LLAMA3}),
    "llama-linear": (
        "llama",
        {**SMALL, "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4}},
    ),
    "smollm": (
        "llama",
        {
            **{"num_hidden_layers": 4, "tie_word_embeddings": True, "num_attention_heads": 6},
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e5},
        },
    ),
    "mistral": ("mistral", {"head_dim": 32, "sliding_window": 32, "max_position_embeddings": 64}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True, "vocab_size": 1100}),  # more rows than the tokenizer has ids
    "qwen3": ("qwen3", {"head_dim": 16}),
    "eurobert": ("eurobert", {"mask_token_id": 1, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}),
}


def classes(family: str) -> tuple[type, type]:
    """transformers' (config, model) of a family."""
    import transformers

    from megatron_mlmclm.convert.families import FAMILIES

    return getattr(transformers, FAMILIES[family].config), getattr(transformers, FAMILIES[family].architecture)


def make(name: str, folder: Path, tokenizer: str, dtype: torch.dtype = torch.float32, **more) -> Path:
    """Write the model `name` of MODELS, with `more` in its config, and the tokenizer, to `folder`."""
    family, options = MODELS[name]
    config, model_class = classes(family)
    torch.manual_seed(len(name))
    model = model_class(config(**{**SHAPE, **options, **more})).to(dtype)
    for key, weight in model.named_parameters():
        if "norm" in key:
            weight.data.uniform_(0.5, 1.5)
        elif key.endswith("bias"):
            weight.data.normal_() if "o_proj" not in key else weight.data.zero_()
    model.save_pretrained(folder, max_shard_size="40KB")
    for file in Path(tokenizer).iterdir():
        shutil.copy(file, folder / file.name)
    (folder / "LICENSE").write_text("The terms of the source.\n")
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n\nA source.\n")
    return folder
