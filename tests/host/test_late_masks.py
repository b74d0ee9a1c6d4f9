"""Masks that the model makes: gradients and reports are exact, the rest is refused by name."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loss_agg import Microbatch
from megatron_loss_agg.mcore import LateMicrobatch, LossHook
from tests.host.harness import EXACT, TOPOLOGIES, build_chunks, data_for, error_of, run_host_ranks
from tests.host.reference import reference
from tests.host.steps import PLACES, Counted, aggregation, weights_of

pytestmark = pytest.mark.host

ROWS = {"sum": {"divisor": 3.0}, "constant": {}, "sample_sum": {}, "microbatch_mean": {}}
ALWAYS = {**ROWS, "sample_mean": {}}
# By topology: layouts; a pack's samples are not told apart, as `sample_mean` needs.
LAYOUTS = {"dp2": ("bshd", "thd"), "cp2": ("bshd", "thd"), "tp2-sp": ("bshd",), "pp2": ("bshd",)}
CASES = [
    (topology, layout, mode, masks, per_token)
    for topology, layouts in LAYOUTS.items()
    for layout, per_token in product(layouts, (False, True))
    for mode in [*(ALWAYS if layout == "bshd" else ROWS), *["token_mean"] * per_token]
    for masks in ["01" if mode == "token_mean" else "fractional"]
]


def hidden(data: Iterator[Any] | None) -> Iterator[Any] | None:
    """Batches whose mask the hook cannot read."""
    return data and ({**b, "made": b["loss_mask"], "loss_mask": None} for b in data)


def forward_step(data_iterator: Any, model: Any) -> Any:
    """Shows the mask to the loss function alone."""
    from tests.host import gpt

    batch = data_iterator and next(data_iterator)
    return gpt.forward_step(batch and iter([{**batch, "loss_mask": batch["made"]}]), model)


def count(batch: Any) -> LateMicrobatch:
    offsets = batch.get("cu_seqlens")
    return LateMicrobatch(len(batch["tokens"]) if offsets is None else len(offsets) - 1)


def step(chunks: Any, data: Any, hook: LossHook, number: int = 4, **options: Any) -> Any:
    from tests.host import gpt

    return gpt.run_step(
        hook, chunks, hidden(data), number, **{"forward_step_func": forward_step, **options}
    )


def places_of(topology: str) -> Any:
    return PLACES[TOPOLOGIES[topology].data_parallel_size]


def facts_of_rank(topology: str, cases: list[Any]) -> dict[Any, Any]:
    """By case: the error of the gradient, and what was reported."""
    from tests.host import gpt, gradients

    shape, places, found = TOPOLOGIES[topology], places_of(topology), {}
    gpt.initialize(**shape.sizes)
    models = {flag: build_chunks(shape, flag) for flag in (False, True)}
    for (layout, mode, masks, per_token), expected in cases:
        chunks, data = models[per_token], data_for(shape, places, layout, masks)
        read = {"read_batch": count} if layout == "thd" else {}
        agg = aggregation(mode, **ALWAYS.get(mode, {}))
        reports = step(chunks, data, LossHook(agg, mask="model", **read))
        names = ("lm loss", f"{mode} loss") if reports else ()
        found[layout, mode, masks, per_token] = (
            gradients.error(chunks, expected),
            {name: gpt.reported(reports, name) for name in names},
        )
    return found


def weights(topology: str, mode: str, masks: str) -> Any:
    return weights_of(mode, places_of(topology), masks, **ALWAYS.get(mode, {}))


@functools.cache
def facts(topology: str) -> list[dict[Any, Any]]:
    cases = [
        (case, reference().gradient(weights(topology, *case[1:3])))
        for of, *rest in CASES
        if of == topology and (case := tuple(rest))
    ]
    return run_host_ranks(facts_of_rank, TOPOLOGIES[topology].world_size, topology, cases)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_the_gradient_and_the_reports_are_those_of_the_whole_step(case: Any) -> None:
    topology, layout, mode, masks, per_token = case
    for rank in facts(topology):
        error, reports = rank[layout, mode, masks, per_token]
        assert error <= EXACT
        for name, value in reports.items():
            shown = "token_mean" if name == "lm loss" else mode
            expected = reference().loss(weights(topology, shown, masks))
            assert value == pytest.approx(expected, rel=1e-13)


def llava_step(per_token: bool, mode: str) -> tuple[float, float, float]:
    """The error of the gradient of a LLaVA, and of both reports, against the formula."""
    from tests.host import gpt, llava

    gpt.initialize()
    batches, number, (rank, ranks) = 4, 2, (dist.get_rank(), dist.get_world_size())
    model = llava.build(per_token)
    ddp = gpt.data_parallel(model)
    mine = range(rank * number, (rank + 1) * number)
    agg = aggregation(mode, **ALWAYS.get(mode, {}))
    with gpt.KeepDouble():
        reports = gpt.run_step(
            LossHook(agg, mask="model"),
            ddp,
            iter([llava.batch(i) for i in mine]),
            number,
            forward_step_func=llava.forward_step,
        )
        made = [llava.forward(model, llava.batch(i)) for i in range(batches)]
    assert ranks * number == batches
    expected = {name: formula(name, made) for name in (mode, "token_mean")}
    parameters = [p for p in model.parameters() if p.requires_grad]
    wanted = torch.autograd.grad(expected[mode], parameters, materialize_grads=True)
    error, norm = (
        torch.cat([x.flatten() for x in grads]).norm()
        for grads in ([p.main_grad - g for p, g in zip(parameters, wanted, strict=True)], wanted)
    )
    shown = {"lm loss": "token_mean", f"{mode} loss": mode}
    errors = [gpt.reported(reports, k) / float(expected[name]) - 1 for k, name in shown.items()]
    return float(error / norm), *errors


def formula(mode: str, made: list[tuple[Tensor, Tensor]]) -> Any:
    """The loss of a step of whole microbatches, each with losses and mask [samples, seq]."""
    sums = [(losses * mask).sum(dim=1) for losses, mask in made]
    tokens = [mask.sum(dim=1) for _, mask in made]
    samples = sum(len(x) for x in tokens)
    if mode == "sample_mean":
        return sum((s / m.clamp(min=1)).sum() for s, m in zip(sums, tokens, strict=True)) / samples
    if mode == "microbatch_mean":
        return sum(s.sum() / m.sum().clamp(min=1) for s, m in zip(sums, tokens, strict=True)) / len(
            made
        )
    divisors = {
        "token_mean": sum(m.sum() for m in tokens),
        "sum": 3.0,
        "constant": 7.0 * samples,
        "sample_sum": samples,
    }
    return sum(s.sum() for s in sums) / divisors[mode]


LLAVA = [(False, mode) for mode in ALWAYS] + [(True, mode) for mode in (*ALWAYS, "token_mean")]


def llava_facts_of_rank() -> dict[Any, Any]:
    return {case: llava_step(*case) for case in LLAVA}


@functools.cache
def llava_facts() -> list[dict[Any, Any]]:
    return run_host_ranks(llava_facts_of_rank, 2)


@pytest.mark.parametrize("case", LLAVA, ids=lambda case: "-".join(map(str, case)))
def test_megatrons_llava_is_exact(case: Any) -> None:
    for rank in llava_facts():
        assert max(map(abs, rank[case])) <= EXACT


def with_mask(change: Any) -> Any:
    """A forward step whose model makes ``change(mask)``."""
    from tests.host import gpt

    return gpt.forward_step_with(lambda f, mask: functools.partial(f, change(mask)))


def bad(mask: Tensor, value: float, ranks: tuple[int, ...] = (0, 1)) -> Tensor:
    """On some ranks with one other element."""
    mask = mask.clone()
    if dist.get_rank() in ranks:
        mask.view(-1)[0] = value
    return mask


def rows_of_batch(extra: int, ranks: tuple[int, ...], batch: Any) -> LateMicrobatch:
    return LateMicrobatch(len(batch["tokens"]) + extra * (dist.get_rank() in ranks))


def whole(batch: Any) -> Microbatch:
    return Microbatch(torch.ones(2, 3))


def failing(batch: Any) -> LateMicrobatch:
    if dist.get_rank() == 1:
        raise OSError("disk")
    return count(batch)


PEER = "PeerError: "
NO_TOTAL = "HostError: 'token_mean' of masks that the model makes, without calculate_per_token"
# Mode, per-token flag, what is wrong, and what each rank says.
REFUSED: dict[str, tuple[str, bool, dict[str, Any], list[str | None]]] = {
    "good": ("sample_sum", False, {}, [None, None]),
    "tokens of the step": ("token_mean", False, {}, [NO_TOTAL] * 2),
    "tokens of the step, in an evaluation": (
        "token_mean",
        False,
        {"forward_only": True},
        [NO_TOTAL] * 2,
    ),
    "fractions divided by the host": (
        "token_mean",
        True,
        {"change": functools.partial(bad, value=0.5)},
        ["MaskError: 'token_mean' with a model's mask that is not 0 or 1 everywhere"] * 2,
    ),
    **{
        f"mask of {value}": (
            "sum",
            False,
            {"change": functools.partial(bad, value=value)},
            ["MaskError: the model's mask of microbatch 0 has negative, infinite or NaN"] * 2,
        )
        for value in (-1.0, torch.nan, torch.inf)
    },
    "flat mask": (
        "sum",
        False,
        {"change": Tensor.flatten},
        ["MaskError: a model's mask of shape (144,) with None rows, for 2 samples"] * 2,
    ),
    "other number of samples": (
        "sample_sum",
        False,
        {"read_batch": functools.partial(rows_of_batch, 1, (0, 1))},
        ["MaskError: a model's mask of shape (2, 72) with 2 rows, for 3 samples of the batch"] * 2,
    ),
    "packed rows": (
        "sample_mean",
        False,
        {"layout": "thd", "read_batch": count},
        ["GroupError: 'sample_mean' with 2 samples packed by the script"] * 2,
    ),
    "packs without a reader": (
        "sum",
        False,
        {"layout": "thd"},
        ["GroupError: the batch has the keys ['cu_seqlens', 'cu_seqlens_padded'] beside"] * 2,
    ),
    "masks of batches": (
        "sum",
        False,
        {"read_batch": whole},
        ["FunctionError: 2 microbatches of type Microbatch for 2 whose masks the model"] * 2,
    ),
    "reader on one rank": ("sum", False, {"read_batch": failing}, [PEER, "OSError: disk"]),
    "experts": (
        "sum",
        True,
        {"config": {"num_moe_experts": 2}},
        ["HostError: the model's num_moe_experts with calculate_per_token_loss and masks"] * 2,
    ),
    "good again": ("sample_sum", True, {}, [None, None]),
}


def errors_of_rank(cases: Any) -> dict[str, str | None]:
    from tests.host import gpt

    gpt.initialize(cp=1 if cases is REFUSED or "good" in cases else 2)
    models = {flag: gpt.ddp_model(flag) for flag in (False, True)}

    def refused(mode: str, per_token: bool, wrong: dict[str, Any]) -> None:
        wrong = dict(wrong)
        change, layout = wrong.pop("change", None), wrong.pop("layout", "bshd")
        read = {k: wrong.pop(k) for k in ("read_batch", "mask") if k in wrong}
        model, saved = models[per_token], vars(models[per_token].config).copy()
        vars(model.config).update(wrong.pop("config", {}))
        own = with_mask(change) if change else gpt.forward_step
        options = {"forward_step_func": own, **wrong}
        hook = LossHook(aggregation(mode), **{"mask": "model", **read})
        try:
            gpt.run_step(hook, model, Counted(gpt.data_rank(), layout), 2, 2, **options)
        finally:
            vars(model.config).update(saved)

    return {name: error_of(refused, *case[:3]) for name, case in cases.items()}


@functools.cache
def errors() -> list[dict[str, str | None]]:
    return run_host_ranks(errors_of_rank, 2, REFUSED)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_exact_is_refused_on_every_rank(name: str) -> None:
    for rank, expected in zip(errors(), REFUSED[name][3], strict=True):
        assert (rank[name] or "").startswith(expected or "") and bool(rank[name]) == bool(expected)


# Of ranks that hold parts of the same samples.
SHARDED = {
    mode: (mode, False, {"change": functools.partial(bad, value=-1.0, ranks=(1,))}, [])
    for mode in ("microbatch_mean", "sample_mean")
}


def test_a_context_parallel_rank_hears_of_anothers_mask() -> None:
    first, second = run_host_ranks(errors_of_rank, 2, SHARDED)
    for mode in SHARDED:
        assert first[mode].startswith("PeerError: another context-parallel rank cannot use")
        assert second[mode].startswith("MaskError: the model's mask of microbatch 0 has negative")


def setting_of_one_rank() -> str | None:
    from tests.host import gpt

    gpt.initialize()
    hook = LossHook(aggregation("sum"), mask="model" if dist.get_rank() else "batch")
    return error_of(gpt.run_step, hook, gpt.ddp_model(), Counted(dist.get_rank()), 2, 2)


def test_ranks_that_differ_in_who_makes_the_mask_are_refused() -> None:
    for error in run_host_ranks(setting_of_one_rank, 2):
        assert error.startswith("ModeError: ranks have different settings: mask=batch on rank(s)")
