"""Dynamic context parallelism: every sample, or pack, has context-parallel ranks of its own.

Hybrid context parallelism: schedule, data wrapper and scheduler are Megatron's, and the forward
step brings a sample to its split, which the released scripts do not reach. Packs: the ordinary
schedule with packs as Megatron's packing schedulers make them, each with a number of ranks.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.nn.functional import cross_entropy, pad

from megatron_loss_agg import CPLayout, Microbatch
from megatron_loss_agg.launch.sft import SFTOptions
from megatron_loss_agg.mcore import LossHook, SampleLoss, TokenLoss, read_batch, with_ids
from megatron_loss_agg.mcore.dynamic_cp import dealt_batches
from megatron_loss_agg.turns import Turns
from tests.distributed import RankFailed
from tests.host import gpt, gradients
from tests.host.cases import mean_of_means
from tests.host.harness import EXACT, PP2, TP2, error_of, run_host_ranks
from tests.host.reference import Gradient, Reference, references
from tests.host.steps import (
    EMPTY,
    LENGTHS,
    Sequence,
    aggregation,
    batch_of,
    sequences,
    weights_of,
)
from tests.launch.test_data import line_of, stand_in_for_libraries
from tests.launch.test_sft import sft_data

GROUPS = "get_{}_data_context_parallel_groups"
data_schedule = pytest.importorskip("megatron.core.datasets.data_schedule")
# Megatron's name of the kind whose groups it makes: later releases have the dynamic kind alone.
KIND = next((x for x in ("dynamic", "hybrid") if hasattr(parallel_state, GROUPS.format(x))), "")
pytestmark = pytest.mark.skipif(not KIND, reason="no context groups of a sample's own")
hybrid = pytest.mark.skipif(KIND != "hybrid", reason="no hybrid context parallelism")

MODES = (
    *("token_mean", "sample_mean", "prompt_mean", "rollout_mean"),
    *("sample_sum", "constant", "sum", "custom"),
)
MULTIPLE = 8  # of the length of a sample: two chunks for each of four ranks
ALL = ((tuple(range(len(LENGTHS))),),)
HALF = (((*range(1, len(LENGTHS), 2),),),)
Steps = tuple[Any, ...]
Expected = list[tuple[str, Any, Gradient, float, float]]
"""By step: mode, samples, gradient, aggregated loss and mean over tokens."""


def losses_of(model: Any, sequence: Sequence) -> dict[str, Tensor]:
    """A sample alone, by a model without position embeddings."""
    model.position_embedding_type = "none"
    return {"": gpt.plain_losses(model, sequence)}


@pytest.fixture(scope="module")
def reference() -> Reference:
    return references(losses_of)[""]


def expected_of(reference: Reference, steps: list[tuple[str, Any]]) -> Expected:
    found = []
    for mode, places in steps:
        w, mean = weights_of(mode, places), weights_of("token_mean", places)
        found.append((mode, places, reference.gradient(w), reference.loss(w), reference.loss(mean)))
    return found


def build(sizes: dict[str, int], dynamic: str, **options: Any) -> Any:
    gpt.initialize(**sizes, **{f"{KIND}_context_parallel": True})
    plain = gpt.build(per_token=True, **options)
    setattr(plain.config, dynamic, True)
    plain.position_embedding_type = "none"
    return gpt.data_parallel(plain, use_distributed_optimizer=sizes.get("cp") == 2)


def check_step(hook: LossHook, model: Any, iterator: Any, expected: Any, **options: Any) -> None:
    """Train one step, and compare gradient and reports."""
    mode, _, gradient, loss, lm_loss = expected
    reports = gpt.run_step(hook, model, iterator, **options)
    assert gradients.error(model, gradient) < EXACT, mode
    if parallel_state.is_pipeline_last_stage():
        assert gpt.reported(reports, f"{mode} loss") == pytest.approx(loss, rel=1e-12)
        assert gpt.reported(reports, "lm loss") == pytest.approx(lm_loss, rel=1e-12)


# Hybrid context parallelism.


def packs(places: Any) -> list[dict[str, Tensor]]:
    """Two packs of this data-parallel rank's samples, with the ids of their groups by token."""
    (((samples),),) = places
    ranks = parallel_state.get_data_parallel_world_size()
    of_rank = samples[gpt.data_rank() :: ranks]
    half = len(of_rank) // 2
    parts = [part for part in (of_rank[:half], of_rank[half:]) if part]
    return [pack([sequences()[i] for i in part]) for part in parts]


