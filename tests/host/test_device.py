"""On a device: the loss function waits for nothing, planning once, collectives get its tensors.

Proved without one, on that of `tests.device`: it has values, so that numbers can be compared with
the CPU's, and every wait for it is counted. It has no backward pass, so a toy model and a schedule
of the loop's own run here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loss_agg import CPLayout, LossAggregation, Microbatch, StepPlan, Term
from tests import device
from tests.distributed import run_ranks
from tests.host.steps import batches

pytestmark = pytest.mark.host

N_MB = 2
BOTH = f"cpu:gloo,{device.DEVICE.type}:{device.BACKEND}"
Place = Callable[[Tensor], Tensor]


def square_mask(plan: Any, i: int) -> Tensor:
    weights: Tensor = plan.microbatches[i].loss_mask ** 2 / plan.counts.samples
    return weights


AGG = {mode: LossAggregation(mode=mode) for mode in ("token_mean", "sample_mean", "prompt_mean")}
CUSTOM = LossAggregation(mode="custom", function=square_mask)
TWO = {"policy": AGG["prompt_mean"], "kl": Term(AGG["token_mean"], coefficient=0.1)}
# What is aggregated, the layout of batches, and options of `one_call`.
CASES: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "rows": (AGG["sample_mean"], "rows", {}),
    "rows-per-token": (AGG["prompt_mean"], "rows", {"per_token": True}),
    "packs": (AGG["prompt_mean"], "packs", {}),
    "packs-per-token": (AGG["sample_mean"], "packs", {"per_token": True}),
    "packs-token-mean": (AGG["token_mean"], "packs", {}),
    "packs-evaluation": (AGG["sample_mean"], "packs", {"forward_only": True}),
    "packs-of-two-terms": (TWO, "packs", {}),
    "rows-of-two-terms": (TWO, "rows", {"per_token": True}),
    "custom": (CUSTOM, "rows", {}),
    "late": (AGG["sample_mean"], "rows", {"late": True}),
    "late-token-mean": (AGG["token_mean"], "rows", {"late": True, "per_token": True}),
}


def as_it_is(x: Tensor) -> Tensor:
    return x


def data(layout: str, rank: int = 0) -> list[dict[str, Tensor]]:
    """Batches of a step, of other samples on another rank; with masks that have irregular gaps."""
    places = ((0, 1), (2, 3, 4)) if rank == 0 else ((3, 6), (7, 8, 9))
    return [
        {**batch, "loss_mask": batch["loss_mask"].float()}
        for batch in batches(places, "thd" if layout == "packs" else "bshd")
    ]


class Model(torch.nn.Module):
    def __init__(self, per_token: bool = False) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.config = SimpleNamespace(calculate_per_token_loss=per_token)

    def forward(self, tokens: Tensor, packed_seq_params: Any = None) -> Tensor:
        return tokens * self.scale


def stock_loss_func(loss_mask: Tensor, output: Tensor) -> tuple[Tensor, Tensor, Any]:
    loss = torch.sum(output.reshape(-1) * loss_mask.reshape(-1))
    tokens = loss_mask.sum().to(torch.int)
    return loss, tokens, {"lm loss": torch.cat([loss.view(1), tokens.view(1)])}


def two_losses(output: Tensor, weights: dict[str, Tensor]) -> Any:
    mean = (weights["policy"] * output).sum()
    report = {"weighed": torch.stack([mean, torch.ones_like(mean)])}
    return {"policy": output, "kl": output.square()}, report


class Script:
    """A loop's own forward step and schedule.

    Args:
        place: puts losses and masks somewhere.
        around: of every call of a loss function.
        before: called at the start of the schedule.
    """

    def __init__(
        self,
        layout: str,
        terms: int,
        place: Place = as_it_is,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        self.layout, self.terms, self.place = layout, terms, place
        self.around, self.before = around, before

    def forward_step(self, data_iterator: Iterator[Any], model: Any) -> tuple[Tensor, Any]:
        from megatron_loss_agg.mcore import TokenLoss

        batch = next(data_iterator)
        size, rank = dist.get_world_size(), dist.get_rank()  # of context-parallel ranks
        packed, layout = None, CPLayout.bshd(batch["tokens"].shape[1], size, rank)
        if self.layout == "packs":
            starts = batch["cu_seqlens_padded"]
            packed = SimpleNamespace(qkv_format="thd", cu_seqlens_q=starts)
            layout = CPLayout.thd(starts, size, rank)
        tokens, mask = (layout.shard(batch[key]) for key in ("tokens", "loss_mask"))
        losses, mask = self.place(model(tokens, packed)), self.place(mask)
        if self.terms > 1:
            return losses, TokenLoss(two_losses, mask, takes_weights=True)
        return losses, functools.partial(stock_loss_func, mask)

    def schedule(
        self,
        *,
        forward_step_func: Any,
        data_iterator: Any,
        model: Any,
        num_microbatches: int,
        forward_only: bool = False,
        pg_collection: Any = None,
    ) -> list[Any]:
        self.before()
        returned = []
        for _ in range(num_microbatches):
            with torch.no_grad():
                losses, loss_func = forward_step_func(data_iterator, model)
                with self.around():
                    returned.append(loss_func(losses))
        return returned


def hook_of(terms: Any, late: bool = False, **_: Any) -> Any:
    """With all checks but the audit, which needs a model in one of Megatron's wrappers."""
    from megatron_loss_agg.mcore import Audit, Loop, LossHook, read_batch, read_samples

    class Unmeasured(Audit):
        def start(self, call: Any) -> None:
            """The model is in none of Megatron's wrappers."""

    return LossHook(
        terms,
        extensions=[Unmeasured()],
        read_batch=read_samples if late else read_batch,
        loop=Loop(of_megatron=True),
    )


