"""The flags: which there are, what they make, and what a start with a bad one says."""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_loss_agg import LossAggregation
from megatron_loss_agg.aggregation import MODES
from megatron_loss_agg.errors import ModeError
from megatron_loss_agg.mcore import (
    Audit,
    DatasetReports,
    Distillation,
    Loop,
    LossHook,
    MultiTokenPrediction,
    RouterLosses,
    read_batch,
    read_samples,
)
from megatron_loss_agg.mcore.install import hook_from_args
from megatron_loss_agg.mcore.launch import flags
from megatron_loss_agg.presets import PRESETS

ROOT = Path(__file__).parents[2]
FLAG = "--loss-aggregation"


def parsed(*arguments: str) -> argparse.Namespace:
    parser = flags.add_arguments(argparse.ArgumentParser(allow_abbrev=False))
    return parser.parse_args(arguments)


def given(*arguments: str) -> LossAggregation | None:
    return flags.aggregation_from(parsed(*arguments))


def asked(args: argparse.Namespace, in_training_loop: bool = False) -> LossHook:
    hook = hook_from_args(args, in_training_loop)
    assert hook is not None
    return hook


def settings(hook: LossHook) -> list[Any]:
    """The extensions with their settings, without those that every hook has."""
    found = [(type(x), x.settings()) for x in hook._extensions]
    default = LossHook(LossAggregation(mode="sum"))._extensions
    return [x for x in found if x not in [(type(y), y.settings()) for y in default]]


def test_the_flag_set_is_frozen() -> None:
    parser = flags.add_arguments(argparse.ArgumentParser(add_help=False))
    found = {tuple(a.option_strings): (a.dest, a.nargs, a.default) for a in parser._actions}
    values = ("", "-divisor", "-empty", "-rejected", "-function", "-batch", "-empty-step")
    values += ("-mask", "-unmeasured", "-mtp", "-moe", "-sample-weights")
    expected = {(FLAG + x,): ((FLAG[2:] + x).replace("-", "_"), None, None) for x in values}
    switches = ("audit", "report-datasets")
    expected |= {
        (f"{FLAG}-{x}",): (f"loss_aggregation_{x}".replace("-", "_"), 0, False) for x in switches
    }
    assert found == expected


@pytest.mark.parametrize("name", [*sorted(MODES.keys() - {"constant", "custom"}), *PRESETS])
def test_every_mode_and_every_preset_is_a_value(name: str) -> None:
    if name in MODES:
        assert given(FLAG, name) == LossAggregation(mode=name)
        return
    needs = PRESETS[name].needs_divisor
    divisor = ("--loss-aggregation-divisor", "8192") if needs else ()
    expected = LossAggregation.preset(name, divisor=8192.0 if needs else None)
    assert given(FLAG, name, *divisor) == expected


def test_options_reach_the_aggregation_and_without_flags_there_is_none() -> None:
    assert given() is None
    assert flags.aggregation_from(argparse.Namespace()) is None
    constant = given(FLAG, "constant", f"{FLAG}-divisor", "7.5", f"{FLAG}-empty", "skip")
    assert constant == LossAggregation(mode="constant", divisor=7.5, empty="skip")
    custom = given(FLAG, "custom", f"{FLAG}-function", "json:dumps")
    assert custom == LossAggregation(mode="custom", function=json.dumps)
    args = parsed(FLAG, "token_mean", f"{FLAG}-batch", "json:dumps")
    assert asked(args)._source.read_batch is json.dumps
    assert asked(args).terms["token_mean"].aggregation == LossAggregation(mode="token_mean")
    assert asked(parsed(FLAG, "token_mean"))._source.read_batch is read_batch
    # A preset keeps its own choice unless told.
    preset = "nemo-rl/sequence_level"
    skips = LossAggregation(mode="sample_mean", rejected="skip")
    assert given(FLAG, preset) == skips
    assert given(FLAG, preset, f"{FLAG}-empty", "skip") == replace(skips, empty="skip")
    assert given(FLAG, preset, f"{FLAG}-rejected", "count") == replace(skips, rejected="count")
    weighed = given(FLAG, preset, f"{FLAG}-sample-weights", "count")
    assert weighed == replace(skips, sample_weights="count")
    weighed = given(FLAG, "token_mean", f"{FLAG}-sample-weights", "skip")
    assert weighed == LossAggregation(mode="token_mean", sample_weights="skip")


