"""Ids of samples: integers, or strings by their hash."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from megatron_loss_agg.errors import DataError
from megatron_loss_agg.tensors import described

Ids = Tensor | Sequence[int] | Sequence[str]
"""One id per sample: int64 [samples], ints, or strings."""


def ids_key(unit: str) -> str:
    """The batch key with the ids of ``unit``, in words."""
    sft = ", or Megatron's --sft with --loss-aggregation-sft-prompt-field FIELD"
    return f"the batch key '{unit}_ids' (int64 [samples]{sft if unit == 'prompt' else ''})"


def ids_from(name: str, values: Any) -> Tensor:
    """int64 [samples] on the CPU, from ints or from strings."""
    is_sequence = isinstance(values, Iterable) and not isinstance(values, str)
    items: list[Any] = list(values) if is_sequence else [None]
    if all(isinstance(x, str) for x in items):
        return torch.tensor([hashed(x) for x in items], dtype=torch.int64)
    wrong = [x for x in items if not _is_integer(x)]
    if wrong:
        got = f"{wrong[0]!r} among others" if is_sequence else described(values)
        raise DataError(
            f"{name} must be an int64 tensor [samples], or a sequence of only ints or only "
            f"strings, got {got}. Convert it."
        )
    numbers = [int(x) for x in items]
    if too_large := [x for x in numbers if not -(2**63) <= x < 2**63]:
        raise DataError(f"{name} must fit into int64, got {too_large[0]}. Give strings.")
    return torch.tensor(numbers, dtype=torch.int64)


def _is_integer(x: Any) -> bool:
    return isinstance(x, Integral) and not isinstance(x, bool)


def hashed(text: str) -> int:
    """The first 8 bytes of the hash of ``text``, as a signed int: the same on every machine."""
    # Accept lone surrogates, as in file names that are not UTF-8.
    encoded = text.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest(), "little", signed=True)
