"""The flags: which there are, what they make, and how a run ends with a bad one."""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import os
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

from megatron_loss_agg import LossAggregation
from megatron_loss_agg.errors import MaskError, ModeError
from megatron_loss_agg.mcore import LossHook
from megatron_loss_agg.mcore.flags import VARIABLE, add_arguments, aggregation_from_environment
from megatron_loss_agg.mcore.install import hook_from_args
from megatron_loss_agg.mcore.launch.once import refuse  # how a launcher ends
from tests.distributed import run_ranks
from tests.launch.processes import MODE, run_afresh

FLAG = "--loss-aggregation"


def parsed(arguments: str, **of_host: Any) -> argparse.Namespace:
    """The flags, with @ for ``--loss-aggregation``, among those of the host."""
    parser = add_arguments(argparse.ArgumentParser(allow_abbrev=False))
    args = parser.parse_args(arguments.replace("@", FLAG).split())
    return argparse.Namespace(**{**vars(args), **of_host})


def hook(arguments: str, in_training_loop: bool = False, **of_host: Any) -> LossHook:
    found = hook_from_args(parsed(arguments, **of_host), in_training_loop)
    assert found is not None
    return found


def test_the_flag_set_is_frozen() -> None:
    parser = add_arguments(argparse.ArgumentParser(add_help=False))
    found = {a.option_strings[0]: (a.dest, a.nargs, a.default) for a in parser._actions}
    values = ["", "-divisor", "-empty", "-rejected", "-function", "-batch", "-empty-step"]
    values += ["-mask", "-unmeasured", "-mtp", "-moe", "-sample-weights", "-levels", "-factors"]
    expected = {FLAG + x: ((FLAG[2:] + x).replace("-", "_"), None, None) for x in values}
    for x in ("audit", "report_datasets"):
        expected[f"{FLAG}-{x}".replace("_", "-")] = (f"loss_aggregation_{x}", 0, False)
    assert found == expected


SKIPS = LossAggregation(mode="sample_mean", rejected="skip")
AGGREGATIONS = {
    "@ rollout_mean": LossAggregation(mode="rollout_mean"),
    "@ verl/seq-mean-token-mean": LossAggregation.preset("verl/seq-mean-token-mean"),
    "@ trl/dr_grpo @-divisor 8": LossAggregation.preset("trl/dr_grpo", divisor=8.0),
    "@ constant @-divisor 7.5 @-empty skip": LossAggregation(
        mode="constant", divisor=7.5, empty="skip"
    ),
    "@ nested_mean @-levels prompt,sample": LossAggregation(
        mode="nested_mean", levels=("prompt", "sample")
    ),
    "@ custom @-function json:dumps": LossAggregation(mode="custom", function=json.dumps),
    "@ token_mean @-sample-weights skip": LossAggregation(mode="token_mean", sample_weights="skip"),
    # A preset keeps its own choice unless told.
    "@ nemo-rl/sequence_level": SKIPS,
    "@ nemo-rl/sequence_level @-empty skip": replace(SKIPS, empty="skip"),
    "@ nemo-rl/sequence_level @-rejected count": replace(SKIPS, rejected="count"),
    "@ areal/seq_mean @-empty count": LossAggregation(mode="sample_mean"),
}


@pytest.mark.parametrize("flags", AGGREGATIONS)
def test_every_option_reaches_the_aggregation(flags: str) -> None:
    (term,) = hook(flags).terms.values()
    assert term.aggregation == AGGREGATIONS[flags]


def test_without_flags_there_is_no_hook() -> None:
    assert hook_from_args(parsed("")) is hook_from_args(argparse.Namespace()) is None


def test_flags_from_a_yaml_file_are_read() -> None:
    file = argparse.Namespace(loss_aggregation="constant", loss_aggregation_divisor=7, yaml_cfg="x")
    found = hook_from_args(file)
    assert found is not None
    assert found.terms["constant"].aggregation.divisor == 7


