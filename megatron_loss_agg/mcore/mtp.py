"""Losses of multi-token prediction (MTP), aggregated as the language model's loss is.

At depth ``d``, position ``t`` predicts the target of position ``t + d``. Its loss gets the weight
that this target has in the main loss, so that a step's loss is extended by::

    f / D * sum_d sum_t w_t^(d) * l_t^(d)

    w_t^(d) = w_{t+d} if t + d is in the sequence (row, or sequence of the pack) of t, else 0

with Megatron's scaling factor ``f`` and its number of MTP layers ``D``. The host computes these
losses in the model's forward pass, and attaches them to the graph with one scale for all tokens of
a microbatch. Here they are kept from it, and added to the loss of the same microbatch.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_loss_agg.aggregation import Term
from megatron_loss_agg.errors import HostError, ModeError
from megatron_loss_agg.layout import CPLayout
from megatron_loss_agg.masks import shifted
from megatron_loss_agg.mcore.host import Call
from megatron_loss_agg.microbatch import Microbatch
from megatron_loss_agg.transfer import Stage, Staged
from megatron_loss_agg.weights import at_least_fp32, times_coefficient, weighted_sum

_METHOD = "compute_language_model_loss"
_FLAG = "--loss-aggregation-mtp same (LossHook(mtp='same'))"


class DepthWeights(NamedTuple):
    """Of one microbatch's tokens on this rank."""

    tokens: int
    weights: Staged  # [depths, tokens]
    active: Staged  # bool [1 + depths, tokens]: masks, from depth 0

    @classmethod
    def of(
        cls,
        microbatch: Microbatch,
        weights: Tensor,
        depths: int,
        layout: CPLayout | None,
        stage: Stage,
    ) -> DepthWeights:
        """From the weights of the whole microbatch, before context parallelism."""

        def from_depth(first: int, whole: Tensor) -> Tensor:
            by_depth = (shifted(whole, microbatch, depth) for depth in range(first, depths + 1))
            parts = (x if layout is None else layout.shard(x) for x in by_depth)
            return torch.stack([part.reshape(-1) for part in parts])

        moved, active = from_depth(1, weights), from_depth(0, microbatch.loss_mask != 0)
        return cls(moved.shape[1], stage.add(moved), stage.add(active))


def number_of_depths(config: Any) -> int:
    """The model's MTP layers.

    Raises:
        HostError: it has none, or the host scales their gradients by a function of their own.
    """
    depths, factor = (
        getattr(config, name, None) for name in ("mtp_num_layers", "mtp_loss_scaling_factor")
    )
    if not depths or factor is None:
        raise HostError(
            f"{_FLAG} and a model with mtp_num_layers={depths}, mtp_loss_scaling_factor={factor}; "
            "expected MTP layers and a factor: set --mtp-num-layers and --mtp-loss-scaling-factor, "
            "or drop the flag"
        )
    if getattr(config, "mtp_grad_scale_func", None) is not None:
        raise HostError(
            f"{_FLAG} and a model with a mtp_grad_scale_func, which scales what the host attaches; "
            "expected None, since MTP's losses are scaled as the main loss is: drop one of the two"
        )
    return int(depths)


def check_first_term(terms: Mapping[str, Term]) -> None:
    """Raise ModeError if losses with the first term's coefficient would be 0."""
    name, term = next(iter(terms.items()))
    if term.coefficient == 0:
        raise ModeError(
            f"{_FLAG} with the coefficient 0 of {name!r}, by which MTP's losses are multiplied, "
            "too, so that MTP would not be trained; expected another one (of a teacher's loss, "
            "--logits-load-kd-loss-alpha below 1): or drop the flag"
        )


class DepthLosses(NamedTuple):
    """One microbatch's losses on this rank."""

    loss: Tensor  # what they add to the loss
    parts: dict[int, Tensor]  # by depth, from 1: the weighted sum, without Megatron's factor


