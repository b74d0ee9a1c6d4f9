"""What is built and installed: the wheel, its metadata, the pins, the scripts."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from email.message import Message
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

import pytest

import megatron_loss_agg

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "megatron_loss_agg"
SCRIPTS = [ROOT / ".ci/run", *ROOT.glob("ci/*.sh"), *ROOT.glob("examples/*.sh")]
SOURCES = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md")
OUTSIDE = Path(os.sep)
BUILD = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"


def run(*command: object, cwd: Path = OUTSIDE) -> str:
    """What the command prints; it must succeed, and sees nothing of this checkout."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def pip(*arguments: object, python: object = sys.executable) -> str:
    options = ("--disable-pip-version-check", "--no-input", "--python", python)
    return run(sys.executable, "-m", "pip", *options, *arguments, "--no-index")


def build(folder: Path, repository: str = "") -> Path:
    """The sources for the package index, from a copy, since a build leaves files beside its own."""
    source = folder / "source"
    shutil.copytree(PACKAGE, source / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    (source / "tests").mkdir()
    shutil.copy(Path(__file__), source / "tests")  # which setuptools takes, unless told otherwise
    for name in (*SOURCES, "CITATION.cff"):
        text = (ROOT / name).read_text()
        if name == "setup.py":
            text = text.replace('REPOSITORY = ""\n', f"REPOSITORY = {repository!r}\n")
        (source / name).write_text(text)
    run(sys.executable, "-c", BUILD, folder, cwd=source)
    (path,) = folder.glob("*.tar.gz")
    return path


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel_file(sdist: Path) -> Path:
    """The wheel, built from the sources for the package index."""
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", sdist.parent, sdist)
    (path,) = sdist.parent.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def wheel(wheel_file: Path) -> ZipFile:
    return ZipFile(wheel_file)


@pytest.fixture(scope="module")
def environment(wheel_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel in a new environment, which sees the packages of this one: torch, Megatron."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip("install", "--no-deps", wheel_file, python=folder / "bin/python")
    return folder / "bin"


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


def test_the_sources_hold_what_builds_the_wheel_and_what_a_reader_needs(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    made = {"PKG-INFO", "setup.cfg"} | {n for n in names if ".egg-info/" in n}
    package = {p.relative_to(ROOT).as_posix() for p in PACKAGE.rglob("*.py")}
    package.add("megatron_loss_agg/py.typed")
    assert names - made == {*package, *SOURCES, "CITATION.cff"}


def test_links_lead_to_the_repository_once_it_has_an_address(tmp_path: Path) -> None:
    with tarfile.open(build(tmp_path, "https://host.example/loss")) as archive:
        (path,) = (name for name in archive.getnames() if re.fullmatch("[^/]+/PKG-INFO", name))
        file = archive.extractfile(path)
        assert file is not None
        text = file.read().decode()
    of_release = f"https://host.example/loss/blob/v{megatron_loss_agg.__version__}"
    assert f"\nProject-URL: Changelog, {of_release}/CHANGELOG.md\n" in text
    assert f"]({of_release}/docs/modes.md)" in text
    assert re.findall(r"\]\((?!https?:|#)", text) == []
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]*)", text)
    assert pictures and all(x.startswith(of_release.replace("blob", "raw")) for x in pictures)


@pytest.mark.host
def test_the_wheel_works_beside_an_existing_torch_and_megatron(environment: Path) -> None:
    found = run(environment / "python", "-c", "import megatron_loss_agg as m; print(m.__file__)")
    assert Path(found).is_relative_to(environment.parent)
    said = run(environment / "megatron-loss-agg", "doctor")
    assert f"megatron_loss_agg   {megatron_loss_agg.__version__}\n" in said


# What NVIDIA's images of 2025 say of their own builds; the first is the oldest that is accepted.
IMAGES = ("2.6.0a0+ecf3bae40a.nv25.1", "2.8.0a0+5228986c39.nv25.6", "2.9.0a0+145a3a7bda.nv25.10")


@pytest.mark.parametrize("torch", IMAGES)
@pytest.mark.parametrize("extras", ["", "[mcore]"])
def test_an_images_own_torch_and_megatron_are_kept(
    extras: str, torch: str, wheel_file: Path, tmp_path: Path
) -> None:
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path)
    (site,) = tmp_path.glob("lib/python*/site-packages")
    for name, version in (("torch", torch), ("megatron_core", "0.14.0")):
        info = site / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    said = pip("install", "--dry-run", f"{wheel_file}{extras}", python=tmp_path / "bin/python")
    assert f"Would install megatron-loss-agg-{megatron_loss_agg.__version__}\n" in said


