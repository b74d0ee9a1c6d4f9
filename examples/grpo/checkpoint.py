"""Checkpoints: a resumed run gives bitwise identical results."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from examples.grpo.options import Options


def save(folder: Path, step: int, options: Options, state: dict[str, Any]) -> None:
    """Write ``state`` after ``step`` steps. Every rank must call.

    Rank 0 writes for all ranks: without tensor or pipeline parallelism, and without a distributed
    optimizer, every rank has the same state. A file appears complete or not at all.
    """
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / f"step_{step:06d}.pt"
        unfinished = target.with_suffix(".part")
        torch.save({**state, "step": step, "options": options.training()}, unfinished)
        os.replace(unfinished, target)
    dist.barrier()


def clear(folder: Path) -> None:
    """Remove the checkpoints of an earlier run, so that the new one cannot be resumed from them."""
    if dist.get_rank() == 0:
        for path in (*folder.glob("step_*.pt"), *folder.glob("step_*.part")):
            path.unlink()
    dist.barrier()


def load(folder: Path, options: Options) -> dict[str, Any]:
    """The newest state in ``folder``.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is from a run with other flags.
    """
    checkpoints = sorted(folder.glob("step_*.pt"))
    if not checkpoints:
        raise FileNotFoundError(f"no checkpoint in {folder}; expected step_*.pt: drop --resume")
    state: dict[str, Any] = torch.load(checkpoints[-1], map_location="cpu", weights_only=True)
    before, now = state["options"], options.training()
    changed = [
        f"{name} {before.get(name)!r} -> {value!r}"
        for name, value in now.items()
        if before.get(name) != value
    ]
    if changed:
        raise ValueError(
            f"{checkpoints[-1]} is of a run with other flags ({', '.join(changed)}); expected the same: "
            "give those, or start anew without --resume"
        )
    return state
