"""RLinf's reasoning actor on Megatron: its aggregation of a microbatch, over the whole step.

Relies on the actor's class, which RLinf's script names, and on its attribute ``loss_agg_func``.
RLinf uses that to reduce the policy loss, KL and entropy of a microbatch to a mean, and Megatron
divides the mean by the number of microbatches and of data-parallel ranks. Here the coefficients of
the step's samples replace the mean with

    num_microbatches * dp_size * sum_s c_s sum_t m_t l_t

in the loss and in the same terms of RLinf's metrics, averaged over both microbatches and ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron_loss_agg import LossAggregation, StepPlan
from megatron_loss_agg.frameworks import (
    print_first_lines,
    prompts_by_tokens,
    read_aggregation,
    required_release,
)
from megatron_loss_agg.frameworks.refusals import SETTINGS as REFUSED
from megatron_loss_agg.frameworks.refusals import check_settings, refused

with required_release("RLinf", "rlinf", "commit a3816b5 (22 Aug 2026)"):
    from rlinf.workers.actor.megatron_actor_worker import MegatronActor as RLinfActor

    # Overridden below.
    attrgetter("training_step", "get_forward_step_func")(RLinfActor)

SETTINGS = """\
export MEGATRON_LOSS_AGG_FLAGS="--loss-aggregation prompt_mean"

# in the training script (main_grpo.py), the second line instead of `... = get_actor_worker(cfg)`:
from megatron_loss_agg.frameworks.rlinf import MegatronActor
actor_worker_cls = MegatronActor

# in the YAML file; RLinf's examples have 5.0, and some have true:
algorithm:
  early_stop_imp_ratio: null
  use_valid_token_scale: false
"""

COLUMN = "loss_coefficients"


class MegatronActor(RLinfActor):
    """RLinf's actor; unchanged without the variable."""

    row_weights: Tensor | None = None
    """``c_s`` of the microbatch whose loss is being computed."""
    is_first_step = True
    aggregation: LossAggregation | None = None

    def training_step(self, batch: Any) -> Any:
        if self.is_first_step:
            self.is_first_step = False
            self.aggregation = read_aggregation("RLinf", on_all_ranks=True)
            if self.aggregation is not None:
                check_settings(self.cfg, *REFUSED["rlinf"])
                self.loss_agg_func = self.aggregated
        if self.aggregation is None:
            return super().training_step(batch)
        if not isinstance(batch, dict):
            raise refused("rlinf, pipeline", type(batch).__name__)
        plan = StepPlan.from_mask_sums(
            self.aggregation,
            batch["response_mask"][:, -self.response_len :].sum(-1),
            prompt_ids=self.prompts(batch) if "prompt" in self.aggregation.units else None,
            group=parallel_state.get_data_parallel_group(),
        )
        print_first_lines(plan)
        coefficients = plan.coefficients(0).to(batch["input_ids"].device, torch.float32)
        return super().training_step({**batch, COLUMN: coefficients})

    def prompts(self, batch: dict[str, Tensor]) -> list[str]:
        """An id for each row's prompt, which is left of the response."""
        columns = slice(None, -self.response_len)
        return prompts_by_tokens(
            batch["input_ids"][:, columns], batch["attention_mask"][:, columns] != 0
        )

    def get_forward_step_func(self) -> Callable[..., Any]:
        forward_step: Callable[..., Any] = super().get_forward_step_func()
        if self.aggregation is None or not self.return_loss:
            return forward_step

        def weighed_step(iterator: Any, model: Any) -> tuple[Any, Callable[..., Any]]:
            batch = dict(next(iterator))
            # RLinf sets the loss of all rows to 0 if the first row has no tokens.
            order = batch["response_mask"].any(-1).to(torch.uint8).argsort(descending=True)
            batch = {key: x[order] for key, x in batch.items()}
            weights = batch.pop(COLUMN)
            if not batch["response_mask"].any():
                batch["response_mask"][0, -1], weights = True, torch.zeros_like(weights)
            output, loss_func = forward_step(iter([batch]), model)

            def weighed_loss(output: Any) -> Any:
                self.row_weights = weights
                result = loss_func(output)
                self.row_weights = None
                return result

            return output, weighed_loss

        return weighed_step

    def aggregated(self, values: Tensor, mask: Tensor, *_: Any) -> Tensor:
        """The loss of a microbatch, instead of RLinf's mean."""
        assert self.row_weights is not None
        weights = self.row_weights.to(values.device).unsqueeze(-1) * mask
        scale = self.num_microbatches * parallel_state.get_data_parallel_world_size()
        return torch.where(mask, values * weights, 0.0).sum() * scale
