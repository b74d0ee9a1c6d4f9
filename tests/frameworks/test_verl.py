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
from tests.frameworks import verl
from tests.frameworks.harness import DIVISOR, FP32, ROOT, page, patched_copy
from tests.frameworks.verl import PADDING, PROMPTS, SESSIONS, Case, Step
from tests.host.harness import run_host_ranks
from tests.host.reference import Reference, relative_error
from tests.host.steps import Weights, sequences
from tests.peers.standins import PEERS

pytestmark = pytest.mark.host

CPS = {"dp2": 1, "cp2": 2}
MODES = ("token_mean", "sample_mean", "rollout_mean", "prompt_mean", "constant")


def divisor_of(mode: str) -> dict[str, float]:
    return {"divisor": DIVISOR} if mode == "constant" else {}


def flags(mode: str) -> str:
    """The flags of the page, for another mode."""
    found = re.search(r'MEGATRON_LOSS_AGG_FLAGS="(.*?)"', page("verl"))
    assert found
    divisor = "".join(f" --loss-aggregation-divisor {d}" for d in divisor_of(mode).values())
    return found[1].replace("prompt_mean", mode) + divisor


def options(mode: str, **further: str) -> tuple[tuple[str, Any], ...]:
    """The same by verl's configuration."""
    return tuple({"mode": mode, **divisor_of(mode), **further}.items())


MOE = (
    ("num_moe_experts", 4),
    ("moe_router_topk", 2),
    ("moe_router_load_balancing_type", "aux_loss"),
    ("add_bias_linear", False),
)
AUXILIARY = {
    f"auxiliary {x}": Case(per_token=True, config=(*MOE, ("moe_aux_loss_coeff", x)))
    for x in (0.0, 1.0)
}
STOCK = {
    "token-mean": Case(),
    "token-mean, per token": Case(per_token=True),
    "seq-mean-token-mean": Case(mode="seq-mean-token-mean"),
    "seq-mean-token-sum-norm": Case(mode="seq-mean-token-sum-norm", factor=DIVISOR),
    "value": Case(loss="value"),
    "distillation": Case(loss="distillation"),
    "geo_mean": Case(loss_mode="geo_mean"),
    **AUXILIARY,
}
PADDED = "sample_mean, padding counts"
EXACT = {
    **{mode: Case(flags(mode)) for mode in MODES},
    **{f"{x}, configured": Case(options=options(x), per_token=True) for x in MODES},
    PADDED: Case(options=options("sample_mean", rejected="count")),
    **{f"prompt_mean, {x}": Case(flags("prompt_mean"), loss=x) for x in ("value", "distillation")},
}
"""By an aggregation of ours, which begins the name."""
MICROBATCHES = {"microbatch_mean": Case(flags("microbatch_mean"))}
OUR_AUXILIARY = {f"ours, {k}": x._replace(flags=flags("sample_mean")) for k, x in AUXILIARY.items()}
UNSUPPORTED = "NotImplementedError: "
REFUSED = {
    f"{UNSUPPORTED}policy_loss.loss_mode='geo_mean' does not support": Case(
        flags("prompt_mean"), loss_mode="geo_mean"
    ),
    f"{UNSUPPORTED}loss_aggregation needs a response_mask": Case(
        flags("token_mean"), without="response_mask"
    ),
    f"{UNSUPPORTED}loss_aggregation needs all micro-batches of an optimizer step": Case(
        flags("token_mean"), worker="TinkerTrainingWorker"
    ),
    "GroupError: mode 'prompt_mean' groups by prompt": Case(flags("prompt_mean"), without="uid"),
}
EVERYTHING = {**STOCK, **EXACT, **MICROBATCHES, **OUR_AUXILIARY, **REFUSED}
both = pytest.mark.parametrize("topology", CPS)


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
def ours(topology: str, package: str) -> dict[str, list[Any]]:
    """The patched verl's steps, or errors, of both ranks; those of stock cases, too."""
    cases = tuple(EVERYTHING.values())
    ranks = run_host_ranks(verl.train, 2, package, CPS[topology], cases, timeout=280)
    return dict(zip(EVERYTHING, map(list, zip(*ranks, strict=True)), strict=True))


