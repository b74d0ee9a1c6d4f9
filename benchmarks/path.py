"""The way of one training call through the package, counted as it runs.

    python -m benchmarks.path [--show]

A tiny GPT trains on rows in one process, on the real Megatron-Core; the last of some steps is
watched. Counted are the functions of the package that run (properties, too; no lambdas or generator
expressions), their files, their calls, the classes whose methods these are, and the moves: calls from
one file into another. The stand-in for a GPU is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import megatron_loss_agg
from benchmarks import megatron
from benchmarks.megatron import Training
from benchmarks.shapes import TINY, Step

PACKAGE = Path(megatron_loss_agg.__file__).parent
STEP = Step(microbatches=2, rows=2, length=16)
STEPS_BEFORE = 3
"""So that the watched one has none of the first step's checks."""
_OUTSIDE = ""
"""In place of a file: code that is not the package's."""


class Watch:
    """Follows the calls inside.

    Attributes:
        calls: of each function, by file and name.
        moves: by pairs of files.
        classes: their names.
    """

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()
        self.moves: Counter[tuple[str, str]] = Counter()
        self.classes: set[str] = set()
        self._files: list[str] = []  # of the functions that are running, the innermost last

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        sys.setprofile(self._follow)
        try:
            yield
        finally:
            sys.setprofile(None)

    @property
    def files(self) -> set[str]:
        return {file for file, _ in self.calls}

    def _follow(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            file = _file_of(frame)
            if file and not frame.f_code.co_name.startswith("<"):
                self._count(frame, file)
            self._files.append(file)
        elif event == "return" and self._files:
            self._files.pop()

    def _count(self, frame: FrameType, file: str) -> None:
        code = frame.f_code
        self.calls[file, getattr(code, "co_qualname", code.co_name)] += 1
        caller = next((x for x in reversed(self._files) if x), _OUTSIDE)
        if caller != file:
            self.moves[caller, file] += 1
        owner = type(frame.f_locals.get("self"))
        if owner.__module__.startswith(megatron_loss_agg.__name__):
            self.classes.add(owner.__name__)


def _file_of(frame: FrameType) -> str:
    path = Path(frame.f_code.co_filename)
    if not path.is_relative_to(PACKAGE):
        return _OUTSIDE
    file = path.relative_to(PACKAGE)
    return _OUTSIDE if "cpu" in file.parts else str(file)


def watched_step() -> Watch:
    """The Python calls of the hook in one step."""
    with megatron.groups():
        ddp, data = megatron.build(TINY, STEP.length), megatron.batches(TINY, STEP)
        training = Training(True, ddp, STEP, data)
        for _ in range(STEPS_BEFORE):
            training.run()
        watch = Watch()
        with watch.watching():
            training.run()
    return watch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--show", action="store_true", help="each function, and how often it ran")
    show = parser.parse_args().show
    watch = watched_step()
    if show:
        for (file, name), number in watch.calls.items():
            print(f"{number:4d} {file:32} {name}")
    both_ways = {pair for pair in watch.moves if pair[::-1] in watch.moves}
    print(
        f"a training call of {STEP.microbatches} microbatches of rows, one term, on one rank: "
        f"{len(watch.files)} files, {len(watch.calls)} functions, {watch.calls.total()} calls, "
        f"{watch.moves.total()} moves between files, of {len(watch.moves)} kinds, "
        f"{len(both_ways) // 2} pairs of files that call each other, {len(watch.classes)} classes"
    )


if __name__ == "__main__":
    main()
