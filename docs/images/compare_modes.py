"""Train as `examples/pretrain_gpt.py` does, and record the losses by length of answer.

`compare_modes.sh` starts it once for each mode. Every evaluation of Megatron's loop adds a line to
``$COMPARE_MODES_OUTPUT``: the step, and the mean over the tokens of the validation answers of each
of `CLASSES`. That mean is computed here, in the same way for every mode, without the plugin.
"""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pretrain_gpt
import torch
import torch.distributed as dist
from megatron.training import get_args
from stdlib_pairs import CLASSES, PackedPairs, class_of

PACKS = 24


def losses_by_length(model: list[torch.nn.Module]) -> dict[str, float]:
    """By class, the mean loss over the tokens of its answers in the first validation packs."""
    args = get_args()
    data = PackedPairs("valid", packs=PACKS, seq_length=args.seq_length, pad_to=2, seed=args.seed)
    sums = {name: [0.0, 0.0] for name in CLASSES}
    for pack in torch.utils.data.DataLoader(data):
        offsets = pack["cu_seqlens_padded"][0].tolist()
        with torch.no_grad():
            losses, loss_func = pretrain_gpt.forward_step(iter([pack]), model[0])
        (mask,) = loss_func.args
        for start, stop in itertools.pairwise(offsets):
            inside = mask[0, start:stop]
            name = class_of(int(inside.sum()))
            sums[name][0] += float((losses[0, start:stop] * inside).sum())
            sums[name][1] += float(inside.sum())
    return {name: total / tokens for name, (total, tokens) in sums.items()}


def record(model: list[torch.nn.Module]) -> None:
    """Add the losses of this evaluation to the file. Megatron calls it on every rank."""
    if dist.get_rank() == 0:
        line: dict[str, Any] = {"step": get_args().curr_iteration + 1, **losses_by_length(model)}
        with Path(os.environ["COMPARE_MODES_OUTPUT"]).open("a") as lines:
            lines.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    pretrain_gpt.main(non_loss_data_func=record)
