"""The scripts of `examples`, started as their users start them, and the data that they train on."""

from __future__ import annotations

import ast
import itertools
import json
import os
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from examples import stdlib_pairs
from examples.stdlib_pairs import END, SEPARATOR, PackedPairs
from tests.frameworks.harness import run_in_bash
from tests.launch import processes
from tests.launch.processes import LAUNCHER, ROOT

STEPS = 10
SCRIPT = ROOT / "examples/pretrain_gpt.py"
SHORT = ("--train-iters", str(STEPS), "--eval-iters", "1")


def torchrun(ranks: int, *command: str) -> str:
    """Run under torchrun on this machine; what it said, of stdout and stderr together."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "examples")])
    quiet = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": path}
    start = f"torchrun --standalone --nproc-per-node {ranks} {shlex.join(command)} 2>&1"
    return run_in_bash(start, **quiet)


def flags_of(name: str) -> list[str]:
    """The array of flags in a shell script of the examples."""
    script = (ROOT / "examples" / name).read_text()
    found = re.search(r"^flags=\((.*?)^\)", script, re.MULTILINE | re.DOTALL)
    assert found
    return shlex.split(found.group(1), comments=True)


def losses(said: str) -> dict[str, list[float]]:
    """The loss of every step, by the name that its progress line gives."""
    lines = re.findall(r"iteration +\d+/ .*", said)
    found: dict[str, list[float]] = {}
    for name, value in re.findall(r"\| (\w+ loss): (\S+)", "\n".join(lines)):
        found.setdefault(name, []).append(float(value))
    return found


@pytest.mark.host
@pytest.mark.slow
def test_the_quickstart_learns_alike_on_four_ranks_and_on_two(tmp_path: Path) -> None:
    trained = losses(torchrun(4, *LAUNCHER, str(SCRIPT), *flags_of("quickstart.sh"), *SHORT))
    assert set(trained) == {"lm loss", "prompt_mean loss"}
    for values in trained.values():
        assert len(values) == STEPS
        assert 5.5 < values[0] < 6.5  # a uniform guess among 384 tokens: ln 384 = 5.95
        assert max(values[-3:]) < values[0] - 1.5
    # CP 2 x DP 1: the same packs in twice as many microbatches a rank.
    codes, said = processes.run(tmp_path, SCRIPT, *flags_of("quickstart.sh"), *SHORT, ranks=2)
    assert codes == [0, 0], said[-4000:]
    halved = losses(said)
    for name, values in trained.items():
        assert halved[name] == pytest.approx(values, rel=1e-4)


@pytest.mark.host
@pytest.mark.parametrize("script", ["custom_loop", "dpo"])
def test_the_custom_loops_prove_their_gradients(script: str) -> None:
    errors = re.findall(r"gradient error (\S+)", torchrun(2, f"examples/{script}.py", "--cpu"))
    assert len(errors) == 5
    assert all(float(error) < 1e-12 for error in errors)


@pytest.mark.host
@pytest.mark.slow
def test_the_proof_holds_and_stock_averages_differ() -> None:
    said = torchrun(4, "examples/proof.py")
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


WITHOUT_THE_HOOK = "proof.LossHook.wrap = lambda self, forward_backward: forward_backward"
# Of one parameter, with one mode and flag, neither of them the first.
NAN = """
exact = proof.host_gradients
def spoiled(data, weights, mode, per_token_flag):
    found = exact(data, weights, mode, per_token_flag)
    if mode == "token_mean" and per_token_flag:
        found[list(found)[-1]] *= float("nan")
    return found
