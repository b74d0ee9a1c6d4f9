"""ms-swift 4.6.0: its own Megatron trainer on the real Megatron-Core, with the plugin of its page.

Stock is exact for the token mean under the per-token flag, where nothing is weighted by
``loss_scale``. That is the mode of its own whose rounding error bounds ours.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import pytest
import torch

from megatron_loss_agg.mcore.flags import VARIABLE
from tests.distributed import run_ranks
from tests.frameworks.harness import FP32, ROOT, attempt, page, references, text_of, token_values
from tests.host.reference import Gradient, Reference, relative_error
from tests.host.steps import EMPTY, PLACES, Places, Weights, sequences, weights_of

pytestmark = pytest.mark.host

PLUGIN = "examples/ms_swift_plugin.py"
MASKS = ("01", "fractional")
SAMPLE_MEAN = "--loss-aggregation sample_mean"
run = partial(run_ranks, preload="tests.frameworks.ms_swift")


class Case(NamedTuple):
    """How a step is divided over two ranks, and what ms-swift is told."""

    cp: int
    layout: str  # rows, padding_free, or packing
    per_token: bool
    dft: bool = False
    pp: int = 1

    @property
    def places(self) -> Places:
        return PLACES[2 // self.cp // self.pp]


ONE_RANK = Case(1, "rows", True)


class Outcome(NamedTuple):
    """Of a step."""

    gradient: Gradient
    logs: dict[str, float]


def trainer_for(case: Case, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    from tests.frameworks import ms_swift
    from tests.host import gpt

    gpt.initialize(cp=case.cp, pipeline_model_parallel_size=case.pp)
    torch.set_default_dtype(dtype)
    settings = {
        "packing": case.layout == "packing",
        "fp8_recipe": "mxfp8",  # without FP8 all that it does is padding, also of packs
        "calculate_per_token_loss": case.per_token,
        "num_microbatches": len(case.places[0]),
        "pipeline_model_parallel_size": case.pp,
        "enable_dft_loss": case.dft,
        "enable_channel_loss": case.dft,
        **changes,
    }
    args = ms_swift.arguments(case.cp, case.layout != "rows", dtype, **settings)
    trainer = ms_swift.Trainer(args, ms_swift.template_for(args))
    trainer.setup_model_training()
    return trainer


def batches(trainer: Any, case: Case, masks: str = "01") -> Any:
    """This rank's batches, from ms-swift's data collator."""
    from megatron.core import mpu

    place = case.places[mpu.get_data_parallel_rank()]
    samples = [[encoded(i, masks) for i in microbatch] for microbatch in place]
    return iter([trainer.data_collator([s] if trainer.args.packing else s) for s in samples])


def encoded(i: int, masks: str) -> dict[str, Any]:
    """A sample as ms-swift's template encodes it: labels at their own token, -100 where masked.

    Args:
        masks: as of `sequences`; the fractions are ms-swift's loss_scale.
    """
    sequence = sequences(masks)[i]
    tokens, scale = text_of(sequence).tolist(), sequence.sample.mask
    labels = [token if m else -100 for token, m in zip(tokens, (0, *scale), strict=True)]
    sample = {"input_ids": tokens, "labels": labels, "length": len(tokens)}
    return sample if masks == "01" else {**sample, "loss_scale": [0.0, *scale]}


def load_plugin(args: Any, flags: str | None) -> None:
    """As ms-swift does with --external_plugins."""
    if flags is not None:
        os.environ[VARIABLE] = flags
    args.external_plugins = [str(ROOT / PLUGIN)]
    args._import_external_plugins()


def one_step(trainer: Any, step: Any) -> Outcome:
    from tests.host import gradients

    trainer.run_train_step(step, None)
    (model,) = trainer.wrapped_models
    return Outcome(gradients.of(model), dict(trainer.callbacks[0].logs))


def stock_and_hooked(case: Case, masks: Sequence[str], flags: str) -> dict[Any, Outcome]:
    """Steps without the plugin, then with it; their logs with those of an evaluation."""
    trainer = trainer_for(case)
    found = {("stock", kind): one_step(trainer, batches(trainer, case, kind)) for kind in masks}
    load_plugin(trainer.args, flags)
    for kind in masks:
        gradient, _ = one_step(trainer, batches(trainer, case, kind))
        trainer.evaluate(batches(trainer, case, kind))
        found["hooked", kind] = Outcome(gradient, dict(trainer.callbacks[0].logs))
    return found


def compute_reference() -> dict[str, Reference]:
    """Of every sample alone, in fp64: ``loss``, and ``dft`` scaled by the token's probability."""
    (model,) = trainer_for(ONE_RANK, torch.float64).unwrapped_models
    log_probs = (token_values(model, text_of(sequence), 1)[0] for sequence in sequences())
    terms = ({"loss": -lp, "dft": -lp * lp.detach().exp()} for lp in log_probs)
    return references(model, terms, ("loss", "dft"))


