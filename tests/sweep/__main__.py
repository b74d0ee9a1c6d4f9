"""The command of the sweep, and its results as a section of docs/verified.md; see ci/sweep.sh."""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from importlib.metadata import version
from itertools import combinations
from pathlib import Path
from typing import Any

from tests.sweep import cases, launch
from tests.sweep.factors import FACTORS

FOLDER = Path("build/sweep")
SOURCES = sorted(Path("megatron_loss_agg").rglob("*.py"))
# Of this very package: another one's results say nothing about it.
STATE = hashlib.sha256(b"".join(path.read_bytes() for path in SOURCES)).hexdigest()[:12]
RESULTS = FOLDER / f"{STATE}.jsonl"
SECTION = Path("ci/sweep.md")
OUTCOMES = ("exact", "refused", "host refused", "WRONG", "HANG", "CRASH")
REAL, FAILED = OUTCOMES[:2], OUTCOMES[3:]

HEAD = """\
## Sweep of the host's flags

Written by `bash ci/sweep.sh`. Each launch is Megatron-Core {version}'s own `pretrain` with the
plugin, on 1 to 4 gloo ranks and data with uneven masks. `exact`: the change of every parameter in
one step is that of one process with the whole batch, which shares no code with the package, to 1e-5
norm-wise (4e-2 where activations or their gradients are of half precision, 1e-1 with experts, whose
tokens may then be routed otherwise; the largest error in fp32 was {error:.1e}). `refused`: an error
of ours, by name. `host refused`: the same error without the plugin. All pairs of values are covered
that the host takes together, apart from {missing} of {pairs}. {done} of {cases} cases were run.
"""


def known() -> dict[str, dict[str, Any]]:
    """The last result of every case."""
    if not RESULTS.exists():
        return {}
    return {line["key"]: line for line in map(json.loads, RESULTS.read_text().splitlines())}


def run(left: list[cases.Case]) -> None:
    for case in left:
        key = cases.key_of(case)
        found = launch.run_case(case, FOLDER / "logs")
        with RESULTS.open("a") as file:
            file.write(json.dumps({"key": key, **found, "case": case}) + "\n")
        print(f"{key} {found['outcome']} {found['text'][:150]}", flush=True)


def in_parallel(jobs: int) -> None:
    """One process for each job, since each has a server of ranks of its own."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.sweep", *sys.argv[1:], "--job"]
    workers = [subprocess.Popen([*command, str(job)]) for job in range(jobs)]
    for worker in workers:
        worker.wait()


def written(results: Iterable[dict[str, Any]]) -> str:
    """The section of these results."""
    rows = list(results)
    of_fp32 = (
        r for r in rows if r["case"]["precision"] == "fp32" and "fused" not in r["case"]["loss"]
    )
    missing, pairs = _uncovered(rows)
    head = HEAD.format(
        version=version("megatron-core"),
        error=max((r["error"] for r in of_fp32 if r["outcome"] == "exact"), default=0.0),
        missing=missing,
        pairs=pairs,
        done=len(rows),
        cases=len(cases.everything()),
    )
    found = Counter(row["outcome"] for row in rows)
    numbers = [str(len(rows)), *(str(found[outcome]) for outcome in OUTCOMES)]
    counts = _table(["launches", *OUTCOMES], [numbers])
    return "\n".join([head, counts, _by_value(rows), _refusals(rows), _left_out()])


def _by_value(rows: list[dict[str, Any]]) -> str:
    """Exact launches; the other outcomes are told by their texts."""
    exact = Counter(
        item for row in rows if row["outcome"] == "exact" for item in row["case"].items()
    )
    values = {factor: dict.fromkeys(row["case"][factor] for row in rows) for factor in FACTORS}
    lines = [
        [factor, ", ".join(f"`{value}` {exact[factor, value]}" for value in those)]
        for factor, those in values.items()
    ]
    return _table(["factor", "its values, each with its exact launches"], lines)


def _refusals(rows: list[dict[str, Any]]) -> str:
    found = Counter(
        (row["outcome"], _short(row["text"])) for row in rows if "refused" in row["outcome"]
    )
    lines = [[outcome, text, str(n)] for (outcome, text), n in sorted(found.items())]
    return _table(["", "in its words", "launches"], lines)


def _short(text: str) -> str:
    """A message without its numbers and addresses, on one line."""
    line = re.sub(r"\s+", " ", re.sub(r"[/\w.-]*/(?:build|lib)/\S*|0x\w+", "...", text)).strip()
    line = re.sub(r"\bN(, N)+", "N, ...", re.sub(r"\d+", "N", line))
    return (line[:157] + "..." if len(line) > 160 else line).replace("|", "/")


def _left_out() -> str:
    reasons = {reason: len(flags) for reason, flags in cases.left_out().items()}
    rows = sorted(reasons.items(), key=lambda item: -item[1])
    known = len(launch.host_flags())
    total = f"Of the host's {known} flags {known - sum(reasons.values())} are swept; the others:"
    table = _table(["left out since", "flags"], [[why, str(number)] for why, number in rows])
    return f"{total}\n\n{table}"


def _uncovered(rows: list[dict[str, Any]]) -> tuple[int, int]:
    """Pairs of values in no launch that got as far as the plugin; and all pairs."""
    wanted = {pair for case in cases.covering() for pair in combinations(case.items(), 2)}
    real = {
        pair
        for row in rows
        if row["outcome"] != "host refused"
        for pair in combinations(((name, row["case"][name]) for name in FACTORS), 2)
    }
    return len(wanted - real), len(wanted)


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> int:
    """Run what has no result yet; status 1 if a launch went wrong, hung or crashed."""
    parser = argparse.ArgumentParser(prog="ci/sweep.sh", description=__doc__)
    parser.add_argument("--part", type=int, help="so many cases, drawn by --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="launches at once")
    parser.add_argument("--again", nargs="+", default=[], help="outcomes that count for nothing")
    parser.add_argument("--job", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    rows = cases.everything()
    if args.part is not None:
        rows = random.Random(args.seed).sample(rows, args.part)
    if args.job is None and args.jobs > 1:
        in_parallel(args.jobs)
    else:
        found = known()
        done = {key for key, line in found.items() if line["outcome"] not in args.again}
        left = [case for case in rows if cases.key_of(case) not in done]
        run(left[args.job or 0 :: args.jobs])
    if args.job is not None:
        return 0
    found = known()
    results = [found[cases.key_of(case)] for case in rows if cases.key_of(case) in found]
    if args.part is None:
        SECTION.write_text(written(results))
    counts = Counter(line["outcome"] for line in results)
    real = sum(counts[outcome] for outcome in REAL)
    print(f"{real} launches of {len(rows)} exact or refused by name; {dict(counts)}")
    print(f"{counts['WRONG']} wrong, {counts['HANG']} hangs, {counts['CRASH']} crashes")
    return int(any(counts[outcome] for outcome in FAILED) or len(results) < len(rows))


if __name__ == "__main__":
    sys.exit(main())