IN_LOOP = {"of_megatron": True}
# Flags, the host's flags in its own training loop, or None elsewhere; and what of the hook's
# settings, which it compares over all ranks, these change.
SETTINGS: list[tuple[str, dict[str, Any] | None, dict[str, Any]]] = [
    # Defaults leave a run as it was.
    ("@-empty-step step @-unmeasured refuse @-mask batch @-mtp host @-moe host", None, {}),
    ("@-empty-step error", None, {"empty_step": "error"}),
    ("@-empty-step skip", None, {"empty_step": "skip"}),
    ("@-mask model", None, {"mask": "model"}),
    ("@-factors w", None, {"factors": "w"}),
    ("@-mtp same", None, {"mtp": "same"}),
    ("@-moe step", None, {"moe": "step"}),
    ("@-audit", None, {"audit": True}),
    ("@-unmeasured trust", None, {"unmeasured": "trust"}),
    ("@-audit @-unmeasured trust", None, {"audit": True, "unmeasured": "trust"}),
    ("@-report-datasets", None, {"report_datasets": 1}),
    # A reader of the user's own, if there is one.
    ("@-mask model @-batch json:dumps", None, {}),
    ("", {}, IN_LOOP),
    ("", {"sft": True}, {**IN_LOOP, "averages_quotients": True}),
    ("@-report-datasets", {"log_interval": 5}, {**IN_LOOP, "report_datasets": 5}),
]


@pytest.mark.parametrize("flags, of_host, changed", SETTINGS)
def test_a_flag_changes_its_own_setting_and_no_other(
    flags: str, of_host: dict[str, Any] | None, changed: dict[str, Any]
) -> None:
    stock = hook("@ sum")._settings
    found = hook(f"@ sum {flags}", of_host is not None, **(of_host or {}))._settings
    assert {name: x for name, x in found.items() if stock.get(name) != x} == changed


def test_a_teacher_of_the_host_is_a_second_term() -> None:
    teacher = {"logits_load_dir": "logits", "logits_load_kd_loss_alpha": 0.25}
    found = hook("@ token_mean", **teacher)
    assert [term.coefficient for term in found.terms.values()] == [0.75, 0.25]


# What needs the tokens of the whole step has them too late from a model.
@pytest.mark.parametrize(
    "flags, of_host, got",
    [
        ("sample_sum @-empty skip", {}, "empty='skip'"),
        ("prompt_mean @-empty-step skip", {}, "'prompt_mean' and empty_step='skip'"),
        ("sum @-report-datasets", {}, "an extension that needs 'dataset'"),
        ("sum", {"sft": True}, "--sft"),
        # As soon as the teacher is known.
        ("token_mean", {"logits_load_dir": "x", "logits_load_kd_loss_alpha": 0.2}, "'token_mean'"),
    ],
)
def test_masks_of_a_model_are_refused_where_they_come_too_late(
    flags: str, of_host: dict[str, Any], got: str
) -> None:
    with pytest.raises(ModeError, match=f"{got}.*with a mask that the model makes"):
        hook(f"@ {flags} @-mask model", in_training_loop=True, **of_host)


