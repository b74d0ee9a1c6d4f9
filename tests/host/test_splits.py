"""The split over context-parallel ranks is recognised: losses meet the weights of their own tokens.

The losses of these scripts are the tokens' labels, so that the aggregated loss says which token got
which weight; masks are uniform, so that they do not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_loss_agg import CPLayout, LossAggregation, Microbatch
from megatron_loss_agg.mcore import DatasetReports, LossHook, TokenLoss
from tests.host.harness import CP2, EXACT, error_of, run_host_ranks

pytestmark = pytest.mark.host

LENGTHS = (8, 4, 52)  # all can be split into 2 * cp chunks
TOKENS = sum(LENGTHS)
LABELS = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(0))

Split = Callable[[Tensor, int, int], CPLayout]
PACKS: dict[str, Split] = {
    "sequences": lambda starts, size, rank: CPLayout.thd(starts, size, rank),
    "padded sequences": lambda starts, size, rank: CPLayout.thd(
        torch.cat([starts, starts.new_tensor([TOKENS])]), size, rank
    ),
    "row": lambda starts, size, rank: CPLayout.bshd(TOKENS, size, rank),
    "contiguous": lambda starts, size, rank: CPLayout.contiguous(TOKENS, size, rank),
    "backwards": lambda starts, size, rank: CPLayout.contiguous(TOKENS, size, size - 1 - rank),
}
FITTING = ("sequences", "row", "contiguous")


def batch(rows: int | None = None) -> dict[str, Tensor]:
    """A pack of `LENGTHS`; or rows."""
    whole = {"labels": LABELS, "tokens": LABELS % 32, "loss_mask": torch.ones(TOKENS)}
    whole = {name: x.view(rows or 1, -1) for name, x in whole.items()}
    if rows is None:
        whole["position_ids"] = torch.cat([torch.arange(n) for n in LENGTHS]).view(1, -1)
        whole["cu_seqlens"] = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    return whole


def dummy() -> dict[str, Tensor]:
    """A pack of one sample whose tokens are all alike."""
    alike, positions = torch.zeros(1, TOKENS).long(), torch.arange(TOKENS).view(1, -1)
    whole = {"labels": alike, "tokens": alike, "position_ids": positions}
    return {**whole, "loss_mask": torch.ones(1, TOKENS), "cu_seqlens": torch.tensor([0, TOKENS])}


def script(split: Split, told: bool = True, whole_losses: bool = False) -> Callable[..., Any]:
    """A forward step.

    Args:
        told: or else the model is called with tokens that are all alike.
    """

    def forward_step(data_iterator: Any, model: Any) -> tuple[Tensor, TokenLoss]:
        from megatron.core import parallel_state

        whole = next(data_iterator)
        size = parallel_state.get_context_parallel_world_size()
        rank = parallel_state.get_context_parallel_rank()
        if "cu_seqlens" in whole:
            layout = split(whole["cu_seqlens"], size, rank)
        else:
            layout = CPLayout.contiguous(whole["labels"].shape[1], size, rank)
        labels, tokens, mask = (layout.shard(whole[k]) for k in ("labels", "tokens", "loss_mask"))
        # In another dtype than the batch's.
        tokens = (tokens if told else torch.zeros_like(tokens)).int()
        if whole_losses:
            labels, mask = whole["labels"], whole["loss_mask"]
        output = model(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), None)

        def losses(output: Tensor) -> tuple[Tensor, dict[str, Any]]:
            return labels.double() + 0 * output.mean(), {}

        return output, TokenLoss(losses, mask)

    return forward_step


def means(whole: dict[str, Tensor]) -> float:
    """The mean over samples of the mean of a sample's labels."""
    if "cu_seqlens" not in whole:
        return float(whole["labels"].double().mean())
    lengths = whole["cu_seqlens"].diff().tolist()
    labels, mask = (whole[k].view(-1)[: sum(lengths)].double() for k in ("labels", "loss_mask"))
    samples = zip(labels.split(lengths), mask.split(lengths), strict=True)
    return sum(float((x * m).sum() / m.sum()) for x, m in samples) / len(lengths)


