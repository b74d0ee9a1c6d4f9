"""Steps that go wrong, as rows of a table: what is done, and what each rank is told of it.

A module with a table names it ``ROWS`` and has one test:

    @pytest.mark.parametrize("name", ROWS)
    def test_every_rank_is_told(name: str) -> None:
        assert_told(__name__, name)

All rows of one topology run in one start of its ranks, one after the other on the same models:
after an error, the next step starts anew.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch.distributed as dist

from megatron_loss_agg.mcore import LossHook
from tests.host import cases, gpt
from tests.host.cases import Case, models_of
from tests.host.harness import TOPOLOGIES, error_of, run_host_ranks
from tests.host.steps import Counted, aggregation, batches

EVALUATION = {"forward_only": True}


def hook_of(terms: Any = "prompt_mean", **options: Any) -> Callable[[int], LossHook]:
    """Of a mode, or of terms: a new hook on every rank."""
    terms = aggregation(terms) if isinstance(terms, str) else terms
    return lambda rank: LossHook(terms, **options)


def thd(*places: tuple[tuple[int, ...], ...]) -> Callable[[int], Any]:
    """Packs of the samples ``places``, by data-parallel rank and microbatch."""
    return lambda rank: batches(places[rank], "thd")


def in_turn(*steps: Callable[[int], Iterator[Any]]) -> Callable[[int], Iterator[Any]]:
    """Steps of `Counted.N_MB` microbatches, each of other data."""

    def data(rank: int) -> Iterator[Any]:
        for step in steps:
            batches = step(rank)
            for _ in range(Counted.N_MB):
                yield next(batches)

    return data


def in_calls(microbatches: Callable[[], Sequence[Any]], *numbers: int) -> Callable[..., None]:
    """As `Row.run`: a ``hook.step`` of the microbatches, of which each call takes a number."""
    return lambda hook, model, call: cases.in_calls(call, hook, [*microbatches()], numbers)


@dataclass(frozen=True)
class Row:
    """One step of the host, or several calls of one, and what becomes of it.

    Args:
        says: the error that every rank raises, its class and parts of its text, as in "HostError:
            a term ... return a TokenLoss"; nothing if all is well.
        on_rank: what some ranks raise instead, by global rank.
        hook: global rank -> hook.
        data: data-parallel rank -> data iterator of ``number`` microbatches and more.
        step: the forward step; or by ``loss`` that of `gpt.forward_step_with`.
        before: options of earlier calls, which succeed. They use the stock forward step, or that of
            the option ``loss``.
        call: other options of the call, such as ``schedule``.
        run: what is done in place of the call, given the hook, the model and the call: a function
            of the number of microbatches and of more options.
        model: the model's configuration when it is built.
        config: what the row changes in it.
    """

    says: str = ""
    on_rank: Mapping[int, str] = field(default_factory=dict)
    topology: str = "dp2"
    hook: Callable[[int], LossHook] = field(default_factory=hook_of)
    data: Callable[[int], Any] = Counted
    number: int = Counted.N_MB
    step: Callable[..., Any] | None = None
    loss: Callable[..., Any] | None = None
    before: Sequence[Mapping[str, Any]] = ()
    call: Mapping[str, Any] = field(default_factory=dict)
    run: Callable[[LossHook, Any, Callable[..., Any]], Any] | None = None
    per_token: bool = False
    model: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)


def assert_told(module: str, name: str) -> None:
    """Every rank raised what the row ``name`` of the module says, and nothing else."""
    row = _rows(module)[name]
    for rank, errors in enumerate(_told(module, row.topology)):
        assert_says(errors[name], row.on_rank.get(rank, row.says))


def assert_says(error: str | None, says: str) -> None:
    """As `Row.says`."""
    kind, _, text = says.partition(": ")
    assert (error is None) == (not says), error
    if error is not None:
        assert error.startswith(f"{kind}: "), error
        assert [part for part in text.split(" ... ") if part not in error] == [], error
        assert "tensor(" not in error


def _rows(module: str) -> dict[str, Row]:
    return importlib.import_module(module).ROWS  # type: ignore[no-any-return]


@functools.cache
def _told(module: str, topology: str) -> list[dict[str, str | None]]:
    """By rank, the error of each row of ``topology``."""
    size = TOPOLOGIES[topology].world_size
    return run_host_ranks(_errors, size, module, topology, timeout=300)


def _errors(module: str, topology: str) -> dict[str, str | None]:
    models = models_of(TOPOLOGIES[topology])
    rows = {name: row for name, row in _rows(module).items() if row.topology == topology}
    return {name: error_of(_run, row, models) for name, row in rows.items()}


def _run(row: Row, models: Callable[[Case], Any]) -> None:
    """``row`` on this rank."""
    (ddp,) = models(Case("sum", per_token=row.per_token, config=dict(row.model)))
    hook = row.hook(dist.get_rank())
    data = row.data(gpt.data_rank()) if gpt.reads_data() else None

    def step(number: int, *, loss: Any = None, **options: Any) -> None:
        if loss is not None:
            options["forward_step_func"] = gpt.forward_step_with(loss)
        gpt.run_step(hook, ddp, data, number, **options)

    of_call = {"forward_step_func": row.step or gpt.forward_step, "loss": row.loss, **row.call}
    call = functools.partial(step, **of_call)
    with mock.patch.dict(vars(ddp.config), row.config):
        if row.run is not None:
            row.run(hook, ddp, call)
            return
        for options in row.before:
            told = error_of(step, row.number, **options)
            assert told is None, told
        call(row.number)
