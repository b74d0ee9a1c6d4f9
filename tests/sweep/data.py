"""The sweep's data: uneven masks in every form in which the host's loaders give samples.

Item ``i`` is the same in every process, so the reference finds the samples of a step by the
numbers of its items.
"""

from __future__ import annotations

import dataclasses
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import Dataset

from megatron_loss_agg.counting import Samples
from megatron_loss_agg.mcore import read_batch

SEQ_LENGTH = 32
VOCAB = 128  # token 127 ends a document
VALIDATION = 1000  # first item of the validation data
OF_SET = 100  # from the first item of a data set to that of the next one
BLEND = [0.45, 0.45, 0.1]
PACKED = (8, 16, 8)  # lengths of the samples of an SFT pack: multiples of 2 * CP * TP


def mask_of(kind: str, item: int, length: int) -> Tensor:
    """Loss mask [length]: a masked prompt, a response, padding; some items have no token at all."""
    places = torch.arange(length)
    start, end = (7 * item) % 13, length - (5 * item) % 7
    mask = ((places >= start) & (places < end)).float()
    if kind == "sparse":  # whole microbatches, and whole ranks, without a token
        return mask * (item % 4 == 1)
    if kind == "fractional":
        mask = mask * (((places + item) % 4).float() + 1) / 4
    return mask * (item % 5 != 3)


def ids_of(item: int, place: int) -> tuple[int, int]:
    """Prompt and rollout of a sample: prompts span microbatches and ranks, rollouts samples."""
    return item // 3, (item // 2) * 64 + place // 2


def _numbers(item: int, samples: int) -> dict[str, Tensor]:
    prompts, rollouts = zip(*(ids_of(item, place) for place in range(samples)), strict=True)
    return {
        "index": torch.tensor(item),
        "prompt_ids": torch.tensor(prompts),
        "rollout_ids": torch.tensor(rollouts),
    }


class Rows(Dataset[dict[str, Tensor]]):
    """One sample a row."""

    index_split: Any = None
    unique_identifiers: dict[str, Any] = {}  # noqa: RUF012  (read by the host)

    def __init__(self, args: Any, first: int, length: int) -> None:
        self.args, self.first, self.length = args, first, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.row(self.first + int(index))

    def row(self, item: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(item)
        text = torch.randint(0, VOCAB - 1, (SEQ_LENGTH + 1,), generator=generator)
        row = {
            "tokens": text[:-1].contiguous(),
            "labels": text[1:].contiguous(),
            "loss_mask": mask_of(self.args.sweep_masks, item, SEQ_LENGTH),
            "position_ids": torch.arange(SEQ_LENGTH),
            "factors": torch.arange(SEQ_LENGTH) / 4,
            **_numbers(item, 1),
        }
        if self.args.create_attention_mask_in_dataloader:
            later = torch.ones(SEQ_LENGTH, SEQ_LENGTH, dtype=torch.bool).triu(1)
            row["attention_mask"] = later[None]
        return row


class Packs(Rows):
    """Several samples a row, in the form of the host's SFT data set."""

    def row(self, item: int) -> dict[str, Tensor]:
        row = super().row(item)
        row.pop("attention_mask", None)
        offsets = list(accumulate(PACKED, initial=0))
        offsets += [SEQ_LENGTH] * (SEQ_LENGTH + 1 - len(offsets))
        parts = enumerate(PACKED)
        masks = [mask_of(self.args.sweep_masks, 3 * item + j, length) for j, length in parts]
        return {
            **row,
            "loss_mask": torch.cat(masks),
            "position_ids": torch.cat([torch.arange(length) for length in PACKED]),
            "cu_seqlens": torch.tensor(offsets, dtype=torch.int32),
            "max_seqlen": torch.tensor(max(PACKED), dtype=torch.int32),
            **_numbers(item, len(PACKED)),
        }


class Documents(Rows):
    """The host's GPT data set over short documents, with an uneven mask on top of its own."""

    def __init__(self, args: Any, first: int, length: int) -> None:
        super().__init__(args, first, length)
        self.host = _host_data(args)

    def row(self, item: int) -> dict[str, Tensor]:
        row = self.host[item]
        numbers = {"index": torch.tensor(item)}
        if "cu_seqlens" not in row:  # else their number differs from row to row
            numbers = _numbers(item, 1)
        mask = row["loss_mask"] * mask_of(self.args.sweep_masks, item, SEQ_LENGTH)
        return {**row, "loss_mask": mask, **numbers}


def _host_data(args: Any) -> Any:
    from megatron.core.datasets.gpt_dataset import (
        GPTDatasetConfig,
        MockGPTDataset,
        MockGPTLowLevelDataset,
    )
    from megatron.core.datasets.utils import Split
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    class ShortDocuments(MockGPTLowLevelDataset):
        max_sequence_length = 24
        size = 4000

    tokenizer = build_tokenizer(args)
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=SEQ_LENGTH,
        split="1,0,0",
        tokenizer=tokenizer,
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        inter_document_masking=args.dataloader_inter_document_masking,
        mid_level_dataset_surplus=0.0,
    )
    documents = ShortDocuments(tokenizer)
    indices = numpy.arange(len(documents), dtype=numpy.int32)
    return MockGPTDataset(documents, None, indices, 1200, Split.train, config)


