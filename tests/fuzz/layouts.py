"""Layouts, shifted masks and sequence means on one process."""

from __future__ import annotations

import contextlib
import math
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from megatron_loss_agg import CPLayout, Microbatch, SequenceMean, predicting_mask
from tests.fuzz import inputs
from tests.fuzz.draw import F64, Draw
from tests.fuzz.judge import Refused, called, require
from tests.fuzz.reading import Read, listed


def positions(kind: str, whole: Any, cp: int, rank: int) -> list[int]:
    """Those that a rank holds, sequence by sequence."""
    if kind == "contiguous":
        return [*range(rank * whole // cp, (rank + 1) * whole // cp)]
    starts = [0, whole] if kind == "bshd" else whole.tolist()
    held: list[int] = []
    for begin, end in pairwise(starts):
        if cp == 1:
            held += range(begin, end)
            continue
        chunk = (end - begin) // (2 * cp)
        for c in (rank, 2 * cp - 1 - rank):
            held += range(begin + c * chunk, begin + (c + 1) * chunk)
    return held


def layout(draw: Draw) -> None:
    """The positions of every rank, `shard`, and `unshard` of all parts with its gradient."""
    kind, cp = draw.choice(("bshd", "thd", "contiguous")), draw.choice((1, 2, 3, 4))
    if kind == "thd":
        lengths = [2 * cp * draw.randrange(3) for _ in range(draw.randrange(4))]
        whole: Any = torch.tensor([0, *accumulate(lengths)])
        whole = draw.maybe(whole.to(draw.choice((torch.int32, torch.int64))))
    else:
        whole = draw.option(2 * cp * draw.randrange(5), 7, -4, 2.0)
    size, rank = draw.option(cp, 5, 2.0), draw.option(draw.randrange(cp), cp)
    made = called(lambda: getattr(CPLayout, kind)(whole, size, rank), strange=draw.strange)
    if not all(isinstance(x, (int, torch.Tensor)) for x in (whole, size, rank)):
        raise Refused  # by its annotation
    held = positions(kind, whole, size, rank)
    require(made.index.tolist() == held, f"{made.index.tolist()} for {held}")
    shape, dim = draw.choice((((), ()), ((2,), ()), ((), (3,)), ((2,), (1, 2)))), 0
    dim = len(shape[0])
    full = (*shape[0], made.total_len, *shape[1])
    x = draw.maybe(draw.dressed(torch.randn(full, dtype=F64)))
    axis = draw.option(draw.choice((dim, dim - len(full))), 5, "seq")
    part = called(lambda: made.shard(x, axis), strange=draw.strange)
    if part.layout != torch.strided:
        raise Refused  # as it may be, see docs/limits
    wanted = torch.stack([x.select(axis, t) for t in held], axis) if held else part[:0]
    require(part.shape[axis] == len(held) and repr(listed(part)) == repr(listed(wanted)), "shard")
    if draw.strange:
        return
    ranks = [getattr(CPLayout, kind)(whole, cp, r) for r in range(cp)]
    parts = [of_rank.shard(x, axis).detach().requires_grad_() for of_rank in ranks]
    joined = made.unshard(parts, dim=axis)
    pull = torch.randn(full, dtype=F64)
    (joined * pull).sum().backward()
    require(torch.equal(joined, x), "unshard")
    require(
        all(torch.equal(p.grad, r.shard(pull, axis)) for p, r in zip(parts, ranks, strict=True)),
        "gradient",
    )
    others = draw.choice(
        (
            parts[:-1],
            [*parts, *parts],
            [None],
            parts[0],
        )
    )
    if cp > 1 and made.total_len:
        with contextlib.suppress(Refused):
            called(lambda: made.unshard(others, dim=axis), strange=True)
            require(False, "unshard took other parts")


def shifted(draw: Draw) -> None:
    """`predicting_mask`."""
    given = inputs.microbatch(draw)
    masks = [given.get(name) for name in ("loss_mask", "cu_seqlens", "cu_seqlens_padded")]
    moved = called(lambda: predicting_mask(*masks), strange=draw.strange)
    of = Read.of({k: v for k, v in given.items() if not k.endswith("ids")})
    wanted = [0.0] * len(of.values)
    for places in of.places:
        for t, following in pairwise(places):
            wanted[t] = of.values[following]
    require(moved.dtype == masks[0].dtype and moved.shape == masks[0].shape, "another tensor")
    require(listed(moved) == wanted, f"{listed(moved)} for {wanted}")


def sequence_mean(draw: Draw) -> None:
    """`SequenceMean` and its gradient."""
    given = inputs.microbatch(draw)
    whole = called(lambda: Microbatch(**given), strange=draw.strange)
    whole = draw.option(whole)
    mean = called(lambda: SequenceMean(whole), strange=draw.strange)
    of = Read.of(given)
    dtype = draw.choice((F64, torch.float32))
    numbers = [
        draw.uniform(-3, 3) if m else draw.choice((1.0, math.nan, math.inf)) for m in of.values
    ]
    x = torch.tensor(numbers, dtype=dtype).view(given["loss_mask"].shape)
    x = draw.maybe(draw.dressed(x).detach().requires_grad_())
    out = called(lambda: mean(x), strange=draw.strange)
    if draw.strange:
        return
    pull = torch.randn(out.shape, dtype=dtype)
    (out * pull).sum().backward()
    wanted, slope = [0.0] * len(of.values), [0.0] * len(of.values)
    values, pulls = listed(x), listed(pull)
    for places in of.places:
        total = math.fsum(of.values[t] for t in places)
        if total:
            value = math.fsum(of.values[t] * values[t] for t in places if of.values[t]) / total
            back = math.fsum(pulls[t] for t in places)
            for t in places:
                wanted[t], slope[t] = value, of.values[t] * back / total
    for what, got, numbers in (("mean", out, wanted), ("gradient", x.grad, slope)):
        _close(what, got, numbers, 1e-13 if dtype == F64 else 2e-6)


def _close(what: str, got: Tensor, wanted: list[float], room: float) -> None:
    off = max([0.0, *(abs(a - b) for a, b in zip(listed(got), wanted, strict=True))])
    require(off <= room * 10, f"{what}: {off:.1e} off")
