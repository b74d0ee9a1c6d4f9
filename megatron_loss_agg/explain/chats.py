"""Loss masks of chats, by the chat template of a Hugging Face transformers tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from megatron_loss_agg.errors import DataError, OptionError
from megatron_loss_agg.explain.samples import Line, lines_of_file, shortened
from megatron_loss_agg.turns import ALL_TURNS, Turns, is_answer

OTHER_FORMAT = (
    "Masks follow the tokenizer's own chat template. Megatron's --sft writes chats in\n"
    "its own format, whose turns may have other tokens: for the masks of such a run\n"
    "see explain --data -- pretrain_gpt.py --sft --data-path FILE ..."
)


def lines_of_chats(
    path: str,
    tokenizer_name: str,
    seq_length: int | None = None,
    turns: Turns = ALL_TURNS,
    weight_field: str | None = None,
) -> Iterator[Line]:
    """The lines of a file of chats, each with a "loss_mask" instead of its "messages".

    Args:
        seq_length: cut or pad the masks to this length; None leaves them as they are.
        turns: the turns of the assistant that carry loss.
        weight_field: the field that holds a line's "weight".

    Raises:
        OptionError: the file, a line or the tokenizer cannot be read.
        DataError: the template writes a turn differently if others follow, or a turn does not say
            whether it counts.
    """
    tokenizer = _load(tokenizer_name)
    for where, line in lines_of_file("--chats", path):
        if not isinstance(line, dict) or not isinstance(line.get("messages"), list):
            raise OptionError(
                f"each chat must be an object with a list 'messages', got {shortened(line)} in "
                f"{where}. Correct the line."
            )
        turn_T = _turns(where, tokenizer, line["messages"])
        if seq_length is not None:
            turn_T = [*turn_T[:seq_length], *[0] * (seq_length - len(turn_T))]
        has_loss = [False, *turns.have_loss(line["messages"], where)]
        turn = torch.tensor(turn_T, dtype=torch.int64)
        mask = turns.mask((turn > 0).double(), turn, has_loss)
        others = {key: value for key, value in line.items() if key not in ("messages", "length")}
        if weight_field is not None:
            others["weight"] = line.get(weight_field)
        yield where, {**others, "loss_mask": mask.tolist()}


def _load(name: str) -> Any:
    """The tokenizer of this name.

    Raises:
        OptionError: transformers is missing, or the tokenizer cannot be loaded.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise OptionError(
            f"--chats needs transformers, got {type(error).__name__}: {error}. Install it with pip "
            "install transformers, or let Megatron read the chats with explain --data -- --sft "
            "--data-path FILE."
        ) from error
    try:
        return AutoTokenizer.from_pretrained(name)
    except Exception as error:  # whatever transformers raises
        raise OptionError(
            f"--tokenizer must name a tokenizer that transformers can load, got {name} "
            f"({type(error).__name__}: {error}). Change it to a folder with tokenizer.json."
        ) from error


def _turns(where: str, tokenizer: Any, messages: Sequence[Any]) -> list[int]:
    """For each token but the last: the answer turn (from 1) that the next token belongs to, or 0.

    Raises:
        OptionError: the template cannot write the messages.
        DataError: it writes a turn differently if others follow, or the assistant has the first turn.
    """

    def token_ids(turns: Sequence[Any], **options: Any) -> list[int]:
        encoded = tokenizer.apply_chat_template(turns, tokenize=True, return_dict=True, **options)
        return list(encoded["input_ids"])

    try:
        whole = token_ids(messages)
        answers = [k for k, message in enumerate(messages) if is_answer(message)]
        tokens_before = {
            k: token_ids(messages[:k], add_generation_prompt=True) for k in answers if k > 0
        }
        tokens_to_end = {k: token_ids(messages[: k + 1]) for k in answers}
    except Exception as error:  # whatever the template raises
        raise OptionError(
            "--tokenizer must have a chat template for these messages, got "
            f"{type(error).__name__}: {error} in {where}. Correct the line, or change --tokenizer."
        ) from error
    if 0 in answers:
        # Templates cannot write such an answer's prompt; it may contain their own system message.
        raise DataError(
            "a chat must have a message before the assistant's first one, to show where the loss "
            f"begins, got none in {where}. Put a system message first, or write the masks yourself "
            "and give them by --jsonl or --data FILE."
        )
    turn_T = [0] * len(whole)
    for k in answers:
        before, after = tokens_before[k], tokens_to_end[k]
        # A template that drops the thoughts of earlier turns has no single mask for the whole chat.
        if whole[: len(before)] != before or whole[: len(after)] != after:
            raise DataError(
                "the chat template must render a turn the same whatever follows it, got other "
                f"tokens for turn {k + 1} in {where}. Write the masks yourself and give them by "
                "--jsonl or --data FILE."
            )
        turn_T[len(before) : len(after)] = [k + 1] * (len(after) - len(before))
    return turn_T[1:]