def pack(chosen: list[Sequence]) -> dict[str, Tensor]:
    fields: dict[str, list[Tensor]] = {}
    ranks = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    multiple = max(MULTIPLE, 2 * ranks)  # all of them may hold a sample
    for sequence in chosen:
        length = len(sequence.tokens) + -len(sequence.tokens) % multiple
        of_sample = {
            "tokens": sequence.tokens,
            "labels": sequence.labels,
            "loss_mask": torch.tensor(sequence.sample.mask, dtype=torch.float64),
        }
        for name, x in of_sample.items():
            fields.setdefault(name, []).append(pad(x, (0, length - len(x))))
        for name in ("prompt", "rollout"):
            ids = torch.full((length,), getattr(sequence.sample, name))
            fields.setdefault(f"{name}_ids", []).append(ids)
    lengths = torch.tensor([0, *map(len, fields["tokens"])])
    joined = {name: torch.cat(parts) for name, parts in fields.items()}
    return {**joined, "cu_seqlens": lengths.cumsum(0).int()}


def hybrid_step(iterator: Iterator[Any] | None, model: Any, loss: Any = gpt.stock_loss_func) -> Any:
    """From a sample to the loss function. Released scripts do it each in a way of their own."""
    batch = gpt.received(iterator)
    length, size = len(batch["tokens"]), int(batch["local_cp_size"])
    layout = CPLayout.bshd(length, size, dp_cp_rank() % size)
    whole = {name: batch[name].reshape(1, -1) for name in ("tokens", "labels", "loss_mask")}
    local = {name: layout.shard(x) for name, x in whole.items()}
    return losses_of_part(model, local, packing(torch.tensor([0, length]), size), loss)


def dp_cp_rank() -> int:
    return parallel_state.get_data_parallel_rank(with_context_parallel=True)


def packing(starts: Tensor, size: int) -> PackedSeqParams:
    """Of sequences that this rank shares with ``size - 1`` others."""
    starts, longest = starts.int(), int(starts.diff().max())
    groups, has_group = getattr(parallel_state, GROUPS.format(KIND)), size > 1 or KIND == "dynamic"
    return PackedSeqParams(
        *("thd", starts, starts, starts, starts, longest, longest),
        local_cp_size=size,
        cp_group=groups(group_size=size) if has_group else None,
    )


def losses_of_part(model: Any, local: dict[str, Tensor], packed: Any, loss: Any) -> Any:
    tokens, labels = local["tokens"], local["labels"]
    output = model(tokens, torch.zeros_like(tokens), None, packed_seq_params=packed)
    loss_func = partial(loss, local["loss_mask"])
    if not parallel_state.is_pipeline_last_stage():
        return output, loss_func
    logits = gpt.gather_from_tensor_model_parallel_region(output)
    losses = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return losses.view_as(labels), loss_func


def hybrid_iterator(config: Any, places: Any) -> Any:
    if not gpt.reads_data():
        return None
    return data_schedule.HybridCPDataLoaderWrapper(iter([packs(places)]), config)


def train_hybrid(sizes: dict[str, int], per_rank: int, expected: Expected) -> None:
    model = build(sizes, "hybrid_context_parallel", max_seqlen_per_dp_cp_rank=per_rank)
    hooks = {mode: LossHook(aggregation(mode), aggregate_evaluation=True) for mode, *_ in expected}
    for step in expected:
        mode, places, _, loss, _ = step
        iterator = hybrid_iterator(model.config, places)
        check_step(hooks[mode], model, iterator, step, **HYBRID)
        iterator = hybrid_iterator(model.config, places)
        evaluated = gpt.run_step(hooks[mode], model, iterator, forward_only=True, **HYBRID)
        for reduced in (gpt.reported, mean_of_means):  # ranks have other numbers of samples
            assert reduced(evaluated, f"{mode} loss") == pytest.approx(loss, rel=1e-12)


