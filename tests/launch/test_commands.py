"""Command lines of the launcher and of ``doctor``, and their answers."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

import pytest

from megatron_loss_agg.launch.doctor import check_release  # of any release
from megatron_loss_agg.launch.flags import VARIABLE
from tests.distributed import run_ranks
from tests.host.refusals import assert_says
from tests.launch.processes import answer, answers

FLAG = "--loss-aggregation"
# The launcher's arguments, as `answer` takes them, and the error, as `assert_says` takes it.
# SCRIPT is a script, whose flags are refused before it starts.
BAD_STARTS = {
    "--gpu script.py": "OptionError: SCRIPT must be a file, got '--gpu'. Write [--cpu] SCRIPT",
    "missing.py": "OptionError: SCRIPT must be a file, got 'missing.py'. Write",
    "SCRIPT @ bogus": "OptionError: unknown mode 'bogus' ... one of token_mean, ",
    "SCRIPT @=": "OptionError: unknown mode ''",
    "SCRIPT @ verl": "OptionError: unknown preset 'verl'. Choose one of verl/t",
    "SCRIPT @-audit": "OptionError: @-audit needs @, got none. Add @ MODE, or remove @-audit.",
    "SCRIPT @-split contiguous": "OptionError: @-split needs @, got none. Add @ MODE, or",
    "SCRIPT @ sum @ sum": "OptionError: @ must be given once, got 2. Remove all @ but one.",
    "SCRIPT @ sum @=sum": "OptionError: @ must be given once, got 2. Remove all @ but one.",
    "@ sum @ token_mean | SCRIPT": "OptionError: @ must be given once, got 2.",
    "SCRIPT @ sum @-empty-step=": (
        "OptionError: @-empty-step must be one of train, error, skip, got ''. Change @-empty-step."
    ),
    # Words of earlier versions.
    "SCRIPT @ sum @-empty-step step": (
        "OptionError: @-empty-step must be one of train, error, skip, got 'step'. Change @-empty"
    ),
    "SCRIPT @ sum @-mtp host": (
        "OptionError: @-mtp must be one of megatron, same, token_mean, ... microbatch_mean"
        " ... got 'host'. Change @-mtp."
    ),
    "SCRIPT @ sum @-split zigzag-pack": (
        "OptionError: @-split must be one of zigzag, zigzag_pack, contiguous, got 'zigzag-pack'."
    ),
    # Flags of earlier versions.
    "SCRIPT @ sum @-mask=model": (
        "OptionError: @-mask was removed: a mask that the model makes during its forward pass is "
        "not known before the step. Compute the mask in the data, or run a forward pass before "
        "the step, and remove @-mask."
    ),
    "SCRIPT @ sum @-moe whole": (
        "OptionError: @-moe was removed: the losses of routers are an example of an extension. Write "
        "@-extension routers:RouterLosses, with ... PYTHONPATH, and remove @-moe."
    ),
    "@ sum @-factors key | SCRIPT": (
        "OptionError: @-factors was removed: a factor of each token belongs into the losses of a "
        "TokenLoss. Multiply the losses by the factor in the script's TokenLoss, and remove"
    ),
    "SCRIPT @": "OptionError: argument @: expected one argument. Correct this flag",
    "SCRIPT @ sum @-divisor x": (
        "OptionError: argument @-divisor: invalid float value: 'x'. Correct this flag"
    ),
    "SCRIPT @-emtpy skip": "OptionError: @-emtpy is not a flag of megatron_loss_agg. Write @-empty",
    "SCRIPT --loss-agregation sum": (
        "OptionError: --loss-agregation is not a flag of megatron_loss_agg. Write @, or another of"
    ),
    "SCRIPT --loss_aggregation=sum": (
        "OptionError: --loss_aggregation is not a flag of megatron_loss_agg. Write @, or another of"
    ),
    "@ sum | SCRIPT @ sum": (
        f"OptionError: The flags must stand in {VARIABLE} or on the command line, got @ beside "
        f"{VARIABLE}. Unset {VARIABLE}, or remove @."
    ),
    "@ sum token_mean | SCRIPT": (
        f"OptionError: {VARIABLE} must hold @ MODE and flags @-... only, got token_mean. Remove"
    ),
    "SCRIPT @ custom @-function json": (
        "OptionError: @-function must be module:name of a function ... got 'json' ... Put the "
    ),
    "SCRIPT @ custom @-function no_module:f": (
        "OptionError: got 'no_module:f' (No module named 'no_module'). Put ... change @-function."
    ),
    "SCRIPT @ trl/dapo @-function json:dumps": (
        "OptionError: @-function needs @ custom, got the preset 'trl/dapo'. Remove @-func"
    ),
    "SCRIPT @ trl/dapo @-levels prompt": (
        "OptionError: @-levels needs @ nested_mean, got the preset 'trl/dapo'. Remove"
    ),
    "SCRIPT @ nested_mean @-levels prompt,sample,turn": (
        "OptionError: 'turn' ... ids of another name ... sample last"
    ),
    "SCRIPT @ nested_mean @-levels position,sample": (
        "OptionError: ['position'] ... of tokens ... @-batch"
    ),
    "SCRIPT @ sum @-extension no_module:f": (
        "OptionError: @-extension must be module:name of a function or class ... got 'no_module:f'"
    ),
    "SCRIPT @ sum @-extension builtins:dict": (
        "OptionError: @-extension must make an Extension, got builtins:dict, which makes a dict."
    ),
    "SCRIPT @ sum @-mismatch ignore": (
        "OptionError: @-mismatch must be one of stop, warn, got 'ignore'. Change @-mismatch."
    ),
    "SCRIPT @ sum @-batch no_module:f": "OptionError: @-batch must be module:name of a function",
    "--cpu SCRIPT @ sum --cpu": (
        "OptionError: --cpu must stand before the script, got it behind examples/pretrain_gpt.py. Write "
        "--cpu examples/pretrain_gpt.py ..."
    ),
}
USAGE = {"": 2, "--cpu": 2, "--help": 0, "--cpu -h": 0}


def test_a_bad_start_ends_with_one_line_before_megatron_is_imported() -> None:
    starts = [start.replace("SCRIPT", "examples/pretrain_gpt.py") for start in BAD_STARTS]
    for result, text in zip(answers(starts, with_megatron=False), BAD_STARTS.values(), strict=True):
        (line,) = result.complained.splitlines()
        assert (result.code, result.said) == (2, "")
        assert line.startswith("megatron_loss_agg: ")
        assert_says(line.removeprefix("megatron_loss_agg: "), text.replace("@", FLAG))
        # It names the flag to change.
        assert FLAG in line or "--cpu must" in line or "SCRIPT must be a file" in line


def test_a_start_without_a_script_shows_the_usage() -> None:
    for result, code in zip(answers([*USAGE], with_megatron=False), USAGE.values(), strict=True):
        assert (result.code, result.complained) == (code, "")
        assert result.said.startswith("usage: torchrun ... -m megatron_loss_agg [--cpu] SCRIPT")
        for flag in ("", "-divisor", "-empty", "-function", "-batch", "-empty-step", "-audit"):
            assert f"{FLAG}{flag} " in result.said or f"{FLAG}{flag}]" in result.said


MODE = "@ prompt_mean"
# Flags of a launch script, and the finding, as `assert_says` takes it.
DOCTOR = {
    f"examples/pretrain_gpt.py --num-layers 2 {MODE}": (
        "OK: prompt_mean; w_t = m_t / (M_prompt * N_prompt); no other flag conflicts with it; "
        "the batches must have prompt_ids"
    ),
    f"--cpu examples/pretrain_gpt.py --num-layers 2 {MODE}": "OK: prompt_mean",
    f"examples/pretrain_gpt.py --cpu {MODE}": "FAIL: OptionError: --cpu must stand before the script",
    "examples/pretrain_gpt.py --num-layers 2 @ sum @-also rollout_mean": (
        "OK: sum; w_t = m_t; also rollout_mean; no other flag conflicts with it; "
        "the batches must have rollout_ids"
    ),
    f"--sft {MODE}": (
        "OK: prompt_mean; w_t = m_t / (M_prompt * N_prompt); no other flag conflicts with it; "
        "the batches must have prompt_ids; @-sft-prompt-field FIELD gives prompt_ids"
    ),
    f"--sft {MODE} @-sft-prompt-field question_id": (
        "OK: prompt_mean; w_t = m_t / (M_prompt * N_prompt); no other flag conflicts with it"
    ),
    f"nosuch.py {MODE}": "FAIL: SCRIPT must be a file, got 'nosuch.py'. Give a training script",
    "--num-layers 2": "WARN: without @ the plugin does nothing. Add @ MODE.",
    f"--my-own-flag {MODE}": (
        "WARN: prompt_mean; w_t = m_t / (M_prompt * N_prompt); Megatron has no --my-own-flag"
    ),
    f"--num-layers two {MODE}": "FAIL: OptionError: argument --num-layers: invalid int",
    "@ constant": "FAIL: OptionError: mode 'constant' needs a div",
    # A module that lies beside the script.
    f"tests/launch/test_flags.py @-batch processes:run {MODE}": "OK: prompt_mean; w_t =",
    f"@-mod x {MODE}": "FAIL: OptionError: @-mod is not a flag of megatron_loss_agg. Write @-m",
    "@ token_mean @-moe whole": "FAIL: OptionError: @-moe was removed: the losses of routers",
    "@ token_mean @-extension routers:RouterLosses": "OK: token_mean; w_t =",
    "@ token_mean --hybrid-context-parallel": "FAIL: HostError: --hybrid-context-parallel needs",
}


def test_this_environment_is_fit_and_flags_are_checked_against_each_other() -> None:
    first, *others = answers(["doctor", *(f"doctor --json -- {flags}" for flags in DOCTOR)])
    checks = first.said.splitlines()
    assert first.code == 0, checks
    assert {line.split()[0] for line in checks} <= {"OK", "WARN"}
    names = [line.split()[1] for line in checks]
    assert names[:5] == ["python", "megatron_loss_agg", "torch", "megatron-core", "launcher"]
    assert checks[4].endswith("Megatron's schedules and optimizers, and of megatron.training")
    for result, (script_flags, text) in zip(others, DOCTOR.items(), strict=True):
        report = json.loads(result.said)
        (last,) = (finding for finding in report["findings"] if finding["check"] == "flags")
        assert_says(f"{last['level']}: {last['text']}", text.replace("@", FLAG))
        assert report["ok"] == (not text.startswith("FAIL")) == (result.code == 0)
        if "-sft-prompt-field" in script_flags:
            assert "the batches must have" not in last["text"]


def test_a_framework_that_is_not_there_is_named() -> None:
    (missing,) = answers(["doctor --framework nemo_rl"])
    assert missing.code == 1
    last = missing.said.splitlines()[-1]
    assert last.startswith("FAIL  nemo_rl") and "must be installed in this Python" in last


def test_without_megatron_it_says_what_to_install() -> None:
    (result,) = answers(["doctor --json -- @ token_mean"], with_megatron=False)
    assert result.code == 1
    by_check = {finding["check"]: finding for finding in json.loads(result.said)["findings"]}
    assert "launcher" not in by_check
    assert by_check["megatron-core"]["level"] == "FAIL"
    assert ". Run pip install megatron-core, or " in by_check["megatron-core"]["text"]
    assert by_check["flags"]["level"] == "WARN"


RELEASES = {"0.12.3": "FAIL", "0.13.1": "WARN", "0.14.0": "OK", "0.19.2": "OK"}
RELEASES |= {"0.20.0rc1": "WARN", "1.0.0": "WARN", "unknown": "FAIL"}


def test_a_release_is_judged_by_its_number() -> None:
    found = {version: check_release(version, Path("/opt/megatron")) for version in RELEASES}
    assert {version: level for version, (level, _) in found.items()} == RELEASES
    for version, (_, text) in found.items():
        assert text.startswith(f"{version} in /opt/megatron")


def test_the_checkout_of_a_script_is_examined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though it is not on PYTHONPATH: the script's own folder comes first when it runs."""
    for name, source in {
        "megatron/core/__init__.py": "__version__ = '0.12.3'",
        "megatron/core/datasets/Makefile": "",
        "megatron/training/__init__.py": "import nowhere_to_be_found",
        "pretrain_gpt.py": "",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(source)
    line = f"doctor -- {tmp_path / 'pretrain_gpt.py'} @ token_mean"

    def doctor_lines() -> dict[str, str]:
        (found,) = run_ranks(answer, 1, line, initialized=False)
        assert found.code == 1
        return {line[6:24].strip(): line for line in found.said.splitlines()}

    # Of a checkout whose data set helpers are to be built: all programs, none, all but pybind11.
    python_scripts = {"all": "exit 0", "none": None, "no pybind11": "exit 1"}
    helpers = {}
    monkeypatch.delenv("CXX", raising=False)
    for name, python in python_scripts.items():
        programs = tmp_path / name
        programs.mkdir()
        for program in ("make", "g++", "python3", "python3-config") if python else ():
            (programs / program).write_text(f"#!/bin/sh\n{python}\n")
            (programs / program).chmod(0o755)
        monkeypatch.setenv("PATH", str(programs))
        lines = doctor_lines()
        helpers[name] = lines.get("data set helpers", "")
    assert helpers["all"] == ""
    assert "without make, g++, python3, python3-config, pybind11. Install" in helpers["none"]
    assert "end there without pybind11. Install" in helpers["no pybind11"]
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    (tmp_path / f"megatron/core/datasets/helpers_cpp{suffix}").touch()
    assert "data set helpers" not in doctor_lines()

    said = f"0.12.3 in {tmp_path} scales losses in another way than 0.13 and later. Install 0.14"
    assert said in lines["megatron-core"]
    assert "No module named 'nowhere_to_be_found'" in lines["megatron.training"]
