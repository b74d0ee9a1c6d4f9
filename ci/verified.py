"""Write ci/verified.md from test reports, one of each release of Megatron-Core.

    python ci/verified.py REPORT.xml ... > ci/verified.md

A report is pytest's ``--junitxml``; what is in all of them goes into the tables. The page ends with
ci/sweep.md, ci/frameworks.md and ci/next.md, which the scripts of these names write; of a table
with a line for each layout of ranks, the page has a column for each.
"""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from pathlib import Path

HEAD = """\
# Verified

Written by `bash ci/matrix.sh` from the reports of the tests, not by hand. Every number is measured
through the host, the real Megatron-Core of that release, on a CPU: its schedule, DDP and gradient
finalization over gloo ranks (DP 1 and 2, CP 1 and 2), in both layouts, with one and three
microbatches of unequal size, with and without `--calculate-per-token-loss`, in every mode: on the
newest release all combinations, on the others those in which every three of these have all.

Numbers are of comparisons and tests that hold: all of them, unless one is written as 15/16.
"""
GRADIENTS = ("tests.host.test_gradients", "test_gradient_is_that_of_the_whole_step")
SECTIONS = [Path(__file__).with_name(name) for name in ("sweep.md", "frameworks.md", "next.md")]
TITLES = {"float64": "largest error in fp64", "float32": "largest error in fp32"}


def properties(case: ElementTree.Element) -> dict[str, str]:
    return {p.attrib["name"]: p.attrib["value"] for p in case.iter("property")}


def passed(case: ElementTree.Element) -> bool:
    return all(case.find(outcome) is None for outcome in ("failure", "error", "skipped"))


def held(results: list[bool]) -> str:
    """The number that hold; and of how many, if not all."""
    return str(len(results)) if all(results) else f"{sum(results)}/{len(results)}"


def gradient_row(version: str, cases: list[ElementTree.Element]) -> str:
    worst: dict[str, float] = defaultdict(float)
    for case in cases:
        measured = properties(case)
        dtype = measured["dtype"]
        worst[dtype] = max(worst[dtype], float(measured["error"]))
    cells = [version, held(list(map(passed, cases))), *(f"{worst[d]:.1e}" for d in TITLES)]
    return f"| {' | '.join(cells)} |"


def read(path: str) -> tuple[str, list[ElementTree.Element]]:
    """The release that a report is about, and its cases."""
    suite = ElementTree.parse(path)
    released = suite.find(".//property[@name='megatron-core']")
    if released is None:
        sys.exit(f"{path} names no release of megatron-core; expected a report on tests/host")
    return released.attrib["value"], list(suite.iter("testcase"))


def title(case: ElementTree.Element) -> tuple[str, str]:
    """The module of a test, and its name without parameters."""
    return case.attrib["classname"], case.attrib["name"].partition("[")[0]


BY_RANKS = re.compile(r"^\| ranks \| aggregation \|.*\n.*\n((?:\|.*\n)+)", re.MULTILINE)
LARGEST = ("metrics", "stock's gradient")  # over all layouts of ranks


def by_aggregation(section: str) -> str:
    """``section``, whose tables of ranks and aggregations have a line for each aggregation."""
    return BY_RANKS.sub(lambda table: _pivot(table[1]), section)


def _pivot(rows: str) -> str:
    found: dict[str, dict[str, str]] = defaultdict(dict)  # by aggregation, and then by column
    columns: dict[str, None] = {}
    for row in rows.splitlines():
        ranks, aggregation, gradient, *others = (cell.strip() for cell in row.split("|")[1:-1])
        columns[ranks] = None
        cells = found[aggregation]
        if not gradient:  # of stock itself
            cells[ranks] = others[-1]
            continue
        cells[ranks] = gradient
        for name, cell in zip(LARGEST, others, strict=True):
            cells[name] = max(
                cells.get(name, ""), cell, key=lambda error: (error == "nan", float(error or 0))
            )
    head = ["aggregation", *columns, *LARGEST]
    lines = [[name, *(cells.get(c, "") for c in head[1:])] for name, cells in found.items()]
    return "".join(f"| {' | '.join(line)} |\n" for line in [head, ["---"] * len(head), *lines])


def main(paths: list[str]) -> None:
    reports = dict(map(read, paths))
    everywhere = set.intersection(*(set(map(title, cases)) for cases in reports.values()))
    print(HEAD)
    print("## Gradients\n")
    print("Norm-wise, relative to one fp64 process. The bound is 1e-14 in fp64, and in fp32 twice")
    print("the error of one unsplit fp32 process.\n")
    print(f"| Megatron-Core | comparisons that hold | {' | '.join(TITLES.values())} |")
    print("|---|---|---|---|")
    for version, cases in reports.items():
        print(gradient_row(version, [c for c in cases if title(c) == GRADIENTS]))
    print("\n## Everything else that ran\n")
    print(f"| test | {' | '.join(reports)} |")
    print(f"|---|{'---|' * len(reports)}")
    counts: dict[str, dict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))
    for version, cases in reports.items():
        for case in cases:
            module, name = title(case)
            if (module, name) in everywhere and (module, name) != GRADIENTS:
                counts[name.removeprefix("test_").replace("_", " ")][version].append(passed(case))
    for name, by_version in sorted(counts.items()):
        cells = [held(by_version[version]) for version in reports]
        print(f"| {name} | {' | '.join(cells)} |")
    for section in SECTIONS:
        print(f"\n{by_aggregation(section.read_text())}", end="")


if __name__ == "__main__":
    main(sys.argv[1:])
