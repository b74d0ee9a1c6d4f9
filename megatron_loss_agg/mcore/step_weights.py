"""The weights of this rank's own tokens, by microbatch of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_loss_agg.aggregation import Term, Unit
from megatron_loss_agg.collectives import failing_together
from megatron_loss_agg.counts import StepCounts
from megatron_loss_agg.errors import AggregationError
from megatron_loss_agg.exchange import abandoning_on_error
from megatron_loss_agg.layout import CPLayout
from megatron_loss_agg.mcore.datasets import StepDatasets, have_dataset_ids
from megatron_loss_agg.mcore.evaluation import denominator
from megatron_loss_agg.mcore.host import ParallelGroups
from megatron_loss_agg.mcore.local_weights import LocalMask, LocalWeights
from megatron_loss_agg.mcore.model_calls import ModelCalls
from megatron_loss_agg.mcore.splits import WHOLE, Splits, ambiguous, check_order
from megatron_loss_agg.mcore.tensor_parallel import on_group
from megatron_loss_agg.microbatch import Microbatch, MicrobatchOfTerms, of_term
from megatron_loss_agg.plan import StepPlan, StepTerms
from megatron_loss_agg.transfer import Stage, brought_to_cpu

WeightsBySplit = dict[str, LocalWeights]
"""The weights of a microbatch under each split that the script may use; one where it is known."""


class Wanted(NamedTuple):
    """What a plan is to know besides the weights."""

    # Mask values, to compare the loss functions' masks with, even where the split is recognised.
    masks: bool
    # Token ids, to check that the model is called in the order of the microbatches.
    order: bool = False
    depths: int = 0  # of MTP, whose losses get the first term's weights; 0: they are the host's
    datasets: bool = False  # the data set of each token
    trains: bool = True


@dataclass(frozen=True, kw_only=True)
class StepWeights:
    """The weights of all microbatches that were planned together."""

    terms: Mapping[str, list[WeightsBySplit]]  # one for each microbatch
    counts: StepCounts  # of the first term, whose tokens the host counts
    denominators: Mapping[str, float]  # of each term's aggregated loss
    total_tokens: int  # of the whole step, as the host counts them: the first term's
    divided_by_host: bool = False  # the host divides the loss by its tokens: see `late_masks`
    is_empty: bool = False  # every token of the whole step is masked or rejected
    unsplit: AggregationError | None = None  # what to raise for losses of a part of the tokens
    routed_tokens: Sequence[int] = ()  # of each microbatch: what the model's routers see
    datasets: StepDatasets | None = None  # if they are reported

    @classmethod
    def plan(
        cls,
        read: Callable[[], Sequence[MicrobatchOfTerms]],
        terms: Mapping[str, Term],
        groups: ParallelGroups,
        splits: Splits,
        wanted: Wanted,
    ) -> StepWeights:
        """Plan a step on every rank of the last pipeline stage; all of them must call.

        Args:
            read: this data-parallel rank's microbatches; called on the ranks that read data.
            splits: those that the script may use.
            wanted: what to know besides the weights.

        Raises:
            AggregationError: this rank's own error.
            PeerError: another rank failed.
        """

        def plan_here() -> StepWeights:
            def needs_token_ids(m: Microbatch) -> bool:
                known = splits.recognised(m.cu_seqlens is not None)
                splits_here = groups.cp_size > 1 and (wanted.masks or known is None)
                return splits_here or wanted.order

            with abandoning_on_error(groups.dp):
                microbatches = brought_to_cpu(read(), needs_token_ids)
                error = splits.check(
                    [of_term(name, m) for m in microbatches for name in terms], groups
                )
                by_dataset = wanted.datasets and have_dataset_ids(
                    wanted.trains, terms, microbatches
                )
            group_by: tuple[Unit, ...] = ("dataset",) if by_dataset else ()
            plans = StepPlan.build_terms(terms, microbatches, groups.dp, group_by=group_by)
            unsplit = splits.shared(error, groups)
            wanted_here = wanted._replace(datasets=by_dataset)
            return cls.of(plans, groups, splits, wanted_here, unsplit)

        return on_group(plan_here, groups)

    @classmethod
    def of(
        cls,
        plans: StepTerms,
        groups: ParallelGroups,
        splits: Splits,
        wanted: Wanted,
        unsplit: AggregationError | None = None,
    ) -> StepWeights:
        """From this rank's plans; called on every rank that reads data."""
        # A custom function may fail on one data-parallel rank alone; the others must learn of it.
        custom = any(plan.aggregation.function is not None for plan in plans.values())
        elsewhere = (
            "the aggregation function failed on another rank of the data-parallel group; "
            "expected it to succeed on every rank: see the error of that rank"
        )
        datasets = StepDatasets.of(plans) if wanted.datasets else None
        with failing_together([groups.dp] if custom else [], elsewhere):
            weights = _by_term(plans, groups, splits, wanted, datasets)
        first = next(iter(plans.values()))
        active, routed = first.counts.active_tokens, first.counts.routed_tokens
        assert active is not None
        return cls(
            terms=weights,
            counts=first.counts,
            total_tokens=active if routed is None else routed,
            is_empty=plans.is_empty,
            unsplit=unsplit,
            routed_tokens=[
                m.loss_mask.numel() if m.routed_tokens is None else m.routed_tokens
                for m in first.microbatches
            ],
            denominators={name: denominator(plan) for name, plan in plans.items()},
            datasets=datasets,
        )

    def __len__(self) -> int:
        """Number of this rank's microbatches."""
        return len(next(iter(self.terms.values())))

    def check_parts(self, losses: Tensor, mask: Tensor, all_tokens: bool, splits: Splits) -> None:
        """Check that losses are of all tokens on every context-parallel rank, or are not.

        Masks of planned shapes tell by these; see `LateWeights.check_parts`.
        """

    def local_mask(self, i: int) -> LocalMask:
        """What is known about the first term's mask of microbatch ``i``, whose split is chosen."""
        (chosen,) = next(iter(self.terms.values()))[i].values()
        return chosen.mask

    def choose(
        self,
        i: int,
        masks: Mapping[str, Tensor],
        model_calls: ModelCalls,
        splits: Splits,
        all_tokens: bool,
    ) -> dict[str, LocalWeights]:
        """The weights of microbatch ``i`` under the script's split, by term.

        Args:
            masks: the loss function's.
            all_tokens: whether the loss function's losses are of all tokens.

        Raises:
            LayoutError: no split fits, or several, which give different weights; or losses are
                whole in some calls only.
            StepError: see `check_order`.
            PeerError: another data-parallel rank's batches cannot be split.
        """
        splits.gathers.settle(all_tokens)
        if not all_tokens and self.unsplit is not None:
            raise self.unsplit
        possible = {
            name: {
                split: w
                for split, w in self.terms[name][i].items()
                if (split == WHOLE) == all_tokens
            }
            for name in masks
        }
        for name, mask in masks.items():
            if not all_tokens:
                _narrow(possible[name], mask, model_calls, splits)
            elif possible[name][WHOLE].mask.token_ids:
                token_ids = [x[WHOLE].mask.token_ids for x in self.terms[name]]
                check_order(i, token_ids, model_calls.inputs)
        chosen = {}
        for name, mask in masks.items():
            split = _fitting(possible[name], mask, splits)
            local = chosen[name] = possible[name][split]
            self.terms[name][i] = {split: local}
        return chosen


