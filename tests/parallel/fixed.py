"""What the probes inside a world and the tests outside it agree on. Imports no megatron."""

import torch

CHANGED_POSITION = 20
LAST_STEP = 20
LAST_POSITIONS = 16  # of a sequence, where a conversion's logits are compared
VOCAB_SIZE = 1003  # no multiple of 128: Megatron pads it, to a size that depends on the layout


def fixed_sequences(seq_length: int) -> torch.Tensor:
    """Two sequences of ordinary ids, [2, seq_length]."""
    return torch.arange(2 * seq_length).reshape(2, -1) % 97 + 5


def documents_of(inputs: torch.Tensor) -> torch.Tensor:
    """Documents for inputs [b, S]: one begins at each multiple of 7, and every other sequence is padded by a fifth."""
    number = (inputs % 7 == 0).long()
    number[:, 0] = 0
    number = number.cumsum(1)
    padded = inputs[:, 1] % 2 == 0
    number[padded, -(inputs.shape[1] // 5) :] = -1
    return number
