"""Every bad input of a token loss, a layout or a sequence mean by its named error."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import tensor

from megatron_loss_agg import AggregationError, CPLayout, Microbatch, SequenceMean, policy
from megatron_loss_agg.errors import GroupError, LayoutError, MaskError, PolicyError

ONES, TWO = torch.ones(6), torch.ones(2, 8)
Row = tuple[Callable[[], Any], type[AggregationError], str]
X = torch.zeros(2, 3)
ppo, cispo, truncated = (
    policy.clipped_policy_loss,
    policy.cispo_loss,
    policy.truncated_importance_weight,
)
gspo, kl, value = policy.sequence_policy_loss, policy.kl_penalty, policy.clipped_value_loss
K123 = "expected 'k1', 'k2' or 'k3'"
OF_LOSSES: list[Row] = [
    (call, PolicyError, f"^{re.escape(text)}")
    for call, text in (
        (lambda: ppo(X, X[0], X), "old_log_probs has shape (3,) and log_probs (2, 3); expected"),
        (lambda: truncated(X, X, cap=2, mask=X[0]), "mask has shape (3,) and log_probs (2, 3);"),
        (lambda: cispo(X, X, 1.0, clip_low=1, clip_high=1), "advantages is a float; expected a"),
        (lambda: kl(X, X.long(), "k1"), "ref_log_probs is a torch.int64 tensor of"),
        (lambda: kl(X, X, ["k1"]), f"estimator=['k1']; {K123}"),
        (lambda: kl(X, X, "k4"), f"estimator='k4'; {K123}"),
        (lambda: ppo(X, X, X, clip_low=-0.1), "clip_low=-0.1; expected a number >= 0"),
        (lambda: gspo(X, X, X, X, clip_low=0, clip_high=math.nan), "clip_high=nan; expected a num"),
        (lambda: ppo(X, X, X, dual_clip=1.0), "dual_clip=1.0; expected a number > 1 that fp32"),
        (lambda: truncated(X, X, cap=0), "cap=0; expected a number > 0"),
        (lambda: value(X, X, X, clip=-1), "clip=-1; expected a number >= 0"),
        (lambda: ppo(X, X, X, clip_high=1e300), "clip_high=1e+300; expected a number >= 0 that fp"),
        (lambda: cispo(X, X, X, clip_low=10**400, clip_high=1), "clip_low=1000"),
        (lambda: ppo(X, X, X, dual_clip="3"), "dual_clip='3'; expected a number > 1 that fp32 hol"),
        (lambda: truncated(X, X, cap=1e300), "cap=1e+300; expected a number > 0 that fp32 holds, "),
        (lambda: value(X, X, X, clip=None), "clip=None; expected a number >= 0"),
    )
]
HALF = CPLayout.bshd(8, 2, 0)
MAKERS = ((CPLayout.bshd, 8), (CPLayout.thd, tensor([0, 8])), (CPLayout.contiguous, 8))


def pack(*offsets: float) -> Callable[[], Any]:
    return lambda: CPLayout.thd(tensor(offsets), 2, 0)


def join(*lengths: int) -> Callable[[], Any]:
    return lambda: HALF.unshard([torch.zeros(n) for n in lengths])


def mean(mask: Any, offsets: Any = None) -> Callable[[], Any]:
    return lambda: SequenceMean(Microbatch(mask, None if offsets is None else tensor(offsets)))


OF_LAYOUTS: list[Row] = [
    *(
        (lambda make=make, x=x, rank=rank: make(x, 2, rank), LayoutError, "cp_rank")
        for make, x in MAKERS
        for rank in (-1, 2)
    ),
    (lambda: CPLayout.bshd(8, -1, 0), LayoutError, "cp_size"),
    *((lambda n=n: CPLayout.bshd(n, 2, 0), LayoutError, f"{n}.*4|4.*{n}") for n in (6, 7, 2, 9)),
    (lambda: CPLayout.contiguous(7, 2, 0), LayoutError, "7"),
    # Lengths 4, 6, 6: the second is not a multiple of 2 * cp = 4, though the total is.
    (pack(0, 4, 10, 16), LayoutError, "6.*4.*pad|4.*6.*pad|pad.*4.*6|pad.*6.*4"),
    (pack(4, 8), LayoutError, r"cu_seqlens.* start at 0"),
    (pack(0, 8, 4), LayoutError, r"cu_seqlens.* not decrease"),
    (pack(0.0, 4.0), LayoutError, "cu_seqlens"),
    *((lambda n=n: HALF.shard(torch.zeros(2, n)), LayoutError, "8") for n in (4, 16)),
    (join(4), LayoutError, "length 4; expected the layout's 8"),
    (join(4, 4, 4), LayoutError, "length 12; expected the layout's 8"),
    (join(4, 3), LayoutError, "length 7; expected the layout's 8"),
    (lambda: HALF.unshard(torch.zeros(2, 4)), LayoutError, "a Tensor without a group"),
    (lambda: HALF.unshard([ONES], group=object()), LayoutError, "a list with a group"),
    (lambda: SequenceMean(ONES), MaskError, "a Tensor; expected a Microbatch"),
    *(
        (mean(tensor([[1.0, bad]])), MaskError, "negative, infinite or NaN")
        for bad in (math.nan, math.inf, -1.0)
    ),
    *((mean(torch.ones(4), x), GroupError, "expected") for x in ([1, 4], [0, 3, 2], [0, 5])),
    (mean(torch.ones(4), [0, 3]), MaskError, "not 0 on tokens outside"),
    (
        lambda: SequenceMean(Microbatch(TWO), HALF),
        LayoutError,
        r"layout of 2 .* a group of 1; .* b",
    ),
    (
        lambda: SequenceMean(Microbatch(TWO), CPLayout.bshd(16, 1, 0)),
        LayoutError,
        "axis -1 has length 8; expected the layout's 16",
    ),
    (lambda: mean(TWO)()(TWO.mT), MaskError, r"\(8, 2\) and local_loss_mask \(2, 8\)"),
    (lambda: mean(TWO)()(TWO.long()), MaskError, r"values is a torch\.int64 .*; expected a float"),
]


CALLS = [*OF_LOSSES, *OF_LAYOUTS]


@pytest.mark.parametrize(("call", "error", "text"), CALLS, ids=[text for *_, text in CALLS])
def test_a_wrong_call_is_named(call, error, text):
    with pytest.raises(error, match=text):
        call()
