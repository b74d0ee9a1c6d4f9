"""Losses of multi-token prediction (MTP), aggregated as the language model's loss is.

At depth ``d``, position ``t`` predicts the target of position ``t + d``. Its loss gets the weight
that this target has in the main loss, so that a step's loss is extended by::

    f / D * sum_d sum_t w_t^(d) * l_t^(d)

    w_t^(d) = w_{t+d} = m_{t+d} * c_[sample of t] if t + d is in the sequence of t, else 0

where a sequence is a row, or one of a pack, with Megatron's scaling factor ``f`` and its number of
MTP layers ``D``. The host computes these losses in the model's forward pass, and attaches them to
the graph with one scale for all tokens of a microbatch. Here they are kept from it, and added to
the loss of the same microbatch.

Suffix: ``_T`` this rank's tokens of a microbatch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from megatron_loss_agg.errors import DataError, HostError, OptionError
from megatron_loss_agg.masks import shifted
from megatron_loss_agg.mcore.extension import Extension, MicrobatchLoss, Watch
from megatron_loss_agg.mcore.host import Call, replaced
from megatron_loss_agg.mcore.step import PlannedStep
from megatron_loss_agg.microbatch import Microbatch
from megatron_loss_agg.tensors import at_least_fp32, moved
from megatron_loss_agg.weighted_sum import times_factors, weighted_sum

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
            raise OptionError(
                f"{_FLAG} with the coefficient 0 of {name!r}, by which it multiplies MTP's losses; "
                "expected another one (--logits-load-kd-loss-alpha below 1): or drop the flag"
            )

    @contextmanager
    def around(self, call: Call, plan: PlannedStep | None) -> Iterator[Watch | None]:
        if not (call.trains and call.groups.last_stage):
            yield None
            return
        depths = number_of_depths(call.config)
        losses = MTPLosses(depths)
        with losses.kept(call.chunks[-1]):
            yield functools.partial(_add, losses, depths)
        losses.check_masks()


def number_of_depths(config: Any) -> int:
    """The model's MTP layers; HostError if it does not train them."""
    depths, factor = (
        getattr(config, name, None) for name in ("mtp_num_layers", "mtp_loss_scaling_factor")
    )
    if not depths or not factor:
        raise HostError(
            f"{_FLAG} and a model with mtp_num_layers={depths}, mtp_loss_scaling_factor={factor}; "
            "expected both: set --mtp-num-layers and --mtp-loss-scaling-factor, or drop the flag"
        )
    return int(depths)


