"""This rank's samples of a step, from microbatches or from mask sums.

Suffix: ``_S`` samples of all this rank's microbatches, in order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_loss_agg.aggregation import BY_ID, Term, Unit, units_by_id
from megatron_loss_agg.errors import DataError
from megatron_loss_agg.masks import brought_to_cpu, sums_by_sample
from megatron_loss_agg.microbatch import (
    BY_SAMPLE,
    Microbatch,
    MicrobatchOfTerms,
    checked_by_sample,
    of_term,
)
from megatron_loss_agg.tensors import described


class Samples(NamedTuple):
    """What a step is counted from; tensors are on the CPU."""

    sums_S: Tensor  # fp64, mask sums
    sizes: list[int]  # samples of each microbatch
    ids: Mapping[Unit, Tensor]  # int64 [samples], of units for which every microbatch has them
    rejected_S: Tensor  # bool
    weights_S: Tensor  # fp64
    given: Set[str]  # which of `rejected` and `sample_weights` any microbatch has
    all_have_weights: bool  # every microbatch with samples has `sample_weights`
    active_tokens: list[int]  # of each microbatch
    positions: list[int] | None  # of each, routed tokens or elements; None where masks are unknown
    routed_microbatches: int  # that say their routed tokens

    @classmethod
    def of_microbatches(cls, microbatches: Sequence[Microbatch], units: Iterable[Unit]) -> Samples:
        """Of microbatches on the CPU; with no microbatch, the ids are those of ``units``."""
        given = {
            name
            for name in ("rejected", "sample_weights")
            if any(getattr(m, name) is not None for m in microbatches)
        }
        weights_S = _column(microbatches, "sample_weights", 1.0)
        if "sample_weights" in given:
            _check_weights(weights_S)
        routed = [m.routed_tokens for m in microbatches]
        known = {*units, *chain.from_iterable(m.ids for m in microbatches)}
        found = {u: [x for m in microbatches if (x := m.ids_of(u)) is not None] for u in known}
        return cls(
            sums_S=sums_by_sample(microbatches),
            sizes=[m.num_samples for m in microbatches],
            ids={
                unit: _joined(ids, torch.int64)
                for unit, ids in found.items()
                if len(ids) == len(microbatches)
            },
            rejected_S=_column(microbatches, "rejected", False),
            weights_S=weights_S,
            given=given,
            all_have_weights=all(
                m.sample_weights is not None for m in microbatches if m.num_samples
            ),
            # Of floats `count_nonzero` alone is slow.
            active_tokens=[int(m.loss_mask.bool().count_nonzero()) for m in microbatches],
            positions=[
                m.loss_mask.numel() if n is None else n
                for m, n in zip(microbatches, routed, strict=True)
            ],
            routed_microbatches=len(routed) - routed.count(None),
        )

    @classmethod
    def of_sums(
        cls, mask_sums: Any, by_sample: Mapping[str, Any], ids: Mapping[Unit, Any]
    ) -> Samples:
        """See `StepPlan.from_mask_sums`; ``by_sample`` has the fields of `BY_SAMPLE`, or None."""
        # An empty list is a rank without microbatches.
        flat = not isinstance(mask_sums, (list, tuple)) or any(map(_is_number, mask_sums))
        sums = [
            torch.as_tensor(x, dtype=torch.float64) for x in ([mask_sums] if flat else mask_sums)
        ]
        for x in sums:
            if x.dim() != 1:
                raise DataError(
                    f"mask_sums is {described(x)}; expected a vector of numbers, one for each "
                    "sample, or a list of such vectors"
                )
        sizes = [x.numel() for x in sums]
        of_all = {name: _of_all(name, x, sizes) for name, x in by_sample.items() if x is not None}
        of_names: Any = ids  # checked by `Microbatch`
        if isinstance(ids, Mapping):
            of_names = {unit: _of_all(f"{unit}_ids", x, sizes) for unit, x in ids.items()}
        # The same samples, each with all of its mask in one token.
        rows = Microbatch(_joined(sums, torch.float64).unsqueeze(1), ids=of_names, **of_all)
        samples = cls.of_microbatches(brought_to_cpu([rows]), BY_ID)
        return samples._replace(sizes=sizes, active_tokens=[], positions=None)


def read_terms(
    terms: Mapping[str, Term], microbatches: Sequence[MicrobatchOfTerms]
) -> list[tuple[tuple[Microbatch, ...], Samples]]:
    """Copies of each term's microbatches, and their samples; terms with the same ones share them.

    Raises:
        DataError: something else than microbatches; or values or offsets of masks, or
            sample weights, that cannot be.
    """
    given = [tuple(of_term(name, m) for m in microbatches) for name in terms]
    for x in chain(*given):
        if not isinstance(x, Microbatch):
            raise DataError(
                f"a {type(x).__name__} among the microbatches; expected a list of Microbatch"
            )
    copies = {m: m.copied() for m in dict.fromkeys(chain(*given))}
    on_cpu = dict(zip(copies, brought_to_cpu([*copies.values()]), strict=True))
    units = {*BY_ID, *units_by_id(terms)}
    samples = {
        own: Samples.of_microbatches([on_cpu[m] for m in own], units)
        for own in dict.fromkeys(given)
    }
    return [(tuple(copies[m] for m in own), samples[own]) for own in given]


def _check_weights(weights_S: Tensor) -> None:
    bad_S = ~(weights_S.isfinite() & (weights_S >= 0))
    if bool(bad_S.any()):
        raise DataError(
            f"sample_weights has the value {weights_S[bad_S][0].item():g}; expected finite numbers "
            ">= 0"
        )


def _joined(parts: Iterable[Tensor], dtype: torch.dtype) -> Tensor:
    """One vector on the CPU; empty if there are no parts."""
    return torch.cat([torch.empty(0, dtype=dtype), *(x.detach().to("cpu", dtype) for x in parts)])


def _column(microbatches: Sequence[Microbatch], name: str, default: float) -> Tensor:
    """The field ``name`` of all samples; ``default`` for microbatches without it."""
    dtype = BY_SAMPLE[name]
    fields = [(m.num_samples, getattr(m, name)) for m in microbatches]
    if all(x is None for _, x in fields):
        return torch.full((sum(n for n, _ in fields),), default, dtype=dtype)
    return _joined(
        (torch.full((n,), default, dtype=dtype) if x is None else x for n, x in fields), dtype
    )


def _of_all(name: str, given: Any, sizes: Sequence[int]) -> Any:
    """``given``, unchecked; or its entries for each microbatch, checked and joined."""
    nested = isinstance(given, (list, tuple)) and not any(
        isinstance(x, str) or _is_number(x) for x in given
    )
    if not nested or (not given and sizes):
        return given
    if len(given) != len(sizes):
        raise DataError(
            f"{name} for {len(given)} microbatches and mask_sums for {len(sizes)}; expected one "
            "entry for each microbatch, or one vector for all samples"
        )
    parts = [checked_by_sample(name, x, size) for x, size in zip(given, sizes, strict=True)]
    return _joined(parts, BY_SAMPLE.get(name, torch.int64))


def _is_number(x: object) -> bool:
    return isinstance(x, (int, float)) or getattr(x, "ndim", 1) == 0
