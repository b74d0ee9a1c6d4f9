"""``explain --data``: what stock Megatron weighs the tokens of a run's own data by."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from megatron_loss_agg.aggregation import LossAggregation
from megatron_loss_agg.errors import OptionError
from megatron_loss_agg.explain.rows import Layout, Rows, rows_of
from megatron_loss_agg.explain.samples import Sample
from megatron_loss_agg.explain.shares import Shares, explain
from megatron_loss_agg.explain.table import aligned
from megatron_loss_agg.microbatch import Microbatch

Read = Callable[[Sequence[str], int], Iterator[Microbatch]]
"""(Megatron's flags, number) -> the first rows or packs of the run's training data."""


def main(argv: Sequence[str], read: Read) -> int:
    """Print the answer for the arguments after ``--data``, save the plot, and return the exit code.

    Raises:
        AggregationError: bad data or flags.
    """
    own = list(itertools.takewhile(lambda arg: arg != "--", argv))
    args, flags = _parser().parse_args(own), argv[len(own) + 1 :]
    layout = _layout(flags)
    twice = 2 * layout.micro_batch_size
    size = 1 if layout.global_batch_size % twice else twice
    against = args.against or f"--micro-batch-size {size}"
    other = _layout([*flags, *shlex.split(against)])
    if other.global_batch_size != layout.global_batch_size:
        raise OptionError("--against has another --global-batch-size; expected the same step")
    number = max(1024, layout.global_batch_size) if args.samples is None else args.samples
    given = rows_of(args.file, number) if args.file else read(flags, number)
    cp_sizes = layout.context_parallel_size, other.context_parallel_size
    with contextlib.redirect_stdout(sys.stderr):  # what Megatron says
        rows = Rows.of(_with_progress(given, number), layout.global_batch_size, cp_sizes)
    active_SC, tokens_S = rows.tokens_SC > 0, rows.tokens_SC.sum(1)
    if not bool(active_SC.any()):
        raise OptionError(
            "no step with loss tokens; expected at least one of --global-batch-size "
            f"{layout.global_batch_size} rows, see --samples"
        )
    stock = {"stock": rows.stock(layout), against: rows.stock(other)}
    first = int(rows.step_S[active_SC.any(1)][0])  # of those with loss tokens
    first_S = rows.step_S == first
    samples = [Sample(x) for x in tokens_S[first_S].tolist()]
    shown, _ = explain(samples, ("token_mean", "sample_mean"), None, None)
    if args.plot is not None:
        _draw(args.plot, samples, rows.tokens_SC[first_S], stock["stock"][first_S], shown)
        print(f"drawn: {args.plot}, of step {first + 1}", file=sys.stderr)
    steps = int(rows.step_S[-1]) + 1
    one, two = (x[active_SC] for x in stock.values())
    parts = [_parts(rows, x_SC) for x_SC in stock.values()]
    moved = float(50 * (parts[0] - parts[1]).abs().sum() / rows.tokens_N.count_nonzero())
    quotient = float(torch.maximum(one / two, two / one).max())
    same_rows = layout.micro_batch_size == other.micro_batch_size
    exception = "" if same_rows else " but microbatch_mean"
    lines = [
        f"Stock Megatron gives a token {_span(one)} times the weight that token_mean gives it,",
        f"steps: {steps:,}, of {layout.global_batch_size:,} rows; samples: {len(tokens_S):,}; "
        f"loss tokens: {float(tokens_S.sum()):,.15g}",
        f"stock: w_t = m_t / {layout.divisor}",
        *(f"{mode}: {x.formula} in step {first + 1}" for mode, x in shown.items()),
        "",
        "Weight of a token, as a multiple of token_mean, for samples of so many loss tokens",
        aligned(_by_length(tokens_S, active_SC, stock)),
        "",
        f"Stock Megatron with {against}: {moved:.1f} % of the weight is on other tokens,",
        f"and a token's weight changes by a factor of up to {quotient:.2f}.",
        f"Every mode of --loss-aggregation{exception} gives a token the same weight in both.",
    ]
    print(*lines, sep="\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron_loss_agg explain --data",
        usage="%(prog)s [FILE] [options] -- [SCRIPT] FLAG ...",
        description="Show what stock Megatron weighs the tokens of a run's own data by. Megatron "
        "reads it from the run's flags; or a line of FILE is a row, as a length or a JSON object.",
        allow_abbrev=False,
    )
    parser.add_argument("file", metavar="FILE", nargs="?", help="lengths or loss masks")
    parser.add_argument("--samples", metavar="N", type=int, help="read N rows (default: 1024)")
    parser.add_argument(
        "--against", metavar="FLAGS", help="of another layout (default: twice --micro-batch-size)"
    )
    parser.add_argument("--plot", metavar="FILE", help="draw one step (png, svg, pdf)")
    return parser


def _layout(flags: Sequence[str]) -> Layout:
    """That of Megatron's flags; others are ignored."""
    parser = argparse.ArgumentParser("megatron_loss_agg explain --data", allow_abbrev=False)
    parser.add_argument("--micro-batch-size", type=int, default=0)
    parser.add_argument("--global-batch-size", type=int, default=0)
    parser.add_argument("--context-parallel-size", type=int, default=1)
    parser.add_argument("--calculate-per-token-loss", action="store_true")
    parser.add_argument("--rampup-batch-size", nargs="+")
    given = vars(parser.parse_known_args(flags)[0])
    if given.pop("rampup_batch_size"):
        raise OptionError(
            "--rampup-batch-size, by which steps differ in size; expected one step's size: drop it "
            "after --, and give --global-batch-size"
        )
    layout = Layout(**given)
    if min(layout[:3]) < 1 or layout.global_batch_size % layout.micro_batch_size:
        raise OptionError(
            f"--micro-batch-size {layout.micro_batch_size}, --global-batch-size "
            f"{layout.global_batch_size} after --; expected the run's own, the first a divisor"
        )
    return layout


def _parts(rows: Rows, weight_SC: Tensor) -> Tensor:
    """How the weight of each step is divided between samples and ranks: 1 in sum."""
    part_SC = weight_SC * rows.tokens_SC
    of_step = torch.bincount(rows.step_S, part_SC.sum(1)).clamp(min=1e-300)
    return part_SC / of_step[rows.step_S, None]


def _with_progress(rows: Iterable[Microbatch], number: int) -> Iterable[Microbatch]:
    with contextlib.suppress(ImportError):
        from tqdm import tqdm

        return tqdm(rows, total=number, unit=" rows", disable=None)  # None: shown on a terminal
    return rows


def _by_length(
    tokens_S: Tensor, active_SC: Tensor, weights: Mapping[str, Tensor]
) -> dict[str, list[str]]:
    """Columns: of each quarter of the samples, by length, the least and largest weights."""
    lengths = tokens_S[tokens_S > 0].sort().values
    cuts = lengths[[len(lengths) * k // 4 for k in range(4)]].unique()
    quarter_S = torch.bucketize(tokens_S, cuts, right=True)  # 0: without tokens
    members = [quarter_S == k for k in range(1, len(cuts) + 1)]
    columns = {"loss tokens": [_span(tokens_S[own_S], ",.10g") for own_S in members]}
    columns["samples"] = [f"{int(own_S.sum()):,}" for own_S in members]
    for mode, x_SC in weights.items():
        columns[mode] = [_span(x_SC[own_S][active_SC[own_S]]) for own_S in members]
    return columns


def _span(x: Tensor, form: str = ".2f") -> str:
    return " to ".join(dict.fromkeys(format(float(end), form) for end in x.aminmax()))


def _draw(
    path: str,
    samples: Sequence[Sample],
    tokens_SC: Tensor,
    stock_SC: Tensor,
    shown: Mapping[str, Shares],
) -> None:
    """One step; of stock Megatron each sample's mean weight."""
    from megatron_loss_agg.explain.picture import draw

    tokens_S = tokens_SC.sum(1)
    mean_S = (stock_SC * tokens_SC).sum(1) / tokens_S.clamp(min=1e-300) / tokens_S.sum()
    like_stock = LossAggregation(mode="microbatch_mean")
    draw(path, samples, {"stock": Shares(like_stock, tokens_S, mean_S, formula=""), **shown})
