"""The model: Megatron's GPT stack with encoder-mode layers, keyed initial weights and a head for predicted rows."""

from megatron_mlmclm.model.build import model_config
from megatron_mlmclm.model.head import (
    Head,
    PredictedRows,
    form_of,
    masked_loss,
    masked_scores,
    predicted_logits,
    select_rows,
)

__all__ = [
    "Head",
    "PredictedRows",
    "form_of",
    "masked_loss",
    "masked_scores",
    "model_config",
    "predicted_logits",
    "select_rows",
]
