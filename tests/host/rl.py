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

from megatron_loss_agg import LossAggregation, Term
from megatron_loss_agg.mcore import TokenLoss
from megatron_loss_agg.policy import (
    clipped_policy_loss,
    clipped_value_loss,
    kl_penalty,
    token_entropy,
)
from megatron_loss_agg.report import Max, Mean, Min
from tests import oracle
from tests.host.steps import Sequence, batch_of, padding_microbatch, sequences

TERMS = {
    "policy": Term(LossAggregation(mode="prompt_mean")),
    "kl": Term(LossAggregation(mode="token_mean"), coefficient=0.3),
    "entropy": Term(LossAggregation(mode="sample_mean"), coefficient=-0.1),
    "value": Term(LossAggregation(mode="constant", divisor=5.0), coefficient=0.5),
}
DIVISOR = {"constant": 5.0}
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


def forward_step(data_iterator: Iterator[Any] | None, model: Any) -> tuple[Tensor, TokenLoss]:
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    from tests.host import gpt

    tokens, labels, mask, packed = gpt.local_batch(data_iterator)
    output = model(tokens, gpt.positions_like(tokens), None, packed_seq_params=packed)

    def compute(logits: Tensor) -> tuple[dict[str, Tensor], dict[str, Any]]:
        logits = gather_from_tensor_model_parallel_region(logits)
        data = data_of(tokens, labels)
        chosen = labels.unsqueeze(-1)
        log_probs = F.log_softmax(logits, dim=-1).gather(-1, chosen).squeeze(-1)
        policy = clipped_policy_loss(
            log_probs, data.old, data.advantages, clip_low=CLIP, clip_high=CLIP
        )
        losses = {
            "policy": policy.losses,
            "kl": kl_penalty(log_probs, data.reference, "k3"),
            "entropy": token_entropy(logits),
            "value": clipped_value_loss(logits[..., 0], data.old_values, data.returns, clip=CLIP),
        }
        return losses, {
            "clip_fraction": Mean.of(policy.clipped, mask),
            "approximate_kl": Mean.of(data.old - log_probs.detach(), mask),
            "ratio_max": Max.of(policy.ratios, mask),
            "ratio_min": Min.of(policy.ratios, mask),
        }

    return output, TokenLoss(compute, mask.to(output.dtype))


def plain_terms(model: Any, sequence: Sequence) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Token losses of the sequence alone, ratios, and old minus new log-probabilities."""
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
    losses = {
        "policy": torch.maximum(-a * ratio, -a * ratio.clamp(1 - CLIP, 1 + CLIP)),
        "kl": log_r.exp() - 1 - log_r,
        "entropy": -(normal.exp() * normal).sum(-1),
        "value": 0.5 * torch.maximum((value - data.returns) ** 2, (near - data.returns) ** 2),
    }
    return losses, ratio.detach(), (data.old - new).detach()


def reference() -> tuple[Any, dict[str, float]]:
    """One process: the gradient of the whole loss, and every number that is reported."""
    from tests.host import gpt

    gpt.initialize()
    model, chosen = gpt.build(), sequences()
    weights = {}
    for name, term in TERMS.items():
        mode = term.aggregation.mode
        ((weights[name],),) = oracle.step_weights(
            mode, [[[s.sample for s in chosen]]], divisor=DIVISOR.get(mode)
        )
    sums = dict.fromkeys(TERMS, torch.zeros(()))
    ratios, differences, masks, gains = [], [], [], []
    for k, sequence in enumerate(chosen):
        losses, ratio, difference = plain_terms(model, sequence)
        for name in TERMS:
            sums[name] = sums[name] + (torch.tensor(weights[name][k]) * losses[name]).sum()
        ratios.append(ratio)
        differences.append(difference)
        masks.append(torch.tensor(sequence.sample.mask))
        gains.append(data_of(sequence.tokens, sequence.labels).advantages)
    total = sum(TERMS[name].coefficient * value for name, value in sums.items())
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradient = dict(zip(names, torch.autograd.grad(total, parameters), strict=True))
    ratio, difference, mask, gain = (torch.cat(x) for x in (ratios, differences, masks, gains))
    # The clip takes the gradient where the ratio left its range in the advantage's direction.
    clipped = ((gain > 0) & (ratio > 1 + CLIP)) | ((gain < 0) & (ratio < 1 - CLIP))
    active = mask > 0
    return gradient, {
        **{f"{name} loss": float(value) for name, value in sums.items()},
        "loss": float(total),
        "clip_fraction": float((clipped * mask).sum() / mask.sum()),
        "approximate_kl": float((difference * mask).sum() / mask.sum()),
        "ratio_max": float(ratio[active].max()),
        "ratio_min": float(ratio[active].min()),
    }


def packs(*places: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """A data iterator over one rank's packed microbatches; an empty place is padding."""
    chosen = sequences()
    return iter(
        [
            batch_of([chosen[i] for i in place], "thd") if place else padding_microbatch()
            for place in places
        ]
    )
