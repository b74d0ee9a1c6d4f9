"""Attention over context-parallel ranks and packed sequences against Megatron's own, one by one."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_loss_agg import AggregationError, CPLayout
from tests.host.harness import run_host_ranks

pytestmark = pytest.mark.host

HEADS, GROUPS, DIM, BATCH = 4, 2, 3, 2
# Padded to multiples of 8 = 2 * the largest context-parallel size.
LENGTHS, PADDED = [5, 16, 1, 9], [8, 16, 8, 16]
TOLERANCE = {"rtol": 0.0, "atol": 1e-13}


def attention(cp: int, **config: Any) -> Any:
    """What the local layer specification builds, in fp64."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    from tests.host import gpt

    gpt.initialize(cp)
    torch.set_default_dtype(torch.float64)
    settings = {
        "num_layers": 1,
        "hidden_size": HEADS * DIM,
        "num_attention_heads": HEADS,
        "num_query_groups": GROUPS,
        "attention_dropout": 0.0,
        "context_parallel_size": cp,
        "masked_softmax_fusion": False,
        "attention_softmax_in_fp32": False,
        **config,
    }
    return LocalSpecProvider().core_attention()(
        TransformerConfig(**settings), 1, AttnMaskType.causal, "self"
    )


def inputs(tokens: int, batch: int) -> list[Tensor]:
    """Query, key, value and the gradient of the output, the same on every rank."""
    g = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(tokens, batch, *shape, generator=g, dtype=torch.float64)

    return [draw(HEADS, DIM), draw(GROUPS, DIM), draw(GROUPS, DIM), draw(HEADS * DIM)]


def pull_back(attend: Any, tensors: list[Tensor], *args: Any, **kwargs: Any) -> list[Tensor]:
    """The output and the gradients of query, key and value."""
    *qkv, grad = tensors
    qkv = [x.detach().requires_grad_() for x in qkv]
    out = attend(*qkv, *args, **kwargs)
    return [out.detach(), *torch.autograd.grad(out, qkv, grad.view_as(out))]


def whole(cp: int, mask: Tensor | None) -> tuple[list[Tensor], list[Tensor]]:
    """This rank's part of the result, and of what one rank alone gets from the whole sequence."""
    import torch.distributed as dist
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    attend = attention(cp)
    layout = CPLayout.bshd(32, cp, dist.get_rank() % cp)
    tensors = inputs(32, BATCH)
    ours = mask if mask is None else layout.shard(mask, dim=2)
    got = pull_back(attend, [layout.shard(x, dim=0) for x in tensors], ours)
    expected = pull_back(lambda *a: DotProductAttention.forward(attend, *a), tensors, mask)
    return got, [layout.shard(x, dim=0) for x in expected]


@pytest.mark.parametrize("cp", [2, 4])
def test_whole_sequences(cp: int) -> None:
    for got, expected in run_host_ranks(whole, cp, cp, None):
        torch.testing.assert_close(got, expected, **TOLERANCE)


def test_groups_that_do_not_begin_at_rank_0() -> None:
    for got, expected in run_host_ranks(whole, 4, 2, None):
        torch.testing.assert_close(got, expected, **TOLERANCE)


def test_a_mask_from_the_data_is_kept() -> None:
    """As with --reset-attention-mask: documents that end at 11 and 20."""
    document = torch.searchsorted(torch.tensor([11, 20]), torch.arange(32), right=True)
    mask = document.unsqueeze(1) != document
    mask |= torch.ones(32, 32, dtype=torch.bool).triu(1)
    for got, expected in run_host_ranks(whole, 2, 2, mask.expand(BATCH, 1, 32, 32)):
        torch.testing.assert_close(got, expected, **TOLERANCE)


