"""A part of the sweep, and that its lists are complete; the whole is `bash ci/sweep.sh`."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.sweep import cases
from tests.sweep.factors import FACTORS


def part(number: int) -> list[cases.Case]:
    """Each case has the most values that those before it lack."""
    found: list[cases.Case] = []
    for _ in range(number):
        had = {x for case in found for x in case.items()}
        found.append(max(cases.everything(), key=lambda case: len(case.items() - had)))
    return found


@pytest.mark.parametrize("case", part(8), ids=cases.key_of)
def test_a_launch_is_exact_or_refused_by_name(case: cases.Case) -> None:
    found = cases.run_case(case)
    assert found["outcome"] in ("exact", "refused", "host refused"), (found, case)


PACKS = {"topology": "cp2", "mode": "sample_mean", "data": "sft", "batches": "1x3"}


@pytest.mark.parametrize("values", [{"batches": "1x6"}, PACKS], ids=["rows", "packs"])
def test_an_exact_launch_is_wrong_without_the_plugin(values: dict[str, str]) -> None:
    case = {**cases.first_values(), **values}
    assert cases.run_case(case)["outcome"] == "exact"
    assert cases.run_case(case, plugin=False)["outcome"] == "WRONG"


def test_every_pair_of_values_that_the_host_takes_together_is_in_a_launch() -> None:
    covered = {pair for case in cases.covering() for pair in combinations(case.items(), 2)}
    for one, other in combinations(FACTORS, 2):
        for pair in product(((one, x) for x in FACTORS[one]), ((other, x) for x in FACTORS[other])):
            assert cases.allowed(dict(pair)) == (pair in covered), pair


def test_every_flag_of_the_host_is_swept_or_left_out_for_a_reason() -> None:
    ours = {flag for flag in cases.swept() if flag.startswith("--loss-aggregation")}
    left_out = [flag for flags in cases.left_out().values() for flag in flags]
    assert sorted([*cases.swept() - ours, *left_out]) == cases.all_flags()
