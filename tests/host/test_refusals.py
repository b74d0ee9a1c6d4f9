"""What the hook refuses, by name and with what to change, and what it does not.

One world runs all cases: after an error the next step starts anew, with another hook.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pytest
import torch

from megatron_loss_agg.mcore import Loop, LossHook
from tests.host import scripts
from tests.host.harness import error_of, run_host_ranks
from tests.host.steps import Counted, aggregation, batches

pytestmark = pytest.mark.host


@dataclass(frozen=True)
class Case:
    """What goes wrong in a step, and what is said of it: the error's name, and parts of its text.

    Args:
        loss: changes the loss function, see `gpt.forward_step_with`.
        data: of a data-parallel rank -> data iterator.
        after: a step or an evaluation before it, in which nothing goes wrong.
    """

    error: tuple[str, ...] = ()
    loss: Callable[..., Any] | None = None
    step: Callable[..., Any] | None = None
    data: Callable[[int], Any] = Counted
    mode: str = "prompt_mean"
    per_token: bool = False
    schedule: Callable[..., Any] | None = None
    after: str = ""


def lacking(key: str) -> Callable[[int], Any]:
    return partial(Counted, without=(key,))


CHANGED = ("MaskError", "is not this rank's part", "read_batch")
UNUSABLE = ("MaskError", "microbatch 1: loss_mask has negative, infinite or NaN values")
NO_OFFSETS = ("GroupError", "has no 'cu_seqlens'", "add it")


def in_layout(layout: str) -> Callable[[int], Any]:
    return partial(Counted, layout=layout)


UNSEEN = ("HostError", "a loss without a call of the model", "--overlap-moe")
fractional = partial(Counted, masks="fractional")

CASES = {
    "good": Case(),
    "legacy": Case(loss=scripts.mean_and_no_count),
    "packed where samples do not matter": Case(step=scripts.packed_call, mode="sum"),
    "fractions elsewhere": Case(data=fractional, mode="sample_sum", per_token=True),
    "fractions of a sum": Case(data=partial(scripts.masks_with, 0.5), mode="sum"),
    "no mask": Case(
        ("HostError", "function without_mask.<locals>.<lambda>,", "TokenLoss"), scripts.without_mask
    ),
    "mask of another name": Case(
        ("HostError", "own_loss)", "a parameter named loss_mask"),
        scripts.with_another_name,
    ),
    "object that is no partial": Case(
        ("HostError", "HoldsMask, which the forward step returned, has no mask"), scripts.HoldsMask
    ),
    "term": Case(
        ("HostError", "expected a masked sum", "drop its own factors", "return a TokenLoss"),
        scripts.with_a_term,
    ),
    "changed mask": Case((*CHANGED, "it sums to"), scripts.with_a_changed_mask),
    "changed mask after an evaluation": Case(
        CHANGED, scripts.with_a_changed_mask, after="evaluation"
    ),
    "mask changed later": Case(CHANGED, partial(scripts.with_first_token, 0.0), after="step"),
    "mask of NaN later": Case(CHANGED, partial(scripts.with_first_token, torch.nan), after="step"),
    **{
        f"every token later, {layout}": Case(
            CHANGED, scripts.with_every_token, data=in_layout(layout), after="step"
        )
        for layout in ("bshd", "thd")
    },
    "transposed": Case(
        ("MaskError", "a mask [samples, seq]", "not transposed"), step=scripts.transposed
    ),
    "part of the losses": Case(
        ("MaskError", "expected one loss per token"), scripts.with_part_of_the_losses
    ),
    "part of the mask": Case(
        ("MaskError", "where this rank's part of the batch's is", "a batch that is whole"),
        scripts.with_part_of_the_mask,
    ),
    "detached losses": Case(
        ("HostError", "losses without a gradient", "not detached"), scripts.with_detached_losses
    ),
    "no prompts": Case(
        ("GroupError", "have no 'prompt_ids'", "add that key"), data=lacking("prompt_ids")
    ),
    "no rollouts": Case(
        ("GroupError", "have no 'rollout_ids'", "add that key"),
        data=lacking("rollout_ids"),
        mode="rollout_mean",
    ),
    "no loss_mask": Case(
        ("MaskError", "expected a mapping with the tensor 'loss_mask'"), data=lacking("loss_mask")
    ),
    "not a mapping": Case(
        ("MaskError", "the data iterator gave Tensor"),
        data=lambda rank: iter([torch.ones(3)] * Counted.N_MB),
    ),
    "packed": Case(NO_OFFSETS, step=scripts.packed_call, mode="sample_mean"),
    "packed by position": Case(
        NO_OFFSETS, step=partial(scripts.packed_call, by_position=True), mode="sample_mean"
    ),
    "own context group": Case(
        ("HostError", "local_cp_size=2", "--hybrid-context-parallel"),
        step=partial(scripts.packed_call, local_cp_size=2),
    ),
    "two batches a microbatch": Case(
        ("StepError", "drew 4 batches for 2 microbatches", "once each"),
        step=scripts.draws_twice,
        mode="sum",
        data=lambda rank: itertools.repeat(next(Counted(rank))),
    ),
    "model not called": Case(UNSEEN, step=scripts.past_the_model, mode="sample_mean"),
    "model not called where samples do not matter": Case(step=scripts.past_the_model, mode="sum"),
    **{
        # Tokens are weighed by the loss function's own mask. It stays right while each sample's sum
        # is the planned one; for modes that know no samples, while that of the pack is.
        f"mask edited in place, {layout}, {mode}, {after}": Case(
            CHANGED if layout == "thd" and (mode, after) != ("token_mean", "step") else (),
            step=scripts.edits_its_mask,
            data=in_layout(layout),
            mode=mode,
            after=after,
        )
        for layout in ("bshd", "thd")
        for mode in ("sample_mean", "token_mean")
        for after in ("", "step")
    },
    "packed later": Case(NO_OFFSETS, step=scripts.packed_call, mode="sample_mean", after="step"),
    "fractions": Case(data=fractional, mode="token_mean", per_token=True),
    **{
        f"mask of {value}, {mode}": Case(
            UNUSABLE, data=partial(scripts.masks_with, value), mode=mode, per_token=per_token
        )
        for mode, per_token in (("sum", False), ("token_mean", True))
        for value in (-1.0, torch.nan, torch.inf)
    },
    "too few": Case(
        ("HostError", "computed 1 losses for 2 microbatches"),
        schedule=partial(scripts.other_number, -1),
    ),
    "good again": Case(),
}


def errors_on_host() -> dict[str, str | None]:
    """Every rank, DP 2: the error of each case."""
    from tests.host import gpt

    gpt.initialize()
    rank = gpt.data_rank()
    models = {per_token: gpt.ddp_model(per_token) for per_token in (False, True)}

    def run(case: Case) -> None:
        hook = LossHook(aggregation(case.mode), loop=Loop(of_megatron=True))
        data, ddp = case.data(rank), models[case.per_token]
        step = partial(gpt.run_step, hook, ddp, data, Counted.N_MB, Counted.ROWS)
        forward_step = case.step or gpt.forward_step
        if case.loss:
            forward_step = gpt.forward_step_with(case.loss)
        if case.after:
            step(forward_only=case.after == "evaluation")
        step(forward_step_func=forward_step, schedule=case.schedule)

    return {name: error_of(run, case) for name, case in CASES.items()}


@cache
def errors() -> list[dict[str, str | None]]:
    return run_host_ranks(errors_on_host, 2, timeout=90)


def assert_refused(errors: list[str | None], *expected: str) -> None:
    """``expected``: the error's name and parts of its text, or nothing."""
    if not expected:
        assert errors == [None] * len(errors)
        return
    name, *texts = expected
    for error in errors:
        assert error is not None and error.startswith(f"{name}: ")
        assert [text for text in texts if text not in error] == []
        assert "tensor(" not in error


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_refused_on_every_rank_and_nothing_else(name: str) -> None:
    assert_refused([rank[name] for rank in errors()], *CASES[name].error)


