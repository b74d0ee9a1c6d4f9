"""Offline distillation through the real host: two terms, each exact over the whole step."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.host.harness import EXACT, TOPOLOGIES, Topology, error_of, run_host_ranks
from tests.host.reference import relative_error
from tests.host.steps import Places, Weights, aggregation, weights_of

pytestmark = pytest.mark.host

# Two microbatches a rank, of unequal masks; one sample has no active token.
PLACES: dict[int, Places] = {
    1: (((0, 1), (5, 2, 3)),),
    2: (((0, 5), (3,)), ((1,), (2, 4))),
}
MODE = "sample_mean"
GUIDE = Path(__file__).parents[2] / "docs/distillation.md"
LAYOUTS = ("bshd", "thd")
# Dtypes, without and with the per-token flag.
ROUTES = ((torch.float64, False), (torch.float64, True), (torch.float32, True))


def by_hand(language: Weights, kd: Weights) -> list[Any]:
    """In fp64 and fp32, and in fp64 with the teacher's whole vocabulary."""
    from tests.host import distillation as made

    whole = made.by_hand(language, kd, kl=made.full_kl)
    return [*(made.by_hand(language, kd, x) for x in (torch.float64, torch.float32)), whole]


@functools.cache
def expected(ranks: int, mode: str = MODE) -> Any:
    """Gradient and losses in fp64, the error of the gradient in fp32, and `by_hand`'s last.

    Args:
        mode: of the language loss; the teacher's is `MODE`.
    """
    weights = (weights_of(name, PLACES[ranks]) for name in (mode, MODE))
    ((exact, naive, whole),) = run_host_ranks(by_hand, 1, *weights)
    return *exact, relative_error(naive[0], exact[0]), whole[0]


def on_host(topology: Topology, folder: str, gradient: Any) -> dict[Any, Any]:
    """Every rank, for each dtype, layout and route: the gradient's error, and what is reported."""
    from tests.host import distillation, gpt, gradients

    gpt.initialize(**topology.sizes)
    places = PLACES[topology.data_parallel_size]
    found = {}
    for layout in LAYOUTS:
        where = f"{folder}/{layout}"
        distillation.save_teacher(topology, places, layout, where)
        flags = ("--loss-aggregation", MODE, "--logits-load-dir", where)
        flags += ("--logits-load-kd-loss-alpha", str(distillation.ALPHA))
        for dtype, per_token in ROUTES:
            chunks, capture = distillation.student(topology, per_token, dtype)
            reports = distillation.step(chunks, places, layout, *flags)
            numbers = {name: gpt.reported(reports, name) for name in sorted(reports[0])}
            found[dtype, layout, per_token] = (gradients.error(chunks, gradient), numbers)
            capture.remove_hooks()
    return found


@pytest.mark.parametrize("name", ["dp2", "cp2", "tp2"])
def test_both_terms_are_exact_over_the_whole_step(name: str, tmp_path: Any) -> None:
    topology = TOPOLOGIES[name]
    gradient, numbers, fp32_error, _ = expected(topology.data_parallel_size)
    for rank in run_host_ranks(on_host, 2, topology, str(tmp_path), gradient):
        for (dtype, *case), (error, reported) in rank.items():
            exact = dtype == torch.float64
            assert error <= (EXACT if exact else 2 * fp32_error), case
            names = {f"{MODE} loss": "language", "kd loss": "kd", "loss": "loss", "lm loss": "lm"}
            names["logits distillation loss"] = "kd mean"
            got = {ours: reported[key] for key, ours in names.items()}
            want = {key: numbers[key] for key in got}
            assert got == pytest.approx(want, rel=EXACT if exact else 1e-5), case


REFUSED = {
    "another alpha": "not the masked sum of 0.5 * sample_mean + 0.5 * kd; expected its own",
    "no teacher": "computed 0 distillation losses|--logits-load-dir|return a TokenLoss",
    "ignored errors": "--logits-load-ignore-errors, with which|change it, or drop the hook",
    "fp32": "fp32 logits, which Megatron's cross entropy has overwritten|add --bf16",
}


