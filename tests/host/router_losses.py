"""The routers' auxiliary losses of a whole step, by their formula, in one fp64 process.

``sum_k T_k / T * a_k``: the model gives its routers' inputs and weights alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.host.reference import Gradient
from tests.host.steps import batches

Microbatches = tuple[tuple[int, ...], ...]
Formula = tuple[str, Microbatches, bool]
"""How samples are laid out; the samples of each microbatch; of the model with four layers?"""

COEFFICIENTS = {"aux_loss": 3.0, "seq_aux_loss": 2.0, "global_aux_loss": 4.0, "z_loss": 0.3}


def gradients_of(
    cases: list[Formula], config: dict[str, Any]
) -> dict[Formula, dict[str, Gradient]]:
    """By case and kind; called on one rank."""
    from tests.host import gpt

    gpt.initialize()
    models = {
        deep: gpt.build(**config, **({"num_layers": 4} if deep else {}))
        for deep in {deep for _, _, deep in cases}
    }
    return {case: _gradients(models[case[2]], *case[:2]) for case in cases}


def _gradients(model: Any, layout: str, microbatches: Microbatches) -> dict[str, Gradient]:
    from tests.host import gpt

    names, parameters = zip(*model.named_parameters(), strict=True)
    routers = [layer.mlp.router for layer in model.decoder.layers]
    inputs: list[Tensor] = []
    hooks = [r.register_forward_pre_hook(lambda _, x: inputs.append(x[0])) for r in routers]
    numbers: list[list[Tensor]] = [[] for _ in routers]  # of tokens by expert, of each microbatch
    total: dict[str, Any] = dict.fromkeys(COEFFICIENTS, 0.0)
    tokens, data = 0, batches(microbatches, layout)
    for _ in microbatches:
        ids, _, _, packed = gpt.local_batch(data)
        inputs.clear()
        with gpt.precision(model.config):
            model(ids, gpt.positions_like(ids), None, packed_seq_params=packed)
        tokens += ids.numel()
        for router, given, of_layer in zip(routers, inputs, numbers, strict=True):
            logits = given.transpose(0, 1) @ router.weight.T  # [rows, tokens, experts]
            for kind, loss in _losses(logits, router.topk, of_layer).items():
                total[kind] = total[kind] + ids.numel() * COEFFICIENTS[kind] * loss
    for hook in hooks:
        hook.remove()
    options: Any = {"retain_graph": True, "materialize_grads": True}
    return {
        kind: dict(zip(names, torch.autograd.grad(x / tokens, parameters, **options), strict=True))
        for kind, x in total.items()
    }


def _losses(logits: Tensor, topk: int, numbers: list[Tensor]) -> dict[str, Tensor]:
    """By kind: ``a_k`` of one layer, without coefficient; ``numbers`` gets another entry."""
    probabilities = logits.softmax(dim=-1)
    chosen = torch.zeros_like(logits).scatter(-1, logits.topk(topk, dim=-1).indices, 1.0)
    flat = probabilities.flatten(0, 1)
    numbers.append(chosen.flatten(0, 1).sum(dim=0))
    slots = len(flat) * topk
    rows = zip(probabilities, chosen, strict=True)
    return {
        "aux_loss": _switch(flat, numbers[-1] / slots),
        "seq_aux_loss": torch.stack([_switch(p, c.mean(dim=0) / topk) for p, c in rows]).mean(),
        # The mean of this microbatch and those before, over this microbatch's tokens.
        "global_aux_loss": _switch(flat, torch.stack(numbers).mean(dim=0) / slots),
        "z_loss": logits.logsumexp(dim=-1).square().mean(),
    }


def _switch(probabilities: Tensor, fractions: Tensor) -> Tensor:
    """``E * sum_e f_e P_e`` of [tokens, E] probabilities."""
    return probabilities.shape[1] * (fractions * probabilities.mean(dim=0)).sum()
