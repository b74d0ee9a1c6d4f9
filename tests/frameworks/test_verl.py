"""verl's own step, with and without the patches, which the commands of its page apply to a copy."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.frameworks import verl
from tests.frameworks.checkout_report import (
    MODES,
    Held,
    LogProbs,
    Losses,
    Report,
    Run,
    Steps,
    flags,
    weights,
    with_entropy,
)
from tests.frameworks.harness import (
    CLIP,
    DIVISOR,
    FP32,
    ROOT,
    Terms,
    grpo,
    page,
    patched_copy,
    references,
    token_values,
)
from tests.frameworks.verl import ROWS, STEP, TEACHER
from tests.host.harness import run_host_ranks
from tests.host.reference import Reference, relative_error
from tests.peers.standins import PEERS

pytestmark = pytest.mark.host

SHARE = len(STEP) / ROWS


def distilled(lp: Tensor, entropy: Tensor, old: Tensor, ref: Tensor, reward: float) -> Terms:
    return {"loss": grpo(lp, entropy, old, ref - TEACHER, reward)["kl"]}


def held(
    run: Run,
    mode: str,
    losses: Losses = with_entropy,
    share: float = 1.0,
    empty: str = "count",
) -> Held:
    """The run, to the weights of a mode; times a share."""
    return run, (losses, [[[x * share for x in w] for w in weights(mode, STEP, empty=empty)]])


def key(mode: str, **further: str) -> dict[str, Any]:
    """An aggregation of ours in verl's configuration."""
    return {"mode": mode, **({"divisor": DIVISOR} if mode == "constant" else {}), **further}


MOE = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_router_load_balancing_type": "aux_loss",
    "add_bias_linear": False,
}
AUXILIARY = {
    f"auxiliary {x}": {"per_token": True, "config": {**MOE, "moe_aux_loss_coeff": x}}
    for x in (0.0, 1.0)
}
PADDED = "sample_mean, padding counts"
PER_TOKEN = "token_mean, per token"
DISTILLED = {"loss": "distillation"}
OWN: dict[str, Held] = {
    "token_mean": held(Run("", {}), "token_mean"),
    PER_TOKEN: held(Run("", {"per_token": True}), "token_mean"),
    PADDED: held(Run("", {"mode": "seq-mean-token-mean"}), "sample_mean", share=SHARE),
    "constant, padding counts": held(
        Run("", {"mode": "seq-mean-token-sum-norm", "factor": DIVISOR}), "constant", share=SHARE
    ),
    "distillation": held(Run("", DISTILLED), "token_mean", distilled),
    "value": (Run("", {"loss": "value"}), None),
    "geo_mean": (Run("", {"loss_mode": "geo_mean"}), None),
    **{name: (Run("", options), None) for name, options in AUXILIARY.items()},
}
REFUSED = {
    "NotImplementedError: policy_loss.loss_mode='geo_mean' does not support": Run(
        flags("prompt_mean"), {"loss_mode": "geo_mean"}
    ),
    "NotImplementedError: loss_aggregation needs a response_mask": Run(
        flags("token_mean"), {"without": "response_mask"}
    ),
    "NotImplementedError: loss_aggregation needs all micro-batches of an optimizer step": Run(
        flags("token_mean"), {"worker": "TinkerTrainingWorker"}
    ),
    "GroupError: mode 'prompt_mean' groups by": Run(flags("prompt_mean"), {"without": "uid"}),
}
RUNS: dict[str, Held] = {
    **{mode: held(Run(flags(mode), {}), mode) for mode in MODES},
    **{
        f"{mode}, configured": held(Run("", {"key": key(mode), "per_token": True}), mode)
        for mode in MODES
    },
    PADDED: held(
        Run("", {"key": key("sample_mean", rejected="count")}), "sample_mean", share=SHARE
    ),
    "sample_mean, without empty ones": held(
        Run("", {"key": key("sample_mean", empty="skip")}), "sample_mean", empty="skip"
    ),
    "prompt_mean, distillation": held(
        Run(flags("prompt_mean"), DISTILLED), "prompt_mean", distilled
    ),
    **{words: (run, words) for words, run in REFUSED.items()},
}
NEAR: dict[str, str | None] = {
    "sample_mean": PADDED,
    "rollout_mean": PADDED,
    "prompt_mean": "token_mean",
    "constant": "constant, padding counts",
}
NEAR["sample_mean, without empty ones"] = PADDED
NEAR |= {f"{mode}, configured": NEAR.get(mode) for mode in MODES}
OTHERS = {
    "microbatch_mean": Run(flags("microbatch_mean"), {}),
    "prompt_mean, value": Run(flags("prompt_mean"), {"loss": "value"}),
    **{f"ours, {x}": Run(flags("sample_mean"), options) for x, options in AUXILIARY.items()},
}
PLACES = {"DP 2": 1, "CP 2": 2}
every_place = pytest.mark.parametrize("place", PLACES)


