"""The split over context-parallel ranks is recognised: losses meet the weights of their own tokens.

The losses of these scripts are the tokens' labels, so that the aggregated loss says which token got
which weight. Masks are uniform, unless they are to tell the split.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from megatron_loss_agg import CPLayout, Microbatch
from megatron_loss_agg.mcore import DatasetReports, LossHook, TokenLoss
from tests.host import whole
from tests.host.harness import EXACT, run_host_ranks
from tests.host.refusals import Row, assert_told, hook_of
from tests.host.steps import aggregation

pytestmark = pytest.mark.host

Batch = dict[str, Tensor]
LENGTHS = (8, 4, 52)  # all can be split into 2 * cp chunks
TOKENS = sum(LENGTHS)
LABELS = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(0))
DATASETS = torch.tensor([3, 5, 7])

SPLITS: dict[str, Callable[[Tensor, int, int], CPLayout]] = {
    "sequences": CPLayout.thd,
    "padded sequences": lambda starts, size, rank: CPLayout.thd(
        torch.cat([starts, starts.new_tensor([TOKENS])]), size, rank
    ),
    "row": lambda starts, size, rank: CPLayout.bshd(TOKENS, size, rank),
    "contiguous": lambda starts, size, rank: CPLayout.contiguous(TOKENS, size, rank),
    "backwards": lambda starts, size, rank: CPLayout.contiguous(TOKENS, size, size - 1 - rank),
}
FITTING = ("sequences", "row", "contiguous")


def rows() -> Batch:
    batch = {"labels": LABELS, "tokens": LABELS % 32, "loss_mask": torch.ones(TOKENS)}
    return {name: x.view(2, -1) for name, x in batch.items()}


def pack() -> Batch:
    batch = {name: x.view(1, -1) for name, x in rows().items()}
    positions = torch.cat([torch.arange(n) for n in LENGTHS]).view(1, -1)
    starts = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    return {**batch, "position_ids": positions, "cu_seqlens": starts, "dataset_ids": DATASETS}


def dummy() -> Batch:
    """A pack of one sample whose tokens are all alike."""
    alike, positions = torch.zeros(1, TOKENS).long(), torch.arange(TOKENS).view(1, -1)
    whole = {"labels": alike, "tokens": alike, "position_ids": positions}
    return {**whole, "loss_mask": torch.ones(1, TOKENS), "cu_seqlens": torch.tensor([0, TOKENS])}


def padded(second: int) -> Batch:
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


def ending_in_padding() -> Batch:
    """Its last 52 tokens are padding."""
    batch = pack()
    batch["loss_mask"][:, sum(LENGTHS[:2]) :] = 0
    del batch["dataset_ids"]
    return {**batch, "cu_seqlens": batch["cu_seqlens"][:-1]}


def telling() -> Batch:
    """A pack whose mask fits one split alone."""
    random = torch.rand(1, TOKENS, generator=torch.Generator().manual_seed(1))
    return {**pack(), "loss_mask": (random < 0.5).float()}


def read_step(iterator: Any, number: int, *, batch: Batch, **given: Any) -> list[Microbatch]:
    """The step's masks, and only what else is ``given``."""
    return [Microbatch(batch["loss_mask"], batch["cu_seqlens"], **given)] * number


def labels_as_losses(
    name: str, iterator: Any, model: Any, told: bool = True, of_all: bool = False
) -> Any:
    """A forward step.

    Args:
        name: of the split.
        told: or else the model is called with tokens that are all alike.
        of_all: losses and mask are of all tokens.
    """
    batch = next(iterator)
    _, size, rank = whole.context_parallel()
    if "cu_seqlens" in batch:
        starts = batch.get("cu_seqlens_padded", batch["cu_seqlens"])
        layout = SPLITS[name](starts, size, rank)
    else:
        layout = CPLayout.contiguous(batch["labels"].shape[1], size, rank)
    labels, tokens, mask = (layout.shard(batch[k]) for k in ("labels", "tokens", "loss_mask"))
    # In another dtype than the batch's.
    tokens = (tokens if told else torch.zeros_like(tokens)).int()
    if of_all:
        labels, mask = batch["labels"], batch["loss_mask"]
    output = model(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), None)
    return output, TokenLoss(lambda output: (labels.double() + 0 * output.mean(), {}), mask)


