"""ROLL's RLVR and agentic pipelines on Megatron: an actor that weights every log-probability.

Relies on ``actor_train.worker_cls``, the path of a worker's class, and on its method `initialize`.
With ``loss_agg_mode: seq-mean-token-sum``, each of ROLL's losses in an optimizer step is

    L = (1 / G) sum_s sum_t m_t l_t        G = global_valid_samples, over all data-parallel ranks

so multiplying the gradient of each log-probability, and of each entropy, by ``c_s G`` gives the
gradient of ``sum_t m_t c_s l_t``. Metrics remain ROLL's own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any, ClassVar

import torch
from megatron.core import mpu
from torch import Tensor

from megatron_loss_agg import LossAggregation, StepPlan, weigh
from megatron_loss_agg.frameworks import (
    print_first_lines,
    prompts_by_tokens,
    read_aggregation,
    required_release,
)
from megatron_loss_agg.frameworks.refusals import SETTINGS as REFUSED
from megatron_loss_agg.frameworks.refusals import check_settings

with required_release("ROLL", "roll", "commit 8eb27cc (19 Aug 2026)"):
    from roll.distributed.scheduler.decorator import Dispatch, register
    from roll.distributed.strategy.megatron_strategy import MegatronTrainStrategy
    from roll.pipeline.agentic.agentic_actor_worker import ActorWorker as AgenticActorWorker
    from roll.pipeline.rlvr.actor_worker import ActorWorker as RLVRActorWorker

    # Replaced below, for each worker's own strategy.
    attrgetter("train_step", "op_compute_log_probs", "op_compute_entropy")(MegatronTrainStrategy)

SETTINGS = """\
# in the YAML file; AggregatedAgenticWorker for the agentic pipeline:
loss_agg_mode: seq-mean-token-sum
actor_train:
  worker_cls: megatron_loss_agg.frameworks.roll.AggregatedRLVRWorker
  system_envs: {MEGATRON_LOSS_AGG_FLAGS: "--loss-aggregation prompt_mean"}
"""

COLUMN = "loss_coefficients"


class _AggregatingWorker:
    """An actor's worker that weights tokens as MEGATRON_LOSS_AGG_FLAGS says."""

    batch_kind: ClassVar[str]
    """A key of `BATCHES`."""
    mask_keys: ClassVar[tuple[str, ...]] = ("response_mask",)
    """The first of these keys in a batch is the mask of the policy loss and of KL."""
    row_weights: Tensor | None = None
    """``c_s`` of the microbatch whose loss is being computed."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def initialize(self, pipeline_config: Any) -> Any:
        result = super().initialize(pipeline_config)  # type: ignore[misc]
        agg = read_aggregation("ROLL", self.batch_kind, on_all_ranks=True)
        if agg is not None:
            self.aggregate(agg)
        return result

    def aggregate(self: Any, agg: LossAggregation) -> None:
        """Make this worker's strategy aggregate."""
        check_settings(self.strategy, *REFUSED["roll, strategy"])
        check_settings(self.worker_config, *REFUSED["roll, worker"])
        check_settings(self.pipeline_config, *REFUSED["roll"])
        strategy = self.strategy
        strategy.train_step = partial(self.train_aggregated, agg, strategy.train_step)
        for name, key in (
            ("op_compute_log_probs", self.mask_keys[0]),
            ("op_compute_entropy", "response_mask"),
        ):
            setattr(strategy, name, partial(self.weighed, getattr(strategy, name), key))

    def train_aggregated(
        self: Any, agg: LossAggregation, train_step: Callable[..., Any], batch: Any, loss_func: Any
    ) -> Any:
        """ROLL's training step for a mini-batch, with the coefficients of its rows as a column."""
        key = next(key for key in self.mask_keys if key in batch.batch)
        mask = batch.batch[key][:, 1:] if key == "response_mask" else batch.batch[key]
        plan = StepPlan.from_mask_sums(
            agg,
            mask.sum(-1),
            **self.ids(batch, agg.units),
            group=mpu.get_data_parallel_group(),
        )
        print_first_lines(plan)
        batch.batch[COLUMN] = plan.coefficients(0).to(mask.device, torch.float32)
        return train_step(batch=batch, loss_func=partial(self.weighed_loss, loss_func))

    def weighed_loss(self, loss_func: Callable[..., Any], data: Any, output_tensor: Tensor) -> Any:
        """ROLL's loss of a microbatch, or of a sample of a pack."""
        self.valid_samples = data.meta_info["global_valid_samples"]
        self.row_weights = data.batch[COLUMN]
        result = loss_func(data, output_tensor)
        self.row_weights = None
        return result

    def weighed(
        self, operation: Callable[..., Tensor], key: str, *args: Any, **kwargs: Any
    ) -> Tensor:
        """The operation's result [rows, tokens], with weighted gradients inside the loss."""
        output = operation(*args, **kwargs)
        if self.row_weights is None:
            return output
        counts = self.valid_samples
        weights = self.row_weights * counts[key if key in counts else "response_mask"]
        return weigh(output, weights.unsqueeze(-1).expand_as(output))


class AggregatedRLVRWorker(_AggregatingWorker, RLVRActorWorker):
    """The actor of the RLVR pipeline."""

    batch_kind: ClassVar = "ROLL's RLVR pipeline"
    mask_keys = ("final_response_mask", "response_mask")

    def ids(self, batch: Any, units: frozenset[str]) -> dict[str, list[str]]:
        """Prompt ids from the prompts' tokens: ROLL numbers samples but drops prompt numbers."""
        if "prompt" not in units:
            return {}
        columns = batch.batch
        return {"prompt_ids": prompts_by_tokens(columns["input_ids"], columns["prompt_mask"] != 0)}


class AggregatedAgenticWorker(_AggregatingWorker, AgenticActorWorker):
    """The agentic pipeline's actor: a trajectory group is a prompt, a trajectory is a rollout."""

    batch_kind: ClassVar = "ROLL's agentic pipeline"

    def ids(self, batch: Any, units: frozenset[str]) -> dict[str, list[str]]:
        columns = {"prompt": "traj_group_id", "rollout": "traj_id"}
        names = batch.non_tensor_batch
        return {f"{x}_ids": [*map(str, names[columns[x]])] for x in columns if x in units}
