"""What the hook refuses, by name and with what to change; and that no rank waits for a failed one.

One world runs all of it: after an error the next step starts anew, with another hook.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.host.iterators import N_MB, ROWS, Counted, aggregation
from tests.host.ranks import run_host_ranks

pytestmark = pytest.mark.host


def error_of(call: Callable[[], Any]) -> str | None:
    """What ``call`` raised, as "Name: text"; None if nothing."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


class Failing(Counted):
    """Raises ``error`` for the second batch of the step on rank 1."""

    def __init__(self, data_rank: int, error: Exception) -> None:
        super().__init__(data_rank)
        self.error = error if data_rank == 1 else None

    def __next__(self) -> dict[str, Any]:
        if self.error and self.given == 1:
            raise self.error
        return super().__next__()


def with_loss_func(change: Callable[..., Any]) -> Callable[..., Any]:
    """A forward step whose loss function is ``change(loss_func, mask)``."""
    from tests.host import gpt

    def forward_step(iterator: Any, model: Any) -> Any:
        losses, loss_func = gpt.forward_step(iterator, model)
        (mask,) = loss_func.args
        return losses, change(loss_func.func, mask)

    return forward_step


def without_mask(loss_func: Any, mask: Tensor) -> Any:
    return lambda output: loss_func(mask, output)


def with_keyword(loss_func: Any, mask: Tensor) -> Any:
    return functools.partial(lambda output, loss_mask: loss_func(loss_mask, output), loss_mask=mask)


def with_object(loss_func: Any, mask: Tensor) -> Any:
    class Loss:
        def __call__(self, loss_mask: Tensor, output: Tensor) -> Any:
            return loss_func(loss_mask, output)

    return functools.partial(functools.partial(Loss()), mask)


def with_another_name(loss_func: Any, mask: Tensor) -> Any:
    def own_loss(tokens: Tensor, output: Tensor) -> Any:
        return loss_func(tokens, output)

    return functools.partial(own_loss, mask)


class HoldsMask:
    """A loss function of the user's that is no partial."""

    def __init__(self, loss_func: Any, mask: Tensor) -> None:
        self.loss_func, self.loss_mask = loss_func, mask

    def __call__(self, output: Tensor) -> Any:
        return self.loss_func(self.loss_mask, output)


def with_a_term(loss_func: Any, mask: Tensor) -> Any:
    def loss_and_term(loss_mask: Tensor, output: Tensor) -> Any:
        loss, num_tokens, report = loss_func(loss_mask, output)
        return loss + 0.1 * output.square().sum(), num_tokens, report

    return functools.partial(loss_and_term, mask)


def with_a_changed_mask(loss_func: Any, mask: Tensor) -> Any:
    return functools.partial(loss_func, mask.roll(1, dims=-1))


def with_a_token_less(loss_func: Any, mask: Tensor) -> Any:
    first = mask.cumsum(dim=-1) == 1
    return functools.partial(loss_func, mask.masked_fill(first, 0))


def with_nan(loss_func: Any, mask: Tensor) -> Any:
    first = mask.cumsum(dim=-1) == 1
    return functools.partial(loss_func, mask.masked_fill(first, torch.nan))


def transposed(iterator: Any, model: Any) -> Any:
    """As of a model whose output is [seq, samples]."""
    from tests.host import gpt

    losses, loss_func = gpt.forward_step(iterator, model)
    (mask,) = loss_func.args
    return losses.T, functools.partial(loss_func.func, mask.T.contiguous())


def with_part_of_the_losses(loss_func: Any, mask: Tensor) -> Any:
    from megatron_loss_agg.mcore import TokenLoss

    return TokenLoss(lambda output: (output[:, 1:], {}), mask)


def mean_and_no_count(loss_func: Any, mask: Tensor) -> Any:
    """A 2-tuple with the mean, as legacy loss functions return it."""

    def mean(loss_mask: Tensor, output: Tensor) -> Any:
        loss, _, report = loss_func(loss_mask, output)
        return loss / loss_mask.sum().clamp(min=1), report

    return functools.partial(mean, mask)


