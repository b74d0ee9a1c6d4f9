"""Pairs of reports that are made together when a call ends."""

from __future__ import annotations

import functools

import pytest
import torch

from megatron_loss_agg.mcore.host import is_own
from megatron_loss_agg.mcore.pairs import Pair, make_pairs
from tests.core.operations import Operations


def test_pairs_keep_their_dtype_and_the_rest_of_a_report_is_left_alone():
    other = torch.tensor([3.0, 4.0])
    wide = torch.tensor(1 / 3, dtype=torch.float64)
    reports = [
        {"lm loss": Pair(torch.tensor(2.0), 3.0, 0.5), "other": other},
        {"lm loss": Pair(torch.tensor(torch.nan), 3.0, 2.0), "mode loss": Pair(wide, 0.1, 1e-9)},
    ]
    make_pairs(reports)
    assert reports[0]["other"] is other
    assert torch.equal(reports[0]["lm loss"], torch.tensor([6.0, 0.5]))
    total, count = reports[1]["lm loss"].tolist()
    assert total != total and count == 2  # the total alone is NaN
    assert reports[1]["mode loss"].tolist() == [float(wide) * 0.1, 1e-9]
    assert reports[1]["lm loss"].dtype == torch.float32


def test_a_pair_can_be_edited_alone():
    reports = [{"a": Pair(torch.ones(()), 1.0, 1.0), "b": Pair(torch.ones(()), 1.0, 1.0)}]
    make_pairs(reports)
    reports[0]["a"].zero_()
    assert reports[0]["b"].tolist() == [1, 1]


def test_any_number_of_pairs_takes_the_same_operations():
    def made(number: int) -> Operations:
        reports = [{"a": Pair(torch.ones(()), 1.0, 1.0)} for _ in range(number)]
        with Operations() as operations:
            make_pairs(reports)
        return operations

    assert made(2).but_views == made(200).but_views <= 6
    assert not made(2).waits


@pytest.mark.host
def test_only_the_hosts_own_schedules_are_known_to_read_no_report_before_they_end():
    from megatron.core.pipeline_parallel import schedules

    own = schedules.forward_backward_no_pipelining

    @functools.wraps(own)
    def wrapper(**arguments):
        return own(**arguments)

    assert is_own(own)
    assert not is_own(wrapper)
    assert not is_own(functools.partial(own))
