"""The rows of a run's data, and what stock Megatron weighs their tokens by.

Suffixes: ``_S`` samples; ``_C`` cells: a rank for each of the context-parallel sizes; ``_H`` parts
of microbatches; ``_N`` steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_loss_agg.cp_layout import CPLayout
from megatron_loss_agg.errors import AggregationError, OptionError
from megatron_loss_agg.explain.samples import lines_of, parsed
from megatron_loss_agg.masks import sums_by_sample
from megatron_loss_agg.microbatch import Microbatch


class Layout(NamedTuple):
    """Megatron's flags of these names, which say what tokens it averages together.

    Data-parallel ranks do not: they are dealt consecutive rows, so that microbatches stay the same.
    """

    micro_batch_size: int
    global_batch_size: int
    context_parallel_size: int
    calculate_per_token_loss: bool

    @property
    def parts(self) -> int:
        """``H``: the microbatches of a step, each on each of its context-parallel ranks."""
        return self.global_batch_size // self.micro_batch_size * self.context_parallel_size

    @property
    def divisor(self) -> str:
        """What a token's mask is divided by."""
        return "M_step" if self.calculate_per_token_loss else f"(M_part * {self.parts})"


@dataclass(frozen=True)
class Rows:
    """The loss tokens of all samples of whole steps."""

    tokens_SC: Tensor  # fp64: mask sums
    row_S: Tensor  # int64
    step_S: Tensor  # int64
    rank_C: Mapping[int, Tensor]  # int64, by context-parallel size

    @classmethod
    def of(cls, rows: Iterable[Microbatch], rows_of_step: int, cp_sizes: Iterable[int]) -> Rows:
        """Of one row or pack each, without those after the last whole step.

        Raises:
            AggregationError: bad masks or offsets, or a row that so many ranks cannot split.
        """
        sizes = sorted({*cp_sizes})
        tokens = [_tokens(row, sizes) for row in rows]
        del tokens[len(tokens) // rows_of_step * rows_of_step :]
        number = torch.tensor([len(x) for x in tokens], dtype=torch.int64)
        row_S = torch.arange(len(tokens)).repeat_interleave(number)
        ranks = torch.cartesian_prod(*map(torch.arange, (1, *sizes))).T[1:]
        tokens_SC = torch.cat([torch.zeros(0, ranks.shape[1]).double(), *tokens])
        return cls(tokens_SC, row_S, row_S // rows_of_step, dict(zip(sizes, ranks, strict=True)))

    def stock(self, layout: Layout) -> Tensor:
        """Stock Megatron's weight of a token, as a multiple of token_mean's: fp64 [samples, cells].

            (m_t / (H * max(M_h, 1))) / (m_t / M_step)

        Its ``loss_func`` counts the tokens ``M_h`` of a part of a microbatch as an integer, and its
        ``forward_step_calc_loss`` divides by it; or per token, all of them by the step's sum.
        Megatron-Core 0.14 takes no maximum: there the loss of a part without a token is NaN.
        """
        cp_size = layout.context_parallel_size
        part_SC = (self.row_S // layout.micro_batch_size * cp_size)[:, None] + self.rank_C[cp_size]
        tokens_H = torch.bincount(
            part_SC.flatten(),
            self.tokens_SC.flatten(),
            minlength=len(self.tokens_N) * layout.parts,
        )
        counted_H = tokens_H.float().trunc().double()  # of a sum in fp32
        if layout.calculate_per_token_loss:
            divisor_SC = counted_H.view(-1, layout.parts).sum(1).clamp(min=1)[self.step_S, None]
        else:
            divisor_SC = layout.parts * counted_H[part_SC].clamp(min=1)
        return (self.tokens_N[self.step_S, None] / divisor_SC).expand_as(self.tokens_SC)

    @property
    def tokens_N(self) -> Tensor:
        """``M_step``, fp64 [steps]."""
        return torch.bincount(self.step_S, self.tokens_SC.sum(1))


def _tokens(row: Microbatch, cp_sizes: Sequence[int]) -> Tensor:
    """Mask sums, fp64 [samples, cells]."""
    sums_by_sample([row])  # checks
    mask_T = row.loss_mask.reshape(-1).double()
    starts, cell_T = row.sample_starts, row.sample_index()
    if starts is None or cell_T is None:
        starts, cell_T = torch.tensor([0, len(mask_T)]), torch.zeros(len(mask_T)).long()
    for size in cp_sizes:
        cell_T = cell_T * size
        for rank in range(1, size):
            cell_T[CPLayout.thd(starts, size, rank).index] += rank
    shape = (row.num_samples + 1, torch.Size(cp_sizes).numel())  # the last is outside of all
    return torch.bincount(cell_T, weights=mask_T, minlength=shape[0] * shape[1]).view(shape)[:-1]


def rows_of(path: str, number: int) -> Iterator[Microbatch]:
    """The first ``number`` lines of a file: a length, or an object as in `from_jsonl`.

    Beside "loss_mask", "cu_seqlens" says where the samples of a pack begin.

    Raises:
        OptionError: the file or a line cannot be read.
    """
    for where, line in lines_of("--data", path, max(number, 0)):
        row: Any = {"length": line} if isinstance(line, int | float) else line
        mask = torch.tensor([[parsed(where, row).tokens]])
        try:
            if "loss_mask" in row:
                mask = torch.tensor([row["loss_mask"]], dtype=torch.float64)
            starts = torch.tensor(row["cu_seqlens"]) if "cu_seqlens" in row else None
            sums_by_sample([microbatch := Microbatch(mask, starts)])
        except (AggregationError, ValueError, TypeError) as error:
            raise OptionError(f"{where}: {error}") from error
        yield microbatch