def packed(cp: int, causal: bool) -> tuple[list[Tensor], list[Tensor]]:
    """As ``whole``, but against Megatron's own attention to one sequence at a time."""
    import torch.distributed as dist
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    attend = attention(cp)
    real, padded = (torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (LENGTHS, PADDED))
    params = PackedSeqParams("thd", real, real, padded, padded, max(PADDED), max(PADDED))
    layout = CPLayout.thd(padded, cp, dist.get_rank())
    tensors = inputs(sum(PADDED), 1)
    local = [layout.shard(x, dim=0).squeeze(1) for x in tensors]
    kind = AttnMaskType.causal if causal else AttnMaskType.padding
    got = pull_back(attend, local, None, kind, packed_seq_params=params)

    def attend_alone(length: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if causal:
            return DotProductAttention.forward(attend, query, key, value, None)
        nowhere = torch.zeros(1, 1, len(query), length, dtype=torch.bool)
        return DotProductAttention.forward(attend, query, key[:length], value[:length], nowhere)

    alone = [
        pull_back(functools.partial(attend_alone, length), list(parts))
        for length, *parts in zip(LENGTHS, *(x.split(PADDED) for x in tensors), strict=True)
    ]
    expected = [layout.shard(torch.cat(x), dim=0) for x in zip(*alone, strict=True)]
    return [x.view(y.shape) for x, y in zip(got, expected, strict=True)], expected


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_packed_sequences(cp: int, causal: bool) -> None:
    for got, expected in run_host_ranks(packed, cp, cp, causal):
        torch.testing.assert_close(got, expected, **TOLERANCE)


def alone_in_a_larger_group() -> bool:
    """Hybrid context parallelism: this batch lies on one rank of the two."""
    from megatron.core.packed_seq_params import PackedSeqParams

    attend = attention(2)
    offsets = torch.tensor([0, 7, 16])
    params = PackedSeqParams("thd", offsets, offsets, offsets, offsets, 9, 9)
    params.local_cp_size = 1
    *qkv, _ = (x.squeeze(1) for x in inputs(16, 1))
    out = attend(*qkv, None, packed_seq_params=params)
    # The first token of a sequence sees itself alone.
    seen = qkv[2].repeat_interleave(HEADS // GROUPS, dim=1).flatten(1)
    return torch.equal(out[[0, 7], 0], seen[[0, 7]])


def test_a_batch_may_have_its_own_group() -> None:
    assert run_host_ranks(alone_in_a_larger_group, 2) == [True, True]


# Offsets of 16 tokens, the padded ones, the kind of mask and the configuration; and the error. A
# causal query never sees the padding, so the real offsets are needed without causality alone.
REFUSED: list[tuple[list[int], list[int], str, dict[str, Any], str]] = [
    (
        *([0, 12], [0, 12], "causal", {}),
        "got 16 tokens on context-parallel rank 0 of 1; expected 12 by the sequence offsets, which "
        "end at 12: they must cover every token, including padding",
    ),
    (
        *([0, 16], [0, 16], "causal", {"window_size": (4, 0)}),
        "got a sliding window (--window-size) with context parallelism or packed",
    ),
    (*([0, 5], [0, 8, 16], "padding", {}), "got 2 offsets and 3 padded; expected equal numbers"),
]


def refusals() -> list[str]:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.enums import AttnMaskType

    errors = []
    for real, padded, kind, config, _ in REFUSED:
        q, q_padded = torch.tensor(real), torch.tensor(padded)
        params = PackedSeqParams("thd", q, q, q_padded, q_padded, 16, 16)
        *qkv, _ = (x.squeeze(1) for x in inputs(16, 1))
        with pytest.raises(AggregationError) as error:
            attention(1, **config)(*qkv, None, AttnMaskType[kind], packed_seq_params=params)
        errors.append(str(error.value))
    return errors


def test_what_would_be_ignored_or_is_not_known_is_refused() -> None:
    (errors,) = run_host_ranks(refusals, 1)
    for error, (*_, text) in zip(errors, REFUSED, strict=True):
        assert error.startswith(text)


def stock() -> bool:
    """Whether the local specification without context parallelism is Megatron's, to the bit."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    attend = attention(1)
    *qkv, _ = inputs(32, BATCH)
    return torch.equal(attend(*qkv, None), DotProductAttention.forward(attend, *qkv, None))


def test_nothing_changes_without_need() -> None:
    assert run_host_ranks(stock, 1) == [True]
