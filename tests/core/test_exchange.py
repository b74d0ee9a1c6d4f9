"""The exchange over ranks: ids of any name, microbatches that several ranks hold, and its size."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megatron_loss_agg import AggregationError, LossAggregation, Microbatch, StepPlan
from megatron_loss_agg.aggregation import Term
from megatron_loss_agg.counting import Samples, coefficients
from megatron_loss_agg.exchange import Columns, RankTable, joined
from megatron_loss_agg.plan import broadcast_plans
from tests.core.meaning import aggregation
from tests.core.operations import Operations
from tests.distributed import run_ranks

Steps = list[list[Microbatch]]  # by rank


def coefficients_on_ranks(agg: LossAggregation, steps: Steps) -> list[list[float]] | str:
    """The coefficients of this rank's microbatches, or its error."""
    try:
        plan = StepPlan.build(agg, steps[dist.get_rank()], dist.group.WORLD)
    except AggregationError as error:
        return f"{type(error).__name__}: {error}"
    return [plan.coefficients(i).tolist() for i in range(len(plan.sizes))]


# Ids of the user's own, for a custom function.


def by_session(samples: Samples) -> torch.Tensor:
    """``1 / M`` of the session of each sample."""
    sessions = samples.groups("session")
    return 1 / sessions.sums(samples.mask_sum)[sessions.group_S]


BY_SESSION = LossAggregation(mode="custom", function=by_session)


def in_sessions(*sessions: int) -> Microbatch:
    return Microbatch(torch.ones(len(sessions), 2), ids={"session": [*sessions]})


def test_a_custom_function_reads_ids_of_any_name():
    plan = StepPlan.build(BY_SESSION, [in_sessions(1, 2), in_sessions(1)])
    assert plan.coefficients(0).tolist() == [1 / 4, 1 / 2]
    assert plan.ids("session", 1).tolist() == [1]
    terms = {"a": aggregation("token_mean"), "b": BY_SESSION}
    plans = StepPlan.build_terms(terms, [in_sessions(1, 2), in_sessions(1)])
    assert plans["b"].coefficients(0).tolist() == [1 / 4, 1 / 2]


def test_ids_of_any_name_are_those_that_every_microbatch_of_every_rank_has():
    nothing, padding = list[Microbatch](), [Microbatch(torch.zeros(0, 2))]
    for empty in (nothing, padding):
        steps = [[in_sessions(1, 2)], empty, [in_sessions(1)]]
        found = run_ranks(coefficients_on_ranks, 3, BY_SESSION, steps)
        assert found == [[[1 / 4, 1 / 2]], [[]] * len(empty), [[1 / 4]]]
    others = [Microbatch(torch.ones(1, 2), ids={"turn": [1]})]
    for error in run_ranks(coefficients_on_ranks, 2, BY_SESSION, [[in_sessions(1)], others]):
        assert "samples grouped by 'session' need its ids, got ids of []" in error


# Dynamic context parallelism: several ranks hold a microbatch.


def held(num_holders: int, *lengths: int, gid: int | None = None) -> Microbatch:
    """A microbatch of samples with so many active tokens."""
    mask = torch.tensor([[1.0] * n + [0.0] * (9 - n) for n in lengths]).view(-1, 9)
    return Microbatch(mask, local_cp_size=num_holders, gid=gid)


# By rank. The gids 0 and 1 are also indices, and numbers of microbatches without a gid; the ranks 2
# and 3 have their microbatches with gids in another order.
HELD = [
    [held(4, 1, 2), held(2, 3, gid=0), held(1, 5), held(2, 4)],
    [held(4, 1, 2), held(2, 3, gid=0), held(2, 4)],
    [held(4, 1, 2), held(2, 6, gid=1), held(2, 7), held(2, 8, 9, gid=0)],
    [held(4, 1, 2), held(2, 8, 9, gid=0), held(2, 7), held(2, 6, gid=1), held(1)],
]


