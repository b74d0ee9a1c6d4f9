"""Flags that were given take effect, or end the run; a run with nothing to do is left alone.

Real scripts, one process a rank, through the launcher or with the lines that the patches add.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_loss_agg.errors import AggregationError, ModeError
from megatron_loss_agg.mcore.flags import VARIABLE
from megatron_loss_agg.mcore.install import hook_from_args
from megatron_loss_agg.mcore.launch import effect
from megatron_loss_agg.mcore.launch import script as launch
from megatron_loss_agg.mcore.launch.flags import in_environment
from tests.launch.processes import MODE, NO_EFFECT, PATCHED, refusals, run
from tests.launch.test_launch import FLAGS, SCRIPT

pytestmark = pytest.mark.host

# Neither Megatron's parser nor its schedule; OPTIMIZER is a class, or None.
NO_PARSER = """
import torch

weight = torch.ones(3, requires_grad=True)
optimizer = OPTIMIZER and OPTIMIZER([weight], lr=0.1)
weight.square().sum().backward()
if optimizer:
    optimizer.step()
else:
    weight.data -= 0.1 * weight.grad
print("stepped")
"""


def test_an_optimizer_does_not_step_if_nobody_asked_for_the_hook(tmp_path: Path) -> None:
    script = NO_PARSER.replace("OPTIMIZER", "torch.optim.SGD")
    codes, said = run(tmp_path, script, *MODE)
    assert codes == [1]
    assert re.search(NO_EFFECT + "SGD is about to step, and no forward-backward call", said)
    assert "expected a loop that calls what Megatron-Core's get_forward_backward_func()" in said
    assert "stepped" not in said
    codes, said = run(tmp_path, script)
    assert (codes, refusals(said), "stepped" in said) == ([0], [], True)


def test_a_script_that_never_asked_for_the_hook_fails_at_its_end(tmp_path: Path) -> None:
    codes, said = run(tmp_path, NO_PARSER.replace("OPTIMIZER", "None"), *MODE, ranks=2)
    assert codes == [2, 2]
    assert said.count("stepped\n") == 2
    assert len(refusals(said)) == 1 and "(first on rank " in said
    assert re.search(NO_EFFECT + "the script made no step through the plugin; expected", said)
    assert "Traceback" not in said


@pytest.mark.parametrize(
    "argv, leaves, code",
    [
        (MODE, "pass", 2),
        (MODE, "raise SystemExit", 2),
        (MODE, "raise SystemExit(0)", 2),
        (MODE, "raise SystemExit(3)", 3),
        (("--help", *MODE), "raise SystemExit(0)", 0),
        ((), "raise SystemExit(0)", 0),
    ],
)
def test_an_exit_is_a_failure_only_if_flags_were_to_be_used(
    tmp_path: Path, argv: tuple[str, ...], leaves: str, code: int
) -> None:
    script = tmp_path / "script.py"
    script.write_text(leaves)
    try:
        found = launch._run(str(script), effect.GivenFlags(argv))
    except SystemExit as leaving:
        found = leaving.code
    assert found == code


def test_flags_are_taken_from_the_other_arguments() -> None:
    given = effect.GivenFlags([*MODE, "--loss-aggregation-audit", "--other", "x"])
    assert given.others == ["--other", "x"]
    assert given.values == {"loss_aggregation": "sample_mean", "loss_aggregation_audit": True}


def test_the_environment_holds_flags_in_place_of_the_command_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(VARIABLE, "--loss-aggregation sum --loss-aggregation-divisor 4")
    given = effect.GivenFlags(["--lr", "1"])
    assert given.values == {"loss_aggregation": "sum", "loss_aggregation_divisor": 4.0}
    assert given.others == ["--lr", "1"]
    assert given.error_at_exit() is not None
    assert effect.GivenFlags(["--help"]).error_at_exit() is None
    with pytest.raises(ModeError, match=f"{VARIABLE} is set, and --loss-aggregation is on"):
        effect.GivenFlags(MODE)
    monkeypatch.setenv(VARIABLE, "--loss-aggregation sum token_mean")
    with pytest.raises(ModeError, match=f"{VARIABLE} holds token_mean; expected"):
        in_environment()


@pytest.mark.parametrize(
    "argv, error",
    [
        (["--loss-aggregation"], "InputError: argument --loss-aggregation: expected one argument"),
        (
            ["--loss-aggregation-emtpy", "skip"],
            "ModeError: unknown flag --loss-aggregation-emtpy; expected --loss-aggregation-empty, ",
        ),
        (
            ["--loss-agregation", "sum"],
            "ModeError: unknown flag --loss-agregation; expected --loss-aggregation, or another of",
        ),
        (
            ["--loss_aggregation=sum"],
            "ModeError: unknown flag --loss_aggregation; expected --loss-aggregation, or another",
        ),
    ],
)
def test_flags_that_cannot_be_read_are_refused(argv: list[str], error: str) -> None:
    with pytest.raises(AggregationError) as raised:
        effect.GivenFlags(argv)
    assert f"{raised.type.__name__}: {raised.value}".startswith(error)


def test_flags_from_a_yaml_file_are_read() -> None:
    file = SimpleNamespace(loss_aggregation="constant", loss_aggregation_divisor=7, yaml_cfg="x")
    hook = hook_from_args(file)
    assert hook is not None
    assert hook.terms["constant"].aggregation.divisor == 7


# What Megatron's `pretrain` does first.
BUILDS = """
from megatron.training import arguments, training
from megatron.training.global_vars import set_args

