"""`patches/check.py` on checkouts whose script has the lines that the patches sit between."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PATCHES = sorted((ROOT / "patches").glob("core_v*.patch"))


def checkout(path: Path, patch: Path, version: str) -> Path:
    """A git checkout of ``version`` whose script has the patch's own context and nothing else."""
    context = [line[1:] for line in patch.read_text().splitlines() if line.startswith(" ")]
    start = int(re.search(r"@@ -(\d+)", patch.read_text())[1])  # type: ignore[index]
    script = ["# before"] * (start - 1) + context + ["# after"]
    info = path / "megatron" / "core" / "package_info.py"
    info.parent.mkdir(parents=True)
    major, minor, last = version.split(".")
    info.write_text(f"MAJOR = {major}\nMINOR = {minor}\nPATCH = {last}\n")
    (path / "pretrain_gpt.py").write_text("\n".join(script) + "\n")
    subprocess.run(["git", "init", "-q", str(path)], check=True)
    return path


def check(path: Path) -> tuple[int, str]:
    command = [sys.executable, str(ROOT / "patches" / "check.py"), str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, done.stdout


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_a_patch_fits_then_is_applied(patch: Path, tmp_path: Path) -> None:
    version = patch.stem.removeprefix("core_v")
    path = checkout(tmp_path / "checkout", patch, version)
    code, text = check(path)
    assert code == 0
    assert f"{patch.name} fits and is not applied" in text
    subprocess.run(["git", "-C", str(path), "apply", str(patch)], check=True)
    code, text = check(path)
    assert (code, text) == (0, f"Megatron-Core {version}: {patch.name} is applied\n")
    assert "install()" in (path / "pretrain_gpt.py").read_text()


def test_what_no_patch_fits_is_said(tmp_path: Path) -> None:
    version = PATCHES[0].stem.removeprefix("core_v")
    changed = checkout(tmp_path / "changed", PATCHES[0], version)
    (changed / "pretrain_gpt.py").write_text("main()\n")
    unknown = checkout(tmp_path / "unknown", PATCHES[0], "0.13.0")
    for path, said in (
        (changed, "does not fit"),
        (unknown, "no patch for this release"),
        (tmp_path, "not a Megatron-LM checkout"),
    ):
        code, text = check(path)
        assert code == 1
        assert said in text
