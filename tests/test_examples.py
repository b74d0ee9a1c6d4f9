"""The scripts of `examples`, one of them by `torchrun`; their data, rewards and packs."""

from __future__ import annotations

import ast
import itertools
import json
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from examples import stdlib_pairs
from examples.grpo import checkpoint, packing, task
from examples.grpo.options import MODES, Options, parse
from megatron_loss_agg import LossAggregation, StepPlan, predicting_mask
from megatron_loss_agg.__main__ import main
from megatron_loss_agg.explain.stock import divides_by_whole_microbatch
from megatron_loss_agg.mcore import read_batch
from tests.frameworks.harness import run_in_bash
from tests.host.harness import run_host_ranks
from tests.launch import processes
from tests.launch.processes import LAUNCHER, ROOT

STEPS = 6
EXAMPLES = ROOT / "examples"
PICTURES = ROOT / "docs" / "images"  # beside the scripts that make them
SHORT = ("--train-iters", str(STEPS), "--eval-iters", "1")


def forked(folder: Path, ranks: int, script: str | Path, *flags: str, **starter: Any) -> str:
    """Run on ranks that have Megatron imported."""
    codes, said = processes.run(folder, EXAMPLES / script, *flags, ranks=ranks, **starter)
    assert codes == [0] * ranks, said[-4000:]
    return said


def flags_of(name: str | Path) -> list[str]:
    """The array of flags in a shell script of the examples."""
    script = (EXAMPLES / name).read_text()
    match = re.search(r"^flags=\((.*?)^\)", script, re.MULTILINE | re.DOTALL)
    assert match
    return shlex.split(match.group(1), comments=True)


def losses(said: str) -> dict[str, list[float]]:
    """The loss of every step, by the name that its progress line gives."""
    lines = re.findall(r"iteration +\d+/ .*", said)
    values: dict[str, list[float]] = {}
    for name, value in re.findall(r"\| (\w+ loss): (\S+)", "\n".join(lines)):
        values.setdefault(name, []).append(float(value))
    return values


def test_the_quickstart_learns(tmp_path: Path) -> None:
    flags = [*flags_of("quickstart.sh"), *SHORT]
    trained = losses(forked(tmp_path, 4, "pretrain_gpt.py", *flags))
    assert set(trained) == {"lm loss", "prompt_mean loss"}
    for values in trained.values():
        assert len(values) == STEPS
        assert 5.5 < values[0] < 6.5  # a uniform guess among 384 tokens: ln 384 = 5.95
        assert values[-1] < values[0] - 1.5


def test_stock_megatrons_gradient_of_short_chats_is_as_explain_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = flags_of("short_chats.sh")
    said = [forked(tmp_path, 2, "pretrain_gpt.py", *flags, *mode) for mode in ((), processes.MODE)]
    stock, plugin = (float(re.findall(r"grad norm: (\S+)", x)[0]) for x in said)
    packs = stdlib_pairs.PackedPairs("train", packs=4, seq_length=1024, pad_to=1024, longest=256)
    rows = [json.dumps({"loss_mask": pack["loss_mask"].tolist()}) for pack in packs]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    assert main(["explain", "--data", str(tmp_path / "rows.jsonl"), "--", *flags]) == 0
    total = 1 if divides_by_whole_microbatch() else 0.5
    assert f"\nIts weights add up to {total:.2f} in a step, " in capsys.readouterr().out
    assert plugin > 1 and stock / plugin == pytest.approx(total, abs=1e-3)


LAYOUT = re.compile(r'^    "(.+): (\d) (.+)"$', re.MULTILINE)


