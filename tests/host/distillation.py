"""Offline distillation with the host's own saver, loader and loss, and the same by hand in fp64.

For the ranks alone: the import needs the stand-ins for a GPU that `tests.host.preload` enables.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import num_microbatches_calculator as calculator
from megatron.core.models.gpt import GPTModel
from megatron.training import arguments, training
from megatron.training.distillation import LogitsSaverHooks, LossFuncCallable, StudentLogitsCapture
from megatron.training.global_vars import set_args
from torch import Tensor

from megatron_loss_agg.mcore.install import install
from tests.host import gpt
from tests.host.harness import Topology, build_chunks
from tests.host.reference import gradient_of
from tests.host.steps import Places, Weights, batches, sequences

TOP_K = 5
ALPHA = 0.3


def with_args(*flags: str) -> Any:
    """The host's parsed flags, set for the process."""
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser())
    parser.add_argument("--export-kd-teacher-load")  # as the scripts do
    args = parser.parse_known_args(["--seq-length", "72", "--train-iters", "1", *flags])[0]
    args.curr_iteration, args.data_path = 0, None
    set_args(args)
    return args


def teacher(**config: Any) -> GPTModel:
    """A model of other weights than the student's."""
    model = gpt.build(**config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    return model


def save_teacher(topology: Topology, places: Places, layout: str, folder: str) -> None:
    """Write what the teacher says of the step into ``folder``, by the host's own saver."""
    with_args("--logits-save-dir", folder, "--logits-save-top-k", str(TOP_K))
    size = topology.data_parallel_size
    calculator.destroy_num_microbatches_calculator()
    calculator.init_num_microbatches_calculator(0, None, len(places[0]) * size, 1, size)
    model = teacher(**topology.config)
    saver = LogitsSaverHooks(folder, TOP_K, save_dtype="fp32")
    saver._save_dtype = torch.float64  # so that nothing is rounded on its way
    saver.attach_hooks(model)
    data = data_of(places, layout)
    with gpt.KeepDouble():
        for _ in places[0]:
            gpt.forward_step(data, model)
    saver._write_batched_tar(*saver.take_pending_data())
    torch.distributed.barrier()


def data_of(places: Places, layout: str) -> Any:
    return batches(places[gpt.data_rank()], layout) if gpt.reads_data() else None


def script(loss: LossFuncCallable) -> Callable[..., Any]:
    """A forward step in the form of pretrain_gpt.py's, whose loss function calls ``loss``."""

    def loss_func(loss_mask: Tensor, output_tensor: Tensor, model: Any) -> Any:
        return loss(loss_mask, output_tensor, model=model)

    def forward_step(data_iterator: Iterator[Any] | None, model: Any) -> tuple[Tensor, Any]:
        losses, stock = gpt.forward_step(data_iterator, model)
        return losses, partial(loss_func, *stock.args, model=model)

    return forward_step


def student(
    topology: Topology, per_token: bool, dtype: torch.dtype = torch.float64
) -> tuple[Any, StudentLogitsCapture]:
    """The model in DDP, and the host's hook on its logits."""
    chunks = build_chunks(topology, per_token, dtype)
    capture = StudentLogitsCapture()
    capture.attach_hooks(chunks[0].module)
    return chunks, capture


def step(
    chunks: Any,
    places: Places,
    layout: str,
    *flags: str,
    forward_step: Callable[..., Any] | None = None,
    **options: Any,
) -> list[dict[str, Tensor]]:
    """One step of Megatron's own training loop under ``flags``; returns its reports."""
    uninstall = install(watch_exit=False)
    try:
        args = with_args(*flags)
        if forward_step is None:
            alpha = args.logits_load_kd_loss_alpha
            forward_step = script(LossFuncCallable(args.logits_load_dir, kd_loss_alpha=alpha))
        keep = gpt.KeepDouble() if chunks[0].module.config.params_dtype == torch.float64 else None
        with keep or contextlib.nullcontext():
            return gpt.run_step(
                None,
                chunks,
                data_of(places, layout),
                len(places[0]),
                schedule=training.get_forward_backward_func(),
                forward_step_func=forward_step,
                **options,
            )
    finally:
        uninstall()


def sparse_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(teacher | student) over the teacher's top entries and the rest as one more; [tokens]."""
    kept = teacher.log_softmax(-1).topk(TOP_K, dim=-1)
    q = kept.values.exp()
    p = student.softmax(-1).gather(-1, kept.indices)
    q, p = (torch.cat([x, 1 - x.sum(-1, keepdim=True)], dim=-1) for x in (q, p))
    return (q * (q.log() - p.log())).sum(-1)


def full_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(teacher | student) over the whole vocabulary; [tokens]."""
    q, p = teacher.log_softmax(-1), student.log_softmax(-1)
    return (q.exp() * (q - p)).sum(-1)


def top_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(teacher | student), both of the teacher's top entries alone; [tokens]."""
    kept = teacher.topk(TOP_K, dim=-1)
    return full_kl(student.gather(-1, kept.indices), kept.values)


def by_hand(
    language: Weights,
    kd: Weights,
    alpha: float = ALPHA,
    kl: Callable[[Tensor, Tensor], Tensor] = sparse_kl,
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """One process, every sample alone: the gradient, and the step's losses by name."""
    gpt.initialize()
    models = gpt.build(), teacher()
    chosen = sequences()
    sums = dict.fromkeys(("language", "kd", "lm", "kd mean"), torch.zeros(()))
    tokens = sum(sum(chosen[i].sample.mask) for i, _ in language)
    for (i, w), (j, v) in zip(language, kd, strict=True):
        assert i == j
        text = chosen[i].tokens.unsqueeze(0)
        logits, of_teacher = (m(text, gpt.positions_like(text), None)[0] for m in models)
        losses = F.cross_entropy(logits, chosen[i].labels, reduction="none")
        divergence = kl(logits, of_teacher.detach())
        mean = [m / tokens for m in chosen[i].sample.mask]
        parts = ((w, losses), (v, divergence), (mean, losses), (mean, divergence))
        for name, (weights, values) in zip(sums, parts, strict=True):
            sums[name] = sums[name] + torch.tensor(weights) @ values
    sums["loss"] = (1 - alpha) * sums["language"] + alpha * sums["kd"]
    numbers = {name: float(value) for name, value in sums.items()}
    return gradient_of(sums["loss"], models[0]), numbers
