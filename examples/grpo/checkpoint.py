"""Checkpoints, from which a run goes on to the same bits."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def save(folder: Path, step: int, state: dict[str, Any]) -> None:
    """Write ``state`` after ``step`` steps. Every rank must call.

    Rank 0 writes for all: without tensor or pipeline parallelism, and without a distributed
    optimizer, every rank holds the same. A file appears whole or not at all.
    """
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        target = _path(folder, step)
        torch.save({"step": step, **state}, target.with_suffix(".part"))
        os.replace(target.with_suffix(".part"), target)
    dist.barrier()


def load(folder: Path) -> dict[str, Any]:
    """The newest state in ``folder``.

    Raises:
        FileNotFoundError: there is none.
    """
    found = sorted(folder.glob("step_*.pt"))
    if not found:
        raise FileNotFoundError(f"no checkpoint in {folder}; expected step_*.pt: drop --resume")
    state: dict[str, Any] = torch.load(found[-1], map_location="cpu", weights_only=True)
    return state


def _path(folder: Path, step: int) -> Path:
    return folder / f"step_{step:06d}.pt"
