"""Shared by the tests of all frameworks.

A framework's own code makes an optimizer step, or two, of a real GPT over gloo ranks. The gradient
of every parameter, and what is reported, is compared with one fp64 process that runs every sample
alone. A framework's own module has its batch, its stand-ins and its entry point.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.host.reference import Gradient
from tests.peers.standins import PEERS, use_peers

ROOT = Path(__file__).parents[2]
FP32 = 1e-6
"""Bound of a gradient's error in fp32. Where a framework has an exact mode, four times its own, too."""
CLIP, KL, ENTROPY = 0.2, 0.3, 0.1
DIVISOR = 7.0
Terms = dict[str, Tensor]
"""fp64 [tokens] of one sample."""


def token_values(model: Any, tokens: Tensor, prompt_length: int) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy of each token after the prompt; the sample alone, unpadded."""
    positions = torch.arange(len(tokens)).unsqueeze(0)
    logits = model(tokens.unsqueeze(0), positions, None).squeeze(0)
    log_p = logits[prompt_length - 1 : -1].log_softmax(-1)
    chosen = log_p.gather(-1, tokens[prompt_length:, None]).squeeze(-1)
    return chosen, -(log_p.exp() * log_p).sum(-1)


def grpo(lp: Tensor, entropy: Tensor, old: Tensor, ref: Tensor, advantage: Tensor | float) -> Terms:
    """With a k3 KL term and an entropy bonus; without their coefficients, under slime's names."""
    ratio = (lp - old).exp()
    policy = -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
    kl = (ref - lp).exp() - 1 - (ref - lp)
    return {"pg_loss": policy, "kl_loss": kl, "entropy_loss": entropy}


def gspo(lp: Tensor, old: Tensor, mask: Sequence[float], advantage: float) -> Tensor:
    """The clipped policy loss of every token, with the geometric mean of its sample's ratios."""
    trained = lp.new_tensor(mask)
    ratio = (((lp - old) * trained).sum() / trained.sum().clamp(min=1)).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)


class KeepGradients:
    """In place of a framework's optimizer: keeps the gradient of each step."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.gradients: list[Gradient] = []
        self.grad_norms_by_group: dict[str, float] = {}
        self.param_groups = [{"lr": 0.0}]

    def zero_grad(self) -> None: ...

    def scale_loss(self, loss: Any) -> Any:
        return loss

    def step(self) -> tuple[bool, float, int]:
        from tests.host import gradients

        self.gradients.append(gradients.of(self.model))
        return True, 0.0, 0


def attempt(
    call: Callable[..., Any],
    *args: Any,
    errors: type[Exception] | tuple[type[Exception], ...] = Exception,
) -> Any:
    """The result of ``call``; or "Name: text" of its error, if that is one of ``errors``."""
    try:
        return call(*args)
    except errors as error:
        return f"{type(error).__name__}: {error}"


def is_passed_on(owner: Any, name: str, call: Callable[..., Any], *args: Any, **more: Any) -> bool:
    """True if ``call`` hands the same objects to the framework's function, and returns its result.

    Args:
        owner: the class or module with the framework's function ``name``.
    """
    calls, result = [], object()

    def stock(*given: Any, **named: Any) -> object:
        calls.append((given, named))
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, stock)
        returned = call(*args, **more)
    ((given, named),) = calls
    given = given[len(given) - len(args) :]  # without self
    same = len(given) == len(args) and all(x is y for x, y in zip(given, args, strict=True))
    return same and returned is result and named == more


def use_framework(standins: str, folder: str) -> None:
    """Let this process import a framework from the folder, and stand-ins as `use_peers`."""
    use_peers(standins)
    sys.path.insert(1, folder)


def finding_without_megatron(
    standins: str, folder: str, name: str, **versions: str
) -> tuple[str, str]:
    """doctor's worst finding in a process that has the framework, and no Megatron.

    Args:
        versions: of stand-ins.
    """
    from megatron_loss_agg.__main__ import main

    use_framework(standins, folder)
    for module, version in versions.items():
        importlib.import_module(module).__version__ = version
    sys.modules["megatron"] = None  # type: ignore[assignment]  # so importing it fails
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        main(["doctor", "--framework", name])
    findings = re.findall(r"^(OK|WARN|FAIL) +(\S+) +(.*)", printed.getvalue(), re.MULTILINE)
    level, check, text = min(findings, key=lambda x: ("FAIL", "WARN", "OK").index(x[0]))
    return level, f"{check}: {text}"


def ignore_padding_masks() -> None:
    """As Transformer Engine does where attention is causal."""
    from megatron_loss_agg.mcore.cpu.attention import GatheredAttention

    attend = GatheredAttention.forward

    def forward(
        self: Any, query: Any, key: Any, value: Any, _: Any, *args: Any, **more: Any
    ) -> Any:
        return attend(self, query, key, value, None, *args, **more)

    GatheredAttention.forward = forward  # type: ignore[method-assign]


def fill(model: Any) -> None:
    """Give a framework's own model weights that do not depend on the parallelism."""
    from tests.host import gradients

    for name, parameter in gradients.parts(model):
        parameter.data = gradients.initial_value(name, parameter).to(parameter.dtype)


def page(framework: str) -> str:
    """The section of the framework, such as ``megatron-bridge``, on the page of all."""
    sections = re.split(r"^## (.*)$", (ROOT / "docs/frameworks.md").read_text(), flags=re.M)
    by_title = dict(zip(sections[1::2], sections[2::2], strict=True))
    (text,) = (x for title, x in by_title.items() if title.lower() == framework)
    return text


def run_in_bash(command: str, **environment: str) -> str:
    """Run a page's command with this Python's programs; it must succeed. Return its output."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-ec", command],
        cwd=ROOT,
        env={**os.environ, **environment, "PATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


def patched_copy(package: str, folder: Path) -> str:
    """Copy the package into ``folder``, and run its page's commands there; return their output."""
    shutil.copytree(PEERS / package, folder / package)
    # After the installation of ours, and the line that finds the folder of theirs.
    block = re.search(r"```bash\npip [^\n]*\n(\w+)=[^\n]*\n(.*?)```", page(package), re.DOTALL)
    assert block
    return run_in_bash(block[2], **{block[1]: str(folder)})


def run_tests(use: Callable[[str], None], folder: str, *arguments: str) -> int:
    """pytest's exit code for test files of a patched framework, for a rank.

    Args:
        use: lets the process import the framework from the folder.
        arguments: pytest's, of which files are relative to the folder.
    """
    use(folder)
    os.chdir(folder)
    for name in [x for x in sys.modules if x.partition(".")[0] == "tests"]:
        del sys.modules[name]  # theirs are of that name, too
    options = ["-c", "/dev/null", "--rootdir", folder, "--import-mode", "importlib"]
    return int(pytest.main([*options, "-p", "no:cacheprovider", *arguments]))
