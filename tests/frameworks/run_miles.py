"""miles' controller, batches, losses and training step on a real GPT over two ranks.

    python -m tests.frameworks.run_miles STOCK PATCHED TABLE [mtp]

miles is a fork of slime: see `run_slime`, whose batch, runs and stand-ins these are.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.frameworks import run_slime
from tests.frameworks.checkout_report import (
    REFUSALS,
    ROLLOUTS,
    STEPS,
    Held,
    LogProbs,
    Run,
    Steps,
    refused,
)
from tests.frameworks.harness import KeepGradients, attempt
from tests.peers.standins import use_peers

STANDINS = f"""
    {run_slime.STANDINS} huggingface_hub safetensors polars uvicorn fastapi aiohttp datasets
"""
OFF = """
    debug_disable_optimizer delay_split_train_data_by_dp dumper_enable dumper_fwd_bwd
    enable_witness multi_lora observe_training_entropy save_local_weight_checksum
    skip_actor_forward_only true_on_policy_mode
"""
ARGS: dict[str, Any] = {
    **run_slime.ARGS,
    **dict.fromkeys(OFF.split()),
    "check_for_nan_in_loss_and_grad": True,
    "object_store_backend": "ray",
    "train_backend": "megatron",
    "use_dynamic_global_batch_size": False,
}
SAMPLES = len(STEPS[0])
ROUNDED = {"rounded": True}
"""With Megatron's fused cross entropy as it is, which rounds its gradient to bf16."""
BF16 = 4e-3
"""Bound of a gradient's error then."""
LATE = {"delay_split_train_data_by_dp": True, "global_batch_size": SAMPLES}
"""Each actor splits the data itself, as with fault tolerance; a step has so many samples."""


class KeepSingle(TorchDispatchMode):
    """Keeps fp32 where Megatron's fused cross entropy rounds its gradient to bf16."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") is torch.bfloat16:
            return args[0].clone()
        return func(*args, **kwargs)


def train(root: str, cp: int, runs: list[Run], log_probs: list[LogProbs]) -> list[Steps | str]:
    """On a rank; see `checkout_report.Train`."""
    use_peers(STANDINS)
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    sys.path.insert(0, root)
    import ray
    from miles.utils import dumper_utils, object_store

    from tests.host import gpt

    ray.put = ray.get = lambda x, **_: x
    dumper_utils.DumperConfig._kv_pairs_to_dict = lambda options: {}
    gpt.initialize(cp, create_gloo_process_groups=True)
    object_store.init_instance(Namespace(**ARGS))
    return [attempt(_train, run, log_probs, errors=REFUSALS) for run in runs]


def _train(run: Run, log_probs: list[LogProbs]) -> Steps:
    from megatron.training import global_vars
    from miles.backends.megatron_utils import model, parallel
    from miles.backends.training_utils import data, loss
    from miles.backends.training_utils.parallel import set_parallel_state
    from miles.utils.ft_utils.process_group_utils import GroupInfo

    os.environ["MEGATRON_LOSS_AGG_FLAGS"] = run.flags
    options = dict(run.options)
    precision = nullcontext() if options.pop("rounded", False) else KeepSingle()
    args = Namespace(**{**ARGS, **options})
    if run.flags:
        from miles.utils.loss_aggregation import validate_loss_aggregation_args

        validate_loss_aggregation_args(args)
    ddp = run_slime.model_of(args)
    if args.allgather_cp:
        run_slime.split_contiguously(ddp)
    global_vars.set_args(args)
    set_parallel_state(parallel.create_megatron_parallel_state(GroupInfo(0, 1, None)))
    rollout = _rollout_data(args, log_probs)
    loss.compute_advantages_and_returns(args, rollout)
    iterators, microbatches = data.get_data_iterator(args, [ddp], rollout)
    rollouts = data.get_num_rollouts(args, rollout, len(microbatches))
    found = []
    for step, (n, size) in enumerate(zip(microbatches, rollouts, strict=True)):
        optimizer = KeepGradients(ddp)
        scheduler = Namespace(step=lambda increment: None)
        with precision:
            metrics, _, _ = model.train_one_step(
                args, 0, step, iterators, [ddp], optimizer, scheduler, n, size, None, 0
            )
        found.append((*optimizer.gradients, metrics))
    return found


def _rollout_data(args: Namespace, log_probs: list[LogProbs]) -> Any:
    """This rank's, by the controller and then by the actor."""
    from miles.backends.training_utils import cp_utils, data
    from miles.backends.training_utils.parallel import get_parallel_state
    from miles.ray.rollout import train_data_conversion as conversion
    from miles.utils import object_store
    from miles.utils.types import Sample

    state = get_parallel_state()
    samples = run_slime.samples(Sample, log_probs)
    whole = conversion.convert_samples_to_train_data(args, samples, {}, None, None)
    if args.delay_split_train_data_by_dp:
        spec = conversion.ROLLOUT_DATA_VALUE_SPEC
        shipped = object_store.get_instance().put(value=whole, value_spec=spec)
    else:
        sizes = {
            "dp_size": state.intra_dp.size,
            "cp_size": state.cp.size,
            "vpp_size": state.vpp_size,
            "microbatch_group_size_per_vp_stage": state.microbatch_group_size_per_vp_stage,
        }
        shipped = conversion.split_train_data_by_dp(args, whole, sizes)
    rollout, _ = data.get_rollout_data(args, shipped)
    run_slime.add_log_probs(rollout, log_probs, cp_utils.slice_log_prob_with_cp)
    return rollout


def _over_samples(held: Held) -> Held:
    """Divided by the samples of a step, in place of its rollouts."""
    run, (losses, by_step) = held
    scaled = [[[x * ROLLOUTS / SAMPLES for x in w] for w in w_s] for w_s in by_step]
    return run, (losses, scaled)


def main(without: str, patched: str, table: str, what: str = "") -> None:
    if what == "mtp":
        report = run_slime.report_on_mtp("miles", train, (without, patched))
        run_slime.compare_mtp(report)
        return report.close(table)
    report = run_slime.report_on("miles", train, (without, patched))
    report.runs |= {
        "microbatch_mean": refused("microbatch_mean"),
        "another backend": refused("token_mean", train_backend="fsdp"),
        "multi-LoRA": refused("token_mean", multi_lora=True),
    }
    run_slime.compare(report)
    own = {f"{x}, over samples": _over_samples(y) for x, y in report.own.items() if y[1]}
    late = replace(report, own={**own, "tokens": report.own["tokens"]}, references={})
    late.compare("DP 2, split by the actors", 1, **LATE)
    replace(report, bound=BF16).compare("DP 2, rounded to bf16", 1, **ROUNDED)
    report.close(table)


if __name__ == "__main__":
    main(*sys.argv[1:])