def test_all_ranks_of_a_microbatch_have_its_coefficients_and_it_counts_once():
    found = run_ranks(coefficients_on_ranks, 4, aggregation("sample_mean"), HELD)
    # Nine samples, each of another number of tokens.
    assert found == [
        [[1 / 9 / int(n) for n in m.loss_mask.sum(1)] for m in of_rank] for of_rank in HELD
    ]


def rows_on_ranks() -> tuple[list[Any], list[list[int]], int, int]:
    plan = StepPlan.build(aggregation("sample_mean"), HELD[dist.get_rank()], dist.group.WORLD)
    rows = [plan.sample_rows(i).tolist() for i in range(len(plan.sizes))]
    counts = plan.counts
    return plan.microbatch_rows.tolist(), rows, counts.microbatches, counts.all_samples


def test_a_plan_has_the_rows_of_its_microbatches_in_the_table_of_all_ranks():
    # Rank 0 sends rows 0 to 3, rank 2 those of three packs, and rank 3 one without samples.
    assert run_ranks(rows_on_ranks, 4) == [
        ([0, 1, 2, 3], [[0, 1], [2], [3], [4]], 8, 9),
        ([0, 1, 3], [[0, 1], [2], [4]], 8, 9),
        ([0, 4, 5, 6], [[0, 1], [5], [6], [7, 8]], 8, 9),
        ([0, 6, 5, 4, 7], [[0, 1], [7, 8], [6], [5], []], 8, 9),
    ]


PAIR = "DataError: a microbatch with local_cp_size=2 must be given by the data- and context-"
PAIR += "parallel ranks 0 to 1, once each and with the same samples, got {}. Let one of Megatron's"
LACKING = "PeerError: another rank has a microbatch that the first of its context-parallel ranks"
FAILED = "PeerError: rank(s) [1] of the group failed while reading the step."
# The steps of both ranks, and the error of each.
WRONG: dict[str, tuple[Steps, tuple[str, str]]] = {
    "the first lacks it": (
        [[held(1, 3)], [held(2, 3)]],
        (LACKING, PAIR.format("one on rank 1 that rank 0 does not have")),
    ),
    "other samples": (
        [[held(2, 3)], [held(2, 1, 2)]],
        (LACKING, PAIR.format("one on rank 1 that rank 0 does not have")),
    ),
    "a gid on one of them": (
        [[held(2, 3)], [held(2, 3, gid=0)]],
        (LACKING, PAIR.format("one on rank 1 that rank 0 does not have")),
    ),
    "one gid twice": (
        [[held(2, 3, gid=5)], [held(2, 3, gid=5), held(2, 3, gid=5)]],
        (FAILED, PAIR.format("the gid 5 twice on rank 1")),
    ),
    "more ranks than there are": (
        [[held(1, 3)], [held(3, 3)]],
        (FAILED, PAIR.format("2 ranks in all").replace("=2", "=3").replace("to 1", "to 2")),
    ),
}


def test_ranks_that_do_not_hold_a_microbatch_together_are_refused():
    for name, (steps, texts) in WRONG.items():
        errors = run_ranks(coefficients_on_ranks, 2, aggregation("sum"), steps)
        for error, text in zip(errors, texts, strict=True):
            assert str(error).startswith(text), (name, error)


# The size and form of what travels.


def rank_table(rank: int, samples: int = 64, **by_sample: Any) -> RankTable:
    microbatch = Microbatch(torch.ones(samples, 1), prompt_ids=torch.arange(samples), **by_sample)
    return RankTable([microbatch], ["prompt"], rank, 2)


def columns_of(*tables: RankTable) -> Columns:
    return Columns.of(torch.stack([torch.tensor(x.header()).long() for x in tables]))


def test_a_sample_takes_16_bytes_with_one_id_and_more_where_some_rank_has_more():
    plain, weighted = rank_table(0), rank_table(1, sample_weights=2 * torch.ones(64))
    assert plain.row(columns_of(plain, plain)).nbytes == 64 * 16 + 2 * 8
    columns = columns_of(plain, weighted)
    assert plain.row(columns).nbytes == 64 * 24 + 2 * 8
    rows = torch.stack([plain.row(columns), weighted.row(columns)])
    assert joined(rows, columns, plain).samples.weight.unique().tolist() == [1, 2]


