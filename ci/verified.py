"""Print docs/verification/index.md from test reports, one of each release of Megatron-Core.

    python ci/verified.py REPORT.xml ... > docs/verification/index.md

A report is pytest's ``--junitxml``; what is in all of them goes into the tables.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict

HEAD = """\
# What was verified

Written by `bash ci/matrix.sh` from the reports of the tests, not by hand. Every number is measured
through Megatron, the real Megatron-Core of that release, on a CPU: its schedule, DDP and gradient
finalization over gloo ranks (DP 1 and 2, CP 1 and 2), in both layouts, with one and three
microbatches of unequal size, with and without `--calculate-per-token-loss`, in every mode: in
combinations in which every three of these have all of theirs.

Numbers are of comparisons and tests that hold: all of them, unless one is written as 15/16. Other
pages have the [sweep of Megatron's flags](sweep.md), the [frameworks](frameworks.md), and the
[next release](next.md) of Megatron-Core.
"""
GRADIENTS = ("tests.host.test_gradients", "test_gradient_is_that_of_the_whole_step")
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


if __name__ == "__main__":
    main(sys.argv[1:])
