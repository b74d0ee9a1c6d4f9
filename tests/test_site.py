"""The site is built, its links and anchors lead somewhere, and its pages open in a browser.

The part in a browser needs Chromium on the PATH; everything else runs anywhere.
"""

from __future__ import annotations

import functools
import html
import inspect
import pkgutil
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

import megatron_loss_agg
from megatron_loss_agg import errors
from tests.browser import CHROMIUM, Browser, browser
from tests.distributed import run_ranks

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


class Page(HTMLParser):
    """What a page refers to, and the anchors that it has."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(file.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.links.append(value)
            elif name == "id" and value:
                self.anchors.add(value)


def test_every_link_and_anchor_leads_somewhere(site: Path) -> None:
    # The page of an unknown address is shown at any of them, so its links begin at the root.
    files = [file for file in site.rglob("*.html") if file.name != "404.html"]
    pages = {file: Page(file) for file in files}
    dead, seen = [], 0
    for file, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme:
                continue
            seen += 1
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            anchors = pages[target].anchors if target in pages else set()
            if not target.is_file() or (parts.fragment and unquote(parts.fragment) not in anchors):
                dead.append((file.name, link))
    assert seen > 1000
    assert dead == []


def test_nothing_that_a_page_needs_comes_from_elsewhere(site: Path) -> None:
    loads = re.compile(r"<(?:script|img|link|iframe)\b[^>]*(?:src|href)=\"(?:https?:)?//[^\"]*")
    assert [(f.name, x) for f in site.rglob("*.html") for x in loads.findall(f.read_text())] == []


def test_formulas_are_drawn(site: Path) -> None:
    sources = {file.stem: file.read_text() for file in (ROOT / "docs").glob("*.md")}
    assert sum(text.count("```math") for text in sources.values()) > 5
    for name, text in sources.items():
        formulas = text.count("```math") + text.count("$`")
        page = (site / f"{name}.html").read_text()
        assert page.count('<svg role="img"') == formulas and "$<code>" not in page, name


def test_the_first_page_is_the_readme_and_a_file_is_shown_whole(site: Path) -> None:
    first = (site / "index.html").read_text()
    assert "<h1" in first and 'href="modes.html"' in first and '="docs/' not in first
    guide = html.unescape(re.sub(r"<[^>]+>", "", (site / "custom_loop.html").read_text()))
    assert (ROOT / "examples/custom_loop.py").read_text().strip() in guide


_COMMANDS = ("megatron_loss_agg.explain",)  # whose __all__ is a command's main function
_PUBLIC_PATHS = {"megatron_loss_agg.losses.policy": "megatron_loss_agg.policy"}


def _public_names() -> list[str]:
    """The dotted paths of all names in `__all__` of all modules, and of their public members."""
    found = [f"{errors.__name__}.{name}" for name in vars(errors) if name.endswith("Error")]
    modules = pkgutil.walk_packages(megatron_loss_agg.__path__, "megatron_loss_agg.")
    for name in ("megatron_loss_agg", *(module.name for module in modules)):
        path = ROOT / name.replace(".", "/")
        source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if "\n__all__ = " not in source.read_text() or name in _COMMANDS:
            continue
        module, place = import_module(name), _PUBLIC_PATHS.get(name, name)
        for public in module.__all__:
            value = getattr(module, public)
            members = _members(value, module.__all__) if inspect.isclass(value) else []
            found += [f"{place}.{public}", *(f"{place}.{public}.{member}" for member in members)]
    return found


def _members(cls: type, public: list[str]) -> list[str]:
    """Public members of a class that neither its docstring nor a base of public name describes."""
    described = {*re.findall(r"^ +(\w+): ", cls.__doc__ or "", re.MULTILINE)}
    members: list[str] = []
    for base in cls.__mro__:
        if base is not cls and base.__name__ in public:
            described |= {*vars(base)}
        elif base.__module__.startswith("megatron_loss_agg"):
            members += [x for x in vars(base) if not x.startswith("_")]
    return [member for member in members if member not in described]


def test_api_pages_hold_every_public_name_and_render_the_sections_of_its_docstring(
    site: Path,
) -> None:
    pages = {page.name: page.read_text() for page in site.glob("api*.html")}
    (names,) = run_ranks(_public_names, 1, preload="tests.host.preload")
    assert len(names) > 80
    shown = {name for page in pages.values() for name in re.findall(r'id="([\w.]+)"', page)}
    assert [name for name in names if name not in shown] == []
    for name, page in pages.items():
        assert re.findall(r"<p>\s*(?:Args|Attributes|Returns|Raises)\b.*?:", page) == [], name
        assert "::\n" not in page and "<p>::" not in page, name


# In a browser.


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """Where the site is served."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None: ...

    handler = functools.partial(Quiet, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if not CHROMIUM:
        pytest.skip("no Chromium on the PATH")
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def complaints(opened: Browser) -> list[Any]:
    """Uncaught exceptions, errors of the console, and what could not be loaded."""
    found = []
    for event in opened.events:
        parameters = event["params"]
        if event["method"] == "Runtime.exceptionThrown":
            found.append(parameters["exceptionDetails"])
        elif event["method"] == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            found.append(parameters["entry"])
        elif event["method"] == "Runtime.consoleAPICalled" and parameters["type"] == "error":
            found.append(parameters["args"])
    return found


@pytest.mark.parametrize("width, scheme", [(390, "dark"), (1280, "light")])
def test_pages_fit_a_phone_and_a_desktop_without_an_error(
    site: Path, address: str, chromium: Browser, width: int, scheme: str
) -> None:
    screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    chromium("Emulation.setDeviceMetricsOverride", **screen)
    preferred = {"name": "prefers-color-scheme", "value": scheme}
    chromium("Emulation.setEmulatedMedia", features=[preferred])
    wrong = {}
    for file in site.rglob("*.html"):
        path = file.relative_to(site).as_posix()
        chromium.open(address + path)
        root = "document.documentElement"
        beyond = chromium.value(f"{root}.scrollWidth - {root}.clientWidth")
        shown = chromium.value(f"{root}.dataset.bsTheme")
        if found := complaints(chromium):
            wrong[path] = found
        elif (beyond, shown) != (0, scheme):
            wrong[path] = [f"{beyond} pixels too wide, {shown}"]
    assert wrong == {}


def test_a_search_finds_pages(address: str, chromium: Browser) -> None:
    chromium.open(f"{address}start.html")
    found = chromium.value(
        """new Promise(done => {
            const query = document.getElementById("mkdocs-search-query");
            const results = document.getElementById("mkdocs-search-results");
            const type = left => {  // again until the index is loaded
                const links = [...results.querySelectorAll("a")].map(link => link.href);
                if (links.length || !left) return done(links);
                query.value = "zero_grad_buffer";
                query.dispatchEvent(new Event("keyup"));
                setTimeout(type, 100, left - 1);
            };
            type(300);
        })"""
    )
    assert any("custom_loop.html" in link for link in found)


def test_a_button_copies_a_block_of_code(address: str, chromium: Browser) -> None:
    permissions = ["clipboardReadWrite", "clipboardSanitizedWrite"]
    chromium("Browser.grantPermissions", permissions=permissions)
    chromium("Emulation.setFocusEmulationEnabled", enabled=True)
    chromium.open(address + "doors.html")
    chromium.value("document.querySelector('button.copy').click()")
    copied = chromium.value("navigator.clipboard.readText()")
    blocks = re.findall(r"```\w+\n(.*?)```", (ROOT / "docs/doors.md").read_text(), re.DOTALL)
    assert copied == blocks[0]
    assert chromium.value("document.querySelectorAll('button.copy').length") == len(blocks)
