"""On a device: the loss function waits for nothing, planning once, collectives get its tensors.

Proved without one. Fake tensors on CUDA have no values, so that whatever needs one raises, as does
a mix of devices. Those of `tests.device` have, so that numbers can be compared with the CPU's.
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
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_loss_agg import CPLayout, LossAggregation, Microbatch, StepPlan, Term
from tests import device
from tests.distributed import run_ranks

run = functools.partial(run_ranks, preload="megatron.core.utils")
needs_device = pytest.mark.skipif(
    not device.is_available(), reason="this torch takes no devices that are written in Python"
)
LENGTHS = ((3, 5, 4), (6, 2, 4))  # of the samples of each microbatch
N_MB = len(LENGTHS)
MULTIPLE = 4  # samples of packs are padded to twice the number of context-parallel ranks
ROW = 8


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


def whole_batch(i: int, layout: str) -> dict[str, Tensor]:
    """With tokens that tell splits apart, and masks of 0 and 1 in an irregular order."""
    lengths = LENGTHS[i]
    widths = [ROW if layout == "rows" else -(-n // MULTIPLE) * MULTIPLE for n in lengths]
    generator = torch.Generator().manual_seed(i)
    tokens = [torch.randint(2, 90, (w,), generator=generator) for w in widths]
    masks = [
        (torch.arange(w) < n) & (x % 3 > 0) for w, n, x in zip(widths, lengths, tokens, strict=True)
    ]
    batch = {
        "tokens": torch.stack(tokens) if layout == "rows" else torch.cat(tokens).unsqueeze(0),
        "loss_mask": (
            torch.stack(masks) if layout == "rows" else torch.cat(masks).unsqueeze(0)
        ).float(),
        "prompt_ids": torch.tensor([7, 7, i]),
    }
    if layout == "packs":
        batch["cu_seqlens"] = torch.tensor([0, *lengths]).cumsum(0).int()
        batch["cu_seqlens_padded"] = torch.tensor([0, *widths]).cumsum(0).int()
    return batch


class Model(torch.nn.Module):
    def __init__(self, per_token: bool) -> None:
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
    losses = {"policy": output, "kl": output.square()}
    mean = (weights["policy"] * output).sum()
    return losses, {"weighed": torch.stack([mean, torch.ones_like(mean)])}


class Stopped(Exception):
    """A schedule that ends in the middle."""


class Script:
    """A loop's own forward step and schedule, whose losses and masks lie somewhere.

    Args:
        place: puts a tensor there.
        around: of every call of a loss function.
        stops: the schedule raises `Stopped` in the end: checks then read nothing.
    """

    def __init__(
        self,
        layout: str,
        terms: int,
        place: Callable[[Tensor], Tensor] = lambda x: x,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
        stops: bool = False,
    ) -> None:
        self.layout, self.terms, self.place = layout, terms, place
        self.around, self.stops = around, stops
        self.returned: list[Any] = []

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
        self.returned = []
        for _ in range(num_microbatches):
            with torch.no_grad():
                losses, loss_func = forward_step_func(data_iterator, model)
                with self.around():
                    self.returned.append(loss_func(losses))
        if self.stops:
            raise Stopped
        return self.returned


def hook_of(terms: Any, options: dict[str, Any]) -> Any:
    """With all checks but the audit, which needs a model in one of Megatron's wrappers."""
    from megatron_loss_agg.mcore import Audit, Loop, read_batch, read_samples
    from megatron_loss_agg.mcore.extensions import with_checks
    from megatron_loss_agg.mcore.hook import Hook

    return Hook(
        terms,
        extensions=[x for x in with_checks([]) if not isinstance(x, Audit)],
        read_batch=read_samples if options.get("late") else read_batch,
        loop=Loop(of_megatron=True),
    )


def groups_of(cp: Any = None) -> Any:
    """All ranks are context-parallel."""
    one = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    return SimpleNamespace(dp=one, cp=cp or dist.new_group(), tp=one, pp=one)