def mean_of_means(batch: Batch) -> float:
    """Over samples, of the mean of a sample's labels."""
    if "cu_seqlens" not in batch:
        return float(batch["labels"].double().mean())
    starts = batch.get("cu_seqlens_padded", batch["cu_seqlens"]).tolist()
    labels, mask = (batch[k].view(-1).double() for k in ("labels", "loss_mask"))
    samples = [slice(*ends) for ends in pairwise(starts)]
    means = [float((labels[s] * mask[s]).sum() / mask[s].sum()) for s in samples]
    return sum(means) / len(means)


class Steps(NamedTuple):
    """Steps of one batch each."""

    split: str
    batches: list[Batch]
    hook: dict[str, Any] = {}  # noqa: RUF012  (never changed)


PACK, TELLING = pack(), telling()
TOLD = {"read_step": partial(read_step, batch=PACK, token_ids=LABELS % 32)}
BY_MASK = {"read_step": partial(read_step, batch=TELLING)}
RECOGNISED = {
    # Rows first and in between: another kind of batch, which they always split contiguously.
    # The first pack could be split in any way: its only sample is padding, its tokens are alike,
    # and its positions are those that the script makes up on the first rank.
    **{
        f"by tokens, {name}": Steps(name, [rows(), dummy(), PACK, PACK, rows()]) for name in FITTING
    },
    **{
        f"by all ranks together, {name}, {second}": Steps(name, [padded(second)] * 2)
        for name in ("row", "contiguous")
        for second in (16, 12)
    },
    **{f"by the mask alone, {name}": Steps(name, [TELLING] * 2, BY_MASK) for name in FITTING},
    "padding after the last sample": Steps("padded sequences", [ending_in_padding()] * 2),
    "by tokens where no batch is read": Steps("row", [PACK], TOLD),
}


def losses_on_host() -> dict[str, list[float]]:
    """Every rank, CP 2: the aggregated loss of each step; and the loss of each data set."""
    from tests.host import gpt

    gpt.initialize(cp=2)
    ddp = gpt.ddp_model()

    def reports(hook: LossHook, split: str, batch: Batch) -> Any:
        step = partial(labels_as_losses, split)
        return gpt.run_step(hook, ddp, iter([batch]), 1, forward_step_func=step)

    found = {}
    for name, case in RECOGNISED.items():
        hook = LossHook(aggregation("sample_mean"), **case.hook)
        of_steps = [reports(hook, case.split, batch) for batch in case.batches]
        found[name] = [gpt.reported(x, "sample_mean loss") for x in of_steps]
    by_dataset = reports(BY_DATASET(0), "contiguous", PACK)
    keys = [f"lm loss of dataset {d}" for d in DATASETS.tolist()]
    return {**found, "data sets": [gpt.reported(by_dataset, key) for key in keys]}


BY_DATASET = hook_of("token_mean", extensions=[DatasetReports()])


@functools.cache
def losses() -> list[dict[str, list[float]]]:
    return run_host_ranks(losses_on_host, 2)


@pytest.mark.parametrize("name", RECOGNISED)
def test_the_split_of_the_script_is_recognised(name: str) -> None:
    expected = [mean_of_means(batch) for batch in RECOGNISED[name].batches]
    for rank in losses():
        assert rank[name] == pytest.approx(expected, rel=EXACT)


def test_reports_by_data_set_know_the_split_where_weights_need_none() -> None:
    expected = [float(x.double().mean()) for x in LABELS.split(LENGTHS)]
    for rank in losses():
        assert rank["data sets"] == pytest.approx(expected, rel=EXACT)


def refused(split: str, says: str, hook: Any = None, **script: Any) -> Row:
    return Row(
        f"LayoutError: {says}",
        topology="cp2",
        hook=hook or hook_of("sample_mean"),
        data=lambda rank: iter([PACK]),
        number=1,
        step=partial(labels_as_losses, split, **script),
    )


UNTOLD = partial(read_step, batch=PACK)
OF_SETS = {"extensions": [DatasetReports()], "read_step": partial(UNTOLD, dataset_ids=DATASETS)}
NONE = "is this rank's part of the batch's under ... token_ids"
ROWS = {
    "a split that is none of these": refused("backwards", NONE),
    "tokens that are all alike": refused("row", NONE, told=False),
    "losses that are not split": refused(
        "row", "all of the 64 tokens of the batch on a context-parallel rank of 2", of_all=True
    ),
    "two splits that fit alike": refused(
        "row",
        "'zigzag over the whole pack', 'contiguous'] alike ... token_ids",
        hook_of("sample_mean", read_step=UNTOLD),
    ),
    "reports by data set without tokens": refused(
        "contiguous", "expected tensors that tell tokens apart", hook_of("token_mean", **OF_SETS)
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_split_that_is_not_recognised_is_refused(name: str) -> None:
    assert_told(__name__, name)
