"""verl's own step, with and without our adapter: verl loads it, and chooses its engine.

verl's own code is everything from `TrainingWorker.train_mini_batch` down: mini- and microbatches,
nested tensors, the forward pass with context parallelism, losses, and what the loss function
returns to Megatron. Stood in for are the objects that its constructors build from a checkpoint:
the model comes from `tests.host.gpt`, and the optimizer only keeps the gradient. And where
Megatron-Core lacks what verl's dynamic context parallelism calls, its groups come from a table. With
`megatron/` of Megatron-LM's branch dev first on PYTHONPATH, `-k "dynamic or dealt"` takes its own.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import logging
import os
import shlex
import shutil
import subprocess
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.datasets import data_schedule
from torch import Tensor

from megatron_loss_agg.launch.flags import VARIABLE
from megatron_loss_agg.presets import PRESETS, presets_of
from tests.frameworks.harness import (
    CLIP,
    DIVISOR,
    ENTROPY,
    FP32,
    KL,
    ROOT,
    KeepGradients,
    Terms,
    attempt,
    grpo,
    is_passed_on,
    run_tests,
    use_framework,
)
from tests.frameworks.report import (
    MODES,
    ON_ONE_RANK,
    LogProbs,
    Report,
    Run,
    Runs,
    Step,
    answers,
    flags,
    reweighed,
    with_entropy,
)
from tests.frameworks.report import exact as exact_over
from tests.host import gpt
from tests.host.harness import MOE, run_host_ranks
from tests.host.reference import relative_error
from tests.peers.standins import PEERS, needs_peers

pytestmark = [pytest.mark.extended, needs_peers]

ADAPTER = "megatron_loss_agg.frameworks.verl"
STANDINS = "ray transformers datasets accelerate peft pandas pydantic uvicorn fastapi"
# The last digit of a rollout is its agent session, which verl counts by prompt.
STEP = answers("""
    0 1 00 110110111011011110110111 1.3
    0 1 00 101 -0.8
    1 1 10 011101011 0.6
    2 1 20 1 -1.1
    0 1 01 10111010110111011 0.9
    1 1 11 000000 1.7
    2 1 21 111010110111 -0.4
    3 1 30 11 1.2
    3 1 31 01101110110110101111 -1.5
    1 1 12 11011 0.5
""")
TEACHER = 1.0  # how far its log-probabilities are from the reference's
# Rows that verl adds, so that ranks get equally many.
PADDING = answers("""
    9 4 90 0 0
    9 4 91 0 0
""")
ROWS = len(STEP) + len(PADDING)
# Rows of two mini-batches, in which each data-parallel rank has three.
HALVES = ((0, 1, 2, 6, 7, 8), (3, 4, 5, 9))
METRICS = {"actor/pg_loss": "pg_loss", "actor/entropy_loss": "entropy_loss"}
"""verl's names, and those of `with_entropy`; others are the same."""
DEFAULTS = {
    "loss_agg_mode": "token-mean",  # verl's own
    "loss_scale_factor": None,  # its divisor
    "loss_mode": "vanilla",  # of its policy loss
    "mini_batch_size": ROWS,
    "without": (),  # columns that the batch lacks
    "padding": "uid",  # or "column": where it is marked
    "by_tokens": True,  # or microbatches are pairs
    "per_token": False,
    "loss": "policy",  # or "value", "distillation" or "sft"
    "dynamic": False,  # context parallelism
    "config": {},  # of the model
    "worker": "TrainingWorker",
}


TOKENS_OF_RANK = 12  # at most, under dynamic context parallelism
LENGTHS = (25, 4, 10, 2, 18, 7, 13, 3, 21, 6, 5, 5)
DEALT = {
    LENGTHS: [[[0, 8, 3]] * 4, [[4, 9], [4, 9], [6, 2], [6, 2]], [[5], [5], [10, 1], [11, 7]]],
    LENGTHS[:6]: [[[0, 4, 1]] * 4, [[2], [2], [5, 3], [5, 3]]],
    LENGTHS[6:]: [[[2, 1], [2, 1], [0, 3, 4], [0, 3, 4]], [[5]] * 4],
}
"""By the lengths of a mini-batch's rows: in each microbatch, the rows of each of four ranks.

So the scheduler of Megatron-LM's branch dev deals them, at d48bd6b.
"""
HAS_SCHEDULER = hasattr(data_schedule, "DefaultDynamicCPScheduler")
"""True on branch dev; no release of Megatron-Core up to 0.19 has that scheduler."""


