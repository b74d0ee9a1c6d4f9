"""``--overlap-moe-expert-parallel-comm``: Megatron calls the layers by a plan, and not the model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from megatron_loss_agg import Microbatch
from megatron_loss_agg.mcore import LossHook
from megatron_loss_agg.mcore.parts.routers import aggregate_routers
from tests.host import gpt, gradients
from tests.host.harness import EP2, EXACT, MOE, error_of, run_host_ranks
from tests.host.reference import Gradient, reference
from tests.host.steps import MODES, N_MB, PLACES, aggregation, batches, weights_of

FLAG = "overlap_moe_expert_parallel_comm"


def forward_step(iterator: Any, model: Any, return_schedule_plan: bool = False) -> Any:
    """As pretrain_gpt.py's."""
    tokens, labels, mask, packing = gpt.local_batch(iterator)
    call: Callable[..., Any] = model.build_schedule_plan if return_schedule_plan else model
    output = call(
        tokens,
        gpt.positions_like(tokens),
        None,
        labels=labels,
        packed_seq_params=packing,
        loss_mask=mask,
    )
    return output, partial(gpt.stock_loss_func, mask)


def moe_model() -> Any:
    gpt.initialize(**EP2)
    model = gpt.data_parallel(gpt.build(per_token=True, **MOE))
    assert hasattr(model.config, FLAG)
    setattr(model.config, FLAG, True)  # later than its check that the model is of half precision
    return model


def as_one_row(batch: dict[str, Any]) -> Microbatch:
    """A pack that is read as a row."""
    return Microbatch(batch["loss_mask"], prompt_ids=batch["prompt_ids"][:1])


def train(expected: dict[str, Gradient]) -> list[str | None]:
    model, places = moe_model(), PLACES[2]
    for layout in ("bshd", "thd"):
        for mode, gradient in expected.items():
            hook = LossHook(aggregation(mode))
            for _ in range(2):
                data = batches(places[gpt.data_rank()], layout)
                gpt.run_step(hook, model, data, N_MB, forward_step_func=forward_step)
                assert gradients.error(model, gradient) < EXACT, (layout, mode)

    def refused(hook: LossHook) -> str | None:
        data = batches(places[gpt.data_rank()], "thd")
        return error_of(gpt.run_step, hook, model, data, N_MB, forward_step_func=forward_step)

    aggregated = aggregation("prompt_mean")
    misread = LossHook(aggregated, read_batch=as_one_row)
    return [refused(misread), refused(LossHook(aggregated, wrappers=[aggregate_routers]))]


def test_a_schedule_of_plans_is_exact_and_its_packs_are_checked() -> None:
    places = PLACES[2]
    expected = {m: reference("moe").gradient(weights_of(m, places)) for m in MODES}
    for packs, routers in run_host_ranks(train, 2, expected):
        assert "DataError: a batch of packed sequences must have 'cu_seqlens'" in str(packs)
        assert "HostError: --loss-aggregation-moe whole" in str(routers)
        assert "needs the model's own forward pass" in str(routers)
