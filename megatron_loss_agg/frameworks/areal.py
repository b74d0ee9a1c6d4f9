"""AReaL's PPO, critic and SFT on Megatron: trainers whose engines weigh every token.

Stands on `TrainEngine.train_batch(input_, loss_fn, loss_weight_fn)`, which the engines here override,
and on the methods of AReaL's trainers that create an engine. AReaL's loss of an optimizer step of N
tokens is, over micro-batches k of ``n_k`` tokens,

    L = sum_k (n_k / N) (1 / n_k) sum_t m_t l_t = (1 / N) sum_t m_t l_t

so the gradient of each log-probability, or value, times ``N c_s`` is that of ``sum_t m_t c_s l_t``.
SFT divides by ``n_k + 1e-5`` in place of ``n_k``, which the weights undo. AReaL reports no loss, but
means over tokens, which stay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_loss_agg import LossAggregation, StepPlan, weigh
from megatron_loss_agg.errors import HostError, OptionError
from megatron_loss_agg.frameworks import (
    aggregation_from_environment,
    check_names,
    print_first_lines,
    print_none,
)

try:
    from areal import PPOTrainer as ArealPPOTrainer
    from areal import SFTTrainer as ArealSFTTrainer

    # 1.0.3, which has no DPO, divides losses by the number of micro-batches once too often.
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
except ImportError as error:
    raise HostError(
        f"AReaL must be 1.0.4 or later, got one without its engines ({error}). Install such a "
        "version of AReaL."
    ) from error

check_names(
    "AReaL",
    "1.0.4 and later have",
    [
        (ArealPPOTrainer, "_create_train_engine"),
        (ArealPPOTrainer, "_create_critic"),
        (ArealSFTTrainer, "_create_actor"),
    ],
)

SETTINGS = """\
export MEGATRON_LOSS_AGG_FLAGS="--loss-aggregation sample_mean"

# in the training script, in place of `from areal import PPOTrainer`; SFTTrainer alike:
from megatron_loss_agg.frameworks.areal import PPOTrainer

# only with `scheduler.type: ray`, whose workers do not inherit variables; the same for `critic`:
actor:
  scheduling_spec:
    - env_vars: {MEGATRON_LOSS_AGG_FLAGS: "--loss-aggregation sample_mean"}
"""

GROUP, WEIGHT = "_trajectory_group", "_loss_weight"


class _Aggregated:
    """An engine that weighs tokens as MEGATRON_LOSS_AGG_FLAGS says."""

    trained_model = ""
    has_prompts = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        self.aggregation = _aggregation(config, self.has_prompts)

    def train_batch(
        self, input_: Any, loss_fn: Callable[..., Tensor], loss_weight_fn: Callable[..., Tensor]
    ) -> Any:
        engine: Any = self
        loss_of_areal = getattr(loss_fn, "func", loss_fn)
        if loss_of_areal not in (grpo_loss_fn, ppo_loss_fn, compute_packed_sft_loss):
            raise HostError(
                "the loss must be one of AReaL's for PPO, its critic or SFT, got "
                f"{loss_of_areal!r}, whose mean is unknown. Unset MEGATRON_LOSS_AGG_FLAGS."
            )
        data = concat_batch(input_)[0] if isinstance(input_, list) else dict(input_)
        mask, groups = data["loss_mask"], data.pop(GROUP, None)
        plan = StepPlan.from_mask_sums(
            self.aggregation,
            mask.count_nonzero(-1),
            prompt_ids=None if groups is None else groups[:, 0],
            group=engine.data_parallel_group,
        )
        print_first_lines(plan, self.trained_model)
        weight_S = (plan.coefficients(0) * plan.counts.all_tokens).to(mask.device, torch.float32)
        # A column that AReaL splits and packs as it does the mask.
        data[WEIGHT] = weight_S.unsqueeze(-1).expand(mask.shape).contiguous()

        def weighed_loss(output: Tensor, *more: Any, **stats: Any) -> Tensor:
            inputs = more[-1]  # (log-probabilities, entropy, inputs), or (values, inputs)
            weights = inputs[WEIGHT]
            if loss_of_areal is compute_packed_sft_loss:
                tokens = inputs["loss_mask"].count_nonzero()
                weights = weights * ((1e-5 + tokens) / tokens)
            return loss_fn(weigh(output, weights), *more, **stats)

        return super().train_batch(data, weighed_loss, loss_weight_fn)  # type: ignore[misc]

    def ppo_update(self, data: list[dict[str, Any]]) -> None:
        """AReaL's, with the trajectory group of each sample: its prompt, whole on one rank."""
        engine: Any = self
        first = engine.data_parallel_rank * 2**32
        groups = [
            {**x, GROUP: torch.full_like(x["loss_mask"], first + i, dtype=torch.int64)}
            for i, x in enumerate(data)
        ]
        super().ppo_update(groups)  # type: ignore[misc]


