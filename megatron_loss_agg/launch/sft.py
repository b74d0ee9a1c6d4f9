"""Prompt ids, weights and turns of Megatron's ``--sft`` data, from fields of its JSON lines.

A line is one pack of one or more conversations. Each conversation begins with a system message. A
field of the line holds one value for all conversations, or a list with one value for each. Each
token of a pack gets its conversation's value, since Megatron's loader keeps columns by token; the
reader takes the value at each conversation's first token. Turns change the loss mask instead.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

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
TURN_FIELD_FLAG = "--loss-aggregation-sft-turn-field"
_MASK_MARK = "is_masked_by_turns"
"""Marks a batch with a loss mask by turns. By token, since hybrid context parallelism cuts it."""


def _weights(name: str, values: Sequence[Any]) -> Tensor:
    """fp64 [conversations], from JSON numbers."""
    for x in values:
        is_number = isinstance(x, int | float) and not isinstance(x, bool)
        if not is_number or not 0 <= x < math.inf:
            raise DataError(
                f"{name} must hold weights of conversations, finite numbers >= 0, got {x!r}. "
                "Correct it, or name another field; put signs into the losses."
            )
    return torch.tensor(values, dtype=torch.float64)


class Column(NamedTuple):
    """A column in packs, with the conversation's value for each token."""

    flag: str  # names the field of the lines
    key: str  # in the batch
    name: str  # of the field in `Microbatch`
    to_tensor: Callable[[str, Sequence[Any]], Tensor]
    """Maps a name for errors, and values, to a tensor [conversations]."""


COLUMNS = (
    # The key must not end in "_ids": `with_ids` would take its values for sample ids.
    Column(PROMPT_FLAG, "token_prompt_id", "prompt_ids", ids_from),
    Column(WEIGHT_FLAG, "token_weight", "sample_weights", _weights),
)


@dataclass(frozen=True)
class SFTOptions:
    """The flags about ``--sft`` data; see `docs/flags.md`."""

    prompt_field: str | None = None
    weight_field: str | None = None
    turns: Turns = ALL_TURNS

    @classmethod
    def of(cls, args: Any) -> SFTOptions:
        """The options in Megatron's parsed flags ``args``."""

        def value(name: str) -> Any:
            return getattr(args, f"loss_aggregation_sft_{name}", None)

        turns = Turns(value("turns") or "all", value("turn_field"))
        return cls(value("prompt_field"), value("weight_field"), turns)

    @functools.cached_property
    def flags(self) -> dict[str, str]:
        """The flags that have an effect, with their values."""
        values = {
            PROMPT_FLAG: self.prompt_field,
            WEIGHT_FLAG: self.weight_field,
            TURNS_FLAG: None if self.turns.which == "all" else self.turns.which,
            TURN_FIELD_FLAG: self.turns.field,
        }
        return {flag: value for flag, value in values.items() if value}

    @property
    def flag(self) -> str:
        """The first of `flags`, to name in an error."""
        return next(iter(self.flags))

    @property
    def in_words(self) -> str:
        """The `flags` without their common prefix, such as "turns last, turn-field train"."""
        return ", ".join(f"{flag.rpartition('sft-')[2]} {x}" for flag, x in self.flags.items())

    @property
    def columns(self) -> list[Column]:
        """The columns that the flags add to packs."""
        return [column for column in COLUMNS if column.flag in self.flags]

    def check(self, args: Any, batch_function: str | None, aggregation: LossAggregation) -> None:
        """Raise OptionError if the flags would have no effect with Megatron's parsed flags."""
        self.check_sft(args)
        if batch_function is not None:
            raise OptionError(
                f"{self.flag} and --loss-aggregation-batch both read the batches, got both. Remove "
                "one of them."
            )
        if self.weight_field and aggregation.sample_weights is None:
            raise OptionError(
                f"{WEIGHT_FLAG} needs --loss-aggregation-sample-weights 'count', for a weighted mean, "
                "or 'skip', to leave the denominators as they are, got none. Choose one "
                "(--loss-aggregation-sample-weights)."
            )

    def check_sft(self, args: Any) -> None:
        """Raise OptionError if any flag is set and Megatron's parsed flags lack ``--sft``."""
        # The attribute is missing before Megatron has parsed its flags.
        if self.flags and not getattr(args, "sft", True):
            raise OptionError(
                f"{self.flag} needs Megatron's --sft, got none. Add --sft, or give the batches what "
                "they lack (prompt_ids, sample_weights, a loss_mask by turns) and remove the flag."
            )

    def reader(self) -> ReadBatch:
        """`read_batch` for packs of `read_item`."""
        return functools.partial(_read_pack, self)

    def read_item(self, item: Mapping[str, Any], dataset: Any, index: int) -> dict[str, Any]:
        """``item``, number ``index`` of Megatron's ``SFTDataset``, plus columns and mask by turns.

        Raises:
            HostError: this Megatron does not make packs.
            DataError: the line lacks a field, or its value does not fit the conversations.
            OptionError: the prompt format does not allow masks by turns.
        """
        if "cu_seqlens" not in item:
            raise HostError(
                f"{self.flag} needs packs, which Megatron-LM 0.16 and later make from lines of "
                "--sft, got a row. Update Megatron-LM, or remove the flag."
            )
        number = int(dataset.indices[index % len(dataset.indices)])
        where = f"line {number + 1} of {dataset.dataset_path}"
        line = dataset.dataset.dataset[number]
        conversations = _conversations(line["messages"])
        starts = _starts(item["cu_seqlens"], self.flag, where)
        lengths = torch.tensor(starts).diff()
        result = dict(item)
        for column in self.columns:
            field = self.flags[column.flag]
            values = _values(line, field, column.flag, len(conversations), where)
            values_C = column.to_tensor(f"{field!r} in {where} ({column.flag})", values)
            # Megatron cuts packs at the sequence length, so the last conversations may be missing.
            result[column.key] = values_C[: len(lengths)].repeat_interleave(lengths)
        if self.turns != ALL_TURNS:
            result["loss_mask"] = self._mask(item, dataset, conversations, starts, where)
            result[_MASK_MARK] = torch.ones_like(item["loss_mask"])
        return result

    def _mask(
        self,
        item: Mapping[str, Any],
        dataset: Any,
        conversations: Sequence[Sequence[Any]],
        starts: Sequence[int],
        where: str,
    ) -> Tensor:
        """The loss mask [tokens] of a pack, by turns.

        Raises:
            DataError: as in `Turns.have_loss`.
            OptionError: the prompt format does not allow masks by turns.
        """
        mask_T = item["loss_mask"].roll(1)  # for each token itself, not for the position before it
        for (start, end), messages in zip(pairwise(starts), conversations, strict=False):
            rendered = [_tokens(dataset.config.tokenizer, message) for message in messages]
            lengths = torch.tensor([len(tokens) for tokens in rendered])
            rendered_T = torch.cat(rendered)[: end - start]  # the pack may cut it
            turn_T = torch.arange(len(messages)).repeat_interleave(lengths)[: end - start]
            is_assistant_T = torch.tensor([is_answer(message) for message in messages])[turn_T]
            span = slice(start, start + len(rendered_T))
            has_same_tokens = torch.equal(rendered_T, item["tokens"][span])
            if not has_same_tokens or bool(mask_T[span][~is_assistant_T].any()):
                raise OptionError(
                    f"{self.flag} needs a prompt format that renders a message the same in every "
                    "conversation and trains on assistant messages alone, got one that does not in "
                    f"{where}. Choose --sft-tokenizer-prompt-format nemotron-nano-v2 or "
                    "nemotron-h-aligned, or remove the flag."
                )
            # Megatron-LM 0.16 ends a conversation with an extra token. It counts as part of the
            # last message. So does padding, whose mask is 0.
            turn_T = pad(turn_T, (0, end - start - len(turn_T)), value=len(messages) - 1)
            has_loss = self.turns.have_loss(messages, where)
            mask_T[start:end] = self.turns.mask(mask_T[start:end], turn_T, has_loss)
        return mask_T.roll(-1)


