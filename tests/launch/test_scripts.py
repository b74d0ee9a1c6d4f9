"""Scripts of other forms than pretrain_gpt.py: exact, or refused by name in the first step."""

from __future__ import annotations

import argparse
import contextlib
import functools
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pytest
import torch

from tests.host.harness import EXACT, error_of, run_host_ranks

pytestmark = pytest.mark.host

EXACT_SCRIPTS = ["pretrain_t5.py", "pretrain_vlm.py"]
with contextlib.suppress(PackageNotFoundError):
    if tuple(map(int, version("megatron-core").split(".")[:2])) >= (0, 18):
        EXACT_SCRIPTS.append("pretrain_hybrid.py")
MODES = ("token_mean", "sample_mean")
N_MB, RANKS = 2, 2
IMAGE = ("--loss-aggregation-batch", "tests.launch.readers:after_image")


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


def scripts_on_host() -> dict[str, Any]:
    """One rank: gradient errors, or the text of an error, by script and mode."""
    import torch.distributed as dist

    from tests.host import gpt
    from tests.launch.script_models import SCRIPTS

    gpt.initialize()
    rank = dist.get_rank()
    facts: dict[str, Any] = {}
    for name in EXACT_SCRIPTS:
        flags = IMAGE if "vlm" in name else ()
        for mode in MODES:
            facts[f"{name} {mode}"] = error_of_gradient(SCRIPTS[name], mode, rank, *flags)
    vision = SCRIPTS["pretrain_vlm.py"]
    facts["model's mask"] = error_of_gradient(
        vision, "sample_mean", rank, "--loss-aggregation-mask", "model"
    )
    for name in ("pretrain_vlm.py", "pretrain_bert.py"):
        facts[name] = error_of(gradient, SCRIPTS[name], rank, "token_mean")
    return facts


@functools.cache
def facts() -> list[dict[str, Any]]:
    return run_host_ranks(scripts_on_host, RANKS)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("script", EXACT_SCRIPTS)
def test_gradients_are_exact(script: str, mode: str) -> None:
    assert max(rank[f"{script} {mode}"] for rank in facts()) <= EXACT


def test_a_mask_that_the_model_makes_is_refused_unless_a_flag_or_a_reader_says_it() -> None:
    for rank in facts():
        assert rank["pretrain_vlm.py"].startswith("MaskError: a loss mask of shape ")
        assert "give --loss-aggregation-mask model" in rank["pretrain_vlm.py"]
        assert rank["model's mask"] <= EXACT


def test_a_model_with_a_second_output_for_another_loss_is_refused() -> None:
    for rank in facts():
        assert rank["pretrain_bert.py"].startswith(
            "MaskError: losses are a tuple for a loss mask of "
        )
        assert "return a TokenLoss" in rank["pretrain_bert.py"]
