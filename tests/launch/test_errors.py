"""The end of a job whose ranks fail: the output of each, and the error that torchrun names."""

from __future__ import annotations

import re
from pathlib import Path

from tests.launch.processes import MODE, refusals, run, run_afresh

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
LAUNCHED = ("-m", "megatron_loss_agg")

# The second of two ranks fails, and the first one waits for it. torchrun orders errors by their
# whole seconds, so the first rank's own error comes more than a second later.
FAILS = """
import sys, time, torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from megatron_loss_agg.errors import DataError

stood_in = [m for m in sys.modules if m.startswith('megatron_loss_agg.mcore.cpu')]
print(stood_in, torch.cuda.current_stream.__module__, sys.argv[1:], flush=True)
dist.init_process_group("gloo")
dist.barrier()
class Refused:
    def __setattr__(self, name, value):
        raise DataError("bad mask")
def train():
    if dist.get_rank() == 1:
        MegatronOptimizer.__init__(Refused(), None, None, None)  # replaced by the launcher
    try:
        dist.barrier()
    except RuntimeError:
        time.sleep(1.1)
        raise
train()
"""


def test_torchrun_names_the_error_of_the_rank_that_failed_first(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(FAILS)
    done = run_afresh(*TORCHRUN, "2", *LAUNCHED, str(script), "--flag", *MODE)
    assert done.returncode == 1
    root_cause = done.stderr.partition("Root Cause")[2]
    assert re.search(r"rank +: 1 ", root_cause), done.stderr[-5000:]
    # In the log and in torchrun's summary: no frame of the launcher.
    log = done.stderr.replace("[rank1]: ", "")
    traces = re.findall(r"Traceback \(most.*\n((?: .*\n)+)(?=.*DataError: bad mask)", log)
    frames = [re.findall(r'(\w+\.py)", line \d+, in (\S+)', trace) for trace in traces]
    in_script = [("script.py", "<module>"), ("script.py", "train")]
    assert frames == [[*in_script, ("optimizer.py", "__init__"), ("script.py", "__setattr__")]] * 2
    # Without --cpu, nothing stands in for a GPU. The flags are not the script's.
    assert done.stdout.splitlines().count("[] torch.cuda ['--flag']") == 2


def test_a_refused_job_ends_with_one_line_of_each_rank(tmp_path: Path) -> None:
    codes, log = run(tmp_path, "import nothing", "--loss-aggregation", "constant", ranks=2)
    assert codes == [2, 2]
    lines = refusals(log)
    assert len(lines) == 2
    assert all(line.startswith("megatron_loss_agg: OptionError: ") for line in lines)
    assert "Traceback" not in log
