"""Qwen3: Llama with a norm on the queries and keys of each head."""

from megatron_mlmclm.convert.families.base import Family

FAMILY = Family("qwen3", "Qwen3ForCausalLM", "Qwen3Config", qk_norm=True)
