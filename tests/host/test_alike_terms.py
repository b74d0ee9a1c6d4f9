"""Terms that have mask and weights in common are checked and weighed once; others each for itself.

Two terms weigh their microbatches alike as far as the batches tell; the script may hand them one
mask, equal ones, or different ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests import oracle
from tests.host.ranks import run_host_ranks

pytestmark = pytest.mark.host

EXACT = 1e-12
MODES = {"policy": "prompt_mean", "kl": "prompt_mean", "entropy": "token_mean"}
COEFFICIENTS = {"policy": 1.0, "kl": 0.3, "entropy": -0.1}
POWERS = {"policy": 1, "kl": 2, "entropy": 3}  # of the cross entropy: what a term's losses are
ROWS, LENGTH, N_MB = 2, 36, 2  # rows long enough to be weighed in their microbatch's turn
PROMPTS = [[4, 5], [5, 5]]

Masks = Callable[[Tensor], Tensor | dict[str, Tensor]]


def without_first(mask: Tensor) -> Tensor:
    return mask.masked_fill(mask.cumsum(dim=-1) == 1, 0)


def one(mask: Tensor) -> Tensor:
    return mask


def equal(mask: Tensor) -> dict[str, Tensor]:
    return {name: mask.clone() for name in MODES}


def own_kl(mask: Tensor) -> dict[str, Tensor]:
    return {**dict.fromkeys(MODES, mask), "kl": without_first(mask)}


def own_entropy(mask: Tensor) -> dict[str, Tensor]:
    return {**dict.fromkeys(MODES, mask), "entropy": without_first(mask)}


def batches() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    text = torch.randint(0, 32, (N_MB, ROWS, LENGTH + 1), generator=generator)
    mask = torch.rand(N_MB, ROWS, LENGTH, generator=generator, dtype=torch.float64) < 0.6
    return [
        {
            "tokens": text[i, :, :-1],
            "labels": text[i, :, 1:],
            "loss_mask": mask[i].double(),
            "prompt_ids": torch.tensor(PROMPTS[i]),
        }
        for i in range(N_MB)
    ]


def term_losses(losses: Tensor) -> dict[str, Tensor]:
    return {name: losses**power for name, power in POWERS.items()}


def plain_gradient(model: Any, masks: Masks) -> Any:
    """By one pass over all rows and a loop over the terms' tokens."""
    data = batches()
    tokens, labels = (torch.cat([b[key] for b in data]) for key in ("tokens", "labels"))
    positions = torch.arange(LENGTH).expand_as(tokens)
    logits = model(tokens, positions, None)
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    given = [masks(b["loss_mask"]) for b in data]
    total = torch.zeros(())
    for name, of_term in term_losses(losses).items():
        of_name = [g[name] if isinstance(g, dict) else g for g in given]
        step = [
            [
                [oracle.Sample(tuple(row), p, 0) for row, p in zip(m.tolist(), ids, strict=True)]
                for m, ids in zip(of_name, PROMPTS, strict=True)
            ]
        ]
        weights = torch.tensor(oracle.step_weights(MODES[name], step)).reshape(-1)
        total = total + COEFFICIENTS[name] * (weights * of_term).sum()
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(total, parameters), strict=True))


def steps_on_host() -> dict[str, Any]:
    """One rank: gradient errors of a first and a second step, or what these were told."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_loss_agg import AggregationError, LossAggregation, Microbatch, Term
    from megatron_loss_agg.mcore import LossHook, TokenLoss
    from megatron_loss_agg.mcore.batches import read_batch
    from tests.host import gpt

    gpt.initialize()
    ddp = gpt.data_parallel(gpt.build(torch.float64, False))
    terms = {
        name: Term(LossAggregation(mode=mode), coefficient=COEFFICIENTS[name])
        for name, mode in MODES.items()
    }

    def reader(masks: Masks) -> Callable[[Any], Any]:
        def read(batch: Any) -> Any:
            given, ids = masks(batch["loss_mask"]), batch["prompt_ids"]
            if isinstance(given, Tensor):
                return read_batch(batch)
            shared: dict[int, Microbatch] = {}
            return {
                name: shared.setdefault(id(mask), Microbatch(mask, prompt_ids=ids))
                for name, mask in given.items()
            }

        return read

    def run(planned: Masks, *given: Masks) -> list[float | str]:
        hook = LossHook(terms, read_batch=reader(planned))
        wrapped = hook.wrap(get_forward_backward_func())
        exact = plain_gradient(gpt.build(torch.float64, False), planned)
        found: list[float | str] = []
        for masks in given:

            def forward_step(iterator: Any, model: Any, masks: Masks = masks) -> Any:
                losses, loss_func = gpt.forward_step(iterator, model)
                (mask,) = loss_func.args
                return losses, TokenLoss(lambda x: (term_losses(x), {}), masks(mask))

            try:
                gpt.run_step(
                    wrapped, ddp, iter(batches()), N_MB, ROWS, forward_step_func=forward_step
                )
                found.append(gpt.relative_error(gpt.gradient(ddp), exact))
            except AggregationError as error:
                found.append(f"{type(error).__name__}: {error}")
        return found

    return {
        "one": run(one, one, one),
        "equal": run(one, equal, equal),
        "own": run(own_kl, own_kl, own_kl),
        "changed": run(one, own_kl),
        "changed later": run(one, one, own_kl),
        "other weights changed": run(one, own_entropy),
        "other weights changed later": run(one, one, own_entropy),
    }


@pytest.fixture(scope="module")
def found() -> dict[str, list[float | str]]:
    return run_host_ranks(steps_on_host, 1)[0]


@pytest.mark.parametrize("case", ["one", "equal", "own"])
def test_the_gradient_is_exact_whatever_terms_share(found, case) -> None:
    assert max(found[case]) <= EXACT


@pytest.mark.parametrize("case", ["changed", "other weights changed"])
def test_a_changed_mask_of_one_term_is_refused(found, case) -> None:
    (first,), (exact, later) = found[case], found[f"{case} later"]
    assert exact <= EXACT
    for told in (first, later):
        assert told.startswith("MaskError: the loss function's mask is not this rank's part")
