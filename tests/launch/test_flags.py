"""The flags: which there are, what they make, and what a start with a bad one says."""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_loss_agg import LossAggregation
from megatron_loss_agg.aggregation import MODES
from megatron_loss_agg.errors import ModeError
from megatron_loss_agg.mcore import flags
from megatron_loss_agg.presets import PRESETS

ROOT = Path(__file__).parents[2]
FLAG = "--loss-aggregation"
SCRIPT = "examples/pretrain_gpt.py"


def given(*arguments: str) -> LossAggregation | None:
    parser = flags.add_arguments(argparse.ArgumentParser(allow_abbrev=False))
    return flags.aggregation_from(parser.parse_args(arguments))


def test_the_flag_set_is_frozen() -> None:
    parser = flags.add_arguments(argparse.ArgumentParser(add_help=False))
    found = {a.option_strings[0]: (a.dest, a.nargs, a.default) for a in parser._actions}
    assert found == {
        "--loss-aggregation": ("loss_aggregation", None, None),
        "--loss-aggregation-divisor": ("loss_aggregation_divisor", None, None),
        "--loss-aggregation-empty": ("loss_aggregation_empty", None, None),
        "--loss-aggregation-rejected": ("loss_aggregation_rejected", None, None),
        "--loss-aggregation-function": ("loss_aggregation_function", None, None),
        "--loss-aggregation-batch": ("loss_aggregation_batch", None, None),
        "--loss-aggregation-empty-step": ("loss_aggregation_empty_step", None, None),
        "--loss-aggregation-audit": ("loss_aggregation_audit", 0, False),
    }
    assert all(len(action.option_strings) == 1 for action in parser._actions)


def test_without_flags_nothing_is_asked_for() -> None:
    assert given() is None
    assert flags.aggregation_from(argparse.Namespace()) is None


@pytest.mark.parametrize("mode", sorted(MODES.keys() - {"constant", "custom"}))
def test_every_mode_is_a_value(mode: str) -> None:
    assert given(FLAG, mode) == LossAggregation(mode=mode)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_value(name: str) -> None:
    needs = PRESETS[name].needs_divisor
    divisor = ("--loss-aggregation-divisor", "8192") if needs else ()
    expected = LossAggregation.preset(name, divisor=8192.0 if needs else None)
    assert given(FLAG, name, *divisor) == expected


def test_options_reach_the_aggregation() -> None:
    constant = given(FLAG, "constant", f"{FLAG}-divisor", "7.5", f"{FLAG}-empty", "skip")
    assert constant == LossAggregation(mode="constant", divisor=7.5, empty="skip")
    custom = given(FLAG, "custom", f"{FLAG}-function", "json:dumps")
    assert custom == LossAggregation(mode="custom", function=json.dumps)


def test_a_function_that_reads_batches_is_loaded() -> None:
    parser = flags.add_arguments(argparse.ArgumentParser(allow_abbrev=False))
    args = parser.parse_args([FLAG, "token_mean", f"{FLAG}-batch", "json:dumps"])
    assert flags.read_batch_from(args) is json.dumps
    assert flags.aggregation_from(args) == LossAggregation(mode="token_mean")
    assert flags.read_batch_from(parser.parse_args([FLAG, "token_mean"])) is None


def test_what_to_do_about_an_empty_step() -> None:
    parser = flags.add_arguments(argparse.ArgumentParser(allow_abbrev=False))
    found = [
        flags.empty_step_from(parser.parse_args([FLAG, "token_mean", *extra]))
        for extra in ([], [f"{FLAG}-empty-step", "skip"], [f"{FLAG}-empty-step", "error"])
    ]
    assert found == ["step", "skip", "error"]
    with pytest.raises(ModeError, match="-empty-step stop; expected one of error, skip, step"):
        flags.empty_step_from(parser.parse_args([FLAG, "sum", f"{FLAG}-empty-step", "stop"]))
    with pytest.raises(ModeError, match="--loss-aggregation-empty-step skip without"):
        given(f"{FLAG}-empty-step", "skip")


@pytest.mark.parametrize("extra, empty", [((), "skip"), ((f"{FLAG}-empty", "count"), "count")])
def test_a_preset_keeps_its_own_choice_unless_told(extra: tuple[str, ...], empty: str) -> None:
    aggregation = given(FLAG, "nemo-rl/sequence_level", *extra)
    assert aggregation is not None and aggregation.empty == empty


