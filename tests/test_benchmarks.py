"""Every part of the benchmarks runs: in small shapes, once, without judging what it measures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import PARTS

pytestmark = pytest.mark.host

ROOT = Path(__file__).parents[1]


def test_every_part_measures_something(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    own = {"OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--quick", "--json", figures],
        cwd=ROOT,
        env={**os.environ, **own},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=280,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-4000:]
    found = json.loads(figures.read_text(encoding="utf-8"))
    assert not found["failed"]
    assert {figure["part"] for figure in found["figures"]} == {*PARTS}
