"""What a call of the schedule does besides its loss: checks and parts, one file each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from megatron_loss_agg.errors import OptionError
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
# measured or read; the first line comes after all that could still raise. What exchanges at the end
# of a call is left first, before another check raises on one rank alone.
_BEFORE = (Agreement, InexactSettings, FirstLine, LeftGradients, Audit)
_AFTER = (MaskedSum, GatherCheck, MaskCheck)


def with_checks(given: Iterable[Extension]) -> list[Extension]:
    """The checks that every hook has, with the ``given`` extensions among them.

    An extension of the class of a check takes its place.

    Raises:
        OptionError: something that is no `Extension`.
    """
    parts = list(given)
    for x in parts:
        if not isinstance(x, Extension):
            raise OptionError(
                f"{x!r} among extensions; expected objects of extensions, such as Audit(trust=True)"
            )

    def placed(checks: Iterable[type[Extension]]) -> Iterator[Extension]:
        for check in checks:
            yield from [x for x in parts if isinstance(x, check)] or [check()]

    between = [x for x in parts if not isinstance(x, _BEFORE + _AFTER)]
    return [*placed(_BEFORE), *between, *placed(_AFTER)]
