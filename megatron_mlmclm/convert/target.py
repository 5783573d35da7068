"""What an exported folder says that it is: config.json, and what sentence-transformers wants beside it."""

import json
from pathlib import Path

import torch

from megatron_mlmclm.convert.families import FAMILIES
from megatron_mlmclm.convert.families.config import to_config
from megatron_mlmclm.convert.origin import Origin
from megatron_mlmclm.data import Tokenizer
from megatron_mlmclm.errors import UserError

SENTENCES = "sentence-transformers"
TARGETS = (*FAMILIES, SENTENCES)
POOLING = "1_Pooling"
# Source: the layout that sentence-transformers 5 writes and reads.
MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": POOLING, "type": "sentence_transformers.models.Pooling"},
]


def write_target(folder: Path, target: str, origin: Origin, vocabulary: Tokenizer, dtype: torch.dtype) -> None:
    """Write config.json in the form of `target`, one of TARGETS, and the further files of sentence-transformers.

    Raises:
        UserError: the target has no form for the model, or needs a mask token.
    """
    family = FAMILIES["eurobert" if target == SENTENCES else target]
    more = {"is_causal": origin.causal}
    if not family.decoder:
        if vocabulary.mask_id is None:
            raise UserError(
                f"{vocabulary.folder}: no mask token; make it one with `mlmclm tokenizer add-mask`, name it --tokenizer"
            )
        more = {"mask_token_id": vocabulary.mask_id, "classifier_pooling": "mean"}
    config = to_config(
        family,
        origin.model,
        vocab_size=origin.model.vocab_size or vocabulary.vocab_size,
        dtype=dtype,
        pad_token_id=vocabulary.pad_id,
        bos_token_id=vocabulary.bos_id,
        eos_token_id=vocabulary.eos_id,
        **more,
    )
    if target == SENTENCES:
        config.architectures = ["EuroBertModel"]  # its head is left out
    config.save_pretrained(folder)
    if target == SENTENCES:
        _write_modules(folder, origin)


def _write_modules(folder: Path, origin: Origin) -> None:
    """A mean over the tokens of a text: the encoder was trained to predict each, and none stands for the whole."""
    (folder / POOLING).mkdir()
    pooling = {"word_embedding_dimension": origin.model.hidden_size, "pooling_mode_mean_tokens": True}
    for mode in ("cls_token", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken"):
        pooling[f"pooling_mode_{mode}"] = False
    files = {
        "modules.json": MODULES,
        f"{POOLING}/config.json": {**pooling, "include_prompt": True},
        "sentence_bert_config.json": {"max_seq_length": origin.model.seq_length, "do_lower_case": False},
        "config_sentence_transformers.json": {
            "prompts": {},
            "default_prompt_name": None,
            "similarity_fn_name": "cosine",
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
