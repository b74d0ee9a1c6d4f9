"""Microbatches of which only the mask sums are known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_loss_agg.errors import DataError
from megatron_loss_agg.microbatch import Microbatch, checked_by_sample
from megatron_loss_agg.tensors import described


def microbatches_from(mask_sums: Any, ids: Any, by_sample: Mapping[str, Any]) -> list[Microbatch]:
    """A microbatch for each vector of mask sums; each sample has all of its mask in one token.

    Args:
        mask_sums, ids: as in `StepPlan.from_mask_sums`.
        by_sample: its other values by the fields of `Microbatch`; None where not given.

    Raises:
        DataError: no vectors, or values that do not fit them.
    """
    has_list = _is_list_of_vectors(mask_sums)
    vectors = [_vector(x) for x in (mask_sums if has_list else [mask_sums])]
    sizes = [len(x) for x in vectors]

    def entries(name: str, values: Any) -> list[Any]:
        return _entries(name, values if has_list else [values], sizes)

    columns = {name: entries(name, x) for name, x in by_sample.items() if x is not None}
    ids_by_unit = {u: entries(f"{u}_ids", x) for u, x in _checked_mapping(ids).items()}
    return [
        Microbatch(
            vector.unsqueeze(1),
            ids={unit: column[i] for unit, column in ids_by_unit.items()},
            **{name: column[i] for name, column in columns.items()},
        )
        for i, vector in enumerate(vectors)
    ]


def _is_list_of_vectors(mask_sums: Any) -> bool:
    """Whether there is a vector for each microbatch. An empty list is a rank without any."""
    return isinstance(mask_sums, (list, tuple)) and not any(_is_number(x) for x in mask_sums)


def _vector(mask_sums: Any) -> Tensor:
    vector = torch.as_tensor(mask_sums, dtype=torch.float64).detach().cpu()
    if vector.dim() != 1:
        raise DataError(
            "mask_sums must be a vector of numbers, one for each sample, or a list of such "
            f"vectors, got {described(vector)}. Flatten it."
        )
    return vector


def _checked_mapping(ids: Any) -> Mapping[str, Any]:
    if ids is not None and not isinstance(ids, Mapping):
        raise DataError(
            f"ids must be a mapping by unit, got a {type(ids).__name__}. Give {{unit: ids}}."
        )
    return ids or {}


def _entries(name: str, values: Any, sizes: Sequence[int]) -> list[Any]:
    """The entry of each microbatch, checked."""
    is_list = isinstance(values, (list, tuple))
    if not is_list or len(values) != len(sizes):
        got = f"{len(values)} entries" if is_list else described(values)
        raise DataError(
            f"{name} must have one entry for each of the {len(sizes)} microbatches of mask_sums, "
            f"got {got}. Give a list like that of mask_sums."
        )
    return [checked_by_sample(name, x, size) for x, size in zip(values, sizes, strict=True)]


def _is_number(x: object) -> bool:
    return isinstance(x, (int, float)) or getattr(x, "ndim", 1) == 0
