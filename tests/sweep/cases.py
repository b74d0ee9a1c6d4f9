"""The cases, the command lines of their launches and references, and what comes of them.

A case has a value of every factor. Together they are a covering array over all pairs of values that
the host takes together; ``python -m tests.sweep.cases`` makes it anew.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from tests.distributed import RankFailed
from tests.host.harness import run_host_ranks
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
# Norm-wise and relative: of fp32, and where activations or their gradients are of half precision;
# the host's fused cross entropy rounds its gradient to bf16.
BOUNDS = {"fp32": 1e-5, "half": 4e-2, "half, experts": 1.5e-1}  # a token may change its expert

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
    *("--distributed-timeout-minutes", "6"),
]


def rate_of(case: Case) -> float:
    if case["precision"] == "fp32":
        return LR["fp32"]
    return LR["half, sums" if case["mode"] in ("sum", "sample_sum") else "half"]


def key_of(case: Case) -> str:
    return " ".join(case.values())


def model_argv(case: Case) -> list[str]:
    """The flags of the model and of the data."""
    layers = TOPOLOGIES[case["topology"]].layers
    flags = [*BASE, *MODEL[case["model"]].format(half=layers // 2).split()]
    if case["gradients"] == "torch-fsdp2":
        flags += ["--untie-embeddings-and-output-weights"]
    flags += [*DATA[case["data"]].split(), *MASKS[case["masks"]].split()]
    if "--position-embedding-type" not in flags:
        flags += ["--position-embedding-type", "rope"]
    return [*flags, "--num-layers", str(layers)]


def reference_argv(case: Case) -> list[str]:
    """For one process."""
    return [*model_argv(case), "--micro-batch-size", "1", "--train-iters", "1"]


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


def launches(case: Case, folder: str, plugin: bool = True) -> list[list[str]]:
    """The starts of the host, one after another; each goes on where the last one ended."""
    size, batch = batch_sizes(case)
    chosen = {**WAYS, "gradients": {**WAYS["gradients"], **WRAPPERS}}
    left_out = ("restart",) if plugin else ("restart", "aggregation")
    ways = [chosen[factor][case[factor]] for factor in WAYS if factor not in left_out]
    if plugin:
        ways.append(f"--loss-aggregation {MODES[case['mode']].flags}")
    told = " ".join(ways).format(eval_batch=2 * data_parallel_size(case), folder=folder)
    common = [*model_argv(case), *TRAINING, *told.split(), "--micro-batch-size", str(size)]
    common += TOPOLOGIES[case["topology"]].flags.split()
    number = ["--global-batch-size", str(batch)]
    loaded = WAYS["restart"][case["restart"]].split()
    common += _optimizer([*common, *loaded], rate_of(case))
    first = [*common, *([] if case["steps"] == "schedule" else number), *_schedule(case, batch)]
    if case["restart"] == "none":
        return [first]
    again = first
    if case["restart"] == "weights-only":  # without the schedules of learning rates and batch sizes
        again = [*common, *number, "--train-iters", str(iterations(case))]
    if case["restart"] == "finetune":  # starts with the first iteration
        again = [*common, *number, *_schedule({**case, "steps": "one"}, batch)]
    saved = ["--save", folder, "--save-interval", "1", "--exit-interval", "1"]
    return [[*first, *saved, *loaded[:2]], [*again, "--load", folder, *loaded]]


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
    """The length of the training; the learning rate rises from 0 before the last iteration."""
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


def on_ranks(ranks: int, function: str, *args: Any) -> list[Any]:
    """The results of this function of the script on each of so many ranks."""
    return run_host_ranks(_call, ranks, function, *args)


def _call(function: str, *args: Any) -> Any:
    from tests.sweep import script  # it imports the host, as only a rank may

    return getattr(script, function)(*args)


def run_case(case: Case, plugin: bool = True) -> dict[str, Any]:
    """Its outcome: ``exact``, ``refused``, ``host refused``, ``WRONG``, ``HANG`` or ``CRASH``."""
    try:
        return _compared(case, _launched(case, plugin))
    except RankFailed as failure:
        text = str(failure)
    ours, said = _ended(text)
    if ours:
        return {"outcome": "refused", "text": said}
    # The host's own doing, if it does the same without the plugin.
    try:
        _launched(case, plugin=False)
    except RankFailed as failure:
        _, of_stock = _ended(str(failure))
        if _kind(of_stock) == _kind(said) and not said.startswith("the server of ranks"):
            return {"outcome": "host refused", "text": of_stock}
        text += f"\nwithout the plugin: {failure}"
    return {"outcome": "HANG" if "were still running" in said else "CRASH", "text": text}


def _launched(case: Case, plugin: bool) -> list[Any]:
    """The ranks' results of the last launch."""
    ranks, results = TOPOLOGIES[case["topology"]].ranks, []
    with tempfile.TemporaryDirectory() as folder:
        for argv in launches(case, f"{folder}/saved", plugin):
            results = on_ranks(ranks, "rank_main", argv, plugin)
    return results


