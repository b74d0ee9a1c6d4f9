"""Every block of code of every page runs, or its flags are parsed, or there is a reason why not.

A page's blocks of Python run in their order, as one program. Commands of the package itself run,
too; those that start training are parsed by the parsers of torchrun, of Megatron and of the plugin.
Every error that the pages quote exists. The site is built as strictly as MkDocs can, which follows
every link and anchor; what its pages load is in it.
"""

from __future__ import annotations

import argparse
import ast
import html
import os
import re
import shlex
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from markdown.extensions.toc import slugify

from megatron_loss_agg import LossAggregation, errors
from megatron_loss_agg.aggregation import MODES
from megatron_loss_agg.describe import formula
from tests.distributed import run_ranks
from tests.launch.processes import ROOT, run_afresh

PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md", "patches/*.md", "benchmarks/*.md")
    for path in ROOT.glob(pattern)
)
TEXTS = {page: (ROOT / page).read_text() for page in PAGES}
LANGUAGES = ("python", "bash", "text", "json", "yaml", "math")
_FENCE = re.compile(r"^( *)```(?:\{ \.)?(\w*)[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)

# What a page claims about the names that its Python leaves behind.
CLAIMS = {
    "README.md": "'prompt_mean loss' in reports[0]",
    "docs/context_parallel.md": "local.tolist() == [0, 1, 6, 7, 8, 11]",
    "docs/custom_loop.md": "'squared loss' in reports[0]",
    "docs/flags.md": "read((0, 0, 0, mask)).loss_mask.shape == (2, 2)",
    "docs/frameworks.md": "read({'loss_mask': mask[:1],"
    " 'cu_seqlens': mask.new_tensor([[0, 1, 2, 3, -1]]),"
    " 'cu_seqlens_argmin': mask.new_tensor([4]), 'token_count': mask.new_tensor([2])})"
    ".cu_seqlens.tolist() == [0, 1, 2]",
    "docs/losses.md": "(lambda hidden, loss: loss(hidden)[1] == loss.loss_mask.sum())"
    "(*forward_step(batches, model, without_head(model.module)))"
    " and distillation_loss(logits, logits, labels, mask)[1].loss_mask is mask",
    "docs/modes.md": "(weights_of(square_root_of_length, mask / 2) ** 2 * 16).round().tolist()"
    " == [[1, 1, 0], [0, 0, 2]]",  # a mask sum of 1 / 2 is not clamped to 1
    "docs/rl.md": "metrics.keys() >= {'policy loss', 'kl loss', 'loss', 'clip_fraction',"
    " 'kl of the policy'} and 'prompt_mean loss' in tree_reports[0]",
    "docs/start.md": "[plan.coefficients(i).tolist() for i in (0, 1)] == [[1 / 16] * 2, [1 / 4, 0]]",
    "examples/grpo/README.md": "list(hook.terms) == ['policy', 'kl', 'entropy']",
}
# Commands that no test here can run, by how they begin: who runs them, or why nobody does.
ELSEWHERE = {
    "bash ci/": "continuous integration itself",
    'source "$(dirname "$(bash ci/python.sh': "as above",
    ".venv/bin/python -m tests.mutants": "takes hours; tests/test_tools.py reads its list",
    "bash examples/quickstart.sh": "its commands run in tests/test_examples.py",
    "bash examples/short_chats.sh": "as above",
    "bash examples/layouts.sh": "as above",
    "bash examples/grpo/run.sh": "its loop runs in tests/test_examples.py",
    "torchrun --nproc-per-node 4 -m examples.grpo.train": "as above",
    "NNODES=": "tests/launch/test_cluster.py",
    "PYTHONPATH=path/to/Megatron-LM python -m": "tests/launch/test_commands.py",
    "PYTHONPATH=. torchrun --nproc-per-node 2 -m megatron_loss_agg --cpu tests/frameworks": (
        "tests/frameworks/test_bridge.py"
    ),
    "python -m megatron_loss_agg explain --data": (
        "tests/core/test_explain.py and tests/launch/test_data.py"
    ),
    "python -m megatron_loss_agg explain --chats": "tests/core/test_explain_chats.py",
    "printf": "tests/core/test_explain.py",
    "patch -p1": "tests/frameworks",
    "SKYRL=": "tests/frameworks",
    "python -m skyrl.": "tests/frameworks/test_skyrl.py",
    "PLUGIN=": "tests/frameworks/test_ms_swift.py",
    "megatron sft": "tests/frameworks/test_ms_swift.py",
    "git -C path/to/": "ci/frameworks.sh, which needs the frameworks' repositories",
    "pip install": "changes the environment",
    "pip download": "as above",
    "pre-commit install": "as above",
    "uv ": "as above",
    "python -m build": "needs build and twine: tests/test_packaging.py builds without them",
    "bash benchmarks/gpu.sh": "tests/gpu/test_gpu.py",
    "WHEELS=": "as above",
}
# Commands that must be found bad, each by another parser.
WRONG = [
    "torchrun --nprocs 8 -m megatron_loss_agg pretrain_gpt.py",
    "torchrun -m megatron_loss_agg pretrain_gpt.py --num-layer 2",
    "torchrun -m megatron_loss_agg my_loop.py --loss-aggregation mean",
    'MEGATRON_LOSS_AGG_FLAGS="--loss-aggregation-mode sum" ray start',
    "python -m megatron_loss_agg explain --length 1,2",
]


class Block(NamedTuple):
    """A fenced block of a page."""

    page: str
    line: int  # of its first line, from 1
    language: str
    text: str

    def commands(self) -> list[str]:
        """Those of a block in bash: without comments, each on one line."""
        joined = re.sub(r"\s*\\\n\s*", " ", self.text)
        lines = (re.sub(r"(^|\s)#.*", "", line).strip() for line in joined.splitlines())
        return [line for line in lines if line]


BLOCKS = [
    Block(page, text.count("\n", 0, found.start(3)) + 1, found[2], found[3])
    for page, text in TEXTS.items()
    for found in _FENCE.finditer(text)
]


def outside_of_blocks(page: str) -> str:
    return re.sub(r"```.*?```", "", TEXTS[page], flags=re.DOTALL)


def test_every_block_is_of_a_known_language_and_no_command_is_outside_of_one() -> None:
    assert [block for block in BLOCKS if block.language not in LANGUAGES] == []
    indented = r"^    +(?:torchrun|python|pip|bash|[A-Z_]+=).*"
    assert [x for p in PAGES for x in re.findall(indented, outside_of_blocks(p), re.M)] == []


def given_names() -> dict[str, Any]:
    """Names that the pages' Python does not define: a loop's own model, batches and forward step."""
    import torch
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    from examples.custom_loop import LENGTH, build, distribute, forward_step, rollouts
    from megatron_loss_agg import LossAggregation, Microbatch, StepPlan

    def weights_of(function: Any, mask: torch.Tensor) -> torch.Tensor:
        agg = LossAggregation(mode="custom", function=function)
        return StepPlan.build(agg, [Microbatch(mask)]).weights(0)

    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)
    model, whole, sizes = distribute(build()), rollouts(0), [1, 3, 2, 2, 1, 3, 2, 2]
    rows = len(whole["tokens"])
    whole |= {
        "labels": whole["tokens"].roll(-1, dims=1),
        "position_ids": torch.arange(LENGTH).repeat(rows, 1),
        "attention_mask": torch.ones(rows, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1),
        "advantages": whole["advantages"].expand(rows, LENGTH),
        "old_log_probs": torch.full((rows, LENGTH), -3.5),
        "reference_log_probs": torch.full((rows, LENGTH), -3.4),
    }
    parts = zip(*(value.split(sizes) for value in whole.values()), strict=True)
    step = [dict(zip(whole, part, strict=True)) for part in parts]
    config = OptimizerConfig(optimizer="adam", lr=0.01, min_lr=0.01, clip_grad=0.0)
    pairs = [{key: x.repeat_interleave(2, dim=0) for key, x in batch.items()} for batch in step]
    shape = {"num_microbatches": len(sizes), "seq_length": LENGTH, "micro_batch_size": 1}
    return {
        "model": model,
        "optimizer": get_megatron_optimizer(config, [model]),
        "step_in_memory": step,
        "loader": cycle(step),
        "batches": cycle(step),
        "pair_loader": cycle(pairs),
        "steps": 2,
        "forward_step": forward_step,
        "the_rest": {"model": [model], "forward_only": False, **shape},
        "mask": torch.tensor([[1, 1, 0], [0, 0, 1]]),
        "labels": torch.zeros(2, 3, dtype=torch.int64),
        "logits": torch.zeros(2, 3, 4),
        "weights_of": weights_of,
    }


def _run_page(blocks: list[Block], claim: str) -> None:
    namespace = given_names()
    for block in blocks:
        # So that a traceback shows the page's own lines.
        code = "\n" * (block.line - 1) + block.text
        exec(compile(code, str(ROOT / block.page), "exec"), namespace)
    assert eval(claim, namespace), claim


PYTHON = [block for block in BLOCKS if block.language == "python"]


@pytest.mark.parametrize("page", sorted({block.page for block in PYTHON}))
def test_python_of_a_page_runs_in_order(page: str) -> None:
    assert page in CLAIMS, f"say in CLAIMS what holds after the Python of {page} has run"
    whole_files = "--8<--"
    own = [x for x in PYTHON if x.page == page and not x.text.startswith(whole_files)]
    run_ranks(_run_page, 1, own, CLAIMS[page], preload="tests.host.preload")


def _check(command: str) -> None:
    """Run a command of the package; parse the flags of one that trains."""
    words = [word for word in shlex.split(command) if word != "..."]
    if words[:3] == ["python", "-m", "megatron_loss_agg"]:
        from megatron_loss_agg.__main__ import main

        assert main(words[3:]) in (0, 1)
        return
    for ours in re.findall(r'MEGATRON_LOSS_AGG_FLAGS="(.*?)"', command):
        _parse_ours(shlex.split(ours))
    if "torchrun" in words:
        _parse_run(words[words.index("torchrun") + 1 :])


def _parse_run(words: list[str]) -> None:
    from megatron.training.arguments import add_megatron_arguments
    from torch.distributed.run import get_args_parser

    from megatron_loss_agg.launch.flags import Parser

    launched = get_args_parser().parse_args(words)
    script, flags = launched.training_script, launched.training_script_args
    if launched.module:
        assert script == "megatron_loss_agg"
        script, *flags = [word for word in flags if word != "--cpu"]
        flags = _parse_ours(flags)
    if os.path.basename(script).startswith(("pretrain_", "train_")):
        _, unknown = add_megatron_arguments(Parser(allow_abbrev=False)).parse_known_args(flags)
        if unknown:
            raise ValueError(f"unknown to Megatron: {unknown}")


def _parse_ours(words: list[str]) -> list[str]:
    """Check our flags among ``words``; return the others."""
    from megatron_loss_agg.launch.flags import aggregation_from, parse_flags

    ours, others = parse_flags(words)
    if ours.get("loss_aggregation") != "MODE":
        aggregation_from(argparse.Namespace(**ours))
    return others


def _check_all(found: list[str], plots: str) -> list[str]:
    """Those that are wrong, each with its error."""
    os.chdir(plots)
    failed = []
    for command in found:
        try:
            _check(command)
        except (Exception, SystemExit) as error:
            failed.append(f"{command}: {type(error).__name__}: {error}")
    return failed


def test_commands_run_or_parse(tmp_path: Path) -> None:
    found = [c for block in BLOCKS if block.language == "bash" for c in block.commands()]
    assert [known for known in ELSEWHERE if not any(c.startswith(known) for c in found)] == []
    here = [command for command in found if not command.startswith(tuple(ELSEWHERE))]
    neither = [c for c in here if "megatron_loss_agg" not in c and not c.startswith("torchrun")]
    assert [c for c in neither if "MEGATRON_LOSS_AGG_FLAGS" not in c] == [], "add it to ELSEWHERE"
    every = [*here, *WRONG]
    (failed,) = run_ranks(_check_all, 1, every, str(tmp_path), preload="tests.host.preload")
    assert [line.partition(": ")[0] for line in failed] == WRONG, failed


def test_commands_on_data_leave_no_set_of_few_lines_empty() -> None:
    """As Megatron's default split does, whose run then ends in an error at its last evaluation."""
    found = [c for block in BLOCKS if block.language == "bash" for c in block.commands()]
    of_data = [c for c in found if "--data-path" in c.split()]
    assert of_data and [c for c in of_data if "--split 90,10,0" not in c] == []


def test_files_that_commands_name_exist() -> None:
    ours = re.compile(r"(?<![\w/.-])(?:ci|\.ci|examples|tests|docs)/[\w./-]+")
    named = {
        path for block in BLOCKS if block.language == "bash" for path in ours.findall(block.text)
    }
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


_LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]+))?\)")


def _anchors(page: str) -> set[str]:
    headings = re.findall(r"^#+ (.*)", outside_of_blocks(page), re.MULTILINE)
    return {slugify(re.sub(r"[`*]|\]\(.*?\)", "", heading), "-") for heading in headings}


# mkdocs checks those under docs/.
@pytest.mark.parametrize("page", [page for page in PAGES if not page.startswith("docs/")])
def test_links_lead_somewhere(page: str) -> None:
    dead = []
    for path, anchor in _LINK.findall(TEXTS[page]):
        target = ((ROOT / page).parent / path if path else ROOT / page).resolve()
        named = not anchor or anchor in _anchors(target.relative_to(ROOT).as_posix())
        if not target.exists() or not named:
            dead.append(f"{path}#{anchor}")
    assert dead == []


# The second sentence of a message: what to change.
_CURE = re.compile(
    r"[.:] …?(?:Add|Bind|Build|Call|Change|Choose|Close|Compute|Convert|Correct|Count|Decide|Declare|"
    r"Derive|Drop|Fix|Flatten|Give|Install|Leave|Let|Make|Mask|Name|Pad|Pass|Put|Raise|Read|Remove|Rename|"
    r"Report|Return|See|Set|Shard|Shift|Split|Train|Turn|Unset|Update|Use|Wrap|Write)\b"
)
_CURE_IS_FILLED_IN = re.compile(r"\. …$|^… was removed: …|a group\. … group=\.$")
_FEW = 14  # letters of a message that is made elsewhere
VERIFIED = TEXTS["docs/verification/index.md"]


def text_of(message: ast.expr) -> str:
    """The text of a message in the source, with … for what a run fills in."""
    match message:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(map(text_of, parts))
        case ast.BinOp(left=left, right=right):
            return text_of(left) + text_of(right)
    return "…"


def messages() -> list[str]:
    """Those of the named errors, where they are made with a text of their own."""
    sources = [path.read_text() for path in (ROOT / "megatron_loss_agg").rglob("*.py")]
    calls = [x for s in sources for x in ast.walk(ast.parse(s)) if isinstance(x, ast.Call)]
    texts = [text_of(x.args[0]) for x in calls if x.args and ast.unparse(x.func) in vars(errors)]
    return [text for text in texts if sum(map(str.isalpha, text)) > _FEW]


def test_every_error_says_what_to_do_and_those_that_troubleshooting_quotes_exist() -> None:
    found = messages()
    assert len(found) > 100
    assert [x for x in found if not (_CURE.search(x) or _CURE_IS_FILLED_IN.search(x))] == []
    quoted = re.findall(r'^\*\*"(.*?)"\*\*', TEXTS["docs/troubleshooting.md"], re.MULTILINE)
    assert len(quoted) > 5
    for quote in quoted:
        pattern = ".*".join(re.escape(part) for part in quote.split("..."))
        assert any(re.search(pattern, message) for message in found), quote


REPORT = """<testsuite><properties><property name="megatron-core" value="{0}"/></properties>
<testcase classname="a" name="test_a_sum[1]"/>
<testcase classname="a" name="test_a_sum[2]">{1}</testcase></testsuite>"""


def test_the_page_of_what_was_verified_counts_what_holds_of_what_ran(tmp_path: Path) -> None:
    reports = [tmp_path / "old.xml", tmp_path / "new.xml"]
    reports[0].write_text(REPORT.format("0.18.2", "<failure/>"))
    reports[1].write_text(REPORT.format("0.19.2", ""))
    printed = run_afresh("ci/verified.py", *map(str, reports)).stdout
    assert "| a sum | 1/2 | 2 |\n" in printed
    assert VERIFIED.startswith(printed[: printed.index("\n| 0.18.2")])


BY_RANKS = """| ranks | aggregation | gradient | metrics | stock's gradient |
| --- | --- | --- | --- | --- |
| DP 2 | stock |  |  | 3e-07 |
| DP 2 | sum | 4e-07 | 1e-07 | 2e-01 |
| CP 2 | sum | 5e-07 | nan | 1e-01 |
"""
BY_AGGREGATION = """| aggregation | DP 2 | CP 2 | metrics | stock's gradient |
| --- | --- | --- | --- | --- |
| stock | 3e-07 |  |  |  |
| sum | 4e-07 | 5e-07 | nan | 2e-01 |
"""


def test_errors_of_frameworks_have_a_column_for_each_layout_and_the_largest_of_the_others(
    tmp_path: Path,
) -> None:
    (tmp_path / "table.md").write_text(BY_RANKS)
    printed = run_afresh("ci/by_aggregation.py", str(tmp_path / "table.md")).stdout
    assert printed == BY_AGGREGATION


def test_the_page_on_limits_has_the_gradients_that_were_verified() -> None:
    (table,) = re.findall(r"^\| Megatron-Core \| comp.*\n(?:\|.*\n)+\n", VERIFIED, re.M)[:1]
    assert table in TEXTS["docs/limits.md"], "copy the first table of docs/verification/index.md"


def test_the_page_on_modes_weighs_a_token_as_the_log_says_it() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `(m_t.*?)`", TEXTS["docs/modes.md"], re.MULTILINE)
    options = {"nested_mean": {"levels": ("prompt", "sample")}, "constant": {"divisor": 10}}
    assert {mode for mode, _ in rows} == MODES.keys() - {"custom"}
    for mode, weight in rows:
        aggregation = LossAggregation(mode=mode, **options.get(mode, {}))
        assert formula(aggregation) == f"w_t = {weight.replace('D', '10')}"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    built = run_afresh("-m", "mkdocs", "build", "--strict", "-d", str(folder))
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def test_what_a_page_of_the_site_needs_is_in_the_site(site: Path) -> None:
    # The page of an unknown address is shown at any of them, so its links begin at the root.
    pages = [file for file in site.rglob("*.html") if file.name != "404.html"]
    loads = re.compile(r'<(?:script|img|link|iframe)\b[^>]*?\b(?:src|href)="([^"]*)"')
    needed = [file.parent / x for file in pages for x in loads.findall(file.read_text())]
    assert len(needed) > 5 * len(pages)
    assert [path for path in needed if not path.is_file()] == []


def test_formulas_are_drawn(site: Path) -> None:
    drawn = 0
    for source in (ROOT / "docs").glob("*.md"):
        formulas = source.read_text().count("```math") + source.read_text().count("$`")
        page = (site / f"{source.stem}.html").read_text()
        assert page.count('<svg role="img"') == formulas and "$<code>" not in page, source
        drawn += formulas
    assert drawn > 5


def test_the_first_page_is_the_readme_and_a_file_is_shown_whole(site: Path) -> None:
    first = (site / "index.html").read_text()
    assert "<h1" in first and 'href="modes.html"' in first and '="docs/' not in first
    guide = html.unescape(re.sub(r"<[^>]+>", "", (site / "custom_loop.html").read_text()))
    assert (ROOT / "examples/custom_loop.py").read_text().strip() in guide


def public_names() -> set[str]:
    """Those that a user imports, and the errors."""
    names = {name for name in vars(errors) if name.endswith("Error")}
    for source in (ROOT / "megatron_loss_agg").rglob("*.py"):
        for node in ast.parse(source.read_text()).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                names |= {*ast.literal_eval(node.value)}
    assert len(names) > 40
    return names - {"main"}  # of the command `explain`


def test_api_pages_hold_every_public_name_and_render_the_sections_of_its_docstring(
    site: Path,
) -> None:
    text = "".join(page.read_text() for page in site.glob("api*.html"))
    shown = {path.rpartition(".")[2] for path in re.findall(r'id="([\w.]+)"', text)}
    assert public_names() - shown == set()
    assert re.findall(r"<p>\s*(?:Args|Attributes|Returns|Raises)\b.*?:", text) == []
    assert "::\n" not in text and "<p>::" not in text


def test_the_page_of_the_api_lists_every_public_name_with_its_docstring_s_first_sentence() -> None:
    """For readers on a code host, which shows no docstrings."""
    sentences: dict[str, set[str]] = {}
    for source in (ROOT / "megatron_loss_agg").rglob("*.py"):
        for node in ast.parse(source.read_text()).body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
                text = " ".join((ast.get_docstring(node) or "").replace("``", "`").split())
                sentences.setdefault(node.name, set()).add(re.split(r"(?<=\.) ", text)[0])
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", TEXTS["docs/api.md"], re.MULTILINE)
    assert public_names() - dict(rows).keys() == set()
    assert [row for row in rows if row[1] not in sentences.get(row[0], {row[1]})] == []
    assert not re.search(r"^:::", TEXTS["docs/api.md"], re.MULTILINE)
