"""``explain``: numbers derived by hand, whole outputs, what it refuses, and the picture."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_loss_agg import LossAggregation
from megatron_loss_agg.__main__ import main
from megatron_loss_agg.aggregation import MODES as ALL_MODES
from megatron_loss_agg.describe import formula  # as doctor prints it, before a step is counted
from megatron_loss_agg.explain.samples import LISTS

GUIDE = (Path(__file__).parents[2] / "docs/explain.md").read_text(encoding="utf-8")
# Samples of 10, 1000 and 40 tokens, M = 1050 and N = 3; the first two are of one prompt, one
# rollout, one data set and one microbatch.
LENGTHS = (10, 1000, 40)
STEP = ["--lengths", "10,1000,40", "--prompts", "a,a,b", "--rollouts", "7,7,9"]
STEP += ["--datasets", "x,x,y", "--microbatches", "0,0,1", "--levels", "prompt,sample"]
STEP += ["--divisor", "100"]

UNITS = ("rollout", "prompt", "dataset", "microbatch")
# The formula of each mode, and the weight of a token of each sample.
MODES = {
    "token_mean": ("m_t / 1050", [1 / 1050] * 3),
    "sample_mean": ("m_t / (M_sample * 3)", [1 / 30, 1 / 3000, 1 / 120]),
    **{f"{unit}_mean": (f"m_t / (M_{unit} * 2)", [1 / 2020, 1 / 2020, 1 / 80]) for unit in UNITS},
    "nested_mean": ("m_t / (M_sample * C * 2)", [1 / 40, 1 / 4000, 1 / 80]),
    "sample_sum": ("m_t / 3", [1 / 3] * 3),
    "constant": ("m_t / (100 * 3)", [1 / 300] * 3),
    "sum": ("m_t / 100", [1 / 100] * 3),
}


def printed(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert main(["explain", *args]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def numbers_by_mode(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    return json.loads(printed(capsys, *args, "--json"))["modes"]


def refusal(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert main(["explain", *args]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("megatron_loss_agg: ")
    return err.removeprefix("megatron_loss_agg: ")


def write(path: Path, *rows: object) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_shares_weights_and_formulas_are_those_derived_by_hand(capsys):
    numbers = numbers_by_mode(capsys, *STEP, "--empty", "skip")
    assert numbers.keys() == ALL_MODES.keys() - {"custom"}
    for mode, (words, weights) in MODES.items():
        row, parts = numbers[mode], [w * n for w, n in zip(weights, LENGTHS, strict=True)]
        assert row["formula"] == f"w_t = {words}"
        assert row["weight_per_token"] == pytest.approx(weights, rel=1e-14)
        assert row["sum_of_weights"] == pytest.approx(sum(parts), rel=1e-14)
        assert row["share"] == pytest.approx([x / sum(parts) for x in parts], rel=1e-14)
        relative = [1050 * weight for weight in weights]
        assert row["relative_to_token_mean"] == pytest.approx(relative, rel=1e-14)


def test_lines_of_a_file_weigh_the_same_as_lists(capsys, tmp_path):
    first = {"rollout": "r", "dataset": 2, "microbatch": 0}
    # Microbatches of two ranks are two, whatever their numbers.
    third = {"prompt": 1, "rollout": "s", "dataset": "y", "microbatch": 0, "rank": 1}
    lines = write(
        tmp_path / "step.jsonl",
        {"length": 10, "prompt": {"id": 1, "set": "x"}, **first, "rank": 0},
        {"loss_mask": [1] * 1000, "prompt": {"set": "x", "id": 1}, **first, "rank": 0},
        {"loss_mask": [0, True, *[0.5] * 78], **third},
    )
    options = ["--divisor", "100", "--levels", "prompt,sample"]
    assert numbers_by_mode(capsys, "--jsonl", lines, *options) == numbers_by_mode(capsys, *STEP)


def test_lists_take_commas_and_spaces_alike(capsys):
    lists = [" ".join(x.split(",")) if "," in x else x for x in STEP]
    words = [word for x in lists for word in x.split()]
    assert len(words) > len(STEP)
    wide = [x.replace(",", ", ") for x in STEP]
    for args in (words, wide):
        assert numbers_by_mode(capsys, *args) == numbers_by_mode(capsys, *STEP)
    modes = ["--modes", "token_mean", "sample_mean"]
    assert list(numbers_by_mode(capsys, "--lengths", "1", *modes)) == modes[1:]


def test_weights_of_lines_weigh_samples(capsys, tmp_path):
    lines = [{"length": 2, "weight": 3}, {"length": 6, "weight": 1}, {"length": 4, "weight": 0}]
    step = ["--jsonl", write(tmp_path / "step.jsonl", *lines), "--modes", "token_mean,sample_mean"]
    # Weights of a token under (count, skip): v / (3 * 2 + 1 * 6), v / 12, v / (4 M_s), v / (3 M_s).
    expected = {
        "count": ([3 / 12, 1 / 12, 0], [3 / 8, 1 / 24, 0]),
        "skip": ([3 / 12, 1 / 12, 0], [3 / 6, 1 / 18, 0]),
    }
    for option, weights in expected.items():
        rows = numbers_by_mode(capsys, *step, "--sample-weights", option)
        assert [row["weight_per_token"] for row in rows.values()] == [
            pytest.approx(x, rel=1e-14) for x in weights
        ]
    unweighted = numbers_by_mode(capsys, *step)
    assert unweighted["token_mean"]["weight_per_token"] == pytest.approx([1 / 12] * 3, rel=1e-14)


def test_samples_without_tokens_count_or_are_skipped(capsys):
    step = ["--lengths", "10,0", "--modes", "sample_mean,nemo-rl/sequence_level"]
    for empty, weight in (("count", 1 / 20), ("skip", 1 / 10)):
        for row in numbers_by_mode(capsys, *step, "--empty", empty).values():
            assert (row["share"], row["weight_per_token"]) == ([1, 0], [weight, 0])
    for row in numbers_by_mode(capsys, "--lengths", "0,0").values():
        assert row["share"] == row["weight_per_token"] == [0, 0]


def test_modes_without_their_input_are_left_out(capsys):
    numbers = json.loads(printed(capsys, "--lengths", "1,2", "--json"))
    assert list(numbers["modes"]) == ["token_mean", "sample_mean", "sample_sum", "sum"]
    assert numbers["left_out"].keys() == ALL_MODES.keys() - numbers["modes"].keys() - {"custom"}
    assert numbers["left_out"]["constant"] == "needs --divisor"
    assert numbers["left_out"]["nested_mean"] == "needs --levels"
    assert numbers["left_out"]["prompt_mean"] == "needs --prompts, or 'prompt' on every line"


# 1 to 24 tokens, M = 300, and a sample without any: 6 samples in each quarter.
MANY = [
    "--lengths",
    ",".join(map(str, [0, *range(24, 0, -1)])),
    "--modes",
    "token_mean,sample_mean",
]
QUARTERS = {
    # Sums of tokens over 300, a quarter of the samples, and 300 / (25 * M_s) at the ends.
    "6 1 to 6": ["7 25", "1 2 to 12"],
    "6 7 to 12": ["19 25", "1 1 to 1.714"],
    "6 13 to 18": ["31 25", "1 0.6667 to 0.9231"],
    "6 19 to 24": ["43 25", "1 0.5 to 0.6316"],
}


def test_many_samples_are_shown_by_quarters(capsys):
    lines = [" ".join(line.split()) for line in printed(capsys, *MANY).splitlines()]
    expected = [f"{ends} {row[k]}" for k in (0, 1) for ends, row in QUARTERS.items()]
    assert [line for line in lines if line in expected] == expected
    assert "25 samples, 1 of them without loss tokens; --json has each" in lines
    assert len(lines) < 20
    few = printed(capsys, "--lengths", ",".join(["1"] * 20))
    assert "\n    19       1 " in few and "quarter" not in few
    nothing = printed(capsys, "--lengths", ",".join(["0"] * 21))
    assert "21 samples, 21 of them without" in nothing


@pytest.mark.parametrize("columns", [70, 80, 200])
def test_tables_fit_into_the_terminal(capsys, tmp_path, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    many = [f"{i % 7 + i * 100}" for i in range(25)]
    groups = (arg for name in LISTS for arg in (f"--{name}", ",".join(many)))
    for step in (STEP, ["--lengths", ",".join(many), *groups, "--levels=prompt,sample"]):
        out = printed(capsys, *step, "--divisor", "1")
        tables = [line for line in out.splitlines() if not re.search(r"^[A-Z]|[:;] | \* ", line)]
        assert max(map(len, tables)) <= columns
        assert all(mode in " ".join(tables).split() for mode in MODES)
    path = write(tmp_path / "rows.jsonl", *ROWS)
    run = ["--micro-batch-size", "1", "--global-batch-size", "2", "--context-parallel-size", "2"]
    lines = printed(capsys, "--data", path, "--", *run).splitlines()
    assert max(map(len, lines)) <= max(columns, 80)


def test_the_picture_has_every_mode_in_the_same_look_on_both_sides(monkeypatch):
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    seen = []
    titles = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, _: seen.extend(figure.axes))
    monkeypatch.setattr(Figure, "suptitle", lambda _, title: titles.append(title))
    step = ["--lengths", "1,10,0,100", "--divisor", "2.5", "--prompts", "0,0,0,1"]
    modes = "token_mean,sample_sum,constant,sum,sample_mean,trl/grpo,prompt_mean"
    assert main(["explain", *step, "--modes", modes, "--plot", "out.png"]) == 0
    assert titles == ["One step of all 4 samples: 111 loss tokens"]
    left, right = (
        [(x.get_label(), x.get_color(), x.get_marker()) for x in axes.lines] for axes in seen
    )
    assert left == right
    assert [name for name, *_ in left] == modes.split(",")
    assert len({tuple(look) for _, *look in left}) == 7
    sample_mean = seen[1].lines[4]
    # Of four samples one is empty and not drawn; it counts.
    assert [*sample_mean.get_xdata()] == [1, 10, 100]
    assert [*sample_mean.get_ydata()] == pytest.approx([100 / 3] * 3)


ONE_ROW = "-- --micro-batch-size 1 --global-batch-size 1"
EITHER = "OptionError: each sample must be an object with either 'length' or 'loss_mask', got "
NUMBERS = "OptionError: a length must be a finite number >= 0, and a loss_mask a list of them, got "
NO_ROWS = "OptionError: the data must have the 1 rows of a step, got 0. Give more rows, or lower "
NO_TOKENS = "OptionError: the data must have loss tokens, got none in 1 steps of 1 rows. Read more "
SIZES = (
    "OptionError: --global-batch-size must be a multiple of --micro-batch-size, and both above 0, "
)
SEQUENCE = "DataError: the length of a sequence must be a multiple of 2 * cp_size = 4, got 3"
LENGTH = (
    "OptionError: under --context-parallel-size a row must be a 'loss_mask', padded as in the "
    "batch, since a token's place in the row decides which rank has it, got a length in PATH:1. "
)
CP2 = f"--data PATH {ONE_ROW} --context-parallel-size 2"
NO_INPUT = "OptionError: at least one mode must have all of its input, got none: "
# Arguments, and the beginning of their error.
BAD_ARGUMENTS = {
    "--lengths 1,x": (
        "OptionError: --lengths must be numbers separated by commas or spaces, got '1,x'. "
    ),
    "--lengths 1,-1": f"{NUMBERS}[-1.0] in sample 1. ",
    "--lengths 1,2 --prompts 0": (
        "OptionError: each list must have one value for each sample, got 2 (length), 1 (prompt). "
    ),
    "--lengths 1 --modes mean": "OptionError: unknown mode 'mean'. ",
    "--lengths 1 --modes trl/mean": "OptionError: unknown preset 'trl/mean'. ",
    "--lengths 1 --modes custom": "OptionError: mode 'custom' needs a function ",
    "--lengths 1 --modes prompt_mean": f"{NO_INPUT}prompt_mean needs --prompts, ",
    "--lengths 1 --modes nested_mean --levels session": (
        f"{NO_INPUT}nested_mean needs ids of ['session'], but explain has only ids of prompt, "
        "rollout, dataset. Give that input, or choose other modes (--modes)."
    ),
    "--lengths 1 --modes sum --divisor 2 --levels x,y": (
        "OptionError: --levels needs a mode that takes it, got --modes sum. Remove --levels, or add"
    ),
    "--lengths 1 --modes microbatch_mean --divisor 3": (
        "OptionError: --divisor needs a mode that takes it, got --modes microbatch_mean. Remove"
    ),
    "--lengths 1 --divisor -1": "OptionError: divisor must be a finite number > 0, got -1.0. ",
    "--lengths 1 --modes sum,mean": "OptionError: unknown mode 'mean'. ",
    "--jsonl no/such/file": (
        "OptionError: --jsonl must name a readable text file, got no/such/file "
    ),
    "--jsonl no/such/file --prompts 1": (
        "OptionError: --prompts must be used with a source other than --jsonl, got both. Remove"
    ),
    "--lengths 1 --samples 1": "OptionError: --samples must be used with a source other than --len",
    f"--data --json {ONE_ROW}": "OptionError: --json must be used with a source other than --data",
    f"--data --plot x {ONE_ROW}": "OptionError: --plot must be used with a source other than --da",
    f"--data --modes sum {ONE_ROW}": "OptionError: --modes must be used with a source other",
    "--lengths 1 --sample-weights skip": (
        "DataError: under --sample-weights each sample must have a weight, a finite number >= 0, got "
    ),
    "--lengths 1 --sft-turns last": "OptionError: --sft-turns must be used with a source other",
    "--chats x --tokenizer y --sft-weight-field w": (
        "OptionError: --sft-weight-field needs --sample-weights count or skip, got none. Add it."
    ),
    f"--data --chats x --tokenizer y --sft-weight-field w --sample-weights skip {ONE_ROW}": (
        "OptionError: --sample-weights must be used with a source other than --data"
    ),
    "": "OptionError: explain must have one source of samples, got none. Give one of --lengths, ",
    "--lengths 1 --jsonl x": (
        "OptionError: explain must have one source of samples, got --lengths and --jsonl. Give "
    ),
    "--lengths 1 --plots x": (
        "OptionError: the options of explain must be from explain --help, got --plots. Correct "
    ),
    f"--data no/such/file {ONE_ROW}": (
        "OptionError: --data must name a readable text file, got no/such/file "
    ),
    **{
        f"--data {words} {ONE_ROW}": (
            f"OptionError: explain must have one source of samples, got {words.split()[0]} and --data. "
        )
        for words in ("--jsonl x", "--lengths 1,2")
    },
    "--chats x --tokenizer y -- --seq-length 4": (
        "OptionError: a run's script and flags after -- need --data, got --seq-length without it. Add"
    ),
    f"--data x --divisor 0 {ONE_ROW}": (
        "OptionError: --divisor must be used with a source other than --data, got both. Remove one"
    ),
    "--data x -- pretrain_gpt.py --micro-batch-size 2": f"{SIZES}got 0 and 2. Give the run's own ",
    "--data x -- --micro-batch-size 2 --global-batch-size 3": f"{SIZES}got 3 and 2. Give the run's",
    "--data": (
        "OptionError: explain --data must have the run's own flags after --, got none. Add them: "
    ),
    "--data x --": "OptionError: explain --data must have the run's own flags after --, got none.",
    "--data x --micro-batch-size 2": (
        "OptionError: the options of explain must be from explain --help, got "
        "--micro-batch-size. Correct it, or put -- in front of a run's own script and flags."
    ),
    "--data x --samples 3 -- --micro-batch-size 2 --global-batch-size 4": (
        "OptionError: --samples must be at least --global-batch-size, got 3 and 4. Raise "
    ),
    "--chats x": "OptionError: --chats and --tokenizer must be given together, got no --tok",
    f"--data --tokenizer x {ONE_ROW} --seq-length 4": (
        "OptionError: --chats and --tokenizer must be given together, got no --chats. Add it."
    ),
    "--chats x --tokenizer y --prompts 1": "OptionError: --prompts must be used with a source",
    f"--data x --chats x --tokenizer y {ONE_ROW}": (
        "OptionError: explain must have one source of samples, got --chats and --data. Give one of"
    ),
    f"--data --chats x --tokenizer y {ONE_ROW}": (
        "OptionError: --chats needs the length of a row, got --seq-length 0. Add --seq-length "
    ),
    f"--data --chats x --tokenizer y {ONE_ROW} --seq-length 4 --loss-aggregation-sft-turns last": (
        "OptionError: the turns of --chats must be chosen before --, got --loss-aggregation-sft-turns "
    ),
    "--data x -- --micro-batch-size 2 --step-batch-size-schedule 0:2,9:3": (
        "OptionError: --step-batch-size-schedule must be a multiple of --micro-batch-size, and both "
        "above 0, got 2 3 and 2. Give the run's own "
    ),
    **{
        f"--data x -- --micro-batch-size 1 --step-batch-size-schedule {schedule}": (
            "OptionError: --step-batch-size-schedule must be pairs of a number of tokens and a "
            f"batch size, starting at 0 tokens, got '{schedule}'. Correct it after --"
        )
        for schedule in ("9:1", "0:x", "0", "0:1:2")
    },
    f"--data x {ONE_ROW} --step-batch-size-schedule 0:1": (
        "OptionError: Megatron takes either --global-batch-size or --step-batch-size-schedule, got both"
    ),
}
# The file at PATH of --jsonl, and of --data; and the beginning of its error.
BAD_STEPS = {
    "{": "OptionError: every line must be a JSON value, got Expecting property name",
    "\n": (
        "OptionError: a step must have samples, got a file without lines. Write a JSON object for"
    ),
    "[1]": f"{EITHER}[1] in PATH:1. ",
    '{"length": 1, "loss_mask": [1]}': EITHER,
    '{"length": "1"}': f'{NUMBERS}["1"] in PATH:1. ',
    '{"loss_mask": 1}': f"{NUMBERS}1 in PATH:1. ",
    '{"loss_mask": [1, -1]}': f"{NUMBERS}[1, -1] in PATH:1. ",
    '{"length": 3}\n{"length": 1, "prompt": 0}': (
        "DataError: 'prompt' must be on every line or on none, got 1 of 2 lines without it. Add it."
    ),
}
BAD_RUNS = {
    '"x"': f"{EITHER}x in PATH:1. ",
    '{"loss_mask": [1], "cu_seqlens": [0, 2]}': "OptionError: PATH:1: offsets must start at 0",
    '{"loss_mask": [1], "cu_seqlens": "x"}': (
        "OptionError: cu_seqlens must be a list of ints, got x in PATH:1. Correct the line."
    ),
    '{"loss_mask": [1], "cu_seqlens": [0.5]}': "OptionError: cu_seqlens must be a list of ints",
    "0": NO_TOKENS,
    "": NO_ROWS,
    "\xff": "OptionError: --data must name a readable text file, got PATH ",
}
BAD = [
    *((arguments, "", text) for arguments, text in BAD_ARGUMENTS.items()),
    *(("--jsonl PATH", lines, text) for lines, text in BAD_STEPS.items()),
    *((f"--data PATH {ONE_ROW}", lines, text) for lines, text in BAD_RUNS.items()),
    (CP2, '{"loss_mask": [1, 1, 1]}', SEQUENCE),
    (CP2, "4", LENGTH),
    (CP2, '{"length": 4}', LENGTH),
    (f"--data PATH {ONE_ROW} --global-batch-size 3", "4\n4", NO_ROWS.replace("1 r", "3 r")[:-42]),
]


@pytest.mark.parametrize("arguments, lines, expected", BAD)
def test_bad_arguments_and_lines_are_named(capsys, tmp_path, arguments, lines, expected):
    path = tmp_path / "data"
    path.write_text(lines, encoding="latin-1")
    error = refusal(capsys, *arguments.replace("PATH", str(path)).split())
    assert error.startswith(expected.replace("PATH", str(path)))


def test_the_picture_is_written_or_the_path_named(capsys, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    for name, magic in (("a.png", b"\x89PNG"), ("a.svg", b"<?xml"), ("a.pdf", b"%PDF")):
        path = tmp_path / name
        assert main(["explain", *STEP, "--plot", str(path)]) == 0
        assert path.read_bytes().startswith(magic)
        assert f"drawn: {path}\n" == capsys.readouterr().err
    for name in ("out.docx", "no/such/folder/out.png"):
        path = tmp_path / name
        error = refusal(capsys, *STEP, "--plot", str(path))
        assert error.startswith("OptionError: --plot must name a .png, .svg or .pdf ")
        assert str(path) in error
    nothing = refusal(capsys, "--lengths", "0", "--plot", str(tmp_path / "out.png"))
    assert nothing.startswith("OptionError: --plot needs a sample with loss tokens, got none. ")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    error = refusal(capsys, *STEP, "--plot", str(tmp_path / "out.png"))
    assert error.startswith("OptionError: --plot needs matplotlib")
    assert "pip install matplotlib" in error


# Lengths of four rows. In a step of two microbatches of 4 and 12 tokens, M = 16, stock Megatron
# weighs a token by 1 / (2 * 4) or 1 / (2 * 12): 16 / 8 = 2 or 16 / 24 = 0.67 times 1 / 16. In one
# microbatch it is token_mean. The difference is (4 * |2 - 1| + 12 * |2/3 - 1|) / 16 / 2 = 25 %.
FOUR = (1, 3, 8, 4)
RUN = ["--", "pretrain_gpt.py", "--micro-batch-size", "2", "--global-batch-size", "4"]


def test_the_guide_shows_what_is_printed(capsys, tmp_path):
    path = write(tmp_path / "lengths.txt", *FOUR, 100)  # the last is of no whole step
    step = ["--lengths", "10,1000,40", "--prompts", "0,0,1"]
    step += ["--modes", "token_mean,sample_mean,prompt_mean,sample_sum"]
    for args in (step, ["--data", path, *RUN]):
        out = printed(capsys, *args)
        assert f"```text\n{out}```\n" in GUIDE
    assert "25.0 % of the weight is on other" in out and "0.67 to 2.00 times" in out


def test_batch_sizes_of_a_run_are_those_of_megatron(capsys, tmp_path):
    path = write(tmp_path / "lengths.txt", *FOUR)
    run = ["--data", path, "--", "--micro-batch-size", "1"]
    # Two rows of 1 and 3 tokens, 4 / (2 * 1) = 2 and 4 / (2 * 3) = 0.67; then one row a step.
    for schedule in (["0:2 2:1"], ["2:1, 0:2"], ["0:2 0.008K:1", "--seq-length", "4"]):
        out = printed(capsys, *run, "--step-batch-size-schedule", *schedule)
        assert "gives a token 0.67 to 2.00 times" in out
        assert "\nsteps: 3, of 1 to 2 rows; samples: 4; loss tokens: 16\n" in out
        assert "\nstock: w_t = m_t / (M_part * 1 to 2)\n" in out
    run += ["--global-batch-size", "4"]
    stock = printed(capsys, *run)
    ignored = "--rampup-batch-size is ignored, as Megatron-Core 0.18 and later ignore it\n"
    ramped = printed(capsys, *run, "--rampup-batch-size", "1", "1", "9")
    assert ramped.replace(ignored, "") == stock and ignored in ramped


# Two steps of two rows on two context-parallel ranks, which hold the first and last quarter of a
# sequence, and its middle. Their tokens: 2 and 0, 4 and 4; then 2.25 and 2, 2.5 and 3.25, counted
# as 2, 2, 2 and 3. M = 10 in both steps.
ROWS = [
    {"loss_mask": [1, 1, 0, 0, 0, 0, 0, 0]},
    {"loss_mask": [1] * 8},
    {"loss_mask": [1, 1, 1, 1, 0.25, 0, 0, 0, 0, 0, 0, 0], "cu_seqlens": [0, 4, 12]},
    {"loss_mask": [0.25, 0.25, 0.25, 1, 1, 1, 1, 1]},
]
# A run's flags; the formula, and weights of each sample's tokens beside token_mean.
STOCK = {
    # 10 / (4 * 2) = 1.25 in parts of 2 tokens, 10 / (4 * 4) and 10 / (4 * 3) in others.
    "--micro-batch-size 1": (
        "(M_part * 4)",
        ["0 2 1.25", "1 8 0.62", "2 4 1.25", "3 0.25 1.25", "4 5.75 0.83 to 1.25"],
    ),
    # 6 and 4 tokens: 10 / (2 * 6) and 10 / (2 * 4); then 4.75 and 5.25, counted as 4 and 5.
    "--micro-batch-size 2": (
        "(M_part * 2)",
        ["0 2 0.83", "1 8 0.83 to 1.25", "2 4 1.00 to 1.25", "3 0.25 1.25", "4 5.75 1.00 to 1.25"],
    ),
    # 10 of 10 tokens, and 10 of 2 + 2 + 2 + 3 = 9.
    "--micro-batch-size 1 --calculate-per-token-loss": (
        "M_all",
        ["0 2 1.00", "1 8 1.00", "2 4 1.11", "3 0.25 1.11", "4 5.75 1.11"],
    ),
}


@pytest.mark.parametrize("flags", STOCK)
def test_stock_weights_are_those_derived_by_hand(capsys, tmp_path, flags):
    run = [*flags.split(), "--global-batch-size", "2", "--context-parallel-size", "2"]
    path = write(tmp_path / "rows.jsonl", *ROWS, "no row")  # which nobody reads
    lines = printed(capsys, "--data", path, "--samples", "4", "--", *run).splitlines()
    divisor, samples = STOCK[flags]
    assert f"stock: w_t = m_t / {divisor}" in lines
    numbers = [" ".join(line.split()) for line in lines]
    for sample in samples:
        assert any(line.startswith(sample) for line in numbers), numbers


def test_a_megatron_that_divides_by_whole_microbatches_is_told_by_its_source(
    capsys, tmp_path, monkeypatch
):
    run = ["--micro-batch-size", "1", "--global-batch-size", "2", "--context-parallel-size"]
    data = ["--data", write(tmp_path / "rows.jsonl", *ROWS), "--samples", "4", "--", *run]
    by_rank = printed(capsys, *data, "2")
    # The installed Megatron's, but for the division.
    path = Path("megatron", "core", "pipeline_parallel", "schedules.py")
    installed = next(file for folder in sys.path if (file := Path(folder, path)).is_file())
    local = "output_tensor /= torch.clamp(num_tokens, min=1)"
    whole = (
        "num_tokens = num_tokens.clone()\n{0}torch.distributed.all_reduce(num_tokens, group=x)\n{0}"
    )
    stock = installed.read_text()
    assert stock.count(local) == 1
    inline = stock.replace(local, whole.format(" " * 20) + local)
    by_function = stock.replace(local, f"num_tokens = whole(num_tokens, x)\n{' ' * 20}{local}")
    by_function += f"\n\ndef whole(num_tokens, x):\n    {whole.format(' ' * 4)}return num_tokens\n"
    # A process group in place of its size reduces nothing.
    refactored = stock.replace("cp_group_size=None", "cp_group=None")
    assert refactored != stock
    (tmp_path / path).parent.mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    outputs = []
    for source in (inline, by_function, refactored):
        (tmp_path / path).write_text(source)
        outputs.append(printed(capsys, *data, "2"))
    assert outputs == [outputs[0]] * 2 + [by_rank]
    assert "(M_part * 4)" in by_rank and "finding 9" not in by_rank
    assert outputs[0].startswith(printed(capsys, *data, "1").rstrip()) and "finding 9" in outputs[0]


def test_parts_and_steps_without_tokens_shrink_weights_and_move_none(capsys, tmp_path):
    path = write(tmp_path / "lengths.txt", 0, 0, 4, 0)
    run = ["--micro-batch-size", "1", "--global-batch-size", "2"]
    out = printed(capsys, "--data", path, "--", *run)
    assert out.startswith("Stock Megatron gives a token 0.50 times its weight in token_mean.\n")
    assert "\nIts weights add up to 0.50 in a step, where those of a mean add up to 1:\n" in out
    assert "\n50.0 % of the parts (microbatches on one context-parallel rank)\n" in out
    assert "\n0.0 % of the weight is on other tokens" in out


def test_the_formula_without_numbers_is_that_of_the_docstring():
    for agg, expected in {
        LossAggregation.preset("slime/constant", divisor=8): "m_t / (8 * N_rollout)",
        LossAggregation(mode="sample_mean", sample_weights="skip"): (
            "v_s * m_t / (M_sample * N_sample)"
        ),
        LossAggregation(mode="token_mean", sample_weights="count"): (
            "v_s * m_t / (M_all * V_across)"
        ),
        LossAggregation(mode="sum"): "m_t",
        LossAggregation(mode="custom", function=len): "m_t * function(samples)",
    }.items():
        assert formula(agg) == f"w_t = {expected}"
