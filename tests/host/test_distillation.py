"""Offline distillation through the real host: two terms, each exact over the whole step."""

from __future__ import annotations

import functools
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_loss_agg.mcore import Distillation, LossHook
from tests.host import distillation, gpt, gradients
from tests.host.cases import Found, reduced
from tests.host.harness import EXACT, TOPOLOGIES, Topology, error_of, run_host_ranks
from tests.host.reference import Gradient, relative_error
from tests.host.refusals import assert_says
from tests.host.steps import Places, Weights, aggregation, weights_of

# Two microbatches a rank, of unequal masks; one sample has no active token.
PLACES: dict[int, Places] = {1: (((0, 1), (5, 2, 3)),), 2: (((0, 5), (3,)), ((1,), (2, 4)))}
MODE = "sample_mean"
GUIDE = Path(__file__).parents[2] / "docs/distillation.md"
# What is reported, and the names of the losses by hand.
REPORTS = {
    f"{MODE} loss": "language",
    "kd loss": "kd",
    "loss": "loss",
    "lm loss": "lm",
    "logits distillation loss": "kd mean",
}


def by_hand(language: Weights, kd: Weights) -> list[Any]:
    """Of the teacher's top entries, and of its whole vocabulary."""
    return [
        distillation.by_hand(language, kd, kl=kl)
        for kl in (distillation.sparse_kl, distillation.full_kl)
    ]


@functools.cache
def expected(ranks: int, mode: str = MODE) -> Any:
    """`by_hand` by a language loss of this mode; that of the teacher is of `MODE`."""
    weights = (weights_of(name, PLACES[ranks]) for name in (mode, MODE))
    return run_host_ranks(by_hand, 1, *weights)[0]


def on_host(topology: Topology, folder: str, gradient: Gradient) -> list[Found]:
    """Every rank, for each layout and route."""
    gpt.initialize(**topology.sizes)
    places = PLACES[topology.data_parallel_size]
    found = []
    for layout in ("bshd", "thd"):
        where = f"{folder}/{layout}"
        distillation.save_teacher(topology, places, layout, where)
        flags = ("--loss-aggregation", MODE, "--logits-load-dir", where)
        flags += ("--logits-load-kd-loss-alpha", str(distillation.ALPHA))
        for per_token in (False, True):
            chunks, capture = distillation.student(topology, per_token)
            reports = distillation.step(chunks, places, layout, *flags)
            found.append(Found(gradients.error(chunks, gradient), reduced(reports)))
            capture.remove_hooks()
    return found


@pytest.mark.parametrize("name", ["dp2", "cp2", "tp2"])
def test_both_terms_are_exact_over_the_whole_step(name: str, tmp_path: Any) -> None:
    topology = TOPOLOGIES[name]
    (gradient, numbers), _ = expected(topology.data_parallel_size)
    wanted = {report: numbers[name] for report, name in REPORTS.items()}
    for rank in run_host_ranks(on_host, 2, topology, str(tmp_path), gradient):
        for error, reports in rank:
            assert error <= EXACT
            ours = {report: reports[report] for report in wanted}
            assert ours == pytest.approx(wanted, rel=EXACT)


REFUSED = {
    "another alpha": "HostError: not the masked sum of 0.5 * sample_mean + 0.5 * kd; expected its "
    "own",
    "no teacher": "HostError: computed 0 distillation losses ... --logits-load-dir ... "
    "return a TokenLoss",
    "ignored errors": "HostError: --logits-load-ignore-errors, with which ... change it, or drop "
    "the hook",
    "fp32": "HostError: fp32 logits, which Megatron's cross entropy has overwritten ... add --bf16",
    "no term of the teacher": f"ModeError: Distillation() with a loss of the terms ['{MODE}'];",
}


