"""`examples/custom_loop.py` asserts its own exactness; here it only has to succeed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "custom_loop.py"


@pytest.mark.host
def test_the_example_proves_its_gradient() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*torchrun, "--nproc-per-node", "2", str(EXAMPLE), "--cpu"],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    errors = re.findall(r"gradient error (\S+)", done.stdout)
    assert len(errors) == 5
    assert all(float(error) < 1e-12 for error in errors)