class Depths:
    """Keeps MTP's losses of a training call from the host, on the last pipeline stage.

    Measures by the gradients that the host would have given the losses that its mask, and so its
    labels, are moved as the weights are.
    """

    def __init__(self, call: Call) -> None:
        self._call = call
        self._number = number_of_depths(call.config)
        self._scale = call.config.mtp_loss_scaling_factor / self._number
        self._module = _language_module(call.chunks[-1])
        self._compute = getattr(self._module, _METHOD)
        self._calls = 0  # of the host's method, in this forward pass
        self._kept: list[Tensor] = []
        self._expected: list[Staged] = []  # of it: `DepthWeights.active`, once that is known
        self._different: list[Tensor] = []  # bool, of every microbatch and depth

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Stand in for the method by which the host computes losses."""
        module, own = self._module, vars(self._module).get(_METHOD)
        handles = [
            module.register_forward_pre_hook(self._begin, with_kwargs=True),
            module.register_forward_hook(self._end),
        ]
        setattr(module, _METHOD, self._keep)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            delattr(module, _METHOD)
            if own is not None:
                setattr(module, _METHOD, own)
            self._kept = []

    def losses(
        self, weights: DepthWeights | None, coefficient: float, gather: str | None
    ) -> DepthLosses:
        """Those of the last forward pass.

        Args:
            weights: of its microbatch, for the first term of the loss, with its ``coefficient``.
            gather: `TokenLoss.whole`.

        Raises:
            HostError: there was no forward pass, or its losses are not of the mask's tokens.
        """
        if gather is not None:
            raise HostError(
                f"{_FLAG} and TokenLoss(whole={gather!r}); expected losses of this "
                "context-parallel rank's tokens, as MTP's are: leave out whole=, or drop the flag"
            )
        assert weights is not None
        kept, self._kept = self._kept, []
        local = weights.tokens
        if len(kept) != self._number or any(x.numel() != local for x in kept):
            raise HostError(
                f"losses of MTP of {[x.numel() for x in kept]} tokens, and a loss mask of {local}; "
                f"expected {self._number} of as many tokens as the mask: call the model that the "
                f"schedule was given, once, with a mask of the labels' shape, or drop {_FLAG}"
            )
        self._expected.append(weights.active)
        parts, scaled = {}, []
        by_depth = weights.weights.on(kept[0].device)
        for depth, (w, losses) in enumerate(zip(by_depth, kept, strict=True), start=1):
            losses = losses.reshape(-1)
            part = weighted_sum(w.to(at_least_fp32(losses.dtype)), losses)
            scaled.append(times_coefficient(self._scale * coefficient, part, losses))
            parts[depth] = part
        return DepthLosses(torch.stack(scaled).sum(), parts)

    def finish(self) -> None:
        """Checks after the call's backward passes.

        Raises:
            HostError: the host moves its mask, and so its labels, in another way than the weights.
        """
        if self._scale == 0:  # no gradient tells anything
            return
        expected = self._number * self._call.scale.num_microbatches
        seen = torch.stack(self._different).tolist() if self._different else []
        if len(seen) != expected or any(seen):
            raise HostError(
                f"the host's masks of MTP are not the loss mask moved by the depth: {sum(seen)} of "
                f"{len(seen)} differ, where {expected} were to be compared; expected the model to "
                "be called with loss_mask=, its part of the batch's mask, and a Megatron-Core that "
                "moves labels inside each sequence under the run's split (packs: 0.16 or later): "
                f"otherwise drop {_FLAG}"
            )

    def _begin(self, module: Any, args: Any, kwargs: Any) -> None:
        if not torch.is_grad_enabled():
            return
        given = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        if given.get("labels") is None:
            raise HostError(
                f"{_FLAG} and a model called without labels; expected labels=, from which Megatron "
                "makes those of each depth: of the inputs it lacks the last one. Or drop the flag"
            )
        if self._kept:
            raise HostError(
                "two forward passes of the model in one microbatch, both with gradients; expected "
                f"one, whose MTP losses belong to the microbatch: otherwise drop {_FLAG}"
            )
        self._calls, self._expected = 0, []

    def _end(self, module: Any, args: Any, output: Any) -> None:
        # Where MTP's layers are on another stage, the main loss must be there to tell it apart.
        least = self._number if getattr(module, "mtp_process", False) else self._number + 1
        if torch.is_grad_enabled() and not least <= self._calls <= self._number + 1:
            raise HostError(
                f"the model computed {self._calls} losses in a forward pass; expected "
                f"{self._number} of MTP and the main one, by {_METHOD}: this model or release of "
                f"Megatron-Core computes MTP's losses in another way, so drop {_FLAG}"
            )

    def _keep(self, *args: Any, **kwargs: Any) -> Tensor:
        """The host's method; from MTP's losses, what it returns has no gradient."""
        losses: Tensor = self._compute(*args, **kwargs)
        if not torch.is_grad_enabled():
            return losses
        depth, self._calls = self._calls, self._calls + 1
        if depth >= self._number:
            return losses
        self._kept.append(losses)
        detached = losses.detach()
        detached.requires_grad_()
        detached.register_hook(functools.partial(self._compare, self._expected, depth))
        return detached

    def _compare(self, expected: list[Staged], depth: int, gradient: Tensor) -> None:
        """Compare the host's mask with the planned one: the gradient is a multiple of it.

        NaN is a mask of 0 times a division by 0. Under calculate_per_token_loss the multiple is
        that of this rank's tokens at depth 0, so it can be 0 if there are none.
        """
        active = ((gradient != 0) & ~gradient.isnan()).reshape(-1)
        planned = expected[0].on(gradient.device)
        differs = (active != planned[depth + 1]).any()
        self._different.append(differs & (active.any() | planned[0].any()))


def _language_module(chunk: Any) -> Any:
    """The module of a model chunk that computes MTP's losses."""
    found = [
        module
        for module in chunk.modules()
        if hasattr(module, _METHOD) and getattr(module.config, "mtp_num_layers", None)
    ]
    if len(found) != 1:
        raise HostError(
            f"{len(found)} modules of the model compute MTP's losses by {_METHOD}; expected one: "
            f"drop {_FLAG}"
        )
    return found[0]
