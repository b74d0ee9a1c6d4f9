"""Offline distillation by the host's own saver, loader and loss: both losses are exact."""

from __future__ import annotations

import argparse
import functools
import re
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from distillation import Distillation
from packaging.version import Version
from torch import Tensor

from megatron_loss_agg.launch.flags import add_arguments
from megatron_loss_agg.launch.install import hook_from_args
from megatron_loss_agg.mcore import LossHook, TokenLoss
from tests.host import gpt, gradients
from tests.host.cases import Expected, reduced
from tests.host.harness import EXACT, TOPOLOGIES, Topology, build_chunks, error_of, run_host_ranks
from tests.host.reference import Gradient, Reference, gradient_of_sum, references, relative_error
from tests.host.refusals import assert_says
from tests.host.scripts import with_labels
from tests.host.steps import Places, Sequence, Weights, aggregation, batches, weights_of

# Two microbatches a rank, of unequal masks; one sample has no active token.
PLACES: dict[int, Places] = {1: (((0, 1), (5, 2, 3)),), 2: (((0, 5), (3,)), ((1,), (2, 4)))}
MODE = "sample_mean"
OURS = ("--loss-aggregation", MODE, "--loss-aggregation-evaluation", "same")
EXTENSION = ("--loss-aggregation-extension", "distillation:Distillation")
TOP_K, ALPHA = 5, 0.3
GUIDE = (Path(__file__).parents[2] / "docs/losses.md").read_text().partition("## Distillation")[2]


def with_args(*flags: str) -> Any:
    """The host's parsed flags with ours, set for the process."""
    from megatron.training import arguments
    from megatron.training.global_vars import set_args

    parser = arguments.add_megatron_arguments(argparse.ArgumentParser())
    parser.add_argument("--export-kd-teacher-load")  # as the scripts do
    add_arguments(parser)
    args = parser.parse_known_args(["--seq-length", "72", "--train-iters", "1", *flags])[0]
    args.curr_iteration, args.data_path = 0, None
    set_args(args)
    return args


