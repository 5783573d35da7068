"""Qwen2 and Qwen2.5: Llama with biases on Q, K and V."""

from megatron_mlmclm.convert.families.base import Family

FAMILY = Family("qwen2", "Qwen2ForCausalLM", "Qwen2Config", qkv_bias="always")
