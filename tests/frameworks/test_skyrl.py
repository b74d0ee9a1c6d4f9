"""SkyRL with our patch: the gradient of every parameter, on its real trainer, worker and loss."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from tests.frameworks import skyrl_case as case
from tests.host.harness import run_host_ranks
from tests.host.reference import relative_error
from tests.peers.standins import PEERS

ROOT = Path(__file__).parents[2]
BLOCK = {  # microbatches of each step by rank; -1 is a padding row
    "dp": ([[[0, 1], [2, 3]], [[4, 5], [6, -1]]], [[[7, 8]], [[9, 10]]]),
    "cp": ([[[0, 1], [2, 3], [4, 5], [6]]], [[[7, 8], [9, 10]]]),
}


@cache
def folder() -> TemporaryDirectory[str]:
    return TemporaryDirectory()


@cache
def references() -> tuple[Any, dict[Any, case.Reference]]:
    wanted = {}
    for mode in case.MODES:
        for step in (0, 1):
            wanted[mode, "exact", step] = case.weights(mode, step)
            for kind, steps in BLOCK.items():
                wanted[mode, kind, step] = case.stock_weights(mode, step, steps[step])
    log_probs, found = run_host_ranks(case.references, 1, [(k[-1], w) for k, w in wanted.items()])[0]
    return log_probs, dict(zip(wanted, found, strict=True))


@cache
def results(package: str) -> dict[str, Any]:
    log_probs, saved = f"{folder().name}/log_probs", f"{folder().name}/{package}.pt"
    torch.save(references()[0], log_probs)
    where = PEERS if package == "stock" else patched()
    command = [sys.executable, "-m", "tests.frameworks.run_skyrl", package, log_probs, saved]
    environment = {**os.environ, "SKYRL": str(where), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=200, env=environment
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = torch.load(saved)
    return found

def patched():
    return os.environ["PATCHED"]

def test_all():
    _, refs = references()
    for t in case.TOPOLOGIES:
        for mode, name in case.MODES.items():
            for package in ("stock", "patched"):
              for prefix in ("", "skyrl/"):
                if package == "stock" and prefix: continue
                r = results(package)[f"{t} {prefix}{name}"]
                if isinstance(r[0], str):
                    print(t, package, prefix+name, r[0][:100]); continue
                for step in (0, 1):
                    errs = {k: max(relative_error(rank["gradients"][step], refs[mode, k, step].gradient) for rank in r) for k in ("exact", t[:2])}
                    print(t, package, prefix+name, step, errs)
                if prefix: print({k: v for k, v in r[0]["metrics"].items()}, [refs[mode,"exact",s][1:] for s in (0,1)])
