"""The launcher on Megatron's real ``pretrain``: its steps, checkpoints, evaluations and reports."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from megatron_loss_agg import Microbatch
from megatron_loss_agg.mcore import read_batch
from megatron_loss_agg.mcore.cpu import CPU_FLAGS
from tests.launch.processes import LAUNCHER, MODE, ROOT, refusals, run
from tests.sweep.data import OF_SET, SEQ_LENGTH, VALIDATION

SCRIPT = ROOT / "examples/pretrain_gpt.py"
REPORTS = ROOT / "docs/reports.md"
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
# The same stand-ins for a GPU, and nothing else of the plugin.
WITHOUT_PLUGIN = """
import runpy, sys
from megatron_loss_agg.mcore import cpu

cpu.enable()
del sys.argv[0]
sys.path[0] = sys.argv[0].rpartition("/")[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""

BESIDE = (
    "--loss-aggregation-also",
    "token_mean",
    "sample_mean",
    "--loss-aggregation-report-weights",
)

_calls = itertools.count()


def reject_all_after_two(batch: Any) -> Microbatch:
    """A reader: two microbatches as they are, and then nothing but rejected samples."""
    microbatch = read_batch(batch)
    rejected = torch.full((microbatch.num_samples,), next(_calls) >= 2)
    return dataclasses.replace(microbatch, rejected=rejected)


class Run(NamedTuple):
    """The logged steps of a start of the script, its whole output, and its checkpoints."""

    logged: list[str]
    log: str
    folder: Path

    def checkpoint(self, iteration: int = ITERATIONS) -> dict[str, Tensor]:
        """Every tensor of a checkpoint, by its path."""
        (path,) = self.folder.glob(f"iter_{iteration:07d}/*/model_optim_rng.pt")
        return tensors(torch.load(path, weights_only=False))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    mode = ("--loss-aggregation", "prompt_mean", "--loss-aggregation-audit")
    # The first step takes a rank's two microbatches, which are read as they are.
    empty = ("--loss-aggregation-batch", "tests.launch.test_pretrain:reject_all_after_two")
    empty += ("--loss-aggregation-rejected", "count", "--loss-aggregation-empty-step", "skip")
    starter = tmp_path_factory.mktemp("starter") / "starter.py"
    starter.write_text(WITHOUT_PLUGIN)
    return {
        "empty steps": start(tmp_path_factory.mktemp("empty"), *mode, *empty),
        "without the plugin": start(tmp_path_factory.mktemp("without"), starter=(str(starter),)),
        "without the flag": start(tmp_path_factory.mktemp("launched")),
        # Megatron then ends the script by itself, after the last step.
        "with the flag": start(
            tmp_path_factory.mktemp("flag"), *mode, *BESIDE, "--exit-interval", "3"
        ),
    }


def start(folder: Path, *flags: str, starter: tuple[str, ...] = LAUNCHER) -> Run:
    """Two data-parallel ranks."""
    save = ("--save", str(folder), "--save-interval", "1")
    codes, log = run(folder, SCRIPT, *SHORT, *save, *flags, ranks=2, starter=starter)
    assert codes == [0, 0], log[-4000:]
    # Without what differs from run to run: the date and the time that a step took.
    logged = [
        re.sub(r"\[\d{4}-.*?\]|elapsed time per iteration \(ms\): [\d.]+", "", line)
        for line in log.splitlines()
        if re.search(r"iteration +\d+/|validation loss at|loss aggregation audit", line)
    ]
    return Run(logged, log, folder)


def tensors(x: Any, name: str = "") -> dict[str, Tensor]:
    if isinstance(x, Tensor):
        return {name: x}
    parts = x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, list) else ()
    return {k: t for key, part in parts for k, t in tensors(part, f"{name}.{key}").items()}


def differing(state: dict[str, Tensor], expected: dict[str, Tensor], part: str = "") -> list[str]:
    """The tensors of a part, of which there are some, that differ."""
    names = [name for name in expected if name.startswith(part)]
    assert any(expected[name].numel() > 1 for name in names)
    return [name for name in names if not torch.equal(state[name], expected[name])]


