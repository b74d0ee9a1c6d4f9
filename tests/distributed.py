"""Run a function on several gloo ranks from inside a test, without torchrun.

Ranks are forked from a server, one for each `preload`, that has imported the slow modules once.
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import gc
import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import popen_fork
from multiprocessing.connection import Connection, wait
from typing import IO, Any, NamedTuple

import torch
import torch.distributed as dist


class RankFailed(AssertionError):
    """A rank raised, died, or was still running when the time was up."""


class _Job(NamedTuple):
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
    timeout: float = 400.0,
    preload: str = "torch._dynamo",
    initialized: bool = True,
) -> list[Any]:
    """Call ``fn(*args)`` on every rank of a fresh gloo world; return the results in rank order.

    ``fn`` must be a module-level function; arguments and results travel by pickle. Inside it,
    ``torch.distributed`` is initialised, ``RANK``, ``LOCAL_RANK`` and ``WORLD_SIZE`` are set, and
    the module ``preload`` is imported. The whole call may take ``timeout`` seconds. Without
    ``initialized``, ``fn`` is to initialise it, by ``init_process_group(backend)``.

    Raises:
        RankFailed: with the traceback of the rank that failed first; or how it died, how much
            memory it had, and the last lines of its stderr.
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
    gc.collect()
    gc.freeze()  # ranks need not look through what was imported
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


class _Forked(popen_fork.Popen):
    """Notes how much memory the process had at most."""

    peak = 0  # in KiB

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        if self.returncode is None:
            pid, status, used = os.wait4(self.pid, flag)
            if pid == self.pid:
                self.returncode, self.peak = os.waitstatus_to_exitcode(status), used.ru_maxrss
        return self.returncode


class _Rank(multiprocessing.get_context("fork").Process):  # type: ignore[name-defined,misc]
    """A rank, and what it says on stderr."""

    _Popen = staticmethod(_Forked)

    def __init__(self, rank: int, job: _Job) -> None:
        self.log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as this)
        self.receiver, sender = multiprocessing.Pipe(duplex=False)
        super().__init__(target=_rank_main, args=(rank, job, sender, self.log))
        self.start()
        sender.close()

    def last_lines(self, number: int = 40) -> str:
        size = os.fstat(self.log.fileno()).st_size
        said = os.pread(self.log.fileno(), 16_384, max(size - 16_384, 0)).decode(errors="replace")
        lines = said.splitlines()[-number:]
        return "".join(f"\n  {line}" for line in ["its last lines on stderr:", *lines] if lines)

    def death(self) -> str:
        """Of a process that ends, or has ended, without a result."""
        self.join()
        code = self.exitcode
        how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        return f"died of {how}, with at most {self._popen.peak >> 10} MiB{self.last_lines()}"


def _run(job: _Job) -> list[bytes]:
    deadline = time.monotonic() + job.timeout
    ranks: list[_Rank] = []
    try:
        for rank in range(job.world_size):
            ranks.append(_Rank(rank, job))
        return _collect(ranks, deadline, job.timeout)
    except BaseException:
        for process in ranks:
            process.kill()
        raise
    finally:
        for process in ranks:
            process.join()


def _collect(ranks: list[_Rank], deadline: float, timeout: float) -> list[bytes]:
    pending = {rank.receiver: i for i, rank in enumerate(ranks)}
    results: dict[int, bytes] = {}
    failures: list[str] = []
    peers_lost: list[str] = []  # what others fail with: the cause is said before, or soon after
    while pending:
        ready = wait([*pending], timeout=max(deadline - time.monotonic(), 0.0))
        for receiver in ready:
            number = pending.pop(receiver)
            rank = ranks[number]
            try:
                succeeded, payload = pickle.loads(receiver.recv_bytes())
            except EOFError:
                failures.append(f"rank {number} {rank.death()}")
                continue
            if succeeded:
                results[number] = payload
                continue
            kind = peers_lost if "/gloo/" in payload else failures
            kind.append(f"rank {number} failed:\n{payload}{rank.last_lines()}")
        if peers_lost:
            deadline = min(deadline, time.monotonic() + 1)
        if failures or not ready:
            break
    if failures or peers_lost:
        raise RankFailed([*failures, *peers_lost][0])
    if pending:
        where = "".join(f"\nrank {i}:{ranks[i].last_lines()}" for i in pending.values())
        late = [*pending.values()]
        raise RankFailed(f"ranks {late} were still running after {timeout:g} s{where}")
    return [results[number] for number in range(len(ranks))]


def _rank_main(rank: int, job: _Job, sender: Connection, log: IO[bytes]) -> None:
    os.dup2(log.fileno(), sys.__stderr__.fileno())
    os.environ.clear()
    os.environ.update(job.environment)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(job.world_size))
    faulthandler.enable(sys.__stderr__)
    # Where it hangs, before it is killed; on a busy machine it takes seconds to say it.
    faulthandler.dump_traceback_later(max(job.timeout - 5, job.timeout / 2), file=sys.__stderr__)
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