@pytest.mark.extended
def test_layouts_part_in_stock_megatron_and_agree_with_the_plugin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import layouts

    shorter = f"--seq-length 256 --pad-samples-to 256 --train-iters {STEPS}".split()
    flags = [*flags_of("layouts.sh"), *shorter]
    quiet = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": str(ROOT)}
    runs = LAYOUT.findall((EXAMPLES / "layouts.sh").read_text())
    assert [int(ranks) for _, ranks, _ in runs] == [1, 1, 2, 2]
    for mode in ("stock", "sample_mean"):
        folder = tmp_path / mode
        folder.mkdir()
        aggregation = () if mode == "stock" else processes.MODE
        for name, ranks, more in runs:
            all_flags = [*flags, *more.split(), *aggregation]
            if aggregation and name == "CP 2":  # as users start it
                command = shlex.join([*LAUNCHER, "examples/pretrain_gpt.py", *all_flags])
                torchrun = f"torchrun --standalone --nproc-per-node {ranks}"
                said = run_in_bash(f"{torchrun} {command} 2>&1", **quiet)
            else:
                said = forked(tmp_path, int(ranks), "pretrain_gpt.py", *all_flags)
            (folder / f"{name}.log").write_text(said)
    assert layouts.main(tmp_path) == 0
    out = capsys.readouterr().out
    assert "\nstock Megatron\n  1 rank  " in out  # what the others are compared with
    assert "\nSHOWN: " in out and ("7452" in out) == divides_by_whole_microbatch()
    assert (tmp_path / "layouts.png").read_bytes().startswith(b"\x89PNG")
    # One loss of the plugin's is off, in one layout.
    log = tmp_path / "sample_mean" / "CP 2.log"
    first = layouts.Run.read(log).losses[0]
    log.write_text(log.read_text().replace(f"{first:.6E}", f"{first * 1.0001:.6E}"))
    assert layouts.main(tmp_path) == 1
    # With the fix, runs of CP 2 are those of 1 rank.
    shutil.copy(tmp_path / "stock/1 rank.log", tmp_path / "stock/CP 2.log")
    assert layouts.main(tmp_path) == 1 and "7452" in capsys.readouterr().out


# What a script that starts without the launcher does before it imports Megatron, or the CPU stands
# in for a GPU too late; forked ranks, which have imported both, cannot tell.
FIRST = {
    **{"proof": "cpu.enable()", "custom_loop": "cpu.enable()"},
    **dict.fromkeys(("dpo", "stream", "prefix_tree"), "from custom_loop import"),
}


@pytest.mark.parametrize("script", FIRST)
def test_a_script_takes_the_cpu_before_megatron_is_imported(script: str) -> None:
    source = (EXAMPLES / f"{script}.py").read_text()
    assert source.index(FIRST[script]) < source.index("from megatron.")


@pytest.mark.parametrize("script", ["custom_loop", "dpo", "stream", "prefix_tree"])
def test_the_custom_loops_prove_their_gradients(script: str, tmp_path: Path) -> None:
    said = forked(tmp_path, 2, f"{script}.py", "--cpu", starter=())
    errors = re.findall(r"gradient error (\S+)", said)
    assert len(errors) == 5
    assert all(float(error) < 1e-12 for error in errors)
    are_pairs = re.search(r"^  counts: +\d+ samples \(pairs\), .* losses$", said, re.MULTILINE)
    assert bool(are_pairs) == (script == "dpo"), said


def _rows_of_microbatches() -> list[list[list[int]]]:
    """The rows of the custom loops' microbatches, for 1 to 8 ranks and each of their ranks."""
    from unittest import mock

    from examples.custom_loop import my_microbatches, parallel_state

    whole, by_ranks = {"tokens": torch.arange(16)}, []
    for ranks in range(1, 9):
        batches = []
        for rank in range(ranks):
            place = {"rank": rank, "world_size": ranks}
            stand_ins = {f"get_data_parallel_{k}": lambda v=v: v for k, v in place.items()}
            with mock.patch.multiple(parallel_state, **stand_ins):
                batches += [batch["tokens"].tolist() for batch in my_microbatches(whole)]
        by_ranks.append(batches)
    return by_ranks


def test_the_custom_loops_have_two_microbatches_with_rows_on_each_of_up_to_8_ranks() -> None:
    (by_ranks,) = run_host_ranks(_rows_of_microbatches, 1)
    for ranks, batches in enumerate(by_ranks, 1):
        assert len(batches) == 2 * ranks and all(batches)
        assert sorted(itertools.chain(*batches)) == [*range(16)]
        # On 8 ranks, each of these has one row.
        assert (len({*map(len, batches)}) > 1) == (ranks < 8)


def test_the_proof_holds_and_stock_averages_differ(tmp_path: Path) -> None:
    said = forked(tmp_path, 4, "proof.py", starter=())
    rows = dict(re.findall(r"^  (\S.*?)  +([\d.e+ -]+)$", said, re.MULTILINE))
    table = {title: [float(cell) for cell in cells.split()] for title, cells in rows.items()}
    per_token = ", --calculate-per-token-loss"
    for flag in ("", per_token):
        assert max(table["megatron_loss_agg" + flag]) <= 1e-12
        prompt_mean, *_ = table["stock Megatron" + flag]
        assert prompt_mean > 1e-2
    # Stock Megatron has an exact mean over tokens, under that flag: the reference must agree.
    *_, token_mean, _ = table["stock Megatron" + per_token]
    assert token_mean <= 1e-12


