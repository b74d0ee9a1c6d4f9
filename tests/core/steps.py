"""Steps of the oracle as tensors in the layouts that the package takes, and strategies for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from tests.oracle import Sample, Step

LAYOUTS = ("thd", "thd_row", "thd_padded", "bshd")
UNITS_WITH_IDS = ("prompt_ids", "rollout_ids")


@dataclass(frozen=True)
class Laid:
    """One microbatch as keyword arguments of ``Microbatch``, and where each token went."""

    inputs: dict[str, Any]
    index: list[list[int]]  # position of every token of every sample in the flattened mask

    def samples(self, weights: torch.Tensor) -> list[list[float]]:
        """Weights per sample and token; anything at a position of no token must be 0."""
        flat = weights.reshape(-1)
        taken = torch.zeros(flat.numel(), dtype=torch.bool)
        for positions in self.index:
            taken[positions] = True
        assert not flat[~taken].any(), "weight at a padding position"
        return [flat[positions].tolist() for positions in self.index]


def padded_length(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def lay(
    samples: list[Sample], layout: str, multiple: int = 1, dtype: torch.dtype = torch.float64
) -> Laid:
    """Tensors of one microbatch; every sequence is padded to a multiple of ``multiple``."""
    ids = {
        "prompt_ids": torch.tensor([s.prompt for s in samples], dtype=torch.int64),
        "rollout_ids": torch.tensor([s.rollout for s in samples], dtype=torch.int64),
    }
    lengths = [len(s.mask) for s in samples]
    if layout == "bshd":
        width = padded_length(max(lengths, default=0) + 1, multiple)
        mask = torch.zeros(len(samples), width, dtype=dtype)
        index = [[s * width + t for t in range(n)] for s, n in enumerate(lengths)]
        offsets = {}
    else:
        gap = multiple if layout == "thd_padded" else 0
        padded = [padded_length(n, multiple) + gap for n in lengths]
        starts = [sum(padded[:s]) for s in range(len(samples) + 1)]
        tail = multiple if layout == "thd_padded" else 0
        mask = torch.zeros(starts[-1] + tail, dtype=dtype)
        index = [list(range(starts[s], starts[s] + n)) for s, n in enumerate(lengths)]
        real = [sum(lengths[:s]) for s in range(len(samples) + 1)]
        offsets = {"cu_seqlens": torch.tensor(real, dtype=torch.int32)}
        if starts != real or tail:
            offsets["cu_seqlens_padded"] = torch.tensor(starts, dtype=torch.int32)
    for sample, positions in zip(samples, index, strict=True):
        if positions:
            mask.reshape(-1)[positions] = torch.tensor(sample.mask, dtype=dtype)
    if layout == "thd_row":
        mask = mask.unsqueeze(0)
    return Laid({"loss_mask": mask, **offsets, **ids}, index)


def flatten(nested: Any) -> list[float]:
    return [x for part in nested for x in flatten(part)] if isinstance(nested, list) else [nested]


# Ids collide where a host rounds them through fp64 (2**53), fp32 (2**24), int32, or takes a
# sentinel (-1, 0, the ends of int64) for "no group".
IDS = (
    0,
    -1,
    1,
    2**24,
    2**24 + 1,
    2**31,
    2**32,
    2**53,
    2**53 + 1,
    -(2**53) - 1,
    2**63 - 1,
    -(2**63),
)

masks = st.one_of(
    st.lists(st.sampled_from([0.0, 1.0]), max_size=6),
    st.lists(st.sampled_from([0.0, 0.25, 0.1, 1.0, 3.5]), max_size=6),
    st.lists(st.floats(2.0**-20, 2.0**10), max_size=4),
    st.lists(st.just(0.0), max_size=4),
)
ids = st.one_of(st.sampled_from(IDS), st.integers(-(2**63), 2**63 - 1))


@st.composite
def samples(draw: st.DrawFn, max_size: int = 8, min_size: int = 0) -> list[Sample]:
    """Samples that share a few prompts and rollouts; a rollout lies inside one prompt."""
    pool = draw(st.lists(ids, min_size=1, max_size=4, unique=True))
    rollouts = draw(st.lists(ids, min_size=1, max_size=6, unique=True))
    prompt_of = {rollout: draw(st.sampled_from(pool)) for rollout in rollouts}
    drawn = draw(
        st.lists(st.tuples(masks, st.sampled_from(rollouts)), min_size=min_size, max_size=max_size)
    )
    return [Sample(tuple(mask), prompt_of[rollout], rollout) for mask, rollout in drawn]


@st.composite
def steps(draw: st.DrawFn, max_ranks: int = 3) -> Step:
    """Samples dealt over ranks and microbatches, of which some stay empty."""
    ranks = draw(st.lists(st.integers(0, 3), min_size=1, max_size=max_ranks))
    if not sum(ranks):
        ranks[0] = 1
    step: Step = [[[] for _ in range(microbatches)] for microbatches in ranks]
    places = [microbatch for rank in step for microbatch in rank]
    for sample in draw(samples()):
        draw(st.sampled_from(places)).append(sample)
    return step
