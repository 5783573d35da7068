"""What is predicted: one objective per file, the corruption they share, and the keyed randomness they draw from."""

from megatron_mlmclm.objectives.base import Objective, Sample, Vocabulary
from megatron_mlmclm.objectives.clm import Clm
from megatron_mlmclm.objectives.corruption import Corruption
from megatron_mlmclm.objectives.keyed import draw_u64, hash_key, threshold_u64
from megatron_mlmclm.objectives.mlm import Mlm
from megatron_mlmclm.objectives.mntp import Mntp

__all__ = [
    "Clm",
    "Corruption",
    "Mlm",
    "Mntp",
    "Objective",
    "Sample",
    "Vocabulary",
    "draw_u64",
    "hash_key",
    "threshold_u64",
]
