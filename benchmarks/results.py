"""Timing functions against each other, and figures against goals."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.shapes import FULL, GOALS, QUICK, QUICK_GOALS

Work = Callable[[], object]


class CannotRun(Exception):
    """A part needs something that this machine lacks; the text names it."""


class Results:
    """Figures, failures, and parts that could not run; written after each, in case of a crash.

    Args:
        path: the JSON file to write.
        quick: measure small shapes once, as a trial, without comparing times with goals.
        clock: returns a time in seconds; by default this thread's CPU time.
    """

    def __init__(
        self, path: Path, quick: bool = False, clock: Callable[[], float] = time.thread_time
    ) -> None:
        self.quick = quick
        self.shapes = QUICK if quick else FULL
        self.clock = clock
        self.part = ""  # the part that is being measured
        kinds = ("figures", "failed", "could_not_run", "facts")
        self.rows: dict[str, list[Any]] = {kind: [] for kind in kinds}
        self.path = path

    def add(
        self, what: str, where: str, value: float, unit: str, goal: str = "", noise: float = 0.0
    ) -> None:
        """Record and print a figure.

        Args:
            goal: the name of the upper limit in `GOALS`; empty: no limit.
            noise: the difference between repetitions, at 95 percent.
        """
        limit = GOALS[goal] if goal and (goal in QUICK_GOALS or not self.quick) else None
        verdict = "" if limit is None else verdict_of(value, limit, noise)
        if not math.isfinite(value):
            return self.fail(what, f"{where}: {value} {unit}")
        row = {"part": self.part, "what": what, "where": where, "value": value, "unit": unit}
        self._add("figures", {**row, "noise": noise, "goal": limit, "verdict": verdict})

    def could_not_run(self, what: str, reason: str) -> None:
        self._add("could_not_run", {"what": what, "reason": reason})

    def fail(self, what: str, reason: str) -> None:
        self._add("failed", {"what": what, "reason": reason})

    def fact(self, what: str, value: str) -> None:
        """Record a fact about the machine."""
        self._add("facts", {"what": what, "reason": value})

    def _add(self, kind: str, row: dict[str, Any]) -> None:
        self.rows[kind].append(row)
        print(line(row) if kind == "figures" else f"{kind}: {row}", flush=True)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.path.with_suffix(".new")  # the process may be killed while writing
        unfinished.write_text(json.dumps(self.rows, indent=1) + "\n", encoding="utf-8")
        unfinished.replace(self.path)

    def rounds(self, number: int) -> int:
        """The number of measurements of a figure that is measured ``number`` times."""
        return 1 if self.quick else number

    def seconds(self, function: Work) -> float:
        begin = self.clock()
        function()
        return self.clock() - begin

    def least_seconds(self, functions: Sequence[Work], rounds: int) -> list[float]:
        """The shortest time of each function over some rounds, in seconds.

        Other work on the machine can only add to a time.
        """
        for function in functions:
            function()
        taken = [[self.seconds(f) for f in functions] for _ in range(self.rounds(rounds))]
        return [min(seconds) for seconds in zip(*taken, strict=True)]

    def ratio(
        self, base: Callable[[], float], other: Callable[[], float], rounds: int
    ) -> tuple[float, float]:
        """Median seconds of ``base``, and median ratio of ``other`` to it; both return seconds.

        They alternate, so that other work on the machine slows both. The first rounds are ignored.
        """
        pairs = [(base(), other()) for _ in range(3 + self.rounds(rounds))][3:]
        ratios = [ours / theirs for theirs, ours in pairs]
        return statistics.median(x for x, _ in pairs), statistics.median(ratios)


def verdict_of(value: float, goal: float, noise: float = 0.0) -> str:
    """``met`` or ``missed``; ``undecided`` if the goal is within the noise."""
    if value + noise <= goal:
        return "met"
    return "undecided" if value - noise <= goal else "missed"


def estimate(samples: Sequence[float]) -> tuple[float, float]:
    """The median, and twice its standard error under normal noise (sigma = 1.4826 MAD)."""
    middle = statistics.median(samples)
    spread = 1.4826 * statistics.median(abs(x - middle) for x in samples)
    return middle, 2 * 1.2533 * spread / math.sqrt(len(samples))


def line(figure: dict[str, Any]) -> str:
    """A figure as a line for the terminal."""
    verdict = "" if figure["goal"] is None else f"{goal_in_words(figure)}: {figure['verdict']}"
    return (
        f"{figure['what']:34} {figure['where']:44} {value_in_words(figure):22} {verdict}".rstrip()
    )


def value_in_words(figure: dict[str, Any]) -> str:
    noise = f" ± {figure['noise']:.2g}" if figure["noise"] else ""
    return f"{figure['value']:.4g}{noise} {figure['unit']}"


def goal_in_words(figure: dict[str, Any]) -> str:
    return "" if figure["goal"] is None else f"at most {figure['goal']:g}"


def counted(parts: Sequence[dict[str, Any]]) -> Counter[str]:
    """The numbers of goals by verdict, of failures, and of parts that could not run."""
    counts = Counter(f["verdict"] for part in parts for f in part["figures"] if f["verdict"])
    for kind in ("failed", "could_not_run"):
        counts[kind] = sum(len(part[kind]) for part in parts)
    return counts
