"""The stand-ins for a GPU: what Megatron asks of one is as on a GPU, and nobody else is touched."""

from __future__ import annotations

import functools
import subprocess
import sys
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_loss_agg import CPLayout
from tests.host import gpt
from tests.host.harness import error_of, run_host_ranks


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


def stand_ins() -> list[list[int]]:
    """One rank: placements, random states and events; and a pack's split over two ranks."""
    from megatron.core import utils

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
    _PlacedInBackward.apply(leaf).sum().backward()
    assert leaf.grad.tolist() == [2.0, 2.0]
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
    offsets = torch.tensor([0, 8, 12, 12], dtype=torch.int32)
    split = utils.tex.thd_get_partitioned_indices
    return [split(offsets, 12, 2, rank).tolist() for rank in range(2)]


def test_every_device_is_the_cpu_and_packs_are_split_in_zigzag_inside_every_sample() -> None:
    (held,) = run_host_ranks(stand_ins, 1)
    # Chunks of 8 / 4 = 2 and of 4 / 4 = 1 token: rank 0 has the first and the last of each.
    assert held == [[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]]


# Attention over context-parallel ranks and packed sequences against Megatron's own, which knows
# neither: on one rank, under the mask that says what a token sees.

HEADS, GROUPS, DIM = 4, 2, 3
# Padded to multiples of 8 = 2 * the largest context-parallel size.
LENGTHS, PADDED = torch.tensor([5, 16, 1, 9]), torch.tensor([8, 16, 8, 16])
TOKENS = int(PADDED.sum())
DOCUMENTS = torch.arange(len(PADDED)).repeat_interleave(PADDED)
LATER = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
OTHERS = DOCUMENTS.unsqueeze(1) != DOCUMENTS
PADDING = torch.arange(TOKENS) - (PADDED.cumsum(0) - PADDED)[DOCUMENTS] >= LENGTHS[DOCUMENTS]
# What a token does not see; whether sequences are packed, or their mask is that of the data.
KINDS: dict[str, tuple[Tensor, bool]] = {
    "packed": (OTHERS | LATER, True),
    "packed, not causal": (OTHERS | PADDING, True),
    "whole": (LATER, False),
    "masked by the data": (OTHERS | LATER, False),  # as by --reset-attention-mask
}


def attention(cp: int, **config: Any) -> Any:
    """What the local layer specification builds, in fp64."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    gpt.initialize(cp)
    torch.set_default_dtype(torch.float64)
    heads = {"num_attention_heads": HEADS, "num_query_groups": GROUPS, "hidden_size": HEADS * DIM}
    settings = {**gpt.SETTINGS, **heads, "context_parallel_size": cp, **config}
    kind = AttnMaskType.causal
    return LocalSpecProvider().core_attention()(TransformerConfig(**settings), 1, kind, "self")


def stock(attend: Any) -> Any:
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    return functools.partial(DotProductAttention.forward, attend)


def packed_between(real: Tensor, padded: Tensor) -> Any:
    from megatron.core.packed_seq_params import PackedSeqParams

    return PackedSeqParams("thd", real, real, padded, padded, 16, 16)


def inputs(tokens: int, batch: int) -> list[Tensor]:
    """Query, key, value and the gradient of the output, the same on every rank."""
    shapes = (HEADS, DIM), (GROUPS, DIM), (GROUPS, DIM), (HEADS * DIM,)
    g = torch.Generator().manual_seed(0)
    return [torch.randn(tokens, batch, *s, generator=g, dtype=torch.float64) for s in shapes]


def pull_back(attend: Any, tensors: list[Tensor], *args: Any, **kwargs: Any) -> list[Tensor]:
    """The output and the gradients of query, key and value."""
    *qkv, grad = tensors
    qkv = [x.detach().requires_grad_() for x in qkv]
    out = attend(*qkv, *args, **kwargs)
    return [out.detach(), *torch.autograd.grad(out, qkv, grad.view_as(out))]


def compared(cp: int) -> dict[str, tuple[list[Tensor], list[Tensor]]]:
    """Every rank, for each of `KINDS`: what it gets, and what it should."""
    from megatron.core.transformer.enums import AttnMaskType

    attend, found = attention(cp), {}
    real, padded = (F.pad(x.cumsum(0), (1, 0)).int() for x in (LENGTHS, PADDED))
    for kind, (hidden, packs) in KINDS.items():
        batch = 1 if packs else 2
        mask, tensors = hidden.expand(batch, 1, -1, -1), inputs(TOKENS, batch)
        if packs:
            layout = CPLayout.thd(padded, cp, dist.get_rank() % cp)
            local = [layout.shard(x, dim=0).squeeze(1) for x in tensors]
            causal = AttnMaskType.padding if "not" in kind else AttnMaskType.causal
            params = packed_between(real, padded)
            got = pull_back(attend, local, None, causal, packed_seq_params=params)
        else:
            layout = CPLayout.bshd(TOKENS, cp, dist.get_rank() % cp)
            ours = layout.shard(mask, dim=2) if "data" in kind else None
            got = pull_back(attend, [layout.shard(x, dim=0) for x in tensors], ours)
        wanted = [layout.shard(x, dim=0) for x in pull_back(stock(attend), tensors, mask)]
        found[kind] = [x.view(y.shape) for x, y in zip(got, wanted, strict=True)], wanted
    return found


@pytest.mark.parametrize("ranks, cp", [(1, 1), (2, 2), (4, 4), (4, 2)])
def test_attention_is_megatrons_own(ranks: int, cp: int) -> None:
    for rank in run_host_ranks(compared, ranks, cp):
        for kind, (got, wanted) in rank.items():
            torch.testing.assert_close(got, wanted, rtol=0, atol=1e-13, msg=lambda m, k=kind: k + m)


def alone() -> list[str | None]:
    """One rank: attention to whole sequences is Megatron's to the bit; what is refused."""
    from megatron.core.transformer.enums import AttnMaskType

    attend, (*qkv, _) = attention(1), inputs(32, 2)
    assert torch.equal(attend(*qkv, None), stock(attend)(*qkv, None))
    *qkv, _ = (x.squeeze(1) for x in inputs(16, 1))

    def error(offsets: list[int], **config: Any) -> str | None:
        params = packed_between(*[torch.tensor(offsets)] * 2)
        given = *qkv, None, AttnMaskType.causal
        return error_of(attention(1, **config), *given, packed_seq_params=params)

    return [error([0, 12]), error([0, 16], window_size=(4, 0))]


def test_nothing_changes_without_need_and_what_would_be_ignored_is_refused() -> None:
    ((uncovered, window),) = run_host_ranks(alone, 1)
    assert uncovered == (
        "LayoutError: got 16 tokens on context-parallel rank 0 of 1; expected 12: sequence offsets "
        "must cover every token, and padding"
    )
    assert window.startswith("HostError: --window-size with context parallelism or packed")
