"""Stand-ins for ``torch.cuda``, so that Megatron-Core, which assumes a GPU, runs on CPU.

All tensors stay on the CPU. Stand-ins return the CPU's own values where Megatron uses them (time,
random state, memory), and constants where it only checks a requirement.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import time
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch.utils.data import DataLoader

_entered_streams: list[Any] = []


def inside_stream() -> bool:
    """True inside ``with torch.cuda.stream(...)``."""
    return bool(_entered_streams)


def install() -> None:
    """Replace the GPU functions of ``torch`` for the rest of the process."""
    _replace_properties()
    _replace_random_state()
    _replace_streams()
    _replace_accelerator()
    _replace_compiler()
    _replace_data_loader()
    _replace_placement()


def _returning(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def _replace(owner: ModuleType | type, **stand_ins: Any) -> None:
    for name, stand_in in stand_ins.items():
        setattr(owner, name, stand_in)


def _is_gpu(device: object) -> bool:
    """True for "cuda:0", ``torch.device("cuda")`` and a bare index."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return type(device) is int or (isinstance(device, str) and device.startswith("cuda"))


_FACTORIES = (
    "arange as_tensor asarray empty empty_like empty_strided eye full full_like linspace ones "
    "ones_like rand rand_like randint randint_like randn randn_like randperm scalar_tensor tensor "
    "zeros zeros_like"
)
_METHODS = "new_empty new_empty_strided new_full new_ones new_tensor new_zeros"


def _replace_placement() -> None:
    """Make tensors on the CPU where an argument asks for a GPU."""
    for owner, names in ((torch, _FACTORIES), (torch.Tensor, _METHODS)):
        for name in names.split():
            setattr(owner, name, _on_cpu(getattr(owner, name)))
    stock_to, stock_type = _on_cpu(torch.Tensor.to), torch.Tensor.type

    def to_cpu(x: Any, *args: Any, **kwargs: Any) -> Any:
        if args and _is_gpu(args[0]):
            args = ("cpu", *args[1:])
        return stock_to(x, *args, **kwargs)

    def type_on_gpu(x: Any, *args: Any, **kwargs: Any) -> Any:
        """Return a GPU type's name, since Megatron's optimizers look for it in parameters."""
        result = stock_type(x, *args, **kwargs)
        return result.replace("torch.", "torch.cuda.") if isinstance(result, str) else result

    def identity(x: Any, *args: Any, **kwargs: Any) -> Any:
        return x

    _replace(
        torch.Tensor,
        to=to_cpu,
        type=type_on_gpu,
        cuda=identity,
        pin_memory=identity,
        record_stream=_returning(None),
    )


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        if _is_gpu(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return function(*args, **kwargs)

    return on_cpu


def _replace_properties() -> None:
    """Report a device that is new enough and has the host's memory, all of it free."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    properties = SimpleNamespace(
        name="cpu", major=8, minor=0, multi_processor_count=1, total_memory=memory, gcnArchName=""
    )
    _replace(
        torch.cuda,
        is_available=_returning(True),
        is_initialized=_returning(True),
        _lazy_init=_returning(None),
        # One device per local rank, since Megatron selects one by local rank.
        device_count=_returning(int(os.environ.get("LOCAL_WORLD_SIZE", "1"))),
        current_device=_returning(0),
        set_device=_returning(None),
        device=lambda *args: contextlib.nullcontext(),
        get_device_properties=_returning(properties),
        is_current_stream_capturing=_returning(False),
        memory_stats=lambda *args, **kwargs: collections.defaultdict(int),
        device_memory_used=_returning(0),
    )
    torch.nn.Module.cuda = lambda self, *args: self  # type: ignore[method-assign]


def _replace_random_state() -> None:
    """Use the CPU's generator for every device."""
    cuda: Any = torch.cuda
    cuda.default_generators = (torch.default_generator,) * cuda.device_count()
    for name in ("_lazy_init", "current_device", "device_count"):
        setattr(cuda.random, name, getattr(cuda, name))  # this module has imported the originals


class Stream:
    """A stream without pending work; also the context of ``torch.cuda.stream(...)``."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = torch.device("cpu")

    def __enter__(self) -> Stream:
        _entered_streams.append(self)
        return self

    def __exit__(self, *exception: object) -> None:
        _entered_streams.pop()

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


def _replace_streams() -> None:
    """Run all work in order, synchronously."""
    _replace(
        torch.cuda,
        Stream=Stream,
        Event=Event,
        stream=lambda stream: stream or Stream(),
        current_stream=lambda *args: Stream(),
        default_stream=lambda *args: Stream(),
        set_stream=_returning(None),
        synchronize=_returning(None),
    )
    _replace(torch.cuda.nvtx, range_push=_returning(None), range_pop=_returning(None))


def _replace_accelerator() -> None:
    """Hide the accelerator of a CUDA build of torch from torch itself."""
    _replace(
        torch.accelerator,
        is_available=_returning(False),
        current_accelerator=_returning(None),
        current_device_index=_returning(0),
    )


def _replace_compiler() -> None:
    """Run eagerly: compiling takes longer than a small run, and scripts cannot call stand-ins."""

    def compile_nothing(model: Any = None, **kwargs: Any) -> Any:
        return (lambda decorated: decorated) if model is None else model

    torch.compile = compile_nothing
    torch.jit.script = lambda scripted, *args, **kwargs: scripted  # type: ignore[assignment]


def _replace_data_loader() -> None:
    """Load data in the rank's own process, since the ranks already share the CPU's cores."""
    construct = DataLoader.__init__

    def construct_in_process(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs.update(pin_memory=False, num_workers=0, persistent_workers=False)
        kwargs.pop("prefetch_factor", None)
        construct(self, *args, **kwargs)

    DataLoader.__init__ = construct_in_process  # type: ignore[method-assign]