# Arguments after the script, with @ for --loss-aggregation, after those of the environment and a
# bar, if it has any; and what is said of them: the error's name, what was got, what to change.
BAD_FLAGS = {
    "@ bogus": "ModeError|unknown mode 'bogus'|expected one of token_mean, ",
    "@=": "ModeError|unknown mode ''",
    "@ verl/bogus": "ModeError|unknown preset 'verl/bogus'|verl/token-mean",
    "@ verl": "ModeError|unknown preset 'verl'; expected one of verl/t",
    "@-divisor 3": "ModeError|@-divisor without @; |give a mode, or drop it",
    "@-audit": "ModeError|@-audit without @; |give a mode, or drop it",
    "@ sample_mean @-empty maybe": "ModeError|maybe|expected 'count' or 'skip'",
    "@ sample_mean @-mask maybe": "ModeError|maybe|expected one of batch, model",
    "@ sum @-empty-step=": "ModeError|expected one of step, error, skip",
    "@ sample_sum @-empty skip @-mask model": "ModeError|with a mask that the model makes|mode sum",
    "@ sum @-factors loss_scale @-batch json:dumps": (
        "ModeError|@-factors loss_scale and a function of its own|token_factors=...)"
    ),
    "@ sum @-factors loss_scale @-mask model": (
        "ModeError|@-factors loss_scale and a function of its own|token_factors=...)"
    ),
    "@": "InputError|argument @: expected one argument",
    "@-emtpy skip": "ModeError|unknown flag @-emtpy; expected @-empty, ",
    "--loss-agregation sum": "ModeError|unknown flag --loss-agregation; expected @, or another of",
    "--loss_aggregation=sum": "ModeError|unknown flag --loss_aggregation; expected @, or another",
    "@ sum | @ sum": f"ModeError|{VARIABLE} is set, and @ is on the command line|one of the two",
    "@ sum token_mean |": f"ModeError|{VARIABLE} holds token_mean; expected",
    "@ constant @-divisor many": "InputError|argument @-divisor: invalid float value: 'many'",
    "@ constant": "DivisorError|'constant' needs a divisor|give one > 0",
    "@ verl/token-mean @-divisor 3": "DivisorError|with preset 'verl/token-mean'|expected none",
    "@ custom @-function json": "FunctionError|'json'|module:name",
    "@ custom @-function no_module:f": "FunctionError|No module named 'no_module'|PYTHONPATH",
    "@ custom @-function json:no_function": "FunctionError|cannot be loaded|no_function|PYTHONPATH",
    "@ trl/dapo @-function json:dumps": "FunctionError|@-function with the preset 'trl/dapo'",
    "@ trl/dapo @-levels prompt": "ModeError|@-levels with the preset 'trl/dapo'",
    "@ nested_mean @-levels prompt,sample,turn": "ModeError|'turn'|ids of another name|sample last",
    "@ nested_mean @-levels position,sample": "ModeError|['position']|of tokens|@-batch",
    "@ sum @-batch no_module:f": "FunctionError|@-batch 'no_module:f'|cannot be loaded|PYTHONPATH",
}
NO_SCRIPT = {
    "--gpu script.py": "InputError|'--gpu' is not a file; expected [--cpu] SCRIPT",
    "missing.py": "InputError|'missing.py' is not a file",
}
USAGE = {"": 2, "--cpu": 2, "--help": 0, "--cpu -h": 0}

STARTS = """
import contextlib, io, json, os, sys
from megatron_loss_agg.__main__ import main
results = []
for line in sys.argv[1:]:
    held, _, line = line.rpartition("|")
    os.environ["MEGATRON_LOSS_AGG_FLAGS"] = held
    said, complained = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(complained):
        code = main(line.split())
    results.append([code, said.getvalue(), complained.getvalue(), "megatron" in sys.modules])
print(json.dumps(results))
"""


def line_of(start: str) -> str:
    """The command line, after the environment's flags and a bar."""
    held, _, arguments = start.replace("@", FLAG).rpartition("|")
    script = "examples/pretrain_gpt.py --train-iters 1 " if start in BAD_FLAGS else ""
    return f"{held}|{script}{arguments}"


