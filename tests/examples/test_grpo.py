"""`examples/grpo`: exact rewards, packing that loses nothing, learning, and resuming to the bit."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.grpo import packing, task
from examples.grpo.options import Options, parse
from megatron_loss_agg import LossAggregation, StepPlan, predicting_mask
from tests.host.ranks import run_host_ranks

CP = 2
MULTIPLE = 2 * CP
DIGITS = range(10)
# 9 prompts with 5 different sums: learnt in seconds.
TINY = Options(
    cpu=True,
    steps=26,
    save_every=20,
    largest=2,
    prompts=8,
    answers=32,
    updates=2,
    warmup=30,
    lr=3e-3,
    token_budget=256,
)


# --- The task ------------------------------------------------------------------------------------


def test_a_reward_is_given_for_the_sum_and_nothing_else() -> None:
    for left in DIGITS:
        for right in DIGITS:
            for said in range(20):
                answer = [*task.encode(f"={said}"), task.END]
                expected = 1.0 if said == left + right else 0.0
                assert task.reward(f"{left}+{right}", answer) == expected


@pytest.mark.parametrize("before", ["", "7", "=", "3+4=7", "=12=", "++"])
def test_what_stands_before_the_last_equals_sign_does_not_matter(before: str) -> None:
    assert task.reward("5+7", [*task.encode(before + "=12"), task.END]) == 1
    assert task.reward("5+7", [*task.encode(before + "=13"), task.END]) == 0


@pytest.mark.parametrize("text", ["12", "", "=", "=012", "=12=", "=1=2", "=12+", "=1", "=+12"])
def test_another_form_is_no_answer(text: str) -> None:
    assert task.reward("5+7", [*task.encode(text), task.END]) == 0


def test_an_answer_must_end_once() -> None:
    right = task.encode("=12")
    assert task.reward("5+7", right) == 0
    assert task.reward("5+7", []) == 0
    assert task.reward("5+7", [*right, task.END, task.END]) == 0
    assert task.reward("5+7", [*right, task.PAD, task.END]) == 0


def test_examples_are_right_and_fit() -> None:
    lengths = set()
    for prompt, answer in task.examples(200, largest=9, seed=0):
        assert task.reward(task.decode(prompt), answer) == 1
        assert len(prompt) == task.PROMPT and len(answer) <= task.MAX_ANSWER
        lengths.add(len(answer))
    assert len(lengths) > 4


def test_prompts_differ_within_a_step_and_depend_on_the_seed_alone() -> None:
    assert len(set(task.prompts(16, largest=4, seed=3))) == 16
    assert task.prompts(16, largest=4, seed=3) == task.prompts(16, largest=4, seed=3)
    assert task.prompts(16, largest=4, seed=3) != task.prompts(16, largest=4, seed=4)


# --- Packing -------------------------------------------------------------------------------------


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
    packs = packing.microbatches(
        fields, lengths, prompt_ids, multiple=MULTIPLE, budget=64, group=None
    )
    assert len(packs) > 3
    found = []
    for pack in packs:
        offsets, padded = pack["cu_seqlens"], pack["cu_seqlens_padded"]
        assert pack["tokens"].shape == (1, int(padded[-1])) and padded[-1] <= 64
        assert (padded.diff() % MULTIPLE == 0).all()
        parts = {name: packing.unpack(pack[name], offsets, padded) for name in fields}
        labels = packing.unpack(pack["labels"], offsets, padded)
        positions = packing.unpack(pack["position_ids"], offsets, padded)
        for i, prompt in enumerate(pack["prompt_ids"].tolist()):
            tokens = parts["tokens"][i]
            assert torch.equal(labels[i][:-1], tokens[1:])
            assert torch.equal(positions[i], torch.arange(len(tokens)))
            found.append((prompt, *(tuple(parts[name][i].tolist()) for name in fields)))
    expected = [
        (prompt, *(tuple(fields[name][i, :length].tolist()) for name in fields))
        for i, (prompt, length) in enumerate(
            zip(prompt_ids.tolist(), lengths.tolist(), strict=True)
        )
    ]
    assert sorted(found) == sorted(expected)


def test_no_bin_is_over_the_budget_and_none_could_be_spared() -> None:
    # 5 + 3 and 4 + 4 fill two bins of 8; the 2 that is left needs a third.
    assert packing.bins([3, 4, 5, 4, 2], 8) == [[2, 0], [1, 3], [4]]
    with pytest.raises(ValueError, match=r"9 tokens; the token budget is 8: raise it"):
        packing.bins([9], 8)


@pytest.mark.parametrize("mode", ["prompt_mean", "token_mean", "sample_mean"])
def test_a_padding_microbatch_changes_no_weight(mode: str) -> None:
    pack = packing.pack(*rows(6, seed=1), MULTIPLE)
    padding = packing.padding_like(pack, MULTIPLE)
    aggregation = LossAggregation(mode=mode)
    alone = StepPlan.build(aggregation, [packing.read_pack(pack)])
    padded = StepPlan.build(aggregation, [packing.read_pack(x) for x in (pack, padding)])
    assert torch.equal(alone.weights(0), padded.weights(0))
    assert padded.weights(1).numel() == 0


# --- The loop ------------------------------------------------------------------------------------


def _train(options: Options) -> int:
    """Train on this rank; how many microbatches with and without a sample it was given."""
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


@pytest.mark.host
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
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Options, list[int]]:
    """One uninterrupted run at CP 2 x DP 2, and the padding microbatches of each rank."""
    options = _in(tmp_path_factory.mktemp("whole"))
    return options, run_host_ranks(_train, 4, options, timeout=200)


def _in(folder: Path, **changes: Any) -> Options:
    return replace(TINY, output=folder, **changes)


def _metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.host
@pytest.mark.slow
def test_the_reward_rises(trained: tuple[Options, list[int]]) -> None:
    options, _ = trained
    rewards = [metrics["reward"] for metrics in _metrics(options.output)]
    first, last = (sum(some) / len(some) for some in (rewards[:4], rewards[-4:]))
    assert first < 0.35
    assert last > 0.42


@pytest.mark.host
@pytest.mark.slow
def test_sampling_and_training_agree_and_ranks_pad_differently(
    trained: tuple[Options, list[int]],
) -> None:
    options, padding = trained
    assert padding[0] == padding[1] and padding[2] == padding[3]  # ranks of one CP group
    assert padding[0] + padding[2] > 0
    assert padding[0] != padding[2]
    assert list((options.output / "tensorboard").glob("events*"))


@pytest.mark.host
@pytest.mark.slow
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(
    trained: tuple[Options, list[int]], tmp_path: Path
) -> None:
    options, _ = trained
    shutil.copy(options.output / "step_000020.pt", tmp_path)
    shutil.copy(options.output / "metrics.jsonl", tmp_path)  # with later steps, as after a crash
    run_host_ranks(_train, 4, _in(tmp_path, resume=True), timeout=200)
    assert _metrics(tmp_path) == _metrics(options.output)
    last = "step_000026.pt"
    whole, resumed = (torch.load(folder / last) for folder in (options.output, tmp_path))
    assert _leaves(whole) == _leaves(resumed)


def _leaves(state: Any) -> list[Any]:
    """All values in ``state``; tensors as bytes."""
    if isinstance(state, torch.Tensor):
        return [state.dtype, state.shape, state.numpy().tobytes()]
    if isinstance(state, dict):
        return [leaf for key in state for leaf in (key, *_leaves(state[key]))]
    if isinstance(state, (list, tuple)):
        return [leaf for value in state for leaf in _leaves(value)]
    return [state]


@pytest.mark.host
@pytest.mark.slow
def test_a_plot_of_several_runs_is_drawn(
    trained: tuple[Options, list[int]], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    from examples.grpo import plot

    options, _ = trained
    plot.plot(tmp_path / "some" / "plot.png", [options.output, options.output])
    assert (tmp_path / "some" / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert "26 steps" in plot.summary(options.output)


def test_flags_are_the_options() -> None:
    assert parse([]) == Options()
    given = parse(["--cpu", "--mode", "token_mean", "--lr", "0.5", "--output", "x"])
    assert (given.cpu, given.mode, given.lr, given.output) == (True, "token_mean", 0.5, Path("x"))
    with pytest.raises(ValueError, match="--prompts 3 cannot be dealt to --updates 2"):
        Options(prompts=3, updates=2)