@cache
def stock(topology: str, package: str = str(PEERS)) -> dict[str, Step]:
    cases = tuple(STOCK.values())
    steps, _ = run_host_ranks(verl.train, 2, package, CPS[topology], cases, timeout=280)
    return dict(zip(STOCK, steps, strict=True))


@cache
def fp64(loss: str = "policy") -> dict[str, Reference]:
    found: dict[str, Reference] = run_host_ranks(verl.reference, 1, loss)[0]
    return found


def sample(i: int) -> oracle.Sample:
    rollout: Any = (PROMPTS[i], SESSIONS[i])
    return oracle.Sample(sequences()[i].sample.mask, PROMPTS[i], rollout)  # type: ignore[arg-type]


def weights(name: str) -> Weights:
    """The oracle's, of all samples but padding; by the name of a case of `EXACT`."""
    mode, count = name.partition(",")[0], len(PROMPTS)
    step = [[[sample(i) for i in range(count)]]]
    found = oracle.step_weights(mode, step, divisor=divisor_of(mode).get("divisor"))[0][0]
    share = count / (count + PADDING) if name == PADDED else 1.0
    return [(i, [x * share for x in w]) for i, w in enumerate(found)]


def error(step: Step | str, w: Weights, loss: str = "policy") -> float:
    assert not isinstance(step, str), step
    return relative_error(step.gradient, fp64(loss)["loss"].gradient(w))


def own_error(topology: str, loss: str = "policy") -> float:
    """The largest of verl's own in modes of its own, where padding counts as samples."""
    if loss != "policy":
        return error(stock(topology)[loss], weights("token_mean"), loss)
    modes = {"token-mean": "token_mean", "seq-mean-token-mean": PADDED}
    return max(error(stock(topology)[own], weights(mode)) for own, mode in modes.items())


@both
@pytest.mark.parametrize("name", EXACT)
def test_the_patched_step_is_exact_and_its_metrics_follow(
    name: str, topology: str, patched: str
) -> None:
    loss, w = EXACT[name].loss, weights(name)
    metrics = {"loss": "loss"}
    if loss == "policy":
        metrics |= {"policy": "actor/pg_loss", "kl": "kl_loss", "entropy": "actor/entropy_loss"}
    for step in ours(topology, patched)[name]:
        assert error(step, w, loss) <= min(2 * own_error(topology, loss), FP32)
        # Microbatches are unequal in samples, and in tokens.
        assert all(len({*map(size, step.microbatches)}) > 1 for size in (len, sum))
    for term, metric in metrics.items():
        of_step = ours(topology, patched)[name][0].metrics[metric]
        assert of_step == pytest.approx(fp64(loss)[term].loss(w), rel=1e-5)
    if loss != "policy":
        assert error(stock(topology)[loss], w, loss) > 1e-2


@both
def test_microbatch_mean_goes_by_verls_microbatches(topology: str, patched: str) -> None:
    steps = ours(topology, patched)["microbatch_mean"]
    sample_of = {len(sequences()[i].tokens) + 1: i for i in range(len(PROMPTS))}
    places = [
        [[sample_of[n] for n in lengths if n in sample_of] for lengths in step.microbatches]
        for step in (steps if topology == "dp2" else steps[:1])
    ]
    step = [[[sample(i) for i in place] for place in rank] for rank in places]
    nested = oracle.step_weights("microbatch_mean", step)
    order = [i for rank in places for place in rank for i in place]
    flat = [w for rank in nested for place in rank for w in place]
    w = list(zip(order, flat, strict=True))
    assert error(steps[0], w) <= min(2 * own_error(topology), FP32)


def same(before: Step, after: Step) -> bool:
    """Bit for bit, but for its times."""
    metrics = [
        {k: v for k, v in step.metrics.items() if not k.startswith("perf/")}
        for step in (before, after)
    ]
    return metrics[0] == metrics[1] and all(
        torch.equal(gradient, after.gradient[name]) for name, gradient in before.gradient.items()
    )


