"""`examples/grpo`: rewards, packs, flags; and its loop, CP 2 x DP 2, which learns and resumes."""

from __future__ import annotations

import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from examples.grpo import checkpoint, packing, task
from examples.grpo.options import MODES, Options, parse
from megatron_loss_agg import LossAggregation, StepPlan, predicting_mask
from megatron_loss_agg.mcore import read_batch
from tests.host.harness import run_host_ranks

MULTIPLE = 4  # twice the context-parallel size
# Must end once, right after the sum that follows the last equals sign.
UNFINISHED = [[], task.encode("=12"), [*task.encode("=12"), task.PAD, task.END]]
NO_ANSWERS = ("12", "", "=", "=012", "=12=", "=1=2", "=12+", "=1", "=+12", "=13", "7=13")


def answer(text: str) -> list[int]:
    return [*task.encode(text), task.END]


def test_a_reward_is_given_for_the_sum_after_the_last_equals_sign_and_nothing_else() -> None:
    for left, right in itertools.product(range(10), repeat=2):
        rewarded = [n for n in range(20) if task.reward(f"{left}+{right}", answer(f"={n}"))]
        assert rewarded == [left + right]
    for before in ("", "7", "=", "3+4=7", "=12=", "++"):
        assert task.reward("5+7", answer(f"{before}=12")) == 1
    for wrong in (*UNFINISHED, [*answer("=12"), task.END], *map(answer, NO_ANSWERS)):
        assert task.reward("5+7", wrong) == 0, wrong


def test_advantages_are_those_of_each_prompts_group() -> None:
    # Group 1: mean 1/4, variance (9 + 3 * 1) / 16 / 3 = 1/4. Group 2: all alike.
    rewards = torch.tensor([1.0, 0, 0, 0, 1, 1, 1, 1])
    expected = torch.tensor([1.5, -0.5, -0.5, -0.5, 0, 0, 0, 0])
    torch.testing.assert_close(task.group_advantages(rewards, 4), expected)


def test_examples_are_right_and_fit_and_prompts_differ_within_a_step() -> None:
    examples = task.examples(200, largest=9, seed=0)
    assert all(task.reward(task.decode(prompt), answer) == 1 for prompt, answer in examples)
    assert all(len(p) == task.PROMPT and len(a) <= task.MAX_ANSWER for p, a in examples)
    first, other = (task.prompts(16, largest=4, seed=seed) for seed in (3, 4))
    assert len(set(first)) == 16
    assert first != other


def rows(number: int, seed: int) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """Fields of random rows of free length, their lengths and their prompts."""
    generator = torch.Generator().manual_seed(seed)
    width = 12
    lengths = torch.randint(task.PROMPT + 1, width + 1, (number,), generator=generator)
    position = torch.arange(width)
    response = (position >= task.PROMPT) & (position < lengths.unsqueeze(1))
    fields = {
        "tokens": torch.randint(1, task.END, (number, width), generator=generator),
        "loss_mask": predicting_mask(response.float()),
        "old_log_probs": -torch.rand(number, width, generator=generator),
    }
    return fields, lengths, torch.arange(number) // 4


def test_packs_hold_every_row_once_within_the_budget() -> None:
    fields, lengths, prompt_ids = rows(40, seed=0)
    found, size = [], {"multiple": MULTIPLE, "budget": 64}
    for pack in packing.microbatches(fields, lengths, prompt_ids, **size, group=None):
        offsets, padded = pack["cu_seqlens"], pack["cu_seqlens_padded"]
        assert pack["tokens"].shape == (1, int(padded[-1])) and padded[-1] <= 64
        assert (padded.diff() % MULTIPLE == 0).all()
        names = (*fields, "labels", "position_ids")
        unpacked = (packing.unpack(pack[name], offsets, padded) for name in names)
        for prompt, *row, labels, positions in zip(pack["prompt_ids"], *unpacked, strict=True):
            assert torch.equal(labels[:-1], row[0][1:])
            assert torch.equal(positions, torch.arange(len(labels)))
            found.append((int(prompt), *(x.tolist() for x in row)))
    expected = [
        (prompt, *(field[i, : lengths[i]].tolist() for field in fields.values()))
        for i, prompt in enumerate(prompt_ids.tolist())
    ]
    assert sorted(found) == sorted(expected)
    # 5 + 3 and 4 + 4 fill two bins of 8; the 2 that is left needs a third.
    assert packing.bins([3, 4, 5, 4, 2], 8) == [[2, 0], [1, 3], [4]]
    with pytest.raises(ValueError, match=r"9 tokens; the token budget is 8: raise it"):
        packing.bins([9], 8)


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_that_is_offered_weighs_packs_and_ignores_padding_ones(mode: str) -> None:
    assert parse(["--mode", mode]).mode == mode
    pack = packing.pack(*rows(6, seed=1), MULTIPLE)
    aggregation = LossAggregation(mode=mode, divisor=9.0 if mode == "constant" else None)
    alone = StepPlan.build(aggregation, [read_batch(pack)])
    assert alone.weights(0).any()
    both = [read_batch(x) for x in (pack, packing.padding_like(pack, MULTIPLE))]
    padded = StepPlan.build(aggregation, both)
    assert not padded.weights(1).any()
    if mode != "microbatch_mean":  # in which a microbatch without a token is a microbatch
        assert torch.equal(alone.weights(0), padded.weights(0))


