"""Steps that are not as usual and mean the same: calls, numbers, masks, empty ranks, checks.

`test_gradients` has the usual ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_loss_agg.mcore import Audit, Loop, TokenLoss
from tests.host.cases import Batch, Case, assert_exact, run
from tests.host.harness import EXACT, TOPOLOGIES, Topology
from tests.host.reference import reference
from tests.host.steps import EMPTY, MODES, N_MB, PLACES, Places, weights_of

pytestmark = pytest.mark.host

LAYOUTS, FLAGS = ("thd", "bshd"), (False, True)
MEGATRON = {"loop": Loop(of_megatron=True)}
CALLS = (1, 2, 1)  # microbatches of each call of a step


@pytest.mark.parametrize(
    "name", ["dp2", "cp2", "tp2-sp", "pp2", "ep2", "pp2-dp2-distributed-overlap"]
)
def test_a_step_of_several_calls_is_exact(name: str) -> None:
    topology = TOPOLOGIES[name]
    places = PLACES[topology.data_parallel_size]
    assert sum(CALLS) == N_MB
    # Twice: the second step does not continue the first.
    cases = [
        Case(mode, layout=layout, places=places, per_token=per_token, calls=CALLS, times=2)
        for mode, layout, per_token in product(MODES, LAYOUTS, FLAGS)
    ]
    assert_exact(topology, cases)


# One hook over a run whose number of microbatches changes, over steps and over ranks. By step:
# whether it evaluates, and the samples by data-parallel rank and microbatch.
RUN: list[tuple[bool, Places]] = [
    (False, (((0, 1),), ((2, 3),))),
    (False, (((3, 4), (5, 6), (7, 8)), ((9, 0),))),
    (True, (((6, 7), (8, 9)), ((0, 1), (2, 3)))),
    (False, (((9, 0), (1, 2)), ((3,), (5,)))),
    (True, (((2, 3),), ((4, 5),))),
    (False, (((5, 6),), ((9,), (1, 2), (3, 4)))),
]


def steps_of_run(topology: Topology, mode: str, layout: str, per_token: bool) -> Iterator[Case]:
    audit = Audit(repeat=layout == "thd")  # or else of the first step alone
    step = None
    for evaluates, places in RUN:
        step = Case(
            mode,
            layout=layout,
            places=places if topology.data_parallel_size == 2 else (sum(places, ()),),
            per_token=per_token,
            hook={**MEGATRON, "extensions": [audit]},
            call={"forward_only": evaluates},
            after=step,
        )
        yield step


@pytest.mark.parametrize("name", ["dp2", "dp2-cp2", "tp2", "pp2"])
def test_every_step_is_exact_whatever_the_number_of_microbatches(name: str) -> None:
    topology, modes = TOPOLOGIES[name], [*MODES, "microbatch_mean"]
    runs = (steps_of_run(topology, *way) for way in product(modes, LAYOUTS, FLAGS))
    assert_exact(topology, [step for steps in runs for step in steps])


NO_TOKENS, TOKENS = ((EMPTY,), (EMPTY,)), ((0, 1), (2, 3))


def test_a_rank_without_active_tokens_takes_part_in_the_step() -> None:
    ranks = product((NO_TOKENS, TOKENS), (NO_TOKENS, ((4, 6), (7,))))
    ways = [("sample_sum", False), ("sample_sum", True), ("token_mean", True)]
    cases = [
        Case(mode, places=places, per_token=per_token)
        for places, (mode, per_token) in product(ranks, ways)
    ]
    for case, of_ranks in run(TOPOLOGIES["dp2"], cases).items():
        assert max(found.error for found in of_ranks) <= EXACT, (case.name, case.places)


REJECTED = (1, 2)


def with_rejected(batch: Batch, of_mb: tuple[int, ...]) -> Batch:
    return {**batch, "rejected": torch.tensor([i in REJECTED for i in of_mb])}


def test_rejected_samples_are_left_out_or_count_in_the_denominators() -> None:
    cases, expected = [], []
    for mode, per_token, choice in product([*MODES, "sum"], FLAGS, ("count", "skip")):
        places = (((0, 1), (2, 4)),)
        way = {"layout": "bshd", "batch": with_rejected, "per_token": per_token}
        cases.append(Case(mode, {"rejected": choice}, places=places, **way))
        counted = places if choice == "count" else (((0,), (4,)),)
        kept = [(i, w) for i, w in weights_of(mode, counted) if i not in REJECTED]
        expected.append(reference().gradient(kept))
    for case, (found,) in run(TOPOLOGIES["dp1"], cases, expected).items():
        assert found.error <= EXACT, case.name


# 475 active tokens: bf16 counts to 256 one by one, uint8 to 255.
LENGTH = 250
DTYPES = (torch.bfloat16, torch.float16, torch.uint8, torch.bool, torch.int64, torch.float32)


def long_rows(batch: Batch, of_mb: tuple[int, ...]) -> Batch:
    """Two rows, the first of which starts with padding."""
    text = torch.randint(0, 32, (2, LENGTH + 1), generator=torch.Generator().manual_seed(3))
    mask = torch.ones(2, LENGTH, dtype=torch.float64)
    mask[0, :25] = 0
    rows = {"tokens": text[:, :-1], "labels": text[:, 1:], "loss_mask": mask}
    return {**rows, "prompt_ids": torch.arange(2)}


def with_mask(change: Callable[[Tensor], Tensor], losses: Tensor, mask: Tensor) -> Any:
    from tests.host import gpt

    return losses, functools.partial(gpt.stock_loss_func, change(mask))


def poisoned(value: float, losses: Tensor, mask: Tensor) -> Any:
    return with_mask(Tensor.clone, losses + torch.where(mask == 0, value, 0.0), mask)


def flat(losses: Tensor, mask: Tensor) -> Any:
    """In another shape than the mask, and without a reduction."""
    return losses, TokenLoss(lambda output: (output.flatten(), {}), mask)


# What a forward step makes of losses and mask; all mean the same.
FORMS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "stock": functools.partial(with_mask, Tensor.clone),
    "flat mask": functools.partial(with_mask, Tensor.flatten),
    "transposed in memory": functools.partial(with_mask, lambda x: x.t().contiguous().t()),
    **{f"{x}": functools.partial(with_mask, lambda mask, x=x: mask.to(x)) for x in DTYPES},
    **{f"{x} where the mask is 0": functools.partial(poisoned, x) for x in (torch.nan, torch.inf)},
    "flat losses": flat,
}


def in_form(name: str, iterator: Any, model: Any) -> Any:
    from tests.host import gpt

    losses, loss_func = gpt.forward_step(iterator, model)
    return FORMS[name](losses, loss_func.args[0])


@pytest.mark.parametrize(
    "mode, per_token", [("prompt_mean", False), ("prompt_mean", True), ("token_mean", True)]
)
def test_a_mask_of_any_dtype_and_masked_nan_or_infinity_change_nothing(
    mode: str, per_token: bool
) -> None:
    stock = Case(mode, places=(((0, 1),) * 2,), per_token=per_token, batch=long_rows, hook=MEGATRON)
    cases = [
        replace(stock, step=functools.partial(in_form, name), times=times)
        for name, times in product(FORMS, (1, 2))
    ]
    # The text is none of the reference's: equal errors say that gradients are equal.
    expected = [reference().gradient(weights_of("sum", PLACES[1]))] * len(cases)
    (wanted,), *others = run(TOPOLOGIES["dp1"], cases, expected).values()
    for case, (found,) in zip(cases[1:], others, strict=True):
        assert found.error == pytest.approx(wanted.error, rel=EXACT), case.step
        # A `TokenLoss` has no report of the stock loss function's.
        for key in found.reports:
            assert found.reports[key] == pytest.approx(wanted.reports[key], rel=EXACT), case.step


# Every pair of layout, flag and dtype; every mode with both layouts.
CHECKED = (
    Case("prompt_mean", layout="thd"),
    Case("prompt_mean", layout="bshd", per_token=True, dtype=torch.float32),
    Case("custom", layout="thd", per_token=True, dtype=torch.float32),
    Case("custom", layout="bshd"),
    Case("token_mean", layout="thd", per_token=True),
    Case("token_mean", layout="bshd", dtype=torch.float32),
)


def twice(**arguments: Any) -> Any:
    """A schedule that drops a loss and computes it again for the backward pass."""
    from tests.host import gpt

    def recomputed(loss_func: Callable[..., Any], output: Tensor) -> Any:
        loss_func(output)
        return loss_func(output)

    return gpt.schedule_with(recomputed)(**arguments)


@pytest.mark.parametrize("name", ["cp2", "pp2", "tp2-sp", "dp2-distributed-overlap"])
def test_neither_checks_nor_a_second_loss_change_a_bit_of_a_gradient(name: str) -> None:
    topology = TOPOLOGIES[name]
    ways: list[list[Case]] = []
    for case in CHECKED:
        checked = replace(case, places=PLACES[topology.data_parallel_size])
        first = replace(checked, call={"schedule": twice})  # which is checked most
        once = replace(checked, after=first)
        again = replace(first, after=once)
        ways.append([replace(checked, checked=False), checked, first, once, again])
    found = run(topology, [case for of_case in ways for case in of_case])
    for unchecked, *others in ways:
        bound = EXACT if unchecked.dtype == torch.float64 else 1e-6
        for rank, wanted in enumerate(found[unchecked]):
            # To the last bit: equal errors say that gradients are equal.
            assert {found[case][rank].error for case in others} == {wanted.error}, unchecked.name
            assert wanted.error <= bound
