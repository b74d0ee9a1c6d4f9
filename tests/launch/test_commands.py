"""Command lines of the launcher and of ``doctor``, and their answers."""

from __future__ import annotations

from pathlib import Path

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
    "SCRIPT @ TRL": "OptionError: unknown preset 'TRL'. Choose one of trl/grpo",
    "SCRIPT @ VERL/token-mean": "OptionError: unknown preset 'VERL/token-mean'. Choose one of verl/t",
    "SCRIPT @ seq-mean-token-mean": (
        "OptionError: unknown mode 'seq-mean-token-mean'. Choose the preset of your system, "
        "verl/seq-mean-token-mean (sample_mean), roll/seq-mean-token-mean (sample_mean), trinity/"
    ),
    "SCRIPT @-audit": "OptionError: @-audit needs @, got none. Add @ MODE, or remove @-audit.",
    "SCRIPT @-split contiguous": "OptionError: @-split needs @, got none. Add @ MODE, or",
    "SCRIPT @ sum @ sum": "OptionError: @ must be given once, got 2. Remove all @ but one.",
    "SCRIPT @ sum @=sum": "OptionError: @ must be given once, got 2. Remove all @ but one.",
    "@ sum @ token_mean | SCRIPT": "OptionError: @ must be given once, got 2.",
    "SCRIPT @ sum @-divisor 5 @-divisor=7": "OptionError: @-divisor must be given once, got 2.",
    "SCRIPT @ nested_mean @-levels prompt @-levels sample": (
        "OptionError: @-levels must be given once, got 2. Remove all @-levels but one."
    ),
    '@ "sum | SCRIPT': (
        f"OptionError: {VARIABLE} must hold flags with closed quotes, got '@ \"sum '. Close"
    ),
    '"@=sum @-empty skip" | SCRIPT': (
        f"OptionError: {VARIABLE} must hold flags that are not quoted as a whole, got '@=sum @-empty"
    ),
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
    # A flag of the version before.
    "SCRIPT @ sum @-moe whole": (
        "OptionError: @-moe was removed: the losses of routers are now an example of an extension. "
        "Write @-extension routers:RouterLosses, with ... PYTHONPATH, and remove @-moe."
    ),
    "SCRIPT @": "OptionError: argument @: expected one argument. Correct this flag",
    "SCRIPT @ sum @-divisor x": (
        "OptionError: argument @-divisor: invalid float value: 'x'. Correct this flag"
    ),
    "SCRIPT @-emtpy skip": "OptionError: @-emtpy is not a flag of megatron_loss_agg. Write @-empty",
    **{
        f"SCRIPT {flag} sum": (
            f"OptionError: {flag} is not a flag of megatron_loss_agg. Write {meant}, or another of @, "
        )
        for flag, meant in {
            "--loss-agregation": "@ MODE",
            "--loss_aggregation": "@ MODE",
            "-loss-aggregation": "@ MODE",
            "—loss-aggregation": "@ MODE",
            "@-mode": "@ MODE",
            "@-type": "@ MODE",
            "--loss-agregation-mode": "@ MODE",
            "--loss_aggregation_divisor": "@-divisor",
            "@-eval": "@-evaluation",
            "@-mtp-mode": "@-mtp",
        }.items()
    },
    "SCRIPT --loss_aggregation=sum": (
        "OptionError: --loss_aggregation is not a flag of megatron_loss_agg. Write @ MODE, or another"
    ),
    "@ sum | SCRIPT @ sum": (
        f"OptionError: The flags must be in {VARIABLE} or on the command line, got @ and "
        f"{VARIABLE}. Unset {VARIABLE}, or remove @."
    ),
    '"@ sum" | SCRIPT': (
        f"OptionError: {VARIABLE} must hold flags that are not quoted as a whole, got '@ sum' as one "
        f"word. Remove the inner quotes: {VARIABLE}='@ sum'."
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
    "SCRIPT @ nested_mean @-levels prompt": (
        "OptionError: nested_mean must have levels besides 'prompt', got only that one, which is"
    ),
    "SCRIPT @ nested_mean @-levels prompt sample turn": (
        "OptionError: 'turn' ... your own names of ids ... sample only last"
    ),
    "SCRIPT @ nested_mean @-levels position,sample": (
        "OptionError: ['position'] ... one per token ... @-batch"
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
}
USAGE = {"": 2, "--cpu": 2, "--help": 0, "--cpu -h": 0}
FIRST_WORDS = [
    "megatron_loss_agg: exact loss aggregation",
    "  torchrun ... -m megatron_loss_agg SCRIPT ... @ MODE ",
    "  python -m megatron_loss_agg doctor ",
    "  python -m megatron_loss_agg explain ",
    "docs: ",
]


def test_a_bad_start_ends_with_one_line_before_megatron_is_imported() -> None:
    starts = [start.replace("SCRIPT", "examples/pretrain_gpt.py") for start in BAD_STARTS]
    for result, text in zip(answers(starts, with_megatron=False), BAD_STARTS.values(), strict=True):
        (line,) = result.complained.splitlines()
        assert (result.code, result.said) == (2, "")
        assert line.startswith("megatron_loss_agg: ")
        assert_says(line.removeprefix("megatron_loss_agg: "), text.replace("@", FLAG))
        # It names the flag to change.
        assert FLAG in line or "SCRIPT must be a file" in line


def test_a_start_without_a_script_shows_the_commands_or_all_flags() -> None:
    for result, code in zip(answers([*USAGE], with_megatron=False), USAGE.values(), strict=True):
        assert (result.code, result.complained) == (code, "")
        if code:
            lines = result.said.splitlines()
            assert all(len(line) < 100 for line in lines)
            for line, words in zip(lines, FIRST_WORDS, strict=True):
                assert line.startswith(words.replace("@", FLAG))
            continue
        assert result.said.startswith("usage: torchrun ... -m megatron_loss_agg [--cpu] SCRIPT")
        for flag in ("", "-divisor", "-empty", "-function", "-batch", "-empty-step", "-audit"):
            assert f"{FLAG}{flag} " in result.said or f"{FLAG}{flag}]" in result.said


MODE = "@ prompt_mean"
SFT = "--sft --no-create-attention-mask-in-dataloader"
# Flags of a launch script, and the finding, as `assert_says` takes it.
DOCTOR = {
    f"examples/pretrain_gpt.py --num-layers 2 {MODE}": (
        "OK: prompt_mean; w_t = m_t / (M_prompt * N_prompt); no other flag conflicts with it; "
        "the batches must have prompt_ids"
    ),
    f"--cpu examples/pretrain_gpt.py --num-layers 2 {MODE}": "OK: prompt_mean",
    "examples/pretrain_gpt.py --num-layers 2 @ sum @-also rollout_mean": (
        "OK: sum; w_t = m_t; also rollout_mean; no other flag conflicts with it; "
        "the batches must have rollout_ids"
    ),
    f"{SFT} {MODE}": (
        "OK: prompt_mean; w_t = m_t / (M_prompt * N_prompt); no other flag conflicts with it; "
        "the batches must have prompt_ids; @-sft-prompt-field FIELD gives prompt_ids"
    ),
    f"{SFT} @ sum @-also prompt_mean": (
        "OK: sum; w_t = m_t; also prompt_mean; ... must have prompt_ids; @-sft-prompt-field FIELD gives"
    ),
    f"{SFT} {MODE} @-sft-prompt-field question_id": (
        "OK: prompt_mean; w_t = m_t / (M_prompt * N_prompt); no other flag conflicts with it"
    ),
    f"--sft {MODE}": (
        "FAIL: HostError: --sft needs batches without an attention mask, got no "
        "--no-create-attention-mask-in-dataloader. Add it."
    ),
    # The script may add a flag of its own, but the run ends at its first batch.
    f"--sft --my-own-flag 1 {MODE}": "FAIL: HostError: --sft needs batches without an attention mask",
    # 300 lines: the test set's share is 0.3 of a line. With --eval-iters 0 nobody reads it.
    f"{SFT} {MODE} --data-path CHATS": (
        "FAIL: HostError: every set with a share in --split must have a line, got none for test from "
        "the 300 lines of CHATS under '969, 30, 1'; ... ZeroDivisionError. Change --split, for"
    ),
    f"{SFT} {MODE} --data-path CHATS --split 999,1,0": "FAIL: HostError: ... none for validation from",
    f"{SFT} {MODE} --data-path CHATS --split 0.001,1,0": "FAIL: HostError: ... none for training from",
    f"{SFT} {MODE} --data-path CHATS --split 90,10,0": "OK: prompt_mean",
    # Of 4 lines there would be 2, 0 and 2, as Python rounds 1.5 and 2.5 to 2.
    f"{SFT} {MODE} --data-path CHATS --split 3,2,3": "OK: prompt_mean",
    f"{SFT} {MODE} --data-path CHATS --eval-iters 0": "OK: prompt_mean",
    f"{SFT} {MODE} --data-path nowhere.jsonl": "OK: prompt_mean",
    # As on a login node.
    f"--cross-entropy-loss-fusion --cross-entropy-fusion-impl te {MODE}": (
        "WARN: prompt_mean; ... te needs Transformer Engine 2.11 or later, and there is none here"
    ),
    f"nosuch.py {MODE}": "FAIL: SCRIPT must be a file, got 'nosuch.py'. Give a training script",
    "--num-layers 2": "WARN: without @ the plugin does nothing. Add @ MODE.",
    "--yaml-cfg run.yaml": "WARN: settings in run.yaml are not read here: a run with --yaml-cfg reads",
    f"--my-own-flag {MODE}": (
        "WARN: prompt_mean; w_t = m_t / (M_prompt * N_prompt); Megatron has no --my-own-flag"
    ),
    f"--num-layers two {MODE}": "FAIL: OptionError: argument --num-layers: invalid int",
    "@ constant": "FAIL: OptionError: mode 'constant' needs a div",
    # A module that lies beside the script.
    f"tests/launch/test_flags.py @-batch processes:run {MODE}": "OK: prompt_mean; w_t =",
    f"@-mod x {MODE}": "FAIL: OptionError: @-mod is not a flag of megatron_loss_agg. Write @ M",
    "@ token_mean @-moe whole": "FAIL: OptionError: @-moe was removed: the losses of routers",
    "@ token_mean @-extension routers:RouterLosses": "OK: token_mean; w_t =",
    "@ token_mean --hybrid-context-parallel": "FAIL: HostError: --hybrid-context-parallel needs",
}


def findings(said: str) -> dict[str, str]:
    """By the name of its check, each finding as "LEVEL: text"."""
    lines = (line.split(maxsplit=2) for line in said.splitlines())
    return {name: f"{level}: {text}" for level, name, text in lines}


def test_this_environment_is_fit_and_flags_are_checked_against_each_other(tmp_path: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    chats.write_text("{}\n" * 300)
    lines = [f"doctor -- {flags}".replace("CHATS", str(chats)) for flags in DOCTOR]
    first, *others = answers(["doctor", *lines])
    checks = first.said.splitlines()
    assert first.code == 0, checks
    assert {line.split()[0] for line in checks} <= {"OK", "WARN"}
    names = [line.split()[1] for line in checks]
    assert names[:5] == ["python", "megatron_loss_agg", "torch", "megatron-core", "launcher"]
    assert checks[4].endswith("Megatron's schedules and optimizers, and of megatron.training")
    for result, (script_flags, text) in zip(others, DOCTOR.items(), strict=True):
        last = findings(result.said)["flags"]
        assert_says(last, text.replace("@", FLAG).replace("CHATS", str(chats)))
        assert last.startswith("FAIL") == (result.code == 1)
        if "-sft-prompt-field" in script_flags:
            assert "the batches must have" not in last


def test_a_framework_that_is_not_there_is_named() -> None:
    (missing,) = answers(["doctor --framework nemo_rl"])
    assert missing.code == 1
    last = missing.said.splitlines()[-1]
    assert last.startswith("FAIL  nemo_rl") and "must be installed in this Python" in last


def test_without_megatron_it_says_what_to_install() -> None:
    (result,) = answers(["doctor -- @ token_mean"], with_megatron=False)
    assert result.code == 1
    by_check = findings(result.said)
    assert "launcher" not in by_check
    assert by_check["megatron-core"].startswith("FAIL: ")
    assert ". Run pip install megatron-core, or " in by_check["megatron-core"]
    assert by_check["flags"].startswith("WARN: ")


RELEASES = {"0.12.3": "FAIL", "0.13.1": "WARN", "0.14.0": "OK", "0.19.2": "OK"}
RELEASES |= {"0.20.0rc1": "WARN", "1.0.0": "WARN", "unknown": "FAIL"}


def test_a_release_is_judged_by_its_number() -> None:
    found = {version: check_release(version, Path("/opt/megatron")) for version in RELEASES}
    assert {version: level for version, (level, _) in found.items()} == RELEASES
    for version, (_, text) in found.items():
        assert text.startswith(f"{version} in /opt/megatron")


def test_the_checkout_of_a_script_is_examined(
    tmp_path: Path,
) -> None:
    """Though it is not on PYTHONPATH: the script's own folder comes first when it runs."""
    for name, source in {
        "megatron/core/__init__.py": "__version__ = '0.12.3'",
        "megatron/training/__init__.py": "import nowhere_to_be_found",
        "pretrain_gpt.py": "",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(source)
    line = f"doctor -- {tmp_path / 'pretrain_gpt.py'} @ token_mean"
    (result,) = run_ranks(answer, 1, line, initialized=False)
    assert result.code == 1
    by_check = findings(result.said)
    said = f"0.12.3 in {tmp_path} scales losses differently from 0.13 and later. Install 0.14"
    assert said in by_check["megatron-core"]
    assert "No module named 'nowhere_to_be_found'" in by_check["megatron.training"]
