"""Any loop on Megatron-Core's schedules: the flags reach it, or end the run.

Real scripts, one process a rank, by the launcher or with the lines that the patches add.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from megatron_loss_agg.mcore.flags import VARIABLE
from tests.launch.processes import LAUNCHER, MODE, NO_EFFECT, PATCHED, run

pytestmark = pytest.mark.host

# Of loops of their own on Megatron-Core: a model, and a step by some schedule.
HOST = """
import argparse
import torch
import torch.distributed as dist
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from tests.host import gpt
from tests.host.steps import Counted

dist.init_process_group("gloo")
gpt.initialize()
model = gpt.ddp_model()
"""

# With a parser and an optimizer of its own. SCHEDULE is how it takes Megatron's schedule.
OWN_LOOP = """
print(argparse.ArgumentParser().parse_args())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
reports = gpt.run_step(None, model, Counted(dist.get_rank()), 2, schedule=SCHEDULE)
optimizer.step()
print("stepped with", *sorted(reports[0]))
"""

# A step of Megatron's optimizer without any token.
EMPTY_STEP = f"""{HOST}
config = OptimizerConfig(optimizer="adam", lr=0.1, min_lr=0.1, weight_decay=0.5, clip_grad=0.0)
optimizer = get_megatron_optimizer(config, [model])
for empty in (False, True, False):
    before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
    gpt.run_step(None, model, Counted(0, active=() if empty else (0,)), 2)
    stepped = optimizer.step()[0]
    after = torch.cat([p.detach().flatten() for p in model.parameters()])
    print("empty", empty, "stepped", stepped, "moved", not torch.equal(before, after))
    optimizer.zero_grad()
"""

# Neither Megatron's parser nor its schedule; OPTIMIZER is a class, or None.
NO_PARSER = """
import torch

weight = torch.ones(3, requires_grad=True)
optimizer = OPTIMIZER and OPTIMIZER([weight], lr=0.1)
weight.square().sum().backward()
if optimizer:
    optimizer.step()
print("stepped")
"""


def loop(schedule: str = "get_forward_backward_func()", before: str = "") -> str:
    return before + HOST + OWN_LOOP.replace("SCHEDULE", schedule)


def without_parser(optimizer: str) -> str:
    return NO_PARSER.replace("OPTIMIZER", optimizer)


@dataclass(frozen=True)
class Run:
    """A script, how it is started, the exit code of every rank, and how often it says what."""

    script: str
    code: int
    said: dict[str, int]
    flags: tuple[str, ...] = MODE
    ranks: int = 1
    starter: tuple[str, ...] = LAUNCHER
    forked: bool = True
    environment: dict[str, str] = field(default_factory=dict)


EARLY = "from megatron.core.pipeline_parallel import get_forward_backward_func as early\n"
TAKEN = """
from megatron.core.pipeline_parallel import schedules
early = schedules.forward_backward_no_pipelining
"""
OWN_HOOK = "LossHook(LossAggregation(mode='sum')).wrap(get_forward_backward_func())"
IMPORTS = """
from megatron_loss_agg import LossAggregation
from megatron_loss_agg.mcore import LossHook
"""
STEPPED = "^stepped with lm loss sample_mean loss$"
STOCK = "^stepped with lm loss$"
REFUSAL, BEFORE_SGD = "^megatron_loss_agg: ", NO_EFFECT + "SGD is about to step"
RUNS = {
    # The script's own parser does not see our flags.
    "a loop of its own": Run(loop(), 0, {STEPPED: 2, r"^Namespace\(\)$": 2}, ranks=2),
    "a loop that has imported the function before it is patched": Run(
        loop("early()", EARLY + PATCHED), 0, {STEPPED: 1}, starter=(), forked=False
    ),
    "without flags": Run(loop(), 0, {STOCK: 1}, flags=()),
    "flags in the environment": Run(
        loop(), 0, {STEPPED: 1}, flags=(), environment={VARIABLE: " ".join(MODE)}
    ),
    "a schedule that was taken before": Run(
        loop("early", TAKEN + PATCHED), 1, {BEFORE_SGD: 2, "stepped": 0}, ranks=2, starter=()
    ),
    "a hook of the loop's own": Run(
        loop(OWN_HOOK, IMPORTS), 0, {"^stepped with lm loss sum loss$": 1}, flags=()
    ),
    "flags that a hook of the loop's own makes useless": Run(
        loop(OWN_HOOK, IMPORTS), 1, {BEFORE_SGD: 1}
    ),
    "an optimizer, and nobody asked for the hook": Run(
        without_parser("torch.optim.SGD"),
        1,
        {
            BEFORE_SGD + ", and no forward-backward call": 1,
            r"expected a loop that calls what Megatron-Core's get_forward_backward_func\(\)": 1,
            "stepped": 0,
        },
    ),
    "a script that has nothing to do with us": Run(
        without_parser("torch.optim.SGD"), 0, {"stepped": 1, REFUSAL: 0}, flags=()
    ),
    "no optimizer, and nobody asked for the hook": Run(
        without_parser("None"),
        2,
        {
            "^stepped$": 2,
            REFUSAL: 1,
            NO_EFFECT + "the script made no step through the plugin; expected": 1,
            "Traceback": 0,
        },
        ranks=2,
    ),
    "the same in a patched script": Run(
        PATCHED + without_parser("None"), 2, {REFUSAL: 1}, starter=(), forked=False
    ),
    # An exit is a failure only if flags were to be used.
    "an exit": Run("raise SystemExit", 2, {REFUSAL: 1}),
    "an exit with 0": Run("raise SystemExit(0)", 2, {REFUSAL: 1}),
    "an exit with 3": Run("raise SystemExit(3)", 3, {REFUSAL: 0}),
    "a cry for help": Run("raise SystemExit(0)", 0, {REFUSAL: 0}, flags=("--help", *MODE)),
    "an exit without flags": Run("raise SystemExit(0)", 0, {REFUSAL: 0}, flags=()),
    "an empty step, to be skipped": Run(
        EMPTY_STEP,
        0,
        {"empty False stepped True moved True": 2, "empty True stepped False moved False": 1},
        flags=(*MODE, "--loss-aggregation-empty-step", "skip"),
    ),
    "an empty step": Run(EMPTY_STEP, 0, {"empty True stepped True moved True": 1}),
}


@pytest.mark.parametrize("name", RUNS)
def test_flags_take_effect_in_any_loop_or_end_the_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = RUNS[name]
    for variable, value in case.environment.items():
        monkeypatch.setenv(variable, value)
    how = {"ranks": case.ranks, "starter": case.starter, "forked": case.forked}
    codes, said = run(tmp_path, case.script, *case.flags, **how)
    assert codes == [case.code] * case.ranks, said[-3000:]
    found = {text: len(re.findall(text, said, re.MULTILINE)) for text in case.said}
    assert found == case.said, said[-3000:]
