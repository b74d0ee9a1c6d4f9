"""SkyRL: an entry point whose trainer weighs the advantages of every sample.

Stands on ``trainer.override_entrypoint``, on ``BasePPOExp.get_trainer``, and on three methods of
`RayPPOTrainer` that `ExactLoss` overrides. SkyRL's policy loss of an optimizer step, a mini-batch
of M loss tokens, is a plain sum over tokens, to which the trainer brings the denominator: under
``loss_reduction=token_mean`` it divides every advantage by M. The loss of a token is proportional
to its advantage, so with

    A_t / M * (M * c_s)   in place of   A_t / M

that sum is ``sum_t m_t * c_s * loss_t``. Advantages do not reach the KL and entropy losses, which
are means over micro-batches: both are refused, unless SkyRL has ``reduce_kl_and_entropy``, by which
loss masks weigh their sums. Masks are then scaled like advantages.

For an entry point of one's own, put `ExactLoss` before the trainer among the bases of a class, have
``get_trainer`` make that trainer, and see that the environment variable reaches its process.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import ray
import torch
from torch import Tensor

from megatron_loss_agg import LossAggregation, StepPlan
from megatron_loss_agg.errors import HostError, OptionError
from megatron_loss_agg.frameworks import (
    aggregation_from_environment,
    check_names,
    check_samples,
    print_first_lines,
    print_none,
)
from megatron_loss_agg.launch.flags import VARIABLE

try:
    from skyrl.train.config import SkyRLTrainConfig
    from skyrl.train.entrypoints.main_base import BasePPOExp
    from skyrl.train.fully_async_trainer import FullyAsyncRayPPOTrainer
    from skyrl.train.trainer import RayPPOTrainer
    from skyrl.train.utils.utils import initialize_ray, validate_cfg
except ImportError as error:
    raise HostError(
        f"SkyRL 0.2.0 or later and its dependencies must be installed, got: {error}. Install them."
    ) from error

check_names(
    "SkyRL",
    "0.2.0 and later have",
    [
        (RayPPOTrainer, "postprocess_generator_output"),
        (RayPPOTrainer, "convert_to_training_input"),
        (RayPPOTrainer, "_normalize_advantages"),
    ],
)

SETTINGS = """\
export MEGATRON_LOSS_AGG_FLAGS="--loss-aggregation prompt_mean"
python -m skyrl.train.entrypoints.main_base trainer.algorithm.use_kl_loss=false \\
    trainer.override_entrypoint=megatron_loss_agg.frameworks.skyrl ...
"""

PROPORTIONAL = frozenset(
    {
        "regular",
        "dual_clip",
        "gspo",
        "sapo",
        "cispo",
        "dppo",
        "rollout_is",
        "importance_sampling",
    }
)
"""SkyRL's policy losses that are proportional to the advantage, where its sign stays."""

Boundaries = list[tuple[int, int]]
"""The first sample of each mini-batch, and the one after its last."""


class ExactLoss:
    """Put before a trainer of SkyRL among the bases of a class; see the module."""

    proportional_losses = PROPORTIONAL
    """Add the name of your own policy loss in a subclass, if it is proportional to advantages."""

    cfg: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.aggregation = self.checked_aggregation(self.cfg)

    @classmethod
    def checked_aggregation(cls, cfg: Any) -> LossAggregation | None:
        """The aggregation in the environment, if any; checked against SkyRL's configuration.

        Raises:
            HostError: a setting of SkyRL's that the weights do not follow.
            OptionError: the aggregation needs more than SkyRL's samples have.
        """
        agg = aggregation_from_environment()
        if agg is None:
            print_none("SkyRL's")
            return None
        check_aggregation(agg, cfg)
        check_settings(cfg, cls.proportional_losses)
        return agg

    def postprocess_generator_output(
        self, generator_output: Any, uids: list[str], *args: Any, **kwargs: Any
    ) -> Any:
        """SkyRL's, with the loss masks from before its filter of prompts of equal rewards."""
        masks = generator_output["loss_masks"]
        output, uids = super().postprocess_generator_output(  # type: ignore[misc]
            generator_output, uids, *args, **kwargs
        )
        if self.aggregation is not None and self.aggregation.rejected:
            output["unfiltered_loss_masks"] = masks
        return output, uids

    def convert_to_training_input(self, generator_output: Any, uids: list[str]) -> Any:
        """SkyRL's batch, with ids of its samples, which the training loop would remove."""
        data = super().convert_to_training_input(generator_output, uids)  # type: ignore[misc]
        if self.aggregation is None:
            return data
        names = data.metadata["uids"]
        number = {name: i for i, name in enumerate(dict.fromkeys(names))}
        data["prompt_ids"] = torch.tensor([number[name] for name in names])
        is_last = data.metadata.get("is_last_step") or [True] * len(names)
        data["rollout_ids"] = torch.tensor([0, *is_last[:-1]]).cumsum(0)
        masks = generator_output["loss_masks"]
        before = generator_output.get("unfiltered_loss_masks", masks)
        filtered = {uid for uid, x, y in zip(uids, before, masks, strict=True) if x != y}
        data["rejected"] = torch.tensor([name in filtered for name in names])
        removed = [sum(x) - sum(y) for x, y in zip(before, masks, strict=True)]
        removed += [0] * (len(names) - len(masks))  # samples that fill the batch, at its end
        data["removed_tokens"] = torch.tensor(removed, dtype=torch.float64)
        return data

    def _normalize_advantages(
        self, data: Any, mini_batch_boundaries: Boundaries, *args: Any
    ) -> Any:
        """SkyRL's token mean, times ``M * c_s`` of each sample."""
        masks = data["loss_mask"]
        data = super()._normalize_advantages(  # type: ignore[misc]
            data, mini_batch_boundaries, *args
        )
        if self.aggregation is None:
            return data
        are_weights = data["loss_mask"] is not masks  # by reduce_kl_and_entropy
        ids = {name: data.pop(name) for name in ("prompt_ids", "rollout_ids")}
        rejected, removed = data.pop("rejected"), data.pop("removed_tokens")
        for start, end in mini_batch_boundaries:
            rows = slice(start, end)
            plan = StepPlan.from_mask_sums(
                self.aggregation,
                masks[rows].sum(-1) + removed[rows],
                rejected=rejected[rows] if self.aggregation.rejected else None,
                **{name: x[rows] for name, x in ids.items()},
            )
            print_first_lines(plan)
            factors = _factors(plan, masks[rows]).to(masks)
            data["advantages"][rows] *= factors
            if are_weights:
                data["loss_mask"][rows] *= factors
        return data


