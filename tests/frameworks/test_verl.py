"""verl's own step, with and without the patches, against one fp64 process.

The patches are applied to a copy of the installed package by the commands of
docs/frameworks/verl.md, and told what to do as that page says.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import oracle
from tests.frameworks.patched import ROOT, page, patched_copy
from tests.frameworks.reference import DIVISOR
from tests.frameworks.verl_ranks import (
    Case,
    Step,
    configured,
    reference,
    run_unit_tests,
    run_verl,
    start_engines,
)
from tests.frameworks.verl_rows import PADDING, PROMPTS, SESSIONS
from tests.host.harness import run_host_ranks
from tests.host.reference import Reference, relative_error
from tests.host.steps import Weights, sequences
from tests.oracle import Sample
from tests.peers.standins import PEERS

pytestmark = pytest.mark.host

CPS = {"dp2": 1, "cp2": 2}
MODES: dict[str, dict[str, Any]] = {
    "token_mean": {},
    "sample_mean": {},
    "rollout_mean": {},
    "prompt_mean": {},
    "constant": {"divisor": DIVISOR},
}
MOE = (
    ("num_moe_experts", 4),
    ("moe_router_topk", 2),
    ("moe_router_load_balancing_type", "aux_loss"),
    ("add_bias_linear", False),
)


def flags(mode: str, divisor: float | None = None) -> str:
    """The flags of the page, for another mode."""
    found = re.search(r'MEGATRON_LOSS_AGG_FLAGS="(.*?)"', page("verl"))
    assert found
    given = found[1].replace("prompt_mean", mode)
    return given + (f" --loss-aggregation-divisor {divisor}" if divisor else "")


AUXILIARY = {
    coefficient: Case(per_token=True, config=(*MOE, ("moe_aux_loss_coeff", coefficient)))
    for coefficient in (0.0, 1.0)
}
STOCK: dict[Any, Case] = {
    "token-mean": Case(),
    "token-mean, per token": Case(per_token=True),
    "seq-mean-token-mean": Case(mode="seq-mean-token-mean"),
    "seq-mean-token-sum-norm": Case(mode="seq-mean-token-sum-norm", factor=DIVISOR),
    "value": Case(loss="value"),
    "distillation": Case(loss="distillation"),
    "geo_mean": Case(loss_mode="geo_mean"),
    **AUXILIARY,
}
# By the environment, or by verl's configuration.
OURS = {
    **{(mode, False): Case(flags(mode, **options)) for mode, options in MODES.items()},
    **{
        (mode, True): Case(options=(("mode", mode), *options.items()), per_token=True)
        for mode, options in MODES.items()
    },
}
FURTHER = {
    "padding counts": Case(options=(("mode", "sample_mean"), ("rejected", "count"))),
    "microbatch_mean": Case(flags("microbatch_mean")),
    "value": Case(flags("prompt_mean"), loss="value"),
    "distillation": Case(flags("prompt_mean"), loss="distillation"),
    **{key: case._replace(flags=flags("sample_mean")) for key, case in AUXILIARY.items()},
}
REFUSED = {
    "NotImplementedError: policy_loss.loss_mode='geo_mean' does not support": Case(
        flags("prompt_mean"), loss_mode="geo_mean"
    ),
    "NotImplementedError: loss_aggregation needs a response_mask": Case(
        flags("token_mean"), without="response_mask"
    ),
    "NotImplementedError: loss_aggregation needs all micro-batches of an optimizer step": Case(
        flags("token_mean"), worker="TinkerTrainingWorker"
    ),
    "GroupError: mode 'prompt_mean' groups by prompt": Case(flags("prompt_mean"), without="uid"),
}


@pytest.fixture(scope="session")
def patched(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a copy of verl, patched by the commands of the page."""
    folder = tmp_path_factory.mktemp("site-packages")
    assert "verl/0.9.1.patch fits and is not applied" in patched_copy("verl", folder)
    return str(folder)


