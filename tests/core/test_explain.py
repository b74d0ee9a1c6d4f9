"""``explain``: numbers derived by hand, what it refuses, and the picture."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_loss_agg.__main__ import main

ROOT = Path(__file__).parents[2]
# Samples of 10, 1000 and 40 tokens, M = 1050 and N = 3; the first two are of one prompt, one
# rollout, one data set and one microbatch.
LENGTHS = (10, 1000, 40)
STEP = ["--lengths", "10,1000,40", "--prompts", "a,a,b", "--rollouts", "7,7,9"]
STEP += ["--datasets", "x,x,y", "--microbatches", "0,0,1", "--levels", "prompt,sample"]

UNITS = ("rollout", "prompt", "dataset", "microbatch")
# Weight of a token of each sample in some modes, with D = 100; `test_modes` has them all.
WEIGHTS = {
    "token_mean": [1 / 1050] * 3,
    "sample_mean": [1 / 30, 1 / 3000, 1 / 120],
    "nested_mean": [1 / 40, 1 / 4000, 1 / 80],
    "constant": [1 / 300] * 3,
    **{f"{unit}_mean": [1 / 2020, 1 / 2020, 1 / 80] for unit in UNITS},
}


def explained(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    assert main(["explain", *args, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


def refusal(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert main(["explain", *args]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("megatron_loss_agg: ")
    return err.removeprefix("megatron_loss_agg: ")


def write(path: Path, *rows: object) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_shares_and_weights_are_those_derived_by_hand(capsys):
    found = explained(capsys, *STEP, "--divisor", "100")
    assert found["left_out"] == {} and len(found["modes"]) == 10
    for mode, weights in WEIGHTS.items():
        row, parts = found["modes"][mode], [w * n for w, n in zip(weights, LENGTHS, strict=True)]
        assert row["weight_per_token"] == pytest.approx(weights, rel=1e-14)
        assert row["sum_of_weights"] == pytest.approx(sum(parts), rel=1e-14)
        assert row["share"] == pytest.approx([x / sum(parts) for x in parts], rel=1e-14)
        relative = [1050 * weight for weight in weights]
        assert row["relative_to_token_mean"] == pytest.approx(relative, rel=1e-14)


def test_lines_of_a_file_say_the_same_as_lists(capsys, tmp_path):
    first = {"rollout": "r", "dataset": 2, "microbatch": 0}
    third = {"prompt": 1, "rollout": "s", "dataset": "y", "microbatch": 1}
    lines = write(
        tmp_path / "step.jsonl",
        {"length": 10, "prompt": {"id": 1, "set": "x"}, **first},
        {"loss_mask": [1] * 1000, "prompt": {"set": "x", "id": 1}, **first},
        {"loss_mask": [0, True, *[0.5] * 78], **third},
    )
    options = ["--divisor", "100", "--levels", "prompt,sample"]
    modes = explained(capsys, "--jsonl", lines, *options)["modes"]
    assert modes == explained(capsys, *STEP, "--divisor", "100")["modes"]


def test_equal_microbatch_numbers_on_two_ranks_are_two_microbatches(capsys, tmp_path):
    rows = [{"length": n, "microbatch": 0, "rank": rank} for n, rank in ((10, 0), (30, 0), (20, 1))]
    path = write(tmp_path / "step.jsonl", *rows)
    (row,) = explained(capsys, "--jsonl", path, "--modes", "microbatch_mean")["modes"].values()
    # K = 2, of 40 and 20 tokens.
    assert row["weight_per_token"] == pytest.approx([1 / 80, 1 / 80, 1 / 40], rel=1e-14)


def test_samples_without_tokens_count_or_are_skipped(capsys):
    step = ["--lengths", "10,0", "--modes", "sample_mean,nemo-rl/sequence_level"]
    for empty, weight in (("count", 1 / 20), ("skip", 1 / 10)):
        for row in explained(capsys, *step, "--empty", empty)["modes"].values():
            assert (row["share"], row["weight_per_token"]) == ([1, 0], [weight, 0])
    for row in explained(capsys, "--lengths", "0,0")["modes"].values():
        assert row["share"] == row["weight_per_token"] == [0, 0]


def test_modes_without_their_input_are_left_out(capsys):
    found = explained(capsys, "--lengths", "1,2")
    assert list(found["modes"]) == ["token_mean", "sample_mean", "sample_sum", "sum"]
    assert found["left_out"].keys() == WEIGHTS.keys() - found["modes"].keys()
    assert found["left_out"]["constant"] == "needs --divisor"
    assert found["left_out"]["nested_mean"] == "needs --levels"
    assert found["left_out"]["prompt_mean"] == "needs --prompts, or 'prompt' on every line"


# Arguments after --lengths, or instead of it; and the beginning of what is said.
BAD_ARGUMENTS = {
    "1,x": "InputError: --lengths: could not convert string to float: 'x'; expected numbers with",
    "1,-1": "InputError: sample 1: a bad length or loss_mask; expected a finite number >= 0",
    "1,2 --prompts 0": "InputError: lists of 2 (length), 1 (prompt) values; expected one value for",
    "1 --modes mean": "ModeError: unknown mode 'mean'; ",
    "1 --modes trl/mean": "ModeError: unknown preset 'trl/mean'",
    "1 --modes custom": "FunctionError: function=None with mode 'custom'; expected a function",
    "1 --modes prompt_mean": "InputError: no mode to show: prompt_mean needs --prompts, ",
    "1 --divisor -1": "DivisorError: divisor=-1.0; expected a finite number > 0",
    "--jsonl no/such/file": "InputError: --jsonl no/such/file: ",
    "--jsonl no/such/file --prompts 1": "InputError: --prompts with --jsonl; expected its values",
}


@pytest.mark.parametrize("arguments", BAD_ARGUMENTS)
def test_bad_arguments_are_named(capsys, arguments):
    args = arguments.split() if arguments.startswith("--") else ["--lengths", *arguments.split()]
    assert refusal(capsys, *args).startswith(BAD_ARGUMENTS[arguments])


NO_LENGTH = "InputError: PATH:2: expected an object with either 'length' or 'loss_mask'"
NO_NUMBERS = "InputError: PATH:2: a bad length or loss_mask; expected a finite number >= 0, or a l"
# The second line of a file, and how what is said of it begins.
BAD_LINES = {
    "{": "InputError: PATH:2: Expecting property name",
    **dict.fromkeys(("[1]", "{}", '{"length": 1, "loss_mask": [1]}'), NO_LENGTH),
    **dict.fromkeys(('{"length": -1}', '{"length": "1"}', '{"loss_mask": 1}'), NO_NUMBERS),
    **dict.fromkeys(('{"loss_mask": [1, -1]}', '{"loss_mask": [NaN]}'), NO_NUMBERS),
    '{"length": 1, "prompt": 0}': "GroupError: --jsonl PATH: 1 of 2 lines have no 'prompt'; expect",
}


@pytest.mark.parametrize("line", BAD_LINES)
def test_bad_lines_are_named(capsys, tmp_path, line):
    path = tmp_path / "step.jsonl"
    path.write_text('{"length": 3}\n' + line + "\n")
    expected = BAD_LINES[line].replace("PATH", str(path))
    assert refusal(capsys, "--jsonl", str(path)).startswith(expected)
    path.write_text("\n")
    assert f"InputError: --jsonl {path}: no line" in refusal(capsys, "--jsonl", str(path))


def test_the_picture_is_written_or_the_path_named(capsys, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    for name, magic in (("a.png", b"\x89PNG"), ("a.svg", b"<?xml"), ("a.pdf", b"%PDF")):
        path = tmp_path / name
        assert main(["explain", *STEP, "--divisor", "100", "--plot", str(path)]) == 0
        assert path.read_bytes().startswith(magic)
        assert f"drawn: {path}\n" == capsys.readouterr().err
    for name in ("out.docx", "no/such/folder/out.png"):
        path = tmp_path / name
        assert f"InputError: --plot {path}: " in refusal(capsys, *STEP, "--plot", str(path))
    nothing = refusal(capsys, "--lengths", "0", "--plot", str(tmp_path / "out.png"))
    assert "InputError: --plot: no sample has loss tokens" in nothing
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    error = refusal(capsys, *STEP, "--plot", str(tmp_path / "out.png"))
    assert error.startswith("DependencyError: --plot needs matplotlib")
    assert "pip install matplotlib" in error


def test_the_guide_shows_what_is_printed(capsys):
    guide = (ROOT / "docs" / "explain.md").read_text(encoding="utf-8")
    assert main(["explain", "--lengths", "10,1000,40", "--prompts", "0,0,1"]) == 0
    out, err = capsys.readouterr()
    assert err == "" and f"```text\n{out}```\n" in guide