def test_ranks_are_decoded_in_the_same_operations_however_many_there_are():
    def names(ranks: int) -> list[str]:
        tables = [rank_table(rank, samples=1 + rank % 3) for rank in range(ranks)]
        columns = columns_of(*tables)
        rows = torch.stack([x.row(columns) for x in tables])
        with Operations() as made:
            samples = joined(rows, columns, tables[-1]).samples
            coefficients(aggregation("prompt_mean"), samples)
        return made.names

    assert names(3) == names(300)


def test_terms_that_share_masks_share_one_table_and_its_groups():
    terms = {"a": aggregation("prompt_mean"), "b": aggregation("sample_sum")}
    plans = StepPlan.build_terms(terms, [Microbatch(torch.ones(2, 3), prompt_ids=[1, 2])])
    table = plans["a"].samples
    assert table is plans["b"].samples
    assert table.groups("prompt") is table.groups("prompt")


def overwriting(samples: Samples) -> torch.Tensor:
    for x in (samples.mask_sum, samples.weight, samples.rejected, *samples.ids.values()):
        x.fill_(7)
    return torch.ones_like(samples.mask_sum)


def test_a_function_that_writes_into_its_samples_changes_no_other_term():
    custom = LossAggregation(mode="custom", function=overwriting, sample_weights="skip")
    terms = {"a": custom, "b": aggregation("prompt_mean", sample_weights="count")}
    microbatch = Microbatch(torch.ones(2, 3), prompt_ids=[1, 2], sample_weights=torch.ones(2))
    plans = StepPlan.build_terms(terms, [microbatch])
    assert plans["b"].coefficients(0).tolist() == [1 / 6, 1 / 6]
    assert plans["b"].mask_sums(0).tolist() == [3, 3]


# A plan on other ranks and devices.


def plans_on_ranks(make: Callable[[Any], Any]) -> tuple[str, bool, list[float]]:
    terms = {"": Term(LossAggregation(mode="custom", function=lambda x: x.mask_sum))}
    plans = make(terms) if dist.get_rank() == 0 else None
    plan = broadcast_plans(plans, terms, dist.group.WORLD)[""]
    aggregation_is_whole = plan.aggregation is terms[""].aggregation
    return plan.aggregation.mode, aggregation_is_whole, plan.coefficients(0).tolist()


def one_microbatch(terms: Any) -> dict[str, StepPlan]:
    return StepPlan.build_terms(terms, [Microbatch(torch.ones(2, 3))])


def test_every_rank_that_gets_a_plan_has_its_own_aggregation():
    found = run_ranks(plans_on_ranks, 2, one_microbatch)
    assert found == [("custom", True, [3.0, 3.0])] * 2


def bytes_of_plan() -> int:
    samples = [1000, 100_000][dist.get_rank()]
    microbatch = Microbatch(torch.ones(samples, 1), prompt_ids=torch.arange(samples))
    plan = StepPlan.build(aggregation("prompt_mean"), [microbatch], dist.group.WORLD)
    assert plan.sums[0].mask == samples
    return len(pickle.dumps(plan))


def test_a_pickled_plan_has_no_samples_of_other_ranks():
    # Three numbers a sample: the coefficient, the mask sum and the id.
    assert run_ranks(bytes_of_plan, 2)[0] < 1000 * 8 * 3 + 4000


def test_the_planned_sums_are_those_of_masks_and_weights():
    step = [
        Microbatch(torch.ones(2, 4)),
        Microbatch(torch.ones(0, 4)),
        Microbatch(torch.ones(1, 2)),
    ]
    plan = StepPlan.build(LossAggregation(mode="custom", function=alternating), step)
    # Coefficients 1, -1 and 1; mask sums 4, 4 and 2.
    assert [*plan.sums] == [(8.0, 0.0, 8.0), (0.0, 0.0, 0.0), (2.0, 2.0, 2.0)]


def alternating(samples: Samples) -> torch.Tensor:
    return 1.0 - 2.0 * (torch.arange(len(samples.mask_sum)) % 2)
