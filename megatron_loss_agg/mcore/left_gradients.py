"""Gradients that a training call left in its model, to which the next call would add its own."""

from __future__ import annotations

import weakref
from typing import Any

from megatron_loss_agg.errors import StepError


class LeftGradients:
    """Tells whether a model's gradients are still those that a hook's last call left.

    Zeroing writes to them; it writes to the whole buffer of which each ``main_grad`` is a view, so
    one is looked at.
    """

    def __init__(self) -> None:
        self._parameter: weakref.ref[Any] | None = None  # the first one with a gradient
        self._left: tuple[int, int] | None = None

    def note(self, model: Any) -> None:
        """A call has ended that left gradients in ``model``."""
        if self._parameter is None:
            first = next((p for p in model.parameters() if _gradient_of(p) is not None), None)
            self._parameter = None if first is None else weakref.ref(first)
        self._left = self._state()

    def check(self, model: Any) -> None:
        """Raise StepError if a call begins on gradients that are still those of the last one."""
        if self._left is None or self._left != self._state():
            return
        gradients = map(_gradient_of, model.parameters())
        # Of a step without tokens they are zero: a loop may skip the rest of it.
        if any(x is not None and bool(x.any()) for x in gradients):
            raise StepError(
                "a forward-backward call on the gradients that the last one left, which Megatron "
                "would reduce and scale again; expected one call for each step, after "
                "model.zero_grad_buffer(): for a step of several calls use LossHook.step"
            )

    def _state(self) -> tuple[int, int] | None:
        """Which tensor the gradient is, and how often it was written to."""
        gradient = None if self._parameter is None else _gradient_of(self._parameter())
        return None if gradient is None else (id(gradient), gradient._version)


def _gradient_of(parameter: Any) -> Any:
    return getattr(parameter, "main_grad", None)
