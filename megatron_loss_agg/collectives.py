"""Collectives. Most of them raise on every rank if one rank fails, instead of hanging."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from megatron_loss_agg.errors import PeerError

_T = TypeVar("_T")

# torch 2.13 renamed it, and warns of the former name.
all_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Failure(NamedTuple):
    """The error of a rank that failed, sent instead of its part."""

    error: str


def gather_objects(mine: Callable[[], _T], group: dist.ProcessGroup | None, doing: str) -> list[_T]:
    """The results of ``mine`` on all ranks of ``group``, in rank order; all ranks must call.

    Args:
        mine: makes this rank's part, an object that can be pickled.
        doing: the work of the ranks, for the error, such as "counting the step".

    Raises:
        PeerError: ``mine`` failed on another rank. The rank that failed raises its own error.
    """
    if ranks_of(group) == 1:
        return [mine()]
    try:
        part = mine()
    except BaseException as error:  # SystemExit and KeyboardInterrupt too
        send_failure(error, group)
        raise
    parts = _all_gather_object(part, group)
    failures = {rank: x.error for rank, x in enumerate(parts) if isinstance(x, Failure)}
    if failures:
        first = min(failures)
        raise PeerError(
            f"rank(s) {[*failures]} of the group failed while {doing}. Fix the error of rank {first} "
            f"first: {failures[first]}"
        )
    return parts


def send_failure(error: BaseException, group: dist.ProcessGroup | None) -> None:
    """Take part in the others' `gather_objects` on a rank that failed: they raise PeerError."""
    if ranks_of(group) > 1:
        _all_gather_object(Failure(f"{type(error).__name__}: {error}"), group)


def ranks_of(group: dist.ProcessGroup | None) -> int:
    """Number of ranks in ``group``; 1 for None."""
    return 1 if group is None else dist.get_world_size(group)


def all_gather(row: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[ranks, n] on the CPU, from each rank's [n], in rank order."""
    if ranks_of(group) == 1:
        return row.cpu().unsqueeze(0)
    sent = for_backend(row, group)
    rows = sent.new_empty(ranks_of(group) * row.numel())
    all_gather_into(rows, sent, group=group)
    return rows.view(-1, row.numel()).cpu()


def any_rank(flag: bool, group: dist.ProcessGroup) -> bool:
    """True if ``flag`` is set on any rank of ``group``. Waits for the device."""
    return bool(all_gather(torch.tensor([int(flag)]), group).any())


@contextlib.contextmanager
def failing_together(
    groups: Iterable[dist.ProcessGroup], message: str, when: bool = True
) -> Iterator[None]:
    """Raise PeerError with ``message`` if the body failed only on other ranks of ``groups``.

    All ranks of these groups must enter. A failure spreads through the groups in the given order.

    Args:
        when: must be the same on all ranks. If False, no rank waits for the others, and an error is
            raised only on the rank where it occurs.
    """
    if not when:
        yield
        return
    failed = True
    try:
        yield
        failed = False
    finally:
        for group in groups:
            failed = any_rank(failed, group)
    if failed:
        raise PeerError(message)


@contextlib.contextmanager
def failing_in_broadcast(group: dist.ProcessGroup) -> Iterator[None]:
    """Wrap the code before a `broadcast`: if it fails on rank 0, the others raise PeerError."""
    try:
        yield
    except BaseException as error:  # SystemExit and KeyboardInterrupt too
        if ranks_of(group) > 1 and dist.get_rank(group) == 0:
            _broadcast_object(Failure(f"{type(error).__name__}: {error}"), group)
        raise


def broadcast(x: Any, group: dist.ProcessGroup, doing: str = "planning the step") -> Any:
    """``x`` from rank 0 of ``group``, on all ranks of the group; all must call.

    Args:
        doing: the work of rank 0, for the error.

    Raises:
        PeerError: rank 0 failed earlier, in `failing_in_broadcast`.
    """
    if dist.get_world_size(group) == 1:
        return x
    x = _broadcast_object(x, group)
    if isinstance(x, Failure):
        raise PeerError(
            f"rank 0 of the group failed while {doing} for this rank. Fix its error first: {x.error}"
        )
    return x


def broadcast_result(
    make: Callable[[], _T], group: dist.ProcessGroup, doing: str = "planning the step"
) -> _T:
    """The result of ``make`` on rank 0 of ``group``, on all ranks of the group; see `broadcast`."""
    result = None
    with failing_in_broadcast(group):
        if dist.get_rank(group) == 0:
            result = make()
    shared: _T = broadcast(result, group, doing)
    return shared


def for_backend(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``x`` on a device that ``group``'s backend accepts: its present one, if possible."""
    backends = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
    if "gloo" not in backends.values():
        return x.to(torch.accelerator.current_accelerator() or "cpu")
    return x.cpu() if backends.get(x.device.type, "gloo") == "gloo" else x


class SumOverRanks(torch.autograd.Function):
    """All-reduce in the forward pass, and of the gradients in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


def _all_gather_object(part: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """The parts of all ranks, in two collectives and two waits for the device."""
    assert group is not None  # a single rank gathers nothing
    data = torch.frombuffer(bytearray(pickle.dumps(part)), dtype=torch.uint8)
    with torch.no_grad():
        sizes = all_gather(torch.tensor([len(data)]), group).flatten().tolist()
        rows = all_gather(pad(data, (0, max(sizes) - len(data))), group)
    return [pickle.loads(bytes(x[:n].numpy())) for x, n in zip(rows, sizes, strict=True)]


def _broadcast_object(x: Any, group: dist.ProcessGroup) -> Any:
    box = [x]
    device = for_backend(torch.empty(0), group).device
    with torch.no_grad():
        dist.broadcast_object_list(box, dist.get_global_rank(group, 0), group, device)
    return box[0]
