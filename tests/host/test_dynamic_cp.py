"""Dynamic context parallelism: every sample, or pack, has context-parallel ranks of its own.

The schedule, data wrapper and scheduler are Megatron's. The batch is bridged to its split in the
forward step, since the released scripts do not get there.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.nn.functional import cross_entropy, pad

from megatron_loss_agg.mcore import LossHook
from tests.host import gpt, gradients
from tests.host.harness import EXACT, run_host_ranks
from tests.host.reference import Gradient, Reference, references, relative_error
from tests.host.steps import LENGTHS, Sequence, aggregation, sequences, weights_of

data_schedule = pytest.importorskip("megatron.core.datasets.data_schedule")
if not hasattr(data_schedule, "HybridCPDataLoaderWrapper"):
    pytest.skip("this release has no hybrid context parallelism", allow_module_level=True)

MODES = (
    *("token_mean", "sample_mean", "prompt_mean", "rollout_mean"),
    *("sample_sum", "constant", "sum", "custom"),
)
PER_RANK = 8  # tokens; longer samples have 2 or 4 ranks
MULTIPLE = 8  # of the length of a sample: two chunks for each of four ranks


def losses_of(model: Any, sequence: Sequence) -> dict[str, Tensor]:
    """A sample alone, by a model without position embeddings."""
    model.position_embedding_type = "none"
    return {"": gpt.plain_losses(model, sequence)}


@pytest.fixture(scope="module")
def reference() -> Reference:
    return references(losses_of)[""]


def packs(of_rank: list[int]) -> list[dict[str, Tensor]]:
    """Two packs of this data-parallel rank's samples, with the ids of their groups by token."""
    half = len(of_rank) // 2
    return [pack([sequences()[i] for i in part]) for part in (of_rank[:half], of_rank[half:])]


def pack(chosen: list[Sequence]) -> dict[str, Tensor]:
    fields: dict[str, list[Tensor]] = {}
    for sequence in chosen:
        length = len(sequence.tokens) + -len(sequence.tokens) % MULTIPLE
        of_sample = {
            "tokens": sequence.tokens,
            "labels": sequence.labels,
            "loss_mask": torch.tensor(sequence.sample.mask, dtype=torch.float64),
        }
        for name, x in of_sample.items():
            fields.setdefault(name, []).append(pad(x, (0, length - len(x))))
        for name, group in (("prompt", sequence.sample.prompt), ("rollout", sequence.sample.rollout)):
            fields.setdefault(f"{name}_ids", []).append(torch.full((length,), group))
    lengths = torch.tensor([0, *map(len, fields["tokens"])])
    joined = {name: torch.cat(parts) for name, parts in fields.items()}
    return {**joined, "cu_seqlens": lengths.cumsum(0).int()}


def forward_step(iterator: Iterator[Any] | None, model: Any) -> Any:
    """As pretrain_gpt.py's, from a sample to the loss function."""
    from megatron.core.utils import get_batch_on_this_cp_rank

    batch = gpt.received(iterator)
    length = len(batch["tokens"])
    whole = {name: batch[name].reshape(1, -1) for name in ("tokens", "labels", "loss_mask")}
    offsets = torch.tensor([0, length], dtype=torch.int32)
    local = get_batch_on_this_cp_rank(
        {**whole, "cu_seqlens": offsets, "local_cp_size": batch["local_cp_size"]},
        is_hybrid_cp=True,
        cp_group=parallel_state.get_context_parallel_group(),
        hybrid_cp_group_func=parallel_state.get_hybrid_data_context_parallel_groups,
    )
    packing = PackedSeqParams(
        *("thd", offsets, offsets, offsets, offsets, length, length),
        local_cp_size=int(batch["local_cp_size"]),
        cp_group=local.get("hybrid_cp_group"),
    )
    tokens, labels = local["tokens"], local["labels"]
    logits = model(tokens, torch.zeros_like(tokens), None, packed_seq_params=packing)
    logits = gpt.gather_from_tensor_model_parallel_region(logits)
    losses = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return losses.view_as(labels), partial(gpt.stock_loss_func, local["loss_mask"])


def train(sizes: dict[str, int], modes: tuple[str, ...]) -> dict[str, tuple[Gradient, float, float]]:
    """By mode: the gradient, the reported aggregated loss, and ``lm loss``."""
    gpt.initialize(**sizes, hybrid_context_parallel=True)
    config = {"hybrid_context_parallel": True, "max_seqlen_per_dp_cp_rank": PER_RANK}
    plain = gpt.build(per_token=True, **config)
    plain.position_embedding_type = "none"
    model = gpt.data_parallel(plain)
    ranks = parallel_state.get_data_parallel_world_size()
    of_rank = [*range(len(LENGTHS))][gpt.data_rank() :: ranks]
    found = {}
    for mode in modes:
        iterator = None
        if gpt.reads_data():
            items = iter([packs(of_rank)])
            iterator = data_schedule.HybridCPDataLoaderWrapper(items, model.config)
        hook = LossHook(aggregation(mode))
        reports = gpt.run_step(hook, model, iterator, 1, forward_step_func=forward_step)
        loss, lm_loss = (gpt.reported(reports, f"{x} loss") for x in (mode, "lm"))
        found[mode] = (gradients.of(model), loss, lm_loss)
    return found


@pytest.mark.parametrize(
    "ranks, sizes",
    [
        (4, {}),
        (4, {"cp": 2}),
        (2, {"cp": 2}),
        (4, {"tensor_model_parallel_size": 2}),
    ],
    ids=str,
)
def test_hybrid_context_parallelism_is_exact(
    ranks: int, sizes: dict[str, int], reference: Reference
) -> None:
    of_ranks = run_host_ranks(train, ranks, sizes, MODES)
    step = ((tuple(range(len(LENGTHS))),),)
    for mode in MODES:
        w = weights_of(mode, step)
        expected, loss = reference.gradient(w), reference.loss(w)
        lm_loss = reference.loss(weights_of("token_mean", step))
        for got, reported, reported_lm in (x[mode] for x in of_ranks):
            if "tensor_model_parallel_size" not in sizes:
                assert relative_error(got, expected) < EXACT, mode
            assert reported == pytest.approx(loss, rel=1e-6)
            assert reported_lm == pytest.approx(lm_loss, rel=1e-6)
