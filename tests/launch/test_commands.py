"""Command lines of the launcher and of ``doctor``, and what they answer."""

from __future__ import annotations

import json
from pathlib import Path

from megatron_loss_agg.launch.doctor import check_release  # of any release
from megatron_loss_agg.launch.flags import VARIABLE
from tests.distributed import run_ranks
from tests.host.refusals import assert_says
from tests.launch.processes import answer, answers

FLAG = "--loss-aggregation"
# The launcher's arguments, as `answer` takes them, and what is said of them, as `assert_says` does.
# SCRIPT is a script; what its flags say is refused before it starts.
BAD_STARTS = {
    "--gpu script.py": "OptionError: '--gpu' is not a file; expected [--cpu] SCRIPT",
    "missing.py": "OptionError: 'missing.py' is not a file",
    "SCRIPT @ bogus": "OptionError: unknown mode 'bogus' ... expected one of token_mean, ",
    "SCRIPT @=": "OptionError: unknown mode ''",
    "SCRIPT @ verl": "OptionError: unknown preset 'verl'; expected one of verl/t",
    "SCRIPT @-audit": "OptionError: @-audit without @; give a mode, or drop it",
    "SCRIPT @ sum @-empty-step=": "OptionError: expected one of step, error, skip",
    "SCRIPT @ sum @-factors key @-batch json:dumps": (
        "OptionError: @-factors key and a function of its own ... token_factors=...)"
    ),
    "SCRIPT @ sum @-factors key @-mask model": (
        "OptionError: @-factors key and a function of its own ... token_factors=...)"
    ),
    "SCRIPT @": "OptionError: argument @: expected one argument",
    "SCRIPT @-emtpy skip": "OptionError: unknown flag @-emtpy; expected @-empty, ",
    "SCRIPT --loss-agregation sum": (
        "OptionError: unknown flag --loss-agregation; expected @, or another of"
    ),
    "SCRIPT --loss_aggregation=sum": (
        "OptionError: unknown flag --loss_aggregation; expected @, or another of"
    ),
    "@ sum | SCRIPT @ sum": (
        f"OptionError: {VARIABLE} is set, and @ is on the command line ... one of the two"
    ),
    "@ sum token_mean | SCRIPT": f"OptionError: {VARIABLE} holds token_mean; expected",
    "SCRIPT @ custom @-function json": "OptionError: 'json' ... module:name",
    "SCRIPT @ custom @-function no_module:f": (
        "OptionError: cannot be loaded ... No module named 'no_module' ... PYTHONPATH"
    ),
    "SCRIPT @ trl/dapo @-function json:dumps": "OptionError: @-function with the preset",
    "SCRIPT @ trl/dapo @-levels prompt": "OptionError: @-levels with the preset 'trl/dapo'",
    "SCRIPT @ nested_mean @-levels prompt,sample,turn": (
        "OptionError: 'turn' ... ids of another name ... sample last"
    ),
    "SCRIPT @ nested_mean @-levels position,sample": (
        "OptionError: ['position'] ... of tokens ... @-batch"
    ),
    "SCRIPT @ sum @-batch no_module:f": "OptionError: @-batch 'no_module:f' cannot be loaded",
}
USAGE = {"": 2, "--cpu": 2, "--help": 0, "--cpu -h": 0}


def test_a_bad_start_ends_with_one_line_before_megatron_is_imported() -> None:
    starts = [start.replace("SCRIPT", "examples/pretrain_gpt.py") for start in BAD_STARTS]
    for found, says in zip(answers(starts, with_megatron=False), BAD_STARTS.values(), strict=True):
        (line,) = found.complained.splitlines()
        assert (found.code, found.said) == (2, "")
        assert line.startswith("megatron_loss_agg: ")
        assert_says(line.removeprefix("megatron_loss_agg: "), says.replace("@", FLAG))


def test_a_start_without_a_script_shows_the_usage() -> None:
    for found, code in zip(answers([*USAGE], with_megatron=False), USAGE.values(), strict=True):
        assert (found.code, found.complained) == (code, "")
        assert found.said.startswith("usage: torchrun ... -m megatron_loss_agg [--cpu] SCRIPT")
        for flag in ("", "-divisor", "-empty", "-function", "-batch", "-empty-step", "-audit"):
            assert f"{FLAG}{flag} " in found.said or f"{FLAG}{flag}]" in found.said


