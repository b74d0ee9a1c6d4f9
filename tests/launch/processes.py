"""Scripts as one process a rank, and command lines of the package.

Importing torch and Megatron takes most of a short run. So ranks are forked from a process that has
them imported, but where the test is about the imports or the end of a process.
"""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from megatron_loss_agg.__main__ import main
from megatron_loss_agg.launch.flags import VARIABLE
from tests.distributed import run_ranks
from tests.host.harness import run_host_ranks

ROOT = Path(__file__).parents[2]
MODE = ("--loss-aggregation", "sample_mean")
LAUNCHER = ("-m", "megatron_loss_agg", "--cpu")


def run(
    folder: Path,
    script: str | Path,
    *flags: str,
    ranks: int = 1,
    starter: tuple[str, ...] = LAUNCHER,
) -> tuple[list[int], str]:
    """Start ``script``, a path or its text; return each rank's exit code, and the whole log."""
    if isinstance(script, str):
        (folder / "script.py").write_text(script)
        script = folder / "script.py"
    argv = [*starter, str(script), *flags]
    codes = run_host_ranks(_main, ranks, argv, folder, initialized=False)
    return codes, "".join((folder / f"rank{rank}.log").read_text() for rank in range(ranks))


def _main(argv: list[str], folder: Path) -> int:
    """``python *argv`` on one rank: its exit code."""
    with (folder / f"rank{os.environ['RANK']}.log").open("w") as said:
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


class Answer(NamedTuple):
    """The exit code and the output of a command line."""

    code: int
    said: str
    complained: str


def answer(line: str) -> Answer:
    """To ``python -m megatron_loss_agg`` with the arguments ``line``.

    Those before a bar are flags in the environment; @ stands for ``--loss-aggregation``.
    """
    held, _, arguments = line.replace("@", "--loss-aggregation").rpartition("|")
    os.environ[VARIABLE] = held
    said, complained = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(complained):
        code = main(arguments.split())
    return Answer(code, said.getvalue(), complained.getvalue())


def answers(lines: Sequence[str], with_megatron: bool = True) -> list[Answer]:
    """To several command lines, one after another in one process."""
    run = run_host_ranks if with_megatron else run_ranks
    (results,) = run(_answers, 1, [*lines], with_megatron, initialized=False)
    return list(results)


def _answers(lines: list[str], with_megatron: bool) -> list[Answer]:
    os.chdir(ROOT)
    if not with_megatron:
        sys.modules["megatron"] = None  # so importing it fails
    return [answer(line) for line in lines]


def run_afresh(*argv: str) -> subprocess.CompletedProcess[str]:
    """``python *argv`` in a new process, in the repository's root."""
    return subprocess.run(
        [sys.executable, *argv],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=900,
    )


def refusals(said: str) -> list[str]:
    """The launcher's lines."""
    return [line for line in said.splitlines() if line.startswith("megatron_loss_agg: ")]
