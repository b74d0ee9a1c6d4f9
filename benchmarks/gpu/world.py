"""Processes and Megatron's process groups: over NCCL on GPUs; in a dry run over gloo on a CPU."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

LIMIT = timedelta(seconds=90)  # of a collective


def context(dry: bool) -> Any:
    """A dry run forks, so that Megatron is imported once; CUDA needs fresh processes."""
    return multiprocessing.get_context("fork" if dry else "spawn")


def enter(dry: bool, rank: int = 0) -> None:
    """Choose the device, before Megatron is imported."""
    import torch

    if dry:
        from megatron_loss_agg.mcore import cpu

        torch.set_num_threads(1)
        cpu.enable()
    else:
        torch.cuda.set_device(rank)


@contextlib.contextmanager
def groups(dry: bool, rank: int = 0, size: int = 1, port: int = 0, cp: int = 1) -> Iterator[None]:
    """Megatron's process groups; ``port`` is that of a store, or 0 if this is the only rank."""
    import torch
    import torch.distributed as dist

    enter(dry, rank)
    from megatron.core import parallel_state, tensor_parallel

    alone = port == 0
    store = dist.TCPStore("127.0.0.1", port, is_master=alone, wait_for_workers=False, timeout=LIMIT)
    backend = "gloo" if dry else "nccl"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=LIMIT)
    try:
        parallel_state.initialize_model_parallel(
            context_parallel_size=cp, create_gloo_process_groups=False
        )
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        torch.manual_seed(1)
        yield
        torch.cuda.synchronize()
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def run_ranks(
    fn: Callable[..., Any], size: int, cp: int, dry: bool, folder: Path, limit: float, *args: Any
) -> list[Any]:
    """``fn(dry, *args)`` on ``size`` ranks with a GPU each; results in rank order.

    Raises:
        RuntimeError: a rank failed or was late.
    """
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    faulthandler.cancel_dump_traceback_later()  # a forked rank would wait for this one's thread
    results = [folder / f"rank{rank}.pickle" for rank in range(size)]
    ranks = []
    for rank, path in enumerate(results):
        path.unlink(missing_ok=True)
        given = (fn, dry, rank, size, store.port, cp, path, limit, args)
        ranks.append(context(dry).Process(target=_rank, args=given))
        ranks[-1].start()
    deadline = time.monotonic() + limit
    while any(p.is_alive() for p in ranks) and time.monotonic() < deadline:
        if any(p.exitcode for p in ranks):
            break
        time.sleep(0.05)
    late = [rank for rank, p in enumerate(ranks) if p.is_alive()]
    for p in ranks:
        p.kill()
        p.join()
    codes = [p.exitcode for p in ranks]
    if any(codes) or late:
        raise RuntimeError(f"ranks ended with {codes}, {late} still running; see the part's log")
    return [pickle.loads(path.read_bytes()) for path in results]


def _rank(
    fn: Callable[..., Any],
    dry: bool,
    rank: int,
    size: int,
    port: int,
    cp: int,
    path: Path,
    limit: float,
    args: tuple[Any, ...],
) -> None:
    faulthandler.dump_traceback_later(0.9 * limit)  # where it hangs, before it is killed
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    with groups(dry, rank, size, port, cp):
        path.write_bytes(pickle.dumps(fn(dry, *args)))


def stop(process: Any) -> None:
    """Kill a process that leads a session of its own, and its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()
