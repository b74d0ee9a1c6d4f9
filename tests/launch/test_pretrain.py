"""The launcher on Megatron's real ``pretrain``: its steps, checkpoints, evaluations and reports."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_loss_agg import Microbatch
from megatron_loss_agg.mcore import read_batch
from megatron_loss_agg.mcore.cpu import CPU_FLAGS
from tests.launch import processes
from tests.launch.processes import LAUNCHER, LENGTH, MODE, ROOT, refusals, run

pytestmark = pytest.mark.host

SCRIPT = ROOT / "examples/pretrain_gpt.py"
ITERATIONS = 3
SHORT = f"""
    --num-layers 1 --hidden-size 16 --ffn-hidden-size 32 --num-attention-heads 2
    --position-embedding-type rope --attention-dropout 0 --hidden-dropout 0
    --seq-length 256 --max-position-embeddings 256 --micro-batch-size 1 --global-batch-size 4
    --train-iters {ITERATIONS} --lr 5e-3 --lr-decay-style constant
    --eval-interval {ITERATIONS} --eval-iters 1 --log-interval 1 --ckpt-format torch
""".split()
# As --cpu sets them: here the script also starts without the plugin.
SHORT += [part for pair in CPU_FLAGS.items() for part in pair if part is not None]
QUIET = ("--logging-level", "40")
# The same stand-ins for a GPU, and nothing else of the plugin.
WITHOUT_PLUGIN = """
import runpy, sys
from megatron_loss_agg.mcore import cpu

cpu.enable()
del sys.argv[0]
sys.path[0] = sys.argv[0].rpartition("/")[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""

_calls = itertools.count()


def reject_all_after_two(batch: Any) -> Microbatch:
    """A reader: two microbatches as they are, and then nothing but rejected samples."""
    microbatch = read_batch(batch)
    rejected = torch.full((microbatch.num_samples,), next(_calls) >= 2)
    return dataclasses.replace(microbatch, rejected=rejected)


Run = tuple[list[str], dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("launch")


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, Run]:
    """What each start of the script logs of its steps, and its final checkpoint."""
    starter = folder / "starter.py"
    starter.write_text(WITHOUT_PLUGIN)
    mode = ["--loss-aggregation", "prompt_mean", "--loss-aggregation-audit"]
    # The first step takes a rank's two microbatches, which are read as they are.
    empty = ["--loss-aggregation-batch", "tests.launch.test_pretrain:reject_all_after_two"]
    empty += ["--loss-aggregation-rejected", "count", "--loss-aggregation-empty-step", "skip"]
    empty += ["--save-interval", "1"]
    return {
        "empty steps": start(LAUNCHER, [*mode, *empty], folder / "empty"),
        "without the plugin": start([str(starter)], [], folder / "without"),
        "without the flag": start(LAUNCHER, [], folder / "launched"),
        "with the flag": start(LAUNCHER, mode, folder / "aggregated"),
    }


def start(starter: Sequence[str], extra: list[str], save: Path) -> Run:
    """Two data-parallel ranks, which log to a file each: lines never mix."""
    flags = [*SHORT, *QUIET, "--save-interval", str(ITERATIONS), *extra, "--save", str(save)]
    logs = [save.with_suffix(f".{rank}.log") for rank in range(2)]
    codes = processes.run_forked([*starter, str(SCRIPT), *flags], logs)
    text = [log.read_text() for log in logs]
    assert codes == [0, 0], text[0][-4000:]
    # Without what differs from run to run: the date and the time that a step took.
    logged = [
        re.sub(r"\[\d{4}-.*?\]|elapsed time per iteration \(ms\): [\d.]+", "", line)
        for said in text
        for line in said.splitlines()
        if re.search(r"iteration +\d+/|validation loss at|loss aggregation audit", line)
    ]
    return logged, checkpoint(save, ITERATIONS)


def checkpoint(save: Path, iteration: int) -> dict[str, Tensor]:
    """Every tensor of it, by its path."""
    (path,) = save.glob(f"iter_{iteration:07d}/*/model_optim_rng.pt")
    return tensors(torch.load(path, weights_only=False))


def tensors(x: Any, name: str = "") -> dict[str, Tensor]:
    if isinstance(x, Tensor):
        return {name: x}
    parts = x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, list) else ()
    return {k: t for key, part in parts for k, t in tensors(part, f"{name}.{key}").items()}


