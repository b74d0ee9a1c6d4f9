"""`examples/compare_modes.sh`: its losses by length are Megatron's, and its picture is drawn."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.examples.test_quickstart import ROOT, quickstart_flags, torchrun

pytestmark = pytest.mark.host

STEPS = 2


@pytest.fixture(scope="module")
def examples() -> Any:
    """Makes the examples importable, as they are for one another."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "examples"))
        yield
        for name in ("stdlib_pairs", "compare_modes_plot", "stock_weights"):
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one run, of `STEPS` steps, whose evaluation reads the packs of `record`."""
    folder = tmp_path_factory.mktemp("runs") / "token_mean"
    folder.mkdir()
    script = "examples/compare_modes.py"
    flags = [*quickstart_flags("compare_modes.sh"), "--train-iters", str(STEPS)]
    flags += ["--lr-warmup-iters", "0", "--eval-interval", str(STEPS), "--eval-iters", "3"]
    flags += ["--loss-aggregation", "token_mean"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMPARE_MODES_OUTPUT", str(folder / "losses.jsonl"))
        said = torchrun(1, "-m", "megatron_loss_agg", "--cpu", script, *flags)
    assert said.returncode == 0, said.stdout[-4000:]
    (folder / "log.txt").write_text(said.stdout)
    return folder


def test_losses_by_length_add_up_to_the_loss_of_the_evaluation(run: Path, examples: Any) -> None:
    from stdlib_pairs import PackedPairs

    first, *_ = map(json.loads, (run / "losses.jsonl").read_text().splitlines())
    assert first.pop("step") == STEPS
    data = PackedPairs("valid", packs=24, seq_length=1024, pad_to=2)
    lengths = [len(pair.response) + 1 for i in range(24) for pair in data.pairs(i)]
    tokens = {
        "short": sum(n for n in lengths if n < 64),
        "medium": sum(n for n in lengths if 64 <= n < 256),
        "long": sum(n for n in lengths if n >= 256),
    }
    assert all(tokens.values())
    mean = sum(first[name] * tokens[name] for name in tokens) / sum(tokens.values())
    logged = re.findall(r"validation loss at .*lm loss value: (\S+)", (run / "log.txt").read_text())
    assert mean == pytest.approx(float(logged[0]), rel=2e-6)


def test_runs_are_plotted_and_summarised(run: Path, examples: Any, capsys: Any) -> None:
    import compare_modes_plot

    shutil.copytree(run, run.parent / "stock", dirs_exist_ok=True)
    compare_modes_plot.main(run.parent, ["stock", "token_mean"])
    assert (run.parent / "loss_by_length.png").read_bytes().startswith(b"\x89PNG")
    said = capsys.readouterr().out
    norms = re.findall(r"grad norm: (\S+)", (run / "log.txt").read_text())
    assert len(norms) == STEPS
    assert f"| {float(norms[0]):.3g} |" in said and "| `stock` |" in said


def test_the_picture_of_stock_weights_has_the_microbatches_means(
    examples: Any, tmp_path: Path
) -> None:
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
