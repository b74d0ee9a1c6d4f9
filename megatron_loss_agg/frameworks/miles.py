"""miles, a fork of slime with the same losses: replaces the same `denominators`.

`convert` relies on ``--custom-convert-samples-to-train-data-path``: the rollout manager of miles
calls it with all samples, instead of its own conversion. It calls that conversion and sets

    denominator = 1 / (c_s * rollouts)

miles requires integer masks, so a denominator below 1 is refused. `postprocess` needs a miles that
passes its data to ``--rollout-data-postprocess-path``, as it does with patches/miles.
"""

from __future__ import annotations

import importlib
from argparse import Namespace
from functools import partial
from typing import Any

import torch

from megatron_loss_agg import LossAggregation, StepPlan
from megatron_loss_agg.frameworks import (
    is_installed,
    print_first_lines,
    read_aggregation,
    required_release,
)
from megatron_loss_agg.frameworks.denominators import Package, needs_prompts, replace_denominators
from megatron_loss_agg.frameworks.refusals import SETTINGS as REFUSED
from megatron_loss_agg.frameworks.refusals import check_settings, refused

SETTINGS = """\
export MEGATRON_LOSS_AGG_FLAGS="--loss-aggregation prompt_mean"
--custom-convert-samples-to-train-data-path megatron_loss_agg.frameworks.miles.convert
"""
OLDEST = "commit 11cc232 (4 Aug 2026)"
CONVERT_HINT = (
    "set --custom-convert-samples-to-train-data-path megatron_loss_agg.frameworks.miles.convert"
)

MILES = Package(
    "miles",
    batch_kind="miles with its patch",
    sizes_key="num_rollouts",
    upgrade_hint=f"Let it hand them over (patches/miles/31f1ca9.patch), or {CONVERT_HINT}.",
    patch_hint=CONVERT_HINT,
)

if is_installed("miles"):  # not where this module is imported only to read it
    with required_release("miles", "miles", OLDEST):
        importlib.import_module("miles.utils.dp_schedule")


def postprocess(args: Namespace, rollout_id: Any = None, rollout_data: Any = None) -> None:
    """Replace the denominators in ``rollout_data``, like slime's adapter."""
    replace_denominators(args, rollout_data, MILES)


def __getattr__(name: str) -> Any:
    """``convert``, loaded by the rollout manager; None without an aggregation.

    With None, miles converts samples itself. A function would not get the metadata that miles's own
    conversion gets: the steps of multi-LoRA, and dynamic batch sizes.
    """
    if name != "convert":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    agg = read_aggregation("miles")
    return agg and partial(_convert, agg)


def _convert(agg: LossAggregation, args: Namespace, samples: list[Any]) -> dict[str, Any]:
    """miles's own training data of ``samples``, with the denominators of the plan.

    Raises:
        HostError: a denominator below 1, or a setting with which miles does not divide by them.
    """
    check_settings(args, *REFUSED["slime"], *REFUSED["miles"])
    # The conversion sets the masks of removed samples to 0.
    removed = [sample.remove_sample for sample in samples]
    lengths = [sample.effective_response_length for sample in samples]
    conversion = importlib.import_module("miles.ray.rollout.train_data_conversion")
    load_function = importlib.import_module("miles.utils.misc").load_function
    path = args.custom_reward_post_process_path
    metadata: dict[str, Any] = {}  # only settings that are refused have any
    data: dict[str, Any] = conversion.convert_samples_to_train_data(
        args, samples, metadata, None, path and load_function(path)
    )
    rollout_ids, num_rollouts = data["rollout_ids"], args.global_batch_size
    order = list(dict.fromkeys(rollout_ids))
    if "multimodal_train_inputs" in data or len(order) < num_rollouts:
        got = f"{len(order)} rollouts of samples with {', '.join(data)}"
        raise refused("miles, split", got, rollouts=num_rollouts)
    mask_sums = lengths if agg.rejected else [sum(mask) for mask in data["loss_masks"]]
    prompts = [sample.group_index for sample in samples]

    denominators = [1.0] * len(samples)
    has_partial_step = getattr(args, "allow_partial_train_step", False)  # newer versions have it
    if not (has_partial_step and args.use_dynamic_batch_size):
        order = order[: len(order) // num_rollouts * num_rollouts]  # miles does not train the rest
    for start in range(0, len(order), num_rollouts):
        step_rollouts = {*order[start : start + num_rollouts]}
        rows = [i for i, rollout in enumerate(rollout_ids) if rollout in step_rollouts]
        plan = StepPlan.from_mask_sums(
            agg,
            [mask_sums[i] for i in rows],
            prompt_ids=[prompts[i] for i in rows] if needs_prompts(agg) else None,
            rollout_ids=[rollout_ids[i] for i in rows],
            rejected=torch.tensor([removed[i] for i in rows]) if agg.rejected else None,
        )
        print_first_lines(plan)
        step_denominators = 1 / (plan.coefficients(0) * len(step_rollouts))
        if step_denominators.min() < 1:
            raise refused("miles, denominators", f"{step_denominators.min().item():.3g}")
        for i, denominator in zip(rows, step_denominators.tolist(), strict=True):
            denominators[i] = denominator
    return {**data, "rollout_mask_sums": denominators}
