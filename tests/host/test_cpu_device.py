"""The stand-ins for a GPU: what Megatron asks of one, and that nobody else is touched."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.host.harness import run_host_ranks

pytestmark = pytest.mark.host


def test_nothing_changes_before_enable() -> None:
    code = (
        "import torch; before = dict(vars(torch.cuda)), torch.compile;"
        "import megatron_loss_agg.mcore.cpu;"
        "assert before == (dict(vars(torch.cuda)), torch.compile)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


class _PlacedInBackward(torch.autograd.Function):
    """As Megatron's own functions do, it asks for a GPU in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        two = torch.full_like(grad, 2.0, device=torch.cuda.current_device())
        return two.cuda() * grad.to("cuda")


def _placed_in_script() -> Tensor:
    return torch.zeros(2, device="cuda")


def stand_ins() -> None:
    """One rank: placements, random states and events."""
    from megatron_loss_agg.mcore.cpu import enable

    enable()  # again: does nothing
    devices = "cuda", "cuda:1", 0, torch.device("cuda", 0), torch.cuda.current_device()
    x = torch.ones(2)
    for device in devices:
        assert torch.zeros(2, device=device).device == x.to(device).device == x.device
        assert x.to(device, torch.float64).dtype == torch.float64
    assert torch.empty(2, device="meta").device.type == "meta"
    assert x.cuda() is x
    assert torch.jit.script(_placed_in_script)().device == x.device
    assert torch.nn.Linear(1, 1).cuda().weight.device == x.device
    assert not torch.zeros(2, pin_memory=True).is_pinned()
    # By these names the optimizers know a parameter on a GPU.
    assert x.type() == "torch.cuda.FloatTensor"
    assert x.type(torch.float64).dtype == torch.float64
    leaf = torch.ones(2, requires_grad=True)
    (gradient,) = torch.autograd.grad(_PlacedInBackward.apply(leaf).sum(), leaf)
    _PlacedInBackward.apply(leaf).sum().backward()
    assert gradient.tolist() == leaf.grad.tolist() == [2.0, 2.0]
    torch.cuda.manual_seed(3)
    state = torch.cuda.get_rng_state()
    first = torch.rand(2)
    torch.cuda.set_rng_state(state)
    assert torch.equal(first, torch.rand(2))  # the state is the one that draws
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    time.sleep(0.02)
    end.record()
    assert start.elapsed_time(end) >= 20.0  # milliseconds


def test_every_device_is_the_cpu() -> None:
    run_host_ranks(stand_ins, 1)


def splits_on_host() -> list[Any]:
    """One rank: what each context-parallel rank of two holds."""
    from megatron.core import utils

    split = utils.tex.thd_get_partitioned_indices
    offsets = torch.tensor([0, 8, 12, 12], dtype=torch.int32)
    return [split(offsets, 12, 2, rank).tolist() for rank in range(2)]


def test_packs_are_split_in_zigzag_inside_every_sample() -> None:
    (held,) = run_host_ranks(splits_on_host, 1)
    # Chunks of 8 / 4 = 2 and of 4 / 4 = 1 token: rank 0 has the first and the last of each.
    assert held == [[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]]


def trained(tp: int, dtype: torch.dtype, **options: Any) -> Any:
    """The decoder of the tiny GPT in DDP, after one backward pass on the same data."""
    from megatron.core.distributed import finalize_model_grads

    from tests.host import gpt

    gpt.initialize(tensor_model_parallel_size=tp)
    module = gpt.build(dtype, sequence_parallel=tp > 1)
    module.post_process = False  # hidden states, and no logits
    ddp = gpt.data_parallel(module, **options)
    ddp.zero_grad_buffer()
    tokens = torch.arange(8).unsqueeze(0)
    out = ddp(tokens, tokens, None)
    weight = torch.randn(8, 1, 16, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    if tp > 1:
        weight = weight.chunk(2)[torch.distributed.get_rank()]
    (out * weight.to(dtype)).sum().backward()
    finalize_model_grads([ddp])
    return ddp


def norm_gradients(tp: int) -> dict[str, Tensor]:
    ddp = trained(tp, torch.float64)
    return {n: p.main_grad for n, p in ddp.module.named_parameters() if "norm" in n}


def test_norms_under_sequence_parallelism() -> None:
    [expected] = run_host_ranks(norm_gradients, 1, 1)
    assert len(expected) == 10  # weight and bias of two norms a layer, and of the last one
    for got in run_host_ranks(norm_gradients, 2, 2):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14)


def optimized(distributed: bool) -> tuple[float, list[Tensor]]:
    """Norm of the gradient, and the parameters after one step of Adam, clipped to a norm of 1."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    ddp = trained(1, torch.float32, use_distributed_optimizer=distributed)
    config = OptimizerConfig(
        optimizer="adam",
        lr=0.5,
        weight_decay=0.0,
        adam_eps=1.0,  # without it Adam's first step does not depend on clipping
        clip_grad=1.0,
        use_distributed_optimizer=distributed,
    )
    before = [p.detach().clone() for p in ddp.parameters()]
    gradients = [p.main_grad.clone() for p in ddp.parameters()]
    succeeded, norm, _ = get_megatron_optimizer(config, [ddp]).step()
    assert succeeded
    if not distributed:  # otherwise this rank holds but a part of the gradient
        whole = torch.cat([gradient.flatten() for gradient in gradients])
        assert norm == pytest.approx(float(whole.norm()), rel=1e-5)
        for p, old, gradient in zip(ddp.parameters(), before, gradients, strict=True):
            clipped = gradient / norm
            torch.testing.assert_close(p.detach(), old - 0.5 * clipped / (clipped.abs() + 1))
    return norm, [p.detach() for p in ddp.parameters()]


def test_clipping_and_the_distributed_optimizer() -> None:
    norm, expected = run_host_ranks(optimized, 2, False)[0]
    assert norm > 1.0
    for got in run_host_ranks(optimized, 2, True):
        torch.testing.assert_close(got, (norm, expected))
