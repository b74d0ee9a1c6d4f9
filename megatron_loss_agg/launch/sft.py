"""Prompt ids of Megatron's ``--sft`` data, from a field of its lines of JSON.

A line is one pack of one or several conversations; each begins with a system message. The field
holds one id for all of them, an int or a string, or a list with an id for each. Every token gets the
id of its conversation, so that ids go wherever Megatron puts the tokens. They are read from the first
token of each conversation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_loss_agg.errors import DataError, HostError, OptionError
from megatron_loss_agg.ids import ids_from
from megatron_loss_agg.mcore import read_batch
from megatron_loss_agg.microbatch import Microbatch

FLAG = "--loss-aggregation-sft-prompt-field"
_KEY = "token_prompt_id"
"""Not named "*_ids", so that `with_ids` does not mistake it for ids of samples."""


def check_flag(args: Any, batch_function: str | None) -> None:
    """Raise OptionError where the flag would have no effect on Megatron's parsed flags ``args``."""
    if not getattr(args, "sft", True):  # missing before Megatron has parsed its flags
        raise OptionError(
            f"{FLAG} needs Megatron's --sft, got none. Add --sft, or give prompt_ids in the batches "
            "and remove the flag."
        )
    if batch_function is not None:
        raise OptionError(
            f"{FLAG} and --loss-aggregation-batch both read the batches, got both. Remove one of them."
        )


def check_data(args: Any, release: tuple[int, int]) -> None:
    """Raise HostError where Megatron would end a run of ``--sft``, at its first batch or much later.

    Args:
        args: Megatron's parsed flags.
        release: of Megatron-Core.
    """
    if release >= (0, 16) and getattr(args, "create_attention_mask_in_dataloader", False):
        raise HostError(
            "--sft needs batches without an attention mask, got no "
            "--no-create-attention-mask-in-dataloader. Add it."
        )
    from megatron.core.datasets.blended_megatron_dataset_config import (
        convert_split_vector_to_split_matrix,
        parse_and_normalize_split,
    )
    from megatron.training.utils import get_blend_and_blend_per_split

    blend, per_split = get_blend_and_blend_per_split(args)
    paths = [] if blend is None or per_split else [Path(path) for path in blend[0]]
    split = args.split or "969, 30, 1"  # Megatron's default
    matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
    evaluates = getattr(args, "eval_iters", None) != 0
    for path in (path for path in paths if path.is_file()):
        with path.open() as file:
            lines = sum(not line.isspace() for line in file)
        for name, ends in zip(("training", "validation", "test"), matrix, strict=True):
            is_read = ends is not None and (evaluates or name == "training")
            if is_read and len({round(end * lines) for end in ends}) == 1:
                raise HostError(
                    f"--split must leave lines for each set with a share, got {split!r}, under which "
                    f"the {lines} lines of {path} leave none for {name}, and Megatron divides by their "
                    "number. Give another, such as --split 90,10,0, which has no test set."
                )


def with_prompt_ids(
    item: Mapping[str, Any], dataset: Any, index: int, field: str
) -> dict[str, Any]:
    """``item``, number ``index`` of Megatron's ``SFTDataset``, with the prompt id of each token.

    Raises:
        HostError: this Megatron makes no packs.
        DataError: the line lacks the field, or its value does not fit the conversations.
    """
    if "cu_seqlens" not in item:
        raise HostError(
            f"{FLAG} needs packs, which Megatron-LM 0.16 and later make of lines of --sft, got a row. "
            "Update it, or give prompt_ids in the batches and remove the flag."
        )
    number = int(dataset.indices[index % len(dataset.indices)])
    where = f"line {number + 1} of {dataset.dataset_path}"
    line = dataset.dataset.dataset[number]
    value = line.get(field)
    if value is None:
        raise DataError(
            f"every line must have the field {field!r} of prompt ids, got none in {where}. Add an id, "
            f"or a list of one for each conversation, or change {FLAG}."
        )
    conversations = 1 + sum(message["role"] == "system" for message in line["messages"][1:])
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    values = list(value) if is_list else [value] * conversations
    ids = ids_from(f"{field!r} in {where} ({FLAG})", values)
    if len(ids) != conversations:
        raise DataError(
            f"the field {field!r} must hold an id, or a list of one for each of the {conversations} "
            f"conversations, got {len(ids)} in {where}. Correct it, or change {FLAG}."
        )
    return {**item, _KEY: _token_ids(ids, item["cu_seqlens"], where)}


def _token_ids(ids: Tensor, cu_seqlens: Tensor, where: str) -> Tensor:
    """int64 [tokens], from the ids of all conversations."""
    offsets = cu_seqlens.tolist()
    end = offsets[-1]  # repeated, so that the offsets of all packs have one length
    lengths = [b - a for a, b in pairwise(offsets[: offsets.index(end) + 1])]
    if 0 in lengths:
        raise DataError(
            f"every conversation must have tokens, got one without in {where}. Remove it, or drop "
            f"{FLAG}."
        )
    # Megatron cuts a pack at the sequence length: it may lack the last conversations.
    return ids[: len(lengths)].repeat_interleave(torch.tensor(lengths))


def read_conversations(batch: Any) -> Microbatch:
    """`read_batch` with the prompt ids of `with_prompt_ids`.

    Raises:
        DataError: the batch has none, or as in `read_batch`.
    """
    if not isinstance(batch, Mapping) or not isinstance(batch.get(_KEY), Tensor):
        raise DataError(
            f"{FLAG} needs batches of Megatron's SFTDataset that keep their {_KEY!r}, got "
            f"{sorted(batch) if isinstance(batch, Mapping) else type(batch).__name__}. Use Megatron's "
            "own --sft data and loader, without --sequence-packing-scheduler, or drop the flag."
        )
    microbatch = read_batch(batch)
    ids_T = batch[_KEY].reshape(-1)
    starts = microbatch.sample_starts
    if starts is None:
        starts = torch.arange(microbatch.num_samples + 1) * batch[_KEY].shape[-1]
    return replace(microbatch, prompt_ids=ids_T[starts[:-1].long()])
