"""The stand-ins for a GPU: what Megatron asks of one is as on a GPU, and nobody else is touched."""

from __future__ import annotations

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
from tests.host.harness import MOE, error_of, on_ranks_of, run_host_ranks
from tests.host.refusals import assert_says
from tests.host.steps import sequences


def test_nothing_changes_before_enable() -> None:
    code = (
        "import torch; before = dict(vars(torch.cuda)), torch.compile;"
        "import megatron_loss_agg.mcore.cpu;"
        "assert before == (dict(vars(torch.cuda)), torch.compile)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@on_ranks_of("dp1")
def test_every_device_is_the_cpu_and_packs_are_split_in_zigzag_inside_every_sample(
    name: str,
) -> None:
    from megatron.core import utils

    x = torch.ones(2)
    for device in ("cuda", "cuda:1", 0, torch.device("cuda", 0)):
        assert torch.zeros(2, device=device).device == x.to(device).device == x.device
        assert x.to(device, torch.float64).dtype == torch.float64
    assert x.cuda() is x
    # By this name the optimizers know a parameter on a GPU.
    assert x.type() == "torch.cuda.FloatTensor"
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
    held = [split(offsets, 12, 2, rank).tolist() for rank in range(2)]
    # Chunks of 8 / 4 = 2 and of 4 / 4 = 1 token: rank 0 has the first and the last of each.
    assert held == [[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]]


# Attention over context-parallel ranks and packed sequences against Megatron's own, which knows
# neither: on one rank, under the mask that says what a token sees. Causal attention is that of
# every model of the other tests.

HEADS, GROUPS, DIM = 4, 2, 3
# Padded to multiples of 8 = 2 * the largest context-parallel size.
LENGTHS, PADDED = torch.tensor([5, 16, 1, 9]), torch.tensor([8, 16, 8, 16])
TOKENS = int(PADDED.sum())
DOCUMENTS = torch.arange(len(PADDED)).repeat_interleave(PADDED)
LATER = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
OTHERS = DOCUMENTS.unsqueeze(1) != DOCUMENTS
PADDING = torch.arange(TOKENS) - (PADDED.cumsum(0) - PADDED)[DOCUMENTS] >= LENGTHS[DOCUMENTS]


def attention(cp: int, **config: Any) -> Any:
    """A model of the local layer specification, in fp64."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    gpt.initialize(cp)
    torch.set_default_dtype(torch.float64)
    heads = {"num_attention_heads": HEADS, "num_query_groups": GROUPS, "hidden_size": HEADS * DIM}
    settings = {**gpt.SETTINGS, **heads, "context_parallel_size": cp, **config}
    kind = AttnMaskType.causal
    return LocalSpecProvider().core_attention()(TransformerConfig(**settings), 1, kind, "self")


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


def compared(cp: int) -> list[tuple[Tensor, Tensor]]:
    """Every rank: what it gets, and what it should."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    attend, rank = attention(cp), dist.get_rank() % cp

    def whole(hidden: Tensor, tensors: list[Tensor]) -> list[Tensor]:
        """Of Megatron's own; ``hidden``: what a token does not see."""
        return pull_back(lambda *qkv: DotProductAttention.forward(attend, *qkv, hidden), tensors)

    real, padded = (F.pad(x.cumsum(0), (1, 0)).int() for x in (LENGTHS, PADDED))
    layout, tensors = CPLayout.thd(padded, cp, rank), inputs(TOKENS, 1)
    local = [layout.shard(x, dim=0).squeeze(1) for x in tensors]
    params = {"packed_seq_params": packed_between(real, padded)}
    got = pull_back(attend, local, None, AttnMaskType.padding, **params)
    hidden = (OTHERS | PADDING).expand(1, 1, -1, -1)
    wanted = [layout.shard(x, dim=0) for x in whole(hidden, tensors)]

    # As by --reset-attention-mask.
    layout, tensors = CPLayout.bshd(TOKENS, cp, rank), inputs(TOKENS, 2)
    hidden = (OTHERS | LATER).expand(2, 1, -1, -1)
    local = [layout.shard(x, dim=0) for x in tensors]
    got += pull_back(attend, local, layout.shard(hidden, dim=2))
    wanted += [layout.shard(x, dim=0) for x in whole(hidden, tensors)]

    # A row with the parameters of a pack, as in Megatron's scripts under hybrid context parallelism.
    offsets, tensors = torch.tensor([0, TOKENS]).int(), inputs(TOKENS, 1)
    local = [layout.shard(x, dim=0) for x in tensors]
    params = {"packed_seq_params": packed_between(offsets, offsets)}
    got += pull_back(attend, local, None, AttnMaskType.causal, **params)
    wanted += [layout.shard(x, dim=0) for x in whole(LATER.expand(1, 1, -1, -1), tensors)]
    return [(x.view(y.shape), y) for x, y in zip(got, wanted, strict=True)]


@pytest.mark.parametrize("ranks, cp", [(1, 1), (4, 4), (4, 2)])
def test_attention_that_is_not_causal_or_masked_by_the_data_is_megatrons(
    ranks: int, cp: int
) -> None:
    for of_rank in run_host_ranks(compared, ranks, cp):
        for got, wanted in of_rank:
            torch.testing.assert_close(got, wanted, rtol=0, atol=1e-13)


@on_ranks_of("dp1")
def test_experts_with_biases_have_the_gradient_of_their_loss(name: str) -> None:
    model = gpt.build(**MOE | {"add_bias_linear": True})

    def loss() -> Tensor:
        return gpt.plain_losses(model, sequences()[0]).sum()

    loss().backward()
    biases = [x for key, x in model.named_parameters() if key.endswith("linear_fc2.bias")]
    slopes, gradients = [], []
    for bias in biases:
        gradients.append(0.0 if bias.grad is None else float(bias.grad[0]))
        around = []
        for moved in (1e-5, -2e-5, 1e-5):
            bias.data[0] += moved
            around.append(float(loss().detach()))
        slopes.append((around[0] - around[1]) / 2e-5)
    assert len(biases) == 8 and any(gradients)
    assert gradients == pytest.approx(slopes, rel=1e-6, abs=1e-8)


UNCOVERED = (
    "DataError: context-parallel rank 0 of 1 must have 12 tokens, got 16. Let the sequence offsets "
    "cover every token, including padding."
)
WINDOW = "HostError: --window-size cannot go with context parallelism or packed"


@on_ranks_of("dp1")
def test_what_attention_would_ignore_is_refused(name: str) -> None:
    *qkv, _ = (x.squeeze(1) for x in inputs(16, 1))
    for end, config, says in ((12, {}, UNCOVERED), (16, {"window_size": (4, 0)}, WINDOW)):
        offsets = torch.tensor([0, end])
        params = {"packed_seq_params": packed_between(offsets, offsets)}
        assert_says(error_of(attention(1, **config), *qkv, None, **params), says)
