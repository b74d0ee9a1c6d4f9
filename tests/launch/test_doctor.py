"""``doctor``: what it finds in this environment, and in ones that lack something."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_loss_agg.mcore.launch.doctor import check_release
from tests.core.test_imports import REFUSE_HOST

ROOT = Path(__file__).parents[2]

RUN = """
REFUSED = ("megatron",)
from megatron_loss_agg.__main__ import main; sys.exit(main(sys.argv[1:]))
"""

# Several command lines in one process, since importing Megatron takes seconds.
SEVERAL = """
import json
import sys
from megatron_loss_agg.__main__ import main

for flags in json.loads(sys.argv[1]):
    print(main(["doctor", "--json", "--", *flags.split()]))
"""

LATE = "--loss-aggregation-mask model --loss-aggregation token_mean"

needs_training = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None
    or importlib.util.find_spec("megatron.training") is None,
    reason="needs megatron.training",
)


def doctor(*args: str, program: tuple[str, ...] = ("-m", "megatron_loss_agg", "doctor")) -> Any:
    return subprocess.run(
        [sys.executable, *program, *args], cwd=ROOT, capture_output=True, text=True
    )


@pytest.mark.host
@needs_training
def test_this_environment_is_fit():
    done = doctor()
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert {line.split()[0] for line in lines} <= {"OK", "WARN"}
    checks = [line.split()[1] for line in lines]
    assert checks[:5] == ["python", "megatron_loss_agg", "torch", "megatron-core", "seams"]
    assert lines[4].endswith("wrap Megatron's schedules, optimizers, megatron.training")


@pytest.mark.host
@needs_training
def test_flags_of_a_launch_script_are_checked_against_each_other():
    mode = "--loss-aggregation prompt_mean"
    cases = {
        f"examples/pretrain_gpt.py --num-layers 2 {mode}": (
            "OK: prompt_mean, and no other flag conflicts with it; the batches must have prompt_ids"
        ),
        f"nosuch.py {mode}": "FAIL: nosuch.py is not a file; expected a training script",
        "--num-layers 2": "WARN: without --loss-aggregation the plugin does nothing",
        f"--my-own-flag {mode}": "WARN: prompt_mean; Megatron has no --my-own-flag",
        f"--num-layers two {mode}": "FAIL: InputError: argument --num-layers: invalid int",
        "--loss-aggregation constant": "FAIL: DivisorError: mode 'constant' needs a div",
        f"--loss-aggregation-batch nosuch:fn {mode}": "FAIL: FunctionError: --loss-aggregation-b",
        f"--loss-aggregation-empty-step foo {mode}": "FAIL: ModeError: --loss-aggregation-empty-s",
        # A module that lies beside the script.
        f"tests/launch/test_doctor.py --loss-aggregation-batch readers:read_batch {mode}": (
            "OK: prompt_mean, and no other flag"
        ),
        f"--cuda-graph-impl full_iteration {mode}": "FAIL: HostError: --cuda-graph-impl full_iter",
        f"--loss-aggregation-mod x {mode}": "FAIL: ModeError: unknown flag --loss-aggregation-mod",
        LATE: "OK: token_mean",
        f"{LATE} --sft": "FAIL: ModeError: Loop(averages_quotients=True) (Meg",
    }
    done = doctor(json.dumps(list(cases)), program=("-c", SEVERAL))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for report, code, said in zip(lines[::2], lines[1::2], cases.values(), strict=True):
        found = json.loads(report)
        (last,) = (finding for finding in found["findings"] if finding["check"] == "flags")
        assert f"{last['level']}: {last['text']}".startswith(said)
        assert found["ok"] == (not said.startswith("FAIL")) == (int(code) == 0)


def test_without_megatron_it_says_what_to_install():
    program = ("-c", REFUSE_HOST + RUN, "doctor")
    done = doctor("--json", "--", "--loss-aggregation", "token_mean", program=program)
    assert (done.returncode, done.stderr) == (1, "")
    found = json.loads(done.stdout)
    assert found["ok"] is False
    by_check = {finding["check"]: finding for finding in found["findings"]}
    assert by_check["megatron-core"]["level"] == "FAIL"
    assert by_check["megatron-core"]["text"].endswith(
        "pip install megatron-core, or put a checkout on PYTHONPATH"
    )
    assert by_check["flags"]["level"] == "WARN"
    assert "seams" not in by_check


RELEASES = {"0.12.3": "FAIL", "0.13.1": "WARN", "0.14.0": "OK", "0.19.2": "OK"}
RELEASES |= {"0.20.0rc1": "WARN", "1.0.0": "WARN", "unknown": "FAIL"}


@pytest.mark.parametrize("version", RELEASES)
def test_a_release_is_judged_by_its_number(version):
    finding = check_release(version, Path("/opt/megatron"))
    assert finding.level == RELEASES[version]
    assert finding.text.startswith(f"{version} in /opt/megatron")


CHECKOUT = {
    "core/__init__.py": "__version__ = '0.12.3'",
    "training/__init__.py": "import nowhere_to_be_found",
}


def test_the_checkout_of_a_script_is_examined(tmp_path):
    """Though it is not on PYTHONPATH: the script's own folder comes first when it runs."""
    for name, source in CHECKOUT.items():
        file = tmp_path / "megatron" / name
        file.parent.mkdir(parents=True)
        file.write_text(source)
    (tmp_path / "pretrain_gpt.py").touch()
    done = doctor("--", str(tmp_path / "pretrain_gpt.py"), "--loss-aggregation", "token_mean")
    assert done.returncode == 1
    lines = {line.split()[1]: line for line in done.stdout.splitlines()}
    assert f"0.12.3 in {tmp_path}: averages losses unlike 0.13" in lines["megatron-core"]
    assert "No module named 'nowhere_to_be_found'; install" in lines["megatron.training"]
