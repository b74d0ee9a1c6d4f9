"""verl's Megatron engine, worker and losses on a tiny GPT, and the same step by one fp64 process.

verl's own code is everything from `TrainingWorker.train_mini_batch` down: mini- and microbatches,
nested tensors, the forward pass with context parallelism, losses, and what the loss function
returns to Megatron. Stood in for are the objects that its constructors build from a checkpoint:
the model comes from `tests.host.gpt`, and the optimizer only keeps the gradient.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.frameworks.optimizer import KeepGradients
from tests.frameworks.patched import ROOT
from tests.frameworks.reference import (
    CLIP,
    ENTROPY,
    KL,
    Terms,
    grpo,
    references,
    text_of,
    token_values,
    total,
)
from tests.frameworks.verl_rows import PROMPTS, ROWS, columns, made_up, rows_of
from tests.host.reference import Reference
from tests.host.steps import sequences
from tests.peers.standins import use_peers

STANDINS = "ray transformers datasets accelerate peft pandas pydantic uvicorn fastapi"


class Case(NamedTuple):
    """One optimizer step."""

    flags: str | None = None  # of the plugin, in the environment
    options: tuple[tuple[str, Any], ...] = ()  # of the plugin, in verl's configuration
    mode: str = "token-mean"  # verl's own
    factor: float | None = None  # its divisor
    per_token: bool = False
    loss: str = "policy"  # or "value", or "distillation"
    loss_mode: str = "vanilla"
    config: tuple[tuple[str, Any], ...] = ()  # of the model
    without: str = "-"  # a column of the batch
    worker: str = "TrainingWorker"


class Step(NamedTuple):
    """What became of it, on this rank."""

    gradient: dict[str, Tensor]
    metrics: dict[str, float]
    microbatches: list[list[int]]  # lengths of the samples
    error: str | None = None


class _ValueHead(torch.nn.Linear):
    """What verl puts in place of the output layer for a critic."""

    def forward(self, hidden: Tensor, **_: Any) -> tuple[Tensor, None]:  # type: ignore[override]
        return super().forward(hidden), None


def build(dtype: torch.dtype, loss: str, per_token: bool = False, **config: Any) -> Any:
    from tests.host import gpt

    model = gpt.build(dtype, per_token, **config)
    if loss == "value":
        head = _ValueHead(model.config.hidden_size, 1, bias=False, dtype=dtype)
        head.weight.data = model.output_layer.weight.data[:1].clone()
        model.output_layer = head
    return model


def run_verl(package: str, cp: int, cases: Sequence[Case]) -> list[Step]:
    """Every case with verl from the folder ``package``, on this rank."""
    import_verl(package)
    from tests.host import gpt

    gpt.initialize(cp)
    return [_run(case, cp) for case in cases]


def import_verl(package: str) -> None:
    """Let this process import verl from the folder ``package``, and what it needs."""
    use_peers(STANDINS)
    sys.path.insert(1, package)
    logging.Logger.warning_once = logging.Logger.debug  # type: ignore[attr-defined]  # transformers'


def _run(case: Case, cp: int) -> Step:
    from megatron.core import parallel_state
    from verl.utils import tensordict_utils as tu

    worker = _worker(case, cp)
    rank, ranks = parallel_state.get_data_parallel_rank(), 2 // cp
    data = tu.get_tensordict(columns(rows_of(rank, ranks)))
    tu.pop(data, case.without)
    tu.assign_non_tensor(
        data,
        temperature=1.0,
        calculate_entropy=case.loss == "policy",
        global_batch_size=ROWS,
        mini_batch_size=ROWS,
    )
    if case.flags is not None:
        os.environ["MEGATRON_LOSS_AGG_FLAGS"] = case.flags
    lengths: list[list[int]] = []
    try:
        with _recorded(worker.engine, lengths):
            train = {"TrainingWorker": "train_mini_batch"}.get(case.worker, "forward_backward")
            output = getattr(worker, train)(data)
    except Exception as error:
        return Step({}, {}, lengths, f"{type(error).__name__}: {error}")
    finally:
        os.environ.pop("MEGATRON_LOSS_AGG_FLAGS", None)
    from verl.utils.metric import reduce_metrics

    metrics = {} if output is None else reduce_metrics(tu.get(output, "metrics"))
    (gradient,) = worker.engine.optimizer.gradients
    return Step(gradient, metrics, lengths)


@contextlib.contextmanager
def _recorded(engine: Any, lengths: list[list[int]]) -> Iterator[None]:
    """Note the samples of every microbatch."""
    inner: Callable[..., Any] = engine.prepare_model_inputs

    def prepare(batch: Any) -> Any:
        lengths.append(batch["input_ids"].offsets().diff().tolist())
        return inner(batch)

    engine.prepare_model_inputs = prepare
    yield


def _worker(case: Case, cp: int) -> Any:
    """verl's worker and engine, with what their constructors would have made."""
    from verl.utils.profiler import DistProfiler
    from verl.workers.config import McoreEngineConfig
    from verl.workers.engine.megatron import transformer_impl
    from verl.workers.engine_workers import TrainingWorker
    from verl.workers.engine_workers_tinker import TinkerTrainingWorker

    from tests.host import gpt

    kind = "WithValueHead" if case.loss == "value" else "WithLMHead"
    engine = object.__new__(getattr(transformer_impl, f"MegatronEngine{kind}"))
    model = gpt.data_parallel(build(torch.float32, case.loss, case.per_token, **dict(case.config)))
    engine.module, engine.tf_config, engine.optimizer = [model], model.config, KeepGradients(model)
    engine.engine_config = McoreEngineConfig(
        context_parallel_size=cp,
        use_dynamic_bsz=True,
        max_token_len_per_gpu=26 // cp,
        **({"loss_aggregation": dict(case.options)} if case.options else {}),
    )
    engine.model_config = SimpleNamespace(
        mtp=SimpleNamespace(enable=False, enable_train=False),
        hf_config=SimpleNamespace(architectures=["LlamaForCausalLM"]),
        tokenizer=SimpleNamespace(pad_token_id=0),
        get={"use_remove_padding": True}.get,
    )
    # The batch lies on the CPU, and the sum over ranks on the GPU: there, verl sums a copy.
    routed = engine._routed_num_tokens
    engine._routed_num_tokens = lambda data: routed(data).clone()
    engine.enable_routing_replay, engine.lr_scheduler = False, SimpleNamespace(step=id)
    engine._is_offload_param = engine._is_offload_optimizer = False
    classes = (TrainingWorker, TinkerTrainingWorker)
    worker: Any = object.__new__({cls.__name__: cls for cls in classes}[case.worker])
    worker.engine, worker.engine_config = engine, engine.engine_config
    worker.model_config, worker.flops_counter, worker.device_name = engine.model_config, None, "cpu"
    worker.profiler = DistProfiler(rank=0, config=None)
    worker.loss_fn = _loss_function(case)
    return worker