def megatrons_own(data_iterator: Any, model: Any, folder: str) -> Any:
    """The model computes the losses, in fp32."""
    from megatron.training.distillation import LossFuncCallable

    tokens, labels, mask, _ = gpt.local_batch(data_iterator)
    losses = model(tokens, gpt.positions_like(tokens), None, labels=labels)
    loss = LossFuncCallable(folder)
    return losses, partial(lambda loss_mask, x: loss(loss_mask, x, model), mask.float())


def refusals(folder: str) -> tuple[dict[str, str | None], dict[str, float]]:
    """One rank: the errors of bad runs; and what is reported in evaluation."""
    from megatron.training.distillation import LossFuncCallable

    topology, places, layout = TOPOLOGIES["dp1"], PLACES[1], "bshd"
    gpt.initialize()
    distillation.save_teacher(topology, places, layout, folder)
    flags = ("--loss-aggregation", MODE, "--logits-load-dir", folder)
    half = (*flags, "--logits-load-kd-loss-alpha", "0.5")
    chunks, _ = distillation.student(topology, False)
    step = partial(distillation.step, chunks, places, layout)
    other_alpha = distillation.script(LossFuncCallable(folder, kd_loss_alpha=0.4))
    hook = LossHook(aggregation(MODE), extensions=[Distillation()])
    errors = {
        "another alpha": error_of(step, *half, forward_step=other_alpha),
        "no teacher": error_of(step, *flags, forward_step=gpt.forward_step),
        "ignored errors": error_of(step, *flags, "--logits-load-ignore-errors"),
        "no term of the teacher": error_of(gpt.run_step, hook, chunks, iter([]), 1),
    }
    chunks[0].eval()
    evaluation = reduced(step(*half, forward_only=True))
    single, _ = distillation.student(topology, False, torch.float32)
    own = partial(megatrons_own, folder=folder)
    of_fp32 = partial(distillation.step, single, places, layout, *flags)
    errors["fp32"] = error_of(of_fp32, forward_step=own)
    return errors, evaluation


def test_a_loss_that_is_not_both_terms_is_refused_and_evaluation_has_one(tmp_path: Any) -> None:
    ((errors, evaluation),) = run_host_ranks(refusals, 1, str(tmp_path))
    for name, says in REFUSED.items():
        assert_says(errors[name], says)
    (_, numbers), _ = expected(1)
    wanted = {"lm loss": numbers["lm"], f"{MODE} loss": numbers["language"]}
    assert evaluation == pytest.approx(wanted, rel=EXACT)


def custom_loops(folder: str) -> list[Gradient]:
    """One rank: of the hook of the guide, the gradients of the host's loss and of the guide's."""
    from megatron.training.distillation import LossFuncCallable

    topology, places, layout = TOPOLOGIES["dp1"], PLACES[1], "bshd"
    gpt.initialize()
    distillation.save_teacher(topology, places, layout, folder)
    distillation.with_args("--logits-load-dir", folder)
    guide: dict[str, Any] = {}
    for snippet in re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL):
        exec(snippet, guide)
    chunks, _ = distillation.student(topology, False)
    teacher = distillation.teacher()

    def own_loss(data_iterator: Any, model: Any) -> Any:
        tokens, labels, mask, _ = gpt.local_batch(data_iterator)
        given = tokens, gpt.positions_like(tokens), None
        return guide["distilled"](model(*given), teacher(*given).detach(), labels, mask)

    of_host = LossFuncCallable(folder, kd_loss_alpha=distillation.ALPHA)
    found = []
    for forward_step in (distillation.script(of_host), own_loss):
        with gpt.KeepDouble():
            data = distillation.data_of(places, layout)
            options = {"forward_step_func": forward_step}
            gpt.run_step(guide["hook"], chunks, data, len(places[0]), **options)
        found.append(gradients.of(chunks))
    return found


def test_custom_loops_of_the_guide_are_exact(tmp_path: Any) -> None:
    (gradient, _), (whole, _) = expected(1, "token_mean")
    ((of_host, own),) = run_host_ranks(custom_loops, 1, str(tmp_path))
    assert relative_error(of_host, gradient) <= EXACT
    assert relative_error(own, whole) <= EXACT
