"""Terms whose masks are one, equal or different are exact alike.

Two terms weigh their microbatches alike as far as the batches tell; the script may hand them one
mask, equal ones, or different ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from megatron_loss_agg import Microbatch, Term
from megatron_loss_agg.mcore import LossHook, TokenLoss
from tests import oracle
from tests.host.harness import EXACT, TP2, Topology, error_of, run_host_ranks
from tests.host.reference import reference
from tests.host.steps import Counted, aggregation, batches, sequences

pytestmark = pytest.mark.host

COEFFICIENTS = {"policy": 1.0, "kl": 0.3, "entropy": -0.1}
POWERS = {"policy": 1, "kl": 2, "entropy": 3}  # of the cross entropy: what a term's losses are
MODES = {"policy": "prompt_mean", "kl": "prompt_mean", "entropy": "token_mean"}
ALIKE = dict.fromkeys(MODES, "token_mean")
CUSTOM = dict.fromkeys(MODES, "custom")
PLACES = (((0, 1), (2, 3)), ((4, 5), (6, 7)))  # of `Counted`, by data-parallel rank

Masks = Callable[[int, int, Tensor], dict[str, Tensor]]
"""(data-parallel rank, microbatch, mask of the batch) -> mask of every term."""


def one(rank: int, i: int, mask: Tensor) -> dict[str, Tensor]:
    return dict.fromkeys(MODES, mask)


def equal(rank: int, i: int, mask: Tensor) -> dict[str, Tensor]:
    return {name: mask.clone() for name in MODES}


def own(name: str, rank: int, i: int, mask: Tensor, since: tuple[int, int] = (0, 0)) -> Any:
    """The term ``name`` leaves the first token of every row out, since a rank and a microbatch."""
    applies = rank >= since[0] and i >= since[1]
    left_out = mask.masked_fill(mask.cumsum(dim=-1) == 1, 0) if applies else mask
    return {**one(rank, i, mask), name: left_out}


own_kl, own_entropy = functools.partial(own, "kl"), functools.partial(own, "entropy")
own_later = functools.partial(own_kl, since=(0, 1))
own_elsewhere = functools.partial(own_kl, since=(1, 1))


class Case(NamedTuple):
    """What is planned, and then done in every step."""

    modes: dict[str, str]
    planned: Masks
    given: tuple[Masks, ...]  # of the loss functions


CASES = {
    "all alike": Case(ALIKE, one, (one, one)),
    "another mode": Case(MODES, one, (one, one)),
    "equal masks": Case(MODES, one, (equal, equal)),
    "own masks": Case(MODES, own_kl, (own_kl, own_kl)),
    # The second microbatch alone has them, but they count in the denominator of both, and of both
    # data-parallel ranks.
    "own masks later": Case(ALIKE, own_later, (own_later, own_later)),
    "own masks on one rank": Case(ALIKE, own_elsewhere, (own_elsewhere, own_elsewhere)),
    "custom": Case(CUSTOM, one, (one, one)),
}
CHANGED = {
    "own mask at once": Case(MODES, one, (own_kl,)),
    "own mask later": Case(MODES, one, (one, own_kl)),
    "own mask of other weights at once": Case(MODES, one, (own_entropy,)),
    "own mask of other weights later": Case(MODES, one, (one, own_entropy)),
}


def masked(mask: Tensor, places: tuple[int, ...]) -> list[oracle.Sample]:
    """The samples ``places``, with the rows of another mask."""
    chosen = [(sequences()[k], row) for k, row in zip(places, mask, strict=True)]
    return [
        oracle.Sample(tuple(row[: len(s.tokens)].tolist()), s.sample.prompt) for s, row in chosen
    ]


def wanted(case: Case, ranks: int) -> Any:
    """The reference's gradient of ``sum coefficient * w * loss ** power``."""
    exact, total = reference(), []
    places = PLACES[:ranks]
    for name, power in POWERS.items():
        step = [
            [
                masked(case.planned(rank, i, batch["loss_mask"])[name], place[i])
                for i, batch in enumerate(batches(place, "bshd"))
            ]
            for rank, place in enumerate(places)
        ]
        mode, divisor = case.modes[name], None
        if mode == "custom":  # of masks of 0 and 1
            mode, divisor = "sum", len(flat(step))
        nested = oracle.step_weights(mode, step, divisor=divisor)
        for k, w in zip(flat(places), flat(nested), strict=True):
            slope = COEFFICIENTS[name] * power * exact.losses[k] ** (power - 1)
            total.append((k, (torch.tensor(w, dtype=slope.dtype) * slope).tolist()))
    return exact.gradient(total)


