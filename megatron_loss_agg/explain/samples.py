"""Reads the samples of a step, and the rows of a run, from lists and from files.

Every source first becomes a series of lines, each with its place, for errors, and its JSON value.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_loss_agg.aggregation import BY_ID
from megatron_loss_agg.counting import sums_by_sample
from megatron_loss_agg.errors import AggregationError, DataError, OptionError
from megatron_loss_agg.microbatch import Microbatch

Line = tuple[str, Any]
"""A place, such as ``step.jsonl:3``, and the value there."""
COLUMNS = (*BY_ID, "microbatch", "rank", "weight")
LISTS = {**{f"{unit}s": unit for unit in BY_ID}, "microbatches": "microbatch"}
"""Command-line options and the columns that they fill."""
_WIDEST = 16
"""Maximum width of a value in a table, in characters."""


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
    weight: float | None = None
    """``v_s``. None: samples have no weights."""


def lines_of_lists(lengths: Sequence[str], lists: Mapping[str, Sequence[str]]) -> list[Line]:
    """A line for each sample from lists of words, such as 10, 1000, 40 and 0, 0, 1.

    Args:
        lists: by the names in `LISTS`.

    Raises:
        OptionError: a length is not a number, or the lists differ in length.
    """
    try:
        columns: dict[str, list[Any]] = {"length": [*map(float, lengths)]}
    except ValueError:
        raise OptionError(
            f"--lengths must be numbers separated by commas or spaces, got {','.join(lengths)!r}. "
            "Correct it."
        ) from None
    for option, words in lists.items():
        columns[LISTS[option]] = [*words]
    if len({len(column) for column in columns.values()}) > 1:
        numbers = ", ".join(f"{len(column)} ({name})" for name, column in columns.items())
        raise OptionError(
            f"each list must have one value for each sample, got {numbers}. Correct the lists."
        )
    rows = zip(*columns.values(), strict=True)
    return [(f"sample {s}", dict(zip(columns, row, strict=True))) for s, row in enumerate(rows)]


def lines_of_file(flag: str, path: str) -> Iterator[Line]:
    """The lines of a file that ``flag`` names; empty ones are skipped.

    Raises:
        OptionError: the file or a line cannot be read.
    """
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield f"{path}:{number}", json.loads(line)
    except json.JSONDecodeError as error:
        raise OptionError(
            f"every line must be a JSON value, got {error} in {path}:{number}. Correct the line."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(
            f"{flag} must name a readable text file, got {path} ({error}). Change the path."
        ) from error


def read_samples(lines: Iterable[Line], are_weighted: bool = False) -> list[Sample]:
    """A sample for each line.

    A line is ``{"length": n}`` or ``{"loss_mask": [...]}``, optionally with ``"prompt"``,
    ``"rollout"``, ``"dataset"``, ``"microbatch"`` and ``"rank"`` (any value); other keys are
    ignored.

    Args:
        are_weighted: True if each line must have a ``"weight"``; otherwise weights are ignored.

    Raises:
        OptionError: there are no lines, or one is not a sample.
        DataError: only some lines have a prompt, rollout, data set, microbatch or rank; or a bad
            weight.
    """
    samples = []
    for where, line in lines:
        tokens = math.fsum(_checked_mask(where, line))
        values = {name: line.get(name) for name in COLUMNS} | {"weight": None}
        if are_weighted:
            values["weight"] = _checked_weight(where, line)
        samples.append(Sample(tokens, **values))
    if not samples:
        raise OptionError(
            "a step must have samples, got a file without lines. Write a JSON object for each "
            "sample, one per line."
        )
    for name in COLUMNS:
        without = sum(getattr(sample, name) is None for sample in samples)
        if 0 < without < len(samples):
            raise DataError(
                f"{name!r} must be on every line or on none, got {without} of {len(samples)} "
                "lines without it. Add it."
            )
    return samples


def read_rows(lines: Iterable[Line], is_split: bool) -> Iterator[Microbatch]:
    """A row of a batch for each line: a number of loss tokens, or an object as in `read_samples`.

    In addition to "loss_mask", "cu_seqlens" may hold the offsets of a pack's samples.

    Args:
        is_split: True if context parallelism splits the rows, which must then have masks.

    Raises:
        OptionError: a line is not a row.
    """
    for where, line in lines:
        row: Any = {"length": line} if isinstance(line, int | float) else line
        mask = torch.tensor([_checked_mask(where, row)], dtype=torch.float64)
        if is_split and "length" in row:
            raise OptionError(
                "under --context-parallel-size a row must be a 'loss_mask', padded as in the "
                "batch, since a token's place in the row decides which rank has it, got a length "
                f"in {where}. Write masks."
            )
        starts = row.get("cu_seqlens")
        if starts is not None and not (
            isinstance(starts, list) and all(isinstance(start, int) for start in starts)
        ):
            raise OptionError(
                f"cu_seqlens must be a list of ints, got {shortened(starts)} in {where}. Correct "
                "the line."
            )
        try:
            microbatch = Microbatch(mask, None if starts is None else torch.tensor(starts).long())
            sums_by_sample([microbatch])  # checks the offsets
        except AggregationError as error:
            raise OptionError(f"{where}: {error}") from error
        yield microbatch


def shortened(value: Any) -> str:
    """A JSON value as text that fits into a table."""
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _WIDEST else text[: _WIDEST - 1] + "…"


def _checked_weight(where: str, line: Mapping[str, Any]) -> float:
    weight: Any = line.get("weight")
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not is_number or not 0 <= weight < math.inf:
        raise DataError(
            "under --sample-weights each sample must have a weight, a finite number >= 0, got "
            f"{shortened(weight)} in {where}. Write it into the field 'weight' (for --chats: "
            "--sft-weight-field), or remove --sample-weights."
        )
    return float(weight)


def _checked_mask(where: str, line: Any) -> list[float]:
    """The loss mask of a line; a length is the mask of one token.

    Raises:
        OptionError: the line has neither, or a bad value.
    """
    if not isinstance(line, dict) or ("length" in line) == ("loss_mask" in line):
        raise OptionError(
            "each sample must be an object with either 'length' or 'loss_mask', got "
            f"{shortened(line)} in {where}. Give one of them."
        )
    mask = line.get("loss_mask", [line.get("length")])
    is_list = isinstance(mask, list) and all(isinstance(m, int | float) for m in mask)
    if not is_list or not all(0 <= m < math.inf for m in mask):
        raise OptionError(
            "a length must be a finite number >= 0, and a loss_mask a list of them, got "
            f"{shortened(mask)} in {where}. Correct it."
        )
    return mask
