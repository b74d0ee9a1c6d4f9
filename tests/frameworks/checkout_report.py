"""What a framework's step is held to, and the table of it that `ci/frameworks.sh` prints."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.frameworks.checkout_data import (
    STEPS,
    Case,
    Expected,
    LogProbs,
    Losses,
    errors,
    reference,
    weights,
)
from tests.frameworks.harness import DIVISOR
from tests.host.harness import run_host_ranks
from tests.host.reference import Gradient

Steps = list[tuple[Gradient, dict[str, float]]]
"""Gradient and metrics of each optimizer step."""


class Run(NamedTuple):
    """One training of the framework's code: our flags, and options of its own."""

    flags: str
    options: dict[str, Any]


Train = Callable[[str, int, list[Run], list[LogProbs]], list[Steps | str]]
"""(checkout, cp, runs, log-probabilities) -> of each run its steps, or what refused it."""

BOUND = 1e-6  # of a gradient in fp32
METRICS = 1e-5  # of a metric in fp32, in which terms cancel
WRONG = 1e-3  # what stock code must be off at least, where the page says that it is


def flags(mode: str, rejected: str = "") -> str:
    """For MEGATRON_LOSS_AGG_FLAGS."""
    text = f"--loss-aggregation {mode}"
    text += f" --loss-aggregation-divisor {DIVISOR}" if mode.endswith("constant") else ""
    return text + (f" --loss-aggregation-rejected {rejected}" if rejected else "")


Held = tuple[Run, Case | None]
"""A run and what it is held to; None: it must be refused, or is only there to differ from."""


def stock(losses: Losses, mode: str, rejected: str = "", **options: Any) -> Held:
    """Code without our flags that has the mode as one of its own."""
    return Run("", options), (losses, [weights(mode, step, rejected) for step in STEPS])


def exact(losses: Losses, mode: str, rejected: str = "", **options: Any) -> Held:
    run, case = stock(losses, mode, rejected, **options)
    return run._replace(flags=flags(mode, rejected)), case


def refused(mode: str, rejected: str = "", **options: Any) -> Held:
    return Run(flags(mode, rejected), options), None


@dataclass
class Report:
    """Collects rows and what failed.

    Args:
        checkouts: without and with the patch.
        own: runs of the stock code.
        runs: of the patched code.
        near: the stock run that a run is shown to differ from, if not the one with its options.
    """

    name: str
    train: Train
    checkouts: tuple[str, str]
    own: dict[str, Held]
    runs: dict[str, Held]
    near: dict[str, str] = field(default_factory=dict)
    rows: list[tuple[str, ...]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def compare(self, place: str, cp: int, rope: bool = True, **options: Any) -> None:
        """All runs, with further options of the framework; ``rope`` as in `reference`."""
        both = {**self.own, **self.runs}
        cases = {name: case for name, (_, case) in both.items() if case is not None}
        given, expected = reference(cases, rope)

        def run(checkout: str, runs: dict[str, Held]) -> dict[str, Any]:
            changed = [Run(run.flags, {**run.options, **options}) for run, _ in runs.values()]
            # The first rank's: after the reduction it is the same on all.
            ranks = run_host_ranks(self.train, 2, checkout, cp, changed, given, timeout=300.0)
            return dict(zip(runs, ranks[0], strict=True))

        plain, patched = self.checkouts
        theirs, again, ours = run(plain, self.own), run(patched, self.own), run(patched, self.runs)
        own_errors = {}
        for name, steps in theirs.items():
            self.check_same(f"{place}, {name}", steps, again[name])
            if name in expected:
                own_errors[name] = self.check_own(place, name, steps, expected[name])
        for what, steps in ours.items():
            if what not in expected:
                self.check_refused(place, what, steps)
                continue
            mine = self.runs[what][0].options
            same = next(name for name, (run, _) in self.own.items() if run.options == mine)
            wrong = None if what in self.own else theirs[self.near.get(what, same)]
            self.check_exact(place, what, steps, expected[what], own_errors[same], wrong)

    def check(self, holds: bool, what: str) -> None:
        if not holds:
            self.failures.append(f"{self.name}: {what}")

    def check_own(self, place: str, mode: str, got: Steps, expected: list[Expected]) -> float:
        """Stock code in a mode of its own; returns its error."""
        error, _ = errors(got, expected)
        self.check(error < BOUND, f"{place}: stock {mode} is {error:.1e} off")
        self.rows.append((place, f"stock's own: {mode}", "", "", f"{error:.1e}"))
        return error

    def check_exact(
        self,
        place: str,
        what: str,
        got: Steps | str,
        expected: list[Expected],
        own: float,
        stock: Steps | None = None,
    ) -> None:
        """A run of the patched code; ``stock`` is one of the code without, which must be wrong."""
        if isinstance(got, str):
            return self.check(False, f"{place}, {what}: {got}")
        error, metrics = errors(got, expected)
        self.check(error < min(BOUND, 2 * own), f"{place}, {what}: {error:.1e} (stock {own:.1e})")
        self.check(metrics < METRICS, f"{place}, {what}: metrics are {metrics:.1e} off")
        wrong = ""
        if stock is not None:
            difference = errors(stock, expected)[0]
            self.check(difference > WRONG, f"{place}, {what}: stock is {difference:.1e} off")
            wrong = f"{difference:.1e}"
        self.rows.append((place, what, f"{error:.1e}", f"{metrics:.1e}", wrong))

    def check_same(self, place: str, stock: Steps, patched: Steps | str) -> None:
        """Bit for bit."""
        equal = not isinstance(patched, str) and all(
            a[1] == b[1] and all(torch.equal(x, b[0][name]) for name, x in a[0].items())
            for a, b in zip(stock, patched, strict=True)
        )
        self.check(equal, f"{place}: the patched code without our flags differs from stock")

    def check_refused(self, place: str, what: str, got: Steps | str) -> None:
        named = isinstance(got, str) and got.partition(":")[0].endswith("Error")
        self.check(named, f"{place}, {what}: not refused")

    def close(self, path: str) -> None:
        """Write the table to ``path``; exit with 1 if anything failed."""
        head = ("ranks", "aggregation", "gradient", "metrics", "stock's gradient")
        lines = [head, ("---",) * len(head), *self.rows]
        text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
        Path(path).write_text(text)
        sys.exit("\n".join(self.failures) or None)


def attempt(step: Callable[[], Steps]) -> Steps | str:
    """What ``step`` returns, or the error of ours that refused it."""
    from megatron_loss_agg import AggregationError

    try:
        return step()
    except AggregationError as error:
        return f"{type(error).__name__}: {error}"
