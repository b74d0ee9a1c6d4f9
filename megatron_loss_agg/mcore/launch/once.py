"""An error that several ranks end with is printed by one of them, not by all at once.

Ranks tell each other through the store of ``torchrun``, which they reach before there is a process
group, or else through that of the process group. Where there is none, every rank prints its own.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from megatron_loss_agg.errors import AggregationError

_PATIENCE = timedelta(seconds=2)
"""How long a rank waits for the others: once before it prints, and once after."""


def refuse(error: AggregationError) -> int:
    """Print ``error`` as one line on stderr, once for all ranks that have it; return the exit code.

    Every rank takes some seconds at most to learn of the others.
    """
    text = f"megatron_loss_agg: {type(error).__name__}: {error}"
    _print_once(error, lambda where: print(text + where, file=sys.stderr, flush=True))()
    return 2


def print_uncaught_once() -> Callable[[], None]:
    """Have uncaught errors of this package printed once; return what undoes it."""
    stock = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        def show(where: str) -> None:
            stock(kind, error, trace)
            if where:
                print(f"megatron_loss_agg: {kind.__name__}{where}: see above", file=sys.stderr)

        if isinstance(error, AggregationError):
            # Torch prints what this function says, with the rank before each line, after it.
            atexit.register(_print_once(error, show))
        else:
            show("")

    sys.excepthook = excepthook
    return lambda: setattr(sys, "excepthook", stock)


def _print_once(error: AggregationError, show: Callable[[str], None]) -> Callable[[], None]:
    """Call ``show`` on one of the ranks that end with ``error``, with `` (on all 8 ranks)``.

    Returns:
        what waits until all have printed: torchrun kills the other ranks when one has ended.
    """
    store = _store()
    if store is None:
        show("")
        return lambda: None
    try:
        where = _where(store, f"{type(error).__name__}: {error}")
    except RuntimeError:  # the store ended with another rank
        where = ""
    if where is not None:
        show(where)
    return functools.partial(_meet, store, "printed")


def _where(store: Store, text: str) -> str | None:
    """Which ranks end with the error ``text``; None on a rank that leaves it to another to print.

    The first to ask for it prints: rank 0 asks at once, the others when all have come.
    """
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store.add(text, 1)
    prints = rank == 0 and store.add(f"print {text}", 1) == 1
    _meet(store, "failed")
    if not prints and store.add(f"print {text}", 1) > 1:
        return None
    having = store.add(text, 0)
    if having == ranks:
        return f" (on all {ranks} ranks)"
    return f" (on {having} of {ranks} ranks, here rank {rank})"


def _meet(store: Store, name: str) -> None:
    """Wait until all ranks are here, or for `_PATIENCE`."""
    with contextlib.suppress(RuntimeError):  # the time is up, or the store ended
        if store.add(name, 1) == int(os.environ["WORLD_SIZE"]):
            store.set(f"all {name}", "")
        store.wait([f"all {name}"], _PATIENCE)


def _store() -> Store | None:
    """None where this is the only rank, or others cannot be reached."""
    known = os.environ
    of_torchrun = known.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    # Without torchrun, rank 0 opens the store when it makes the process group.
    if not (of_torchrun or dist.is_initialized()) or known.get("WORLD_SIZE", "1") == "1":
        return None
    address = known["MASTER_ADDR"], int(known["MASTER_PORT"])
    try:
        store = dist.TCPStore(*address, timeout=_PATIENCE, wait_for_workers=False)  # type: ignore[attr-defined]
    except RuntimeError:
        return None
    attempt = known.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"megatron_loss_agg/errors/{attempt}", store)
