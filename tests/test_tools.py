"""The repository's own tools: the ranks of its tests, its environment, its patches, benchmarks."""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import combinations, product
from pathlib import Path
from subprocess import PIPE

import pytest
import torch
import torch.distributed as dist

from benchmarks.__main__ import PARTS
from tests.distributed import RankFailed, run_ranks
from tests.host.cases import covering
from tests.launch.processes import ROOT, run_afresh
from tests.mutants import read_mutants


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
    "hangs": r"^ranks \[0, 1\] were still running after 12 s\nrank 0:(?s:.*)rank 1:(?s:.*)in fail",
}


@pytest.mark.parametrize("how", FAILED)
def test_a_failed_rank_says_how_it_ended_and_what_it_said_last(how: str) -> None:
    with pytest.raises(RankFailed, match=FAILED[how]) as raised:
        run_ranks(fail, 2, how, timeout=12 if how == "hangs" else 400)
    assert "\n  a last word" in str(raised.value)


@pytest.mark.extended
def test_every_part_of_the_benchmarks_measures_something(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    done = run_afresh("-m", "benchmarks", "--quick", "--json", str(figures))
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    found = json.loads(figures.read_text(encoding="utf-8"))
    assert not found["failed"]
    assert {figure["part"] for figure in found["figures"]} == {*PARTS}


def test_the_way_of_a_call_is_counted_as_it_runs() -> None:
    done = run_afresh("-m", "benchmarks.path", "--show")
    assert done.returncode == 0, done.stderr[-4000:]
    *_, summary = done.stdout.splitlines()
    counts = (
        r": \d+ files, \d+ functions, \d+ calls, \d+ moves .*, \d+ classes; \d+\.\d% of the code"
    )
    assert re.search(counts, summary)
    assert re.search(r"\n *\d+ of *\d+ lines of mcore/step\.py; not \d+", done.stdout)
    # Of two microbatches; the first step, which is checked more, is not watched.
    assert "   1 mcore/step.py                    Step.run\n" in done.stdout
    assert "   2 mcore/step.py                    Step.loss\n" in done.stdout
    assert "mcore/checks/scaling.py" not in done.stdout


def test_every_mutant_is_a_change_of_the_source_and_its_tests_exist() -> None:
    mutants = read_mutants()
    assert len({*mutants}) == len(mutants) >= 150
    texts = {path: (ROOT / path).read_text() for path in {x.path for x in mutants}}
    for mutant in mutants:
        mutant.applied_to(texts[mutant.path])
    words = {word for x in mutants for word in shlex.split(x.tests) if word.startswith("tests/")}
    assert [word for word in words if not (ROOT / word).exists()] == []


def test_the_tests_that_run_on_other_releases_exist() -> None:
    noxfile = runpy.run_path(str(ROOT / "noxfile.py"))
    assert [name for name in noxfile["NEXT_TESTS"] if not (ROOT / name).exists()] == []


PATCHES = ROOT / "patches"


def lay_out(path: Path, patch: str) -> Path:
    """A folder of files with the lines that a patch expects, where it expects them."""
    for part in re.split(r"^--- ", patch, flags=re.MULTILINE)[1:]:
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
    return path


# Whether a patch fits the framework itself is seen where its tests patch the framework's code: those
# of verl and SkyRL do, and `ci/frameworks.sh` and `ci/next.sh` for the others.
@pytest.mark.parametrize(
    "patch", [*PATCHES.glob("*/*.patch")], ids=lambda patch: str(patch.relative_to(PATCHES))
)
def test_a_patch_is_well_formed_can_be_reverted_and_its_page_names_it(
    patch: Path, tmp_path: Path
) -> None:
    lay_out(tmp_path, patch.read_text())
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    before = {file: file.read_text() for file in tmp_path.rglob("*.py")}
    for options in ((), ("--reverse",)):
        subprocess.run(["git", "-C", tmp_path, "apply", *options, patch], check=True)
        unchanged = {file: file.read_text() for file in tmp_path.rglob("*.py")} == before
        assert unchanged == bool(options)
    assert f"`{patch.relative_to(PATCHES)}`" in (PATCHES / "README.md").read_text()


# `ci/python.sh`, on an interpreter that makes empty environments, whose pip notes what it installs.

INTERPRETER = """#!/usr/bin/env bash
last=${@: -1}
case "$*" in
    *_base_executable*) echo "$BASE" ;;
    *torch*) [[ -n ${HAS_TORCH:-} ]] ;;
    -VV) echo "${VERSION:-3.12}" ;;
    "-m venv "*) mkdir -p "$last/bin"; cp "$0" "$last/bin/python"; echo "$*" >"$last/options" ;;
    "-m pip "*)
        sleep "${PIP_TAKES:-0}"
        echo "$last" >>"$ASKED"
        [[ $PIP_USER == 0 && $last != "${FAILS:-}" ]]
        ;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """As far as the script looks at it; the interpreter and what pip was asked for lie beside."""
    for name in (
        "pyproject.toml",
        "ci/python.sh",
        *(f"ci/{x.name}" for x in ROOT.glob("ci/*.txt")),
    ):
        (tmp_path / "checkout" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / "checkout" / name)
    (tmp_path / "python").write_text(INTERPRETER)
    (tmp_path / "python").chmod(0o755)
    return tmp_path / "checkout"


def start(checkout: Path, extras: str, **variables: str) -> subprocess.Popen[str]:
    own = {"PYTHON": f"{checkout}/../python", "BASE": f"{checkout}/../python", "PIP_USER": "1"}
    asked = {"ASKED": f"{checkout}/../asked"}
    return subprocess.Popen(
        ["bash", str(checkout / "ci/python.sh"), extras],
        env={**os.environ, **own, **asked, **variables},
        stdout=PIPE,
        stderr=PIPE,
        text=True,
    )


def environment(checkout: Path, extras: str, **variables: str) -> str:
    """The script's output beside the interpreter's path; empty where all was there."""
    running = start(checkout, extras, **variables)
    printed, said = running.communicate(timeout=60)
    assert running.returncode == 0, said
    assert printed == f"{checkout}/.venv/bin/python\n"
    return said


def asked(checkout: Path) -> list[str]:
    """Last words of the pip commands since the last call."""
    file = checkout.parent / "asked"
    lines = file.read_text().splitlines()
    file.unlink()
    return lines


def test_an_environment_is_used_again_and_made_anew_for_other_versions(checkout: Path) -> None:
    assert f"making {checkout}/.venv" in environment(checkout, "mcore")
    assert asked(checkout) == ["setuptools>=77", f"{checkout}[mcore]"]
    assert "making" not in environment(checkout, "mcore,test")
    folders = [f"{checkout}/ci/{name}.txt" for name in ("peers", "hugging_face")]
    assert asked(checkout) == ["setuptools>=77", f"{checkout}[mcore,test]", *folders]
    assert environment(checkout, "mcore") == environment(checkout, "mcore,test") == ""
    # By the interpreter in it, too, which goes when it is made anew.
    inside = f"{checkout}/.venv/bin/python"
    assert environment(checkout, "mcore", PYTHON=inside) == ""
    assert "making" in environment(checkout, "mcore", PYTHON=inside, VERSION="3.13")
    for name in ("pyproject.toml", "ci/constraints.txt", "ci/peers.txt"):
        environment(checkout, "mcore")
        (checkout / name).write_text((checkout / name).read_text() + "# changed\n")
        assert "making" in environment(checkout, "mcore"), name


def test_an_interpreter_that_has_torch_keeps_it(checkout: Path) -> None:
    environment(checkout, "mcore", HAS_TORCH="yes")
    assert "--system-site-packages" in (checkout / ".venv/options").read_text()
    (pin,) = (checkout / ".venv/constraints.txt").read_text().splitlines()
    assert pin.startswith("megatron-core==")


def test_an_install_that_failed_is_begun_again_and_one_of_two_at_once_installs(
    checkout: Path,
) -> None:
    assert start(checkout, "mcore", FAILS=f"{checkout}[mcore]").wait() == 1
    assert asked(checkout)
    both = [start(checkout, "mcore", PIP_TAKES="2") for _ in range(2)]
    said = [running.communicate(timeout=60)[1] for running in both]
    assert [running.returncode for running in both] == [0, 0]
    assert asked(checkout) == ["setuptools>=77", f"{checkout}[mcore]"]
    assert sum("waiting for another run" in text for text in said) == 1


def test_an_unfit_interpreter_is_refused_and_a_folder_of_the_users_is_never_cleared(
    checkout: Path,
) -> None:
    unfit = start(checkout, "mcore", PYTHON="/bin/false")
    assert "no Python 3.12 or 3.13 with ensurepip" in unfit.communicate()[1]
    (checkout / ".venv").mkdir()
    (checkout / ".venv/precious").touch()
    refused = start(checkout, "mcore")
    assert "was not made here" in refused.communicate()[1]
    assert unfit.returncode == refused.returncode == 1
    assert [file.name for file in (checkout / ".venv").iterdir()] == ["precious"]


def test_a_covering_set_has_all_triples() -> None:
    axes = [range(n) for n in (4, 3, 3, 2, 2)]
    rows = covering(3, *axes)
    assert len(rows) < len([*product(*axes)])
    for three in combinations(range(len(axes)), 3):
        found = {tuple(row[i] for i in three) for row in rows}
        assert found == {*product(*(axes[i] for i in three))}
