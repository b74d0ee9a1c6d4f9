"""One optimizer step of ragged samples, as rows and as packs."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.host import steps
from tests.host.steps import EMPTY, VOCAB

EOS = VOCAB - 1  # Bridge pads packs with it, and never trains on it
LENGTHS = (23, 3, 9, 1, 17, 6, 12, 2, 20, 5, 4, 8)
ROW = 32  # length of every row
MICRO_BATCH = 2  # rows
PACKS = ((0, 1), (EMPTY,), (2, 3, 10, 11), (4, 6, 7, 8, 9))
PACK = 64  # length of every pack
MULTIPLE = 4  # 2 * cp
sequences = functools.partial(steps.sequences, lengths=LENGTHS, vocab=EOS, seed=3)
"""The samples of the step."""


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Padded rows, as Megatron's pretraining data sets give them; the step again and again."""

    def __len__(self) -> int:
        return 100 * len(LENGTHS)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sequence = sequences()[index % len(LENGTHS)]

        def padded(values: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.pad(values, (0, ROW - len(values)))

        return {
            "tokens": padded(sequence.tokens),
            "labels": padded(sequence.labels),
            "loss_mask": padded(torch.tensor(sequence.sample.mask, dtype=torch.float32)),
            "position_ids": torch.arange(ROW),
        }


def write_packs(path: Path, multiple: int) -> None:
    """A file of packs as Bridge prepares it: text one longer than its tokens, padded with EOS.

    Args:
        multiple: each sample's tokens are padded to it, for context parallelism.
    """
    packs: list[dict[str, Any]] = []
    for chosen in PACKS:
        ids, mask, starts = [], [], []
        for i in chosen:
            sequence = sequences()[i]
            text = [*sequence.tokens.tolist(), int(sequence.labels[-1])]
            fill = -len(sequence.tokens) % multiple
            starts.append(len(ids))
            ids += text + [EOS] * fill
            mask += [*(int(m) for m in sequence.sample.mask), 0] + [0] * fill
        packs.append({"input_ids": ids, "loss_mask": mask, "seq_start_id": starts})
    path.with_suffix(".json").write_text("[]")  # of packs for CUDA graphs
    np.save(path, np.array(packs, dtype=object), allow_pickle=True)
