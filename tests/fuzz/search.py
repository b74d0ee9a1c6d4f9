"""Runs cases by seed, and collects what they find."""

from __future__ import annotations

import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from tests.fuzz import layouts, numbers, policies, ranks, steps
from tests.fuzz.draw import Draw
from tests.fuzz.judge import Refused

CASES: tuple[Callable[[Draw], None], ...] = (
    steps.one_microbatch,
    steps.plan,
    steps.plan,
    steps.sums_alone,
    steps.terms,
    steps.custom,
    layouts.layout,
    layouts.shifted,
    layouts.sequence_mean,
    numbers.summed,
    numbers.reported,
    policies.policy_loss,
    policies.entropy,
)


@dataclass
class Report:
    """How many inputs were exact and how many refused, by case; and what was found."""

    exact: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        names = sorted({*self.exact, *self.refused})
        lines = [f"{n}: {self.exact[n]} exact, {self.refused[n]} refused" for n in names]
        return "\n".join([*self.findings, *lines, f"{len(self.findings)} findings"])


def search(seed: int, number: int) -> Report:
    """Cases of the seeds from ``seed`` on, each of which is a search of its own."""
    report = Report()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about prototypes
        for one in range(seed, seed + number):
            _run(one, report)
    return report


def _run(seed: int, report: Report) -> None:
    draw = Draw(seed)
    torch.manual_seed(seed)
    case = draw.choice(CASES)
    try:
        case(draw)
        report.exact[case.__name__] += 1
    except Refused:
        report.refused[case.__name__] += 1
    except Exception:
        report.findings.append(
            f"--seed {seed} --number 1 ({case.__name__}):\n{traceback.format_exc()}"
        )


def search_ranks(seed: int, number: int, world: int) -> Report:
    """Steps of the seeds from ``seed`` on over ``world`` gloo ranks."""
    report = Report()
    for one, verdict in ranks.search(seed, number, world):
        if verdict in ("exact", "refused"):
            getattr(report, verdict)[f"{world} ranks"] += 1
        else:
            report.findings.append(f"--seed {one} --number 1 --ranks {world}: {verdict}")
    return report
