"""The keys that a run of Megatron's ``pretrain`` leaves in W&B, read from an offline run's file."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from tests.host.harness import run_host_ranks
from tests.launch import processes
from tests.peers.standins import use_peers

pytestmark = pytest.mark.host

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
runpy.run_path({str(processes.SETS_SCRIPT)!r}, run_name="__main__")
"""


def recorded(path: Path) -> list[dict[str, float]]:
    """Each step of a run's file, which is like leveldb's logs.

    After a header there are blocks of 32 KiB, and in them records of checksum, length and type (a
    whole one, or the first, a middle or the last part of one).
    """
    use_peers("opentelemetry")
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, parts, steps = path.read_bytes(), 7, b"", []
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
    return steps


def test_the_losses_have_the_names_that_the_guide_gives_in_wandb_as_in_tensorboard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = ("--wandb-save-dir", str(tmp_path), "--tensorboard-dir", str(tmp_path / "board"))
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    codes, said = processes.run(tmp_path, SCRIPT, *FLAGS, *folders)
    assert codes == [0], said[-3000:]
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    steps = {int(step["_step"]): step for step in run_host_ranks(recorded, 1, path)[0]}
    names = {f"{name}{rest}" for name in ("lm loss", f"{PRESET} loss") for rest in DATASETS}
    names |= {f"{name} validation" for name in names}
    assert {key for step in steps.values() for key in step if " loss" in key} == names
    board = processes.tensorboard(tmp_path / "board")
    assert {f"{name} vs samples" for name in names} <= board.keys()
    first = {key: board[key][1] for key in names if 1 in board[key]}
    assert len(first) > 6
    assert {key: steps[1][key] for key in names & steps[1].keys()} == pytest.approx(first)
