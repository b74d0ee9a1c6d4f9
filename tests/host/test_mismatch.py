"""A later step with other masks than were counted: it ends the run, or is let pass and counted."""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Iterator
from typing import Any

import pytest

from megatron_loss_agg.mcore import LossHook
from tests.host import gpt
from tests.host.cases import reduced
from tests.host.harness import error_of, run_host_ranks
from tests.host.steps import aggregation, batch_of, sequences


def forward_step(wrong_rank: int | None, iterator: Iterator[Any], model: Any) -> Any:
    """Takes the first token of a row out of the mask on ``wrong_rank``."""
    output, loss_func = gpt.forward_step(iterator, model)
    (mask,) = loss_func.args
    if gpt.data_rank() == wrong_rank:
        mask = mask.clone()
        mask.view(-1)[int(mask.view(-1).argmax())] = 0
    return output, functools.partial(loss_func.func, mask)


Step = tuple[str | None, float | None, str]
"""The error of a step, its report of mismatches, and what it printed as an error."""


def steps(mismatch: str, *wrong_ranks: int | None) -> list[Step]:
    """Each step is wrong on one rank, or on none."""
    gpt.initialize()
    model = gpt.ddp_model()
    hook = LossHook(aggregation("sample_mean"), mismatch=mismatch)
    rows = [batch_of([sequences()[i]], "bshd") for i in (0, 1)]
    results: list[Step] = []
    for wrong_rank in wrong_ranks:
        reports: list[Any] = []

        def step(wrong_rank: int | None = wrong_rank, reports: list[Any] = reports) -> None:
            function = functools.partial(forward_step, wrong_rank)
            reports += gpt.run_step(hook, model, iter(rows), 2, forward_step_func=function)

        with contextlib.redirect_stderr(io.StringIO()) as printed:
            error = error_of(step)
        number = reduced(reports)["mismatches"] if mismatch == "warn" and reports else None
        results.append((error, number, printed.getvalue()))
    return results


def test_a_mismatch_is_printed_and_counted_if_the_hook_is_to_warn() -> None:
    for rank, results in enumerate(run_host_ranks(steps, 2, "warn", None, 0, None, 1, None)):
        assert [error for error, *_ in results] == [None] * 5
        # Found after a step's reports are made, so that the next step is the first to report it.
        assert [number for _, number, _ in results] == pytest.approx([0, 0, 1, 1, 2])
        says = [
            "training continues, but the loss function's mask must be" in text
            for *_, text in results
        ]
        assert says == [step == (3 if rank else 1) for step in range(5)]


@pytest.mark.parametrize("mismatch, wrong_ranks", [("warn", (0,)), ("stop", (None, 0))])
def test_the_first_step_and_one_that_is_to_stop_raise(
    mismatch: str, wrong_ranks: tuple[int | None, ...]
) -> None:
    told, other = run_host_ranks(steps, 2, mismatch, *wrong_ranks)
    assert told[-1][0].startswith("DataError: the loss function's mask must be this rank's part")
    is_first = len(wrong_ranks) == 1  # which all ranks compare; later a launcher ends the others
    assert (other[-1][0] or "").startswith("PeerError: another rank's losses" if is_first else "")
