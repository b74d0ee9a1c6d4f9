"""Checks of Megatron's ``--sft`` for ``doctor``, for runs that Megatron itself would end later."""

from __future__ import annotations

import math
from itertools import islice
from pathlib import Path
from typing import Any

from megatron_loss_agg.errors import HostError


def check_attention_mask(args: Any, release: tuple[int, int]) -> None:
    """Raise HostError if Megatron would end a run with ``--sft`` at its first batch.

    Args:
        args: Megatron's parsed flags.
        release: the release of Megatron-Core.
    """
    if release >= (0, 16) and getattr(args, "create_attention_mask_in_dataloader", False):
        raise HostError(
            "--sft needs batches without an attention mask, got no "
            "--no-create-attention-mask-in-dataloader. Add it."
        )


def check_split(args: Any) -> None:
    """Raise HostError if, with Megatron's parsed flags, a set that Megatron reads would be empty.

    Megatron divides by the number of lines in a set when it first reads the set.
    """
    from megatron.core.datasets.blended_megatron_dataset_config import (
        convert_split_vector_to_split_matrix,
        parse_and_normalize_split,
    )
    from megatron.training.utils import get_blend_and_blend_per_split

    blend, per_split = get_blend_and_blend_per_split(args)
    if blend is None or per_split:
        return
    split = args.split or "969, 30, 1"  # Megatron's default
    matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
    reads_all = getattr(args, "eval_iters", None) != 0
    ends_of = dict(zip(("training", "validation", "test"), matrix, strict=True))
    ends_of = {
        name: ends for name, ends in ends_of.items() if ends and (reads_all or name == "training")
    }
    # A share of two or more lines never rounds to none, so there is no need to read on.
    shares = [end - start for start, end in ends_of.values()]
    enough = math.ceil(2 / min(shares, default=1))
    for path in filter(Path.is_file, map(Path, blend[0])):
        lines = count_lines(path, enough)
        for name, (start, end) in ends_of.items():
            if round(start * lines) == round(end * lines):
                raise HostError(
                    f"every set with a share in --split must have a line, got none for {name} from the "
                    f"{lines} lines of {path} under {split!r}; Megatron would end in a "
                    "ZeroDivisionError. Change --split, for example to 90,10,0, which has no test "
                    "set."
                )


def count_lines(path: Path, most: int) -> int:
    """The number of lines in ``path`` that are not blank, or ``most`` if there are more."""
    with path.open("rb") as file:
        return sum(1 for _ in islice((line for line in file if not line.isspace()), most))
