"""verl's Megatron engine, worker and losses on a tiny GPT.

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
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_loss_agg.mcore.flags import VARIABLE
from tests.frameworks.checkout_report import LogProbs, Run, Steps, answers
from tests.frameworks.harness import CLIP, ENTROPY, KL, ROOT, KeepGradients, attempt
from tests.peers.standins import use_peers

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
PADDING = 2  # rows that verl adds, so that ranks get equally many
ROWS = len(STEP) + PADDING
METRICS = {"actor/pg_loss": "pg_loss", "actor/entropy_loss": "entropy_loss"}
"""verl's names, and those of `with_entropy`; others are the same."""
DEFAULTS = {
    "key": {},  # an aggregation of ours, by verl's configuration
    "mode": "token-mean",  # verl's own
    "factor": None,  # its divisor
    "per_token": False,
    "loss": "policy",  # or "value", or "distillation"
    "loss_mode": "vanilla",
    "config": {},  # of the model
    "without": "-",  # a column of the batch
    "worker": "TrainingWorker",
}


def rows(log_probs: LogProbs) -> list[dict[str, Any]]:
    """The samples and padding, as verl's agent loop writes them down."""
    found = []
    for answer, old, ref in zip(STEP, *log_probs, strict=True):
        data = {"old_log_probs": old, "ref_log_prob": ref, "values": old, "returns": ref}
        advantages, mask = torch.full_like(old, answer.reward), torch.tensor(answer.mask)
        data |= {"advantages": advantages, "loss_mask": mask}
        ids = {"uid": f"prompt {answer.prompt}", "session_id": answer.rollout % 10}
        found.append({**ids, **_row(answer.tokens(), answer.prompt_length, data, padding=False)})
    nothing = {name: torch.zeros_like(x[:1]) for name, x in data.items()}
    padding = {"uid": "pad0", **_row(torch.ones(5).long(), 4, nothing, padding=True)}
    return [*found, *({**padding, "session_id": i} for i in range(PADDING))]


def _row(tokens: Tensor, start: int, data: dict[str, Tensor], padding: bool) -> dict[str, Any]:
    # Where tokens are predicted. Near the policy there would be no digits left of the KL term.
    teacher = F.pad(data["ref_log_prob"] - TEACHER, (start - 1, 1))
    return {
        **data,
        "response_mask": data["loss_mask"],
        "is_padding": torch.tensor(padding),
        "teacher_logprobs": teacher.unsqueeze(-1),
        "prompts": tokens[:start],
        "responses": tokens[start:],
        "input_ids": tokens,
        "position_ids": torch.arange(len(tokens)),
    }


def columns(chosen: list[dict[str, Any]]) -> dict[str, Any]:
    """The batch of rows, ragged, as verl's workers get it."""
    found: dict[str, Any] = {name: [fields[name] for fields in chosen] for name in chosen[0]}
    for name, (first, *_) in found.items():
        if isinstance(first, Tensor) and first.dim():
            found[name] = torch.nested.as_nested_tensor(found[name], layout=torch.jagged)
        elif isinstance(first, Tensor):
            found[name] = torch.stack(found[name])
    return found


def import_verl(package: str) -> None:
    """Let this process import verl from the folder ``package``, and what it needs."""
    use_peers(STANDINS)
    sys.path.insert(1, package)
    logging.Logger.warning_once = logging.Logger.debug  # type: ignore[attr-defined]  # transformers'


def train(package: str, cp: int, runs: list[Run], log_probs: list[LogProbs]) -> list[Steps | str]:
    """On a rank; see `checkout_report.Train`."""
    import_verl(package)
    from tests.host import gpt

    gpt.initialize(cp)
    batch = rows(log_probs[0])
    return [attempt(_train, run, batch, cp) for run in runs]