HYBRID: dict[str, Any] = {"num_microbatches": 1, "forward_step_func": hybrid_step}


@hybrid
@pytest.mark.parametrize(
    "ranks, sizes, per_rank",
    [(4, {}, 8), (4, {"cp": 2}, 8), (4, TP2, 16), (8, {"cp": 2}, 16)],
    ids=["dp4", "dp2-cp2", "tp2-dp2", "dp4-cp2"],
)
def test_hybrid_context_parallelism_is_exact(
    ranks: int, sizes: dict[str, int], per_rank: int, reference: Reference
) -> None:
    modes = MODES if ranks == 4 else MODES[:3]  # eight take their time
    steps = [(mode, ALL) for mode in modes] + [("prompt_mean", HALF), ("sample_mean", HALF)]
    run_host_ranks(train_hybrid, ranks, sizes, per_rank, expected_of(reference, steps))


def without_empty_ends(packs: list[dict[str, Tensor]]) -> Iterator[list[dict[str, Tensor]]]:
    """As a packing that drops the last samples of a pack if they have no active token."""
    kept = []
    for whole in packs:
        offsets = whole["cu_seqlens"].tolist()
        while len(offsets) > 1 and not whole["loss_mask"][offsets[-2] : offsets[-1]].any():
            offsets.pop()
        part = {key: x[: offsets[-1]] for key, x in whole.items()}
        if len(offsets) > 1:
            kept.append({**part, "cu_seqlens": whole["cu_seqlens"][: len(offsets)]})
    yield kept


def train_without_empty_ends(expected: Expected) -> str:
    """Return what was printed."""
    model = build({}, "hybrid_context_parallel", max_seqlen_per_dp_cp_rank=8)
    printed = io.StringIO()
    for step in expected:
        mode, _, gradient, *_ = step
        iterator = None
        if gpt.reads_data():
            source = without_empty_ends(packs(EMPTY_LAST))
            iterator = data_schedule.HybridCPDataLoaderWrapper(source, model.config)
        with contextlib.redirect_stdout(printed):
            gpt.run_step(LossHook(aggregation(mode)), model, iterator, **HYBRID)
        assert gradients.error(model, gradient) < EXACT, mode
    return printed.getvalue()


def failing(packs: list[dict[str, Tensor]], good_steps: int) -> Iterator[list[dict[str, Tensor]]]:
    for _ in range(good_steps):
        yield packs
    if gpt.data_rank() == 1:
        raise OSError("disk")
    yield packs


def train_on_failing(good_steps: int) -> None:
    model = build({}, "hybrid_context_parallel", max_seqlen_per_dp_cp_rank=16)
    source = failing(packs(ALL), good_steps)
    iterator = data_schedule.HybridCPDataLoaderWrapper(source, model.config)
    hook = LossHook(aggregation("sample_mean"))
    for _ in range(good_steps + 1):
        gpt.run_step(hook, model, iterator, **HYBRID)


@hybrid
@pytest.mark.parametrize("good_steps", [0, 1])
def test_a_loader_that_fails_in_its_wrapper_ends_the_job_with_its_error(good_steps: int) -> None:
    """The other ranks wait for it in the wrapper, not in an exchange of the hook."""
    with pytest.raises(RankFailed, match=r"rank 1 failed(.|\n)*OSError: disk"):
        run_host_ranks(train_on_failing, 2, good_steps)


