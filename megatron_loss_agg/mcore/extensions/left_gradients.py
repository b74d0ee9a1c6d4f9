"""Gradients that a training call left in its model, to which the next call would add its own."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron_loss_agg.errors import DataError, HostError
from megatron_loss_agg.mcore.extension import Extension, Watch
from megatron_loss_agg.mcore.host import Call
from megatron_loss_agg.mcore.step import PlannedStep

# What `_state` was when a call ended, by model, since several hooks may train it in turn.
_left: weakref.WeakKeyDictionary[Any, tuple[int, int] | None] = weakref.WeakKeyDictionary()


class LeftGradients(Extension):
    """Refuses a step on gradients that the last one left, and a second model for one hook."""

    def __init__(self) -> None:
        self._model: weakref.ref[Any] | None = None

    def start(self, call: Call) -> None:
        if not call.trains:
            return
        model: Any = call.chunks[0]
        self._model = self._model or weakref.ref(model)
        if self._model() is not model:
            raise HostError(
                "a LossHook trains a second model; expected a hook for each, which is checked in "
                "the first step of its model"
            )
        if _held_by_optimizer(model):
            raise DataError(
                "a parameter's grad is its main_grad, which counts the first "
                "microbatch twice; expected optimizer.zero_grad() before"
            )
        # Of a step without tokens they are zero: a loop may skip the rest of it.
        if _left.get(model) == _state(model) and any(bool(x.any()) for x in _gradients(model)):
            raise DataError(
                "a forward-backward call on the gradients that the last one left, which Megatron "
                "would reduce and scale again; expected model.zero_grad_buffer() before: for a "
                "step of several calls use LossHook.step, for several losses one hook with terms"
            )

    @contextmanager
    def around(self, call: Call, plan: PlannedStep | None) -> Iterator[Watch | None]:
        yield None
        if call.trains:
            _left[call.chunks[0]] = _state(call.chunks[0])


def _state(model: Any) -> tuple[int, int] | None:
    """Which tensor the first gradient is, and how often it was written to.

    One is enough: zeroing writes to the whole buffer of which each ``main_grad`` is a view.
    """
    first = next(_gradients(model), None)
    return None if first is None else (id(first), first._version)


def _held_by_optimizer(model: Any) -> bool:
    """Whether an optimizer has made a ``main_grad`` its parameter's ``grad``.

    The next backward pass would add to it, and DDP would then add it to itself.
    """
    parameters = (x for x in model.parameters() if x.grad is not None)
    return any(x.grad is getattr(x, "main_grad", None) for x in parameters)


def _gradients(model: Any) -> Iterator[Any]:
    for parameter in model.parameters():
        gradient = getattr(parameter, "main_grad", None)
        if gradient is not None:
            yield gradient
