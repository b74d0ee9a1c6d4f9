"""The page of the GPU script: its head is written by hand, its results by the script."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "gpu.md"
RESULTS = "## Results\n"
DRY = "Dry run on a CPU: this tries the script, and is no evidence about a GPU."

Found = dict[str, dict[str, Any]]


def count(found: Found) -> collections.Counter[str]:
    """Goals met, missed and undecided; parts failed and not run."""
    counts: collections.Counter[str] = collections.Counter()
    for part in found.values():
        counts.update(f["verdict"] for f in part["figures"] if f["verdict"])
        for kind in ("failed", "could_not_run"):
            counts[kind] += len(part[kind])
    return counts


def summary(found: Found) -> str:
    """In one line."""
    n = count(found)
    return (
        f"Goals: {n['met']} met, {n['missed']} missed, {n['undecided']} undecided within the noise."
        f" {n['failed']} failed, {n['could_not_run']} could not run and count as nothing."
    )


def lines(name: str, part: dict[str, Any]) -> Iterator[str]:
    """Of one part, for the terminal."""
    yield f"\n{name}: {part['seconds']} s"
    for fact, value in part.get("facts", []):
        yield f"  {fact}: {value}"
    for figure in part["figures"]:
        verdict = f"{_goal(figure)} {figure['verdict']}".strip()
        yield f"  {figure['what']:44} {figure['where']:60} {_value(figure)}  {verdict}"
    for row in part["failed"]:
        yield f"  FAILED {row['what']}: {row['reason']}"
    for row in part["could_not_run"]:
        yield f"  could not run: {row['what']}: {row['reason']}"


def paths(out: Path, dry: bool, whole: bool) -> list[Path]:
    """Where the page goes; into the docs only with every part of a real run."""
    return [out / "gpu.md", PAGE] if whole and not dry else [out / "gpu.md"]


def write(path: Path, found: Found, dry: bool) -> None:
    """The page's head, as it stands, and the results; without leave to write, nothing."""
    head = PAGE.read_text(encoding="utf-8").partition(RESULTS)[0]
    text = "\n".join([head + RESULTS, *_results(found, dry), ""])
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        print(f"{path} cannot be written ({error})")


def _results(found: Found, dry: bool) -> Iterator[str]:
    if dry:
        yield f"**{DRY}**\n"
    yield summary(found)
    facts = [row for part in found.values() for row in part.get("facts", [])]
    if facts:
        yield "\n| machine | |\n|---|---|"
        yield from (f"| {name} | {_cell(value)} |" for name, value in facts)
    yield "\n| measured | where | figure | goal | |\n|---|---|---|---|---|"
    for part in found.values():
        for f in part["figures"]:
            cells = f["what"], f["where"], _value(f), _goal(f), f["verdict"]
            yield "| " + " | ".join(_cell(cell) for cell in cells) + " |"
    for kind, title in (("failed", "Failed"), ("could_not_run", "Could not run")):
        rows = [row for part in found.values() for row in part[kind]]
        if rows:
            yield f"\n| {title} | why |\n|---|---|"
            yield from (f"| {_cell(row['what'])} | {_cell(row['reason'])} |" for row in rows)
    yield "\n| part | seconds |\n|---|---|"
    yield from (f"| {name} | {part['seconds']} |" for name, part in found.items())


def _value(figure: dict[str, Any]) -> str:
    noise = f" ± {figure['noise']:.2g}" if figure["noise"] else ""
    return f"{figure['value']:.5g}{noise} {figure['unit']}"


def _goal(figure: dict[str, Any]) -> str:
    return "" if figure["goal"] is None else f"at most {figure['goal']:g}"


def _cell(text: str) -> str:
    """On one line, without what ends a cell."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
