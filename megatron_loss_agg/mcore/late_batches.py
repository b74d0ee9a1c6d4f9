"""Batches whose loss mask is made by the model, as vision-language models do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron_loss_agg.errors import FunctionError, GroupError, MaskError
from megatron_loss_agg.samples import listed

_ROWS = ("tokens", "input_ids", "text", "labels")  # keys, of which the first that is present counts
_READER = (
    "give a function batch -> LateMicrobatch (--loss-aggregation-batch module:name, or in a loop "
    "of your own LossHook(read_batch=...))"
)


@dataclass(frozen=True)
class LateMicrobatch:
    """A microbatch of this rank whose loss mask the model makes: see `LossHook`'s ``mask``.

    Args:
        samples: number of samples, those without a loss token included.

    Raises:
        MaskError: it is not an int above 0.
    """

    samples: int

    def __post_init__(self) -> None:
        if type(self.samples) is not int or self.samples < 1:
            raise MaskError(f"samples={self.samples!r}; expected an int > 0")


def read_samples(batch: Any) -> LateMicrobatch:
    """The number of rows of a batch; every row is one sample.

    Counts the rows of the first of the keys ``tokens``, ``input_ids``, ``text`` and ``labels``.

    Raises:
        MaskError: there is none, or it is no tensor [samples, seq].
        GroupError: the batch has offsets of packed samples, rejected samples or sample weights.
    """
    keys = sorted(batch) if isinstance(batch, Mapping) else type(batch).__name__
    found = [batch[key] for key in _ROWS if key in batch] if isinstance(batch, Mapping) else []
    if not found or not isinstance(found[0], Tensor) or found[0].dim() != 2:
        raise MaskError(
            f"the data iterator gave {keys}; expected a mapping with one of the tensors "
            f"{', '.join(_ROWS)}, [samples, seq], to count its rows: otherwise {_READER}"
        )
    refused = [
        key
        for key in batch
        if batch[key] is not None
        and (key in ("rejected", "sample_weights") or str(key).startswith("cu_seqlens"))
    ]
    if refused:
        raise GroupError(
            f"the batch has the keys {refused} beside a mask that the model makes; expected one "
            f"sample in each row, none rejected and none weighted: otherwise {_READER}"
        )
    return LateMicrobatch(found[0].shape[0])


def checked_samples(microbatches: Any, number: int) -> list[int]:
    """The number of samples of each of ``number`` microbatches.

    Raises:
        FunctionError: another number of them, or other types.
    """
    found = listed(microbatches)
    if len(found) != number or not all(isinstance(m, LateMicrobatch) for m in found):
        kinds = sorted({type(m).__name__ for m in found})
        raise FunctionError(
            f"{len(found)} microbatches of type {', '.join(kinds)} for {number} whose masks the "
            f"model makes; expected as many LateMicrobatch: {_READER}"
        )
    return [m.samples for m in found]