class Dealer:
    """`DEALT` in place of a scheduler."""

    def __init__(self, **sizes: Any) -> None: ...

    def get_groups_and_subsamples(self, samples: list[tuple[int, int]]) -> list[list[list[int]]]:
        return DEALT[tuple(length for _, length in samples)]


def rows(log_probs: LogProbs, padding_column: bool) -> list[dict[str, Any]]:
    """The samples and padding, as verl's agent loop writes them down."""
    padding_uid = "no prompt" if padding_column else f"pad{0x5EED:032x}"
    found = []
    padding = [(answer, torch.zeros(1), torch.zeros(1)) for answer in PADDING]
    for answer, old, ref in [*zip(STEP, *log_probs, strict=True), *padding]:
        tokens, mask, start = answer.tokens(), torch.tensor(answer.mask), answer.prompt_length
        # Where tokens are predicted. Near the policy there would be no digits left of the KL term.
        teacher = F.pad(ref - TEACHER, (start - 1, 1))
        row = {
            "uid": padding_uid if answer in PADDING else f"prompt {answer.prompt}",
            "session_id": answer.rollout % 10,
            **{"prompts": tokens[:start], "responses": tokens[start:]},
            **{"input_ids": tokens, "position_ids": torch.arange(len(tokens))},
            **{"response_mask": mask, "loss_mask": mask},
            "advantages": torch.full_like(old, answer.reward),
            **{"old_log_probs": old, "ref_log_prob": ref, "values": old, "returns": ref},
            "teacher_logprobs": teacher.unsqueeze(-1),
        }
        if padding_column:
            row["is_padding"] = torch.tensor(answer in PADDING)
        found.append(row)
    return found


def columns(chosen: list[dict[str, Any]]) -> dict[str, Any]:
    """The batch of rows as verl's workers get it: ragged, even where lengths are equal."""
    found: dict[str, Any] = {name: [row[name] for row in chosen] for name in chosen[0]}
    for name, (first, *_) in found.items():
        if isinstance(first, Tensor) and first.dim():
            found[name] = torch.nested.as_nested_tensor(found[name], layout=torch.jagged)
        elif isinstance(first, Tensor):
            found[name] = torch.stack(found[name])
    return found


def use(package: str) -> None:
    use_framework(STANDINS, package)
    logging.Logger.warning_once = logging.Logger.debug  # type: ignore[attr-defined]  # transformers'
    ray: Any = importlib.import_module("ray._private.runtime_env.constants")
    ray.RAY_JOB_CONFIG_JSON_ENV_VAR = "RAY_JOB_CONFIG_JSON_ENV_VAR"
    os.environ["VERL_ENGINE_DEVICE"] = "cuda"  # of the engines


def use_dynamic_groups(package: str) -> None:
    """As `use`; releases lack the scheduler, and have the groups of two ranks and more."""
    use(package)
    if HAS_SCHEDULER:
        return
    alone, _ = dist.new_subgroups(1)

    def group(group_size: int) -> Any:
        stock_group = parallel_state.get_hybrid_data_context_parallel_groups
        return alone if group_size == 1 else stock_group(group_size=group_size)

    parallel_state.get_dynamic_data_context_parallel_groups = group
    data_schedule.DefaultDynamicCPScheduler = Dealer


def adapt() -> None:
    """Let verl load the adapter, as it does by `SETTINGS`."""
    os.environ["VERL_USE_EXTERNAL_MODULES"] = ADAPTER
    importlib.import_module("verl")