def samples_of_chats(folder: Path) -> list[tuple[list[float], int, float]]:
    """Mask, prompt and weight of each conversation that this rank reads, by flags of `--sft` data."""
    from megatron.core.tokenizers import MegatronTokenizer

    stand_in_for_libraries()
    tokenizer = MegatronTokenizer.from_pretrained(
        "none", metadata_path={"library": "sft"}, prompt_format="nemotron-h-aligned"
    )
    model = build({}, "hybrid_context_parallel", max_seqlen_per_dp_cp_rank=32)
    rank = dp_cp_rank()
    dataset = sft_data(folder / "chats.jsonl", tokenizer)
    options = SFTOptions("prompts", "weights", Turns("each"))
    pack = options.read_item(dataset[rank], dataset, rank)
    item = next(data_schedule.HybridCPDataLoaderWrapper(iter([[pack]]), model.config))
    found = []
    for batch in dealt_batches(item, rank):
        read = options.reader()(batch)
        assert isinstance(read, Microbatch) and isinstance(read.prompt_ids, Tensor)
        assert read.sample_weights is not None
        (prompt,), (weight,) = read.prompt_ids.tolist(), read.sample_weights.tolist()
        found.append((read.loss_mask.flatten().tolist(), prompt, weight))
    return found


@hybrid
def test_samples_of_chats_keep_turns_prompts_and_weights(tmp_path: Path) -> None:
    two_turns = [("user", "ab"), ("assistant", "cd"), ("user", "e"), ("assistant", "fghi")]
    one_turn = [("user", "abc"), ("assistant", "d")]
    lines = [
        line_of([[("system", "s"), *x] for x in chats], prompts=prompts, weights=weights)
        for chats, prompts, weights in (
            ([two_turns, one_turn], [7, 8], [0.5, 2.0]),
            ([one_turn], [9], [1.5]),
        )
    ]
    (tmp_path / "chats.jsonl").write_text("".join(lines))
    by_rank = run_host_ranks(samples_of_chats, 2, tmp_path)
    # sabcdefghi: cd is predicted at 2 and 3, fghi at 5 to 8. sabcd: d at 3.
    first = [0, 0, 0.5, 0.5, 0, *[0.25] * 4, 0, 0, 0]
    second = [0, 0, 0, 1]
    assert sorted((sample for rank in by_rank for sample in rank), key=lambda x: x[1]) == [
        (first, 7, 0.5),
        (second + [0] * 16, 8, 2.0),
        (second + [0] * 28, 9, 1.5),
    ]


def draws_nothing_known() -> list[str | None]:
    model = build({}, "hybrid_context_parallel", max_seqlen_per_dp_cp_rank=16)
    hook = LossHook(aggregation("sample_mean"), aggregate_evaluation=True)
    samples, groups = next(hybrid_iterator(model.config, ALL))
    # As a stock script evaluates on; and as an open pull request packs the samples.
    items = (packs(ALL), packs(ALL)[:1], (iter([samples]), groups))
    options = {**HYBRID, "forward_only": True}
    return [error_of(gpt.run_step, hook, model, iter([item]), **options) for item in items]


@hybrid
def test_an_item_that_is_not_the_wrappers_is_refused() -> None:
    for errors in run_host_ranks(draws_nothing_known, 2):
        for error, got in zip(
            errors, ("['dict', 'dict']", "list", "_iterator', 'list']"), strict=True
        ):
            text = "HostError: the data iterator under hybrid context parallelism must give (samples by"
            assert str(error).startswith(text) and f"{got}. Wrap it" in str(error)


# By rank: 0, 4, 8; 1, 5, 9; ... The empty sample ends its rank's second pack.
EMPTY_LAST = (((0, 1, 2, 3, 4, 9, 6, 7, 8, EMPTY),),)
NOT_EMPTY = (((0, 1, 2, 3, 4, 9, 6, 7, 8),),)


@hybrid
def test_samples_that_the_packing_drops_do_not_count(reference: Reference) -> None:
    steps = [("sample_mean", NOT_EMPTY), ("prompt_mean", NOT_EMPTY)]
    first, *others = run_host_ranks(train_without_empty_ends, 4, expected_of(reference, steps))
    assert "9 samples" in first and not any(others)