CHOICES = {  # the first is the default
    "empty_step": ("step", "error", "skip"),
    "unmeasured": ("refuse", "trust"),
    "mask": ("batch", "model"),
    "mtp": ("host", "same"),
    "moe": ("host", "step"),
}


def read(*arguments: str) -> list[Any]:
    """What the flags ask for, in a form that can be compared."""
    hook = asked(parsed(FLAG, "sum", *arguments))
    return [settings(hook), hook._empty_step, hook._source.read_batch]


def flag(name: str) -> str:
    return f"{FLAG}-{name.replace('_', '-')}"


def test_the_defaults_leave_a_run_as_it_was() -> None:
    assert read() == [[], "step", read_batch]
    for name, (default, *_) in CHOICES.items():
        assert read(flag(name), default) == read()


@pytest.mark.parametrize(
    "name, value", [(n, v) for n, values in CHOICES.items() for v in values[1:]]
)
def test_a_choice_is_read(name: str, value: str) -> None:
    extensions_found, empty_step, reader = read(flag(name), value)
    extensions = {"unmeasured": Audit, "mtp": MultiTokenPrediction, "moe": RouterLosses}
    expected = [extensions[name]] if name in extensions else []
    assert [kind for kind, _ in extensions_found] == expected
    assert empty_step == (value if name == "empty_step" else "step")
    assert reader is (read_samples if name == "mask" else read_batch)
    with pytest.raises(ModeError, match=f"{flag(name)} without"):
        given(flag(name), value)


def test_switches_are_extensions() -> None:
    audits = (Audit(repeat=True), Audit(trust=True), Audit(repeat=True, trust=True))
    switches = (["-audit"], ["-unmeasured", "trust"], ["-audit", f"{FLAG}-unmeasured", "trust"])
    for audit, (first, *more) in zip(audits, switches, strict=True):
        assert read(FLAG + first, *more) == [[(Audit, audit.settings())], "step", read_batch]
    args = parsed(FLAG, "sum", f"{FLAG}-report-datasets")
    args.log_interval = 5
    for in_training_loop, interval in ((False, 1), (True, 5)):
        expected = [(DatasetReports, DatasetReports(interval).settings())]
        assert settings(asked(args, in_training_loop)) == expected


def test_a_reader_of_masks_that_the_model_makes_is_the_users_own_if_there_is_one() -> None:
    args = parsed(FLAG, "sum", f"{FLAG}-mask", "model", f"{FLAG}-batch", "json:dumps")
    assert asked(args)._source.read_batch is json.dumps


def test_a_teacher_of_the_host_is_a_second_term() -> None:
    args = parsed(FLAG, "token_mean")
    args.logits_load_dir, args.logits_load_kd_loss_alpha = "logits", 0.25
    hook = asked(args)
    assert [kind for kind, _ in settings(hook)] == [Distillation]
    assert [term.coefficient for term in hook.terms.values()] == [0.75, 0.25]
    # Masks that the model makes are refused for two terms, as soon as the teacher is known.
    args.loss_aggregation_mask = "model"
    with pytest.raises(ModeError, match="'token_mean' with a mask that the model makes"):
        hook_from_args(args)


def test_the_loop_is_that_of_the_host_and_its_evaluations_those_of_its_flags() -> None:
    args = parsed(FLAG, "sum")
    assert asked(args)._loop == Loop()
    assert asked(args, True)._loop == Loop(of_megatron=True)
    args.sft = True
    assert asked(args)._loop == Loop()
    assert asked(args, True)._loop == Loop(of_megatron=True, averages_quotients=True)
    args.loss_aggregation_mask = "model"
    with pytest.raises(ModeError, match="--sft"):
        hook_from_args(args, True)


