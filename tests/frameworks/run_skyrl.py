"""Train with SkyRL on two gloo ranks, in all ways of `skyrl_case.RUNS` that the package knows.

    SKYRL=FOLDER python -m tests.frameworks.run_skyrl {stock,patched} LOG_PROBS RESULTS

``FOLDER`` holds the package, with or without the patch.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from tests.distributed import run_ranks
from tests.frameworks import skyrl_case as case


def on_rank(runs: dict[str, case.Run], log_probs: list[Tensor], cp: int) -> dict[str, Any]:
    from tests.frameworks import skyrl_ranks

    return skyrl_ranks.run_all(runs, log_probs, cp)


if __name__ == "__main__":
    package, log_probs, results = sys.argv[1:]
    own = package == "stock"  # which knows its own names only
    runs = {name: run for name, run in case.RUNS.items() if not (own and "/" in run.loss_reduction)}
    given = torch.load(log_probs)
    found: dict[str, Any] = {}
    for cp in (1, 2):
        ranks = run_ranks(on_rank, 2, runs, given, cp, preload="tests.frameworks.skyrl_ranks")
        found |= {name: [rank[name] for rank in ranks] for name in ranks[0]}
    torch.save(found, results)
