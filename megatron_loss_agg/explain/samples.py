"""Reads samples: of one step from lists or a JSONL file, or the rows of a run from a file."""

from __future__ import annotations

import itertools
import json
import math
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from megatron_loss_agg.aggregation import BY_ID
from megatron_loss_agg.errors import AggregationError, DataError, OptionError
from megatron_loss_agg.masks import sums_by_sample
from megatron_loss_agg.microbatch import Microbatch

COLUMNS = (*BY_ID, "microbatch", "rank")
LISTS = {**{f"{unit}s": unit for unit in BY_ID}, "microbatches": "microbatch"}
"""Options of the command line, and the columns that they give."""
_WIDEST = 16
_BAR = 30
_SECONDS = 0.3
"""Between two pictures of the bar."""
_Row = TypeVar("_Row")


@dataclass(frozen=True)
class Sample:
    """Loss tokens of one sample, and its groups."""

    tokens: float
    """Sum of the mask."""
    prompt: Any = None
    """Any JSON value; equal values are one group over the whole step. None: unknown."""
    rollout: Any = None
    """Likewise."""
    dataset: Any = None
    """Likewise."""
    microbatch: Any = None
    """Numbered per rank. None: unknown."""
    rank: Any = None
    """Data-parallel rank. None: unknown."""


def from_lists(lengths: str, **lists: str | None) -> list[Sample]:
    """Samples from comma-separated lists, such as ``10,1000,40`` and ``0,0,1``.

    Args:
        lists: by the names in `LISTS`; None for lists that are absent.

    Raises:
        OptionError: a list cannot be parsed, or differs in length from ``lengths``.
    """
    try:
        columns: dict[str, list[Any]] = {"length": [float(item) for item in lengths.split(",")]}
    except ValueError:
        raise OptionError(
            f"--lengths must be numbers with commas between, got {lengths!r}. Correct it."
        ) from None
    for option, text in lists.items():
        if text is not None:
            columns[LISTS[option]] = [item.strip() for item in text.split(",")]
    if len({len(column) for column in columns.values()}) > 1:
        numbers = ", ".join(f"{len(column)} ({name})" for name, column in columns.items())
        raise OptionError(
            f"each list must have one value for each sample, got {numbers}. Correct the lists."
        )
    rows = zip(*columns.values(), strict=True)
    return [
        parsed(f"sample {s}", dict(zip(columns, row, strict=True))) for s, row in enumerate(rows)
    ]


def from_jsonl(path: str) -> list[Sample]:
    """Samples from a file with one JSON object per line.

    ``{"length": n}`` or ``{"loss_mask": [...]}``, optionally with ``"prompt"``, ``"rollout"``,
    ``"dataset"``, ``"microbatch"`` and ``"rank"`` (any value); other keys are ignored.

    Raises:
        OptionError: the file or a line cannot be read.
        DataError: only some lines have a prompt, rollout, data set, microbatch or rank.
    """
    return from_rows("--jsonl", path, lines_of("--jsonl", path))


def from_rows(flag: str, path: str, rows: Iterable[tuple[str, Any]]) -> list[Sample]:
    """Samples from the objects of a file, each with its file and line.

    Raises:
        OptionError: there is none, or one is no sample.
        DataError: only some have a prompt, rollout, data set, microbatch or rank.
    """
    samples = [parsed(where, row) for where, row in with_progress(rows)]
    if not samples:
        raise OptionError(
            f"{flag} must name a file with a JSON object for each sample, got no line in {path}. "
            "Write one."
        )
    for name in COLUMNS:
        without = sum(getattr(sample, name) is None for sample in samples)
        if 0 < without < len(samples):
            raise DataError(
                f"{name!r} must be on every line of {path} or on none, got {without} of "
                f"{len(samples)} lines without it. Add it ({flag})."
            )
    return samples


