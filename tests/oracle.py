"""Specification of every mode as plain loops in fp64. Imports nothing of the package, nor torch.

A step is a list of data-parallel ranks; a rank is a list of microbatches; a microbatch is a list
of samples; a sample is its mask. The loss of a step is ``sum(w * loss)`` over all tokens, so the
weights returned here say everything there is to know about a mode.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from math import fsum


@dataclass(frozen=True)
class Sample:
    """One trained sequence: its loss mask, the ids of its groups, and its own weight."""

    mask: tuple[float, ...]
    prompt: int = 0
    rollout: int = 0
    dataset: int = 0
    weight: float = 1.0


Step = list[list[list[Sample]]]
Place = tuple[int, int, int]  # rank, microbatch of the rank, sample of the microbatch

# The unit whose tokens share one denominator, and the unit that the outer mean runs over.
INNER = {
    "token_mean": "all",
    "sample_mean": "sample",
    "rollout_mean": "rollout",
    "prompt_mean": "prompt",
    "dataset_mean": "dataset",
    "microbatch_mean": "microbatch",
    "sample_sum": None,
    "constant": None,
    "sum": None,
}
OUTER = INNER | {"token_mean": None, "sample_sum": "sample", "constant": "sample"}


def samples_of(step: Step) -> Iterator[tuple[Place, Sample]]:
    for r, rank in enumerate(step):
        for k, microbatch in enumerate(rank):
            for s, sample in enumerate(microbatch):
                yield (r, k, s), sample


def key_of(unit: str, place: Place, sample: Sample) -> Hashable:
    """The unit (all, sample, prompt, ...) that a sample belongs to."""
    rank, microbatch, _ = place
    return {
        "all": "the only one",
        "microbatch": (rank, microbatch),
        "sample": place,
        "rollout": sample.rollout,
        "prompt": sample.prompt,
        "session": sample.rollout,  # by other names
        "task": sample.prompt,
        "dataset": sample.dataset,
    }[unit]


def members(step: Step, unit: str) -> dict[Hashable, list[Sample]]:
    """The samples of every unit of a kind."""
    found: dict[Hashable, list[Sample]] = defaultdict(list)
    if unit == "microbatch":  # a microbatch exists even when it holds no sample
        for r, rank in enumerate(step):
            for k in range(len(rank)):
                found[(r, k)] = []
    for place, sample in samples_of(step):
        found[key_of(unit, place, sample)].append(sample)
    return found


def mask_sums(step: Step, unit: str) -> dict[Hashable, float]:
    """Sum of the mask over every unit of a kind; units without active tokens are listed with 0."""
    return {
        key: fsum(m for sample in group for m in sample.mask)
        for key, group in members(step, unit).items()
    }


def number_of(step: Step, unit: str, empty: str = "count") -> int:
    sums = mask_sums(step, unit).values()
    return len(sums) if empty == "count" else sum(1 for total in sums if total > 0)


def weight_of(step: Step, unit: str, empty: str = "count") -> float:
    """Sum over units of the mean weight of their tokens; without tokens, of their samples."""
    means = []
    for group in members(step, unit).values():
        tokens = fsum(m for sample in group for m in sample.mask)
        if tokens:
            means.append(fsum(s.weight * m for s in group for m in s.mask) / tokens)
        elif empty == "count":
            means.append(fsum(s.weight for s in group) / len(group) if group else 1.0)
    return fsum(means)


def nested_shares(
    step: Step, levels: Sequence[str], empty: str, weighted: bool
) -> tuple[dict[Place, float], float]:
    """A mean over the outermost groups of the mean over the groups in each of them, and so on.

    Of every sample, what a unit of its mask weighs beside the outermost mean; and what that one
    divides by: the number of its groups, or their weight if samples are ``weighted``.
    """
    shares: dict[Place, float] = {}
    Group = list[tuple[Place, Sample]]

    def groups_in(group: Group, unit: str) -> list[Group]:
        found: dict[Hashable, Group] = defaultdict(list)
        for place, sample in group:
            found[key_of(unit, place, sample)].append((place, sample))
        return [g for g in found.values() if empty == "count" or any(any(s.mask) for _, s in g)]

    def weight(group: Group, inner: Sequence[str], share: float) -> float:
        """Notes the shares in a group with this share of the loss; returns its mean weight."""
        if inner:
            parts = groups_in(group, inner[0])
            return fsum(weight(g, inner[1:], share / len(parts)) for g in parts) / len(parts)
        tokens = fsum(m for _, s in group for m in s.mask)
        shares.update((place, share / tokens if tokens else 0.0) for place, _ in group)
        if not weighted:
            return 1.0
        if tokens:
            return fsum(s.weight * m for _, s in group for m in s.mask) / tokens
        return fsum(s.weight for _, s in group) / len(group)

    outermost = groups_in([*samples_of(step)], levels[0])
    return shares, fsum(weight(group, levels[1:], 1.0) for group in outermost)


def shares_and_units(
    mode: str,
    step: Step,
    *,
    levels: Sequence[str] = (),
    empty: str = "count",
    count: str | None = None,
    sample_weights: str | None = None,
) -> tuple[dict[Place, float], float]:
    """As of `nested_shares`, in any mode; the outermost mean divides by 1 if there is none."""
    weighted = sample_weights == "count"
    if mode == "nested_mean":
        return nested_shares(step, levels, empty, weighted)
    inner, outer = INNER[mode], count or OUTER[mode]
    sums = mask_sums(step, inner) if inner else {}
    shares = {
        place: 1 / (sums[key_of(inner, place, s)] or 1.0) if inner else 1.0
        for place, s in samples_of(step)
    }
    unit = outer or inner
    if weighted and unit:
        return shares, weight_of(step, unit, empty)
    return shares, float(number_of(step, outer, empty)) if outer else 1.0


def step_weights(
    mode: str,
    step: Step,
    *,
    levels: Sequence[str] = (),
    divisor: float | None = None,
    empty: str = "count",
    count: str | None = None,
    sample_weights: str | None = None,
) -> list[list[list[list[float]]]]:
    """Weight of every token: nested as the step (rank, microbatch, sample, token)."""
    shares, units = shares_and_units(
        mode, step, levels=levels, empty=empty, count=count, sample_weights=sample_weights
    )

    def weight(place: Place, sample: Sample, m: float) -> float:
        if m == 0 or sample.weight == 0:
            return 0.0
        return sample.weight * m * shares[place] / units / (divisor or 1.0)

    return [
        [
            [[weight((r, k, s), sample, m) for m in sample.mask] for s, sample in enumerate(mb)]
            for k, mb in enumerate(rank)
        ]
        for r, rank in enumerate(step)
    ]