MODE, LATE = "@ prompt_mean", "@-mask model @ token_mean"
# Flags of a launch script, and what is found, as `assert_says` takes it.
DOCTOR = {
    f"examples/pretrain_gpt.py --num-layers 2 {MODE}": (
        "OK: prompt_mean; w_t = m_t / (M_prompt * N_prompt); no other flag conflicts with it; "
        "the batches must have prompt_ids"
    ),
    f"nosuch.py {MODE}": "FAIL: nosuch.py is not a file; expected a training script",
    "--num-layers 2": "WARN: without @ the plugin does nothing",
    f"--my-own-flag {MODE}": (
        "WARN: prompt_mean; w_t = m_t / (M_prompt * N_prompt); Megatron has no --my-own-flag"
    ),
    f"--num-layers two {MODE}": "FAIL: OptionError: argument --num-layers: invalid int",
    "@ constant": "FAIL: OptionError: mode 'constant' needs a div",
    # A module that lies beside the script.
    f"tests/launch/test_flags.py @-batch processes:run {MODE}": "OK: prompt_mean; w_t =",
    f"@-mod x {MODE}": "FAIL: OptionError: unknown flag @-mod",
    LATE: "OK: token_mean; w_t = m_t / M_step; no other",
    f"{LATE} --sft": "FAIL: OptionError: Loop(averages_quotients=True) (Meg",
}


def test_this_environment_is_fit_and_flags_are_checked_against_each_other() -> None:
    first, *others = answers(["doctor", *(f"doctor --json -- {flags}" for flags in DOCTOR)])
    checks = first.said.splitlines()
    assert first.code == 0, checks
    assert {line.split()[0] for line in checks} <= {"OK", "WARN"}
    names = [line.split()[1] for line in checks]
    assert names[:5] == ["python", "megatron_loss_agg", "torch", "megatron-core", "seams"]
    assert checks[4].endswith("wrap Megatron's schedules, optimizers, megatron.training")
    for found, says in zip(others, DOCTOR.values(), strict=True):
        report = json.loads(found.said)
        (last,) = (finding for finding in report["findings"] if finding["check"] == "flags")
        assert_says(f"{last['level']}: {last['text']}", says.replace("@", FLAG))
        assert report["ok"] == (not says.startswith("FAIL")) == (found.code == 0)


def test_without_megatron_it_says_what_to_install() -> None:
    (found,) = answers(["doctor --json -- @ token_mean"], with_megatron=False)
    assert found.code == 1
    by_check = {finding["check"]: finding for finding in json.loads(found.said)["findings"]}
    assert "seams" not in by_check
    assert by_check["megatron-core"]["level"] == "FAIL"
    assert "pip install megatron-core, or " in by_check["megatron-core"]["text"]
    assert by_check["flags"]["level"] == "WARN"


RELEASES = {"0.12.3": "FAIL", "0.13.1": "WARN", "0.14.0": "OK", "0.19.2": "OK"}
RELEASES |= {"0.20.0rc1": "WARN", "1.0.0": "WARN", "unknown": "FAIL"}


def test_a_release_is_judged_by_its_number() -> None:
    found = {version: check_release(version, Path("/opt/megatron")) for version in RELEASES}
    assert {version: finding.level for version, finding in found.items()} == RELEASES
    assert all(x.text.startswith(f"{version} in /opt/megatron") for version, x in found.items())


def test_the_checkout_of_a_script_is_examined(tmp_path: Path) -> None:
    """Though it is not on PYTHONPATH: the script's own folder comes first when it runs."""
    for name, source in {
        "megatron/core/__init__.py": "__version__ = '0.12.3'",
        "megatron/training/__init__.py": "import nowhere_to_be_found",
        "pretrain_gpt.py": "",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(source)
    line = f"doctor -- {tmp_path / 'pretrain_gpt.py'} @ token_mean"
    (found,) = run_ranks(answer, 1, line, initialized=False)
    assert found.code == 1
    lines = {line.split()[1]: line for line in found.said.splitlines()}
    assert f"0.12.3 in {tmp_path}: averages losses unlike 0.13" in lines["megatron-core"]
    assert "No module named 'nowhere_to_be_found'" in lines["megatron.training"]
