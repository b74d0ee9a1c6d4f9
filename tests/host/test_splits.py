"""Losses meet the weights of their own tokens: the split over context-parallel ranks is recognised.

And a step is refused where it is not, or where the model gets the tokens of another microbatch. The
losses of these scripts are the tokens' labels, so that the aggregated loss says which token got
which weight. Masks are uniform, unless they are to tell the split.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loss_agg import CPLayout, Microbatch
from megatron_loss_agg.mcore import DatasetReports, TokenLoss, read_batch
from tests.host import gpt, parallel_state
from tests.host.cases import EVALUATION, Batch, Case, Found, run
from tests.host.harness import EXACT, TOPOLOGIES, run_host_ranks
from tests.host.refusals import Refusal, assert_told

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


def unlike_megatron() -> list[str]:
    """The keys of a batch of which `CPLayout` gives this rank another part than Megatron."""
    from megatron.core.utils import get_batch_on_this_cp_rank

    size, rank = dist.get_world_size(), dist.get_rank()
    gpt.initialize(cp=size)
    x = torch.arange(48).view(3, 16)
    given = {"tokens": x, "loss_mask": x % 5 / 4, "labels": x + 1}
    part = get_batch_on_this_cp_rank({**given}, False)
    layout = CPLayout.bshd(16, size, rank)
    return [key for key, y in given.items() if not torch.equal(part[key], layout.shard(y))]


@pytest.mark.parametrize("cp", [2, 4])
def test_rows_are_split_as_megatron_splits_them(cp: int) -> None:
    assert run_host_ranks(unlike_megatron, cp) == [[]] * cp


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
    split: str,
    iterator: Any,
    model: Any,
    part: Callable[[int], int] = int,
    tokens: Callable[[Tensor], Tensor] = Tensor.int,  # another dtype than the batch's
    mask: Callable[[Tensor], Tensor] = Tensor.clone,
) -> Any:
    """A forward step.

    Args:
        part: the context-parallel rank whose part a rank takes.
        tokens, mask: what is made of those of the part.
    """
    batch = next(iterator)
    size = parallel_state.get_context_parallel_world_size()
    rank = parallel_state.get_context_parallel_rank()
    if "cu_seqlens" in batch:
        starts = batch.get("cu_seqlens_padded", batch["cu_seqlens"])
        layout = SPLITS[split](starts, size, part(rank))
    else:
        layout = CPLayout.contiguous(batch["labels"].shape[1], size, part(rank))
    labels, own, own_mask = (layout.shard(batch[k]) for k in ("labels", "tokens", "loss_mask"))
    output = model(tokens(own), gpt.positions_like(own), None)
    losses = labels.double() + 0 * output.mean()
    return output, TokenLoss(lambda output: (losses, {}), mask(own_mask))


def mean_of_means(batch: Batch) -> float:
    """Over samples, of the mean of a sample's labels."""
    if "cu_seqlens" not in batch:
        return float(batch["labels"].double().mean())
    starts = batch.get("cu_seqlens_padded", batch["cu_seqlens"]).tolist()
    labels, mask = (batch[k].view(-1).double() for k in ("labels", "loss_mask"))
    samples = [slice(*ends) for ends in pairwise(starts)]
    means = [float((labels[s] * mask[s]).sum() / mask[s].sum()) for s in samples]
    return sum(means) / len(means)


def steps(split: str, *batches: Batch, mode: str = "sample_mean", **hook: Any) -> Case:
    """The last one of several, each of one batch."""
    *before, last = batches
    return Case(
        mode,
        places=(((0,),),),
        batch=partial(given, last),
        step=partial(labels_as_losses, split),
        hook=hook,
        after=steps(split, *before, mode=mode, **hook) if before else None,
    )


OF_SETS = steps("contiguous", PACK, mode="token_mean", extensions=[DatasetReports()])
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
    "by reports by data set, where weights need none": OF_SETS,
}


def expected(case: Case) -> dict[str, float]:
    if case is not OF_SETS:
        return {"sample_mean loss": mean_of_means(*case.data(0))}
    means = [float(labels.double().mean()) for labels in LABELS.split(LENGTHS)]
    return {f"lm loss of dataset {x}": of for x, of in zip(DATASETS.tolist(), means, strict=True)}


@functools.cache
def found() -> dict[Case, list[Found]]:
    return run(TOPOLOGIES["cp2"], [case for last in RECOGNISED.values() for case in last.steps])


@pytest.mark.parametrize("name", RECOGNISED)
def test_the_split_of_the_script_is_recognised(name: str) -> None:
    for case in RECOGNISED[name].steps:
        for _, reports in found()[case]:
            wanted = expected(case)
            assert {key: reports[key] for key in wanted} == pytest.approx(wanted, rel=EXACT)


def of_pack(split: str, says: str, mode: str = "sample_mean", **hook: Any) -> Refusal:
    return Refusal(f"DataError: {says}", steps(split, PACK, mode=mode, **hook), "cp2")


