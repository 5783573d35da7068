"""Mistral: Llama with a sliding window, which `config.py` keeps sequences below."""

from megatron_mlmclm.convert.families.base import Family

FAMILY = Family("mistral", "MistralForCausalLM", "MistralConfig", qkv_bias="never")
