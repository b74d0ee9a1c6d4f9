"""Attention over context-parallel ranks and packed sequences against Megatron's own, one by one."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loss_agg import CPLayout
from tests.host.harness import error_of, run_host_ranks

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


def stock(attend: Any) -> Any:
    """Megatron's own, which knows neither context parallelism nor packed sequences."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    return functools.partial(DotProductAttention.forward, attend)


def params_of(real: Any, padded: Any) -> Any:
    """Packed sequences between offsets."""
    from megatron.core.packed_seq_params import PackedSeqParams

    real, padded = torch.as_tensor(real), torch.as_tensor(padded)
    return PackedSeqParams("thd", real, real, padded, padded, 16, 16)


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


def whole(cp: int, mask: Tensor | None = None) -> tuple[list[Tensor], list[Tensor]]:
    """This rank's part of the result, and of what one rank alone gets from the whole sequence."""
    attend = attention(cp)
    layout = CPLayout.bshd(32, cp, dist.get_rank() % cp)
    tensors = inputs(32, BATCH)
    ours = mask if mask is None else layout.shard(mask, dim=2)
    got = pull_back(attend, [layout.shard(x, dim=0) for x in tensors], ours)
    expected = pull_back(stock(attend), tensors, mask)
    return got, [layout.shard(x, dim=0) for x in expected]


def documents() -> Tensor:
    """The mask of --reset-attention-mask: documents that end at 11 and 20."""
    document = torch.searchsorted(torch.tensor([11, 20]), torch.arange(32), right=True)
    mask = document.unsqueeze(1) != document
    mask |= torch.ones(32, 32, dtype=torch.bool).triu(1)
    return mask.expand(BATCH, 1, 32, 32)


def packed(cp: int, causal: bool) -> tuple[list[Tensor], list[Tensor]]:
    """As ``whole``, but against Megatron's own attention to one sequence at a time."""
    from megatron.core.transformer.enums import AttnMaskType

    attend = attention(cp)
    real, padded = (torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (LENGTHS, PADDED))
    layout = CPLayout.thd(padded, cp, dist.get_rank())
    tensors = inputs(sum(PADDED), 1)
    local = [layout.shard(x, dim=0).squeeze(1) for x in tensors]
    kind = AttnMaskType.causal if causal else AttnMaskType.padding
    got = pull_back(attend, local, None, kind, packed_seq_params=params_of(real, padded))

    def attend_alone(length: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if causal:
            return stock(attend)(query, key, value, None)
        nowhere = torch.zeros(1, 1, len(query), length, dtype=torch.bool)
        return stock(attend)(query, key[:length], value[:length], nowhere)

    alone = [
        pull_back(functools.partial(attend_alone, length), list(parts))
        for length, *parts in zip(LENGTHS, *(x.split(PADDED) for x in tensors), strict=True)
    ]
    expected = [layout.shard(torch.cat(x), dim=0) for x in zip(*alone, strict=True)]
    return [x.view(y.shape) for x, y in zip(got, expected, strict=True)], expected


def compared(cp: int) -> dict[str, tuple[list[Tensor], list[Tensor]]]:
    """Every rank, for each kind of sequences: what it gets, and what it should."""
    pairs = {"packed": packed(cp, True), "packed, not causal": packed(cp, False)}
    if cp > 1:
        pairs["whole"] = whole(cp)
    if cp == 2:
        pairs["masked by the data"] = whole(cp, documents())
    return pairs


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_attention_is_megatrons_own(cp: int) -> None:
    for rank in run_host_ranks(compared, cp, cp):
        for kind, (got, expected) in rank.items():
            torch.testing.assert_close(got, expected, **TOLERANCE, msg=lambda m, k=kind: k + m)


def test_groups_that_do_not_begin_at_rank_0() -> None:
    for got, expected in run_host_ranks(whole, 4, 2):
        torch.testing.assert_close(got, expected, **TOLERANCE)


# Offsets of 16 tokens, the padded ones, the kind of mask and the configuration; and the error.
REFUSED: list[tuple[list[int], list[int], str, dict[str, Any], str]] = [
    (
        *([0, 12], [0, 12], "causal", {}),
        "LayoutError: got 16 tokens on context-parallel rank 0 of 1; expected 12: sequence offsets "
        "must cover every token, and padding",
    ),
    (
        *([0, 16], [0, 16], "causal", {"window_size": (4, 0)}),
        "HostError: --window-size with context parallelism or packed",
    ),
]


def alone() -> list[str | None]:
    """One rank: attention to whole sequences is Megatron's to the bit; what is refused."""
    from megatron.core.transformer.enums import AttnMaskType

    attend, (*qkv, _) = attention(1), inputs(32, BATCH)
    assert torch.equal(attend(*qkv, None), stock(attend)(*qkv, None))
    errors = []
    for real, padded, kind, config, _ in REFUSED:
        params = params_of(real, padded)
        *qkv, _ = (x.squeeze(1) for x in inputs(16, 1))
        attend, mask_type = attention(1, **config), AttnMaskType[kind]
        errors.append(error_of(attend, *qkv, None, mask_type, packed_seq_params=params))
    return errors


def test_nothing_changes_without_need_and_what_would_be_ignored_is_refused() -> None:
    (errors,) = run_host_ranks(alone, 1)
    for error, (*_, text) in zip(errors, REFUSED, strict=True):
        assert error is not None and error.startswith(text)
