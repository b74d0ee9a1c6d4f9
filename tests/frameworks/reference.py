"""What the frameworks' steps are compared with: one fp64 process that runs every sample alone."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor

from tests.host.reference import Reference
from tests.host.steps import Sequence

CLIP, KL, ENTROPY = 0.2, 0.3, 0.1
DIVISOR = 7.0
COEFFICIENTS = {"policy": 1.0, "kl": KL, "entropy": -ENTROPY}
"""Of the terms of `grpo`."""
Terms = dict[str, Tensor]
"""fp64 [tokens] of one sample."""


def references(
    model: Any, samples: Iterable[Terms], differentiated: Collection[str] = ("loss",)
) -> dict[str, Reference]:
    """By term; those that are not ``differentiated`` are without gradients."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    found: dict[str, Reference] = {}
    for terms in samples:
        for term, of_tokens in terms.items():
            losses, gradients = found.setdefault(term, Reference([], []))
            losses.append(of_tokens.detach())
            if term in differentiated:
                rows = [torch.autograd.grad(x, parameters, retain_graph=True) for x in of_tokens]
                columns = map(torch.stack, zip(*rows, strict=True))
                gradients.append(dict(zip(names, columns, strict=True)))
    return found


def token_values(model: Any, tokens: Tensor, prompt_length: int) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy of each token after the prompt; the sample alone, unpadded."""
    positions = torch.arange(len(tokens)).unsqueeze(0)
    logits = model(tokens.unsqueeze(0), positions, None).squeeze(0)
    log_p = logits[prompt_length - 1 : -1].log_softmax(-1)
    chosen = log_p.gather(-1, tokens[prompt_length:, None]).squeeze(-1)
    return chosen, -(log_p.exp() * log_p).sum(-1)


def text_of(sequence: Sequence) -> Tensor:
    """A prompt of one token, and an answer."""
    return torch.cat([sequence.tokens, sequence.labels[-1:]])


def grpo(lp: Tensor, entropy: Tensor, old: Tensor, ref: Tensor, advantage: Tensor | float) -> Terms:
    """With a k3 KL term and an entropy bonus; without their coefficients."""
    ratio = (lp - old).exp()
    policy = -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
    return {"policy": policy, "kl": (ref - lp).exp() - 1 - (ref - lp), "entropy": entropy}


def total(terms: Terms) -> Tensor:
    """With the coefficients."""
    parts = [coefficient * terms[name] for name, coefficient in COEFFICIENTS.items()]
    return torch.stack(parts).sum(0)
