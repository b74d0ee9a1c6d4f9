"""Weights for masks that the model makes, which are known only after its forward pass.

``w_t = m_t * c_s`` then comes from what is known earlier, the numbers N of samples and K of
microbatches of the step, and from sums over one microbatch:

=================== ============= ==============================================================
mode                ``c_s``
=================== ============= ==============================================================
``sum``             1 / D
``constant``        1 / (N D)
``sample_sum``      1 / N
``sample_mean``     1 / (N M_s)   M_s: summed over context-parallel ranks
``microbatch_mean`` 1 / (K M_k)   M_k: likewise
``token_mean``      1             the host divides by its token count, after the last microbatch
=================== ============= ==============================================================

The last one needs ``calculate_per_token_loss``. Under it, the loss of the other modes must be
multiplied by the host's token count, so that count must be known, too: each rank then reports one
token a microbatch, which the host's own auxiliary losses would be scaled by.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_loss_agg.aggregation import LossAggregation, Term
from megatron_loss_agg.collectives import all_gather
from megatron_loss_agg.counts import LocalCounts, StepCounts
from megatron_loss_agg.errors import GroupError, HostError, MaskError, ModeError, PeerError
from megatron_loss_agg.exchange import abandoning_on_error, count_step
from megatron_loss_agg.masks import MaskSums
from megatron_loss_agg.mcore.batches import ReadBatch, read_batch
from megatron_loss_agg.mcore.host import Call, ParallelGroups
from megatron_loss_agg.mcore.late_batches import checked_samples, read_samples
from megatron_loss_agg.mcore.local_weights import LocalMask, LocalWeights
from megatron_loss_agg.mcore.model_calls import ModelCalls
from megatron_loss_agg.mcore.splits import WHOLE, Splits
from megatron_loss_agg.mcore.step_weights import StepWeights
from megatron_loss_agg.mcore.tensor_parallel import on_group
from megatron_loss_agg.microbatch import Microbatch
from megatron_loss_agg.ranges import active_samples, check_fits_fp32, check_normal_in_fp32
from megatron_loss_agg.samples import Samples
from megatron_loss_agg.transfer import Stage, brought_to_cpu
from megatron_loss_agg.weights import described, is_plain, sample_coefficients

_POSSIBLE = (
    "expected mode sum, constant, sample_sum, sample_mean or microbatch_mean, which count samples "
    "or microbatches with empty='count'; or token_mean as the only term, under "
    "--calculate-per-token-loss"
)
_SCALED_BY_TOKENS = ("num_moe_experts", "mtp_num_layers", "experimental_attention_variant")


def check_possible(
    terms: Mapping[str, Term],
    choices: Mapping[str, str],
    report_datasets: bool,
    by_microbatch: bool = False,
) -> None:
    """Refuse what needs the masks, or the tokens, of the whole step before the first forward pass.

    Args:
        choices: values of `CHOICES`.
        by_microbatch: see `LossHook`'s ``evaluates_by_microbatch``.

    Raises:
        ModeError: names the mode or the setting.
    """
    what = "with a mask that the model makes (--loss-aggregation-mask model)"
    for agg in (term.aggregation for term in terms.values()):
        known = (None, "sample", "microbatch")
        possible = agg.function is None and agg.across in known and agg.within in (*known, "step")
        if not possible or (agg.within == "step" and len(terms) > 1):
            raise ModeError(f"{agg.label!r} {what}; {_POSSIBLE}")
        own_rejected = agg.rejected is not None and agg.name is None
        if agg.sample_weights is not None or own_rejected:
            option = "rejected" if own_rejected else "sample_weights"
            raise ModeError(
                f"{option}={getattr(agg, option)!r} {what}, whose batches are read for their "
                f"number of samples alone; expected none: drop --loss-aggregation-"
                f"{option.replace('_', '-')}"
            )
        if agg.empty == "skip" and agg.across is not None:
            raise ModeError(
                f"empty='skip' {what}, so that the number of {agg.across}s with tokens is not "
                "known in time; expected empty='count'"
            )
    empty_step = choices["empty_step"]
    if empty_step != "step":
        raise ModeError(
            f"empty_step={empty_step!r} {what}, so that an empty step is not known in time; "
            "expected 'step'"
        )
    if by_microbatch:
        raise ModeError(
            f"evaluates_by_microbatch (Megatron's --sft) {what}; expected an evaluation that adds "
            "up sums and counts: drop one of the two"
        )
    found = [f"{name}={choices[name]!r}" for name in ("mtp", "moe") if choices[name] != "host"]
    found += ["report_datasets"] if report_datasets else []
    if found:
        flag = "--loss-aggregation-" + found[0].partition("=")[0].replace("_", "-")
        raise ModeError(
            f"{found[0]} ({flag}) {what}, whose tokens are not known before the step; "
            "expected one of the two: drop it"
        )


def reader(given: ReadBatch) -> ReadBatch:
    """``given``, if it is not the one that reads masks from batches."""
    return read_samples if given is read_batch else given


def plan_late(
    read: Callable[[], Any], number: int, terms: Mapping[str, Term], call: Call
) -> LateWeights:
    """Count the samples of a step; on every rank of the last pipeline stage.

    Args:
        read: this data-parallel rank's ``number`` microbatches.

    Raises:
        HostError: ``calculate_per_token_loss`` is not as the terms need it.
        FunctionError, MaskError, GroupError: bad batches.
        PeerError: another rank failed.
    """
    check_host(terms, call.scale.per_token, call.config)
    groups = call.groups

    def count_here() -> tuple[list[int], list[StepCounts]]:
        with abandoning_on_error(groups.dp):
            sizes = checked_samples(read(), number)
            samples = Samples.of_sums([torch.ones(n) for n in sizes])
            local = {n: LocalCounts(term.aggregation, samples, None) for n, term in terms.items()}
        return sizes, [step.counts for step in count_step(local, groups.dp)]

    sizes, counted = on_group(count_here, groups)
    by_host = _divided_by_host(terms)
    return LateWeights(
        terms={name: [{} for _ in sizes] for name in terms},
        # Of masks, nothing is known.
        counts=counted[0]._replace(tokens=math.nan, kept_tokens=math.nan, all_tokens=math.nan),
        denominators={name: c.across for name, c in zip(terms, counted, strict=True)},
        # The host divides by the true count, and the loss is left as it is; or by one a microbatch.
        total_tokens=1 if by_host else counted[0].microbatches * groups.cp_size,
        divided_by_host=by_host,
        samples=sizes,
        aggregations={name: term.aggregation for name, term in terms.items()},
        groups=groups,
    )


@dataclass(frozen=True, kw_only=True)
class LateWeights(StepWeights):
    """The weights of a step's microbatches, each made when its mask is there."""

    samples: Sequence[int]  # of each microbatch
    aggregations: Mapping[str, LossAggregation]
    groups: ParallelGroups

    def choose(
        self,
        i: int,
        masks: Mapping[str, Tensor],
        model_calls: ModelCalls,
        splits: Splits,
        all_tokens: bool,
    ) -> dict[str, LocalWeights]:
        """The weights of microbatch ``i``; waits for the device. See `StepWeights.choose`.

        Raises:
            MaskError: a mask of another number of samples, or bad values.
            GroupError: samples are packed, and the mode needs to know which tokens are whose.
            PeerError: another context-parallel rank has such a mask.
        """
        splits.gathers.settle(all_tokens)
        summed = any(self.aggregations[name].within in ("sample", "microbatch") for name in masks)
        group = None if all_tokens or not summed else self.groups.cp
        known: dict[str, LocalMask] = {}
        # NaN, where reading fails, tells the other ranks.
        sums = torch.full((len(masks), self.samples[i]), math.nan, dtype=torch.float64)
        try:
            for row, (name, mask) in zip(sums, masks.items(), strict=True):
                known[name] = local = self._read(i, name, mask, model_calls, all_tokens)
                row.zero_()[: local.sums.numel()] = local.sums
        finally:
            of_ranks = all_gather(sums.view(-1), group)
        if bool(of_ranks.isnan().any()):
            raise PeerError(
                "another context-parallel rank cannot use the mask of its model; expected it to: "
                "see the error of that rank"
            )
        whole = of_ranks.sum(dim=0).view_as(sums)
        chosen = {}
        for (name, local), sums_S in zip(known.items(), whole, strict=True):
            agg = self.aggregations[name]
            within_S = torch.ones_like(sums_S)
            if agg.within in ("sample", "microbatch"):
                within_S = sums_S if agg.within == "sample" else sums_S.sum().expand_as(sums_S)
            coefficient_S = sample_coefficients(
                within_S, self.denominators[name], agg.scale, within_S == 0
            )
            # A pack's samples have equal coefficients: see `_read`.
            coefficient_S = coefficient_S[:1] if local.packed else coefficient_S
            weights = LocalWeights(local, Stage().add(coefficient_S), None, False, local.sums)
            chosen[name] = weights
            self.terms[name][i] = {WHOLE: weights}
        return chosen

    def check_parts(self, losses: Tensor, mask: Tensor, all_tokens: bool, splits: Splits) -> None:
        """See `Gathers.compare`."""
        splits.gathers.compare(losses, mask, all_tokens, self.groups.cp)

    def _read(
        self, i: int, name: str, mask: Tensor, model_calls: ModelCalls, all_tokens: bool
    ) -> LocalMask:
        packed = self._check_samples(i, name, mask, model_calls)
        rows = mask.detach().reshape((1, -1) if packed else mask.shape)
        try:
            read = MaskSums.read(brought_to_cpu([Microbatch(rows)]))
        except MaskError as error:
            raise MaskError(
                f"the model's mask of microbatch {i} has negative, infinite or NaN values, or "
                "some beyond fp32; expected non-negative, finite ones"
            ) from error
        (active,), (total,) = read.active_tokens, read.totals
        agg, across = self.aggregations[name], self.denominators[name]
        _, least = active_samples(read.by_sample)
        check_fits_fp32(agg, least, [total])
        check_normal_in_fp32(agg, across, total, active, self.samples[i], least_weight=1.0)
        if self.divided_by_host and total != active:
            raise MaskError(
                f"{agg.label!r} with a model's mask that is not 0 or 1 "
                "everywhere, by whose sum the host cannot divide; expected 0 and 1, or another mode"
            )
        own = active if self.divided_by_host else 1
        if self.divided_by_host and all_tokens:
            own = self.groups.cp_part(active)
        return LocalMask(tuple(rows.shape), packed, own, read.by_sample, total, None, ())

    def _check_samples(self, i: int, name: str, mask: Tensor, model_calls: ModelCalls) -> bool:
        """Whether the model was called with packed sequences; raises if it cannot be planned so."""
        if not is_plain(mask):
            raise MaskError(f"the model's mask is {described(mask)}; expected a real, dense tensor")
        found, packed = model_calls.packed_sequences, model_calls.packed_sequences is not None
        if found is None:
            found = mask.shape[0] if mask.dim() == 2 else None
        if found != self.samples[i]:
            raise MaskError(
                f"a model's mask of shape {tuple(mask.shape)} with "
                f"{found} {'packed sequences' if packed else 'rows'}, for "
                f"{self.samples[i]} samples of the batch; expected a mask [samples, seq], or "
                "LateMicrobatch(samples=...) with the number of the model's samples"
            )
        if packed and found > 1 and self.aggregations[name].within == "sample":
            raise GroupError(
                f"{self.aggregations[name].label!r} with {found} samples packed by the script, "
                "whose masks the model makes; expected samples in rows, or mode sum, constant, "
                "sample_sum or microbatch_mean"
            )
        return packed


def check_host(terms: Mapping[str, Term], per_token: bool, config: Any) -> None:
    """Raise HostError if ``terms`` need ``calculate_per_token_loss`` the other way round.

    Args:
        per_token: whether it is on.
        config: the model's.
    """
    if _divided_by_host(terms):
        if not per_token:
            raise HostError(
                "'token_mean' of masks that the model makes, without calculate_per_token_loss: "
                "the tokens of the step are not known in time, and the host would not divide by "
                f"them; {_POSSIBLE}"
            )
        return
    if not per_token:
        return
    for name in _SCALED_BY_TOKENS:
        if getattr(config, name, None) is not None:
            raise HostError(
                f"the model's {name} with calculate_per_token_loss and masks that the model makes: "
                "the host scales a loss of its own by the tokens of the step, which are not known "
                "in time; expected calculate_per_token_loss off, or mode token_mean"
            )


def _divided_by_host(terms: Mapping[str, Term]) -> bool:
    """Whether the host divides the loss by its count of the step's tokens."""
    return any(term.aggregation.within == "step" for term in terms.values())
