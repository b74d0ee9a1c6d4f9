"""The split over context-parallel ranks is recognised: losses meet the weights of their own tokens.

The losses of these scripts are the tokens' labels, so that the aggregated loss says which token got
which weight. Masks are uniform, unless they are to tell the split.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_loss_agg import CPLayout, Microbatch
from megatron_loss_agg.mcore import DatasetReports, TokenLoss
from tests.host import whole
from tests.host.cases import Batch, Case, Found, run
from tests.host.harness import EXACT, TOPOLOGIES
from tests.host.refusals import Row, assert_told, hook_of

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


PACK = pack()


def given(replaced: Batch, batch: Batch, of_mb: tuple[int, ...]) -> Batch:
    return replaced


def read_step(iterator: Any, number: int, batch: Batch = PACK, **more: Any) -> list[Microbatch]:
    """The masks of a batch, and only what ``more`` is given."""
    return [Microbatch(batch["loss_mask"], batch["cu_seqlens"], **more)] * number


def labels_as_losses(
    split: str, iterator: Any, model: Any, told: bool = True, of_all: bool = False
) -> Any:
    """A forward step.

    Args:
        told: or else the model is called with tokens that are all alike.
        of_all: losses and mask are of all tokens.
    """
    batch = next(iterator)
    _, size, rank = whole.context_parallel()
    if "cu_seqlens" in batch:
        starts = batch.get("cu_seqlens_padded", batch["cu_seqlens"])
        layout = SPLITS[split](starts, size, rank)
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


def steps(split: str, *batches: Batch, mode: str = "sample_mean", **hook: Any) -> dict[Case, Batch]:
    """Steps of one hook, each of one batch."""
    found: dict[Case, Batch] = {}
    step, after = partial(labels_as_losses, split), None
    for batch in batches:
        data = {"places": (((0,),),), "batch": partial(given, batch)}
        after = Case(mode, step=step, hook=hook, after=after, **data)
        found[after] = batch
    return found


RECOGNISED = {
    # Rows first and in between: another kind of batch, which they always split contiguously.
    # The first pack could be split in any way: its only sample is padding, its tokens are alike,
    # and its positions are those that the script makes up on the first rank.
    **{
        f"by tokens, {split}": steps(split, rows(), dummy(), PACK, PACK, rows())
        for split in FITTING
    },
    **{
        f"by all ranks together, {split}, {second}": steps(split, *2 * [padded(second)])
        for split in ("row", "contiguous")
        for second in (16, 12)
    },
    **{
        f"by the mask alone, {split}": steps(
            split, *2 * [telling()], read_step=partial(read_step, batch=telling())
        )
        for split in FITTING
    },
    "padding after the last sample": steps("padded sequences", *2 * [ending_in_padding()]),
    "by tokens where no batch is read": steps(
        "row", PACK, read_step=partial(read_step, token_ids=LABELS % 32)
    ),
}
OF_SETS = steps("contiguous", PACK, mode="token_mean", extensions=[DatasetReports()])


@functools.cache
def found() -> dict[Case, list[Found]]:
    return run(TOPOLOGIES["cp2"], [case for of in [*RECOGNISED.values(), OF_SETS] for case in of])


@pytest.mark.parametrize("name", RECOGNISED)
def test_the_split_of_the_script_is_recognised(name: str) -> None:
    for case, batch in RECOGNISED[name].items():
        for _, reports in found()[case]:
            wanted = mean_of_means(batch)
            assert reports["sample_mean loss"] == pytest.approx(wanted, rel=EXACT)


def test_reports_by_data_set_know_the_split_where_weights_need_none() -> None:
    (case,) = OF_SETS
    for _, reports in found()[case]:
        for dataset, labels in zip(DATASETS.tolist(), LABELS.split(LENGTHS), strict=True):
            wanted = float(labels.double().mean())
            assert reports[f"lm loss of dataset {dataset}"] == pytest.approx(wanted, rel=EXACT)


def refused(split: str, says: str, hook: Any = None, **script: Any) -> Row:
    return Row(
        f"LayoutError: {says}",
        topology="cp2",
        hook=hook or hook_of("sample_mean"),
        data=lambda rank: iter([PACK]),
        number=1,
        step=partial(labels_as_losses, split, **script),
    )


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
        hook_of("sample_mean", read_step=read_step),
    ),
    "reports by data set without tokens": refused(
        "contiguous",
        "expected tensors that tell tokens apart",
        hook_of(
            "token_mean",
            extensions=[DatasetReports()],
            read_step=partial(read_step, dataset_ids=DATASETS),
        ),
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_split_that_is_not_recognised_is_refused(name: str) -> None:
    assert_told(__name__, name)
