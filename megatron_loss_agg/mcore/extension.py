"""Extensions of a hook: they add to its loss or its reports."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping

from megatron_loss_agg.mcore.call import Call
from megatron_loss_agg.mcore.reports import MicrobatchLoss
from megatron_loss_agg.plan import StepPlan


class Extension:
    """An addition to the loss or the reports of a hook; each method may be left out.

    It may also change Megatron's configuration while a call runs, and raise.

    Attributes:
        counts_at_end: True if it also works in a step that is counted at its end. Plans are then
            for one part of the step on this rank, and no other rank takes part in them.
        scaled_losses: losses that Megatron itself adds (``"moe"``, ``"mtp"``, ``"dsa"``) and that
            this extension scales over the whole step.
    """

    counts_at_end = False
    scaled_losses: Collection[str] = ()

    @contextlib.contextmanager
    def around(self, call: Call, plans: Mapping[str, StepPlan] | None) -> Iterator[None]:
        """Entered after the step is counted, left after Megatron's schedule.

        This happens on every rank, for every call of the schedule that the hook aggregates. A step
        is one call or several: ``call.begins_step`` is True in the first, ``call.ends_step`` in the
        last. In `LossHook.stream`, every call begins a step and none ends it. May communicate,
        since all ranks enter.

        Args:
            plans: by term; None on pipeline stages without a loss, and with ``count="end"``. They hold
                masks, and the samples of all ranks, only on ranks that read batches
                (``call.groups.reads_data``).
        """
        yield

    def on_loss(self, microbatch: MicrobatchLoss) -> None:
        """Called for the loss of each microbatch, on the ranks that compute it.

        Must not communicate. May change ``microbatch.total`` and add reports.
        """
