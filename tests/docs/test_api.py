"""The API pages hold every public name, with its docstring's sections rendered as such."""

from __future__ import annotations

import html
import inspect
import pkgutil
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import pytest

import megatron_loss_agg
from megatron_loss_agg import errors
from tests.distributed import run_ranks

ROOT = Path(__file__).parents[2]
_COMMANDS = ("megatron_loss_agg.explain",)  # whose __all__ is a command's main function
_PUBLIC_PATHS = {"megatron_loss_agg.losses.policy": "megatron_loss_agg.policy"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, str]:
    return {page.name: page.read_text() for page in site.glob("api*.html")}


def _public_names() -> list[str]:
    """The dotted paths of all names in `__all__` of all modules, and of their public members."""
    found = [f"{errors.__name__}.{name}" for name in vars(errors) if name.endswith("Error")]
    modules = pkgutil.walk_packages(megatron_loss_agg.__path__, "megatron_loss_agg.")
    sources = {"megatron_loss_agg": Path(megatron_loss_agg.__file__)}
    for module in modules:
        finder = module.module_finder.find_spec(module.name, None)  # type: ignore[call-arg]
        sources[module.name] = Path(str(finder and finder.origin))
    for name, source in sources.items():
        if "\n__all__ = " not in source.read_text() or name in _COMMANDS:
            continue
        module, path = import_module(name), _PUBLIC_PATHS.get(name, name)
        for public in module.__all__:
            found.append(f"{path}.{public}")
            value = getattr(module, public)
            if inspect.isclass(value):
                members = _members(value, module.__all__)
                found += [f"{path}.{public}.{member}" for member in members]
    return found


def _members(cls: type, public: Sequence[str]) -> list[str]:
    """Public members of a class that neither its docstring nor a base of public name describes."""
    described = {*re.findall(r"^ +(\w+): ", cls.__doc__ or "", re.MULTILINE)}
    members: list[str] = []
    for base in cls.__mro__:
        if base is not cls and base.__name__ in public:
            described |= {*vars(base)}
        elif base.__module__.startswith("megatron_loss_agg"):
            members += [x for x in vars(base) if not x.startswith("_")]
    return [member for member in members if member not in described]


def test_no_public_name_is_missing(pages: dict[str, str]) -> None:
    (names,) = run_ranks(_public_names, 1, preload="tests.host.preload")
    assert len(names) > 80
    shown = {name for page in pages.values() for name in re.findall(r'id="([\w.]+)"', page)}
    assert [name for name in names if name not in shown] == []


def test_no_section_of_a_docstring_is_shown_as_text(pages: dict[str, str]) -> None:
    for name, page in pages.items():
        assert re.findall(r"<p>\s*(?:Args|Attributes|Returns|Raises)\b.*?:", page) == [], name
        assert "::\n" not in page and "<p>::" not in page, name


def test_custom_loops_shows_the_example_whole(site: Path) -> None:
    page = html.unescape(re.sub(r"<[^>]+>", "", (site / "custom_loop.html").read_text()))
    assert (ROOT / "examples/custom_loop.py").read_text().strip() in page