@pytest.fixture(scope="session")
def patched(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a copy of verl, patched by the commands of the page."""
    folder = tmp_path_factory.mktemp("site-packages")
    assert "verl/0.9.1.patch fits and is not applied" in patched_copy("verl", folder)
    return str(folder)


class Compared(NamedTuple):
    failures: list[str]
    steps: dict[str, dict[str, Steps]]  # by place; the stock code has the patch of token numbers
    stock: dict[str, dict[str, Steps]]  # without that patch
    reference: dict[str, Reference]


@pytest.fixture(scope="session")
def compared(patched: str, tmp_path_factory: pytest.TempPathFactory) -> Compared:
    mended = tmp_path_factory.mktemp("mended")
    shutil.copytree(PEERS / "verl", mended / "verl")
    patch = ROOT / "patches/verl-routed-tokens/0.9.1.patch"
    subprocess.run(["patch", "-p1", "-d", str(mended), "-i", str(patch)], check=True)
    report = Report(
        "verl", verl.train, (str(mended), patched), OWN, RUNS, NEAR, OTHERS, batch=(STEP,)
    )
    steps = {place: report.compare(place, cp) for place, cp in PLACES.items()}
    log_probs, _ = report.reference(True)
    runs, stock = [run for run, _ in OWN.values()], {}
    for place, cp in PLACES.items():
        found = run_host_ranks(verl.train, 2, str(PEERS), cp, runs, log_probs, timeout=280)[0]
        stock[place] = dict(zip(OWN, found, strict=True))
    reference = run_host_ranks(token_losses, 1, log_probs)[0]
    return Compared(report.failures, steps, stock, reference)


def token_losses(log_probs: list[LogProbs]) -> dict[str, Reference]:
    """Of the policy and of the critic, for weights that are known only after the step."""
    from tests.host import gpt

    gpt.initialize()
    model = gpt.build()

    def of_answer(answer: Any, old: Tensor, ref: Tensor) -> Terms:
        tokens, old, ref = answer.tokens(), old.double(), ref.double()
        policy = with_entropy(*token_values(model, tokens, 1), old, ref, answer.reward)["loss"]
        value = model(tokens[None], torch.arange(len(tokens))[None], None)[0, :-1, 0]
        near = old + (value - old).clamp(-CLIP, CLIP)
        return {"policy": policy, "value": 0.5 * ((value - ref) ** 2).maximum((near - ref) ** 2)}

    terms = (of_answer(*x) for x in zip(STEP, *log_probs[0], strict=True))
    return references(model, terms, ("policy", "value"))


def test_every_aggregation_is_exact_or_refused_and_without_one_no_bit_changes(
    compared: Compared,
) -> None:
    assert compared.failures == []
    for steps in compared.steps.values():  # microbatches are unequal in samples, and in tokens
        for rank in steps["prompt_mean"][0][1]["microbatches"]:
            assert all(len({*map(size, rank)}) > 1 for size in (len, sum))


@every_place
def test_microbatch_mean_goes_by_verls_microbatches(compared: Compared, place: str) -> None:
    ((gradient, metrics),) = compared.steps[place]["microbatch_mean"]
    sample_of = {len(answer.tokens()): i for i, answer in enumerate(STEP)}
    places = tuple(
        tuple(tuple(sample_of[n] for n in lengths if n in sample_of) for lengths in rank)
        for rank in metrics["microbatches"]
    )
    w = list(enumerate(weights("microbatch_mean", STEP, places=places)))
    assert relative_error(gradient, compared.reference["policy"].gradient(w)) < FP32


@every_place
def test_the_critic_follows(compared: Compared, place: str) -> None:
    critic, steps = compared.reference["value"], compared.steps[place]
    own, w = (list(enumerate(weights(mode, STEP))) for mode in ("token_mean", "prompt_mean"))
    ((gradient, metrics),) = steps["prompt_mean, value"]
    error = relative_error(steps["value"][0][0], critic.gradient(own))
    assert relative_error(gradient, critic.gradient(w)) <= min(2 * error, FP32)
    assert relative_error(steps["value"][0][0], critic.gradient(w)) > 1e-2
    assert metrics["loss"] == pytest.approx(critic.loss(w), rel=1e-5)


@every_place
@pytest.mark.parametrize("name", OWN)
def test_numbers_of_tokens_are_mended_and_no_other_bit_changes(
    compared: Compared, place: str, name: str
) -> None:
    ((before, metrics),), ((after, then),) = (
        x[place][name] for x in (compared.stock, compared.steps)
    )
    off = relative_error(before, after)
    if place == "CP 2" and OWN[name][0].options.get("per_token"):
        # Each context-parallel rank counts tokens // 2 in each microbatch.
        assert off > (2e-2 if name == PER_TOKEN else 0)
    else:
        assert off == 0 and metrics == then


def test_auxiliary_losses_keep_verls_meaning(compared: Compared) -> None:
    # verl returns the tokens that were routed as the number of tokens, which auxiliary losses are
    # scaled by. Their gradient is the same whatever the aggregation of the loss.
    steps = compared.steps["DP 2"]
    own, ours = ([steps[f"{x}{name}"][0][0] for name in AUXILIARY] for x in ("", "ours, "))
    assert relative_error(*own) > 1e-3
    assert relative_error(ours[0], own[0]) > 1e-2
    theirs, mine = (
        {name: g - without[name] for name, g in with_loss.items()}
        for without, with_loss in (own, ours)
    )
    assert relative_error(mine, theirs) < FP32


def test_other_engines_refuse_to_start(patched: str) -> None:
    given = ["", flags("prompt_mean"), "--loss-aggregation mean"]
    ((without, said, wrong),) = run_host_ranks(verl.start_engines, 1, patched, given)
    known = {"FSDPEngineWithLMHead", "FSDPEngineWithValueHead", "MegatronEngineWithLMHead"}
    assert known <= {*said}
    for engine, text in said.items():
        refused = text.startswith(f"NotImplementedError: {engine} (backend")
        assert refused != engine.startswith("Megatron"), text
        assert "loss_aggregation" not in without[engine]
    assert wrong["MegatronEngineWithLMHead"].startswith("ModeError: unknown mode 'mean'")


def test_the_configuration_has_a_key(patched: str) -> None:
    assert f'MEGATRON_LOSS_AGG_FLAGS="{flags("prompt_mean")}"' in page("verl")
    found = re.findall(r"^(\S*loss_aggregation\.\w+=\w+)", page("verl"), re.MULTILINE)
    assert len(found) == 2
    wanted = {"mode": "constant", "divisor": 4096}
    (seen,) = run_host_ranks(verl.configured, 1, patched, found, [])
    assert seen == [[wanted, wanted, {}], [{}, {}, {}]]


def test_verls_unit_tests_pass(patched: str) -> None:
    names = ("loss_aggregation", "megatron_routed_num_tokens")
    files = [f"tests/workers/test_{name}_on_cpu.py" for name in names]
    assert all((Path(patched) / file).is_file() for file in files)
    text = verl.run_unit_tests(Path(patched), *files)
    assert re.search(r"\b34 passed", text), text