def _conversations(messages: Sequence[Any]) -> list[list[Any]]:
    """The conversations of a line. A system message begins a new one."""
    conversations: list[list[Any]] = []
    for message in messages:
        if message["role"] == "system" or not conversations:
            conversations.append([])
        conversations[-1].append(message)
    return conversations


def _starts(cu_seqlens: Tensor, flag: str, where: str) -> list[int]:
    """Offsets of the conversations that the pack holds."""
    offsets: list[int] = cu_seqlens.tolist()
    # The end is repeated, so that the offsets of all packs have the same length.
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
        DataError: there is no value, or a list of the wrong length.
    """
    value = line.get(field)
    if value is None:
        raise DataError(
            f"every line must have the field {field!r} of {flag}, got none in {where}. Add one "
            f"value, or a list with one for each conversation, or change {flag}."
        )
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    values = list(value) if is_list else [value] * conversations
    if len(values) != conversations:
        raise DataError(
            f"the field {field!r} must hold one value, or a list with one for each of the "
            f"{conversations} conversations, got {len(values)} in {where}. Correct it, or change "
            f"{flag}."
        )
    return values


def _tokens(tokenizer: Any, message: Mapping[str, Any]) -> Tensor:
    """The tokens of one turn."""
    tokens = tokenizer.tokenize_conversation(
        [message], return_target=False, add_generation_prompt=False
    )
    return torch.tensor(tokens.tolist(), dtype=torch.int64)


def _read_pack(options: SFTOptions, batch: Any) -> Microbatch:
    """`read_batch` for packs of `SFTOptions.read_item`.

    Raises:
        DataError: the batch lacks keys that the flags add, or as in `read_batch`.
    """
    columns = options.columns
    marks = [] if options.turns == ALL_TURNS else [_MASK_MARK]
    values = batch if isinstance(batch, Mapping) else {}
    for key in [*(column.key for column in columns), *marks]:
        if not isinstance(values.get(key), Tensor):
            raise DataError(
                f"{options.flag} needs batches from Megatron's SFTDataset over lines of JSON, "
                f"including {key!r}, got {batch_keys(batch)}. Use that data set "
                "(megatron.training.datasets.sft_dataset) and Megatron's loader, without "
                "--sequence-packing-scheduler, or drop the flag."
            )
    microbatch = read_batch(batch)
    starts = microbatch.sample_starts
    if starts is None:
        starts = torch.arange(microbatch.num_samples + 1) * microbatch.loss_mask.shape[-1]
    firsts = starts[:-1].long()
    return replace(microbatch, **{x.name: batch[x.key].reshape(-1)[firsts] for x in columns})
