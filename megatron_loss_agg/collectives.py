"""Collectives that raise on every rank if one rank fails or has different data; none hangs.

Inputs and results are on the CPU, whatever the backend.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loss_agg.errors import AggregationError, PeerError

_T = TypeVar("_T")


class Header(NamedTuple):
    """The first columns of every rank's row."""

    failed: bool
    records: int
    tag: int  # checksum of the records' names and order


def gather_records(
    mine: Tensor,
    capacity: int,
    group: dist.ProcessGroup | None,
    *,
    tag: int,
    failure: str,
    difference: Callable[[Sequence[Header]], AggregationError],
) -> Tensor:
    """fp64 [ranks, records, width] of each rank's ``mine``, fp64 [records, width].

    One all-gather for up to ``capacity`` records, a second one for the rest. The first has a fixed
    size, since ranks that disagree on a size hang or crash; the second runs only if all agree.

    Args:
        tag: see `tag_of`.
        failure: message for ranks that failed, with ``{}`` for their list.
        difference: makes the error that every rank raises if the headers differ.

    Raises:
        PeerError: some rank called `abandon_records`.
    """
    row = _padded_row(Header(False, len(mine), tag), mine[:capacity], capacity)
    rows = all_gather(row, group)
    headers = [Header(*row) for row in rows[:, : len(Header._fields)].tolist()]
    failed = [rank for rank, other in enumerate(headers) if other.failed]
    if failed:
        raise PeerError(
            f"{failure.format(failed)}; expected valid input on every rank: see the error of "
            "those ranks"
        )
    if len(set(headers)) > 1:
        raise difference(headers)
    records = rows[:, len(Header._fields) :].unflatten(1, (capacity, -1))[:, : len(mine)]
    if len(mine) > capacity:
        rest = all_gather(mine[capacity:].reshape(-1), group)
        records = torch.cat([records, rest.unflatten(1, (-1, mine.shape[1]))], dim=1)
    return records


def abandon_records(capacity: int, width: int, group: dist.ProcessGroup | None) -> None:
    """Call instead of `gather_records` on a rank that failed."""
    all_gather(_padded_row(Header(True, 0, 0), torch.zeros(0, width), capacity), group)


@contextlib.contextmanager
def abandoning_on_error(
    capacity: int, width: int, group: dist.ProcessGroup | None
) -> Iterator[None]:
    """Call `abandon_records` if the body fails, so that the other ranks raise PeerError."""
    try:
        yield
    except BaseException:  # SystemExit and KeyboardInterrupt too
        abandon_records(capacity, width, group)
        raise


def tag_of(names: Iterable[object]) -> int:
    """A checksum of the names and their order; below 2**53, so that fp64 holds it."""
    return crc32(repr(list(names)).encode())


def _padded_row(header: Header, records: Tensor, capacity: int) -> Tensor:
    """fp64 [len(header) + capacity * width]: the header, the records, then zeros."""
    row = torch.zeros(len(header) + capacity * records.shape[1], dtype=torch.float64)
    row[: len(header)] = torch.tensor(header, dtype=torch.float64)
    row[len(header) :][: records.numel()] = records.reshape(-1)
    return row


def all_gather(row: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """[ranks, n] from each rank's [n], in rank order."""
    if group is None or ranks_of(group) == 1:
        return row.unsqueeze(0)
    sent = fitting(row, group)
    rows = sent.new_empty(ranks_of(group) * row.numel())
    dist.all_gather_into_tensor(rows, sent, group=group)
    return rows.view(-1, row.numel()).cpu()


def ranks_of(group: dist.ProcessGroup | None) -> int:
    """Number of ranks; 1 for None."""
    return 1 if group is None else dist.get_world_size(group)


def rank_in(group: dist.ProcessGroup | None) -> int:
    """This rank's place in ``group``; 0 for None."""
    return 0 if group is None else dist.get_rank(group)


@contextlib.contextmanager
def failing_together(groups: Iterable[dist.ProcessGroup], message: str) -> Iterator[None]:
    """Make the body fail on every rank of ``groups`` if it fails on one of them.

    Raises:
        PeerError: with ``message``, where the body succeeded and another rank's failed.
    """
    failed = True
    try:
        yield
        failed = False
    finally:
        for group in groups:
            failed = any_rank(failed, group)
    if failed:
        raise PeerError(message)


def any_rank(flag: bool, group: dist.ProcessGroup) -> bool:
    """Whether ``flag`` is set on any rank of ``group``. One collective; waits for the device."""
    if dist.get_world_size(group) == 1:
        return flag
    value = fitting(torch.tensor(int(flag)), group)
    dist.all_reduce(value, op=dist.ReduceOp.MAX, group=group)
    return bool(value)


def handed_on(make: Callable[[], _T], group: dist.ProcessGroup, source: int) -> _T:
    """What ``make`` returns on rank ``source`` of ``group``, on all of its ranks; all must call.

    Raises:
        PeerError: ``make`` failed there; that rank raises its own error.
    """
    if dist.get_world_size(group) == 1:
        return make()
    box: list[Any] = [None]
    try:
        if dist.get_rank(group) == source:
            box = [make()]
    finally:  # the others must hear of a failure, too
        device = fitting(torch.empty(0), group).device
        with torch.no_grad():
            dist.broadcast_object_list(box, dist.get_global_rank(group, source), group, device)
    if box[0] is None:
        raise PeerError(
            "the rank that plans the step for this one failed; expected it to succeed: see its "
            "error"
        )
    found: _T = box[0]
    return found


def fitting(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``x`` where ``group``'s backend takes it: on its own device if it can stay there."""
    backends = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
    if "gloo" not in backends.values():
        return x.to(torch.accelerator.current_accelerator() or "cpu")
    return x if backends.get(x.device.type, "gloo") != "gloo" else x.cpu()