def _loss_function(case: Case) -> Callable[..., Any]:
    from verl.workers.config import ActorConfig, CriticConfig, PolicyLossConfig
    from verl.workers.utils.losses import ppo_loss, value_loss

    if case.loss == "value":
        critic = CriticConfig(
            strategy="megatron", loss_agg_mode=case.mode, cliprange_value=CLIP, use_dynamic_bsz=True
        )
        return partial(value_loss, config=critic)
    actor = ActorConfig(
        strategy="megatron",
        rollout_n=1,
        use_dynamic_bsz=True,
        loss_agg_mode=case.mode,
        loss_scale_factor=case.factor,
        clip_ratio=CLIP,
        policy_loss=PolicyLossConfig(loss_mode=case.loss_mode),
        use_kl_loss=True,
        kl_loss_coef=KL,
        kl_loss_type="low_var_kl",
        entropy_coeff=ENTROPY,
    )
    if case.loss == "distillation":
        from verl.trainer.distillation.losses import distillation_ppo_loss
        from verl.workers.config.distillation import DistillationLossConfig

        options = {"use_task_rewards": False, "use_policy_gradient": False}
        teacher = SimpleNamespace(distillation_loss=DistillationLossConfig("k3", **options))
        return partial(distillation_ppo_loss, config=actor, distillation_config=teacher)
    return partial(ppo_loss, config=actor)


