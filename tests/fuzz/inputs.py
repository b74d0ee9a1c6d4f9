"""Microbatches and aggregations by seed, of which some arguments are strange."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch

from megatron_loss_agg import LossAggregation
from megatron_loss_agg.presets import PRESETS
from tests import oracle
from tests.fuzz.draw import F64, FLOATS, INTEGERS, Draw
from tests.fuzz.judge import called

UNITS = ("prompt", "rollout", "dataset")
ID_NAMES = tuple(f"{unit}_ids" for unit in UNITS)
MODES = sorted(oracle.INNER)
IDS = (0, -1, 7, 2**53, 2**53 + 1, -(2**63), 2**63 - 1)
MASKS = ((0.0, 1.0), (0.0,), (1.0,), (0.0, 0.25, 1.5), (0.1, 3.7), (2.0**-20, 100.0))
FAR_MASKS = ((1e-39, 0.0), (1e37, 1.0), (1e-20, 1e-37), (1e30,), (3e38,), (1e-10, 3e-39))
DIVISORS = (1, 4, 0.5, 1e-30, 3e30)
FAR_DIVISORS = (*DIVISORS, 1e37, 1e-37)


def mask_values(draw: Draw, number: int) -> torch.Tensor:
    choices = draw.choice(MASKS)
    if draw.far and draw.flag():
        choices = draw.choice(FAR_MASKS)
    return torch.tensor([draw.choice(choices) for _ in range(number)], dtype=F64)


def ids(draw: Draw, number: int) -> Any:
    found = [draw.choice(IDS) for _ in range(number)]
    return [f"p{i}" for i in found] if draw.flag(0.2) else torch.tensor(found, dtype=torch.int64)


def weights(draw: Draw, number: int) -> torch.Tensor:
    found = [draw.choice((0.0, 0.25, 1.0, 3.0)) for _ in range(number)]
    return torch.tensor(found, dtype=draw.choice(FLOATS))


def microbatch(draw: Draw, rejected: bool = False, weighted: bool = False) -> dict[str, Any]:
    """Keyword arguments of a `Microbatch`."""
    lengths = [draw.randrange(6) for _ in range(draw.randrange(5))]
    given: dict[str, Any] = {}
    if draw.flag(0.4):
        shape = len(lengths), max(lengths, default=0)
        mask = mask_values(draw, shape[0] * shape[1]).view(shape)
    else:
        padded = draw.flag()
        places = [n + padded * draw.randrange(3) for n in lengths]
        starts = [0, *accumulate(places)]
        mask = torch.zeros(starts[-1] + padded * draw.randrange(3), dtype=F64)
        for start, n in zip(starts, lengths, strict=False):
            mask[start : start + n] = mask_values(draw, n)
        dtype = draw.choice((torch.int32, torch.int64))
        given["cu_seqlens"] = torch.tensor([0, *accumulate(lengths)], dtype=dtype)
        if padded:
            given["cu_seqlens_padded"] = torch.tensor(starts)
        if draw.flag(0.3):
            mask = mask.unsqueeze(0)
    given["loss_mask"] = draw.dressed(mask.to(draw.choice((*FLOATS, *INTEGERS))))
    given |= {name: ids(draw, len(lengths)) for name in ID_NAMES}
    if rejected:
        given["rejected"] = torch.tensor([draw.flag(0.3) for _ in lengths], dtype=torch.bool)
    if weighted:
        given["sample_weights"] = weights(draw, len(lengths))
    return {name: draw.maybe(x) for name, x in given.items()}


def aggregation(draw: Draw) -> LossAggregation:
    """Any mode but `custom`, or a preset."""
    divisors = FAR_DIVISORS if draw.far else DIVISORS
    empty = draw.option(draw.choice(("count", "skip")))
    rejected = draw.option(draw.choice(("count", "skip")))
    weighs = draw.option(draw.choice(("count", "skip")))
    if draw.flag(0.2):
        name = draw.choice([*PRESETS])
        divisor = draw.choice(divisors) if PRESETS[name].needs_divisor else None
        name, divisor = draw.option(name), draw.option(divisor, *FAR_DIVISORS)
        return called(
            lambda: LossAggregation.preset(
                name, divisor=divisor, empty=empty, rejected=rejected, sample_weights=weighs
            ),
            strange=draw.strange,
        )
    mode = draw.choice(MODES)
    needs = mode == "constant" or (mode == "sum" and draw.flag())
    options = {
        "mode": draw.option(mode, *MODES),
        "divisor": draw.option(draw.choice(divisors) if needs else None, *FAR_DIVISORS),
        "empty": empty,
        "rejected": rejected,
        "sample_weights": weighs,
        "count": draw.option(None, "sample", *UNITS),
    }
    return called(lambda: LossAggregation(**options), strange=draw.strange)
