"""Measures how the installed host scales a returned loss, and compares it with `host`.

A host that scales differently is caught before the first step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron_loss_agg.collectives import any_rank
from megatron_loss_agg.errors import HostError
from megatron_loss_agg.mcore.extension import Extension
from megatron_loss_agg.mcore.extensions.probe import (
    WRAPPERS,
    data_groups,
    measured_factors,
    probe_tokens,
    wrapper_of,
)
from megatron_loss_agg.mcore.host import Call, HostScale

TOLERANCE = 1e-4
"""Relative tolerance of the measured factor, which is measured in fp32."""

_TRUST = "choose Audit(trust=True) (--loss-aggregation-unmeasured trust)"


class Audit(Extension):
    """Compares `measured_factors` with 1 before the first training step.

    Args:
        repeat: again before the first step of every new `HostScale`, and print the results.
        trust: go on with a host that cannot be measured, as if it were as planned; otherwise it is
            refused.

    Attributes:
        measured: gradients as a multiple of the planned ones, when last measured; None if they
            never were.
    """

    def __init__(self, repeat: bool = False, trust: bool = False) -> None:
        self.measured: float | None = None
        self._repeat = repeat
        self._trusts = trust
        self._checked: set[HostScale] = set()

    def settings(self) -> Mapping[str, object]:
        return {"audit": self._repeat, "unmeasured": "trust" if self._trusts else "refuse"}

    def words(self) -> str:
        if self.measured is None:
            return "gradients not measured"
        return f"measured gradients: {self.measured:.6f} times the planned ones"

    def start(self, call: Call) -> None:
        """Measure the host for a training call. All ranks must call; if one raises, all do.

        Raises:
            HostError: the measured factor differs from the planned one, or cannot be measured.
        """
        if not call.trains:
            return
        scale = call.scale
        # The number of microbatches may be new on some data-parallel ranks only.
        if self._checked and not (
            self._repeat and any_rank(scale not in self._checked, call.groups.dp)
        ):
            return
        wrap = wrapper_of(call)
        if wrap is not None:
            self._compare(call, wrap)
        elif not self._trusts:
            raise HostError(_unmeasured(call.chunks[-1]))
        self._checked.add(scale)  # not earlier: a loop that catches the error must fail again

    def _compare(self, call: Call, wrap: Callable[..., Any]) -> None:
        factors = measured_factors(call, wrap)
        distances = (factors - 1).abs().nan_to_num(math.inf)
        measured = float(factors.view(-1)[distances.argmax()])
        undone = 1.0 / call.scale.multiplier(probe_tokens(call))
        if not abs(measured - 1) <= TOLERANCE:  # also refuses NaN
            if call.config.finalize_model_grads_func is None and self._trusts:
                return
            raise HostError(_mismatch(call, factors, measured, undone))
        self.measured = measured
        if self._repeat and dist.get_rank() == 0:
            text = (
                f"the host multiplies a returned loss by {measured * undone:.6g}, the plugin "
                f"undoes {undone:.6g}: gradients are {measured:.6f} times the planned ones"
            )
            print(f"loss aggregation audit: {text}", flush=True)


def _unmeasured(chunk: Any) -> str:
    return (
        f"the averaging over data-parallel ranks of a {type(chunk).__name__} cannot be measured; "
        f"expected the model in one of Megatron's {', '.join(WRAPPERS)}: wrap it, or, if its "
        f"gradients are averaged as the first of these does, {_TRUST}"
    )


def _mismatch(call: Call, factors: Tensor, measured: float, undone: float) -> str:
    from megatron.core import __version__

    finalize = call.config.finalize_model_grads_func
    averages = any(dist.get_world_size(group) > 1 for group in data_groups(call))
    found = f"gradients would be {measured:.6g} times the planned ones"
    if finalize is None and (averages or call.scale.per_token):
        return (
            f"{found}, since config.finalize_model_grads_func is not set: the schedule neither "
            "reduces nor scales them; expected megatron.core.distributed.finalize_model_grads: set "
            f"it, or, if the loop itself does all of that after the schedule, {_TRUST}"
        )
    how = (
        f"{type(call.chunks[-1]).__name__} and config.finalize_model_grads_func="
        f"{getattr(finalize, '__qualname__', finalize)}"
    )
    if (factors[:, 1] - factors[:, 0] > TOLERANCE).any():
        return (
            f"{found} on one rank, and differ from those of others, since {how} do not sum them "
            "over all data- and context-parallel ranks; expected "
            "megatron.core.distributed.finalize_model_grads: set it, or have yours call it"
        )
    mend = "install one of these"
    if type(call.chunks[-1]).__name__ != WRAPPERS[0]:
        mend += f", use {WRAPPERS[0]}"
    if call.scale.per_token:
        mend += ", turn off calculate_per_token_loss"
    return (
        f"megatron-core {__version__} with {how} multiplies a returned loss by "
        f"{measured * undone:.6g} under this configuration ({call.scale}), but the plugin undoes "
        f"{undone:.6g}: {found}; expected the loss averaging of {WRAPPERS[0]} in Megatron-Core "
        f"0.13 to 0.19: {mend}, or report this version"
    )
