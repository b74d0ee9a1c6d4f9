"""Losses of multi-token prediction (MTP), aggregated as the language model's loss is.

At depth ``d``, position ``t`` predicts the target of position ``t + d``. Its loss gets the weight
that this target has in the main loss, so that a step's loss is extended by::

    f / D * sum_d sum_t w_t^(d) * l_t^(d)

    w_t^(d) = w_{t+d} = m_{t+d} * c_[sample of t] if t + d is in the sequence of t, else 0

where a sequence is a row, or one of a pack, with Megatron's scaling factor ``f`` and its number of
MTP layers ``D``. The host computes these losses in the model's forward pass, and attaches them to
the graph with one scale for all tokens of a microbatch. Here they are kept from it, and added to
the loss of the same microbatch.

Suffixes: ``_D`` depths, ``_T`` this rank's tokens of a microbatch.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_loss_agg.errors import HostError, ModeError
from megatron_loss_agg.masks import shifted
from megatron_loss_agg.mcore.extension import Extension, MicrobatchLoss
from megatron_loss_agg.mcore.host import Call
from megatron_loss_agg.mcore.step import PlannedStep
from megatron_loss_agg.mcore.weigh import moved
from megatron_loss_agg.microbatch import Microbatch
from megatron_loss_agg.weights import at_least_fp32, times_coefficient, weighted_sum

_METHOD = "compute_language_model_loss"
_FLAG = "--loss-aggregation-mtp same (MultiTokenPrediction())"


class MultiTokenPrediction(Extension):
    """Adds MTP's losses in training, with the weights of the first term of the loss."""

    needs = frozenset({"masks"})

    def settings(self) -> Mapping[str, object]:
        return {"mtp": "same"}

    def words(self) -> str:
        return "mtp: same"

    def start(self, call: Call) -> None:
        if not call.trains:
            return
        number_of_depths(call.config)
        name, term = next(iter(call.terms.items()))
        if term.coefficient == 0:
            raise ModeError(
                f"{_FLAG} with the coefficient 0 of {name!r}, by which MTP's losses are "
                "multiplied, too, so that MTP would not be trained; expected another one (of a "
                "teacher's loss, --logits-load-kd-loss-alpha below 1): or drop the flag"
            )

    @contextlib.contextmanager
    def around(
        self, call: Call, plan: PlannedStep | None
    ) -> Iterator[Callable[[MicrobatchLoss], None] | None]:
        if not (call.trains and call.groups.last_stage):
            yield None
            return
        kept = _KeptLosses(call)
        with kept.watched():
            yield kept.add
        kept.check_masks()


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


class _KeptLosses:
    """MTP's losses of one call, on the last pipeline stage.

    The gradients that the host would have given them say whether its masks, and so its labels, are
    moved as the weights are.
    """

    def __init__(self, call: Call) -> None:
        self._call = call
        self._number = number_of_depths(call.config)
        self._scale = call.config.mtp_loss_scaling_factor / self._number
        self._module = _language_module(call.chunks[-1])
        self._compute = getattr(self._module, _METHOD)
        self._calls = 0  # of the host's method, in this forward pass
        # Of this microbatch, by depth: the losses, and a leaf of the same values for the host.
        self._kept: list[tuple[Tensor, Tensor]] = []
        self._different: list[Tensor] = []  # bool, of every microbatch and depth

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
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

    def add(self, x: MicrobatchLoss) -> None:
        """Add the losses of the last forward pass to those of its microbatch.

        Raises:
            HostError: there was no forward pass, or its losses are not of the mask's tokens.
        """
        if x.whole is not None:
            raise HostError(
                f"{_FLAG} and TokenLoss(whole={x.whole!r}); expected losses of this "
                "context-parallel rank's tokens, as MTP's are: leave out whole=, or drop the flag"
            )
        kept, self._kept = self._kept, []
        name, tokens = x.first, x.masks[x.first].numel()
        sizes = [losses.numel() for losses, _ in kept]
        if sizes != [tokens] * self._number:
            raise HostError(
                f"losses of MTP of {sizes} tokens, and a loss mask of {tokens}; expected "
                f"{self._number} of as many tokens as the mask: call the model that the schedule "
                f"was given, once, with a mask of the labels' shape, or drop {_FLAG}"
            )
        masks_DT, weights_DT = _by_depth(x, self._number, kept[0][0])
        active_DT, scale = masks_DT != 0, self._scale * self._call.terms[name].coefficient
        parts = []
        for depth, (w, (losses, leaf)) in enumerate(zip(weights_DT, kept, strict=True), start=1):
            leaf.register_hook(functools.partial(self._compare, active_DT[0], active_DT[depth]))
            part, key = weighted_sum(w, losses.reshape(-1)), f"mtp_{depth} {name} loss"
            parts.append(times_coefficient(scale, part, losses))
            x.report(key, x.sum_pair(key, part))
        x.total = x.total + torch.stack(parts).sum()

    def check_masks(self) -> None:
        """Check the host's masks, after the call's backward passes.

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
        self._calls = 0

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
        """The host's method; MTP's losses are returned without their graph."""
        losses: Tensor = self._compute(*args, **kwargs)
        if not torch.is_grad_enabled():
            return losses
        self._calls += 1
        if self._calls > self._number:
            return losses
        leaf = losses.detach().requires_grad_()
        self._kept.append((losses, leaf))
        return leaf

    def _compare(self, unmoved_T: Tensor, planned_T: Tensor, gradient: Tensor) -> None:
        """Compare the host's mask, of which ``gradient`` is a multiple, with the planned one.

        NaN is a mask of 0 times a division by 0. Under calculate_per_token_loss the multiple is
        that of this rank's tokens at depth 0, so it can be 0 if there are none.
        """
        active_T = ((gradient != 0) & ~gradient.isnan()).reshape(-1)
        differs = (active_T != planned_T).any()
        self._different.append(differs & (active_T.any() | unmoved_T.any()))


def _by_depth(x: MicrobatchLoss, depths: int, losses: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Masks [1 + D, T] from depth 0 on, and weights [D, T], on the device of ``losses``."""
    term, local = x.plan.terms[x.first], x.local[x.first]
    assert term.masks is not None
    whole = Microbatch(term.masks[x.i], term.samples[x.i].starts)

    def moved_by(first: int, values: Tensor) -> Tensor:
        by_depth = [shifted(values, whole, depth) for depth in range(first, depths + 1)]
        part = local.local(torch.stack(by_depth))
        return moved(part.reshape(len(by_depth), -1), losses.device)

    masks_DT, dtype = moved_by(0, whole.loss_mask), at_least_fp32(losses.dtype)
    if local.given is not None:
        return masks_DT, [*moved_by(1, local.given).to(dtype)]
    return masks_DT, [local.weights(mask_T, dtype) for mask_T in masks_DT[1:]]


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