def one_call(
    hook: Any,
    script: Script,
    model: Any,
    groups: Any,
    forward_only: bool = False,
    place: Callable[[Tensor], Tensor] = lambda x: x,
) -> list[Any]:
    """What the loss functions returned.

    Args:
        place: where the data iterator's tensors lie.
    """
    batches = [whole_batch(i, script.layout) for i in range(N_MB)]
    returned: list[Any] = hook.wrap(script.schedule)(
        forward_step_func=script.forward_step,
        data_iterator=iter([{key: place(x) for key, x in batch.items()} for batch in batches]),
        model=model,
        num_microbatches=N_MB,
        forward_only=forward_only,
        pg_collection=groups,
    )
    return returned


def on_fake_cuda(case: str) -> tuple[list[str], int]:
    """Waits of the loss functions of a second step, and how many losses it made on the device."""
    terms, layout, options = CASES[case]
    per_token, forward_only = (options.get(x, False) for x in ("per_token", "forward_only"))
    hook, model, groups = hook_of(terms, options), Model(per_token), groups_of()
    number = len(hook.terms)
    for evaluates in sorted({False, forward_only}):  # first steps, in which checks may wait
        one_call(hook, Script(layout, number), model, groups, evaluates)
    mode, seen = FakeTensorMode(allow_non_fake_inputs=True), device.WatchedFakes()

    def place(x: Tensor) -> Tensor:
        with mode:
            return mode.from_tensor(x.detach()).to("cuda")

    @contextmanager
    def around() -> Iterator[None]:
        with mode, seen:
            yield

    script = Script(layout, number, place, around, stops=True)
    with pytest.raises(Stopped):
        one_call(hook, script, model, groups, forward_only)
    made = [x for returned in script.returned for x in device.tensors_in(returned)]
    return seen.waits, sum(x.device.type == "cuda" for x in made)


@pytest.mark.parametrize("case", CASES)
def test_a_loss_function_needs_no_value_from_the_device(case: str) -> None:
    ((waits, made),) = run(on_fake_cuda, 1, case)
    assert waits == []
    assert made >= 2 * N_MB  # losses and reports


BOTH = f"cpu:gloo,{device.DEVICE.type}:{device.BACKEND}"


def on_device(case: str, read_on_device: bool, backend: str = device.BACKEND) -> dict[str, Any]:
    """Waits of a second step, by part, and whether two steps return what they do on the CPU."""
    terms, layout, options = CASES[case]
    per_token, forward_only = (options.get(x, False) for x in ("per_token", "forward_only"))
    model, hook = Model(per_token), hook_of(terms, options)
    number, groups = len(hook.terms), groups_of()
    steps = [*sorted({False, forward_only}), forward_only]
    wanted = [one_call(hook, Script(layout, number), model, groups, x) for x in steps]

    device.take()
    groups.cp = dist.new_group(backend=backend)
    hook, seen = hook_of(terms, options), device.Watched()
    planning, waits = [], []

    @contextmanager
    def around() -> Iterator[None]:
        before = len(seen.waits)
        yield
        waits[:] += seen.waits[before:]

    def place(x: Tensor) -> Tensor:
        return x.pin_memory().to(device.DEVICE, non_blocking=True)

    class Counting(Script):
        def schedule(self, **arguments: Any) -> Any:
            planning[:] = seen.waits
            waits.clear()
            return super().schedule(**arguments)

    found = []
    for evaluates in steps:
        with seen:
            seen.waits.clear()
            script = Counting(layout, number, place, around)
            read_to = place if read_on_device else (lambda x: x)
            found.append(one_call(hook, script, model, groups, evaluates, read_to))
    same = [
        torch.equal(x.cpu(), y)
        for x, y in zip(device.tensors_in(found), device.tensors_in(wanted), strict=True)
    ]
    collectives = [where for _, where in seen.collectives]
    return {"planning": planning, "loss": waits, "same": same, "collectives": collectives}