def test_an_editable_install_is_the_checkout(tmp_path: Path) -> None:
    source, folder = tmp_path / "source", tmp_path / "environment"
    shutil.copytree(PACKAGE, source / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in SOURCES:
        shutil.copy(ROOT / name, source)
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python = folder / "bin/python"
    pip("install", "--no-deps", "--no-build-isolation", "--editable", source, python=python)
    found = run(python, "-c", "import megatron_loss_agg as m; print(m.__file__)")
    assert Path(found).is_relative_to(source)


def test_the_extras_resolve(environment: Path, wheel_file: Path) -> None:
    wanted = f"{wheel_file}[mcore,plot,rl,test,docs]"
    constraints = ("--constraint", ROOT / "ci/constraints.txt")
    said = pip("install", "--dry-run", *constraints, wanted, python=environment / "python")
    assert "Would install" not in said


def test_the_metadata_names_the_licence_and_torch_alone(wheel: ZipFile, metadata: Message) -> None:
    assert any(path.endswith("LICENSE") for path in wheel.namelist())
    assert metadata["License-Expression"] == "Apache-2.0"
    requirements = metadata.get_all("Requires-Dist") or []
    assert [r for r in requirements if "extra ==" not in r] == ["torch>=2.6.0a0"]
    # On the package index this name is another project than NVIDIA's.
    assert not [r for r in requirements if r.startswith("apex")]


def test_one_version_everywhere(metadata: Message, environment: Path) -> None:
    assert metadata["Version"] == megatron_loss_agg.__version__
    changes = (ROOT / "CHANGELOG.md").read_text()
    unreleased, newest, *_ = re.findall(r"^## (.+)", changes, re.MULTILINE)
    assert unreleased == "[Unreleased]"
    date = re.fullmatch(
        rf"\[{re.escape(megatron_loss_agg.__version__)}\] - (\d{{4}}-\d\d-\d\d)", newest
    )
    assert date
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {megatron_loss_agg.__version__}\ndate-released: {date[1]}\n" in citation
    printed = run(environment / "megatron-loss-agg", "--version")
    assert printed == f"megatron-loss-agg {megatron_loss_agg.__version__}\n"


def test_what_the_environment_installs_is_pinned(metadata: Message) -> None:
    installed = {"", "mcore", "test", "docs", "plot", "rl"}  # "" is no extra
    required: dict[str, set[str]] = {}
    for requirement in metadata.get_all("Requires-Dist") or []:
        extra = "".join(re.findall(r'extra == "(\w+)"', requirement))
        required.setdefault(extra, set()).add(_normal(re.split(r"[^\w.-]", requirement)[0]))
    assert installed <= required.keys()
    pins = re.findall(r"^([^#\s]+)==", (ROOT / "ci/constraints.txt").read_text(), re.MULTILINE)
    assert set.union(*(required[x] for x in installed)) <= {_normal(name) for name in pins}


def test_scripts_parse_and_may_be_executed() -> None:
    for script in SCRIPTS:
        assert script.stat().st_mode & 0o100, script
        assert script.read_text().startswith("#!/usr/bin/env bash\n"), script
        subprocess.run(["bash", "-n", script], check=True)
