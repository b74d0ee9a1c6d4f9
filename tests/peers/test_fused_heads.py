"""Heads that make token losses from hidden states, without logits: weights compose with each."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.host.cases import Case, run
from tests.host.harness import TOPOLOGIES
from tests.host.steps import PLACES
from tests.peers.standins import needs_peers, use_peers

pytestmark = needs_peers

Head = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(hidden [tokens, hidden], weight [vocab, hidden], labels [tokens]) -> losses [tokens]"""


def torchs(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    from torch.nn.functional import linear_cross_entropy

    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=3)
    return linear_cross_entropy(hidden, weight, labels, reduction="none", options=options)


def use_liger() -> None:
    if "liger_kernel" not in sys.modules:
        use_peers("transformers")
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported: kernels on the CPU
        for name in [x for x in sys.modules if x.startswith("triton") and "._C" not in x]:
            del sys.modules[name]


def ligers(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    use_liger()
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return liger_fused_linear_cross_entropy(hidden, weight, labels, reduction="none")


def ligers_of_a_part(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Of this tensor-parallel rank's part of the vocabulary.

    The code behind `LigerFusedLinearScaledCrossEntropyTPFunction` where its kernels do not run; the
    function itself wants a GPU.
    """
    use_liger()
    from liger_kernel.ops.fused_linear_scaled_cross_entropy import _apply_tp_fallback
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    return _apply_tp_fallback(hidden, weight, labels, 1.0, -100, False, group)


def plain_of_a_part(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The logits of all ranks' parts, and torch's cross entropy of them."""
    from megatron.core import tensor_parallel

    hidden = tensor_parallel.copy_to_tensor_model_parallel_region(hidden)
    logits = tensor_parallel.gather_from_tensor_model_parallel_region(hidden @ weight.t())
    return F.cross_entropy(logits, labels, reduction="none")


def plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The logits, and torch's cross entropy of them."""
    return F.cross_entropy(hidden @ weight.t(), labels, reduction="none")


def cuts(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Cut Cross-Entropy's function for devices without its kernels; a compiler takes minutes."""
    use_peers("")
    from cut_cross_entropy import linear_cross_entropy

    torch.compiler.set_stance("force_eager")
    return linear_cross_entropy(hidden, weight, labels, reduction="none", impl="torch_compile")


def forward_step(data_iterator: Any, model: Any, head: Head) -> Any:
    """The model returns hidden states, and the loss function has the head."""
    from megatron.core.utils import get_attr_wrapped_model

    from megatron_loss_agg.mcore import TokenLoss
    from tests.host import gpt

    layer = get_attr_wrapped_model(model, "output_layer")
    layer.forward = lambda hidden, weight=None, **_: (hidden, None)
    tokens, labels, mask, packed = gpt.local_batch(data_iterator)
    output = model(tokens, gpt.positions_like(tokens), None, packed_seq_params=packed)

    def compute(hidden: Tensor) -> tuple[Tensor, dict[str, Any]]:
        losses = head(hidden.flatten(0, 1), layer.weight, labels.flatten())
        return losses.view_as(labels), {}

    return output, TokenLoss(compute, mask.to(output.dtype))


@pytest.mark.parametrize(
    "head, reference, ranks",
    [
        (torchs, plain, "cp2"),
        (ligers, plain, "cp2"),
        (cuts, plain, "cp2"),
        (ligers_of_a_part, plain_of_a_part, "tp2"),
    ],
)
def test_the_gradient_is_that_of_the_whole_step(head: Head, reference: Head, ranks: str) -> None:
    if head is torchs and not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        pytest.skip("torch has it from 2.13 on")
    by_logits, by_head = (
        Case(
            "sample_mean",
            masks="fractional",
            places=PLACES[1],
            dtype=torch.float32,
            step=partial(forward_step, head=x),
        )
        for x in (reference, head)
    )
    found = run(TOPOLOGIES[ranks], [by_logits, by_head])
    rounding, error = (max(x.error for x in found[case]) for case in (by_logits, by_head))
    # Errors of the whole model, with the head's weight. The first is the cost of fp32 alone.
    assert rounding <= 2e-7 and error <= rounding + 5e-8
