"""A whole training step and log-probabilities on the real Megatron-Core, in one CPU process."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.hook import loss_func
from benchmarks.memory import LiveBytes
from benchmarks.results import Results
from benchmarks.shapes import (
    AGGREGATIONS,
    LOGITS,
    MODEL,
    ROW,
    ROWS,
    SEED,
    STEP_MICROBATCHES,
    VOCABULARY,
)

Batch = dict[str, Tensor]


def measure(results: Results) -> None:
    """Turns the CPU stand-in for a GPU on, for good: it slows every call of torch down."""
    from megatron_loss_agg.mcore import cpu

    cpu.enable()
    from megatron.core import parallel_state, tensor_parallel

    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(SEED)
    torch.manual_seed(SEED)
    _training_step(results)
    _log_probs(results)
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def _training_step(results: Results) -> None:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_loss_agg.mcore import LossHook

    ddp, stock = build(), get_forward_backward_func()
    data = _batches()
    names = ("token_mean", "prompt_mean")
    hooked = {name: LossHook(AGGREGATIONS[name]).wrap(stock) for name in names}
    steps = {name: functools.partial(_step, f, ddp, data) for name, f in hooked.items()}
    run = functools.partial(_step, stock, ddp, data)
    for step in (run, *steps.values()):
        step()
        step()
    taken: list[float] = []
    found: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(12):
        before = _cpu_seconds(run)
        after = {name: _cpu_seconds(step) for name, step in steps.items()}
        base = (before + _cpu_seconds(run)) / 2  # on both sides, so that a drift cancels
        taken.append(base)
        for name, seconds in after.items():
            found[name].append(seconds / base)
    where = f"GPT {MODEL['num_layers']} x {MODEL['hidden_size']}, {STEP_MICROBATCHES} microbatches"
    results.add("stock step", where, statistics.median(taken), "s")
    for name, rs in found.items():
        results.add(f"step with {name}", where, statistics.median(rs), "x stock", "step")


def _cpu_seconds(function: Callable[[], object]) -> float:
    begin = time.process_time()
    function()
    return time.process_time() - begin


def build() -> Any:
    """A GPT in Megatron's DDP."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        **MODEL,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        finalize_model_grads_func=finalize_model_grads,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=ROW,
        position_embedding_type="rope",
    )
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=False)
    return DistributedDataParallel(config, settings, model)


def _batches() -> list[Batch]:
    generator = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(
        VOCABULARY, (STEP_MICROBATCHES, ROWS, ROW + 1), generator=generator
    ).unbind()
    first = torch.randint(ROW // 2, (STEP_MICROBATCHES, ROWS, 1), generator=generator)
    masks = (torch.arange(ROW) >= first).float().unbind()
    ids = torch.zeros(ROWS, dtype=torch.int64)
    return [
        {"tokens": t, "loss_mask": m, "prompt_ids": ids} for t, m in zip(tokens, masks, strict=True)
    ]


def _step(forward_backward: Callable[..., Any], ddp: Any, data: list[Batch]) -> None:
    ddp.zero_grad_buffer()
    forward_backward(
        forward_step_func=forward_step,
        data_iterator=iter(data),
        model=[ddp],
        num_microbatches=len(data),
        seq_length=ROW,
        micro_batch_size=ROWS,
        forward_only=False,
    )


def forward_step(data_iterator: Iterator[Batch], model: Any) -> tuple[Tensor, Any]:
    """As in Megatron's own scripts: the model computes the losses."""
    batch = next(data_iterator)
    tokens, labels = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
    later = torch.ones(1, 1, ROW, ROW, dtype=torch.bool).triu(1)
    losses = model(tokens, torch.arange(ROW).expand_as(tokens), later, labels=labels)
    return losses, functools.partial(loss_func, batch["loss_mask"])


def _log_probs(results: Results) -> None:
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    from megatron_loss_agg.mcore.logprobs import vocab_parallel_log_probs

    tokens, vocabulary = LOGITS
    labels = torch.randint(vocabulary, (tokens, 1))

    def peak(function: Callable[[Tensor, Tensor], Tensor]) -> int:
        leaf = torch.randn(tokens, 1, vocabulary, requires_grad=True)
        with LiveBytes() as counted:
            function(leaf * 1.0, labels).sum().backward()
        return counted.peak

    ours, theirs = peak(vocab_parallel_log_probs), peak(vocab_parallel_cross_entropy)
    where = f"{tokens} tokens, vocabulary {vocabulary}"
    ratio = ours / theirs
    results.add("peak memory of the log-probs", where, ratio, "x Megatron's", "log_probs_memory")