def test_flags_are_the_options() -> None:
    assert parse([]) == Options()
    given = parse(["--cpu", "--mode", "token_mean", "--lr", "0.5", "--output", "x"])
    assert (given.cpu, given.mode, given.lr, given.output) == (True, "token_mean", 0.5, Path("x"))


REFUSED = {
    "--mode nope": "; expected one of token_mean, sample_mean, prompt_mean,",
    "--mode custom": "; expected one of",
    "--steps 0": "; expected at least 1",
    "--answers 1": "; expected at least 2",
    "--largest 10": "; expected one digit",
    "--largest 2 --prompts 10": "; expected at most the 9 of --largest",
    "--prompts 3": " cannot be dealt to --updates 2",
    "--context-parallel 4 --token-budget 15": "; expected at least 16",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_a_run_that_cannot_be_is_refused_by_its_last_flag(flags: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse(flags.split())
    assert stopped.value.code == 2
    last = flags[flags.rindex("--") :]
    assert f"train.py: error: {last}{REFUSED[flags]}" in capsys.readouterr().err


# 9 prompts with 5 different sums: learnt in seconds.
SIZES = {"largest": 2, "prompts": 8, "answers": 32, "updates": 2, "token_budget": 640}
TINY = Options(cpu=True, steps=26, save_every=20, warmup=30, lr=3e-3, **SIZES)


def _train(options: Options) -> int:
    """Train on this rank; how many microbatches without a sample it was given."""
    from examples.grpo.loop import train

    made, given = packing.microbatches, []

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


@pytest.mark.host
@pytest.mark.slow
def test_context_parallel_ranks_sample_the_same_to_the_bit() -> None:
    ranks = run_host_ranks(_sample, 4, TINY)
    for first, second in (ranks[0:2], ranks[2:4]):
        assert all((a == b).all() for a, b in zip(first, second, strict=True))
    assert not (ranks[0][0] == ranks[2][0]).all()  # data-parallel ranks have other noise
    (whole,) = run_host_ranks(_sample, 1, replace(TINY, context_parallel=1))
    tokens, sampled, scored = whole
    for rank in (0, 1):  # sample i of the step is rank i % 2's
        got = ranks[2 * rank][0]
        assert (got[:, : task.PROMPT] == tokens[rank::2, : task.PROMPT]).all()
        assert (got == tokens[rank::2]).mean() > 0.95  # but where rounding tips a near tie
    drawn = sampled != 0
    assert abs(sampled[drawn] - scored[drawn]).max() < 1e-4


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Options, list[int]]:
    """One uninterrupted run at CP 2 x DP 2; with the padding microbatches of each rank."""
    options = replace(TINY, output=tmp_path_factory.mktemp("whole"))
    (options.output / "step_000100.pt").touch()  # an earlier run's
    return options, run_host_ranks(_train, 4, options, timeout=200)


def _metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.host
@pytest.mark.slow
def test_the_reward_rises_and_is_logged_and_plotted(trained: Any, tmp_path: Path) -> None:
    from examples.grpo import plot

    options, padding = trained
    metrics = _metrics(options.output)
    rewards = [of_step["reward"] for of_step in metrics]
    assert sum(rewards[:4]) / 4 < 0.35
    assert sum(rewards[-4:]) / 4 > 0.42
    events = EventAccumulator(str(options.output / "tensorboard")).Reload()
    assert set(events.Tags()["scalars"]) == {*metrics[0]} - {"step"}
    assert [event.value for event in events.Scalars("reward")] == pytest.approx(rewards)
    # Data-parallel ranks needed padding.
    assert padding[0] == padding[1] and padding[2] == padding[3]  # a pack is on two ranks
    assert padding[0] + padding[2] > 0
    plot.plot(tmp_path / "some" / "plot.png", [options.output, options.output])
    assert (tmp_path / "some" / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert "26 steps" in plot.summary(options.output)


@pytest.mark.host
@pytest.mark.slow
def test_a_run_resumes_to_the_bit_and_with_the_same_flags_alone(
    trained: Any, tmp_path: Path
) -> None:
    options, _ = trained
    shutil.copy(options.output / "step_000020.pt", tmp_path)
    shutil.copy(options.output / "metrics.jsonl", tmp_path)  # with later steps, as after a crash
    run_host_ranks(_train, 4, replace(options, output=tmp_path, resume=True), timeout=200)
    assert _metrics(tmp_path) == _metrics(options.output)
    with pytest.raises(ValueError, match=r"other flags \(lr 0.003 -> 0.1\); expected the same"):
        checkpoint.load(options.output, replace(options, lr=0.1))
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="drop --resume"):
        checkpoint.load(tmp_path / "empty", options)
