"""Tensors of a step cross between CPU and GPU together, once, however many there are.

A GPU is stood in for: to it, by torch's device ``meta``, whose tensors have no values; from it, by
tensors that say that they are on one, and count what would wait for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.fake_groups import fake_groups
from megatron_loss_agg import LossAggregation, Microbatch, StepPlan, Term
from megatron_loss_agg.mcore.splits import Splits
from megatron_loss_agg.mcore.step_weights import StepWeights, Wanted
from megatron_loss_agg.mcore.tensor_parallel import packed
from megatron_loss_agg.transfer import Stage, brought_to_cpu, joined, kinds_of, split
from tests.core.operations import Operations

META = torch.device("meta")
LENGTH = 8
WANTED = Wanted(masks=False, depths=2, datasets=True)


class OnGpu(Tensor):
    """A tensor in the CPU's memory that says it is on a GPU."""

    waits = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == Tensor.device.__get__:
            return torch.device("cuda", 0)
        if func == Tensor.is_cpu.__get__:
            return False
        if func in WAITS:
            OnGpu.waits += 1
            args = [x.as_subclass(Tensor) if isinstance(x, OnGpu) else x for x in args]
            return func(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)


WAITS = {getattr(Tensor, name) for name in ("to", "cpu", "item", "tolist", "nonzero", "unique")}
WAITS |= {getattr(Tensor, f"__{name}__") for name in ("bool", "int", "float", "contains")}
WAITS |= {torch.equal, torch.allclose}


def halves(plan: StepPlan, i: int) -> Tensor:
    """A custom aggregation."""
    return plan.microbatches[i].loss_mask / 2


COUNTED: Any = {"sample_weights": "skip"}
TERMS = {
    "policy": Term(LossAggregation(mode="sample_mean", **COUNTED)),
    "kl": Term(LossAggregation(mode="token_mean", **COUNTED)),
    "own": Term(LossAggregation(mode="custom", function=halves, **COUNTED)),
}


def microbatch(samples: int, layout: str, length: int = LENGTH) -> Microbatch:
    mask = (torch.arange(samples * length) % 3 > 0).float()
    tokens = torch.arange(samples * length)
    by_sample = {"dataset_ids": torch.arange(samples) % 2, "sample_weights": torch.ones(samples)}
    if layout == "rows":
        mask, tokens = mask.view(samples, length), tokens.view(samples, length)
        return Microbatch(mask, token_ids=tokens, **by_sample)
    starts = length * torch.arange(samples + 1, dtype=torch.int32)
    return Microbatch(mask, starts, cu_seqlens_padded=starts, token_ids=tokens, **by_sample)


def on_gpu(whole: Microbatch) -> Microbatch:
    given = {
        name: x.as_subclass(OnGpu) if isinstance(x, Tensor) else x
        for name, x in vars(whole).items()
    }
    return Microbatch(**{**given, "token_ids": [x.as_subclass(OnGpu) for x in whole.token_ids]})


@pytest.fixture(scope="module")
def groups() -> Iterator[Any]:
    with fake_groups(1, 2) as found:
        yield dict(zip((1, 2), found, strict=True))


def planned(step: list[Microbatch], groups: Any, wanted: Wanted = WANTED) -> StepWeights:
    return StepWeights.plan(lambda: step, TERMS, groups, Splits(), wanted)


def tensors_of(found: Any) -> list[Tensor]:
    message, text = packed(found)
    return [message, torch.tensor(text)]


def test_tensors_of_all_kinds_and_sizes_come_apart_as_they_were_joined():
    given = [
        torch.arange(3, dtype=torch.uint8),
        torch.tensor(2.5, dtype=torch.float64),
        torch.arange(6, dtype=torch.bfloat16).view(2, 3).T,
        torch.tensor([True, False]),
        torch.empty(0, 4),
        torch.arange(5)[1:4],
        torch.ones(1).expand(3),
    ]
    for found, x in zip(split(joined(given), kinds_of(given)), given, strict=True):
        assert found.dtype == x.dtype
        assert torch.equal(found, x)


