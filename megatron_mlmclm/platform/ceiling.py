"""How fast this machine multiplies matrices: what a model's FLOP/s are measured against."""

import time

import torch

SIDES = {"cpu": 1024, "cuda": 8192}  # of the matrices: large enough to be near the best, done in milliseconds
ROUNDS = 6


def matmul_ceiling(dtype: torch.dtype) -> float:
    """FLOP/s of one process with the threads, or the GPU, it has: the best of a few square products, after one more."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    side = SIDES[device.type]
    left, right, product = (torch.ones(side, side, dtype=dtype, device=device) for _ in range(3))
    seconds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        torch.mm(left, right, out=product)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return 2 * side**3 / min(seconds[1:])