proof.host_gradients = spoiled
"""


@pytest.mark.host
@pytest.mark.slow
@pytest.mark.parametrize("defect", [WITHOUT_THE_HOOK, NAN])
def test_the_proof_fails_when_the_gradient_is_wrong(tmp_path: Path, defect: str) -> None:
    script = (
        f"import sys; sys.path[0] = {str(ROOT / 'examples')!r}\n"
        "import proof\n"
        "proof.SHAPE['num_layers'] = proof.MICROBATCHES = 1\n"
        f"{defect}\n"
        "sys.exit(proof.main())\n"
    )
    codes, said = processes.run(tmp_path, script, ranks=4, starter=())
    assert codes == [1, 0, 0, 0]
    assert "NOT EXACT" in said


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the examples importable, as they are for one another."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    yield
    for name in ("stdlib_pairs", "compare_modes_plot", "stock_weights"):
        sys.modules.pop(name, None)


@pytest.mark.host
@pytest.mark.usefixtures("examples")
def test_losses_by_length_are_megatrons_and_runs_are_plotted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    import compare_modes_plot

    run = tmp_path / "token_mean"
    run.mkdir()
    short = "--train-iters 2 --lr-warmup-iters 0 --eval-interval 2 --eval-iters 3"
    flags = [*flags_of("compare_modes.sh"), *short.split(), "--loss-aggregation", "token_mean"]
    monkeypatch.setenv("COMPARE_MODES_OUTPUT", str(run / "losses.jsonl"))
    log = torchrun(1, *LAUNCHER, "examples/compare_modes.py", *flags)
    (run / "log.txt").write_text(log)
    # The evaluation reads 24 packs. By length, their losses add up to what Megatron logs.
    first, *_ = map(json.loads, (run / "losses.jsonl").read_text().splitlines())
    data = PackedPairs("valid", packs=24, seq_length=1024, pad_to=2)
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


@pytest.mark.usefixtures("examples")
def test_the_picture_of_stock_weights_has_the_microbatches_means(tmp_path: Path) -> None:
    import stock_weights

    samples = stock_weights.step()
    weights = stock_weights.draw(str(tmp_path / "x.png"), samples)
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    total = sum(sample.tokens for sample in samples)
    for place, sample in enumerate(samples):
        own = sum(other.tokens for other in samples if other.microbatch == sample.microbatch)
        assert weights["microbatch_mean"][place] == pytest.approx(total / own / 4)
        assert weights["sample_mean"][place] == pytest.approx(total / sample.tokens / len(samples))
        assert weights["token_mean"][place] == pytest.approx(1)


PACKS = 12


def packed_pairs(packs: int = PACKS, **seed: int) -> PackedPairs:
    return PackedPairs("train", packs=packs, seq_length=512, pad_to=4, **seed)


def test_packs_are_whole_functions_with_loss_on_the_response_and_its_end() -> None:
    dataset = packed_pairs()
    for index in range(PACKS):
        item, pairs = dataset[index], dataset.pairs(index)
        starts, padding = item["cu_seqlens_padded"].tolist(), item["cu_seqlens_padded"].diff()
        assert item["cu_seqlens"].diff().tolist() == [pair.length for pair in pairs]
        assert padding.tolist() == [-(-pair.length // 4) * 4 for pair in pairs]
        assert item["tokens"].numel() == starts[-1] <= 512
        assert int(item["max_seqlen"]) == int(padding.max())
        for pair, start, stop in zip(pairs, starts, starts[1:], strict=False):
            assert pair in stdlib_pairs.functions(pair.module)
            names = ("tokens", "labels", "position_ids", "loss_mask")
            tokens, labels, positions, mask = (item[name][start:stop] for name in names)
            assert labels[mask.bool()].tolist() == [*pair.response, END]
            # The first position with loss holds the separator: its logits predict the first byte.
            assert tokens[mask.bool()][0] == SEPARATOR
            assert torch.equal(tokens[1 : pair.length], labels[: pair.length - 1])
            assert labels[pair.length - 1] == END
            assert torch.equal(positions[: pair.length], torch.arange(pair.length))


def test_functions_of_one_module_share_an_id_across_packs() -> None:
    dataset, id_of = packed_pairs(), stdlib_pairs.prompt_id
    ids = [dataset[index]["prompt_ids"].tolist() for index in range(PACKS)]
    assert ids == [[id_of(pair.module) for pair in dataset.pairs(i)] for i in range(PACKS)]
    assert any({*left} & {*right} for left, right in itertools.pairwise(ids))
    assert id_of("a.py") != id_of("b.py")


def test_order_depends_on_the_seed_alone_and_splits_share_no_module() -> None:
    datasets = packed_pairs(), packed_pairs(2 * PACKS), packed_pairs(seed=1)
    first, longer, other = ([made.pairs(i) for i in range(PACKS)] for made in datasets)
    assert first == longer != other
    train, valid = ({*stdlib_pairs.modules(split)} for split in ("train", "valid"))
    assert train and valid and not train & valid


def test_a_prompt_is_signature_and_docstring_and_the_whole_parses(tmp_path: Path) -> None:
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


def test_too_short_a_pack_is_refused_with_a_remedy() -> None:
    with pytest.raises(ValueError, match="raise --seq-length"):
        next(stdlib_pairs.samples("valid", seed=0, max_length=4, per_module=8))