def groups_of(cp: Any = None) -> Any:
    """All ranks are context-parallel."""
    one = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    return SimpleNamespace(dp=one, cp=cp or dist.new_group(), tp=one, pp=one)


def one_call(
    hook: Any, script: Script, model: Any, groups: Any, evaluates: bool, place: Place = as_it_is
) -> list[Any]:
    """What the loss functions returned; ``place``: where the data iterator's tensors lie."""
    step = [{key: place(x) for key, x in batch.items()} for batch in data(script.layout)]
    returned: list[Any] = hook.wrap(script.schedule)(
        forward_step_func=script.forward_step,
        data_iterator=iter(step),
        model=model,
        num_microbatches=N_MB,
        forward_only=evaluates,
        pg_collection=groups,
    )
    return returned


def on_device(read_on_device: bool, backend: str) -> dict[str, dict[str, Any]]:
    """By case: waits of a second step, by part; and whether both return what they do on the CPU."""
    groups, wanted = groups_of(), {}

    def steps(case: str) -> tuple[Any, Model, list[bool], int]:
        terms, _, options = CASES[case]
        evaluates = options.get("forward_only", False)
        model, hook = Model(options.get("per_token", False)), hook_of(terms, **options)
        return hook, model, [*sorted({False, evaluates}), evaluates], len(hook.terms)

    for case, (_, layout, _) in CASES.items():
        hook, model, kinds, number = steps(case)
        wanted[case] = [one_call(hook, Script(layout, number), model, groups, x) for x in kinds]
    device.take()  # for good
    groups.cp = dist.new_group(backend=backend)
    seen = device.Watched()
    planning: list[str] = []
    waits: list[str] = []

    @contextmanager
    def around() -> Iterator[None]:
        before = len(seen.waits)
        yield
        waits[:] += seen.waits[before:]

    def begins() -> None:
        planning[:] = seen.waits
        waits.clear()

    def place(x: Tensor) -> Tensor:
        return x.pin_memory().to(device.DEVICE, non_blocking=True)

    found = {}
    for case, (_, layout, _) in CASES.items():
        hook, model, kinds, number = steps(case)
        seen.collectives.clear()
        got = []
        for evaluates in kinds:
            with seen:
                seen.waits.clear()
                script = Script(layout, number, place, around, begins)
                read_to = place if read_on_device else as_it_is
                got.append(one_call(hook, script, model, groups, evaluates, read_to))
        pairs = zip(device.tensors_in(got), device.tensors_in(wanted[case]), strict=True)
        same = [torch.equal(x.cpu(), y) for x, y in pairs]
        where = {x for _, x in seen.collectives}
        found[case] = {"plan": [*planning], "loss": [*waits], "same": same, "where": where}
    return found


@functools.cache
def ranks_on_device(ranks: int, backend: str) -> list[dict[str, dict[str, Any]]]:
    return run_ranks(on_device, ranks, ranks == 1, backend, preload="megatron.core.utils")


