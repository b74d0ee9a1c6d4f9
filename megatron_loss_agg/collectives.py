"""Collectives that raise on every rank if one rank fails or has different data; none hangs.

Inputs and results are on the CPU, whatever the backend.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from megatron_loss_agg.errors import AggregationError, PeerError

_T = TypeVar("_T")


def gathered(
    mine: Tensor,
    group: dist.ProcessGroup | None,
    *,
    tag: int,
    failure: str,
    difference: AggregationError,
) -> list[Tensor]:
    """Each rank's ``mine``, a vector, whose length may differ between ranks.

    Two collectives: one of fixed size, since ranks that disagree on a size hang or crash, and then
    the vectors, if all ranks have one.

    Args:
        tag: what must be the same on every rank, see `tag_of`.
        failure: message for ranks that failed, with ``{}`` for their list.
        difference: what every rank raises if tags differ.

    Raises:
        PeerError: some rank called `abandon`.
    """
    if ranks_of(group) == 1:
        return [mine]
    headers = all_gather(torch.tensor([0, tag, len(mine)]), group).tolist()
    if failed := [rank for rank, header in enumerate(headers) if header[0]]:
        raise PeerError(
            f"{failure.format(failed)}; expected valid input on every rank: see the error of "
            "those ranks"
        )
    if any(header[1] != tag for header in headers):
        raise difference
    sizes = [size for _, _, size in headers]
    if not max(sizes):
        return [mine] * len(sizes)
    rows = all_gather(pad(mine, (0, max(sizes) - len(mine))), group)
    return [row[:size] for row, size in zip(rows, sizes, strict=True)]


def abandon(group: dist.ProcessGroup | None) -> None:
    """Call instead of `gathered` on a rank that failed: the others raise PeerError."""
    all_gather(torch.tensor([1, 0, 0]), group)


@contextlib.contextmanager
def abandoning_on_error(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Call `abandon` if the body fails."""
    try:
        yield
    except BaseException:  # SystemExit and KeyboardInterrupt too
        abandon(group)
        raise


def tag_of(names: Iterable[object]) -> int:
    """A checksum of the names and their order."""
    return crc32(repr(list(names)).encode())


def all_gather(row: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """[ranks, n] from each rank's [n], in rank order."""
    if group is None or ranks_of(group) == 1:
        return row.unsqueeze(0)
    sent = for_backend(row, group)
    rows = sent.new_empty(ranks_of(group) * row.numel())
    dist.all_gather_into_tensor(rows, sent, group=group)
    return rows.view(-1, row.numel()).cpu()


def ranks_of(group: dist.ProcessGroup | None) -> int:
    """Number of ranks; 1 for None."""
    return 1 if group is None else dist.get_world_size(group)


@contextlib.contextmanager
def failing_together(groups: Iterable[dist.ProcessGroup], message: str) -> Iterator[None]:
    """Raise PeerError with ``message`` if the body fails on another rank of ``groups`` alone."""
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
    return bool(all_gather(torch.tensor([int(flag)]), group).any())


def handed_on(make: Callable[[], _T], group: dist.ProcessGroup, source: int) -> _T:
    """What ``make`` returns on rank ``source`` of ``group``, on all of its ranks; all must call.

    If it fails there, the others raise PeerError.
    """
    if dist.get_world_size(group) == 1:
        return make()
    box: list[Any] = [None]
    try:
        if dist.get_rank(group) == source:
            box = [make()]
    finally:  # the others must hear of a failure, too
        device = for_backend(torch.empty(0), group).device
        with torch.no_grad():
            dist.broadcast_object_list(box, dist.get_global_rank(group, source), group, device)
    if box[0] is None:
        raise PeerError(
            "the rank that plans the step for this one failed; expected it to succeed: see its "
            "error"
        )
    found: _T = box[0]
    return found


def for_backend(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``x`` where ``group``'s backend takes it: on its own device if it can stay there."""
    backends = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
    if "gloo" not in backends.values():
        return x.to(torch.accelerator.current_accelerator() or "cpu")
    return x if backends.get(x.device.type, "gloo") != "gloo" else x.cpu()
