"""An error that several ranks end with is printed by one of them, not by all at once.

Ranks tell each other through the store of ``torchrun``, which they reach before there is a process
group, or else through that of the process group. Where there is none, every rank prints its own.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from megatron_loss_agg.errors import AggregationError

_PATIENCE = timedelta(seconds=2)
"""How long a rank waits for the store, and then for the errors of other ranks."""
_LINGER = 0.5
"""Seconds for which a rank stays after an error is printed: torchrun kills the others when one has
ended, also one that is about to print.
"""


def refuse(error: AggregationError) -> int:
    """Print ``error`` as one line on stderr, once for all ranks that have it; return the exit code.

    Every rank may take some seconds, and no longer, to learn of the others.
    """
    text = f"megatron_loss_agg: {type(error).__name__}: {error}"
    _print_once(error, lambda where: print(text + where, file=sys.stderr))
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
            _print_once(error, show)
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


def _print_once(error: AggregationError, show: Callable[[str], None]) -> None:
    """Call ``show`` on one of the ranks that end with ``error``.

    Args:
        show: prints it, with words that say where it is: `` (on all 8 ranks)``.
    """
    ranks = _ranks()
    if ranks is None:
        show("")
        return
    try:
        where = _where(ranks, f"{type(error).__name__}: {error}")
    except RuntimeError:  # the store ended with another rank
        where = ""
    if where is not None:
        show(where)
        sys.stderr.flush()
    time.sleep(_LINGER)


def _ranks() -> _Ranks | None:
    """None where this is the only rank, or the others cannot be reached."""
    known = os.environ
    try:
        rank, number = int(known["RANK"]), int(known["WORLD_SIZE"])
        of_torchrun = known.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        # Without torchrun, rank 0 opens the store when it makes the process group.
        if number == 1 or not (of_torchrun or dist.is_initialized()):
            return None
        store = dist.TCPStore(  # type: ignore[attr-defined]
            known["MASTER_ADDR"],
            int(known["MASTER_PORT"]),
            is_master=False,
            timeout=_PATIENCE,
            wait_for_workers=False,
        )
    except (KeyError, ValueError, RuntimeError):
        return None
    return _Ranks(store, rank, number)


def _where(ranks: _Ranks, text: str) -> str | None:
    """Which ranks end with the error ``text``; None on a rank that leaves it to another to print.

    A few requests a rank, however many ranks there are. That the waiting is over is decided once,
    so that all ranks act on the same: by the last rank to come, or by the first to lose patience.
    """
    store, rank, number = ranks
    prefix = f"megatron_loss_agg/errors/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
    key, over = f"{prefix}/of/{text}", f"{prefix}/over"
    is_first = store.add(key, 1) == 1
    if store.add(f"{prefix}/ranks", 1) == number:
        store.compare_set(over, "", "all have come")
    try:
        store.wait([over], _PATIENCE)
    except dist.DistStoreError:
        store.compare_set(over, "", "the time is up")
    with_it = store.add(key, 0)
    if store.get(over) == b"all have come" and with_it == number:
        return f" (on all {number} ranks)" if rank == 0 else None
    if not is_first:
        return None
    return f" (on rank {rank})" if with_it == 1 else f" (on {with_it} of {number} ranks)"
