"""Megatron-Bridge's script `run_recipe.py`, of a checkout, with the installed package.

    python -m tests.frameworks.run_megatron_bridge CHECKOUT _ TABLE

The runs are those of `test_bridge`, where a recipe is trained without the script.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import Any

from tests.distributed import run_ranks
from tests.frameworks.checkout_report import BOUND, METRICS, WRONG, write
from tests.frameworks.test_bridge import MODES, STOCK_ERRORS, error, expected_reports

run = functools.partial(run_ranks, preload="tests.frameworks.bridge_recipe", initialized=False)


def train(arguments: list[str], mode: str) -> dict[str, Any]:
    """What this rank sees, in a mode, or without the plugin."""
    from megatron_loss_agg.mcore.flags import VARIABLE
    from megatron_loss_agg.mcore.install import install
    from tests.frameworks import bridge_recipe

    os.environ[VARIABLE] = f"--loss-aggregation {mode}" if mode else ""
    if mode:
        install(watch_exit=False)
    return bridge_recipe.main(arguments)


def main(checkout: str, _: str, table: str) -> None:
    rows, failures = [], []
    script = ["--script", str(Path(checkout, "scripts/training/run_recipe.py"))]
    for case in STOCK_ERRORS:
        place = f"{case.layout}, {'CP' if case.cp > 1 else 'DP'} 2"
        per_token = ", per token" if case.per_token else ""
        stock = run(train, 2, case.arguments + script, "")[0]
        if case.per_token:
            own = f"{error(stock, 'token_mean'):.1e}"
            rows.append((place, f"stock's own: token_mean{per_token}", "", "", own))
        for mode in MODES:
            seen = run(train, 2, case.arguments + script, mode)[0]
            mine, own = error(seen, mode), error(stock, mode)
            reports = expected_reports(mode)
            metrics = max(abs(seen["evaluation"][k] / x - 1) for k, x in reports.items())
            if mine > BOUND or metrics > METRICS:
                failures.append(f"{case}, {mode}: {mine:.1e}, {metrics:.1e} off")
            wrong = f"{own:.1e}" if own > WRONG else ""
            rows.append((place, f"{mode}{per_token}", f"{mine:.1e}", f"{metrics:.1e}", wrong))
    write(table, rows, failures)


if __name__ == "__main__":
    main(*sys.argv[1:])
