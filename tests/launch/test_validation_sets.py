"""Numbers of several validation sets, through the ``evaluate`` of Megatron's real ``pretrain``.

Iterations of an evaluation have different numbers of tokens, and must weigh as much.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.launch import processes

pytestmark = pytest.mark.host

SIZES = (6, 10)  # rows of each set; one row of the first has no active token
SCRIPT = Path(__file__).with_name("sets_script.py")
LENGTH = 32
SHARED = f"""
    --num-layers 1 --hidden-size 16 --ffn-hidden-size 32 --num-attention-heads 2
    --position-embedding-type rope --attention-dropout 0 --hidden-dropout 0
    --seq-length {LENGTH} --max-position-embeddings {LENGTH}
    --micro-batch-size 1 --logging-level 40 --num-workers 0 --init-method-std 0.5
"""
FLAGS = f"""
    {SHARED} --global-batch-size 2 --train-iters 1 --lr 0.1
    --skip-train --multiple-validation-sets --full-validation
""".split()


def evaluated(
    folder: Path, mode: str, *flags: str, ranks: int
) -> list[tuple[float, float, float, float]]:
    """For each set: token and sample mean of the losses; what is logged as each, and as mode."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SEEN", str(folder / "seen"))
        codes, said = processes.run(
            folder, SCRIPT, *FLAGS, *flags, "--loss-aggregation", mode, ranks=ranks
        )
    assert codes == [0] * ranks, said[-3000:]
    # By place, since a set is gone through as often as there are microbatches.
    parts = {
        (number, row, rank): (mask.double(), losses.double())
        for rank in range(ranks)
        for _, number, row, mask, losses in torch.load(folder / f"seen.{rank}")
    }
    facts = []
    for number, size in enumerate(SIZES):
        rows = []
        for row in range(size):
            of_row = [x for (n, r, _), x in parts.items() if (n, r) == (number, row)]
            mask, losses = (torch.cat(tensors) for tensors in zip(*of_row, strict=True))
            assert len(mask) == LENGTH
            rows.append((float((mask * losses).sum()), float(mask.sum())))
        assert rows.count((0.0, 0.0)) == (number == 0)
        sums, counts = zip(*rows, strict=True)
        means = [s / n for s, n in rows if n]
        (line,) = re.findall(f"validation-{number} loss at .*", said)
        logged = [float(re.findall(f"{key} loss value: (\\S+)", line)[0]) for key in ("lm", mode)]
        facts.append((sum(sums) / sum(counts), sum(means) / len(means), logged[0], logged[1]))
    return facts


CP2 = ("--context-parallel-size", "2")
RUNS = {
    "data-parallel": ("sample_mean", ("--loss-aggregation-empty", "skip")),
    "context-parallel": ("token_mean", CP2),
    "quotients": ("token_mean", ("--sft",)),
}


@pytest.mark.parametrize("run", RUNS)
def test_each_set_is_reduced_over_all_of_its_tokens_or_samples(tmp_path: Path, run: str) -> None:
    (mode, flags), ranks = RUNS[run], 1 if run == "quotients" else 2
    for tokens, samples, lm_loss, mode_loss in evaluated(tmp_path, mode, *flags, ranks=ranks):
        assert abs(tokens - samples) > 1e-3 * tokens  # the masks tell the means apart
        assert lm_loss == pytest.approx(tokens, rel=2e-6)
        expected = tokens if mode == "token_mean" else samples
        assert mode_loss == pytest.approx(expected, rel=2e-6)
