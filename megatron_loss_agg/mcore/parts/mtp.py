"""Losses of multi-token prediction (MTP), aggregated like the main loss or in another mode.

At depth ``d``, position ``t`` predicts the target of position ``t + d``. Its loss gets the weight of
this target in the main loss, or under the other mode. The loss of a step gets the additional term

    f / D * sum_d sum_t w_t^(d) * l_t^(d)

    w_t^(d) = w_{t+d} = m_{t+d} * c_[sample of t] if t + d is in the sequence of t, else 0

A sequence is a row, or one sample of a pack; ``f`` is Megatron's scaling factor, and ``D`` its number
of MTP layers. Megatron computes these losses in the model's forward pass and attaches them to the
graph with one scale for all tokens of a microbatch. Here they are withheld from Megatron and added
to the loss of the same microbatch.

Suffix: ``_T`` this rank's tokens of a microbatch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from megatron_loss_agg.aggregation import LossAggregation, Term
from megatron_loss_agg.collectives import broadcast_result, failing_together
from megatron_loss_agg.errors import HostError, OptionError
from megatron_loss_agg.masks import shifted
from megatron_loss_agg.mcore.call import Call, replaced
from megatron_loss_agg.mcore.checks.before import check_schedule
from megatron_loss_agg.mcore.extension import Extension
from megatron_loss_agg.mcore.parts.modes import replanned
from megatron_loss_agg.mcore.reports import MicrobatchLoss, report_pair
from megatron_loss_agg.mcore.split import local_starts, rank_layout
from megatron_loss_agg.microbatch import brought_to_cpu
from megatron_loss_agg.plan import StepPlan
from megatron_loss_agg.tensors import at_least_fp32, moved
from megatron_loss_agg.weighted_sum import weighted_sum, weights_of_tokens

_METHOD = "compute_language_model_loss"
_FLAG = "--loss-aggregation-mtp (MTPAggregation)"
_ANOTHER_RANK_FAILED = (
    "another rank cannot aggregate the losses of MTP. Fix the error of that rank first."
)


class MTPAggregation(Extension):
    """Adds MTP's losses in training, with the weights of the hook's first term.

        hook = LossHook(LossAggregation(mode="prompt_mean"), extensions=[MTPAggregation()])

    Reports get ``"mtp_1 <first term> loss"`` and so on: the weighted sum of each depth, without
    ``f / D``. With several terms, ``"loss"`` includes MTP's part.

    Args:
        aggregation: for MTP's losses; None: the first term's. In either case, samples and the
            multiplier are the first term's. The reports have the aggregation's label instead of the
            term's name.

    Raises:
        HostError: in a call, the model has no MTP layers or shifts a different mask.
        OptionError: in a call, the first term has multiplier 0.
        DataError: in a call, batches lack the ids that ``aggregation`` needs.
    """

    scaled_losses = ("mtp",)

    def __init__(self, aggregation: LossAggregation | None = None) -> None:
        self.aggregation = aggregation
        self._has_planned = False
        self._label = ""
        # MTP's plan of the running step; None on pipeline stages without a loss.
        self._plan: StepPlan | None = None
        self._masks: dict[int, list[Tensor]] = {}  # of the running call, see `_masks_on_rank`
        self._losses = _WithheldLosses(0)

    @contextmanager
    def around(self, call: Call, plans: Mapping[str, StepPlan] | None) -> Iterator[None]:
        if not call.trains:
            yield
            return
        check_schedule(call, _FLAG)
        depths = _number_of_depths(call.config)
        name, term = next(iter(call.terms.items()))
        _check_multiplier(name, term)
        if call.begins_step:
            self._label = name
            self._plan = None if plans is None else plans[name]
            if self.aggregation is not None:
                self._label = self.aggregation.label
                self._plan = self._replanned(call, self.aggregation)
        if self._plan is None:
            yield
            return
        self._masks = _masks_on_rank(call, self._plan, depths)
        self._losses = losses = _WithheldLosses(depths)
        with losses.kept(call.chunks[-1]):
            yield
        losses.check_masks()

    def _replanned(self, call: Call, aggregation: LossAggregation) -> StepPlan | None:
        """The plan of the step in MTP's mode."""
        groups, plan = call.groups, self._plan
        model_groups = [groups.dp_cp or groups.dp, groups.split_group, groups.pp]
        with failing_together(model_groups, _ANOTHER_RANK_FAILED, when=not self._has_planned):
            if plan is not None:
                (plan,) = replanned(call, plan, [aggregation])
        self._has_planned = True
        return plan

    def on_loss(self, microbatch: MicrobatchLoss) -> None:
        call, i, plan = microbatch.call, microbatch.i, self._plan
        if not call.trains:
            return
        assert plan is not None  # on a rank that computes losses
        masks = [moved(x, microbatch.total.device) for x in self._masks[i]]
        sums = []
        for mask_T, losses_T in zip(masks[1:], self._losses.take(masks), strict=True):
            w_T = _weights(call, plan, i, mask_T, at_least_fp32(losses_T.dtype))
            sums.append(weighted_sum(w_T.view(-1), losses_T))
        multiplier = next(iter(call.terms.values())).multiplier
        factor = multiplier * call.config.mtp_loss_scaling_factor / len(sums)
        microbatch.total = microbatch.total + factor * torch.stack(sums).sum()
        for depth, x in enumerate(sums, start=1):
            microbatch.report(f"mtp_{depth} {self._label} loss", report_pair(call, plan, x))