def test_without_the_flag_a_run_is_bit_identical(runs: dict[str, Run]) -> None:
    plain, launched = runs["without the plugin"], runs["without the flag"]
    assert len([line for line in plain.logged if "lm loss" in line]) >= ITERATIONS + 1
    assert launched.logged == plain.logged
    plain_state, state = plain.checkpoint(), launched.checkpoint()
    assert state.keys() == plain_state.keys()
    for part in (".model.", ".optimizer.", ""):
        assert differing(state, plain_state, part) == []


def test_a_run_that_is_resumed_goes_on_as_if_it_had_not_ended(
    runs: dict[str, Run], tmp_path: Path
) -> None:
    whole = runs["with the flag"]
    loaded = ("--load", str(whole.folder), "--ckpt-step", "2")
    resumed = start(tmp_path, "--loss-aggregation", "prompt_mean", *BESIDE, *loaded)
    assert len([line for line in resumed.logged if re.search(r"iteration +3/", line)]) == 1
    assert differing(resumed.checkpoint(), whole.checkpoint(), ".model.") == []
    assert differing(resumed.checkpoint(), whole.checkpoint(), ".optimizer.") == []


def test_with_the_flag_the_script_trains_on_the_mode_and_audits_it(runs: dict[str, Run]) -> None:
    plain, aggregated = runs["without the plugin"], runs["with the flag"]
    steps = [line for line in aggregated.logged if re.search(r"iteration +\d+/", line)]
    assert len(steps) == ITERATIONS
    assert all("prompt_mean loss: " in line for line in steps)
    # Before the first update the models are the same, and `lm loss` keeps its meaning.
    first = [float(re.findall(r"lm loss: (\S+)", x[0])[0]) for x in (plain.logged, steps)]
    assert first[1] == pytest.approx(first[0], rel=1e-6)
    assert any("prompt_mean loss value: " in line for line in aggregated.logged)  # evaluation
    (line,) = (line for line in aggregated.logged if "audit" in line)
    assert "gradients are 1.000000 times the planned ones" in line
    assert not any("audit" in line for line in runs["without the flag"].logged)
    for line in steps:  # the token mean beside it is what `lm loss` is
        losses = dict(re.findall(r"(\w+) loss: (\S+)", line))
        assert {*losses} == {"lm", "prompt_mean", "token_mean", "sample_mean"}
        lm, token_mean = (float(losses[name]) for name in ("lm", "token_mean"))
        assert token_mean == pytest.approx(lm, rel=1e-6)
        assert losses["sample_mean"] not in (losses["token_mean"], losses["prompt_mean"])
        (effective,) = re.findall(r"effective samples: (\S+)", line)
        assert 1 <= float(effective) <= 4
    assert differing(aggregated.checkpoint(), plain.checkpoint(), ".model.") != []
    # Random numbers of the CPU are no reason to warn.
    head = f"\n{'==== loss aggregation: prompt_mean '.ljust(80, '=')}\n"
    lines = aggregated.log.partition(head)[2].splitlines()
    labels = ("weight", "step", "counts", "also", "measured")
    assert [line.split(":")[0].strip() for line in lines[: len(labels)]] == [*labels]
    assert all(len(line) <= 80 for line in lines[: len(labels)])
    assert "RNG state" not in aggregated.log


def test_a_skipped_step_changes_nothing(runs: dict[str, Run]) -> None:
    run = runs["empty steps"]
    steps = [line for line in run.logged if re.search(r"iteration +\d+/", line)]
    skipped = [int(re.findall(r"skipped iterations: +(\d+)", line)[0]) for line in steps]
    assert skipped == [0, 1, 1]
    first = {name: t for name, t in run.checkpoint(1).items() if t.is_floating_point()}
    for part in (".model.", ".optimizer."):
        assert differing(run.checkpoint(), first, part) == []
    assert any("exp_avg" in name and bool(t.any()) for name, t in first.items())