def _train(run: Run, batch: list[dict[str, Any]], cp: int) -> Steps:
    from megatron.core import parallel_state
    from verl.utils import tensordict_utils as tu
    from verl.utils.metric import reduce_metrics

    os.environ[VARIABLE] = run.flags
    options = Namespace(**{**DEFAULTS, **run.options})
    worker = _worker(options, cp)
    each = ROWS // (2 // cp)  # the last rank has the padding
    first = parallel_state.get_data_parallel_rank() * each
    data = tu.get_tensordict(columns(batch[first : first + each]))
    tu.pop(data, options.without)
    sizes = {"global_batch_size": ROWS, "mini_batch_size": ROWS}
    entropy = options.loss == "policy"
    tu.assign_non_tensor(data, temperature=1.0, calculate_entropy=entropy, **sizes)
    lengths: list[list[int]] = []
    prepare = worker.engine.prepare_model_inputs

    def noted(microbatch: Any) -> Any:
        lengths.append(microbatch["input_ids"].offsets().diff().tolist())
        return prepare(microbatch)

    worker.engine.prepare_model_inputs = noted
    tinker = options.worker == "TinkerTrainingWorker"
    output = (worker.forward_backward if tinker else worker.train_mini_batch)(data)
    found = {} if output is None else reduce_metrics(tu.get(output, "metrics"))
    metrics = {METRICS.get(k, k): x for k, x in found.items() if not k.startswith("perf/")}
    of_ranks: list[Any] = [None, None]
    torch.distributed.all_gather_object(of_ranks, lengths)
    (gradient,) = worker.engine.optimizer.gradients
    return [(gradient, {**metrics, "microbatches": of_ranks[: 2 // cp]})]


class _ValueHead(torch.nn.Linear):
    """What verl puts in place of a critic's output layer: here the first of its logits."""

    def forward(self, hidden: Tensor, **_: Any) -> tuple[Tensor, None]:  # type: ignore[override]
        return super().forward(hidden)[..., :1], None


def _worker(options: Namespace, cp: int) -> Any:
    """verl's worker and engine, with what their constructors would have made."""
    from verl.utils.profiler import DistProfiler
    from verl.workers.config import McoreEngineConfig
    from verl.workers.engine.megatron import transformer_impl
    from verl.workers.engine_workers import TrainingWorker
    from verl.workers.engine_workers_tinker import TinkerTrainingWorker

    from tests.host import gpt

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
        use_dynamic_bsz=True,
        max_token_len_per_gpu=26 // cp,
        **({"loss_aggregation": options.key} if options.key else {}),
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
    from verl.workers.config import ActorConfig, CriticConfig, PolicyLossConfig
    from verl.workers.utils.losses import ppo_loss, value_loss

    common = {"strategy": "megatron", "loss_agg_mode": options.mode, "use_dynamic_bsz": True}
    if options.loss == "value":
        return partial(value_loss, config=CriticConfig(cliprange_value=CLIP, **common))
    actor = ActorConfig(
        rollout_n=1,
        loss_scale_factor=options.factor,
        clip_ratio=CLIP,
        policy_loss=PolicyLossConfig(loss_mode=options.loss_mode),
        use_kl_loss=True,
        kl_loss_coef=KL,
        kl_loss_type="low_var_kl",
        entropy_coeff=ENTROPY,
        **common,
    )
    if options.loss == "distillation":
        from verl.trainer.distillation.losses import distillation_ppo_loss
        from verl.workers.config.distillation import DistillationLossConfig

        of_teacher = {"use_task_rewards": False, "use_policy_gradient": False}
        teacher = Namespace(distillation_loss=DistillationLossConfig("k3", **of_teacher))
        return partial(distillation_ppo_loss, config=actor, distillation_config=teacher)
    return partial(ppo_loss, config=actor)


def start_engines(package: str, flags: list[str]) -> list[dict[str, str]]:
    """By flags and engine, what a start of it without a model says."""
    import_verl(package)
    from verl.workers.config import EngineConfig
    from verl.workers.engine.base import EngineRegistry

    os.environ["VERL_ENGINE_DEVICE"] = "cuda"
    start, found = partial(EngineRegistry.new, engine_config=EngineConfig()), []
    for given in flags:
        os.environ[VARIABLE] = given
        found.append(
            {
                EngineRegistry.get_engine_cls(kind, backend).__name__: said
                for kind, backends in EngineRegistry._engines.items()
                for backend in backends
                if isinstance(said := attempt(start, kind, backend), str)
            }
        )
    return found


def configured(package: str, *overrides: list[str]) -> list[list[Any]]:
    """The aggregations of actor, critic and reference model, of verl's configuration files."""
    import_verl(package)
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
