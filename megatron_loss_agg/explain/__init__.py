"""``python -m megatron_loss_agg explain``: the weight of each sample under each mode."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from megatron_loss_agg.errors import OptionError
from megatron_loss_agg.explain import stock
from megatron_loss_agg.explain.chats import add_chats, lines_of_chats
from megatron_loss_agg.explain.samples import LISTS, Sample, from_jsonl, from_lists, from_rows
from megatron_loss_agg.explain.shares import ALL_MODES, explain
from megatron_loss_agg.explain.show import as_json, as_text, draw, shares_by_sample, write_csv

__all__ = ["main"]


def main(argv: Sequence[str], read: stock.Read) -> int:
    """Print the table, save the plot, and return the exit code; ``read`` is for ``--data``.

    Raises:
        AggregationError: bad input.
    """
    if argv[:1] == ["--data"]:
        return stock.main(argv[1:], read)
    args = _parser().parse_args(argv)
    samples = _samples(args)
    modes = ALL_MODES if args.modes is None else [mode.strip() for mode in args.modes.split(",")]
    shown, left_out = explain(samples, modes, args.divisor, args.empty, args.levels)
    if args.plot is not None:
        draw(args.plot, samples, shown)
        print(f"drawn: {args.plot}", file=sys.stderr)
    if args.csv is not None:
        write_csv(args.csv, shares_by_sample(samples, shown))
        print(f"written: {args.csv}", file=sys.stderr)
    to_text = as_json if args.json else as_text
    try:
        print(to_text(samples, shown, left_out), flush=True)
    except BrokenPipeError:  # closed by the reader, such as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _samples(args: argparse.Namespace) -> list[Sample]:
    """Those of the lists or of the file.

    Raises:
        AggregationError: they cannot be read, or lists stand beside a file.
    """
    lists = {name: getattr(args, name) for name in LISTS}
    if args.lengths is not None:
        return from_lists(args.lengths, **lists)
    flag, path = ("--jsonl", args.jsonl) if args.jsonl is not None else ("--chats", args.chats)
    for name, values in lists.items():
        if values is not None:
            raise OptionError(
                f"{flag} takes no --{name}, got both. Put the values on the file's lines."
            )
    if flag == "--jsonl":
        return from_jsonl(path)
    return from_rows(flag, path, lines_of_chats(path, args.tokenizer))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron_loss_agg explain",
        description="Show each sample's share of the gradient, and the weight of its tokens, under "
        "each mode of loss aggregation. Of the data of a run: explain --data --help",
        allow_abbrev=False,
    )
    step = parser.add_mutually_exclusive_group(required=True)
    step.add_argument("--lengths", metavar="N,N,...", help="loss tokens of each sample of a step")
    step.add_argument(
        "--jsonl",
        metavar="FILE",
        help='the samples as lines {"length": n or "loss_mask": [...], "prompt": any, '
        '"rollout": any, "dataset": any, "microbatch": any, "rank": any}; '
        "all but the first are optional",
    )
    add_chats(step, parser)
    for name, unit in LISTS.items():
        parser.add_argument(
            f"--{name}",
            metavar="X,X,...",
            help=f"{unit} of each sample; equal ones are one, on any rank",
        )
    parser.add_argument("--divisor", metavar="D", type=float, help="the D of 'constant' and 'sum'")
    parser.add_argument(
        "--levels",
        metavar="UNIT,UNIT,...",
        help="the path of 'nested_mean', from outside to inside, such as prompt,sample",
    )
    parser.add_argument(
        "--empty",
        choices=("count", "skip"),
        help="whether groups without tokens count (default: count, or as the preset has it)",
    )
    parser.add_argument(
        "--modes", metavar="MODE,...", help="modes or presets (default: all modes but custom)"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object, not a table")
    parser.add_argument("--plot", metavar="FILE", help="draw both tables (png, svg, pdf)")
    parser.add_argument("--csv", metavar="FILE", help="write a line for each mode and sample")
    return parser
