"""Losses meet the weights of their own tokens: the declared split over context-parallel ranks.

It is verified in the first step; a step is refused where it is another one, which is named, or where
the model gets the tokens of another microbatch. The losses of these scripts are the tokens' labels,
so that the aggregated loss says which token got which weight. Masks are uniform, unless they are to
tell the split.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise, product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loss_agg import CPLayout, LossAggregation, Microbatch
from megatron_loss_agg.mcore import LossHook, SampleLoss, TokenLoss, read_batch
from megatron_loss_agg.mcore.call import CPRank
from megatron_loss_agg.mcore.split import local_starts, same_order, sums_by_sequence
from megatron_loss_agg.microbatch import MicrobatchShape
from tests.host import gpt, parallel_state
from tests.host.cases import EVALUATION, Batch, Case, Found, assert_exact, by_the_oracle, run
from tests.host.harness import EXACT, TOPOLOGIES, run_host_ranks
from tests.host.refusals import Refusal, assert_told
from tests.host.steps import EMPTY, LENGTHS, PLACES

SAMPLES = (20, 4, 40)  # all can be split into 2 * cp chunks; every split has other parts of them
TOKENS = sum(SAMPLES)
LABELS = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(0))

# What scripts do, by the name of the split, or of none.
LAYOUTS: dict[str, Callable[[Tensor, int, int], CPLayout]] = {
    "zigzag": lambda starts, size, rank: CPLayout.thd(
        torch.cat([starts, starts.new_tensor([TOKENS])]), size, rank
    ),
    "zigzag_pack": lambda starts, size, rank: CPLayout.bshd(TOKENS, size, rank),
    "contiguous": lambda starts, size, rank: CPLayout.contiguous(TOKENS, size, rank),
    "backwards": lambda starts, size, rank: CPLayout.contiguous(TOKENS, size, size - 1 - rank),
}
SPLITS = ("zigzag", "zigzag_pack", "contiguous")


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


SHAPES = {((2, 3), (6,)): True, ((1, 6), (6, 1)): True, ((2, 3), (3, 2)): False}
SHAPES |= {((6,), (5,)): False, ((2, 3), (5,)): False, ((2, 3), (2, 1, 3)): True}


def test_tensors_hold_the_same_tokens_in_one_order_whatever_the_form() -> None:
    assert {shapes: same_order(*shapes) for shapes in SHAPES} == SHAPES


def test_sums_of_sequences_in_half_precision_are_taken_in_fp32() -> None:
    ones, shape = torch.ones(1, 301), MicrobatchShape((1, 301), None)  # bf16 rounds it to 300
    sums = sums_by_sequence(ones.bfloat16(), ones, shape, "zigzag", CPRank(1, 0))
    assert sums.dtype == torch.float32 and sums.tolist() == [301]


def test_one_rank_holds_sequences_of_any_length() -> None:
    shape = MicrobatchShape((1, 5), torch.tensor([0, 3, 5]))
    assert local_starts(shape, "zigzag", 1, 0) is shape.starts


def rows() -> Batch:
    batch = {"labels": LABELS, "tokens": LABELS % 32, "loss_mask": torch.ones(TOKENS)}
    return {name: x.view(2, -1) for name, x in batch.items()}


def pack() -> Batch:
    batch = {name: x.view(1, -1) for name, x in rows().items()}
    positions = torch.cat([torch.arange(n) for n in SAMPLES]).view(1, -1)
    starts = torch.tensor([0, *SAMPLES]).cumsum(0).int()
    return {**batch, "position_ids": positions, "cu_seqlens": starts}


def dummy() -> Batch:
    """A pack of one sample whose tokens are all alike."""
    alike, positions = torch.zeros(1, TOKENS).long(), torch.arange(TOKENS).view(1, -1)
    whole = {"labels": alike, "tokens": alike, "position_ids": positions}
    return {**whole, "loss_mask": torch.ones(1, TOKENS), "cu_seqlens": torch.tensor([0, TOKENS])}


def alike_pack() -> Batch:
    """A pack of several samples whose tokens are all alike."""
    alike = torch.zeros(1, TOKENS).long()
    return {**pack(), "labels": alike, "tokens": alike}


def padded(*places: tuple[int, int], padding: int = 0) -> Batch:
    """A pack of samples in longer places, of (tokens, length of the place) each.

    Args:
        padding: label of what is no token of a sample.
    """
    real = torch.zeros(TOKENS, dtype=torch.bool)
    starts = [0]
    for tokens, length in places:
        real[starts[-1] : starts[-1] + tokens] = True
        starts.append(starts[-1] + length)
    labels = torch.where(real, LABELS + 1, padding).view(1, -1)
    return {
        "labels": labels,
        "tokens": labels % 32,
        "loss_mask": real.float().view(1, -1),
        "cu_seqlens": torch.tensor([0, *(tokens for tokens, _ in places)]).cumsum(0),
        "cu_seqlens_padded": torch.tensor(starts),
    }


def of_bridge(batch: Batch) -> Batch:
    """A pack of one sample in Megatron-Bridge's keys, in which the padding behind it is another."""
    (_, real), (_, end) = batch["cu_seqlens"].tolist(), batch["cu_seqlens_padded"].tolist()
    of_pack = {k: x for k, x in batch.items() if not k.startswith("cu_seqlens")}
    return {
        **of_pack,
        "cu_seqlens_q": torch.tensor([[0, real, real + TOKENS - end]]),
        "cu_seqlens_q_padded": torch.tensor([[0, end, TOKENS]]),
        "token_count": torch.tensor([end]),
    }


