"""verl's Megatron engine, worker and losses on a tiny GPT, and the same step by one fp64 process.

verl's own code is everything from `TrainingWorker.train_mini_batch` down: mini- and microbatches,
nested tensors, the forward pass with context parallelism, losses, and what the loss function
returns to Megatron. Stood in for are the objects that its constructors build from a checkpoint:
the model comes from `tests.host.gpt`, and the optimizer only keeps the gradient.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.frameworks.harness import (
    CLIP,
    ENTROPY,
    KL,
    ROOT,
    KeepGradients,
    Terms,
    attempt,
    grpo,
    references,
    text_of,
    token_values,
    total,
)
from tests.host.reference import Gradient, Reference
from tests.host.steps import sequences
from tests.peers.standins import use_peers

STANDINS = "ray transformers datasets accelerate peft pandas pydantic uvicorn fastapi"
VARIABLE = "MEGATRON_LOSS_AGG_FLAGS"
PROMPTS = ("ab", "ab", "c3", "d4", "ab", "c3", "d4", "e5", "e5", "c3")
SESSIONS = (0, 0, 0, 0, 1, 1, 1, 0, 1, 2)  # samples 0 and 1 are one rollout
PADDING = 2  # rows that verl adds, so that ranks get equally many
ROWS = len(PROMPTS) + PADDING


class Case(NamedTuple):
    """One optimizer step."""

    flags: str = ""  # of the plugin, in the environment
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

    gradient: Gradient
    metrics: dict[str, float]
    microbatches: list[list[int]]  # lengths of the samples


def made_up(i: int) -> dict[str, Tensor]:
    """What rollout and trainer leave for every token of sample ``i``'s answer, in fp32."""
    from tests.host.rl import data_of

    names = ("old_log_probs", "ref_log_prob", "advantages", "values", "returns")
    data = data_of(sequences()[i].tokens, sequences()[i].labels)
    return {name: value.float() for name, value in zip(names, data, strict=True)}


def row(i: int) -> dict[str, Any]:
    """Sample ``i``, or padding, as verl's agent loop writes it down."""
    fields: dict[str, Any] = {"uid": "pad0", "session_id": i}
    prompts, responses, mask = torch.ones(4).long(), torch.ones(1).long(), torch.zeros(1).long()
    tokens = {name: torch.zeros(1) for name in made_up(0)}
    if i < len(PROMPTS):
        text, tokens = sequences()[i], made_up(i)
        prompts, responses, mask = text.tokens[:1], text.labels, torch.tensor(text.sample.mask)
        fields = {"uid": PROMPTS[i], "session_id": SESSIONS[i]}
    whole, mask = torch.cat([prompts, responses]), mask.long()
    teacher = F.pad(tokens["ref_log_prob"], (len(prompts) - 1, 1))  # where tokens are predicted
    return {
        **fields,
        **tokens,
        "is_padding": torch.tensor(i >= len(PROMPTS)),
        "teacher_logprobs": teacher.unsqueeze(-1),
        "prompts": prompts,
        "responses": responses,
        "input_ids": whole,
        "position_ids": torch.arange(len(whole)),
        "response_mask": mask,
        "loss_mask": mask,
    }


def columns(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The batch of ``rows``, ragged, as verl's workers get it."""
    found: dict[str, Any] = {name: [fields[name] for fields in rows] for name in rows[0]}
    for name, (first, *_) in found.items():
        if isinstance(first, Tensor) and first.dim():
            found[name] = torch.nested.as_nested_tensor(found[name], layout=torch.jagged)
        elif isinstance(first, Tensor):
            found[name] = torch.stack(found[name])
    return found


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


def import_verl(package: str) -> None:
    """Let this process import verl from the folder ``package``, and what it needs."""
    use_peers(STANDINS)
    sys.path.insert(1, package)
    logging.Logger.warning_once = logging.Logger.debug  # type: ignore[attr-defined]  # transformers'


def train(package: str, cp: int, cases: Sequence[Case]) -> list[Step | str]:
    """Every case with verl from the folder ``package``, on this rank; or its error."""
    import_verl(package)
    from tests.host import gpt

    gpt.initialize(cp)
    return [attempt(_train, case, cp) for case in cases]


def _train(case: Case, cp: int) -> Step:
    from megatron.core import parallel_state
    from verl.utils import tensordict_utils as tu
    from verl.utils.metric import reduce_metrics

    os.environ[VARIABLE] = case.flags
    worker = _worker(case, cp)
    each = ROWS // (2 // cp)  # the last rank has the padding
    first = parallel_state.get_data_parallel_rank() * each
    data = tu.get_tensordict(columns([row(i) for i in range(first, first + each)]))
    tu.pop(data, case.without)
    sizes = {"global_batch_size": ROWS, "mini_batch_size": ROWS}
    entropy = case.loss == "policy"
    tu.assign_non_tensor(data, temperature=1.0, calculate_entropy=entropy, **sizes)
    lengths: list[list[int]] = []
    prepare = worker.engine.prepare_model_inputs

    def noted(batch: Any) -> Any:
        lengths.append(batch["input_ids"].offsets().diff().tolist())
        return prepare(batch)

    worker.engine.prepare_model_inputs = noted
    tinker = case.worker == "TinkerTrainingWorker"
    output = (worker.forward_backward if tinker else worker.train_mini_batch)(data)
    metrics = {} if output is None else reduce_metrics(tu.get(output, "metrics"))
    (gradient,) = worker.engine.optimizer.gradients
    return Step(gradient, metrics, lengths)


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

    common = {"strategy": "megatron", "loss_agg_mode": case.mode, "use_dynamic_bsz": True}
    if case.loss == "value":
        return partial(value_loss, config=CriticConfig(cliprange_value=CLIP, **common))
    actor = ActorConfig(
        rollout_n=1,
        loss_scale_factor=case.factor,
        clip_ratio=CLIP,
        policy_loss=PolicyLossConfig(loss_mode=case.loss_mode),
        use_kl_loss=True,
        kl_loss_coef=KL,
        kl_loss_type="low_var_kl",
        entropy_coeff=ENTROPY,
        **common,
    )
    if case.loss == "distillation":
        from verl.trainer.distillation.losses import distillation_ppo_loss
        from verl.workers.config.distillation import DistillationLossConfig

        options = {"use_task_rewards": False, "use_policy_gradient": False}
        teacher = SimpleNamespace(distillation_loss=DistillationLossConfig("k3", **options))
        return partial(distillation_ppo_loss, config=actor, distillation_config=teacher)
    return partial(ppo_loss, config=actor)


def start_engines(package: str, flags: str) -> dict[str, str]:
    """By engine, what a start of it without a model says."""
    import_verl(package)
    from verl.workers.config import EngineConfig
    from verl.workers.engine.base import EngineRegistry

    os.environ.update({"VERL_ENGINE_DEVICE": "cuda", VARIABLE: flags})
    start = partial(EngineRegistry.new, engine_config=EngineConfig())
    return {
        EngineRegistry.get_engine_cls(kind, backend).__name__: said
        for kind, backends in EngineRegistry._engines.items()
        for backend in backends
        if isinstance(said := attempt(start, kind, backend), str)
    }


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
from tests.frameworks.verl import import_verl
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
