"""What a call of the schedule does besides its loss: checks and parts, one file each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from megatron_loss_agg.errors import ModeError
from megatron_loss_agg.mcore.extension import Extension
from megatron_loss_agg.mcore.extensions.agreement import Agreement
from megatron_loss_agg.mcore.extensions.audit import Audit
from megatron_loss_agg.mcore.extensions.first_line import FirstLine
from megatron_loss_agg.mcore.extensions.gathers import GatherCheck
from megatron_loss_agg.mcore.extensions.inexact import InexactSettings
from megatron_loss_agg.mcore.extensions.left_gradients import LeftGradients
from megatron_loss_agg.mcore.extensions.masked_sum import MaskedSum
from megatron_loss_agg.mcore.extensions.masks import MaskCheck

# A call is entered in this order and left in reverse. Settings are compared before anything is
# measured or read; the first line comes after all that could still raise.
_BEFORE = (Agreement, InexactSettings, FirstLine, LeftGradients, Audit)
_AFTER = (MaskCheck, MaskedSum, GatherCheck)


def with_checks(given: Iterable[Extension]) -> list[Extension]:
    """The checks that every hook has, with the ``given`` extensions among them.

    An extension of the class of a check takes its place.

    Raises:
        ModeError: something that is no `Extension`, or two for one place.
    """
    parts: list[Any] = list(given)
    for x in parts:
        if not isinstance(x, Extension):
            got = f"the class {x.__name__}" if isinstance(x, type) else f"a {type(x).__name__}"
            raise ModeError(
                f"{got} among extensions; expected objects of extensions, such as Audit(trust=True)"
            )

    def placed(default: type[Extension]) -> Extension:
        own: list[Extension] = [x for x in parts if isinstance(x, default)]
        if len(own) > 1:
            raise ModeError(f"{len(own)} {default.__name__} among extensions; expected one")
        if own:
            parts.remove(own[0])
            return own[0]
        return default()

    before, after = [*map(placed, _BEFORE)], [*map(placed, _AFTER)]
    return [*before, *parts, *after]
