"""Any loop on Megatron-Core's schedules: the flags reach it, or end the run.

Real scripts, one process a rank, by the launcher or with the lines that the patches add.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from megatron_loss_agg.launch.flags import VARIABLE
from tests.launch.processes import LAUNCHER, MODE, refusals, run, run_afresh

# A loop of its own on Megatron-Core: a model, and a step by SCHEDULE, with a parser and an
# optimizer of its own.
HOST = """
import argparse
import torch
import torch.distributed as dist
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from tests.host import gpt
from tests.host.steps import NO_TOKENS, SHORT, batches

dist.init_process_group("gloo")
gpt.initialize()
model = gpt.ddp_model()
"""
OWN_LOOP = """
print(argparse.ArgumentParser().parse_args())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = batches(SHORT[dist.get_rank()], "bshd")
reports = gpt.run_step(None, model, data, 2, schedule=SCHEDULE)
optimizer.step()
print("stepped with", *sorted(reports[0]))
"""

# A step of Megatron's optimizer without any token.
EMPTY_STEP = f"""{HOST}
config = OptimizerConfig(optimizer="adam", lr=0.1, min_lr=0.1, weight_decay=0.5, clip_grad=0.0)
optimizer = get_megatron_optimizer(config, [model])
for inner in getattr(optimizer, "chained_optimizers", [optimizer]):
    inner.optimizer.step()  # as Megatron does to have the state that a checkpoint is loaded into
for empty in (False, True, False):
    before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
    gpt.run_step(None, model, batches((NO_TOKENS if empty else SHORT)[0], "bshd"), 2)
    stepped = optimizer.step()[0]
    after = torch.cat([p.detach().flatten() for p in model.parameters()])
    print("empty", empty, "stepped", stepped, "moved", not torch.equal(before, after))
    optimizer.zero_grad()
"""

# Neither Megatron's parser nor its schedule, and no optimizer; or one.
NOTHING = """
print("stepped")
"""
OPTIMIZER = f"""
import torch

weight = torch.ones(3, requires_grad=True)
weight.square().sum().backward()
torch.optim.SGD([weight], lr=0.1).step()
{NOTHING}
"""

# What the patches add to a script.
PATCHED = """
from megatron_loss_agg.mcore import cpu

cpu.enable()
if __name__ == "__main__":
    from megatron_loss_agg.launch.install import install

    install()
"""
IMPORTED = "from megatron.core.pipeline_parallel import get_forward_backward_func as early\n"
TAKEN = """
from megatron.core.pipeline_parallel import schedules
early = schedules.forward_backward_no_pipelining
"""
OWN_HOOK = """
from megatron_loss_agg import LossAggregation
from megatron_loss_agg.mcore import LossHook
hook = LossHook(LossAggregation(mode="sum"))
"""


def loop(schedule: str = "get_forward_backward_func()", before: str = "") -> str:
    return before + HOST + OWN_LOOP.replace("SCHEDULE", schedule)


class Run(NamedTuple):
    """A script, how it is started, the exit code of every rank, and its log."""

    script: str
    code: int
    counts: dict[str, int]  # of lines in the log, by pattern
    flags: tuple[str, ...] = MODE
    ranks: int = 1
    starter: tuple[str, ...] = LAUNCHER
    environment: str = ""  # flags in the environment variable


NO_EFFECT = "HostError: --loss-aggregation sample_mean has no effect: "
STEPPED = "^stepped with lm loss sample_mean loss$"
REFUSAL, BEFORE_SGD = "^megatron_loss_agg: ", NO_EFFECT + "SGD is about to step"
RUNS = {
    # The script's own parser does not see our flags.
    "a loop of its own": Run(loop(), 0, {STEPPED: 2, r"^Namespace\(\)$": 2}, ranks=2),
    "a loop that has imported the function before it is patched": Run(
        loop("early()", IMPORTED + PATCHED), 0, {STEPPED: 1}, starter=()
    ),
    "flags in the environment": Run(loop(), 0, {STEPPED: 1}, (), environment=" ".join(MODE)),
    "without flags": Run(loop(), 0, {"^stepped with lm loss$": 1}, flags=()),
    "a schedule that was taken before": Run(
        loop("early", TAKEN + PATCHED), 1, {BEFORE_SGD: 2, "stepped": 0}, ranks=2, starter=()
    ),
    "flags that a hook of the loop's own makes useless": Run(
        loop("hook.wrap(get_forward_backward_func())", OWN_HOOK), 1, {BEFORE_SGD: 1}
    ),
    "an optimizer, and nobody asked for the hook": Run(
        OPTIMIZER,
        1,
        {
            BEFORE_SGD + ", but no forward-backward call": 1,
            r"\. Call what Megatron-Core's get_forward_backward_func\(\) returns, after inst": 1,
            "stepped": 0,
        },
    ),
    "a script that has nothing to do with us": Run(OPTIMIZER, 0, {"stepped": 1, REFUSAL: 0}, ()),
    "no optimizer, and nobody asked for the hook": Run(
        NOTHING,
        2,
        {
            "^stepped$": 2,
            REFUSAL: 2,
            NO_EFFECT + r"the script trained nothing through the plugin\. Call": 2,
            "Traceback": 0,
        },
        ranks=2,
    ),
    # An exit is a failure only if flags were to be used.
    "an exit with 0": Run("raise SystemExit(0)", 2, {REFUSAL: 1}),
    "an exit with 3": Run("raise SystemExit(3)", 3, {REFUSAL: 0}),
    "a cry for help": Run("raise SystemExit(0)", 0, {REFUSAL: 0}, flags=("--help", *MODE)),
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
    monkeypatch.setenv(VARIABLE, case.environment)
    codes, log = run(tmp_path, case.script, *case.flags, ranks=case.ranks, starter=case.starter)
    assert codes == [case.code] * case.ranks, log[-3000:]
    counts = {text: len(re.findall(text, log, re.MULTILINE)) for text in case.counts}
    assert counts == case.counts, log[-3000:]


def test_a_patched_script_that_makes_no_step_fails_at_its_end(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(PATCHED + NOTHING)
    done = run_afresh(str(script), *MODE)
    assert done.returncode == 2, done.stderr[-3000:]
    (line,) = refusals(done.stderr)
    assert re.search(NO_EFFECT, line)
