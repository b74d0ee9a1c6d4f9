"""Scripts as one process a rank, through the launcher or by themselves.

Importing torch and Megatron takes most of a short run. So ranks are forked from a process that has
them imported, but where the test is about the imports or the end of a process.
"""

from __future__ import annotations

import contextlib
import os
import random
import runpy
import socket
import subprocess
import sys
import traceback
from pathlib import Path

from tests.host.harness import run_host_ranks

ROOT = Path(__file__).parents[2]
SETS_SCRIPT = Path(__file__).with_name("sets_script.py")
LENGTH = 32
SETS_FLAGS = f"""
    --num-layers 1 --hidden-size 16 --ffn-hidden-size 32 --num-attention-heads 2
    --position-embedding-type rope --attention-dropout 0 --hidden-dropout 0
    --seq-length {LENGTH} --max-position-embeddings {LENGTH}
    --micro-batch-size 1 --logging-level 40 --num-workers 0 --init-method-std 0.5
"""
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
    forked: bool = True,
) -> tuple[list[int], str]:
    """Start ``script``, a path or its text; return each rank's exit code, and all that was said."""
    if isinstance(script, str):
        (folder / "script.py").write_text(script)
        script = folder / "script.py"
    start = run_forked if forked else run_afresh
    logs = [folder / f"rank{rank}.log" for rank in range(ranks)]  # pipes could fill up
    codes = start([*starter, str(script), *flags], logs)
    return codes, "".join(log.read_text() for log in logs)


def run_forked(argv: list[str], logs: list[Path]) -> list[int]:
    """``python *argv`` on one rank for each log."""
    return run_host_ranks(_main, len(logs), argv, logs, timeout=240, initialized=False)


def _main(argv: list[str], logs: list[Path]) -> int:
    """One rank: its exit code."""
    with logs[int(os.environ["RANK"])].open("w") as said:
        for stream in (1, 2):
            os.dup2(said.fileno(), stream)
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # by --cpu, before it was forked
    is_module = argv[0] == "-m"
    sys.argv = argv[is_module:]
    sys.path.insert(0, str(Path(argv[0]).parent))  # replaced by the launcher
    code: object = 0
    try:
        (runpy.run_module if is_module else runpy.run_path)(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code if isinstance(code, int) else int(code is not None)


def run_afresh(argv: list[str], logs: list[Path]) -> list[int]:
    """As `run_forked`, in new processes."""
    # What torchrun sets for every rank; torchrun itself does not tell the ranks' exit codes.
    shared = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _free_port()}
    shared["WORLD_SIZE"] = str(len(logs))
    processes = []
    for rank, log in enumerate(logs):
        with log.open("w") as said:
            process = subprocess.Popen(
                [sys.executable, *argv],
                env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=said,
                stderr=subprocess.STDOUT,
            )
        processes.append(process)
    try:
        return [process.wait(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()


def _free_port() -> str:
    """Not one that the system gives by itself: another test could take that before rank 0 does."""
    while True:
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", random.randrange(20_000, 32_000)))
            return str(listener.getsockname()[1])


def tensorboard(folder: Path) -> dict[str, dict[int, float]]:
    """What is logged, by name and step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    return {  # the first of a step: the last step is evaluated again after the training
        tag: {event.step: event.value for event in reversed(events.Scalars(tag))}
        for tag in events.Tags()["scalars"]
    }


def refusals(said: str) -> list[str]:
    """The launcher's lines."""
    return [line for line in said.splitlines() if line.startswith("megatron_loss_agg: ")]
