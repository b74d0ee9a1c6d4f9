"""Packing schedulers of Megatron's development branch: static and dynamic context parallelism.

Scheduler, data wrapper, split and schedule are Megatron's. `ci/next.sh` runs this on a checkout that
has them; no release does.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from torch import Tensor
from torch.nn.functional import cross_entropy, pad

from megatron_loss_agg import CPLayout
from megatron_loss_agg.mcore import LossHook
from tests.host import gpt, gradients
from tests.host.harness import EXACT, PP2, TP2, run_host_ranks
from tests.host.reference import Gradient, references
from tests.host.steps import LENGTHS, Sequence, aggregation, sequences, weights_of
from tests.host.test_dynamic_cp import ALL, MULTIPLE, losses_of

data_schedule = pytest.importorskip("megatron.core.datasets.data_schedule")
pytestmark = pytest.mark.skipif(
    not hasattr(parallel_state, "get_dynamic_data_context_parallel_groups"),
    reason="this Megatron has no dynamic context parallelism",
)

# Without ids of prompts and rollouts, which the wrapper drops.
MODES = ("token_mean", "sample_mean", "sample_sum", "constant", "sum", "custom")
DYNAMIC, BALANCED = "default_dynamic_cp", "dp_balanced"


def sample(sequence: Sequence) -> dict[str, Tensor]:
    """As a data set of variable lengths gives it; padding is not zero."""
    number = len(sequence.tokens)
    length = number + -number % MULTIPLE
    longer = partial(pad, pad=(0, length - number))
    mask = torch.tensor(sequence.sample.mask, dtype=torch.float32)
    return {
        "tokens": longer(sequence.tokens, value=3),
        "labels": longer(sequence.labels, value=5),
        "loss_mask": longer(mask),
        "position_ids": torch.arange(length),
        "original_seq_len": torch.tensor([number], dtype=torch.int32),
        "padded_seq_len": torch.tensor([length], dtype=torch.int32),
    }


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


def train(
    sizes: dict[str, int],
    scheduler: str,
    per_rank: int,
    expected: dict[str, tuple[Gradient, float]],
) -> None:
    split_without_transformer_engine()
    is_dynamic = scheduler == DYNAMIC
    gpt.initialize(**sizes, **({"dynamic_context_parallel": True} if is_dynamic else {}))
    plain = gpt.build(per_token=True)
    plain.position_embedding_type = "none"
    # Later than the configuration's check of Transformer Engine's version.
    plain.config.sequence_packing_scheduler = scheduler
    plain.config.dynamic_context_parallel = is_dynamic
    plain.config.max_seqlen_per_dp_cp_rank = per_rank
    model = gpt.data_parallel(plain)
    ranks = parallel_state.get_data_parallel_world_size()
    of_rank = [*range(len(LENGTHS))][gpt.data_rank() :: ranks]
    for mode, (gradient, loss) in expected.items():
        items = iter([[sample(sequences()[i])] for i in of_rank]) if gpt.reads_data() else None
        iterator, number, *_ = data_schedule.wrap_data_iterator(items, plain.config, len(of_rank))
        hook = LossHook(aggregation(mode), split="zigzag")
        reports = gpt.run_step(hook, model, iterator, number, forward_step_func=forward_step)
        assert gradients.error(model, gradient) < EXACT, mode
        if parallel_state.is_pipeline_last_stage():
            assert gpt.reported(reports, f"{mode} loss") == pytest.approx(loss, rel=1e-12)


@pytest.mark.parametrize(
    "ranks, sizes, scheduler, per_rank",
    [
        (4, {}, DYNAMIC, 8),
        (8, {"cp": 2}, DYNAMIC, 8),
        (4, TP2, DYNAMIC, 16),
        (4, PP2, DYNAMIC, 16),
        (4, {"cp": 2}, BALANCED, 16),
    ],
    ids=["dp4", "dp4-cp2", "tp2-dp2", "pp2-dp2", "balanced-cp2"],
)
def test_packs_of_megatrons_schedulers_are_exact(
    ranks: int, sizes: dict[str, int], scheduler: str, per_rank: int
) -> None:
    reference = references(losses_of)[""]
    weights = {mode: weights_of(mode, ALL) for mode in MODES}
    expected = {mode: (reference.gradient(w), reference.loss(w)) for mode, w in weights.items()}
    run_host_ranks(train, ranks, sizes, scheduler, per_rank, expected)
