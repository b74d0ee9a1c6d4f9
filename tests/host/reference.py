"""The reference of every aggregation: one fp64 process that runs every sample alone.

A loss is linear in the token losses, so the gradient of every token's loss says everything: the
gradient of ``sum w * loss`` is ``sum w * gradient`` for any weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.host import gpt
from tests.host.harness import MODELS, run_host_ranks
from tests.host.steps import Sequence, Weights, sequences

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


LossesOf = Callable[[Any, Sequence], Mapping[str, Tensor]]
"""Of the model and a sample: by name, a loss for each token of the sample."""


def references(losses_of: LossesOf, **config: Any) -> dict[str, Reference]:
    """By name, of other losses of tokens."""
    return run_host_ranks(_by_token, 1, losses_of, config)[0]  # type: ignore[no-any-return]


def _stock(model: Any, sequence: Sequence) -> dict[str, Tensor]:
    return {"stock": gpt.plain_losses(model, sequence)}


@functools.cache
def reference(model: str = "dense") -> Reference:
    return references(_stock, **MODELS[model])["stock"]


def gradient_of_sum(*parts: tuple[float, Reference, Weights]) -> Gradient:
    """Of ``sum coefficient * sum w * loss``."""
    gradients = [(factor, reference.gradient(weights)) for factor, reference, weights in parts]
    return {name: sum(factor * g[name] for factor, g in gradients) for name in gradients[0][1]}


def gradient_of(loss: Tensor, model: torch.nn.Module) -> Gradient:
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, parameters, retain_graph=True, materialize_grads=True)
    return dict(zip(names, found, strict=True))


def relative_error(got: Gradient, expected: Gradient) -> float:
    """Norm-wise over all parameters, in fp64; absolute where no gradient is expected."""
    difference = sum((got[n].double() - g.double()).square().sum() for n, g in expected.items())
    norm = sum(g.double().square().sum() for g in expected.values())
    return float((difference / (norm or 1.0)).sqrt())


def of_samples(
    model: torch.nn.Module,
    samples: Iterable[Mapping[str, Tensor]],
    differentiated: Collection[str] | None = None,
) -> dict[str, Reference]:
    """By name, of the losses of every sample's tokens; gradients of all, or of some names."""
    found: dict[str, Reference] = {}
    for by_name in samples:
        for name, losses in by_name.items():
            of_name = found.setdefault(name, Reference([], []))
            of_name.losses.append(losses.detach())
            if differentiated is None or name in differentiated:
                rows = [gradient_of(loss, model) for loss in losses]
                stacked = {key: torch.stack([g[key] for g in rows]) for key in rows[0]}
                of_name.gradients.append(stacked)
    return found


def _by_token(losses_of: LossesOf, config: dict[str, Any]) -> dict[str, Reference]:
    gpt.initialize()
    model = gpt.build(**config)
    return of_samples(model, (losses_of(model, sequence) for sequence in sequences()))
