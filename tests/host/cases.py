"""Steps of the host as cases, and one runner that takes them on every rank of a topology.

A file of tests is a table of cases, and the formula of what they should give. In

    assert_exact(TOPOLOGIES["cp2"], [Case("sample_mean", per_token=True, places=PLACES[1])])

the case is a step of the samples of `steps`, weighed by ``sample_mean``, in the microbatches of
``PLACES[1]``, under ``calculate_per_token_loss``, and in all else the usual one: packs, masks of 0 and
1, fp64, the model and the stock loss function of `gpt`. Two context-parallel ranks take it through a
`LossHook` of its own. On each, the gradient and the reported losses must be those of one process,
weighed by the oracle.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from covertable import make
from torch import Tensor

from megatron_loss_agg import LossAggregation
from megatron_loss_agg.mcore import LossHook, read_batch
from megatron_loss_agg.report import reduce_reports
from tests.host import gpt, gradients, parallel_state, pipeline_parallel
from tests.host.harness import EXACT, Topology, build_chunks, one_or_all, run_host_ranks
from tests.host.reference import Gradient, reference
from tests.host.steps import (
    MODES,
    PLACES,
    Places,
    Weights,
    aggregation,
    batch_of,
    padding_microbatch,
    sequences,
    weights_of,
)

Batch = dict[str, Any]
Call = Callable[..., Any]
"""One call of the schedule: a function of the number of microbatches and of more options."""
EVALUATION = {"forward_only": True}  # as `Case.call`


def covering(strength: int, *axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Few rows of one value of each axis: every ``strength`` axes have all their combinations."""
    rows = sorted(map(tuple, make([list(range(len(axis))) for axis in axes], strength=strength)))
    return [tuple(axis[i] for axis, i in zip(axes, row, strict=True)) for row in rows]


@dataclass(frozen=True, eq=False)
class Case:
    """One step of the host: an aggregation, how its samples are laid out, and what is not as usual.

    Functions are those of a module: ranks get them by their names.
    """

    mode: str = "prompt_mean"
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
    iterator: Callable[[Iterator[Batch]], Any] = iter  # what is made of a rank's batches
    step: Callable[..., Any] | None = None  # the forward step, if not that of `gpt`
    call: dict[str, Any] = field(default_factory=dict)  # further arguments of the schedule
    run: Callable[[Any, Any, Call], None] | None = None  # in place of the call: hook, model, call
    calls: tuple[int, ...] = ()  # microbatches of each call, where the step has several
    times: int = 1  # that the step is taken: the first one measures
    after: Case | None = None  # the step before this one, whose hook takes both
    hooked: bool = True  # or else the host alone computes its loss

    @property
    def aggregation(self) -> LossAggregation:
        return aggregation(self.mode, **self.options)

    @property
    def steps(self) -> list[Case]:
        """Those of the hook up to this one."""
        return [*(self.after.steps if self.after else []), self]

    @property
    def weights(self) -> Weights:
        """The oracle's."""
        return weights_of(self.mode, self.places, self.masks, **self.options)

    @property
    def loss(self) -> tuple[Any, ...]:
        """The values that decide the loss of the step: equal for cases that are run in another way."""
        return self.mode, tuple(self.options.items()), self.masks, self.places

    @property
    def name(self) -> str:
        options = "-".join(str(value) for value in self.options.values())
        flag = "per_token" if self.per_token else "default"
        dtype = str(self.dtype).removeprefix("torch.")
        number = len(self.places[0])
        return f"{self.mode}{options}-{self.masks}-{dtype}-{self.layout}-{number}mb-{flag}"

    def new_hook(self) -> LossHook | None:
        evaluates = bool(self.call.get("forward_only"))
        options = {"aggregate_evaluation": evaluates, **self.hook}
        return LossHook(self.terms or self.aggregation, **options) if self.hooked else None

    def data(self, rank: int) -> Iterator[Batch]:
        """The batches of a data-parallel rank."""
        chosen = sequences(self.masks)
        for of_mb in self.places[rank]:
            of_samples = [chosen[i] for i in of_mb]
            batch = batch_of(of_samples, self.layout) if of_mb else padding_microbatch()
            yield self.batch(batch, of_mb) if self.batch else batch


def usual(topology: Topology, modes: Sequence[str] = MODES, **more: Any) -> list[Case]:
    """Every two of a mode, a layout and the per-token flag, on the topology's ranks."""
    rows = covering(2, modes, ("thd", "bshd"), topology.per_token_flags)
    more = {"places": PLACES[topology.data_parallel_size], **more}
    return [Case(mode, layout=layout, per_token=flag, **more) for mode, layout, flag in rows]


class Found(NamedTuple):
    """Of one case, on one rank."""

    error: float  # of the gradient of this rank's parameters, relative and norm-wise
    reports: dict[str, float]  # of all microbatches and ranks; empty but on the last stage


@functools.cache
def _gradient(loss: tuple[Any, ...], model: str) -> Gradient:
    """The reference's, by the oracle's weights; of `Case.loss`."""
    mode, options, masks, places = loss
    return reference(model).gradient(weights_of(mode, places, masks, **dict(options)))


def run(
    topology: Topology, cases: Sequence[Case], expected: Sequence[Gradient] | None = None
) -> dict[Case, list[Found]]:
    """Every case on every rank; the gradients that are expected are the reference's by default."""
    if expected is None:
        expected = [_gradient(case.loss, topology.model) for case in cases]
    given = topology, list(cases), list(expected)
    ranks = run_host_ranks(_on_rank, topology.world_size, *given)
    assert len(ranks) == topology.world_size
    return dict(zip(cases, map(list, zip(*ranks, strict=True)), strict=True))


