"""A script on Megatron's ``pretrain`` with data sets of rows; started by the launcher.

Two validation sets, or with ``--blend`` a training and a validation blend of all data sets. Every
rank writes the losses that its loss function gets, so that a test can reduce them by itself: a list
of (whether it trains, set, row, mask, losses), of this context-parallel rank's tokens.
"""

from __future__ import annotations

import argparse
import os
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.datasets import utils as datasets_utils
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.utils import Split
from megatron.core.enums import ModelType
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from torch import Tensor

from megatron_loss_agg import CPLayout

VOCAB = 32
SIZES = (6, 10)  # rows of each validation set
BLEND = [0.45, 0.45, 0.1]
EMPTY = (0, 1)  # a set, and a row of it without active tokens
seen: list[tuple[bool, int, int, Tensor, Tensor]] = []


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Rows of random tokens, of which the first few are active."""

    def __init__(self, number: int, size: int, split: Split = Split.valid) -> None:
        self.number = number
        self.size = size
        self.split = self.index_split = split  # read by Megatron
        self.unique_identifiers = {"number": number}

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        length = get_args().seq_length
        generator = torch.Generator().manual_seed(100 * self.number + int(row))
        text = torch.randint(0, VOCAB, (length + 1,), generator=generator)
        active = int(torch.randint(1, length, (), generator=generator)) if row % 3 else 2
        if (self.number, row) == EMPTY:
            active = 0
        mask = (torch.arange(length) < active).float()
        places = {"set": torch.tensor(self.number), "row": torch.tensor(row)}
        rows = {"tokens": text[:-1], "labels": text[1:], "loss_mask": mask}
        return {**rows, "factors": torch.arange(length) / 4, **places}


def loss_func(loss_mask: Tensor, output: Tensor, place: tuple[bool, int, int]) -> Any:
    losses, mask = output.view(-1).float(), loss_mask.view(-1)
    seen.append((*place, mask, losses.detach()))
    total, number = (losses * mask).sum(), mask.sum().to(torch.int)
    return total, number, {"lm loss": torch.stack([total.detach(), number])}


def forward_step(data_iterator: Any, model: Any) -> tuple[Tensor, Any]:
    batch = next(data_iterator)
    cp = mpu.get_context_parallel_world_size(), mpu.get_context_parallel_rank()
    layout = CPLayout.bshd(batch["tokens"].shape[1], *cp)
    tokens, labels, mask = (layout.shard(batch[k]) for k in ("tokens", "labels", "loss_mask"))
    losses = model(tokens, layout.index.view(1, -1), None, labels=labels)
    place = model.training, int(batch["set"]), int(batch["row"])
    return losses, partial(loss_func, mask, place=place)


def datasets_provider(num_samples: list[int]) -> Any:
    if not get_args().blend:
        return None, [Rows(*numbered) for numbered in enumerate(SIZES)], None
    config: Any = SimpleNamespace(defer_npy_index_mmap=False, path_to_cache=None)
    blends = []
    for split, size in zip((Split.train, Split.valid), num_samples, strict=False):
        sets: Any = [Rows(number, size, split) for number in range(len(BLEND))]
        blends.append(BlendedDataset(sets, BLEND, size, config))
    return *blends, None


datasets_provider.is_distributed = True  # type: ignore[attr-defined]


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("--blend", action="store_true")
    return parser


if __name__ == "__main__":
    datasets_utils.compile_helpers = lambda: None  # wheels have them compiled
    defaults = {"tokenizer_type": "NullTokenizer", "vocab_size": VOCAB}
    args = parse_and_validate_args(extra_args_provider=add_arguments, args_defaults=defaults)
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, datasets_provider, ModelType.encoder_or_decoder, forward_step)
    torch.save(seen, f"{os.environ['SEEN']}.{os.environ['RANK']}")
