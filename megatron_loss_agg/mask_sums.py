"""Microbatches with known mask sums but unknown masks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_loss_agg.errors import DataError
from megatron_loss_agg.microbatch import Microbatch
from megatron_loss_agg.tensors import described


def microbatches_from(mask_sums: Any, ids: Any, by_sample: Mapping[str, Any]) -> list[Microbatch]:
    """A microbatch for each vector of mask sums; each sample has its whole mask in one token.

    Args:
        mask_sums, ids: as in `StepPlan.from_mask_sums`.
        by_sample: its other arguments, by field of `Microbatch`; None if not given.

    Raises:
        DataError: mask sums that are not vectors, or values that do not fit them.
    """
    if ids is not None and not isinstance(ids, Mapping):
        raise DataError(
            f"ids must map units to ids, got a {type(ids).__name__}. Give {{unit: ids}}."
        )
    fields = {name: x for name, x in by_sample.items() if x is not None}
    named_ids = dict(ids or {})
    is_list = isinstance(mask_sums, (list, tuple)) and not any(map(_is_number, mask_sums))
    if not is_list:  # one microbatch; its other values are not in lists either
        mask_sums = [mask_sums]
        fields = {name: [x] for name, x in fields.items()}
        named_ids = {unit: [x] for unit, x in named_ids.items()}
    for name, values in (*fields.items(), *((f"{u}_ids", x) for u, x in named_ids.items())):
        _check_number(name, values, len(mask_sums))
    return [
        Microbatch(
            _vector(sums).unsqueeze(1),
            ids={unit: values[i] for unit, values in named_ids.items()},
            **{name: values[i] for name, values in fields.items()},
        )
        for i, sums in enumerate(mask_sums)
    ]


def _vector(mask_sums: Any) -> Tensor:
    vector = torch.as_tensor(mask_sums, dtype=torch.float64).detach().cpu()
    if vector.dim() != 1:
        raise DataError(
            "mask_sums must be a vector of numbers, one for each sample, or a list of such "
            f"vectors, got {described(vector)}. Flatten it."
        )
    return vector


def _check_number(name: str, values: Any, number: int) -> None:
    if not isinstance(values, (list, tuple)) or len(values) != number:
        is_list = isinstance(values, (list, tuple))
        got = f"{len(values)} entries" if is_list else described(values)
        raise DataError(
            f"{name} must have one entry for each of the {number} microbatches of mask_sums, got "
            f"{got}. Give a list like mask_sums."
        )


def _is_number(x: object) -> bool:
    return isinstance(x, (int, float)) or getattr(x, "ndim", 1) == 0
