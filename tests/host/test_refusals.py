"""What the hook refuses, by name and with what to change, and what it does not.

One world runs all cases: after an error the next step starts anew, with another hook.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.host.harness import error_of, run_host_ranks
from tests.host.steps import Counted, aggregation, batches

pytestmark = pytest.mark.host


def without_mask(stock: Any, mask: Tensor) -> Any:
    return lambda output: stock(mask, output)


def with_keyword(stock: Any, mask: Tensor) -> Any:
    return functools.partial(lambda output, loss_mask: stock(loss_mask, output), loss_mask=mask)


def with_object(stock: Any, mask: Tensor) -> Any:
    class Loss:
        def __call__(self, loss_mask: Tensor, output: Tensor) -> Any:
            return stock(loss_mask, output)

    return functools.partial(functools.partial(Loss()), mask)


def with_another_name(stock: Any, mask: Tensor) -> Any:
    def own_loss(tokens: Tensor, output: Tensor) -> Any:
        return stock(tokens, output)

    return functools.partial(own_loss, mask)


class HoldsMask:
    """A loss function of the user's that is no partial."""

    def __init__(self, stock: Any, mask: Tensor) -> None:
        self.stock, self.loss_mask = stock, mask

    def __call__(self, output: Tensor) -> Any:
        return self.stock(self.loss_mask, output)


def with_a_term(stock: Any, mask: Tensor) -> Any:
    def loss_and_term(loss_mask: Tensor, output: Tensor) -> Any:
        loss, num_tokens, report = stock(loss_mask, output)
        return loss + 0.1 * output.square().sum(), num_tokens, report

    return functools.partial(loss_and_term, mask)


def with_a_changed_mask(stock: Any, mask: Tensor) -> Any:
    return functools.partial(stock, mask.roll(1, dims=-1))


def with_first_token(value: float, stock: Any, mask: Tensor) -> Any:
    return functools.partial(stock, mask.masked_fill(mask.cumsum(dim=-1) == 1, value))


def with_part_of_the_losses(stock: Any, mask: Tensor) -> Any:
    from megatron_loss_agg.mcore import TokenLoss

    return TokenLoss(lambda output: (output[:, 1:], {}), mask)


def mean_and_no_count(stock: Any, mask: Tensor) -> Any:
    """A 2-tuple with the mean, as legacy loss functions return it."""

    def mean(loss_mask: Tensor, output: Tensor) -> Any:
        loss, _, report = stock(loss_mask, output)
        return loss / loss_mask.sum().clamp(min=1), report

    return functools.partial(mean, mask)


def transposed(iterator: Any, model: Any) -> Any:
    """As of a model whose output is [seq, samples]."""
    from tests.host import gpt

    losses, loss_func = gpt.forward_step(iterator, model)
    (mask,) = loss_func.args
    return losses.T, functools.partial(loss_func.func, mask.T.contiguous())


def packed_call(iterator: Any, model: Any, by_position: bool = False, **options: Any) -> Any:
    """Calls the model with packed sequences, whatever the batch says."""
    from megatron.core.packed_seq_params import PackedSeqParams

    from tests.host import gpt

    batch = next(iterator)
    tokens, mask = batch["tokens"].view(1, -1), batch["loss_mask"]
    length = tokens.shape[1]
    starts = torch.tensor([0, length], dtype=torch.int32)
    packed = PackedSeqParams("thd", starts, starts, starts, starts, length, length, **options)
    given = [tokens, torch.arange(length).unsqueeze(0), None]
    if by_position:
        logits = model(*given, None, None, None, packed)
    else:
        logits = model(*given, packed_seq_params=packed)
    losses = logits.logsumexp(-1).view_as(mask)  # of the right shape, and no more is needed
    return losses, functools.partial(gpt.stock_loss_func, mask)