def differing(found: dict[str, Tensor], expected: dict[str, Tensor], part: str = "") -> list[str]:
    """The tensors of a part, of which there are some, that differ."""
    names = [name for name in expected if name.startswith(part)]
    assert any(expected[name].numel() > 1 for name in names)
    return [name for name in names if not torch.equal(found[name], expected[name])]


def test_without_the_flag_a_run_is_bit_identical(runs: dict[str, Run]) -> None:
    logged, saved = runs["without the plugin"]
    launched_logged, launched_saved = runs["without the flag"]
    assert len([line for line in logged if "lm loss" in line]) >= ITERATIONS + 1
    assert launched_logged == logged
    assert launched_saved.keys() == saved.keys()
    for part in (".model.", ".optimizer.", ""):
        assert differing(launched_saved, saved, part) == []


def test_with_the_flag_the_script_trains_on_the_mode_and_audits_it(runs: dict[str, Run]) -> None:
    logged, saved = runs["without the plugin"]
    aggregated_logged, aggregated_saved = runs["with the flag"]
    steps = [line for line in aggregated_logged if re.search(r"iteration +\d+/", line)]
    assert len(steps) == ITERATIONS
    assert all("prompt_mean loss: " in line for line in steps)
    # Before the first update the models are the same, and `lm loss` keeps its meaning.
    first = [float(re.findall(r"lm loss: (\S+)", lines[0])[0]) for lines in (logged, steps)]
    assert first[1] == pytest.approx(first[0], rel=1e-6)
    assert any("prompt_mean loss value: " in line for line in aggregated_logged)  # evaluation
    (line,) = (line for line in aggregated_logged if "audit" in line)
    assert "gradients are 1.000000 times the planned ones" in line
    assert not any("audit" in line for line in runs["without the flag"][0])
    assert differing(aggregated_saved, saved, ".model.") != []


def test_a_skipped_step_changes_nothing(runs: dict[str, Run], folder: Path) -> None:
    logged, last = runs["empty steps"]
    steps = [line for line in logged if re.search(r"iteration +\d+/", line)]
    skipped = [int(re.findall(r"skipped iterations: +(\d+)", line)[0]) for line in steps]
    assert skipped == [0, 1, 1]
    saved = checkpoint(folder / "empty", 1)
    first = {name: t for name, t in saved.items() if t.is_floating_point()}
    for part in (".model.", ".optimizer."):
        assert differing(last, first, part) == []
    assert any("exp_avg" in name and bool(t.any()) for name, t in first.items())


def test_random_numbers_of_the_cpu_are_no_warning(tmp_path: Path) -> None:
    codes, said = run(tmp_path, SCRIPT, *SHORT, *MODE, "--exit-interval", "1", ranks=2)
    assert codes == [0, 0], said[-3000:]
    assert "loss aggregation: sample_mean" in said
    assert "RNG state" not in said


# Flags, the number of logged steps, and whether there is an evaluation.
NOTHING_TO_DO = {
    "evaluation alone": (("--skip-train",), 0, True),
    "an early end": (("--exit-interval", "1"), 1, False),
    # As after the last iteration of a job that is started again.
    "no step at all": (("--skip-train", "--eval-iters", "0"), 0, False),
}


@pytest.mark.parametrize("case", NOTHING_TO_DO)
def test_runs_of_the_host_that_are_short_are_not_refused(tmp_path: Path, case: str) -> None:
    flags, steps, evaluates = NOTHING_TO_DO[case]
    codes, said = run(tmp_path, SCRIPT, *SHORT, *QUIET, *MODE, *flags)
    assert (codes, refusals(said)) == ([0], []), said[-3000:]
    assert len(re.findall(r"iteration +\d+/ +\d+ .*sample_mean loss: ", said)) == steps
    assert ("sample_mean loss value: " in said) == evaluates