def train(log_probs: list[LogProbs], _: Any, **changed: Any) -> list[Step]:
    from verl.utils import tensordict_utils as tu
    from verl.utils.metric import reduce_metrics

    options = Namespace(**{**DEFAULTS, **changed})
    register_own_losses()
    worker = _worker(options)
    each = ROWS // worker.engine.get_data_parallel_size()  # the last rank has the padding
    first = worker.engine.get_data_parallel_rank() * each
    chosen = rows(log_probs[0], options.padding == "column")[first : first + each]
    found = columns(chosen)
    data = tu.get_tensordict({k: x for k, x in found.items() if k not in options.without})
    size = options.mini_batch_size
    sizes = {"global_batch_size": size, "mini_batch_size": size}
    entropy = options.loss == "policy"
    tu.assign_non_tensor(data, temperature=1.0, calculate_entropy=entropy, **sizes)
    tinker = options.worker == "TinkerTrainingWorker"
    output = (worker.forward_backward if tinker else worker.train_mini_batch)(data)
    found = {} if output is None else reduce_metrics(tu.get(output, "metrics"))
    metrics = {METRICS.get(k, k): x for k, x in found.items() if not k.startswith("perf/")}
    gradients = worker.engine.optimizer.gradients
    if len(gradients) == 1:
        return [Step(gradients[0], metrics)]
    # Of several mini-batches the metrics are means.
    return [Step({k: sum(x[k] for x in gradients) for k in gradients[0]}, {})]


class _ValueHead(torch.nn.Linear):
    """In place of a critic's output layer, as in verl: here the entropy is the value."""

    def forward(self, hidden: Tensor, **_: Any) -> tuple[Tensor, None]:  # type: ignore[override]
        log_p = super().forward(hidden).log_softmax(-1)
        return -(log_p.exp() * log_p).sum(-1, keepdim=True), None


def _worker(options: Namespace) -> Any:
    """verl's worker and engine, with the attributes that their constructors set."""
    from verl.utils.profiler import DistProfiler
    from verl.workers.config import McoreEngineConfig
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine_workers import TrainingWorker
    from verl.workers.engine_workers_tinker import TinkerTrainingWorker

    cp = parallel_state.get_context_parallel_world_size()
    plain = gpt.build(torch.float32, options.per_token, **options.config)
    if options.dynamic and not HAS_SCHEDULER:
        plain.position_embedding_type = "none"  # a release's takes one split for all microbatches
    kind = "language_model"
    if options.loss == "value":
        kind, weight = "value_model", plain.output_layer.weight
        plain.output_layer = _ValueHead(*reversed(weight.shape), bias=False)
        plain.output_layer.weight = weight
    model = gpt.data_parallel(plain)
    engine: Any = object.__new__(EngineRegistry.get_engine_cls(kind, "megatron"))
    engine.module, engine.tf_config, engine.optimizer = [model], model.config, KeepGradients(model)
    engine.engine_config = McoreEngineConfig(
        context_parallel_size=cp,
        use_dynamic_bsz=options.by_tokens,
        micro_batch_size_per_gpu=2,
        max_token_len_per_gpu=26 // cp,
        dynamic_context_parallel=options.dynamic,
        max_seqlen_per_dp_cp_rank=TOKENS_OF_RANK,
    )
    engine.model_config = Namespace(
        model_type=kind,
        mtp=Namespace(enable=False, enable_train=False),
        hf_config=Namespace(architectures=["LlamaForCausalLM"]),
        tokenizer=Namespace(pad_token_id=0),
        get={"use_remove_padding": True}.get,
    )
    # The batch lies on the CPU, and the sum over ranks on the GPU: there, verl sums a copy.
    routed = engine._routed_num_tokens
    engine._routed_num_tokens = lambda data: routed(data).clone()
    engine.enable_routing_replay, engine.lr_scheduler = False, Namespace(step=id)
    engine._is_offload_param = engine._is_offload_optimizer = False
    classes = {cls.__name__: cls for cls in (TrainingWorker, TinkerTrainingWorker)}
    worker: Any = object.__new__(classes[options.worker])
    worker.engine, worker.engine_config = engine, engine.engine_config
    worker.model_config, worker.flops_counter, worker.device_name = engine.model_config, None, "cpu"
    worker.profiler = DistProfiler(rank=0, config=None)
    worker.loss_fn = _loss_function(options)
    return worker


