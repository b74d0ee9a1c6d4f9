"""Prompt ids, weights and turns of Megatron's ``--sft`` data, from fields of its lines of JSON.

A line is one pack of one or several conversations; each begins with a system message. A field of the
line holds one value for all of them, or a list with one for each. Every token gets that of its
conversation, so that values go wherever Megatron puts the tokens; they are read from the first token
of each conversation. Turns change the loss mask.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_loss_agg.aggregation import LossAggregation
from megatron_loss_agg.errors import DataError, HostError, OptionError
from megatron_loss_agg.ids import ids_from
from megatron_loss_agg.mcore import read_batch
from megatron_loss_agg.mcore.batches import ReadBatch, batch_keys
from megatron_loss_agg.microbatch import Microbatch
from megatron_loss_agg.turns import ALL_TURNS, Turns, is_answer

PROMPT_FLAG = "--loss-aggregation-sft-prompt-field"
WEIGHT_FLAG = "--loss-aggregation-sft-weight-field"
TURNS_FLAG = "--loss-aggregation-sft-turns"
TURN_FLAG = "--loss-aggregation-sft-turn-field"
_PROMPTS = "token_prompt_id"
"""Not named "*_ids", so that `with_ids` does not mistake it for ids of samples."""
_WEIGHTS = "token_weight"
_TURNS = "has_turns"
"""Says that the loss mask is by turns."""


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


@dataclass(frozen=True)
class SFTFields:
    """The flags about ``--sft`` data; see `docs/flags.md`."""

    prompt: str | None = None
    weight: str | None = None
    turns: Turns = ALL_TURNS

    @classmethod
    def of(cls, args: Any) -> SFTFields:
        """Those in Megatron's parsed flags ``args``."""

        def value(name: str) -> Any:
            return getattr(args, f"loss_aggregation_sft_{name}", None)

        turns = Turns(value("turns") or "all", value("turn_field"))
        return cls(value("prompt_field"), value("weight_field"), turns)

    @functools.cached_property
    def flags(self) -> dict[str, str]:
        """The flags that change something, with their values."""
        which = None if self.turns.which == "all" else self.turns.which
        values = {
            PROMPT_FLAG: self.prompt,
            WEIGHT_FLAG: self.weight,
            TURNS_FLAG: which,
            TURN_FLAG: self.turns.field,
        }
        return {flag: value for flag, value in values.items() if value}

    @property
    def flag(self) -> str:
        """The first of them, to name in an error."""
        return next(iter(self.flags))

    @property
    def in_words(self) -> str:
        """Them without their common beginning, such as "turns last, turn-field train"."""
        return ", ".join(f"{flag.rpartition('sft-')[2]} {x}" for flag, x in self.flags.items())

    def check(self, args: Any, batch_function: str | None, aggregation: LossAggregation) -> None:
        """Raise OptionError where the flags would have no effect on Megatron's parsed flags."""
        if not getattr(args, "sft", True):  # missing before Megatron has parsed its flags
            raise OptionError(
                f"{self.flag} needs Megatron's --sft, got none. Add --sft, or give the batches what "
                "they lack (prompt_ids, sample_weights, a loss_mask by turns) and remove the flag."
            )
        if batch_function is not None:
            raise OptionError(
                f"{self.flag} and --loss-aggregation-batch both read the batches, got both. Remove "
                "one of them."
            )
        if self.weight and aggregation.sample_weights is None:
            raise OptionError(
                f"{WEIGHT_FLAG} needs --loss-aggregation-sample-weights 'count', for a weighted mean, "
                "or 'skip', to leave the denominators as they are, got none. Choose one "
                "(--loss-aggregation-sample-weights)."
            )

    def reader(self) -> ReadBatch:
        """`read_batch` with what `read_item` has added."""
        return functools.partial(_read_conversations, self)

    def read_item(self, item: Mapping[str, Any], dataset: Any, index: int) -> dict[str, Any]:
        """``item``, number ``index`` of Megatron's ``SFTDataset``, with what its line says.

        Raises:
            HostError: this Megatron makes no packs.
            DataError: the line lacks a field, or its value does not fit the conversations.
            OptionError: the prompt format does not tell turns apart.
        """
        if "cu_seqlens" not in item:
            raise HostError(
                f"{self.flag} needs packs, which Megatron-LM 0.16 and later make of lines of --sft, got "
                "a row. Update it, or remove the flag."
            )
        number = int(dataset.indices[index % len(dataset.indices)])
        where = f"line {number + 1} of {dataset.dataset_path}"
        line = dataset.dataset.dataset[number]
        conversations = _conversations(line["messages"])
        starts = _starts(item["cu_seqlens"], self.flag, where)

        def by_token(values_C: Tensor) -> Tensor:
            # Megatron cuts a pack at the sequence length: it may lack the last conversations.
            return values_C[: len(starts) - 1].repeat_interleave(torch.tensor(starts).diff())

        result = dict(item)
        if self.prompt:
            values = _values(line, self.prompt, PROMPT_FLAG, len(conversations), where)
            result[_PROMPTS] = by_token(
                ids_from(f"{self.prompt!r} in {where} ({PROMPT_FLAG})", values)
            )
        if self.weight:
            values = _values(line, self.weight, WEIGHT_FLAG, len(conversations), where)
            result[_WEIGHTS] = by_token(_weights(values, self.weight, where))
        if self.turns != ALL_TURNS:
            result["loss_mask"] = self._mask(item, dataset, conversations, starts, where)
            result[_TURNS] = torch.tensor(True)
        return result

    def _mask(
        self,
        item: Mapping[str, Any],
        dataset: Any,
        conversations: Sequence[Sequence[Any]],
        starts: Sequence[int],
        where: str,
    ) -> Tensor:
        """The loss mask of a pack, by turns."""
        # Turn 0 is padding.
        counts, of_assistant = [False], [False]
        turn_T = torch.zeros(starts[-1] + 1, dtype=torch.int64)
        text_T = torch.cat([item["tokens"], item["tokens"].new_zeros(1)])
        for start, messages in zip(starts, conversations, strict=False):
            texts = [_tokens(dataset.config.tokenizer, message) for message in messages]
            lengths = torch.tensor([len(text) for text in texts])
            turns = torch.arange(len(messages)).repeat_interleave(lengths) + len(counts)
            end = min(start + len(turns), len(turn_T))  # of a pack that is cut
            turn_T[start:end] = turns[: end - start]
            text_T[start:end] = torch.cat(texts)[: end - start]
            counts += self.turns.counts(messages, where)
            of_assistant += map(is_answer, messages)
        mask_T, turn_T = item["loss_mask"], turn_T[1:]  # of the token that a position predicts
        is_others_T = ~torch.tensor(of_assistant)[turn_T]
        if not torch.equal(text_T[:-1], item["tokens"]) or bool(mask_T[is_others_T].any()):
            raise OptionError(
                f"{self.flag} needs a prompt format that writes a turn alike whatever "
                f"stands before it, and trains on the assistant's turns alone, got another in {where}. "
                "Choose --sft-tokenizer-prompt-format nemotron-nano-v2 or nemotron-h-aligned, or "
                "remove the flag."
            )
        return self.turns.mask(mask_T, turn_T, counts)


