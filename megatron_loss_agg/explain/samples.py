"""The samples of one optimizer step, from command-line lists or from a JSONL file."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron_loss_agg.aggregation import BY_ID
from megatron_loss_agg.errors import DataError, OptionError

COLUMNS = (*BY_ID, "microbatch", "rank")
LISTS = {**{f"{unit}s": unit for unit in BY_ID}, "microbatches": "microbatch"}
"""Options of the command line, and the columns that they give."""


@dataclass(frozen=True)
class Sample:
    """Loss tokens of one sample, and its groups."""

    # Sum of the mask.
    tokens: float
    # Any JSON value; equal values are one group over the whole step. None: not given.
    prompt: Any = None
    rollout: Any = None
    dataset: Any = None
    # Numbered per rank. None: not given.
    microbatch: Any = None
    # Data-parallel rank. None: not given.
    rank: Any = None


def from_lists(lengths: str, **lists: str | None) -> list[Sample]:
    """Samples from comma-separated lists, such as ``10,1000,40`` and ``0,0,1``.

    Args:
        lists: by the names in `LISTS`; None: not given.

    Raises:
        OptionError: a list cannot be parsed, or differs in length from ``lengths``.
    """
    try:
        columns: dict[str, list[Any]] = {"length": [float(item) for item in lengths.split(",")]}
    except ValueError as error:
        raise OptionError(f"--lengths: {error}; expected numbers with commas between") from None
    given = {flag: text for flag, text in lists.items() if text is not None}
    for flag, text in given.items():
        columns[LISTS[flag]] = [item.strip() for item in text.split(",")]
    if len({len(column) for column in columns.values()}) > 1:
        numbers = ", ".join(f"{len(column)} ({name})" for name, column in columns.items())
        raise OptionError(f"lists of {numbers} values; expected one value for each sample in each")
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
    samples = [parsed(where, row) for where, row in lines_of("--jsonl", path)]
    if not samples:
        raise OptionError(f"--jsonl {path}: no line; expected one JSON object for each sample")
    for name in COLUMNS:
        without = sum(getattr(sample, name) is None for sample in samples)
        if 0 < without < len(samples):
            raise DataError(
                f"--jsonl {path}: {without} of {len(samples)} lines have no {name!r}; expected it "
                "on every line or on none"
            )
    return samples


def lines_of(flag: str, path: str, number: int | None = None) -> Iterator[tuple[str, Any]]:
    """Where each of the first ``number`` lines is, and its JSON value; empty ones are skipped.

    Raises:
        OptionError: the file or a line cannot be read.
    """
    try:
        with open(path, encoding="utf-8") as file:
            lines = (numbered for numbered in enumerate(file, 1) if numbered[1].strip())
            for n, line in itertools.islice(lines, number):
                yield f"{path}:{n}", json.loads(line)
    except json.JSONDecodeError as error:
        raise OptionError(f"{path}:{n}: {error}; expected one JSON object a line") from None
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"{flag} {path}: {error}; expected a readable text file") from error


def parsed(where: str, row: Any) -> Sample:
    """The sample of a line, or of values of the lists; OptionError names ``where`` it is bad."""
    if not isinstance(row, dict) or ("length" in row) == ("loss_mask" in row):
        raise OptionError(f"{where}: expected an object with either 'length' or 'loss_mask'")
    mask = row.get("loss_mask", [row.get("length")])
    numbers = isinstance(mask, list) and all(isinstance(m, int | float) for m in mask)
    if not numbers or not all(0 <= m < math.inf for m in mask):
        raise OptionError(
            f"{where}: a bad length or loss_mask; expected a finite number >= 0, or a list of them"
        )
    return Sample(math.fsum(mask), **{name: row.get(name) for name in COLUMNS})