def windows(rows: int) -> list[Batch]:
    """Consecutive windows of one text: the labels of a batch are the tokens of the next one."""
    text = torch.randint(0, 32, (5, rows, 16), generator=torch.Generator().manual_seed(5))
    mask = torch.ones(rows, 16, dtype=torch.float64)
    return [{"tokens": text[i], "labels": text[i + 1], "loss_mask": mask} for i in range(4)]


def of_windows(says: str = "", topology: str = "dp1", rows: int = 2, **options: Any) -> Refusal:
    """A step of four windows, of which a ``batch`` of one number is made."""
    case = Case(
        "token_mean",
        **{
            "places": (tuple((i,) for i in range(4)),),
            "batch": partial(window, rows=rows),
            "step": partial(labels_as_losses, ""),
            **options,
        },
    )
    return Refusal(says, case, topology)


def window(_: Batch, of_mb: tuple[int, ...], rows: int) -> Batch:
    return windows(rows)[of_mb[0]]


def on_two_ranks(says: str = "", rows: int = 2, reads: Any = read_batch, **script: Any) -> Refusal:
    step = partial(labels_as_losses, "", **script)
    return of_windows(says, "cp2", rows, hook={"read_batch": reads}, step=step)


def pack_of_rank(batch: Batch) -> Microbatch:
    """A row as a pack, of two samples on the second rank."""
    starts = torch.tensor([0, 8, 16] if dist.get_rank() else [0, 16])
    return Microbatch(batch["loss_mask"], starts, token_ids=batch["tokens"])


def without_a_token(mask: Tensor) -> Tensor:
    """On the second rank."""
    return mask.masked_fill(mask.cumsum(dim=-1) == 1, 0.0) if dist.get_rank() else mask


OF_PARTS = {
    "a split that is none of these": of_pack(
        "backwards", "is this rank's part of the batch's under ... token_ids"
    ),
    "two splits that fit alike": of_pack(
        "row",
        "'zigzag over the whole pack', 'contiguous'] alike ... token_ids",
        read_step=read_step,
    ),
    # Whose tokens all have one weight.
    "reports by data set where two splits fit": of_pack(
        *("contiguous", "expected tensors that tell tokens apart", "token_mean"),
        extensions=[DatasetReports()],
        read_step=partial(read_step, dataset_ids=DATASETS),
    ),
    "parts of every rank": on_two_ranks(),
    "the same part on two ranks": on_two_ranks(
        "DataError: the model is called with the same tokens", part=lambda rank: 0
    ),
    "tokens that the script changes": on_two_ranks(tokens=lambda x: 31 - x),
    # As where the model gets embeddings: they tell nothing.
    "positions alone": on_two_ranks(tokens=lambda x: gpt.positions_like(x)),
    "a token less on one rank": on_two_ranks(
        "DataError: the loss function's mask is not this rank's part", mask=without_a_token
    ),
    "other samples on each rank": on_two_ranks(
        "DataError: the context-parallel ranks have read different numbers",
        rows=1,
        reads=pack_of_rank,
    ),
}


def ordered(
    read: Any, order: tuple[int, ...], calls: tuple[int, ...] = (4,), says: str = ""
) -> Refusal:
    """A step at hand, whose data come in another ``order``."""

    def in_order(batches: Iterator[Batch]) -> Iterator[Batch]:
        given = [*batches]
        return iter([given[i] for i in order])

    return of_windows(says, hook={"read_batch": read}, iterator=in_order, calls=calls)


def by_labels(batch: Batch) -> Microbatch:
    return Microbatch(batch["loss_mask"], token_ids=batch["labels"])


def alike(batch: Batch) -> Microbatch:
    """A dummy, whose tokens are of one number."""
    return dataclasses.replace(read_batch(batch), token_ids=torch.zeros_like(batch["tokens"]))


def in_one_memory(batches: Iterator[Batch]) -> Iterator[Batch]:
    kept: Batch = {}
    for batch in batches:
        for name, x in batch.items():
            kept.setdefault(name, x.clone()).copy_(x)
        yield kept


ORDER = "DataError: the model is called with the tokens of microbatch"
OF_MICROBATCHES = {
    "by labels, in calls": ordered(by_labels, (0, 1, 2, 3), (2, 2)),
    "calls swapped": ordered(read_batch, (2, 3, 0, 1), (2, 2), ORDER),
    "one in place of another": ordered(read_batch, (0, 1, 2, 2), says=ORDER),
    "turned dummies": ordered(alike, (3, 0, 1, 2)),
    # Stock Megatron draws each batch before its own forward pass; the hook draws all before the
    # first.
    "batches in one memory": of_windows(ORDER, iterator=in_one_memory),
    "an evaluation in one memory": of_windows(ORDER, iterator=in_one_memory, call=EVALUATION),
}
ROWS = {**OF_PARTS, **OF_MICROBATCHES}


@pytest.mark.parametrize("name", ROWS)
def test_tokens_of_another_part_or_microbatch_are_refused(name: str) -> None:
    assert_told(__name__, name)
