"""The cases: a covering array over all pairs of values that the host takes together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.sweep.cases import Case, key_of
from tests.sweep.factors import FACTORS, TOPOLOGIES, WRAPPERS

ARRAY = Path(__file__).with_name("array.csv")

Rule = tuple[tuple[str, ...], Callable[[Case], bool]]

EXPERTS = ("ep2", "ep2-cp2", "ep2-pp2", "ep2-tp2-sp", "etp2")

AVERAGE = ("average", "distributed-gather-unaligned")
EVEN = dict.fromkeys(("vpp2", "vpp2-dp2", "vpp2-cp2"), ("1x2", "2x2", "1x6"))
EVEN["vpp2-group"] = ("1x3", "1x6")
DIVISIBLE = [name for name, t in TOPOLOGIES.items() if t.ranks // t.divided > 1 or "cp" in name]
PLAIN_TP = ("tp2-dp2", "tp2-pp2-mapping")


def _moe(case: Case) -> bool:
    return case["model"].startswith("moe")


# What the host refuses, by the factors that it depends on, each with the host's reason.
RULES: tuple[Rule, ...] = (
    # Experts to divide.
    (("topology", "model"), lambda c: c["topology"] not in EXPERTS or _moe(c)),
    # A context-parallel group for each sample adds token counts.
    (("topology", "loss"), lambda c: c["topology"] != "hybrid-cp" or "per-token" in c["loss"]),
    # Averaging in the collective leaves no sum to divide by the number of tokens.
    (
        ("gradients", "loss"),
        lambda c: c["gradients"] not in AVERAGE or "per-token" not in c["loss"],
    ),
    # Two of these together.
    (("model", "recompute"), lambda c: c["recompute"] != "distributed" or not _moe(c)),
    (
        ("topology", "gradients"),
        lambda c: c["topology"] != "hybrid-cp" or c["gradients"] not in AVERAGE,
    ),
    # A whole number of microbatches for each group of them.
    (
        ("topology", "batches"),
        lambda c: not c["topology"].startswith("vpp") or c["batches"] in EVEN[c["topology"]],
    ),
    # Two instances of the distributed optimizer share the data-parallel ranks.
    (
        ("topology", "gradients"),
        lambda c: c["gradients"] != "distributed-instances" or c["topology"] in DIVISIBLE,
    ),
    # Recomputed activations are divided over tensor-parallel ranks, unless sequences are.
    (
        ("topology", "recompute"),
        lambda c: c["recompute"] != "distributed" or c["topology"] in PLAIN_TP,
    ),
    # Refused over pipeline stages, where stock Megatron's gradients are wrong, too.
    (
        ("gradients", "loss"),
        lambda c: c["gradients"] != "distributed-instances" or "per-token" not in c["loss"],
    ),
    # Two of these together.
    (
        ("topology", "gradients"),
        lambda c: c["topology"] != "hybrid-cp" or c["gradients"] != "distributed-instances",
    ),
    # Experts and tensor parallelism without sequence parallelism.
    (("topology", "model"), lambda c: c["topology"] not in PLAIN_TP or not _moe(c)),
    # Stages in the middle get no attention mask, so documents see one another there.
    (
        ("topology", "data"),
        lambda c: not c["topology"].startswith("vpp") or c["data"] != "documents-reset-all",
    ),
    # Tied embeddings of a multi-token prediction stage differ from the first stage's.
    (("topology", "model"), lambda c: "pp2" not in c["topology"] or c["model"] != "mtp"),
    # Skipped iterations read one iterator, and no part of a pack for context parallelism.
    (("topology", "steps"), lambda c: not _divided(c) or not c["steps"].startswith("skip")),
    # The host divides such a group's samples over its ranks itself.
    (("topology", "loader"), lambda c: c["topology"] != "hybrid-cp" or "cyclic" not in c["loader"]),
    # A run that skips its first iteration does not stop after it.
    (("steps", "restart"), lambda c: c["steps"] != "skip-first" or c["restart"] == "none"),
    # The saved step is not the last one.
    (("steps", "restart"), lambda c: c["steps"] != "one" or c["restart"] == "none"),
)


def _divided(case: Case) -> bool:
    return case["topology"].startswith("vpp") or "cp" in case["topology"]


def covering() -> list[Case]:
    """The committed array: every pair of values that `RULES` allow."""
    names = list(FACTORS)
    rows = (line.split(",") for line in ARRAY.read_text().splitlines()[1:])
    return [dict(zip(names, row, strict=True)) for row in rows]


def make_array() -> list[Case]:
    """In as few cases as the library finds; it takes a minute."""
    factors = {name: list(values) for name, values in FACTORS.items()}
    from covertable import make

    return list(make(factors, salt="0", constraints=[_condition(rule) for rule in RULES]))


def alone() -> list[Case]:
    """Every value of every factor, with the first values of the others."""
    first = {name: next(iter(values)) for name, values in FACTORS.items()}
    rows = []
    for name, values in FACTORS.items():
        for value in values:
            case = {**first, "steps": "two", "batches": "1x6", "loss": "per-token", name: value}
            if case["topology"] in EXPERTS:
                case["model"] = "moe"
            rows.append(case)
    for value in [*WRAPPERS, *FACTORS["gradients"]]:
        rows.append({**first, "topology": "dp2", "steps": "two", "gradients": value})
    return [row for row in rows if all(rule(row) for _, rule in RULES)]


def everything() -> list[Case]:
    """Both, each case once."""
    rows = {key_of(case): case for case in [*alone(), *covering()]}
    return list(rows.values())


def allowed(pair: dict[str, str]) -> bool:
    """Whether some case has these values of two factors: by the rules on these two alone."""
    return all(rule(pair) for names, rule in RULES if set(names) <= set(pair))


def _condition(rule: Rule) -> dict[str, Any]:
    keys, allowed = rule
    return {"operator": "fn", "requires": list(keys), "evaluate": allowed}


if __name__ == "__main__":
    lines = [
        ",".join(FACTORS),
        *(",".join(case[name] for name in FACTORS) for case in make_array()),
    ]
    ARRAY.write_text("\n".join([*lines, ""]))