# What Megatron's `pretrain` does first, and fails at where there is no more of the script.
BEGINS = """
from megatron.training import arguments, training
from megatron.training.global_vars import set_args

set_args(arguments.parse_args())
try:
    training.setup_model_and_optimizer(None, None)
finally:
    print("found", training.get_args().loss_aggregation)
"""


def test_a_yaml_file_in_place_of_all_flags_keeps_ours(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    for of_file in ("", ", loss_aggregation: sum"):
        file.write_text(f"{{enable_msc: false, disable_msc_deprecated: false{of_file}}}")
        _, said = run(tmp_path, BEGINS, "--yaml-cfg", str(file), *MODE)
        assert "found sample_mean\n" in said, said[-3000:]


def test_a_flag_of_the_host_that_does_not_fit_is_one_line_for_all_ranks(tmp_path: Path) -> None:
    flags = (*MODE, "--cuda-graph-impl", "full_iteration")
    codes, said = run(tmp_path, BEGINS, *flags, ranks=2)
    assert codes == [2, 2]
    (line,) = refusals(said)
    assert line.startswith("megatron_loss_agg: HostError: --cuda-graph-impl full_iteration")
    assert "Traceback" not in said


# Several data sets. The expected numbers are made from the losses that the loss function got.

SIZES = (6, 10)  # rows of each validation set; one row of the first has no active token
STEPS, N_MB = 6, 2
Row = tuple[bool, int, int, Tensor, Tensor]


def launched_on_sets(
    folder: Path, ranks: int, *flags: str, patch: pytest.MonkeyPatch
) -> tuple[list[list[Row]], str]:
    """What each rank's loss function got, and what was said."""
    patch.setenv("SEEN", str(folder / "seen"))
    codes, said = run(
        folder, processes.SETS_SCRIPT, *processes.SETS_FLAGS.split(), *flags, ranks=ranks
    )
    assert codes == [0] * ranks, said[-3000:]
    return [torch.load(folder / f"seen.{rank}") for rank in range(ranks)], said


def means(rows: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Over tokens, and over rows with tokens, of pairs (sum, number of tokens)."""
    sums, counts = zip(*rows, strict=True)
    quotients = [s / n for s, n in zip(sums, counts, strict=True) if n]
    return sum(sums) / sum(counts), sum(quotients) / len(quotients)


def pair(mask: Tensor, losses: Tensor) -> tuple[float, float]:
    return float((mask.double() * losses.double()).sum()), float(mask.sum())


CP2 = ("--context-parallel-size", "2")
# Iterations of an evaluation have different numbers of tokens, and must weigh as much.
VALIDATIONS: dict[str, tuple[int, str, tuple[str, ...]]] = {
    "data-parallel": (2, "sample_mean", ("--loss-aggregation-empty", "skip")),
    "context-parallel": (2, "token_mean", CP2),
    "quotients": (1, "token_mean", ("--sft",)),
}


@pytest.mark.parametrize("name", VALIDATIONS)
def test_each_validation_set_is_reduced_over_all_of_its_tokens_or_samples(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number, mode, flags = VALIDATIONS[name]
    run_flags = ["--global-batch-size", "2", "--train-iters", "1", "--lr", "0.1", "--skip-train"]
    run_flags += ["--multiple-validation-sets", "--full-validation", "--loss-aggregation", mode]
    ranks, said = launched_on_sets(tmp_path, number, *run_flags, *flags, patch=monkeypatch)
    # By place, since a set is gone through as often as there are microbatches.
    parts = {(s, row, i): x for i, rank in enumerate(ranks) for _, s, row, *x in rank}
    for dataset, size in enumerate(SIZES):
        rows = []
        for row in range(size):
            of_row = [x for place, x in parts.items() if place[:2] == (dataset, row)]
            mask, losses = (torch.cat(x) for x in zip(*of_row, strict=True))
            assert len(mask) == LENGTH
            rows.append(pair(mask, losses))
        assert rows.count((0.0, 0.0)) == (dataset == 0)
        tokens, samples = means(rows)
        assert abs(tokens - samples) > 1e-3 * tokens  # the masks tell the means apart
        (line,) = re.findall(f"validation-{dataset} loss at .*", said)
        logged = [float(re.findall(f"{key} loss value: (\\S+)", line)[0]) for key in ("lm", mode)]
        expected = [tokens, tokens if mode == "token_mean" else samples]
        assert logged == pytest.approx(expected, rel=2e-6)


FACTORS = torch.arange(LENGTH) / 4  # of the script's batches; its log leaves out what is below 0


def by_dataset(rows: Iterable[Row], factors: Tensor) -> dict[str, float]:
    """Of each data set that has tokens: the mean over tokens, and that over rows with factors."""
    found: dict[int, list[tuple[Tensor, Tensor]]] = {}
    for _, dataset, _, mask, losses in rows:
        found.setdefault(dataset, []).append((mask, losses))
    values = {}
    for dataset, of_rows in found.items():
        if any(mask.any() for mask, _ in of_rows):
            tokens, _ = means(pair(*of_row) for of_row in of_rows)
            _, samples = means(pair(mask, factors * losses) for mask, losses in of_rows)
            key = f"loss of dataset {dataset}"
            values |= {f"lm {key}": tokens, f"sample_mean {key}": samples}
    return values


def printed(line: str, suffix: str) -> dict[str, float]:
    found = re.findall(rf"(\w+ loss of dataset \d+){suffix}: (\S+)", line)
    return {key: float(value) for key, value in found}


BLEND = f"""
    --global-batch-size 4 --train-iters {STEPS} --lr 0.1 --lr-decay-style constant
    --eval-interval {STEPS} --eval-iters 2 --log-interval 2 --tensorboard-log-interval 1 --blend
    --loss-aggregation sample_mean --loss-aggregation-report-datasets
""".split()


@pytest.mark.parametrize("has_factors", [False, True], ids=["", "with factors"])
def test_log_tensorboard_and_evaluation_have_each_data_set_of_a_blend(
    has_factors: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--tensorboard-dir", str(tmp_path / "board")]
    flags += ["--loss-aggregation-factors", "factors"] if has_factors else []
    factors = FACTORS if has_factors else torch.ones(LENGTH)
    ranks, said = launched_on_sets(tmp_path, 2, *BLEND, *flags, patch=monkeypatch)
    trained, evaluated = ([[x for x in r if x[0] == trains] for r in ranks] for trains in (1, 0))
    assert len(trained[0]) == STEPS * N_MB
    board = processes.tensorboard(tmp_path / "board")
    names = [name for name in board if re.fullmatch(r"\w+ loss of dataset \d", name)]
    steps = [{x: board[x].get(n, math.nan) for x in names} for n in range(1, STEPS + 1)]
    missing = sum(math.isnan(value) for step in steps for value in step.values())
    assert len(names) == 6 and missing > 4  # some sets are not in every step, or are new in it
    for i, step in enumerate(steps):
        of_step = (x for rank in trained for x in rank[i * N_MB : (i + 1) * N_MB])
        of_rows = by_dataset(of_step, factors)
        known = {key: value for key, value in step.items() if not math.isnan(value)}
        assert known == pytest.approx({key: of_rows[key] for key in known}, rel=2e-6)
    lines = re.findall(r"iteration +\d*[02468]/.*", said)  # the first step is logged, too
    for line, first, second in zip(lines, steps[::2], steps[1::2], strict=True):
        means_of_both = {x: (first[x] + second[x]) / 2 for x in names}
        both = {x: mean for x, mean in means_of_both.items() if not math.isnan(mean)}
        assert printed(line, "") == pytest.approx(both, rel=2e-6)
    # The first evaluation, of two iterations.
    of_rows = by_dataset((x for rank in evaluated for x in rank[: 2 * N_MB]), factors)
    (line, *_) = re.findall(r"validation loss at .*", said)
    assert printed(line, " value") == pytest.approx(of_rows, rel=2e-6)
    logged = {key: board[f"{key} validation"][STEPS] for key in of_rows}
    assert logged == pytest.approx(of_rows, rel=2e-6)