def relative_errors(batches: list[dict[str, Tensor]], **given: Any) -> list[float] | str | None:
    """Of the aggregated loss of each batch, a step of its own; or how it is refused."""
    from tests.host import gpt

    gpt.initialize(**CP2)
    ddp, errors = gpt.ddp_model(), []
    hook = LossHook(LossAggregation(mode="sample_mean"), **given.pop("hook", {}))

    def run() -> None:
        for whole in batches:
            step = script(**given)
            reports = gpt.run_step(hook, ddp, iter([whole]), 1, forward_step_func=step)
            found, expected = gpt.reported(reports, "sample_mean loss"), means(whole)
            errors.append(abs(found - expected) / (expected or 1))
        known = [hook._splits.recognised(True), hook._splits.recognised(False)]
        assert known[0] is not None, known

    return error_of(run) or errors


def _packs(steps: list[dict[str, Tensor]], name: str, **given: Any) -> Any:
    return relative_errors(steps, split=PACKS[name], **given)


@pytest.mark.parametrize("name", FITTING)
def test_the_split_of_the_script_is_recognised(name: str) -> None:
    # Rows first and in between: another kind of batch, which they always split contiguously.
    # The first pack could be split in any way: its only sample is padding, its tokens are alike,
    # and its positions are those that the script makes up on the first rank.
    steps = [batch(rows=2), dummy(), batch(), batch(), batch(rows=2)]
    for errors in run_host_ranks(_packs, 2, steps, name):
        assert isinstance(errors, list), errors
        assert len(errors) == len(steps)
        assert max(errors) <= EXACT


def padded_pack(second: int) -> dict[str, Tensor]:
    """Two samples in places of 32: ranks differ in which splits fit their own part."""
    real = torch.zeros(TOKENS, dtype=torch.bool)
    real[:16] = real[32 : 32 + second] = True
    labels = torch.where(real, LABELS + 1, 0).view(1, -1)
    return {
        "labels": labels,
        "tokens": labels % 32,
        "loss_mask": real.float().view(1, -1),
        "cu_seqlens": torch.tensor([0, 16, 16 + second]),
        "cu_seqlens_padded": torch.tensor([0, 32, TOKENS]),
    }


def padded_losses(name: str, second: int) -> list[float] | str | None:
    """Every rank, CP 2: the loss of two steps of `padded_pack`."""
    from tests.host import gpt

    gpt.initialize(**CP2)
    ddp, found = gpt.ddp_model(), []
    hook = LossHook(LossAggregation(mode="sample_mean"))

    def run() -> None:
        for _ in range(2):
            data = iter([padded_pack(second)])
            step = script(split=PACKS[name])
            reports = gpt.run_step(hook, ddp, data, 1, forward_step_func=step)
            found.append(gpt.reported(reports, "sample_mean loss"))

    return error_of(run) or found


@pytest.mark.parametrize("second", [16, 12])
@pytest.mark.parametrize("name", ["row", "contiguous"])
def test_ranks_recognise_the_split_together(name: str, second: int) -> None:
    labels = padded_pack(second)["labels"].double().view(-1)
    expected = (labels[:16].mean() + labels[32 : 32 + second].mean()) / 2
    for found in run_host_ranks(padded_losses, 2, name, second, timeout=60):
        assert found == pytest.approx([float(expected)] * 2, rel=EXACT)


def reports_of_data_sets(told: bool) -> Any:
    """Every rank, CP 2: the mean of each data set in a pack that is split contiguously."""
    from tests.host import gpt

    gpt.initialize(**CP2)
    ddp, ids = gpt.ddp_model(), torch.tensor([3, 5, 7])
    whole = {**batch(), "dataset_ids": ids}

    def read_step(iterator: Any, number: int) -> list[Microbatch]:
        return [Microbatch(whole["loss_mask"], whole["cu_seqlens"], dataset_ids=ids)]

    hook = LossHook(
        LossAggregation(mode="token_mean"),
        extensions=[DatasetReports()],
        read_step=None if told else read_step,
    )
    step, found = script(split=PACKS["contiguous"]), []

    def run() -> None:
        reports = gpt.run_step(hook, ddp, iter([whole]), 1, forward_step_func=step)
        found.extend(gpt.reported(reports, f"lm loss of dataset {d}") for d in ids.tolist())

    return error_of(run) or found