def _number_of_depths(config: Any) -> int:
    """The number of the model's MTP layers; HostError if it does not train any."""
    depths = getattr(config, "mtp_num_layers", None)
    factor = getattr(config, "mtp_loss_scaling_factor", None)
    if not depths or not factor:
        raise HostError(
            f"{_FLAG} needs a model that trains MTP layers, got mtp_num_layers={depths} and "
            f"mtp_loss_scaling_factor={factor}. Set --mtp-num-layers and --mtp-loss-scaling-factor, or "
            "drop the flag."
        )
    return int(depths)


class _WithheldLosses:
    """MTP's losses of one call, withheld from Megatron.

    Megatron's ``compute_language_model_loss`` makes MTP's losses and, with labels, the main loss.
    Megatron continues with leaves of the same values instead of MTP's losses. Their gradients are
    proportional to its shifted masks, so they show whether it shifts labels like the weights.
    """

    def __init__(self, depths: int) -> None:
        self._depths = depths
        self._losses: list[Tensor] = []  # of this microbatch
        self._leaves: list[Tensor] = []  # passed on instead of these losses
        self._num_expected = 0  # number of comparisons
        self._differences: list[Tensor] = []  # bool, of every microbatch and depth

    @contextmanager
    def kept(self, model: torch.nn.Module) -> Iterator[None]:
        """Withhold the losses that ``model`` computes in forward passes with gradients."""
        with ExitStack() as stack:
            for module in model.modules():
                if hasattr(module, _METHOD):
                    withholding = functools.partial(self._withhold, getattr(module, _METHOD))
                    stack.enter_context(replaced(module, _METHOD, withholding))
            yield

    def _withhold(self, compute: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """The main loss, or a leaf instead of MTP's loss."""
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
            masks: this rank's loss masks of the targets, by depth from 0 on, [T] each.

        Raises:
            HostError: the model has not computed a loss for each depth and token.
        """
        tokens = [mask.numel() for mask in masks]
        losses, self._losses = self._losses, []
        leaves, self._leaves = self._leaves, []
        sizes = [x.numel() for x in losses]
        # Including the main loss, unless the model computes it in another way.
        if sizes not in (tokens[1:], tokens):
            raise HostError(
                f"the model must compute {self._depths} losses of MTP and the main one by "
                f"{_METHOD}, each of {tokens[0]} tokens like the loss mask, got losses of {sizes}. "
                "Call the model once, with this rank's labels or none, without SampleLoss; or drop "
                f"{_FLAG}."
            )
        has_tokens = masks[0].any()
        for leaf, mask_T in zip(leaves, masks[1:], strict=True):
            planned_T = mask_T.reshape(-1) != 0
            leaf.register_hook(functools.partial(self._compare, has_tokens, planned_T))
        self._num_expected += self._depths
        return [x.reshape(-1) for x in losses[: self._depths]]

    def _compare(self, has_tokens: Tensor, planned_T: Tensor, gradient: Tensor) -> None:
        """Compare Megatron's mask with the planned one; ``gradient`` is a multiple of the former.

        NaN comes from 0 / 0 at masked tokens, before Megatron-Core 0.17. With
        calculate_per_token_loss, the multiple is this rank's number of tokens before the shift; if
        that is 0, the gradient shows nothing.
        """
        active_T = ((gradient != 0) & ~gradient.isnan()).reshape(-1)
        self._differences.append((active_T != planned_T).any() & (has_tokens | active_T.any()))

    def check_masks(self) -> None:
        """Raise HostError unless Megatron shifted its masks as planned; after backward passes.

        Waits for the device.
        """
        differs = torch.stack(self._differences).tolist() if self._differences else []
        if len(differs) != self._num_expected or any(differs):
            raise HostError(
                "the model must shift the batch's loss mask by each depth of MTP, inside each sequence, "
                "got another mask. Call it with this rank's labels= and loss_mask= (without "
                "labels: the mask by token, with the loss mask of position t at t + 1), and for "
                "packs with the padded, not the real, offsets as cu_seqlens_q of packed_seq_params "
                f"(before Megatron-Core 0.16: with rows instead of packs); or drop {_FLAG}."
            )


def _check_multiplier(name: str, term: Term) -> None:
    if term.multiplier == 0:
        raise OptionError(
            f"{_FLAG} needs a first term with a nonzero multiplier, which also multiplies MTP's "
            f"losses, got 0 for {name!r}. Change it (--logits-load-kd-loss-alpha below 1), or drop "
            "the flag."
        )


def _masks_on_rank(call: Call, plan: StepPlan, depths: int) -> dict[int, list[Tensor]]:
    """By microbatch of the call: this rank's part of the mask, shifted by 0 and by each depth."""
    indices = range(call.first_index, call.first_index + call.scale.num_microbatches)
    if any(plan.sequences[i] is not None for i in indices):
        raise HostError(
            f"{_FLAG} needs masks of tokens, got microbatches with losses by sample "
            "(Microbatch.of_samples, SampleLoss). Use losses by token for the first term, or drop the "
            "flag."
        )

    def whole_masks() -> list[Tensor]:
        """The masks of the plan's microbatches; for tensor-parallel rank 0, which has them."""
        microbatches = brought_to_cpu([plan.microbatches[i] for i in indices])
        return [m.loss_mask for m in microbatches]

    masks = {}  # copies, since the forward steps may write into the batch's masks
    for i, mask in zip(indices, broadcast_result(whole_masks, call.groups.tp), strict=True):
        shape, groups = plan.shapes[i], call.groups
        layout = rank_layout(shape, call.split, groups.cp_size, groups.cp_rank)
        masks[i] = [layout.shard(shifted(mask, shape.starts, d)) for d in range(depths + 1)]
    return masks


def _weights(call: Call, plan: StepPlan, i: int, mask_T: Tensor, dtype: torch.dtype) -> Tensor:
    """Mask times the samples' coefficients, in the shape of ``mask_T``."""
    starts = local_starts(plan.shapes[i], call.split, call.groups.cp_size, call.groups.cp_rank)
    return weights_of_tokens(plan.coefficients(i), mask_T, starts, dtype)
