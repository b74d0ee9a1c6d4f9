"""Steps of the host as cases, and one runner that takes them on every rank of a topology.

A case says what is switched on; the runner gives the error of every rank's gradient, and what the
step reports. A file of tests is a table of cases, and the formula of what they should give.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from covertable import make
from torch import Tensor

from megatron_loss_agg import LossAggregation
from tests.host.harness import EXACT, Topology, build_chunks, one_or_all, run_host_ranks
from tests.host.reference import Gradient, reference
from tests.host.steps import (
    PLACES,
    Places,
    Weights,
    aggregation,
    batch_of,
    padding_microbatch,
    sequences,
    weights_of,
)

# Set by the version matrix, which asks whether a release is as the newest one is.
COVERS = os.environ.get("TEST_GRIDS") == "covering"
Batch = dict[str, Any]


def grid(strength: int, *axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Rows of one value of each axis: all of them; or under `COVERS` few, in which every
    ``strength`` axes still have all combinations of their values.
    """
    rows = list(product(*(range(len(axis)) for axis in axes)))
    if COVERS:
        rows = sorted(
            map(tuple, make([list(range(len(axis))) for axis in axes], strength=strength))
        )
    return [tuple(axis[i] for axis, i in zip(axes, row, strict=True)) for row in rows]


@dataclass(frozen=True, eq=False)
class Case:
    """One step of the host: an aggregation, how its samples are laid out, and what is not as usual.

    Functions are those of a module: ranks get them by their names.
    """

    mode: str
    options: dict[str, Any] = field(default_factory=dict)  # of the aggregation
    masks: str = "01"
    layout: str = "thd"
    places: Places = PLACES[2]
    per_token: bool = False
    dtype: torch.dtype = torch.float64
    config: dict[str, Any] = field(default_factory=dict)  # of the model
    terms: Mapping[str, Any] | None = None  # in place of the aggregation
    hook: dict[str, Any] = field(default_factory=dict)  # further arguments of `LossHook`
    batch: Callable[[Batch, tuple[int, ...]], Batch] | None = None  # what the data is, of samples
    step: Callable[..., Any] | None = None  # the forward step, if not that of `gpt`
    call: dict[str, Any] = field(default_factory=dict)  # further arguments of the schedule
    calls: tuple[int, ...] = ()  # microbatches of each call, where the step has several
    times: int = 1  # that the step is taken: the first one measures
    after: Case | None = None  # the step before this one, whose hook takes both
    hooked: bool = True  # or else the host alone computes its loss
    checked: bool = True  # or else by a hook without any check

    @property
    def aggregation(self) -> LossAggregation:
        return aggregation(self.mode, **self.options)

    @property
    def weights(self) -> Weights:
        """The oracle's."""
        return weights_of(self.mode, self.places, self.masks, **self.options)

    @property
    def loss(self) -> tuple[Any, ...]:
        """What decides the loss of the step: equal for cases that are run in another way."""
        return self.mode, tuple(self.options.items()), self.masks, self.places

    @property
    def name(self) -> str:
        options = "-".join(str(value) for value in self.options.values())
        flag = "per_token" if self.per_token else "default"
        dtype = str(self.dtype).removeprefix("torch.")
        number = len(self.places[0])
        return f"{self.mode}{options}-{self.masks}-{dtype}-{self.layout}-{number}mb-{flag}"

    def data(self, rank: int) -> Iterator[Batch]:
        """The batches of a data-parallel rank."""
        chosen = sequences(self.masks)
        for of_mb in self.places[rank]:
            of_samples = [chosen[i] for i in of_mb]
            batch = batch_of(of_samples, self.layout) if of_mb else padding_microbatch()
            yield self.batch(batch, of_mb) if self.batch else batch


class Found(NamedTuple):
    """Of one case, on one rank."""

    error: float  # of the gradient of this rank's parameters, relative and norm-wise
    reports: dict[str, float]  # of all microbatches and ranks; empty but on the last stage


def expected_gradients(cases: Sequence[Case], model: str = "dense") -> list[Gradient]:
    """The reference's, by the oracle's weights."""
    losses = {case.loss: case.weights for case in cases}
    gradients = {loss: reference(model).gradient(weights) for loss, weights in losses.items()}
    return [gradients[case.loss] for case in cases]


def run(
    topology: Topology, cases: Sequence[Case], expected: Sequence[Gradient] | None = None
) -> dict[Case, list[Found]]:
    """Every case on every rank; the gradients that are expected are the reference's by default."""
    gradients = expected_gradients(cases, topology.model) if expected is None else expected
    given = topology, list(cases), list(gradients)
    ranks = run_host_ranks(_on_rank, topology.world_size, *given, timeout=600)
    assert len(ranks) == topology.world_size
    return dict(zip(cases, map(list, zip(*ranks, strict=True)), strict=True))


