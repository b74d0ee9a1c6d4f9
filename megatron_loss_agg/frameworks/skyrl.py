"""SkyRL: an entry point with a trainer that weights every sample's advantages.

Relies on ``trainer.override_entrypoint``, on ``BasePPOExp.get_trainer``, and on three methods of
`RayPPOTrainer` that `ExactLoss` overrides. SkyRL's policy loss for an optimizer step, a mini-batch
of M loss tokens, is a plain sum over tokens. The trainer divides it by dividing advantages: with
``loss_reduction=token_mean``, every advantage by M. The loss of a token is proportional to its
advantage, so with

    A_t / M * (M * c_s)   instead of   A_t / M

that sum is ``sum_t m_t * c_s * loss_t``. The KL and entropy losses have no advantages and are means
over micro-batches. Both are refused unless SkyRL has ``reduce_kl_and_entropy``: then their sums are
weighted by loss masks, and the masks are scaled like advantages.

For your own entry point, put `ExactLoss` before the trainer in the bases of a class, have
``get_trainer`` make that trainer, and make sure that the environment variable reaches its process.
"""

from __future__ import annotations

import os
import sys
from operator import attrgetter
from typing import Any

import ray
import torch
from torch import Tensor

from megatron_loss_agg import LossAggregation, StepPlan
from megatron_loss_agg.frameworks import print_first_lines, read_aggregation, required_release
from megatron_loss_agg.frameworks.refusals import SETTINGS as REFUSED
from megatron_loss_agg.frameworks.refusals import Setting, check_settings, refused
from megatron_loss_agg.launch.flags import VARIABLE

with required_release("SkyRL", "skyrl", "0.2.0"):
    from skyrl.train.config import SkyRLTrainConfig
    from skyrl.train.entrypoints import main_base
    from skyrl.train.fully_async_trainer import FullyAsyncRayPPOTrainer
    from skyrl.train.trainer import RayPPOTrainer
    from skyrl.train.utils.utils import initialize_ray, validate_cfg

    # Overridden or called below.
    attrgetter("BasePPOExp.get_trainer", "main")(main_base)
    attrgetter(
        "postprocess_generator_output", "convert_to_training_input", "_normalize_advantages"
    )(RayPPOTrainer)

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
"""SkyRL's policy losses that are proportional to the advantage as long as its sign is kept."""

Boundaries = list[tuple[int, int]]
"""For each mini-batch, its first sample and its last plus one."""


class ExactLoss:
    """Goes before a SkyRL trainer in the bases of a class; see the module."""

    proportional_losses = PROPORTIONAL
    """In a subclass, add your own policy loss if it is proportional to advantages."""

    cfg: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.aggregation = self.checked_aggregation(self.cfg)

    @classmethod
    def checked_aggregation(cls, cfg: Any) -> LossAggregation | None:
        """The aggregation in the environment, checked against SkyRL's configuration; or None.

        Raises:
            HostError: a setting of SkyRL's that the weights do not follow.
            OptionError: the aggregation needs more than SkyRL's samples have.
        """
        agg = read_aggregation("SkyRL")
        if agg is not None:
            _check_rejected(agg, cfg)
            check_settings(cfg, *REFUSED["skyrl"], *_loss_settings(cfg, cls.proportional_losses))
        return agg

    def postprocess_generator_output(
        self, generator_output: Any, uids: list[str], *args: Any, **kwargs: Any
    ) -> Any:
        """SkyRL's output, plus the loss masks from before it filters prompts with equal rewards."""
        masks = generator_output["loss_masks"]
        result = super().postprocess_generator_output(  # type: ignore[misc]
            generator_output, uids, *args, **kwargs
        )
        if self.aggregation is not None and self.aggregation.rejected:
            output, _ = result
            output["unfiltered_loss_masks"] = masks
        return result

    def convert_to_training_input(self, generator_output: Any, uids: list[str]) -> Any:
        """SkyRL's batch, with sample ids as columns, since the training loop removes the uids."""
        data = super().convert_to_training_input(generator_output, uids)  # type: ignore[misc]
        if self.aggregation is None:
            return data
        batch_uids = data.metadata["uids"]
        prompt_numbers = {uid: i for i, uid in enumerate(dict.fromkeys(batch_uids))}
        data["prompt_ids"] = torch.tensor([prompt_numbers[uid] for uid in batch_uids])
        # The steps of a trajectory are consecutive.
        is_last = data.metadata.get("is_last_step") or [True] * len(batch_uids)
        data["rollout_ids"] = torch.tensor([0, *is_last[:-1]]).cumsum(0)
        masks = generator_output["loss_masks"]
        before = generator_output.get("unfiltered_loss_masks", masks)
        filtered = {uid for uid, x, y in zip(uids, before, masks, strict=True) if x != y}
        data["rejected"] = torch.tensor([uid in filtered for uid in batch_uids])
        removed = [sum(x) - sum(y) for x, y in zip(before, masks, strict=True)]
        removed += [0] * (len(batch_uids) - len(masks))  # samples that pad the batch
        data["removed_tokens"] = torch.tensor(removed, dtype=torch.float64)
        return data

    def _normalize_advantages(
        self, data: Any, mini_batch_boundaries: Boundaries, *args: Any, **kwargs: Any
    ) -> Any:
        """SkyRL's token mean, times ``M * c_s`` of each sample."""
        masks = data["loss_mask"]
        data = super()._normalize_advantages(  # type: ignore[misc]
            data, mini_batch_boundaries, *args, **kwargs
        )
        if self.aggregation is None:
            return data
        masks_are_weights = data["loss_mask"] is not masks  # with reduce_kl_and_entropy
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
            if masks_are_weights:
                data["loss_mask"][rows] *= factors
        return data


