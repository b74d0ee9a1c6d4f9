"""Adapters of miles, whose losses are the sum that slime's are: see `slime`.

`convert` stands on ``--custom-convert-samples-to-train-data-path``: the rollout manager of miles
calls it with all samples, in place of its own conversion. It calls that, and sets

    denominator = 1 / (c_s * rollouts)

miles takes integers for masks, so a denominator below 1 is refused. `postprocess` needs a miles
that hands its data to ``--rollout-data-postprocess-path``, which patches/miles adds.
"""

from __future__ import annotations

import importlib
from argparse import Namespace
from typing import Any

import torch

from megatron_loss_agg import StepPlan
from megatron_loss_agg.errors import HostError, OptionError
from megatron_loss_agg.frameworks import aggregation_from_environment, print_first_lines, print_none
from megatron_loss_agg.frameworks.slime import (
    check_has,
    check_settings,
    needs_prompts,
    replace_denominators,
)

SETTINGS = """\
export MEGATRON_LOSS_AGG_FLAGS="--loss-aggregation prompt_mean"
--custom-convert-samples-to-train-data-path megatron_loss_agg.frameworks.miles.convert
"""
OLDEST = "commit 11cc232 (4 Aug 2026)"
CONVERT = (
    "set --custom-convert-samples-to-train-data-path megatron_loss_agg.frameworks.miles.convert"
)
SPLITS_LATE = (
    "delay_split_train_data_by_dp",  # as fault tolerance of training does
    "use_dynamic_global_batch_size",
)

check_has("miles.utils.dp_schedule", OLDEST)


def postprocess(args: Namespace, rollout_id: Any = None, rollout_data: Any = None) -> None:
    """Replace the denominators in ``rollout_data``, as the adapter of slime does."""
    needs = f"Let it hand them over (patches/miles/31f1ca9.patch), or {CONVERT}."
    replace_denominators(args, rollout_data, "miles", needs, CONVERT)


def convert(args: Namespace, samples: list[Any]) -> dict[str, Any]:
    """The training data that miles makes of ``samples``, with the denominators of the plan.

    Raises:
        HostError: a denominator below 1, or a setting by which miles does not divide by them.
        OptionError: the aggregation needs the split of the samples, which comes later.
    """
    agg = aggregation_from_environment()
    if agg is None:
        print_none("miles's own")
    else:
        check_settings(agg, args)
        _check_split(args)
        if "microbatch" in agg.units:
            raise OptionError(
                "microbatches must be known to group samples by them, got samples that are not "
                "split yet. Choose another mode (--loss-aggregation)."
            )
    removed = [sample.remove_sample for sample in samples]
    lengths = [sample.effective_response_length for sample in samples]
    stock = importlib.import_module("miles.ray.rollout.train_data_conversion")
    load_function = importlib.import_module("miles.utils.misc").load_function
    path = args.custom_reward_post_process_path
    data: dict[str, Any] = stock.convert_samples_to_train_data(
        args, samples, {}, None, path and load_function(path)
    )
    if agg is None:
        return data
    rollout_ids, rollouts = data["rollout_ids"], args.global_batch_size
    order = list(dict.fromkeys(rollout_ids))
    if "multimodal_train_inputs" in data or len(order) < rollouts:
        raise HostError(
            "samples must be split by the rollout manager, as those are that are of text and at "
            f"least --global-batch-size {rollouts} rollouts, got {len(order)} rollouts of samples "
            f"with {', '.join(data)}. Change the batch, or remove the aggregation."
        )
    mask_sums = lengths if agg.rejected else [sum(mask) for mask in data["loss_masks"]]
    prompts = [sample.group_index for sample in samples]

    denominators = [1.0] * len(samples)
    # Rollouts after the last whole step are not trained.
    for start in range(0, len(order) - rollouts + 1, rollouts):
        of_step = {*order[start : start + rollouts]}
        rows = [i for i, rollout in enumerate(rollout_ids) if rollout in of_step]
        plan = StepPlan.from_mask_sums(
            agg,
            [mask_sums[i] for i in rows],
            prompt_ids=[prompts[i] for i in rows] if needs_prompts(agg) else None,
            rollout_ids=[rollout_ids[i] for i in rows],
            rejected=torch.tensor([removed[i] for i in rows]) if agg.rejected else None,
        )
        print_first_lines(plan)
        of_rows = 1 / (plan.coefficients(0) * rollouts)
        if of_rows.min() < 1:
            raise HostError(
                "denominators must be at least 1 in miles, which divides by no less, got "
                f"{of_rows.min().item():.3g}. Choose another mode or divisor (--loss-aggregation), "
                "or apply patches/miles/31f1ca9.patch and set --rollout-data-postprocess-path "
                "megatron_loss_agg.frameworks.miles.postprocess instead."
            )
        for i, denominator in zip(rows, of_rows.tolist(), strict=True):
            denominators[i] = denominator
    return {**data, "rollout_mask_sums": denominators}


def _check_split(args: Namespace) -> None:
    """Raise if miles splits samples into steps in another way, or rounds denominators."""
    for name in SPLITS_LATE:
        if getattr(args, name):
            flag = "--" + name.replace("_", "-")
            raise HostError(
                "samples must be split by the rollout manager into steps of --global-batch-size "
                f"rollouts, got {flag}. Remove {flag}, or the aggregation."
            )
    if args.object_store_backend != "ray":
        raise HostError(
            "--object-store-backend must be ray, since others round rollout_mask_sums to integers, "
            f"got {args.object_store_backend}. Set --object-store-backend ray."
        )
    if args.train_backend != "megatron":
        raise HostError(
            f"--train-backend must be megatron, got {args.train_backend}. Set --train-backend "
            "megatron, or remove the aggregation."
        )
