"""Stand-ins for ``torch.cuda`` streams and events; all work runs in order, synchronously."""

from __future__ import annotations

import time
from typing import Any

import torch

_entered: list[Any] = []


def inside() -> bool:
    """Whether code runs in ``with torch.cuda.stream(...)``."""
    return bool(_entered)


def install() -> None:
    """Replace the streams, events and ranges of ``torch.cuda``."""
    stand_ins: dict[str, Any] = {
        "Stream": _Stream,
        "Event": _Event,
        "stream": _Inside,
        "current_stream": lambda *args: _Stream(),
        "default_stream": lambda *args: _Stream(),
        "set_stream": lambda stream: None,
        "synchronize": lambda *args: None,
    }
    for name, stand_in in stand_ins.items():
        setattr(torch.cuda, name, stand_in)
    for name in ("range_push", "range_pop", "mark"):
        setattr(torch.cuda.nvtx, name, lambda *args: None)


class _Inside:
    """``torch.cuda.stream(...)``, which may be entered more than once."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __enter__(self) -> Any:
        _entered.append(self.stream)
        return self.stream

    def __exit__(self, *exception: object) -> None:
        _entered.pop()


class _Stream:
    """A stream without pending work."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = torch.device("cpu")

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *exception: object) -> None:
        return None

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def wait_stream(self, stream: _Stream) -> None: ...

    def wait_event(self, event: _Event) -> None: ...

    def record_event(self, event: _Event | None = None) -> _Event:
        event = event or _Event()
        event.record(self)
        return event

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, 0


class _Event:
    """An event that records the host's clock, so that Megatron's timers are right."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._seconds = 0.0

    def record(self, stream: _Stream | None = None) -> None:
        self._seconds = time.perf_counter()

    def elapsed_time(self, end: _Event) -> float:
        """Milliseconds from this event to ``end``."""
        return 1e3 * (end._seconds - self._seconds)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def wait(self, stream: _Stream | None = None) -> None: ...
