"""Scripts as one process a rank, through the launcher or by themselves."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODE = ("--loss-aggregation", "sample_mean")
LAUNCHER = ("-m", "megatron_loss_agg", "--cpu")
NO_EFFECT = "HostError: --loss-aggregation sample_mean ha[sd] no effect: "
PATCHED = """
from megatron_loss_agg.mcore import cpu

cpu.enable()
if __name__ == "__main__":
    from megatron_loss_agg.mcore.install import install

    install()
"""


def run(
    folder: Path,
    script: str | Path,
    *flags: str,
    ranks: int = 1,
    starter: tuple[str, ...] = LAUNCHER,
) -> tuple[list[int], str]:
    """Start ``script``, a path or its text; return each rank's exit code, and all that was said."""
    if isinstance(script, str):
        (folder / "script.py").write_text(script)
        script = folder / "script.py"
    # What torchrun sets for every rank; torchrun itself does not tell the ranks' exit codes.
    shared = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _free_port(), "WORLD_SIZE": str(ranks)}
    logs = [(folder / f"rank{rank}.log") for rank in range(ranks)]  # pipes could fill up
    processes = []
    for rank, log in enumerate(logs):
        with log.open("w") as said:
            process = subprocess.Popen(
                [sys.executable, *starter, str(script), *flags],
                env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=said,
                stderr=subprocess.STDOUT,
            )
        processes.append(process)
    try:
        codes = [process.wait(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return codes, "".join(log.read_text() for log in logs)


def _free_port() -> str:
    """Not one that the system gives by itself: another test could take that before rank 0 does."""
    while True:
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", random.randrange(20_000, 32_000)))
            return str(listener.getsockname()[1])


def refusals(said: str) -> list[str]:
    """The launcher's lines."""
    return [line for line in said.splitlines() if line.startswith("megatron_loss_agg: ")]
