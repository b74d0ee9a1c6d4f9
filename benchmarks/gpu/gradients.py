"""Gradients of the plugin through Megatron, compared with one fp64 process, sample by sample."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks import megatron
from benchmarks.results import Results
from megatron_loss_agg.mcore import LossHook
from tests.host.reference import Gradient, relative_error
from tests.host.steps import PLACES, aggregation, batches, sequences, weights_of

SINGLE, HALF = torch.float32, torch.bfloat16
LAYOUTS = ("thd", "bshd")


class Expected(NamedTuple):
    """The fp64 gradient of a loss, and the error of one unsplit process in another dtype."""

    gradient: Gradient
    error: float


def run(results: Results, seconds: float) -> None:
    """Compare on one rank, then on two with data and with context parallelism."""
    two = os.environ["WORLD_SIZE"] == "2"
    worlds = {"DP 2": (2, 1), "CP 2": (1, 2)} if two else {"one rank": (1, 1)}
    losses = [*product(("token_mean", "prompt_mean", "constant"), ("fractional", "01"))]
    if results.quick:
        losses = losses[:1]
    with megatron.groups(gpu=not results.quick):
        for dtype in (SINGLE, HALF):
            megatron.divide()
            expected = _expected(dtype, losses)  # on each rank, as if it were alone
            for (name, (dp, cp)), layout in product(worlds.items(), LAYOUTS):
                megatron.divide(cp)
                errors = [_errors(dtype, layout, flag, dp, expected) for flag in (False, True)]
                worst = torch.tensor(errors, dtype=torch.float64).cuda()  # [2, losses]
                dist.all_reduce(worst, op=dist.ReduceOp.MAX)
                ratios = worst.cpu() / torch.tensor([x.error for x in expected.values()])
                what = f"gradient's error, {str(dtype).removeprefix('torch.')}"
                where = f"{name}, {layout}, {worst.numel()} steps"
                results.add(what, where, float(worst.max()), "of its norm")
                relative = float(ratios.max()), "x one process's", "gradient"
                results.add(f"{what}, relative", where, *relative)


def _model(dtype: torch.dtype, per_token: bool = False) -> Any:
    """The tests' small GPT; for bf16 with parameters in bf16, and everything else in fp32."""
    from megatron.core.transformer.module import Float16Module

    from megatron_loss_agg.mcore.cpu import attention
    from tests.host import gpt

    attention.install()  # otherwise packs and context parallelism need Transformer Engine
    if dtype != HALF:
        return gpt.build(dtype, per_token).cuda()
    model = gpt.build(SINGLE, per_token, bf16=True, params_dtype=HALF).cuda()
    return Float16Module(model.config, model)


def _expected(dtype: torch.dtype, losses: list[tuple[str, str]]) -> dict[Any, Expected]:
    """The expected gradients by loss, a pair of mode and masks."""
    exact, rounded = _model(torch.float64), _model(dtype)
    for p, q in zip(exact.parameters(), rounded.parameters(), strict=True):
        p.data = q.data.double()
    names = [name for name, _ in exact.named_parameters()]
    expected = {}
    for loss in losses:
        reference = dict(zip(names, _gradient(exact, torch.float64, *loss), strict=True))
        unsplit = dict(zip(names, _gradient(rounded, SINGLE, *loss), strict=True))
        expected[loss] = Expected(reference, relative_error(unsplit, reference))
    return expected


def _gradient(model: Any, dtype: torch.dtype, mode: str, masks: str) -> tuple[Tensor, ...]:
    """The gradient of the whole step in one process: samples one by one, with the oracle's weights."""
    torch.set_default_dtype(dtype)
    total: Any = 0.0
    for i, weights in weights_of(mode, PLACES[1], masks):
        sample = sequences(masks)[i]
        tokens, labels = sample.tokens.cuda(), sample.labels.cuda()
        positions = torch.arange(len(tokens)).cuda().unsqueeze(0)
        logits = model(tokens.unsqueeze(0), positions, None).squeeze(0)
        losses = F.cross_entropy(logits, labels, reduction="none")
        total = total + (torch.tensor(weights, dtype=dtype).cuda() * losses).sum()
    torch.set_default_dtype(SINGLE)
    return tuple(g.cpu() for g in torch.autograd.grad(total, tuple(model.parameters())))


def _errors(
    dtype: torch.dtype, layout: str, per_token: bool, dp: int, expected: dict[Any, Expected]
) -> list[float]:
    """The error of every loss's gradient on this rank."""
    from tests.host import gpt

    model = _model(dtype, per_token)
    ddp = gpt.data_parallel(model, grad_reduce_in_fp32=True)
    torch.set_default_dtype(SINGLE)
    places, errors = PLACES[dp], []
    for (mode, masks), (gradient, _) in expected.items():
        data = batches(places[gpt.data_rank()], layout, masks)
        hook = LossHook(aggregation(mode))
        gpt.run_step(hook, ddp, data, len(places[0]), forward_step_func=forward_step)
        inner = getattr(model, "module", model)
        got = {name: p.main_grad.cpu() for name, p in inner.named_parameters()}
        errors.append(relative_error(got, gradient))
    return errors


def forward_step(data_iterator: Iterator[Any], model: Any) -> tuple[Tensor, Any]:
    """Losses of this rank's part of the next batch, moved from the CPU."""
    from tests.host import gpt

    *tensors, packed = gpt.local_batch(data_iterator)
    tokens, labels, mask = (x.cuda() for x in tensors)
    if packed is not None:
        fields = {f.name: getattr(packed, f.name) for f in dataclasses.fields(packed) if f.init}
        moved = {n: x.cuda() if isinstance(x, Tensor) else x for n, x in fields.items()}
        packed = type(packed)(**moved)
    positions = torch.arange(tokens.shape[1]).cuda().expand_as(tokens)
    logits = model(tokens, positions, None, packed_seq_params=packed)
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return losses.view_as(tokens), partial(gpt.stock_loss_func, mask.to(losses.dtype))