def _loss_function(options: Namespace) -> Callable[..., Any]:
    from verl.trainer.distillation.losses import distillation_ppo_loss
    from verl.workers.config import ActorConfig, CriticConfig, PolicyLossConfig
    from verl.workers.config.distillation import DistillationLossConfig
    from verl.workers.utils.losses import ppo_loss, sft_loss, value_loss

    common = {
        "strategy": "megatron",
        "loss_agg_mode": options.loss_agg_mode,
        "use_dynamic_bsz": True,
    }
    if options.loss == "value":
        return partial(value_loss, config=CriticConfig(cliprange_value=CLIP, **common))
    if options.loss == "sft":
        return partial(sft_loss, config=None)
    actor = ActorConfig(
        rollout_n=1,
        loss_scale_factor=options.loss_scale_factor,
        clip_ratio=CLIP,
        use_kl_loss=True,
        kl_loss_coef=KL,
        kl_loss_type="low_var_kl",
        entropy_coeff=ENTROPY,
        # Tokens of the largest covariance get a penalty: here, all.
        policy_loss=PolicyLossConfig(loss_mode=options.loss_mode, kl_cov_ratio=1.0, ppo_kl_coef=KL),
        **common,
    )
    if options.loss == "distillation":
        teacher_options = {"use_task_rewards": False, "use_policy_gradient": False}
        teacher = Namespace(
            distillation_loss=DistillationLossConfig(loss_mode="k3", **teacher_options)
        )
        return partial(distillation_ppo_loss, config=actor, distillation_config=teacher)
    return partial(ppo_loss, config=actor)


def distilled(lp: Tensor, entropy: Tensor, old: Tensor, ref: Tensor, reward: float) -> Terms:
    return {"loss": grpo(lp, entropy, old, ref - TEACHER, reward)["kl_loss"]}


def value(lp: Tensor, entropy: Tensor, old: Tensor, ref: Tensor, reward: float) -> Terms:
    near = old + (entropy - old).clamp(-CLIP, CLIP)
    return {"loss": 0.5 * ((entropy - ref) ** 2).maximum((near - ref) ** 2)}


def kl_cov(lp: Tensor, entropy: Tensor, old: Tensor, ref: Tensor, reward: float) -> Terms:
    terms = grpo(lp, entropy, old, ref, reward)
    terms["pg_loss"] = KL * (lp - old).abs() - (lp - old).exp() * reward
    loss = terms["pg_loss"] + KL * terms["kl_loss"] - ENTROPY * terms["entropy_loss"]
    return {"loss": loss, **terms}


def register_own_losses() -> None:
    """Policy losses of a user, without a call of `agg_loss`."""
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, register_policy_loss

    def own_mean(**inputs: Any) -> tuple[Tensor, dict[str, Any]]:
        mask = inputs["response_mask"]
        return -(inputs["log_prob"] * inputs["advantages"] * mask).sum() / mask.sum(), {}

    def own_sum(**inputs: Any) -> tuple[Tensor, dict[str, Any]]:
        losses = -inputs["log_prob"] * inputs["advantages"] * inputs["response_mask"]
        info = inputs["config"].global_batch_info
        return losses.sum(-1).sum() / info["batch_num_tokens"] * info["dp_size"], {}

    if "own mean" not in POLICY_LOSS_REGISTRY:
        register_policy_loss("own mean")(own_mean)
        register_policy_loss("own sum")(own_sum)


exact = partial(exact_over, batch=(STEP,))
stock = partial(exact, our_flags="")
SHARE = len(STEP) / ROWS  # of a mean over samples, in which padding counts


