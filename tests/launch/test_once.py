"""An error that several ranks end with is printed once, and no rank waits long for the others."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_loss_agg.errors import AggregationError, MaskError, PeerError
from megatron_loss_agg.mcore.launch.once import refuse
from tests.distributed import run_ranks
from tests.launch.processes import MODE, ROOT, refusals, run

A, B = MaskError("a"), MaskError("b")
PEER = PeerError("see the error of rank 1")
LONGEST = 5.0  # seconds, for waits of 2 and of 0.5 on a busy machine


def refusal(
    errors: list[AggregationError | None], delays: list[float], environment: dict[str, str]
) -> tuple[str, float]:
    """What this rank says of its error, and how many seconds that takes."""
    os.environ.update(environment)
    rank = int(os.environ["RANK"])
    time.sleep(delays[rank])
    error, began = errors[rank], time.monotonic()
    if error is None:
        return "", 0.0
    with contextlib.redirect_stderr(io.StringIO()) as said:
        assert refuse(error) == 2
    return said.getvalue(), time.monotonic() - began


def said(
    errors: list[AggregationError | None],
    delays: tuple[float, ...] = (0, 0, 0),
    **environment: str,
) -> list[str]:
    """Of each rank. They are started as by torchrun, and have no process group."""
    found = run_ranks(
        refusal, len(errors), errors, [*delays], environment, timeout=60, initialized=False
    )
    assert all(seconds < LONGEST for _, seconds in found)
    return [text for text, _ in found]


def line(error: AggregationError, rank: int | None = None) -> str:
    where = "" if rank is None else f" (first on rank {rank})"
    return f"megatron_loss_agg: {type(error).__name__}: {error}{where}\n"


def test_an_error_of_all_ranks_is_printed_by_the_first() -> None:
    assert said([A, A, A], (0.3, 0, 0.3)) == ["", line(A, 1), ""]


def test_an_error_of_one_rank_is_printed_by_that_rank() -> None:
    assert said([None, A]) == ["", line(A, 1)]


def test_each_of_different_errors_is_printed() -> None:
    assert said([A, B]) == [line(A, 0), line(B, 1)]
    # Also where one rank's comes later than the others' word of it.
    assert said([PEER, A, PEER], (0, 1.0, 0.3)) == [line(PEER, 0), line(A, 1), ""]


def test_a_rank_that_comes_too_late_repeats_nothing() -> None:
    assert said([A, A], (4, 0)) == ["", line(A, 1)]


@pytest.mark.parametrize(
    "environment",
    [
        {"MASTER_PORT": "1"},  # nobody listens
        {"TORCHELASTIC_USE_AGENT_STORE": "False"},  # and there is no process group yet
    ],
)
def test_ranks_that_cannot_reach_each_other_print_their_own(environment: dict[str, str]) -> None:
    assert said([A, A], **environment) == [line(A), line(A)]


TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def torchrun(*command: str) -> tuple[int, str]:
    done = subprocess.run(
        [*TORCHRUN, *command],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout


def test_a_bad_flag_of_a_job_of_torchrun_is_one_line() -> None:
    flags = ("--loss-aggregation", "bogus")
    code, text = torchrun("-m", "megatron_loss_agg", "examples/pretrain_gpt.py", *flags)
    assert code == 1  # torchrun's own
    (found,) = refusals(text)
    assert found.startswith("megatron_loss_agg: ModeError: unknown mode 'bogus'")
    assert re.search(r" \(first on rank [01]\)$", found)
    # It stops the other rank as soon as it sees that the first one has ended.
    assert {"2"} <= {*re.findall(r"exitcode +: (-?\d+)", text)} <= {"2", "-15"}


# A script in which each rank fails in a way of its own, with a process group.
FAILS = """
import os
import torch.distributed as dist
from megatron_loss_agg.errors import MaskError, PeerError

dist.init_process_group("gloo")
rank = int(os.environ["RANK"])
dist.barrier()
raise ERRORS
"""


@pytest.mark.host
def test_tracebacks_of_an_error_in_training_are_printed_once(tmp_path: Path) -> None:
    """Without torchrun: rank 0 holds the store of the process group."""
    script = FAILS.replace("ERRORS", "MaskError('bad mask')")
    codes, text = run(tmp_path, script, ranks=3, starter=("-m", "megatron_loss_agg"), forked=False)
    assert codes == [1, 1, 1]
    assert text.count("Traceback") == text.count("MaskError: bad mask\n") == 1


@pytest.mark.host
def test_the_error_that_others_only_hear_of_is_printed(tmp_path: Path) -> None:
    script = FAILS.replace("ERRORS", "MaskError('bad mask') if rank == 1 else PeerError('see 1')")
    (tmp_path / "script.py").write_text(script)
    code, text = torchrun("-m", "megatron_loss_agg", str(tmp_path / "script.py"))
    assert code == 1
    assert text.count("MaskError: bad mask\n") == text.count("PeerError: see 1\n") == 1


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
    assert found.startswith("megatron_loss_agg: HostError: --cuda-graph-impl full_iteration,")
    assert re.search(r" \(first on rank [01]\)$", found)