def _ended(text: str) -> tuple[bool, str]:
    """Whether an error of ours ended a rank; and the error, or the first line of another end."""
    told = re.search(r"^tests\.sweep\.script\.Ended: (.*)", text, re.MULTILINE)
    if told is None:
        return False, text.partition("\n")[0]
    ours, said = json.loads(told[1])
    return ours, said


def _kind(said: str) -> str:
    """The class of an error: its words may differ, since another rank may fail first."""
    return re.sub(r"\d+", "", said.partition(":")[0])


def _compared(case: Case, results: list[Any]) -> dict[str, Any]:
    of_ranks = {result.data_rank: result.last_step() for result in results if result.last_step()}
    step = [of_ranks[rank] for rank in sorted(of_ranks)]
    items = sorted(item for rank in step for microbatch in rank for item in microbatch)
    expected = expected_items(case)
    if expected is not None and items != expected:
        return {"outcome": "WRONG", "text": f"trained on the items {items}, not {expected}"}
    mode = MODES[case["mode"]]
    empty = "skip" if case["aggregation"] == "empty-skip" else "count"
    told = {"mode": mode.mode, "divisor": mode.divisor, "empty": empty}
    try:
        ((start, gradient),) = on_ranks(1, "reference_main", reference_argv(case), step, told)
    except RankFailed as failure:
        return {"outcome": "CRASH", "text": f"reference: {failure}"}
    rate = rate_of(case)
    errors = [_error(result.parameters, rate, start, gradient) for result in results]
    names = {name for result in results for name in result.parameters}
    if other := names ^ set(start):
        return {"outcome": "CRASH", "text": f"parameters differ: {sorted(other)}"}
    half = case["precision"] != "fp32" or "fused" in case["loss"]
    kind = "half, experts" if half and "moe" in case["model"] else "half" if half else "fp32"
    if all(error <= BOUNDS[kind] for error in errors):
        return {"outcome": "exact", "text": "", "error": max(errors)}
    return {"outcome": "WRONG", "text": f"errors of the ranks: {errors}"}


def _error(
    parameters: dict[str, Tensor],
    rate: float,
    start: dict[str, Tensor],
    gradient: dict[str, Tensor],
) -> float:
    """Of the change of one rank's parameters, norm-wise and relative."""
    off = size = 0.0
    for name, value in parameters.items():
        wanted = -rate * gradient[name]
        difference = value.double() - start[name].double() - wanted
        off += float(difference.square().sum())
        size += float(wanted.square().sum())
    return math.sqrt(off / size) if size else off  # a step without tokens changes nothing


# The host's flags.


def all_flags() -> list[str]:
    (found,) = on_ranks(1, "host_flags")
    return list(found)


def swept() -> set[str]:
    """Flags that some launch of the sweep is given, apart from the sweep's own."""
    told = [word for case in everything() for argv in launches(case, "") for word in argv]
    return {word for word in told if word.startswith("--") and not word.startswith("--sweep-")}


def left_out() -> dict[str, list[str]]:
    """Every other flag of the host, under the reason why it is not swept."""
    sections = (section.partition("\n") for section in LEFT_OUT.read_text().split("\n\n"))
    return {reason: flags.split() for reason, _, flags in sections}


def main() -> None:
    """Make the array, in as few cases as the library finds; it takes a minute."""
    from covertable import make

    conditions = [
        {"operator": "fn", "requires": [rule.one, rule.other], "evaluate": rule.holds}
        for rule in RULES
    ]
    values = {name: list(values) for name, values in FACTORS.items()}
    made = make(values, salt="0", constraints=conditions)
    rows = [list(FACTORS), *([case[name] for name in FACTORS] for case in made)]
    ARRAY.write_text("".join(",".join(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
