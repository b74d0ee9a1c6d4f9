"""`ci/python.sh`: which interpreter it builds on, what it installs again, and what it leaves alone.

pip is a stand-in that notes what it is asked for, so that nothing is downloaded.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(
    not (3, 12) <= sys.version_info < (3, 14), reason="needs Python 3.12 or 3.13"
)

ROOT = Path(__file__).parents[1]
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


def run(*arguments: Any, **changed: Any) -> subprocess.CompletedProcess[str]:
    """The script until its end."""
    running = start(*arguments, **changed)
    out, err = running.communicate(timeout=60)
    return subprocess.CompletedProcess(running.args, running.returncode, out, err)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment as the script leaves it, but for what pip would have installed."""
    venv = tmp_path_factory.mktemp("made") / "venv"
    assert run(venv).returncode != 0  # made; then pip refuses
    (packages,) = venv.glob("lib/*/site-packages")
    shutil.rmtree(packages)
    (packages / "pip").mkdir(parents=True)
    (packages / "pip" / "__main__.py").write_text(PIP)
    done = run(venv)
    assert done.returncode == 0, done.stderr
    return venv


@pytest.fixture
def venv(made: Path, tmp_path: Path) -> Path:
    """A copy of `made` in which nothing was asked of pip."""
    copy = shutil.copytree(made, tmp_path / "venv", symlinks=True)
    (copy / "asked").unlink()
    return copy


def asked(venv: Path) -> list[str]:
    """What pip was asked to install, since the last call."""
    try:
        return (venv / "asked").read_text().splitlines()
    except FileNotFoundError:
        return []
    finally:
        (venv / "asked").unlink(missing_ok=True)


def used_again(done: subprocess.CompletedProcess[str], venv: Path) -> bool:
    """Whether the script succeeded without a word, with nothing made and nothing installed."""
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{venv}/bin/python\n"
    return done.stderr == "" and asked(venv) == []


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


@pytest.mark.parametrize("claim", NO_MATTER)
def test_an_environment_is_used_again(venv: Path, tmp_path: Path, claim: str) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    if "another" in str(NO_MATTER[claim]):
        subprocess.run([BASE, "-m", "venv", "--without-pip", tmp_path / "another"], check=True)
    changed = {k: v and v.format(tmp_path) for k, v in NO_MATTER[claim].items()}
    assert used_again(run(venv, **changed), venv)


def test_an_outdated_environment_is_made_again_even_by_its_own_interpreter(venv: Path) -> None:
    (venv / "foundation").write_text("another interpreter\n")
    done = run(venv, PYTHON=f"{venv}/bin/python3")
    assert f"making {venv} with {BASE.parent}" in done.stderr
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


def test_sets_of_extras_live_side_by_side_and_checkouts_apart(venv: Path, other: Path) -> None:
    # Also where pip would install for the user.
    assert run(venv, "mcore,plot", PIP_USER="1").returncode == 0
    assert asked(venv) == ["setuptools>=77", f"{ROOT}[mcore,plot]"]
    assert used_again(run(venv, "mcore"), venv)
    assert used_again(run(venv, "mcore,plot"), venv)
    for checkout in (other, ROOT):
        assert run(venv, "mcore", checkout=checkout).returncode == 0
        assert asked(venv)[-1] == f"{checkout}[mcore]"


def test_an_install_cut_short_leaves_no_stamp_of_before(venv: Path, other: Path) -> None:
    setup = other / "setup.py"
    before = setup.read_text()
    assert run(venv, checkout=other).returncode == 0
    setup.write_text(before + "# a later commit\n")
    assert run(venv, checkout=other, FAILS=f"{other}[mcore]").returncode == 1
    setup.write_text(before)
    asked(venv)
    assert run(venv, checkout=other).returncode == 0
    assert asked(venv)[-1] == f"{other}[mcore]"


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


def test_an_unfit_interpreter_is_refused_and_a_folder_of_the_users_is_never_cleared(
    tmp_path: Path,
) -> None:
    refused = run(tmp_path / "venv", PYTHON="/bin/false")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "PYTHON=/bin/false is not a Python 3.12 or 3.13" in refused.stderr
    assert list(tmp_path.iterdir()) == []
    precious = tmp_path / "venv" / "precious"
    precious.parent.mkdir()
    precious.touch()
    refused = run(tmp_path / "venv")
    assert refused.returncode == 1
    assert "was not made here" in refused.stderr
    assert precious.exists() and not (tmp_path / "venv.lock").exists()
