"""The sweep's results as a section of docs/verified.md."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from importlib.metadata import version
from itertools import combinations
from typing import Any

from tests.sweep import flags
from tests.sweep.cases import Case, covering, everything
from tests.sweep.factors import FACTORS
from tests.sweep.launch import host_flags

OUTCOMES = ("exact", "refused", "host refused", "WRONG", "HANG", "CRASH")
REAL = OUTCOMES[:2]

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


def written(results: Iterable[dict[str, Any]]) -> str:
    rows = list(results)
    exact = [r["error"] for r in rows if r["outcome"] == "exact" and _is_fp32(r["case"])]
    missing, pairs = _uncovered(rows)
    head = HEAD.format(
        version=version("megatron-core"),
        error=max(exact, default=0.0),
        missing=missing,
        pairs=pairs,
        done=len(rows),
        cases=len(everything()),
    )
    return "\n".join([head, _counts(rows), _by_value(rows), _refusals(rows), _left_out()])


def _is_fp32(case: Case) -> bool:
    return case["precision"] == "fp32" and "fused" not in case["loss"]


def _counts(rows: list[dict[str, Any]]) -> str:
    found = Counter(r["outcome"] for r in rows)
    cells = [str(found[outcome]) for outcome in OUTCOMES]
    return _table(["launches", *OUTCOMES], [[str(len(rows)), *cells]])


def _by_value(rows: list[dict[str, Any]]) -> str:
    found: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for row in rows:
        for factor, value in row["case"].items():
            found[factor, value][row["outcome"]] += 1
    lines = [
        [factor, f"`{value}`", *(str(counts[outcome]) for outcome in OUTCOMES)]
        for (factor, value), counts in sorted(
            found.items(), key=lambda item: list(FACTORS).index(item[0][0])
        )
    ]
    return _table(["factor", "value", *OUTCOMES], lines)


def _refusals(rows: list[dict[str, Any]]) -> str:
    found = Counter(
        (row["outcome"], _short(row["text"])) for row in rows if "refused" in row["outcome"]
    )
    lines = [[outcome, text, str(n)] for (outcome, text), n in sorted(found.items())]
    return _table(["", "in its words", "launches"], lines)


def _short(text: str) -> str:
    """A message without its numbers and addresses, on one line."""
    line = re.sub(r"\s+", " ", re.sub(r"[/\w.-]*/(?:build|lib)/\S*|0x\w+", "...", text)).strip()
    line = re.sub(r"\d+", "N", line)
    return (line[:157] + "..." if len(line) > 160 else line).replace("|", "/")


def _left_out() -> str:
    known = host_flags()
    reasons = Counter(filter(None, map(flags.reason, known)))
    number = len(known) - reasons.total()
    total = f"Of the host's {len(known)} flags {number} are swept; the others:\n\n"
    return total + _table(
        ["left out since", "flags"], [[w, str(n)] for w, n in reasons.most_common()]
    )


def _uncovered(rows: list[dict[str, Any]]) -> tuple[int, int]:
    """Pairs of values in no launch that got as far as the plugin; and all pairs."""
    wanted = {pair for case in covering() for pair in combinations(case.items(), 2)}
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
