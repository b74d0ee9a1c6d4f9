"""Packing schedulers of Megatron's development branch: static and dynamic context parallelism.

Scheduler, data wrapper, split and schedule are Megatron's. `ci/next.sh` runs this on a checkout that
has them; no release does.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core import parallel_state
from torch import Tensor
from torch.nn.functional import cross_entropy, pad

from megatron_loss_agg import CPLayout
from megatron_loss_agg.launch.install import install
from megatron_loss_agg.mcore import LossHook, with_ids
from tests.host import gpt, gradients
from tests.host.harness import EXACT, PP2, TP2, error_of, run_host_ranks
from tests.host.reference import Gradient, references
from tests.host.steps import (
    LENGTHS,
    PROMPTS,
    aggregation,
    sequences,
    weights_of,
    weights_with,
)
from tests.host.test_dynamic_cp import ALL, MULTIPLE, losses_of
from tests.oracle import Sample

data_schedule = pytest.importorskip("megatron.core.datasets.data_schedule")
pytestmark = pytest.mark.skipif(
    not hasattr(parallel_state, "get_dynamic_data_context_parallel_groups"),
    reason="this Megatron has no dynamic context parallelism",
)

MODES = (
    *("token_mean", "sample_mean", "prompt_mean", "rollout_mean", "dataset_mean"),
    *("sample_sum", "constant", "sum", "custom"),
)
DYNAMIC, BALANCED = "default_dynamic_cp", "dp_balanced"


def dataset_of(i: int) -> int:
    """The data set of sample ``i``: the same for all samples of a rank's pack."""
    return i % 2


def sample(i: int) -> dict[str, Any]:
    """An item of a blend of data sets of variable lengths; padding is not zero."""
    sequence = sequences()[i]
    number = len(sequence.tokens)
    length = number + -number % MULTIPLE
    longer = partial(pad, pad=(0, length - number))
    mask = torch.tensor(sequence.sample.mask, dtype=torch.float32)
    return {
        "dataset_id": np.int16(dataset_of(i)),  # as in Megatron's BlendedDataset
        "tokens": longer(sequence.tokens, value=3),
        "labels": longer(sequence.labels, value=5),
        "loss_mask": longer(mask),
        "position_ids": torch.arange(length),
        "original_seq_len": torch.tensor([number], dtype=torch.int32),
        "padded_seq_len": torch.tensor([length], dtype=torch.int32),
        "prompt_ids": torch.tensor([sequence.sample.prompt]),
        "rollout_ids": torch.tensor([sequence.sample.rollout]),
    }


