"""What a step should have done to the parameters: one process, the whole step, no plugin."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training import arguments
from megatron.training.argument_utils import gpt_config_from_args
from megatron.training.initialize import initialize_megatron
from torch import Tensor

from megatron_loss_agg.mcore.cpu import set_default_flags
from tests.oracle import Sample, step_weights
from tests.sweep import data
from tests.sweep.script import begin, keep_models, parsed

Items = list[list[list[int]]]  # of a step, by data-parallel rank and microbatch


class Reference(NamedTuple):
    """Of every parameter: its value before the step, and the gradient of the step's loss."""

    start: dict[str, Tensor]
    gradient: dict[str, Tensor]  # fp64


def reference_main(argv: list[str], log: str, items: Items, mode: dict[str, Any]) -> Reference:
    """Run every sample of the step alone, so that packs and their attention play no part.

    Args:
        mode: the arguments of `step_weights` apart from the step.
    """
    begin(f"{log}.reference", argv)
    add = arguments.add_megatron_arguments
    arguments.add_megatron_arguments = lambda parser: set_default_flags(add(parser))
    keep_models([])
    args = parsed(argv)
    initialize_megatron()
    config = gpt_config_from_args(args)
    model = config.get_builder_cls()(config).build_model(
        ProcessGroupCollection.use_mpu_process_groups()
    )
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    # A sum over many samples loses more digits than one of them has.
    gradient = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in start.items()}
    train = data.datasets(args, [data.VALIDATION, 0, 0])[0]
    for sample, weights in _weighted(train, items, mode):
        model.zero_grad()
        (_losses(model, sample) * torch.tensor(weights)).sum().backward()
        for name, p in model.named_parameters():
            if p.grad is not None:
                gradient[name] += p.grad
    return Reference(start, gradient)


def _losses(model: GPTModel, sample: dict[str, Tensor]) -> Tensor:
    """[tokens], of the sample alone."""
    row = {key: x[None] for key, x in sample.items()}
    losses = model(
        row["tokens"],
        row["position_ids"],
        row.get("attention_mask"),
        labels=row["labels"],
        loss_mask=row["loss_mask"],
    )
    return losses.view(-1)


def _weighted(
    train: Any, items: Items, mode: dict[str, Any]
) -> list[tuple[dict[str, Tensor], list[float]]]:
    """The samples of the step that have tokens, with the weights of their tokens."""
    numbers = [item for rank in items for microbatch in rank for item in microbatch]
    samples = {item: data.samples_of(train[item]) for item in numbers}
    step = [
        [
            [
                Sample(tuple(sample["loss_mask"].tolist()), *data.ids_of(item, place))
                for item in microbatch
                for place, sample in enumerate(samples[item])
            ]
            for microbatch in rank
        ]
        for rank in items
    ]
    nested = step_weights(step=step, **mode)
    flat = [weights for rank in nested for microbatch in rank for weights in microbatch]
    whole = [sample for item in numbers for sample in samples[item]]
    return [(s, w) for s, w in zip(whole, flat, strict=True) if any(w)]