def packed_on_tensor_ranks() -> str | None:
    """Every rank, TP 2, of which the first reads the data."""
    from tests.host import gpt

    gpt.initialize(tensor_model_parallel_size=2)
    step = [LossHook(aggregation("sample_mean")), gpt.ddp_model(), Counted(0), Counted.N_MB]
    return error_of(gpt.run_step, *step, Counted.ROWS, forward_step_func=scripts.packed_call)


def test_every_tensor_parallel_rank_refuses_packed_calls_without_offsets() -> None:
    assert_refused(run_host_ranks(packed_on_tensor_ranks, 2), *NO_OFFSETS)


# Context-parallel groups of a sample's own (dynamic, hybrid): the size that the packed sequences
# name, the model's configuration, and what is said of them.
OF_ONE = ("HostError", "local_cp_size=1", "one group of 2", "--hybrid-context-parallel")
CONFIGURED = ("HostError", "-context-parallel, with which", "groups of their own", "change it")
GRAPHS = ("HostError", "replays one step's weights for all", "as graphs of layers do not")
OVERLAP = ("HostError", "--overlap-moe-expert-parallel-comm", "change it")
CONTEXT_GROUPS: dict[str, tuple[int | None, dict[str, Any], tuple[str, ...]]] = {
    "none": (None, {}, ()),
    "group of all": (2, {}, ()),
    "group of one": (1, {}, OF_ONE),
    "hybrid": (None, {"hybrid_context_parallel": True}, CONFIGURED),
    "dynamic": (None, {"dynamic_context_parallel": True}, CONFIGURED),
    "graph of an iteration": (None, {"cuda_graph_impl": "full_iteration"}, GRAPHS),
    "graph of an iteration, by its scope": (
        None,
        {"cuda_graph_impl": "local", "cuda_graph_scope": ["full_iteration"]},
        GRAPHS,
    ),
    "graph of layers": (
        None,
        {"cuda_graph_impl": "local", "cuda_graph_scope": ["full_iteration_inference"]},
        (),
    ),
    "overlap of experts": (None, {"overlap_moe_expert_parallel_comm": True}, OVERLAP),
}


