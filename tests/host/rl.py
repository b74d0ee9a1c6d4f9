"""One policy step on the real host, and the same by one process in plain code.

Four terms, each with a denominator of its own. Old and reference log-probabilities, advantages,
returns and old values are made up from tokens and labels, so that both sides know them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_loss_agg import Term
from megatron_loss_agg.mcore import TokenLoss
from megatron_loss_agg.policy import (
    clipped_policy_loss,
    clipped_value_loss,
    kl_penalty,
    token_entropy,
)
from megatron_loss_agg.report import Max, Mean, Min, Sum
from tests.host import gpt, whole
from tests.host.reference import gradient_of
from tests.host.steps import Sequence, aggregation, sequences, weights_of

TERMS = {
    "policy": Term(aggregation("prompt_mean")),
    "kl": Term(aggregation("token_mean"), coefficient=0.3),
    "entropy": Term(aggregation("sample_mean"), coefficient=-0.1),
    "value": Term(aggregation("constant"), coefficient=0.5),
}
CLIP = 0.2


class Data(NamedTuple):
    """What a rollout leaves for every token."""

    old: Tensor
    reference: Tensor
    advantages: Tensor
    old_values: Tensor
    returns: Tensor


def data_of(tokens: Tensor, labels: Tensor) -> Data:
    x, y = tokens.double(), labels.double()
    return Data(
        old=-3.3 - ((7 * x + 3 * y) % 11) / 20,
        reference=-3.5 - ((5 * x + y) % 7) / 10,
        advantages=((x + y) % 5 - 2) / 2,
        old_values=((3 * x + y) % 9) / 9,
        returns=((x + 2 * y) % 8) / 4,
    )


def forward_step(
    data_iterator: Iterator[Any] | None, model: Any, kind: str | None = None
) -> tuple[Tensor, TokenLoss]:
    """The policy step; with a ``kind`` of `whole.gathered`, every rank holds all its losses."""
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    batch = gpt.received(data_iterator)
    tokens = gpt.layout_of(batch).shard(batch["tokens"])
    output, labels, mask = gpt.outputs(batch, model)

    def compute(logits: Tensor, weights: Any = None) -> tuple[dict[str, Tensor], dict[str, Any]]:
        logits = gather_from_tensor_model_parallel_region(logits)
        data = data_of(tokens, labels)
        log_probs = F.log_softmax(logits, dim=-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        policy = clipped_policy_loss(
            log_probs, data.old, data.advantages, clip_low=CLIP, clip_high=CLIP
        )
        losses = {
            "policy": policy.losses,
            "kl": kl_penalty(log_probs, data.reference, "k3"),
            "entropy": token_entropy(logits),
            "value": clipped_value_loss(logits[..., 0], data.old_values, data.returns, clip=CLIP),
        }
        if kind is not None:
            losses = {name: whole.gathered(x, batch, kind) for name, x in losses.items()}
        return losses, {
            "clip_fraction": Mean.of(policy.clipped, mask),
            "approximate_kl": Mean.of(data.old - log_probs.detach(), mask),
            "ratio_max": Max.of(policy.ratios, mask),
            "ratio_min": Min.of(policy.ratios, mask),
            **{f"{name} again": Sum.of(losses[name], w) for name, w in (weights or {}).items()},
        }

    of_losses = mask.to(output.dtype) if kind is None else batch["loss_mask"]
    return output, TokenLoss(compute, of_losses, kind, takes_weights=True)


def plain(model: Any, sequence: Sequence) -> dict[str, Tensor]:
    """Of the sequence alone, by token: losses and what is measured."""
    positions = torch.arange(len(sequence.tokens)).unsqueeze(0)
    logits = model(sequence.tokens.unsqueeze(0), positions, None).squeeze(0)
    data = data_of(sequence.tokens, sequence.labels)
    normal = logits - logits.logsumexp(-1, keepdim=True)
    new = normal[torch.arange(len(sequence.labels)), sequence.labels]
    ratio = (new - data.old).exp()
    a = data.advantages
    log_r = data.reference - new
    value, old_value = logits[:, 0], data.old_values
    near = old_value + (value - old_value).clamp(-CLIP, CLIP)
    return {
        "policy": torch.maximum(-a * ratio, -a * ratio.clamp(1 - CLIP, 1 + CLIP)),
        "kl": log_r.exp() - 1 - log_r,
        "entropy": -(normal.exp() * normal).sum(-1),
        "value": 0.5 * torch.maximum((value - data.returns) ** 2, (near - data.returns) ** 2),
        "ratio": ratio,
        # The clip takes the gradient where the ratio left its range in the advantage's direction.
        "clipped": ((a > 0) & (ratio > 1 + CLIP)) | ((a < 0) & (ratio < 1 - CLIP)),
        "difference": data.old - new,
        "mask": torch.tensor(sequence.sample.mask),
    }


def reference() -> tuple[Any, dict[str, float]]:
    """One process: the gradient of the whole loss, and every number that is reported."""
    gpt.initialize()
    model = gpt.build()
    of_samples = [plain(model, sequence) for sequence in sequences()]
    x = {name: torch.cat([of[name] for of in of_samples]) for name in of_samples[0]}
    everything = ((tuple(range(len(of_samples))),),)
    sums = {}
    for name, term in TERMS.items():
        weights = [w for _, of in weights_of(term.aggregation.mode, everything) for w in of]
        sums[name] = (torch.tensor(weights) * x[name]).sum()
    total = sum(TERMS[name].coefficient * value for name, value in sums.items())
    mask, ratio = x["mask"], x["ratio"][x["mask"] > 0]
    return gradient_of(total, model), {
        **{f"{name} {what}": float(v) for name, v in sums.items() for what in ("loss", "again")},
        "loss": float(total),
        "clip_fraction": float((x["clipped"] * mask).sum() / mask.sum()),
        "approximate_kl": float((x["difference"] * mask).sum() / mask.sum()),
        "ratio_max": float(ratio.max()),
        "ratio_min": float(ratio.min()),
    }