@needs_device
@pytest.mark.parametrize(("ranks", "read_on_device"), [(1, True), (2, False)])
@pytest.mark.parametrize("case", CASES)
def test_a_step_on_a_device_is_that_of_the_cpu_and_waits_while_it_plans_alone(
    case: str, ranks: int, read_on_device: bool
) -> None:
    for rank in run(on_device, ranks, case, read_on_device):
        assert rank["loss"] == []
        assert len(rank["planning"]) <= read_on_device
        assert all(rank["same"]) and len(rank["same"]) >= 2 * N_MB
        assert {*rank["collectives"]} <= {device.DEVICE.type}


@needs_device
@pytest.mark.parametrize("case", ["rows", "packs"])
def test_a_loss_function_sends_from_the_device_if_a_group_takes_both(case: str) -> None:
    for rank in run(on_device, 2, case, False, BOTH):
        assert rank["loss"] == []
        assert all(rank["same"])
        assert device.DEVICE.type in rank["collectives"]


def numbers_of(plan: Any) -> list[Any]:
    return [plan.counts, *(plan.coefficients(i).tolist() for i in range(N_MB))]


def over_groups(backend: str, places_on_device: bool) -> dict[str, Any]:
    """Of everything that ranks exchange: is it right, where its tensors were, and its waits."""
    from megatron_loss_agg.collectives import handed_on
    from megatron_loss_agg.report import Sum, reduce_reports

    rank = dist.get_rank()
    batches = [whole_batch((i + rank) % N_MB, "rows") for i in range(N_MB)]

    def step(place: Callable[[Tensor], Tensor]) -> list[Microbatch]:
        return [
            Microbatch(place(x["loss_mask"]), prompt_ids=place(x["prompt_ids"])) for x in batches
        ]

    def exchanged(group: Any, place: Callable[[Tensor], Tensor]) -> tuple[Any, ...]:
        plans = StepPlan.build_terms(TWO, step(place), group)
        counted = [numbers_of(plans[name]) for name in TWO]
        box = handed_on(lambda: (rank, counted), group, 1)
        total = place(torch.tensor(rank + 1.0))
        reports = [{"policy": Sum(total), "lm loss": torch.stack([total, total])}]
        return counted, box, reduce_reports(reports, group)

    wanted = exchanged(dist.group.WORLD, lambda x: x)
    device.take()
    group = dist.new_group(backend=backend)
    place = (lambda x: x.to(device.DEVICE)) if places_on_device else (lambda x: x)
    with device.Watched() as seen:
        found = exchanged(group, place)
    where = {device_type for _, device_type in seen.collectives}
    return {"same": found == wanted, "sender": found[1][0], "where": where, "waits": seen.waits}


@needs_device
@pytest.mark.parametrize("places_on_device", [False, True])
def test_ranks_exchange_tensors_on_the_device_that_their_backend_takes(
    places_on_device: bool,
) -> None:
    for rank in run(over_groups, 2, device.BACKEND, places_on_device):
        assert rank["same"] and rank["sender"] == 1
        assert rank["where"] == {device.DEVICE.type}


@needs_device
def test_a_group_for_both_exchanges_over_the_cpu_and_waits_for_no_kernel() -> None:
    for rank in run(over_groups, 2, BOTH, False):
        assert rank["same"] and rank["sender"] == 1
        assert rank["where"] == {"cpu"}
        assert rank["waits"] == []


def counting_group(gloo_beside: bool) -> tuple[bool, bool]:
    """Whether counts go over a group of their own, and whether it is gloo's."""
    from megatron.core import parallel_state

    from megatron_loss_agg.mcore.host import ParallelGroups

    parallel_state.initialize_model_parallel(create_gloo_process_groups=gloo_beside)
    group = ParallelGroups.of().dp
    is_own = group is not parallel_state.get_data_parallel_group()
    return is_own, gloo_beside and group is parallel_state.get_data_parallel_group_gloo()


@pytest.mark.parametrize("gloo_beside", [False, True])
def test_counts_go_over_the_host_s_own_gloo_group_if_it_has_one(gloo_beside: bool) -> None:
    assert {*run(counting_group, 2, gloo_beside)} == {(gloo_beside, gloo_beside)}
