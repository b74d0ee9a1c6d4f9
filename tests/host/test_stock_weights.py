"""Stock Megatron's weights, as ``explain --data`` has them, against gradients without a hook."""

from __future__ import annotations

import math

import pytest

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
    cells = Cells.read(rows, len(rows), cp_size)
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


def test_short_chats_in_long_rows_halve_the_gradient() -> None:
    topology = TOPOLOGIES["cp2"]
    stock = Case("sample_mean", layout="bshd", places=SHORT_CHATS, hooked=False)
    ours = Case("sample_mean", layout="bshd", places=SHORT_CHATS)
    assert explained(stock, topology)[1] == [0.5]
    mean = weights_of("sample_mean", SHORT_CHATS)
    half = [(i, [w / 2 for w in weights]) for i, weights in mean]
    gradients = {stock: reference().gradient(half), ours: reference().gradient(mean)}
    assert_exact(topology, [stock, ours], lambda case: (gradients[case], {}))