@cache
def reference() -> dict[str, Reference]:
    (found,) = run(compute_reference, 1)
    return found


def weights(mode: str, masks: str) -> Weights:
    """The same for all parallelisms."""
    return weights_of(mode, PLACES[1], masks)


@cache
def steps(cp: int, layout: str, per_token: bool, mode: str) -> dict[tuple[str, str], Outcome]:
    """By "stock" or "hooked", and masks; the same on both ranks."""
    case, flags = Case(cp, layout, per_token), f"--loss-aggregation {mode}"
    first, second = run(stock_and_hooked, 2, case, MASKS, flags)
    for key, outcome in first.items():
        assert outcome.logs == second[key].logs
        assert relative_error(outcome.gradient, second[key].gradient) == 0
    return first


def error(outcome: Outcome, mode: str, masks: str, loss: str = "loss") -> float:
    whole = reference()[loss].gradient(weights(mode, masks))
    return relative_error(outcome.gradient, {name: whole[name] for name in outcome.gradient})


LAYOUTS = [(2, "rows"), (2, "packing"), (1, "rows"), (1, "padding_free")]
CASES = [
    *[(*place, flag, "sample_mean") for place in LAYOUTS for flag in (True, False)],
    (2, "packing", True, "token_mean"),
    (2, "packing", False, "token_mean"),
    (1, "rows", False, "token_mean"),
]


@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("cp, layout, per_token, mode", CASES)
def test_a_step_is_exact_and_logs_the_token_mean_and_the_aggregated_loss(
    cp: int, layout: str, per_token: bool, mode: str, masks: str
) -> None:
    found = steps(cp, layout, per_token, mode)
    hooked, stock = found["hooked", masks], found["stock", masks]
    own = error(steps(cp, layout, True, "sample_mean")["stock", "01"], "token_mean", "01")
    assert error(hooked, mode, masks) <= min(2 * own, FP32)
    # What it would be without the plugin.
    stock_is_exact = (per_token, mode, masks) == (True, "token_mean", "01")
    assert stock_is_exact or error(stock, mode, masks) > 1e-2
    scales = [m for sequence in sequences(masks) for m in sequence.sample.mask]
    of_mode, of_tokens = (
        reference()["loss"].loss(weights(name, masks)) for name in (mode, "token_mean")
    )
    # ms-swift's own divides by the number of tokens, whatever their weights.
    of_tokens *= sum(scales) / sum(m > 0 for m in scales)
    for prefix in ("", "eval_"):
        assert hooked.logs[f"{prefix}{mode}_loss"] == pytest.approx(of_mode, rel=1e-6)
        assert hooked.logs[f"{prefix}loss"] == pytest.approx(of_tokens, rel=1e-6)
    added = hooked.logs.keys() - stock.logs.keys()
    assert added == {f"{mode}_loss", f"eval_{mode}_loss", "eval_loss"}


STOCK = {
    ("token_mean", "01", 2, "packing"): (0.0, 0.66),
    ("token_mean", "01", 1, "rows"): (0.0, 0.93),
    ("token_mean", "fractional", 2, "packing"): (0.024, 0.63),
    ("sample_mean", "01", 2, "packing"): (0.69, 0.72),
    ("sample_mean", "01", 1, "rows"): (0.69, 0.50),
}
"""On the page: errors of stock with the per-token flag and without."""


@pytest.mark.parametrize("mode, masks, cp, layout", STOCK)
def test_stock_is_as_wrong_as_the_page_says(mode: str, masks: str, cp: int, layout: str) -> None:
    of_flag = (steps(cp, layout, flag, "sample_mean")["stock", masks] for flag in (True, False))
    errors = [error(stock, mode, masks) for stock in of_flag]
    assert errors == pytest.approx(STOCK[mode, masks, cp, layout], abs=5e-3)


def test_dft_and_losses_by_channel_stay() -> None:
    case = Case(2, "packing", True, dft=True)
    found, _ = run(stock_and_hooked, 2, case, MASKS[:1], SAMPLE_MEAN)
    hooked, stock = found["hooked", "01"], found["stock", "01"]
    assert error(hooked, "sample_mean", "01", "dft") < FP32
    for log in ("loss_None", "loss"):
        assert hooked.logs[log] == stock.logs[log]


