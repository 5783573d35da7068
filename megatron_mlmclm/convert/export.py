"""`mlmclm export-hf`: a Megatron checkpoint -> a Hugging Face encoder that needs no code of ours."""

import argparse
import shutil
from pathlib import Path

import torch

from megatron_mlmclm.aside import new_folder
from megatron_mlmclm.convert.card import model_card
from megatron_mlmclm.convert.checkpoint import find_checkpoint, read_recipe, read_weights
from megatron_mlmclm.convert.llama_shape import to_hugging_face
from megatron_mlmclm.data import Tokenizer
from megatron_mlmclm.errors import UserError
from megatron_mlmclm.recipe import Recipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb."""
    parser.add_argument("checkpoint", help="run folder (its newest checkpoint), checkpoints folder, or iter_N folder")
    parser.add_argument("--output", required=True, help="folder to write; must not exist")
    parser.add_argument("--tokenizer", help="tokenizer folder (default: the one kept in the run folder)")


def run(args: argparse.Namespace) -> None:
    """Run the verb."""
    output = export_hf(args.checkpoint, args.output, args.tokenizer)
    print(f"encoder: {output}")


def export_hf(checkpoint: str | Path, output: str | Path, tokenizer: str | Path | None = None) -> Path:
    """Write `output`: safetensors, config, tokenizer and a model card, loadable by `AutoModelForMaskedLM`.

    The checkpoint may come from any tensor and pipeline parallel layout. Written aside and renamed when complete.

    Raises:
        UserError: no checkpoint or tokenizer, an output that exists, a checkpoint that does not fit its recipe, a model
            with a window.
    """
    folder, output = find_checkpoint(checkpoint), Path(output)
    with new_folder(output) as aside:
        recipe = read_recipe(folder)
        if recipe.model.window_size is not None:
            raise UserError(
                f"{folder}: was trained with model.window_size {list(recipe.model.window_size)}; EuroBERT has no window"
                " and would see more than the model learned from: a run to be exported must do without"
            )
        source = _tokenizer_folder(folder, recipe, tokenizer)
        vocabulary = Tokenizer.load(source)
        if vocabulary.mask_id is None:
            raise UserError(
                f"{source}: no mask token; make it one with `mlmclm tokenizer add-mask`, name it --tokenizer"
            )
        _encoder(folder, recipe, vocabulary).save_pretrained(aside)
        for file in aside.glob("*.safetensors"):
            shutil.copymode(aside / "config.json", file)  # they are written for the owner alone
        for file in sorted(source.iterdir()):
            shutil.copy(file, aside / file.name)
        (aside / "README.md").write_text(model_card(recipe, folder), encoding="utf-8")
    return output


def _tokenizer_folder(checkpoint: Path, recipe: Recipe, named: str | Path | None) -> Path:
    kept = checkpoint.parent.parent / "tokenizer"  # in the run folder, beside checkpoints/
    return Path(named) if named else kept if kept.is_dir() else Path(recipe.data.tokenizer)


def _encoder(checkpoint: Path, recipe: Recipe, vocabulary: Tokenizer) -> torch.nn.Module:
    """The model as transformers' own EuroBERT, with the checkpoint's tensors and dtype."""
    from transformers import EuroBertForMaskedLM

    weights = read_weights(checkpoint)
    dtype = weights["decoder.final_layernorm.weight"].dtype
    try:
        state = to_hugging_face(weights, recipe.model, vocabulary.vocab_size)
        with torch.device("meta"):
            model = EuroBertForMaskedLM(_config(recipe, vocabulary))
        if recipe.model.tie_embeddings:
            state["lm_head.weight"] = state["model.embed_tokens.weight"]
        model.load_state_dict(state, assign=True)
    except (KeyError, RuntimeError) as error:
        raise UserError(f"{checkpoint}: does not fit its recipe: {error}") from None
    model.tie_weights()
    model.config.dtype = dtype
    return model


def _config(recipe: Recipe, vocabulary: Tokenizer) -> "EuroBertConfig":  # noqa: F821
    from transformers import EuroBertConfig

    model = recipe.model
    return EuroBertConfig(
        vocab_size=vocabulary.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.ffn_hidden_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.kv_heads,
        head_dim=model.head_dim,
        max_position_embeddings=model.seq_length,
        rms_norm_eps=model.layernorm_epsilon,
        rope_parameters={"rope_type": "default", "rope_theta": float(model.rotary_base)},
        initializer_range=model.init_method_std,
        tie_word_embeddings=model.tie_embeddings,
        pad_token_id=vocabulary.pad_id,
        bos_token_id=vocabulary.bos_id,
        eos_token_id=vocabulary.eos_id,
        mask_token_id=vocabulary.mask_id,
        classifier_pooling="mean",
    )
