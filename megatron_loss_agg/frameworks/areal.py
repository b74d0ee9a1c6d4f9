"""AReaL's PPO, critic and SFT on Megatron: trainers whose engines weight every token.

Relies on `TrainEngine.train_batch(input_, loss_fn, loss_weight_fn)`, overridden by the engines
here, and on the methods of AReaL's trainers that create an engine. AReaL's loss for an optimizer
step of N tokens, with micro-batches k of ``n_k`` tokens, is

    L = sum_k (n_k / N) (1 / n_k) sum_t m_t l_t = (1 / N) sum_t m_t l_t

so multiplying the gradient of each log-probability, or value, by ``N c_s`` gives the gradient of
``sum_t m_t c_s l_t``. SFT divides by ``n_k + 1e-5`` instead of ``n_k``; the weights undo that.
AReaL does not report the loss but means over tokens, which are unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from megatron_loss_agg import LossAggregation, StepPlan, weigh
from megatron_loss_agg.frameworks import (
    check_aggregation,
    print_first_lines,
    read_aggregation,
    required_release,
    same_on_all_ranks,
)
from megatron_loss_agg.frameworks.refusals import SETTINGS as REFUSED
from megatron_loss_agg.frameworks.refusals import check_settings, refused

with required_release("AReaL", "areal", "1.0.4"):
    from areal import PPOTrainer as ArealPPOTrainer
    from areal import SFTTrainer as ArealSFTTrainer

    # 1.0.3, which divides losses once too often by the number of micro-batches, has no DPO engine.
    from areal.engine.megatron_engine import (  # noqa: F401
        MegatronDPOEngine,
        MegatronLMEngine,
        MegatronPPOActor,
        MegatronPPOCritic,
    )
    from areal.trainer.ppo.actor import grpo_loss_fn
    from areal.trainer.ppo.critic import ppo_loss_fn
    from areal.trainer.sft.lm_engine import compute_packed_sft_loss
    from areal.utils.data import concat_batch
    from areal.utils.environ import is_single_controller

    # Overridden or called below.
    attrgetter("_create_train_engine", "_create_critic")(ArealPPOTrainer)
    attrgetter("_create_actor")(ArealSFTTrainer)
    for engine in MegatronPPOActor, MegatronPPOCritic, MegatronLMEngine:
        attrgetter("train_batch", "as_controller", "create_process_group")(engine)
    attrgetter("ppo_update")(MegatronPPOActor)

SETTINGS = """\
export MEGATRON_LOSS_AGG_FLAGS="--loss-aggregation sample_mean"

# in the training script, instead of `from areal import PPOTrainer`; the same for SFTTrainer:
from megatron_loss_agg.frameworks.areal import PPOTrainer

# only with `scheduler.type: ray`, whose workers do not inherit variables; the same for `critic`:
actor:
  scheduling_spec:
    - env_vars: {MEGATRON_LOSS_AGG_FLAGS: "--loss-aggregation sample_mean"}