@functools.cache
def starts() -> dict[str, tuple[int, str, str, bool]]:
    """Each start's exit code, stdout and stderr, and whether Megatron was imported by then."""
    names = [*BAD_FLAGS, *USAGE, *NO_SCRIPT]
    done = run_afresh("-c", STARTS, *map(line_of, names))
    assert done.returncode == 0, done.stderr
    return dict(zip(names, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("start", [*BAD_FLAGS, *NO_SCRIPT])
def test_a_bad_start_ends_with_one_line_before_megatron_is_imported(start: str) -> None:
    code, said, complained, imported = starts()[start]
    name, *texts = {**BAD_FLAGS, **NO_SCRIPT}[start].replace("@", FLAG).split("|")
    assert (code, said, imported) == (2, "", False)
    assert complained.startswith(f"megatron_loss_agg: {name}: ")
    assert complained.count("\n") == 1 and complained.endswith("\n")
    assert [text for text in texts if text not in complained] == []


@pytest.mark.parametrize("start", USAGE)
def test_a_start_without_a_script_shows_the_usage(start: str) -> None:
    code, said, complained, _ = starts()[start]
    assert (code, complained) == (USAGE[start], "")
    assert said.startswith("usage: torchrun ... -m megatron_loss_agg [--cpu] SCRIPT")
    for flag in ("", "-divisor", "-empty", "-function", "-batch", "-empty-step", "-audit"):
        assert f"{FLAG}{flag} " in said or f"{FLAG}{flag}]" in said


def test_a_loop_without_a_hook_reads_the_aggregation_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert aggregation_from_environment() is None
    monkeypatch.setenv(VARIABLE, f"{FLAG} sum {FLAG}-divisor 4")
    assert aggregation_from_environment() == LossAggregation(mode="sum", divisor=4)
    for useless in (f"{FLAG}-audit", "token_mean", "--lr 1"):
        monkeypatch.setenv(VARIABLE, f"{FLAG} token_mean {useless}")
        with pytest.raises(ModeError, match=f"{VARIABLE} holds {useless}.*expected {FLAG}"):
            aggregation_from_environment()


# An error that several ranks end with, and how long they wait for one another.

PATIENCE = 30.0  # seconds until a rank that still waits for another fails the test


class End(NamedTuple):
    """The error of each rank, and how many lines are printed."""

    errors: tuple[str | None, ...]
    lines: int
    delays: tuple[float, ...] = (0, 0, 0)  # seconds
    environment: dict[str, str] | None = None
    connected: bool = False  # the ranks have a process group


WITHOUT_TORCHRUN = {"TORCHELASTIC_USE_AGENT_STORE": "False"}
ENDS = {
    "of all ranks": End(("a", "a", "a"), 1, (0.3, 0, 0)),
    "of one rank": End((None, "a"), 1),
    "one that comes later than the others' word of it": End(("b", "a", "b"), 2, (0, 1, 0.3)),
    "of a rank that comes too late": End(("a", "a"), 1, (4, 0)),
    # Nobody listens; or there is no store of torchrun's, and that of the process group, or none.
    "of ranks without a store": End(("a", "a"), 2, environment={"MASTER_PORT": "1"}),
    "of a process group": End(("a", "a"), 1, environment=WITHOUT_TORCHRUN, connected=True),
    "of ranks without torchrun": End(("a", "a"), 2, environment=WITHOUT_TORCHRUN),
}


def refusal(end: End) -> str:
    """What this rank says of its error."""
    if end.connected:
        dist.init_process_group("gloo")
    os.environ.update(end.environment or {})
    rank = int(os.environ["RANK"])
    time.sleep(end.delays[rank])
    error = end.errors[rank]
    with contextlib.redirect_stderr(io.StringIO()) as said:
        assert error is None or refuse(MaskError(error)) == 2
    return said.getvalue()


@pytest.mark.parametrize("name", ENDS)
def test_an_error_is_printed_once_if_the_ranks_can_reach_each_other(name: str) -> None:
    end = ENDS[name]
    found = run_ranks(refusal, len(end.errors), end, timeout=PATIENCE, initialized=False)
    printed = {rank: text for rank, text in enumerate(found) if text}
    assert len(printed) == end.lines
    assert {end.errors[rank] for rank in printed} == {*end.errors} - {None}
    for rank, text in printed.items():
        line = rf"megatron_loss_agg: MaskError: {end.errors[rank]}( \(.+ rank.*\))?\n"
        assert re.fullmatch(line, text)


# Two ranks fail with one error, and the third with another.
FAILS = """
import sys, torch
import torch.distributed as dist
from megatron_loss_agg.errors import MaskError, PeerError

stood_in = [m for m in sys.modules if m.startswith('megatron_loss_agg.mcore.cpu')]
print(stood_in, torch.cuda.current_stream.__module__, sys.argv[1:], flush=True)
dist.init_process_group("gloo")
dist.barrier()
def train():
    raise MaskError("bad mask") if dist.get_rank() else PeerError("see the others")
train()
"""


def test_each_error_in_a_job_of_torchrun_is_printed_once_with_its_traceback(
    tmp_path: Path,
) -> None:
    script = tmp_path / "script.py"
    script.write_text(FAILS)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3")
    done = run_afresh(*torchrun, "-m", "megatron_loss_agg", str(script), "--flag", *MODE)
    said = done.stdout + done.stderr.partition("torch/distributed/elastic")[0]
    for text, number in {
        "MaskError: bad mask$": 1,
        "PeerError: see the others$": 1,
        "Traceback": 2,
        r'script\.py", line \d+, in train$': 2,
        # Without --cpu, nothing stands in for a GPU. The flags are not the script's.
        r"^\[\] torch\.cuda \['--flag'\]$": 3,
    }.items():
        assert len(re.findall(text, said, re.MULTILINE)) == number, (text, said[-5000:])