@hybrid
def test_a_sample_on_ranks_without_a_group_is_refused() -> None:
    # Megatron's own scheduler gives a sample of 256 tokens to the ranks 2 to 5, and hangs.
    domain = SimpleNamespace(size=lambda: 8)
    scheduler = data_schedule.BalancedCPScheduler(max_seq_len_per_rank=64, dp_cp_group=domain)
    lengths = enumerate((256, 32, 256, 96, 128, 128, 128, 192, 128))
    _, groups = scheduler.get_groups_and_subsamples([*lengths], None)
    samples = {gid: {} for gid in range(9)}
    said = {error_of(dealt_batches, (samples, groups), rank) for rank in range(8)}
    assert len(said) == 1
    assert "HostError: a sample must be held by all ranks of one of" in str(said.pop())
    # Of six ranks Megatron has groups of 1, 2 and 6.
    three = [[[0], [0], [0], [], [], []]]
    assert "got one on ranks [0, 1, 2]" in str(error_of(dealt_batches, ({0: {}}, three), 0))


@hybrid
def test_samples_are_dealt_in_the_order_of_the_schedule() -> None:
    batches = dealt_batches(({0: {}, 1: {}}, [[[1, 0]]]), 0)
    assert [batch["gid"] for batch in batches] == [1, 0]


# Packs, each with a number of ranks.

# By microbatch: first rank and number of ranks of each pack, and its samples.
PACKS = (
    {(0, 4): (0, 1, 8)},
    {(0, 2): (2, 3), (2, 2): (4,)},
    {(0, 1): (5,), (1, 1): (6,), (2, 2): (7, 9)},
)
PACKS_OF_TWO = (
    {(0, 2): (0, 1, 8)},
    {(0, 1): (2, 3), (1, 1): (4, 9)},
    {(0, 2): (5, 6, 7)},
)


def dynamic_packs(table: Any) -> Iterator[dict[str, Any]]:
    rank = dp_cp_rank()
    for of_microbatch in table:
        for (first, size), samples in of_microbatch.items():
            if first <= rank < first + size:
                batch = padded_to_multiple([sequences()[i] for i in samples])
                yield {**batch, "local_cp_size": torch.tensor(size, dtype=torch.int32)}


def padded_to_multiple(chosen: list[Sequence]) -> dict[str, Any]:
    """A pack whose padded places are long enough for four ranks; padding is not zero."""
    of_rows = batch_of(chosen, "thd")
    starts = of_rows["cu_seqlens_padded"]
    widths = [int(n) + -int(n) % MULTIPLE for n in starts.diff()]
    parts = zip(starts[:-1], starts[1:], widths, strict=True)
    places = [(int(a), int(b), w) for a, b, w in parts]
    batch = {"cu_seqlens_padded": torch.tensor([0, *widths]).cumsum(0).int()}
    for name, fill in (("tokens", 3), ("labels", 5), ("loss_mask", 0)):
        x = of_rows[name][0]
        batch[name] = torch.cat([pad(x[a:b], (0, w - (b - a)), value=fill) for a, b, w in places])
        batch[name] = batch[name].unsqueeze(0)
    return {**of_rows, **batch}


def packed_step(
    iterator: Iterator[Any],
    model: Any,
    loss: Any = gpt.stock_loss_func,
    split: Callable[[Tensor, int, int], CPLayout] = CPLayout.thd,
) -> Any:
    batch = gpt.received(iterator)
    size, starts = int(batch["local_cp_size"]), batch["cu_seqlens_padded"]
    layout = split(starts, size, dp_cp_rank() % size)
    local = {name: layout.shard(batch[name]) for name in ("tokens", "labels", "loss_mask")}
    return losses_of_part(model, local, packing(starts, size), loss)


PACKED: dict[str, Any] = {"num_microbatches": 3, "forward_step_func": packed_step}