def errors_of_context_groups() -> dict[str, str | None]:
    """Every rank, CP 2: the error of each case."""
    from tests.host import gpt

    gpt.initialize(cp=2)

    def step(local_cp_size: int | None, config: dict[str, Any]) -> None:
        ddp = gpt.ddp_model(per_token=True)
        vars(ddp.config).update(config)

        def set_size(module: Any, args: Any, kwargs: Any) -> Any:
            packed = kwargs["packed_seq_params"]
            kwargs["packed_seq_params"] = dataclasses.replace(packed, local_cp_size=local_cp_size)
            return args, kwargs

        ddp.register_forward_pre_hook(set_size, with_kwargs=True)
        gpt.run_step(LossHook(aggregation("prompt_mean")), ddp, batches(((0, 1), (2,)), "thd"), 2)

    return {name: error_of(step, *given) for name, (*given, _) in CONTEXT_GROUPS.items()}


def test_context_parallel_groups_of_their_own_are_refused_and_only_those() -> None:
    ranks = run_host_ranks(errors_of_context_groups, 2)
    for name, (_, _, expected) in CONTEXT_GROUPS.items():
        assert_refused([rank[name] for rank in ranks], *expected)


def error_of_optimizer_instances() -> str | None:
    """Every rank, PP 2: several optimizer instances under the per-token flag."""
    from tests.host import gpt

    gpt.initialize(pipeline_model_parallel_size=2)
    ddp = gpt.ddp_model(per_token=True)
    ddp.ddp_config.num_distributed_optimizer_instances = 2
    return error_of(gpt.run_step, LossHook(aggregation("token_mean")), ddp, Counted(0), 2)


def test_optimizer_instances_are_refused_where_megatron_scales_them_wrongly() -> None:
    ranks = run_host_ranks(error_of_optimizer_instances, 2)
    assert_refused(
        ranks, "HostError", "--num-distributed-optimizer-instances > 1", "several pipeline stages"
    )
