"""A framework's package, patched by the commands of its page."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.peers.standins import PEERS

ROOT = Path(__file__).parents[2]


def page(package: str) -> str:
    return (ROOT / f"docs/frameworks/{package}.md").read_text()


def patched_copy(package: str, folder: Path) -> str:
    """Copy the installed package into ``folder`` and patch it there; returns what was printed."""
    shutil.copytree(PEERS / package, folder / package)
    # After the installation of ours, and the line that finds the folder of theirs.
    block = re.search(r"```bash\npip [^\n]*\n(\w+)=[^\n]*\n(.*?)```", page(package), re.DOTALL)
    assert block
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-ec", block[2]],
        cwd=ROOT,
        env={**os.environ, block[1]: str(folder), "PATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