def train_packs(sizes: dict[str, int], table: Any, expected: Expected) -> None:
    model = build(sizes, "dynamic_context_parallel")
    for step in expected:
        mode, _, _, loss, _ = step
        hook = LossHook(aggregation(mode), aggregate_evaluation=True)
        check_step(hook, model, dynamic_packs(table), step, **PACKED)
        options = {**PACKED, "forward_only": True}
        evaluated = gpt.run_step(hook, model, dynamic_packs(table), **options)
        if parallel_state.is_pipeline_last_stage():
            assert gpt.reported(evaluated, f"{mode} loss") == pytest.approx(loss, rel=1e-12)


@pytest.mark.parametrize(
    "sizes, table",
    [({}, PACKS), ({"cp": 2}, PACKS), (PP2, PACKS_OF_TWO)],
    ids=["dp4", "cp2", "pp2"],
)
def test_packs_with_ranks_of_their_own_are_exact(
    sizes: dict[str, int], table: Any, reference: Reference
) -> None:
    steps = [(mode, ALL) for mode in MODES]
    run_host_ranks(train_packs, 4, sizes, table, expected_of(reference, steps))


def gathering_step(iterator: Iterator[Any], model: Any) -> Any:
    """With the losses of the whole pack on each rank that holds it."""
    batch = next(iterator)
    losses, _ = packed_step(iter([batch]), model)
    return losses, TokenLoss(lambda whole: whole, batch["loss_mask"], gather=lambda x: x)


def train_gathering(expected: Expected) -> None:
    model = build({"cp": 2}, "dynamic_context_parallel")
    for mode, _, gradient, *_ in expected:
        options = {**PACKED, "forward_step_func": gathering_step}
        gpt.run_step(LossHook(aggregation(mode)), model, dynamic_packs(PACKS), **options)
        assert gradients.error(model, gradient) < EXACT, mode


def test_losses_of_whole_packs_are_gathered_over_the_ranks_of_each(reference: Reference) -> None:
    steps = [("token_mean", ALL), ("prompt_mean", ALL)]
    run_host_ranks(train_gathering, 4, expected_of(reference, steps))


CALLS_OF_RANK = ((3,), (3,), (1, 2), (1, 1, 1))
"""Microbatches of each call, by rank: those that hold a pack together run it together."""


def train_in_calls(expected: Expected) -> list[str | None]:
    model = build({}, "dynamic_context_parallel")
    rank = dp_cp_rank()
    for mode, _, gradient, loss, _ in expected:
        hook, reports = LossHook(aggregation(mode)), []
        iterator = dynamic_packs(PACKS)
        with hook.step([microbatch_of(batch) for batch in dynamic_packs(PACKS)]):
            for i, number in enumerate(CALLS_OF_RANK[rank]):
                options = {**PACKED, "num_microbatches": number, "zero_grad": i == 0}
                reports += gpt.run_step(hook, model, iterator, **options)
        assert gradients.error(model, gradient) < EXACT, mode
        assert gpt.reported(reports, f"{mode} loss") == pytest.approx(loss, rel=1e-12)
    return [misread_in_calls(model, rank, step) for step in (contiguous_step, with_other_mask)]


def microbatch_of(batch: dict[str, Any]) -> Microbatch:
    return replace(read_batch(batch), local_cp_size=int(batch["local_cp_size"]))


def misread_in_calls(model: Any, rank: int, step: Any) -> str | None:
    hook, iterator = LossHook(aggregation("prompt_mean")), dynamic_packs(PACKS)

    def in_calls() -> None:
        with hook.step([microbatch_of(batch) for batch in dynamic_packs(PACKS)]):
            for number in CALLS_OF_RANK[rank]:
                options = {**PACKED, "num_microbatches": number, "forward_step_func": step}
                gpt.run_step(hook, model, iterator, **options)

    return error_of(in_calls)


def with_other_mask(iterator: Iterator[Any], model: Any) -> Any:
    losses, loss_func = packed_step(iterator, model)
    return losses, partial(loss_func.func, loss_func.args[0] / 2)


def test_ranks_make_other_numbers_of_calls_of_one_step(reference: Reference) -> None:
    steps = [("prompt_mean", ALL), ("sample_mean", ALL)]
    for said in run_host_ranks(train_in_calls, 4, expected_of(reference, steps)):
        split, mask = map(str, said)
        assert "must be split over context-parallel ranks as declared, zigzag" in split
        assert "mask sum of a sample must be" in mask


