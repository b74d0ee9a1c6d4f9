"""The names that the pages' Python takes as given: a loop's own model, batches and forward step."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from examples.custom_loop import LENGTH, build, forward_step, rollouts
from megatron_loss_agg import LossAggregation, Microbatch, StepPlan

N_MB = 8  # of a step


def _microbatches() -> list[dict[str, torch.Tensor]]:
    whole = rollouts(0)
    rows = len(whole["tokens"])
    whole |= {
        "labels": whole["tokens"].roll(-1, dims=1),
        "position_ids": torch.arange(LENGTH).repeat(rows, 1),
        "attention_mask": torch.ones(rows, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1),
        "old_log_probs": torch.full((rows, LENGTH), -3.5),
        "reference_log_probs": torch.full((rows, LENGTH), -3.4),
    }
    # Of unequal size; `advantages` become [rows, seq].
    whole["advantages"] = whole["advantages"].expand(rows, LENGTH)
    sizes = [1, 3, 2, 2, 1, 3, 2, 2]
    parts = {key: value.split(sizes) for key, value in whole.items()}
    return [{key: part[i] for key, part in parts.items()} for i in range(N_MB)]


def names() -> dict[str, Any]:
    """What a page starts with; real Megatron-Core on one rank."""
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)
    model = build()
    config = OptimizerConfig(optimizer="adam", lr=0.01, min_lr=0.01, clip_grad=0.0)
    step_in_memory = _microbatches()
    return {
        "model": model,
        "optimizer": get_megatron_optimizer(config, [model]),
        "step_in_memory": step_in_memory,
        "loader": cycle(step_in_memory),
        "batches": cycle(step_in_memory),
        "steps": 2,
        "forward_step": forward_step,
        "the_rest": {
            "model": [model],
            "num_microbatches": N_MB,
            "seq_length": LENGTH,
            "micro_batch_size": 1,
            "forward_only": False,
        },
        "data_and_context_parallel_group": dist.group.WORLD,
        "mask": torch.tensor([[1, 1, 0], [0, 0, 1]]),
        "labels": torch.zeros(2, 3, dtype=torch.int64),
        "logits": torch.zeros(2, 3, 4),
        "plan_of": lambda mask: StepPlan.build(
            LossAggregation(mode="sample_mean"), [Microbatch(mask)]
        ),
    }
