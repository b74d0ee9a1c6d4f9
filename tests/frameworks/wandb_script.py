"""The script of `tests/launch/sets_script.py` beside the real W&B, which runs offline."""

import os
import runpy
from pathlib import Path

from tests.peers.standins import use_peers

use_peers("opentelemetry")  # with which it would report on itself
os.environ["WANDB_MODE"] = "offline"
runpy.run_path(
    str(Path(__file__).parents[1] / "launch" / "sets_script.py"),
    run_name="__main__",
)
