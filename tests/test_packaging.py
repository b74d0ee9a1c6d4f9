"""What is built, installed and documented: the wheel, its metadata, the pins, the commands."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from configparser import ConfigParser
from email.message import Message
from email.parser import Parser
from importlib import import_module
from pathlib import Path
from zipfile import ZipFile

import pytest

import megatron_loss_agg

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "megatron_loss_agg"
SCRIPTS = [ROOT / ".ci/run", *ROOT.glob("ci/*.sh"), *ROOT.glob("examples/*.sh")]
GUIDES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> ZipFile:
    """The built wheel; built from a copy, since a build leaves files beside its sources."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(PACKAGE, source / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check"]
    command += ["--no-index", "--no-deps", "--no-build-isolation"]
    built = subprocess.run(
        [*command, "--wheel-dir", str(folder), str(source)], capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr
    (path,) = folder.glob("*.whl")
    return ZipFile(path)


@pytest.fixture(scope="module")
def metadata(wheel: ZipFile) -> Message:
    return Parser().parsestr(_dist_info(wheel, "METADATA"))


def _dist_info(wheel: ZipFile, name: str) -> str:
    (path,) = (path for path in wheel.namelist() if path.endswith(f".dist-info/{name}"))
    return wheel.read(path).decode()


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_wheel_holds_the_whole_package_and_nothing_else(wheel: ZipFile) -> None:
    sources = {
        path.relative_to(ROOT).as_posix()
        for path in PACKAGE.rglob("*")
        if path.suffix == ".py" or path.name == "py.typed"
    }
    shipped = {path for path in wheel.namelist() if ".dist-info/" not in path}
    assert "megatron_loss_agg/py.typed" in shipped
    assert shipped == sources


def test_the_metadata_names_the_licence_and_torch_alone(wheel: ZipFile, metadata: Message) -> None:
    assert any(path.endswith("LICENSE") for path in wheel.namelist())
    assert metadata["License"] == "Apache-2.0"
    requirements = metadata.get_all("Requires-Dist") or []
    assert [r for r in requirements if "extra ==" not in r] == ["torch>=2.6"]
    # On the package index this name is another project than NVIDIA's.
    assert not [r for r in requirements if r.startswith("apex")]


def test_one_version_everywhere(metadata: Message) -> None:
    assert metadata["Version"] == megatron_loss_agg.__version__
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert headings[1:2] in ([], [megatron_loss_agg.__version__])
    assert f"\nversion: {megatron_loss_agg.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    command = [sys.executable, "-m", "megatron_loss_agg", "--version"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert printed == f"megatron-loss-agg {megatron_loss_agg.__version__}\n"


def test_the_console_script_resolves(wheel: ZipFile) -> None:
    config = ConfigParser()
    config.read_string(_dist_info(wheel, "entry_points.txt"))
    module, _, function = config["console_scripts"]["megatron-loss-agg"].partition(":")
    assert callable(getattr(import_module(module), function))


@pytest.mark.parametrize("extra", [None, "mcore", "test", "rl"])
def test_what_the_environment_installs_is_pinned(metadata: Message, extra: str | None) -> None:
    required = {
        _normal(re.split(r"[^\w.-]", requirement)[0])
        for requirement in metadata.get_all("Requires-Dist") or []
        if (f'extra == "{extra}"' in requirement if extra else "extra ==" not in requirement)
    }
    assert required
    pins = re.findall(r"^([^#\s]+)==", (ROOT / "ci/constraints.txt").read_text(), re.MULTILINE)
    assert required <= {_normal(name) for name in pins}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse_and_may_be_executed(script: Path) -> None:
    assert script.stat().st_mode & 0o100
    assert script.read_text().startswith("#!/usr/bin/env bash\n")
    subprocess.run(["bash", "-n", script], check=True)


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_files_that_a_guide_names_exist(guide: Path) -> None:
    text = guide.read_text()
    blocks = re.findall(r"```(?:bash|sh|console|shell)\n(.*?)```", text, re.DOTALL)
    ours = re.findall(r"(?<![\w/.-])(?:ci|\.ci|examples|tests|docs)/[\w./-]+", "".join(blocks))
    assert [path for path in ours if not (ROOT / path).exists()] == []
    links = re.findall(r"\]\((?!https?:|mailto:|#)([^)#\s]+)", text)
    assert [link for link in links if not (guide.parent / link).exists()] == []


def test_the_page_of_errors_is_that_of_the_source() -> None:
    command = [sys.executable, str(ROOT / "ci/errors.py")]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    page = (ROOT / "docs/errors.md").read_text()
    assert page == printed, "run python ci/errors.py >docs/errors.md"
