"""Compares how the installed host scales a returned loss with `host`, before the first step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from megatron_loss_agg.collectives import any_rank
from megatron_loss_agg.errors import HostError
from megatron_loss_agg.mcore.extension import Extension
from megatron_loss_agg.mcore.extensions.probe import WRAPPERS, measured_factor, wrapper_of
from megatron_loss_agg.mcore.host import Call, HostScale

_TOLERANCE = 1e-4
"""Relative tolerance of the measured factor, which is measured in fp32."""

_TRUST = "Audit(trust=True) (--loss-aggregation-unmeasured trust)"


class Audit(Extension):
    """Compares `measured_factor` with 1 before the first training step.

    Args:
        repeat: again before the first step of every new `HostScale`, and print the results.
        trust: go on with a host that cannot be measured, as if it were as planned.

    Attributes:
        measured: gradients as a multiple of the planned ones, when last measured; or None.
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
        return f"gradients are {self.measured:.6f} times the planned ones"

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
            self._compare(call, measured_factor(call, wrap))
        elif not self._trusts:
            raise HostError(
                f"the averaging of a {type(call.chunks[-1]).__name__} cannot be measured; expected "
                f"one of Megatron's {', '.join(WRAPPERS)}: wrap the model in it, or, if its "
                f"gradients are averaged as the first of these does, choose {_TRUST}"
            )
        self._checked.add(scale)  # not earlier: a loop that catches the error must fail again

    def _compare(self, call: Call, measured: float) -> None:
        from megatron.core import __version__

        finalize: Any = call.config.finalize_model_grads_func
        if abs(measured - 1) <= _TOLERANCE:  # NaN is not
            self.measured = measured
            if self._repeat and dist.get_rank() == 0:
                print(f"loss aggregation audit: {self.words()} ({call.scale})", flush=True)
        elif finalize is not None or not self._trusts:
            raise HostError(
                f"gradients would be {measured:.6g} times the planned ones in megatron-core "
                f"{__version__} with {type(call.chunks[-1]).__name__} and "
                f"config.finalize_model_grads_func={getattr(finalize, '__qualname__', finalize)} "
                f"({call.scale}); expected what {WRAPPERS[0]} and finalize_model_grads do in "
                "Megatron-Core 0.13 to 0.19: use these, or turn off calculate_per_token_loss; or, "
                "if the loop itself reduces and scales gradients after the schedule, leave the "
                f"function None and choose {_TRUST}"
            )
