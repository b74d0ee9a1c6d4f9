"""On a device: the loss function waits for nothing, planning seldom, collectives get its tensors.

Proved without one, on that of `tests.device`: it has values, so that numbers can be compared with
the CPU's, and every wait for it is noted. It has no backward pass, so a toy model and a schedule of
the loop's own run here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loss_agg import CPLayout, Microbatch, Term
from megatron_loss_agg.mcore import SampleLoss, TokenLoss, read_batch
from megatron_loss_agg.mcore.call import ProcessGroups  # what a collective shows of neither
from megatron_loss_agg.report import reduce_reports
from tests import device
from tests.distributed import run_ranks
from tests.host import parallel_state
from tests.host.cases import Batch, Case
from tests.host.harness import error_of
from tests.host.steps import aggregation

N_MB = 2
PLACES = (((0, 1), (2, 3, 4)), ((3, 6), (7, 8, 9)))
"""Samples of the microbatches, by data-parallel rank."""
BOTH = f"cpu:gloo,{device.DEVICE.type}:{device.BACKEND}"
Place = Callable[[Tensor], Tensor]
Seen = tuple[list[str], list[str]]
"""Waits, and the devices of collectives."""
TWO = {"policy": aggregation("prompt_mean"), "kl": Term(aggregation("token_mean"), multiplier=0.1)}


def long_pack(_: Batch, of_mb: tuple[int, ...], tokens: int = 2**15, mask: float = 0.1) -> Batch:
    """One sample of many equal fractions: added up in fp32 one by one, its mask is 3e-4 off."""
    starts = torch.tensor([0, tokens], dtype=torch.int32)
    rows = {"tokens": torch.ones(1, tokens), "loss_mask": torch.full((1, tokens), mask)}
    offsets = {"cu_seqlens": starts, "cu_seqlens_padded": starts}
    return {**rows, **offsets, "prompt_ids": torch.tensor([0])}


def gathered(whole_mask: Tensor, mask: Tensor) -> TokenLoss:
    return TokenLoss(as_it_is, whole_mask, gather=as_it_is)


def by_sample(whole_mask: Tensor, mask: Tensor) -> SampleLoss:
    return SampleLoss(lambda sums, lengths: sums / lengths, as_it_is, mask)


def read_sequences(batch: Batch) -> Microbatch:
    sequences = read_batch(batch)
    return Microbatch.of_samples(sequences.num_samples, sequences=sequences)


CASES = {
    "rows": Case("sample_mean", layout="bshd"),
    "rows-per-token": Case("prompt_mean", layout="bshd", per_token=True),
    "packs": Case("prompt_mean"),
    "packs-per-token": Case("sample_mean", per_token=True),
    "packs-token-mean": Case("token_mean"),
    "packs-of-one-sample": Case("prompt_mean", batch=long_pack),
    "packs-evaluation": Case("sample_mean", call={"forward_only": True}),
    "packs-of-two-terms": Case("", terms=TWO),
    "rows-of-two-terms": Case("", terms=TWO, layout="bshd", per_token=True),
    "custom": Case("custom", layout="bshd"),
    "gathered-packs": Case("prompt_mean", step=gathered),
    "gathered-rows": Case("sample_mean", layout="bshd", step=gathered),
    "losses-by-sample": Case("sample_mean", step=by_sample, hook={"read_batch": read_sequences}),
}


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


def two_losses(output: Tensor) -> dict[str, Tensor]:
    return {"policy": output, "kl": output.square()}


def weighed(losses: dict[str, Tensor], weights: dict[str, Tensor]) -> dict[str, Tensor]:
    mean = (weights["policy"] * losses["policy"]).sum()
    return {"weighed": torch.stack([mean, torch.ones_like(mean)])}


def groups_of(backend: str | None = None) -> Any:
    """Of two data-parallel ranks with two context-parallel ones each; or of one rank alone."""
    ranks = [*range(dist.get_world_size())]
    cp = min(2, len(ranks))

    def mine(*of_ranks: list[int]) -> Any:
        made = [(x, dist.new_group(x, backend=backend)) for x in of_ranks]
        return next(group for x, group in made if dist.get_rank() in x)

    one = mine(*([rank] for rank in ranks))
    split = mine(*(ranks[i : i + cp] for i in range(0, len(ranks), cp)))
    return SimpleNamespace(dp=mine(*(ranks[i::cp] for i in range(cp))), cp=split, tp=one, pp=one)


def seen() -> Seen:
    """Since the last call."""
    found = [*device.waits], [*device.collectives]
    device.waits.clear()
    device.collectives.clear()
    return found


def as_it_is(x: Tensor) -> Tensor:
    return x


def to_device(x: Tensor) -> Tensor:
    return x.pin_memory().to(device.DEVICE, non_blocking=True)


def several_steps(
    case: Case, groups: Any, read: Place = as_it_is, place: Place = as_it_is
) -> tuple[list[Any], list[Any], Seen, list[Seen]]:
    """The results of the loss functions, the last step's reports, and its waits: first, planning.

    ``read`` puts the data iterator's tensors somewhere, and ``place`` losses and masks.
    """
    case = replace(case, places=PLACES, hook={"aggregate_evaluation": True, **case.hook})
    model, returned = Model(case.per_token), []
    planning: Seen = [], []
    of_losses: list[Seen] = []

    def forward_step(data_iterator: Iterator[Any], model: Any) -> tuple[Tensor, Any]:
        batch = next(data_iterator)
        size, rank = groups.cp.size(), groups.cp.rank()
        packed, layout = None, CPLayout.bshd(batch["tokens"].shape[1], size, rank)
        if case.layout == "thd":
            starts = batch["cu_seqlens_padded"]
            packed = SimpleNamespace(qkv_format="thd", cu_seqlens_q=starts)
            layout = CPLayout.thd(starts, size, rank)
        tokens, mask = (layout.shard(batch[key]) for key in ("tokens", "loss_mask"))
        losses, mask = place(model(tokens, packed)), place(mask)
        if case.step:
            return losses, case.step(place(batch["loss_mask"]), mask)
        if case.terms:
            return losses, TokenLoss(two_losses, mask, report=weighed)
        return losses, functools.partial(stock_loss_func, mask)

    @torch.no_grad()
    def schedule(*, forward_step_func: Any, data_iterator: Any, model: Any, **_: Any) -> list[Any]:
        nonlocal planning
        planning, of_step = seen(), []
        of_losses.clear()
        for _ in range(N_MB):
            losses, loss_func = forward_step_func(data_iterator, model)
            seen()
            of_step.append(loss_func(losses))
            of_losses.append(seen())
        return of_step

    hook: Any = case.new_hook()
    hook.measure_scaling = lambda *_: None  # which needs a backward pass; all other checks are on
    run = hook.wrap(schedule)
    # The first call that trains, and the first that evaluates, is checked more.
    for forward_only in (False, *["forward_only" in case.call] * 2):
        batches = [
            {k: read(x.float() if k == "loss_mask" else x) for k, x in batch.items()}
            for batch in case.data(groups.dp.rank())
        ]
        seen()
        returned.append(
            run(
                forward_step_func=forward_step,
                data_iterator=iter(batches),
                model=model,
                num_microbatches=N_MB,
                forward_only=forward_only,
                pg_collection=groups,
            )
        )
    reports = reduce_reports([report for *_, report in returned[-1]], groups.dp)
    return returned, reports, planning, of_losses


def on_device(read_on_device: bool, backend: str) -> dict[str, Any]:
    """By case: whether it is the CPU's; and waits and collectives of the last step, by part."""
    groups = groups_of()
    wanted = {name: several_steps(case, groups) for name, case in CASES.items()}
    device.take()  # for good
    groups, found = groups_of(backend), {}
    read = to_device if read_on_device else as_it_is
    with device.Watch():
        for name, case in CASES.items():
            returned, reports, *waited = several_steps(case, groups, read, to_device)
            expected, expected_reports, *_ = wanted[name]
            pairs = zip(device.tensors_in(returned), device.tensors_in(expected), strict=True)
            same = [torch.equal(x.cpu(), y) for x, y in pairs]
            found[name] = [*same, reports == expected_reports], *waited
    return found