Expected = tuple[Gradient, dict[str, float]]
"""A gradient, and what is reported besides other things."""


def by_the_oracle(case: Case, model: str = "dense") -> Expected:
    """Of the stock loss function: the reference's, by the oracle's weights."""
    tokens = weights_of("token_mean", case.places, case.masks)
    losses = {"lm": tokens, case.mode: case.weights}
    reports = {f"{name} loss": reference(model).loss(weights) for name, weights in losses.items()}
    return _gradient(case.loss, model), reports


def assert_exact(
    topology: Topology, cases: Sequence[Case], expected: Callable[[Case], Expected] | None = None
) -> None:
    """Every rank's gradient and reports, of fp64 cases; by default `by_the_oracle`."""
    of = expected or functools.partial(by_the_oracle, model=topology.model)
    wanted = {case: of(case) for case in cases}
    found = run(topology, cases, [gradient for gradient, _ in wanted.values()])
    for case, ranks in found.items():
        reports = wanted[case][1]
        assert not reports or any(rank.reports for rank in ranks), case
        for rank in ranks:
            assert case.call.get("forward_only") or rank.error <= EXACT, case
            ours = {key: rank.reports.get(key) for key in reports}
            assert not rank.reports or ours == pytest.approx(reports, rel=EXACT), case


def _on_rank(topology: Topology, cases: list[Case], expected: list[Gradient]) -> list[Found]:
    models = models_of(topology)
    hooks: dict[Case, Any] = {}
    found = []
    for case, gradient in zip(cases, expected, strict=True):
        chunks = models(case)
        hooks[case] = hooks[case.after] if case.after else case.new_hook()
        reports = take(case, topology, chunks, hooks[case])
        found.append(Found(gradients.error(chunks, gradient), reduced(reports)))
    return found


def models_of(topology: Topology) -> Callable[[Case], list[Any]]:
    """Called on a rank: the model chunks of a case, built once for cases that can share them."""
    gpt.initialize(**topology.sizes)
    built: dict[str, list[Any]] = {}

    def chunks_of(case: Case) -> list[Any]:
        key = repr((case.per_token, case.dtype, case.config))
        if key not in built:
            built[key] = build_chunks(topology, case.per_token, case.dtype, **case.config)
        return built[key]

    return chunks_of


def take(case: Case, topology: Topology, chunks: list[Any], hook: Any = None) -> list[Any]:
    """Take the step, which leaves its gradient in ``chunks``; return its reports."""
    torch.set_default_dtype(case.dtype)
    rank, reads = gpt.data_rank(), gpt.reads_data()
    hook = hook or case.new_hook()
    options = {"forward_step_func": case.step or gpt.forward_step, **case.call}
    with torch.set_grad_enabled(not case.call.get("forward_only")):
        for _ in range(case.times):
            data = [
                case.iterator(case.data(rank)) if reads else None for _ in range(topology.chunks)
            ]
            step = functools.partial(gpt.run_step, hook, chunks, one_or_all(data), **options)
            if case.run:
                reports = case.run(hook, one_or_all(chunks), step) or []
            elif case.calls:
                read = map(case.hook.get("read_batch", read_batch), case.data(rank))
                with hook.step([*read]):
                    calls = [step(n, zero_grad=i == 0) for i, n in enumerate(case.calls)]
                reports = [report for of_call in calls for report in of_call]
            else:
                reports = step(len(case.places[rank]))
    return reports


def in_calls(
    sizes: Mapping[int, Sequence[Sequence[int]]], hook: Any, model: Any, step: Call
) -> list[Any]:
    """As `Case.run`: the step as a stream of several calls.

    Args:
        sizes: microbatches of each call, by the number of data-parallel ranks and by rank.
    """
    ranks = parallel_state.get_data_parallel_world_size()
    reports = []
    with hook.stream():
        for i, number in enumerate(sizes[ranks][gpt.data_rank()]):
            reports += step(number, zero_grad=i == 0)
    return reports


def evaluate(
    case: Case,
    calls: Sequence[Places],
    topology: Topology,
    chunks: list[Any],
    hook: Any,
    averages_quotients: bool = False,
) -> dict[str, float]:
    """The result of Megatron's ``evaluate`` for the reports of calls, each of other samples."""
    schedule = hook.wrap(pipeline_parallel.get_forward_backward_func())  # of one evaluation
    way = {"hooked": False, "call": {"forward_only": True, "schedule": schedule}}
    of_calls = [take(replace(case, places=x, **way), topology, chunks) for x in calls]
    every = [report for reports in of_calls for report in reports]
    keys = sorted({key for report in every for key in report})
    if averages_quotients:
        means = [reduced(reports, averages_quotients=True) for reports in of_calls]
        return {key: mean(of[key] for of in means if key in of) for key in keys}
    return {key: gpt.reported([x for x in every if key in x], key) for key in keys}


def reduced(reports: list[dict[str, Any]], averages_quotients: bool = False) -> dict[str, float]:
    """Of all microbatches and ranks: pairs as Megatron's training loop reduces them, or as its
    evaluation does under ``--sft``; and metrics as the package does.
    """
    if not all(isinstance(x, Tensor) for report in reports for x in report.values()):
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        return reduce_reports(reports, group)
    reduce = mean_of_means if averages_quotients else gpt.reported
    return {key: reduce(reports, key) for key in sorted(reports[0] if reports else ())}


def mean_of_means(reports: list[dict[str, Tensor]], key: str) -> float:
    """Of one call, as Megatron's ``evaluate`` makes it under ``--sft``."""
    pairs = torch.vstack([report[key].view(-1) for report in reports])
    mean = (pairs[:, 0] / pairs[:, 1].clamp(min=1)).mean()
    dist.all_reduce(mean)
    return float(mean / dist.get_world_size())
