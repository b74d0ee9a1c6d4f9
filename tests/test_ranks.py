"""The ranks that the tests run."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.distributed import RankFailed, _collect, run_ranks


def receive_from_a_dead_rank() -> None:
    dist.barrier()
    if dist.get_rank() == 1:
        os.abort()
    dist.recv(torch.zeros(1), src=1)


def test_a_rank_that_dies_is_named():
    with pytest.raises(RankFailed, match="rank 1 died without a word"):
        run_ranks(receive_from_a_dead_rank, 2)


def test_its_death_is_told_and_not_what_it_does_to_others():
    pipes = [multiprocessing.Pipe(duplex=False) for _ in range(2)]
    pipes[0][1].send_bytes(pickle.dumps((False, "[/gloo/transport/tcp/pair.cc] Read error")))
    pipes[1][1].close()
    processes = [SimpleNamespace(exitcode=0), SimpleNamespace(exitcode=-signal.SIGABRT)]
    receivers = {receiver: rank for rank, (receiver, _) in enumerate(pipes)}
    with pytest.raises(RankFailed, match="rank 1 died without a word"):
        _collect(receivers, processes, time.monotonic() + 10, 10)