def flat(step: Any) -> list[Any]:
    """The samples of a step, of all its ranks and microbatches."""
    return [sample for rank in step for microbatch in rank for sample in microbatch]


class Script:
    """What a rank's user brings: reads batches, and masks the losses of each term."""

    def __init__(self, planned: Masks, rank: int) -> None:
        self.planned = self.given = planned
        self.rank = rank
        self.losses = 0

    def read(self, batch: dict[str, Tensor]) -> dict[str, Microbatch]:
        masks = self.planned(self.rank, batch["number"] % Counted.N_MB, batch["loss_mask"])
        prompts = batch["prompt_ids"]
        shared = {id(mask): Microbatch(mask, prompt_ids=prompts) for mask in masks.values()}
        return {name: shared[id(mask)] for name, mask in masks.items()}

    def loss(self, stock: Any, mask: Tensor) -> TokenLoss:
        masks = self.given(self.rank, self.losses % Counted.N_MB, mask)
        self.losses += 1
        return TokenLoss(lambda x: ({name: x**p for name, p in POWERS.items()}, {}), masks)


def steps_on_host(sizes: dict[str, int], expected: dict[str, Any]) -> dict[str, list[Any]]:
    """Every rank, for each case: its steps' gradient errors, or what a step was refused with."""
    from tests.host import gpt, gradients

    gpt.initialize(**sizes)
    ddp = gpt.ddp_model()
    rank = gpt.data_rank()

    def steps(case: Case, exact: Any) -> list[Any]:
        script = Script(case.planned, rank)
        terms = {n: Term(aggregation(mode), COEFFICIENTS[n]) for n, mode in case.modes.items()}
        hook = LossHook(terms, read_batch=script.read)
        data = Counted(rank) if gpt.reads_data() else None
        options = {
            "forward_step_func": gpt.forward_step_with(script.loss),
        }
        found: list[Any] = []
        for script.given in case.given:
            error = error_of(gpt.run_step, hook, ddp, data, Counted.N_MB, Counted.ROWS, **options)
            found.append(error or gradients.error(ddp, exact))
        return found

    return {name: steps({**CASES, **CHANGED}[name], exact) for name, exact in expected.items()}


@functools.cache
def found(sizes: tuple[tuple[str, int], ...]) -> list[dict[str, list[Any]]]:
    topology = Topology(2, dict(sizes))
    ranks = topology.data_parallel_size
    cases = CASES if sizes else {**CASES, **CHANGED}
    expected = {name: wanted(case, ranks) for name, case in cases.items()}
    return run_host_ranks(steps_on_host, 2, topology.sizes, expected, timeout=60)


# The second rank of two tensor-parallel ones gets its weights by pickle.
@pytest.mark.parametrize("sizes", [(), tuple(TP2.items())], ids=["dp2", "tp2"])
@pytest.mark.parametrize("name", CASES)
def test_the_gradient_is_exact_whatever_the_terms_share(name: str, sizes: Any) -> None:
    for rank in found(sizes):
        assert max(rank[name]) <= EXACT


@pytest.mark.parametrize("name", CHANGED)
def test_a_changed_mask_of_one_term_is_refused(name: str) -> None:
    for rank in found(()):
        *exact, told = rank[name]
        assert all(error <= EXACT for error in exact)
        assert told.startswith("MaskError: the loss function's mask is not this rank's part")
