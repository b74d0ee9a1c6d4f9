"""Adapter of slime: replaces the denominators that slime ships with its samples.

It stands on ``--rollout-data-postprocess-path``: slime calls this function on every rank that
trains, with the rank's data for all optimizer steps to come. Each loss and metric of a step is then

    sum over samples of (x * mask).sum() / max(denominator, 1), divided by the step's rollouts

where the denominator of a sample is its entry of ``rollout_mask_sums``. The adapter sets

    denominator = 1 / (c_s * rollouts)

and divides the sample's mask by it where it is below 1. miles has the same sum: see `miles`.
"""

from __future__ import annotations

import importlib
from argparse import Namespace
from importlib.util import find_spec
from itertools import islice
from numbers import Integral
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu
from torch import Tensor

from megatron_loss_agg import LossAggregation, StepPlan
from megatron_loss_agg.errors import HostError, OptionError
from megatron_loss_agg.frameworks import (
    aggregation_from_environment,
    check_samples,
    print_first_lines,
    print_none,
)

SETTINGS = """\
--rollout-data-postprocess-path megatron_loss_agg.frameworks.slime.postprocess
--train-env-vars '{"MEGATRON_LOSS_AGG_FLAGS":"--loss-aggregation=prompt_mean"}'
"""
OLDEST = "commit 7405851 (25 May 2026)"
SEAM = "apply patches/slime/624b824.patch to slime"
SHIPPED = "rollout_mask_sums", "rollout_ids", "micro_batch_indices"


def check_has(module: str, oldest: str) -> None:
    """Raise if a framework that is installed is too old to have ``module``."""
    framework = module.partition(".")[0]
    try:
        is_installed = find_spec(module.rpartition(".")[0])
    except ModuleNotFoundError:
        return
    if is_installed and not find_spec(module):
        raise HostError(
            f"{framework} must be of {oldest} or later, got one without {module}. Use "
            f"that, or remove the adapter from its flags."
        )


check_has("slime.utils.dp_schedule", OLDEST)


def postprocess(args: Namespace, rollout_id: Any = None, rollout_data: Any = None) -> None:
    """Replace the denominators in ``rollout_data``; do nothing without an aggregation.

    Raises:
        HostError: slime is too old, or reduces a loss in another way by one of its settings.
        OptionError: the aggregation needs more than slime's samples have.
    """
    replace_denominators(args, rollout_data, "slime", f"Use slime of {OLDEST} or later.", SEAM)


def replace_denominators(
    args: Namespace, data: dict[str, Any] | None, framework: str, needs: str, seam: str
) -> None:
    """Set ``rollout_mask_sums`` of this rank's samples; do nothing without an aggregation.

    Args:
        framework: the package that trains: slime or miles.
        needs: the sentence that says which of its versions hands over ``data``, for errors.
        seam: the action by which it ships prompts and removed samples, for errors.
    """
    agg = aggregation_from_environment()
    if agg is None:
        print_none(f"{framework}'s own")
        return
    if data is None:
        raise HostError(
            f"{framework} must hand its data to --rollout-data-postprocess-path, got its arguments "
            f"alone. {needs}"
        )
    check_settings(agg, args)
    _check_critic(args, framework, seam)
    if missing := [name for name in SHIPPED if name not in data]:
        raise HostError(
            f"samples must come with {', '.join(SHIPPED)}, got none of {', '.join(missing)}. Use slime "
            f"of {OLDEST} or later, make --custom-convert-samples-to-train-data-path add them, or "
            "let the rollout manager of miles split the data."
        )
    masks = data["loss_masks"]
    mask_sums = torch.stack([mask.sum() for mask in masks]).tolist()
    removed = _removed(data, seam) if agg.rejected else None
    if removed:
        before = data["effective_response_lengths"]
        mask_sums = [before[i] if x else mask_sums[i] for i, x in enumerate(removed)]
    prompts, per_prompt = None, None
    if needs_prompts(agg):
        prompts = data.get("group_indices")
        if prompts is None:
            prompts, per_prompt = _prompts_by_index(args, data, framework, seam)

    # torch knows no backend of the wrapper in which slime puts groups that it destroys for a while.
    group = mpu.get_data_parallel_group()
    group = getattr(group, "group", group)
    denominators = torch.ones(len(masks), dtype=torch.float64)
    microbatches = iter(data["micro_batch_indices"])
    sizes = "global_batch_sizes" if framework == "slime" else "num_rollouts"
    for number, rollouts in zip(data["num_microbatches"], data[sizes], strict=True):
        step = list(islice(microbatches, number))

        def of_step(x: list[Any] | None, step: list[list[int]] = step) -> Any:
            return None if x is None else [[x[row] for row in rows] for rows in step]

        plan = StepPlan.from_mask_sums(
            agg,
            of_step(mask_sums),
            prompt_ids=of_step(prompts),
            rollout_ids=of_step(data["rollout_ids"]),
            rejected=None if removed is None else [*map(torch.tensor, of_step(removed))],
            group=group,
        )
        _check_groups(plan, rollouts, per_prompt, seam)
        print_first_lines(plan, "critic" if args.loss_type == "value_loss" else "")
        for k, rows in enumerate(step):
            denominators[rows] = 1 / (plan.coefficients(k) * rollouts)

    denominators = denominators.to(data["rollout_mask_sums"])
    _check_least(args, denominators, group)
    for i in (denominators < 1).nonzero().flatten().tolist():
        masks[i] = masks[i] / denominators[i]
    data["rollout_mask_sums"] = denominators


