"""What is allowed: the exact number, or for strange input an error. All else is a finding."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from megatron_loss_agg import AggregationError

# Three roundings: of the mask, of the coefficient and of their product; bf16 rounds once more.
ROUNDING = {torch.float64: 2e-14, torch.float32: 4 * 2.0**-24, torch.bfloat16: 2.0**-8}
SMALLEST = {torch.float64: 2.0**-1074, torch.float32: 2.0**-149, torch.bfloat16: 2.0**-133}


_SAYS_WHAT_TO_MEND = re.compile("expected |give |needs a|takes no|it has ")


class Finding(AssertionError):
    """A wrong number, an unnamed error, or a refusal of valid input."""


class Refused(Exception):
    """The input was refused by a named error, as it may be."""


def called(function: Callable[[], Any], *, strange: bool) -> Any:
    """The result of ``function``.

    Args:
        strange: whether the input may be refused, by name or by torch's or Python's own error.

    Raises:
        Refused: it was.
        Finding: valid input was refused.
    """
    try:
        return function()
    except Refused:
        raise
    except Exception as error:
        if not strange:
            raise Finding(f"valid input was refused: {type(error).__name__}: {error}") from error
        if isinstance(error, AggregationError) and not _SAYS_WHAT_TO_MEND.search(str(error)):
            raise Finding(f"{type(error).__name__} does not say what to mend: {error}") from error
        raise Refused from error


def flat(nested: Any) -> list[float]:
    return [x for y in nested for x in flat(y)] if isinstance(nested, (list, tuple)) else [nested]


def require(holds: bool, text: str) -> None:
    if not holds:
        raise Finding(text)


def same(what: str, pairs: Iterable[tuple[Tensor, Any]], rounding: float, smallest: float) -> None:
    """Each number near rounding error, and so their sum: it does not hide in denormal numbers."""
    error = size = 0.0
    for got, nested in pairs:
        found, wanted = got.detach().double().reshape(-1).tolist(), flat(nested)
        require(len(found) == len(wanted), f"{what}: {len(found)} numbers for {len(wanted)}")
        for x, y in zip(found, wanted, strict=True):
            off = abs(x - y)
            require(off <= rounding * abs(y) + smallest, f"{what}: {x!r}, and the oracle {y!r}")
            error, size = error + off, size + abs(y)
    require(error <= rounding * size, f"{what}: {error / (size or 1):.1e} off in all")


def same_weights(what: str, pairs: Iterable[tuple[Tensor, Any]], dtype: torch.dtype) -> None:
    same(f"{what} in {dtype}", pairs, ROUNDING[dtype], SMALLEST[dtype])