class MTPLosses:
    """MTP's losses of one step, kept from the host; for loops that apply coefficients themselves.

    ``compute_language_model_loss`` of the host makes MTP's losses, and with labels the main one.
    MTP's are replaced by leaves of the same values. The leaves' gradients are multiples of the
    masks that the host moved, which say whether it moves labels as the weights are moved.

        losses = MTPLosses(config.mtp_num_layers)
        with losses.kept(model):  # in the forward step
            logits = model(tokens, ..., loss_mask=mask_of_tokens)
        of_depths = losses.take(masks)  # in the loss function, to be weighted and added
        losses.check_masks()  # after the step
    """

    def __init__(self, depths: int) -> None:
        self._depths = depths
        self._losses: list[Tensor] = []  # of this microbatch
        self._leaves: list[Tensor] = []
        self._expected = 0  # comparisons
        self._differ: list[Tensor] = []  # bool, of every microbatch and depth

    @contextmanager
    def kept(self, model: torch.nn.Module) -> Iterator[None]:
        """Keep what ``model`` computes in forward passes with gradients."""
        with ExitStack() as stack:
            for module in model.modules():
                if hasattr(module, _METHOD):
                    kept = functools.partial(self._keep, getattr(module, _METHOD))
                    stack.enter_context(replaced(module, _METHOD, kept))
            yield

    def _keep(self, compute: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """What the host gets instead of the losses that it computes."""
        losses = compute(*args, **kwargs)
        if not torch.is_grad_enabled():
            return losses
        self._losses.append(losses)
        if len(self._losses) > self._depths:
            return losses
        self._leaves.append(losses.detach().requires_grad_())
        return self._leaves[-1]

    def take(self, masks: Sequence[Tensor]) -> list[Tensor]:
        """The losses of this microbatch by depth, [T] each.

        Args:
            masks: [T] of this rank, by depth from 0 on: the loss mask of what a position predicts.

        Raises:
            HostError: the model has not computed a loss of each depth and token.
            DataError: not as many masks as depths and one more, of as many tokens each.
        """
        tokens = [mask.numel() for mask in masks]
        if len(tokens) != self._depths + 1 or len({*tokens}) > 1:
            raise DataError(
                f"masks of {tokens} tokens for {self._depths} depths of MTP; expected one for each "
                "depth from 0 on, of as many tokens"
            )
        losses, self._losses = self._losses, []
        leaves, self._leaves = self._leaves, []
        sizes = [of_call.numel() for of_call in losses]
        # Some models compute the main loss in another way.
        if sizes not in (tokens[1:], tokens):
            raise HostError(
                f"the model computed losses of {sizes} tokens by {_METHOD}, with a loss mask of "
                f"{tokens[0]}; expected {self._depths} of MTP and the main one, of as many: "
                "call the model once, with this rank's labels, without TokenLoss(whole=...); or "
                f"drop {_FLAG}"
            )
        has_tokens = masks[0].any()
        for leaf, mask_T in zip(leaves, masks[1:], strict=True):
            planned_T = mask_T.reshape(-1) != 0
            leaf.register_hook(functools.partial(self._compare, has_tokens, planned_T))
        self._expected += self._depths
        return [of_depth.reshape(-1) for of_depth in losses[: self._depths]]

    def _compare(self, has_tokens: Tensor, planned_T: Tensor, gradient: Tensor) -> None:
        """Compare the host's mask, of which ``gradient`` is a multiple, with the planned one.

        NaN is a mask of 0 times a division by 0. Under calculate_per_token_loss the multiple is
        this rank's number of tokens before the move, which may be 0.
        """
        active_T = ((gradient != 0) & ~gradient.isnan()).reshape(-1)
        self._differ.append((active_T != planned_T).any() & (has_tokens | active_T.any()))

    def check_masks(self) -> None:
        """Raise HostError unless the host moved its masks as the weights, after backward passes."""
        differ = torch.stack(self._differ).tolist() if self._differ else []
        if len(differ) != self._expected or any(differ):
            raise HostError(
                "the model's masks of MTP are not the loss mask moved by the depth; expected the "
                "loss function's mask to be that of the batch (compare them first), and a "
                "model called with this rank's labels= and loss_mask=, and for packs Megatron-Core "
                "0.16 or later, which moves labels inside each; or without labels, which the host "
                "then takes from the tokens, and with loss_mask= by token (the loss mask of "
                f"position t at position t + 1): otherwise drop {_FLAG}"
            )


def _add(losses: MTPLosses, depths: int, x: MicrobatchLoss) -> None:
    """Add MTP's losses to those of their microbatch."""
    masks, weights = zip(*(_at_depth(x, depth) for depth in range(1, depths + 1)), strict=True)
    coefficient = x.call.terms[x.first].coefficient
    factor = x.call.config.mtp_loss_scaling_factor / depths * coefficient
    parts = []
    of_depths = losses.take([x.masks[x.first], *masks])
    for depth, (w_T, losses_T) in enumerate(zip(weights, of_depths, strict=True), start=1):
        part, key = weighted_sum(w_T, losses_T), f"mtp_{depth} {x.first} loss"
        parts.append(factor * part)
        x.report(key, x.sum_pair(key, part))
    x.total = x.total + torch.stack(parts).sum()


def _at_depth(x: MicrobatchLoss, depth: int) -> tuple[Tensor, Tensor]:
    """The mask and the weights at ``depth``, [T], on the device of the losses."""
    losses, term, local = x.losses[x.first], x.plan.terms[x.first], x.local[x.first]
    dtype = at_least_fp32(losses.dtype)
    assert term.masks is not None
    whole = Microbatch(term.masks[x.i], term.shapes[x.i].starts)

    def of_rank(values: Tensor) -> Tensor:
        return moved(local.part_of_rank(shifted(values, whole, depth)), losses.device).reshape(-1)

    mask_T = of_rank(whole.loss_mask)
    if local.custom is not None:
        return mask_T, of_rank(local.custom).to(dtype)
    w_T = local.unfactored(mask_T, dtype)
    return mask_T, w_T if local.factors is None else times_factors(w_T, of_rank(local.factors))