class AggregatedPPOActor(_Aggregated, MegatronPPOActor):
    """AReaL's actor; PPO, GRPO, GSPO, CISPO and SAPO."""


class AggregatedPPOCritic(_Aggregated, MegatronPPOCritic):
    """AReaL's critic."""

    trained_model = "critic"


class AggregatedLMEngine(_Aggregated, MegatronLMEngine):
    """AReaL's engine for SFT."""

    has_prompts = False


def _aggregation(config: Any, has_prompts: bool) -> LossAggregation:
    """The aggregation in the environment, checked against the engine's configuration."""
    agg = aggregation_from_environment()
    if agg is None:
        raise HostError(
            "MEGATRON_LOSS_AGG_FLAGS must be set for the workers, too, got none. Set it in "
            "scheduling_spec.env_vars of this engine."
        )
    units = {"all", "sample", "prompt"} if has_prompts else {"all", "sample"}
    if not agg.units <= units:
        raise OptionError(
            f"--loss-aggregation must be a mean over {', '.join(sorted(units))} in this engine, "
            f"which has no other ids, got {agg.label!r}. Choose token_mean or sample_mean."
        )
    if agg.rejected is not None or agg.sample_weights is not None:
        raise OptionError(
            f"{agg.label!r} must leave 'rejected' and 'sample_weights' open, since AReaL has neither, "
            "got one. Remove --loss-aggregation-rejected and -sample-weights, or choose a mode."
        )
    if "prompt" in agg.units and config.ppo_n_minibatches > 1:
        raise HostError(
            f"ppo_n_minibatches must be 1 with {agg.label!r}, since AReaL's minibatches split "
            f"prompts, got {config.ppo_n_minibatches}. Change ppo_n_minibatches, or choose "
            "sample_mean."
        )
    if config.enable_tree_training:
        raise HostError(
            "enable_tree_training must be off, since sequences in a tree share tokens, got on. "
            "Turn it off, or unset MEGATRON_LOSS_AGG_FLAGS."
        )
    if getattr(config, "m2_threshold", None) is not None:
        raise HostError(
            "m2_threshold must be unset, since M2PO divides by the tokens of a micro-batch that it "
            f"leaves, got {config.m2_threshold}. Unset it, or MEGATRON_LOSS_AGG_FLAGS."
        )
    return agg


class PPOTrainer(ArealPPOTrainer):
    """AReaL's, whose actor and critic are aggregated. Without the variable it is AReaL's."""

    def _create_train_engine(self, actor_config: Any, alloc: Any) -> Any:
        if actor_config is not self.config.actor:
            return super()._create_train_engine(actor_config, alloc)
        if aggregation_from_environment() is None:
            print_none("AReaL's")
            return super()._create_train_engine(actor_config, alloc)
        return _created(AggregatedPPOActor, actor_config, alloc, self.scheduler)

    def _create_critic(self, critic_config: Any, alloc: Any) -> Any:
        if aggregation_from_environment() is None:
            return super()._create_critic(critic_config, alloc)
        return _created(AggregatedPPOCritic, critic_config, alloc, self.scheduler)


class SFTTrainer(ArealSFTTrainer):
    """AReaL's, whose model is aggregated. Without the variable it is AReaL's."""

    def _create_actor(self, actor_config: Any) -> Any:
        if aggregation_from_environment() is None:
            print_none("AReaL's")
            return super()._create_actor(actor_config)
        return _created(AggregatedLMEngine, actor_config, self.actor_alloc, self.scheduler)


def _created(engine_class: Any, config: Any, alloc: Any, scheduler: Any) -> Any:
    """The engine, or its controller, which sends the import path of the class to its workers."""
    if alloc.backend != "megatron":
        raise HostError(
            f"the backend must be Megatron, got {alloc.backend!r}. Change the engine's backend, or "
            "unset MEGATRON_LOSS_AGG_FLAGS."
        )
    _aggregation(config, engine_class.has_prompts)  # before any worker starts
    if is_single_controller():
        engine = engine_class.as_controller(config, scheduler)
    else:
        engine = engine_class(config=config)
    engine.create_process_group(parallel_strategy=alloc.parallel)
    return engine
