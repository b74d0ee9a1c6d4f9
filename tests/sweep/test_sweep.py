"""A seeded part of the sweep, and that its lists are complete; the whole is `bash ci/sweep.sh`."""

from __future__ import annotations

import random
from itertools import combinations
from pathlib import Path

import pytest

from tests.sweep import cases
from tests.sweep.factors import FACTORS
from tests.sweep.launch import host_flags, run_case

PART = random.Random(0).sample(cases.everything(), 16)


@pytest.mark.host
@pytest.mark.slow
@pytest.mark.parametrize("case", PART, ids=cases.key_of)
def test_a_launch_is_exact_or_refused_by_name(case: dict[str, str], tmp_path: Path) -> None:
    found = run_case(case, tmp_path)
    assert found["outcome"] in ("exact", "refused", "host refused"), (found, case)


@pytest.mark.host
@pytest.mark.parametrize("masks", FACTORS["masks"])
def test_stock_megatron_is_not_exact(masks: str, tmp_path: Path) -> None:
    # What the sweep would find if the plugin did nothing.
    case = {**cases.first_values(), "masks": masks, "mode": "token_mean", "batches": "1x6"}
    assert run_case(case, tmp_path)["outcome"] == "exact"
    assert run_case(case, tmp_path, plugin=False)["outcome"] == "WRONG"


def test_the_array_covers_every_pair_that_the_rules_allow() -> None:
    rows = cases.covering()
    assert all(map(cases.allowed, rows))
    covered = {pair for row in rows for pair in combinations(row.items(), 2)}
    pairs = {
        ((one, a), (other, b))
        for one, other in combinations(FACTORS, 2)
        for a in FACTORS[one]
        for b in FACTORS[other]
    }
    assert {pair for pair in pairs - covered if cases.allowed(dict(pair))} == set()


@pytest.mark.host
def test_every_flag_of_the_host_is_swept_or_left_out_for_a_reason() -> None:
    ours = {flag for flag in cases.swept() if flag.startswith("--loss-aggregation")}
    left_out = [flag for flags in cases.left_out().values() for flag in flags]
    assert sorted([*cases.swept() - ours, *left_out]) == host_flags()
