"""The repository's own tools: the ranks of its tests, its environment, its patches, benchmarks."""

from __future__ import annotations

import fcntl
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import combinations, product
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.__main__ import PARTS
from tests.distributed import RankFailed, run_ranks
from tests.host import cases

ROOT = Path(__file__).resolve().parents[1]

# Ranks of the tests: what is said of one that fails.


def fail(how: str) -> None:
    """Rank 1 ends in some way, while rank 0 waits for it."""
    dist.barrier()
    if dist.get_rank() == 0:
        dist.recv(torch.zeros(1), src=1)
    print("a last word", file=sys.stderr)
    ways: dict[str, Callable[[], object]] = {
        "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "aborts": os.abort,
        "exits": lambda: os._exit(3),
        "raises": lambda: 1 / 0,
        "hangs": lambda: time.sleep(60),
    }
    ways[how]()


FAILED = {
    "killed": r"^rank 1 died of signal SIGKILL, with at most \d\d+ MiB\n  its last lines on stderr",
    # With a traceback of what it was doing.
    "aborts": r"^rank 1 died of signal SIGABRT, with at most \d\d+ MiB(?s:.*)in fail",
    "exits": r"^rank 1 died of exit code 3, with at most \d\d+ MiB",
    "raises": r"^rank 1 failed:\n(?s:.*)ZeroDivisionError",
    "hangs": r"^ranks \[0, 1\] were still running after 5 s\nrank 0:(?s:.*)rank 1:(?s:.*)in fail",
}


@pytest.mark.parametrize("how", FAILED)
def test_a_failed_rank_says_how_it_ended_and_what_it_said_last(how: str) -> None:
    with pytest.raises(RankFailed, match=FAILED[how]) as raised:
        run_ranks(fail, 2, how, timeout=5 if how == "hangs" else 60)
    assert "\n  a last word" in str(raised.value)


# Benchmarks: in small shapes, once, without judging what they measure.


@pytest.mark.host
def test_every_part_of_the_benchmarks_measures_something(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--quick", "--json", figures],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        text=True,
        stdout=PIPE,
        stderr=STDOUT,
        timeout=280,
    )
    assert run.returncode == 0, run.stdout[-4000:]
    found = json.loads(figures.read_text(encoding="utf-8"))
    assert not found["failed"]
    assert {figure["part"] for figure in found["figures"]} == {*PARTS}


# `patches/check.py`, on folders that hold the lines that the patches sit between, so that every
# patch fits. Whether it fits the framework itself is seen where its tests patch the framework's
# code: those of verl and SkyRL do, and `ci/frameworks.sh` and `ci/next.sh` for the others.

PATCHES = ROOT / "patches"
MEGATRON = sorted(PATCHES.glob("core_v*.patch"))
FRAMEWORKS = sorted(PATCHES.glob("*/*.patch"))
APPLY, REVERT = "fits and is not applied; apply", "is applied; revert"


def name_of(patch: Path) -> str:
    return str(patch.relative_to(PATCHES))


