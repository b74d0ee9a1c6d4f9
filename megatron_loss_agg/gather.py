"""Collectives in which ranks that failed, or differ, are heard of: no rank waits for another."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loss_agg.errors import AggregationError, PeerError


class Header(NamedTuple):
    """What every rank's first row begins with."""

    failed: bool  # the rank has no units to share
    units: int
    tag: int  # differs between different units, and orders of them


def gather_units(
    mine: Tensor,
    room: int,
    group: dist.ProcessGroup | None,
    *,
    tag: int,
    failure: str,
    difference: Callable[[Sequence[Header]], AggregationError],
) -> Tensor:
    """Everybody's rows of the same units, such as terms or metrics: fp64 [ranks, units, width].

    One collective for up to ``room`` units, and a second for all further ones. The first has the
    same size whatever the units: a collective of different sizes hangs or ends the process. When
    the second is made, all ranks are known to have the same.

    Args:
        mine: fp64 [units, width], on the CPU.
        tag: see `tag_of`.
        failure: what to say of ranks that failed, with a place for them.
        difference: the error to raise, on every rank, where these headers are not all the same.

    Raises:
        PeerError: some rank failed (see `abandon_units`).
    """
    header = Header(False, len(mine), tag)
    rows = gather_rows(row_of(header, mine[:room], room), group)
    headers = [Header(*row) for row in rows[:, : len(header)].tolist()]
    failures = [rank for rank, other in enumerate(headers) if other.failed]
    if failures:
        raise PeerError(
            f"{failure.format(failures)}; expected every rank's to be valid: see the error of "
            "those ranks"
        )
    if len(set(headers)) > 1:
        raise difference(headers)
    units = rows[:, len(header) :].unflatten(1, (room, -1))[:, : len(mine)]
    if len(mine) > room:
        rest = gather_rows(mine[room:].reshape(-1), group)
        units = torch.cat([units, rest.unflatten(1, (-1, mine.shape[1]))], dim=1)
    return units


def tag_of(units: Iterable[object]) -> int:
    """A number that differs between different units, and orders of them; below 2**53."""
    return crc32(repr(list(units)).encode())


def abandon_units(room: int, width: int, group: dist.ProcessGroup | None) -> None:
    """Stand in for `gather_units` on a rank that failed."""
    gather_rows(row_of(Header(True, 0, 0), torch.zeros(0, width), room), group)


def row_of(header: Header, units: Tensor, room: int) -> Tensor:
    """fp64 of one size: the header, the units, and zeros up to the end."""
    row = torch.zeros(len(header) + room * units.shape[1], dtype=torch.float64)
    row[: len(header)] = torch.tensor(header, dtype=torch.float64)
    row[len(header) :][: units.numel()] = units.reshape(-1)
    return row


def gather_rows(row: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """[ranks, n] out of everybody's [n], in rank order; on the CPU on both ends."""
    if group is None or dist.get_world_size(group) == 1:
        return row.unsqueeze(0)
    sent = row.to(communication_device(group))
    rows = sent.new_empty(dist.get_world_size(group) * row.numel())
    dist.all_gather_into_tensor(rows, sent, group=group)
    return rows.view(-1, row.numel()).cpu()


@contextlib.contextmanager
def failing_together(groups: Iterable[dist.ProcessGroup], elsewhere: str) -> Iterator[None]:
    """Let the ranks of ``groups`` hear if the body fails on one of them; see `any_of`.

    Raises:
        PeerError: ``elsewhere``, where the body succeeds and another rank's fails.
    """
    failed = True
    try:
        yield
        failed = False
    finally:
        for group in groups:
            failed = any_of(failed, group)
    if failed:
        raise PeerError(elsewhere)


def any_of(flag: bool, group: dist.ProcessGroup) -> bool:
    """Whether some rank of ``group`` sets ``flag``. One collective, and a wait for it."""
    if dist.get_world_size(group) == 1:
        return flag
    told = torch.tensor(int(flag), dtype=torch.int, device=communication_device(group))
    dist.all_reduce(told, op=dist.ReduceOp.MAX, group=group)
    return bool(told)


def communication_device(group: dist.ProcessGroup) -> torch.device:
    """The device that ``group``'s backend carries tensors on."""
    if "gloo" in dist.get_backend(group):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
