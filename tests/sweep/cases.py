"""The cases, and from a case to the command lines of its launches and of its reference.

A case has a value of every factor. Together they are a covering array over all pairs of values that
the host takes together; ``python -m tests.sweep.cases`` makes it anew.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from tests.sweep.data import SEQ_LENGTH
from tests.sweep.factors import (
    BATCHES,
    DATA,
    EXPERTS,
    FACTORS,
    MASKS,
    MODEL,
    MODES,
    RULES,
    TOPOLOGIES,
    WAYS,
    WRAPPERS,
)

Case = dict[str, str]  # factor -> value
ARRAY = Path(__file__).with_name("array.csv")
LEFT_OUT = Path(__file__).with_name("left_out.txt")

# Powers of two: the change of a parameter is then its gradient, rounded once. What fp16 can hold
# after a step is less, and the gradients of sums are larger.
LR = {"fp32": 1024.0, "half": 32.0, "half, sums": 0.5}
ADAM_EPS = 1e7  # so far above any gradient that Adam's first step is SGD's, to 1e-7

BASE = f"""
    --hidden-size 16 --ffn-hidden-size 32 --num-attention-heads 2 --kv-channels 8
    --attention-dropout 0 --hidden-dropout 0 --seq-length {SEQ_LENGTH}
    --max-position-embeddings {SEQ_LENGTH} --make-vocab-size-divisible-by 32
