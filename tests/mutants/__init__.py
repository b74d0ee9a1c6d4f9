"""Mutants: small defects of the package, each with the tests that must fail on it.

`mutants.toml` is the list, and `python -m tests.mutants` runs it. A test that fails on no mutant may
still be worth its lines; one that a mutant survives is too weak.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import NamedTuple

import tomllib

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_name("mutants.toml")


class Mutant(NamedTuple):
    """One change of one file of the package."""

    area: str
    file: str  # in megatron_loss_agg/
    old: str  # occurs once in the file
    new: str
    why: str  # the defect, in a few words
    tests: str  # arguments of pytest: at least one of these tests must fail

    @property
    def path(self) -> str:
        return f"megatron_loss_agg/{self.file}"

    @property
    def name(self) -> str:
        return f"{self.area}: {self.file}: {self.why}"

    def applied_to(self, text: str) -> str:
        """The changed text of the file; ValueError or SyntaxError if it cannot be."""
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: {text.count(self.old)} times in it: {self.old!r}")
        changed = text.replace(self.old, self.new)
        if changed == text:
            raise ValueError(f"{self.name}: changes nothing")
        ast.parse(changed)
        return changed


def read_mutants() -> list[Mutant]:
    """The list. An area gives the tests of those of its mutants that have none of their own."""
    areas = tomllib.loads(LIST.read_text(encoding="utf-8"))["area"]
    return [
        Mutant(area["name"], area["file"], old, new, why, *(tests or [area["tests"]]))
        for area in areas
        for old, new, why, *tests in area["mutants"]
    ]
