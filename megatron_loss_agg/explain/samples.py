"""The samples of one optimizer step, from command-line lists or from a JSONL file."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_loss_agg.aggregation import BY_ID
from megatron_loss_agg.errors import GroupError, InputError

# Up to here every integer is exact in fp64, in which tokens are counted.
_MAX = 2**53
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
    microbatch: int | None = None
    # Data-parallel rank. None: not given.
    rank: int | None = None


def from_lists(lengths: str, **lists: str | None) -> list[Sample]:
    """Samples from comma-separated lists, such as ``10,1000,40`` and ``0,0,1``.

    Args:
        lists: by the names in `LISTS`; None: not given.

    Raises:
        InputError: a list cannot be parsed, or differs in length from ``lengths``.
    """
    tokens = _integers("--lengths", lengths)
    columns: dict[str, Sequence[Any]] = {}
    for flag, text in lists.items():
        if text is None:
            continue
        column = _integers(f"--{flag}", text) if flag == "microbatches" else _items(text)
        if len(column) != len(tokens):
            raise InputError(
                f"--{flag} has {len(column)} values and --lengths has {len(tokens)}; "
                "expected one for each sample"
            )
        columns[LISTS[flag]] = column
    return [
        Sample(float(count), **{name: column[s] for name, column in columns.items()})
        for s, count in enumerate(tokens)
    ]


def from_jsonl(path: str) -> list[Sample]:
    """Samples from a file with one JSON object per line.

    ``{"length": n}`` or ``{"loss_mask": [...]}``, optionally with ``"prompt"``, ``"rollout"`` and
    ``"dataset"`` (any value), ``"microbatch"`` and ``"rank"`` (integers); other keys are ignored.

    Raises:
        InputError: the file or a line cannot be read.
        GroupError: only some lines have a prompt, rollout, data set, microbatch or rank.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--jsonl {path}: {error}; expected a readable text file") from error
    numbered = [(f"{path}:{n}", line) for n, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise InputError(f"--jsonl {path}: no line; expected one JSON object for each sample")
    samples = [_sample(where, line) for where, line in numbered]
    for name in COLUMNS:
        known = [getattr(sample, name) is not None for sample in samples]
        if any(known) and not all(known):
            without, with_it = (numbered[known.index(known_)][0] for known_ in (False, True))
            raise GroupError(
                f"{without} has no {name!r} and {with_it} has; expected it on every line or on none"
            )
    return samples


def _sample(where: str, line: str) -> Sample:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # includes too many digits or too deep nesting
        raise InputError(f"{where}: no JSON ({error}); expected one JSON object a line") from None
    if not isinstance(row, dict):
        raise InputError(f"{where}: {type(row).__name__}; expected a JSON object")
    if ("length" in row) == ("loss_mask" in row):
        raise InputError(f"{where}: has keys {[*row]}; expected either 'length' or 'loss_mask'")
    if "length" in row:
        tokens = float(_count(where, "length", row["length"]))
    else:
        tokens = _mask_sum(where, row["loss_mask"])
    microbatch, rank = (
        None if row.get(name) is None else _count(where, name, row[name])
        for name in ("microbatch", "rank")
    )
    groups = {unit: row.get(unit) for unit in BY_ID}
    return Sample(tokens, **groups, microbatch=microbatch, rank=rank)


def _mask_sum(where: str, mask: Any) -> float:
    numbers = isinstance(mask, list) and all(isinstance(m, (bool, int, float)) for m in mask)
    if not numbers or not all(0 <= m <= _MAX for m in mask) or sum(mask) > _MAX:
        raise InputError(
            f"{where}: a bad 'loss_mask'; expected a list of finite numbers >= 0 with a sum up to "
            "2**53"
        )
    return math.fsum(mask)


def _count(where: str, name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MAX:
        shown = repr(value) if len(repr(value)) <= 80 else repr(value)[:80] + "..."
        raise InputError(f"{where}: {name!r} is {shown}; expected an integer >= 0, up to 2**53")
    return value


def _items(text: str) -> list[str]:
    return [item.strip() for item in text.split(",")]


def _integers(flag: str, text: str) -> list[int]:
    items = _items(text)
    digits = len(str(_MAX))
    if not all(i.isdecimal() and len(i) <= digits and int(i) <= _MAX for i in items):
        shown = text if len(text) <= 80 else text[:80] + "..."
        raise InputError(
            f"{flag} {shown!r}; expected integers >= 0, up to 2**53, with commas between them"
        )
    return [int(item) for item in items]
