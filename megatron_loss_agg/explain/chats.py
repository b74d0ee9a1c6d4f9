"""Loss masks of chats, by the chat template of a tokenizer of Hugging Face's transformers."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from megatron_loss_agg.errors import DataError, OptionError
from megatron_loss_agg.explain.samples import lines_of, shortened
from megatron_loss_agg.microbatch import Microbatch

_ANSWERS = "assistant"
"""The role whose turns carry loss."""


def add_chats(files: Any, parser: argparse.ArgumentParser) -> None:
    """Add ``--chats`` to ``files``, a parser or a group of its, and ``--tokenizer`` to ``parser``."""
    files.add_argument(
        "--chats",
        metavar="FILE",
        help='chats as lines {"messages": [{"role": ..., "content": ...}, ...]}; the turns of the '
        "assistant carry loss",
    )
    parser.add_argument(
        "--tokenizer",
        metavar="NAME",
        help="of --chats: a folder or name of a tokenizer with a chat template, which "
        "transformers loads",
    )


def lines_of_chats(
    path: str | None, tokenizer_name: str | None, number: int | None = None
) -> Iterator[tuple[str, Any]]:
    """File and line, and object with "loss_mask" for "messages", of each of the first chats.

    Raises:
        OptionError: the file, a line or the tokenizer cannot be read.
        DataError: the template writes a turn otherwise if others follow.
    """
    if path is None or tokenizer_name is None:
        missing = "--chats without --tokenizer" if tokenizer_name is None else "--tokenizer alone"
        raise OptionError(f"--chats and --tokenizer must stand together, got {missing}. Give both.")
    tokenizer = _load(tokenizer_name)
    for where, line in lines_of("--chats", path, number):
        if not isinstance(line, dict) or not isinstance(line.get("messages"), list):
            raise OptionError(
                f"each chat must be an object with a list 'messages', got {shortened(line)} in "
                f"{where}. Correct the line."
            )
        others = {key: value for key, value in line.items() if key not in ("messages", "length")}
        yield where, {**others, "loss_mask": _mask(where, tokenizer, line["messages"])}


def rows_of_chats(
    path: str | None, tokenizer_name: str | None, number: int, seq_length: int
) -> Iterator[Microbatch]:
    """The first chats, each cut or padded to a row of ``seq_length``.

    Raises:
        AggregationError: as `lines_of_chats`.
    """
    for _, line in lines_of_chats(path, tokenizer_name, number):
        mask = torch.zeros(1, seq_length)
        start = torch.tensor(line["loss_mask"][:seq_length])
        mask[0, : len(start)] = start
        yield Microbatch(mask)


def _load(name: str) -> Any:
    """The tokenizer of this name, which has a chat template.

    Raises:
        OptionError: transformers or the template is missing, or the tokenizer cannot be loaded.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise OptionError(
            f"--chats needs transformers, got {type(error).__name__}: {error}. Install it, by pip "
            "install transformers; or let Megatron read the chats, by explain --data -- --sft "
            "--data-path FILE."
        ) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except Exception as error:  # whatever transformers raises
        raise OptionError(
            f"--tokenizer must name a tokenizer that transformers can load, got {name} "
            f"({type(error).__name__}: {error}). Change it to a folder with tokenizer.json."
        ) from error
    if not tokenizer.chat_template:
        raise OptionError(
            f"--tokenizer must have a chat template, got none in {name}. Name the tokenizer of a "
            "model that chats."
        )
    return tokenizer


def _mask(where: str, tokenizer: Any, messages: Sequence[Any]) -> list[int]:
    """1 where the next token is of an answer, of all tokens but the last.

    Raises:
        OptionError: the template cannot write the messages.
        DataError: it writes a turn otherwise if others follow.
    """

    def ids(turns: Sequence[Any], **options: Any) -> list[int]:
        encoded = tokenizer.apply_chat_template(turns, tokenize=True, return_dict=True, **options)
        return list(encoded["input_ids"])

    try:
        whole = ids(messages)
        is_answer = [0] * len(whole)
        for k, message in enumerate(messages):
            if message["role"] != _ANSWERS:
                continue
            before = ids(messages[:k], add_generation_prompt=True) if k else []
            after = ids(messages[: k + 1])
            if whole[: len(before)] != before or whole[: len(after)] != after:
                raise DataError(
                    "the chat template must write a turn alike whatever follows it, got another "
                    f"text for turn {k + 1} in {where}. Write the masks yourself, and give them "
                    "by --jsonl, or by --data FILE."
                )
            is_answer[len(before) : len(after)] = [1] * (len(after) - len(before))
    except DataError:
        raise
    except Exception as error:  # whatever the template raises
        raise OptionError(
            "--tokenizer must have a chat template for these messages, got "
            f"{type(error).__name__}: {error} in {where}. Correct the line, or change --tokenizer."
        ) from error
    return is_answer[1:]
