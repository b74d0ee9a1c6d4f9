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
from megatron_loss_agg.masks import MaskSums, brought_to_cpu
from megatron_loss_agg.microbatch import BY_SAMPLE, Microbatch, checked_by_sample


class Samples(NamedTuple):
    """What a step is counted from; tensors are on the CPU."""

    sums_S: Tensor  # fp64, mask sums
    sizes: list[int]  # samples of each microbatch
    mask_totals: list[float]  # of each microbatch
    ids: Mapping[Unit, Tensor]  # int64 [samples], of units for which every microbatch has them
    rejected_S: Tensor | None  # bool
    weights_S: Tensor | None  # fp64
    active_tokens: list[int]  # of each microbatch
    positions: list[int] | None  # of each, routed tokens or elements; None where masks are unknown
    routed_microbatches: int  # that say their routed tokens

    @classmethod
    def of_microbatches(cls, microbatches: Sequence[Microbatch]) -> Samples:
        """Of microbatches on the CPU.

        Raises:
            MaskError, GroupError: as `MaskSums.read`; or sample weights that are not finite and
                >= 0.
        """
        sums_S, totals, active_tokens = MaskSums.read(microbatches)
        ids = {
            unit: _column(microbatches, f"{unit}_ids", 0)
            for unit in BY_ID
            if all(getattr(m, f"{unit}_ids") is not None for m in microbatches)
        }
        rejected_S = weights_S = None
        if any(m.rejected is not None for m in microbatches):
            rejected_S = _column(microbatches, "rejected", False)
        if any(m.sample_weights is not None for m in microbatches):
            weights_S = _column(microbatches, "sample_weights", 1.0)
            _check_weights(weights_S)
        sizes = [m.num_samples for m in microbatches]
        routed = [m.routed_tokens for m in microbatches]
        positions = [
            m.loss_mask.numel() if n is None else n
            for m, n in zip(microbatches, routed, strict=True)
        ]
        says = len(routed) - routed.count(None)
        return cls(
            sums_S, sizes, totals, ids, rejected_S, weights_S, active_tokens, positions, says
        )

    @classmethod
    def of_sums(cls, mask_sums: Any, by_sample: Mapping[str, Any]) -> Samples:
        """See `StepPlan.from_mask_sums`.

        Args:
            by_sample: the other fields by name, of `BY_SAMPLE`; None where not given.

        Raises:
            MaskError, GroupError: a wrong shape or dtype, or values that are not finite and >= 0.
        """
        by_microbatch = isinstance(mask_sums, (list, tuple)) and (
            not mask_sums or not all(map(_is_number, mask_sums))
        )  # an empty list is a rank without microbatches
        sums = [_checked_sums(x) for x in (mask_sums if by_microbatch else [mask_sums])]
        sizes = [x.numel() for x in sums]
        of_all = {name: _of_all(name, x, sizes) for name, x in by_sample.items() if x is not None}
        # The same samples, each with all of its mask in one token.
        rows = Microbatch(vector(sums, torch.float64).unsqueeze(1), **of_all)
        return cls.of_microbatches(brought_to_cpu([rows]))._replace(
            sizes=sizes,
            mask_totals=[float(x.sum()) for x in sums],
            active_tokens=[],
            positions=None,
        )


def read_terms(by_term: Iterable[Sequence[Any]]) -> list[tuple[tuple[Microbatch, ...], Samples]]:
    """Copies of each term's microbatches, and their samples.

    Args:
        by_term: the microbatches of each term, unchecked. Terms with the same ones share them.
    """
    given = [tuple(microbatches) for microbatches in by_term]
    for x in chain(*given):
        if not isinstance(x, Microbatch):
            raise MaskError(f"a {type(x).__name__}; expected a list of Microbatch")
    copies = {m: m.copied() for m in dict.fromkeys(chain(*given))}
    on_cpu = dict(zip(copies, brought_to_cpu([*copies.values()]), strict=True))
    samples = {
        of_term: Samples.of_microbatches([on_cpu[m] for m in of_term])
        for of_term in dict.fromkeys(given)
    }
    return [(tuple(copies[m] for m in of_term), samples[of_term]) for of_term in given]


def vector(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """``parts`` as one ``dtype`` vector on the CPU; empty if there are none."""
    return torch.cat([torch.empty(0, dtype=dtype), *(part.to("cpu", dtype) for part in parts)])


def _column(microbatches: Sequence[Microbatch], name: str, default: float) -> Tensor:
    """The field ``name`` of all samples; ``default`` for microbatches without it."""
    dtype = BY_SAMPLE[name]
    parts = [
        torch.full((m.num_samples,), default, dtype=dtype) if x is None else x.detach()
        for m in microbatches
        for x in [getattr(m, name)]
    ]
    return vector(parts, dtype)


def _check_weights(weights_S: Tensor) -> None:
    bad_S = ~(weights_S.isfinite() & (weights_S >= 0))
    if bool(bad_S.any()):
        raise MaskError(
            f"sample_weights has the value {weights_S[bad_S][0].item():g}; expected finite "
            "numbers >= 0"
        )


def _of_all(name: str, given: Any, sizes: Sequence[int]) -> Any:
    """``given``, unchecked; or its entries for each microbatch, checked and joined."""
    nested = isinstance(given, (list, tuple)) and all(map(_may_be_vector, given))
    if not nested or (not given and sizes):
        return given
    if len(given) != len(sizes) or any(part is None for part in given):
        raise GroupError(
            f"{name} for {sum(part is not None for part in given)} microbatches and mask_sums for "
            f"{len(sizes)}; expected one entry for each microbatch, or one vector for all samples"
        )
    parts = [checked_by_sample(name, *pair) for pair in zip(given, sizes, strict=True)]
    return vector([part.detach() for part in parts], BY_SAMPLE[name])


def _may_be_vector(x: object) -> bool:
    return x is None or isinstance(x, (list, tuple)) or getattr(x, "ndim", 0) > 0


def _is_number(x: object) -> bool:
    return isinstance(x, (int, float)) or getattr(x, "ndim", 1) == 0


def _checked_sums(given: Any) -> Tensor:
    """fp64 [samples]."""
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
