"""Steps that must be refused, as rows of a table: a `Case`, and what each rank is told of it.

A module with a table names it ``ROWS`` and has one test:

    @pytest.mark.parametrize("name", ROWS)
    def test_every_rank_is_told(name: str) -> None:
        assert_told(__name__, name)

The row

    "no prompts": Refusal(
        "DataError: a batch must have 'prompt_ids' ... got the keys",
        Case(batch=without_prompts),
        topology="cp2",
    )

is a step under ``prompt_mean`` whose batches lack ids. Both context-parallel ranks must raise a
`DataError`, with these two texts in it, and none may wait for the other. All rows of one topology run
in one start of its ranks, one after the other on the same models: after an error, the next step
starts anew.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from tests.host.cases import Case, models_of, take
from tests.host.harness import TOPOLOGIES, error_of, run_host_ranks
from tests.host.steps import SHORT

two_rows = functools.partial(Case, layout="bshd", places=SHORT)


@dataclass(frozen=True)
class Refusal:
    """A step, and the error that ranks raise; without an error it must pass.

    Args:
        says: the error that every rank raises, its class and parts of its text, as in "HostError:
            a term ... return a TokenLoss"; nothing if all is well. Steps before it succeed.
        on_rank: what some ranks raise instead, by global rank.
        unlike: what some ranks do instead, by global rank.
    """

    says: str = ""
    case: Case = field(default_factory=two_rows)
    topology: str = "dp2"
    on_rank: Mapping[int, str] = field(default_factory=dict)
    unlike: Mapping[int, Case] = field(default_factory=dict)


def assert_told(module: str, name: str) -> None:
    """Every rank raised what the row ``name`` of the module says, and nothing else."""
    row = _rows(module)[name]
    for rank, errors in enumerate(_told(module, row.topology)):
        assert_says(errors[name], row.on_rank.get(rank, row.says))


def assert_says(error: str | None, says: str) -> None:
    """As `Refusal.says`."""
    kind, _, text = says.partition(": ")
    assert (error is None) == (not says), error
    if error is not None:
        assert error.startswith(f"{kind}: "), error
        assert [part for part in text.split(" ... ") if part not in error] == [], error
        assert "tensor(" not in error


def _rows(module: str) -> dict[str, Refusal]:
    return importlib.import_module(module).ROWS  # type: ignore[no-any-return]


@functools.cache
def _told(module: str, topology: str) -> list[dict[str, str | None]]:
    """By rank, the error of each row of ``topology``."""
    size = TOPOLOGIES[topology].world_size
    return run_host_ranks(_errors, size, module, topology)


def _errors(module: str, topology: str) -> dict[str, str | None]:
    models = models_of(TOPOLOGIES[topology])
    rows = {name: row for name, row in _rows(module).items() if row.topology == topology}
    return {name: error_of(_run, row, models) for name, row in rows.items()}


def _run(row: Refusal, models: Callable[[Case], list[Any]]) -> None:
    """``row`` on this rank."""
    steps, topology = row.unlike.get(dist.get_rank(), row.case).steps, TOPOLOGIES[row.topology]
    hook = steps[0].new_hook()
    for case in steps[:-1]:
        told = error_of(take, case, topology, models(case), hook)
        assert told is None, told
    take(steps[-1], topology, models(steps[-1]), hook)