"""

GROUP_KEY, WEIGHT_KEY = "_trajectory_group", "_loss_weight"


class _AggregatingEngine:
    """An engine that weights tokens as MEGATRON_LOSS_AGG_FLAGS says."""

    model_name = ""
    has_prompts = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        self.aggregation = _aggregation(config, self.has_prompts)

    def train_batch(
        self, input_: Any, loss_fn: Callable[..., Tensor], loss_weight_fn: Callable[..., Tensor]
    ) -> Any:
        engine: Any = self
        areal_loss = getattr(loss_fn, "func", loss_fn)
        if areal_loss not in (grpo_loss_fn, ppo_loss_fn, compute_packed_sft_loss):
            raise refused("areal, loss", repr(areal_loss))
        data = concat_batch(input_)[0] if isinstance(input_, list) else dict(input_)
        mask, groups = data["loss_mask"], data.pop(GROUP_KEY, None)
        plan = StepPlan.from_mask_sums(
            self.aggregation,
            mask.count_nonzero(-1),
            prompt_ids=None if groups is None else groups[:, 0],
            group=engine.data_parallel_group,
        )
        print_first_lines(plan, self.model_name)
        weight_S = (plan.coefficients(0) * plan.counts.all_tokens).to(mask.device, torch.float32)
        # AReaL splits and packs a column of the mask's shape like the mask.
        data[WEIGHT_KEY] = weight_S.unsqueeze(-1).expand(mask.shape).contiguous()

        def weighed_loss(output: Tensor, *more: Any, **stats: Any) -> Tensor:
            inputs = more[-1]  # (log-probabilities, entropy, inputs), or (values, inputs)
            weights = inputs[WEIGHT_KEY]
            if areal_loss is compute_packed_sft_loss:
                tokens = inputs["loss_mask"].count_nonzero()
                weights = weights * ((1e-5 + tokens) / tokens)
            return loss_fn(weigh(output, weights), *more, **stats)

        return super().train_batch(data, weighed_loss, loss_weight_fn)  # type: ignore[misc]

    def ppo_update(self, data: list[dict[str, Any]]) -> None:
        """AReaL's update, plus each sample's trajectory group: its prompt, entirely on one rank."""
        engine: Any = self
        first = engine.data_parallel_rank * 2**32  # so that ranks number different groups
        groups = [
            {**x, GROUP_KEY: torch.full_like(x["loss_mask"], first + i, dtype=torch.int64)}
            for i, x in enumerate(data)
        ]
        super().ppo_update(groups)  # type: ignore[misc]


class AggregatedPPOActor(_AggregatingEngine, MegatronPPOActor):
    """AReaL's actor, for PPO, GRPO, GSPO, CISPO and SAPO."""


class AggregatedPPOCritic(_AggregatingEngine, MegatronPPOCritic):
    """AReaL's critic."""

    model_name = "critic"


class AggregatedLMEngine(_AggregatingEngine, MegatronLMEngine):
    """AReaL's engine for SFT."""

    has_prompts = False


def _aggregation(config: Any, has_prompts: bool) -> LossAggregation:
    """The aggregation in the environment, checked against the engine's configuration."""
    agg = read_aggregation("AReaL")
    if agg is None:
        raise refused("areal, variable", "none")
    if not has_prompts:
        check_aggregation(agg, "AReaL's SFT")
    if agg.rejected is not None:
        raise refused("areal, rejected", agg.rejected, label=agg.label)
    check_settings(config, *REFUSED["areal"])
    if "prompt" in agg.units:
        check_settings(config, *REFUSED["areal, prompts"])
    return agg


class PPOTrainer(ArealPPOTrainer):
    """AReaL's trainer with an aggregating actor and critic; unchanged without the variable."""

    def _create_train_engine(self, actor_config: Any, alloc: Any) -> Any:
        create = partial(super()._create_train_engine, actor_config, alloc)
        if actor_config is not self.config.actor:  # it is a reference's or a teacher's
            return create()
        return _create_engine(AggregatedPPOActor, actor_config, alloc, self.scheduler, create)

    def _create_critic(self, critic_config: Any, alloc: Any) -> Any:
        create = partial(super()._create_critic, critic_config, alloc)
        return _create_engine(AggregatedPPOCritic, critic_config, alloc, self.scheduler, create)


class SFTTrainer(ArealSFTTrainer):
    """AReaL's trainer with an aggregating model; unchanged without the variable."""

    def _create_actor(self, actor_config: Any) -> Any:
        create = partial(super()._create_actor, actor_config)
        return _create_engine(
            AggregatedLMEngine, actor_config, self.actor_alloc, self.scheduler, create
        )


def _create_engine(
    engine_class: Any, config: Any, alloc: Any, scheduler: Any, create: Callable[[], Any]
) -> Any:
    """The engine, or its controller, which sends the class's import path to its workers.

    Args:
        create: AReaL's own method, for a process without the variable.
    """
    agg = read_aggregation("AReaL")
    if agg is None:
        engine = create()
    else:
        check_settings(alloc, *REFUSED["areal, allocation"])
        _aggregation(config, engine_class.has_prompts)  # raise before any worker starts
        if is_single_controller():
            engine = engine_class.as_controller(config, scheduler)
        else:
            engine = engine_class(config=config)
        engine.create_process_group(parallel_strategy=alloc.parallel)
    if not is_single_controller():  # every rank has a trainer, and there are process groups now
        same_on_all_ranks(lambda: agg)
    return engine