def _factors(plan: StepPlan, masks: Tensor) -> Tensor:
    """``M * c_s`` of each sample of a mini-batch, fp64 [samples, 1]."""
    coefficients = plan.coefficients(0)
    if bool((coefficients < 0).any()):
        raise OptionError(
            "coefficients that scale advantages must be >= 0, got negative ones, which would flip "
            "signs. Change the aggregation function (--loss-aggregation-function)."
        )
    divided_by = masks.sum().clamp(min=1)  # as SkyRL's token_mean has it
    return (coefficients * divided_by).unsqueeze(-1)


def check_aggregation(agg: LossAggregation, cfg: Any) -> None:
    """Raise OptionError if the aggregation needs more than SkyRL's samples have."""
    check_samples(agg)
    if "microbatch" in agg.units:
        raise OptionError(
            f"means must be over the whole mini-batch, got {agg.label}. Unset {VARIABLE} and set "
            "trainer.algorithm.loss_reduction=token_mean_legacy, or choose another mode."
        )
    if agg.rejected and not cfg.trainer.algorithm.zero_variance_filter:
        raise OptionError(
            "--loss-aggregation-rejected needs samples that "
            "trainer.algorithm.zero_variance_filter=true rejects, got false. Remove it, or set the "
            "filter."
        )
    if agg.rejected and cfg.generator.merge_stepwise_output:
        raise OptionError(
            "--loss-aggregation-rejected needs the loss masks of samples before they are filtered, "
            "got generator.merge_stepwise_output=true, which changes both at once. Remove one."
        )


def check_settings(cfg: Any, proportional_losses: frozenset[str] = PROPORTIONAL) -> None:
    """Raise HostError if the gradient of SkyRL would not be that of the weighted policy loss."""
    algorithm = cfg.trainer.algorithm
    if algorithm.loss_reduction != "token_mean":
        raise HostError(
            "trainer.algorithm.loss_reduction must be token_mean, which the aggregation replaces, "
            f"got {algorithm.loss_reduction}. Remove it, or unset {VARIABLE}."
        )
    if algorithm.policy_loss_type not in proportional_losses:
        raise HostError(
            "trainer.algorithm.policy_loss_type must be proportional to the advantage, as "
            f"{', '.join(sorted(proportional_losses))} are, got {algorithm.policy_loss_type}. "
            "Choose one of them; or add your own to proportional_losses of a trainer."
        )
    reduces_all = getattr(algorithm, "reduce_kl_and_entropy", False)
    for name in ("use_kl_loss", "use_entropy_loss"):
        if getattr(algorithm, name) and not reduces_all:
            raise HostError(
                f"a loss must be proportional to advantages, got trainer.algorithm.{name}=true, a "
                "mean over micro-batches. Set it to false; or apply patches/skyrl/0.4.0.patch, and "
                "set trainer.algorithm.reduce_kl_and_entropy=true."
            )
    if cfg.trainer.critic.model.path:
        raise HostError(
            "there must be no critic, whose loss advantages do not reach, got "
            f"trainer.critic.model.path={cfg.trainer.critic.model.path}. Choose an "
            f"advantage_estimator without one, or unset {VARIABLE}."
        )
    transformer = cfg.trainer.policy.megatron_config.transformer_config_kwargs or {}
    if transformer.get("calculate_per_token_loss"):
        raise HostError(
            "Megatron must average losses as SkyRL expects, got calculate_per_token_loss in "
            "trainer.policy.megatron_config.transformer_config_kwargs. Remove it."
        )


class ExactTrainer(ExactLoss, RayPPOTrainer):
    """SkyRL's trainer."""


class ExactAsyncTrainer(ExactLoss, FullyAsyncRayPPOTrainer):
    """SkyRL's fully asynchronous trainer."""


class Experiment(BasePPOExp):
    """SkyRL's experiment with one of these trainers."""

    def get_trainer(self, cfg: Any, *args: Any, **kwargs: Any) -> ExactLoss:
        trainer = ExactAsyncTrainer if cfg.trainer.fully_async.enabled else ExactTrainer
        return trainer(cfg, *args, **kwargs)


def run(cfg: Any) -> None:
    """Train, in the process that SkyRL starts for it."""
    Experiment(cfg).run()


def main() -> None:
    """Start SkyRL, as its own entry point does, which calls this function.

    Ray does not hand the environment of this process on: the variable is given to the trainer's.
    """
    overrides = [x for x in sys.argv[1:] if not x.startswith("trainer.override_entrypoint=")]
    cfg = SkyRLTrainConfig.from_cli_overrides(overrides)
    validate_cfg(cfg)
    ExactTrainer.checked_aggregation(cfg)
    initialize_ray(cfg)
    environment = {"env_vars": {VARIABLE: os.environ.get(VARIABLE, "")}}
    ray.get(ray.remote(num_cpus=1, runtime_env=environment)(run).remote(cfg))
