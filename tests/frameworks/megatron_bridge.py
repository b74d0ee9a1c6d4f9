"""Megatron-Bridge's script `run_recipe.py`, of a checkout, with the installed package.

The runs are those of `test_bridge`, where a recipe is trained without the script.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.frameworks.harness import FP32
from tests.frameworks.report import METRICS, WRONG
from tests.frameworks.test_bridge import (
    MODES,
    STOCK,
    STOCK_ERRORS,
    error,
    expected_reports,
    on_ranks,
    run,
)


def report(checkout: str, _: str) -> Any:
    rows, failures = [], []
    script = ["--script", str(Path(checkout, "scripts/training/run_recipe.py"))]
    for case in STOCK_ERRORS:
        place = f"{case.layout}, {'CP' if case.cp > 1 else 'DP'} 2"
        per_token = ", per token" if case.per_token else ""
        seen: dict[str, Any] = {}
        for mode in (STOCK, *MODES):  # the script ends the process group
            seen |= run(on_ranks, 2, case.arguments + script, (mode,), initialized=False)[0]
        if case.per_token:
            own = f"{error(seen[STOCK], 'token_mean'):.1e}"
            rows.append((place, f"stock's own: token_mean{per_token}", "", "", own))
        for mode in MODES:
            mine, own = error(seen[mode], mode), error(seen[STOCK], mode)
            reports = expected_reports(mode)
            metrics = max(abs(seen[mode]["evaluation"][k] / x - 1) for k, x in reports.items())
            if mine > FP32 or metrics > METRICS:
                failures.append(f"{case}, {mode}: {mine:.1e}, {metrics:.1e} off")
            wrong = f"{own:.1e}" if own > WRONG else ""
            rows.append((place, f"{mode}{per_token}", f"{mine:.1e}", f"{metrics:.1e}", wrong))
    return rows, failures
