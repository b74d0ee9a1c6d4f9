"""Drawn inputs, valid ones; and by name the changes after which they must be refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from tests import oracle
from tests.core.meaning import F64, LAYOUTS, MODES, UNITS, lay
from tests.oracle import Sample

FLOATS = (torch.float32, F64, torch.bfloat16, torch.float16)
INTEGERS = (torch.bool, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
# Groups of any name are told by ids, see `meaning.names_of`.
PATHS = [("prompt", "sample"), ("rollout", "sample"), ("dataset", "sample")]
PATHS += [("prompt", "rollout"), ("prompt", "rollout", "sample")]
PATHS += [("session",), ("task", "session"), ("prompt", "session", "sample")]
# Ids collide where a host rounds them through fp64 (2**53), fp32 (2**24), int32, or takes a
# sentinel (-1, 0, the ends of int64) for "no group".
IDS = (0, -1, 1, 2**24, 2**24 + 1, 2**31, 2**32, 2**53, 2**53 + 1, -(2**53) - 1)
IDS += (2**63 - 1, -(2**63))
PROMPTS = (-1, 2**32 - 1, 2**53, 2**53 + 1)  # of rollouts
Changes = dict[str, str]  # what is changed, and the name of how

masks = st.one_of(
    st.lists(st.sampled_from([0.0, 1.0]), max_size=6),
    st.lists(st.sampled_from([0.0, 0.25, 0.1, 1.0, 3.5]), max_size=6),
    st.lists(st.floats(2.0**-20, 2.0**10), max_size=4),
    st.lists(st.just(0.0), max_size=4),
)
ids = st.one_of(st.sampled_from(IDS), st.integers(-(2**63), 2**63 - 1))
sample_weights = st.sampled_from([0.0, 0.25, 1.0, 3.5])
EXTREMES = (math.nan, math.inf, -math.inf, 3e38, -3e38, 1.7e308, 1e-40, 1.0)
"""Values that may lie where nothing counts."""
ANYTHING = st.sampled_from(EXTREMES)


@st.composite
def samples(
    draw: st.DrawFn, max_size: int = 8, min_size: int = 0, weighted: bool = False
) -> list[Sample]:
    """Samples that share a few prompts, rollouts and data sets; a rollout has one prompt."""
    pool = draw(st.lists(ids, min_size=1, max_size=6, unique=True))
    of_sample = st.tuples(masks, st.sampled_from(pool), st.sampled_from(pool))
    drawn = draw(st.lists(of_sample, min_size=min_size, max_size=max_size))
    found = [Sample(tuple(m), PROMPTS[r % len(PROMPTS)], r, dataset) for m, r, dataset in drawn]
    return [replace(s, weight=draw(sample_weights)) for s in found] if weighted else found


# The same numbers in another form.
FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda x: x,
    "of other strides": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "a view": lambda x: torch.stack([x, torch.zeros_like(x)], dim=-1)[..., 0],
    "of a graph": lambda x: x.clone().requires_grad_(x.is_floating_point()),
    "a lazy negation": lambda x: (-x)._neg_view() if x.is_floating_point() else x,
}


@st.composite
def microbatches(
    draw: st.DrawFn, layouts: Sequence[str] = LAYOUTS, multiple: int = 1, weighted: bool = False
) -> dict[str, Any]:
    """Keyword arguments of a `Microbatch`."""
    drawn = draw(samples(max_size=4, weighted=weighted))
    given = lay(drawn, draw(st.sampled_from(layouts)), multiple, weighted)
    mask = given["loss_mask"].clamp(max=100).to(draw(st.sampled_from(FLOATS + INTEGERS)))
    given["loss_mask"] = FORMS[draw(st.sampled_from([*FORMS]))](mask)
    how = draw(st.sampled_from(["a tensor", "a tensor", "ints", "strings"]))
    if how != "a tensor":
        of_unit = {f"{unit}_ids": given[f"{unit}_ids"].tolist() for unit in UNITS}
        given |= of_unit if how == "ints" else {k: [f"p{x}" for x in v] for k, v in of_unit.items()}
    if draw(st.booleans()):
        flags = [draw(st.booleans()) for _ in drawn]
        given["rejected"] = torch.tensor(flags, dtype=torch.bool)
    return given


@st.composite
def aggregations(draw: st.DrawFn, weighted: bool) -> dict[str, Any]:
    """Keyword arguments of a `LossAggregation` of any mode but `custom`."""
    mode = draw(st.sampled_from([*MODES, *4 * ["nested_mean"]]))  # of which there are many
    choices = ["empty", "rejected", *(["sample_weights"] if weighted else [])]
    chosen = {name: draw(st.sampled_from(["count", "skip"])) for name in choices}
    if mode == "constant" or (mode == "sum" and draw(st.booleans())):
        chosen["divisor"] = draw(st.sampled_from([1, 4, 0.5, 1e-30, 3e30, Fraction(1, 3)]))
    if oracle.OUTER.get(mode) in ("sample", *UNITS):
        chosen["count"] = draw(st.sampled_from([None, "sample", *UNITS]))
    if mode == "nested_mean":
        chosen["levels"] = draw(st.sampled_from(PATHS))
    return {"mode": mode, **chosen}


def _with_one(number: float) -> Callable[[Tensor], Tensor]:
    """With one element replaced by what the dtype makes of the number."""

    def change(x: Tensor) -> Tensor:
        x = x.detach().resolve_neg().clone(memory_format=torch.contiguous_format)
        x.view(-1)[:1] = torch.tensor(number, dtype=F64).to(x.dtype)
        return x

    return change


NUMBERS = (math.nan, math.inf, -math.inf, -1.0, 1e-320, 1e-39, 1e-30, 3e38, 1e300, 2.0**31)
CHANGES: dict[str, Callable[[Tensor], Any]] = {
    **{f"one {number}": _with_one(number) for number in NUMBERS},
    **{f"as {dtype}": lambda x, d=dtype: x.detach().to(d) for dtype in FLOATS + INTEGERS},
    "all times 1e37": lambda x: x * 1e37,
    "all times 1e-39": lambda x: x.double() * 1e-39,
    "in one more dimension": lambda x: x.unsqueeze(0),
    "flattened": lambda x: x.reshape(-1),
    "summed": lambda x: x.sum(),
    "emptied": lambda x: x[..., :0],
    "one less": lambda x: x[:-1],
    "doubled": lambda x: torch.cat([x, x]),
    "transposed": lambda x: x.transpose(0, -1),
    "expanded": lambda x: x.reshape(-1)[:1].expand(3, 3),
    "flipped": lambda x: x.flip(0),
    "a list": lambda x: x.tolist(),
    "an array": lambda x: x.detach().double().numpy(),
    "sparse": lambda x: x.detach().to_sparse(),
    "sparse by rows": lambda x: x.detach().float().reshape(1, -1).to_sparse_csr(),
    "nested": lambda x: torch.nested.nested_tensor([x.detach(), x.detach()]),
    "of another library": lambda x: x.detach().float().to_mkldnn(),
    "complex": lambda x: x.detach().to(torch.complex64),
}
_OBJECTS = (None, True, 0, -1, 2.5, math.nan, "token_mean", b"x", 10**400, Fraction(1, 3), (), [])
_OBJECTS += ({}, object, np.float32(0.5), np.ones((2, 3)), ["a", "b"], [[1.0], [2.0, 3.0]], [None])
OBJECTS = {repr(x)[:20]: x for x in _OBJECTS}


def changed(x: Any, name: str) -> Any:
    """``x`` with a change, or an object in its place; None where torch cannot make it."""
    if name in OBJECTS or not isinstance(x, Tensor):
        return OBJECTS.get(name)
    try:
        return CHANGES[name](x)
    except (RuntimeError, IndexError, NotImplementedError):  # a scalar has no [:-1]
        return None


def with_changes(given: dict[str, Any], changes: Changes) -> dict[str, Any]:
    return {name: changed(x, changes[name]) if name in changes else x for name, x in given.items()}


def changes(tensors: Sequence[str] = (), options: Sequence[str] = ()) -> st.SearchStrategy[Changes]:
    """None in half of the cases, and at most two."""
    kinds = []
    if tensors:
        how = st.sampled_from([*CHANGES, *OBJECTS])
        kinds += 2 * [st.dictionaries(st.sampled_from(tensors), how, min_size=1, max_size=2)]
    if options:
        how = st.sampled_from([*OBJECTS])
        kinds += [st.dictionaries(st.sampled_from(options), how, min_size=1, max_size=1)]
    return st.one_of(*(len(kinds) * [st.just({})]), *kinds)


INPUTS = ("loss_mask", "cu_seqlens", "cu_seqlens_padded", "rejected", "sample_weights")
INPUTS += tuple(f"{unit}_ids" for unit in UNITS)
OPTIONS = ("mode", "divisor", "levels", "empty", "rejected", "sample_weights", "count")