def own(preset: str) -> Run:
    """verl's mode of that name."""
    name, mode = preset.partition("/")[2], PRESETS[preset].mode
    factor = DIVISOR if PRESETS[preset].needs_divisor else None
    run = stock(with_entropy, mode, loss_agg_mode=name, loss_scale_factor=factor)
    return run if mode in ("token_mean", "sum") else reweighed(run, lambda _: SHARE)


def in_parts(mode: str, parts: tuple[tuple[int, ...], ...], **options: Any) -> Run:
    """In two mini-batches, each with denominators of its own; of both, the sum of the gradients."""
    runs = [exact(with_entropy, mode, places=lambda _, x=x: ((x,),)) for x in parts]
    (first,), (second,) = (run.weights for run in runs)
    options["mini_batch_size"] = ROWS // 2
    return replace(runs[0], weights=(first + second,), options=options)


def refused(words: str, mode: str = "prompt_mean", **options: Any) -> Run:
    return Run(flags(mode), options, refusal=words)


ROUTED = {**MOE, "moe_router_load_balancing_type": "aux_loss"}
AUXILIARY = {
    f"auxiliary {x}": {"per_token": True, "config": {**ROUTED, "moe_aux_loss_coeff": x}}
    for x in (0.0, 1.0)
}
DISTILLED, VALUE = {"loss": "distillation"}, {"loss": "value"}
PER_TOKEN = {"token mean, per token": stock(with_entropy, "token_mean", per_token=True)}
OWN: Runs = {
    **{name: own(name) for name in presets_of("verl")},
    "distillation": stock(distilled, "token_mean", **DISTILLED),
    "value": stock(value, "token_mean", **VALUE),
    **{name: Run(options=options) for name, options in AUXILIARY.items()},
}
TWO = "prompt_mean, two mini-batches"
CUSTOM = "--loss-aggregation custom --loss-aggregation-function tests.sweep.data:sixty_fourth"
LEVELS = "--loss-aggregation nested_mean --loss-aggregation-levels prompt,turn"
RUNS: Runs = {
    **{mode: exact(with_entropy, mode) for mode in MODES},
    **{f"{mode}, per token": exact(with_entropy, mode, per_token=True) for mode in MODES},
    "prompt_mean, pairs": exact(with_entropy, "prompt_mean", by_tokens=False),
    TWO: in_parts("prompt_mean", HALVES),
    "sample_mean, padding counts": reweighed(
        exact(with_entropy, "sample_mean", "count"), lambda _: SHARE
    ),
    "sample_mean, padding in a column": exact(with_entropy, "sample_mean", padding="column"),
    "sample_mean, without empty ones": exact(with_entropy, "sample_mean", empty="skip"),
    "sum": exact(with_entropy, "sum"),
    "sample_sum": exact(with_entropy, "sample_sum"),
    "custom": reweighed(exact(with_entropy, "sum", our_flags=CUSTOM), lambda _: 1 / 64),
    "prompt_mean, distillation": exact(distilled, "prompt_mean", **DISTILLED),
    "prompt_mean, value": exact(value, "prompt_mean", **VALUE),
    "prompt_mean, kl_cov": exact(kl_cov, "prompt_mean", loss_mode="kl_cov"),
    **{name: Run(flags("sample_mean"), options) for name, options in AUXILIARY.items()},
    "several calls": refused(
        "HostError: An optimizer step must be one train_batch", worker="TinkerTrainingWorker"
    ),
    "verl's mode": refused(
        "HostError: loss_agg_mode must be token-mean, .* got token-sum", loss_agg_mode="token-sum"
    ),
    **{
        name: refused(f"HostError: policy_loss.loss_mode must be .* got {name}", loss_mode=name)
        for name in ("sapo", "geo_mean", "clip_cov")
    },
    **{
        name: refused("HostError: verl's loss must be a sum that agg_loss", loss_mode=name)
        for name in ("own mean", "own sum")
    },
    "SFT": refused(
        "HostError: verl's batch must have a response_mask", loss="sft", without=["response_mask"]
    ),
    "no sessions": refused(
        "DataError: rollout_mean needs the column session_id",
        "rollout_mean",
        without=["session_id"],
    ),
    "microbatch_mean": refused("OptionError: .*got microbatch ", "microbatch_mean"),
    "turns": Run(LEVELS, refusal="OptionError: .*got turn "),
    **ON_ONE_RANK,
}


