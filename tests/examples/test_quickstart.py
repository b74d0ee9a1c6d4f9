"""`examples/quickstart.sh` in its own flags: the training and the proof; and the custom loop."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch import processes
from tests.launch.processes import LAUNCHER, ROOT

pytestmark = pytest.mark.host

STEPS = 10
SCRIPT = ROOT / "examples/pretrain_gpt.py"
SHORT = ("--train-iters", str(STEPS), "--eval-iters", "1")


def torchrun(ranks: int, *command: str) -> subprocess.CompletedProcess[str]:
    """Run under torchrun on this machine; stdout and stderr together."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    path = os.pathsep.join([str(ROOT), str(ROOT / "examples")])
    return subprocess.run(
        [*launcher, "--nproc-per-node", str(ranks), *command],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )


def quickstart_flags(name: str = "quickstart.sh") -> list[str]:
    """The array of flags in the shell script."""
    script = (ROOT / "examples" / name).read_text()
    found = re.search(r"^flags=\((.*?)^\)", script, re.MULTILINE | re.DOTALL)
    assert found
    return shlex.split(found.group(1), comments=True)


def losses(said: str) -> dict[str, list[float]]:
    """The loss of every step, by the name that its progress line gives."""
    lines = re.findall(r"iteration +\d+/ .*", said)
    found: dict[str, list[float]] = {}
    for name, value in re.findall(r"\| (\w+ loss): (\S+)", "\n".join(lines)):
        found.setdefault(name, []).append(float(value))
    return found


@pytest.fixture(scope="module")
def trained() -> dict[str, list[float]]:
    run = torchrun(4, *LAUNCHER, str(SCRIPT), *quickstart_flags(), *SHORT)
    assert run.returncode == 0, run.stdout[-4000:]
    return losses(run.stdout)


@pytest.mark.slow
def test_every_step_prints_both_losses_and_they_fall(trained: dict[str, list[float]]) -> None:
    assert set(trained) == {"lm loss", "prompt_mean loss"}
    for values in trained.values():
        assert len(values) == STEPS
        assert 5.5 < values[0] < 6.5  # a uniform guess among 384 tokens: ln 384 = 5.95
        assert max(values[-3:]) < values[0] - 1.5


@pytest.mark.slow
def test_half_the_ranks_train_the_same_model(
    trained: dict[str, list[float]], tmp_path: Path
) -> None:
    # CP 2 x DP 1: the same packs in twice as many microbatches a rank.
    codes, said = processes.run(tmp_path, SCRIPT, *quickstart_flags(), *SHORT, ranks=2)
    assert codes == [0, 0], said[-4000:]
    alone = losses(said)
    for name, values in trained.items():
        assert alone[name] == pytest.approx(values, rel=1e-4)


def test_the_custom_loop_proves_its_gradient() -> None:
    run = torchrun(2, "examples/custom_loop.py", "--cpu")
    assert run.returncode == 0, run.stdout[-4000:]
    errors = re.findall(r"gradient error (\S+)", run.stdout)
    assert len(errors) == 5
    assert all(float(error) < 1e-12 for error in errors)


@pytest.mark.slow
def test_proof_holds_and_stock_averages_differ() -> None:
    run = torchrun(4, "examples/proof.py")
    assert run.returncode == 0, run.stdout[-4000:]
    rows = dict(re.findall(r"^  (\S.*?)  +([\d.e+ -]+)$", run.stdout, re.MULTILINE))
    table = {title: [float(cell) for cell in cells.split()] for title, cells in rows.items()}
    per_token = ", --calculate-per-token-loss"
    for flag in ("", per_token):
        assert max(table["megatron_loss_agg" + flag]) <= 1e-12
        prompt_mean, *_ = table["stock Megatron" + flag]
        assert prompt_mean > 1e-2
    # Stock Megatron has an exact mean over tokens, under that flag: the reference must agree.
    *_, token_mean, _ = table["stock Megatron" + per_token]
    assert token_mean <= 1e-12


WITHOUT_THE_HOOK = "proof.LossHook.wrap = lambda self, forward_backward: forward_backward"
# Of one parameter, with one mode and flag, neither of them the first.
NAN = """
exact = proof.host_gradients
def spoiled(data, weights, mode, per_token_flag):
    found = exact(data, weights, mode, per_token_flag)
    if mode == "token_mean" and per_token_flag:
        found[list(found)[-1]] *= float("nan")
    return found
proof.host_gradients = spoiled
"""


@pytest.mark.slow
@pytest.mark.parametrize("defect", [WITHOUT_THE_HOOK, NAN])
def test_proof_fails_when_the_gradient_is_wrong(tmp_path: Path, defect: str) -> None:
    script = (
        f"import sys; sys.path[0] = {str(ROOT / 'examples')!r}\n"
        "import proof\n"
        "proof.SHAPE['num_layers'] = proof.MICROBATCHES = 1\n"
        f"{defect}\n"
        "sys.exit(proof.main())\n"
    )
    codes, said = processes.run(tmp_path, script, ranks=4, starter=())
    assert codes == [1, 0, 0, 0]
    assert "NOT EXACT" in said