@pytest.mark.parametrize("ranks, backend", [(1, device.BACKEND), (2, device.BACKEND), (2, BOTH)])
@pytest.mark.parametrize("case", CASES)
def test_a_step_on_a_device_is_that_of_the_cpu_and_waits_while_it_plans_alone(
    case: str, ranks: int, backend: str
) -> None:
    for rank in ranks_on_device(ranks, backend):
        found = rank[case]
        assert found["loss"] == []
        assert all(found["same"]) and len(found["same"]) >= 2 * N_MB
        if backend == BOTH:  # sends from the device in a loss, and over the CPU while it plans
            assert case not in ("rows", "packs") or device.DEVICE.type in found["where"]
        else:
            assert found["where"] <= {device.DEVICE.type}
            assert len(found["plan"]) <= (ranks == 1)  # whose batches are on the device


def over_groups(backend: str, places_on_device: bool) -> dict[str, Any]:
    """Of a step's counts and reports: are they right, where tensors were sent, and the waits."""
    from megatron_loss_agg.report import Sum, reduce_reports

    rank = dist.get_rank()

    def exchanged(group: Any, place: Place) -> tuple[Any, ...]:
        step = [
            Microbatch(place(x["loss_mask"]), prompt_ids=place(x["prompt_ids"]))
            for x in data("rows", rank)
        ]
        plans = [StepPlan.build(agg, step, group) for agg in AGG.values()]
        counted = [(p.counts, *(p.coefficients(i).tolist() for i in range(N_MB))) for p in plans]
        total = place(torch.tensor(rank + 1.0))
        reports = [{"policy": Sum(total), "lm loss": torch.stack([total, total])}]
        return counted, reduce_reports(reports, group)

    wanted = exchanged(dist.group.WORLD, as_it_is)
    device.take()
    group = dist.new_group(backend=backend)
    with device.Watched() as seen:
        place = (lambda x: x.to(device.DEVICE)) if places_on_device else as_it_is
        same = exchanged(group, place) == wanted
    return {"same": same, "where": {x for _, x in seen.collectives}, "waits": seen.waits}


@pytest.mark.parametrize("backend, places", [(device.BACKEND, 0), (device.BACKEND, 1), (BOTH, 0)])
def test_ranks_exchange_over_the_cpu_if_they_can_and_wait_for_no_kernel(
    backend: str, places: int
) -> None:
    for rank in run_ranks(over_groups, 2, backend, bool(places), preload="megatron.core.utils"):
        assert rank["same"]
        assert rank["where"] == {"cpu" if backend == BOTH else device.DEVICE.type}
        assert backend != BOTH or rank["waits"] == []


LONG = 2**15


def one_long_pack() -> list[Any]:
    """A step with one sample of many equal fractions, and what its loss functions return."""
    batch = {"tokens": torch.ones(1, LONG), "loss_mask": torch.full((1, LONG), 0.1)}
    batch["cu_seqlens"] = batch["cu_seqlens_padded"] = torch.tensor([0, LONG], dtype=torch.int32)
    script = Script("packs", 1)
    returned: list[Any] = hook_of(AGG["sample_mean"]).wrap(script.schedule)(
        forward_step_func=script.forward_step,
        data_iterator=iter([batch]),
        model=Model(),
        num_microbatches=1,
        pg_collection=groups_of(),
    )
    return [x.item() for x in device.tensors_in(returned[0]) if not x.dim()]


def test_a_pack_of_many_equal_fractions_is_summed_exactly() -> None:
    """Added up one by one in fp32, its mask is 3e-4 off, and would be taken for another."""
    (found,) = run_ranks(one_long_pack, 1, preload="megatron.core.utils")
    assert found[0] == pytest.approx(1.0, rel=1e-6)


def counting_group(gloo_beside: bool) -> tuple[bool, bool]:
    """Whether counts go over a group of their own, and whether it is gloo's."""
    from megatron.core import parallel_state

    from megatron_loss_agg.mcore.host import ParallelGroups  # what a collective shows of neither

    parallel_state.initialize_model_parallel(create_gloo_process_groups=gloo_beside)
    group = ParallelGroups.of().dp
    is_own = group is not parallel_state.get_data_parallel_group()
    return is_own, gloo_beside and group is parallel_state.get_data_parallel_group_gloo()


@pytest.mark.parametrize("gloo_beside", [False, True])
def test_counts_go_over_the_hosts_own_gloo_group_if_it_has_one(gloo_beside: bool) -> None:
    found = run_ranks(counting_group, 2, gloo_beside, preload="megatron.core.utils")
    assert found == [(gloo_beside, gloo_beside)] * 2
