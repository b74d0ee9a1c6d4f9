"""ms-swift 4.6.0: its own Megatron trainer on the real Megatron-Core, with the plugin of its page.

Stock is exact for the token mean under the per-token flag, where nothing is weighted by
``loss_scale``. That is the mode of its own whose rounding error bounds ours.
"""

from __future__ import annotations

import re
from functools import cache, partial

import pytest

from tests.distributed import run_ranks
from tests.frameworks import run_ms_swift as ranks
from tests.frameworks.run_ms_swift import Case, Outcome
from tests.host.reference import Reference, relative_error
from tests.host.steps import PLACES, Weights, sequences, weights_of

pytestmark = pytest.mark.host

run = partial(run_ranks, preload="tests.frameworks.ms_swift_host")

PAGE = (ranks.ROOT / "docs/frameworks/ms-swift.md").read_text()
LAYOUTS = [(2, "rows"), (2, "packing"), (1, "rows"), (1, "padding_free")]
MASKS = ("01", "fractional")
FLAG = "--loss-aggregation {}"


@cache
def reference() -> dict[str, Reference]:
    (found,) = run(ranks.reference, 1)
    return found


def weights(mode: str, masks: str) -> Weights:
    """The same for all parallelisms."""
    return weights_of(mode, PLACES[1], masks)


@cache
def steps(cp: int, layout: str, per_token: bool, mode: str) -> dict[tuple[str, str], Outcome]:
    """By "stock" or "hooked", and masks; the same on both ranks."""
    case = Case(cp, layout, per_token)
    first, second = run(ranks.stock_and_hooked, 2, case, MASKS, FLAG.format(mode))
    for key, outcome in first.items():
        assert outcome.logs == second[key].logs
        assert relative_error(outcome.gradient, second[key].gradient) == 0
    return first


def error(outcome: Outcome, mode: str, masks: str, dft: bool = False) -> float:
    whole = reference()["dft" if dft else "loss"].gradient(weights(mode, masks))
    return relative_error(outcome.gradient, {name: whole[name] for name in outcome.gradient})


CASES = [
    *[(*place, flag, "sample_mean") for place in LAYOUTS for flag in (True, False)],
    (2, "packing", True, "token_mean"),
    (2, "packing", False, "token_mean"),
    (1, "rows", False, "token_mean"),
]


@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("cp, layout, per_token, mode", CASES)
def test_gradients_are_exact(cp: int, layout: str, per_token: bool, mode: str, masks: str) -> None:
    found = steps(cp, layout, per_token, mode)
    own = error(steps(cp, layout, True, "sample_mean")["stock", "01"], "token_mean", "01")
    assert own < 1e-6
    assert error(found["hooked", masks], mode, masks) <= 2 * own
    # What it would be without the plugin.
    stock_is_exact = (per_token, mode, masks) == (True, "token_mean", "01")
    assert stock_is_exact or error(found["stock", masks], mode, masks) > 1e-2


# On the page: mode, masks, and stock's error with the per-token flag and without.
@pytest.mark.parametrize(
    "mode, masks, cp, layout, with_flag, without",
    [
        ("token_mean", "01", 2, "packing", 0.0, 0.66),
        ("token_mean", "01", 1, "rows", 0.0, 0.93),
        ("token_mean", "fractional", 2, "packing", 0.024, 0.63),
        ("sample_mean", "01", 2, "packing", 0.69, 0.72),
        ("sample_mean", "01", 1, "rows", 0.69, 0.50),
    ],
)
def test_stock_is_as_wrong_as_the_page_says(
    mode: str, masks: str, cp: int, layout: str, with_flag: float, without: float
) -> None:
    for per_token, expected in ((True, with_flag), (False, without)):
        stock = steps(cp, layout, per_token, "sample_mean")["stock", masks]
        assert error(stock, mode, masks) == pytest.approx(expected, abs=5e-3)