@pytest.mark.parametrize("number", [1, 16])
@pytest.mark.parametrize("layout", ["rows", "packs"])
@pytest.mark.parametrize("length", [LENGTH, 64], ids=["short", "long"])
def test_a_step_takes_one_copy_to_the_device_and_a_microbatch_none(groups, layout, length, number):
    weights = planned([microbatch(3, layout, length) for _ in range(number)], groups[1])
    with Operations() as operations:
        for i in range(number):
            for by_split in (weights.terms[name][i] for name in TERMS):
                (local,) = by_split.values()
                mask = torch.empty(local.mask.shape, device=META)
                made = local.made_for(mask, torch.float32)
                assert made.device == local.checksum_of(mask).device == META
                assert local.mask.dataset_T.on(META).shape == made.shape
                if local.of_depths is not None:
                    assert local.of_depths.weights.on(META).shape == (2, *made.shape)
                    assert local.of_depths.active.on(META).dtype == torch.bool
    assert len(operations.copies) == 1
    assert not operations.waits


def test_what_is_staged_later_is_copied_too():
    stage = Stage()
    first = stage.add(torch.ones(2))
    assert torch.equal(first.on(torch.device("cpu")), torch.ones(2))
    assert first.on(META).device == META
    later = stage.add(torch.ones(3)).on(META)
    assert later.device == META
    assert later.shape == (3,)
    assert first.on(META).shape == (2,)


@pytest.mark.parametrize("wanted", [WANTED, WANTED._replace(masks=True)], ids=["later", "first"])
@pytest.mark.parametrize("layout", ["rows", "packs"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_masks_on_a_gpu_are_planned_as_on_the_cpu_and_take_one_wait_a_step(
    groups, ranks, layout, wanted
):
    for number in (1, 16):
        step = [microbatch(4, layout) for _ in range(number)]
        OnGpu.waits = 0
        found = planned([on_gpu(m) for m in step], groups[ranks], wanted)
        assert OnGpu.waits == 1
        expected = planned(step, groups[ranks], wanted)
        for x, y in zip(tensors_of(found), tensors_of(expected), strict=True):
            assert type(x) is Tensor
            assert torch.equal(x, y)


def test_microbatches_come_with_one_wait_and_token_ids_stay_where_nobody_needs_them():
    OnGpu.waits = 0
    brought_to_cpu([on_gpu(microbatch(4, "packs")), on_gpu(microbatch(4, "rows"))])
    assert OnGpu.waits == 1
    (here,) = brought_to_cpu([on_gpu(microbatch(4, "packs"))])
    assert [type(x) for x in (here.loss_mask, *here.token_ids)] == [Tensor, OnGpu]
    (here,) = brought_to_cpu([on_gpu(microbatch(4, "packs"))], lambda _: True)
    assert [type(x) for x in (here.loss_mask, *here.token_ids)] == [Tensor, Tensor]


@pytest.mark.parametrize("layout", ["rows", "packs"])
def test_a_plan_without_a_host_takes_one_wait_a_step_and_keeps_its_masks_on_the_gpu(layout):
    for number in (1, 16):
        step = [microbatch(4, layout) for _ in range(number)]
        OnGpu.waits = 0
        found = StepPlan.build_terms(TERMS, [on_gpu(m) for m in step])["kl"]
        assert OnGpu.waits == 1
        expected = StepPlan.build_terms(TERMS, step)["kl"]
        assert found.counts == expected.counts
        for i, m in enumerate(found.microbatches):
            assert type(m.loss_mask) is OnGpu
            assert type(found.coefficients(i)) is Tensor
            assert torch.equal(found.coefficients(i), expected.coefficients(i))


def test_microbatches_that_terms_share_are_shared_on_the_cpu(groups):
    whole = on_gpu(microbatch(4, "rows"))
    step: Any = [dict.fromkeys(TERMS, whole), dict.fromkeys(TERMS, whole)]
    weights = StepWeights.plan(
        lambda: step,
        dict.fromkeys(TERMS, TERMS["kl"]),
        groups[1],
        Splits(),
        WANTED,
    )
    assert len({id(weights.terms[name][0]) for name in TERMS}) == 1
