"""An error that several ranks end with is printed by one of them, not by all at once.

Ranks tell each other through the store of ``torchrun``, which they reach before there is a process
group, or else through that of the process group. Where there is none, every rank prints its own.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import socket
import sys
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from megatron_loss_agg.errors import AggregationError

_PATIENCE = timedelta(seconds=2)
"""How long a rank waits for the store, for other ranks' errors, and until these are printed."""


def refuse(error: AggregationError) -> int:
    """Print ``error`` as one line on stderr, once for all ranks that have it; return the exit code.

    Every rank may take some seconds, and no longer, to learn of the others.
    """
    text = f"megatron_loss_agg: {type(error).__name__}: {error}"
    _print_once(error, lambda where: print(text + where, file=sys.stderr, flush=True))()
    return 2


def print_uncaught_once() -> Callable[[], None]:
    """Have uncaught errors of this package printed once for all ranks that have them.

    Returns:
        what restores ``sys.excepthook``.
    """
    stock = sys.excepthook

    def excepthook(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        def show(where: str) -> None:
            stock(kind, error, trace)
            if where:
                print(f"megatron_loss_agg: {kind.__name__}{where}: see above", file=sys.stderr)

        if isinstance(error, AggregationError):
            # Torch prints what this function says, with the rank before each line, after it.
            atexit.register(_print_once(error, show))
        else:
            show("")

    def restore() -> None:
        if sys.excepthook is excepthook:
            sys.excepthook = stock

    sys.excepthook = excepthook
    return restore


class _Ranks(NamedTuple):
    """What this rank needs to exchange errors with the others."""

    store: Store
    rank: int
    number: int


def _print_once(error: AggregationError, show: Callable[[str], None]) -> Callable[[], None]:
    """Call ``show`` on one of the ranks that end with ``error``.

    Args:
        show: prints it, with words that say where it is: `` (on all 8 ranks)``.

    Returns:
        a function that waits until all have printed, to be called before this rank ends.
    """
    ranks = _ranks()
    where: str | None = ""
    with contextlib.suppress(RuntimeError):  # the store ended with another rank
        where = "" if ranks is None else _where(ranks, f"{type(error).__name__}: {error}")
    if where is not None:
        show(where)
    return functools.partial(_wait_for_prints, ranks)


def _ranks() -> _Ranks | None:
    """None where this is the only rank, or others cannot be reached."""
    known = os.environ
    of_torchrun = known.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    # Without torchrun, rank 0 opens the store when it makes the process group.
    if not (of_torchrun or dist.is_initialized()):
        return None
    try:
        rank, number = int(known["RANK"]), int(known["WORLD_SIZE"])
        if number == 1:
            return None
        address = known["MASTER_ADDR"], int(known["MASTER_PORT"])
        # Before torch tries it, which prints its own stack if nobody listens.
        socket.create_connection(address, _PATIENCE.total_seconds()).close()
        store = dist.TCPStore(*address, timeout=_PATIENCE, wait_for_workers=False)  # type: ignore[attr-defined]
    except (KeyError, ValueError, OSError, RuntimeError):
        return None
    attempt = known.get("TORCHELASTIC_RESTART_COUNT", "0")
    return _Ranks(PrefixStore(f"megatron_loss_agg/errors/{attempt}", store), rank, number)


def _where(ranks: _Ranks, text: str) -> str | None:
    """Which ranks end with the error ``text``; None on a rank that leaves it to another to print.

    A few requests a rank, however many ranks there are. That the waiting is over is decided once,
    so that all ranks act on the same: by the last rank to come, or by the first to lose patience.
    """
    store, rank, number = ranks
    is_first = store.add(f"error {text}", 1) == 1
    if store.add("failed", 1) == number:
        store.compare_set("over", "", "all have come")
    try:
        store.wait(["over"], _PATIENCE)
    except dist.DistStoreError:
        store.compare_set("over", "", "the time is up")
    with_it = store.add(f"error {text}", 0)
    if store.get("over") == b"all have come" and with_it == number:
        return f" (on all {number} ranks)" if rank == 0 else None
    if not is_first:
        return None
    return f" (on rank {rank})" if with_it == 1 else f" (on {with_it} of {number} ranks)"


def _wait_for_prints(ranks: _Ranks | None) -> None:
    """Stay until all have printed: torchrun kills the other ranks when one has ended."""
    if ranks is None:
        return
    with contextlib.suppress(RuntimeError):  # the time is up, or the store ended
        if ranks.store.add("done", 1) >= ranks.store.add("failed", 0):
            ranks.store.set("all done", "")
        ranks.store.wait(["all done"], _PATIENCE)