def test_a_job_that_finds_its_last_iteration_done_is_not_refused(tmp_path: Path) -> None:
    codes, log = run(tmp_path, SCRIPT, *SHORT, *MODE, "--skip-train", "--eval-iters", "0")
    assert (codes, refusals(log)) == ([0], []), log[-3000:]


EXPERTS = """
    --num-experts 2 --moe-token-dispatcher-type allgather --moe-router-load-balancing-type aux_loss
    --moe-aux-loss-coeff 1.0 --disable-bias-linear --eval-iters 0
"""


def test_an_extension_by_flag_changes_what_the_script_trains(tmp_path: Path) -> None:
    """The example for losses of routers, beside one that doubles the loss."""
    extensions = "routers:RouterLosses", "tests.launch.my_extensions:Doubled"
    flags = (*EXPERTS.split(), *MODE, "--loss-aggregation-extension", *extensions)
    codes, log = run(tmp_path, SCRIPT, *SHORT, *flags, ranks=2)
    assert (codes, refusals(log)) == ([0, 0], []), log[-3000:]
    assert re.search(rf"^  extension: +{re.escape(extensions[0])}", log, re.MULTILINE)
    steps = [line for line in log.splitlines() if re.search(r"iteration +\d+/", line)]
    assert len(steps) == ITERATIONS
    for line in steps:
        mean, doubled = (
            float(re.findall(rf"{name} loss: (\S+)", line)[0])
            for name in ("sample_mean", "doubled")
        )
        assert doubled == pytest.approx(2 * mean, rel=1e-6)


# What Megatron does after a fault with --inprocess-restart.
RESTARTS = f"""
import runpy, sys
from megatron.core.rerun_state_machine import destroy_rerun_state_machine
from megatron.training import training

sys.path.insert(0, {str(SCRIPT.parent)!r})
for _ in range(2):
    runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
    training.destroy_global_state()
    destroy_rerun_state_machine()
"""


def test_a_restart_in_the_same_process_trains_another_model(tmp_path: Path) -> None:
    codes, log = run(tmp_path, RESTARTS, *SHORT, *MODE, "--eval-iters", "0")
    assert (codes, refusals(log)) == ([0], []), log[-3000:]
    assert log.count("sample_mean loss:") == 2 * ITERATIONS


# What Megatron's `pretrain` does first, and fails at where there is no more of the script.
BEGINS = """
from megatron.training import arguments, training
from megatron.training.global_vars import set_args

set_args(arguments.parse_args())
try:
    training.setup_model_and_optimizer(None, None)
finally:
    print("mode:", training.get_args().loss_aggregation)
"""