@pytest.fixture(scope="session")
def compared() -> tuple[list[str], tuple[Any, Any]]:
    """The failures; and all steps of two data-parallel ranks, of stock verl and with the adapter."""
    report = Report(
        use, train, (str(PEERS),) * 2, {**OWN, **PER_TOKEN}, RUNS, batch=(STEP,), adapt=adapt
    )
    steps = report.compare("DP 2", 1)
    # Stock verl drops tokens under the per-token flag, and each rank has another half.
    cp_runs = {name: run for name, run in RUNS.items() if name != TWO and not run.refusal}
    replace(report, own=OWN, runs=cp_runs).compare("CP 2", 2)
    return report.failures, steps


def test_every_aggregation_is_exact_or_refused_and_without_one_no_bit_changes(
    compared: tuple[list[str], Any],
) -> None:
    failures, _ = compared
    assert failures == []


# Dynamic context parallelism: every rank has the whole batch, and microbatches groups of their own.

DYNAMIC: dict[str, Any] = {"dynamic": True, "per_token": True}  # verl sets the flag
ROUTED_DYNAMICALLY = {name: {**options, **DYNAMIC} for name, options in AUXILIARY.items()}
OWN_DYNAMIC: Runs = {
    "token mean": stock(with_entropy, "token_mean", **DYNAMIC),
    **{name: Run(options=options) for name, options in ROUTED_DYNAMICALLY.items()},
}
PARTS = ((0, 1, 2, 3, 4, 5), (6, 7, 8, 9))  # rows of two mini-batches
RUNS_DYNAMIC: Runs = {
    **{mode: exact(with_entropy, mode, **DYNAMIC) for mode in (*MODES, "sample_sum")},
    TWO: in_parts("prompt_mean", PARTS, **DYNAMIC),
    "sample_mean, padding counts": reweighed(
        exact(with_entropy, "sample_mean", "count", **DYNAMIC), lambda _: SHARE
    ),
    "sample_mean, without empty ones": exact(with_entropy, "sample_mean", empty="skip", **DYNAMIC),
    "custom": reweighed(exact(with_entropy, "sum", our_flags=CUSTOM, **DYNAMIC), lambda _: 1 / 64),
    "prompt_mean, kl_cov": exact(kl_cov, "prompt_mean", loss_mode="kl_cov", **DYNAMIC),
    **{name: Run(flags("sample_mean"), options) for name, options in ROUTED_DYNAMICALLY.items()},
    "microbatch_mean": refused("OptionError: .*got microbatch ", "microbatch_mean", **DYNAMIC),
}


@pytest.fixture(scope="session")
def compared_dynamic() -> tuple[list[str], tuple[Any, Any]]:
    """As `compared`, of four ranks."""
    known = inspect.signature(parallel_state.initialize_model_parallel).parameters
    (flag,) = {"dynamic_context_parallel", "hybrid_context_parallel"} & known.keys()
    report = Report(
        *(use_dynamic_groups, train, (str(PEERS),) * 2, OWN_DYNAMIC, RUNS_DYNAMIC),
        **{"batch": (STEP,), "ranks": 4, "sizes": {flag: True}, "adapt": adapt},
    )
    steps = report.compare("DP 4", 1, rope=HAS_SCHEDULER)
    # The groups are the same, whatever the number of context-parallel ranks that verl is given.
    cp_runs = {name: RUNS_DYNAMIC[name] for name in ("prompt_mean", TWO)}
    own = {"token mean": OWN_DYNAMIC["token mean"]}
    replace(report, own=own, runs=cp_runs).compare("CP 2", 2, rope=HAS_SCHEDULER)
    return report.failures, steps


def test_dynamic_context_parallelism_is_exact(compared_dynamic: tuple[list[str], Any]) -> None:
    failures, _ = compared_dynamic
    assert failures == []


