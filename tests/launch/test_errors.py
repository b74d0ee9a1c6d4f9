"""An error that several ranks end with is printed once, and no rank waits long for the others."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from megatron_loss_agg.errors import AggregationError, MaskError, PeerError
from megatron_loss_agg.mcore.launch.once import refuse
from tests.distributed import run_ranks
from tests.launch.processes import MODE, ROOT, refusals, run

A, B = MaskError("a"), MaskError("b")
PEER = PeerError("see the error of rank 1")
PATIENCE = 30.0  # seconds until a rank that still waits for another fails the test


def refusal(
    errors: list[AggregationError | None], delays: list[float], environment: dict[str, str]
) -> str:
    """What this rank says of its error."""
    os.environ.update(environment)
    rank = int(os.environ["RANK"])
    time.sleep(delays[rank])
    error = errors[rank]
    with contextlib.redirect_stderr(io.StringIO()) as said:
        assert error is None or refuse(error) == 2
    return said.getvalue()


@dataclass(frozen=True)
class End:
    """The error of each rank, and how often each is printed."""

    errors: list[AggregationError | None]
    printed: dict[AggregationError, int]
    delays: tuple[float, ...] = (0, 0, 0)  # seconds
    environment: dict[str, str] = field(default_factory=dict)


ENDS = {
    "of all ranks": End([A, A, A], {A: 1}, (0.3, 0, 0)),
    "of one rank": End([None, A], {A: 1}),
    "different ones": End([A, B], {A: 1, B: 1}),
    "one that comes later than the others' word of it": End(
        [PEER, A, PEER], {PEER: 1, A: 1}, (0, 1, 0.3)
    ),
    "of a rank that comes too late": End([A, A], {A: 1}, (4, 0)),
    # Nobody listens; or there is no process group yet, and no store.
    "of ranks without a store": End([A, A], {A: 2}, environment={"MASTER_PORT": "1"}),
    "of ranks without torchrun": End(
        [A, A], {A: 2}, environment={"TORCHELASTIC_USE_AGENT_STORE": "False"}
    ),
}


@pytest.mark.parametrize("name", ENDS)
def test_an_error_is_printed_once_if_the_ranks_can_reach_each_other(name: str) -> None:
    end = ENDS[name]
    given = end.errors, [*end.delays], end.environment
    found = run_ranks(refusal, len(end.errors), *given, timeout=PATIENCE, initialized=False)
    for text, error in zip(found, end.errors, strict=True):
        line = f"megatron_loss_agg: {type(error).__name__}: {error}"
        assert not text or re.fullmatch(re.escape(line) + r"( \(.+ rank.*\))?\n", text)
    assert {e: sum(f": {e}" in text for text in found) for e in end.printed} == end.printed


def test_a_bad_flag_of_a_job_of_torchrun_is_one_line() -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    launcher = ("--nproc-per-node", "2", "-m", "megatron_loss_agg", "examples/pretrain_gpt.py")
    done = subprocess.run(
        [*torchrun, *launcher, "--loss-aggregation", "bogus"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1  # torchrun's own
    (found,) = refusals(done.stdout)
    assert found.startswith("megatron_loss_agg: ModeError: unknown mode 'bogus'")
    # It stops the other rank as soon as it sees that the first one has ended.
    assert {"2"} <= {*re.findall(r"exitcode +: (-?\d+)", done.stdout)} <= {"2", "-15"}


# What Megatron's `pretrain` does first.
BUILDS = """
import torch.distributed as dist
from megatron.training import arguments, training
from megatron.training.global_vars import set_args

dist.init_process_group("gloo")
set_args(arguments.parse_args())
training.setup_model_and_optimizer(None, None)
"""


@pytest.mark.host
def test_a_flag_of_the_host_that_does_not_fit_is_one_line_for_all_ranks(tmp_path: Path) -> None:
    flags = (*MODE, "--cuda-graph-impl", "full_iteration")
    codes, text = run(tmp_path, BUILDS, *flags, ranks=2, forked=False)
    assert codes == [2, 2]
    (found,) = refusals(text)
    assert found.startswith("megatron_loss_agg: HostError: --cuda-graph-impl full_iteration")
    assert "Traceback" not in text
