"""Compares all ranks' settings before the first step.

Through the process group's store and not by a collective: a rank without a hook would never join
one, and the others would hang.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store, _get_default_store

from megatron_loss_agg.aggregation import Term
from megatron_loss_agg.errors import AggregationError, ModeError, PeerError
from megatron_loss_agg.mcore.extension import Extension
from megatron_loss_agg.mcore.host import Call, ParallelGroups

_MARGIN = timedelta(seconds=5)
"""For ranks that wait for an answer: the rank that gives it has waited for the others."""

_Ranks = dict[str, list[int]]
"""Settings as JSON -> the ranks that have them; "" -> the ranks that are absent."""

_rounds: Counter[str] = Counter()  # a key of the store serves once


class Agreement(Extension):
    """Compares the terms, and the settings of the hook and its extensions, over all ranks, once.

    Args:
        patience: seconds that ranks wait for each other's hook before the first step.
    """

    def __init__(self, patience: float = 60.0) -> None:
        self._patience = timedelta(seconds=patience)
        self._agreed = False

    def start(self, call: Call) -> None:
        if self._agreed:
            return
        terms = {f"term {name!r}": described(term) for name, term in call.terms.items()}
        settings = {**terms, "order of terms": [*call.terms], **call.settings}
        agree(settings, call.groups, self._patience)
        self._agreed = True


def agree(settings: Mapping[str, Any], groups: ParallelGroups, patience: timedelta) -> None:
    """Compare ``settings`` over all ranks of the model. All of them must call.

    Args:
        patience: how long ranks wait for each other.

    Raises:
        ModeError: some setting differs; on every rank.
        PeerError: a rank has not called in time; on every other rank.
    """
    known: _Ranks = {json.dumps(settings): [dist.get_rank()]}
    timeout = patience
    # What a group knows, each of its ranks passes on to its group along the next axis.
    for axis, group in (("tp", groups.tp), ("cp", groups.cp), ("dp", groups.dp), ("pp", groups.pp)):
        ranks = dist.get_process_group_ranks(group)
        if len(ranks) > 1:
            known = _exchange(known, f"{axis} {ranks}", ranks, timeout)
            timeout += 2 * _MARGIN  # a rank that waited for others comes later to the next group
    absent = sorted(known.pop("", []))
    if absent:
        raise PeerError(
            f"rank(s) {absent} have not called a forward-backward function with a LossHook within "
            f"{patience.total_seconds():g} s; expected the hook, or the same --loss-aggregation "
            "flags, on every rank of the model: give extensions=[Agreement(patience=...)] if some "
            "are later"
        )
    if len(known) > 1:
        raise _difference(known)


def _exchange(mine: _Ranks, name: str, ranks: Sequence[int], timeout: timedelta) -> _Ranks:
    """What all of ``ranks`` know together; the first of them merges it."""
    store = _get_default_store()
    _rounds[name] += 1
    key = f"megatron_loss_agg/{name}/{_rounds[name]}"
    first = ranks[0]
    store.set(f"{key}/{dist.get_rank()}", json.dumps(mine))
    if dist.get_rank() == first:
        store.set(f"{key}/all", json.dumps(_merged(store, key, ranks, timeout)))
    if not _arrived(store, [f"{key}/all"], timeout + _MARGIN):
        return {**mine, "": sorted({*mine.get("", []), first})}
    found: _Ranks = json.loads(store.get(f"{key}/all"))
    return found


def _merged(store: Store, key: str, ranks: Sequence[int], timeout: timedelta) -> _Ranks:
    """What ``ranks`` know together; the ranks that are absent, too."""
    merged: _Ranks = {}
    _arrived(store, [f"{key}/{rank}" for rank in ranks], timeout)
    for rank in ranks:
        arrived = store.check([f"{key}/{rank}"])
        known: _Ranks = json.loads(store.get(f"{key}/{rank}")) if arrived else {"": [rank]}
        for settings, of_ranks in known.items():
            merged[settings] = sorted({*merged.get(settings, []), *of_ranks})
    return merged


def _arrived(store: Store, keys: list[str], timeout: timedelta) -> bool:
    try:
        store.wait(keys, timeout)
    except dist.DistStoreError:  # the time is up
        return False
    return True


def _difference(known: _Ranks) -> AggregationError:
    of_ranks = [(json.loads(settings), ranks) for settings, ranks in sorted(known.items())]
    names = dict.fromkeys(name for settings, _ in of_ranks for name in settings)
    differ = [n for n in names if len({str(settings.get(n)) for settings, _ in of_ranks}) > 1]
    found = "; ".join(
        f"{', '.join(f'{name}={settings.get(name)}' for name in differ)} on rank(s) {ranks}"
        for settings, ranks in of_ranks
    )
    return ModeError(
        f"ranks have different settings: {found}; expected the same LossHook, or the same "
        "--loss-aggregation flags, on every rank"
    )


def described(term: Term) -> str:
    """A term in words that do not differ between processes, as a function's address does."""
    aggregation = term.aggregation
    given = {
        f.name: getattr(aggregation, f.name) for f in dataclasses.fields(aggregation) if f.compare
    }
    if given["divisor"] is not None:
        given["divisor"] = float(given["divisor"])  # 2, 2.0 and numpy's are the same
    if given["function"] is not None:
        given["function"] = _described_function(given["function"])
    options = ", ".join(f"{name}={value!r}" for name, value in given.items() if value is not None)
    return f"{term.coefficient!r} * ({options})"


def _described_function(function: Any) -> str:
    """Its name, the code and the numbers and texts that it was made with."""
    if isinstance(function, functools.partial):
        values = [*function.args, *function.keywords.items()]
        return f"{_described_function(function.func)} with {_plain(values)}"
    name = getattr(function, "__qualname__", type(function).__qualname__)
    code = getattr(function, "__code__", None)
    if code is None:
        return name
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    made_with = [*code.co_consts[1:], *(function.__defaults__ or ()), *cells]
    return f"{name} of code {zlib.crc32(code.co_code):x} with {_plain(made_with)}"


def _plain(values: Sequence[Any]) -> list[Any]:
    """Those whose text is the same in every process."""
    kinds = (int, float, str, type(None))
    pairs = (x if isinstance(x, tuple) else (x,) for x in values)
    return [x for pair in pairs for x in pair if isinstance(x, kinds)]