def short_chats(number: int) -> Batch:
    """Each alone in a long row, as Megatron's --sft has them: of two ranks one has padding alone."""
    length = TOKENS // number
    batch = padded(*[(length // 4 - 2, length)] * number, padding=31)
    starts, positions = batch.pop("cu_seqlens_padded"), torch.arange(length).expand(number, -1)
    return {**batch, "cu_seqlens": starts, "position_ids": positions}


def short_rows() -> Batch:
    """One row of 20 tokens, and padding behind them."""
    whole = padded((20, TOKENS), padding=31)
    return {key: x for key, x in whole.items() if not key.startswith("cu_seqlens")}


def few_tokens() -> Batch:
    """One row of 10 tokens, and padding behind them."""
    whole = padded((10, TOKENS), padding=31)
    return {key: x for key, x in whole.items() if not key.startswith("cu_seqlens")}


def telling() -> Batch:
    """A pack whose mask fits one split alone."""
    random = torch.rand(1, TOKENS, generator=torch.Generator().manual_seed(1))
    return {**pack(), "loss_mask": (random < 0.5).float()}


PACK = pack()
LONE_PACK = padded((TOKENS, TOKENS))
LONE = padded((38, 40), padding=31)  # one sample, and padding behind it
SHORT_CHATS = [short_chats(1), short_chats(2)]
PLACES_OF_32 = [padded((16, 32), (second, 32)) for second in (16, 12)]


def given(replaced: Batch, batch: Batch, of_mb: tuple[int, ...]) -> Batch:
    return replaced


def read_step(iterator: Any, number: int, batch: Batch = PACK, **more: Any) -> list[Microbatch]:
    """The masks of a batch, and only what ``more`` is given."""
    offsets = {k: batch[k] for k in ("cu_seqlens", "cu_seqlens_padded") if k in batch}
    return [Microbatch(batch["loss_mask"], **offsets, **more)] * number


def starts_of(batch: Batch) -> Tensor | None:
    keys = ("cu_seqlens_padded", "cu_seqlens", "cu_seqlens_q_padded")
    starts = next((batch[k] for k in keys if k in batch), None)
    return None if starts is None else starts.flatten()


def labels_as_losses(
    split: str,
    iterator: Any,
    model: Any,
    kind: str = "tokens",
    part: Callable[[int], int] = int,
    tokens: Callable[[Tensor], Tensor] = Tensor.int,  # another dtype than the batch's
    mask: Callable[[Tensor], Tensor] = Tensor.clone,
    pads: bool = False,
    has_positions: bool = False,
    scores: bool = False,
) -> Any:
    """A forward step.

    Args:
        split: of `LAYOUTS`; rows are split contiguously, or by zigzag.
        kind: of the losses: of ``tokens``; of all tokens, that it lets the hook ``gather``, maybe
            without a look at their order (``blind gather``); or of ``samples``.
        part: the context-parallel rank whose part a rank takes.
        tokens, mask: what is made of those of the part.
        pads: what is no token of a sample becomes 0 before the split.
        has_positions: split the batch's positions, too; otherwise the script makes its own.
        scores: the model is called with other tokens first.
    """
    batch = next(iterator)
    size = parallel_state.get_context_parallel_world_size()
    rank = parallel_state.get_context_parallel_rank()
    starts = starts_of(batch)
    if starts is None:
        of_rows = CPLayout.contiguous if split == "contiguous" else CPLayout.bshd
        layout = of_rows(batch["labels"].shape[1], size, part(rank))
    else:
        layout = LAYOUTS[split](starts, size, part(rank))
    whole = {**batch}
    if pads:
        whole |= {k: batch[k] * (batch["loss_mask"] != 0) for k in ("labels", "tokens")}
    labels, own, own_mask = (layout.shard(whole[k]) for k in ("labels", "tokens", "loss_mask"))
    positions = gpt.positions_like(own)
    if has_positions:
        positions = layout.shard(batch["position_ids"].reshape(batch["tokens"].shape))
    if scores:
        model(31 - own, positions, None)
    output = model(tokens(own), positions, None)
    losses = labels.double() + 0 * output.mean()

    def of_all(x: Tensor) -> Tensor:
        assert torch.equal(x, batch["labels"].double())
        return x

    def of_samples(sums: Tensor, lengths: Tensor) -> Tensor:
        return sums / lengths

    return output, {
        "tokens": TokenLoss(lambda _: losses, mask(own_mask)),
        "gather": TokenLoss(of_all, batch["loss_mask"], lambda _: losses),
        "blind gather": TokenLoss(Tensor.clone, batch["loss_mask"], lambda _: losses),
        "samples": SampleLoss(of_samples, lambda _: losses, mask(own_mask)),
    }[kind]


def read_samples(batch: Batch) -> Microbatch:
    sequences = read_batch(batch)
    return Microbatch.of_samples(sequences.num_samples, sequences=sequences)


KINDS = ("tokens", "gather", "samples")
READERS = {"samples": read_samples}


def mean_of_means(batch: Batch) -> float:
    """Over samples, of the mean of a sample's labels."""
    starts = starts_of(batch)
    if starts is None:
        return float(batch["labels"].double().mean())
    labels, mask = (batch[k].view(-1).double() for k in ("labels", "loss_mask"))
    samples = [slice(*ends) for ends in pairwise(starts.tolist()) if mask[slice(*ends)].any()]
    means = [float((labels[s] * mask[s]).sum() / mask[s].sum()) for s in samples]
    return sum(means) / len(means)


def steps(
    split: str, *batches: Batch, declared: str | None = None, script: Any = None, **hook: Any
) -> Case:
    """The last one of several, each of one batch."""
    *before, last = batches
    script, options = script or {}, {"split": declared, **hook}
    if "kind" in script:
        options.setdefault("read_batch", READERS.get(script["kind"], read_batch))
    return Case(
        "sample_mean",
        places=(((0,),),),
        batch=partial(given, last),
        step=partial(labels_as_losses, split, **script),
        hook=options,
        after=steps(split, *before, declared=declared, script=script, **hook) if before else None,
    )


VERIFIED = {
    **{
        f"{split}, {kind}": steps(
            split, PACK, rows(), dummy(), PACK, declared=split, script={"kind": kind}
        )
        for split, kind in product(SPLITS, KINDS)
    },
    "by default": steps("zigzag", PACK, rows(), PACK),
    "by default, and a later pack that tells nothing": steps("zigzag", PACK, alike_pack()),
    "by the last of two calls": steps("zigzag", PACK, script={"scores": True}),
    "rows whatever is declared": steps("contiguous", rows(), rows(), declared="zigzag_pack"),
    # The first pack could be split in any way: its only sample has no padding, its tokens are
    # alike, and its positions are those that the script makes up on the first rank.
    **{
        f"after a pack that tells nothing, {split}": steps(split, dummy(), PACK, declared=split)
        for split in SPLITS
    },
    **{
        f"places of 32, {split}, {i}": steps(split, *2 * [batch], declared=split)
        for split, (i, batch) in product(("zigzag_pack", "contiguous"), enumerate(PLACES_OF_32))
    },
    **{
        f"a mask that tells, {split}": steps(
            split,
            *2 * [telling()],
            declared=split,
            read_step=partial(read_step, batch=telling()),
        )
        for split in SPLITS
    },
    "by tokens where no batch is read": steps(
        "zigzag_pack",
        PACK,
        declared="zigzag_pack",
        read_step=partial(read_step, model_inputs=LABELS % 32),
    ),
    "by tokens where none is declared": steps(
        "zigzag", PACK, read_step=partial(read_step, model_inputs=LABELS % 32)
    ),
    **{
        f"padding behind a sample, {split}, {keys.__name__}, {kind}": steps(
            split, *2 * [keys(LONE)], declared=split, script={"kind": kind, "pads": pads}
        )
        for split, keys, (kind, pads) in product(
            SPLITS,
            (dict, of_bridge),
            (("tokens", False), ("tokens", True), ("gather", False), ("samples", True)),
        )
    },
    "padding behind a sample, by default": steps("zigzag", LONE),
    "sequences that zigzag cannot split": steps(
        "contiguous", padded((6, 6), (58, 58)), declared="contiguous"
    ),
    **{
        f"{i + 1} short chats, {split}, {kind}": steps(
            split, chats, declared=split, script={"has_positions": True, "kind": kind}
        )
        for i, chats in enumerate(SHORT_CHATS)
        for split, kind in product(SPLITS, ("tokens", "gather"))
    },
    **{
        f"{i + 1} short chats by default, after {len(before)} packs": steps(
            "zigzag", *before, chats, script={"has_positions": True}
        )
        for (i, chats), before in product(enumerate(SHORT_CHATS), ((), (PACK,)))
    },
    **{
        f"padding that the script changes, {split}, {i}": steps(
            split, batch, declared=split, script={"pads": True}
        )
        for split, (i, batch) in product(
            ("zigzag_pack", "contiguous"),
            enumerate(padded((16, 32), (n, 32), padding=29) for n in (16, 12)),
        )
    },
}


@functools.cache
def found() -> dict[Case, list[Found]]:
    return run(TOPOLOGIES["cp2"], [case for last in VERIFIED.values() for case in last.steps])


@pytest.mark.parametrize("name", VERIFIED)
def test_the_declared_split_is_that_of_the_weights(name: str) -> None:
    for case in VERIFIED[name].steps:
        for _, reports in found()[case]:
            wanted = {"sample_mean loss": mean_of_means(*case.data(0))}
            assert {key: reports[key] for key in wanted} == pytest.approx(wanted, rel=EXACT)


def two_shapes(first: str) -> list[dict[str, float]]:
    """The reports of two terms, of which one sees a row and the other a pack, in both orders."""
    gpt.initialize(cp=2)
    model = gpt.ddp_model()
    of_names = {"row": lambda b: Microbatch(b["loss_mask"]), "pack": read_batch}
    names = [first, *(of_names.keys() - {first})]
    hook = LossHook(
        {name: LossAggregation(mode="sample_mean") for name in names},
        read_batch=lambda batch: {name: of_names[name](batch) for name in names},
    )

    def forward_step(iterator: Any, model: Any) -> Any:
        output, loss = labels_as_losses("zigzag", iterator, model, kind="gather")
        masks = dict.fromkeys(names, loss.loss_mask)
        return output, TokenLoss(lambda x: dict.fromkeys(names, x), masks, loss.gather)

    reports = gpt.run_step(hook, model, iter([PACK]), 1, forward_step_func=forward_step)
    return [{name: gpt.reported(reports, f"{name} loss") for name in names}]


@pytest.mark.parametrize("first", ["row", "pack"])
def test_terms_of_a_row_and_a_pack_gather_by_the_split_of_the_pack(first: str) -> None:
    expected = {"row": float(LABELS.double().mean()), "pack": mean_of_means(PACK)}
    for reports in run_host_ranks(two_shapes, 2, first):
        assert reports == [pytest.approx(expected, rel=EXACT)]


def evaluated_between() -> None:
    """An evaluation whose tokens tell nothing forgets nothing."""
    gpt.initialize(cp=2)
    model = gpt.ddp_model()
    hook = LossHook(LossAggregation(mode="sample_mean"), aggregate_evaluation=True)
    step = {"forward_step_func": partial(labels_as_losses, "zigzag")}
    for batch, forward_only in ((PACK, False), (dummy(), True), (alike_pack(), False)):
        gpt.run_step(hook, model, iter([batch]), 1, forward_only=forward_only, **step)


def test_an_evaluation_without_telling_tokens_leaves_the_split_verified() -> None:
    run_host_ranks(evaluated_between, 2)


# The same by gradient, for Megatron's own split of a pack with padding behind its only sample.
BEHIND = 64  # tokens of the pack


def with_padding(batch: Batch, of_mb: tuple[int, ...], keys: str) -> Batch:
    """One sample, and tokens of nobody."""
    (_, real), (_, end) = (batch[k].tolist() for k in ("cu_seqlens", "cu_seqlens_padded"))
    names = ("tokens", "labels", "loss_mask")
    fill = {"tokens": 7, "labels": 8, "loss_mask": 0}
    long = {k: torch.nn.functional.pad(batch[k], (0, BEHIND - end), value=fill[k]) for k in names}
    found = {**long, "prompt_ids": batch["prompt_ids"]}
    if keys == "megatron":
        offsets = {k: batch[k] for k in ("cu_seqlens", "cu_seqlens_padded")}
        return {**found, **offsets}
    return {
        **found,
        "cu_seqlens_q": torch.tensor([[0, real, real + BEHIND - end]]),
        "cu_seqlens_q_padded": torch.tensor([[0, end, BEHIND]]),
        "token_count": torch.tensor([end]),
    }


def padded_step(iterator: Any, model: Any, kind: str) -> Any:
    """The model is called with the padding as a sequence of its own."""
    batch = gpt.received(iterator)
    end = starts_of(batch).tolist()[1]
    starts = torch.tensor([0, end, BEHIND], dtype=torch.int32)
    losses, loss_func = gpt.forward_step(iter([{**batch, "cu_seqlens_padded": starts}]), model)
    if kind == "stock":
        return losses, loss_func
    return losses, TokenLoss(Tensor.clone, batch["loss_mask"], Tensor.clone)


@pytest.mark.parametrize("name", ["cp2", "dp2-cp2"])
def test_packs_of_one_sample_with_padding_behind_it_are_exact(name: str) -> None:
    ranks = TOPOLOGIES[name].data_parallel_size
    lone = [i for i in range(len(LENGTHS)) if i != EMPTY]
    places = tuple(tuple((i,) for i in lone[r : len(lone) - 1 : ranks]) for r in range(ranks))
    cases = [
        Case(
            "prompt_mean",
            places=places,
            per_token=per_token,
            batch=partial(with_padding, keys=keys),
            step=partial(padded_step, kind=kind),
            times=2,
        )
        for keys, kind, per_token in product(
            ("megatron", "bridge"), ("stock", "gather"), (False, True)
        )
    ]
    of = partial(by_the_oracle, model="dense")
    expected = {case: of(case) for case in cases}
    for case in cases:
        if case.step.keywords["kind"] == "gather":
            del expected[case][1]["lm loss"]
    assert_exact(TOPOLOGIES[name], cases, expected.__getitem__)


# What is refused.


def of_pack(split: str, says: str, *batches: Batch, **options: Any) -> Refusal:
    """Of one step, or of the last of several; by default of `PACK`."""
    return Refusal(f"DataError: {says}", steps(split, *batches or [PACK], **options), "cp2")


def misdeclared(
    split: str,
    declared: str | None,
    batch: Batch = PACK,
    names: str | None = None,
    **options: Any,
) -> Refusal:
    """Every rank hears the name of the split that fits, or several."""
    says = (
        "microbatch 0 must be split over context-parallel ranks as declared, "
        f"{declared or 'zigzag'}, got {names or split}. Give --loss-aggregation-split "
        f"{names or split} (LossHook(split=))"
    )
    return of_pack(split, says, batch, declared=declared, **options)


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
            "step": partial(labels_as_losses, "contiguous"),
            **options,
        },
    )
    return Refusal(says, case, topology)


def window(_: Batch, of_mb: tuple[int, ...], rows: int) -> Batch:
    return windows(rows)[of_mb[0]]


def question(_: Batch, of_mb: tuple[int, ...]) -> Batch:
    """A window with a loss at its last token alone, which is the same in all of them."""
    batch = windows(2)[of_mb[0]]
    is_last = (torch.arange(16) == 15).expand(2, -1)
    tokens = batch["tokens"].masked_fill(is_last, 7)
    return {**batch, "tokens": tokens, "loss_mask": is_last.double()}


def on_two_ranks(says: str = "", rows: int = 2, reads: Any = read_batch, **script: Any) -> Refusal:
    step = partial(labels_as_losses, "contiguous", **script)
    return of_windows(says, "cp2", rows, hook={"read_batch": reads}, step=step)


def pack_of_rank(batch: Batch) -> Microbatch:
    """A row as a pack, of two samples on the second rank."""
    starts = torch.tensor([0, 8, 16] if dist.get_rank() else [0, 16])
    return Microbatch(batch["loss_mask"], starts, model_inputs=batch["tokens"])


def without_a_token(mask: Tensor) -> Tensor:
    """On the second rank."""
    return mask.masked_fill(mask.cumsum(dim=-1) == 1, 0.0) if dist.get_rank() else mask


def of_first_rank(rank: int) -> int:
    return 0


def read_rows(iterator: Any, number: int) -> list[Microbatch]:
    return [Microbatch(rows()["loss_mask"])] * number


def with_ids_of_rank(batch: Batch, of_mb: tuple[int, ...]) -> Batch:
    """Every sample is a prompt of its own on the second rank."""
    ids = batch["prompt_ids"]
    return {**batch, "prompt_ids": torch.arange(len(ids)) if dist.get_rank() else ids}


def telling_then_alike(batch: Batch, of_mb: tuple[int, ...]) -> Batch:
    return PACK if of_mb == (0,) else alike_pack()


OTHER_IDS = Case(places=PLACES[1], batch=with_ids_of_rank)
BLIND = {"kind": "blind gather"}
UNVERIFIED = "the split of microbatch 0 must be verified ... --loss-aggregation-split {"
SAME = "every context-parallel rank must have its own part of the tokens of microbatch 0"
MASK = "the loss function's mask must be this rank's part ... split it as declared"
OF_PARTS = {
    # Masks whose sums are equal under every split: the tokens tell.
    **{
        f"{split} where {declared} is declared, {kind}": misdeclared(
            split, declared, script={"kind": kind}
        )
        for split, declared, kind in product(SPLITS, SPLITS, ("tokens", "samples", "blind gather"))
        if split != declared
    },
    # Weights of rows are the same in every split, and the order of gathered tokens is not.
    "gathered rows, contiguous by default": misdeclared("contiguous", None, rows(), script=BLIND),
    "gathered rows, zigzag where contiguous is declared": misdeclared(
        "zigzag", "contiguous", rows(), script=BLIND, names="zigzag or zigzag_pack"
    ),
    # The second rank holds padding alone, where zigzag would give it tokens: 20 of 64 tokens in
    # rows, 28 in a pack whose only sample ends at 48.
    "gathered rows that are short, contiguous by default": misdeclared(
        "contiguous", None, short_rows(), script=BLIND
    ),
    "a gathered pack that is short, contiguous where zigzag_pack is declared": misdeclared(
        "contiguous", "zigzag_pack", padded((28, 48), padding=31), script=BLIND
    ),
    # Ten tokens are at the start of the first rank's part in every split; padding alone is elsewhere.
    **{
        f"gathered {name}, {split} by default, after a step that fits every split": Refusal(
            f"DataError: microbatch 0 must be split ... as declared, zigzag, got {split}. Give",
            steps(split, *batches, script=BLIND),
            "cp2",
        )
        for name, split, batches in (
            ("rows", "contiguous", (few_tokens(), rows())),
            ("rows in a third step", "contiguous", (few_tokens(), few_tokens(), rows())),
            ("packs with a tail", "zigzag_pack", (padded((10, 40), padding=31), LONE)),
        )
    },
    "gathered rows, contiguous by default, after rows of another kind that fit every split": Refusal(
        "DataError: microbatch 0 must be split ... as declared, zigzag, got contiguous. Give",
        dataclasses.replace(
            steps("contiguous", rows(), script=BLIND), after=steps("contiguous", few_tokens())
        ),
        "cp2",
    ),
    # Rows are right under any split, and tell the script's; the next pack fits all, the last tells
    # nothing.
    "a pack that tells nothing, zigzag where contiguous is declared": of_pack(
        "zigzag",
        "microbatch 0 must be split ... as declared, contiguous, got zigzag or zigzag_pack.",
        rows(),
        padded((10, 40), padding=31),
        alike_pack(),
        declared="contiguous",
    ),
    "another split than declared, after a pack that tells nothing": Refusal(
        "DataError: microbatch 0 must be split ... as declared, contiguous, got zigzag. Give",
        steps("zigzag", dummy(), PACK, declared="contiguous"),
        "cp2",
    ),
    "gathered rows without tokens of the batch": of_pack(
        "zigzag", UNVERIFIED, rows(), script=BLIND, read_step=read_rows
    ),
    "zigzag_pack by default": misdeclared("zigzag_pack", None),
    **{
        f"zigzag_pack by default, after {name} that fit two splits": Refusal(
            "DataError: microbatch 0 must be split ... as declared, zigzag, got zigzag_pack. Give",
            steps("zigzag_pack", *batches, script=script),
            "cp2",
        )
        for name, batches, script in (
            ("rows", (rows(), PACK), None),
            ("packs of one sample", (LONE_PACK, PACK), None),
            ("gathered rows", (rows(), LONE), BLIND),
        )
    },
    "a pack that tells nothing, behind one that does, counted at the end": Refusal(
        case=dataclasses.replace(
            steps("zigzag", PACK, count="end"), places=(((0,), (1,)),), batch=telling_then_alike
        ),
        topology="cp2",
    ),
    "contiguous by default, of token_mean": misdeclared("contiguous", None),
    **{
        f"padding behind a sample, {split} by default": of_pack(split, MASK, LONE)
        for split in ("zigzag_pack", "contiguous")
    },
    "contiguous where another is declared, told by the second rank alone": misdeclared(
        "contiguous", "zigzag_pack", PLACES_OF_32[0]
    ),
    # A mask that tells, where tokens do not.
    **{
        f"a mask of {split} where {declared} is declared": of_pack(
            split,
            MASK,
            telling(),
            declared=declared,
            read_step=partial(read_step, batch=telling()),
        )
        for split, declared in product(SPLITS, SPLITS)
        if split != declared
    },
    "padding behind a sample of another split, told by its mask": of_pack(
        "contiguous", MASK, LONE, declared="zigzag", read_step=partial(read_step, batch=LONE)
    ),
    **{
        f"a split that is none of these, {declared}": of_pack(
            "backwards",
            "microbatch 0 must be split over context-parallel ranks as one of zigzag, zigzag_pack, "
            "contiguous, got tokens that are not part",
            declared=declared,
        )
        for declared in (None, *SPLITS)
    },
    "no tokens of the batch": of_pack("zigzag", UNVERIFIED, read_step=read_step),
    "no tokens of the batch, on one rank": Refusal(
        case=steps("zigzag", PACK, read_step=read_step), topology="dp1"
    ),
    "sequences that zigzag cannot split": of_pack(
        "contiguous",
        "sequences of a pack must be padded to multiples of 2 * cp_size = 4, got [6, 58, 0]. Pad them, "
        "or declare how the pack is split (--loss-aggregation-split",
        padded((6, 6), (58, 58)),
    ),
    **{
        f"the same part on two ranks, {split}, {'declared' if declares else 'by default'}": of_pack(
            split, SAME, declared=split if declares else None, script={"part": of_first_rank}
        )
        for split, declares in [("zigzag", False), *product(SPLITS, [True])]
    },
    "parts of every rank": on_two_ranks(),
    "the same part of rows on two ranks": on_two_ranks(f"DataError: {SAME}", part=of_first_rank),
    "tokens that the script changes": on_two_ranks(tokens=lambda x: 31 - x),
    # As where the model gets embeddings: they tell nothing.
    "positions alone": on_two_ranks(tokens=lambda x: gpt.positions_like(x)),
    "a token less on one rank": on_two_ranks(f"DataError: {MASK}", mask=without_a_token),
    "other samples on each rank": on_two_ranks(
        "DataError: all context-parallel ranks must read the same batches, got different offsets. Sp",
        rows=1,
        reads=pack_of_rank,
    ),
    "other ids on each rank": Refusal(
        "DataError: all context-parallel ranks must read the same batches, got different ids or weig",
        OTHER_IDS,
        "cp2",
    ),
    "other ids on each rank in a later step": Refusal(
        "DataError: the weights of microbatch 0 must add up to ... the same ids, sample_weights",
        dataclasses.replace(OTHER_IDS, after=dataclasses.replace(OTHER_IDS, batch=None)),
        "cp2",
    ),
}


def ordered(
    read: Any,
    order: tuple[int, ...],
    calls: tuple[int, ...] = (4,),
    says: str = "",
    topology: str = "dp1",
    **options: Any,
) -> Refusal:
    """A step at hand, whose data come in another ``order``."""

    def in_order(batches: Iterator[Batch]) -> Iterator[Batch]:
        given = [*batches]
        return iter([given[i] for i in order])

    hook = {"read_batch": read}
    return of_windows(says, topology, hook=hook, iterator=in_order, calls=calls, **options)


def by_tokens(batch: Batch) -> Microbatch:
    return Microbatch(batch["loss_mask"], model_inputs=batch["tokens"])


def with_positions(_: Batch, of_mb: tuple[int, ...]) -> Batch:
    batch = windows(2)[of_mb[0]]
    return {**batch, "position_ids": gpt.positions_like(batch["tokens"])}


def by_tokens_and_positions(batch: Batch) -> Microbatch:
    return Microbatch(batch["loss_mask"], model_inputs=[batch["tokens"], batch["position_ids"]])


def alike(batch: Batch) -> Microbatch:
    """A dummy, whose tokens are of one number."""
    return dataclasses.replace(read_batch(batch), model_inputs=torch.zeros_like(batch["tokens"]))


def in_one_memory(batches: Iterator[Batch]) -> Iterator[Batch]:
    kept: Batch = {}
    for batch in batches:
        for name, x in batch.items():
            kept.setdefault(name, x.clone()).copy_(x)
        yield kept


ORDER = "DataError: the model must be called with the tokens of microbatch"
OF_MICROBATCHES = {
    "by tokens, in calls": ordered(by_tokens, (0, 1, 2, 3), (2, 2)),
    "calls swapped": ordered(read_batch, (2, 3, 0, 1), (2, 2), ORDER),
    "one in place of another": ordered(read_batch, (0, 1, 2, 2), says=ORDER),
    "another with an equal token with a loss": ordered(
        read_batch, (0, 1, 2, 2), says=ORDER, batch=question
    ),
    # Positions are equal in all microbatches. In zigzag those of no rank are 0, 1, 2 and so on.
    "another with equal positions": ordered(
        by_tokens_and_positions,
        (0, 1, 2, 2),
        says=ORDER,
        topology="cp2",
        batch=with_positions,
        step=partial(labels_as_losses, "zigzag", has_positions=True),
    ),
    "turned dummies": ordered(alike, (3, 0, 1, 2)),
    # Stock Megatron draws each batch before its own forward pass; the hook draws all before the
    # first.
    "batches in one memory": of_windows(ORDER, iterator=in_one_memory),
    "an evaluation in one memory": of_windows(ORDER, iterator=in_one_memory, call=EVALUATION),
}
ROWS = {**OF_PARTS, **OF_MICROBATCHES}


@pytest.mark.parametrize("name", ROWS)
def test_tokens_of_another_split_part_or_microbatch_are_refused(name: str) -> None:
    assert_told(__name__, name)
