"""This rank's samples of a step, from microbatches or from mask sums.

Suffix: ``_S`` samples of all this rank's microbatches, in order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_loss_agg.aggregation import BY_ID, Unit
from megatron_loss_agg.errors import GroupError, MaskError
from megatron_loss_agg.masks import MaskSums
from megatron_loss_agg.microbatch import Microbatch, check_by_sample, checked_ids
from megatron_loss_agg.transfer import brought_to_cpu
from megatron_loss_agg.weights import LARGEST_FP32, described, is_plain


class Samples(NamedTuple):
    """What the counts of a step are made from; tensors are on the CPU."""

    sums_S: Tensor  # fp64, mask sums
    sizes: list[int]  # samples of each microbatch
    mask_totals: list[float]  # of each microbatch
    ids: Mapping[Unit, Sequence[Tensor]]  # int64 vectors, by `BY_ID`, where given
    rejected_S: Tensor | None  # bool
    weights_S: Tensor | None  # fp64
    active_tokens: list[int] | None  # of each microbatch; None where masks are unknown
    routed_tokens: list[int]  # of the microbatches that say it

    @classmethod
    def of_microbatches(cls, microbatches: Sequence[Microbatch]) -> Samples:
        """Of microbatches on the CPU; raises as `MaskSums.read`."""
        sums_S, totals, active_tokens = MaskSums.read(microbatches)
        ids: dict[Unit, Sequence[Tensor]] = {}
        for unit in BY_ID:
            given = [getattr(microbatch, f"{unit}_ids") for microbatch in microbatches]
            if not any(part is None for part in given):
                ids[unit] = given
        rejected_S = _filled(microbatches, "rejected", False, torch.bool)
        weights_S = _filled(microbatches, "sample_weights", 1.0, torch.float64)
        if weights_S is not None:
            _check_weights(weights_S)
        sizes = [m.num_samples for m in microbatches]
        routed = [m.routed_tokens for m in microbatches if m.routed_tokens is not None]
        return cls(sums_S, sizes, totals, ids, rejected_S, weights_S, active_tokens, routed)

    @classmethod
    def of_sums(
        cls,
        mask_sums: Any,
        ids: Mapping[Unit, Any] | None = None,
        rejected: Any = None,
        sample_weights: Any = None,
    ) -> Samples:
        """See `StepPlan.from_mask_sums`.

        Raises:
            MaskError, GroupError: a wrong shape or dtype, or sums that are not finite and >= 0.
        """
        by_microbatch = isinstance(mask_sums, (list, tuple)) and (
            not mask_sums or not all(map(_is_number, mask_sums))
        )  # an empty list is a rank without microbatches
        sums = [_checked_sums(x) for x in (mask_sums if by_microbatch else [mask_sums])]
        sizes = [x.numel() for x in sums]
        by_unit = {u: _ids(f"{u}_ids", x, sizes) for u, x in (ids or {}).items() if x is not None}
        rejected_S = None
        if rejected is not None:
            rejected_S = vector(_tensors("rejected", rejected, torch.bool, sizes), torch.bool)
        weights_S = None
        if sample_weights is not None:
            given = _tensors("sample_weights", sample_weights, None, sizes)
            weights_S = vector(given, torch.float64)
            _check_weights(weights_S)
        totals = [float(x.sum()) for x in sums]
        sums_S = vector(sums, torch.float64)
        return cls(sums_S, sizes, totals, by_unit, rejected_S, weights_S, None, [])


def read_terms(by_term: Iterable[Any]) -> list[tuple[tuple[Microbatch, ...], Samples]]:
    """Copies of each term's microbatches, and their samples.

    Args:
        by_term: the microbatches of each term, unchecked. Terms with the same ones share them.
    """
    checked = [_checked_microbatches(microbatches) for microbatches in by_term]
    copies = {m: m.copied() for m in dict.fromkeys(chain(*checked))}
    on_cpu = dict(zip(copies, brought_to_cpu([*copies.values()]), strict=True))
    samples = {
        of_term: Samples.of_microbatches([on_cpu[m] for m in of_term])
        for of_term in dict.fromkeys(checked)
    }
    return [(tuple(copies[m] for m in of_term), samples[of_term]) for of_term in checked]


def _checked_microbatches(microbatches: Any) -> tuple[Microbatch, ...]:
    found = listed(microbatches)
    for microbatch in found:
        if not isinstance(microbatch, Microbatch):
            raise MaskError(f"a {type(microbatch).__name__}; expected a list of Microbatch")
    return tuple(found)


def listed(microbatches: Any) -> list[Any]:
    """A list, since the microbatches are iterated over once per term."""
    sequence = isinstance(microbatches, Iterable) and getattr(microbatches, "ndim", 1) == 1
    if not sequence or isinstance(microbatches, (Tensor, Mapping)):
        raise MaskError(f"a {type(microbatches).__name__}; expected a list of Microbatch")
    return list(microbatches)


def vector(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """``parts`` as one ``dtype`` vector on the CPU; empty if there are none."""
    return torch.cat([torch.empty(0, dtype=dtype), *(part.to("cpu", dtype) for part in parts)])


def _filled(
    microbatches: Sequence[Microbatch], name: str, default: float, dtype: torch.dtype
) -> Tensor | None:
    """The field ``name`` of all, ``default`` where some are None; None if all are."""
    given = [getattr(m, name) for m in microbatches]
    if all(x is None for x in given):
        return None
    parts = [
        torch.full((m.num_samples,), default, dtype=dtype) if x is None else x.detach()
        for m, x in zip(microbatches, given, strict=True)
    ]
    return vector(parts, dtype)


def _tensors(
    name: str, given: Any, dtype: torch.dtype | None, sizes: Sequence[int]
) -> list[Tensor]:
    parts = _by_microbatch(name, given, sizes)
    for part, size in parts:
        check_by_sample(name, part, dtype, size)
    return [part.detach() for part, _ in parts]


def _check_weights(weights_S: Tensor) -> None:
    """Raise MaskError if fp32 cannot hold a weight, or its reciprocal."""
    held = (weights_S >= 1 / LARGEST_FP32) & (weights_S <= LARGEST_FP32)
    if not bool((held | (weights_S == 0)).all()):
        bad = weights_S[~(held | (weights_S == 0))][0].item()
        raise MaskError(
            f"sample_weights has the value {bad:g}; expected finite numbers >= 0 that fp32 holds, "
            f"0 or from {1 / LARGEST_FP32:.3g} to {LARGEST_FP32:.3g}"
        )


def _ids(name: str, given: Any, sizes: Sequence[int]) -> list[Tensor]:
    parts = _by_microbatch(name, given, sizes)
    return [checked_ids(name, ids, size) for ids, size in parts]


def _by_microbatch(name: str, given: Any, sizes: Sequence[int]) -> list[tuple[Any, int]]:
    """Parts of ``given``, each with its number of samples: one per microbatch, or one for all."""
    nested = isinstance(given, (list, tuple)) and all(map(_may_be_vector, given))
    if not nested or (not given and sizes):
        return [(given, sum(sizes))]
    if len(given) != len(sizes) or any(part is None for part in given):
        raise GroupError(
            f"{name} for {sum(part is not None for part in given)} microbatches and mask_sums for "
            f"{len(sizes)}; expected one entry for each microbatch, or one vector for all samples"
        )
    return list(zip(given, sizes, strict=True))


def _may_be_vector(x: object) -> bool:
    return x is None or isinstance(x, (list, tuple)) or getattr(x, "ndim", 0) > 0


def _is_number(x: object) -> bool:
    return isinstance(x, (int, float)) or getattr(x, "ndim", 1) == 0


def _checked_sums(given: Any) -> Tensor:
    """fp64 [samples]."""
    if isinstance(given, Tensor) and not is_plain(given):
        raise MaskError(f"mask_sums are {described(given)}; expected a real, dense vector")
    try:
        # Python numbers directly in fp64, and not in the default dtype.
        dtype = None if hasattr(given, "dtype") else torch.float64
        sums = torch.as_tensor(given, dtype=dtype).detach()
        sums_S = sums.to("cpu", torch.float64)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise MaskError(
            f"mask_sums cannot be read ({error}); expected a vector of numbers"
        ) from error
    valid = sums_S.dim() == 1 and not sums.is_complex()
    if not valid or not bool((sums_S.isfinite() & (sums_S >= 0)).all()):
        raise MaskError(
            f"mask_sums of shape {tuple(sums.shape)} and dtype {sums.dtype}; expected a vector of "
            "finite numbers >= 0, one for each sample"
        )
    return sums_S