set_args(arguments.parse_args())
print("builds")
training.setup_model_and_optimizer(None, None)
"""


def test_a_yaml_file_in_place_of_all_flags_keeps_ours(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    file = tmp_path / "config.yaml"
    file.write_text("{enable_msc: false, disable_msc_deprecated: false}")
    flags = ("--yaml-cfg", str(file), *MODE)
    builds = "training.setup_model_and_optimizer(None, None)"
    asks = f"try:\n    {builds}\nfinally:\n    print('found', training.get_args().loss_aggregation)"
    _, said = run(tmp_path, BUILDS.replace(builds, asks), *flags)
    assert "found sample_mean\n" in said, said[-3000:]
    # Also where the file says something else.
    file.write_text("{enable_msc: false, disable_msc_deprecated: false, loss_aggregation: sum}")
    _, said = run(tmp_path, BUILDS.replace(builds, asks), *flags)
    assert "found sample_mean\n" in said, said[-3000:]


def test_a_patched_script_is_watched_like_a_launched_one(tmp_path: Path) -> None:
    script = PATCHED + NO_PARSER.replace("OPTIMIZER", "None")
    codes, said = run(tmp_path, script, *MODE, starter=(), forked=False)
    assert codes == [2]
    assert len(refusals(said)) == 1


NOTHING_TO_DO = {
    "evaluation alone": ("--skip-train",),
    "an early end": ("--exit-interval", "1"),
    # As after the last iteration of a job that is started again.
    "no step at all": ("--skip-train", "--eval-iters", "0"),
}


@pytest.mark.parametrize("case", NOTHING_TO_DO)
def test_runs_of_the_host_that_are_short_are_not_refused(tmp_path: Path, case: str) -> None:
    keep = FLAGS[: FLAGS.index("--save-interval")] + FLAGS[FLAGS.index("--ckpt-format") :]
    codes, said = run(tmp_path, SCRIPT, *keep, *MODE, *NOTHING_TO_DO[case])
    assert (codes, refusals(said)) == ([0], []), said[-3000:]
    steps = len(re.findall(r"iteration +\d+/ +\d+ .*sample_mean loss: ", said))
    evaluations = len(re.findall("sample_mean loss value: ", said))
    assert (steps, evaluations > 0) == {
        "evaluation alone": (0, True),
        "an early end": (1, False),
        "no step at all": (0, False),
    }[case]