def packed_call(local_cp_size: int | None, by_position: bool) -> Callable[..., Any]:
    """A forward step that calls the model with packed sequences, whatever the batch says."""
    from megatron.core.packed_seq_params import PackedSeqParams

    from tests.host import gpt

    def forward_step(iterator: Any, model: Any) -> Any:
        batch = next(iterator)
        tokens, mask = batch["tokens"].view(1, -1), batch["loss_mask"]
        length = tokens.shape[1]
        starts = torch.tensor([0, length], dtype=torch.int32)
        packed = PackedSeqParams(
            "thd", starts, starts, starts, starts, length, length, local_cp_size=local_cp_size
        )
        given = [tokens, torch.arange(length).unsqueeze(0), None]
        if by_position:
            logits = model(*given, None, None, None, packed)
        else:
            logits = model(*given, packed_seq_params=packed)
        losses = logits.logsumexp(-1).view_as(mask)  # of the right shape, and no more is needed
        return losses, functools.partial(gpt.stock_loss_func, mask)

    return forward_step


def one_fewer(schedule: Any) -> Any:
    return lambda **kwargs: schedule(**{**kwargs, "num_microbatches": N_MB - 1})


def one_more(schedule: Any) -> Any:
    return lambda **kwargs: schedule(**{**kwargs, "num_microbatches": N_MB + 1})


def errors_on_host() -> dict[str, str | None]:
    """Every rank, DP 2: the error of each case."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_loss_agg.mcore import LossHook
    from tests.host import gpt

    gpt.initialize()
    rank = parallel_state.get_data_parallel_rank()
    schedule = get_forward_backward_func()
    models = {flag: gpt.data_parallel(gpt.build(torch.float64, flag)) for flag in (False, True)}

    def steps(
        mode: str,
        *step_by_step: Callable[..., Any],
        data: Any = None,
        per_token: bool = False,
        schedule: Any = schedule,
        evaluates_first: bool = False,
    ) -> str | None:
        wrapped = LossHook(aggregation(mode), in_training_loop=True).wrap(schedule)
        data = data or Counted(rank)

        def run() -> None:
            ddp = models[per_token]
            if evaluates_first:
                gpt.run_step(wrapped, ddp, data, N_MB, ROWS, forward_only=True)
            for step in step_by_step or (gpt.forward_step,):
                gpt.run_step(wrapped, ddp, data, N_MB, ROWS, forward_step_func=step)

        return error_of(run)

    def batches_without(*keys: str) -> Counted:
        return Counted(rank, without=keys)

    mode = "prompt_mean"
    return {
        "good": steps(mode),
        "legacy": steps(mode, with_loss_func(mean_and_no_count)),
        "keyword": steps(mode, with_loss_func(with_keyword)),
        "callable object": steps(mode, with_loss_func(with_object)),
        "no mask": steps(mode, with_loss_func(without_mask)),
        "mask of another name": steps(mode, with_loss_func(with_another_name)),
        "object that is no partial": steps(mode, with_loss_func(HoldsMask)),
        "term": steps(mode, with_loss_func(with_a_term)),
        "changed mask": steps(mode, with_loss_func(with_a_changed_mask)),
        "changed mask after an evaluation": steps(
            mode, with_loss_func(with_a_changed_mask), evaluates_first=True
        ),
        "mask changed later": steps(mode, gpt.forward_step, with_loss_func(with_a_token_less)),
        "mask of NaN later": steps(mode, gpt.forward_step, with_loss_func(with_nan)),
        "transposed": steps(mode, transposed),
        "part of the losses": steps(mode, with_loss_func(with_part_of_the_losses)),
        "no prompts": steps(mode, data=batches_without("prompt_ids")),
        "no rollouts": steps("rollout_mean", data=batches_without("rollout_ids")),
        "no loss_mask": steps(mode, data=batches_without("loss_mask")),
        "not a mapping": steps(mode, data=iter([torch.ones(3)] * N_MB)),
        "packed": steps("sample_mean", packed_call(None, by_position=False)),
        "packed by position": steps("sample_mean", packed_call(None, by_position=True)),
        "packed later": steps("sum", packed_call(None, by_position=False)),
        "own context group": steps(mode, packed_call(2, by_position=False)),
        "layout changed": steps(
            "sample_mean", gpt.forward_step, packed_call(None, by_position=False)
        ),
        "fractions": steps("token_mean", data=Counted(rank, fractional=True), per_token=True),
        "fractions elsewhere": steps(
            "sample_sum", data=Counted(rank, fractional=True), per_token=True
        ),
        "too few": steps(mode, schedule=one_fewer(schedule)),
        "too many": steps(mode, schedule=one_more(schedule)),
        "failed reader": steps(mode, data=Failing(rank, OSError("disk"))),
        "short reader": steps(mode, data=Failing(rank, StopIteration())),
        "good again": steps(mode),
    }


def errors_on_tensor_ranks() -> dict[str, str | None]:
    """Every rank, TP 2, of which the first reads the data: the error of each case."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_loss_agg.mcore import LossHook
    from tests.host import gpt

    gpt.initialize(tensor_model_parallel_size=2)
    reads = torch.distributed.get_rank() == 0
    ddp = gpt.data_parallel(gpt.build(torch.float64, False))

    def step(data: Any, forward_step: Any = gpt.forward_step) -> str | None:
        wrapped = LossHook(aggregation("sample_mean")).wrap(get_forward_backward_func())
        return error_of(
            lambda: gpt.run_step(wrapped, ddp, data, N_MB, ROWS, forward_step_func=forward_step)
        )

    return {
        "failed reader": step(Failing(1, OSError("disk")) if reads else None),
        "packed": step(Counted(0), packed_call(None, by_position=False)),
    }


