"""How what the hook adds to a step grows: with microbatches, terms, and samples of a microbatch.

On Megatron's own schedule and a model of one parameter, so that little else is measured.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks import megatron
from benchmarks.loss_function import loss_func
from benchmarks.results import Results, rounds_of, seconds
from benchmarks.shapes import AGGREGATIONS, GROWTH, GROWTH_FROM, GROWTH_TOKENS

Batch = dict[str, Tensor]


def measure(results: Results) -> None:
    """A line for each of the three; every point of it against the one before."""
    with megatron.one_rank():
        for axis, numbers in GROWTH.items():
            before: tuple[int, float] | None = None
            for number in numbers:
                added = _added(**{**GROWTH_FROM, axis: number})
                where = f"{number} {axis}"
                results.add("added by the hook", where, 1e3 * added, "ms")
                if before is not None:
                    linear = before[1] * number / before[0]
                    results.add(
                        "grows",
                        f"{axis}, {before[0]} to {number}",
                        added / linear,
                        "of linearly",
                        "growth",
                    )
                before = number, added


def _added(microbatches: int, terms: int, samples: int) -> float:
    """CPU seconds that the hook adds to a step; the median of rounds."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_loss_agg.mcore import LossHook, TokenLoss

    names = [f"term {i}" for i in range(terms)]
    step = [_batch(samples) for _ in range(min(microbatches, 4))]
    model, stock = _model(), get_forward_backward_func()
    hooked = LossHook(dict.fromkeys(names, AGGREGATIONS["prompt_mean"])).wrap(stock)

    def of_hook(mask: Tensor) -> Callable[..., Any]:
        return TokenLoss(lambda output: (dict.fromkeys(names, output), {}), mask)

    def of_stock(mask: Tensor) -> Callable[..., Any]:
        return functools.partial(_stock_loss, terms, mask)

    def run(schedule: Callable[..., Any], loss_of: Callable[[Tensor], Callable[..., Any]]) -> None:
        def forward_step(data_iterator: Iterator[Batch], model: Any) -> tuple[Tensor, Any]:
            batch = next(data_iterator)
            return model(batch["losses"]), loss_of(batch["loss_mask"])

        schedule(
            forward_step_func=forward_step,
            data_iterator=itertools.cycle(step),
            model=[model],
            num_microbatches=microbatches,
            seq_length=GROWTH_TOKENS,
            micro_batch_size=samples,
            forward_only=False,
        )

    works = [functools.partial(run, hooked, of_hook), functools.partial(run, stock, of_stock)]
    for work in works * 2:
        work()
    rounds = rounds_of(max(3, 60 // microbatches))
    taken = [[seconds(work) for work in works] for _ in range(rounds)]
    return statistics.median(ours - theirs for ours, theirs in taken)


def _batch(samples: int) -> Batch:
    generator = torch.Generator().manual_seed(samples)
    shape = samples, GROWTH_TOKENS
    return {
        "losses": torch.randn(shape, generator=generator),
        "loss_mask": (torch.rand(shape, generator=generator) < 0.5).float(),
        "prompt_ids": torch.arange(samples) // 8,
    }


def _stock_loss(terms: int, loss_mask: Tensor, output: Tensor) -> Any:
    """Of as many terms: each a sum over the mask."""
    loss, num_tokens, report = loss_func(loss_mask, output)
    for _ in range(terms - 1):
        loss = loss + torch.sum(output.view(-1) * loss_mask.view(-1))
    return loss, num_tokens, report


def _model() -> torch.nn.Module:
    from megatron.core.enums import ModelType
    from megatron.core.transformer.transformer_config import TransformerConfig

    class Scale(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model_type = ModelType.encoder_or_decoder
            self.config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
            self.scale = torch.nn.Parameter(torch.ones(()))

        def forward(self, losses: Tensor) -> Tensor:
            return losses * self.scale

        def set_input_tensor(self, _: Any) -> None:
            """Asked for by the schedule."""

    return Scale()
