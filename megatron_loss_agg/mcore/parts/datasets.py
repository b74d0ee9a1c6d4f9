"""Reports by data set: the mean over its tokens, and the aggregated loss of its tokens alone.

With the weights ``w`` of a term, the aggregated loss of data set ``d`` is

- ``sum_{t in d} w_t loss_t / sum_{t in d} w_t`` for means: the same mean over the tokens of ``d``
  alone, without groups that have none; factors of tokens are left out below;
- ``sum_{t in d} w_t loss_t`` for sums (``sample_sum``, ``constant``, ``sum``) and ``custom``: its
  part of the loss; the parts of all data sets add up to it. In an evaluation, over the calls that
  have tokens of ``d``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from megatron_loss_agg.mcore.extension import Extension, MicrobatchLoss, Watch, denominator
from megatron_loss_agg.mcore.host import Call
from megatron_loss_agg.mcore.step import PlannedStep
from megatron_loss_agg.tensors import at_least_fp32, moved
from megatron_loss_agg.weighted_sum import where_weighted


class DatasetReports(Extension):
    """Adds reports by data set: ``lm loss of dataset 3``, ``sample_mean loss of dataset 3``.

    Without ids, as validation sets often are, there are none.

    Args:
        log_interval: over how many steps the host's log averages.
    """

    needs = frozenset({"dataset"})

    def __init__(self, log_interval: int = 1) -> None:
        self._log_interval = log_interval
        self._since: dict[int, int] = {}  # by id, the training step that had it first
        self._steps = 0
        # Of this training step: the data sets that are reported, and those without a mean yet.
        self._names: list[int] = []
        self._new: set[int] = set()

    def settings(self) -> Mapping[str, object]:
        return {"report_datasets": self._log_interval}

    @contextmanager
    def around(self, call: Call, plan: PlannedStep | None) -> Iterator[Watch | None]:
        if call.loop.averages_quotients and not call.trains:
            yield None  # averages of quotients: none by data set would be exact
            return
        if call.trains and plan is not None and call.begins_step:
            self._note(_ids(plan))
        yield functools.partial(self._report, call)

    def _note(self, ids: list[int]) -> None:
        """Decide what a newly planned training step reports.

        Megatron's log averages a name over those of `log_interval` steps in which it is a number.
        A data set's mean is 0/0, which the log leaves out, in a step without its tokens; and in the
        first `log_interval` steps of a data set that the run's first step lacks.
        """
        for d in ids:
            self._since.setdefault(d, self._steps)
        recent = max(0, self._steps - self._log_interval)
        self._names = sorted(self._since)
        self._new = {d for d in self._names if self._since[d] > recent}
        self._steps += 1

    @torch.no_grad()
    def _report(self, call: Call, x: MicrobatchLoss) -> None:
        if "dataset" not in x.plan.first.ids:
            return
        names, new = (self._names, self._new) if call.trains else (_ids(x.plan), set())

        def report_mean(what: str, name: str, w: Tensor, counted: Tensor) -> None:
            pairs = _sums(x, name, names, (w, x.losses[name]), (counted, torch.ones_like(w)))
            for d, pair in pairs.items():
                x.report(f"{what} of dataset {d}", pair.new_zeros(2) if d in new else pair)

        mask = x.masks[x.first].reshape(-1).double()
        report_mean("lm loss", x.first, mask, mask)
        for name, w in x.weights.items():
            aggregation = call.terms[name].aggregation
            over = denominator(aggregation, x.plan.terms[name])
            if aggregation.within is not None:  # an evaluation weighs its calls by denominators
                weights, counted = (y.double() * over for y in (w, x.unfactored[name]))
                report_mean(f"{name} loss", name, weights, counted)
                continue
            for d, (part,) in _sums(x, name, names, (w.double(), x.losses[name])).items():
                key = f"{name} loss of dataset {d}"
                x.report(key, x.sum_pair(key, part, over))


def _ids(plan: PlannedStep) -> list[int]:
    """Of the whole step, sorted; those with tokens in some term."""
    found = set[int]()
    for term in plan.terms.values():
        if "dataset" in term.ids:
            ids, sums = term.groups("dataset")
            found.update(ids[sums > 0].tolist())
    return sorted(found)


def _sums(
    x: MicrobatchLoss, name: str, names: list[int], *pairs: tuple[Tensor, Tensor]
) -> dict[int, Tensor]:
    """By data set: the sum of ``w * v`` over its tokens with ``w != 0``, for each pair of them.

    Summed in fp64; in the dtype of the first ``v``, the losses, but at least fp32.
    """
    local, id_S = x.local[name], x.plan.terms[name].ids["dataset"][x.i]
    sums_S = torch.stack([local.sums(where_weighted(w, v.to(w)) * w) for w, v in pairs], dim=1)
    ids = torch.tensor(names, dtype=torch.int64)
    place_S = torch.searchsorted(ids, id_S).where(torch.isin(id_S, ids), len(names))
    sums = sums_S.new_zeros(len(names) + 1, len(pairs))
    sums.index_add_(0, moved(place_S, sums.device), sums_S)
    return dict(zip(names, sums[:-1].to(at_least_fp32(pairs[0][1].dtype)), strict=True))