@functools.cache
def ranks_on_device(ranks: int, backend: str) -> list[dict[str, Any]]:
    return run_ranks(on_device, ranks, ranks == 1, backend, preload="megatron.core.utils")


@pytest.mark.parametrize("ranks, backend", [(1, device.BACKEND), (4, device.BACKEND), (4, BOTH)])
@pytest.mark.parametrize("case", CASES)
def test_a_step_on_a_device_is_that_of_the_cpu_and_waits_while_it_plans_alone(
    case: str, ranks: int, backend: str
) -> None:
    for rank in ranks_on_device(ranks, backend):
        same, (waits, where), of_losses = rank[case]
        assert all(same) and len(same) >= 2 * N_MB
        # Counts go over the CPU if they can, and wait for no kernel; or else there and back.
        assert {*where} <= {"cpu" if backend == BOTH else device.DEVICE.type}
        copies = 0 if backend == BOTH else 2 * len(where)
        assert len(waits) <= (1 if ranks == 1 else copies)  # one rank's batches are on the device
        for waits, where in of_losses:
            assert waits == []
            assert {*where} <= {device.DEVICE.type}


def losses_of_long_packs() -> list[float]:
    (first, *_), *_ = several_steps(Case("sample_mean", batch=long_pack), groups_of())
    return [loss.item() for loss, *_ in first]


def test_a_pack_of_many_equal_fractions_is_summed_exactly() -> None:
    """Or else it would be taken for another than was counted."""
    (losses,) = run_ranks(losses_of_long_packs, 1, preload="megatron.core.utils")
    assert sum(losses) / N_MB == pytest.approx(1.0, rel=1e-6)


def error_of_a_lost_token() -> str | None:
    batch = functools.partial(long_pack, tokens=2**17, mask=1.0)
    return error_of(several_steps, Case("sample_mean", batch=batch), groups_of(), place=lost_token)


def lost_token(x: Tensor) -> Tensor:
    return x * (torch.arange(x.numel()) > 0)


def test_one_token_among_many_is_no_rounding() -> None:
    (error,) = run_ranks(error_of_a_lost_token, 1, preload="megatron.core.utils")
    assert "its mask sum of a sample must be 131072, got 131071." in str(error)


def counting_group(gloo_beside: bool) -> tuple[bool, bool]:
    """Whether counts go over a group of their own, and whether it is gloo's."""
    parallel_state.initialize_model_parallel(create_gloo_process_groups=gloo_beside)
    group = ProcessGroups.of().dp
    is_own = group is not parallel_state.get_data_parallel_group()
    return is_own, gloo_beside and group is parallel_state.get_data_parallel_group_gloo()


@pytest.mark.parametrize("gloo_beside", [False, True])
def test_counts_go_over_the_hosts_own_gloo_group_if_it_has_one(gloo_beside: bool) -> None:
    found = run_ranks(counting_group, 2, gloo_beside, preload="megatron.core.utils")
    assert found == [(gloo_beside, gloo_beside)] * 2
