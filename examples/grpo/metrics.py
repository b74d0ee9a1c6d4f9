"""The metrics of a run: a JSON line and TensorBoard scalars per step, and a progress bar."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

Metrics = dict[str, float]


class Log:
    """The metrics of a run, on disk and in a progress bar.

    Args:
        folder: for ``metrics.jsonl`` and ``tensorboard/``.
        start: the first step. Metrics of this and later steps are removed, since an earlier run may
            have continued after its last checkpoint.
        writes: True on the rank that writes; the others write nothing.
    """

    def __init__(self, folder: Path, start: int, writes: bool) -> None:
        self.writes = writes
        if not writes:
            return
        folder.mkdir(parents=True, exist_ok=True)
        self._lines = folder / "metrics.jsonl"
        earlier = [m for m in read(folder) if m["step"] < start] if start else []
        self._lines.write_text("".join(json.dumps(m) + "\n" for m in earlier))
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=start)

    def steps(self, start: int, stop: int) -> Iterator[int]:
        """``range(start, stop)`` behind a progress bar with the last metrics."""
        self._bar = progress("GRPO", start, stop, self.writes)
        return iter(self._bar)

    def write(self, step: int, metrics: Metrics) -> None:
        if not self.writes:
            return
        with self._lines.open("a") as lines:
            lines.write(json.dumps({"step": step, **metrics}) + "\n")
        for name, value in metrics.items():
            self._board.add_scalar(name, value, step)
        shown = {name: f"{metrics[name]:.2f}" for name in ("reward", "length")}
        self._bar.set_postfix(shown)

    def close(self) -> None:
        if self.writes:
            self._board.close()


def progress(name: str, start: int, stop: int, shown: bool) -> Any:
    """``range(start, stop)`` behind a progress bar."""
    return tqdm(range(start, stop), name, initial=start, total=stop, disable=not shown, unit="step")


def read(folder: Path) -> list[Metrics]:
    """All steps in ``folder``, in order."""
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
