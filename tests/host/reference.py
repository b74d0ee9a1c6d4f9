"""What every aggregation is compared with: one fp64 process that runs every sample alone.

A loss is linear in the token losses, so the gradient of every token's loss says everything: the
gradient of ``sum w * loss`` is ``sum w * gradient`` for any weights.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.host import gpt
from tests.host.harness import MODELS, run_host_ranks
from tests.host.steps import Weights, sequences

Gradient = dict[str, Tensor]


class Reference(NamedTuple):
    """Of every sample: the losses of its tokens, and their gradients."""

    losses: list[Tensor]  # fp64 [tokens]
    gradients: list[Gradient]  # fp64 [tokens, *shape of the parameter]

    def loss(self, weights: Weights) -> float:
        """``sum w * loss``."""
        parts = [torch.tensor(w, dtype=torch.float64) * self.losses[i] for i, w in weights]
        return float(torch.cat(parts).sum())

    def gradient(self, weights: Weights) -> Gradient:
        """Of ``sum w * loss``, by parameter."""
        return {
            name: sum(
                torch.tensordot(torch.tensor(w, dtype=torch.float64), self.gradients[i][name], 1)
                for i, w in weights
            )
            for name in self.gradients[0]
        }


@functools.cache
def reference(model: str = "dense") -> Reference:
    return Reference(*run_host_ranks(_tokens, 1, MODELS[model])[0])


def gradient_of(loss: Tensor, model: torch.nn.Module) -> Gradient:
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, parameters, retain_graph=True, materialize_grads=True)
    return dict(zip(names, found, strict=True))


def relative_error(got: Gradient, expected: Gradient) -> float:
    """Norm-wise over all parameters, in fp64; absolute where no gradient is expected."""
    difference = sum((got[n].double() - g.double()).square().sum() for n, g in expected.items())
    norm = sum(g.double().square().sum() for g in expected.values())
    return float((difference / (norm or 1.0)).sqrt())


def _tokens(config: dict[str, Any]) -> tuple[list[Tensor], list[Gradient]]:
    """One process: the two fields of `Reference`."""
    gpt.initialize()
    model = gpt.build(**config)
    losses, gradients = [], []
    for sequence in sequences():
        of_sample = gpt.plain_losses(model, sequence)
        of_tokens = [gradient_of(loss, model) for loss in of_sample]
        losses.append(of_sample.detach())
        gradients.append({n: torch.stack([g[n] for g in of_tokens]) for n in of_tokens[0]})
    return losses, gradients