# Arguments after the script, with @ for --loss-aggregation; and what is said of them: the error's
# name, what was got, and what to change.
NO_MODE, NOT_FINITE = "without @;|give a mode, or drop", "a finite number > 0"
CHOICE = "expected 'count' or 'skip'"
BAD_FLAGS = {
    "@ bogus": "ModeError|unknown mode 'bogus'|expected one of token_mean, ",
    "@=": "ModeError|unknown mode ''",
    "@ verl/bogus": "ModeError|unknown preset 'verl/bogus'|verl/token-mean",
    "@ sample_mean @-empty maybe": f"ModeError|empty='maybe'|{CHOICE}",
    "@ sample_mean @-rejected maybe": f"ModeError|rejected='maybe'|{CHOICE}",
    "@ sum @-sample-weights maybe": f"ModeError|sample_weights='maybe'|{CHOICE}",
    "@-sample-weights skip": "ModeError|@-sample-weights without @|give a mode",
    "@ sum @-empty-step=": "ModeError|expected one of step, error, skip",
    "@ sum @-unmeasured maybe": "ModeError|@-unmeasured maybe|expected one of refuse, trust",
    "@ sum @-mask maybe": "ModeError|@-mask maybe|expected one of batch, model",
    "@ prompt_mean @-mask model": "ModeError|'prompt_mean' with a mask that the model|mode sum, ",
    "@ sum @-mtp all": "ModeError|@-mtp all|expected one of host, same",
    "@-mtp same": "ModeError|@-mtp without @|give a mode",
    "@ sum @-moe maybe": "ModeError|@-moe maybe|expected one of host, step",
    "@-moe step": "ModeError|@-moe without @|give a mode",
    "@-unmeasured trust": "ModeError|@-unmeasured without @|give a mode",
    "@-rejected skip": "ModeError|@-rejected without @|give a mode",
    "@-divisor=": "InputError|argument @-divisor: invalid float value: ''",
    "@-divisor 3": f"ModeError|-divisor {NO_MODE}",
    "@-empty skip": f"ModeError|-empty {NO_MODE}",
    "@-function json:dumps": f"ModeError|{NO_MODE}",
    "@-batch json:dumps": f"ModeError|-batch {NO_MODE}",
    "@-audit": f"ModeError|@-audit {NO_MODE}",
    "@-report-datasets": f"ModeError|@-report-datasets {NO_MODE}",
    "@ constant": "DivisorError|'constant' needs a divisor|give one > 0",
    "@ trl/dr_grpo": "DivisorError|divisor=None with preset 'trl/dr_grpo'|a number > 0",
    "@ constant @-divisor many": "InputError|argument @-divisor: invalid float value: 'many'",
    "@ constant @-divisor nan": f"DivisorError|nan|{NOT_FINITE}",
    "@ sum @-divisor 0": "DivisorError|divisor=0.0|> 0",
    "@ token_mean @-divisor 3": "DivisorError|divisor=3.0 with mode 'token_mean'|drop it",
    "@ verl/token-mean @-divisor 3": "DivisorError|with preset 'verl/token-mean'|expected none",
    "@ custom": "FunctionError|function=None with mode 'custom'; expected a function",
    "@ custom @-function json": "FunctionError|'json'|module:name",
    "@ custom @-function :dumps": "FunctionError|':dumps'|module:name",
    "@ custom @-function no_module:f": "FunctionError|No module named 'no_module'|PYTHONPATH",
    "@ custom @-function json:no_function": "FunctionError|cannot be loaded|no_function|PYTHONPATH",
    "@ custom @-function json:__name__": "FunctionError|function='json' with mode 'custom'",
    "@ sum @-function json:dumps": "FunctionError|with mode 'sum'|expected none",
    "@ trl/dapo @-function json:dumps": "FunctionError|@-function with the preset 'trl/dapo'",
    "@ sum @-batch json": "FunctionError|@-batch 'json'|module:name",
    "@ sum @-batch no_module:f": "FunctionError|@-batch 'no_module:f'|cannot be loaded|PYTHONPATH",
}