@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("cp, layout, per_token, mode", CASES)
def test_logs_have_the_mean_over_tokens_and_the_aggregated_loss(
    cp: int, layout: str, per_token: bool, mode: str, masks: str
) -> None:
    found = steps(cp, layout, per_token, mode)
    logs, stock = found["hooked", masks].logs, found["stock", masks].logs
    expected = reference()["loss"].loss(weights(mode, masks))
    active = sum(m > 0 for sequence in sequences(masks) for m in sequence.sample.mask)
    weight = sum(m for sequence in sequences(masks) for m in sequence.sample.mask)
    # ms-swift's own divides by the number of tokens, whatever their weights.
    of_tokens = reference()["loss"].loss(weights("token_mean", masks)) * weight / active
    for prefix in ("", "eval_"):
        assert logs[f"{prefix}{mode}_loss"] == pytest.approx(expected, rel=1e-6)
        assert logs[f"{prefix}loss"] == pytest.approx(of_tokens, rel=1e-6)
    assert logs.keys() - stock.keys() == {f"{mode}_loss", f"eval_{mode}_loss", "eval_loss"}


def test_dft_and_losses_by_channel_stay() -> None:
    case = Case(2, "packing", True, dft=True)
    found, _ = run(ranks.stock_and_hooked, 2, case, MASKS[:1], FLAG.format("sample_mean"))
    hooked, stock = found["hooked", "01"], found["stock", "01"]
    assert error(hooked, "sample_mean", "01", dft=True) < 6e-7
    assert hooked.logs["loss_None"] == stock.logs["loss_None"]
    assert hooked.logs["loss"] == stock.logs["loss"]


def test_pipeline_stages_without_labels_pass() -> None:
    case = Case(1, "padding_free", True, pp=2)
    first, last = run(ranks.stock_and_hooked, 2, case, MASKS[:1], FLAG.format("sample_mean"))
    for found in (first, last):
        own = error(found["stock", "01"], "token_mean", "01")
        assert error(found["hooked", "01"], "sample_mean", "01") <= 2 * own < 2e-6
    expected = reference()["loss"].loss(weights("sample_mean", "01"))
    assert last["hooked", "01"].logs["sample_mean_loss"] == pytest.approx(expected, rel=1e-6)
    assert "sample_mean_loss" not in first["hooked", "01"].logs


def test_without_the_variable_nothing_changes() -> None:
    (found,) = run(ranks.without_effect, 1, None)
    assert found == ("bit-identical", "stock schedule")


def test_a_worker_of_a_data_loader_is_left_alone() -> None:
    (found,) = run(ranks.without_effect, 1, FLAG.format("sample_mean"))
    assert found == ("bit-identical", "stock schedule")


def test_an_empty_step_can_be_skipped() -> None:
    flags = f"{FLAG.format('sample_mean')} --loss-aggregation-empty-step skip"
    ((before, after, logs),) = run(ranks.empty_step, 1, flags)
    assert all(before[name].equal(after[name]) for name in before)
    assert logs["grad_norm"] == 0
    ((before, after, logs),) = run(ranks.empty_step, 1, FLAG.format("sample_mean"))
    assert not all(before[name].equal(after[name]) for name in before)  # by its weight decay


def test_other_trainers_are_refused_before_their_model_is_built() -> None:
    (errors,) = run(ranks.refusals, 1, FLAG.format("sample_mean"))
    expected = (
        "{} with --task_type {}; expected megatron sft or pt with causal_lm, whose loss is a "
    )
    for (name, task), said in zip(ranks.REFUSED, errors, strict=True):
        assert said.startswith("HostError: " + expected.format(name, task))
        assert said.endswith("unset MEGATRON_LOSS_AGG_FLAGS")


def test_the_page_names_the_plugin_and_the_flags_of_these_tests() -> None:
    (flags,) = set(re.findall(r'MEGATRON_LOSS_AGG_FLAGS="(.*?)"', PAGE))
    assert flags == FLAG.format("sample_mean")
    (plugin,) = set(re.findall(r"--external_plugins (\S+)", PAGE))
    assert plugin == str(ranks.PLUGIN.relative_to(ranks.ROOT))
    pins = (ranks.ROOT / "ci/peers.txt").read_text().split()
    assert all(pin in PAGE for pin in pins if pin.startswith(("ms-swift", "mcore-bridge")))
