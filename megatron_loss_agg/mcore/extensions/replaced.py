"""Stands in for an attribute of the host's during a call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(holder: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of an object, a class or a module, and restore what it was."""
    is_own, before = name in vars(holder), getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        if is_own:
            setattr(holder, name, before)
        else:  # of its class
            delattr(holder, name)
