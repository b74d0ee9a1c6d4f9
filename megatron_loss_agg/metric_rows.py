"""What ranks tell each other about their metrics: one row of a fixed size, then the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loss_agg.errors import PeerError, ReportError
from megatron_loss_agg.exchange import gather_rows

COLUMNS = 3
"""Numbers of a metric."""
METRICS_A_ROW = 32


class _Header(NamedTuple):
    """What every rank's first row begins with, so that ranks which differ can tell."""

    failed: bool  # the rank has no metrics to reduce
    tag: int  # differs between different metrics, and orders of them


def exchange_metrics(kinds: Sequence[str], mine: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Collect everybody's metrics: fp64 [ranks, metrics, COLUMNS], in rank order.

    One collective for up to `METRICS_A_ROW` metrics, and a second for all further ones. The first
    has the same size whatever the metrics: a collective of different sizes hangs or ends the
    process. When the second is made, all ranks are known to have the same.

    Args:
        kinds: what each metric is called, kind included; the same on every rank.
        mine: fp64 [metrics, COLUMNS], on the CPU.

    Raises:
        PeerError: some rank failed.
        ReportError: ranks have different metrics; every rank of ``group`` raises.
    """
    header = _Header(False, crc32(repr(list(kinds)).encode()))
    first, rest = mine[:METRICS_A_ROW], mine[METRICS_A_ROW:]
    rows = gather_rows(_row_of(header, first), group)
    headers = [_Header(*row) for row in rows[:, : len(header)].tolist()]
    _check_headers(headers, header, kinds)
    cells = rows[:, len(header) :][:, : first.numel()]
    if rest.numel():
        cells = torch.cat([cells, gather_rows(rest.reshape(-1), group)], dim=1)
    return cells.unflatten(1, (len(kinds), COLUMNS))


def abandon_metrics(group: dist.ProcessGroup | None) -> None:
    """Stand in for `exchange_metrics` on a rank that has none to reduce."""
    gather_rows(_row_of(_Header(True, 0), torch.zeros(0, COLUMNS)), group)


def _row_of(header: _Header, metrics: Tensor) -> Tensor:
    """fp64 of one size: the header, the metrics, and zeros up to the end."""
    row = torch.zeros(len(header) + COLUMNS * METRICS_A_ROW, dtype=torch.float64)
    row[: len(header)] = torch.tensor(header, dtype=torch.float64)
    row[len(header) :][: metrics.numel()] = metrics.reshape(-1)
    return row


def _check_headers(headers: Sequence[_Header], mine: _Header, kinds: Sequence[str]) -> None:
    """Raise, on every rank that has not failed itself, unless all are well and agree."""
    failures = [rank for rank, header in enumerate(headers) if header.failed]
    if failures:
        raise PeerError(
            f"bad metrics on rank(s) {failures} of the group; expected every rank's to be valid: "
            "see the error of those ranks"
        )
    others = [rank for rank, header in enumerate(headers) if header != mine]
    if others:
        raise ReportError(
            f"this rank reports {', '.join(kinds) or 'nothing'}, and rank(s) {others} of the group "
            "other metrics; expected the same names and kinds on every rank"
        )
