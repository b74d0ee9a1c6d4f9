"""One step, and what an optimizer gets of a system's own loss on it.

Two data-parallel ranks with three microbatches of two samples. Masks are uneven; one sample is
empty, and so is one microbatch, which is one prompt. Gradients are those of the policy loss by the
log-probabilities, where the ratio is 1: ``-A_t * w_t``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

RANKS, PER_RANK, ROWS, SEQ = 2, 3, 2, 5
SAMPLES = RANKS * PER_RANK * ROWS
DIVISOR = 7  # the systems' "maximum length", deliberately not the padded width
_ROWS = """
    11000 10000  11111 01100  00000 11100
    00010 01010  00000 00000  11110 10100
"""
_BITS = torch.tensor([int(bit) for row in _ROWS.split() for bit in row], dtype=torch.float64)
MASKS = _BITS.reshape(RANKS, PER_RANK, ROWS, SEQ)
PROMPTS = torch.tensor([3, 3, 3, -9, -9, -9, 0, 0, 7, 7, 5, 5]).reshape(RANKS, PER_RANK, ROWS)
LOG_PROBS = torch.linspace(-4.0, -0.5, MASKS.numel(), dtype=torch.float64).reshape(MASKS.shape)
# One for each sample, all different, of both signs.
ADVANTAGES = torch.linspace(-1.0, 1.3, SAMPLES, dtype=torch.float64).reshape(RANKS, PER_RANK, ROWS)

MicrobatchLoss = Callable[[int, int, Tensor], Tensor]
"""(rank, i, log-probabilities) -> what the trainer calls backward on."""


def gradient(loss: MicrobatchLoss) -> Tensor:
    """What the optimizer gets: gradients add up over microbatches, and DDP averages over ranks."""
    log_probs = LOG_PROBS.clone().requires_grad_()
    for rank in range(RANKS):
        for i in range(PER_RANK):
            loss(rank, i, log_probs[rank, i]).backward()
    assert log_probs.grad is not None
    return log_probs.grad / RANKS
