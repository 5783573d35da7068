"""What is predicted: one objective per file, the corruption they share, and the keyed randomness they draw from."""

from megatron_mlmclm.objectives.base import Objective, Sample, Vocabulary
from megatron_mlmclm.objectives.clm import Clm
from megatron_mlmclm.objectives.corruption import Corruption
from megatron_mlmclm.objectives.diffusion import Diffusion
from megatron_mlmclm.objectives.keyed import draw_share, draw_u64, hash_key, threshold_u64
from megatron_mlmclm.objectives.mlm import Mlm
from megatron_mlmclm.objectives.mntp import Mntp
from megatron_mlmclm.objectives.pll import PseudoLikelihood
from megatron_mlmclm.objectives.ratio import Constant, Ramp, Ratio, Steps, as_ratio
from megatron_mlmclm.objectives.words import WordMarks

__all__ = [
    "Clm",
    "Constant",
    "Corruption",
    "Diffusion",
    "Mlm",
    "Mntp",
    "Objective",
    "PseudoLikelihood",
    "Ramp",
    "Ratio",
    "Sample",
    "Steps",
    "Vocabulary",
    "WordMarks",
    "as_ratio",
    "draw_share",
    "draw_u64",
    "hash_key",
    "threshold_u64",
]