def _narrow(
    by_split: WeightsBySplit, mask: Tensor, model_calls: ModelCalls, splits: Splits
) -> None:
    """Keep the splits that fit a loss function's mask and the tokens of its model call."""
    known = next(iter(by_split.values())).mask
    if known.values is None:
        return
    fitting = [split for split, local in by_split.items() if local.mask.fits(mask)]
    if not fitting:  # see `MaskChecks.check`
        return
    told = len(fitting) == 1 < len(by_split)  # by the mask alone
    shards = {s: () if told else by_split[s].mask.token_ids for s in fitting}
    splits.narrow(known.packed, shards, model_calls.inputs)


def _fitting(by_split: WeightsBySplit, mask: Tensor, splits: Splits) -> str:
    """The split that is left, or one of several that give ``mask`` the same weights."""
    first, *others = by_split
    if not others:
        return first
    left = splits.left(by_split[first].mask.packed)
    fitting = [split for split in left if split in by_split] or [*by_split]
    known = by_split[fitting[0]].mask
    if len(fitting) > 1 and known.values is not None and known.fits(mask):
        made = [by_split[split].compared_for(mask) for split in fitting]
        if not all(torch.equal(other, made[0]) for other in made):
            raise ambiguous(fitting)
    return fitting[0]


def _by_term(
    plans: StepTerms,
    groups: ParallelGroups,
    splits: Splits,
    wanted: Wanted,
    datasets: StepDatasets | None,
) -> dict[str, list[WeightsBySplit]]:
    """By term and microbatch; terms with equal weights for a microbatch share them."""
    weights: dict[str, list[WeightsBySplit]] = {name: [] for name in plans}
    stage = Stage()
    for i in range(len(next(iter(plans.values())).microbatches)):
        # Keep layouts for one microbatch only: they take more memory than the weights.
        masks: dict[int, dict[str, tuple[CPLayout | None, LocalMask]]] = {}
        made: list[tuple[StepPlan, WeightsBySplit]] = []
        for name, plan in plans.items():
            found = next((w for other, w in made if _equal_weights(plan, other, i)), None)
            if found is None:
                microbatch = plan.microbatches[i]
                if id(microbatch) not in masks:
                    layouts = splits.layouts(microbatch, groups)
                    packed = microbatch.cu_seqlens is not None
                    keeps = wanted.masks or splits.undecided(packed, layouts)
                    masks[id(microbatch)] = {}
                    for split, layout in layouts.items():
                        ids = wanted.order if layout is None else keeps
                        known = LocalMask.of(plan, i, layout, keeps, ids, groups, stage, datasets)
                        masks[id(microbatch)][split] = layout, known
                found = {
                    split: LocalWeights.of(plan, i, *of_split, stage, 0 if made else wanted.depths)
                    for split, of_split in masks[id(microbatch)].items()
                }
                made.append((plan, found))
            weights[name].append(found)
    return weights


def _equal_weights(plan: StepPlan, other: StepPlan, i: int) -> bool:
    """Whether both give microbatch ``i`` the same weights.

    Equal aggregations are not enough: the terms' masks may differ in other microbatches or ranks,
    and so may their denominators.
    """
    custom = plan.aggregation.function is not None or other.aggregation.function is not None
    same_mask = plan.microbatches[i] is other.microbatches[i]
    return not custom and same_mask and torch.equal(plan.coefficients(i), other.coefficients(i))
