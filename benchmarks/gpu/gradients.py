"""Gradients of the plugin through Megatron, against one process in fp64 that runs samples alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu import world
from benchmarks.gpu.evidence import CannotRun, Evidence
from megatron_loss_agg.mcore import LossHook
from tests.host.reference import Gradient, relative_error
from tests.host.steps import PLACES, aggregation, batches, sequences, weights_of

SINGLE, HALF = torch.float32, torch.bfloat16
KEPT = "expected.pt"
WORLDS = {"DP 2": (2, 1), "CP 2": (1, 2)}  # data- and context-parallel ranks


class Case(NamedTuple):
    """One step."""

    dtype: torch.dtype
    mode: str
    masks: str
    layout: str
    per_token: bool

    @property
    def loss(self) -> tuple[torch.dtype, str, str]:
        """What decides its gradient, apart from rounding."""
        return self.dtype, self.mode, self.masks


class Expected(NamedTuple):
    """Of a loss: the fp64 gradient, and the error of one process in the case's dtype."""

    gradient: Gradient
    error: float


def cases(dry: bool) -> list[Case]:
    modes = ["token_mean", "prompt_mean"] if dry else ["token_mean", "prompt_mean", "constant"]
    masks = ["fractional"] if dry else ["01", "fractional"]
    return list(
        map(Case._make, product((SINGLE, HALF), modes, masks, ("thd", "bshd"), (False, True)))
    )


def run(evidence: Evidence, dry: bool, seconds: float, folder: Path) -> None:
    """One rank; keeps what is expected for `ranks`."""
    with world.groups(dry):
        expected = _expected(dry)
        torch.save(expected, folder / KEPT)
        _judge(evidence, "one rank", expected, [_errors(dry, expected)])


def ranks(evidence: Evidence, dry: bool, seconds: float, folder: Path) -> None:
    """Two ranks, with a GPU each."""
    number = 2 if dry else torch.cuda.device_count()
    if number < 2:
        raise CannotRun(f"needs 2 GPUs; found {number}")
    if not (folder / KEPT).exists():
        raise CannotRun("the part 'gradients', which makes what it expects, did not")
    expected = torch.load(folder / KEPT, weights_only=False)
    for name, (dp, cp) in WORLDS.items():
        try:
            errors = world.run_ranks(_rank, 2, cp, dry, folder, 0.45 * seconds, folder / KEPT, dp)
        except RuntimeError as error:
            evidence.fail(f"gradients, {name}", str(error))
        else:
            _judge(evidence, name, expected, errors)


def _judge(
    evidence: Evidence, where: str, expected: dict[Any, Expected], ranks: list[dict[Case, float]]
) -> None:
    """The worst case of each dtype and layout, as a multiple of one unsplit process's error."""
    for dtype, layout in product((SINGLE, HALF), ("thd", "bshd")):
        chosen = [c for c in ranks[0] if (c.dtype, c.layout) == (dtype, layout)]
        worst = {c: max(rank[c] for rank in ranks) for c in chosen}
        ratios = {c: error / expected[c.loss].error for c, error in worst.items()}
        name, place = str(dtype).removeprefix("torch."), f"{where}, {layout}, {len(chosen)} steps"
        evidence.add(f"gradient's error, {name}", place, max(worst.values()), "of its norm")
        what = f"gradient's error, {name}, over one process's"
        evidence.add(what, place, max(ratios.values()), "x", "gpu_gradient")


def _rank(dry: bool, path: Path, dp: int) -> dict[Case, float]:
    return _errors(dry, torch.load(path, weights_only=False), dp)


def _model(dtype: torch.dtype, per_token: bool = False) -> Any:
    """The tests' small GPT; of bf16, with parameters rounded to it and fp32 outside of them."""
    from megatron.core.transformer.module import Float16Module

    from megatron_loss_agg.mcore.cpu import attention
    from tests.host import gpt

    attention.install()  # packs and context parallelism need Transformer Engine otherwise
    if dtype != HALF:
        return gpt.build(dtype, per_token).cuda()
    model = gpt.build(SINGLE, per_token, bf16=True, params_dtype=HALF).cuda()
    return Float16Module(model.config, model)


def _expected(dry: bool) -> dict[Any, Expected]:
    """By loss."""
    found = {}
    for dtype in (SINGLE, HALF):
        exact, rounded = _model(torch.float64), _model(dtype)
        for p, q in zip(exact.parameters(), rounded.parameters(), strict=True):
            p.data = q.data.double()
        names = [name for name, _ in exact.named_parameters()]
        for loss in dict.fromkeys(case.loss for case in cases(dry) if case.dtype == dtype):
            reference = dict(zip(names, _gradient(exact, torch.float64, loss), strict=True))
            unsplit = dict(zip(names, _gradient(rounded, SINGLE, loss), strict=True))
            found[loss] = Expected(reference, relative_error(unsplit, reference))
    torch.set_default_dtype(SINGLE)
    return found


def _gradient(model: Any, dtype: torch.dtype, loss: tuple[Any, str, str]) -> tuple[Tensor, ...]:
    """Of the whole step in one process: every sample alone and unpadded, the oracle's weights."""
    _, mode, masks = loss
    torch.set_default_dtype(dtype)
    total: Any = 0.0
    for i, weights in weights_of(mode, PLACES[1], masks):
        sample = sequences(masks)[i]
        tokens, labels = sample.tokens.cuda(), sample.labels.cuda()
        positions = torch.arange(len(tokens)).cuda().unsqueeze(0)
        logits = model(tokens.unsqueeze(0), positions, None).squeeze(0)
        losses = F.cross_entropy(logits, labels, reduction="none")
        total = total + (torch.tensor(weights, dtype=dtype).cuda() * losses).sum()
    return tuple(g.cpu() for g in torch.autograd.grad(total, tuple(model.parameters())))


def _errors(dry: bool, expected: dict[Any, Expected], dp: int = 1) -> dict[Case, float]:
    """Of every case, on this rank."""
    from tests.host import gpt

    found = {}
    places, mine = PLACES[dp], PLACES[dp][gpt.data_rank()]
    for dtype, per_token in product((SINGLE, HALF), (False, True)):
        model = _model(dtype, per_token)
        ddp = gpt.data_parallel(model, grad_reduce_in_fp32=True)
        inner = getattr(model, "module", model)
        torch.set_default_dtype(SINGLE)
        for case in (c for c in cases(dry) if (c.dtype, c.per_token) == (dtype, per_token)):
            data = batches(mine, case.layout, case.masks)
            hook = LossHook(aggregation(case.mode))
            gpt.run_step(hook, ddp, data, len(places[0]), forward_step_func=forward_step)
            got = {name: p.main_grad.cpu() for name, p in inner.named_parameters()}
            found[case] = relative_error(got, expected[case.loss].gradient)
    return found


def forward_step(data_iterator: Iterator[Any], model: Any) -> tuple[Tensor, Any]:
    """Losses of this rank's part of the next batch, which comes from the CPU."""
    from tests.host import gpt

    *given, packed = gpt.local_batch(data_iterator)
    tokens, labels, mask = (x.cuda() for x in given)
    if packed is not None:
        fields = {f.name: getattr(packed, f.name) for f in dataclasses.fields(packed) if f.init}
        moved = {n: x.cuda() if isinstance(x, Tensor) else x for n, x in fields.items()}
        packed = type(packed)(**moved)
    positions = torch.arange(tokens.shape[1]).cuda().expand_as(tokens)
    logits = model(tokens, positions, None, packed_seq_params=packed)
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return losses.view_as(tokens), partial(gpt.stock_loss_func, mask.to(losses.dtype))
