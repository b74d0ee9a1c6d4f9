"""`patches/check.py` on folders that hold the lines that the patches sit between.

So every patch fits here. Whether it fits the framework itself is seen where its tests patch the
framework's code: those of verl and SkyRL do, and `ci/frameworks.sh` for the others.
"""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "patches"
MEGATRON = sorted(FOLDER.glob("core_v*.patch"))
FRAMEWORKS = sorted(FOLDER.glob("*/*.patch"))


def name_of(patch: Path) -> str:
    return str(patch.relative_to(FOLDER))


def lay_out(path: Path, patch: Path, repository: bool = False) -> Path:
    """Files at ``path`` with what ``patch`` expects, at its lines, and nothing else."""
    for part in re.split(r"^--- ", patch.read_text(), flags=re.MULTILINE)[1:]:
        name = part.split(maxsplit=1)[0]
        if name == "/dev/null":
            continue
        file = path / name.removeprefix("a/")
        lines: list[str] = []
        for hunk in re.split(r"^@@ -", part, flags=re.MULTILINE)[1:]:
            start = int(re.match(r"\d+", hunk)[0])  # type: ignore[index]
            lines += ["# filler"] * (start - 1 - len(lines))
            body = hunk.split("\ndiff --git ")[0].splitlines()[1:]
            lines += [line[1:] for line in body if not line.startswith("+")]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join([*lines, "# after"]) + "\n")
    if repository:
        subprocess.run(["git", "init", "-q", str(path)], check=True)
    return path


def megatron(path: Path, patch: Path, version: str) -> Path:
    """A git checkout of ``version`` of Megatron-LM."""
    info = lay_out(path, patch, repository=True) / "megatron" / "core" / "package_info.py"
    info.parent.mkdir(parents=True)
    numbers = zip(("MAJOR", "MINOR", "PATCH"), version.split("."), strict=True)
    info.write_text("".join(f"{name} = {number}\n" for name, number in numbers))
    return path


def check(path: Path | str) -> tuple[int, str]:
    command = [sys.executable, str(FOLDER / "check.py"), str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, done.stdout


def about(patch: Path, path: Path) -> str:
    """What is said of this patch, and not of others that change the same files."""
    code, text = check(path)
    assert code == ("do not fit" in text or "does not fit" in text)
    framework = patch.parent.name
    found = re.findall(rf"^{framework}: (.*\n.*\n?)", text, re.MULTILINE)
    (said,) = found
    return str(said)


def run_as_told(text: str) -> None:
    """Run the command that ``check.py`` printed."""
    subprocess.run(text.splitlines()[-1], shell=True, check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize("patch", MEGATRON, ids=name_of)
def test_a_patch_of_megatron_fits_then_is_applied(patch: Path, tmp_path: Path) -> None:
    version = patch.stem.removeprefix("core_v")
    path = megatron(tmp_path / "checkout", patch, version)
    code, text = check(path)
    assert code == 0
    assert f"{patch.name} fits and is not applied" in text
    run_as_told(text)
    code, text = check(path)
    assert code == 0
    assert text.startswith(f"Megatron-Core {version}: {patch.name} is applied; revert it with\n")
    assert "install()" in (path / "pretrain_gpt.py").read_text()


@pytest.mark.parametrize("patch", FRAMEWORKS, ids=name_of)
@pytest.mark.parametrize("kind", ["checkout", "site-packages"])
def test_a_patch_of_a_framework_is_applied_and_reverted(
    patch: Path, kind: str, tmp_path: Path
) -> None:
    def contents() -> dict[Path, str]:
        return {file: file.read_text() for file in path.rglob("*.py")}

    path = lay_out(tmp_path / kind, patch, repository=kind == "checkout")
    before, text = contents(), about(patch, path)
    assert f"{name_of(patch)} fits and is not applied" in text
    run_as_told(text)
    assert contents() != before
    text = about(patch, path)
    assert text.startswith(f"{name_of(patch)} is applied; revert it with\n")
    run_as_told(text)
    assert contents() == before


def test_a_folder_inside_a_repository_is_looked_at_itself(tmp_path: Path) -> None:
    # From inside a repository, git takes the paths of its own diffs from the root, and passes over
    # those that are not below the folder.
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    folder, patch = tmp_path / "site-packages", tmp_path / "some.patch"
    folder.mkdir()
    (folder / "x.py").write_text("old\n")
    patch.write_text("diff --git a/x.py b/x.py\n--- a/x.py\n+++ b/x.py\n@@ -1 +1 @@\n-old\n+new\n")
    applies = runpy.run_path(str(FOLDER / "check.py"))["applies"]
    assert applies(patch, folder)
    assert not applies(patch, folder, "--reverse")


@pytest.mark.parametrize("patch", FRAMEWORKS, ids=name_of)
def test_another_version_of_a_framework_is_said(patch: Path, tmp_path: Path) -> None:
    path = lay_out(tmp_path / "checkout", patch)
    rewritten, *gone = path.rglob("*.py")
    rewritten.write_text("# rewritten\n")
    for file in gone[:1]:
        file.unlink()
    code, text = check(path)
    assert code == 1
    assert f"{name_of(patch)} does not fit the version in {path}" in text


def test_what_no_patch_fits_is_said_and_help_says_what_is_given(tmp_path: Path) -> None:
    patch = MEGATRON[0]
    changed = megatron(tmp_path / "changed", patch, patch.stem.removeprefix("core_v"))
    (changed / "pretrain_gpt.py").write_text("main()\n")
    for path, said in (
        (changed, "does not fit"),
        (megatron(tmp_path / "unknown", patch, "0.13.0"), "no patch for this release"),
        (tmp_path, "not a Megatron-LM checkout"),
    ):
        code, text = check(path)
        assert code == 1
        assert said in text
    code, text = check("--help")
    assert code == 0
    assert "path/to/verl-checkout" in text and "the folder that holds a package" in text