KINDS = {"rows": Rows, "packs": Packs, "documents": Documents}


def datasets(args: Any, sizes: list[int | None]) -> list[Any]:
    """Training, validation and test data, as many items as the host asks for."""
    lengths = [max(size or 0, 48) for size in sizes]
    if args.blend:
        return [_blend(args, length) for length in lengths]
    kind = KINDS[args.sweep_data]
    firsts = (0, VALIDATION, VALIDATION)
    made: list[Any] = [kind(args, *given) for given in zip(firsts, lengths, strict=True)]
    if args.multiple_validation_sets:  # the host then takes none to test
        made[1:] = [[made[1], kind(args, VALIDATION + OF_SET, 48)], None]
    return made


def _blend(args: Any, length: int) -> Any:
    from megatron.core.datasets.blended_dataset import BlendedDataset
    from megatron.core.datasets.utils import Split

    sets: Any = [Rows(args, OF_SET * number, length) for number in range(len(BLEND))]
    for rows in sets:
        rows.index_split = Split.train
    config: Any = SimpleNamespace(defer_npy_index_mmap=False, path_to_cache=None)
    return BlendedDataset(sets, BLEND, length, config)


def read_by_number(batch: dict[str, Tensor]) -> Any:
    """For ``--loss-aggregation-batch``: the microbatch, its ids from the items' numbers."""
    keys = ("loss_mask", "cu_seqlens")
    found = read_batch({key: batch[key] for key in keys if key in batch})
    ids: list[tuple[int, int]] = []
    for row, item in enumerate(batch["index"].tolist()):
        samples = 1
        if "cu_seqlens" in batch:
            samples = int((batch["cu_seqlens"][row] < SEQ_LENGTH).sum())
        ids += [ids_of(item, place) for place in range(samples)]
    prompts, rollouts = (torch.tensor(column) for column in zip(*ids, strict=True))
    return dataclasses.replace(found, prompt_ids=prompts, rollout_ids=rollouts)


def sixty_fourth(samples: Samples) -> Tensor:
    """For ``--loss-aggregation-function``: every token weighs 1, by 1 / 64."""
    return torch.full((len(samples.microbatch),), 1 / 64, dtype=torch.float64)


def samples_of(row: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """The samples of a row, each as a row of its own."""
    if "cu_seqlens" not in row:
        return [row]
    ends = row["cu_seqlens"].tolist()
    ends = ends[: ends.index(SEQ_LENGTH) + 1]
    keys = ("tokens", "labels", "loss_mask", "position_ids")
    return [{key: row[key][start:end] for key in keys} for start, end in pairwise(ends)]
