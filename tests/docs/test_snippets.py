"""Every block of code of every page runs, or its flags are parsed, or there is a reason why not.

A page's blocks of Python run in their order, as one program. Commands of the package itself run,
too; those that start training are parsed by the parsers of torchrun, of Megatron and of the plugin.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
from typing import Any, NoReturn

import pytest

from tests.distributed import run_ranks
from tests.docs.pages import PAGES, ROOT, blocks, commands

# What a page claims about the names that its Python leaves behind.
CLAIMS = {
    "README.md": "'prompt_mean loss' in reports[0]",
    "docs/custom_loop.md": "local.tolist() == [0, 1, 6, 7, 8, 11] and abs(3 * loss - 1) < 1e-6"
    " and 'squared loss' in reports[0]",
    "docs/distillation.md": "distilled(logits, logits, labels, mask)[1].loss_mask is mask",
    "docs/doors.md": "plan.coefficients(0).tolist() == [1 / 12, 1 / 20]",
    "docs/flags.md": "read((0, 0, 0, mask)).loss_mask.shape == (2, 2)",
    "docs/losses.md": "read({'texts': ['a', 'b']}).samples == 2",
    "docs/modes.md": "(square_root_of_length(plan_of(mask), 0) * 4)[1].tolist() == [0, 0, 2]",
    "docs/rl.md": "[plan.coefficients(i).tolist() for i in (0, 1)] == [[1 / 16] * 2, [1 / 4, 0]]"
    " and metrics.keys() >= {'policy loss', 'kl loss', 'loss', 'clip_fraction'}"
    " and 'kl of the policy' in reports[0]",
    "examples/grpo/README.md": "list(hook.terms) == ['policy', 'kl', 'entropy']",
    "patches/README.md": "install.__module__ == 'megatron_loss_agg.mcore.launch.install'",
}
# Commands that no test here can run, by how they begin: who runs them, or why nobody does.
ELSEWHERE = {
    "bash ci/": "continuous integration itself",
    "bash examples/quickstart.sh": "its commands run in tests/examples/test_quickstart.py",
    "bash examples/grpo/run.sh": "its loop runs in tests/examples/test_grpo_loop.py",
    "torchrun --nproc-per-node 4 -m examples.grpo.train": "as above",
    "PYTHONPATH=path/to/Megatron-LM python -m": "tests/launch/test_doctor.py",
    "PYTHONPATH=. torchrun --nproc-per-node 2 -m megatron_loss_agg --cpu tests/frameworks": (
        "tests/frameworks/test_bridge.py"
    ),
    "python patches/check.py": "tests/patches/test_check.py",
    "patch -p1": "tests/frameworks",
    "SKYRL=": "tests/frameworks",
    "SITE=": "tests/frameworks",
    "git -C path/to/": "ci/frameworks.sh, which needs the frameworks' repositories",
    "pip install": "changes the environment",
    "pip download": "as above",
    "python -m build": "needs build and twine: tests/test_packaging.py builds without them",
    "bash benchmarks/gpu.sh": "tests/gpu/test_gpu_script.py",
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
SHOWN = ("text", "json")  # what a command prints or reads


def _python(page: str) -> list[Any]:
    return [block for block in blocks(page) if block.language == "python"]


def _run_page(page: str) -> None:
    from tests.docs.prelude import names

    namespace = names()
    for block in _python(page):
        if block.text.startswith("--8<--"):
            continue  # a whole file
        # So that a traceback shows the page's own lines.
        code = "\n" * (block.line - 1) + block.text
        exec(compile(code, str(ROOT / page), "exec"), namespace)
    assert eval(CLAIMS[page], namespace), CLAIMS[page]


@pytest.mark.parametrize("page", filter(_python, PAGES))
def test_python_of_a_page_runs_in_order(page: str) -> None:
    assert page in CLAIMS, f"say in CLAIMS what holds after the Python of {page} has run"
    run_ranks(_run_page, 1, page, preload="tests.host.preload")


def test_every_block_is_known() -> None:
    known = ("python", "bash", *SHOWN)
    found = [block for page in PAGES for block in blocks(page)]
    assert [str(block) for block in found if block.language not in known] == []
    for page in PAGES:  # a command in an indented block would be seen by no test
        text = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL)
        assert re.findall(r"^    +(?:torchrun|python|pip|bash|[A-Z_]+=).*", text, re.M) == [], page


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def _check(command: str) -> None:
    """Run a command of the package; parse the flags of one that trains.

    Raises:
        ValueError: a flag or value that its parser does not know.
    """
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
    from torch.distributed.run import get_args_parser

    launched = get_args_parser().parse_args(words)
    script, flags = launched.training_script, launched.training_script_args
    if launched.module:
        assert script == "megatron_loss_agg"
        script, *flags = [word for word in flags if word != "--cpu"]
        flags = _parse_ours(flags)
    if os.path.basename(script).startswith(("pretrain_", "train_")):
        from megatron_loss_agg.mcore.launch.seams import seams

        parser = getattr(*seams()["add_arguments"][0])(_Parser(allow_abbrev=False))
        _, flags = parser.parse_known_args(flags)
        if flags:
            raise ValueError(f"unknown to Megatron: {flags}")


def _parse_ours(words: list[str]) -> list[str]:
    """Check our flags among ``words``; return the others."""
    from megatron_loss_agg.mcore.launch.flags import aggregation_from, taken_from

    ours, others = taken_from(words)
    if ours.get("loss_aggregation") != "MODE":
        aggregation_from(argparse.Namespace(**ours))
    return others


def _check_all(found: list[str], plots: str) -> list[str]:
    os.chdir(plots)
    failed = []
    for command in found:
        try:
            _check(command)
        except (Exception, SystemExit) as error:
            failed.append(f"{command}: {type(error).__name__}: {error}")
    return failed


def test_commands_run_or_parse(tmp_path: Any) -> None:
    found = [
        command
        for page in PAGES
        for block in blocks(page)
        if block.language == "bash"
        for command in commands(block)
    ]
    unused = [known for known in ELSEWHERE if not any(c.startswith(known) for c in found)]
    assert unused == []
    here = [command for command in found if not command.startswith(tuple(ELSEWHERE))]
    neither = [c for c in here if "megatron_loss_agg" not in c and not c.startswith("torchrun")]
    assert [c for c in neither if "MEGATRON_LOSS_AGG_FLAGS" not in c] == [], "add it to ELSEWHERE"
    every = [*here, *WRONG]
    (failed,) = run_ranks(_check_all, 1, every, str(tmp_path), preload="tests.host.preload")
    assert [line.partition(": ")[0] for line in failed] == WRONG, failed
