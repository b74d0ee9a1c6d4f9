"""The site in a browser: every page on a phone and on a desk, in both schemes; and its search.

Needs Chromium (apt-get install chromium). The site is served under a path, as a project's often is.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest
from mkdocs.config import load_config
from mkdocs.structure.files import get_files
from mkdocs.structure.nav import get_navigation
from playwright.sync_api import Browser, Page, sync_playwright

from tests.launch.processes import ROOT

UNDER = "under/a/path"
UNKNOWN = "of/no/page.html"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium: run apt-get install chromium"
)

# Typed queries, by the page that must be among the first three found.
SEARCHES = {
    query: page
    for page, queries in {
        "flags": [
            "--loss-aggregation-extension",
            "--loss-aggregation-divisor",
            "MEGATRON_LOSS_AGG_FLAGS",
            "no effect",
            "doctor",
            "--sft",
            "prompt ids",
            "yaml",
            "conversation",
        ],
        "losses": ["RouterLosses", "--mtp-num-layers", "MoE", "aux loss", "distillation", "liger"],
        "modes": [
            "prompt_mean",
            "nested_mean",
            "microbatch_mean",
            "dr_grpo",
            "seq-mean-token-mean",
            "bnpo",
            "DAPO",
            "multi-turn",
            "agent",
            "dataset weights",
            "denominator",
        ],
        "frameworks": ["slime", "verl", "NeMo-RL", "Bridge"],
        "rl": ["KL", "NaN", "entropy", "importance sampling", "PPO", "critic", "advantages"],
        "context_parallel": ["CP", "cu_seqlens_padded", "packing", "thd"],
        "custom_loop": ["LossHook", "DPO", "reward model", "async"],
        "troubleshooting": [
            "hang",
            "deadlock",
            "resume",
            "checkpoint",
            "clip-grad",
            "learning rate",
            "grad norm half",
        ],
        "start": [
            "Slurm",
            "kubernetes",
            "docker",
            "container",
            "requirements",
            "python version",
            "multi node",
            "cpu",
        ],
        "explain": ["--chats", "explain", "short chats"],
        "reports": [
            "wandb",
            "W&B",
            "tensorboard",
            "lm loss",
            "validation loss",
            "grad norm",
            "first lines",
            "perplexity",
            "evaluation",
        ],
        "theory": ["overhead", "performance", "memory", "gradient accumulation"],
        "limits": [
            "bf16",
            "fp16",
            "fp8",
            "GPU",
            "NCCL",
            "FSDP",
            "pipeline parallel",
            "tensor parallel",
        ],
        "api": ["HostError"],
    }.items()
    for query in queries
}


def pages() -> list[str]:
    """The addresses of the pages that mkdocs.yml lists."""
    config = load_config(str(ROOT / "mkdocs.yml"))
    nav = get_navigation(get_files(config), config)
    return [page.url for page in nav.pages]


class Handler(SimpleHTTPRequestHandler):
    """Serves files; for a page that is not there, 404.html."""

    def translate_path(self, path: str) -> str:
        file = super().translate_path(path)
        missing = file.endswith(".html") and not os.path.exists(file)
        return os.path.join(self.directory, UNDER, "404.html") if missing else file

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of the site that was built and is being served."""
    folder = tmp_path_factory.mktemp("site")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=folder)) as server:
        url = f"http://127.0.0.1:{server.server_port}/{UNDER}/"
        subprocess.run(
            [sys.executable, "-m", "mkdocs", "build", "-q", "--strict", "-d", folder / UNDER],
            cwd=ROOT,
            env={**os.environ, "SITE_URL": url},
            check=True,
        )
        Thread(target=server.serve_forever, daemon=True).start()
        yield url
        server.shutdown()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with (
        sync_playwright() as play,
        play.chromium.launch(executable_path=CHROMIUM, args=FLAGS) as chromium,
    ):
        yield chromium


@pytest.fixture
def page(browser: Browser, address: str) -> Iterator[Page]:
    """A tab, in which nothing may be loaded from elsewhere, fail to load, or end in an error."""
    faults = []
    with browser.new_page() as tab:
        tab.on("console", lambda said: said.type == "error" and faults.append(said.text))
        tab.on("pageerror", lambda error: faults.append(str(error)))
        tab.on("response", lambda answer: answer.status < 400 or faults.append(answer.url))
        tab.on("request", lambda r: r.url.startswith((address, "data:")) or faults.append(r.url))
        yield tab
    assert faults == []


