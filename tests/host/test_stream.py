"""Steps that are counted as they train, against one process that knows the whole step."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from megatron_loss_agg.mcore import MaskedLosses, TokenLoss
from tests.host import gpt
from tests.host.cases import Case, Expected, assert_exact, covering, in_calls
from tests.host.harness import TOPOLOGIES, Topology
from tests.host.reference import reference
from tests.host.steps import Places, Weights, sequences, weights_with
from tests.oracle import Sample

# By data-parallel rank: the samples of each microbatch, and the microbatches of each call. Every
# prompt and rollout is in one call, and sample 5 has no token.
STREAMS: dict[int, tuple[Places, tuple[tuple[int, ...], ...]]] = {
    1: ((((0, 1), (4,), (7, 8), (2,), (5, 9), (3, 6)),), ((2, 4),)),
    2: (
        (((0, 1), (4,), (7, 8)), ((2,), (5, 9), (3,), (6,))),
        ((2, 1), (4,)),
    ),
}
SIZES = {ranks: sizes for ranks, (_, sizes) in STREAMS.items()}
# As `STREAMS`, with whole groups in each microbatch.
WHOLE: dict[int, Places] = {
    1: (((0, 1, 4), (7, 8), (2, 5, 9), (3, 6)),),
    2: (((0, 1, 4), (7, 8)), ((2, 5, 9), (3, 6), (), ())),
}
MODES: dict[str, dict[str, Any]] = {
    "token_mean": {},
    "sample_mean": {},
    "rollout_mean": {},
    "prompt_mean": {},
    "nested_mean": {"levels": ("prompt", "rollout", "sample")},
    "sample_sum": {},
    "constant": {},
    "sum": {},
    "microbatch_mean": {},
}


def streams(topology: Topology, **more: Any) -> list[Case]:
    places, _ = STREAMS[topology.data_parallel_size]
    rows = covering(2, [*MODES], ("thd", "bshd"), topology.per_token_flags, ("01", "fractional"))
    return [
        Case(
            mode,
            options=MODES[mode],
            layout=layout,
            per_token=per_token,
            masks=masks,
            places=places,
            run=functools.partial(in_calls, SIZES),
            times=2,
            **more,
        )
        for mode, layout, per_token, masks in rows
    ]


@pytest.mark.parametrize("name", ["dp1", "dp2", "dp2-cp2", "pp2-dp2-distributed-overlap"])
def test_a_stream_of_calls_is_exact(name: str) -> None:
    assert_exact(TOPOLOGIES[name], streams(TOPOLOGIES[name]))


def at_the_end(topology: Topology, **more: Any) -> list[Case]:
    places = WHOLE[topology.data_parallel_size]
    rows = covering(2, [*MODES], topology.per_token_flags, ("01", "fractional"))
    return [
        Case(
            mode,
            options=MODES[mode],
            per_token=per_token,
            masks=masks,
            places=places,
            hook={"count": "end"},
            times=2,
            **more,
        )
        for mode, per_token, masks in rows
    ]


def extended(*row: Any) -> Any:
    return pytest.param(*row, marks=pytest.mark.extended)


AT_THE_END = ["dp2", "pp2-cp2", extended("tp2-sp"), extended("vpp2-dp2-distributed-overlap")]


@pytest.mark.parametrize("name", AT_THE_END)
def test_a_call_that_is_counted_as_it_trains_is_exact(name: str) -> None:
    assert_exact(TOPOLOGIES[name], at_the_end(TOPOLOGIES[name]))


@pytest.mark.parametrize("name", ["tp2-sp", "vpp2", "dp2-overlap-unaligned", "dp2-average"])
def test_a_stream_is_exact_under_further_splits(name: str) -> None:
    cases = streams(TOPOLOGIES[name])
    assert_exact(TOPOLOGIES[name], [x for x in cases if x.mode in ("token_mean", "prompt_mean")])


def rejects(i: int, t: int) -> bool:
    """Whether the loss leaves out token ``t`` of sample ``i``: all tokens of samples 2 and 8."""
    return i in (2, 8) or (i + 3 * t) % 4 == 0


def decided_mask(batch: dict[str, Any], samples: tuple[int, ...]) -> Tensor:
    """The loss mask of the batch without the tokens that `rejects` says."""
    mask = batch["loss_mask"].clone()
    starts = batch.get("cu_seqlens_padded")
    for place, i in enumerate(samples):
        for t in range(len(sequences()[i].tokens)):
            if rejects(i, t):
                index = (place, t) if starts is None else (0, int(starts[place]) + t)
                mask[index] = 0
    return mask


def with_decided_mask(batch: dict[str, Any], samples: tuple[int, ...]) -> dict[str, Any]:
    return {**batch, "decided": decided_mask(batch, samples)}


def deciding_step(data_iterator: Any, model: Any) -> Any:
    """A forward step whose loss decides its mask."""
    batch = gpt.received(data_iterator)
    output, labels, mask = gpt.outputs(batch, model)
    if not gpt.get_attr_wrapped_model(model, "post_process"):
        return output, None
    decided = gpt.layout_of(batch).shard(batch["decided"])

    def compute(logits: Tensor) -> MaskedLosses:
        logits = gpt.gather_from_tensor_model_parallel_region(logits)
        losses = gpt.F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return MaskedLosses(losses.view_as(labels), decided)

    return output, TokenLoss(compute, mask)


def by_the_decided_masks(case: Case) -> Expected:
    def sample(i: int, _: tuple[int, ...]) -> Sample:
        x = sequences(case.masks)[i].sample
        mask = tuple(0.0 if rejects(i, t) else m for t, m in enumerate(x.mask))
        return replace(x, mask=mask)

    options = {**({"divisor": 7.0} if case.mode == "constant" else {}), **case.options}
    weights: Weights = weights_with(case.mode, case.places, sample, **options)
    stock = reference()
    return stock.gradient(weights), {f"{case.mode} loss": stock.loss(weights)}


def deciding(topology: Topology, in_stream: bool) -> list[Case]:
    if in_stream:  # two calls of whole microbatches on each rank
        places: Places = (
            tuple(x[:2] for x in WHOLE[2]) if topology.data_parallel_size == 2 else WHOLE[1]
        )
    else:
        places = WHOLE[topology.data_parallel_size]
    rows = covering(2, [*MODES], ("count", "skip"), ("thd", "bshd"), topology.per_token_flags)
    return [
        Case(
            mode,
            options={**MODES[mode], "empty": empty},
            layout=layout,
            per_token=per_token,
            places=places,
            batch=with_decided_mask,
            step=deciding_step,
            times=2,
            **({"run": by_microbatch} if in_stream else {"hook": {"count": "end"}}),
        )
        for mode, empty, layout, per_token in rows
        if layout == "thd" or () not in sum(places, ())
    ]


def by_microbatch(hook: Any, model: Any, step: Any) -> list[Any]:
    """A stream of calls of one microbatch, then one of the rest."""
    ranks = gpt.parallel_state.get_data_parallel_world_size()
    number = len(WHOLE[1][0]) if ranks == 1 else 2
    with hook.stream():
        return step(1) + step(number - 1, zero_grad=False)


DECIDED = [
    ("dp2", False),
    ("cp2", True),
    ("pp2-dp2-distributed-overlap", False),
    extended("dp2", True),
    extended("cp2", False),
    extended("pp2-dp2-distributed-overlap", True),
    extended("tp2-sp", True),
    extended("tp2-sp", False),
]


@pytest.mark.parametrize("name, in_stream", DECIDED)
def test_masks_that_the_loss_decides_are_exact(name: str, in_stream: bool) -> None:
    assert_exact(TOPOLOGIES[name], deciding(TOPOLOGIES[name], in_stream), by_the_decided_masks)