def check_settings(agg: LossAggregation, args: Namespace) -> None:
    """Raise if slime or miles would not divide by the denominators, or has no such ids."""
    for name in ("calculate_per_token_loss", "custom_pg_loss_reducer_function_path", "multi_lora"):
        if getattr(args, name, None):
            flag = "--" + name.replace("_", "-")
            raise HostError(
                f"all losses must be divided by rollout_mask_sums, got {flag}, by which they are "
                f"not. Remove {flag}, or the aggregation."
            )
    if args.loss_type == "custom_loss":
        raise HostError(
            "--loss-type must be policy_loss or sft_loss, got custom_loss, whose sum is not known. "
            "Change --loss-type, or remove the aggregation."
        )
    check_samples(agg)


def needs_prompts(agg: LossAggregation) -> bool:
    """Whether prompts group the samples, or a user's function may ask for them."""
    return "prompt" in agg.units or agg.mode == "custom"


def _check_critic(args: Namespace, framework: str, seam: str) -> None:
    """Raise in an actor whose critic is trained without `postprocess`, in other processes."""
    if not args.use_critic or args.loss_type == "value_loss":
        return
    actor = importlib.import_module(f"{framework}.backends.megatron_utils.actor")
    train_critic = actor.MegatronTrainRayActor.train_critic
    code = getattr(train_critic, "__wrapped__", train_critic).__code__
    if "rollout_data_postprocess" not in code.co_names:
        raise HostError(
            f"{framework} must call --rollout-data-postprocess-path for its critic, got one that "
            "calls it for the actor alone. Choose another --advantage-estimator than ppo, or "
            f"{seam}."
        )


def _removed(data: dict[str, Any], seam: str) -> list[bool]:
    """True for each sample that was removed."""
    if "remove_samples" not in data:
        raise HostError(
            "--loss-aggregation-rejected needs samples that say whether they were removed, got "
            f"masks alone. Remove it, or {seam}."
        )
    removed: list[bool] = data["remove_samples"]
    return removed


def _prompts_by_index(
    args: Namespace, data: dict[str, Any], framework: str, seam: str
) -> tuple[list[int], int]:
    """A prompt for each sample, as the framework's data source numbers samples; samples of each."""
    source = args.data_source_path
    if not source.startswith(f"{framework}.rollout.data_source.") or "sample_indices" not in data:
        raise HostError(
            "samples must be numbered by the framework's own --data-source-path to know prompts, "
            f"got {source}. Choose a mode without prompts, or {seam}."
        )
    number = args.n_samples_per_prompt
    # Of another type, it is refused on all ranks by the plan.
    indices = data["sample_indices"]
    return [x // number if isinstance(x, Integral) else x for x in indices], number


def _check_groups(plan: StepPlan, rollouts: int, per_prompt: int | None, seam: str) -> None:
    """Raise if the plan's groups are not those of the step; all ranks do."""
    assert plan.samples is not None
    number = len(plan.samples.groups("rollout").ids_G)
    if number != rollouts:
        raise HostError(
            f"the ranks of a step must have its {rollouts} rollouts, got {number}. Leave "
            "rollout_ids and the split of the data as they are."
        )
    if per_prompt is None:
        return
    prompts = len(plan.samples.groups("prompt").ids_G)
    if prompts * per_prompt != rollouts:
        raise HostError(
            f"sample_indices must number {per_prompt} rollouts for each prompt "
            f"(--n-samples-per-prompt) in a step of {rollouts}, got {prompts} prompts. Choose a "
            f"--global-batch-size of whole prompts, keep Sample.index as the data source numbers it, or "
            f"{seam}."
        )


def _check_least(args: Namespace, denominators: Tensor, group: dist.ProcessGroup) -> None:
    """Raise if a mask of any rank must change its sign, or its size where that is used otherwise."""
    least = denominators.min()
    dist.all_reduce(least, dist.ReduceOp.MIN, group=group)
    if least < 0:
        raise OptionError(
            "coefficients must be >= 0 in slime and miles, got negative ones. Change the "
            "aggregation function (--loss-aggregation-function)."
        )
    corrects = args.custom_tis_function_path and (args.use_tis or args.get_mismatch_metrics)
    users = {
        "--custom-tis-function-path": corrects,
        "--enable-mtp-training": args.enable_mtp_training,
        "--use-opsm": getattr(args, "use_opsm", False),  # newer than the hook
    }
    used = next((flag for flag, is_on in users.items() if is_on), None)
    if least < 1 and used:
        raise HostError(
            f"denominators must be at least 1 with {used}, which uses the masks in its own way, got "
            f"{least.item():.3g}. Remove {used}, or choose another mode or divisor "
            "(--loss-aggregation)."
        )
