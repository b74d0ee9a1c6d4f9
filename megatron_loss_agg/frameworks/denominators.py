"""The denominators of slime, and of miles, its fork with the same losses.

Each loss and metric of a step is

    sum over samples of (x * mask).sum() / max(denominator, 1), divided by the step's rollouts

where the denominator of a sample is its entry in ``rollout_mask_sums``. The adapters set

    denominator = 1 / (c_s * rollouts)

and, if it is below 1, divide the sample's mask by it, since no mask is divided by less than 1.
"""

from __future__ import annotations

import importlib
from argparse import Namespace
from itertools import islice
from numbers import Integral
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import mpu
from torch import Tensor

from megatron_loss_agg import LossAggregation, StepPlan
from megatron_loss_agg.frameworks import print_first_lines, read_aggregation
from megatron_loss_agg.frameworks.refusals import SETTINGS as REFUSED
from megatron_loss_agg.frameworks.refusals import check_settings, refused

OLDEST_SLIME = "commit 7405851 (25 May 2026)"
SHIPPED_KEYS = "rollout_mask_sums", "rollout_ids", "micro_batch_indices"


class Package(NamedTuple):
    """slime, or its fork."""

    name: str
    batch_kind: str  # as in `check_aggregation`
    sizes_key: str  # of its data: the number of rollouts in each step
    upgrade_hint: str  # a sentence for errors: which version passes the data
    patch_hint: str  # a clause for errors: how to make it ship prompts and removed samples


def replace_denominators(args: Namespace, data: dict[str, Any] | None, package: Package) -> None:
    """Set ``rollout_mask_sums`` of this rank's samples; do nothing without an aggregation."""
    agg = read_aggregation(package.name, package.batch_kind, on_all_ranks=True)
    if agg is None:
        return
    if data is None:
        words = {"framework": package.name, "hint": package.upgrade_hint}
        raise refused("slime, data", "only its arguments", **words)
    check_settings(args, *REFUSED["slime"])
    _check_critic(args, package)
    if missing := [key for key in SHIPPED_KEYS if key not in data]:
        keys, got = ", ".join(SHIPPED_KEYS), f"none of {', '.join(missing)}"
        raise refused("slime, keys", got, keys=keys, oldest=OLDEST_SLIME)
    masks = data["loss_masks"]
    mask_sums = torch.stack([mask.sum() for mask in masks]).tolist()
    removed = _removed_samples(data, package) if agg.rejected else None
    if removed:  # the masks of removed samples are 0 by now
        lengths = data["effective_response_lengths"]
        mask_sums = [lengths[i] if x else mask_sums[i] for i, x in enumerate(removed)]
    prompts, per_prompt = None, None
    if needs_prompts(agg):
        prompts = data.get("group_indices")
        if prompts is None:
            prompts, per_prompt = _prompts_by_index(args, data, package)

    # slime wraps groups to destroy them temporarily, and torch finds no backend for the wrapper.
    group = mpu.get_data_parallel_group()
    group = getattr(group, "group", group)
    denominators = torch.ones(len(masks), dtype=torch.float64)
    microbatches = iter(data["micro_batch_indices"])
    for num_microbatches, num_rollouts in zip(
        data["num_microbatches"], data[package.sizes_key], strict=True
    ):
        step = list(islice(microbatches, num_microbatches))
        plan = StepPlan.from_mask_sums(
            agg,
            _by_microbatch(mask_sums, step),
            prompt_ids=None if prompts is None else _by_microbatch(prompts, step),
            rollout_ids=_by_microbatch(data["rollout_ids"], step),
            rejected=None
            if removed is None
            else [*map(torch.tensor, _by_microbatch(removed, step))],
            group=group,
        )
        _check_groups(plan, num_rollouts, per_prompt, package)
        print_first_lines(plan, "critic" if args.loss_type == "value_loss" else "")
        for k, rows in enumerate(step):
            denominators[rows] = 1 / (plan.coefficients(k) * num_rollouts)

    denominators = denominators.to(data["rollout_mask_sums"])
    _check_smallest(args, denominators, group)
    for i in (denominators < 1).nonzero().flatten().tolist():
        masks[i] = masks[i] / denominators[i]
    data["rollout_mask_sums"] = denominators


def needs_prompts(agg: LossAggregation) -> bool:
    """True if prompts group the samples, or a user's function may ask for them."""
    return "prompt" in agg.units or agg.mode == "custom"


def _by_microbatch(values: list[Any], step: list[list[int]]) -> list[list[Any]]:
    return [[values[row] for row in rows] for rows in step]


def _check_critic(args: Namespace, package: Package) -> None:
    """Raise in an actor if other processes train its critic without `postprocess`."""
    if not args.use_critic or args.loss_type == "value_loss":
        return
    actor = importlib.import_module(f"{package.name}.backends.megatron_utils.actor")
    train_critic = actor.MegatronTrainRayActor.train_critic
    code = getattr(train_critic, "__wrapped__", train_critic).__code__
    if "rollout_data_postprocess" not in code.co_names:
        got = "one that calls it only for the actor"
        raise refused("slime, critic", got, framework=package.name, hint=package.patch_hint)


def _removed_samples(data: dict[str, Any], package: Package) -> list[bool]:
    """True for each sample that was removed."""
    if "remove_samples" not in data:
        raise refused("slime, removed samples", "only masks", hint=package.patch_hint)
    removed: list[bool] = data["remove_samples"]
    return removed


def _prompts_by_index(
    args: Namespace, data: dict[str, Any], package: Package
) -> tuple[list[int], int]:
    """Each sample's prompt, from the numbers of the framework's data source; samples per prompt."""
    source, own = args.data_source_path, f"{package.name}.rollout.data_source."
    if not source.startswith(own) or "sample_indices" not in data:
        raise refused("slime, numbered samples", source, hint=package.patch_hint)
    per_prompt = args.n_samples_per_prompt
    # The plan refuses an index of another type, on all ranks.
    indices = data["sample_indices"]
    return [x // per_prompt if isinstance(x, Integral) else x for x in indices], per_prompt


def _check_groups(
    plan: StepPlan, num_rollouts: int, per_prompt: int | None, package: Package
) -> None:
    """Raise on all ranks if the plan and the step differ in their numbers of groups."""
    assert plan.samples is not None
    rollouts = len(plan.samples.groups("rollout").ids_G)
    if rollouts != num_rollouts:
        raise refused("slime, rollouts", rollouts, rollouts=num_rollouts)
    if per_prompt is None:
        return
    prompts = len(plan.samples.groups("prompt").ids_G)
    if prompts * per_prompt != num_rollouts:
        words = {"per_prompt": per_prompt, "rollouts": num_rollouts, "hint": package.patch_hint}
        raise refused("slime, prompts", f"{prompts} prompts", **words)


def _check_smallest(args: Namespace, denominators: Tensor, group: dist.ProcessGroup) -> None:
    """Raise on all ranks if a mask would change sign, or change size where another loss uses it."""
    smallest = denominators.min()
    dist.all_reduce(smallest, dist.ReduceOp.MIN, group=group)
    if smallest < 0:
        raise refused("slime, signs", "negative ones")
    corrects = args.custom_tis_function_path and (args.use_tis or args.get_mismatch_metrics)
    mask_users = {
        "--custom-tis-function-path": corrects,
        "--enable-mtp-training": args.enable_mtp_training,
        "--use-opsm": getattr(args, "use_opsm", False),  # newer than the oldest slime
    }
    user = next((flag for flag, is_on in mask_users.items() if is_on), None)
    if smallest < 1 and user:
        raise refused("slime, masks", f"{smallest.item():.3g}", flag=user)
