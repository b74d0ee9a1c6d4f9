"""``explain --data``: stock Megatron's weights of the tokens of a run's own data.

Stock Megatron divides a token's loss by the loss tokens of its part: its microbatch, or under
context parallelism the tokens of it that one rank has. So its weights depend on the run's flags,
and are compared between the run's own and others (``--against``).

Suffixes: ``_S`` samples; ``_C`` cells, see `LossTokens`; ``_P`` parts of microbatches; ``_N``
steps; ``_T`` tokens of a row.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_loss_agg.aggregation import LossAggregation
from megatron_loss_agg.cp_layout import CPLayout
from megatron_loss_agg.errors import OptionError
from megatron_loss_agg.explain.chats import add_chats, rows_of_chats
from megatron_loss_agg.explain.samples import Sample, rows_from, with_progress
from megatron_loss_agg.explain.shares import Shares, explain
from megatron_loss_agg.explain.show import aligned, draw, quarters, span, write_csv
from megatron_loss_agg.masks import sums_by_sample
from megatron_loss_agg.microbatch import Microbatch

Read = Callable[[Sequence[str], int], Iterator[Microbatch]]
"""(Megatron's flags, number) -> the first rows or packs of the run's training data."""


def main(argv: Sequence[str], read: Read) -> int:
    """Print the answer for the arguments after ``--data``, save the files, return the exit code.

    Raises:
        AggregationError: bad data or flags.
    """
    options = list(itertools.takewhile(lambda arg: arg != "--", argv))
    args, unknown = _parser().parse_known_args(options)
    megatron_flags = argv[len(options) + 1 :]
    if unknown:
        raise OptionError(
            f"options of explain --data must stand before -- and Megatron's flags after it, got "
            f"{unknown[0]} before it. Put -- in front of the run's own script and flags."
        )
    if not megatron_flags:
        raise OptionError(
            "explain --data must have the run's own flags after --, got none. Add them: at least "
            "-- --micro-batch-size N --global-batch-size N."
        )
    run = BatchFlags.of(megatron_flags)
    against = args.against or _twice_the_microbatch(run)
    other = BatchFlags.of([*megatron_flags, *shlex.split(against)])
    if other.global_batch_size != run.global_batch_size:
        raise OptionError(
            f"--against must keep the step of {run.global_batch_size} rows, got "
            f"--global-batch-size {other.global_batch_size}. Drop that flag from --against."
        )
    number = max(1024, run.global_batch_size) if args.samples is None else args.samples
    if number < run.global_batch_size:
        raise OptionError(
            f"--samples must be at least --global-batch-size, got {number} and "
            f"{run.global_batch_size}. Raise --samples, or drop it."
        )
    is_split = max(run.context_parallel_size, other.context_parallel_size) > 1
    rows = _rows(args, number, megatron_flags, read, is_split)
    with contextlib.redirect_stdout(sys.stderr):  # what Megatron prints
        tokens = LossTokens.of(with_progress(rows, number), run, other)
    if not bool(tokens.tokens_SC.any()):
        raise OptionError(
            f"the data must have loss tokens, got none in {len(tokens.tokens_N):,} steps of "
            f"{run.global_batch_size} rows. Read more rows (--samples)."
        )
    runs = [
        Run.of(f"this run{_ranks_in_words(run)}", tokens, run, tokens.rank_C),
        Run.of(f"with {against}", tokens, other, tokens.other_rank_C),
    ]
    if run.context_parallel_size > 1 and other.context_parallel_size > 1:
        whole = run._replace(context_parallel_size=1)
        name = "with --context-parallel-size 1"
        runs.append(Run.of(name, tokens, whole, torch.zeros_like(tokens.rank_C)))
    weights = {"stock": runs[0].weight_SC, against: runs[1].weight_SC}
    step, samples, shown = _first_step(tokens)
    if args.plot is not None:
        of_stock = [_mean_of_samples(tokens, x_SC, step) for x_SC in weights.values()]
        names = ("stock", f"stock with {against}")
        of_runs = {
            f"{name} (weights add up to {shares.total:.2f})": shares
            for name, shares in zip(names, of_stock, strict=True)
        }
        draw(args.plot, samples, {**of_runs, **shown})
        print(f"drawn: {args.plot}, of step {step + 1}", file=sys.stderr)
    if args.csv is not None:
        write_csv(args.csv, _rows_by_sample(tokens, weights))
        print(f"written: {args.csv}", file=sys.stderr)
    print(*_answer(tokens, runs, weights, step, shown), sep="\n")
    return 0


def _rows(
    args: argparse.Namespace, number: int, flags: Sequence[str], read: Read, is_split: bool
) -> Iterator[Microbatch]:
    """The first rows of the chats, of the file, or of the data that Megatron's flags name."""
    if args.chats is None and args.tokenizer is None:
        return rows_from(args.file, number, is_split) if args.file else read(flags, number)
    if args.file:
        raise OptionError(
            "--data must have either a file of rows or --chats, got both. Drop "
            f"{args.file}, or --chats and --tokenizer."
        )
    parser = argparse.ArgumentParser("megatron_loss_agg explain --data", allow_abbrev=False)
    parser.add_argument("--seq-length", type=int, default=0)
    seq_length = parser.parse_known_args(flags)[0].seq_length
    if seq_length < 1:
        raise OptionError(
            f"--chats needs the length of a row, got --seq-length {seq_length}. Add --seq-length "
            "after --."
        )
    return rows_of_chats(args.chats, args.tokenizer, number, seq_length)


class BatchFlags(NamedTuple):
    """Megatron's flags of these names, by which it averages tokens together.

    The number of data-parallel ranks is none of them: ranks get consecutive rows, so that each
    microbatch has the same rows.
    """

    micro_batch_size: int
    global_batch_size: int
    context_parallel_size: int
    calculate_per_token_loss: bool

    @classmethod
    def of(cls, flags: Sequence[str]) -> BatchFlags:
        """Those among Megatron's ``flags``; others are ignored."""
        parser = argparse.ArgumentParser("megatron_loss_agg explain --data", allow_abbrev=False)
        parser.add_argument("--micro-batch-size", type=int, default=0)
        parser.add_argument("--global-batch-size", type=int, default=0)
        parser.add_argument("--context-parallel-size", type=int, default=1)
        parser.add_argument("--calculate-per-token-loss", action="store_true")
        parser.add_argument("--rampup-batch-size", nargs="+")
        values = vars(parser.parse_known_args(flags)[0])
        if values.pop("rampup_batch_size"):
            raise OptionError(
                "all steps must have the same size, got --rampup-batch-size. Drop it after --, and "
                "give --global-batch-size."
            )
        batch = cls(**values)
        if min(batch[:3]) < 1 or batch.global_batch_size % batch.micro_batch_size:
            raise OptionError(
                "--global-batch-size must be a multiple of --micro-batch-size, and both above 0, "
                f"got {batch.global_batch_size} and {batch.micro_batch_size}. Give the run's own "
                "after --."
            )
        return batch

    @property
    def parts(self) -> int:
        """Parts of a step: its microbatches, each on each of its context-parallel ranks."""
        return self.global_batch_size // self.micro_batch_size * self.context_parallel_size

    @property
    def divisor(self) -> str:
        """The denominator of a token's mask."""
        return "M_all" if self.calculate_per_token_loss else f"(M_part * {self.parts})"


class Run(NamedTuple):
    """A run of stock Megatron, and its weights."""

    name: str
    flags: BatchFlags
    rank_C: Tensor
    """int64: the context-parallel rank of each cell."""
    weight_SC: Tensor
    """Of `stock_weights`."""

    @classmethod
    def of(cls, name: str, tokens: LossTokens, flags: BatchFlags, rank_C: Tensor) -> Run:
        return cls(name, flags, rank_C, stock_weights(tokens, flags, rank_C))


@dataclass(frozen=True)
class LossTokens:
    """Loss tokens of the samples of whole steps, by cells.

    A cell holds the tokens that one context-parallel rank of the run has, and one of the run that
    it is compared with.
    """

    tokens_SC: Tensor
    """Mask sums, fp64."""
    row_S: Tensor
    """int64."""
    step_S: Tensor
    """int64."""
    rank_C: Tensor
    """int64: the context-parallel rank of the run."""
    other_rank_C: Tensor
    """int64: that of the other run."""

    @classmethod
    def of(cls, rows: Iterable[Microbatch], run: BatchFlags, other: BatchFlags) -> LossTokens:
        """Of one row or pack each, without those after the last whole step.

        Raises:
            AggregationError: fewer rows than a step has, bad masks or offsets, or a row that so
                many ranks cannot split.
        """
        cp_size, other_cp_size = run.context_parallel_size, other.context_parallel_size
        of_rows = [_tokens(row, cp_size, other_cp_size) for row in rows]
        if len(of_rows) < run.global_batch_size:
            raise OptionError(
                f"the data must have the {run.global_batch_size} rows of a step, got "
                f"{len(of_rows)}. Give more rows, or lower --global-batch-size."
            )
        del of_rows[len(of_rows) // run.global_batch_size * run.global_batch_size :]
        samples_of_row = torch.tensor([len(x) for x in of_rows], dtype=torch.int64)
        row_S = torch.arange(len(of_rows)).repeat_interleave(samples_of_row)
        cell_C = torch.arange(cp_size * other_cp_size)
        return cls(
            tokens_SC=torch.cat([torch.zeros(0, len(cell_C), dtype=torch.float64), *of_rows]),
            row_S=row_S,
            step_S=row_S // run.global_batch_size,
            rank_C=cell_C // other_cp_size,
            other_rank_C=cell_C % other_cp_size,
        )

    @property
    def tokens_S(self) -> Tensor:
        """fp64."""
        return self.tokens_SC.sum(1)

    @property
    def tokens_N(self) -> Tensor:
        """``M_all`` of each step, fp64."""
        return torch.bincount(self.step_S, self.tokens_S)


def stock_weights(tokens: LossTokens, flags: BatchFlags, rank_C: Tensor) -> Tensor:
    """Stock Megatron's weight of a token, as a multiple of token_mean's: fp64 [samples, cells].

        (m_t / (parts * max(M_part, 1))) / (m_t / M_all)

    Its ``loss_func`` counts the tokens ``M_part`` of a part of a microbatch as an integer, and its
    ``forward_step_calc_loss`` divides by it; or per token, all of them by the step's sum.
    Megatron-Core 0.14 takes no maximum: there the loss of a part without a token is NaN.

    Args:
        rank_C: the context-parallel rank of each cell under ``flags``.
    """
    part_SC, tokens_P = _parts(tokens, flags, rank_C)
    counted_P = tokens_P.float().trunc().double()  # int() of a sum in fp32
    if flags.calculate_per_token_loss:
        counted_N = counted_P.view(-1, flags.parts).sum(1).clamp(min=1)
        divisor_SC = counted_N[tokens.step_S, None].expand_as(tokens.tokens_SC)
    else:
        divisor_SC = flags.parts * counted_P[part_SC].clamp(min=1)
    return tokens.tokens_N[tokens.step_S, None] / divisor_SC


def _parts(tokens: LossTokens, flags: BatchFlags, rank_C: Tensor) -> tuple[Tensor, Tensor]:
    """The part of each cell, int64 [samples, cells]; and ``M_part`` of all parts, fp64."""
    microbatch_S = tokens.row_S // flags.micro_batch_size
    part_SC = microbatch_S[:, None] * flags.context_parallel_size + rank_C
    tokens_P = torch.bincount(
        part_SC.flatten(),
        tokens.tokens_SC.flatten(),
        minlength=len(tokens.tokens_N) * flags.parts,
    )
    return part_SC, tokens_P


def sums_of_weights(tokens: LossTokens, weight_SC: Tensor) -> Tensor:
    """``sum_t w_t`` of each step with loss tokens, fp64, of multiples of token_mean's weights."""
    sum_N = torch.bincount(tokens.step_S, (weight_SC * tokens.tokens_SC).sum(1))
    has_tokens_N = tokens.tokens_N > 0
    return sum_N[has_tokens_N] / tokens.tokens_N[has_tokens_N]


def _empty_parts(tokens: LossTokens, run: Run) -> float:
    """The fraction of parts without a loss token, of steps that have one."""
    _, tokens_P = _parts(tokens, run.flags, run.rank_C)
    is_empty = tokens_P.view(-1, run.flags.parts)[tokens.tokens_N > 0] == 0
    return float(is_empty.double().mean())


def _tokens(row: Microbatch, cp_size: int, other_cp_size: int) -> Tensor:
    """Mask sums of one row or pack, fp64 [samples, cells]."""
    sums_by_sample([row])  # checks values and offsets
    mask_T = row.loss_mask.reshape(-1).double()
    starts, sample_T = row.sample_starts, row.sample_index()
    if starts is None or sample_T is None:
        starts, sample_T = torch.tensor([0, len(mask_T)]), torch.zeros(len(mask_T)).long()
    rank_T = _ranks(starts, cp_size, len(mask_T))
    other_rank_T = _ranks(starts, other_cp_size, len(mask_T))
    samples, cells = row.num_samples + 1, cp_size * other_cp_size  # the last is outside of all
    index_T = sample_T * cells + rank_T * other_cp_size + other_rank_T
    return torch.bincount(index_T, mask_T, minlength=samples * cells).view(samples, cells)[:-1]


def _ranks(starts: Tensor, cp_size: int, tokens: int) -> Tensor:
    """The context-parallel rank that has each token, int64 [tokens]."""
    rank_T = torch.zeros(tokens, dtype=torch.int64)
    for rank in range(1, cp_size):
        rank_T[CPLayout.thd(starts, cp_size, rank).index] = rank
    return rank_T


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron_loss_agg explain --data",
        usage="%(prog)s [FILE] [options] -- [SCRIPT] FLAG ...",
        description="Show stock Megatron's weights of the tokens of a run's own data. Megatron "
        "reads it from the run's flags; or a line of FILE is a row, as a length or a JSON object; "
        "or a line of --chats is a row.",
        allow_abbrev=False,
    )
    parser.add_argument("file", metavar="FILE", nargs="?", help="lengths or loss masks")
    add_chats(parser, parser)
    parser.add_argument("--samples", metavar="N", type=int, help="read N rows (default: 1024)")
    parser.add_argument(
        "--against", metavar="FLAGS", help="of another run (default: twice --micro-batch-size)"
    )
    parser.add_argument("--plot", metavar="FILE", help="draw one step (png, svg, pdf)")
    parser.add_argument("--csv", metavar="FILE", help="write the weights of every sample")
    return parser


def _twice_the_microbatch(run: BatchFlags) -> str:
    """The flag of twice the size, or of 1 where that does not divide the step."""
    size = 2 * run.micro_batch_size
    return f"--micro-batch-size {1 if run.global_batch_size % size else size}"


def _ranks_in_words(flags: BatchFlags) -> str:
    size = flags.context_parallel_size
    return f" (context-parallel size {size}, zigzag)" if size > 1 else ""


def _first_step(tokens: LossTokens) -> tuple[int, list[Sample], dict[str, Shares]]:
    """Number, samples and shares under two modes of the first step with loss tokens."""
    step = int(tokens.tokens_N.nonzero()[0])
    samples = [Sample(x) for x in tokens.tokens_S[tokens.step_S == step].tolist()]
    shown, _ = explain(samples, ("token_mean", "sample_mean"), None, None)
    return step, samples, shown


def _mean_of_samples(tokens: LossTokens, weight_SC: Tensor, step: int) -> Shares:
    """Stock Megatron's shares of a step, with the mean weight of each sample's tokens."""
    tokens_SC, weight_SC = tokens.tokens_SC[tokens.step_S == step], weight_SC[tokens.step_S == step]
    tokens_S = tokens_SC.sum(1)
    mean_S = (weight_SC * tokens_SC).sum(1) / tokens_S.clamp(min=1e-300) / tokens_S.sum()
    return Shares(LossAggregation(mode="microbatch_mean"), tokens_S, mean_S, formula="")


def _answer(
    tokens: LossTokens,
    runs: Sequence[Run],
    weights: Mapping[str, Tensor],
    step: int,
    shown: Mapping[str, Shares],
) -> list[str]:
    """The printed lines: weights, their formulas and sums, and the difference of two runs."""
    is_active_SC = tokens.tokens_SC > 0
    stock, stock_of_other = (x_SC[is_active_SC] for x_SC in weights.values())
    factor = float(torch.maximum(stock / stock_of_other, stock_of_other / stock).max())
    fraction_SC, other_fraction_SC = (_fractions(tokens, x_SC) for x_SC in weights.values())
    steps_with_tokens = tokens.tokens_N.count_nonzero()
    percent = float(50 * (fraction_SC - other_fraction_SC).abs().sum() / steps_with_tokens)
    against = [*weights][1]
    run, other = runs[0].flags, runs[1].flags
    same_microbatches = run.micro_batch_size == other.micro_batch_size
    exception = "" if same_microbatches else " but microbatch_mean"
    sums = _by_run(tokens, runs)
    return [
        f"Stock Megatron gives a token {span(stock)} times its weight in token_mean.",
        *_sum_in_words(sums["sum of weights"][0]),
        f"steps: {len(tokens.tokens_N):,}, of {run.global_batch_size:,} rows; "
        f"samples: {len(tokens.row_S):,}; loss tokens: {float(tokens.tokens_S.sum()):,.15g}",
        f"stock: w_t = m_t / {run.divisor}",
        *(f"{mode}: {shares.formula} in step {step + 1}" for mode, shares in shown.items()),
        "",
        "Weight of a token, as a multiple of token_mean, by the sample's loss tokens",
        aligned(_by_length(tokens, weights), keys=2),
        "",
        "Sum of stock Megatron's weights of a step. A part (a microbatch on one",
        "context-parallel rank) without a loss token adds 0 to the mean over parts.",
        aligned(sums, keys=len(sums), left=("run",)),
        "",
        f"Stock Megatron with {against}:",
        f"{percent:.1f} % of the weight moves to other tokens (both sums scaled to 1),",
        f"and a token's weight changes by a factor of up to {factor:.2f}.",
        f"Every mode of --loss-aggregation{exception}",
        "gives a token the same weight in both.",
    ]


def _sum_in_words(total: str) -> list[str]:
    """The sum of the weights in words."""
    if total == "1.00":
        return ["Its weights add up to 1.00 in a step, as those of a mean do."]
    return [
        f"Its weights add up to {total} in a step, where those of a mean add up to 1:",
        f"its gradient is about {total} times that of a mean with the same relative weights.",
    ]


def _by_run(tokens: LossTokens, runs: Sequence[Run]) -> dict[str, list[str]]:
    """Columns: of each run, the sum of its weights in the mean over steps, and empty parts."""
    sums = [sums_of_weights(tokens, run.weight_SC).mean() for run in runs]
    return {
        "sum of weights": [f"{float(total):.2f}" for total in sums],
        "empty parts": [f"{100 * _empty_parts(tokens, run):.1f} %" for run in runs],
        "run": [run.name for run in runs],
    }


def _rows_by_sample(tokens: LossTokens, weights: Mapping[str, Tensor]) -> Iterator[list[Any]]:
    """The lines of a CSV file: of each run and sample, weights as multiples of token_mean's."""
    yield ["run", "step", "row", "tokens", "least", "largest", "sum_of_weights"]
    tokens_of_step_S = tokens.tokens_N[tokens.step_S].clamp(min=1e-300)
    step_and_row_S = (torch.stack([tokens.step_S, tokens.row_S], dim=1) + 1).tolist()
    for name, weight_SC in weights.items():
        sum_S = (weight_SC * tokens.tokens_SC).sum(1) / tokens_of_step_S
        for s, step_and_row in enumerate(step_and_row_S):
            active = weight_SC[s][tokens.tokens_SC[s] > 0]
            ends = [float(x) for x in active.aminmax()] if active.numel() else ["", ""]
            yield [name, *step_and_row, float(tokens.tokens_S[s]), *ends, float(sum_S[s])]


def _fractions(tokens: LossTokens, weight_SC: Tensor) -> Tensor:
    """Each cell's fraction of the sum of its step's weights."""
    sum_SC = weight_SC * tokens.tokens_SC
    sum_N = torch.bincount(tokens.step_S, sum_SC.sum(1)).clamp(min=1e-300)
    return sum_SC / sum_N[tokens.step_S, None]


def _by_length(tokens: LossTokens, weights: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Columns: of each quarter of the samples, by length, the least and largest weights."""
    tokens_S, is_active_SC = tokens.tokens_S, tokens.tokens_SC > 0
    is_in_quarter = quarters(tokens_S)
    columns = {"loss tokens": [span(tokens_S[is_in_S], ",.10g") for is_in_S in is_in_quarter]}
    columns["samples"] = [f"{int(is_in_S.sum()):,}" for is_in_S in is_in_quarter]
    for name, x_SC in weights.items():
        columns[name] = [span(x_SC[is_in_S][is_active_SC[is_in_S]]) for is_in_S in is_in_quarter]
    return columns
