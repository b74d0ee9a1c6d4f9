"""miles' controller, batches, losses and training step on a real GPT over two ranks.

miles is a fork of slime: see `slime`, whose batch, runs and stand-ins these are.
"""

from __future__ import annotations

from argparse import Namespace
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.frameworks import slime
from tests.frameworks.harness import use_framework
from tests.frameworks.report import ROLLOUTS, STEPS, LogProbs, Step, refused, reweighed

STANDINS = f"{slime.STANDINS} huggingface_hub safetensors polars uvicorn fastapi aiohttp datasets"
OFF = """
    debug_disable_optimizer delay_split_train_data_by_dp dumper_enable dumper_fwd_bwd
    enable_witness multi_lora observe_training_entropy save_local_weight_checksum
    skip_actor_forward_only true_on_policy_mode
"""
ARGS: dict[str, Any] = {
    **slime.ARGS,
    **dict.fromkeys(OFF.split()),
    **{"check_for_nan_in_loss_and_grad": True, "use_dynamic_global_batch_size": False},
    **{"object_store_backend": "ray", "train_backend": "megatron"},
}
SAMPLES = len(STEPS[0])
BF16 = 4e-3
"""Bound of a gradient's error where Megatron's fused cross entropy rounds its gradient to bf16."""


class KeepSingle(TorchDispatchMode):
    """Keeps fp32 there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") is torch.bfloat16:
            return args[0].clone()
        return func(*args, **kwargs)


def use(root: str) -> None:
    use_framework(STANDINS, root)
    import ray
    from miles.utils import dumper_utils, object_store

    ray.put = ray.get = lambda x, **_: x
    dumper_utils.DumperConfig._kv_pairs_to_dict = lambda options: {}
    object_store.init_instance(Namespace(**ARGS))


def train(log_probs: list[LogProbs], _: Any, rounded: bool = False, **options: Any) -> list[Step]:
    from miles.backends.megatron_utils import model, parallel
    from miles.backends.training_utils import data, loss
    from miles.backends.training_utils.parallel import set_parallel_state
    from miles.utils.ft_utils.process_group_utils import GroupInfo

    args, ddp = slime.set_up("miles", {**ARGS, **options})
    set_parallel_state(parallel.create_megatron_parallel_state(GroupInfo(0, 1, None)))
    rollout = _rollout_data(args, log_probs)
    loss.compute_advantages_and_returns(args, rollout)
    iterators, microbatches = data.get_data_iterator(args, [ddp], rollout)
    rollouts = data.get_num_rollouts(args, rollout, len(microbatches))
    numbers = zip(microbatches, rollouts, strict=True)
    with nullcontext() if rounded else KeepSingle():
        return slime.steps(model.train_one_step, args, ddp, iterators, numbers, None, 0)


def _rollout_data(args: Namespace, log_probs: list[LogProbs]) -> Any:
    """This rank's, by the controller and then by the actor."""
    from miles.backends.training_utils import cp_utils, data
    from miles.backends.training_utils.parallel import get_parallel_state
    from miles.ray.rollout import train_data_conversion as conversion
    from miles.utils import object_store
    from miles.utils.types import Sample

    state = get_parallel_state()
    samples = slime.samples(Sample, log_probs)
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
    slime.add_log_probs(rollout, log_probs, cp_utils.slice_log_prob_with_cp)
    return rollout


MORE = {
    "microbatch_mean": refused("microbatch_mean"),
    "another backend": refused("token_mean", train_backend="fsdp"),
    "multi-LoRA": refused("token_mean", multi_lora=True),
}


def report(*arguments: str) -> Any:
    found = slime.compared(use, train, *arguments, more=MORE)
    if arguments[-1] != "mtp":
        # Each actor splits the data, as with fault tolerance; a step is of so many samples.
        over_samples = {
            f"{name}, over samples": reweighed(run, lambda _: ROLLOUTS / SAMPLES)
            for name, run in found.own.items()
            if run.losses
        }
        own = {**over_samples, "tokens": found.own["tokens"]}
        late = {"delay_split_train_data_by_dp": True, "global_batch_size": SAMPLES}
        replace(found, own=own, references={}).compare("DP 2, split by the actors", 1, **late)
        replace(found, bound=BF16).compare("DP 2, rounded to bf16", 1, rounded=True)
    return found.rows, found.failures
