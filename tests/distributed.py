"""Run a function on several gloo ranks from inside a test, without torchrun.

Ranks are forked from a server, one for each `preload`, that has imported the slow modules once.
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import importlib
import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist


class RankFailed(AssertionError):
    """A rank raised, died, or was still running when the time was up."""


@dataclass(frozen=True)
class _Job:
    world_size: int
    port: int
    timeout: float
    environment: dict[str, str]
    # Pickled apart from the job: the server need not import the test, and unlike a
    # multiprocessing queue, pickle sends the values of tensors and not handles of shared memory.
    call: bytes
    initialized: bool


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 120.0,
    preload: str = "torch.distributed",
    initialized: bool = True,
) -> list[Any]:
    """Call ``fn(*args)`` on every rank of a fresh gloo world; return the results in rank order.

    ``fn`` must be a module-level function; arguments and results travel by pickle. Inside it,
    ``torch.distributed`` is initialised, ``RANK``, ``LOCAL_RANK`` and ``WORLD_SIZE`` are set, and
    the module ``preload`` is imported. The whole call may take ``timeout`` seconds. Without
    ``initialized``, ``fn`` is to initialise it, by ``init_process_group(backend)``.

    Raises:
        RankFailed: with the traceback of the rank that failed first.
    """
    # Held here, on a port that the system picks, so that nobody can take it in between.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    call = pickle.dumps((fn, args))
    job = _Job(world_size, store.port, timeout, dict(os.environ), call, initialized)
    server = _server(preload)
    try:
        server.send_bytes(pickle.dumps(job))
        answer = pickle.loads(server.recv_bytes())
    except (EOFError, OSError):
        _server.cache_clear()
        raise RankFailed(f"the server of ranks that preloads {preload} died") from None
    if isinstance(answer, str):
        raise RankFailed(answer)
    return [pickle.loads(result) for result in answer]


@functools.cache
def _server(preload: str) -> Connection:
    """Start the server process for ``preload`` and return the line to it."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(there, preload))
    process.start()
    there.close()
    # Runs before multiprocessing joins its children at exit; the server ends with its line.
    atexit.register(here.close)
    return here


def _serve(line: Connection, preload: str) -> None:
    torch.set_num_threads(1)  # for the ranks too; and no thread may exist when they are forked
    importlib.import_module(preload)
    while True:
        try:
            job = pickle.loads(line.recv_bytes())
        except EOFError:
            return
        try:
            answer: list[bytes] | str = _run(job)
        except RankFailed as failure:
            answer = str(failure)
        line.send_bytes(pickle.dumps(answer))


def _run(job: _Job) -> list[bytes]:
    deadline = time.monotonic() + job.timeout
    context = multiprocessing.get_context("fork")
    receivers: dict[Any, int] = {}
    processes = []
    try:
        for rank in range(job.world_size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_rank_main, args=(rank, job, sender))
            process.start()
            sender.close()
            receivers[receiver] = rank
            processes.append(process)
        results = _collect(receivers, processes, deadline, job.timeout)
    except BaseException:
        for process in processes:
            process.kill()
        raise
    finally:
        for process in processes:
            process.join()
    return results


def _collect(
    receivers: dict[Any, int], processes: list[Any], deadline: float, timeout: float
) -> list[bytes]:
    results: dict[int, bytes] = {}
    while len(results) < len(receivers):
        pending = [receiver for receiver, rank in receivers.items() if rank not in results]
        ready = wait(pending, timeout=max(deadline - time.monotonic(), 0.0))
        if not ready:
            late = sorted(receivers[receiver] for receiver in pending)
            raise RankFailed(f"ranks {late} were still running after {timeout:g} s")
        for receiver in ready:
            rank = receivers[receiver]
            try:
                succeeded, payload = pickle.loads(receiver.recv_bytes())
            except EOFError:
                raise RankFailed(f"rank {rank} died without a word") from None
            if not succeeded:
                dead = _died(processes) if "/gloo/" in payload else None
                if dead is not None:
                    raise RankFailed(f"rank {dead} died without a word")
                raise RankFailed(f"rank {rank} failed:\n{payload}")
            results[rank] = payload
    return [results[rank] for rank in range(len(receivers))]


def _died(processes: list[Any]) -> int | None:
    """A rank whose death may have closed another's connections, shortly before it is known here."""
    for _ in range(100):
        for rank, process in enumerate(processes):
            if process.exitcode not in (None, 0):
                return rank
        time.sleep(0.01)
    return None


def _rank_main(rank: int, job: _Job, sender: Connection) -> None:
    os.environ.clear()
    os.environ.update(job.environment)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(job.world_size))
    faulthandler.dump_traceback_later(0.95 * job.timeout)  # where it hangs, before it is killed
    try:
        if job.initialized:
            limit = timedelta(seconds=job.timeout)
            store = dist.TCPStore("127.0.0.1", job.port, is_master=False, timeout=limit)
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=job.world_size, timeout=limit
            )
        else:  # as torchrun: every rank is a client of the launcher's store
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(job.port))
            os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")
        fn, args = pickle.loads(job.call)
        result = pickle.dumps(fn(*args))
    except BaseException:
        # Sent before this process ends, hence before its peers can notice and fail in turn.
        sender.send_bytes(pickle.dumps((False, traceback.format_exc())))
        return
    sender.send_bytes(pickle.dumps((True, result)))
    if not job.initialized:
        return
    dist.barrier()  # nobody leaves while a peer is still in its last collective
    dist.destroy_process_group()
