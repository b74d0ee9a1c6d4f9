"""Run one case: its launches, its reference, and what came of it."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

from torch import Tensor

from tests.distributed import RankFailed
from tests.host.harness import run_host_ranks
from tests.sweep import cases
from tests.sweep.cases import Case
from tests.sweep.factors import MODES

TIMEOUT = float(os.environ.get("SWEEP_TIMEOUT", "120"))
# Norm-wise and relative: of fp32, and where activations or their gradients are of half precision;
# the host's fused cross entropy rounds its gradient to bf16.
BOUNDS = {"fp32": 1e-5, "half": 4e-2, "half, experts": 1e-1}  # a token may change its expert


def on_ranks(ranks: int, function: str, *args: Any) -> list[Any]:
    """What this function of the script returns on each of so many ranks."""
    return run_host_ranks(_call, ranks, function, *args, timeout=TIMEOUT)


def _call(function: str, *args: Any) -> Any:
    from tests.sweep import script  # it imports the host, as only a rank may

    return getattr(script, function)(*args)


def host_flags() -> list[str]:
    (found,) = on_ranks(1, "host_flags")
    return list(found)


def run_case(case: Case, folder: Path, plugin: bool = True) -> dict[str, Any]:
    """Its outcome: ``exact``, ``refused``, ``host refused``, ``WRONG``, ``HANG`` or ``CRASH``."""
    folder = folder / cases.key_of(case)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        found = {"text": "", **_outcome(case, folder, plugin)}
    finally:
        for saved in folder.glob("saved*"):
            shutil.rmtree(saved)
    if found["outcome"] in ("exact", "refused", "host refused"):
        shutil.rmtree(folder)
    return found


def _outcome(case: Case, folder: Path, plugin: bool) -> dict[str, Any]:
    try:
        results = _launch(case, folder, plugin)
    except RankFailed as failure:
        return _failed(case, folder, str(failure))
    try:
        return _compared(case, folder, results)
    except RankFailed as failure:
        *_, last = str(failure).strip().splitlines()
        return {"outcome": "CRASH", "text": f"reference: {last[:500]}"}


def _launch(case: Case, folder: Path, plugin: bool) -> list[Any]:
    """The ranks' results of the last launch."""
    results: list[Any] = []
    saved = folder / f"saved-{plugin}"
    for number, launch in enumerate(cases.launches(case, str(saved), plugin)):
        log = str(folder / f"{'with' if plugin else 'without'}-{number}")
        results = on_ranks(launch.ranks, "rank_main", launch.argv, log, plugin)
    return results


def _failed(case: Case, folder: Path, text: str) -> dict[str, Any]:
    ended = _ended(text)
    if ended["named"]:
        return {"outcome": "refused", "text": f"{ended['error']}: {ended['text']}"}
    # The host's own doing, if it does the same without the plugin.
    try:
        _launch(case, folder, plugin=False)
    except RankFailed as failure:
        stock = _ended(str(failure))
        if _shape(stock) == _shape(ended):
            text = f"{stock['error']}: {stock['text']}"
            return {"outcome": "host refused", "text": text, "where": stock["where"]}
        ended["stock"] = stock
    outcome = "HANG" if ended["error"] == "hang" else "CRASH"
    return {"outcome": outcome, "text": f"{ended['error']}: {ended['text']}", **ended}


def _shape(ended: dict[str, Any]) -> tuple[str, str]:
    """What two ends have in common if one thing caused both: ranks and numbers may differ."""
    return ended["error"], re.sub(r"[\d., ]+", "", ended["text"].partition("\n")[0])


def _ended(text: str) -> dict[str, Any]:
    """What `script.Ended` says in the traceback of a rank."""
    for line in text.splitlines():
        _, mark, told = line.partition("tests.sweep.script.Ended: ")
        if mark:
            return dict(json.loads(told))
    # Of other ends the first line says how: what follows it differs from run to run.
    first = text.partition("\n")[0]
    kind = "hang" if "were still running" in first else "died"
    said = text[-500:] if first.endswith("failed:") else first
    return {"error": kind, "text": said, "named": False, "where": ""}


def _compared(case: Case, folder: Path, results: list[Any]) -> dict[str, Any]:
    step = _last_step(results)
    items = sorted(item for rank in step for microbatch in rank for item in microbatch)
    expected = cases.expected_items(case)
    if expected is not None and items != expected:
        return {"outcome": "WRONG", "text": f"trained on the items {items}, not {expected}"}
    mode = MODES[case["mode"]]
    empty = "skip" if case["aggregation"] == "empty-skip" else "count"
    told = {"mode": mode.mode, "divisor": mode.divisor, "empty": empty}
    given = cases.reference_argv(case), str(folder / "log"), step, told
    (reference,) = on_ranks(1, "reference_main", *given)
    errors = [_error(result.parameters, cases.rate_of(case), *reference) for result in results]
    error = max(errors, default=math.nan)
    names = {name for result in results for name in result.parameters}
    if other := names ^ set(reference.start):
        return {"outcome": "CRASH", "text": f"parameters differ: {sorted(other)}"}
    half = case["precision"] != "fp32" or "fused" in case["loss"]
    kind = "half, experts" if half and "moe" in case["model"] else "half" if half else "fp32"
    outcome = "exact" if error <= BOUNDS[kind] else "WRONG"
    text = "" if outcome == "exact" else f"errors of the ranks: {errors}"
    return {"outcome": outcome, "error": error, "text": text}


def _last_step(results: list[Any]) -> list[list[list[int]]]:
    """Items of the last step: by data-parallel rank, and microbatch."""
    step: dict[int, list[list[int]]] = defaultdict(list)
    for result in results:
        if not result.drawn:
            continue
        last = max(iteration for iteration, _, _ in result.drawn)
        of_step = [draw for draw in result.drawn if draw[0] == last]
        for _, rank, items in of_step[-result.microbatches :]:
            step[rank].append(items)
    return [step[rank] for rank in sorted(step)]


def _error(
    parameters: dict[str, Tensor],
    rate: float,
    start: dict[str, Tensor],
    gradient: dict[str, Tensor],
) -> float:
    """Of the change of one rank's parameters, norm-wise and relative."""
    off = size = 0.0
    for name, value in parameters.items():
        wanted = -rate * gradient[name]
        difference = value.double() - start[name].double() - wanted
        off += float(difference.square().sum())
        size += float(wanted.square().sum())
    return math.sqrt(off / size) if size else off  # a step without tokens changes nothing
