"""What is predicted: one objective per file, and the keyed randomness they draw from."""

from megatron_mlmclm.objectives.keyed import draw_u64, hash_key, threshold_u64

__all__ = ["draw_u64", "hash_key", "threshold_u64"]
