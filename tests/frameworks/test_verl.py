"""verl's own step, with and without the patches, which the commands of its page apply to a copy.

verl's own code is everything from `TrainingWorker.train_mini_batch` down: mini- and microbatches,
nested tensors, the forward pass with context parallelism, losses, and what the loss function
returns to Megatron. Stood in for are the objects that its constructors build from a checkpoint:
the model comes from `tests.host.gpt`, and the optimizer only keeps the gradient.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import shutil
import subprocess
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
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
    page,
    patched_copy,
    run_tests,
    use_framework,
)
from tests.frameworks.report import (
    MODES,
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
from tests.peers.standins import PEERS

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
PAIRS = (((0, 1), (2, 3), (4, 5), (6, 7), (8, 9), ()),)  # the last is of padding
METRICS = {"actor/pg_loss": "pg_loss", "actor/entropy_loss": "entropy_loss"}
"""verl's names, and those of `with_entropy`; others are the same."""
DEFAULTS = {
    "loss_agg_mode": "token-mean",  # verl's own
    "loss_scale_factor": None,  # its divisor
    "by_tokens": True,  # or microbatches are pairs
    "per_token": False,
    "loss": "policy",  # or "value", or "distillation"
    "config": {},  # of the model
    "worker": "TrainingWorker",
}


def rows(log_probs: LogProbs) -> list[dict[str, Any]]:
    """The samples and padding, as verl's agent loop writes them down."""
    found = []
    padding = [(answer, torch.zeros(1), torch.zeros(1)) for answer in PADDING]
    for answer, old, ref in [*zip(STEP, *log_probs, strict=True), *padding]:
        tokens, mask, start = answer.tokens(), torch.tensor(answer.mask), answer.prompt_length
        # Where tokens are predicted. Near the policy there would be no digits left of the KL term.
        teacher = F.pad(ref - TEACHER, (start - 1, 1))
        row = {
            "uid": f"prompt {answer.prompt}",
            "session_id": answer.rollout % 10,
            "is_padding": torch.tensor(answer in PADDING),
            **{"prompts": tokens[:start], "responses": tokens[start:]},
            **{"input_ids": tokens, "position_ids": torch.arange(len(tokens))},
            **{"response_mask": mask, "loss_mask": mask},
            "advantages": torch.full_like(old, answer.reward),
            **{"old_log_probs": old, "ref_log_prob": ref, "values": old, "returns": ref},
            "teacher_logprobs": teacher.unsqueeze(-1),
        }
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


def train(log_probs: list[LogProbs], key: Any, **changed: Any) -> list[Step]:
    from megatron.core import parallel_state
    from verl.utils import tensordict_utils as tu
    from verl.utils.metric import reduce_metrics

    options = Namespace(**{**DEFAULTS, **changed})
    worker = _worker(options, key)
    each = ROWS // parallel_state.get_data_parallel_world_size()  # the last rank has the padding
    first = parallel_state.get_data_parallel_rank() * each
    data = tu.get_tensordict(columns(rows(log_probs[0])[first : first + each]))
    sizes = {"global_batch_size": ROWS, "mini_batch_size": ROWS}
    entropy = options.loss == "policy"
    tu.assign_non_tensor(data, temperature=1.0, calculate_entropy=entropy, **sizes)
    tinker = options.worker == "TinkerTrainingWorker"
    output = (worker.forward_backward if tinker else worker.train_mini_batch)(data)
    found = {} if output is None else reduce_metrics(tu.get(output, "metrics"))
    metrics = {METRICS.get(k, k): x for k, x in found.items() if not k.startswith("perf/")}
    (gradient,) = worker.engine.optimizer.gradients
    return [Step(gradient, metrics)]


class _ValueHead(torch.nn.Linear):
    """What verl puts in place of a critic's output layer: here the entropy is the value."""

    def forward(self, hidden: Tensor, **_: Any) -> tuple[Tensor, None]:  # type: ignore[override]
        log_p = super().forward(hidden).log_softmax(-1)
        return -(log_p.exp() * log_p).sum(-1, keepdim=True), None


