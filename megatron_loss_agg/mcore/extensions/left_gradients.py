"""Gradients that a training call left in its model, to which the next call would add its own."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from megatron_loss_agg.errors import HostError, StepError
from megatron_loss_agg.mcore.extension import Extension, MicrobatchLoss
from megatron_loss_agg.mcore.host import Call
from megatron_loss_agg.mcore.step import PlannedStep


class _Left(NamedTuple):
    """Which tensor a gradient was when a call ended, and how often it was written to.

    Zeroing writes to it; it writes to the whole buffer of which each ``main_grad`` is a view, so
    that of one parameter is enough.
    """

    parameter: weakref.ref[Any]
    gradient: int
    version: int

    @classmethod
    def of(cls, model: Any) -> _Left | None:
        first = next((p for p in model.parameters() if _gradient_of(p) is not None), None)
        return None if first is None else cls._now(first)

    @classmethod
    def _now(cls, parameter: Any) -> _Left | None:
        gradient = _gradient_of(parameter)
        if gradient is None:
            return None
        return cls(weakref.ref(parameter), id(gradient), gradient._version)

    @property
    def is_unchanged(self) -> bool:
        now = self._now(self.parameter())
        return now is not None and now[1:] == self[1:]


# By model, since several hooks may train it in turn.
_left: weakref.WeakKeyDictionary[Any, _Left] = weakref.WeakKeyDictionary()


class LeftGradients(Extension):
    """Refuses a step on gradients that the last one left, and a second model for one hook."""

    def __init__(self) -> None:
        self._model: weakref.ref[Any] | None = None

    def start(self, call: Call) -> None:
        if not call.trains:
            return
        self._model = self._model or weakref.ref(call.chunks[0])
        if self._model() is not call.chunks[0]:
            raise HostError(
                "a LossHook trains a second model; expected a hook for each: it measures the "
                "host's averaging, and checks losses and splits, in the first step of one model"
            )
        model: Any = call.chunks[0]
        left = _left.get(model)
        if left is None or not left.is_unchanged:
            return
        gradients = map(_gradient_of, model.parameters())
        # Of a step without tokens they are zero: a loop may skip the rest of it.
        if any(x is not None and bool(x.any()) for x in gradients):
            raise StepError(
                "a forward-backward call on the gradients that the last one left, which Megatron "
                "would reduce and scale again; expected one call for each step, after "
                "model.zero_grad_buffer(): for a step of several calls use LossHook.step, and for "
                "losses of several hooks one hook with several terms"
            )

    @contextmanager
    def around(
        self, call: Call, plan: PlannedStep | None
    ) -> Iterator[Callable[[MicrobatchLoss], None] | None]:
        yield None
        if call.trains:
            model = call.chunks[0]
            left = _Left.of(model)
            if left is None:
                _left.pop(model, None)
            else:
                _left[model] = left


def _gradient_of(parameter: Any) -> Any:
    return getattr(parameter, "main_grad", None)
