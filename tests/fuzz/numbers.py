"""Weighted sums and metrics on one process."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from megatron_loss_agg import weighted_sum
from megatron_loss_agg.report import Max, Mean, Min, reduce_reports
from tests.fuzz.draw import F64, FLOATS, INTEGERS, NUMBERS, Draw
from tests.fuzz.judge import called, require
from tests.fuzz.reading import listed

SHAPES = ((), (0,), (1,), (7,), (2, 3), (2, 0, 2), (1, 9))


def pair_of(draw: Draw) -> tuple[Any, Any]:
    """Values and weights of one shape; values of weight 0 may be anything."""
    shape = draw.choice(SHAPES)
    count = math.prod(shape)
    weights = [draw.choice((0.0, 0.0, 1.0, 2.0, 0.3)) for _ in range(count)]
    values = [draw.uniform(-9, 9) if w else draw.choice((1.0, *NUMBERS)) for w in weights]
    as_weights, as_values = draw.choice((*FLOATS, *INTEGERS)), draw.choice((*FLOATS, *INTEGERS))
    w = torch.tensor(weights, dtype=F64).view(shape).to(as_weights)
    v = torch.tensor(values, dtype=F64).view(shape)
    if not as_values.is_floating_point:
        v = v.nan_to_num(0, 0, 0).clamp(0, 9)
    return draw.maybe(draw.dressed(v.to(as_values))), draw.maybe(draw.dressed(w))


def products(values: Tensor, weights: Tensor) -> list[float]:
    pairs = zip(listed(values), listed(weights), strict=True)
    return [v * w for v, w in pairs if w != 0]


def near(what: str, got: float, terms: list[float], dtype: torch.dtype, scale: float = 1.0) -> None:
    """``got`` is the sum of ``terms`` over ``scale``, or not finite where ``dtype`` overflows."""
    size = sum(map(abs, terms))
    limit = torch.finfo(dtype)
    # Half precision holds 1e-3; sums are in fp32 at least.
    if not size < limit.max / 4 or size / scale > limit.max / 4:
        inside = math.isfinite(size) and math.isfinite(got)
        require(not inside or abs(got * scale - math.fsum(terms)) <= 0.01 * size, f"{what}: {got}")
        return
    room = 16 * max(limit.eps, 1e-16) * size / scale + limit.smallest_normal
    wanted = math.fsum(terms) / scale
    require(abs(got - wanted) <= room, f"{what}: {got!r}, and the oracle {wanted!r}")


def summed(draw: Draw) -> None:
    """`weighted_sum` and its gradient."""
    losses, w = pair_of(draw)
    total = called(lambda: weighted_sum(w, losses), strange=draw.strange)
    floats = [x.dtype for x in (w, losses) if x.is_floating_point()] or [torch.float32]
    dtype = torch.promote_types(floats[0], floats[-1])
    require(total.dtype == dtype and total.dim() == 0, f"a {total.dtype} of shape {total.shape}")
    near("sum", total.item(), products(losses, w), dtype)
    if losses.requires_grad:
        leaf = losses.detach().clone().requires_grad_()
        weighted_sum(w, leaf).backward()
        pairs = list(zip(listed(leaf.grad), listed(w), strict=True))
        require(all(g == b or abs(g - b) <= 1e-2 * abs(b) or b != b for g, b in pairs), "gradient")


def reported(draw: Draw) -> None:
    """Metrics of one or two microbatches, reduced."""
    pairs = [pair_of(draw) for _ in range(draw.randrange(1, 3))]
    reports = [
        {
            name: called(lambda of=of, v=v, w=w: of(v, w), strange=draw.strange)
            for name, of in (("mean", Mean.of), ("max", Max.of), ("min", Min.of))
        }
        for v, w in pairs
    ]
    reports = [{name: draw.option(x, torch.ones(2)) for name, x in of.items()} for of in reports]
    given = draw.option([draw.option(of) for of in reports])
    found = called(lambda: reduce_reports(given, None), strange=draw.strange)
    if draw.strange:
        return
    kept = [v for x, w in pairs for v, b in zip(listed(x), listed(w), strict=True) if b != 0]
    require(found["max"] == max([-math.inf, *kept]), f"maximum {found['max']}")
    require(found["min"] == min([math.inf, *kept]), f"minimum {found['min']}")
    count = math.fsum(b for _, w in pairs for b in listed(w))
    terms = [x for v, w in pairs for x in products(v, w)]
    near("mean", found["mean"], terms if count else [], torch.float32, count or 1.0)
