"""EuroBERT: a Llama that is not causal, with a masked-LM head."""

from megatron_mlmclm.convert.families.base import Family

FAMILY = Family("eurobert", "EuroBertForMaskedLM", "EuroBertConfig", decoder=False)
