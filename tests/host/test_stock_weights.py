"""Stock Megatron's weights, as ``explain --data`` has them, against gradients without a hook."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from megatron_loss_agg import Microbatch
from megatron_loss_agg.explain.stock import BatchFlags, Cells, StockRun
from tests.host.cases import Case, assert_exact
from tests.host.harness import TOPOLOGIES, Topology
from tests.host.reference import Gradient, reference
from tests.host.steps import PLACES, SHORT, Weights, sequences, weights_of

ONE_BY_ONE = (((0,), (1,), (5,), (2,)), ((3,), (4,), (6,), (7,)))
# Samples of at most 6 tokens in rows of 24: zigzag has them all on the first of two ranks.
SHORT_CHATS = (((1,), (3,), (7,), (9,)),)


def explained(case: Case, topology: Topology) -> tuple[Weights, list[float]]:
    """Weights of tokens, and the sums of a step's weights, by ``explain``."""
    microbatches = [batch for rank in range(len(case.places)) for batch in case.data(rank)]
    rows = [
        Microbatch(batch["loss_mask"][r : r + 1], batch.get("cu_seqlens_padded"))
        for batch in microbatches
        for r in range(len(batch["loss_mask"]))
    ]
    cp_size = topology.sizes.get("cp", 1)
    flags = BatchFlags(
        micro_batch_size=len(rows) // len(microbatches),
        global_batch_size=len(rows),
        context_parallel_size=cp_size,
        calculate_per_token_loss=case.per_token,
    )
    cells = Cells.read(rows, flags)
    run = StockRun.weigh(flags, cells)
    places = zip(cells.sample_C.tolist(), cells.rank_C.tolist(), strict=True)
    all_tokens = float(cells.tokens_S.sum())
    weight_at = dict(zip(places, (run.weight_C / all_tokens).tolist(), strict=True))
    order = [i for rank in case.places for of_mb in rank for i in of_mb]
    chosen, weights = sequences(case.masks), []
    for s, i in enumerate(order):
        mask = chosen[i].sample.mask
        width = len(rows[s].loss_mask[0]) if case.layout == "bshd" else -(-len(mask) // 4) * 4
        chunks = [t * 2 * cp_size // width for t in range(len(mask))]
        ranks = [min(chunk, 2 * cp_size - 1 - chunk) for chunk in chunks]
        # A rank without a token of the sample has no cell of it.
        pairs = zip(mask, ranks, strict=True)
        weights.append((i, [m * weight_at.get((s, rank), 0) for m, rank in pairs]))
    return weights, run.sum_N.tolist()


# Rows alone, two rows a microbatch, and packs.
LAYOUTS = (("bshd", ONE_BY_ONE), ("bshd", SHORT), ("thd", PLACES[2]))


@pytest.mark.parametrize("name", ["dp2", "dp2-cp2"])
def test_the_gradient_of_stock_megatron_is_that_of_the_weights(name: str) -> None:
    cases = [
        Case(layout=layout, places=places, masks=masks, per_token=per_token, hooked=False)
        for layout, places in LAYOUTS
        for masks in ("01", "fractional")
        for per_token in (False, True)
    ]

    def expected(case: Case) -> tuple[Gradient, dict[str, float]]:
        weights, (total,) = explained(case, TOPOLOGIES[name])
        assert total == pytest.approx(math.fsum(w for _, ws in weights for w in ws), rel=1e-14)
        return reference().gradient(weights), {}

    assert_exact(TOPOLOGIES[name], cases, expected)


def with_upstream_fix(hook: Any, model: Any, step: Callable[[int], Any]) -> Any:
    """The step of `SHORT_CHATS` where Megatron divides by the tokens of all context-parallel ranks.

    This is how https://github.com/NVIDIA/Megatron-LM/pull/7513 describes itself: losses with a count
    are divided by that of the whole sequence, and multiplied by the ranks that DDP averages over.
    """
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import schedules

    stock, group = schedules.forward_step_calc_loss, parallel_state.get_context_parallel_group()

    def fixed(model: Any, output: Any, loss_func: Any, *args: Any, **kwargs: Any) -> Any:
        def whole(output: Any) -> tuple[Any, ...]:
            loss, *counts, report = loss_func(output)
            if not counts:
                return loss, report
            (tokens,) = (count.clone() for count in counts)
            dist.all_reduce(tokens, group=group)
            return loss * group.size(), tokens, report

        return stock(model, output, whole, *args, **kwargs)

    with patch.object(schedules, "forward_step_calc_loss", fixed):
        return step(len(SHORT_CHATS[0]))


def test_short_chats_in_long_rows_halve_the_gradient_without_upstreams_fix() -> None:
    topology = TOPOLOGIES["cp2"]
    stock = Case("sample_mean", layout="bshd", places=SHORT_CHATS, hooked=False)
    fixed, ours = replace(stock, run=with_upstream_fix), replace(stock, hooked=True)
    both = replace(ours, run=with_upstream_fix)
    # As `explain` has it: with the fix, parts are those of one context-parallel rank.
    assert explained(stock, topology)[1] == [0.5] and explained(stock, TOPOLOGIES["dp1"])[1] == [1]
    mean = weights_of("sample_mean", SHORT_CHATS)
    half = [(i, [w / 2 for w in weights]) for i, weights in mean]
    whole = reference().gradient(mean)
    gradients = {stock: reference().gradient(half), fixed: whole, ours: whole, both: whole}
    assert_exact(topology, [*gradients], lambda case: (gradients[case], {}))