# Refusals.


def with_sums(iterator: Any, model: Any) -> Any:
    losses, _ = packed_step(iterator, model)
    return losses, SampleLoss(lambda sums, _: sums, lambda x: x, torch.ones_like(losses))


def of_samples(iterator: Any, model: Any) -> Any:
    losses, _ = packed_step(iterator, model)
    return losses, SampleLoss(lambda x: x.sum(dim=1))


def in_equal_parts(starts: Tensor, size: int, rank: int) -> CPLayout:
    return CPLayout.contiguous(int(starts[-1]), size, rank)


contiguous_step = partial(packed_step, split=in_equal_parts)


def local_masks(batches: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Ranks that hold a pack have other masks."""
    rank = dp_cp_rank()
    for batch in batches:
        yield {**batch, "loss_mask": batch["loss_mask"] * (1 + rank)}


def without_number(batches: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for batch in batches:
        del batch["local_cp_size"]
        yield batch


def is_last_rank() -> bool:
    return dp_cp_rank() == 3


def without_number_on_one_rank(batches: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    return without_number(batches) if is_last_rank() else batches


def shorter_on_one_rank(batches: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    return islice(batches, 2) if is_last_rank() else batches


def on_fewer_ranks(batches: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """A pack says that four ranks hold it, and two do."""
    for batch in batches:
        size = int(batch["local_cp_size"])
        yield {**batch, "local_cp_size": torch.tensor(4 if size == 2 else size)}


def as_they_are(batches: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    return batches


# The error, the mode, a change of the batches, and the forward step.
REFUSED: list[tuple[str, str, Any, Any]] = [
    (
        "DataError: a mean over microbatches needs the loop's microbatches, got samples that",
        *("microbatch_mean", as_they_are, packed_step),
    ),
    (
        "HostError: a SampleLoss of tokens on several ranks needs the same context-parallel ranks for",
        *("sum", as_they_are, with_sums),
    ),
    (
        "HostError: a SampleLoss of tokens on several ranks needs the same context-parallel ranks for",
        *("sum", as_they_are, of_samples),
    ),
    (
        "DataError: all context-parallel ranks must read the same batches, got different masks",
        *("sum", local_masks, packed_step),
    ),
    (
        "DataError: must be split over context-parallel ranks as declared, zigzag, got",
        *("sum", as_they_are, contiguous_step),
    ),
    (
        "DataError: a batch under dynamic context parallelism must have the key 'local_cp_size', as",
        *("sum", without_number, packed_step),
    ),
    (
        "DataError: a batch under dynamic context parallelism must have the key 'local_cp_size', as",
        *("sum", without_number_on_one_rank, packed_step),
    ),
    (
        "DataError: the data iterator must give 3 batches for a call, got 2",
        *("sum", shorter_on_one_rank, packed_step),
    ),
    (
        "DataError: a microbatch with local_cp_size=4 must be given by the data- and context-parallel",
        *("sum", on_fewer_ranks, packed_step),
    ),
]


def refused() -> list[str | None]:
    model = build({}, "dynamic_context_parallel")
    errors = []
    for _, mode, change, step in REFUSED:
        options = {**PACKED, "forward_step_func": step}
        hook, iterator = LossHook(aggregation(mode)), change(dynamic_packs(PACKS))
        errors.append(error_of(gpt.run_step, hook, model, iterator, **options))
    return errors


# Packs of one rank each, which tell no split.
ALONE = tuple({(rank, 1): (k,) for rank in range(4)} for k in range(3))


def misread_later() -> str | None:
    """The first step shows no split, and the second one another than is declared."""
    model = build({}, "dynamic_context_parallel")
    hook = LossHook(aggregation("sum"))
    options = {**PACKED, "forward_step_func": contiguous_step}
    gpt.run_step(hook, model, dynamic_packs(ALONE), **options)
    return error_of(gpt.run_step, hook, model, dynamic_packs(PACKS), **options)


def test_a_split_is_compared_in_the_first_step_that_shows_it() -> None:
    for error in run_host_ranks(misread_later, 4):
        assert "must be split over context-parallel ranks as declared, zigzag" in str(error)


PAIR = ({(0, 2): (0,), (2, 2): (4,)},)


def gather_later(expected: Expected) -> None:
    """Packs of one sample each, which ranks first share, and gather the losses of, in a later step."""
    model = build({}, "dynamic_context_parallel")
    ((mode, _, gradient, *_),) = expected
    hook = LossHook(aggregation(mode))
    gpt.run_step(hook, model, dynamic_packs(ALONE), **PACKED)
    options = {**PACKED, "num_microbatches": 1, "forward_step_func": gathering_step}
    gpt.run_step(hook, model, dynamic_packs(PAIR), **options)
    assert gradients.error(model, gradient) < EXACT


def test_a_split_that_is_first_shown_by_gathered_losses_is_exact(reference: Reference) -> None:
    run_host_ranks(gather_later, 4, expected_of(reference, [("sample_mean", (((0, 4),),))]))


def evaluate_terms() -> str | None:
    """Half of the ranks that hold a pack evaluate one term of two."""
    model = build({}, "dynamic_context_parallel")
    rank = dp_cp_rank()

    def step(iterator: Iterator[Any], model: Any) -> Any:
        losses, loss_func = packed_step(iterator, model)
        names = ("a", "b") if rank < 2 else ("a",)
        return losses, TokenLoss(lambda x: dict.fromkeys(names, x), loss_func.args[0])

    hook = LossHook({"a": aggregation("sum"), "b": aggregation("sum")}, aggregate_evaluation=True)
    options = {**PACKED, "forward_step_func": step, "forward_only": True}
    return error_of(gpt.run_step, hook, model, dynamic_packs(PACKS), **options)


def test_ranks_that_evaluate_other_terms_of_a_pack_all_end() -> None:
    *with_both, third, fourth = map(str, run_host_ranks(evaluate_terms, 4))
    assert all("mask sum of a sample must be" in error for error in with_both)
    assert "PeerError" in third and "PeerError" in fourth


def test_what_is_not_exact_is_refused_on_every_rank() -> None:
    ranks = run_host_ranks(refused, 4)
    for (words, *_), errors in zip(REFUSED, zip(*ranks, strict=True), strict=True):
        name, _, text = words.partition(": ")
        named = [error for error in errors if error.startswith(name) and text in error]
        others = [error for error in errors if error not in named]
        assert named and all(error.startswith("PeerError") for error in others), errors


def streamed() -> list[str | None]:
    """In a call of a stream, and in one that is counted at its end."""
    model = build({}, "dynamic_context_parallel")
    hook, at_end = (LossHook(aggregation("sample_mean"), count=x) for x in ("before", "end"))

    def stream() -> None:
        with hook.stream():
            gpt.run_step(hook, model, dynamic_packs(PACKS), **PACKED)

    return [error_of(stream), error_of(gpt.run_step, at_end, model, dynamic_packs(PACKS), **PACKED)]


def test_a_step_that_is_counted_at_its_end_is_refused() -> None:
    for errors in run_host_ranks(streamed, 4):
        for error in errors:
            assert str(error).startswith(
                "HostError: this model cannot train in a step that is counted"
            )
            assert "under dynamic context parallelism" in str(error)


def test_packs_without_the_numbers_of_their_samples_take_no_ids(monkeypatch: Any) -> None:
    """As Megatron's main branch makes them."""
    for name in ("get_batch_and_global_seqlens", "build_packed_microbatches"):
        monkeypatch.setattr(data_schedule, name, lambda grouped_samples, dev: None, raising=False)
    error = str(error_of(with_ids(print), None, None, 1))
    assert error.startswith("HostError: Megatron's data_schedule must have")
    assert "(samples, sample_id_groups, ...) for ids in packs, got others. Drop with_ids" in error
