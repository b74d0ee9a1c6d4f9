"""`examples/grpo` as a whole, CP 2 x DP 2: it learns, and resumes to the bit."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import is_tensor
from torch.utils._pytree import tree_flatten

from examples.grpo import checkpoint, packing, task
from examples.grpo.options import Options
from tests.host.harness import run_host_ranks

pytestmark = [pytest.mark.host, pytest.mark.slow]

# 9 prompts with 5 different sums: learnt in seconds.
SIZES = {"largest": 2, "prompts": 8, "answers": 32, "updates": 2, "token_budget": 640}
TINY = Options(cpu=True, steps=26, save_every=20, warmup=30, lr=3e-3, **SIZES)

Trained = tuple[Options, list[int]]  # flags, and the padding microbatches of each rank


def _train(options: Options) -> int:
    """Train on this rank; how many microbatches without a sample it was given."""
    from examples.grpo.loop import train

    made = packing.microbatches
    given = []

    def counted(*args: Any, **kwargs: Any) -> list[packing.Pack]:
        packs = made(*args, **kwargs)
        given.append(sum(map(packing.is_padding, packs)))
        return packs

    packing.microbatches = counted
    train(options)
    return sum(given)


def _sample(options: Options) -> tuple[Any, Any, Any]:
    """What an untrained model samples on this rank: tokens, and their log-probabilities."""
    from examples.grpo import model, rollout

    model.start(options)
    gpt = model.build(options)
    rows = rollout.collect(gpt, gpt, task.prompts(4, 9, seed=0), options.answers, seed=0)
    return rows.tokens.numpy(), rows.old_log_probs.numpy(), rows.reference_log_probs.numpy()


def test_context_parallel_ranks_sample_the_same_to_the_bit() -> None:
    ranks = run_host_ranks(_sample, 4, TINY)
    for first, second in (ranks[0:2], ranks[2:4]):
        assert all((a == b).all() for a, b in zip(first, second, strict=True))
    assert not (ranks[0][0] == ranks[2][0]).all()  # data-parallel ranks have other noise
    (whole,) = run_host_ranks(_sample, 1, replace(TINY, context_parallel=1))
    tokens = whole[0]
    for rank in (0, 1):  # sample i of the step is rank i % 2's
        got = ranks[2 * rank][0]
        assert (got[:, : task.PROMPT] == tokens[rank::2, : task.PROMPT]).all()
        assert (got == tokens[rank::2]).mean() > 0.95  # but where rounding tips a near tie
    tokens, sampled, scored = whole
    drawn = sampled != 0
    assert abs(sampled[drawn] - scored[drawn]).max() < 1e-4


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """One uninterrupted run at CP 2 x DP 2."""
    options = _in(tmp_path_factory.mktemp("whole"))
    (options.output / "step_000100.pt").touch()  # an earlier run's
    return options, run_host_ranks(_train, 4, options, timeout=200)


def _in(folder: Path, **changes: Any) -> Options:
    return replace(TINY, output=folder, **changes)


def _metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_reward_rises_and_tensorboard_has_what_is_logged(trained: Trained) -> None:
    options, padding = trained
    metrics = _metrics(options.output)
    rewards = [of_step["reward"] for of_step in metrics]
    first, last = (sum(some) / len(some) for some in (rewards[:4], rewards[-4:]))
    assert first < 0.35
    assert last > 0.42
    events = EventAccumulator(str(options.output / "tensorboard")).Reload()
    assert set(events.Tags()["scalars"]) == {*metrics[0]} - {"step"}
    assert [event.value for event in events.Scalars("reward")] == pytest.approx(rewards)
    # Data-parallel ranks needed padding.
    assert padding[0] == padding[1] and padding[2] == padding[3]  # a pack is on two ranks
    assert padding[0] + padding[2] > 0


def test_a_resumed_run_is_bit_identical(trained: Trained, tmp_path: Path) -> None:
    options, _ = trained
    shutil.copy(options.output / "step_000020.pt", tmp_path)
    shutil.copy(options.output / "metrics.jsonl", tmp_path)  # with later steps, as after a crash
    run_host_ranks(_train, 4, _in(tmp_path, resume=True), timeout=200)
    assert _metrics(tmp_path) == _metrics(options.output)
    last = "step_000026.pt"
    whole, resumed = (torch.load(folder / last) for folder in (options.output, tmp_path))
    assert _leaves(whole) == _leaves(resumed)


def _leaves(state: Any) -> tuple[list[Any], Any]:
    """All values in ``state``, tensors as bytes; and its structure."""
    leaves, structure = tree_flatten(state)
    found = [(x.dtype, x.shape, x.numpy().tobytes()) if is_tensor(x) else x for x in leaves]
    return found, structure


def test_several_runs_are_plotted(trained: Trained, tmp_path: Path) -> None:
    from examples.grpo import plot

    options, _ = trained
    plot.plot(tmp_path / "some" / "plot.png", [options.output, options.output])
    assert (tmp_path / "some" / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert "26 steps" in plot.summary(options.output)


def test_other_flags_are_refused(trained: Trained, tmp_path: Path) -> None:
    options, _ = trained
    with pytest.raises(ValueError, match=r"other flags \(lr 0.003 -> 0.1\); expected the same"):
        checkpoint.load(options.output, replace(options, lr=0.1))
    assert checkpoint.load(options.output, options)["step"] == options.steps
    with pytest.raises(FileNotFoundError, match="drop --resume"):
        checkpoint.load(tmp_path, options)
