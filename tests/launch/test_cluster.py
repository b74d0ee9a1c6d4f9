"""Jobs on several nodes: two launchers on this machine, which meet as those of two nodes do."""

from __future__ import annotations

import os
import random
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from tests.launch.processes import MODE, ROOT, run
from tests.launch.test_errors import FAILS
from tests.test_examples import flags_of

CLUSTER = ROOT / "examples" / "cluster"
# Saves the gradients that the optimizer gets: of the last step, in the end.
TRAINS = f"""
import os, runpy, sys
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

def save(optimizer, *_):
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
    torch.save(gradients, f"{{os.environ['GRADIENTS']}}{{os.environ['RANK']}}.pt")

register_optimizer_step_pre_hook(save)
sys.path.insert(0, "{ROOT}/examples")
runpy.run_path("{ROOT}/examples/pretrain_gpt.py", run_name="__main__")
"""


def is_free(port: int) -> bool:
    with socket.socket() as listener:
        return listener.connect_ex(("127.0.0.1", port)) != 0


def on_two_nodes(folder: Path, *words: str) -> list[tuple[int, str]]:
    """Run node.sh once a node, each with one rank; the exit code and all output of each."""
    # Below the ports that the system picks for others, before these nodes begin to listen.
    port = next(x for x in random.sample(range(20000, 30000), 100) if is_free(x))
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "GRADIENTS": f"{folder}/2-nodes-",
        **{"NNODES": "2", "RANKS": "1", "HOST": "127.0.0.1", "PORT": str(port)},
    }
    launchers = [
        subprocess.Popen(
            ["bash", str(CLUSTER / "node.sh"), *words],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for _ in range(2)
    ]
    logs = [launcher.communicate(timeout=900)[0] for launcher in launchers]
    return [(launcher.returncode, text) for launcher, text in zip(launchers, logs, strict=True)]


def test_the_gradient_of_two_nodes_is_that_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINS)
    flags = [*flags_of("quickstart.sh"), "--train-iters", "5", "--eval-iters", "0"]
    monkeypatch.setenv("GRADIENTS", f"{tmp_path}/1-nodes-")
    codes, log = run(tmp_path, script, *flags, ranks=2)
    assert codes == [0, 0], log[-4000:]
    for code, log in on_two_nodes(tmp_path, "--cpu", str(script), *flags):
        assert code == 0, log[-4000:]
    for rank in (0, 1):
        one_node, two_nodes = (torch.load(tmp_path / f"{n}-nodes-{rank}.pt") for n in (1, 2))
        assert len(one_node) > 5 and any(x.any() for x in one_node)
        assert all(torch.equal(x, y) for x, y in zip(one_node, two_nodes, strict=True))


@pytest.mark.extended  # `test_errors` has one node
def test_a_rank_that_dies_ends_the_job_and_its_node_names_its_error(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(FAILS)
    ended = on_two_nodes(tmp_path, str(script), *MODE)
    assert [code for code, _ in ended] == [1, 1]
    causes = [log.partition("Root Cause")[2] for _, log in ended]
    (named,) = [cause for cause in causes if "DataError: bad mask" in cause]
    assert re.search(r"rank +: 1 ", named)
    assert re.search(r'script\.py", line \d+, in train$', named, re.MULTILINE)


def test_scripts_of_clusters_start_the_same_command() -> None:
    subprocess.run(["bash", "-n", CLUSTER / "slurm.sh"], check=True)
    assert "bash examples/cluster/node.sh" in (CLUSTER / "slurm.sh").read_text()
    job = yaml.safe_load((CLUSTER / "pytorchjob.yaml").read_text())
    for replica in job["spec"]["pytorchReplicaSpecs"].values():
        (container,) = replica["template"]["spec"]["containers"]
        assert container["command"][:3] == ["torchrun", "-m", "megatron_loss_agg"]
