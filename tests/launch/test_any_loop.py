"""Loops on Megatron-Core's schedules, with parsers of their own: the flags reach each of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_loss_agg.mcore.flags import VARIABLE
from tests.launch.processes import MODE, NO_EFFECT, PATCHED, run

pytestmark = pytest.mark.host

# A loop with a parser and a schedule of its own. SCHEDULE is how it takes it.
OWN_LOOP = """
import argparse
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from tests.host import gpt
from tests.host.steps import Counted

print(argparse.ArgumentParser().parse_args())
dist.init_process_group("gloo")
gpt.initialize()
model = gpt.ddp_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
forward_backward = SCHEDULE
reports = forward_backward(
    forward_step_func=gpt.forward_step, data_iterator=Counted(dist.get_rank()), model=[model],
    num_microbatches=2, seq_length=1, micro_batch_size=1, forward_only=False,
)
optimizer.step()
print("stepped with", *sorted(reports[0]))
"""
STOCK = "get_forward_backward_func()"
STEPPED = "stepped with lm loss sample_mean loss\n"
EARLY = "from megatron.core.pipeline_parallel import get_forward_backward_func as early\n"


def test_any_loop_on_the_hosts_schedule_is_hooked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = OWN_LOOP.replace("SCHEDULE", STOCK)
    codes, said = run(tmp_path, loop, *MODE, ranks=2)
    assert (codes, said.count(STEPPED)) == ([0, 0], 2), said[-3000:]
    # The script's own parser has not seen our flags.
    assert said.count("Namespace()\n") == 2
    # As with the lines that the patches add, even where the loop has imported the function before.
    late = EARLY + PATCHED + OWN_LOOP.replace("SCHEDULE", "early()")
    codes, said = run(tmp_path, late, *MODE, starter=(), forked=False)
    assert (codes, said.count(STEPPED)) == ([0], 1), said[-3000:]
    # Without flags nothing changes; the environment may hold them.
    codes, said = run(tmp_path, loop)
    assert (codes, said.count("stepped with lm loss\n")) == ([0], 1), said[-3000:]
    monkeypatch.setenv(VARIABLE, " ".join(MODE))
    codes, said = run(tmp_path, loop, forked=False)
    assert (codes, said.count(STEPPED)) == ([0], 1), said[-3000:]


# A step of Megatron's optimizer without any token, in a loop of its own.
EMPTY_STEP = """
import torch
import torch.distributed as dist
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from tests.host import gpt
from tests.host.steps import Counted

dist.init_process_group("gloo")
gpt.initialize()
model = gpt.ddp_model()
config = OptimizerConfig(optimizer="adam", lr=0.1, min_lr=0.1, weight_decay=0.5, clip_grad=0.0)
optimizer = get_megatron_optimizer(config, [model])
for empty in (False, True, False):
    model.zero_grad_buffer()
    counted = Counted(0)
    data = [next(counted), next(counted)]
    for batch in data:
        batch["loss_mask"] = batch["loss_mask"] * (not empty)
    before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
    get_forward_backward_func()(
        forward_step_func=gpt.forward_step, data_iterator=iter(data), model=[model],
        num_microbatches=2, seq_length=1, micro_batch_size=1, forward_only=False,
    )
    stepped = optimizer.step()[0]
    after = torch.cat([p.detach().flatten() for p in model.parameters()])
    print("empty", empty, "stepped", stepped, "moved", not torch.equal(before, after))
"""


def test_an_empty_step_is_skipped_in_any_loop(tmp_path: Path) -> None:
    moves = "empty False stepped True moved True\n"
    codes, said = run(tmp_path, EMPTY_STEP, *MODE, "--loss-aggregation-empty-step", "skip")
    assert codes == [0], said[-3000:]
    assert (
        "".join(re.findall("^empty.*\\n", said, re.MULTILINE))
        == f"{moves}empty True stepped False moved False\n{moves}"
    )
    codes, said = run(tmp_path, EMPTY_STEP, *MODE)
    assert "empty True stepped True moved True\n" in said, said[-3000:]


def test_a_schedule_that_was_taken_before_ends_the_run_before_the_first_step(
    tmp_path: Path,
) -> None:
    taken = "from megatron.core.pipeline_parallel import schedules\n"
    taken += "early = schedules.forward_backward_no_pipelining\n"
    taken += PATCHED + OWN_LOOP.replace("SCHEDULE", "early")
    codes, said = run(tmp_path, taken, *MODE, starter=(), ranks=2)
    assert codes == [1, 1]
    assert len(re.findall("^.*" + NO_EFFECT + "SGD is about to step", said, re.MULTILINE)) == 2
    assert "stepped" not in said


def test_a_hook_of_the_loops_own_is_not_hooked_again(tmp_path: Path) -> None:
    own = "LossHook(LossAggregation(mode='sum')).wrap(get_forward_backward_func())"
    imports = "from megatron_loss_agg import LossAggregation\n"
    imports += "from megatron_loss_agg.mcore import LossHook\n"
    loop = imports + OWN_LOOP.replace("SCHEDULE", own)
    codes, said = run(tmp_path, loop)
    assert (codes, said.count("stepped with lm loss sum loss\n")) == ([0], 1), said[-3000:]
    # Flags that it makes useless are refused.
    codes, said = run(tmp_path, loop, *MODE)
    assert codes == [1]
    assert re.search(NO_EFFECT + "SGD is about to step", said)
