"""Runs a part of the GPU script in new processes, one for each rank, with a time limit."""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.parts import Part
from benchmarks.results import CannotRun, Results

MIN_SECONDS = 10.0  # a part with less time left is not started
OUR_PACKAGES = ("benchmarks", "megatron_loss_agg", "tests")


def run(name: str, part: Part, dry: bool, seconds: float, folder: Path) -> dict[str, Any]:
    """The part's result, even if it failed; ``seconds`` may be less than its limit."""
    begin, path = time.monotonic(), folder / f"{name}.json"
    path.unlink(missing_ok=True)
    rows: dict[str, Any] = {"figures": [], "could_not_run": [], "failed": []}
    seconds, num_gpus = min(seconds, part.seconds), torch.cuda.device_count()
    failure: str | None = None
    if not dry and num_gpus < part.ranks:
        rows["could_not_run"].append(
            {"what": name, "reason": f"needs {part.ranks} GPUs; found {num_gpus}"}
        )
    elif seconds < MIN_SECONDS:
        failure = "no time was left for it"
    else:
        failure = _processes(name, part, dry, seconds, folder)
    if path.exists():
        rows.update(json.loads(path.read_text(encoding="utf-8")))
    if failure is not None:
        rows["failed"].append({"what": name, "reason": failure})
    return {**rows, "seconds": round(time.monotonic() - begin, 1)}


def _processes(name: str, part: Part, dry: bool, seconds: float, folder: Path) -> str | None:
    """Run the part's ranks; return a failure in words, or None."""
    # Hold it here, on a port from the system, so that no other process takes it before rank 0 does.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    arguments = [name, part.function, str(int(dry)), str(seconds), str(folder)]
    command = [sys.executable, "-m", "benchmarks.gpu.runner", *arguments]
    processes = []
    for rank in range(part.ranks):
        variables = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": part.ranks,
            "STORE_PORT": store.port,
        }
        environment = {**os.environ, **{key: str(value) for key, value in variables.items()}}
        options: Any = {"env": environment, "start_new_session": True}
        with open(folder / f"{name}.{rank}.log", "wb") as log:
            processes.append(subprocess.Popen(command, stdout=log, stderr=log, **options))
    deadline = time.monotonic() + seconds
    while None in (codes := [p.poll() for p in processes]) and not any(codes):
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    for p in processes:
        if p.returncode is None:
            os.killpg(p.pid, signal.SIGKILL)
            p.wait()
    see = f"; see {folder / name}.*.log"
    if any(codes):
        return f"its processes ended with {codes}{see}"
    return f"still running after {seconds:.0f} s, and was killed{see}" if None in codes else None


def main() -> None:
    """One rank of a part."""
    name, function, dry, seconds, folder = sys.argv[1:]
    faulthandler.dump_traceback_later(0.95 * float(seconds))  # where it hangs, before it is killed
    rank = int(os.environ["RANK"])
    path = Path(folder) / (f"{name}.json" if rank == 0 else f"{name}.{rank}.json")
    if dry == "1":
        torch.set_num_threads(1)
        results = Results(path, quick=True)
    else:
        results = Results(path, clock=_clock)
    module, _, attribute = function.partition(":")
    try:
        getattr(importlib.import_module(module), attribute)(results, float(seconds))
    except CannotRun as reason:
        results.could_not_run(name, str(reason))
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] in OUR_PACKAGES:
            raise
        results.could_not_run(name, f"{error}: put the wheels that are missing into WHEELS")
    except Exception as error:
        traceback.print_exc()
        text = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        results.fail(name, f"{text}; see {Path(folder) / name}.{rank}.log")
        if rank:  # the results of other ranks are not read: they fail by their exit code
            sys.exit(1)


def _clock() -> float:
    """Wall-clock seconds, after the GPU has finished its work."""
    torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main()
