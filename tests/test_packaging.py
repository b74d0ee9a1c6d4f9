"""The published files: the sources, the wheel and its metadata; pins, file modes, a host's settings."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from email.message import Message
from email.parser import Parser
from importlib.metadata import packages_distributions
from pathlib import Path
from zipfile import ZipFile

import pytest
import yaml

import megatron_loss_agg

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "megatron_loss_agg"
SOURCES = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md")
VERSION = megatron_loss_agg.__version__
BUILD = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"


def run(*command: object, cwd: Path = Path(os.sep)) -> str:
    """The output of the command, which must succeed, and sees nothing of this checkout."""
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
        if repository:
            text = re.sub(
                '^# (\\[project.urls\\]\n)# Source = ".*"$',
                rf'\1Source = "{repository}"',
                text,
                flags=re.M,
            )
        (source / name).write_text(text)
    run(sys.executable, "-c", BUILD, folder, cwd=source)
    (path,) = folder.glob("*.tar.gz")
    return path


def new_environment(folder: Path) -> Path:
    """The folder of its packages."""
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    (site,) = folder.glob("lib/python*/site-packages")
    return site


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist: Path) -> Path:
    """Built from the sources for the package index."""
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", sdist.parent, sdist)
    (path,) = sdist.parent.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    (path,) = (path for path in ZipFile(wheel).namelist() if path.endswith("/METADATA"))
    return Parser().parsestr(ZipFile(wheel).read(path).decode())


def test_the_sources_and_the_wheel_hold_the_whole_package_and_no_tests(
    sdist: Path, wheel: Path
) -> None:
    package = {p.relative_to(ROOT).as_posix() for p in PACKAGE.rglob("*.py")}
    package.add("megatron_loss_agg/py.typed")
    assert {path for path in ZipFile(wheel).namelist() if ".dist-info/" not in path} == package
    assert any(path.endswith("LICENSE") for path in ZipFile(wheel).namelist())
    with tarfile.open(sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    made = {"PKG-INFO", "setup.cfg"} | {n for n in names if ".egg-info/" in n}
    assert names - made == {*package, *SOURCES, "CITATION.cff"}


def test_links_of_the_description_lead_to_the_release_once_the_sources_have_an_address(
    metadata: Message, tmp_path: Path
) -> None:
    relative = r"\]\((?!https?:|#)"
    assert re.findall(relative, str(metadata.get_payload())) == []
    with tarfile.open(build(tmp_path, "https://host.example/loss")) as archive:
        (path,) = (name for name in archive.getnames() if re.fullmatch("[^/]+/PKG-INFO", name))
        file = archive.extractfile(path)
        assert file is not None
        text = file.read().decode()
    of_release = f"https://host.example/loss/blob/v{VERSION}"
    assert "\nProject-URL: Source, https://host.example/loss\n" in text
    assert f"]({of_release}/docs/modes.md)" in text
    assert re.findall(relative, text) == []
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]*)", text)
    assert pictures and all(x.startswith(of_release.replace("blob", "raw")) for x in pictures)


@pytest.mark.extended
def test_the_wheel_works_beside_an_existing_torch_and_megatron(wheel: Path, tmp_path: Path) -> None:
    (new_environment(tmp_path) / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip("install", "--no-deps", wheel, python=tmp_path / "bin/python")
    found = run(tmp_path / "bin/python", "-c", "import megatron_loss_agg as m; print(m.__file__)")
    assert Path(found).is_relative_to(tmp_path)
    command = tmp_path / "bin/megatron-loss-agg"
    assert f"megatron_loss_agg   {VERSION}\n" in run(command, "doctor")
    assert run(command, "--version") == f"megatron-loss-agg {VERSION}\n"


# What NVIDIA's images of 2025 say of their own builds; the first is the oldest that is accepted.
@pytest.mark.parametrize("torch", ["2.6.0a0+ecf3bae40a.nv25.1", "2.9.0a0+145a3a7bda.nv25.10"])
def test_an_images_own_torch_and_megatron_are_kept(torch: str, wheel: Path, tmp_path: Path) -> None:
    site = new_environment(tmp_path)
    image = {"numpy": "1.26.4", "torch": torch, "megatron_core": "0.14.0"}
    for name, version in image.items():
        info = site / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    said = pip("install", "--dry-run", f"{wheel}[mcore]", python=tmp_path / "bin/python")
    assert f"Would install megatron-loss-agg-{VERSION}\n" in said


def test_the_metadata_names_the_licence_and_torch_with_numpy_alone(metadata: Message) -> None:
    assert metadata["License-Expression"] == "Apache-2.0"
    requirements = metadata.get_all("Requires-Dist") or []
    assert [r for r in requirements if "extra ==" not in r] == ["numpy", "torch>=2.6.0a0"]
    # On the package index this name is another project than NVIDIA's.
    assert not [r for r in requirements if r.startswith("apex")]


def test_one_version_everywhere(metadata: Message) -> None:
    assert metadata["Version"] == VERSION
    changes = (ROOT / "CHANGELOG.md").read_text()
    unreleased, newest, *_ = re.findall(r"^## (.+)", changes, re.MULTILINE)
    assert unreleased == "[Unreleased]"
    date = re.fullmatch(rf"\[{re.escape(VERSION)}\] - (\d{{4}}-\d\d-\d\d)", newest)
    assert date
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {VERSION}\ndate-released: {date[1]}\n" in citation


def declared(metadata: Message) -> set[str]:
    """The names of all requirements, of every extra."""
    requirements = metadata.get_all("Requires-Dist") or []
    return {re.split(r"[^\w.-]", requirement)[0].lower() for requirement in requirements}


def test_what_the_environment_of_the_tests_needs_is_pinned(metadata: Message) -> None:
    pins = re.findall(r"^([^#\s]+)==", (ROOT / "ci/constraints.txt").read_text(), re.MULTILINE)
    others = {"transformer-engine", "megatron-loss-agg"}  # of the extra for a GPU, and itself
    assert declared(metadata) - others <= {pin.lower() for pin in pins}


# Of the frameworks and systems of ci/peers.txt and ci/hugging_face.txt, which have folders of their own.
USE_PEERS = ("tests/frameworks/", "tests/peers/", "tests/core/test_explain_chats.py")


def test_the_extra_of_the_tests_has_all_that_they_import(metadata: Message) -> None:
    wanted = declared(metadata)
    distributions = packages_distributions()
    files = [
        path
        for folder in ("tests", "examples", "benchmarks", "docs")
        for path in (ROOT / folder).rglob("*.py")
    ]
    ours = {"megatron_loss_agg", "tests", "examples", "benchmarks", *(path.stem for path in files)}
    missing = set()
    for path in files:
        if path.relative_to(ROOT).as_posix().startswith(USE_PEERS):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [x.name for x in node.names] if isinstance(node, ast.Import) else []
            for name in {x.partition(".")[0] for x in modules} - sys.stdlib_module_names - ours:
                if not {x.lower() for x in distributions.get(name, ())} & wanted:
                    missing.add(name)
    assert missing == set()


def test_scripts_parse_and_may_be_executed() -> None:
    folders = ("ci", "examples", "docs/images")
    scripts = (script for folder in folders for script in (ROOT / folder).glob("*.sh"))
    for script in (ROOT / ".ci/run", *scripts):
        assert script.stat().st_mode & 0o100, script
        assert script.read_text().startswith("#!/usr/bin/env bash\n"), script
        subprocess.run(["bash", "-n", script], check=True)


def test_a_code_host_runs_what_ci_runs_and_its_forms_ask() -> None:
    host = ROOT / ".github"
    workflow = yaml.safe_load((host / "workflows/ci.yml").read_text())
    (job,) = workflow["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == ["bash .ci/run"]
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    script = (ROOT / "ci/test.sh").read_text()
    commands = [hook["entry"].replace("python", '"$python"') for hook in local["hooks"]]
    assert len(commands) == 3 and all(f"    {command}" in script for command in commands)
    forms = [*host.glob("ISSUE_TEMPLATE/*.yml")]
    assert len(forms) == 2
    for form in forms:
        content = yaml.safe_load(form.read_text())
        assert {"name", "description", "body"} == content.keys()
        assert all(field["attributes"]["label"] for field in content["body"])