# Arguments after the script; the error's name, and what its text says: what was got, and what to
# change.
BAD_FLAGS: dict[str, tuple[str, tuple[str, ...]]] = {
    f"{FLAG} bogus": ("ModeError", ("unknown mode 'bogus'", "expected one of token_mean, ")),
    f"{FLAG}=": ("ModeError", ("unknown mode ''",)),
    f"{FLAG} verl/bogus": ("ModeError", ("unknown preset 'verl/bogus'", "verl/token-mean")),
    f"{FLAG} sample_mean {FLAG}-empty maybe": (
        "ModeError",
        ("empty='maybe'", "expected 'count' or 'skip'"),
    ),
    f"{FLAG} sample_mean {FLAG}-rejected maybe": (
        "ModeError",
        ("rejected='maybe'", "expected 'count' or 'skip'"),
    ),
    f"{FLAG}-rejected skip": ("ModeError", (f"{FLAG}-rejected skip without {FLAG}", "give a mode")),
    f"{FLAG} constant": ("DivisorError", ("'constant' needs a divisor", "give one > 0")),
    f"{FLAG} trl/dr_grpo": ("DivisorError", ("'trl/dr_grpo' needs a divisor", "give one > 0")),
    f"{FLAG} open-instruct/constant": ("DivisorError", ("needs a divisor", "give one > 0")),
    f"{FLAG} constant {FLAG}-divisor many": ("DivisorError", ("'many'", "a finite number > 0")),
    f"{FLAG} constant {FLAG}-divisor nan": ("DivisorError", ("nan", "a finite number > 0")),
    f"{FLAG} constant {FLAG}-divisor inf": ("DivisorError", ("inf", "a finite number > 0")),
    f"{FLAG} constant {FLAG}-divisor 0": ("DivisorError", ("0.0", "a finite number > 0")),
    f"{FLAG} sum {FLAG}-divisor -3": ("DivisorError", ("-3.0", "a finite number > 0")),
    f"{FLAG} sum {FLAG}-divisor 1e46": ("DivisorError", ("1e+46", "from 1e-37 to 1e+37")),
    f"{FLAG} sum {FLAG}-divisor 1e-40": ("DivisorError", ("1e-40", "from 1e-37 to 1e+37")),
    f"{FLAG} token_mean {FLAG}-divisor 3": (
        "DivisorError",
        ("divisor=3.0 with mode 'token_mean'", "drop it"),
    ),
    f"{FLAG} verl/token-mean {FLAG}-divisor 3": ("DivisorError", ("takes none", "drop it")),
    f"{FLAG} custom": ("FunctionError", (f"custom without {FLAG}-function;", "module:name")),
    f"{FLAG} custom {FLAG}-function json": ("FunctionError", ("'json'", "module:name")),
    f"{FLAG} custom {FLAG}-function :dumps": ("FunctionError", ("':dumps'", "module:name")),
    f"{FLAG} custom {FLAG}-function no_module:f": (
        "FunctionError",
        ("cannot be loaded", "No module named 'no_module'", "PYTHONPATH"),
    ),
    f"{FLAG} custom {FLAG}-function json:no_function": (
        "FunctionError",
        ("cannot be loaded", "no_function", "PYTHONPATH"),
    ),
    f"{FLAG} custom {FLAG}-function json:__name__": ("FunctionError", ("is not callable",)),
    f"{FLAG} sum {FLAG}-function json:dumps": ("FunctionError", ("only 'custom' takes one",)),
    f"{FLAG} trl/dapo {FLAG}-function json:dumps": (
        "FunctionError",
        ("preset 'trl/dapo'", "only 'custom' takes one"),
    ),
    f"{FLAG} sum {FLAG}-batch json": ("FunctionError", (f"{FLAG}-batch 'json'", "module:name")),
    f"{FLAG} sum {FLAG}-batch no_module:f": (
        "FunctionError",
        (f"{FLAG}-batch 'no_module:f'", "cannot be loaded", "PYTHONPATH"),
    ),
    f"{FLAG} sum {FLAG}-batch json:__name__": ("FunctionError", ("is not callable",)),
    f"{FLAG}-divisor=": ("ModeError", (f"-divisor  without {FLAG};", "give a mode, or drop")),
    f"{FLAG} sum {FLAG}-empty-step=": ("ModeError", ("expected one of error, skip, step",)),
    f"{FLAG}-divisor 3": ("ModeError", (f"-divisor 3 without {FLAG};", "give a mode, or drop")),
    f"{FLAG}-empty skip": ("ModeError", (f"-empty skip without {FLAG};", "give a mode, or drop")),
    f"{FLAG}-function json:dumps": ("ModeError", (f"without {FLAG};", "give a mode, or drop")),
    f"{FLAG}-batch json:dumps": ("ModeError", (f"-batch json:dumps without {FLAG};", "give a")),
    f"{FLAG}-audit": ("ModeError", (f"{FLAG}-audit without {FLAG};", "give a mode, or drop")),
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


@functools.cache
def starts() -> dict[str, tuple[int, str, str, bool]]:
    """Each start's exit code, stdout and stderr, and whether Megatron was imported by then."""
    lines = [f"{SCRIPT} --train-iters 1 {arguments}" for arguments in BAD_FLAGS]
    lines += ["", "--cpu", "-h", "--help", "--cpu -h", "--gpu script.py", "missing.py"]
    command = [sys.executable, "-c", STARTS, *lines]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return dict(zip(lines, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("arguments", BAD_FLAGS)
def test_a_bad_flag_stops_the_start_with_one_line(arguments: str) -> None:
    code, said, complained, imported = starts()[f"{SCRIPT} --train-iters 1 {arguments}"]
    name, texts = BAD_FLAGS[arguments]
    assert code == 2
    assert said == ""
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


def test_a_flag_in_the_place_of_the_script_is_refused() -> None:
    code, _, complained, _ = starts()["--gpu script.py"]
    assert code == 2
    assert "'--gpu' before the script" in complained


def test_a_script_that_is_not_there_is_named() -> None:
    code, _, complained, imported = starts()["missing.py"]
    assert code == 2
    assert complained.startswith("megatron_loss_agg: InputError: 'missing.py' is not a file")
    assert complained.count("\n") == 1
    assert not imported


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
