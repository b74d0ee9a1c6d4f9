"""What is refused by name under masks that the model makes, on every rank."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loss_agg import Microbatch
from megatron_loss_agg.mcore import (
    DatasetReports,
    Extension,
    LateMicrobatch,
    Loop,
    LossHook,
    read_batch,
    read_samples,
)
from tests.host.harness import error_of, run_host_ranks
from tests.host.steps import Counted, aggregation
from tests.host.test_late_masks import SUMMED, count

pytestmark = pytest.mark.host


def with_mask(change: Any) -> Any:
    """A forward step whose model makes ``change(mask)``."""
    from tests.host import gpt

    return gpt.forward_step_with(lambda f, mask: functools.partial(f, change(mask)))


def bad(mask: Tensor, value: float, ranks: tuple[int, ...] = (0, 1)) -> Tensor:
    """On some ranks with one other element."""
    mask = mask.clone()
    if dist.get_rank() in ranks:
        mask.view(-1)[0] = value
    return mask


def one_more(batch: Any) -> LateMicrobatch:
    return LateMicrobatch(len(batch["tokens"]) + 1)


def by_turns(batch: Any) -> Microbatch | LateMicrobatch:
    return Microbatch(torch.ones(2, 3)) if batch["number"] % 2 else count(batch)


def failing(batch: Any) -> LateMicrobatch:
    if dist.get_rank() == 1:
        raise OSError("disk")
    return count(batch)


PEER = "PeerError: "
BAD = "MaskError: the model's mask of microbatch 0 has other values"
NO_TOTAL = "ModeError: calculate_per_token_loss=False and 'token_mean' with a mask that the model"


class Needing(Extension):
    def __init__(self, need: str) -> None:
        self.needs = frozenset({need})


OPTIONS: dict[str, dict[str, Any]] = {
    "an extension that needs 'masks' with a mask that the model makes": {
        "extensions": [Needing("masks")]
    },
    "an extension that needs 'stages' with": {"extensions": [Needing("stages")]},
    "an extension that needs 'dataset' with": {"extensions": [DatasetReports()]},
    "empty_step='skip' with": {"empty_step": "skip"},
    "Loop(averages_quotients=True) (Megatron's --sft) with": {
        "loop": Loop(averages_quotients=True)
    },
}
# Mode, per-token flag, what is wrong, and what each rank says.
REFUSED: dict[str, tuple[str, bool, dict[str, Any], list[str | None]]] = {
    "good": ("sample_sum", False, {}, [None, None]),
    "tokens of the step": ("token_mean", False, {}, [NO_TOTAL] * 2),
    "tokens of the step, in an evaluation": (
        "token_mean",
        False,
        {"forward_only": True},
        [NO_TOTAL] * 2,
    ),
    "fractions divided by the host": (
        "token_mean",
        True,
        {"change": functools.partial(bad, value=0.5)},
        ["MaskError: the model's mask of microbatch 0 has other values"] * 2,
    ),
    **{
        f"mask of {value}": (
            "sum",
            False,
            {"change": functools.partial(bad, value=value)},
            [BAD] * 2,
        )
        for value in (-1.0, torch.nan, torch.inf)
    },
    "flat mask": (
        "sum",
        False,
        {"change": Tensor.flatten},
        ["MaskError: 'sum' of a model's mask of shape (144,) with None rows, for 2 samples"] * 2,
    ),
    "other number of samples": (
        "sample_sum",
        False,
        {"read_batch": one_more},
        ["MaskError: 'sample_sum' of a model's mask of shape (2, 72) with 2 rows, for 3 samples"]
        * 2,
    ),
    "packed rows": (
        "sample_mean",
        False,
        {"layout": "thd", "read_batch": count},
        ["MaskError: 'sample_mean' of a model's mask of shape (1, 28) with 2 packed seque"] * 2,
    ),
    "packs without a reader": (
        "sum",
        False,
        {"layout": "thd"},
        ["MaskError: 'sum' of a model's mask of shape (1, 28) with 2 packed sequences, for 1 "] * 2,
    ),
    "masks of some batches": (
        "sum",
        False,
        {"read_batch": by_turns},
        ["FunctionError: the function that reads batches returned a LateMicrobatch; expected"] * 2,
    ),
    "reader on one rank": ("sum", False, {"read_batch": failing}, [PEER, "OSError: disk"]),
    "experts": (
        "sum",
        True,
        {"config": {"num_moe_experts": 2}},
        ["ModeError: calculate_per_token_loss and the model's num_moe_experts with a mask"] * 2,
    ),
    "mode": ("prompt_mean", False, {}, ["ModeError: 'prompt_mean' with a mask that the mod"] * 2),
    **{
        f"options: {text}": ("sum", False, options, [f"ModeError: {text}"] * 2)
        for text, options in OPTIONS.items()
    },
    "good again": ("sample_sum", True, {}, [None, None]),
}


def errors_of_rank(cases: Any, cp: int) -> dict[str, str | None]:
    from tests.host import gpt

    gpt.initialize(cp)
    models = {flag: gpt.ddp_model(flag) for flag in (False, True)}

    def refused(mode: str, per_token: bool, wrong: dict[str, Any]) -> None:
        wrong = dict(wrong)
        change, layout = wrong.pop("change", None), wrong.pop("layout", "bshd")
        options = {k: wrong.pop(k) for k in ("extensions", "empty_step", "loop") if k in wrong}
        read_batch = wrong.pop("read_batch", read_samples)
        model, saved = models[per_token], vars(models[per_token].config).copy()
        vars(model.config).update(wrong.pop("config", {}))
        own = with_mask(change) if change else gpt.forward_step
        call = {"forward_step_func": own, **wrong}
        hook = LossHook(aggregation(mode), read_batch=read_batch, **options)
        try:
            gpt.run_step(hook, model, Counted(gpt.data_rank(), layout), 2, 2, **call)
        finally:
            vars(model.config).update(saved)

    return {name: error_of(refused, *case[:3]) for name, case in cases.items()}


@functools.cache
def errors() -> list[dict[str, str | None]]:
    return run_host_ranks(errors_of_rank, 2, REFUSED, 1)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_exact_is_refused_on_every_rank(name: str) -> None:
    for rank, expected in zip(errors(), REFUSED[name][3], strict=True):
        assert (rank[name] or "").startswith(expected or "") and bool(rank[name]) == bool(expected)


# Of ranks that hold parts of the same samples.
SHARDED = {
    mode: (mode, False, {"change": functools.partial(bad, value=-1.0, ranks=(1,))}, [])
    for mode in SUMMED
}


def test_context_parallel_ranks_hear_of_anothers_mask() -> None:
    for rank in run_host_ranks(errors_of_rank, 2, SHARDED, 2):
        for mode in SHARDED:
            assert rank[mode].startswith(BAD)


def setting_of_one_rank() -> str | None:
    from tests.host import gpt

    gpt.initialize()
    read = read_samples if dist.get_rank() else read_batch
    hook = LossHook(aggregation("sum"), read_batch=read)
    return error_of(gpt.run_step, hook, gpt.ddp_model(), Counted(dist.get_rank()), 2, 2)


def test_ranks_that_differ_in_who_makes_the_mask_are_refused() -> None:
    for error in run_host_ranks(setting_of_one_rank, 2):
        assert error.startswith("ModeError: ranks have different settings: mask=batch on rank(s)")