def assert_exact(topology: Topology, cases: Sequence[Case]) -> None:
    """Every rank's gradient and the reported losses, of fp64 cases with the stock loss function."""
    of_model = reference(topology.model)
    for case, ranks in run(topology, cases).items():
        tokens = weights_of("token_mean", case.places, case.masks)
        losses = {"lm": tokens, case.mode: case.weights}
        wanted = {f"{name} loss": of_model.loss(weights) for name, weights in losses.items()}
        assert any(found.reports for found in ranks), case.name
        for found in ranks:
            assert case.call.get("forward_only") or found.error <= EXACT, case.name
            assert found.reports in ({}, pytest.approx(wanted, rel=EXACT)), case.name


def _on_rank(topology: Topology, cases: list[Case], expected: list[Gradient]) -> list[Found]:
    from megatron_loss_agg.mcore import Loop
    from tests.host import gradients

    models = models_of(topology)
    hooks: dict[Case, Any] = {}
    found = []
    for case, gradient in zip(cases, expected, strict=True):
        chunks = models(case)
        hooks[case] = hooks[case.after] if case.after else _hook_of(case)
        reports = take(case, topology, chunks, hooks[case])
        loop = case.hook.get("loop", Loop())
        found.append(
            Found(gradients.error(chunks, gradient), reduced(reports, loop.averages_quotients))
        )
    return found


def models_of(topology: Topology) -> Callable[[Case], list[Any]]:
    """Called on a rank: the model chunks of a case, built once for cases that can share them."""
    from tests.host import gpt

    gpt.initialize(**topology.sizes)
    built: dict[str, list[Any]] = {}

    def chunks_of(case: Case) -> list[Any]:
        key = repr((case.per_token, case.dtype, case.config))
        if key not in built:
            built[key] = build_chunks(topology, case.per_token, case.dtype, **case.config)
        return built[key]

    return chunks_of


def _hook_of(case: Case) -> Any:
    from megatron_loss_agg.mcore import LossHook
    from megatron_loss_agg.mcore.hook import Hook

    kind = LossHook if case.checked else Hook
    return kind(case.terms or case.aggregation, **case.hook) if case.hooked else None


def take(case: Case, topology: Topology, chunks: list[Any], hook: Any = None) -> list[Any]:
    """Take the step, which leaves its gradient in ``chunks``; return its reports."""
    from megatron_loss_agg.mcore import read_batch
    from tests.host import gpt

    torch.set_default_dtype(case.dtype)
    rank, reads = gpt.data_rank(), gpt.reads_data()
    hook = hook or _hook_of(case)
    options = {"forward_step_func": case.step or gpt.forward_step, **case.call}
    with torch.set_grad_enabled(not case.call.get("forward_only")):
        for _ in range(case.times):
            data = [case.data(rank) if reads else None for _ in range(topology.chunks)]
            step = functools.partial(gpt.run_step, hook, chunks, one_or_all(data), **options)
            if case.calls:
                read = map(case.hook.get("read_batch", read_batch), case.data(rank))
                reports = in_calls(step, hook, list(read), case.calls)
            else:
                reports = step(len(case.places[rank]))
    return reports


def in_calls(
    step: Callable[..., Any], hook: Any, microbatches: list[Any], calls: Sequence[int]
) -> list[Any]:
    """One optimizer step by a ``step(number of microbatches)`` for each of ``calls``."""
    reports = []
    with hook.step(microbatches):
        for i, number in enumerate(calls):
            reports += step(number, zero_grad=i == 0) or []
    return reports


def reduced(reports: list[dict[str, Any]], averages_quotients: bool = False) -> dict[str, float]:
    """Of all microbatches and ranks: pairs as Megatron's training loop reduces them, or as its
    evaluation does under ``--sft``; and metrics as the package does.
    """
    from megatron.core import parallel_state

    from megatron_loss_agg.report import reduce_reports
    from tests.host import gpt

    if not all(isinstance(x, Tensor) for report in reports for x in report.values()):
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        return reduce_reports(reports, group)
    mean = mean_of_means if averages_quotients else gpt.reported
    return {key: mean(reports, key) for key in sorted(reports[0] if reports else ())}


def mean_of_means(reports: list[dict[str, Tensor]], key: str) -> float:
    """Of one call, as Megatron's ``evaluate`` makes it under ``--sft``."""
    pairs = torch.vstack([report[key].view(-1) for report in reports])
    mean = (pairs[:, 0] / pairs[:, 1].clamp(min=1)).mean()
    dist.all_reduce(mean)
    return float(mean / dist.get_world_size())
