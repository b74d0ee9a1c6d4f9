"""Gradients that a training call left in its model, to which the next call would add its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from megatron_loss_agg.errors import StepError


class LeftGradients:
    """Tells whether anything was written to a model's gradients since a hook's last call.

    The optimizer, clipping and zeroing write to them. A loop that does none of these makes a second
    call before the optimizer's step, or has forgotten to zero.
    """

    def __init__(self) -> None:
        self._state: tuple[int, int] | None = None

    def note(self, model: Any) -> None:
        """A call has ended that left gradients in ``model``."""
        self._state = _state_of(model)

    def check(self, model: Any) -> None:
        """Raise StepError if a call begins on gradients that are still those of the last one."""
        unwritten = self._state is not None and self._state == _state_of(model)
        # Of a step without tokens they are zero: a loop may skip the rest of it.
        if unwritten and any(bool(x.any()) for x in _gradients(model)):
            raise StepError(
                "a forward-backward call on the gradients that the last one left, which would add "
                "up means of parts; expected one call for each step, after model.zero_grad_buffer()"
                ": for a step of several calls use LossHook.step"
            )


def _state_of(model: Any) -> tuple[int, int] | None:
    """Which tensor the first gradient is, and how often it was written to; None without any."""
    first = next(_gradients(model), None)
    return None if first is None else (id(first), first._version)


def _gradients(model: Any) -> Iterator[Tensor]:
    for parameter in model.parameters():
        gradient = getattr(parameter, "main_grad", None)
        gradient = parameter.grad if gradient is None else gradient
        if gradient is not None:
            yield gradient
