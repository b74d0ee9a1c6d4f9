"""Planning a step: the masks of one rank, and the exchange of the samples of many ranks.

The exchange is run in one process, for one rank of a process group of the stated size. The parts of
the other ranks were recorded beforehand in the same way, so the time is one rank's work, without
the network.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.results import Results
from benchmarks.shapes import LAYOUTS, MODE, microbatch
from megatron_loss_agg import Microbatch, StepPlan, collectives, weighted_sum

NUMBER = 8
"""Microbatches of a step on one rank, at most."""


def measure(results: Results) -> None:
    samples, length = results.shapes.plan
    for layout in LAYOUTS:
        step = [Microbatch(**microbatch(samples // NUMBER, length, layout))] * NUMBER
        work = functools.partial(StepPlan.build, MODE, step)
        (seconds,) = results.least_seconds([work], 40)
        where = f"{samples} x {length} {layout}, {NUMBER} microbatches"
        results.add("plan of one rank", where, 1e3 * seconds, "ms", "plan_ms")
    for samples, length in results.shapes.losses[1:]:
        for layout in LAYOUTS:
            _weighed(results, samples, length, layout)
    for samples in results.shapes.samples:
        for ranks in results.shapes.ranks:
            _exchange(results, samples, ranks)


def _weighed(results: Results, samples: int, length: int, layout: str) -> None:
    """Compare planning, weights and weighted sums, forward and backward, with masked means."""
    batch = microbatch(samples, length, layout)
    mask = batch["loss_mask"]
    losses = [torch.randn(mask.shape).requires_grad_() for _ in range(NUMBER)]

    def means() -> None:
        for x in losses:
            x.grad = None
            ((x * mask).sum() / mask.sum()).backward()

    def weighed() -> None:
        plan = StepPlan.build(MODE, [Microbatch(**batch) for _ in losses])
        for i, x in enumerate(losses):
            x.grad = None
            weighted_sum(plan.weights(i), x).backward()

    base, other = (functools.partial(results.seconds, work) for work in (means, weighed))
    _, ratio = results.ratio(base, other, 60)
    where = f"{samples} x {length} {layout}, {NUMBER} microbatches"
    results.add("plan, weights and sums", where, ratio, "x masked means", f"weighed_{layout}")


def _exchange(results: Results, samples: int, ranks: int) -> None:
    with _fake_group(ranks) as group:
        rows = [_row(_planning(samples, ranks, rank, group)) for rank in range(ranks)]
        exchange = Exchange(rows)
        with _gathering_by(exchange.gather):
            (seconds,) = results.least_seconds([_planning(samples, ranks, 0, group)], 5)
    where = f"{samples:,} samples on {ranks:,} ranks"
    goal = f"exchange_ms_{samples}" if ranks == results.shapes.ranks[-1] else ""
    results.add("plan of many ranks", where, 1e3 * seconds, "ms", goal)
    results.add("sent by each", where, 1e-3 * exchange.sent_bytes, "kB")


def _planning(samples: int, ranks: int, rank: int, group: Any) -> Callable[[], StepPlan]:
    """Plans one rank's samples from their mask sums; prompts have 8 samples."""
    number = samples // ranks
    sums = (1 + torch.arange(number, dtype=torch.float64)).chunk(NUMBER)
    ids = ((rank * number + torch.arange(number)) // 8).chunk(NUMBER)
    return functools.partial(StepPlan.from_mask_sums, MODE, sums, prompt_ids=ids, group=group)


@contextlib.contextmanager
def _fake_group(ranks: int) -> Iterator[Any]:
    """This process as the first rank of a process group, without the other ranks."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def _gathering_by(gather: Callable[..., None]) -> Iterator[None]:
    """Replace the all-gather of CPU tensors by ``gather``."""
    with (
        mock.patch.object(collectives, "all_gather_into", gather),
        mock.patch.object(dist, "get_backend_config", return_value="cpu:gloo"),
    ):
        yield


class _SentAll(BaseException):
    """Raised when a rank has sent both of its rows."""


def _row(planning: Callable[[], StepPlan]) -> list[Tensor]:
    """The rows of one rank's two all-gathers."""
    sent: list[Tensor] = []

    def gather(output: Tensor, row: Tensor, **_: Any) -> None:
        """Record the row and gather as if all ranks had sent it."""
        if len(sent) < 2:
            sent.append(row.clone())
        if len(sent) == 2:
            raise _SentAll
        output.view(-1, row.numel()).copy_(row)

    with contextlib.suppress(_SentAll), _gathering_by(gather):
        planning()
    return sent


class Exchange:
    """Two all-gathers in turn, of recorded rows.

    Attributes:
        sent_bytes: bytes that a rank sends in both gathers together.
    """

    def __init__(self, rows: list[list[Tensor]]) -> None:
        self._gathered = [_padded(parts) for parts in zip(*rows, strict=True)]
        self.sent_bytes = sum(x[0].nbytes for x in self._gathered)
        self._next = 0

    def gather(self, output: Tensor, row: Tensor, **_: Any) -> None:
        gathered = self._gathered[self._next % 2]
        self._next += 1
        output.copy_(gathered.view(-1))


def _padded(rows: tuple[Tensor, ...]) -> Tensor:
    """[ranks, n]: the rows, padded to the length of the longest, like the ranks pad them."""
    padded = rows[0].new_zeros(len(rows), max(map(len, rows)))
    for i, row in enumerate(rows):
        padded[i, : len(row)] = row
    return padded
