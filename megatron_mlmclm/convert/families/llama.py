"""Llama 2 and 3.x, and SmolLM and SmolLM2, which are Llamas with tied embeddings."""

from megatron_mlmclm.convert.families.base import Family

FAMILY = Family("llama", "LlamaForCausalLM", "LlamaConfig")