def _worker(options: Namespace, key: dict[str, Any]) -> Any:
    """verl's worker and engine, with what their constructors would have made."""
    from megatron.core import parallel_state
    from verl.utils.profiler import DistProfiler
    from verl.workers.config import McoreEngineConfig
    from verl.workers.engine.megatron import transformer_impl
    from verl.workers.engine_workers import TrainingWorker
    from verl.workers.engine_workers_tinker import TinkerTrainingWorker

    cp = parallel_state.get_context_parallel_world_size()
    plain = gpt.build(torch.float32, options.per_token, **options.config)
    kind = "LM"
    if options.loss == "value":
        kind, weight = "Value", plain.output_layer.weight
        plain.output_layer = _ValueHead(*reversed(weight.shape), bias=False)
        plain.output_layer.weight = weight
    model = gpt.data_parallel(plain)
    engine = object.__new__(getattr(transformer_impl, f"MegatronEngineWith{kind}Head"))
    engine.module, engine.tf_config, engine.optimizer = [model], model.config, KeepGradients(model)
    engine.engine_config = McoreEngineConfig(
        context_parallel_size=cp,
        use_dynamic_bsz=options.by_tokens,
        micro_batch_size_per_gpu=2,
        max_token_len_per_gpu=26 // cp,
        **({"loss_aggregation": key} if key else {}),
    )
    engine.model_config = Namespace(
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
    from verl.workers.config import ActorConfig, CriticConfig
    from verl.workers.config.distillation import DistillationLossConfig
    from verl.workers.utils.losses import ppo_loss, value_loss

    common = {
        "strategy": "megatron",
        "loss_agg_mode": options.loss_agg_mode,
        "use_dynamic_bsz": True,
    }
    if options.loss == "value":
        return partial(value_loss, config=CriticConfig(cliprange_value=CLIP, **common))
    actor = ActorConfig(
        rollout_n=1,
        loss_scale_factor=options.loss_scale_factor,
        clip_ratio=CLIP,
        use_kl_loss=True,
        kl_loss_coef=KL,
        kl_loss_type="low_var_kl",
        entropy_coeff=ENTROPY,
        **common,
    )
    if options.loss == "distillation":
        of_teacher = {"use_task_rewards": False, "use_policy_gradient": False}
        teacher = Namespace(distillation_loss=DistillationLossConfig("k3", **of_teacher))
        return partial(distillation_ppo_loss, config=actor, distillation_config=teacher)
    return partial(ppo_loss, config=actor)


def distilled(lp: Tensor, entropy: Tensor, old: Tensor, ref: Tensor, reward: float) -> Terms:
    return {"loss": grpo(lp, entropy, old, ref - TEACHER, reward)["kl_loss"]}


def value(lp: Tensor, entropy: Tensor, old: Tensor, ref: Tensor, reward: float) -> Terms:
    near = old + (entropy - old).clamp(-CLIP, CLIP)
    return {"loss": 0.5 * ((entropy - ref) ** 2).maximum((near - ref) ** 2)}


exact = partial(exact_over, batch=(STEP,))
stock = partial(exact, given="")
SHARE = len(STEP) / ROWS  # of a mean over samples, in which padding counts


def own(preset: str) -> Run:
    """verl's mode of that name."""
    name, mode = preset.partition("/")[2], PRESETS[preset].mode
    factor = DIVISOR if PRESETS[preset].needs_divisor else None
    run = stock(with_entropy, mode, loss_agg_mode=name, loss_scale_factor=factor)
    return run if mode in ("token_mean", "sum") else reweighed(run, lambda _: SHARE)


ROUTED = {**MOE, "moe_router_load_balancing_type": "aux_loss"}
AUXILIARY = {
    f"auxiliary {x}": {"per_token": True, "config": {**ROUTED, "moe_aux_loss_coeff": x}}
    for x in (0.0, 1.0)
}
DISTILLED, VALUE = {"loss": "distillation"}, {"loss": "value"}
OWN: Runs = {
    **{name: own(name) for name in presets_of("verl")},
    "token mean, per token": stock(with_entropy, "token_mean", per_token=True),
    "distillation": stock(distilled, "token_mean", **DISTILLED),
    "value": stock(value, "token_mean", **VALUE),
    **{name: Run(options=options) for name, options in AUXILIARY.items()},
}
SPLIT = "NotImplementedError: loss_aggregation needs all micro-batches of an optimizer step"
CUSTOM = "--loss-aggregation custom --loss-aggregation-function tests.sweep.data:sixty_fourth"
CONFIGURED = {"configured": True}  # an aggregation of ours, by verl's configuration
RUNS: Runs = {
    **{mode: exact(with_entropy, mode) for mode in MODES},
    "microbatch_mean": exact(
        with_entropy, "microbatch_mean", places=lambda _: PAIRS, by_tokens=False
    ),
    **{
        f"{mode}, configured": exact(with_entropy, mode, per_token=True, **CONFIGURED)
        for mode in MODES
    },
    "sample_mean, padding counts": reweighed(
        exact(with_entropy, "sample_mean", "count", **CONFIGURED), lambda _: SHARE
    ),
    "sample_mean, without empty ones": exact(
        with_entropy, "sample_mean", empty="skip", **CONFIGURED
    ),
    "custom": reweighed(exact(with_entropy, "sum", given=CUSTOM), lambda _: 1 / 64),
    "prompt_mean, distillation": exact(distilled, "prompt_mean", **DISTILLED),
    "prompt_mean, value": exact(value, "prompt_mean", **VALUE),
    SPLIT: Run(flags("token_mean"), {"worker": "TinkerTrainingWorker"}, refusal=SPLIT),
    **{name: Run(flags("sample_mean"), options) for name, options in AUXILIARY.items()},
}


@pytest.fixture(scope="session")
def patched(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a copy of verl, patched by the commands of the page."""
    folder = tmp_path_factory.mktemp("site-packages")
    assert "verl/0.9.1.patch fits and is not applied" in patched_copy("verl", folder)
    return str(folder)


@pytest.fixture(scope="session")
def compared(
    patched: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[str], tuple[Any, Any]]:
    """What failed; and all steps of two data-parallel ranks, of stock and of patched code.

    The stock code has the patch of token numbers, which mends a fault of its own.
    """
    mended = tmp_path_factory.mktemp("mended")
    shutil.copytree(PEERS / "verl", mended / "verl")
    patch = ROOT / "patches/verl-routed-tokens/0.9.1.patch"
    subprocess.run(["patch", "-p1", "-d", str(mended), "-i", str(patch)], check=True)
    report = Report(use, train, (str(mended), patched), OWN, RUNS, batch=(STEP,))
    steps = report.compare("DP 2", 1)
    report.compare("CP 2", 2)
    return report.failures, steps


def test_every_aggregation_is_exact_or_refused_and_without_one_no_bit_changes(
    compared: tuple[list[str], Any],
) -> None:
    failures, _ = compared
    assert failures == []


def test_auxiliary_losses_keep_verls_meaning(compared: tuple[Any, Any]) -> None:
    # verl returns the tokens that were routed as the number of tokens, which auxiliary losses are
    # scaled by. Their gradient is the same whatever the aggregation of the loss.
    _, steps = compared
    own, ours = ([of[name][0].gradient for name in AUXILIARY] for of in steps)
    assert relative_error(*own) > 1e-3
    assert relative_error(ours[0], own[0]) > 1e-2
    theirs, mine = (
        {name: g - without[name] for name, g in with_loss.items()}
        for without, with_loss in (own, ours)
    )
    assert relative_error(mine, theirs) < FP32


ENGINES = {
    ("fsdp", flags("prompt_mean")): "NotImplementedError: FSDPEngineWithLMHead (backend 'fsdp') ",
    ("megatron", "--loss-aggregation mean"): "OptionError: unknown mode 'mean'",
}


def start_engines(package: str) -> list[Any]:
    """What starts without a model say."""
    use(package)
    from verl.workers.config import EngineConfig
    from verl.workers.engine.base import EngineRegistry

    os.environ["VERL_ENGINE_DEVICE"] = "cuda"
    start = partial(EngineRegistry.new, "language_model", engine_config=EngineConfig())
    said = []
    for backend, given in ENGINES:
        os.environ[VARIABLE] = given
        said.append(attempt(partial(start, backend=backend)))
    return said


def test_other_engines_and_wrong_flags_are_refused_at_the_start(patched: str) -> None:
    said = run_host_ranks(start_engines, 1, patched)[0]
    for error, words in zip(said, ENGINES.values(), strict=True):
        assert error.startswith(words)


def configured(package: str, *overrides: list[str]) -> list[list[Any]]:
    """The aggregations of actor, critic and reference model, of verl's configuration files."""
    use(package)
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf
    from verl.utils.config import omega_conf_to_dataclass

    found, common = [], ["model_engine=megatron", "actor_rollout_ref.model.path=none"]
    with initialize_config_dir(f"{package}/verl/trainer/config", version_base=None):
        for given in overrides:
            config = compose("ppo_trainer", overrides=[*common, *given])
            OmegaConf.resolve(config)
            roles = config.actor_rollout_ref.actor, config.critic, config.actor_rollout_ref.ref
            megatrons = (omega_conf_to_dataclass(role.megatron) for role in roles)
            found.append([dict(megatron.loss_aggregation) for megatron in megatrons])
    return found


def test_the_configuration_has_a_key(patched: str) -> None:
    assert f'MEGATRON_LOSS_AGG_FLAGS="{flags("prompt_mean")}"' in page("verl")
    found = re.findall(r"^(\S*loss_aggregation\.\w+=\w+)", page("verl"), re.MULTILINE)
    assert len(found) == 2
    wanted, preset = {"mode": "constant", "divisor": 4096}, {"mode": "verl/seq-mean-token-mean"}
    assert f"`{preset['mode']}`" in page("verl")
    key = found[0].partition("=")[0]
    (seen,) = run_host_ranks(configured, 1, patched, found, [], [f"{key}={preset['mode']}"])
    assert seen == [[wanted, wanted, {}], [{}, {}, {}], [preset, preset, {}]]


def test_verls_unit_tests_pass(patched: str) -> None:
    names = ("loss_aggregation", "megatron_routed_num_tokens")
    files = [f"tests/workers/test_{name}_on_cpu.py" for name in names]
    assert run_host_ranks(run_tests, 1, use, patched, *files) == [0]
