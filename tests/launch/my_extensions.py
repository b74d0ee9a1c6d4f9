"""Extensions that tests name in flags."""

from __future__ import annotations

from megatron_loss_agg.mcore import Extension, MicrobatchLoss


class Doubled(Extension):
    """Doubles the loss."""

    def on_loss(self, microbatch: MicrobatchLoss) -> None:
        microbatch.total = 2 * microbatch.total
        microbatch.report("doubled loss", microbatch.pair(microbatch.total))


def doubled() -> Doubled:
    return Doubled()


def needs_argument(factor: float) -> Doubled:
    return Doubled()
