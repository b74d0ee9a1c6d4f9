"""``python -m megatron_loss_agg explain``: the weight of each sample of a step.

Samples come from lists, from a file, or from a run's data. They are weighted by every mode, or with
``--data`` by stock Megatron. The answer is a text; for a step also a JSON object, and a picture.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

from megatron_loss_agg.aggregation import takes_divisor, words_in
from megatron_loss_agg.errors import OptionError
from megatron_loss_agg.explain.chats import OTHER_FORMAT, lines_of_chats
from megatron_loss_agg.explain.samples import (
    LISTS,
    Line,
    lines_of_file,
    lines_of_lists,
    read_rows,
    read_samples,
)
from megatron_loss_agg.explain.shares import ALL_MODES, shares_by_mode
from megatron_loss_agg.explain.show import draw, tables
from megatron_loss_agg.explain.stock import (
    WHOLE_MICROBATCHES,
    BatchFlags,
    Cells,
    StockRun,
    divides_by_whole_microbatch,
    in_words,
)
from megatron_loss_agg.microbatch import Microbatch
from megatron_loss_agg.turns import TURNS, Turns

__all__ = ["main"]

Read = Callable[[Sequence[str], int], Iterator[Microbatch]]
"""Maps Megatron's flags and a number to that many rows or packs of the run's training data."""


def main(argv: Sequence[str], read: Read) -> int:
    """Print the answer, save the picture, and return the exit code.

    Args:
        read: reads a run's training data, for ``--data``.

    Raises:
        AggregationError: bad input.
    """
    args, run_flags = _parse(argv)
    with contextlib.redirect_stdout(sys.stderr):  # output of Megatron and of tokenizers
        is_step = args.data is None
        answer = _explain_step(args) if is_step else _explain_run(args, run_flags, read)
    print(answer)
    return 0


def _explain_step(args: argparse.Namespace) -> str:
    """Weight the samples of one step by each mode, and draw the picture."""
    samples = read_samples(_lines(args), are_weighted=args.sample_weights is not None)
    modes = args.modes or ALL_MODES
    shares, left_out = shares_by_mode(
        samples, modes, args.divisor, args.empty, args.levels, args.sample_weights
    )
    if args.plot is not None:
        draw(args.plot, shares)
        print(f"drawn: {args.plot}", file=sys.stderr)
    if not args.json:
        return _with_note(args, tables(samples, shares, left_out))
    numbers = {
        "samples": [vars(sample) for sample in samples],
        "modes": {
            name: {
                "share": s.fractions.tolist(),
                "weight_per_token": s.per_token.tolist(),
                "relative_to_token_mean": s.relative_to_token_mean.tolist(),
                "sum_of_weights": s.total,
                "formula": s.formula,
            }
            for name, s in shares.items()
        },
        "left_out": left_out,
    }
    return json.dumps(numbers)


def _explain_run(args: argparse.Namespace, run_flags: Sequence[str], read: Read) -> str:
    """Weight the tokens of a run's data as stock Megatron does."""
    if not run_flags:
        raise OptionError(
            "explain --data must have the run's own flags after --, got none. Add them: at least "
            "-- --micro-batch-size N --global-batch-size N."
        )
    flags = BatchFlags.parse(run_flags)
    first_step = flags.schedule[0][1]
    num_rows = max(1024, first_step) if args.samples is None else args.samples
    if num_rows < first_step:
        raise OptionError(
            f"--samples must be at least --global-batch-size, got {num_rows} and {first_step}. Raise "
            "--samples, or drop it."
        )
    if args.chats and flags.seq_length < 1:
        raise OptionError(
            f"--chats needs the length of a row, got --seq-length {flags.seq_length}. Add "
            "--seq-length after --."
        )
    turn_flags = [x for x in run_flags if x.startswith("--loss-aggregation-sft-turn")]
    if args.chats and turn_flags:
        raise OptionError(
            f"the turns of --chats must be chosen before --, got {turn_flags[0]} after it. Write "
            "--sft-turns or --sft-turn-field there, and remove the flag."
        )
    is_split = flags.context_parallel_size > 1 and not flags.calculate_per_token_loss
    has_whole_parts = is_split and divides_by_whole_microbatch()
    if has_whole_parts:
        flags = replace(flags, context_parallel_size=1)
    if args.data or args.chats:
        lines = islice(_lines(args, flags.seq_length), num_rows)
        rows = read_rows(lines, is_split=flags.context_parallel_size > 1)
    else:
        rows = read(run_flags, num_rows)
    cells = Cells.read(rows, flags)
    answer = in_words(cells, StockRun.weigh(flags, cells))
    return _with_note(args, f"{answer}\n\n{WHOLE_MICROBATCHES}" if has_whole_parts else answer)


