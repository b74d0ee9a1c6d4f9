"""The list of a hook's extensions: the default checks, and those that are given."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_loss_agg import AggregationError, LossAggregation
from megatron_loss_agg.mcore import Agreement, Audit, Extension, LossHook
from megatron_loss_agg.mcore.extensions import with_checks

BEFORE = ["Agreement", "InexactSettings", "FirstLine", "LeftGradients", "Audit"]
AFTER = ["MaskedSum", "GatherCheck", "MaskCheck"]


class Own(Extension):
    pass


class OwnAudit(Audit):
    pass


def names(*given: Extension) -> list[str]:
    return [type(x).__name__ for x in with_checks(given)]


def test_parts_stand_between_the_checks_in_their_order() -> None:
    assert names() == BEFORE + AFTER
    assert names(OwnAudit(), Own(), Agreement(1.0)) == [*BEFORE[:-1], "OwnAudit", "Own", *AFTER]


def test_a_given_check_takes_the_place_of_the_default_one() -> None:
    audit, agreement = Audit(trust=True), Agreement(patience=1.0)
    found = with_checks([audit, agreement])
    assert (found[0], found[4]) == (agreement, audit)
    assert len(found) == len(BEFORE + AFTER)


@pytest.mark.parametrize(
    "given, text",
    [
        ([Audit], "<class 'megatron_loss_agg.*.Audit'> among extensions; expected objects"),
        (["audit"], "'audit' among extensions; expected objects"),
        ([Audit(), OwnAudit()], "several extensions have the settings"),
    ],
)
def test_what_is_no_extension_or_one_too_many_is_refused(given: Any, text: str) -> None:
    with pytest.raises(AggregationError, match=f"^{text}"):
        LossHook(LossAggregation(mode="sum"), extensions=given)
