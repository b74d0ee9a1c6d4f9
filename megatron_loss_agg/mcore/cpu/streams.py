"""Stand-ins for ``torch.cuda`` streams and events; all work runs in order, synchronously."""

from __future__ import annotations

import time
from typing import Any

import torch

_entered: list[Any] = []


def inside() -> bool:
    """Whether code runs in ``with torch.cuda.stream(...)``."""
    return bool(_entered)


class Stream:
    """A stream without pending work, and what ``torch.cuda.stream(...)`` enters."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = torch.device("cpu")

    def __enter__(self) -> Stream:
        _entered.append(self)
        return self

    def __exit__(self, *exception: object) -> None:
        _entered.pop()

    def synchronize(self) -> None: ...

    def wait_stream(self, stream: Stream) -> None: ...

    def wait_event(self, event: Event) -> None: ...

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record()
        return event

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, 0


class Event:
    """An event that records the host's clock, so that Megatron's timers are right."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._seconds = 0.0

    def record(self, stream: Stream | None = None) -> None:
        self._seconds = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds from this event to ``end``."""
        return 1e3 * (end._seconds - self._seconds)

    def synchronize(self) -> None: ...

    def wait(self, stream: Stream | None = None) -> None: ...
