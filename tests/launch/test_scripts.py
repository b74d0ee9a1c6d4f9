"""Scripts of other forms than pretrain_gpt.py: exact, or refused by name in the first step."""

from __future__ import annotations

import argparse
import functools
from typing import Any

import pytest
import torch

from tests.host.harness import EXACT, error_of, run_host_ranks

pytestmark = pytest.mark.host

N_MB, RANKS = 2, 2
IMAGE = ("--loss-aggregation-batch", "tests.launch.readers:after_image")
MODEL = ("--loss-aggregation-mask", "model")
# Scripts and further flags; a mask that the model makes needs a flag, or a reader that says it.
FLAGS: dict[str, tuple[str, ...]] = {
    "pretrain_t5.py": (),
    "pretrain_vlm.py": IMAGE,
    "pretrain_vlm.py, mask of the model": MODEL,
}
EXACT_CASES = [(name, mode) for name in FLAGS for mode in ("token_mean", "sample_mean")]
EXACT_CASES.remove(("pretrain_vlm.py, mask of the model", "token_mean"))  # needs the per-token flag


def gradient(script: Any, rank: int, *flags: str) -> tuple[Any, Any]:
    """One step as Megatron's training loop makes it: the model, and its gradients."""
    from megatron.training import arguments, training
    from megatron.training.global_vars import set_args

    from megatron_loss_agg.mcore.install import install
    from tests.host import gpt
    from tests.launch import script_models

    model = gpt.data_parallel(script.model(script_models.config()))
    uninstall = install(watch_exit=False)
    try:
        parser = arguments.add_megatron_arguments(argparse.ArgumentParser())
        set_args(parser.parse_known_args(["--loss-aggregation", *flags])[0])
        with gpt.KeepDouble():
            training.get_forward_backward_func()(
                forward_step_func=script.forward_step,
                data_iterator=iter([script_models.batch(rank * N_MB + i) for i in range(N_MB)]),
                model=[model],
                num_microbatches=N_MB,
                seq_length=script_models.LENGTH,
                micro_batch_size=2,
                forward_only=False,
            )
    finally:
        uninstall()
    return model.module, [p.main_grad.clone() for p in model.parameters()]


def error_of_gradient(script: Any, mode: str, rank: int, *flags: str) -> float:
    """Relative to the formula, applied to the whole step in this process."""
    from tests.host import gpt
    from tests.launch import script_models

    model, found = gradient(script, rank, mode, *flags)
    whole = [script_models.batch(number) for number in range(RANKS * N_MB)]
    sums = torch.stack([batch["loss_mask"].sum(dim=1) for batch in whole])
    loss: Any = 0.0
    for batch, tokens in zip(whole, sums, strict=True):
        with gpt.KeepDouble():
            losses, mask = script.forward(model, batch)
        by_row = (losses * mask).sum(dim=1)
        if mode == "sample_mean":
            by_row = by_row / tokens.clamp(min=1) / sums.numel()
        else:
            by_row = by_row / sums.sum()
        loss = loss + by_row.sum()
    expected = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    pairs = [(x, y) for x, y in zip(found, expected, strict=True) if y is not None]
    difference, norm = (torch.cat([t.flatten() for t in ts]) for ts in zip(*pairs, strict=True))
    return float((difference - norm).norm() / norm.norm())


def scripts_on_host() -> dict[Any, Any]:
    """One rank: gradient errors by case, and the text of an error by script."""
    import torch.distributed as dist

    from tests.host import gpt
    from tests.launch.script_models import SCRIPTS

    gpt.initialize()
    rank = dist.get_rank()
    found: dict[Any, Any] = {
        (name, mode): error_of_gradient(SCRIPTS[name.split(",")[0]], mode, rank, *FLAGS[name])
        for name, mode in EXACT_CASES
    }
    vision = SCRIPTS["pretrain_vlm.py"]
    return found | {"unsaid": error_of(gradient, vision, rank, "token_mean")}


@functools.cache
def found() -> list[dict[Any, Any]]:
    return run_host_ranks(scripts_on_host, RANKS)


@pytest.mark.parametrize("case", EXACT_CASES)
def test_gradients_are_exact(case: tuple[str, str]) -> None:
    assert max(rank[case] for rank in found()) <= EXACT


def test_a_mask_that_the_model_makes_is_refused_unless_a_flag_or_a_reader_says_it() -> None:
    for rank in found():
        assert rank["unsaid"].startswith("MaskError: a loss mask of shape ")
        assert "give --loss-aggregation-mask model" in rank["unsaid"]
