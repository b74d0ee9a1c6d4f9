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
STEP = ["--lengths", "10,1000,40", "--prompts", "a,a,b", "--rollouts", "7,7,9"]
STEP += ["--datasets", "x,x,y", "--microbatches", "0,0,1"]

# Weight of a token of each sample; with D = 100.
PAIRED = [1 / 2020, 1 / 2020, 1 / 80]
WEIGHTS = {
    "token_mean": [1 / 1050] * 3,
    "sample_mean": [1 / 30, 1 / 3000, 1 / 120],
    "rollout_mean": PAIRED,
    "prompt_mean": PAIRED,
    "dataset_mean": PAIRED,
    "sample_sum": [1 / 3] * 3,
    "constant": [1 / 300] * 3,
    "sum": [1 / 100] * 3,
    "microbatch_mean": PAIRED,
}
# A sample's part of the sum of all weights, where that is not its part of the tokens.
PAIRED_SHARES = [10 / 1010 / 2, 1000 / 1010 / 2, 1 / 2]
SHARES = dict.fromkeys(
    ("rollout_mean", "prompt_mean", "dataset_mean", "microbatch_mean"), PAIRED_SHARES
)
SHARES |= {"sample_mean": [1 / 3] * 3}


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
    assert found["left_out"] == {}
    assert found["modes"].keys() == WEIGHTS.keys()
    for mode, row in found["modes"].items():
        share = SHARES.get(mode, [10 / 1050, 1000 / 1050, 40 / 1050])
        assert row["share"] == pytest.approx(share, rel=1e-14)
        assert row["weight_per_token"] == pytest.approx(WEIGHTS[mode], rel=1e-14)
        relative = [1050 * weight for weight in WEIGHTS[mode]]
        assert row["relative_to_token_mean"] == pytest.approx(relative, rel=1e-14)
        total = sum(w * n for w, n in zip(WEIGHTS[mode], (10, 1000, 40), strict=True))
        assert row["sum_of_weights"] == pytest.approx(total, rel=1e-14)


def test_lines_of_a_file_say_the_same_as_lists(capsys, tmp_path):
    first = {"rollout": "r", "dataset": 2, "microbatch": 0}
    lines = write(
        tmp_path / "step.jsonl",
        {"length": 10, "prompt": {"id": 1, "set": "x"}, **first},
        {"loss_mask": [1] * 1000, "prompt": {"set": "x", "id": 1}, **first},
        {
            "loss_mask": [0, True, *[0.5] * 78],
            "prompt": 1,
            "rollout": "s",
            "dataset": "y",
            "microbatch": 1,
        },
    )
    modes = explained(capsys, "--jsonl", lines, "--divisor", "100")["modes"]
    assert modes == explained(capsys, *STEP, "--divisor", "100")["modes"]


def test_equal_microbatch_numbers_on_two_ranks_are_two_microbatches(capsys, tmp_path):
    rows = [{"length": n, "microbatch": 0, "rank": rank} for n, rank in ((10, 0), (30, 0), (40, 1))]
    path = write(tmp_path / "step.jsonl", *rows)
    (row,) = explained(capsys, "--jsonl", path, "--modes", "microbatch_mean")["modes"].values()
    # K = 2, with 40 tokens each.
    assert row["weight_per_token"] == pytest.approx([1 / 80] * 3, rel=1e-14)


def test_samples_without_tokens_count_or_are_skipped(capsys):
    step = ["--lengths", "10,0", "--modes", "sample_mean,sample_sum,nemo-rl/sequence_level"]
    modes = explained(capsys, *step)["modes"]
    assert [row["share"] for row in modes.values()] == [[1.0, 0.0]] * 3
    assert [row["weight_per_token"][0] for row in modes.values()] == [1 / 20, 1 / 2, 1 / 20]
    skipped = explained(capsys, *step, "--empty", "skip")["modes"]
    assert skipped["sample_mean"]["weight_per_token"] == [1 / 10, 0]
    for row in explained(capsys, "--lengths", "0,0")["modes"].values():
        assert row["share"] == row["weight_per_token"] == [0, 0]


def test_modes_without_their_input_are_left_out(capsys):
    found = explained(capsys, "--lengths", "1,2")
    assert list(found["modes"]) == ["token_mean", "sample_mean", "sample_sum", "sum"]
    assert found["left_out"] == {
        "rollout_mean": "needs --rollouts, or 'rollout' on every line",
        "prompt_mean": "needs --prompts, or 'prompt' on every line",
        "dataset_mean": "needs --datasets, or 'dataset' on every line",
        "constant": "needs --divisor",
        "microbatch_mean": "needs --microbatches, or 'microbatch' on every line",
    }


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


NO_LENGTH = "expected an object with either 'length' or 'loss_mask'"
NO_NUMBERS = "a bad length or loss_mask; expected a finite number >= 0, or a list of them"
# The second line of a file, and how what is said of it begins; an InputError of that line, unless
# named.
BAD_LINES = {
    "{": "Expecting property name",
    "[1]": NO_LENGTH,
    "{}": NO_LENGTH,
    '{"length": 1, "loss_mask": [1]}': NO_LENGTH,
    '{"length": -1}': NO_NUMBERS,
    '{"length": "1"}': NO_NUMBERS,
    '{"loss_mask": 1}': NO_NUMBERS,
    '{"loss_mask": [1, -1]}': NO_NUMBERS,
    '{"loss_mask": [NaN]}': NO_NUMBERS,
    '{"length": 1, "prompt": 0}': "GroupError: --jsonl PATH: 1 of 2 lines have no 'prompt'; expect",
}


@pytest.mark.parametrize("line", BAD_LINES)
def test_bad_lines_are_named(capsys, tmp_path, line):
    path, message = tmp_path / "step.jsonl", BAD_LINES[line]
    path.write_text('{"length": 3}\n' + line + "\n")
    message = message if "Error: " in message else f"InputError: PATH:2: {message}"
    said = refusal(capsys, "--jsonl", str(path))
    assert said.startswith(message.replace("PATH", str(path)))
    path.write_text("\n")
    assert f"InputError: --jsonl {path}: no line" in refusal(capsys, "--jsonl", str(path))


def test_the_picture_without_matplotlib_says_what_to_install(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    error = refusal(capsys, *STEP, "--plot", str(tmp_path / "out.png"))
    assert error.startswith("DependencyError: --plot needs matplotlib")
    assert "pip install matplotlib" in error


def test_the_picture_is_written_or_the_path_named(capsys, tmp_path):
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


def test_the_guide_shows_what_is_printed(capsys):
    guide = (ROOT / "docs" / "explain.md").read_text(encoding="utf-8")
    assert main(["explain", "--lengths", "10,1000,40", "--prompts", "0,0,1"]) == 0
    out, err = capsys.readouterr()
    assert err == "" and f"```text\n{out}```\n" in guide