@functools.cache
def errors() -> list[dict[str, str | None]]:
    return run_host_ranks(errors_on_host, 2, timeout=90)


@functools.cache
def errors_of_tensor_ranks() -> list[dict[str, str | None]]:
    return run_host_ranks(errors_on_tensor_ranks, 2, timeout=90)


@pytest.mark.parametrize(
    "case",
    [
        "good",
        "legacy",
        "keyword",
        "callable object",
        "packed later",
        "fractions elsewhere",
        "good again",
    ],
)
def test_what_is_fine_is_not_refused(case: str) -> None:
    assert [rank[case] for rank in errors()] == [None, None]


@pytest.mark.parametrize(
    "case, name, texts",
    [
        ("no mask", "HostError", ("function without_mask.<locals>.<lambda>,", "TokenLoss")),
        (
            "mask of another name",
            "HostError",
            ("own_loss) of (tokens: ", "a parameter named loss_mask"),
        ),
        ("object that is no partial", "HostError", ("HoldsMask, which carries no mask",)),
        ("term", "HostError", ("expected a masked sum", "return a TokenLoss")),
        ("changed mask", "MaskError", ("is not this rank's part", "read_batch")),
        (
            "changed mask after an evaluation",
            "MaskError",
            ("is not this rank's part", "read_batch"),
        ),
        ("mask changed later", "MaskError", ("is not this rank's part", "read_batch")),
        ("mask of NaN later", "MaskError", ("is not this rank's part", "read_batch")),
        ("transposed", "MaskError", ("expected [samples, seq]", "transpose both")),
        ("part of the losses", "MaskError", ("expected one loss per token",)),
        ("no prompts", "GroupError", ("have no 'prompt_ids'", "add that key")),
        ("no rollouts", "GroupError", ("have no 'rollout_ids'", "add that key")),
        ("no loss_mask", "MaskError", ("expected a mapping with the tensor 'loss_mask'",)),
        ("not a mapping", "MaskError", ("the data iterator gave Tensor",)),
        ("packed", "GroupError", ("has no 'cu_seqlens'", "add it")),
        ("packed by position", "GroupError", ("has no 'cu_seqlens'", "add it")),
        ("own context group", "HostError", ("local_cp_size=2", "--hybrid-context-parallel")),
        ("layout changed", "HostError", ("first step of 2 rows", "a LossHook for each")),
        ("fractions", "MaskError", ("--calculate-per-token-loss", "drop that flag")),
        ("too few", "HostError", ("computed 1 losses for 2 microbatches",)),
        ("too many", "HostError", ("a loss beyond the step's 2 microbatches",)),
    ],
)
def test_bad_input_is_refused_on_every_rank(case: str, name: str, texts: tuple[str, ...]) -> None:
    for rank in errors():
        assert rank[case] is not None and rank[case].startswith(f"{name}: ")
        for text in texts:
            assert text in rank[case]
        assert "tensor(" not in rank[case]


@pytest.mark.parametrize(
    "case, error", [("failed reader", "OSError: disk"), ("short reader", "StopIteration: ")]
)
def test_a_rank_that_cannot_read_its_data_stops_the_others(case: str, error: str) -> None:
    other, failed = (rank[case] for rank in errors())
    assert failed == error
    assert other is not None and other.startswith("PeerError: ")
    assert "rank(s) [1]" in other


def test_a_tensor_parallel_rank_hears_that_its_reader_failed() -> None:
    reader, other = (rank["failed reader"] for rank in errors_of_tensor_ranks())
    assert reader == "OSError: disk"
    assert other is not None and other.startswith("PeerError: ")


def test_every_tensor_parallel_rank_refuses_packed_calls_without_offsets() -> None:
    for rank in errors_of_tensor_ranks():
        assert rank["packed"] is not None and rank["packed"].startswith("GroupError: ")
