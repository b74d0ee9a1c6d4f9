"""What an input means, in plain loops; and what is allowed: its exact number, or a refusal."""

from __future__ import annotations

import contextlib
import functools
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from megatron_loss_agg import AggregationError, LossAggregation
from tests import oracle
from tests.oracle import Sample

LARGEST = 3.4028234663852886e38  # of fp32
# Three roundings: of the mask, of the coefficient and of their product; bf16 rounds once more.
ROUNDING = {torch.float64: 2e-14, torch.float32: 4 * 2.0**-24, torch.bfloat16: 2.0**-8}
SMALLEST = {torch.float64: 2.0**-1074, torch.float32: 2.0**-149, torch.bfloat16: 2.0**-133}
_SAYS_WHAT_TO_MEND = re.compile("expected |give |needs a|takes no|it has ")


class Refused(Exception):
    """A changed input was refused, as it may be."""


def called(function: Callable[..., Any], *args: Any, changes: Any = True, **options: Any) -> Any:
    """The result; raises Refused if ``changes`` were made and the package, or torch, objects."""
    try:
        return function(*args, **options)
    except Refused:
        raise
    except Exception as error:
        if not changes:
            raise AssertionError("valid input was refused") from error
        if isinstance(error, AggregationError) and not _SAYS_WHAT_TO_MEND.search(str(error)):
            raise AssertionError("the error does not say what to mend") from error
        raise Refused from error


def exact_or_refused(test: Callable[..., None]) -> Callable[..., None]:
    """A test that ends where its input is refused."""

    @functools.wraps(test)
    def judged(*args: Any, **drawn: Any) -> None:
        with contextlib.suppress(Refused), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, about prototypes
            test(*args, **drawn)

    return judged


def listed(x: Any) -> list[float]:
    """All numbers of a tensor, or of a nest of lists."""
    if isinstance(x, Tensor):
        return [float(value) for value in x.detach().reshape(-1).tolist()]
    return [value for part in x for value in listed(part)] if isinstance(x, list) else [float(x)]


def products(values: Tensor, weights: Tensor) -> list[float]:
    """Of values and weights, without what weighs nothing."""
    pairs = zip(listed(values), listed(weights), strict=True)
    return [v * w for v, w in pairs if w != 0]


def assert_same(pairs: Iterable[tuple[Tensor, Any]], rounding: float, smallest: float = 0) -> None:
    """Each number is near rounding error, and so is their sum, which denormal numbers escape."""
    error = size = 0.0
    for got, wanted in pairs:
        for x, y in zip(listed(got.double()), listed(wanted), strict=True):
            off = abs(x - y)
            assert off <= rounding * abs(y) + smallest, f"{x!r}, and the oracle {y!r}"
            error, size = error + off, size + abs(y)
    assert error <= rounding * size


def assert_same_weights(pairs: Iterable[tuple[Tensor, Any]], dtype: torch.dtype) -> None:
    assert_same(pairs, ROUNDING[dtype], SMALLEST[dtype])


@dataclass(frozen=True)
class Read:
    """One microbatch, read in plain loops; AssertionError for what must have been refused."""

    samples: list[Sample]
    places: list[list[int]]  # of each sample's tokens in the flattened mask
    rejected: list[bool]  # of each sample
    values: list[float]  # of the flattened mask

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Read:
        """From the keyword arguments of a `Microbatch`."""
        values = listed(given["loss_mask"])
        assert all(0 <= m <= LARGEST for m in values), "values of the mask"
        places = _places(given, len(values))
        outside = {*range(len(values))}.difference(*places)
        assert not any(values[t] for t in outside), "a mask on padding"
        number = len(places)
        by_sample = [[tuple(values[t] for t in p) for p in places]]
        for name in ("prompt_ids", "rollout_ids", "dataset_ids"):
            by_sample.append(_by_sample(given.get(name), number, 0))
        by_sample.append(_by_sample(given.get("sample_weights"), number, 1.0))
        samples = [Sample(*of_sample) for of_sample in zip(*by_sample, strict=True)]
        weights = [s.weight for s in samples if any(s.mask)]
        assert all(v == 0 or 1 / LARGEST <= v <= LARGEST for v in weights), "sample weights"
        return cls(samples, places, _by_sample(given.get("rejected"), number, False), values)

    @classmethod
    def of_sums(cls, sums: Any, *ids: Any) -> Read:
        """From mask sums and ids alone, as if each sample were one token."""
        values = [float(x) for x in (sums.tolist() if hasattr(sums, "tolist") else sums)]
        assert all(0 <= m < float("inf") for m in values), "mask sums"
        by_sample = (_by_sample(x, len(values), 0) for x in ids)
        samples = [Sample((m,), *of) for m, *of in zip(values, *by_sample, strict=True)]
        return cls(samples, [[s] for s in range(len(values))], [False] * len(values), values)


def _places(given: Mapping[str, Any], tokens: int) -> list[list[int]]:
    real, padded = given.get("cu_seqlens"), given.get("cu_seqlens_padded")
    if real is None:
        rows, width = given["loss_mask"].shape
        return [[*range(s * width, (s + 1) * width)] for s in range(rows)]
    real = real.tolist()
    starts = real if padded is None else padded.tolist()
    lengths = [b - a for a, b in pairwise(real)]
    assert real[0] == starts[0] == 0, "offsets"
    for (a, b), n in zip(pairwise(starts), lengths, strict=True):
        assert 0 <= n <= b - a and a + n <= tokens, "offsets"
    return [[*range(a, a + n)] for a, n in zip(starts, lengths, strict=False)]


def _by_sample(given: Any, number: int, default: Any) -> list[Any]:
    if given is None:
        return [default] * number
    if isinstance(given, str):  # the id of a lone sample
        given = [given]
    found = given.tolist() if isinstance(given, Tensor) else list(given)
    assert len(found) == number, "not one for each sample"
    return found


def expected_weights(agg: LossAggregation, ranks: Sequence[Sequence[Read]]) -> list[list[Any]]:
    """The weight of every position of every mask, by rank and microbatch."""
    found = oracle.step_weights(
        agg.mode,
        [[counted(m, agg) for m in rank] for rank in ranks],
        levels=agg.levels or (),
        divisor=None if agg.divisor is None else float(agg.divisor),
        empty=agg.empty,
        count=agg.count,
        sample_weights=agg.sample_weights,
    )
    return [
        [_laid(m, agg, weights) for m, weights in zip(rank, of_rank, strict=True)]
        for rank, of_rank in zip(ranks, found, strict=True)
    ]


def counted(microbatch: Read, agg: LossAggregation) -> list[Sample]:
    """The samples that are in the denominators."""
    pairs = zip(microbatch.samples, microbatch.rejected, strict=True)
    return [s for s, gone in pairs if not (gone and agg.rejected == "skip")]


def _laid(microbatch: Read, agg: LossAggregation, by_sample: list[list[float]]) -> list[float]:
    weights, left = [0.0] * len(microbatch.values), iter(by_sample)
    for places, gone in zip(microbatch.places, microbatch.rejected, strict=True):
        of_sample = [] if gone and agg.rejected == "skip" else next(left)
        for t, w in zip(places, of_sample, strict=False):
            weights[t] = 0.0 if gone else w
    return weights
