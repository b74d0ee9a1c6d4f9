"""miles' controller, actor, batches, losses and training step on a real GPT over two ranks.

miles is a fork of slime: see `slime`, whose batch, runs and stand-ins these are.
"""

from __future__ import annotations

import os
import re
from argparse import Namespace
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_loss_agg.launch.flags import VARIABLE
from tests.frameworks import slime
from tests.frameworks.harness import use_framework
from tests.frameworks.report import ON_ONE_RANK, STEPS, LogProbs, Report, Runs, Step
from tests.host.harness import run_host_ranks

STANDINS = f"""
    {slime.STANDINS} huggingface_hub safetensors polars uvicorn fastapi aiohttp datasets tokenizers
    mooncake
"""
CONVERT = "--custom-convert-samples-to-train-data-path"
OFF = """
    debug_disable_optimizer delay_split_train_data_by_dp dumper_enable dumper_fwd_bwd
    enable_witness multi_lora observe_training_entropy save_local_weight_checksum
    skip_actor_forward_only true_on_policy_mode custom_reward_post_process_path
"""
ARGS: dict[str, Any] = {
    **slime.ARGS,
    **dict.fromkeys(OFF.split()),
    **{"check_for_nan_in_loss_and_grad": True, "use_dynamic_global_batch_size": False},
    **{"object_store_backend": "ray", "train_backend": "megatron"},
    "data_source_path": "miles.rollout.data_source.RolloutDataSourceWithBuffer",
}
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


def adapt() -> None:
    from megatron_loss_agg.frameworks import miles

    match = re.search(rf"^{CONVERT} (\S+)$", miles.SETTINGS, re.MULTILINE)
    assert match
    slime.adapted[CONVERT] = match[1]


def adapt_with_seam() -> None:
    slime.adapted[slime.HOOK] = "megatron_loss_agg.frameworks.miles.postprocess"


def train(log_probs: list[LogProbs], _: Any, rounded: bool = False, **options: Any) -> list[Step]:
    from miles.backends.megatron_utils import actor, model, parallel
    from miles.backends.training_utils import cp_utils
    from miles.backends.training_utils.parallel import set_parallel_state
    from miles.utils.ft_utils.process_group_utils import GroupInfo

    args, ddp = slime.set_up({**ARGS, **options})
    set_parallel_state(parallel.create_megatron_parallel_state(GroupInfo(0, 1, None)))
    rollout = _rollout_data(args, log_probs)
    scored = slime.scores(rollout, log_probs, cp_utils.slice_log_prob_with_cp)
    trained: list[Step] = []

    def train(*given: Any, **_: Any) -> NoReturn:
        iterators, *numbers = given[-3:]
        zipped = zip(*numbers, strict=True)
        with nullcontext() if rounded else KeepSingle():
            trained.extend(slime.steps(model.train_one_step, args, ddp, iterators, zipped, None, 0))
        raise InterruptedError(slime.DONE)

    actor.train = train
    actor.Timer().start_time["train_wait"] = 0.0  # as from the last rollout on
    worker = slime.stub_actor("miles", args, scored)
    try:
        actor.MegatronTrainRayActor.train_actor(worker, 0, rollout, witness_info=None, attempt=0)
    except InterruptedError:
        return trained
    raise AssertionError("nothing was trained")


def _rollout_data(args: Namespace, log_probs: list[LogProbs]) -> Any:
    """This rank's, by the controller and then by the actor."""
    from miles.backends.training_utils import data
    from miles.backends.training_utils.parallel import get_parallel_state
    from miles.ray.rollout import train_data_conversion as conversion
    from miles.utils.misc import load_function
    from miles.utils.types import Sample

    path = slime.adapted.get(CONVERT)
    convert = path and load_function(path)
    samples = slime.samples(Sample, log_probs)
    state = get_parallel_state()
    sizes = {
        "dp_size": state.intra_dp.size,
        "cp_size": state.cp.size,
        "vpp_size": state.vpp_size,
        "microbatch_group_size_per_vp_stage": state.microbatch_group_size_per_vp_stage,
    }
    whole = conversion.convert_samples_to_train_data(args, samples, {}, convert, None)
    shipped = conversion.split_train_data_by_dp(args, whole, sizes)
    rollout, _ = data.get_rollout_data(args, shipped)
    return rollout


