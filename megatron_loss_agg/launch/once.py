"""An error that several ranks end with is printed by the first of them, not by all at once.

Ranks tell each other through the store of ``torchrun``, which they reach before there is a process
group, or else through that of the process group. Where there is none, every rank prints its own.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from megatron_loss_agg.errors import AggregationError

_PATIENCE = timedelta(seconds=2)
"""How long a rank that ends waits for the others: torchrun kills them when one has ended."""


def refuse(error: AggregationError) -> int:
    """Print ``error`` as one line, once for all ranks that have it; return the exit code."""
    store, text = _store(), f"megatron_loss_agg: {type(error).__name__}: {error}"
    if store is None:
        print(text, file=sys.stderr, flush=True)
    elif _is_first(store, text):
        print(f"{text} (first on rank {os.environ['RANK']})", file=sys.stderr, flush=True)
    _meet(store)
    return 2


def print_uncaught_once() -> Callable[[], None]:
    """Have uncaught errors of this package printed once; return what undoes it."""
    stock = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if not isinstance(error, AggregationError):
            stock(kind, error, trace)
            return
        store = _store()
        if store is None or _is_first(store, f"{kind.__name__}: {error}"):
            stock(kind, error, trace)
        # Torch prints what this function says, with the rank before each line, after it.
        atexit.register(_meet, store)

    sys.excepthook = excepthook
    return lambda: setattr(sys, "excepthook", stock)


def _is_first(store: Store, text: str) -> bool:
    """Whether no rank has said it before; also where the store has ended with another rank."""
    try:
        return bool(store.add(text, 1) == 1)
    except RuntimeError:
        return True


def _meet(store: Store | None) -> None:
    """Wait until all ranks are here, or for `_PATIENCE`."""
    if store is None:
        return
    with contextlib.suppress(RuntimeError):  # the time is up, or the store ended
        if store.add("ended", 1) == int(os.environ["WORLD_SIZE"]):
            store.set("all ended", "")
        store.wait(["all ended"], _PATIENCE)


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
