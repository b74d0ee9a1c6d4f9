"""The launcher on Megatron's real ``pretrain``."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_loss_agg.mcore.cpu import CPU_FLAGS
from tests.launch.processes import LAUNCHER, MODE, ROOT, refusals, run, run_afresh, run_forked

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
FLAGS = [*SHORT, "--logging-level", "40", "--save-interval", str(ITERATIONS)]
# The same stand-ins for a GPU, and nothing else of the plugin.
WITHOUT_PLUGIN = """
import runpy, sys
from megatron_loss_agg.mcore import cpu

cpu.enable()
del sys.argv[0]
sys.path[0] = sys.argv[0].rpartition("/")[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""

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
    empty = ["--loss-aggregation-batch", "tests.launch.readers:reject_all_after_two"]
    empty += ["--loss-aggregation-rejected", "count", "--loss-aggregation-empty-step", "skip"]
    empty += ["--save-interval", "1"]
    return {
        "empty steps": start(LAUNCHER, [*mode, *empty], folder / "empty"),
        "without the plugin": start([str(starter)], [], folder / "without"),
        "without the flag": start(LAUNCHER, [], folder / "launched"),
        "with the flag": start(LAUNCHER, mode, folder / "aggregated", run_afresh),
    }


def start(
    starter: Sequence[str],
    extra: list[str],
    save: Path,
    launch: Callable[[list[str], list[Path]], list[int]] = run_forked,
) -> Run:
    """Two data-parallel ranks, which log to a file each: lines never mix."""
    logs = [save.with_suffix(f".{rank}.log") for rank in range(2)]
    codes = launch([*starter, str(SCRIPT), *FLAGS, *extra, "--save", str(save)], logs)
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


def checkpoint(save: Path, iteration: int) -> dict[str, Any]:
    (path,) = save.glob(f"iter_{iteration:07d}/*/model_optim_rng.pt")
    return torch.load(path, weights_only=False)


def tensors(x: Any, name: str = "") -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, by its path."""
    if isinstance(x, torch.Tensor):
        return {name: x}
    parts = x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, list) else ()
    return {k: t for key, part in parts for k, t in tensors(part, f"{name}.{key}").items()}


def test_without_the_flag_a_run_is_bit_identical(runs: dict[str, Run]) -> None:
    logged, saved = runs["without the plugin"]
    launched_logged, launched_saved = runs["without the flag"]
    assert len([line for line in logged if "lm loss" in line]) >= ITERATIONS + 1
    assert launched_logged == logged
    expected, found = tensors(saved), tensors(launched_saved)
    for part in (".model.", ".optimizer."):
        assert any(name.startswith(part) and t.numel() > 1 for name, t in expected.items())
    assert found.keys() == expected.keys()
    assert [name for name, t in expected.items() if not torch.equal(t, found[name])] == []


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
    weights, aggregated = tensors(saved["model"]), tensors(aggregated_saved["model"])
    assert any(not torch.equal(t, aggregated[name]) for name, t in weights.items())


def test_a_skipped_step_changes_nothing(runs: dict[str, Run], folder: Path) -> None:
    logged, saved = runs["empty steps"]
    steps = [line for line in logged if re.search(r"iteration +\d+/", line)]
    skipped = [int(re.findall(r"skipped iterations: +(\d+)", line)[0]) for line in steps]
    assert skipped == [0, 1, 1]
    first, last = tensors(checkpoint(folder / "empty", 1)), tensors(saved)
    for part in (".model.", ".optimizer."):
        parts = {n: t for n, t in first.items() if n.startswith(part) and t.is_floating_point()}
        assert parts
        assert [n for n, t in parts.items() if not torch.equal(t, last[n])] == []
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
    codes, said = run(tmp_path, SCRIPT, *SHORT, "--logging-level", "40", *MODE, *flags)
    assert (codes, refusals(said)) == ([0], []), said[-3000:]
    assert len(re.findall(r"iteration +\d+/ +\d+ .*sample_mean loss: ", said)) == steps
    assert ("sample_mean loss value: " in said) == evaluates


# What Megatron's `pretrain` does first, and fails at.
ASKS = """
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
        _, said = run(tmp_path, ASKS, "--yaml-cfg", str(file), *MODE)
        assert "found sample_mean\n" in said, said[-3000:]