LEAST = "denominators must be at least 1"
RUNS: Runs = {
    **slime.RUNS,
    **slime.REMOVED,
    "prompt_mean": slime.refused_with(f"{LEAST}.*got 0.5", "prompt_mean"),
    "sum": slime.refused_with(LEAST, "sum"),
    "microbatch_mean": slime.refused_with("got microbatch ", "microbatch_mean"),
}
CONVERT_SETTINGS = {
    "--delay-split-train-data-by-dp": {"delay_split_train_data_by_dp": True},
    "--use-dynamic-global-batch-size": {"use_dynamic_global_batch_size": True},
    "--object-store-backend": {"object_store_backend": "mooncake"},
    "--train-backend": {"train_backend": "fsdp"},
    "--multi-lora": {"multi_lora": True},
    "got 12 rollouts": {"global_batch_size": 13},
}
REFUSED: Runs = {
    **{
        name: run
        for name, run in slime.REFUSED.items()
        if name in ("per token", "with a reducer", "with a loss of the user", "dataset_mean")
    },
    **{
        words: slime.refused_with(words, "token_mean", **options)
        for words, options in CONVERT_SETTINGS.items()
    },
}
RUNS_WITH_SEAM: Runs = {
    **slime.RUNS,
    **slime.REFUSED,
    **slime.WITHOUT_SEAM,
    **ON_ONE_RANK,
}


def report(without: str, patched: str) -> Any:
    runs = {**RUNS, **REFUSED}
    found = Report(use, train, (without, without), slime.OWN, runs, adapt=adapt)
    slime.compared(found)
    replace(found, bound=BF16).compare("DP 2, rounded to bf16", 1, rounded=True)
    seam = replace(
        found,
        checkouts=(without, patched),
        runs=RUNS_WITH_SEAM,
        adapt=adapt_with_seam,
        references={},
    )
    slime.compared(seam, "with the seam")
    (problems,) = run_host_ranks(_conversion_problems, 1, without)
    return found.rows, found.failures + problems


def _conversion_problems(root: str) -> list[str]:
    """Parts of the training data that miles does not make as without our flag, if it is off.

    Its metadata say the steps of multi-LoRA, and the batch size where that is dynamic.
    """
    use(root)
    adapt()
    from miles.ray.rollout import train_data_conversion as conversion
    from miles.utils.misc import load_function
    from miles.utils.types import Sample

    os.environ[VARIABLE] = ""
    zeros = [LogProbs(*([torch.zeros(len(a.mask)) for a in step],) * 2) for step in STEPS]
    samples = slime.samples(Sample, zeros)
    for sample in samples:
        sample.adapter = Namespace(slot=0)
        sample.metadata = {"adapter_global_batch_size": 6}
    metadata = {
        "step_slots": [0, 1],
        "step_adapter_names": ["first", "second"],
        "prompt_group_sizes": [len(samples)],
        "dynamic_global_batch_size": 6,
    }
    args = Namespace(**{**ARGS, "use_dynamic_global_batch_size": True})
    stock, ours = (
        conversion.convert_samples_to_train_data(args, samples, metadata, convert, None)
        for convert in (None, load_function(slime.adapted[CONVERT]))
    )
    assert stock["step_slots"] == [0, 1] and stock["step_adapter_batch_sizes"] == {0: 6}
    problems = [f"{name} differs" for name in stock if stock[name] != ours.get(name)]
    return problems + _partial_step_problems(slime.samples(Sample, zeros))


def _partial_step_problems(samples: list[Any]) -> list[str]:
    """Denominators of a last, smaller step that differ from those of its rollouts alone."""
    from miles.utils.misc import load_function

    os.environ[VARIABLE] = "--loss-aggregation sample_mean"
    convert = load_function(slime.adapted[CONVERT])
    is_partial = {"allow_partial_train_step": True, "use_dynamic_batch_size": True}

    def denominators(part: list[Any], rollouts: int) -> list[float]:
        args = Namespace(**{**ARGS, **is_partial, "global_batch_size": rollouts})
        return convert(args, part)["rollout_mask_sums"]

    ids = [*dict.fromkeys(x.rollout_id for x in samples)]
    number = len(ids) // 2 + 1
    is_last = [x.rollout_id in ids[number:] for x in samples]
    last = [x for x, is_chosen in zip(samples, is_last, strict=True) if is_chosen]
    whole = denominators(samples, number)
    found = [x for x, is_chosen in zip(whole, is_last, strict=True) if is_chosen]
    return [] if found == denominators(last, len(ids) - number) else [f"a partial step: {found}"]
