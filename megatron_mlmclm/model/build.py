"""From Megatron's arguments to a `GPTModelConfig` whose layers we chose. The model class is named here only."""

import argparse
from collections.abc import Callable
from functools import partial

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.training.argument_utils import gpt_config_from_args
from megatron.training.models.gpt import GPTModelConfig

from megatron_mlmclm.attention import Pattern, SdpaCoreAttention, set_pattern, verify
from megatron_mlmclm.model.init import init_weights
from megatron_mlmclm.model.norm import RMSNorm
from megatron_mlmclm.model.rope import RopeScaling, scale_rope


def model_config(
    args: argparse.Namespace,
    *,
    vocab_size: int,
    padded_vocab_size: int | None,
    init_std: float,
    pattern: Pattern,
    finalize_model_grads: Callable[..., None],
    rope_scaling: RopeScaling | None = None,
    weights: Callable[[list[MegatronModule]], list[MegatronModule]] | None = None,
) -> GPTModelConfig:
    """The model of a run: Megatron's GPT stack with our norm and core attention, and keyed initial weights.

    `vocab_size` is the model's; with `padded_vocab_size` None, Megatron pads it to a multiple of 128 * tp. `pattern` is
    that of the first step. `finalize_model_grads` is called on every rank between backward and optimizer, in place of
    Megatron's, which it calls. `weights` fills in the weights of this rank's chunks; None: they are drawn.
    """
    config = gpt_config_from_args(args)
    config.vocab_size = padded_vocab_size or vocab_size
    config.should_pad_vocab = padded_vocab_size is None
    config.transformer.finalize_model_grads_func = finalize_model_grads
    config.transformer_layer_spec = partial(layer_spec, pattern=pattern)
    config.pre_wrap_hooks.append(partial(_start_with, pattern=pattern))
    if rope_scaling is not None:
        config.pre_wrap_hooks.append(partial(scale_rope, scaling=rope_scaling))
    drawn = partial(init_weights, seed=args.seed, std=init_std, vocab_size=vocab_size)
    config.pre_wrap_hooks.append(weights or drawn)
    return config


def layer_spec(
    config: GPTModelConfig, vp_stage: int | None = None, *, pattern: Pattern
) -> ModuleSpec | TransformerBlockSubmodules:
    """Layers that start with `pattern`: TE's where the run asks for Transformer Engine, else local ones made ours."""
    transformer, kind = config.transformer, AttnMaskType[pattern.attn_mask_type]
    if transformer.transformer_impl == "transformer_engine":
        from megatron_mlmclm.attention import PatternTEDotProductAttention

        spec = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=transformer.qk_layernorm)
        spec.submodules.self_attention.submodules.core_attention = PatternTEDotProductAttention
        spec.submodules.self_attention.params["attn_mask_type"] = kind
        return spec
    spec = get_gpt_layer_local_spec(qk_layernorm=transformer.qk_layernorm, normalization="RMSNorm")
    spec.submodules.input_layernorm = RMSNorm
    spec.submodules.pre_mlp_layernorm = RMSNorm
    attention = spec.submodules.self_attention
    attention.params["attn_mask_type"] = kind
    attention.submodules.core_attention = SdpaCoreAttention
    if transformer.qk_layernorm:
        attention.submodules.q_layernorm = attention.submodules.k_layernorm = RMSNorm
    # A plain ModuleSpec would keep megatron's final norm, which refuses sequence parallelism.
    layers = get_num_layers_to_build(transformer, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=[spec] * layers, layer_norm=RMSNorm)


def _start_with(chunks: list[torch.nn.Module], *, pattern: Pattern) -> list[torch.nn.Module]:
    """A pre-wrap hook: the model that was built attends by `pattern`, or the run ends here."""
    set_pattern(chunks, pattern)
    verify(chunks, pattern)
    return chunks