def teacher(**config: Any) -> Any:
    """A model of other weights than the student's."""
    model = gpt.build(**config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    return model


def rank_data(places: Places, layout: str) -> Any:
    return batches(places[gpt.data_rank()], layout) if gpt.reads_data() else None


def save_teacher(topology: Topology, places: Places, layout: str, folder: str) -> None:
    """Write the teacher's logits of the step into ``folder``, by the host's own saver."""
    from megatron.core import num_microbatches_calculator as calculator
    from megatron.training.distillation import LogitsSaverHooks

    with_args("--logits-save-dir", folder, "--logits-save-top-k", str(TOP_K))
    size = topology.data_parallel_size
    calculator.destroy_num_microbatches_calculator()
    calculator.init_num_microbatches_calculator(0, None, len(places[0]) * size, 1, size)
    model = teacher(**topology.config)
    saver = LogitsSaverHooks(folder, TOP_K, save_dtype="fp32")
    saver._save_dtype = torch.float64  # so that nothing is rounded on its way
    saver.attach_hooks(model)
    data = rank_data(places, layout)
    with gpt.KeepDouble():
        for _ in places[0]:
            gpt.forward_step(data, model)
    saver._write_batched_tar(*saver.take_pending_data())
    torch.distributed.barrier()


def student(topology: Topology, per_token: bool, dtype: torch.dtype = torch.float64) -> Any:
    """The model in DDP; and the host's hook on its logits."""
    from megatron.training.distillation import StudentLogitsCapture

    chunks, capture = build_chunks(topology, per_token, dtype), StudentLogitsCapture()
    capture.attach_hooks(chunks[0].module)
    return chunks, capture


def script(folder: str, alpha: float, inner: Any = None) -> Callable[..., Any]:
    """A forward step in the form of pretrain_gpt.py's, with the host's loss function."""
    from megatron.training.distillation import LossFuncCallable

    loss = LossFuncCallable(folder, kd_loss_alpha=alpha)

    def loss_func(loss_mask: Tensor, output_tensor: Tensor, model: Any) -> Any:
        return loss(loss_mask, output_tensor, model=model)

    def forward_step(data_iterator: Any, model: Any) -> tuple[Tensor, Any]:
        losses, stock = (inner or gpt.forward_step)(data_iterator, model)
        return losses, partial(loss_func, *stock.args, model=model)

    return forward_step


def with_kd_factor(folder: str, factor: float) -> Callable[..., Any]:
    """A script that multiplies the teacher's half of its loss by ``factor``."""
    forward_step = script(folder, 0.5)

    def scaled_step(data_iterator: Any, model: Any) -> Any:
        output, loss_function = forward_step(data_iterator, model)

        def loss_with_factor(loss_mask: Tensor, output_tensor: Tensor) -> Any:
            total, *rest = loss_function(output_tensor)
            language = (output_tensor * loss_mask).sum()
            return 0.5 * language + factor * (total - 0.5 * language), *rest

        return output, partial(loss_with_factor, *loss_function.args)

    return scaled_step


def token_loss_step(data_iterator: Any, model: Any) -> tuple[Tensor, TokenLoss]:
    losses, stock = gpt.forward_step(data_iterator, model)
    return losses, TokenLoss(lambda output: output, *stock.args)


def step(
    chunks: Any,
    places: Places,
    layout: str,
    *flags: str,
    forward_step: Callable[..., Any] | None = None,
    hook: LossHook | None = None,
    **options: Any,
) -> list[dict[str, Tensor]]:
    """One step of the schedule with the hook of the flags; returns its reports."""
    args = with_args(*OURS, *EXTENSION, *flags)
    hook = hook or hook_from_args(args)
    if forward_step is None:
        forward_step = script(args.logits_load_dir, args.logits_load_kd_loss_alpha)
    data, options["forward_step_func"] = rank_data(places, layout), forward_step
    with gpt.KeepDouble():
        return gpt.run_step(hook, chunks, data, len(places[0]), **options)


def losses_of(model: Any, sequence: Sequence) -> dict[str, Tensor]:
    """Cross entropy, and KL(teacher | student) over the whole vocabulary; over the teacher's top
    entries and the rest as one more; over the top entries alone.
    """
    text = sequence.tokens.unsqueeze(0)
    logits, teacher_logits = (
        m(text, gpt.positions_like(text), None)[0] for m in (model, teacher_alone())
    )
    top = teacher_logits.detach().topk(TOP_K, dim=-1)
    q, p = teacher_logits.detach().log_softmax(-1), logits.log_softmax(-1)
    top_parts = [x.gather(-1, top.indices).exp() for x in (q, p)]
    with_rest = [torch.cat([x, 1 - x.sum(-1, keepdim=True)], dim=-1).log() for x in top_parts]
    return {
        "language": F.cross_entropy(logits, sequence.labels, reduction="none"),
        "full": divergence(q, p),
        "sparse": divergence(*with_rest),
        "top": divergence(top.values.log_softmax(-1), p.gather(-1, top.indices).log_softmax(-1)),
    }


def divergence(log_q: Tensor, log_p: Tensor) -> Tensor:
    return (log_q.exp() * (log_q - log_p)).sum(-1)


@functools.cache
def teacher_alone() -> Any:
    return teacher()


@functools.cache
def token_references() -> dict[str, Reference]:
    return references(losses_of)


def by_hand(language: Weights, kd: Weights, alpha: float = ALPHA, kl: str = "sparse") -> Expected:
    """The gradient by these weights of both losses, and what is reported of them."""
    losses, divergences = token_references()["language"], token_references()[kl]
    places = ((tuple(i for i, _ in language),),)
    numbers = {
        f"{MODE} loss": losses.loss(language),
        "kd loss": divergences.loss(kd),
        "lm loss": losses.loss(weights_of("token_mean", places)),
        "logits distillation loss": divergences.loss(weights_of("token_mean", places)),
    }
    numbers["loss"] = (1 - alpha) * numbers[f"{MODE} loss"] + alpha * numbers["kd loss"]
    gradient = gradient_of_sum((1 - alpha, losses, language), (alpha, divergences, kd))
    return gradient, numbers


def expected(ranks: int) -> Expected:
    weights = weights_of(MODE, PLACES[ranks])
    return by_hand(weights, weights)


def on_host(topology: Topology, folder: str, gradient: Gradient, numbers: dict[str, float]) -> None:
    """Every rank, for each layout and route."""
    gpt.initialize(**topology.sizes)
    places = PLACES[topology.data_parallel_size]
    for layout, per_token in product(("bshd", "thd"), (False, True)):
        where = f"{folder}/{layout}"
        if not per_token:
            save_teacher(topology, places, layout, where)
        flags = ("--logits-load-dir", where, "--logits-load-kd-loss-alpha", str(ALPHA))
        chunks, capture = student(topology, per_token)
        reports = reduced(step(chunks, places, layout, *flags))
        assert gradients.error(chunks, gradient) <= EXACT
        assert {key: reports[key] for key in numbers} == pytest.approx(numbers, rel=EXACT)
        capture.remove_hooks()


@pytest.mark.parametrize("name", ["dp2", "cp2", "tp2"])
def test_both_terms_are_exact_over_the_whole_step(name: str, tmp_path: Any) -> None:
    topology = TOPOLOGIES[name]
    run_host_ranks(on_host, 2, topology, str(tmp_path), *expected(topology.data_parallel_size))


REFUSED = {
    "another alpha": "HostError: must return the masked sum of 0.5 * language + 0.5 * kd, got ... "
    "Give Distillation(alpha=) the alpha of the loss function",
    "another alpha, of a student that was its teacher": "HostError: the masked sum of 0.5 *",
    "no extension": "HostError: a loss function must return the masked sum ... "
    "for Megatron's distillation",
    "flags without a teacher": "OptionError: Distillation needs a teacher, got neither ... "
    "Add one, give Distillation(alpha=)",
    "several terms": "OptionError: Distillation needs a hook of one term with multiplier 1, got",
    "no teacher": "HostError: must compute one distillation loss, got 0 ... --logits-load-dir ... "
    "return a TokenLoss",
    "a TokenLoss": "HostError: a script's loss function that adds both losses up, got a TokenLoss",
    "ignored errors": "HostError: --logits-load-ignore-errors cannot go with",
    "fp32": "HostError: got fp32 ones, which Megatron's cross entropy has overwritten ... (--bf16)",
    "overwritten logits": "HostError: got --cross-entropy-fusion-impl te, which overwrites ... native",
}


def refusals(folder: str, numbers: dict[str, float]) -> None:
    """One rank: bad runs; and what is reported in evaluation."""
    topology, places, layout = TOPOLOGIES["dp1"], PLACES[1], "bshd"
    gpt.initialize()
    save_teacher(topology, places, layout, folder)
    flags = ("--logits-load-dir", folder)
    half = (*flags, "--logits-load-kd-loss-alpha", "0.5")
    chunks, _ = student(topology, False)
    one_step = partial(step, chunks, places, layout)
    terms = {name: aggregation(MODE) for name in ("language", "kd")}
    errors = {
        "another alpha": error_of(one_step, *half, forward_step=script(folder, 0.4)),
        "no teacher": error_of(one_step, *flags, forward_step=gpt.forward_step),
        "a TokenLoss": error_of(one_step, *flags, forward_step=token_loss_step),
        "ignored errors": error_of(one_step, *flags, "--logits-load-ignore-errors"),
        "no extension": error_of(one_step, *half, hook=LossHook(aggregation(MODE))),
        "flags without a teacher": error_of(one_step, forward_step=script(folder, 0.5)),
        "several terms": error_of(
            one_step, *half, hook=LossHook(terms, extensions=[Distillation()])
        ),
    }
    fused = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"}
    with (
        mock.patch.multiple(chunks[0].config, **fused),
        mock.patch("megatron.core.utils._te_version", Version("2.17")),
    ):
        errors["overwritten logits"] = error_of(one_step, *half)
    hook = LossHook(aggregation(MODE), extensions=[Distillation(alpha=0.5)])

    def half_of_kd() -> None:
        one_step(*half, hook=hook, forward_step=with_kd_factor(folder, 0.5))

    with torch.no_grad():
        student_parameters = [x.clone() for x in chunks[0].parameters()]
        for x, y in zip(chunks[0].parameters(), teacher_alone().parameters(), strict=True):
            x.copy_(y)
    half_of_kd()  # kd is 0, so that its factor may be anything
    with torch.no_grad():
        for x, y in zip(chunks[0].parameters(), student_parameters, strict=True):
            x.copy_(y)
    errors["another alpha, of a student that was its teacher"] = error_of(half_of_kd)
    chunks[0].eval()
    assert reduced(one_step(*half, forward_only=True)) == pytest.approx(numbers, rel=EXACT)
    single, _ = student(topology, False, torch.float32)
    with_own_labels = script(folder, 1.0, with_labels)
    errors["fp32"] = error_of(step, single, places, layout, *flags, forward_step=with_own_labels)
    for name, says in REFUSED.items():
        assert_says(errors[name], says)


def test_a_loss_that_is_not_both_is_refused_and_evaluation_has_one(tmp_path: Any) -> None:
    _, numbers = expected(1)
    language_numbers = {key: numbers[key] for key in ("lm loss", f"{MODE} loss")}
    run_host_ranks(refusals, 1, str(tmp_path), language_numbers)


def custom_loops(folder: str) -> list[Gradient]:
    """One rank: the gradients of the guide's hooks, for the host's loss and for the guide's own."""
    topology, places, layout = TOPOLOGIES["dp1"], PLACES[1], "bshd"
    gpt.initialize()
    save_teacher(topology, places, layout, folder)
    with_args("--logits-load-dir", folder)
    guide: dict[str, Any] = {}
    chunks, _ = student(topology, False)

    def own_loss(data_iterator: Any, model: Any) -> Any:
        tokens, labels, mask, _ = gpt.local_batch(data_iterator)
        inputs = tokens, gpt.positions_like(tokens), None
        teacher_logits = teacher_alone()(*inputs).detach()
        return guide["distillation_loss"](model(*inputs), teacher_logits, labels, mask)

    results = []
    snippets = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    for snippet, forward_step in zip(snippets, (script(folder, ALPHA), own_loss), strict=True):
        exec(snippet, guide)
        with gpt.KeepDouble():
            data = rank_data(places, layout)
            options = {"schedule": guide["forward_backward"], "forward_step_func": forward_step}
            gpt.run_step(None, chunks, data, len(places[0]), **options)
        results.append(gradients.of(chunks))
    return results


def test_custom_loops_of_the_guide_are_exact(tmp_path: Any) -> None:
    token_mean, weights = (weights_of(mode, PLACES[1]) for mode in ("token_mean", MODE))
    ((megatron_loss, own_loss),) = run_host_ranks(custom_loops, 1, str(tmp_path))
    assert relative_error(megatron_loss, by_hand(weights, weights)[0]) <= EXACT
    assert relative_error(own_loss, by_hand(token_mean, weights, kl="full")[0]) <= EXACT
