"""Reports by data set: the mean over its tokens, and the aggregated loss of its tokens alone.

With the weights ``w`` of a term, the aggregated loss of data set ``d`` is

- ``sum_{t in d} w_t loss_t / sum_{t in d} w_t`` for means: the same mean over the tokens of ``d``
  alone, without groups that have none;
- ``sum_{t in d} w_t loss_t`` for sums (``sample_sum``, ``constant``, ``sum``) and ``custom``: its
  part of the loss; the parts of all data sets add up to it. In an evaluation, over the calls that
  have tokens of ``d``.

Each rank reports its tokens' parts of both sums. All ranks report the same names: the data sets of
the whole step are known from the exchange of the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_loss_agg.aggregation import Term
from megatron_loss_agg.errors import GroupError
from megatron_loss_agg.groups import places_in
from megatron_loss_agg.layout import CPLayout
from megatron_loss_agg.mcore.host_loss import TokenLosses
from megatron_loss_agg.microbatch import Microbatch, MicrobatchOfTerms, of_term
from megatron_loss_agg.plan import StepTerms
from megatron_loss_agg.transfer import Staged
from megatron_loss_agg.weights import at_least_fp32, where_weighted

FLAG = "--loss-aggregation-report-datasets"


def have_dataset_ids(
    trains: bool, terms: Mapping[str, Term], microbatches: Sequence[MicrobatchOfTerms]
) -> bool:
    """Whether the microbatches say which data sets their samples are of.

    Validation sets need not, since they are often read one by one.

    Raises:
        GroupError: they do not, and are of a training step.
    """
    have = all(of_term(name, m).dataset_ids is not None for m in microbatches for name in terms)
    if trains and not have:
        raise GroupError(
            f"{FLAG}: a batch has neither 'dataset_id' nor 'dataset_ids'; expected the data set of "
            "each sample: train on a blend, add that key (int64 [samples]) to the batch, or drop "
            "the flag"
        )
    return have


class SeenDatasets:
    """The data sets of earlier training steps; the same on every rank.

    Args:
        log_interval: over how many steps the host's log averages.
    """

    def __init__(self, log_interval: int) -> None:
        self._log_interval = log_interval
        self._since: dict[int, int] = {}  # by id, the step that had it first
        self._steps = 0

    def note(self, step: StepDatasets) -> None:
        """Decide what a newly planned training step reports.

        Megatron's log adds up a name's values over the steps that the optimizer does not skip, and
        divides by the number of all of them. So a mean of a data set is 0/0 in a step where it is
        missing, and for as many steps as the log averages where it comes later than in the first
        step: no number is logged for it in that interval.
        """
        for d in step.ids:
            self._since.setdefault(d, self._steps)
        step.missing = sorted(self._since.keys() - {*step.ids})
        recent = max(0, self._steps - self._log_interval)
        step.new = {d for d in step.ids if self._since[d] > recent}
        self._steps += 1


@dataclass
class StepDatasets:
    """The data sets of the microbatches that were planned together."""

    ids: list[int]  # with tokens in the whole step, sorted
    missing: list[int] = field(default_factory=list)  # reported, without tokens in this step
    new: set[int] = field(default_factory=set)  # in later steps than the first, see `SeenDatasets`

    @classmethod
    def of(cls, plans: StepTerms) -> StepDatasets:
        """From this rank's plans, which group by data set."""
        groups = (plan.groups("dataset") for plan in plans.values())
        return cls(torch.cat([ids[sums > 0] for ids, sums in groups]).unique().tolist())

    def index_of(self, microbatch: Microbatch, layout: CPLayout | None) -> Tensor:
        """int32 [tokens of this rank]: the index in `ids` of each token's data set.

        ``len(ids)`` for tokens of no sample, or of a data set without active tokens.
        """
        assert microbatch.dataset_ids is not None
        known = torch.tensor(self.ids, dtype=torch.int64)
        index_S = places_in(known, microbatch.dataset_ids).int()
        sample_T, shape = microbatch.sample_index(), microbatch.loss_mask.shape
        if sample_T is None:
            index_T = index_S.unsqueeze(-1).expand(shape)
        else:
            padded = torch.cat([index_S, index_S.new_full((1,), len(self.ids))])
            index_T = padded[sample_T].view(shape)
        local_T = index_T if layout is None else layout.shard(index_T)
        return local_T.reshape(-1)

    @torch.no_grad()
    def reports(
        self,
        terms: Mapping[str, Term],
        denominators: Mapping[str, float],
        tokens: TokenLosses,
        weights_T: Mapping[str, Tensor],
        indices: Mapping[str, Staged | None],
        summed: Callable[[str, Tensor, float], Any],
    ) -> dict[str, Any]:
        """Pairs of one microbatch by name, of the same names in each microbatch and rank.

        Args:
            denominators: of the terms; means weigh a call of an evaluation by them.
            tokens, weights_T, indices: of this rank's tokens, by term: losses, weights, data sets.
            summed: (name, part, denominator) -> the pair for a part of a sum.
        """
        first = next(iter(tokens.losses))
        losses, mask = tokens.first
        found: dict[str, Any] = self._means("lm loss", indices[first], mask.reshape(-1), losses)
        for name, losses in tokens.losses.items():
            what, w, place_T = f"{name} loss", weights_T[name].double(), indices[name]
            if terms[name].aggregation.within is not None:
                found |= self._means(what, place_T, w * denominators[name], losses)
                continue
            parts = dict(zip(self.ids, self._sums(place_T, w, losses).unbind(), strict=True))
            for d in (*self.missing, *self.ids):
                key, part = f"{what} of dataset {d}", parts.get(d, w.new_zeros(()))
                found[key] = summed(key, part.to(at_least_fp32(losses.dtype)), denominators[name])
        return found

    def _means(
        self, what: str, place_T: Staged | None, w: Tensor, losses: Tensor
    ) -> dict[str, Tensor]:
        """Pairs of ``sum w * loss`` and ``sum w`` of each data set; both 0 for a missing one."""
        w = w.double()
        sums = [self._sums(place_T, w, x) for x in (losses, torch.ones_like(w))]
        pairs = torch.stack(sums, dim=1).to(at_least_fp32(losses.dtype))
        none = pairs.new_zeros(2)
        found = dict.fromkeys(self.missing, none)
        for d, pair in zip(self.ids, pairs.unbind(), strict=True):
            found[d] = none if d in self.new else pair
        return {f"{what} of dataset {d}": pair for d, pair in found.items()}

    def _sums(self, place_T: Staged | None, w: Tensor, x: Tensor) -> Tensor:
        """fp64 [data sets]: sums of ``w * x``, where ``w``, fp64, is not 0."""
        assert place_T is not None
        sums = w.new_zeros(len(self.ids) + 1)
        return sums.index_add_(0, place_T.on(w.device), where_weighted(w, x.to(w)) * w)[:-1]
