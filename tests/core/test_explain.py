"""``explain``: numbers derived by hand, what it refuses, and the picture."""

from __future__ import annotations

import io
import itertools
import json
import random
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_loss_agg import LossAggregation, Microbatch
from megatron_loss_agg.__main__ import main
from megatron_loss_agg.explain.rows import Layout, Rows  # whose digits `explain` rounds
from megatron_loss_agg.weights import formula  # as doctor says it, before a step is counted

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
    "1 --modes nested_mean --levels session": "InputError: no mode to show: nested_mean needs ids "
    "of ['session'], and explain has those of prompt, rollout, dataset",
    "1 --divisor -1": "DivisorError: divisor=-1.0; expected a finite number > 0",
    "--jsonl no/such/file": "InputError: --jsonl no/such/file: ",
    "--jsonl no/such/file --prompts 1": "InputError: --prompts with --jsonl; expected its values",
    "--data no/such/file -- --micro-batch-size 2 --global-batch-size 2": (
        "InputError: --data no/such/file: "
    ),
    "--data x -- pretrain_gpt.py --micro-batch-size 2": (
        "InputError: --micro-batch-size 2, --global-batch-size 0 after --; expected the run's own"
    ),
    "--data x -- --micro-batch-size 2 --global-batch-size 3": (
        "InputError: --micro-batch-size 2, --global-batch-size 3 after --; expected the run's own"
    ),
    "--data x --against=--global-batch-size=4 -- --micro-batch-size 1 --global-batch-size 2": (
        "InputError: --against has another --global-batch-size; expected the same step"
    ),
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


def test_the_formula_has_the_numbers_of_the_step(capsys):
    found = explained(capsys, *STEP, "--divisor", "100", "--empty", "skip")["modes"]
    assert {mode: row["formula"].removeprefix("w_t = ") for mode, row in found.items()} == {
        "token_mean": "m_t / 1050",
        "sample_mean": "m_t / (M_sample * 3)",
        **{f"{unit}_mean": f"m_t / (M_{unit} * 2)" for unit in UNITS},
        "nested_mean": "m_t / (M_sample * C * 2)",
        "sample_sum": "m_t / 3",
        "constant": "m_t / (100 * 3)",
        "sum": "m_t / 100",
    }


# Lengths of four rows. In a step of two microbatches of 4 and 12 tokens, M = 16, stock Megatron
# weighs a token by 1 / (2 * 4) or 1 / (2 * 12): 16 / 8 = 2 or 16 / 24 = 0.67 times 1 / 16. In one
# microbatch it is token_mean. The difference is (4 * |2 - 1| + 12 * |2/3 - 1|) / 16 / 2 = 25 %.
FOUR = (1, 3, 8, 4)
RUN = ["--", "pretrain_gpt.py", "--micro-batch-size", "2", "--global-batch-size", "4"]


def test_what_stock_megatron_weighs_is_printed_as_the_guide_shows(capsys, tmp_path):
    path = write(tmp_path / "lengths.txt", *FOUR, 100)  # the last is of no whole step
    assert main(["explain", "--data", path, *RUN]) == 0
    out, err = capsys.readouterr()
    assert err == "" and f"```text\n{out}```\n" in (ROOT / "docs/explain.md").read_text()
    lines = out.splitlines()
    assert lines[0].startswith("Stock Megatron weighs a token 0.67 to 2.00 times what token_mean")
    assert lines[1] == "steps: 1, of 4 rows; samples: 4; loss tokens: 16"
    assert [line.split() for line in lines[7:12]] == [
        ["loss", "tokens", "samples", "stock", "--micro-batch-size", "4"],
        ["1", "1", "2.00", "1.00"],
        ["3", "1", "2.00", "1.00"],
        ["4", "1", "0.67", "1.00"],
        ["8", "1", "0.67", "1.00"],
    ]
    assert "Stock Megatron with --micro-batch-size 4: 25.0 % of the weight is on other" in out
    assert "weighs up to 2.00 times" in out


