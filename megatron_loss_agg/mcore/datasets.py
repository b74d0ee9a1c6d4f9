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

import torch
from torch import Tensor

from megatron_loss_agg.aggregation import Term
from megatron_loss_agg.errors import GroupError
from megatron_loss_agg.mcore.host import ParallelGroups
from megatron_loss_agg.mcore.host_loss import TokenLosses
from megatron_loss_agg.mcore.splits import Splits
from megatron_loss_agg.microbatch import Microbatch, MicrobatchOfTerms, of_term
from megatron_loss_agg.plan import StepTerms
from megatron_loss_agg.weights import where_weighted

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
    """The data sets of earlier training steps; the same on every rank."""

    def __init__(self) -> None:
        self._ids: set[int] = set()
        self._trained = False

    def note(self, step: StepDatasets, trains: bool) -> None:
        """Decide what a newly planned step reports.

        Megatron's log adds up a name's values over steps and divides by the number of all steps. So
        a mean of a data set that was seen before, or is seen in a later step than the first one, is
        0/0 in a step where it is missing or new, and no number is logged for it in that interval.
        """
        if not trains:
            return
        found = set(step.ids)
        step.missing = sorted(self._ids - found)
        step.new = found - self._ids if self._trained else set()
        self._ids |= found
        self._trained = True


@dataclass
class StepDatasets:
    """The data sets of the microbatches that were planned together."""

    ids: list[int]  # with tokens in the whole step, sorted
    # By term, microbatch and split: int64 [tokens], index in `ids`, beyond them for other tokens.
    places: Mapping[str, list[dict[str, Tensor]]]
    missing: list[int] = field(default_factory=list)  # reported, without tokens in this step
    new: set[int] = field(default_factory=set)  # in later steps than the first, see `SeenDatasets`

    @classmethod
    def of(cls, plans: StepTerms, groups: ParallelGroups, splits: Splits) -> StepDatasets:
        """From this rank's plans, which group by data set."""
        found = []
        for plan in plans.values():
            ids, sums = plan.groups("dataset")
            found.append(ids[sums > 0])
        distinct = torch.cat(found).unique()
        made: dict[int, dict[str, Tensor]] = {}
        places: dict[str, list[dict[str, Tensor]]] = {}
        for name, plan in plans.items():
            for microbatch in plan.microbatches:
                if id(microbatch) not in made:
                    place_T = _places(microbatch, distinct)
                    made[id(microbatch)] = {
                        split: (place_T if layout is None else layout.shard(place_T)).reshape(-1)
                        for split, layout in splits.layouts(microbatch, groups).items()
                    }
                places.setdefault(name, []).append(made[id(microbatch)])
        return cls(distinct.tolist(), places)

    def reports(
        self,
        terms: Mapping[str, Term],
        denominators: Mapping[str, float],
        tokens: TokenLosses,
        made: Mapping[str, Tensor],
        places: Mapping[str, Tensor],
        summed: Callable[[str, Tensor, float], Tensor],
    ) -> dict[str, Tensor]:
        """Pairs of one microbatch by name, of the same names in each microbatch and rank.

        Args:
            denominators: of the terms; means weigh a call of an evaluation by them.
            tokens, made: losses and weights of this rank's tokens.
            places: of the terms, from `places`.
            summed: (name, part, denominator) -> the pair for a part of a sum.
        """
        first = next(iter(tokens.losses))
        losses, mask = tokens.first
        found = self._means("lm loss", places[first], mask.reshape(-1), losses)
        for name, losses in tokens.losses.items():
            what, w, place_T = f"{name} loss", made[name].double(), places[name]
            if terms[name].aggregation.within is not None:
                found |= self._means(what, place_T, w * denominators[name], losses)
                continue
            parts = dict(zip(self.ids, self._sums(place_T, w, losses).unbind(), strict=True))
            for d in (*self.missing, *self.ids):
                key, part = f"{what} of dataset {d}", parts.get(d, w.new_zeros(()))
                found[key] = summed(key, part, denominators[name])
        dtype = torch.promote_types(losses.dtype, torch.float32)
        return {key: pair.to(dtype) for key, pair in found.items()}

    def _means(self, what: str, place_T: Tensor, w: Tensor, losses: Tensor) -> dict[str, Tensor]:
        """Pairs of ``sum w * loss`` and ``sum w`` of each data set; both 0 for a missing one."""
        w = w.double()
        sums = [self._sums(place_T, w, x) for x in (losses, torch.ones_like(w))]
        none = w.new_zeros(2)
        found = dict.fromkeys(self.missing, none)
        for d, pair in zip(self.ids, torch.stack(sums, dim=1).unbind(), strict=True):
            found[d] = none if d in self.new else pair
        return {f"{what} of dataset {d}": pair for d, pair in found.items()}

    def _sums(self, place_T: Tensor, w: Tensor, x: Tensor) -> Tensor:
        """fp64 [data sets]: sums of ``w * x``, where ``w``, fp64, is not 0."""
        sums = w.new_zeros(len(self.ids) + 1)
        place_T = place_T.to(w.device, non_blocking=True)
        return sums.index_add_(0, place_T, where_weighted(w, x.to(w)) * w)[:-1]


def _places(microbatch: Microbatch, ids: Tensor) -> Tensor:
    """int64 in the shape of the mask: the index in ``ids`` of each token's data set."""
    assert microbatch.dataset_ids is not None
    own_S = microbatch.dataset_ids.cpu()
    place_S = torch.searchsorted(ids, own_S)
    known = torch.cat([ids, ids.new_zeros(1)])[place_S] == own_S
    place_S = place_S.where(known & (place_S < len(ids)), len(ids))
    sample_T = microbatch.sample_index()
    if sample_T is None:
        return place_S.unsqueeze(-1).expand(microbatch.loss_mask.shape)
    padded = torch.cat([place_S, place_S.new_full((1,), len(ids))])
    return padded[sample_T.cpu()].view(microbatch.loss_mask.shape)
