"""The keys that a run of Megatron's ``pretrain`` leaves in W&B, read from an offline run's file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch import processes

pytestmark = pytest.mark.host

ROOT = Path(__file__).parents[2]
PRESET = "verl/seq-mean-token-mean"
DATASETS = ("", " of dataset 0", " of dataset 1", " of dataset 2")
FLAGS = f"""
    {processes.SETS_FLAGS} --global-batch-size 2 --train-iters 2 --lr 0.1 --lr-decay-style constant
    --eval-interval 1 --eval-iters 2 --log-interval 1 --tensorboard-log-interval 1 --blend
    --loss-aggregation {PRESET} --loss-aggregation-report-datasets
    --wandb-project p --wandb-exp-name e
""".split()
# Beside the real W&B, without what it reports on itself with.
SCRIPT = f"""
import os, runpy
from tests.peers.standins import use_peers
use_peers("opentelemetry")
os.environ["WANDB_MODE"] = "offline"
runpy.run_path({str(ROOT / "tests/launch/sets_script.py")!r}, run_name="__main__")
"""
# A run's file, as leveldb's logs: blocks of 32 KiB, and in them records of checksum, length and
# type (a whole one, or the first, a middle or the last part of one). The first block has a header.
READER = """
import json, struct, sys
from tests.peers.standins import use_peers
use_peers("opentelemetry")
from wandb.proto.wandb_internal_pb2 import Record
data, place, parts, steps = open(sys.argv[1], "rb").read(), 7, b"", []
while place + 7 <= len(data):
    if 32768 - place % 32768 < 7:
        place += 32768 - place % 32768
        continue
    _, length, kind = struct.unpack_from("<IHB", data, place)
    parts += data[place + 7 : place + 7 + length]
    place += 7 + length
    if kind in (1, 4):
        record, parts = Record.FromString(parts), b""
        if record.HasField("history"):
            items = record.history.item
            steps.append({x.key or x.nested_key[0]: json.loads(x.value_json) for x in items})
print(json.dumps(steps))
"""


def recorded(folder: Path) -> dict[int, dict[str, float]]:
    """What an offline run logged, by step."""
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    said = subprocess.run(
        [sys.executable, "-c", READER, str(path)], cwd=ROOT, capture_output=True, text=True
    )
    assert said.returncode == 0, said.stderr
    return {int(step["_step"]): step for step in json.loads(said.stdout)}


def test_the_losses_have_the_names_that_the_guide_gives_in_wandb_as_in_tensorboard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = ("--wandb-save-dir", str(tmp_path), "--tensorboard-dir", str(tmp_path / "board"))
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    codes, said = processes.run(tmp_path, SCRIPT, *FLAGS, *folders)
    assert codes == [0], said[-3000:]
    steps = recorded(tmp_path)
    names = {f"{name}{rest}" for name in ("lm loss", f"{PRESET} loss") for rest in DATASETS}
    names |= {f"{name} validation" for name in names}
    assert {key for step in steps.values() for key in step if " loss" in key} == names
    board = processes.tensorboard(tmp_path / "board")
    assert {f"{name} vs samples" for name in names} <= board.keys()
    first = {key: board[key][1] for key in names if 1 in board[key]}
    assert len(first) > 6
    assert {key: steps[1][key] for key in names & steps[1].keys()} == pytest.approx(first)
