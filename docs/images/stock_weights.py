"""Draw what a token weighs in one real step: in stock Megatron, and in means over the step.

    PYTHONPATH=examples python docs/images/stock_weights.py OUTPUT.png

The step is the first one of `examples/quickstart.sh`: four microbatches of packed
samples, two on each of two data-parallel ranks. docs/explain.md shows this picture.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from matplotlib.figure import Figure
from stdlib_pairs import PackedPairs

from megatron_loss_agg.explain.samples import Sample
from megatron_loss_agg.explain.shares import shares_by_mode

MICROBATCHES, SEQ_LENGTH, PAD_TO = 4, 1280, 4
MARKS = {
    "microbatch_mean": {"marker": "o", "color": "C1", "label": "stock Megatron"},
    "sample_mean": {"marker": "D", "color": "C0", "label": "sample_mean", "fillstyle": "none"},
    "token_mean": {"marker": "_", "color": "grey", "label": "token_mean", "markersize": 16},
}


def step() -> list[Sample]:
    """The samples of the step, by microbatch."""
    data = PackedPairs("train", packs=MICROBATCHES, seq_length=SEQ_LENGTH, pad_to=PAD_TO)
    return [
        Sample(tokens=len(pair.response) + 1, microbatch=number)
        for number in range(MICROBATCHES)
        for pair in data.pairs(number)
    ]


def draw(output: str, samples: Sequence[Sample]) -> dict[str, list[float]]:
    """Write the picture; return the weights of a token of each sample, by mode."""
    shares, _ = shares_by_mode(samples, MARKS)
    weights = {mode: shares[mode].relative_to_token_mean.tolist() for mode in MARKS}
    # A gap between microbatches.
    positions = [i + sample.microbatch for i, sample in enumerate(samples)]
    figure = Figure(figsize=(8.0, 3.4), dpi=110, layout="constrained")
    axes = figure.subplots()
    for mode, mark in MARKS.items():
        style = {"linestyle": "none", "markersize": 8, **mark}
        axes.plot(positions, weights[mode], **style)
    for number in range(MICROBATCHES):
        microbatch_samples = [
            (p, s) for p, s in zip(positions, samples, strict=True) if s.microbatch == number
        ]
        first, last = microbatch_samples[0][0], microbatch_samples[-1][0]
        axes.axvspan(first - 0.6, last + 0.6, color="grey", alpha=0.12, linewidth=0, zorder=0)
        title = f"microbatch {number + 1}\n{sum(s.tokens for _, s in microbatch_samples):g} tokens"
        axes.text((first + last) / 2, 5.65, title, ha="center", va="bottom", fontsize=9)
    axes.set_xticks(positions, [f"{sample.tokens:g}" for sample in samples])
    axes.set_xlabel("the samples of one optimizer step, by their loss tokens")
    axes.set_ylabel("weight of one token\n(1: its weight in token_mean)")
    axes.set_ylim(0, 5.6)
    axes.grid(axis="y", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", frameon=False)
    figure.savefig(output)
    return weights


if __name__ == "__main__":
    print(draw(sys.argv[1], step()))
