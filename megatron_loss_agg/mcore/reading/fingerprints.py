"""Fingerprints of tokens: short numbers that tell which tokens a rank holds, and in which order.

The sum of a hash of each token. Of the hash of its id alone, the parts of several ranks add up to
that of the whole, in any order; of the hash of id and place, it also tells the order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

# Odd constants of 64 bits, which spread the bits of a product (Knuth's multiplicative hashing).
_PLACE, _MIX = -7046029254386353131, -4417276706812531889
_BITS = 2**26 - 1  # so that fp64 holds the sum of 2^27 tokens


class IdFingerprints(NamedTuple):
    """Of one tensor that tells a microbatch's tokens apart."""

    whole: float  # of the whole microbatch, in any order
    tells: bool  # its values are not all equal
    by_split: Mapping[str, float]  # of this rank's part under each split, in its order


class Fingerprints(NamedTuple):
    """Of one microbatch."""

    ids: tuple[IdFingerprints, ...]  # the most telling first
    mask: Mapping[str, float]  # as `IdFingerprints.by_split`, of where the mask is not 0


def fingerprint(ids: Tensor, in_order: bool = False) -> Tensor:
    """fp64, a scalar on the device of ``ids``: integers or bool; ``in_order`` tells their order."""
    x = ids.reshape(-1).long()
    if in_order:
        x = x + torch.arange(x.numel(), device=x.device) * _PLACE
    x = (x ^ (x >> 31)) * _MIX
    return ((x ^ (x >> 29)) & _BITS).sum(dtype=torch.float64)


def counts_up(x: Tensor) -> Tensor:
    """Bool: whether these are positions that a script may have made itself, whatever its split."""
    flat = x if x.dim() else x.reshape(1)
    return (flat == torch.arange(flat.shape[-1], device=x.device)).all()