def rows_from(path: str, number: int, is_split: bool) -> Iterator[Microbatch]:
    """The first ``number`` lines of a file, each a row of a batch: a length or an object.

    An object is as in `from_jsonl`; beside "loss_mask", "cu_seqlens" holds the offsets of the
    samples of a pack. Rows that context parallelism splits have a mask.

    Raises:
        OptionError: the file or a line cannot be read.
    """
    for where, line in lines_of("--data", path, number):
        row: Any = {"length": line} if isinstance(line, int | float) else line
        mask = torch.tensor([[parsed(where, row).tokens]])
        if is_split and "loss_mask" not in row:
            raise OptionError(
                "under --context-parallel-size a row must be a 'loss_mask', padded as in the "
                "batch, since its place in the row decides which rank has a token, got a length "
                f"in {where}. Write masks."
            )
        starts = None
        if "loss_mask" in row:
            mask = torch.tensor([row["loss_mask"]], dtype=torch.float64)
        if "cu_seqlens" in row:
            try:
                starts = torch.tensor(row["cu_seqlens"])
            except (ValueError, TypeError):
                raise OptionError(
                    f"cu_seqlens must be a list of ints, got {shortened(row['cu_seqlens'])} in "
                    f"{where}. Correct the line."
                ) from None
        try:
            microbatch = Microbatch(mask, starts)
            sums_by_sample([microbatch])
        except AggregationError as error:
            raise OptionError(f"{where}: {error}") from error
        yield microbatch


def lines_of(flag: str, path: str, number: int | None = None) -> Iterator[tuple[str, Any]]:
    """File and line, and JSON value, of the first ``number`` lines; empty lines are skipped.

    Raises:
        OptionError: the file or a line cannot be read.
    """
    try:
        with open(path, encoding="utf-8") as file:
            lines = (numbered for numbered in enumerate(file, 1) if numbered[1].strip())
            for n, line in itertools.islice(lines, number):
                yield f"{path}:{n}", json.loads(line)
    except json.JSONDecodeError as error:
        raise OptionError(
            f"every line must be a JSON value, got {error} in {path}:{n}. Correct the line."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(
            f"{flag} must name a readable text file, got {path} ({error}). Change the path."
        ) from error


def with_progress(rows: Iterable[_Row], total: int | None = None) -> Iterator[_Row]:
    """The rows; while reading takes long, a bar on stderr, if that is a terminal."""
    if not sys.stderr.isatty():
        yield from rows
        return
    shown_at, width = time.monotonic(), 0
    for number, row in enumerate(rows, 1):
        yield row
        if time.monotonic() >= shown_at + _SECONDS:
            filled = 0 if total is None else _BAR * number // total
            bar = "" if total is None else f"[{'#' * filled:{_BAR}}] "
            text = f"{bar}{number:,} rows read"
            print(f"\r{text:{width}}", end="", file=sys.stderr, flush=True)
            shown_at, width = time.monotonic(), len(text)
    print(f"\r{'':{width}}\r" if width else "", end="", file=sys.stderr, flush=True)


def parsed(where: str, row: Any) -> Sample:
    """The sample of a line, or of values of the lists.

    Raises:
        OptionError: a bad value; the error says ``where``.
    """
    if not isinstance(row, dict) or ("length" in row) == ("loss_mask" in row):
        raise OptionError(
            "each sample must be an object with either 'length' or 'loss_mask', got "
            f"{shortened(row)} in {where}. Give one of them."
        )
    mask = row.get("loss_mask", [row.get("length")])
    is_list = isinstance(mask, list) and all(isinstance(m, int | float) for m in mask)
    if not is_list or not all(0 <= m < math.inf for m in mask):
        raise OptionError(
            "a length must be a finite number >= 0, and a loss_mask a list of them, got "
            f"{shortened(mask)} in {where}. Correct it."
        )
    return Sample(math.fsum(mask), **{name: row.get(name) for name in COLUMNS})


def shortened(value: Any) -> str:
    """A JSON value as a text that fits into a table."""
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _WIDEST else text[: _WIDEST - 1] + "…"