def other_number(more: int, **kwargs: Any) -> Any:
    """Megatron's schedule, for more microbatches than it is told."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    number = kwargs.pop("num_microbatches") + more
    return get_forward_backward_func()(**kwargs, num_microbatches=number)


def masks_with(value: float, rank: int) -> Any:
    """A data iterator whose first mask is fractional, and whose second one has ``value``."""
    data = Counted(rank)
    fraction, batch = next(data), next(data)
    for x, number in ((fraction, 0.5), (batch, value)):
        x["loss_mask"] = x["loss_mask"].masked_fill(x["loss_mask"].cumsum(dim=-1) == 1, number)
    return iter([fraction, batch])


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
    return functools.partial(Counted, without=(key,))


CHANGED = ("MaskError", "is not this rank's part", "read_batch")
UNUSABLE = ("MaskError", "negative, infinite or NaN values; expected finite values >= 0")
FRACTIONS = ("MaskError", "fractional loss masks with --calculate-per-token-loss", "drop that flag")
NO_OFFSETS = ("GroupError", "has no 'cu_seqlens'", "add it")
fractional = functools.partial(Counted, masks="fractional")

CASES = {
    "good": Case(),
    "legacy": Case(loss=mean_and_no_count),
    "keyword": Case(loss=with_keyword),
    "callable object": Case(loss=with_object),
    "packed where samples do not matter": Case(step=packed_call, mode="sum"),
    "fractions elsewhere": Case(data=fractional, mode="sample_sum", per_token=True),
    "fractions of a sum": Case(data=functools.partial(masks_with, 0.5), mode="sum"),
    "no mask": Case(
        ("HostError", "function without_mask.<locals>.<lambda>,", "TokenLoss"), without_mask
    ),
    "mask of another name": Case(
        ("HostError", "own_loss) of (tokens: ", "a parameter named loss_mask"), with_another_name
    ),
    "object that is no partial": Case(("HostError", "HoldsMask, which carries no mask"), HoldsMask),
    "term": Case(("HostError", "expected a masked sum", "return a TokenLoss"), with_a_term),
    "changed mask": Case(CHANGED, with_a_changed_mask),
    "changed mask after an evaluation": Case(CHANGED, with_a_changed_mask, after="evaluation"),
    "mask changed later": Case(CHANGED, functools.partial(with_first_token, 0.0), after="step"),
    "mask of NaN later": Case(
        CHANGED, functools.partial(with_first_token, torch.nan), after="step"
    ),
    "transposed": Case(("MaskError", "expected [samples, seq]", "transpose both"), step=transposed),
    "part of the losses": Case(
        ("MaskError", "expected one loss per token"), with_part_of_the_losses
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
    "packed": Case(NO_OFFSETS, step=packed_call, mode="sample_mean"),
    "packed by position": Case(
        NO_OFFSETS, step=functools.partial(packed_call, by_position=True), mode="sample_mean"
    ),
    "own context group": Case(
        ("HostError", "local_cp_size=2", "--hybrid-context-parallel"),
        step=functools.partial(packed_call, local_cp_size=2),
    ),
    "layout changed": Case(
        ("HostError", "first step of 2 rows", "a LossHook for each"),
        step=packed_call,
        mode="sample_mean",
        after="step",
    ),
    "fractions": Case(FRACTIONS, data=fractional, mode="token_mean", per_token=True),
    **{
        f"mask of {value}, {mode}": Case(
            UNUSABLE, data=functools.partial(masks_with, value), mode=mode, per_token=per_token
        )
        # Without the flag, and with it, under which fractions alone would be refused.
        for mode, per_token in (("sum", False), ("token_mean", True))
        for value in (-1.0, torch.nan, torch.inf)
    },
    "too few": Case(
        ("HostError", "computed 1 losses for 2 microbatches"),
        schedule=functools.partial(other_number, -1),
    ),
    "too many": Case(
        ("HostError", "a loss beyond the step's 2 microbatches"),
        schedule=functools.partial(other_number, 1),
    ),
    "good again": Case(),
}


def errors_on_host() -> dict[str, str | None]:
    """Every rank, DP 2: the error of each case."""
    from megatron.core import parallel_state

    from megatron_loss_agg.mcore import LossHook
    from tests.host import gpt

    gpt.initialize()
    rank = parallel_state.get_data_parallel_rank()
    models = {per_token: gpt.ddp_model(per_token) for per_token in (False, True)}

    def run(case: Case) -> None:
        hook = LossHook(aggregation(case.mode), in_training_loop=True)
        data, ddp = case.data(rank), models[case.per_token]
        step = functools.partial(gpt.run_step, hook, ddp, data, Counted.N_MB, Counted.ROWS)
        forward_step = case.step or gpt.forward_step
        if case.loss:
            forward_step = gpt.forward_step_with(case.loss)
        if case.after:
            step(forward_only=case.after == "evaluation")
        step(forward_step_func=forward_step, schedule=case.schedule)

    return {name: error_of(run, case) for name, case in CASES.items()}


@functools.cache
def errors() -> list[dict[str, str | None]]:
    return run_host_ranks(errors_on_host, 2, timeout=90)


def assert_refused(errors: list[str | None], name: str, *texts: str) -> None:
    for error in errors:
        assert error is not None and error.startswith(f"{name}: ")
        assert [text for text in texts if text not in error] == []
        assert "tensor(" not in error


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.error])
def test_what_is_fine_is_not_refused(name: str) -> None:
    assert [rank[name] for rank in errors()] == [None, None]


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.error])
def test_bad_input_is_refused_on_every_rank(name: str) -> None:
    assert_refused([rank[name] for rank in errors()], *CASES[name].error)


def packed_on_tensor_ranks() -> str | None:
    """Every rank, TP 2, of which the first reads the data."""
    from megatron_loss_agg.mcore import LossHook
    from tests.host import gpt

    gpt.initialize(tensor_model_parallel_size=2)
    step = [LossHook(aggregation("sample_mean")), gpt.ddp_model(), Counted(0), Counted.N_MB]
    return error_of(gpt.run_step, *step, Counted.ROWS, forward_step_func=packed_call)


def test_every_tensor_parallel_rank_refuses_packed_calls_without_offsets() -> None:
    assert_refused(run_host_ranks(packed_on_tensor_ranks, 2), *NO_OFFSETS)


# Context-parallel groups of a sample's own (dynamic, hybrid): the size that the packed sequences
# name, the model's configuration, and what is said of them.
CONTEXT_GROUPS: dict[str, tuple[int | None, dict[str, bool], tuple[str, ...]]] = {
    "none": (None, {}, ()),
    "group of all": (2, {}, ()),
    "group of one": (
        1,
        {},
        ("HostError", "local_cp_size=1", "one group of 2", "--hybrid-context-parallel"),
    ),
    "configured": (
        None,
        {"hybrid_context_parallel": True},
        ("HostError", "hybrid_context_parallel", "one group for all", "turn it off"),
    ),
}


def errors_of_context_groups() -> dict[str, str | None]:
    """Every rank, CP 2: the error of each case."""
    from megatron_loss_agg.mcore import LossHook
    from tests.host import gpt

    gpt.initialize(cp=2)

    def step(local_cp_size: int | None, config: dict[str, bool]) -> None:
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
    for name, (_, _, error) in CONTEXT_GROUPS.items():
        if error:
            assert_refused([rank[name] for rank in ranks], *error)
        else:
            assert [rank[name] for rank in ranks] == [None, None]