@both
@pytest.mark.parametrize("name", STOCK)
def test_without_an_aggregation_the_patch_mends_numbers_of_tokens_and_changes_no_other_bit(
    name: str, topology: str, patched: str, mended: str
) -> None:
    before, after = stock(topology)[name], stock(topology, mended)[name]
    assert same(after, ours(topology, patched)[name][0])
    if topology == "cp2" and STOCK[name].per_token:
        assert name in AUXILIARY or error(after, weights("token_mean")) < FP32
    else:
        assert same(before, after)


@both
def test_what_stock_verl_gives(topology: str) -> None:
    steps = stock(topology)
    # Padding counts as samples: 1 - 10/12 = 1/6.
    for name, mode in (
        ("seq-mean-token-mean", "sample_mean"),
        ("seq-mean-token-sum-norm", "constant"),
    ):
        wrong = error(steps[name], weights(mode))
        assert wrong == pytest.approx(PADDING / (len(PROMPTS) + PADDING), rel=1e-4)
    # It has no mean over prompts.
    own = [step for name, step in steps.items() if "-mean" in name]
    assert min(error(step, weights("prompt_mean")) for step in own) > 0.1
    # With the flag, each context-parallel rank counts tokens // 2 in each microbatch.
    wrong = error(steps["token-mean, per token"], weights("token_mean"))
    assert wrong < FP32 if topology == "dp2" else wrong > 2e-2


def test_auxiliary_losses_keep_verls_meaning(patched: str) -> None:
    # verl returns the tokens that were routed as the number of tokens, which auxiliary losses are
    # scaled by. Their gradient is the same whatever the aggregation of the loss.
    own = [stock("dp2")[name].gradient for name in AUXILIARY]
    found = [ours("dp2", patched)[name][0].gradient for name in OUR_AUXILIARY]
    assert relative_error(*own) > 1e-3
    assert relative_error(found[0], own[0]) > 1e-2
    theirs, mine = (
        {name: g - without[name] for name, g in with_loss.items()}
        for without, with_loss in (own, found)
    )
    assert relative_error(mine, theirs) < FP32


@both
@pytest.mark.parametrize("expected", REFUSED)
def test_what_the_patch_cannot_do_is_refused(expected: str, topology: str, patched: str) -> None:
    for said in ours(topology, patched)[expected]:
        assert str(said).startswith(expected)


def test_other_engines_refuse_to_start(patched: str) -> None:
    (without,) = run_host_ranks(verl.start_engines, 1, patched, "")
    (said,) = run_host_ranks(verl.start_engines, 1, patched, flags("prompt_mean"))
    known = {"FSDPEngineWithLMHead", "FSDPEngineWithValueHead", "MegatronEngineWithLMHead"}
    assert known <= {*said}
    for engine, text in said.items():
        refused = text.startswith(f"NotImplementedError: {engine} (backend")
        assert refused != engine.startswith("Megatron"), text
        assert "loss_aggregation" not in without[engine]
    (said,) = run_host_ranks(verl.start_engines, 1, patched, "--loss-aggregation mean")
    assert said["MegatronEngineWithLMHead"].startswith("ModeError: unknown mode 'mean'")


def test_the_configuration_has_a_key(patched: str) -> None:
    found = re.findall(r"^(\S*loss_aggregation\.\w+=\w+)", page("verl"), re.MULTILINE)
    assert len(found) == 2
    wanted = {"mode": "constant", "divisor": 4096}
    assert run_host_ranks(verl.configured, 1, patched, found)[0] == [wanted, wanted, {}]
    assert run_host_ranks(verl.configured, 1, patched, [])[0] == [{}, {}, {}]


def test_verls_unit_tests_pass(patched: str) -> None:
    names = ("loss_aggregation", "megatron_routed_num_tokens")
    files = [f"tests/workers/test_{name}_on_cpu.py" for name in names]
    assert all((Path(patched) / file).is_file() for file in files)
    text = verl.run_unit_tests(Path(patched), *files)
    assert re.search(r"\b34 passed", text), text