def lay_out(path: Path, patch: Path, repository: bool = False) -> Path:
    """Files at ``path`` with what ``patch`` expects, at its lines, and nothing else."""
    for part in re.split(r"^--- ", patch.read_text(), flags=re.MULTILINE)[1:]:
        name = part.split(maxsplit=1)[0]
        if name == "/dev/null":
            continue
        lines: list[str] = []
        for hunk in re.split(r"^@@ -", part, flags=re.MULTILINE)[1:]:
            start = int(re.match(r"\d+", hunk)[0])  # type: ignore[index]
            lines += ["# filler"] * (start - 1 - len(lines))
            body = hunk.split("\ndiff --git ")[0].splitlines()[1:]
            lines += [line[1:] for line in body if not line.startswith("+")]
        file = path / name.removeprefix("a/")
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
    command = [sys.executable, str(PATCHES / "check.py"), str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, done.stdout


def do_as_told(patch: Path, path: Path, what: str) -> None:
    """Run the command that ``check.py`` prints to apply this patch, or to revert it."""
    code, text = check(path)
    assert code == ("not fit" in text)  # another patch for the same files
    (command,) = re.findall(rf"{name_of(patch)} {what} it with\n +(.*)", text)
    subprocess.run(command, shell=True, check=True, stdout=DEVNULL)


@pytest.mark.parametrize("patch", MEGATRON, ids=name_of)
def test_a_patch_of_megatron_fits_then_is_applied(patch: Path, tmp_path: Path) -> None:
    version = patch.stem.removeprefix("core_v")
    path = megatron(tmp_path / "checkout", patch, version)
    do_as_told(patch, path, APPLY)
    code, text = check(path)
    assert (code, text.partition(" it with")[0]) == (
        0,
        f"Megatron-Core {version}: {patch.name} {REVERT}",
    )
    assert "install()" in (path / "pretrain_gpt.py").read_text()


@pytest.mark.parametrize("patch", FRAMEWORKS, ids=name_of)
@pytest.mark.parametrize("kind", ["checkout", "site-packages"])
def test_a_patch_of_a_framework_is_applied_and_reverted_if_it_fits_the_version(
    patch: Path, kind: str, tmp_path: Path
) -> None:
    def contents() -> dict[Path, str]:
        return {file: file.read_text() for file in path.rglob("*.py")}

    path = lay_out(tmp_path / kind, patch, repository=kind == "checkout")
    before = contents()
    do_as_told(patch, path, APPLY)
    assert contents() != before
    do_as_told(patch, path, REVERT)
    assert contents() == before
    # Another version of the framework.
    rewritten, *others = before
    rewritten.write_text("# rewritten\n")
    for gone in others[:1]:
        gone.unlink()
    code, text = check(path)
    assert code == 1
    assert f"{name_of(patch)} does not fit the version in {path}" in text


def test_a_framework_is_recognised_by_its_package_alone(tmp_path: Path) -> None:
    (patch,) = PATCHES.glob("miles/*.patch")
    jobs = lay_out(tmp_path, patch) / ".github" / "workflows" / "pr-test.yml"
    jobs.parent.mkdir(parents=True)
    jobs.touch()  # the patch of slime changes a file of this name
    code, text = check(tmp_path)
    assert (code, "slime" in text) == (0, False)


def test_a_folder_inside_a_repository_is_looked_at_itself(tmp_path: Path) -> None:
    # From inside a repository, git takes the paths of its own diffs from the root, and passes over
    # those that are not below the folder.
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    folder, patch = tmp_path / "site-packages", tmp_path / "some.patch"
    folder.mkdir()
    (folder / "x.py").write_text("old\n")
    patch.write_text("diff --git a/x.py b/x.py\n--- a/x.py\n+++ b/x.py\n@@ -1 +1 @@\n-old\n+new\n")
    applies = runpy.run_path(str(PATCHES / "check.py"))["applies"]
    assert applies(patch, folder)
    assert not applies(patch, folder, "--reverse")


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


# `ci/python.sh`: which interpreter it builds on, what it installs again, and what it leaves alone.
# pip is a stand-in that notes what it is asked for, so that nothing is downloaded.

of_environment = pytest.mark.skipif(
    not (3, 12) <= sys.version_info < (3, 14), reason="needs Python 3.12 or 3.13"
)
BASE = Path(sys._base_executable)  # type: ignore[attr-defined]
PIP = """
import os, sys
with open(sys.prefix + "/asked", "a") as asked:
    print(sys.argv[-1], file=asked)
for_the_user = os.environ.get("PIP_USER") == "1"  # which pip refuses here
sys.exit(for_the_user or os.environ.get("FAILS") in sys.argv)
"""


def start(
    venv: Path, extras: str = "mcore", checkout: Path = ROOT, **changed: str | None
) -> subprocess.Popen[str]:
    """The script on ``BASE``, with ``changed`` variables; None unsets one."""
    given = {
        "PYTHON": str(BASE),
        "MEGATRON_LOSS_AGG_VENV": str(venv),
        "PIP_RETRIES": "no number",  # so that pip itself refuses, wherever it is not the stand-in
        **changed,
    }
    variables = {k: v for k, v in {**os.environ, **given}.items() if v is not None}
    command = ["bash", str(checkout / "ci/python.sh"), extras]
    return subprocess.Popen(
        command, env=variables, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, text=True
    )


def run(*arguments: Any, **changed: Any) -> tuple[int, str, str]:
    """The script until its end: its exit code, what it printed, and what it said beside that."""
    running = start(*arguments, **changed)
    out, err = running.communicate(timeout=60)
    return running.returncode, out, err


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment as the script leaves it, but for what pip would have installed."""
    venv = tmp_path_factory.mktemp("made") / "venv"
    assert run(venv)[0] != 0  # made; then pip refuses
    (packages,) = venv.glob("lib/*/site-packages")
    shutil.rmtree(packages)
    (packages / "pip").mkdir(parents=True)
    (packages / "pip" / "__main__.py").write_text(PIP)
    code, _, said = run(venv)
    assert code == 0, said
    return venv


@pytest.fixture
def venv(made: Path, tmp_path: Path) -> Path:
    """A copy of `made` in which nothing was asked of pip."""
    copy = shutil.copytree(made, tmp_path / "venv", symlinks=True)
    (copy / "asked").unlink()
    return copy


def asked(venv: Path) -> list[str]:
    """What pip was asked to install, since the last call."""
    file = venv / "asked"
    lines = file.read_text().splitlines() if file.exists() else []
    file.unlink(missing_ok=True)
    return lines


def used_again(venv: Path, extras: str = "mcore", **changed: str | None) -> bool:
    """Whether the script succeeds without a word, with nothing made and nothing installed."""
    done = run(venv, extras, **changed)
    return done == (0, f"{venv}/bin/python\n", "") and asked(venv) == []


# What changes nothing: variables, in which a pair of braces stands for the test's folder.
SYSTEM = f"{BASE.parent}:{os.defpath}"
NO_MATTER: dict[str, dict[str, str | None]] = {
    "the environment stands for the interpreter behind it": {"PYTHON": "{}/venv/bin/python"},
    "by any of its names": {"PYTHON": "{}/venv/bin/python3"},
    "activated, it is no other interpreter": {"PYTHON": None, "PATH": "{}/venv/bin:" + SYSTEM},
    "nor is another one": {"PYTHON": None, "PATH": "{}/another/bin:" + SYSTEM},
    "no home is needed": {"HOME": None, "PYENV_ROOT": None},
    "packages of the shell alone do not count": {"PYTHONPATH": "{}"},
}


@of_environment
@pytest.mark.parametrize("claim", NO_MATTER)
def test_an_environment_is_used_again(venv: Path, tmp_path: Path, claim: str) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    if "another" in str(NO_MATTER[claim]):
        subprocess.run([BASE, "-m", "venv", "--without-pip", tmp_path / "another"], check=True)
    assert used_again(venv, **{k: v and v.format(tmp_path) for k, v in NO_MATTER[claim].items()})


@of_environment
def test_an_outdated_environment_is_made_again_even_by_its_own_interpreter(venv: Path) -> None:
    (venv / "foundation").write_text("another interpreter\n")
    *_, said = run(venv, PYTHON=f"{venv}/bin/python3")
    assert f"making {venv} with {BASE.parent}" in said
    assert os.access(venv / "bin" / "python", os.X_OK)
    assert not list(venv.glob("stamp-*"))


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """Another checkout, as far as the script looks at it."""
    for name in ("setup.py", "pyproject.toml", "ci/python.sh", "ci/constraints.txt"):
        file = tmp_path / "other" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, file)
    return tmp_path / "other"


@of_environment
def test_sets_of_extras_live_side_by_side_and_checkouts_apart(venv: Path, other: Path) -> None:
    assert run(venv, "mcore,plot", PIP_USER="1")[0] == 0  # where pip would install for the user
    assert asked(venv) == ["setuptools>=77", f"{ROOT}[mcore,plot]"]
    assert used_again(venv, "mcore") and used_again(venv, "mcore,plot")
    for checkout in (other, ROOT):
        assert run(venv, "mcore", checkout)[0] == 0
        assert asked(venv)[-1] == f"{checkout}[mcore]"


@of_environment
def test_an_install_cut_short_leaves_no_stamp_of_before(venv: Path, other: Path) -> None:
    setup = other / "setup.py"
    before = setup.read_text()
    assert run(venv, "mcore", other)[0] == 0
    setup.write_text(before + "# a later commit\n")
    assert run(venv, "mcore", other, FAILS=f"{other}[mcore]")[0] == 1
    setup.write_text(before)
    asked(venv)
    assert run(venv, "mcore", other)[0] == 0
    assert asked(venv)[-1] == f"{other}[mcore]"


@of_environment
@pytest.mark.skipif(shutil.which("flock") is None, reason="needs flock")
def test_waiting_for_another_run_is_said(venv: Path) -> None:
    with Path(f"{venv}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = start(venv)
        assert waiting.stderr is not None
        said = waiting.stderr.readline()
    out, _ = waiting.communicate(timeout=60)
    assert f"waiting for another run that is at work on {venv}" in said
    assert out == f"{venv}/bin/python\n"


@of_environment
def test_an_unfit_interpreter_is_refused_and_a_folder_of_the_users_is_never_cleared(
    tmp_path: Path,
) -> None:
    code, out, said = run(tmp_path / "venv", PYTHON="/bin/false")
    assert (code, out) == (1, "")
    assert "PYTHON=/bin/false is not a Python 3.12 or 3.13" in said
    assert list(tmp_path.iterdir()) == []
    precious = tmp_path / "venv" / "precious"
    precious.parent.mkdir()
    precious.touch()
    code, _, said = run(tmp_path / "venv")
    assert code == 1
    assert "was not made here" in said
    assert precious.exists() and not (tmp_path / "venv.lock").exists()


def test_releases_that_share_a_grid_have_all_values_and_together_all_combinations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    axes = range(4), range(3), range(2), range(2)
    monkeypatch.setattr(cases, "COVERS", "covering")

    def missing(rows: list[tuple[int, ...]], strength: int) -> list[Any]:
        """Combinations of values of so many axes that no row has."""
        return [
            values
            for places in combinations(range(len(axes)), strength)
            for values in product(*(axes[i] for i in places))
            if values not in {tuple(row[i] for i in places) for row in rows}
        ]

    together = []
    for part in range(5):
        monkeypatch.setattr(cases, "PART", [str(part), "5"])
        rows = cases.grid(3, *axes)
        assert missing(rows, 2) == [] and len(rows) < len(list(product(*axes))) / 2
        together += rows
    assert missing(together, 3) == []
