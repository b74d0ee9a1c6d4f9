"""What one part of the GPU script found, kept in a file so that a crash loses nothing."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.results import Figure
from benchmarks.shapes import GOALS


class CannotRun(Exception):
    """A part of the script needs what this machine lacks; the text says what."""


@dataclass
class Measured(Figure):
    """A figure and its noise: what a repetition may differ by, at 95 percent."""

    noise: float = 0.0

    @property
    def verdict(self) -> str:
        """``undecided`` where the goal lies within the noise; without a goal, nothing."""
        if self.goal is None:
            return ""
        if self.value + self.noise <= self.goal:
            return "met"
        return "undecided" if self.value - self.noise <= self.goal else "missed"


class Evidence:
    """Figures, what could not run, and what failed; written to ``path`` at every addition.

    In a dry run, times have no goals.
    """

    def __init__(self, path: Path, dry: bool) -> None:
        self._path = path
        self._without_goal = ("", "hook_on_gpu", "gpu_step") if dry else ("",)
        self._rows: dict[str, list[Any]] = {"figures": [], "could_not_run": [], "failed": []}

    def add(
        self, what: str, where: str, value: float, unit: str, goal: str = "", noise: float = 0.0
    ) -> None:
        """Record a figure against the goal of `shapes.GOALS` that is named, or against none."""
        limit = None if goal in self._without_goal else GOALS[goal]
        figure = Measured(what, where, float(value), unit, limit, noise=noise)
        if not math.isfinite(figure.value):
            return self.fail(what, f"{where}: {value} {unit}")
        self._add("figures", {**asdict(figure), "verdict": figure.verdict})

    def could_not_run(self, what: str, reason: str) -> None:
        self._add("could_not_run", {"what": what, "reason": reason})

    def fail(self, what: str, reason: str) -> None:
        self._add("failed", {"what": what, "reason": reason})

    def fact(self, name: str, value: str) -> None:
        """Something about the machine."""
        self._rows.setdefault("facts", []).append([name, value])
        self._write()

    def _add(self, kind: str, row: dict[str, Any]) -> None:
        self._rows[kind].append(row)
        print(kind, row, flush=True)
        self._write()

    def _write(self) -> None:
        """Whole or not at all: the process may be killed in between."""
        text = json.dumps(self._rows, indent=1)
        beside = self._path.with_suffix(".part")
        beside.write_text(text + "\n", encoding="utf-8")
        beside.replace(self._path)


def estimate(samples: Sequence[float]) -> tuple[float, float]:
    """The median, and twice its standard error as for normal noise (sigma = 1.4826 MAD)."""
    middle = statistics.median(samples)
    spread = 1.4826 * statistics.median(abs(x - middle) for x in samples)
    return middle, 2 * 1.2533 * spread / math.sqrt(len(samples))