def test_a_yaml_file_in_place_of_all_flags_keeps_ours(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("{enable_msc: false, disable_msc_deprecated: false, loss_aggregation: sum}")
    _, log = run(tmp_path, BEGINS, "--yaml-cfg", str(file), *MODE)
    assert "mode: sample_mean\n" in log, log[-3000:]


def test_a_flag_of_megatron_that_does_not_fit_is_one_line_on_each_rank(tmp_path: Path) -> None:
    flags = (*MODE, "--cuda-graph-impl", "full_iteration")
    codes, log = run(tmp_path, BEGINS, *flags, ranks=2)
    assert codes == [2, 2]
    lines = refusals(log)
    assert len(lines) == 2
    for line in lines:
        assert line.startswith("megatron_loss_agg: HostError: --cuda-graph-impl full_iteration")
    assert "Traceback" not in log


# Several data sets. The expected numbers are made from the losses that the loss function got: on
# each rank, whether it trains, the items of the microbatch (here one), its mask and its losses.
Seen = tuple[bool, list[int], Tensor, Tensor]
Pair = tuple[float, float]  # a sum, and its number of tokens
STEPS, N_MB = 6, 2
SETS_FLAGS = f"""
    --num-layers 1 --hidden-size 16 --ffn-hidden-size 32 --num-attention-heads 2
    --position-embedding-type rope --attention-dropout 0 --hidden-dropout 0
    --seq-length {SEQ_LENGTH} --max-position-embeddings {SEQ_LENGTH}
    --micro-batch-size 1 --logging-level 40 --num-workers 0 --init-method-std 0.5
""".split()


def launched(
    folder: Path, ranks: int, *flags: str, patch: pytest.MonkeyPatch
) -> tuple[list[list[Seen]], str]:
    """The inputs of each rank's loss function, and the output."""
    patch.setenv("SEEN", str(folder / "seen"))
    codes, log = run(folder, ROOT / "tests/sweep/script.py", *SETS_FLAGS, *flags, ranks=ranks)
    assert codes == [0] * ranks, log[-3000:]
    return [torch.load(folder / f"seen.{rank}") for rank in range(ranks)], log


def pair(mask: Tensor, losses: Tensor) -> Pair:
    return float((mask.double() * losses.double()).sum()), float(mask.sum())


def token_mean(pairs: list[Pair]) -> float:
    return sum(x for x, _ in pairs) / sum(n for _, n in pairs)


def sample_mean(pairs: list[Pair]) -> float:
    """Of those with tokens."""
    means = [x / n for x, n in pairs if n]
    return sum(means) / len(means)


SETS = {
    "token_mean": ("--sft", "--sweep-data", "packs", "--context-parallel-size", "2"),
    "sample_mean": ("--loss-aggregation-empty", "skip", "--loss-aggregation-also", "token_mean"),
}


@pytest.mark.parametrize("mode", SETS)
def test_each_validation_set_is_reduced_over_its_tokens_samples_or_calls(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls of an evaluation have different numbers of tokens, and must weigh as much.

    Under --sft Megatron averages over calls by itself, so each weighs the same.
    """
    flags = ["--global-batch-size", "2", "--train-iters", "1", "--lr", "0.1", "--skip-train"]
    flags += ["--multiple-validation-sets", "--full-validation"]
    flags += ["--loss-aggregation", mode, *SETS[mode]]
    ranks, log = launched(tmp_path, 2, *flags, patch=monkeypatch)
    for number, first in enumerate((VALIDATION, VALIDATION + OF_SET)):
        samples = []
        for item in range(first, first + 48):
            # By rank, since a set is gone through as often as there are microbatches.
            parts = {i: x[2:] for i, seen in enumerate(ranks) for x in seen if x[1] == [item]}
            mask, losses = (torch.cat(x) for x in zip(*parts.values(), strict=True))
            assert len(mask) == SEQ_LENGTH
            samples.append(pair(mask, losses))
        calls = [samples[i : i + 2] for i in range(0, 48, 2)] if "--sft" in flags else [samples]
        expected = {
            "lm": sum(map(token_mean, calls)) / len(calls),
            "sample_mean": sample_mean(samples),
        }
        expected["token_mean"] = expected["lm"]
        assert abs(expected["sample_mean"] / expected["lm"] - 1) > 1e-4  # masks are uneven
        (line,) = re.findall(f"validation-{number} loss at .*", log)
        for key in {"lm", "token_mean", mode}:
            (logged,) = re.findall(f"{key} loss value: (\\S+)", line)
            assert float(logged) == pytest.approx(expected[key], rel=2e-6)
    # Without training the first evaluation is announced.
    assert log.count(f"==== loss aggregation: {mode} ") == log.count("\n  evaluation: ") == 1


def tensorboard(folder: Path) -> dict[str, dict[int, float]]:
    """The logged values, by name and step."""
    events = EventAccumulator(str(folder)).Reload()
    return {  # the first of a step: the last step is evaluated again after the training
        tag: {event.step: event.value for event in reversed(events.Scalars(tag))}
        for tag in events.Tags()["scalars"]
    }


def by_dataset(seen: Iterable[Seen]) -> dict[str, float]:
    """Of each data set with tokens: the mean over tokens, and that over samples."""
    rows: dict[int, list[tuple[Tensor, Tensor]]] = {}
    for _, (item,), mask, losses in seen:
        rows.setdefault(item // OF_SET, []).append((mask, losses))
    values = {}
    for dataset, samples in rows.items():
        if any(mask.any() for mask, _ in samples):
            key = f"loss of dataset {dataset}"
            values[f"lm {key}"] = token_mean([pair(*row) for row in samples])
            values[f"sample_mean {key}"] = sample_mean([pair(*row) for row in samples])
    return values


def printed(line: str, suffix: str) -> dict[str, float]:
    pairs = re.findall(rf"(\w+ loss of dataset \d+){suffix}: (\S+)", line)
    return {key: float(value) for key, value in pairs}


BLENDED = f"""
    --global-batch-size 4 --train-iters {STEPS} --lr 0.1 --lr-decay-style constant
    --eval-interval {STEPS} --eval-iters 2 --log-interval 2 --tensorboard-log-interval 1 --blend
    --loss-aggregation sample_mean --loss-aggregation-report-datasets
    --loss-aggregation-also token_mean
""".split()


def test_log_tensorboard_and_evaluation_have_each_data_set_of_a_blend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("--tensorboard-dir", str(tmp_path / "board"))
    ranks, log = launched(tmp_path, 2, *BLENDED, *flags, patch=monkeypatch)
    trained, evaluated = ([[x for x in r if x[0] == trains] for r in ranks] for trains in (1, 0))
    assert len(trained[0]) == STEPS * N_MB
    board = tensorboard(tmp_path / "board")
    names = [name for name in board if re.fullmatch(r"\w+ loss of dataset \d", name)]
    steps = [{x: board[x].get(n, math.nan) for x in names} for n in range(1, STEPS + 1)]
    missing = sum(math.isnan(value) for step in steps for value in step.values())
    assert len(names) == 6 and missing > 4  # some sets are not in every step, or are new in it
    for i, step in enumerate(steps):
        expected = by_dataset(x for rank in trained for x in rank[i * N_MB : (i + 1) * N_MB])
        numbers = {key: value for key, value in step.items() if not math.isnan(value)}
        assert numbers == pytest.approx({key: expected[key] for key in numbers}, rel=2e-6)
    lines = re.findall(r"iteration +\d*[02468]/.*", log)  # the first step is logged, too
    for line, first, second in zip(lines, steps[::2], steps[1::2], strict=True):
        means = {x: (first[x] + second[x]) / 2 for x in names}
        numbers = {x: mean for x, mean in means.items() if not math.isnan(mean)}
        assert printed(line, "") == pytest.approx(numbers, rel=2e-6)
    # The first evaluation, of two iterations.
    expected = by_dataset(x for rank in evaluated for x in rank[: 2 * N_MB])
    (line, *_) = re.findall(r"validation loss at .*", log)
    assert printed(line, " value") == pytest.approx(expected, rel=2e-6)
    logged = {key: board[f"{key} validation"][STEPS] for key in expected}
    assert logged == pytest.approx(expected, rel=2e-6)
    assert {f"{key} validation vs samples" for key in expected} <= board.keys()
    # Every curve that the page on them names.
    (table,) = re.findall(r"^\| curve \|.*\n(?:\|.*\n)+", REPORTS.read_text(), re.MULTILINE)
    curves = re.findall(r"`(.*?)`", "".join(re.findall(r"^\|[^|]*\|", table, re.MULTILINE)))
    assert len(curves) > 5 and {*curves} <= board.keys()


def test_a_run_that_is_counted_as_it_trains_is_that_which_is_counted_before(tmp_path: Path) -> None:
    mode = ("--loss-aggregation", "sample_mean")
    runs = []
    for count in ("before", "end"):
        (tmp_path / count).mkdir()
        runs.append(start(tmp_path / count, *mode, "--loss-aggregation-count", count))
    before, end = runs
    assert "counted at its end; the denominator of this one is" in end.log
    numbers = [re.findall(r"(?:loss|norm|PPL): (\S+)", "\n".join(x.logged)) for x in (before, end)]
    assert len(numbers[0]) > 3 * ITERATIONS
    assert [*map(float, numbers[1])] == pytest.approx([*map(float, numbers[0])], rel=1e-5)