@pytest.mark.skipif(not HAS_SCHEDULER, reason="this Megatron-Core has no such scheduler")
def test_rows_are_dealt_as_megatron_deals_them() -> None:
    sizes = {"dp_size": 4, "cp_size": 1, "microbatch_group_size_per_vp_stage": None}
    scheduler = data_schedule.DefaultDynamicCPScheduler(TOKENS_OF_RANK, **sizes)
    for lengths, dealt in DEALT.items():
        assert scheduler.get_groups_and_subsamples([*enumerate(lengths)]) == dealt


@pytest.mark.parametrize("steps", ["compared", "compared_dynamic"])
def test_auxiliary_losses_keep_verls_meaning(steps: str, request: Any) -> None:
    # verl returns the tokens that were routed as the number of tokens, which auxiliary losses are
    # scaled by. Their gradient is the same whatever the aggregation of the loss.
    _, compared = request.getfixturevalue(steps)
    own, ours = ([of[name][0].gradient for name in AUXILIARY] for of in compared)
    assert relative_error(*own) > 1e-3
    assert relative_error(ours[0], own[0]) > 1e-2
    theirs, mine = (
        {name: g - without[name] for name, g in with_loss.items()}
        for without, with_loss in (own, ours)
    )
    assert relative_error(mine, theirs) < FP32


