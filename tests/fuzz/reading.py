"""What an input means, in plain loops: the samples of a microbatch, and the weights of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor

from megatron_loss_agg import LossAggregation
from tests import oracle
from tests.oracle import Sample

LARGEST = 3.4028234663852886e38  # of fp32


class Unreadable(Exception):
    """An input without a meaning, which the package must refuse."""


@dataclass(frozen=True)
class Read:
    """One microbatch."""

    samples: list[Sample]
    places: list[list[int]]  # of each sample's tokens in the flattened mask
    rejected: list[bool]  # of each sample
    values: list[float]  # of the flattened mask

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Read:
        """From the keyword arguments of a `Microbatch`."""
        values = listed(given["loss_mask"])
        if not all(0 <= m <= LARGEST for m in values):
            raise Unreadable("values of the mask")
        places = _places(given, len(values))
        inside = {t for of_sample in places for t in of_sample}
        if any(m for t, m in enumerate(values) if t not in inside):
            raise Unreadable("a mask on padding")
        number = len(places)
        masks = [tuple(values[t] for t in p) for p in places]
        ids = [
            _by_sample(given.get(f"{unit}_ids"), number, 0)
            for unit in ("prompt", "rollout", "dataset")
        ]
        ids.append(_by_sample(given.get("sample_weights"), number, 1.0))
        samples = [Sample(*of_sample) for of_sample in zip(masks, *ids, strict=True)]
        weights = [s.weight for s in samples if any(s.mask)]
        if not all(v == 0 or 1 / LARGEST <= v <= LARGEST for v in weights):
            raise Unreadable("sample weights")
        return cls(samples, places, _by_sample(given.get("rejected"), number, False), values)

    @classmethod
    def of_sums(cls, sums: Any, *ids: Sequence[Any]) -> Read:
        """From mask sums and ids alone, as if each sample were one token."""
        values = [float(x) for x in (sums.tolist() if hasattr(sums, "tolist") else sums)]
        if not all(0 <= m < float("inf") for m in values):
            raise Unreadable("mask sums")
        samples = [Sample((m,), *of) for m, *of in zip(values, *ids, strict=True)]
        return cls(samples, [[s] for s in range(len(values))], [False] * len(values), values)


def listed(x: Tensor) -> list[float]:
    return [float(value) for value in x.detach().reshape(-1).tolist()]


def _places(given: Mapping[str, Any], tokens: int) -> list[list[int]]:
    real, padded = given.get("cu_seqlens"), given.get("cu_seqlens_padded")
    if real is None:
        rows, width = given["loss_mask"].shape
        return [[*range(s * width, (s + 1) * width)] for s in range(rows)]
    real = real.tolist()
    starts = real if padded is None else padded.tolist()
    lengths = [b - a for a, b in pairwise(real)]
    ends = starts[1:]
    good = [0 <= n <= b - a for a, b, n in zip(starts, ends, lengths, strict=False)]
    last = max([0, *(a + n for a, n in zip(starts, lengths, strict=False))])
    if real[0] != 0 or starts[0] != 0 or not all(good) or last > tokens:
        raise Unreadable("offsets")
    return [[*range(a, a + n)] for a, n in zip(starts, lengths, strict=False)]


def _by_sample(given: Any, number: int, default: Any) -> list[Any]:
    if given is None:
        return [default] * number
    found = given.tolist() if isinstance(given, Tensor) else list(given)
    if len(found) != number:
        raise Unreadable("not one for each sample")
    return found


def expected_weights(agg: LossAggregation, ranks: Sequence[Sequence[Read]]) -> list[list[Any]]:
    """The weight of every position of every mask, by rank and microbatch."""
    skips = agg.rejected == "skip"
    step = [
        [
            [s for s, gone in zip(m.samples, m.rejected, strict=True) if not (skips and gone)]
            for m in rank
        ]
        for rank in ranks
    ]
    found = oracle.step_weights(
        agg.mode,
        step,
        divisor=None if agg.divisor is None else float(agg.divisor),
        empty=agg.empty,
        count=agg.count,
        sample_weights=agg.sample_weights,
    )
    return [
        [_laid(m, of_microbatch, skips) for m, of_microbatch in zip(rank, of_rank, strict=True)]
        for rank, of_rank in zip(ranks, found, strict=True)
    ]


def _laid(microbatch: Read, by_sample: list[list[float]], skips: bool) -> list[float]:
    weights, left = [0.0] * len(microbatch.values), iter(by_sample)
    for places, gone in zip(microbatch.places, microbatch.rejected, strict=True):
        of_sample = [] if skips and gone else next(left)
        if not gone:
            for t, w in zip(places, of_sample, strict=True):
                weights[t] = w
    return weights
