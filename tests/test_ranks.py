"""The ranks that the tests run: what is said of one that fails."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from tests.distributed import RankFailed, run_ranks


def fail(how: str) -> None:
    """Rank 1 ends in some way, while rank 0 waits for it."""
    dist.barrier()
    if dist.get_rank() == 0:
        dist.recv(torch.zeros(1), src=1)
    print("a last word", file=sys.stderr)
    ways: dict[str, Callable[[], object]] = {
        "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "aborts": os.abort,
        "exits": lambda: os._exit(3),
        "raises": lambda: 1 / 0,
        "hangs": lambda: time.sleep(60),
    }
    ways[how]()


FAILED = {
    "killed": r"^rank 1 died of signal SIGKILL, with at most \d\d+ MiB\n  its last lines on stderr",
    # With a traceback of what it was doing.
    "aborts": r"^rank 1 died of signal SIGABRT, with at most \d\d+ MiB(?s:.*)in fail",
    "exits": r"^rank 1 died of exit code 3, with at most \d\d+ MiB",
    "raises": r"^rank 1 failed:\n(?s:.*)ZeroDivisionError",
    "hangs": r"^ranks \[0, 1\] were still running after 5 s\nrank 0:(?s:.*)rank 1:(?s:.*)in fail",
}


@pytest.mark.parametrize("how", FAILED)
def test_a_failed_rank_says_how_it_ended_and_what_it_said_last(how: str) -> None:
    with pytest.raises(RankFailed, match=FAILED[how]) as raised:
        run_ranks(fail, 2, how, timeout=5 if how == "hangs" else 60)
    assert "\n  a last word" in str(raised.value)
