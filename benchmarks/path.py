"""The code of the package that an ordinary training call runs, counted by a trace.

    python -m benchmarks.path [--show]

A tiny GPT trains on rows on two data-parallel ranks, on the real Megatron-Core. The last of several
steps, an ordinary one, is traced on the first rank. The trace counts the functions of the package
that run (including properties, without lambdas and generator expressions), their files, their
calls, the classes of the methods, and the moves: calls from one file into another. The stand-in for
a GPU is left out.

It also counts the lines that run, as a share of the code of the entered files. A line counts if it
has instructions of a function's body: not the ``def`` line, a docstring, or the top level of a
module or class; a statement over several lines may count several times. The other lines are code
for rarer runs that is in everybody's way. ``--show`` lists them by file.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import multiprocessing
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch.distributed as dist

import megatron_loss_agg
from benchmarks import megatron
from benchmarks.megatron import Training
from benchmarks.results import Results
from benchmarks.shapes import TINY, Step

PACKAGE = Path(megatron_loss_agg.__file__).parent
STEP = Step(microbatches=2, rows=2, length=16)
RANKS = 2
STEPS_BEFORE = 3
"""Number of steps before the traced one, since the first step has more checks."""
_OUTSIDE = ""
"""Stands for the file of code outside the package."""


class Watch:
    """Traces calls inside a context.

    Attributes:
        calls: numbers of calls by file and function.
        moves: numbers of moves by pair of files.
        classes: names of classes with a method that ran.
        lines: the lines that ran, by file.
    """

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()
        self.moves: Counter[tuple[str, str]] = Counter()
        self.classes: set[str] = set()
        self.lines: defaultdict[str, set[int]] = defaultdict(set)
        self._files: list[str] = []  # files of the running functions, innermost last

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(None)

    @property
    def files(self) -> list[str]:
        return sorted({file for file, _ in self.calls})

    def share_of_lines(self) -> float:
        """The share of the code of all entered files that ran."""
        code = {file: code_lines(PACKAGE / file) for file in self.files}
        ran = sum(len(self.lines[file] & lines) for file, lines in code.items())
        return ran / sum(map(len, code.values()))

    def _enter(self, frame: FrameType, _event: str, _argument: object) -> Any:
        file = _package_file(frame)
        if file == _OUTSIDE:
            return None
        if not frame.f_code.co_name.startswith("<"):
            self._count(frame, file)
        self._files.append(file)
        return self._follow

    def _follow(self, frame: FrameType, event: str, _argument: object) -> Any:
        if event == "line":
            self.lines[_package_file(frame)].add(frame.f_lineno)
        elif event == "return":
            self._files.pop()
        return self._follow

    def _count(self, frame: FrameType, file: str) -> None:
        code = frame.f_code
        self.calls[file, getattr(code, "co_qualname", code.co_name)] += 1
        caller = self._files[-1] if self._files else _OUTSIDE
        if caller != file:
            self.moves[caller, file] += 1
        owner = type(frame.f_locals.get("self"))
        if owner.__module__.startswith(megatron_loss_agg.__name__):
            self.classes.add(owner.__name__)


def code_lines(file: Path) -> set[int]:
    """The lines with instructions of the bodies of a file's functions."""
    lines = set()
    for code in _functions(compile(file.read_text(encoding="utf-8"), file, "exec")):
        numbers = {number for _, _, number in code.co_lines() if number}
        is_expression = code.co_name.startswith("<")
        lines |= numbers if is_expression else numbers - {code.co_firstlineno}
    return lines


def _functions(code: CodeType) -> Iterator[CodeType]:
    """All functions inside, at any depth."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            if constant.co_flags & inspect.CO_OPTIMIZED:  # not a class body
                yield constant
            yield from _functions(constant)


def _package_file(frame: FrameType) -> str:
    path = Path(frame.f_code.co_filename)
    if not path.is_relative_to(PACKAGE):
        return _OUTSIDE
    file = path.relative_to(PACKAGE)
    return _OUTSIDE if "cpu" in file.parts else str(file)


def watched_step() -> Watch:
    """The Python calls of the hook in one step, on the first of several data-parallel ranks."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with multiprocessing.get_context("spawn").Pool(RANKS) as pool:
        ranks = pool.starmap(_watch_on_rank, [(x, store.port) for x in range(RANKS)], chunksize=1)
    return ranks[0]


def _watch_on_rank(rank: int, port: int) -> Watch:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), STORE_PORT=str(port))
    with megatron.groups():
        ddp, data = megatron.build(TINY, STEP.length), megatron.batches(TINY, STEP)
        training = Training(True, ddp, STEP, data)
        for _ in range(STEPS_BEFORE):
            training.run()
        watch = Watch()
        with watch.watching():
            training.run()
    return watch


def measure(results: Results) -> None:
    watch = watched_step()
    where = f"ordinary step, {STEP.microbatches} microbatches of rows"
    results.add("entered files", where, len(watch.files), "files", "entered_files")
    results.add("entered functions", where, len(watch.calls), "functions")
    rare = 1 - watch.share_of_lines()
    results.add("lines of these files that do not run", where, rare, "of all", "rare_lines")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--show", action="store_true", help="each function, and what does not run")
    show = parser.parse_args().show
    watch = watched_step()
    if show:
        _show(watch)
    both_ways = {pair for pair in watch.moves if pair[::-1] in watch.moves}
    print(
        f"a training call of {STEP.microbatches} microbatches of rows, one term, on each of two ranks: "
        f"{len(watch.files)} files, {len(watch.calls)} functions, {watch.calls.total()} calls, "
        f"{watch.moves.total()} moves between files, of {len(watch.moves)} kinds, "
        f"{len(both_ways) // 2} pairs of files that call each other, {len(watch.classes)} classes; "
        f"{watch.share_of_lines():.1%} of the code of these files"
    )


def _show(watch: Watch) -> None:
    for (file, name), number in watch.calls.items():
        print(f"{number:4d} {file:32} {name}")
    for file in watch.files:
        lines = code_lines(PACKAGE / file)
        ran = watch.lines[file] & lines
        print(f"{len(ran):4d} of {len(lines):4d} lines of {file}; not {_ranges(lines, ran)}")


def _ranges(lines: set[int], ran: set[int]) -> str:
    """The lines that did not run, with consecutive lines as one range."""
    ranges = []
    for did_run, neighbours in groupby(sorted(lines), key=lambda line: line in ran):
        first, *_, last = [*neighbours] * 2
        if not did_run:
            ranges.append(f"{first}-{last}" if first != last else f"{first}")
    return ", ".join(ranges)


if __name__ == "__main__":
    main()