def _conversations(messages: Sequence[Any]) -> list[list[Any]]:
    """The conversations of a line; a system message begins a new one."""
    conversations: list[list[Any]] = []
    for message in messages:
        if message["role"] == "system" or not conversations:
            conversations.append([])
        conversations[-1].append(message)
    return conversations


def _starts(cu_seqlens: Tensor, flag: str, where: str) -> list[int]:
    """Offsets of the conversations that the pack holds."""
    offsets: list[int] = cu_seqlens.tolist()
    # The end is repeated, so that the offsets of all packs have one length.
    starts = offsets[: offsets.index(offsets[-1]) + 1]
    if any(a == b for a, b in pairwise(starts)):
        raise DataError(
            f"every conversation must have tokens, got one without in {where}. Remove it, or drop "
            f"{flag}."
        )
    return starts


def _values(
    line: Mapping[str, Any], field: str, flag: str, conversations: int, where: str
) -> list[Any]:
    """The field's value for each conversation of a line.

    Raises:
        DataError: there is none, or a list of another length.
    """
    value = line.get(field)
    if value is None:
        raise DataError(
            f"every line must have the field {field!r} of {flag}, got none in {where}. Add one value, "
            f"or a list of one for each conversation, or change {flag}."
        )
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    values = list(value) if is_list else [value] * conversations
    if len(values) != conversations:
        raise DataError(
            f"the field {field!r} must hold one value, or a list of one for each of the "
            f"{conversations} conversations, got {len(values)} in {where}. Correct it, or change "
            f"{flag}."
        )
    return values


def _weights(values: Sequence[Any], field: str, where: str) -> Tensor:
    """fp64, from numbers of JSON."""
    for x in values:
        is_number = isinstance(x, int | float) and not isinstance(x, bool)
        if not is_number or not 0 <= x < math.inf:
            raise DataError(
                f"the field {field!r} must hold weights of conversations, finite numbers >= 0, got "
                f"{x!r} in {where}. Correct it, or change {WEIGHT_FLAG}; a sign belongs in the losses."
            )
    return torch.tensor(values, dtype=torch.float64)


def _tokens(tokenizer: Any, message: Mapping[str, Any]) -> Tensor:
    """The tokens of one turn."""
    tokens = tokenizer.tokenize_conversation(
        [message], return_target=False, add_generation_prompt=False
    )
    return torch.tensor(tokens.tolist(), dtype=torch.int64)


def _read_conversations(fields: SFTFields, batch: Any) -> Microbatch:
    """`read_batch` with what `SFTFields.read_item` has added.

    Raises:
        DataError: the batch lacks it, or as in `read_batch`.
    """
    used = {
        _PROMPTS: fields.prompt is not None,
        _WEIGHTS: fields.weight is not None,
        _TURNS: fields.turns != ALL_TURNS,
    }
    keys = batch if isinstance(batch, Mapping) else {}
    for key in (key for key, is_used in used.items() if is_used):
        if not isinstance(keys.get(key), Tensor):
            raise DataError(
                f"{fields.flag} needs batches of Megatron's SFTDataset over lines of JSON that keep "
                f"their {key!r}, got {batch_keys(batch)}. Use that data set "
                "(megatron.training.datasets.sft_dataset) and Megatron's loader, without "
                "--sequence-packing-scheduler, or drop the flag."
            )
    microbatch = read_batch(batch)
    starts = microbatch.sample_starts
    if starts is None:
        starts = torch.arange(microbatch.num_samples + 1) * microbatch.loss_mask.shape[-1]
    by_sample = {
        name: batch[key].reshape(-1)[starts[:-1].long()]
        for name, key in (("prompt_ids", _PROMPTS), ("sample_weights", _WEIGHTS))
        if used[key]
    }
    return replace(microbatch, **by_sample)
