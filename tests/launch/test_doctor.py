"""``doctor``: what it finds in this environment, and in ones that lack something."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_loss_agg.mcore.doctor import check_release, check_source
from megatron_loss_agg.mcore.packages import Finding, check_apex
from tests.core.test_imports import REFUSE_HOST

ROOT = Path(__file__).parents[2]

RUN = """
REFUSED = ("megatron", "transformer_engine")
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
    assert {"transformer-engine", "apex"} <= set(checks)


@pytest.mark.host
@needs_training
def test_flags_of_a_launch_script_are_checked_against_each_other():
    mode = "--loss-aggregation prompt_mean"
    cases = {
        f"pretrain_gpt.py --num-layers 2 {mode}": "OK: prompt_mean, and no other flag",
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
    }
    done = doctor(json.dumps(list(cases)), program=("-c", SEVERAL))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for report, code, said in zip(lines[::2], lines[1::2], cases.values(), strict=True):
        found = json.loads(report)
        last = found["findings"][-1]
        assert last["check"] == "flags"
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
    assert by_check["megatron-core"]["text"].startswith("not installed; pip install megatron-core")
    assert by_check["transformer-engine"]["level"] == by_check["flags"]["level"] == "WARN"
    assert "seams" not in by_check


def test_a_folder_that_is_no_checkout_is_refused(tmp_path):
    done = doctor("--megatron", str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert f"InputError: --megatron {tmp_path}: no megatron/core" in done.stderr


RELEASES = {"0.12.3": "FAIL", "0.13.1": "WARN", "0.14.0": "OK", "0.19.2": "OK"}
RELEASES |= {"0.20.0rc1": "WARN", "1.0.0": "WARN", "unknown": "FAIL"}


@pytest.mark.parametrize("version", RELEASES)
def test_a_release_is_judged_by_its_number(version):
    finding = check_release(version, Path("/opt/megatron"))
    assert finding.level == RELEASES[version]
    assert finding.text.startswith(f"{version} in /opt/megatron")


def test_a_patched_script_is_recognised(tmp_path):
    assert list(check_source(tmp_path)) == []
    (tmp_path / "train_rl.py").write_text("import megatron\n")
    (tmp_path / "pretrain_gpt.py").write_text("import megatron\n")
    (found,) = check_source(tmp_path)
    assert found == ("OK", "patch", "none applied: put -m megatron_loss_agg before the script")
    (tmp_path / "pretrain_gpt.py").write_text("from megatron_loss_agg.mcore import install\n")
    (found,) = check_source(tmp_path)
    assert found.text == "applied to pretrain_gpt.py: start it without -m megatron_loss_agg"


def apex_made_of(folder: Path, *files: str) -> Finding:
    for file in files:
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("raise AssertionError('the doctor imports no apex')\n")
    importlib.invalidate_caches()
    return check_apex()


@pytest.mark.skipif("apex" in sys.modules, reason="apex is imported already")
def test_apex_is_told_by_its_files(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    unrelated = apex_made_of(tmp_path, "apex/__init__.py", "apex/interfaces.py")
    assert unrelated.level == "WARN"
    assert unrelated.text.endswith(
        "is an unrelated project of the same name, which Megatron takes for NVIDIA's; "
        "pip uninstall apex"
    )
    parts = ("apex/optimizers/fused_adam.py", "apex/multi_tensor_apply/__init__.py")
    if importlib.util.find_spec("amp_C") is None:
        without_kernels = apex_made_of(tmp_path, *parts)
        assert (without_kernels.level, "amp_C" in without_kernels.text) == ("WARN", True)
    complete = apex_made_of(tmp_path, *parts, "amp_C.py")
    assert complete == ("OK", "apex", f"NVIDIA's, in {tmp_path / 'apex'}")