def test_pipeline_stages_without_labels_pass() -> None:
    case = Case(1, "padding_free", True, pp=2)
    first, last = run(stock_and_hooked, 2, case, MASKS[:1], SAMPLE_MEAN)
    for found in (first, last):
        own = error(found["stock", "01"], "token_mean", "01")
        assert error(found["hooked", "01"], "sample_mean", "01") <= 2 * own < 2e-6
    expected = reference()["loss"].loss(weights("sample_mean", "01"))
    assert last["hooked", "01"].logs["sample_mean_loss"] == pytest.approx(expected, rel=1e-6)
    assert "sample_mean_loss" not in first["hooked", "01"].logs


def steps_without_a_hook(flags: str) -> tuple[list[Outcome], bool]:
    """Before the plugin is loaded, after it is without flags, and in a worker of a data loader.

    And whether the schedule is Megatron's.
    """
    from megatron.core.pipeline_parallel import schedules
    from torch.utils.data import _utils

    trainer, schedule = trainer_for(ONE_RANK), schedules.forward_backward_no_pipelining
    outcomes = [one_step(trainer, batches(trainer, ONE_RANK))]
    for given in (None, flags):
        if given:
            _utils.worker._worker_info = object()
        load_plugin(trainer.args, given)
        outcomes.append(one_step(trainer, batches(trainer, ONE_RANK)))
    return outcomes, schedules.forward_backward_no_pipelining is schedule


def test_without_the_variable_or_in_a_worker_of_a_data_loader_nothing_changes() -> None:
    ((outcomes, is_stock),) = run(steps_without_a_hook, 1, SAMPLE_MEAN)
    before, *after = outcomes
    assert is_stock
    for outcome in after:
        assert outcome.logs == before.logs
        assert all(before.gradient[name].equal(g) for name, g in outcome.gradient.items())


def empty_step(flags: str) -> tuple[bool, dict[str, float]]:
    """Whether a step whose tokens are all masked moves the model, and its logs."""
    decay = dict.fromkeys(("weight_decay", "start_weight_decay", "end_weight_decay"), 0.1)
    trainer = trainer_for(ONE_RANK, num_microbatches=1, lr=0.1, **decay)
    load_plugin(trainer.args, flags)
    (model,) = trainer.unwrapped_models
    before = [parameter.detach().clone() for parameter in model.parameters()]
    outcome = one_step(trainer, iter([trainer.data_collator([encoded(EMPTY, "01")])]))
    return not all(map(torch.equal, before, model.parameters())), outcome.logs


def test_an_empty_step_can_be_skipped() -> None:
    ((moved, logs),) = run(empty_step, 1, f"{SAMPLE_MEAN} --loss-aggregation-empty-step skip")
    assert not moved
    assert logs["grad_norm"] == 0
    ((moved, _),) = run(empty_step, 1, SAMPLE_MEAN)
    assert moved  # by its weight decay


OTHERS = {
    "MegatronTrainer": "seq_cls",
    "MegatronEmbeddingTrainer": "embedding",
    "MegatronRerankerTrainer": "reranker",
}


def refusals(flags: str) -> list[str]:
    """What the trainers `OTHERS` raise when they are made."""
    from swift.megatron import trainers

    from tests.frameworks import ms_swift
    from tests.host import gpt

    gpt.initialize()
    errors = []
    for name, task in OTHERS.items():
        args = ms_swift.arguments(1, False, torch.float32, task_type=task)
        load_plugin(args, flags)
        cls = ms_swift.Trainer if name == "MegatronTrainer" else getattr(trainers, name)
        errors.append(attempt(cls, args, ms_swift.template_for(args)))
    return errors


def test_other_trainers_are_refused_before_their_model_is_built() -> None:
    (errors,) = run(refusals, 1, SAMPLE_MEAN)
    for (name, task), said in zip(OTHERS.items(), errors, strict=True):
        name = name.replace("MegatronTrainer", "Trainer")  # of the tests
        assert said.startswith(f"HostError: {name} with --task_type {task}; expected megatron sft")
        assert said.endswith("unset MEGATRON_LOSS_AGG_FLAGS")


def test_the_page_names_the_plugin_and_the_flags_of_these_tests() -> None:
    text, pins = page("ms-swift"), (ROOT / "ci/peers.txt").read_text().split()
    assert set(re.findall(r'MEGATRON_LOSS_AGG_FLAGS="(.*?)"', text)) == {SAMPLE_MEAN}
    assert set(re.findall(r"--external_plugins (\S+)", text)) == {PLUGIN}
    assert all(pin in text for pin in pins if pin.startswith(("ms-swift", "mcore-bridge")))