def test_reports_by_data_set_ask_for_the_split_where_weights_do_not() -> None:
    means_of = [float(x.double().mean()) for x in LABELS.split(LENGTHS)]
    for found in run_host_ranks(reports_of_data_sets, 2, True):
        assert found == pytest.approx(means_of, rel=EXACT)
    for found in run_host_ranks(reports_of_data_sets, 2, False):
        assert "expected tensors that tell tokens apart" in found


REFUSED = {
    "a split that is none of them": ("backwards", True, "is this rank's part of the batch's under"),
    "nothing tells tokens apart": ("row", False, "is this rank's part of the batch's under"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_split_that_is_not_recognised_is_refused(name: str) -> None:
    split, told, text = REFUSED[name]
    for error in run_host_ranks(functools.partial(_packs, told=told), 2, [batch()], split):
        assert isinstance(error, str) and error.startswith("LayoutError"), error
        assert text in error
        assert "token_ids" in error


def test_losses_that_are_not_split_are_refused() -> None:
    call = functools.partial(_packs, whole_losses=True)
    for error in run_host_ranks(call, 2, [batch()], "row"):
        assert isinstance(error, str) and error.startswith("LayoutError"), error
        assert "all of the 64 tokens of the batch on a context-parallel rank of 2" in error


def masks_alone(iterator: Any, number: int, *, whole: dict[str, Tensor]) -> list[Microbatch]:
    return [Microbatch(whole["loss_mask"], whole["cu_seqlens"])] * number


@pytest.mark.parametrize("name", FITTING)
def test_a_mask_that_fits_one_split_alone_decides(name: str) -> None:
    whole = batch()
    generator = torch.Generator().manual_seed(1)
    whole["loss_mask"] = (torch.rand(1, TOKENS, generator=generator) < 0.5).float()
    hook = {"read_step": functools.partial(masks_alone, whole=whole)}
    for errors in run_host_ranks(functools.partial(_packs, hook=hook), 2, [whole, whole], name):
        assert isinstance(errors, list), errors
        assert max(errors) <= EXACT


def test_padding_after_the_last_sample_is_split_like_a_sequence() -> None:
    whole = batch()
    whole["cu_seqlens"] = whole["cu_seqlens"][:-1]  # the last 52 tokens are padding
    whole["loss_mask"][:, sum(LENGTHS[:2]) :] = 0
    for errors in run_host_ranks(_packs, 2, [whole, whole], "padded sequences"):
        assert isinstance(errors, list), errors
        assert max(errors) <= EXACT


def read_step(iterator: Any, number: int, *, told: bool) -> list[Microbatch]:
    ids = {"token_ids": LABELS % 32} if told else {}
    whole = batch()
    return [Microbatch(whole["loss_mask"], whole["cu_seqlens"], **ids)] * number


def test_two_splits_that_fit_and_give_other_weights_are_refused() -> None:
    hook = {"read_step": functools.partial(read_step, told=False)}
    for error in run_host_ranks(functools.partial(_packs, hook=hook), 2, [batch()], "row"):
        assert isinstance(error, str) and error.startswith("LayoutError"), error
        assert "'zigzag over the whole pack', 'contiguous'] alike" in error
        assert "token_ids" in error


def test_token_ids_of_a_microbatch_decide_where_no_batch_is_read() -> None:
    hook = {"read_step": functools.partial(read_step, told=True)}
    for errors in run_host_ranks(functools.partial(_packs, hook=hook), 2, [batch()], "row"):
        assert isinstance(errors, list), errors
        assert max(errors) <= EXACT