@pytest.fixture(scope="session")
def patched(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a copy of verl that has both patches."""
    folder = tmp_path_factory.mktemp("site-packages")
    shutil.copytree(PEERS / "verl", folder / "verl")
    for name in ("verl", "verl-routed-tokens"):
        patch = ROOT / f"patches/{name}/0.9.1.patch"
        subprocess.run(["patch", "-p1", "-d", str(folder), "-i", str(patch)], check=True)
    return str(folder)


def test_token_counts_stay_right_where_verl_has_mended_them(patched: str) -> None:
    runs = {name: RUNS[name] for name in ("token_mean, per token",)}
    report = Report(use, train, (patched,) * 2, PER_TOKEN, runs, batch=(STEP,), adapt=adapt)
    report.compare("CP 2", 2)
    assert report.failures == []


def test_verls_unit_tests_pass(patched: str) -> None:
    names = ("trainer/ppo/test_padding_column", "workers/test_megatron_routed_num_tokens")
    files = [f"tests/{name}_on_cpu.py" for name in names]
    assert run_host_ranks(run_tests, 1, use, patched, *files) == [0]


IMPORTS = {
    "an old registry": "HostError: verl must be 0.9.0 or later",
    "--loss-aggregation mean": "OptionError: unknown mode 'mean'",
    flags("microbatch_mean"): "OptionError: --loss-aggregation must group tokens by sample or prom",
    flags("dataset_mean"): "OptionError: --loss-aggregation must group tokens by sample or prompt",
}
"""Flags, and the error of the adapter's import."""


def passed_on(package: str) -> dict[str, bool]:
    """For each method of an engine without the variable, whether verl's gets the same objects."""
    use(package)
    os.environ[VARIABLE] = ""
    importlib.import_module(ADAPTER)
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.base import BaseEngine
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

    engine: Any = object.__new__(EngineRegistry.get_engine_cls("language_model", "megatron"))
    engine.engine_config = Namespace(dynamic_context_parallel=False)
    calls = {
        "train_batch": (BaseEngine, ({}, print)),
        "forward_backward_batch": (MegatronEngineWithLMHead, ({}, print, False)),
        "postprocess_micro_batch_func": (MegatronEngineWithLMHead, (object(), {}, False, print)),
    }
    return {
        name: is_passed_on(owner, name, getattr(engine, name), *args)
        for name, (owner, args) in calls.items()
    }


def test_without_the_variable_verls_functions_get_the_same_objects() -> None:
    ((found),) = run_host_ranks(passed_on, 1, str(PEERS))
    assert found and all(found.values()), found


def failed_imports() -> list[str]:
    from verl.workers.engine import EngineRegistry

    register = EngineRegistry.register
    said = []
    for given in IMPORTS:
        os.environ[VARIABLE] = given if given.startswith("--") else ""
        if not given.startswith("--"):  # it knows no vendors
            EngineRegistry.register = lambda model_type, backend, device="cuda": None  # type: ignore[method-assign]
        said.append(str(attempt(importlib.import_module, ADAPTER)))
        EngineRegistry.register = register  # type: ignore[method-assign]
    os.environ[VARIABLE] = ""
    return said


def configured(package: str) -> tuple[dict[str, str], set[str]]:
    """Ray's variables and the modes in the configuration that `SETTINGS` give."""
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    settings = importlib.import_module(ADAPTER).SETTINGS
    given = ["model_engine=megatron", *shlex.split(settings)]
    with initialize_config_dir(f"{package}/verl/trainer/config", version_base=None):
        config = compose("ppo_trainer", overrides=given)
    OmegaConf.resolve(config)
    modes = {config.actor_rollout_ref.actor.loss_agg_mode, config.critic.loss_agg_mode}
    return dict(config.ray_kwargs.ray_init.runtime_env.env_vars), modes


def started() -> dict[str, str]:
    """The errors of engines as they start, and the output of a critic's first step."""
    from verl.workers.config import EngineConfig, McoreEngineConfig
    from verl.workers.engine import EngineRegistry

    configs = {"fsdp": EngineConfig(), "fsdp, forward only": EngineConfig(forward_only=True)}
    said = {}
    os.environ[VARIABLE] = flags("prompt_mean")
    for name, config in configs.items():
        kind = EngineRegistry.get_engine_cls("language_model", "fsdp")
        engine: Any = object.__new__(kind)
        engine.engine_config = config
        said[name] = str(attempt(engine.initialize))
    engine = object.__new__(EngineRegistry.get_engine_cls("language_model", "megatron"))
    engine.engine_config = McoreEngineConfig(
        dynamic_context_parallel=True, max_seqlen_per_dp_cp_rank=TOKENS_OF_RANK
    )
    said["dynamic"] = str(attempt(engine._init_device_mesh))
    gpt.initialize()
    zeros = [torch.zeros(len(answer.mask)) for answer in STEP]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        train([LogProbs(zeros, zeros)], None, **VALUE)
    return {**said, "printed": printed.getvalue()}


def before_training(package: str) -> tuple[Any, ...]:
    use(package)
    return failed_imports(), configured(package), started()


@pytest.fixture(scope="session")
def seen() -> tuple[Any, ...]:
    """The results of `before_training` on one rank."""
    return run_host_ranks(before_training, 1, str(PEERS))[0]  # type: ignore[no-any-return]


def test_an_older_verl_and_wrong_flags_are_refused_as_verl_starts(seen: tuple[Any, ...]) -> None:
    for said, words in zip(seen[0], IMPORTS.values(), strict=True):
        assert said.startswith(words)


def test_the_settings_of_the_page_hand_the_variables_to_ray(seen: tuple[Any, ...]) -> None:
    variables, modes = seen[1]
    wanted = {"VERL_USE_EXTERNAL_MODULES": ADAPTER, VARIABLE: flags("prompt_mean")}
    assert (variables, modes) == (wanted, {"token-mean"})


def test_other_engines_are_refused_at_the_start_and_the_first_step_is_announced(
    seen: tuple[Any, ...],
) -> None:
    said = seen[2]
    assert said["fsdp"].startswith("HostError: The engine must be Megatron's, got FSDPEngineWith")
    assert not said["fsdp, forward only"].startswith("HostError")
    assert (
        "==== loss aggregation of the critic: prompt_mean (rejected: skip) ===" in said["printed"]
    )


@pytest.mark.skipif(HAS_SCHEDULER, reason="this Megatron-Core has what verl needs")
def test_verl_says_which_megatron_its_dynamic_context_parallelism_needs(seen: Any) -> None:
    needs = (
        "RuntimeError: Dynamic CP requires a Megatron-Core build containing NVIDIA/Megatron-LM#5154"
    )
    assert seen[2]["dynamic"].startswith(needs)
