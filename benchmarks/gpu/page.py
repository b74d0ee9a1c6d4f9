"""The page of the GPU script: its head is written by hand, its results by the script."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.results import counted, goal_in_words, value_in_words

PAGE = Path(__file__).parents[1] / "gpu.md"
RESULTS = "## Results\n"
DRY = "Dry run on a CPU: this tries the script, and is no evidence about a GPU."

PartResults = dict[str, dict[str, Any]]
"""By part: its rows, by kind."""


def summary(n: Counter[str]) -> str:
    """The numbers of `counted` in one line."""
    return (
        f"Goals: {n['met']} met, {n['missed']} missed, {n['undecided']} undecided within the noise."
        f" {n['failed']} failed, {n['could_not_run']} could not run and count as nothing."
    )


def paths(out: Path, dry: bool, whole: bool) -> list[Path]:
    """The files to write; the repository's page only after every part of a real run."""
    return [out / "gpu.md", PAGE] if whole and not dry else [out / "gpu.md"]


def write(path: Path, parts: PartResults, dry: bool) -> None:
    """Write the page's head, unchanged, and the results."""
    head = PAGE.read_text(encoding="utf-8").partition(RESULTS)[0]
    path.write_text("\n".join([head + RESULTS, *_results(parts, dry), ""]), encoding="utf-8")


def _results(parts: PartResults, dry: bool) -> Iterator[str]:
    if dry:
        yield f"**{DRY}**\n"
    yield summary(counted([*parts.values()]))
    yield "\n| measured | where | figure | goal | |\n|---|---|---|---|---|"
    for part in parts.values():
        for f in part["figures"]:
            yield _row(f["what"], f["where"], value_in_words(f), goal_in_words(f), f["verdict"])
    for kind in ("failed", "could_not_run", "facts"):
        rows = [row for part in parts.values() for row in part.get(kind, [])]
        if rows:
            yield f"\n| {kind.replace('_', ' ')} | |\n|---|---|"
            yield from (_row(row["what"], row["reason"]) for row in rows)


def _row(*cells: str) -> str:
    """A row of a table, without line ends and bars inside its cells."""
    texts = (" ".join(c.split()).replace("|", "\\|").replace("<", "&lt;") for c in cells)
    return f"| {' | '.join(texts)} |"