def start_engines(package: str, flags: str | None) -> dict[str, str]:
    """By engine, what a start of it without a model says."""
    import_verl(package)
    from verl.workers.config import EngineConfig
    from verl.workers.engine.base import EngineRegistry

    os.environ["VERL_ENGINE_DEVICE"] = "cuda"
    if flags is not None:
        os.environ["MEGATRON_LOSS_AGG_FLAGS"] = flags
    said = {}
    for kind, backends in EngineRegistry._engines.items():
        for backend in backends:
            try:
                EngineRegistry.new(kind, backend, engine_config=EngineConfig())
            except Exception as error:
                name = EngineRegistry.get_engine_cls(kind, backend).__name__
                said[name] = f"{type(error).__name__}: {error}"
    return said


def configured(package: str, overrides: Sequence[str]) -> list[Any]:
    """The aggregations of actor, critic and reference model, of verl's configuration files."""
    import_verl(package)
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf
    from verl.utils.config import omega_conf_to_dataclass

    with initialize_config_dir(f"{package}/verl/trainer/config", version_base=None):
        overrides = ["model_engine=megatron", "actor_rollout_ref.model.path=none", *overrides]
        config = compose("ppo_trainer", overrides=list(overrides))
    OmegaConf.resolve(config)
    roles = config.actor_rollout_ref.actor, config.critic, config.actor_rollout_ref.ref
    return [dict(omega_conf_to_dataclass(role.megatron).loss_aggregation) for role in roles]


_PYTEST = """
import sys
import megatron.core
from tests.frameworks.verl_ranks import import_verl
folder, *files = sys.argv[1:]
import_verl(folder)
for name in [x for x in sys.modules if x.partition(".")[0] == "tests"]:
    del sys.modules[name]  # verl's are of that name, too
import pytest
options = ["-q", "-c", "/dev/null", "--rootdir", folder, "--import-mode", "importlib"]
sys.exit(pytest.main([*options, "-p", "no:cacheprovider", *(f"{folder}/{x}" for x in files)]))
"""


def run_unit_tests(folder: Path, *files: str) -> str:
    """Run verl's own test files in ``folder``; returns what pytest printed."""
    command = [sys.executable, "-W", "ignore", "-c", _PYTEST, str(folder), *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.stdout + done.stderr


def reference(loss: str) -> dict[str, Reference]:
    """By term of the loss, and of every sample but padding."""
    from tests.host import gpt

    gpt.initialize()
    model = build(torch.float64, loss)
    return references(model, (_token_terms(model, loss, i) for i in range(len(PROMPTS))))


def _token_terms(model: Any, loss: str, i: int) -> Terms:
    sequence, data = sequences()[i], {k: v.double() for k, v in made_up(i).items()}
    if loss == "value":
        positions = torch.arange(len(sequence.tokens)).unsqueeze(0)
        value = model(sequence.tokens.unsqueeze(0), positions, None).flatten()
        old, returns = data["values"], data["returns"]
        near = old + (value - old).clamp(-CLIP, CLIP)
        return {"loss": 0.5 * torch.maximum((value - returns) ** 2, (near - returns) ** 2)}
    values, a = token_values(model, text_of(sequence), 1), data["advantages"]
    terms = grpo(*values, data["old_log_probs"], data["ref_log_prob"], a)
    policy, kl = terms["policy"], terms["kl"].clamp(max=10)  # as verl does
    terms |= {"policy": torch.where(a < 0, policy.minimum(-3.0 * a), policy), "kl": kl}  # dual clip
    return {**terms, "loss": kl if loss == "distillation" else total(terms)}