@pytest.fixture(scope="session")
def mended(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a copy of verl that has the patch of the numbers of tokens alone."""
    folder = tmp_path_factory.mktemp("mended")
    shutil.copytree(PEERS / "verl", folder / "verl")
    patch = ROOT / "patches/verl-routed-tokens/0.9.1.patch"
    subprocess.run(["patch", "-p1", "-d", str(folder), "-i", str(patch)], check=True)
    return str(folder)


@cache
def _run(package: str, cp: int, cases: tuple[Case, ...]) -> list[list[Step]]:
    """By rank, then case."""
    return run_host_ranks(run_verl, 2, package, cp, cases, timeout=280)


def stock(topology: str, package: str = str(PEERS)) -> dict[Any, Step]:
    steps = _run(package, CPS[topology], tuple(STOCK.values()))[0]
    return dict(zip(STOCK, steps, strict=True))


def ours(topology: str, package: str) -> dict[Any, list[Step]]:
    """The patched verl's steps, of both ranks: of stock cases first."""
    named: dict[Any, Case] = {
        **{("stock", name): case for name, case in STOCK.items()},
        **OURS,
        **FURTHER,
        **REFUSED,
    }
    ranks = _run(package, CPS[topology], tuple(named.values()))
    return dict(zip(named, map(list, zip(*ranks, strict=True)), strict=True))


@cache
def fp64(loss: str = "policy") -> dict[str, Reference]:
    found: dict[str, Reference] = run_host_ranks(reference, 1, loss)[0]
    return found


def sample(i: int) -> Sample:
    rollout: Any = (PROMPTS[i], SESSIONS[i])
    return Sample(sequences()[i].sample.mask, PROMPTS[i], rollout)  # type: ignore[arg-type]


def weights(mode: str, **options: Any) -> Weights:
    """The oracle's, of all samples but padding."""
    step = [[[sample(i) for i in range(len(PROMPTS))]]]
    return list(enumerate(oracle.step_weights(mode, step, **options)[0][0]))


def error(step: Step, w: Weights, loss: str = "policy") -> float:
    assert step.error is None
    return relative_error(step.gradient, fp64(loss)["loss"].gradient(w))


def own_error(topology: str) -> float:
    """The larger one of verl's own in modes of its own, where padding counts as samples."""
    steps, count = stock(topology), len(PROMPTS)
    padded = [(i, [x * count / (count + PADDING) for x in w]) for i, w in weights("sample_mean")]
    return max(
        error(steps["token-mean"], weights("token_mean")),
        error(steps["seq-mean-token-mean"], padded),
    )


both = pytest.mark.parametrize("topology", CPS)


@both
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_the_patched_step_is_exact(mode: str, per_token: bool, topology: str, patched: str) -> None:
    w = weights(mode, **MODES[mode])
    for step in ours(topology, patched)[mode, per_token]:
        assert error(step, w) <= min(2 * own_error(topology), 1e-6)


@both
def test_microbatches_are_unequal(topology: str, patched: str) -> None:
    for step in ours(topology, patched)["token_mean", False]:
        assert len({len(microbatch) for microbatch in step.microbatches}) > 1
        assert len({sum(microbatch) for microbatch in step.microbatches}) > 1


@both
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_metrics_follow(mode: str, per_token: bool, topology: str, patched: str) -> None:
    metrics = ours(topology, patched)[mode, per_token][0].metrics
    w = weights(mode, **MODES[mode])
    names = {"policy": "actor/pg_loss", "kl": "kl_loss", "entropy": "actor/entropy_loss"}
    for term, name in {**names, "loss": "loss"}.items():
        assert metrics[name] == pytest.approx(fp64()[term].loss(w), rel=1e-5)


@both
@pytest.mark.parametrize("loss", ["value", "distillation"])
def test_further_losses_are_exact(loss: str, topology: str, patched: str) -> None:
    step = ours(topology, patched)[loss][0]
    own = error(stock(topology)[loss], weights("token_mean"), loss)
    w = weights("prompt_mean")
    assert error(step, w, loss) <= min(2 * own, 1e-6)
    assert error(stock(topology)[loss], w, loss) > 1e-2
    assert step.metrics["loss"] == pytest.approx(fp64(loss)["loss"].loss(w), rel=1e-5)


@both
def test_microbatch_mean_goes_by_verls_microbatches(topology: str, patched: str) -> None:
    steps = ours(topology, patched)["microbatch_mean"]
    sample_of = {len(sequences()[i].tokens) + 1: i for i in range(len(PROMPTS))}
    ranks = steps if topology == "dp2" else steps[:1]
    places = [
        [[sample_of[n] for n in lengths if n in sample_of] for lengths in step.microbatches]
        for step in ranks
    ]
    step = [[[sample(i) for i in place] for place in rank] for rank in places]
    nested = oracle.step_weights("microbatch_mean", step)
    w = [
        (i, sample_weights)
        for rank, of_rank in zip(places, nested, strict=True)
        for place, of_place in zip(rank, of_rank, strict=True)
        for i, sample_weights in zip(place, of_place, strict=True)
    ]
    assert error(steps[0], w) <= min(2 * own_error(topology), 1e-6)


@both
@pytest.mark.parametrize("name", STOCK)
def test_without_an_aggregation_the_patch_changes_no_bit(
    name: str, topology: str, patched: str, mended: str
) -> None:
    assert_same(stock(topology, mended)[name], ours(topology, patched)["stock", name][0])


@both
@pytest.mark.parametrize("name", STOCK)
def test_numbers_of_tokens_are_mended_and_nothing_else(
    name: str, topology: str, mended: str
) -> None:
    after = stock(topology, mended)[name]
    if topology == "cp2" and STOCK[name].per_token:
        assert name in AUXILIARY or error(after, weights("token_mean")) < 1e-6
    else:
        assert_same(stock(topology)[name], after)


def assert_same(before: Step, after: Step) -> None:
    assert before.error is after.error is None
    assert before.gradient.keys() == after.gradient.keys()
    for parameter, gradient in before.gradient.items():
        assert torch.equal(gradient, after.gradient[parameter])
    same = {k: v for k, v in before.metrics.items() if not k.startswith("perf/")}
    assert same == {k: v for k, v in after.metrics.items() if not k.startswith("perf/")}


@both
def test_padding_counts_if_told_so(topology: str, patched: str) -> None:
    count = len(PROMPTS)
    w = [(i, [x * count / (count + PADDING) for x in w]) for i, w in weights("sample_mean")]
    assert error(ours(topology, patched)["padding counts"][0], w) < 1e-6


@both
def test_what_stock_verl_gives(topology: str) -> None:
    steps = stock(topology)
    # Padding counts as samples: 1 - 10/12 = 1/6.
    for name, mode in (
        ("seq-mean-token-mean", "sample_mean"),
        ("seq-mean-token-sum-norm", "constant"),
    ):
        wrong = error(steps[name], weights(mode, **MODES[mode]))
        assert wrong == pytest.approx(PADDING / (len(PROMPTS) + PADDING), rel=1e-4)
    # It has no mean over prompts.
    own = [step for name, step in steps.items() if "-mean" in str(name)]
    nearest = min(error(step, weights("prompt_mean")) for step in own)
    assert nearest > 0.1
    # With the flag, each context-parallel rank counts tokens // 2 in each microbatch.
    wrong = error(steps["token-mean, per token"], weights("token_mean"))
    assert wrong < 1e-6 if topology == "dp2" else wrong > 2e-2


def test_auxiliary_losses_keep_verls_meaning(patched: str) -> None:
    # verl returns the tokens that were routed as the number of tokens, which auxiliary losses are
    # scaled by. Their gradient is the same whatever the aggregation of the loss.
    own, found = stock("dp2"), {c: ours("dp2", patched)[c][0] for c in AUXILIARY}
    assert all(step.error is None for step in found.values())
    assert relative_error(own[0.0].gradient, own[1.0].gradient) > 1e-3
    assert relative_error(found[0.0].gradient, own[0.0].gradient) > 1e-2
    theirs, mine = (
        {name: g - steps[0.0].gradient[name] for name, g in steps[1.0].gradient.items()}
        for steps in (own, found)
    )
    assert relative_error(mine, theirs) < 1e-6


@both
@pytest.mark.parametrize("expected", REFUSED)
def test_what_the_patch_cannot_do_is_refused(expected: str, topology: str, patched: str) -> None:
    for step in ours(topology, patched)[expected]:
        assert step.error is not None
        assert step.error.startswith(expected)


def test_other_engines_refuse_to_start(patched: str) -> None:
    (without,) = run_host_ranks(start_engines, 1, patched, None)
    (said,) = run_host_ranks(start_engines, 1, patched, flags("prompt_mean"))
    assert {"FSDPEngineWithLMHead", "FSDPEngineWithValueHead", "MegatronEngineWithLMHead"} <= {
        *said
    }
    for engine, text in said.items():
        refused = text.startswith(f"NotImplementedError: {engine} (backend")
        assert refused != engine.startswith("Megatron"), text
        assert "loss_aggregation" not in without[engine]
    (said,) = run_host_ranks(start_engines, 1, patched, "--loss-aggregation mean")
    assert said["MegatronEngineWithLMHead"].startswith("ModeError: unknown mode 'mean'")


def test_the_configuration_has_a_key(patched: str) -> None:
    found = re.findall(r"^(\S*loss_aggregation\.\w+=\w+)", page("verl"), re.MULTILINE)
    assert len(found) == 2
    wanted = {"mode": "constant", "divisor": 4096}
    assert run_host_ranks(configured, 1, patched, found)[0] == [wanted, wanted, {}]
    assert run_host_ranks(configured, 1, patched, [])[0] == [{}, {}, {}]


def test_verls_unit_tests_pass(patched: str) -> None:
    folder = Path(patched)
    names = ("loss_aggregation", "megatron_routed_num_tokens")
    files = [f"tests/workers/test_{name}_on_cpu.py" for name in names]
    assert all((folder / file).is_file() for file in files)
    text = run_unit_tests(folder, *files)
    assert re.search(r"\b34 passed", text), text