def _factors(plan: StepPlan, masks: Tensor) -> Tensor:
    """``M * c_s`` of each sample of a mini-batch, fp64 [samples, 1]."""
    coefficients = plan.coefficients(0)
    if bool((coefficients < 0).any()):
        raise refused("skyrl, signs", "negative ones, which would flip signs")
    denominator = masks.sum().clamp(min=1)  # as in SkyRL's token_mean
    return (coefficients * denominator).unsqueeze(-1)


def _check_rejected(agg: LossAggregation, cfg: Any) -> None:
    """Raise OptionError if rejected samples are asked for but SkyRL's filter does not mark them."""
    if not agg.rejected:
        return
    if not cfg.trainer.algorithm.zero_variance_filter:
        raise refused("skyrl, filter", "false")
    if cfg.generator.merge_stepwise_output:
        got = "generator.merge_stepwise_output=true, which changes both at once"
        raise refused("skyrl, merged", got)


def _loss_settings(cfg: Any, proportional_losses: frozenset[str]) -> tuple[Setting, ...]:
    """The settings with which weighted advantages weight the whole loss."""
    policy_loss = Setting(
        "trainer.algorithm.policy_loss_type",
        f"proportional to the advantage, as in {', '.join(sorted(proportional_losses))}",
        proportional_losses,
        "Choose one of them; or add your own to proportional_losses of a trainer.",
    )
    if getattr(cfg.trainer.algorithm, "reduce_kl_and_entropy", False):
        return (policy_loss,)
    return policy_loss, *REFUSED["skyrl, KL and entropy"]


class ExactTrainer(ExactLoss, RayPPOTrainer):
    """SkyRL's trainer."""


class ExactAsyncTrainer(ExactLoss, FullyAsyncRayPPOTrainer):
    """SkyRL's fully asynchronous trainer."""


class Experiment(main_base.BasePPOExp):
    """SkyRL's experiment, with one of the trainers above."""

    def get_trainer(self, cfg: Any, *args: Any, **kwargs: Any) -> ExactLoss:
        trainer = ExactAsyncTrainer if cfg.trainer.fully_async.enabled else ExactTrainer
        return trainer(cfg, *args, **kwargs)


def run(cfg: Any) -> None:
    """Train, in the process that SkyRL starts for training."""
    Experiment(cfg).run()


def main() -> Any:
    """Start SkyRL; its own entry point calls this function instead.

    Ray does not pass this process's environment on, so the trainer's process gets the variable.
    """
    overrides = [x for x in sys.argv[1:] if not x.startswith("trainer.override_entrypoint=")]
    if read_aggregation("SkyRL") is None:
        sys.argv[1:] = overrides
        return main_base.main()
    cfg = SkyRLTrainConfig.from_cli_overrides(overrides)
    validate_cfg(cfg)
    ExactTrainer.checked_aggregation(cfg)
    initialize_ray(cfg)
    environment = {"env_vars": {VARIABLE: os.environ[VARIABLE]}}
    return ray.get(ray.remote(num_cpus=1, runtime_env=environment)(run).remote(cfg))
