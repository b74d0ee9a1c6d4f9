"""An error that several ranks end with: who prints it, and how long they wait for one another."""

from __future__ import annotations

import contextlib
import io
import os
import re
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import torch.distributed as dist

from megatron_loss_agg.errors import DataError
from megatron_loss_agg.launch.once import refuse  # how a launcher ends
from tests.distributed import run_ranks
from tests.launch.processes import MODE, run_afresh

PATIENCE = 30.0  # seconds until a rank that still waits for another fails the test


class End(NamedTuple):
    """The error of each rank, and how many lines are printed."""

    errors: tuple[str | None, ...]
    lines: int
    delays: tuple[float, ...] = (0, 0, 0)  # seconds
    environment: dict[str, str] | None = None
    connected: bool = False  # the ranks have a process group


WITHOUT_TORCHRUN = {"TORCHELASTIC_USE_AGENT_STORE": "False"}
ENDS = {
    "of two ranks, and later another of the third": End(("b", "a", "b"), 2, (0, 1, 0.3)),
    "of two ranks, of which the second comes too late": End((None, "a", "a"), 1, (0, 0, 2.5)),
    # Nobody listens; or there is no store of torchrun's, and that of the process group, or none.
    "of ranks without a store": End(("a", "a"), 2, environment={"MASTER_PORT": "1"}),
    "of a process group": End(("a", "a"), 1, environment=WITHOUT_TORCHRUN, connected=True),
    "of ranks without torchrun": End(("a", "a"), 2, environment=WITHOUT_TORCHRUN),
}


def refusal(end: End) -> str:
    """What this rank says of its error."""
    if end.connected:
        dist.init_process_group("gloo")
    os.environ.update(end.environment or {})
    rank = int(os.environ["RANK"])
    time.sleep(end.delays[rank])
    error = end.errors[rank]
    with contextlib.redirect_stderr(io.StringIO()) as said:
        assert error is None or refuse(DataError(error)) == 2
    return said.getvalue()


@pytest.mark.parametrize("name", ENDS)
def test_an_error_is_printed_once_if_the_ranks_can_reach_each_other(name: str) -> None:
    end = ENDS[name]
    found = run_ranks(refusal, len(end.errors), end, timeout=PATIENCE, initialized=False)
    printed = {rank: text for rank, text in enumerate(found) if text}
    assert len(printed) == end.lines
    assert {end.errors[rank] for rank in printed} == {*end.errors} - {None}
    for rank, text in printed.items():
        line = rf"megatron_loss_agg: DataError: {end.errors[rank]}( \(.+ rank.*\))?\n"
        assert re.fullmatch(line, text)


# Two ranks fail with one error, and the third with another.
FAILS = """
import sys, torch
import torch.distributed as dist
from megatron_loss_agg.errors import DataError, PeerError

stood_in = [m for m in sys.modules if m.startswith('megatron_loss_agg.mcore.cpu')]
print(stood_in, torch.cuda.current_stream.__module__, sys.argv[1:], flush=True)
dist.init_process_group("gloo")
dist.barrier()
def train():
    raise DataError("bad mask") if dist.get_rank() else PeerError("see the others")
train()
"""


def test_each_error_in_a_job_of_torchrun_is_printed_once_with_its_traceback(
    tmp_path: Path,
) -> None:
    script = tmp_path / "script.py"
    script.write_text(FAILS)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3")
    done = run_afresh(*torchrun, "-m", "megatron_loss_agg", str(script), "--flag", *MODE)
    said = done.stdout + done.stderr.partition("torch/distributed/elastic")[0]
    for text, number in {
        "DataError: bad mask$": 1,
        "PeerError: see the others$": 1,
        "Traceback": 2,
        r'script\.py", line \d+, in train$': 2,
        # Without --cpu, nothing stands in for a GPU. The flags are not the script's.
        r"^\[\] torch\.cuda \['--flag'\]$": 3,
    }.items():
        assert len(re.findall(text, said, re.MULTILINE)) == number, (text, said[-5000:])