# One parameter is NaN, with one mode and flag, neither of them the first.
SPOILED = f"""
import sys
sys.path[0] = {str(ROOT / "examples")!r}
import proof
proof.SHAPE["num_layers"] = proof.MICROBATCHES = 1
exact = proof.megatron_gradients
def spoiled(data, weights, mode, per_token_flag):
    gradients = exact(data, weights, mode, per_token_flag)
    if mode == "token_mean" and per_token_flag:
        gradients[list(gradients)[-1]] *= float("nan")
    return gradients
proof.megatron_gradients = spoiled
sys.exit(proof.main())
"""


def test_the_proof_fails_when_one_parameter_of_one_run_is_wrong(tmp_path: Path) -> None:
    codes, said = processes.run(tmp_path, SPOILED, ranks=4, starter=())
    assert codes == [1, 0, 0, 0]
    assert "NOT EXACT" in said


def test_losses_by_length_are_megatrons_and_runs_are_plotted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.syspath_prepend(str(PICTURES))
    import compare_modes_plot

    run = tmp_path / "token_mean"
    run.mkdir()
    short = "--train-iters 2 --lr-warmup-iters 0 --eval-interval 2 --eval-iters 3"
    mode = ("--loss-aggregation", "token_mean")
    flags = [*flags_of(PICTURES / "compare_modes.sh"), *short.split(), *mode]
    monkeypatch.setenv("COMPARE_MODES_OUTPUT", str(run / "losses.jsonl"))
    log = forked(tmp_path, 1, PICTURES / "compare_modes.py", *flags)
    (run / "log.txt").write_text(log)
    # The evaluation reads 24 packs. By length, their losses add up to what Megatron logs.
    first, *_ = map(json.loads, (run / "losses.jsonl").read_text().splitlines())
    data = stdlib_pairs.PackedPairs("valid", packs=24, seq_length=1024, pad_to=2)
    lengths = [len(pair.response) + 1 for i in range(24) for pair in data.pairs(i)]
    classes = {"short": (0, 64), "medium": (64, 256), "long": (256, 9999)}
    tokens = {k: sum(n for n in lengths if a <= n < b) for k, (a, b) in classes.items()}
    assert all(tokens.values()) and first["step"] == 2
    mean = sum(first[name] * tokens[name] for name in tokens) / sum(tokens.values())
    logged = re.findall(r"validation loss at .*lm loss value: (\S+)", log)
    assert mean == pytest.approx(float(logged[0]), rel=2e-6)
    shutil.copytree(run, tmp_path / "stock")
    compare_modes_plot.main(tmp_path, ["stock", "token_mean"])
    assert (tmp_path / "loss_by_length.png").read_bytes().startswith(b"\x89PNG")
    norm, _ = re.findall(r"grad norm: (\S+)", log)
    said = capsys.readouterr().out
    assert f"| {float(norm):.3g} |" in said and "| `stock` |" in said


