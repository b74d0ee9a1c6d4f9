"""`examples/grpo` without its model: exact rewards, packing that loses nothing, flags."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from examples.grpo import packing, task
from examples.grpo.options import MODES, Options, parse
from megatron_loss_agg import LossAggregation, StepPlan, predicting_mask
from megatron_loss_agg.mcore.reading.keys import read_batch

CP = 2
MULTIPLE = 2 * CP
DIGITS = range(10)


def test_a_reward_is_given_for_the_sum_and_nothing_else() -> None:
    for left in DIGITS:
        for right in DIGITS:
            for said in range(20):
                answer = [*task.encode(f"={said}"), task.END]
                expected = 1.0 if said == left + right else 0.0
                assert task.reward(f"{left}+{right}", answer) == expected


RIGHT, END = task.encode("=12"), [task.END]
NO_ANSWERS = [[], RIGHT, [*RIGHT, *END, *END], [*RIGHT, task.PAD, *END]]  # must end once
NO_ANSWERS += [
    [*task.encode(text), *END]
    for text in ("12", "", "=", "=012", "=12=", "=1=2", "=12+", "=1", "=+12", "=13", "7=13")
]


def test_what_stands_before_the_last_equals_sign_does_not_matter_and_another_form_does() -> None:
    for before in ("", "7", "=", "3+4=7", "=12=", "++"):
        assert task.reward("5+7", [*task.encode(before), *RIGHT, *END]) == 1
    assert [answer for answer in NO_ANSWERS if task.reward("5+7", answer) != 0] == []


def test_advantages_are_those_of_each_prompts_group() -> None:
    # Group 1: mean 1/4, variance (9 + 3 * 1) / 16 / 3 = 1/4. Group 2: all alike.
    rewards = torch.tensor([1.0, 0, 0, 0, 1, 1, 1, 1])
    expected = torch.tensor([1.5, -0.5, -0.5, -0.5, 0, 0, 0, 0])
    torch.testing.assert_close(task.group_advantages(rewards, 4), expected)


def test_examples_are_right_and_fit() -> None:
    lengths = set()
    for prompt, answer in task.examples(200, largest=9, seed=0):
        assert task.reward(task.decode(prompt), answer) == 1
        assert len(prompt) == task.PROMPT and len(answer) <= task.MAX_ANSWER
        lengths.add(len(answer))
    assert len(lengths) > 4


def test_prompts_differ_within_a_step_and_depend_on_the_seed_alone() -> None:
    first, again, other = (task.prompts(16, largest=4, seed=seed) for seed in (3, 3, 4))
    assert len(set(first)) == 16
    assert first == again != other


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
        (prompt, *(tuple(field[i, : lengths[i]].tolist()) for field in fields.values()))
        for i, prompt in enumerate(prompt_ids.tolist())
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
    alone = StepPlan.build(aggregation, [read_batch(pack)])
    padded = StepPlan.build(aggregation, [read_batch(x) for x in (pack, padding)])
    assert torch.equal(alone.weights(0), padded.weights(0))
    assert not padded.weights(1).any()


def test_flags_are_the_options() -> None:
    assert parse([]) == Options()
    given = parse(["--cpu", "--mode", "token_mean", "--lr", "0.5", "--output", "x"])
    assert (given.cpu, given.mode, given.lr, given.output) == (True, "token_mean", 0.5, Path("x"))


REFUSED = {
    "--mode nope": "; expected one of token_mean, sample_mean, prompt_mean,",
    "--mode custom": "; expected one of",
    "--steps 0": "; expected at least 1",
    "--save-every 0": "; expected at least 1",
    "--answers 1": "; expected at least 2",
    "--updates 0": "; expected at least 1",
    "--context-parallel 0": "; expected at least 1",
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


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_that_is_offered_can_be_built(mode: str) -> None:
    assert parse(["--mode", mode]).mode == mode
    divisor = 9.0 if mode == "constant" else None
    plan = StepPlan.build(
        LossAggregation(mode=mode, divisor=divisor),
        [read_batch(packing.pack(*rows(6, seed=1), MULTIPLE))],
    )
    assert plan.weights(0).any()