def test_masks_packs_and_a_picture_of_data(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    # The same four samples as masks, two in a pack; and what nobody reads.
    pack = {"loss_mask": [1, 0, 1, 1, 1, 0], "cu_seqlens": [0, 2, 6]}
    path = write(tmp_path / "x.jsonl", pack, {"loss_mask": [0, *[1] * 8]}, {"length": 4}, "no row")
    run = ["--micro-batch-size", "1", "--global-batch-size", "3"]
    plot, flags = tmp_path / "x.png", ["--samples", "3"]
    assert main(["explain", "--data", path, *flags, "--plot", str(plot), "--", *run]) == 0
    out, err = capsys.readouterr()
    # M / (H M_h): 16 / (3 * 4), and 16 / (3 * 8) in the microbatch of 8 tokens.
    assert "weighs a token 0.67 to 1.33 times" in out and "samples: 4;" in out
    assert "stock: w_t = m_t / (M_part * 3)\ntoken_mean: w_t = m_t / 16 in" in out
    assert "sample_mean: w_t = m_t / (M_sample * 4) in" in out
    assert "with --micro-batch-size 1: 0.0 % " in out  # 2 does not divide 3
    assert err == f"drawn: {plot}, of step 1\n"
    assert plot.read_bytes().startswith(b"\x89PNG")


def stock_by_hand(
    rows: list[tuple[list[float], list[int]]], mbs: int, gbs: int, cp: int, per_token: bool
) -> list[tuple[float, float, float]]:
    """Of each sample: the sum of its weights, and the least and largest of a token.

    As multiples of 1 / M. Sequences of ``rows`` (mask, offsets) are dealt in zigzag to ``cp``
    ranks; a rank divides its sum of a microbatch by its tokens, and the ranks' and microbatches'
    quotients are averaged; or, per token, the step's sum is divided by the counted tokens.
    """
    found = []
    for first in range(0, len(rows), gbs):
        places, sums = [], defaultdict(float)
        for row, (mask, offsets) in enumerate(rows[first : first + gbs]):
            for start, end in itertools.pairwise(offsets):
                chunk = (end - start) // (2 * cp)
                tokens = []
                for t in range(start, end):
                    k = (t - start) // chunk if cp > 1 else 0
                    part = row // mbs, min(k, 2 * cp - 1 - k)
                    sums[part] += mask[t]
                    tokens.append((mask[t], part))
                places.append(tokens)
        step, parts = sum(sums.values()), gbs // mbs * cp
        divisors = {part: parts * max(int(x), 1) for part, x in sums.items()}
        if per_token:
            divisors = dict.fromkeys(sums, max(sum(map(int, sums.values())), 1))
        for tokens in places:
            w = [(m, step / divisors[part]) for m, part in tokens if m]
            weights = [x for _, x in w] or [0.0]
            found.append((sum(m * x for m, x in w), min(weights), max(weights)))
    return found


@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize("values", [(0.0, 1.0), (0.0, 0.25)])
def test_stock_weights_are_those_of_a_reference(cp, values):
    draw = random.Random(cp)
    rows: list[tuple[list[float], list[int]]] = []
    for _ in range(12):
        offsets = [0]
        for _ in range(draw.randint(1, 3)):
            offsets.append(offsets[-1] + 8 * draw.randint(1, 3))
        active = draw.choice((0.1, 0.5, 0.9))
        rows.append(([values[draw.random() < active] for _ in range(offsets[-1])], offsets))
    given = [
        Microbatch(torch.tensor([mask]), torch.tensor(offsets) if k % 2 else None)
        for k, (mask, offsets) in enumerate(rows)
    ]
    rows = [(m, offsets if k % 2 else [0, len(m)]) for k, (m, offsets) in enumerate(rows)]
    read = Rows.of(given, 4, (cp, 2))
    for mbs, per_token in itertools.product((1, 2, 4), (False, True)):
        weights = read.stock(Layout(mbs, 4, cp, per_token))
        expected = stock_by_hand(rows, mbs, 4, cp, per_token)
        for own, tokens, (total, least, most) in zip(
            weights, read.tokens_SC, expected, strict=True
        ):
            assert float((own * tokens).sum()) == pytest.approx(total, rel=1e-13)
            if most:
                ends = [float(x) for x in own[tokens > 0].aminmax()]
                assert ends == pytest.approx([least, most], rel=1e-13)


def test_parts_and_steps_without_tokens_shrink_weights_and_move_none(capsys, tmp_path):
    path = write(tmp_path / "lengths.txt", 0, 0, 4, 0)
    run = ["--micro-batch-size", "1", "--global-batch-size", "2"]
    assert main(["explain", "--data", path, "--", *run]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Stock Megatron weighs a token 0.50 times what token_mean")
    assert "token_mean: w_t = m_t / 4 in step 2\n" in out
    assert "with --micro-batch-size 2: 0.0 % of the weight is on other" in out
    said = refusal(capsys, "--data", path, "--", *run, "--rampup-batch-size", "1", "1", "9")
    assert said.startswith("InputError: --rampup-batch-size, by which steps differ in size")


BAD_ROWS = {
    "{": "InputError: PATH:1: Expecting property name",
    '"x"': "InputError: PATH:1: expected an object with either 'length' or 'loss_mask'",
    "-1": "InputError: PATH:1: a bad length or loss_mask; expected a finite number",
    '{"loss_mask": [1], "cu_seqlens": [0, 2]}': "InputError: PATH:1: microbatch 0 of 1 tokens",
    '{"loss_mask": [1], "cu_seqlens": "x"}': "InputError: PATH:1: ",
    "0": "InputError: no step with loss tokens; expected at least one of --global-batch-size 1 ro",
    "": "InputError: no step with loss tokens; expected at least one of --global-batch-size 1 ro",
}


@pytest.mark.parametrize("line", BAD_ROWS)
def test_bad_rows_are_named(capsys, tmp_path, line):
    path = tmp_path / "data"
    path.write_text(line)
    run = ["--micro-batch-size", "1", "--global-batch-size", "1"]
    said = refusal(capsys, "--data", str(path), "--", *run)
    assert said.startswith(BAD_ROWS[line].replace("PATH", str(path)))
    path.write_text("4")
    split = refusal(capsys, "--data", str(path), "--", *run, "--context-parallel-size", "2")
    assert split.startswith("LayoutError: sequence 0 has (padded) length 1; expected a multiple")
    path.write_bytes(b"\xff")
    assert refusal(capsys, "--data", str(path), "--", *run).startswith(f"InputError: --data {path}")


def test_a_bar_shows_on_a_terminal_and_may_be_missing(capsys, tmp_path, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    path, terminal = write(tmp_path / "lengths.txt", *FOUR, *FOUR), Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert main(["explain", "--data", path, *RUN]) == 0
    assert "8/1024" in terminal.getvalue()
    monkeypatch.setitem(sys.modules, "tqdm", None)
    out = capsys.readouterr().out
    assert "steps: 2, of" in out and ": 25.0 % of" in out
    assert main(["explain", "--data", path, *RUN]) == 0
    assert capsys.readouterr().out == out


def test_the_formula_without_numbers_is_that_of_the_docstring():
    for agg, expected in {
        LossAggregation.preset("slime/constant", divisor=8): "m_t / (8 * N_rollout)",
        LossAggregation(mode="token_mean"): "m_t / M_step",
        LossAggregation(mode="sample_mean", sample_weights="skip"): (
            "v_s * m_t / (M_sample * N_sample)"
        ),
        LossAggregation(mode="sample_mean", sample_weights="count"): (
            "v_s * m_t / (M_sample * V_across)"
        ),
        LossAggregation(mode="token_mean", sample_weights="count"): (
            "v_s * m_t / (M_step * V_across)"
        ),
        LossAggregation(mode="nested_mean", levels="prompt,sample"): (
            "m_t / (M_sample * C * N_prompt)"
        ),
        LossAggregation(mode="sum"): "m_t",
        LossAggregation(mode="custom", function=len): "function(plan, i)",
    }.items():
        assert formula(agg) == f"w_t = {expected}"