def test_a_sample_is_a_documented_function_and_only_its_body_and_end_have_loss(
    tmp_path: Path,
) -> None:
    source = (
        "class A:\n    def f(self, x):\n"
        '        """Double x."""\n        # plain\n        return 2 * x\n'
        "def undocumented():\n    return 1\n"
        'def only_docstring():\n    """Nothing else."""\n'
        'def one_line(): "Documented."; return 1\n'
    )
    (tmp_path / "m.py").write_text(source)
    (pair,) = stdlib_pairs.functions("m.py", tmp_path)
    assert pair.prompt == b'def f(self, x):\n    """Double x."""\n'
    assert pair.response == b"# plain\nreturn 2 * x\n"
    assert ast.parse(pair.prompt + b"    return 2 * x")
    packs, id_of = stdlib_pairs.PackedPairs("train", packs=12, seq_length=512, pad_to=4), {}
    for item, pairs in ((packs[i], packs.pairs(i)) for i in range(12)):
        starts, padding = item["cu_seqlens_padded"].tolist(), item["cu_seqlens_padded"].diff()
        assert item["cu_seqlens"].diff().tolist() == [pair.length for pair in pairs]
        assert padding.tolist() == [-(-pair.length // 4) * 4 for pair in pairs]
        assert item["tokens"].numel() == starts[-1] <= 512
        assert int(item["max_seqlen"]) == int(padding.max())
        for pair, start, prompt_id in zip(pairs, starts, item["prompt_ids"].tolist(), strict=False):
            names = ("tokens", "labels", "position_ids", "loss_mask")
            fields = [item[name][start : start + pair.length].tolist() for name in names]
            text = [*pair.prompt, stdlib_pairs.SEPARATOR, *pair.response, stdlib_pairs.END]
            mask = [0.0] * len(pair.prompt) + [1.0] * (len(pair.response) + 1)
            assert fields == [text[:-1], text[1:], [*range(pair.length)], mask]
            assert id_of.setdefault(pair.module, prompt_id) == prompt_id
    assert len({*id_of.values()}) == len(id_of) < 12  # groups go on in the next pack
    train, valid = ({*stdlib_pairs.modules(split)} for split in ("train", "valid"))
    assert train and valid and not train & valid


# `examples/grpo`.

NO_ANSWERS = ("12", "", "=", "=012", "=12=", "=1=2", "=12+", "=1", "=+12", "=13", "7=13")


def answer(text: str) -> list[int]:
    return [*task.encode(text), task.END]


def test_a_reward_is_given_for_the_sum_after_the_last_equals_sign_and_nothing_else() -> None:
    for left, right in itertools.product(range(10), repeat=2):
        rewarded = [n for n in range(20) if task.reward(f"{left}+{right}", answer(f"={n}"))]
        assert rewarded == [left + right]
    for before in ("", "7", "=", "3+4=7", "=12=", "++"):
        assert task.reward("5+7", answer(f"{before}=12")) == 1
    unfinished = [[], task.encode("=12"), [*task.encode("=12"), task.PAD, task.END]]
    for wrong in (*unfinished, [*answer("=12"), task.END], *map(answer, NO_ANSWERS)):
        assert task.reward("5+7", wrong) == 0, wrong
    # Group 1: mean 1/4, variance (9 + 3 * 1) / 16 / 3 = 1/4. Group 2: all the same.
    rewards = torch.tensor([1.0, 0, 0, 0, 1, 1, 1, 1])
    expected = torch.tensor([1.5, -0.5, -0.5, -0.5, 0, 0, 0, 0])
    torch.testing.assert_close(task.group_advantages(rewards, 4), expected)


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


def unpack(
    values: torch.Tensor, offsets: torch.Tensor, offsets_padded: torch.Tensor
) -> list[torch.Tensor]:
    """The samples of [1, tokens], without their padding: the inverse of `packing.pack`."""
    starts, lengths = offsets_padded[:-1].tolist(), offsets.diff().tolist()
    pairs = zip(starts, lengths, strict=True)
    return [values[0, start : start + length] for start, length in pairs]


def test_packs_hold_every_row_once_within_the_budget() -> None:
    fields, lengths, prompt_ids = rows(40, seed=0)
    unpacked_rows = []
    for pack in packing.microbatches(
        fields, lengths, prompt_ids, multiple=4, budget=64, group=None
    ):
        offsets, padded = pack["cu_seqlens"], pack["cu_seqlens_padded"]
        assert pack["tokens"].shape == (1, int(padded[-1])) and padded[-1] <= 64
        assert (padded.diff() % 4 == 0).all()
        names = (*fields, "labels", "position_ids")
        unpacked = (unpack(pack[name], offsets, padded) for name in names)
        for prompt, *row, labels, positions in zip(pack["prompt_ids"], *unpacked, strict=True):
            assert torch.equal(labels[:-1], row[0][1:])
            assert torch.equal(positions, torch.arange(len(labels)))
            unpacked_rows.append((int(prompt), *(x.tolist() for x in row)))
    expected = [
        (prompt, *(field[i, : lengths[i]].tolist() for field in fields.values()))
        for i, prompt in enumerate(prompt_ids.tolist())
    ]
    assert sorted(unpacked_rows) == sorted(expected)


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_that_is_offered_weighs_packs_and_ignores_padding_ones(mode: str) -> None:
    pack = packing.pack(*rows(6, seed=1), 4)
    aggregation = LossAggregation(mode=mode, divisor=9.0 if mode == "constant" else None)
    alone = StepPlan.build(aggregation, [read_batch(pack)])
    assert alone.weights(0).any()
    both = [read_batch(x) for x in (pack, packing.padding_like(pack, 4))]
    padded = StepPlan.build(aggregation, both)
    assert not padded.weights(1).any()
    if mode != "microbatch_mean":  # in which a microbatch without a token is a microbatch
        assert torch.equal(alone.weights(0), padded.weights(0))


REFUSED = {
    "--mode custom": "; expected one of token_mean, sample_mean, prompt_mean,",
    "--largest 2 --prompts 10": "; expected at most the 9 of --largest",
    "--prompts 3": " cannot be dealt to --updates 2",
    "--context-parallel 4 --token-budget 15": "; expected at least 16",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_a_run_that_cannot_be_is_refused_by_its_last_flag(flags: str, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        parse(flags.split())
    last = flags[flags.rindex("--") :]
    assert f"train.py: error: {last}{REFUSED[flags]}" in capsys.readouterr().err


# 9 prompts with 5 different sums: learnt in seconds.
SIZES = {"largest": 2, "prompts": 8, "answers": 32, "updates": 2, "token_budget": 640}
TINY = Options(cpu=True, steps=12, save_every=8, warmup=40, lr=5e-3, **SIZES)


def _train(options: Options) -> None:
    from examples.grpo.loop import train

    train(options)


def _sample(options: Options) -> tuple[Any, Any, Any]:
    """Samples of an untrained model on this rank: tokens, and their log-probabilities."""
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
    tokens, sampled, scored = whole
    for rank in (0, 1):  # sample i of the step is rank i % 2's
        got = ranks[2 * rank][0]
        assert (got[:, : task.PROMPT] == tokens[rank::2, : task.PROMPT]).all()
        assert (got == tokens[rank::2]).mean() > 0.95  # but where rounding tips a near tie
    drawn = sampled != 0
    assert abs(sampled[drawn] - scored[drawn]).max() < 1e-4


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Options:
    """Of one uninterrupted run at CP 2 x DP 2."""
    options = replace(TINY, output=tmp_path_factory.mktemp("whole"))
    for name in ("step_000100.pt", "step_000100.part", "step_notes.txt"):  # from an earlier run
        (options.output / name).touch()
    run_host_ranks(_train, 4, options)
    return options


def _metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_reward_rises_and_is_logged_and_plotted(trained: Options, tmp_path: Path) -> None:
    from examples.grpo import plot

    metrics = _metrics(trained.output)
    rewards = [step["reward"] for step in metrics]
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.05
    events = EventAccumulator(str(trained.output / "tensorboard")).Reload()
    assert set(events.Tags()["scalars"]) == {*metrics[0]} - {"step"}
    assert [event.value for event in events.Scalars("reward")] == pytest.approx(rewards)
    plot.plot(tmp_path / "some" / "plot.png", [trained.output, trained.output])
    assert (tmp_path / "some" / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert "12 steps" in plot.summary(trained.output)


def test_a_new_run_removes_an_earlier_ones_checkpoints_and_no_other_file(trained: Options) -> None:
    names = {path.name for path in trained.output.glob("step_*")}
    assert names == {"step_000008.pt", "step_000012.pt", "step_notes.txt"}


def test_a_run_resumes_to_the_bit_and_with_the_same_flags_alone(
    trained: Options, tmp_path: Path
) -> None:
    shutil.copy(trained.output / "step_000008.pt", tmp_path)
    shutil.copy(trained.output / "metrics.jsonl", tmp_path)  # with later steps, as after a crash
    run_host_ranks(_train, 4, replace(trained, output=tmp_path, resume=True))
    assert _metrics(tmp_path) == _metrics(trained.output)
    with pytest.raises(ValueError, match=r"other flags \(lr 0.005 -> 0.1\); expected the same"):
        checkpoint.load(trained.output, replace(trained, lr=0.1))


def _train_in_bf16(options: Options) -> None:
    """As on a GPU, apart from the layers of Transformer Engine."""
    from examples.grpo import model

    model.get_gpt_layer_with_transformer_engine_spec = model.get_gpt_layer_local_spec
    _train(replace(options, cpu=False))


def test_a_run_in_bf16_resumes_to_the_bit(tmp_path: Path) -> None:
    # The optimizer's fp32 weights are in the checkpoint: rounded ones would give other steps.
    whole = replace(
        TINY, steps=4, save_every=2, warmup=2, context_parallel=1, output=tmp_path / "whole"
    )
    run_host_ranks(_train_in_bf16, 1, whole)
    resumed = replace(whole, output=tmp_path / "resumed", resume=True)
    resumed.output.mkdir()
    for name in ("step_000002.pt", "metrics.jsonl"):
        shutil.copy(whole.output / name, resumed.output)
    run_host_ranks(_train_in_bf16, 1, resumed)
    assert _metrics(resumed.output) == _metrics(whole.output)
