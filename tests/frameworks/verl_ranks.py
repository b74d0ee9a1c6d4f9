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
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.frameworks.verl_rows import PROMPTS, ROWS, columns, made_up, rows_of
from tests.host import reference as host
from tests.host.steps import Weights, sequences
from tests.peers.standins import use_peers

KL, ENTROPY, CLIP = 0.3, 0.1, 0.2
COEFFICIENTS = {
    "policy": {"pg": 1.0, "kl": KL, "entropy": -ENTROPY},
    "distillation": {"kl": 1.0},
    "value": {"value": 1.0},
}
STANDINS = "ray transformers datasets accelerate peft pandas pydantic uvicorn fastapi"


class Case(NamedTuple):
    """One optimizer step."""

    flags: str | None = None  # of the plugin
    mode: str = "token-mean"  # verl's own
    factor: float | None = None  # its divisor
    per_token: bool = False
    loss: str = "policy"  # or "value", or "distillation"
    loss_mode: str = "vanilla"
    config: tuple[tuple[str, Any], ...] = ()  # of the model
    data: tuple[tuple[str, Any], ...] = ()  # that the worker is told besides
    without: str = "-"  # a column of the batch


class Step(NamedTuple):
    """What became of it, on this rank."""

    gradient: dict[str, Tensor]
    metrics: dict[str, float]
    microbatches: list[list[int]]  # lengths of the samples
    error: str | None = None


class _Optimizer:
    """Keeps the gradient that verl would step with."""

    def __init__(self, model: Any) -> None:
        self.model, self.gradient = model, {}
        self.param_groups: list[dict[str, float]] = [{"lr": 0.0}]

    def zero_grad(self) -> None: ...

    def step(self) -> tuple[bool, float, int]:
        parameters = self.model.module.named_parameters()
        self.gradient = {name: p.main_grad.clone() for name, p in parameters}
        return True, 0.0, 0


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
        **dict(case.data),
    )
    if case.flags is not None:
        os.environ["MEGATRON_LOSS_AGG_FLAGS"] = case.flags
    lengths: list[list[int]] = []
    try:
        with _recorded(worker.engine, lengths):
            output = worker.train_mini_batch(data)
    except Exception as error:
        return Step({}, {}, lengths, f"{type(error).__name__}: {error}")
    finally:
        os.environ.pop("MEGATRON_LOSS_AGG_FLAGS", None)
    from verl.utils.metric import reduce_metrics

    metrics = {} if output is None else reduce_metrics(tu.get(output, "metrics"))
    return Step(worker.engine.optimizer.gradient, metrics, lengths)


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

    from tests.host import gpt

    kind = "WithValueHead" if case.loss == "value" else "WithLMHead"
    engine = object.__new__(getattr(transformer_impl, f"MegatronEngine{kind}"))
    model = gpt.data_parallel(build(torch.float32, case.loss, case.per_token, **dict(case.config)))
    engine.module, engine.tf_config, engine.optimizer = [model], model.config, _Optimizer(model)
    engine.engine_config = McoreEngineConfig(
        context_parallel_size=cp, use_dynamic_bsz=True, max_token_len_per_gpu=26 // cp
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
    worker = object.__new__(TrainingWorker)
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


class Reference(NamedTuple):
    """One process and fp64, of every sample."""

    terms: list[dict[str, Tensor]]  # of every token, without their coefficients
    total: host.Reference  # their sum with coefficients

    def mean(self, name: str, weights: Weights) -> float:
        """``sum w * term``."""
        return sum(float(torch.tensor(w).double() @ self.terms[i][name]) for i, w in weights)


def reference(loss: str) -> Reference:
    from tests.host import gpt

    gpt.initialize()
    model = build(torch.float64, loss)
    names, parameters = zip(*model.named_parameters(), strict=True)
    coefficients = COEFFICIENTS[loss]
    terms, losses, gradients = [], [], []
    for i in range(len(PROMPTS)):
        of_sample = _token_terms(model, loss, i)
        total = sum(factor * of_sample[name] for name, factor in coefficients.items())
        rows = [torch.autograd.grad(x, parameters, retain_graph=True) for x in total]
        columns = zip(*rows, strict=True)
        gradients.append({n: torch.stack(c) for n, c in zip(names, columns, strict=True)})
        losses.append(total.detach())
        terms.append({name: value.detach() for name, value in of_sample.items()})
    return Reference(terms, host.Reference(losses, gradients))


def _token_terms(model: Any, loss: str, i: int) -> dict[str, Tensor]:
    """fp64 [tokens] of sample ``i``, alone and unpadded."""
    sequence, data = sequences()[i], {k: v.double() for k, v in made_up(i).items()}
    positions = torch.arange(len(sequence.tokens)).unsqueeze(0)
    output = model(sequence.tokens.unsqueeze(0), positions, None).squeeze(0)
    if loss == "value":
        value, old, returns = output.squeeze(-1), data["values"], data["returns"]
        near = old + (value - old).clamp(-CLIP, CLIP)
        return {"value": 0.5 * torch.maximum((value - returns) ** 2, (near - returns) ** 2)}
    normal = F.log_softmax(output, dim=-1)
    new = normal.gather(-1, sequence.labels.unsqueeze(-1)).squeeze(-1)
    a, ratio = data["advantages"], (new - data["old_log_probs"]).exp()
    clipped = torch.maximum(-a * ratio, -a * ratio.clamp(1 - CLIP, 1 + CLIP))
    log_r = data["ref_log_prob"] - new
    return {
        "pg": torch.where(a < 0, torch.minimum(-a * 3.0, clipped), clipped),  # 3: dual clip
        "kl": (log_r.exp() - 1 - log_r).clamp(max=10),  # as verl does
        "entropy": -(normal.exp() * normal).sum(-1),
    }
