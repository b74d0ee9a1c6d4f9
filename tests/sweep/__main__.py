"""The command of the sweep; see ci/sweep.sh."""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from tests.sweep import cases, launch, table

FOLDER = Path("build/sweep")
SOURCES = sorted(Path("megatron_loss_agg").rglob("*.py"))
# Of this very package: another one's results say nothing about it.
STATE = hashlib.sha256(b"".join(path.read_bytes() for path in SOURCES)).hexdigest()[:12]
RESULTS = FOLDER / f"{STATE}.jsonl"
SECTION = Path("ci/sweep.md")
FAILED = ("WRONG", "HANG", "CRASH")


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


def chosen_by(args: argparse.Namespace) -> list[cases.Case]:
    rows = {"pairs": cases.covering, "alone": cases.alone, "all": cases.everything}[args.cases]()
    if args.part is not None:
        rows = random.Random(args.seed).sample(rows, args.part)
    return rows


def main() -> int:
    """Run what has no result yet; status 1 if a launch went wrong, hung or crashed."""
    parser = argparse.ArgumentParser(prog="ci/sweep.sh", description=__doc__)
    parser.add_argument("--part", type=int, help="so many cases, drawn by --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="launches at once")
    parser.add_argument("--cases", default="all", choices=("all", "pairs", "alone"))
    parser.add_argument("--again", nargs="+", default=[], help="outcomes that count for nothing")
    parser.add_argument("--job", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    rows = chosen_by(args)
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
    if args.part is None and args.cases == "all":
        SECTION.write_text(table.written(results))
    counts = Counter(line["outcome"] for line in results)
    real = sum(counts[outcome] for outcome in table.REAL)
    print(f"{real} launches of {len(rows)} exact or refused by name; {dict(counts)}")
    print(f"{counts['WRONG']} wrong, {counts['HANG']} hangs, {counts['CRASH']} crashes")
    return int(any(counts[outcome] for outcome in FAILED) or len(results) < len(rows))


if __name__ == "__main__":
    sys.exit(main())
