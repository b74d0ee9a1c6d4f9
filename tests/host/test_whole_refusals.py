"""Losses of all tokens that were gathered in another way than the script said are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_loss_agg import Microbatch
from megatron_loss_agg.mcore import LossHook, TokenLoss
from tests.host.harness import error_of, run_host_ranks
from tests.host.steps import aggregation, batches
from tests.host.whole import Consumed, parts, script

pytestmark = pytest.mark.host


MEASURED = ("LayoutError: TokenLoss(whole=", "for the losses of 'prompt_mean', whose gather")
REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "reduced, said local": (
        {"kind": "reduced_grad", "whole": "local_grad"},
        (*MEASURED, "expected whole='reduced_grad'"),
    ),
    "local, said reduced": (
        {"kind": "local_grad", "whole": "reduced_grad"},
        (*MEASURED, "expected whole='local_grad'"),
    ),
    "taken once only": ({"kind": "local_grad", "function": Consumed.apply}, ()),
    "apart from the model": (
        {"kind": "local_grad", "function": lambda x: torch.zeros_like(x, requires_grad=True)},
        (),
    ),
    "not said": (
        {"kind": "local_grad", "whole": None},
        ("LayoutError: a loss mask of all", "TokenLoss(whole='local_grad') or 'reduced_grad'"),
    ),
    "not whole": (
        {"kind": "local_grad", "gathers": False},
        ("LayoutError: a loss mask of a part", "sharded as the model's inputs are"),
    ),
    "good": ({"kind": "local_grad"}, ()),
}


def odd_pack(batch: dict[str, Tensor]) -> Microbatch:
    """The mask without the last token, which no other rank's part is as long as."""
    starts = batch["cu_seqlens"]
    mask = torch.cat([batch["loss_mask"][:, :13], batch["loss_mask"][:, :14]], dim=1)
    return Microbatch(mask, starts.new_tensor([0, 13, 27]), batch["prompt_ids"])


def odd_step(whole: bool) -> Callable[..., Any]:
    """A forward step whose losses have nothing to do with the text, of `odd_pack`."""

    def forward_step(data_iterator: Iterator[Any], model: Any) -> tuple[Tensor, TokenLoss]:
        batch = next(data_iterator)
        output, _ = script("local_grad")(iter([batch]), model)
        mask = odd_pack(batch).loss_mask

        def compute(output: Tensor) -> tuple[Tensor, dict[str, Any]]:
            x = torch.cat(parts(output.sum(dim=-1), "local_grad"), dim=1)
            return (x[:, :27] if whole else x[:, :14]), {}

        kind = "local_grad" if whole else None
        return output, TokenLoss(compute, mask if whole else mask[:, :14], kind)

    return forward_step


def errors_on_host() -> dict[str, str | None]:
    """Every rank, CP 2: what each script is told; and of others in one run."""
    from tests.host import gpt

    gpt.initialize(cp=2)
    ddp = gpt.ddp_model()

    def run(hook: LossHook, step: Any, **options: Any) -> None:
        data = batches(((0, 1),), "thd")
        gpt.run_step(hook, ddp, data, 1, forward_step_func=step, **options)

    found: dict[str, str | None] = {}
    for name, (given, _) in REFUSED.items():
        found[name] = error_of(run, LossHook(aggregation("prompt_mean")), script(**given))
    for name, step in (("odd", odd_step(True)), ("odd parts", odd_step(False))):
        hook = LossHook(aggregation("prompt_mean"), read_batch=odd_pack)
        found[name] = error_of(run, hook, step)
    hook = LossHook(aggregation("prompt_mean"))
    found["first"] = error_of(run, hook, script("reduced_grad"))
    found["another gather later"] = error_of(run, hook, script("local_grad"))
    found["parts later"] = error_of(run, hook, gpt.forward_step)
    ddp.zero_grad_buffer()
    hook = LossHook(aggregation("prompt_mean"))
    with torch.no_grad():
        found["evaluation"] = error_of(run, hook, script("reduced_grad"), forward_only=True)
    found["after an evaluation"] = error_of(run, hook, script("reduced_grad", whole="local_grad"))
    return found


def test_another_gather_than_said_is_refused_on_every_rank() -> None:
    for rank in run_host_ranks(errors_on_host, 2, timeout=90):
        for name, (_, texts) in REFUSED.items():
            assert (rank[name] is None) is (not texts), (name, rank[name])
            assert [text for text in texts if text not in str(rank[name])] == [], rank[name]
        assert rank["first"] is rank["another gather later"] is rank["evaluation"] is None
        assert rank["odd"] is None
        assert "MaskError: a loss mask of shape (1, 14), where" in str(rank["odd parts"])
        assert "whose gather is" in str(rank["after an evaluation"])
        assert rank["parts later"] is None
