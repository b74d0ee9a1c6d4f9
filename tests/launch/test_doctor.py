"""``doctor``: what it finds in this environment, and in ones that lack something."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_loss_agg.mcore.launch.doctor import check_release  # of any release

ROOT = Path(__file__).parents[2]

WITHOUT_HOST = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "megatron":
            raise ModuleNotFoundError(f"{name} is not to be imported here", name=name)

sys.meta_path.insert(0, Refuse())
from megatron_loss_agg.__main__ import main; sys.exit(main(sys.argv[1:]))
"""

# Several command lines in one process, since importing Megatron takes seconds.
SEVERAL = """
import json
import sys
from megatron_loss_agg.__main__ import main

print(main(["doctor"]))
for flags in json.loads(sys.argv[1]):
    print(main(["doctor", "--json", "--", *flags.split()]))
"""


def doctor(*args: str, program: tuple[str, ...] = ("-m", "megatron_loss_agg", "doctor")) -> Any:
    return subprocess.run(
        [sys.executable, *program, *args], cwd=ROOT, capture_output=True, text=True
    )


MODE, LATE = "@ prompt_mean", "@-mask model @ token_mean"
# Flags of a launch script, with @ for --loss-aggregation, and what is found.
FLAGS = {
    f"examples/pretrain_gpt.py --num-layers 2 {MODE}": (
        "OK: prompt_mean; w_t = m_t / (M_prompt * N_prompt); no other flag conflicts with it; "
        "the batches must have prompt_ids"
    ),
    f"nosuch.py {MODE}": "FAIL: nosuch.py is not a file; expected a training script",
    "--num-layers 2": "WARN: without --loss-aggregation the plugin does nothing",
    f"--my-own-flag {MODE}": (
        "WARN: prompt_mean; w_t = m_t / (M_prompt * N_prompt); Megatron has no --my-own-flag"
    ),
    f"--num-layers two {MODE}": "FAIL: InputError: argument --num-layers: invalid int",
    "@ constant": "FAIL: DivisorError: mode 'constant' needs a div",
    # A module that lies beside the script.
    f"tests/launch/test_doctor.py @-batch processes:run {MODE}": "OK: prompt_mean; w_t =",
    f"--cuda-graph-impl full_iteration {MODE}": "FAIL: HostError: --cuda-graph-impl full_iter",
    f"@-mod x {MODE}": "FAIL: ModeError: unknown flag --loss-aggregation-mod",
    LATE: "OK: token_mean; w_t = m_t / M_step; no other",
    f"{LATE} --sft": "FAIL: ModeError: Loop(averages_quotients=True) (Meg",
}


@pytest.mark.host
def test_this_environment_is_fit_and_flags_are_checked_against_each_other() -> None:
    given = [flags.replace("@", "--loss-aggregation") for flags in FLAGS]
    done = doctor(json.dumps(given), program=("-c", SEVERAL))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    checks, (code, *lines) = lines[: -2 * len(FLAGS) - 1], lines[-2 * len(FLAGS) - 1 :]
    assert code == "0", checks
    assert {line.split()[0] for line in checks} <= {"OK", "WARN"}
    found = [line.split()[1] for line in checks]
    assert found[:5] == ["python", "megatron_loss_agg", "torch", "megatron-core", "seams"]
    assert checks[4].endswith("wrap Megatron's schedules, optimizers, megatron.training")
    for report, code, said in zip(lines[::2], lines[1::2], FLAGS.values(), strict=True):
        found = json.loads(report)
        (last,) = (finding for finding in found["findings"] if finding["check"] == "flags")
        assert f"{last['level']}: {last['text']}".startswith(said)
        assert found["ok"] == (not said.startswith("FAIL")) == (int(code) == 0)


def test_without_megatron_it_says_what_to_install() -> None:
    flags = ("--json", "--", "--loss-aggregation", "token_mean")
    done = doctor("doctor", *flags, program=("-c", WITHOUT_HOST))
    assert (done.returncode, done.stderr) == (1, "")
    found = json.loads(done.stdout)
    assert found["ok"] is False
    by_check = {finding["check"]: finding for finding in found["findings"]}
    assert "seams" not in by_check
    levels = {"megatron-core": "FAIL", "flags": "WARN"}
    assert {name: by_check[name]["level"] for name in levels} == levels
    assert "pip install megatron-core, or " in by_check["megatron-core"]["text"]


RELEASES = {"0.12.3": "FAIL", "0.13.1": "WARN", "0.14.0": "OK", "0.19.2": "OK"}
RELEASES |= {"0.20.0rc1": "WARN", "1.0.0": "WARN", "unknown": "FAIL"}


def test_a_release_is_judged_by_its_number() -> None:
    found = {version: check_release(version, Path("/opt/megatron")) for version in RELEASES}
    assert {version: finding.level for version, finding in found.items()} == RELEASES
    assert all(x.text.startswith(f"{version} in /opt/megatron") for version, x in found.items())


def test_the_checkout_of_a_script_is_examined(tmp_path: Path) -> None:
    """Though it is not on PYTHONPATH: the script's own folder comes first when it runs."""
    for name, source in {
        "megatron/core/__init__.py": "__version__ = '0.12.3'",
        "megatron/training/__init__.py": "import nowhere_to_be_found",
        "pretrain_gpt.py": "",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(source)
    done = doctor("--", str(tmp_path / "pretrain_gpt.py"), "--loss-aggregation", "token_mean")
    assert done.returncode == 1
    lines = {line.split()[1]: line for line in done.stdout.splitlines()}
    assert f"0.12.3 in {tmp_path}: averages losses unlike 0.13" in lines["megatron-core"]
    assert "No module named 'nowhere_to_be_found'" in lines["megatron.training"]