def packed(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """A collated batch of one pack, with a place for a sample without tokens."""
    dataset_ids = torch.tensor([int(x.pop("dataset_id")) for x in samples])
    joined = {key: torch.cat([x[key] for x in samples]).unsqueeze(0) for key in samples[0]}
    joined["dataset_id"] = dataset_ids[:1]
    lengths = joined.pop("padded_seq_len")[0]
    del joined["original_seq_len"]
    offsets = torch.tensor([0, 0, *lengths.tolist()]).cumsum(0).int()
    for key in ("prompt_ids", "rollout_ids"):
        joined[key] = pad(joined[key], (1, 0), value=-1)
    return {**joined, "cu_seqlens": offsets.unsqueeze(0)}


def forward_step(iterator: Any, model: Any) -> Any:
    config = gpt.get_attr_wrapped_model(model, "config")
    tokens, labels, mask, _, _, packing, padding = (
        data_schedule.get_batch_on_this_rank_for_sequence_packing(
            iterator, dynamic_cp=config.dynamic_context_parallel, config=config
        )
    )
    if tokens is None:
        tokens = torch.zeros(padding.shape, dtype=torch.int64)
    output = model(tokens, torch.zeros_like(tokens), None, packed_seq_params=packing)
    if not parallel_state.is_pipeline_last_stage():
        return output, None
    logits = gpt.gather_from_tensor_model_parallel_region(output)
    losses = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return losses.view_as(labels), partial(gpt.stock_loss_func, mask.double())


def split_without_transformer_engine() -> None:
    from megatron.core.datasets import data_schedule_utils

    def index(offsets: Tensor, total: int, size: int, rank: int) -> Tensor:
        return CPLayout.thd(offsets, size, rank).index

    data_schedule_utils.get_thd_partitioned_indices = index


def configured(scheduler: str, per_rank: int) -> Any:
    """A model without position embeddings, for packs of the scheduler."""
    plain = gpt.build(per_token=True)
    plain.position_embedding_type = "none"
    # Later than the configuration's check of Transformer Engine's version.
    plain.config.sequence_packing_scheduler = scheduler
    plain.config.dynamic_context_parallel = scheduler == DYNAMIC
    plain.config.max_seqlen_per_dp_cp_rank = per_rank
    return plain


def train(
    sizes: dict[str, int],
    scheduler: str,
    per_rank: int,
    packs: bool,
    expected: dict[str, tuple[Gradient, float]],
) -> None:
    split_without_transformer_engine()
    is_dynamic = scheduler == DYNAMIC
    gpt.initialize(**sizes, **({"dynamic_context_parallel": True} if is_dynamic else {}))
    plain = configured(scheduler, per_rank)
    model = gpt.data_parallel(plain)
    ranks = parallel_state.get_data_parallel_world_size()
    indices = range(len(LENGTHS))[gpt.data_rank() :: ranks]

    def run(hook: LossHook, **options: Any) -> list[Any]:
        samples = [sample(i) for i in indices]
        items = [packed(samples)] if packs else [[x] for x in samples]
        source = iter(items) if gpt.reads_data() else None
        wrap = with_ids(data_schedule.wrap_data_iterator)
        iterator, number, *_ = wrap(source, plain.config, len(items))
        options["forward_step_func"] = forward_step
        return gpt.run_step(hook, model, iterator, number, **options)

    for mode, (gradient, loss) in expected.items():
        hook = LossHook(aggregation(mode), split="zigzag", aggregate_evaluation=True)
        reports = run(hook)
        assert gradients.error(model, gradient) < EXACT, mode
        evaluated = run(hook, forward_only=True)
        if parallel_state.is_pipeline_last_stage():
            for call_reports in (reports, evaluated):
                assert gpt.reported(call_reports, f"{mode} loss") == pytest.approx(loss, rel=1e-12)


def in_dataset(i: int, _: tuple[int, ...]) -> Sample:
    return replace(sequences()[i].sample, dataset=dataset_of(i))


@pytest.mark.parametrize(
    "ranks, sizes, scheduler, per_rank, packs",
    [
        (4, {}, DYNAMIC, 8, False),
        (8, {"cp": 2}, DYNAMIC, 8, False),
        (4, TP2, DYNAMIC, 16, True),
        (4, PP2, DYNAMIC, 16, False),
        (4, {"cp": 2}, BALANCED, 16, True),
    ],
    ids=["dp4", "dp4-cp2", "tp2-dp2-packs", "pp2-dp2", "balanced-cp2-packs"],
)
def test_packs_of_megatrons_schedulers_are_exact(
    ranks: int, sizes: dict[str, int], scheduler: str, per_rank: int, packs: bool
) -> None:
    reference = references(losses_of)[""]
    weights = {mode: weights_of(mode, ALL) for mode in MODES if mode != "dataset_mean"}
    weights["dataset_mean"] = weights_with("dataset_mean", ALL, in_dataset)
    expected = {mode: (reference.gradient(w), reference.loss(w)) for mode, w in weights.items()}
    run_host_ranks(train, ranks, sizes, scheduler, per_rank, packs, expected)


def pack_by_flags() -> dict[str, Any]:
    """The ids in packs that Megatron's training loop gets, by the flags of the launcher."""
    from megatron.training import training

    gpt.initialize()
    config = configured(BALANCED, 64).config
    ids = {}
    for flags in ("", "--loss-aggregation prompt_mean"):
        sys.argv = ["script", *flags.split()]
        uninstall = install(watch_exit=False)
        items = [[sample(i)] for i in range(4)]
        iterator, number, *_ = training.wrap_data_iterator(iter(items), config, 4)
        uninstall()
        packs = [next(iterator) for _ in range(number)]
        ids[flags] = [x["prompt_ids"].tolist() for x in packs if "prompt_ids" in x]
    return ids


def different_ids() -> list[str | None]:
    """Items of which some lack a key, or have two values."""
    gpt.initialize()
    config = configured(BALANCED, 64).config
    wrap = with_ids(data_schedule.wrap_data_iterator)
    first, second = (sample(i) for i in range(2))
    two = {**second, "prompt_ids": torch.tensor([1, 2])}
    del second["prompt_ids"]
    return [error_of(wrap, iter([[first], [x]]), config, 2) for x in (second, two)]


def test_the_launcher_keeps_ids_and_bad_ones_are_refused() -> None:
    (ids,) = run_host_ranks(pack_by_flags, 1)
    assert ids == {"": [], "--loss-aggregation prompt_mean": [[*PROMPTS[:4]]]}
    ((lacking, two),) = run_host_ranks(different_ids, 1)
    assert "DataError: all samples of a step must have ids under the same keys" in str(lacking)
    assert "DataError: the key 'prompt_ids' of a data set's item must have a value" in str(two)