STARTS = """
import contextlib, io, json, sys
from megatron_loss_agg.__main__ import main
results = []
for line in sys.argv[1:]:
    said, complained = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(complained):
        code = main(line.split())
    results.append([code, said.getvalue(), complained.getvalue(), "megatron" in sys.modules])
print(json.dumps(results))
"""


def bad_start(arguments: str) -> str:
    return f"examples/pretrain_gpt.py --train-iters 1 {arguments.replace('@', FLAG)}"


@functools.cache
def starts() -> dict[str, tuple[int, str, str, bool]]:
    """Each start's exit code, stdout and stderr, and whether Megatron was imported by then."""
    lines = [bad_start(arguments) for arguments in BAD_FLAGS]
    lines += ["", "--cpu", "-h", "--help", "--cpu -h", "--gpu script.py", "missing.py"]
    command = [sys.executable, "-c", STARTS, *lines]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return dict(zip(lines, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("arguments", BAD_FLAGS)
def test_a_bad_flag_stops_the_start_with_one_line(arguments: str) -> None:
    code, said, complained, imported = starts()[bad_start(arguments)]
    name, *texts = BAD_FLAGS[arguments].replace("@", FLAG).split("|")
    assert (code, said) == (2, "")
    assert complained.startswith(f"megatron_loss_agg: {name}: ")
    assert complained.count("\n") == 1 and complained.endswith("\n")
    for text in texts:
        assert text in complained
    assert not imported


@pytest.mark.parametrize(
    "line, code", [("", 2), ("--cpu", 2), ("-h", 0), ("--help", 0), ("--cpu -h", 0)]
)
def test_a_start_without_a_script_shows_the_usage(line: str, code: int) -> None:
    found, said, complained, _ = starts()[line]
    assert (found, complained) == (code, "")
    assert said.startswith("usage: torchrun ... -m megatron_loss_agg [--cpu] SCRIPT")
    options = ("divisor", "empty", "rejected", "function", "batch", "empty-step", "audit")
    for flag in (FLAG, *(f"{FLAG}-{option}" for option in options)):
        assert f"{flag} " in said or f"{flag}]" in said


def test_a_start_with_something_else_than_a_script_is_refused() -> None:
    code, _, complained, _ = starts()["--gpu script.py"]
    assert code == 2
    assert "'--gpu' is not a file; expected [--cpu] SCRIPT" in complained
    code, _, complained, imported = starts()["missing.py"]
    assert (code, imported) == (2, False)
    assert complained.startswith("megatron_loss_agg: InputError: 'missing.py' is not a file")
    assert complained.count("\n") == 1


def test_the_command_itself_stops_before_megatron_is_imported(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit('the script ran')")
    tripwire = tmp_path / "megatron" / "__init__.py"
    tripwire.parent.mkdir()
    tripwire.write_text("raise SystemExit('Megatron was imported')")
    environment: dict[str, Any] = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "megatron_loss_agg", str(script), FLAG]
    bad, good = (
        subprocess.run([*command, mode], env=environment, capture_output=True, text=True)
        for mode in ("bogus", "token_mean")
    )
    assert bad.returncode == 2
    assert bad.stderr.startswith("megatron_loss_agg: ModeError: unknown mode 'bogus'")
    assert bad.stderr.count("\n") == 1
    assert "Megatron was imported" in good.stderr  # the wire is in the way of a good flag


def test_the_environment_gives_the_aggregation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(flags.VARIABLE, raising=False)
    assert flags.aggregation_from_environment() is None
    monkeypatch.setenv(flags.VARIABLE, "--loss-aggregation sum --loss-aggregation-divisor 4")
    assert flags.aggregation_from_environment() == LossAggregation(mode="sum", divisor=4)


@pytest.mark.parametrize("held", ["--loss-aggregation-audit", "token_mean", "--lr 1"])
def test_the_environment_holds_nothing_without_effect(
    held: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(flags.VARIABLE, f"--loss-aggregation token_mean {held}")
    with pytest.raises(
        ModeError, match=f"{flags.VARIABLE} holds {held}.*expected --loss-aggregation"
    ):
        flags.aggregation_from_environment()