def other_steps(folder: str) -> dict[str, Any]:
    """One rank: what is reported in evaluation and in a custom loop, and the errors of bad runs."""
    from functools import partial

    from megatron.training.distillation import LossFuncCallable

    from tests.host import distillation, gpt, gradients

    topology, places, layout = TOPOLOGIES["dp1"], PLACES[1], "bshd"
    gpt.initialize()
    distillation.save_teacher(topology, places, layout, folder)
    flags = ("--loss-aggregation", MODE, "--logits-load-dir", folder)
    chunks, _ = distillation.student(topology, False, torch.float64)
    step = partial(distillation.step, chunks, places, layout)
    found: dict[str, Any] = {}

    def script(alpha: float) -> Any:
        return distillation.script(LossFuncCallable(folder, kd_loss_alpha=alpha))

    half = (*flags, "--logits-load-kd-loss-alpha", "0.5")
    found["another alpha"] = error_of(step, *half, forward_step=script(0.4))
    found["no teacher"] = error_of(step, *flags, forward_step=gpt.forward_step)
    found["ignored errors"] = error_of(step, *flags, "--logits-load-ignore-errors")
    chunks[0].eval()
    reports = step(*half, forward_only=True)
    found["evaluation"] = {name: gpt.reported(reports, name) for name in sorted(reports[0])}
    chunks[0].train()

    distillation.with_args("--logits-load-dir", folder)
    guide: dict[str, Any] = {}
    for snippet in re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL):
        exec(snippet, guide)
    teacher = distillation.teacher()

    def own_loss(data_iterator: Any, model: Any) -> Any:
        tokens, labels, mask, _ = gpt.local_batch(data_iterator)
        given = tokens, gpt.positions_like(tokens), None
        return guide["distilled"](model(*given), teacher(*given).detach(), labels, mask)

    for name, forward_step in (("stock", script(distillation.ALPHA)), ("own", own_loss)):
        with gpt.KeepDouble():
            data = distillation.data_of(places, layout)
            options = {"forward_step_func": forward_step}
            gpt.run_step(guide["hook"], chunks, data, len(places[0]), **options)
        found[name] = gradients.of(chunks)

    single, _ = distillation.student(topology, False, torch.float32)

    def megatrons_own(data_iterator: Any, model: Any) -> Any:
        tokens, labels, mask, _ = gpt.local_batch(data_iterator)
        losses = model(tokens, gpt.positions_like(tokens), None, labels=labels)
        loss = LossFuncCallable(folder)
        return losses, partial(lambda loss_mask, x: loss(loss_mask, x, model), mask.float())

    options = {"forward_step": megatrons_own}
    found["fp32"] = error_of(distillation.step, single, places, layout, *flags, **options)
    return found


def other_terms() -> str | None:
    from megatron_loss_agg.mcore import Distillation, LossHook
    from tests.host import gpt

    gpt.initialize()
    hook = LossHook(aggregation(MODE), extensions=[Distillation()])
    return error_of(gpt.run_step, hook, gpt.ddp_model(), iter([]), 1)


def test_a_loss_without_the_teachers_term_is_refused() -> None:
    (error,) = run_host_ranks(other_terms, 1)
    assert error is not None
    assert error.startswith(f"ModeError: Distillation() with a loss of the terms ['{MODE}'];")


def test_evaluation_custom_loops_and_refusals(tmp_path: Any) -> None:
    gradient, _, _, whole = expected(1, "token_mean")
    (found,) = run_host_ranks(other_steps, 1, str(tmp_path))
    assert relative_error(found["stock"], gradient) <= EXACT
    assert relative_error(found["own"], whole) <= EXACT
    _, numbers, _, _ = expected(1)
    wanted = {"lm loss": numbers["lm"], f"{MODE} loss": numbers["language"]}
    assert found["evaluation"] == pytest.approx(wanted, rel=EXACT)
    for name, texts in REFUSED.items():
        assert found[name].startswith("HostError: "), found[name]
        for text in texts.split("|"):
            assert text in found[name], found[name]
