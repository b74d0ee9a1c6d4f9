"""Terms that have mask and weights in common share one vector of weights; others have their own.

Two terms weigh their microbatches alike as far as the batches tell; the script may hand them one
mask, equal ones, or different ones.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_loss_agg import Microbatch, Term
from megatron_loss_agg.mcore import LossHook, TokenLoss
from tests import oracle
from tests.host.harness import EXACT, TP2, Topology, error_of, run_host_ranks
from tests.host.reference import reference
from tests.host.steps import Counted, Weights, aggregation, batches, sequences

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


def own(name: str, rank: int, i: int, mask: Tensor) -> dict[str, Tensor]:
    """The term ``name`` leaves the first token of every row out."""
    return {**one(rank, i, mask), name: mask.masked_fill(mask.cumsum(dim=-1) == 1, 0)}


def own_later(rank: int, i: int, mask: Tensor) -> dict[str, Tensor]:
    return (own if i else lambda _, *args: one(*args))("kl", rank, i, mask)


def own_elsewhere(rank: int, i: int, mask: Tensor) -> dict[str, Tensor]:
    return (own if rank and i else lambda _, *args: one(*args))("kl", rank, i, mask)


own_kl, own_entropy = functools.partial(own, "kl"), functools.partial(own, "entropy")


def own_mask(plan: Any, i: int) -> Tensor:
    """A custom aggregation."""
    return plan.microbatches[i].loss_mask


class Case(NamedTuple):
    """Modes by term, the masks that are planned and those of the loss functions by step.

    Args:
        vectors: of weights that each microbatch has.
    """

    modes: dict[str, str]
    planned: Masks
    given: tuple[Masks, ...]
    vectors: list[int] | None = None


CASES = {
    "all alike": Case(ALIKE, one, (one, one), [1, 1]),
    "another mode": Case(MODES, one, (one, one), [2, 2]),
    "equal masks": Case(MODES, one, (equal, equal)),
    "own masks": Case(MODES, own_kl, (own_kl, own_kl), [3, 3]),
    # The second microbatch alone has them, but they count in the denominator of both, and of both
    # data-parallel ranks.
    "own masks later": Case(ALIKE, own_later, (own_later, own_later), [2, 2]),
    "own masks on one rank": Case(ALIKE, own_elsewhere, (own_elsewhere, own_elsewhere), [2, 2]),
    "custom": Case(CUSTOM, one, (one, one), [3, 3]),
}
CHANGED = {
    "own mask at once": Case(MODES, one, (own_kl,)),
    "own mask later": Case(MODES, one, (one, own_kl)),
    "own mask of other weights at once": Case(MODES, one, (own_entropy,)),
    "own mask of other weights later": Case(MODES, one, (one, own_entropy)),
}


def wanted(case: Case, ranks: int) -> Any:
    """The reference's gradient of ``sum coefficient * w * loss ** power``."""
    chosen, exact = sequences(), reference()
    total: Weights = []
    for name, power in POWERS.items():
        step = []
        for rank, place in enumerate(PLACES[:ranks]):
            step.append([])
            for i, batch in enumerate(batches(place, "bshd")):
                rows = case.planned(rank, i, batch["loss_mask"])[name]
                step[-1].append(
                    [
                        oracle.Sample(tuple(row[: len(chosen[k].tokens)].tolist()), prompt)
                        for k, row, prompt in zip(
                            place[i], rows, batch["prompt_ids"].tolist(), strict=True
                        )
                    ]
                )
        mode = case.modes[name]
        nested = oracle.step_weights("sum" if mode == "custom" else mode, step)
        for place, of_rank in zip(PLACES, nested, strict=False):
            for k, w in zip(itertools.chain(*place), itertools.chain(*of_rank), strict=True):
                slope = COEFFICIENTS[name] * power * exact.losses[k] ** (power - 1)
                total.append((k, (torch.tensor(w, dtype=slope.dtype) * slope).tolist()))
    return exact.gradient(total)


class WeightVectors(TorchDispatchMode):
    """The vectors that losses are multiplied with."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name == "aten::dot":
            self.found.add(args[1].data_ptr())
        return func(*args, **(kwargs or {}))


class Script:
    """What a rank's user brings: reads batches, and masks the losses of each term."""

    def __init__(self, planned: Masks, rank: int) -> None:
        self.planned = self.given = planned
        self.rank = rank
        self.steps = 0
        self.vectors: list[int] = []

    def read(self, batch: dict[str, Tensor]) -> dict[str, Microbatch]:
        given = self.planned(self.rank, batch["number"] % Counted.N_MB, batch["loss_mask"])
        shared = {
            id(mask): Microbatch(mask, prompt_ids=batch["prompt_ids"]) for mask in given.values()
        }
        return {name: shared[id(mask)] for name, mask in given.items()}

    def loss(self, stock: Any, mask: Tensor) -> Any:

        masks = self.given(self.rank, self.steps % Counted.N_MB, mask)
        self.steps += 1
        return TokenLoss(lambda x: ({name: x**p for name, p in POWERS.items()}, {}), masks)

    def schedule(self, **kwargs: Any) -> Any:
        """Megatron's, counting the weight vectors of every loss."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        inner = kwargs.pop("forward_step_func")

        def count(loss: Any, output: Any) -> Any:
            with WeightVectors() as vectors:
                result = loss(output)
            self.vectors.append(len(vectors.found))
            return result

        def forward_step(*args: Any) -> Any:
            output, loss = inner(*args)
            return output, functools.partial(count, loss)

        return get_forward_backward_func()(**kwargs, forward_step_func=forward_step)


def steps_on_host(sizes: dict[str, int], expected: dict[str, Any]) -> dict[str, list[Any]]:
    """Every rank, for each case: the (gradient error, weight vectors) of its steps, or an error."""
    from tests.host import gpt, gradients

    gpt.initialize(**sizes)
    ddp = gpt.ddp_model()
    rank = gpt.data_rank()
    reads = gpt.reads_data()

    def steps(case: Case, exact: Any) -> list[Any]:
        script = Script(case.planned, rank)
        terms = {
            name: Term(
                aggregation(mode, **({"function": own_mask} if mode == "custom" else {})),
                COEFFICIENTS[name],
            )
            for name, mode in case.modes.items()
        }
        hook = LossHook(terms, read_batch=script.read)
        data = Counted(rank) if reads else None
        options = {
            "forward_step_func": gpt.forward_step_with(script.loss),
            "schedule": script.schedule,
        }
        found: list[Any] = []
        for script.given in case.given:
            script.vectors = []
            error = error_of(gpt.run_step, hook, ddp, data, Counted.N_MB, Counted.ROWS, **options)
            found.append(error or (gradients.error(ddp, exact), script.vectors))
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
def test_the_gradient_is_exact_and_alike_terms_share_weights(name: str, sizes: Any) -> None:
    case = CASES[name]
    for rank in found(sizes):
        for error, vectors in rank[name]:
            assert error <= EXACT
            # With one data-parallel rank nobody has masks of its own elsewhere.
            if case.vectors and not (sizes and name == "own masks on one rank"):
                assert vectors == case.vectors


@pytest.mark.parametrize("name", CHANGED)
def test_a_changed_mask_of_one_term_is_refused(name: str) -> None:
    for rank in found(()):
        *exact, told = rank[name]
        assert all(error <= EXACT for error, _ in exact)
        assert told.startswith("MaskError: the loss function's mask is not this rank's part")
