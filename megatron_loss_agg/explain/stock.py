"""``explain --data``: stock Megatron's weights for the tokens of a run's own data.

Stock Megatron divides a token's loss by the loss tokens of its part: its microbatch or, with
context parallelism, one rank's tokens of the microbatch. So its weights depend on the run's flags.

Suffixes: ``_S`` samples; ``_C`` cells, see `Cells`; ``_P`` parts of microbatches; ``_N`` steps;
``_T`` tokens of a row.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from megatron_loss_agg.aggregation import words_in
from megatron_loss_agg.counting import sums_by_sample
from megatron_loss_agg.cp_layout import CPLayout
from megatron_loss_agg.errors import OptionError
from megatron_loss_agg.explain.show import aligned, rows_and_members, span
from megatron_loss_agg.microbatch import Microbatch

_POWERS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


class _Parser(argparse.ArgumentParser):
    """Raises `OptionError` for a bad value of a run's flag, without argparse's usage text."""

    def error(self, message: str) -> NoReturn:
        raise OptionError(f"{message}. Correct this flag after --.")


@dataclass(frozen=True)
class BatchFlags:
    """Megatron's flags of these names, which decide which tokens are averaged together.

    The number of data-parallel ranks has no influence: ranks get consecutive rows, so each
    microbatch has the same rows.
    """

    micro_batch_size: int
    global_batch_size: int
    context_parallel_size: int = 1
    calculate_per_token_loss: bool = False
    seq_length: int = 0
    step_batch_size_schedule: str = ""
    rampup_batch_size: Sequence[str] = ()

    @classmethod
    def parse(cls, flags: Sequence[str]) -> BatchFlags:
        """Read the flags from Megatron's ``flags``, ignoring others."""
        parser = _Parser(add_help=False, allow_abbrev=False)
        parser.add_argument("--micro-batch-size", type=int, default=0)
        parser.add_argument("--global-batch-size", type=int, default=0)
        parser.add_argument("--context-parallel-size", type=int, default=1)
        parser.add_argument("--calculate-per-token-loss", action="store_true")
        parser.add_argument("--seq-length", type=int, default=0)
        parser.add_argument("--rampup-batch-size", nargs="+", default=())
        parser.add_argument("--step-batch-size-schedule", default="")
        batch = cls(**vars(parser.parse_known_args(flags)[0]))
        if batch.step_batch_size_schedule and batch.global_batch_size:
            raise OptionError(
                "Megatron takes either --global-batch-size or --step-batch-size-schedule, got both. "
                "Remove one of them after --."
            )
        sizes = [size for _, size in batch.schedule]
        smallest = min(*sizes, batch.micro_batch_size, batch.context_parallel_size)
        if smallest < 1 or any(size % batch.micro_batch_size for size in sizes):
            flag = (
                "step-batch-size-schedule"
                if batch.step_batch_size_schedule
                else "global-batch-size"
            )
            raise OptionError(
                f"--{flag} must be a multiple of --micro-batch-size, and both above 0, got "
                f"{' '.join(map(str, sizes))} and {batch.micro_batch_size}. Give the run's own after --."
            )
        return batch

    @cached_property
    def schedule(self) -> list[tuple[int, int]]:
        """Pairs (rows read so far, rows of a step from then on), as Megatron parses its flags.

        Raises:
            OptionError: the schedule cannot be read.
        """
        if not self.step_batch_size_schedule:
            return [(0, self.global_batch_size)]
        try:
            words = (word.split(":") for word in words_in(self.step_batch_size_schedule))
            pairs = [(_number(start), _number(size)) for start, size in words]
        except ValueError:
            pairs = []
        schedule = sorted((start // (self.seq_length or 1), size) for start, size in pairs)
        if not schedule or schedule[0][0] != 0:
            raise OptionError(
                "--step-batch-size-schedule must be pairs of a number of tokens and a batch size, "
                f"starting at 0 tokens, got {self.step_batch_size_schedule!r}. Correct it after "
                "--, for example to '0:768 250B:1536'."
            )
        return schedule

    def step_sizes(self, num_rows: int) -> list[int]:
        """The number of rows in each whole step of the first ``num_rows`` rows."""
        sizes: list[int] = []
        read = 0
        while True:
            size = [size for start, size in self.schedule if start <= read][-1]
            read += size
            if read > num_rows:
                return sizes
            sizes.append(size)


def _number(text: str) -> int:
    """The value of a number in Megatron's schedule, such as ``250B``."""
    digits = text.upper().rstrip("".join(_POWERS))
    return int(float(digits) * _POWERS.get(text.upper()[len(digits) :], 1))


def divides_by_whole_microbatch() -> bool:
    """True if the Megatron found here divides a loss by the tokens of all context-parallel ranks.

    No release up to 0.19 does: a rank divides by its own tokens, finding 9 in Megatron-LM's issue
    7452. This looks for a reduction in the source, in the function that divides and in those that
    it calls there, since importing Megatron takes seconds and fails on some login nodes. Without
    Megatron: False.
    """
    spec = find_spec("megatron")
    folders = (spec and spec.submodule_search_locations) or []
    files = [Path(folder, "core/pipeline_parallel/schedules.py") for folder in folders]
    source = next((file.read_text("utf-8") for file in files if file.is_file()), "")
    functions = {x.name: x for x in ast.parse(source).body if isinstance(x, ast.FunctionDef)}
    called: set[str] = set()
    new = {"forward_step_calc_loss"}
    while new:
        called |= new
        new = {x for name in new & functions.keys() for x in _calls(functions[name])} - called
    return any("reduce" in name for name in called)


def _calls(function: ast.FunctionDef) -> Iterator[str]:
    """The names of the functions that ``function`` calls, without their modules."""
    for node in ast.walk(function):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func).rpartition(".")[2]


@dataclass(frozen=True)
class Cells:
    """Loss tokens of whole steps, by cells.

    The tokens of a cell belong to one sample and are on one context-parallel rank, so stock
    Megatron gives them all the same weight.
    """

    tokens_C: Tensor
    """Mask sums, fp64, above 0."""
    sample_C: Tensor
    """int64."""
    rank_C: Tensor
    """int64: the context-parallel rank."""
    row_S: Tensor
    """int64."""
    rows_N: Tensor
    """int64: the rows of each step."""

    @classmethod
    def read(cls, rows: Iterable[Microbatch], flags: BatchFlags) -> Cells:
        """Count the tokens of each row or pack, without those after the last whole step.

        Raises:
            AggregationError: fewer rows than a step has, no loss tokens, bad masks or offsets, or a
                row that cannot be split over so many ranks.
        """
        row_cells = [_count(row, flags.context_parallel_size) for row in rows]
        sizes = flags.step_sizes(len(row_cells))
        if not sizes:
            raise OptionError(
                f"the data must have the {flags.schedule[0][1]} rows of a step, got {len(row_cells)}. "
                "Give more rows, or lower --global-batch-size."
            )
        del row_cells[sum(sizes) :]
        tokens, samples, ranks, num_samples = zip(*row_cells, strict=True)
        samples_before = torch.tensor([0, *num_samples]).cumsum(0).tolist()
        cells = cls(
            tokens_C=torch.cat(tokens),
            sample_C=torch.cat([x + n for x, n in zip(samples, samples_before, strict=False)]),
            rank_C=torch.cat(ranks),
            row_S=torch.arange(len(row_cells)).repeat_interleave(torch.tensor(num_samples)),
            rows_N=torch.tensor(sizes),
        )
        if not len(cells.tokens_C):
            raise OptionError(
                f"the data must have loss tokens, got none in {len(sizes):,} steps of "
                f"{span(cells.rows_N, ',.15g')} rows. Read more rows (--samples)."
            )
        return cells

    @cached_property
    def step_S(self) -> Tensor:
        """int64."""
        return torch.arange(len(self.rows_N)).repeat_interleave(self.rows_N)[self.row_S]

    @cached_property
    def step_C(self) -> Tensor:
        """int64."""
        return self.step_S[self.sample_C]

    @cached_property
    def tokens_S(self) -> Tensor:
        """fp64."""
        return torch.bincount(self.sample_C, self.tokens_C, minlength=len(self.row_S))

    @cached_property
    def tokens_N(self) -> Tensor:
        """``M_all`` of each step, fp64."""
        return torch.bincount(self.step_S, self.tokens_S, minlength=len(self.rows_N))


def _count(row: Microbatch, cp_size: int) -> tuple[Tensor, Tensor, Tensor, int]:
    """Tokens, sample and rank of each cell of a row or pack; its number of samples."""
    sums_by_sample([row])  # checks values and offsets
    mask_T = row.loss_mask.reshape(-1).double()
    starts, sample_T = row.sample_starts, row.sample_index()
    if starts is None or sample_T is None:
        starts, sample_T = torch.tensor([0, len(mask_T)]), torch.zeros(len(mask_T)).long()
    rank_T = torch.zeros_like(sample_T)
    if cp_size > 1:
        split_T = CPLayout.thd(starts, cp_size, 0).rank_of_position
        rank_T[: len(split_T)] = split_T  # after the last sample masks are 0, so any rank will do
    tokens = torch.bincount(sample_T * cp_size + rank_T, mask_T)
    cell_C = tokens.nonzero().view(-1)
    return tokens[cell_C], cell_C // cp_size, cell_C % cp_size, row.num_samples


class StockRun(NamedTuple):
    """Stock Megatron's weights for the tokens of a run."""

    flags: BatchFlags
    weight_C: Tensor
    """Weight of a token, as a multiple of its weight in token_mean: fp64 [cells]."""
    sum_N: Tensor
    """The sum of all weights, ``sum_t w_t``, of each step with loss tokens, fp64."""
    empty_fraction: float
    """The fraction of parts without loss tokens, in steps that have any."""
    parts_N: Tensor
    """int64: the number of parts in each step: its microbatches times context-parallel ranks."""

    @property
    def formula(self) -> str:
        """The weight of a token in words."""
        if self.flags.calculate_per_token_loss:
            return "w_t = m_t / M_all"
        return f"w_t = m_t / (M_part * {span(self.parts_N, ',.15g')})"

    @classmethod
    def weigh(cls, flags: BatchFlags, cells: Cells) -> StockRun:
        """Weight each token as stock Megatron does.

            (m_t / (parts * max(M_part, 1))) / (m_t / M_all)

        Its ``loss_func`` counts the tokens ``M_part`` of a part of a microbatch as an integer, and
        its ``forward_step_calc_loss`` divides by it. With ``calculate_per_token_loss``, all tokens
        are divided by the step's sum. Megatron-Core 0.14 does not take the maximum: there the loss
        of a part without tokens is NaN.
        """
        size, steps = flags.context_parallel_size, len(cells.rows_N)
        parts_N = cells.rows_N // flags.micro_batch_size * size
        step_P = torch.arange(steps).repeat_interleave(parts_N)
        microbatch_C = cells.row_S[cells.sample_C] // flags.micro_batch_size
        part_C = microbatch_C * size + cells.rank_C
        tokens_P = torch.bincount(part_C, cells.tokens_C, minlength=len(step_P))
        counted_P = tokens_P.float().trunc().double()  # int() of a sum in fp32
        if flags.calculate_per_token_loss:
            divisor_C = torch.bincount(step_P, counted_P).clamp(min=1)[cells.step_C]
        else:
            divisor_C = parts_N[cells.step_C] * counted_P[part_C].clamp(min=1)
        weight_C = cells.tokens_N[cells.step_C] / divisor_C
        sum_N = torch.bincount(cells.step_C, weight_C * cells.tokens_C, minlength=steps)
        has_tokens_N = cells.tokens_N > 0
        is_empty = tokens_P[has_tokens_N[step_P]] == 0
        return cls(
            flags=flags,
            weight_C=weight_C,
            sum_N=(sum_N / cells.tokens_N)[has_tokens_N],
            empty_fraction=float(is_empty.double().mean()),
            parts_N=parts_N,
        )


WHOLE_MICROBATCHES = (
    "This Megatron divides by the loss tokens of all context-parallel ranks (the fix of\n"
    "Megatron-LM's issue 7452, finding 9): a part is a whole microbatch."
)


def in_words(cells: Cells, run: StockRun) -> str:
    """The weights, and their sum in a step, in words and as a table."""
    # The mask of a turn that counts once sums to 1 only to fp32's precision.
    tokens_S = cells.tokens_S.round(decimals=4)
    keys, members = rows_and_members(tokens_S)
    weights = [span(run.weight_C[is_in_S[cells.sample_C]]) for is_in_S in members]
    total = f"{float(run.sum_N.mean()):.2f}"
    lines = [
        f"Stock Megatron gives a token {span(run.weight_C)} times its weight in token_mean.",
        f"Its weights add up to {total} in a step, where those of a mean add up to 1:",
        f"its gradient is about {total} times that of a mean with the same relative weights.",
        f"{_moved_percent(cells, run):.1f} % of the weight is on other tokens than in token_mean,",
        "if both sums are scaled to 1.",
        f"{100 * run.empty_fraction:.1f} % of the parts (microbatches on one context-parallel rank)",
        "have no loss token, and add 0 to the mean over parts.",
        f"steps: {len(cells.rows_N):,}, of {span(cells.rows_N, ',.15g')} rows; "
        f"samples: {len(cells.row_S):,}; loss tokens: {round(float(tokens_S.sum()), 2):,.15g}",
        f"stock: {run.formula}",
    ]
    if run.flags.rampup_batch_size:
        lines.append("--rampup-batch-size is ignored, as Megatron-Core 0.18 and later ignore it")
    lines += [
        "",
        "Weight of a token of the sample, as a multiple of its weight in token_mean",
        aligned({**keys, "weight": weights}, len(keys)),
        "",
        "Every mode of --loss-aggregation but microbatch_mean gives a token the same",
        "weight, whatever the microbatches and the context parallelism.",
    ]
    return "\n".join(lines)


def _moved_percent(cells: Cells, run: StockRun) -> float:
    """The percentage of the weight that is on other tokens than in token_mean."""
    weight_C = run.weight_C * cells.tokens_C
    fraction_C = weight_C / torch.bincount(cells.step_C, weight_C)[cells.step_C]
    difference_C = fraction_C - cells.tokens_C / cells.tokens_N[cells.step_C]
    return 50 * float(difference_C.abs().sum()) / int(cells.tokens_N.count_nonzero())
