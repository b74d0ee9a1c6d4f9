"""Compares all ranks' settings before the first step.

Through the process group's store and not by a collective: a rank without a hook would never join
one, and the others would hang.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from megatron_loss_agg.describe import terms_in_words
from megatron_loss_agg.errors import OptionError, PeerError
from megatron_loss_agg.mcore.extension import Extension
from megatron_loss_agg.mcore.host import Call

_MARGIN = timedelta(seconds=5)
"""For ranks that wait for an answer: the rank that gives it has waited for the others."""

_Ranks = dict[str, list[int]]
"""Settings as JSON -> the ranks that have them; "" -> the ranks that are absent."""

_rounds: Counter[str] = Counter()  # a key of the store serves once


class Agreement(Extension):
    """Compares the terms, and the settings of the hook and its extensions, over all ranks, once.

    Args:
        patience: seconds that ranks wait for each other's hook.
    """

    def __init__(self, patience: float = 60.0) -> None:
        self._patience = timedelta(seconds=patience)
        self._agreed = False

    def start(self, call: Call) -> None:
        """All ranks of the model must call.

        Raises:
            OptionError: some setting differs.
            PeerError: a rank has not called in time.
        """
        if self._agreed:
            return
        settings = {"terms": terms_in_words(call.terms), **call.settings}
        known: _Ranks = {json.dumps(settings): [dist.get_rank()]}
        timeout = self._patience
        # What a group knows, each of its ranks passes on to its group along the next axis.
        for axis in ("tp", "cp", "dp", "pp"):
            ranks = dist.get_process_group_ranks(getattr(call.groups, axis))
            if len(ranks) > 1:
                known = _exchanged(known, f"{axis} {ranks}", ranks, timeout)
                timeout += 2 * _MARGIN  # a rank that waited comes later to the next group
        absent = known.pop("", [])
        if absent:
            raise PeerError(
                f"rank(s) {absent} have not called a LossHook's schedule within "
                f"{self._patience.total_seconds():g} s; expected the same hook, or the same "
                "--loss-aggregation flags, on every rank: for later ones Agreement(patience=...)"
            )
        if len(known) > 1:
            raise OptionError(
                f"ranks have different settings: {_difference(known)}; expected the same LossHook, "
                "or the same --loss-aggregation flags, on every rank"
            )
        self._agreed = True


def _exchanged(mine: _Ranks, name: str, ranks: Sequence[int], timeout: timedelta) -> _Ranks:
    """What all of ``ranks`` know together; the first of them merges it."""
    store, rank, first = _get_default_store(), dist.get_rank(), ranks[0]
    _rounds[name] += 1
    key = f"megatron_loss_agg/{name}/{_rounds[name]}"
    store.set(f"{key}/{rank}", json.dumps(mine))
    if rank == first:
        with contextlib.suppress(dist.DistStoreError):  # the time is up
            store.wait([f"{key}/{other}" for other in ranks], timeout)
        merged: _Ranks = {}
        for other in ranks:
            here = store.check([f"{key}/{other}"])
            known: _Ranks = json.loads(store.get(f"{key}/{other}")) if here else {"": [other]}
            for settings, of_ranks in known.items():
                merged[settings] = sorted({*merged.get(settings, []), *of_ranks})
        store.set(f"{key}/all", json.dumps(merged))
    try:
        store.wait([f"{key}/all"], timeout + _MARGIN)
    except dist.DistStoreError:
        return {**mine, "": sorted({*mine.get("", []), first})}
    return json.loads(store.get(f"{key}/all"))


def _difference(known: _Ranks) -> str:
    """The settings that differ, and who has which."""
    of_ranks = [(json.loads(settings), ranks) for settings, ranks in sorted(known.items())]
    names = dict.fromkeys(name for settings, _ in of_ranks for name in settings)
    differ = [n for n in names if len({str(settings.get(n)) for settings, _ in of_ranks}) > 1]
    return "; ".join(
        f"{', '.join(f'{name}={settings.get(name)}' for name in differ)} on rank(s) {ranks}"
        for settings, ranks in of_ranks
    )