def _with_note(args: argparse.Namespace, text: str) -> str:
    return f"{text}\n\n{OTHER_FORMAT}" if args.chats else text


def _lines(args: argparse.Namespace, seq_length: int | None = None) -> Iterator[Line]:
    """The lines of the source that was named; with ``seq_length``, chats become rows."""
    if args.lengths is not None:
        lists = {name: getattr(args, name) for name in LISTS}
        return iter(lines_of_lists(args.lengths, {k: x for k, x in lists.items() if x is not None}))
    if args.chats is not None:
        turns = Turns(args.sft_turns or "all", args.sft_turn_field)
        return lines_of_chats(args.chats, args.tokenizer, seq_length, turns, args.sft_weight_field)
    if args.jsonl is not None:
        return lines_of_file("--jsonl", args.jsonl)
    return lines_of_file("--data", args.data)


def _parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options, and the run's flags after ``--``.

    Raises:
        OptionError: unknown options, no source of samples or several, or options without effect.
    """
    end = argv.index("--") if "--" in argv else len(argv)
    args, unknown = _parser().parse_known_args(argv[:end])
    if unknown:
        raise OptionError(
            f"the options of explain must be from explain --help, got {unknown[0]}. Correct it, or "
            "put -- in front of a run's own script and flags."
        )
    for name in ("lengths", *LISTS, "modes", "levels"):
        if (words := getattr(args, name)) is not None:
            setattr(args, name, words_in(" ".join(words)))
    options = ("lengths", "jsonl", "chats", "data")
    sources = [name for name in options if getattr(args, name) is not None]
    if sources == ["chats", "data"] and not args.data:
        sources = ["chats"]  # each chat is a row of the run
    if len(sources) != 1:
        raise OptionError(
            "explain must have one source of samples, got "
            f"{' and '.join(f'--{name}' for name in sources) or 'none'}. Give one of --lengths, "
            "--jsonl, --chats and --data."
        )
    if (args.chats is None) != (args.tokenizer is None):
        missing = "--tokenizer" if args.tokenizer is None else "--chats"
        raise OptionError(
            f"--chats and --tokenizer must be given together, got no {missing}. Add it."
        )
    is_run, run_flags = args.data is not None, list(argv[end + 1 :])
    if run_flags and not is_run:
        raise OptionError(
            f"a run's script and flags after -- need --data, got {run_flags[0]} without it. Add --data, "
            "or remove what is after --."
        )
    has_effect = {
        **dict.fromkeys(LISTS, args.lengths is not None),
        **dict.fromkeys(("divisor", "levels", "empty", "modes", "json", "plot"), not is_run),
        "sample_weights": not is_run,
        "samples": is_run,
        **dict.fromkeys(("sft_turns", "sft_turn_field"), args.chats is not None),
        "sft_weight_field": args.chats is not None and not is_run,
    }
    for name in has_effect:
        if getattr(args, name) is not None and not has_effect[name]:
            source = "data" if is_run else sources[0]
            raise OptionError(
                f"--{name.replace('_', '-')} must be used with a source other than --{source}, got "
                "both. Remove one of them."
            )
    if args.modes is not None:
        takes = {
            "levels": "nested_mean" in args.modes,
            "divisor": any(map(takes_divisor, args.modes)),
        }
        for name in takes:
            if getattr(args, name) is not None and not takes[name]:
                raise OptionError(
                    f"--{name} needs a mode that takes it, got --modes {','.join(args.modes)}. Remove "
                    f"--{name}, or add such a mode."
                )
    if args.sft_weight_field and args.sample_weights is None:
        raise OptionError(
            "--sft-weight-field needs --sample-weights count or skip, got none. Add it."
        )
    return args, run_flags


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron_loss_agg explain",
        usage="%(prog)s (--lengths N ... | --jsonl FILE | --chats FILE | --data [FILE]) [options] "
        "[-- SCRIPT FLAG ...]",
        description="Show each sample's share of the gradient, and the weight of its tokens, under "
        "each mode of loss aggregation; or with --data stock Megatron's weights of the tokens of a "
        "run's own data.",
        allow_abbrev=False,
    )
    # The words of a list are separated by commas or spaces.
    sources = parser.add_argument_group("where samples come from")
    sources.add_argument(
        "--lengths", metavar="N", nargs="+", help="loss tokens of each sample of a step"
    )
    for name, unit in LISTS.items():
        sources.add_argument(
            f"--{name}",
            metavar="X",
            nargs="+",
            help=f"with --lengths: {unit} of each sample; equal values mean the same one, on any "
            "rank",
        )
    sources.add_argument(
        "--jsonl",
        metavar="FILE",
        help='the samples as lines {"length": n or "loss_mask": [...], "prompt": any, '
        '"rollout": any, "dataset": any, "microbatch": any, "rank": any, "weight": n}; '
        "all but the first are optional",
    )
    sources.add_argument(
        "--chats",
        metavar="FILE",
        help='chats as lines {"messages": [{"role": ..., "content": ...}, ...]}; the turns of the '
        "assistant carry loss",
    )
    sources.add_argument(
        "--tokenizer",
        metavar="NAME",
        help="with --chats: a folder or name of a tokenizer with a chat template, for transformers "
        "to load",
    )
    sources.add_argument(
        "--sft-turns",
        choices=TURNS,
        help="with --chats: which of the assistant's turns carry loss; each: with a mask whose sum "
        "is 1 (default: all)",
    )
    sources.add_argument(
        "--sft-turn-field",
        metavar="NAME",
        help="with --chats: the field of the assistant's messages that says whether they carry "
        "loss",
    )
    sources.add_argument(
        "--sft-weight-field",
        metavar="NAME",
        help="with --chats, without --data: the field of a line that holds its weight",
    )
    sources.add_argument(
        "--data",
        metavar="FILE",
        nargs="?",
        const="",
        help="the rows of a run with the flags after --: read by Megatron from these flags; or "
        "lines of FILE, each a length or an object as in --jsonl; or of --chats",
    )
    modes = parser.add_argument_group("modes, without --data")
    modes.add_argument(
        "--modes",
        metavar="MODE",
        nargs="+",
        help="modes or presets (default: all modes but custom)",
    )
    modes.add_argument("--divisor", metavar="D", type=float, help="the D of 'constant' and 'sum'")
    modes.add_argument(
        "--json", action="store_true", default=None, help="print a JSON object instead of text"
    )
    modes.add_argument("--plot", metavar="FILE", help="draw weights and shares (png, svg, pdf)")
    modes.add_argument(
        "--levels",
        metavar="UNIT",
        nargs="+",
        help="the path of 'nested_mean', from outside to inside, such as prompt,sample",
    )
    modes.add_argument(
        "--empty",
        choices=("count", "skip"),
        help="whether groups without tokens count (default: count, or the preset's choice)",
    )
    modes.add_argument(
        "--sample-weights",
        choices=("count", "skip"),
        help='whether weights of samples count in the denominators; each line then has a "weight"',
    )
    stock = parser.add_argument_group("stock Megatron, with --data")
    stock.add_argument("--samples", metavar="N", type=int, help="read N rows (default: 1024)")
    return parser
