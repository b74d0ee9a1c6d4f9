"""slime's controller, actor, critic, batch, loss and training step on a real GPT over two ranks.

Stood in for: Ray (data is handed over as it is), the inference servers, passes of other models,
and the optimizer, which keeps the gradient that it is given. What does not depend on slime's
modules serves `miles` too.
"""

from __future__ import annotations

import importlib
import shlex
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from tests.frameworks.harness import CLIP, ENTROPY, KL, KeepGradients, Terms, use_framework
from tests.frameworks.report import (
    MODES,
    ON_ONE_RANK,
    ROLLOUTS,
    STEPS,
    Answer,
    LogProbs,
    Report,
    Run,
    Runs,
    Step,
    exact,
    refused,
    reweighed,
    stock,
    with_entropy,
)
from tests.host.steps import Places

STANDINS = (
    "ray sglang sglang_router transformers wandb torch_memory_saver mbridge httpx requests urllib3"
)
HOOK = "--rollout-data-postprocess-path"
OFF = """
    balance_data balance_by_flops allgather_cp calculate_per_token_loss
    custom_pg_loss_reducer_function_path rollout_data_postprocess_path
    rewards_normalization reward_key
    custom_advantage_function_path use_opd normalize_advantages use_rollout_logprobs
    use_unbiased_kl eps_clip_c use_opsm get_mismatch_metrics use_tis recompute_loss_function
    save_debug_train_data custom_megatron_before_train_step_hook_path enable_mtp_training
    decoder_seq_length ci_test keep_old_actor use_critic use_routing_replay
    use_rollout_routing_replay log_multi_turn log_passrate log_correct_samples use_wandb
    use_tensorboard
"""
PER_PROMPT = 2
ARGS: dict[str, Any] = {
    **dict.fromkeys(OFF.split()),
    **{"global_batch_size": ROLLOUTS, "rollout_batch_size": 2 * ROLLOUTS // PER_PROMPT},
    **{"n_samples_per_prompt": PER_PROMPT, "micro_batch_size": 1, "seq_length": 1},
    **{"use_dynamic_batch_size": True, "max_tokens_per_gpu": 24, "data_pad_size_multiplier": 8},
    **{"rollout_temperature": 1.0, "rollout_top_p": 1.0, "log_probs_chunk_size": -1},
    **{"advantage_estimator": "grpo", "loss_type": "policy_loss", "kl_coef": 0.0},
    **{"use_kl_loss": True, "kl_loss_coef": KL, "kl_loss_type": "k3", "entropy_coef": ENTROPY},
    **{"eps_clip": CLIP, "eps_clip_high": CLIP, "value_clip": CLIP, "qkv_format": "thd"},
    **{"compute_advantages_and_returns": True, "wandb_always_use_train_step": False},
    "custom_tis_function_path": "tests.frameworks.slime.reject",
    "data_source_path": "slime.rollout.data_source.RolloutDataSourceWithBuffer",
}
EVERY_THIRD = 3
REJECTING = {"use_tis": True}
IN_PAIRS = {"use_dynamic_batch_size": False, "micro_batch_size": 2}
CRITIC = {"use_critic": True, "custom_advantage_function_path": "tests.frameworks.slime.returns"}
DONE = "all steps are trained"
adapted: dict[str, str] = {}
"""The flags of slime that the adapter's page sets; empty in a process that trains stock code."""


def reject(*, pg_loss: Tensor, loss_masks: list[Tensor], **_: Any) -> Any:
    """As slime's rejection sampling: some tokens are masked inside the loss."""
    masks = [mask.clone() for mask in loss_masks]
    for mask in masks:
        mask[::EVERY_THIRD] = 0
    return pg_loss, masks, {}


def returns(_: Namespace, data: dict[str, Any]) -> None:
    data["returns"] = data["advantages"] = [torch.zeros_like(x) for x in data["values"]]


def half_by_prompt(samples: Any) -> Tensor:
    """Half of the coefficients of `prompt_mean`."""
    prompts = samples.groups("prompt")
    tokens: Tensor = prompts.sums(samples.mask_sum)
    return 0.5 / (len(tokens) * tokens[prompts.group_S])


def with_value(lp: Tensor, entropy: Tensor, old: Tensor, ref: Tensor, reward: float) -> Terms:
    """slime's loss of a critic whose values are log-probabilities, and whose returns are 0."""
    clipped = old + (lp - old).clamp(-CLIP, CLIP)
    loss = torch.maximum(clipped**2, lp**2)
    return {"loss": loss, "value_loss": loss}


def use(root: str) -> None:
    use_framework(STANDINS, root)
    import ray
    from megatron.core.tensor_parallel import mappings

    ray.put = ray.get = lambda x, **_: x
    from slime.utils import reloadable_process_group

    # As in slime's actors: process groups are wrapped from then on.
    reloadable_process_group.available_memory = lambda: {"free_GB": float("inf")}
    reloadable_process_group.monkey_patch_torch_dist()
    reloadable_process_group.register_default_process_group(timedelta(minutes=5))
    mappings.dist_all_gather_func = dist.all_gather_into_tensor  # Megatron was imported before
    mappings.dist_reduce_scatter_func = dist.reduce_scatter_tensor


def adapt() -> None:
    from megatron_loss_agg.frameworks import slime

    adapted.update(zip(*[iter(shlex.split(slime.SETTINGS))] * 2, strict=True))


def train(log_probs: list[LogProbs], _: Any, **options: Any) -> list[Step]:
    from slime.backends.megatron_utils import actor, loss, model

    args, ddp = set_up({**ARGS, **options})
    rollout = _rollout_data(args, log_probs)
    scored = scores(rollout, log_probs, loss.slice_log_prob_with_cp)
    values = {"values": scored["log_probs"]}
    trained: list[Step] = []

    def train(*given: Any) -> NoReturn:
        iterators, *numbers = given[-3:]
        trained.extend(
            steps(model.train_one_step, args, ddp, iterators, zip(*numbers, strict=True))
        )
        raise InterruptedError(DONE)

    actor.train, actor.forward_only = train, lambda *_: values
    actor.Timer().start_time["train_wait"] = 0.0  # as from the last rollout on
    worker = stub_actor("slime", args, scored)
    if args.custom_advantage_function_path:
        _predict_values(ddp)
        rollout.update(scored)
        run = actor.MegatronTrainRayActor.train_critic
    else:
        run = actor.MegatronTrainRayActor.train_actor
    try:
        run(worker, 0, rollout)
    except InterruptedError:
        return trained
    raise AssertionError("nothing was trained")


def stub_actor(framework: str, args: Namespace, scored: dict[str, Any]) -> Namespace:
    """A worker, as far as training uses it; other passes of the model return ``scored``."""
    load_function = importlib.import_module(f"{framework}.utils.misc").load_function

    def compute_log_prob(*_: Any, store_prefix: str, **__: Any) -> dict[str, Any]:
        return {f"{store_prefix}log_probs": scored[f"{store_prefix}log_probs"]}

    path = args.rollout_data_postprocess_path
    return Namespace(
        args=args,
        rollout_data_postprocess=path and load_function(path),
        compute_log_prob=compute_log_prob,
        weights_backuper=Namespace(backup_tags={"ref"}),
        _active_model_tag="actor",
        _switch_model=lambda tag: None,
        _set_replay_stage=lambda stage: None,  # of miles
        _use_rollout_replay=lambda manager: False,
        _ft_test_action_executor=None,
        model=None,
        optimizer=None,
        opt_param_scheduler=None,
    )


def set_up(options: dict[str, Any]) -> tuple[Namespace, Any]:
    """The arguments; and a model in DDP."""
    from megatron.training import global_vars

    from tests.host import gpt

    args = Namespace(**options)
    args.rollout_data_postprocess_path = adapted.get(HOOK)
    global_vars.set_args(args)
    ddp = gpt.data_parallel(gpt.build(torch.float32, args.calculate_per_token_loss))
    if args.allgather_cp:
        _split_contiguously(ddp)
    return args, ddp


def _split_contiguously(ddp: Any) -> None:
    """As models for slime's ``--allgather-cp`` split a packed row."""
    from megatron_loss_agg import CPLayout
    from megatron_loss_agg.mcore.cpu import attention

    def thd(offsets: Tensor, cp_size: int, cp_rank: int) -> CPLayout:
        return CPLayout.contiguous(int(offsets[-1]), cp_size, cp_rank)

    attention.CPLayout = Namespace(thd=thd)
    ddp.module.position_embedding_type = "none"  # Megatron's rotary embedding expects a zigzag


def _predict_values(ddp: Any) -> None:
    """Make a critic of the model: the value before a token is its log-probability."""

    def value(_: Any, __: Any, given: dict[str, Any], logits: Tensor) -> Tensor:
        following = given["input_ids"].roll(-1, dims=1)
        return logits.log_softmax(-1).gather(-1, following.unsqueeze(-1))

    ddp.module.register_forward_hook(value, with_kwargs=True)


def steps(
    train_one_step: Any, args: Namespace, ddp: Any, iterators: Any, numbers: Any, *more: Any
) -> list[Step]:
    """One for each of ``numbers``: microbatches and rollouts."""
    optimizer, scheduler = KeepGradients(ddp), Namespace(step=lambda increment: None)
    metrics = [
        train_one_step(args, 0, step, iterators, [ddp], optimizer, scheduler, n, size, *more)[0]
        for step, (n, size) in enumerate(numbers)
    ]
    return list(map(Step, optimizer.gradients, metrics))


def _rollout_data(args: Namespace, log_probs: list[LogProbs]) -> Any:
    """This rank's, by the controller and then by the actor."""
    from megatron.core import mpu
    from slime.backends.megatron_utils import actor
    from slime.ray.rollout import RolloutManager
    from slime.utils.types import Sample

    sizes = {
        "dp_size": mpu.get_data_parallel_world_size(),
        "cp_size": mpu.get_context_parallel_world_size(),
        "vpp_size": 1,
        "microbatch_group_size_per_vp_stage": 1,
    }
    manager = Namespace(
        args=args,
        custom_convert_samples_to_train_data_func=None,
        train_parallel_config=sizes,
        _post_process_rewards=lambda samples: ([s.reward for s in samples],) * 2,
    )
    whole = RolloutManager._convert_samples_to_train_data(manager, samples(Sample, log_probs))
    shipped = RolloutManager._split_train_data_by_dp(manager, whole)
    return actor.MegatronTrainRayActor._get_rollout_data(manager, shipped)


def scores(
    rollout: dict[str, Any], log_probs: list[LogProbs], slice_with_cp: Callable[..., Tensor]
) -> dict[str, list[Tensor]]:
    """Log-probabilities by the policy and the reference: of this rank's tokens."""
    order = [tuple(answer.tokens().tolist()) for step in STEPS for answer in step]
    rows = [order.index(tuple(tokens.tolist())) for tokens in rollout["tokens"]]
    lengths = list(zip(rollout["total_lengths"], rollout["response_lengths"], strict=True))
    scored = {}
    for name, kind in (("log_probs", "old"), ("ref_log_probs", "ref")):
        values = [x for step in log_probs for x in getattr(step, kind)]
        scored[name] = [slice_with_cp(values[i], *n) for i, n in zip(rows, lengths, strict=True)]
    return scored


def samples(sample: type, log_probs: list[LogProbs]) -> list[Any]:
    """`STEPS`, in the framework's class; its data source numbers rollouts prompt by prompt."""
    generated = [x for step in log_probs for x in step.old]
    answers = [answer for step in STEPS for answer in step]
    return [
        sample(
            index=answer.rollout,
            group_index=answer.prompt,
            rollout_id=answer.rollout,
            tokens=answer.tokens().tolist(),
            response_length=len(answer.mask),
            reward=answer.reward,
            loss_mask=list(answer.mask),
            rollout_log_probs=old.tolist(),
            remove_sample=answer.removed,
        )
        for answer, old in zip(answers, generated, strict=True)
    ]


def _in_pairs(step: Sequence[Answer]) -> Places:
    """Microbatches of two samples: the controller takes the rollouts in order, each whole."""
    order = sorted(range(len(step)), key=lambda i: step[i].rollout)
    return (tuple(zip(order[::2], order[1::2], strict=True)),)


def rejecting(run: Run) -> Run:
    """Without the tokens that `reject` masks."""
    return reweighed(run, lambda t: t % EVERY_THIRD > 0)


OWN: Runs = {
    "rollout_mean": stock(with_entropy, "rollout_mean"),
    "with rejection": rejecting(stock(with_entropy, "rollout_mean", **REJECTING)),
}
BY_HAND = "--loss-aggregation custom --loss-aggregation-function tests.frameworks.slime:"
RUNS: Runs = {
    **{mode: exact(with_entropy, mode) for mode in (*MODES, "sample_sum", "sum")},
    "custom": reweighed(
        exact(with_entropy, "prompt_mean", our_flags=BY_HAND + "half_by_prompt"), lambda _: 0.5
    ),
    "sample_mean, without empty ones": exact(with_entropy, "sample_mean", empty="skip"),
    "token_mean, tokens rejected in the loss": rejecting(
        exact(with_entropy, "token_mean", **REJECTING)
    ),
    "microbatch_mean": exact(with_entropy, "microbatch_mean", places=_in_pairs, **IN_PAIRS),
}
REMOVED: Runs = {
    "sample_mean, removed samples: skip": exact(with_entropy, "sample_mean", "skip"),
    "token_mean, removed samples: count": exact(with_entropy, "token_mean", "count"),
}


def refused_with(words: str, mode: str, rejected: str = "", **options: Any) -> Run:
    """A run that is refused by an error of ours with these words."""
    return replace(refused(mode, rejected, **options), refusal=f"(Host|Option)Error: .*{words}")


REFUSED: Runs = {
    "per token": refused_with(
        "--calculate-per-token-loss", "token_mean", calculate_per_token_loss=True
    ),
    "with a reducer": refused_with(
        "--custom-pg-loss", "token_mean", custom_pg_loss_reducer_function_path="some.reducer"
    ),
    "with a loss of the user": refused_with("custom_loss", "token_mean", loss_type="custom_loss"),
    "prompt_mean, tokens rejected in the loss": refused_with(
        "--custom-tis-function-path.*got 0.5", "prompt_mean", **REJECTING
    ),
    "sum, with MTP": refused_with("--enable-mtp-training", "sum", enable_mtp_training=True),
    "dataset_mean": refused_with("got dataset", "dataset_mean"),
    "three rollouts of a prompt": refused_with(
        "got 3 prompts", "prompt_mean", n_samples_per_prompt=3
    ),
    "the user's data source": refused_with(
        "--data-source-path", "prompt_mean", data_source_path="some.Source"
    ),
}
WITHOUT_SEAM: Runs = {
    "removed samples: skip": refused_with("say whether they were removed", "sample_mean", "skip"),
    "with a critic": refused_with("for its critic", "token_mean", use_critic=True),
}
VALUE = "value loss"
OWN_WITH_SEAM: Runs = {
    "rollout_mean": OWN["rollout_mean"],
    f"rollout_mean, {VALUE}": stock(with_value, "rollout_mean", **CRITIC),
}
RUNS_WITH_SEAM: Runs = {
    **REMOVED,
    "prompt_mean": exact(
        with_entropy, "prompt_mean", data_source_path="some.Source", near="rollout_mean"
    ),
    "prompt_mean, with a critic": exact(
        with_entropy, "prompt_mean", use_critic=True, near="rollout_mean"
    ),
    **{f"{mode}, {VALUE}": exact(with_value, mode, **CRITIC) for mode in MODES},
}


def compared(report: Report, *words: str) -> Report:
    """Compare `slime` or `miles` under data and context parallelism."""
    report.compare(", ".join(["DP 2", *words]), 1)
    report.compare(", ".join(["CP 2, zigzag", *words]), 2)
    report.compare(", ".join(["CP 2, contiguous", *words]), 2, rope=False, allgather_cp=True)
    return report


def report(without: str, patched: str) -> Any:
    runs = {**RUNS, **REFUSED, **WITHOUT_SEAM, **ON_ONE_RANK}
    found = compared(Report(use, train, (without, without), OWN, runs, adapt=adapt))
    seam = replace(
        found, checkouts=(without, patched), own=OWN_WITH_SEAM, runs=RUNS_WITH_SEAM, references={}
    )
    seam.compare("DP 2, with the seam", 1)
    return found.rows, found.failures
