"""What a stock loss function is: a `functools.partial` that binds its ``loss_mask``."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

from torch import Tensor


def bound_mask(loss_func: Callable[..., Any]) -> Tensor | None:
    """The ``loss_mask`` that a `functools.partial` binds, by position or name."""
    if not isinstance(loss_func, functools.partial):
        return None
    function, given, mask = loss_func.func, loss_func.args, loss_func.keywords.get("loss_mask")
    if isinstance(function, FunctionType) and not vars(function):
        # A plain function: reading its code is much faster than making a signature.
        code = function.__code__
        names = code.co_varnames[: min(code.co_argcount, len(given))]
        mask = given[names.index("loss_mask")] if "loss_mask" in names else mask
    elif given:
        with contextlib.suppress(ValueError):  # some built-in functions have no signature
            bound = inspect.signature(function).bind_partial(*given, **loss_func.keywords)
            mask = bound.arguments.get("loss_mask")
    return mask if isinstance(mask, Tensor) else None


def name_of(loss_func: Callable[..., Any]) -> str:
    """A readable name, without the tensors that a `functools.partial` binds."""
    if isinstance(loss_func, functools.partial):
        return f"partial({name_of(loss_func.func)})"
    return getattr(loss_func, "__qualname__", type(loss_func).__qualname__)
