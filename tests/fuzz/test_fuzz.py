"""10,000 inputs: each exact, or refused by name; `python -m tests.fuzz` searches further."""

from __future__ import annotations

import pytest

from tests.fuzz.search import search, search_ranks


@pytest.mark.parametrize("first", range(0, 9000, 1500))
def test_public_functions_are_exact_or_refuse_by_name(first):
    report = search(first, 1500)
    assert not report.findings, report
    for name in {*report.exact, *report.refused}:
        assert report.exact[name] > report.refused[name] / 3 > 0, report


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_are_exact_or_all_refuse(world):
    report = search_ranks(0, 500, world)
    assert not report.findings, report
    assert min(report.exact.total(), report.refused.total()) > 100, report


def test_an_input_is_that_of_its_seed_alone():
    of_many, alone = search(0, 20), [search(seed, 1) for seed in range(20)]
    assert of_many.exact == sum((x.exact for x in alone), type(of_many.exact)())
