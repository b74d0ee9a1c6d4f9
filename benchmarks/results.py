"""Timing functions against each other, and figures against goals."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.shapes import GOALS

quick = False
"""Whether every figure is measured once (``--quick``), to see that it can be."""


def rounds_of(number: int) -> int:
    """How often to measure what is otherwise measured ``number`` times."""
    return min(number, 1) if quick else number


def ratios(
    floor: Callable[[], object],
    others: dict[str, Callable[[], object]],
    rounds: int,
    warm_up: int = 3,
) -> tuple[float, dict[str, float]]:
    """Seconds of ``floor``, and how many times as long each of ``others`` takes.

    Medians over rounds, in each of which every function runs once, of the round's own ratios: what
    else the machine does then weighs on all of them alike. Time is that of this thread's own CPU.
    """
    names = list(others)
    for _ in range(rounds_of(warm_up)):
        seconds(floor)
        for name in names:
            seconds(others[name])
    taken: list[float] = []
    found: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds_of(rounds)):
        base = seconds(floor)
        taken.append(base)
        for name in names:
            found[name].append(seconds(others[name]) / base)
    return statistics.median(taken), {n: statistics.median(r) for n, r in found.items()}


def seconds(function: Callable[[], object]) -> float:
    """CPU time of this thread in one call."""
    begin = time.thread_time()
    function()
    return time.thread_time() - begin


def least_seconds(functions: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """Of rounds in which each runs once: what else the machine does can only add to them."""
    for function in functions:
        function()
    taken = [[seconds(function) for function in functions] for _ in range(rounds_of(rounds))]
    return [min(of_one) for of_one in zip(*taken, strict=True)]


@dataclass
class Figure:
    """One measured number; met if it is at most the goal of that name."""

    what: str
    where: str
    value: float
    unit: str
    goal: float | None = None
    part: str = ""  # of the benchmarks

    @property
    def met(self) -> bool:
        return self.goal is None or self.value <= self.goal


@dataclass
class Results:
    figures: list[Figure] = field(default_factory=list)
    part: str = ""  # that is being measured

    def add(self, what: str, where: str, value: float, unit: str, goal: str = "") -> None:
        """Record and print a figure, against the goal of `shapes.GOALS` if one is named."""
        figure = Figure(what, where, value, unit, GOALS[goal] if goal else None, self.part)
        self.figures.append(figure)
        verdict = "" if figure.goal is None else f"  goal {figure.goal:g}: "
        verdict += "" if figure.goal is None else "met" if figure.met else "MISSED"
        print(f"{what:34} {where:38} {value:9.3f} {unit:18}{verdict}", flush=True)

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [{**asdict(figure), "met": figure.met} for figure in self.figures]
        path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")

    @property
    def missed(self) -> list[Figure]:
        return [figure for figure in self.figures if not figure.met]