""".split()
TRAINING = [
    *("--lr-decay-style", "constant", "--weight-decay", "0", "--sgd-momentum", "0"),
    *("--adam-beta1", "0", "--adam-beta2", "0", "--log-interval", "1", "--num-workers", "0"),
    *("--distributed-timeout-minutes", "2"),
]


class Launch(NamedTuple):
    """One start of the host: its ranks, and what each is told."""

    ranks: int
    argv: list[str]


def rate_of(case: Case) -> float:
    if case["precision"] == "fp32":
        return LR["fp32"]
    return LR["half, sums" if case["mode"] in ("sum", "sample_sum") else "half"]


def key_of(case: Case) -> str:
    """Of the case and of what it tells the host."""
    told = [case, reference_argv(case), [launch.argv for launch in launches(case, "")]]
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:12]


def reference_argv(case: Case) -> list[str]:
    """The flags of the model and of the data, for one process."""
    model = MODEL[case["model"]].format(half=TOPOLOGIES[case["topology"]].layers // 2)
    if case["gradients"] == "torch-fsdp2":
        model += " --untie-embeddings-and-output-weights"
    flags = [*BASE, *model.split(), *DATA[case["data"]].split(), *MASKS[case["masks"]].split()]
    if "--position-embedding-type" not in flags:
        flags += ["--position-embedding-type", "rope"]
    layers = str(TOPOLOGIES[case["topology"]].layers)
    return [*flags, "--num-layers", layers, "--micro-batch-size", "1", "--train-iters", "1"]


def data_parallel_size(case: Case) -> int:
    topology = TOPOLOGIES[case["topology"]]
    return topology.ranks // topology.divided


def batch_sizes(case: Case) -> tuple[int, int]:
    """Samples of a microbatch, and of a step."""
    size, number = BATCHES[case["batches"]]
    return size, size * number * data_parallel_size(case)


def iterations(case: Case) -> int:
    """The last iteration, which alone changes the model: the learning rate is 0 before."""
    return {"one": 1, "skip-second": 3}.get(case["steps"], 2)


def launches(case: Case, folder: str, plugin: bool = True) -> list[Launch]:
    """The starts of the host, one after another; each goes on where the last one ended."""
    topology = TOPOLOGIES[case["topology"]]
    size, batch = batch_sizes(case)
    chosen = {**WAYS, "gradients": {**WAYS["gradients"], **WRAPPERS}}
    ways = " ".join(chosen[factor][case[factor]] for factor in WAYS if factor != "restart")
    if not plugin:
        ways = ways.replace(WAYS["aggregation"][case["aggregation"]], "")
    mode = f"--loss-aggregation {MODES[case['mode']].flags}" if plugin else ""
    ways = ways.format(eval_batch=2 * data_parallel_size(case), folder=folder)
    common = [*reference_argv(case)[:-4], *TRAINING, *topology.flags.split(), *ways.split()]
    common += [*mode.split(), "--micro-batch-size", str(size)]
    if case["steps"] != "schedule":
        common += ["--global-batch-size", str(batch)]
    loaded = WAYS["restart"][case["restart"]].split()
    common += _optimizer([*common, *loaded], rate_of(case))
    first = [*common, *_schedule(case, batch)]
    if case["restart"] == "none":
        return [Launch(topology.ranks, first)]
    saved = ["--save", folder, "--save-interval", "1", "--exit-interval", "1"]
    kind = loaded[:2]
    again = first
    if case["steps"] == "schedule":  # of batch sizes, which a second launch has not
        common += ["--global-batch-size", str(batch)]
    if case["restart"] == "weights-only":  # without the schedule of learning rates
        again = [*common, "--train-iters", str(iterations(case))]
    if case["restart"] == "finetune":  # starts with the first iteration
        again = [*common, *_schedule({**case, "steps": "one"}, batch)]
    return [
        Launch(topology.ranks, [*first, *saved, *kind]),
        Launch(topology.ranks, [*again, "--load", folder, *loaded]),
    ]


def _optimizer(flags: list[str], rate: float) -> list[str]:
    if "adam" in flags:
        rate *= ADAM_EPS
        chosen = ["--optimizer", "adam", "--adam-eps", str(ADAM_EPS)]
    else:
        chosen = ["--optimizer", "sgd"]
    if "--clip-grad" not in flags:
        chosen += ["--clip-grad", "0"]
    return [*chosen, "--lr", str(rate), "--min-lr", "0"]


def _schedule(case: Case, batch: int) -> list[str]:
    """How long to train; the learning rate rises from 0 before the last iteration."""
    steps = case["steps"]
    if steps == "one":
        return ["--train-iters", "1"]
    if steps == "samples":
        return ["--train-samples", str(2 * batch), "--lr-warmup-samples", str(batch)]
    if steps == "schedule":
        small = str(BATCHES[case["batches"]][0] * data_parallel_size(case))
        return [
            # It counts tokens.
            *("--step-batch-size-schedule", f"0:{small} {int(small) * SEQ_LENGTH}:{batch}"),
            *("--train-samples", str(int(small) + batch), "--lr-warmup-samples", small),
        ]
    if steps == "skip-first":  # which the schedule of learning rates does not count
        return ["--train-iters", "2"]
    return ["--train-iters", str(iterations(case)), "--lr-warmup-iters", "1"]


def expected_items(case: Case) -> list[int] | None:
    """Items of the last step, where the host reads its data in order."""
    if case["loader"].startswith("cyclic"):
        return None
    _, batch = batch_sizes(case)
    before = (iterations(case) - 1) * batch
    if case["steps"] == "schedule":
        before = BATCHES[case["batches"]][0] * data_parallel_size(case)
    if case["restart"] == "finetune":
        before = 0
    return list(range(before, before + batch))


def allowed(values: Mapping[str, str]) -> bool:
    """By the rules on factors that are among ``values``."""
    return all(rule.holds(values) for rule in RULES if {rule.one, rule.other} <= values.keys())


def covering() -> list[Case]:
    """The committed array: every pair of values that `RULES` allow."""
    rows = (line.split(",") for line in ARRAY.read_text().splitlines()[1:])
    return [dict(zip(FACTORS, row, strict=True)) for row in rows]


def make_array() -> list[Case]:
    """In as few cases as the library finds; it takes a minute."""
    from covertable import make

    conditions = [
        {"operator": "fn", "requires": [rule.one, rule.other], "evaluate": rule.holds}
        for rule in RULES
    ]
    values = {name: list(values) for name, values in FACTORS.items()}
    return list(make(values, salt="0", constraints=conditions))


def first_values() -> Case:
    return {name: next(iter(values)) for name, values in FACTORS.items()}


def alone() -> list[Case]:
    """Every value of every factor, with the first values of the others."""
    first, rows = first_values(), []
    for name, values in FACTORS.items():
        for value in values:
            case = {**first, "steps": "two", "batches": "1x6", "loss": "per-token", name: value}
            if case["topology"] in EXPERTS:
                case["model"] = "moe"
            rows.append(case)
    for value in [*WRAPPERS, *FACTORS["gradients"]]:
        rows.append({**first, "topology": "dp2", "steps": "two", "gradients": value})
    return [row for row in rows if allowed(row)]


def everything() -> list[Case]:
    """Both, each case once."""
    rows = {key_of(case): case for case in [*alone(), *covering()]}
    return list(rows.values())


def swept() -> set[str]:
    """Flags that some launch of the sweep is given, apart from the sweep's own."""
    told = [word for case in everything() for launch in launches(case, "") for word in launch.argv]
    return {word for word in told if word.startswith("--") and not word.startswith("--sweep-")}


def left_out() -> dict[str, list[str]]:
    """Every other flag of the host, under the reason why it is not swept."""
    sections = (section.partition("\n") for section in LEFT_OUT.read_text().split("\n\n"))
    return {reason: flags.split() for reason, _, flags in sections}


if __name__ == "__main__":
    made = [",".join(case[name] for name in FACTORS) for case in make_array()]
    ARRAY.write_text("\n".join([",".join(FACTORS), *made, ""]))
