"""The command of the sweep, and its results as docs/verification/sweep.md; see ci/sweep.sh."""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
from collections import Counter
from importlib.metadata import version
from itertools import combinations
from pathlib import Path
from typing import Any

from tests.sweep import cases
from tests.sweep.factors import FACTORS

# Of this very package and sweep: another one's results say nothing about it.
SOURCES = sorted([*Path("megatron_loss_agg").rglob("*.py"), *Path("tests/sweep").glob("*.py")])
STATE = hashlib.sha256(b"".join(path.read_bytes() for path in SOURCES)).hexdigest()[:12]
RESULTS = Path("build/sweep") / f"{STATE}.jsonl"
PAGE = Path("docs/verification/sweep.md")
OUTCOMES = ("exact", "refused", "host refused", "WRONG", "HANG", "CRASH")
GOOD = OUTCOMES[:3]
Rows = list[dict[str, Any]]

HEAD = """\
# Sweep of Megatron's flags

Written by `bash ci/sweep.sh`. Each launch is Megatron-Core {version}'s own `pretrain` with the
plugin, on 1 to 4 gloo ranks and data with uneven masks. `exact`: the change of every parameter in
one step is that of one process with the whole batch, which shares no code with the package, to 1e-5
norm-wise (4e-2 where activations or their gradients are of half precision, 0.15 with experts, whose
tokens may then be routed otherwise; the largest error in fp32 was {error:.1e}). `refused`: an error
of ours, by name. `host refused`: an error of the same class without the plugin. All pairs of values
are covered that the host takes together, apart from {missing} of {pairs}. {done} of {cases} cases
were run.
"""


def known() -> dict[str, dict[str, Any]]:
    """The last result of every case."""
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    return {cases.key_of(line["case"]): line for line in map(json.loads, lines)}


def run(case: cases.Case) -> None:
    found = cases.run_case(case)
    with RESULTS.open("a") as file:
        file.write(json.dumps({**found, "case": case}) + "\n")
    print(f"{cases.key_of(case)}: {found['outcome']} {found['text'][:150]}", flush=True)


def written(rows: Rows) -> str:
    """The page of these results."""
    of_fp32 = [
        row["error"]
        for row in rows
        if row["outcome"] == "exact"
        and row["case"]["precision"] == "fp32"
        and "fused" not in row["case"]["loss"]
    ]
    missing, pairs = _uncovered(rows)
    head = HEAD.format(
        version=version("megatron-core"),
        error=max(of_fp32, default=0.0),
        missing=missing,
        pairs=pairs,
        done=len(rows),
        cases=len(cases.everything()),
    )
    found = Counter(row["outcome"] for row in rows)
    numbers = [str(len(rows)), *(str(found[outcome]) for outcome in OUTCOMES)]
    counts = _table(["launches", *OUTCOMES], [numbers])
    return "\n".join([head, counts, _by_value(rows), _refusals(rows), _left_out()])


def _by_value(rows: Rows) -> str:
    """Exact launches; the other outcomes are told by their texts."""
    exact = Counter(x for row in rows if row["outcome"] == "exact" for x in row["case"].items())
    lines = []
    for factor in FACTORS:
        values = dict.fromkeys(row["case"][factor] for row in rows)
        lines.append([factor, ", ".join(f"`{value}` {exact[factor, value]}" for value in values)])
    return _table(["factor", "its values, each with its exact launches"], lines)


def _refusals(rows: Rows) -> str:
    refused = [row for row in rows if "refused" in row["outcome"]]
    found = Counter((row["outcome"], _short(row["text"])) for row in refused)
    lines = [[outcome, text, str(n)] for (outcome, text), n in sorted(found.items())]
    return _table(["", "in its words", "launches"], lines)


def _short(text: str) -> str:
    """A message without its numbers and addresses, on one line."""
    line = re.sub(r"\s+", " ", re.sub(r"[/\w.-]*/(?:build|lib)/\S*|0x\w+", "...", text)).strip()
    line = re.sub(r"\bN(, N)+", "N, ...", re.sub(r"\d+", "N", line))
    return (line[:157] + "..." if len(line) > 160 else line).replace("|", "/")


def _left_out() -> str:
    number = {reason: len(flags) for reason, flags in cases.left_out().items()}
    rows = [[why, str(number[why])] for why in sorted(number, key=lambda why: -number[why])]
    known = len(cases.all_flags())
    total = f"Of the host's {known} flags {known - sum(number.values())} are swept; the others:"
    return f"{total}\n\n{_table(['left out since', 'flags'], rows)}"


def _uncovered(rows: Rows) -> tuple[int, int]:
    """Pairs of values in no launch that got as far as the plugin; and all pairs."""
    wanted = {pair for case in cases.covering() for pair in combinations(case.items(), 2)}
    real = [row["case"] for row in rows if row["outcome"] != "host refused"]
    return len(wanted - {pair for x in real for pair in combinations(x.items(), 2)}), len(wanted)


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def in_parallel(jobs: int) -> None:
    """One process for each job, since each has a server of ranks of its own."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.sweep", *sys.argv[1:], "--job"]
    workers = [subprocess.Popen([*command, str(job)]) for job in range(jobs)]
    for worker in workers:
        worker.wait()


def main() -> int:
    """Run what has no good result yet; status 1 if a launch went wrong, hung or crashed."""
    parser = argparse.ArgumentParser(prog="ci/sweep.sh", description=__doc__)
    parser.add_argument("values", nargs="*", help="only cases that have all of these")
    parser.add_argument("--jobs", type=int, default=1, help="launches at once")
    parser.add_argument("--job", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    chosen = [case for case in cases.everything() if {*args.values} <= {*case.values()}]
    wanted = {cases.key_of(case): case for case in chosen}
    if not wanted:
        parser.error(f"no case has {' and '.join(args.values)}")
    if args.job is None and args.jobs > 1:
        in_parallel(args.jobs)
    else:
        good = {key for key, line in known().items() if line["outcome"] in GOOD}
        left = [case for key, case in wanted.items() if key not in good]
        for case in left[args.job or 0 :: args.jobs]:
            run(case)
    if args.job is not None:
        return 0
    found = known()
    results = [found[key] for key in wanted if key in found]
    if not args.values:
        PAGE.write_text(written(results))
    counts = Counter(line["outcome"] for line in results)
    print(dict(counts))
    return int(sum(counts[outcome] for outcome in GOOD) < len(wanted))


if __name__ == "__main__":
    sys.exit(main())
