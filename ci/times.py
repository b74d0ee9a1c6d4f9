"""Print where the time of `.ci/run` goes, from build/times and the tests' reports.

    python ci/times.py

A step's minutes are by the clock; those of a folder or file are the sum over its tests, several of
which run at the same time.
"""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

BUILD = Path(__file__).parents[1] / "build"
LONGEST = 12


def table(head: tuple[str, str], rows: Iterable[tuple[str, float]]) -> None:
    print(f"\n{head[0]:60} {head[1]}")
    for name, seconds in rows:
        print(f"{name:60} {seconds / 60:7.1f}")


def main() -> None:
    times = BUILD / "times"  # of each step: its seconds and its name
    lines = times.read_text().splitlines() if times.exists() else []
    steps = [(name, float(seconds)) for seconds, _, name in (x.partition(" ") for x in lines)]
    table(("step", "minutes"), [*steps, ("all", sum(seconds for _, seconds in steps))])
    folders: Counter[str] = Counter()
    files: Counter[str] = Counter()
    releases = []
    for report in sorted((BUILD / "verified").glob("*.xml")):
        suite = ElementTree.parse(report).getroot().find("testsuite")
        assert suite is not None
        releases.append((f"pytest on {report.stem}", float(suite.attrib["time"])))
        for case in suite.iter("testcase") if report.stem == "newest" else ():
            folder, _, file = case.attrib["classname"].removeprefix("tests.").rpartition(".")
            folders[folder or "tests"] += float(case.attrib["time"])
            files[f"{folder or 'tests'}/{file}"] += float(case.attrib["time"])
    table(("of these", "minutes"), releases)
    table(("tests on the newest release, by folder", "minutes of tests"), folders.most_common())
    table(("longest files", "minutes of tests"), files.most_common(LONGEST))


if __name__ == "__main__":
    main()