# What a reader does not see: boxes whose content is wider than they are, or that are not on the
# page; and names in the first column of a table that are broken.
HIDDEN = """(mayScroll) => {
  const width = document.documentElement.clientWidth;
  const clips = (box) => box.clientWidth && box.scrollWidth > box.clientWidth + 1
    && getComputedStyle(box).overflowX !== "visible";
  const isOut = (box) => {
    const { left, right } = box.getBoundingClientRect();
    return left < 0 || right > width + 1;
  };
  const isBroken = (name) => !/\\s/.test(name.textContent)
    && name.offsetHeight / parseFloat(getComputedStyle(name).lineHeight) > 1.6;
  const boxes = [...document.querySelectorAll("article *")].filter((x) => !x.closest(mayScroll));
  const hidden = boxes.filter(
    (box) => clips(box) || (box.matches("pre, table, th, td, img") && isOut(box))
      || (box.matches("tr > :first-child code") && isBroken(box)));
  const page = document.documentElement.scrollWidth > width ? ["the page"] : [];
  return [...page, ...hidden.map((box) => `${box.tagName}: ${box.textContent.slice(0, 60)}`)];
}"""
# On a phone output keeps its columns, and pictures their letters: they scroll, each by itself.
MAY_SCROLL = {390: ".language-text code, div.math, p:has(> img:only-child)", 1440: "none"}


@pytest.mark.parametrize("width", [390, 1440])
def test_nothing_is_clipped_on_a_phone_and_on_a_desk(page: Page, address: str, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    hidden, tables, stacked = {}, 0, 0
    for url in [*pages(), UNKNOWN]:
        page.goto(address + url)
        hidden[url] = page.evaluate(HIDDEN, MAY_SCROLL[width])
        tables += page.locator("article table").count()
        stacked += page.locator("article table[data-stacked]").count()
    assert {url: boxes for url, boxes in hidden.items() if boxes} == {}
    assert tables > 10
    assert (stacked > 5) == (width == 390)


# The contrast of every link and of every piece of code, as WCAG defines it, by colours.
CONTRASTS = """() => {
  const rgba = (css) => {
    const [r, g, b, a = 1] = css.match(/^rgba?\\((.*)\\)$/)[1].split(",").map(Number);
    return [r, g, b, a];
  };
  const over = ([r, g, b, a], under) => [r, g, b].map((x, i) => a * x + (1 - a) * under[i]);
  const luminance = (rgb) => {
    const [r, g, b] = rgb.map((x) => x / 255).map(
      (x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const background = (element) =>
    element ? over(rgba(getComputedStyle(element).backgroundColor), background(element.parentElement))
      : [255, 255, 255];
  const contrasts = {};
  for (const element of document.querySelectorAll("article a, article code, article code span, nav a")) {
    const texts = [...element.childNodes].filter((x) => x.nodeType === 3 && x.textContent.trim());
    if (!texts.length || !element.checkVisibility({ opacityProperty: true })) continue;
    const under = background(element), colour = rgba(getComputedStyle(element).color);
    const [light, dark] = [luminance(under), luminance(over(colour, under))].sort((a, b) => b - a);
    const name = `${colour} on ${under.map(Math.round)}: ${texts[0].textContent.trim()}`;
    contrasts[`${colour} on ${under.map(Math.round)}`] = [(light + 0.05) / (dark + 0.05), name];
  }
  return Object.values(contrasts);
}"""


@pytest.mark.extended  # only colours of the site change it
def test_links_and_code_are_legible_in_both_schemes(page: Page, address: str) -> None:
    page.set_viewport_size({"width": 1440, "height": 900})
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        contrasts = {}
        for url in pages():
            page.goto(address + url)
            contrasts |= {name: contrast for contrast, name in page.evaluate(CONTRASTS)}
        assert len(contrasts) > 5
        assert {name: x for name, x in contrasts.items() if x < 4.5} == {}, scheme


# Keeps every query that is typed, and the addresses that the search answers with.
LISTEN = """
window.answers = [];
const Plain = Worker;
window.Worker = class extends Plain {
  constructor(...options) {
    super(...options);
    const queries = [];
    this.postMessage = (message) => {
      if (typeof message.data === "string") queries.push(message.data);
      Object.getPrototypeOf(this).postMessage.call(this, message);
    };
    this.addEventListener("message", ({ data }) => {
      const items = data.data?.items;
      if (items) answers.push([queries.shift(), items.map(([first]) => first.location)]);
    });
  }
};
"""
LAST_ANSWER = "typed => answers.at(-1)?.[0] === typed ? answers.at(-1)[1] : null"


def test_the_search_finds_names_flags_and_short_words(page: Page, address: str) -> None:
    page.set_viewport_size({"width": 1440, "height": 900})
    page.add_init_script(LISTEN)
    page.goto(address)
    found = {}
    for query in SEARCHES:
        page.locator("[data-md-component=search-query]").click()
        page.keyboard.press("Control+A")
        page.keyboard.type(query)
        answer = page.wait_for_function(LAST_ANSWER, arg=query).json_value()
        found[query] = [location.partition(".html")[0] for location in answer[:3]]
    first = page.locator(f".md-search-result__item a[href*='/{found[query][0]}.html']").first
    assert first.is_visible()
    assert len(SEARCHES) >= 60
    assert {q: x for q, x in found.items() if SEARCHES[q] not in x} == {}
