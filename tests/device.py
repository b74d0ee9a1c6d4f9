"""A device in the memory of the CPU: what a GPU forbids raises, and every wait is noted.

Its tensors have true numbers and say that they lie on `DEVICE`. An operation on them and on tensors
of the CPU raises. `take` it in a process of its own: torch cannot take a device back. It has no
backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

BACKEND = "device_only"
"""Of process groups, for tensors on the device."""

DEVICE = torch.device("privateuseone", 0)
# Operations whose results' size or value the host must know.
WAITS = {"_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "unique_dim"}
_COPIES = ("_to_copy", "copy_")
_ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "_unsafe_view")

waits: list[str] = []
"""Names of the operations for which the host waited for the device."""
launches: list[str] = []
"""Names of the operations that the device ran; views and allocations run nothing."""
uploads: list[str] = []
"""Names of the operations that copied from the host to the device."""
collectives: list[str] = []
"""The types of the devices whose tensors they took."""
_arriving: list[tuple[Tensor, Tensor]] = []
"""Copies to the CPU that were not waited for, and what they will hold."""


class OnDevice(Tensor):
    """A tensor of the device."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> OnDevice:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=DEVICE,
        )
        made.held = held
        return made

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"OnDevice({self.held})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class Watch(TorchDispatchMode):
    """Notes `waits` and `collectives` of everything inside."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func._schema.name.split("::")[1], kwargs or {}
        given = tensors_in((args, kwargs))
        if func.namespace == "c10d":
            collectives.extend(x.device.type for x in given[:1])
        out = _run(func, args, kwargs)
        made = tensors_in(out)
        if _is_on_device(made):
            comes_from_host = any(not isinstance(x, OnDevice) for x in given)
            if name == "lift_fresh" or (name in _COPIES and comes_from_host):
                uploads.append(name)
            elif not func.is_view and name not in _ALLOCATIONS:
                launches.append(name)
        if _waits(name, given, made, kwargs):
            _synchronize(name)
        return out


class _Stream:
    """Of the device: there is one."""

    @staticmethod
    def synchronize() -> None:
        _synchronize("synchronize")


def take() -> None:
    """Make the device the accelerator of this process, for good."""
    backend_registration._setup_privateuseone_for_python_backend()
    library = torch.library.Library("aten", "IMPL")
    library.impl("empty.memory_format", _empty, "PrivateUse1")
    library.impl("empty_strided", _empty_strided, "PrivateUse1")
    library.impl("_copy_from", _copy_from, "PrivateUse1")
    _kept.append(library)  # its functions go with it
    torch.accelerator.current_accelerator = lambda *_: torch.device(DEVICE.type)
    torch.accelerator.current_device_index = lambda: 0
    torch.accelerator.current_stream = lambda *_: _Stream
    torch.accelerator.is_available = lambda: True
    Tensor.pin_memory = _pinned
    dist.Backend.register_backend(BACKEND, dist.ProcessGroupGloo, devices=["cpu"])


_kept: list[Any] = []


def _empty(size: Any, dtype: Any = None, *_: Any, **__: Any) -> Tensor:
    return OnDevice(torch.empty(size, dtype=dtype))


def _empty_strided(size: Any, stride: Any, dtype: Any = None, *_: Any, **__: Any) -> Tensor:
    return OnDevice(torch.empty_strided(size, stride, dtype=dtype))


def _pinned(x: Tensor, *_: Any) -> Tensor:
    copy = x.clone()
    copy.is_pinned_here = True
    return copy


def _copy_from(x: Tensor, to: Tensor, non_blocking: bool = False) -> Tensor:
    x, held = (y.held if isinstance(y, OnDevice) else y for y in (x, to))
    held.copy_(x)
    return to


def _synchronize(name: str) -> None:
    waits.append(name)
    for copy, value in _arriving:
        copy.copy_(value)
    _arriving.clear()


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The operation on the tensors that are held."""
    given = tensors_in((args, kwargs))
    copies = func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
    target = kwargs.get("device")
    on_device = _is_on_device(given) if target is None else target.type == DEVICE.type
    if not on_device and not _is_on_device(given):
        return func(*args, **kwargs)
    if not copies and any(x.dim() and not isinstance(x, OnDevice) for x in given):
        raise RuntimeError(f"{func} on tensors of {sorted({str(x.device) for x in given})}")
    if target is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    held = tree_map_only(OnDevice, lambda x: x.held, (args, kwargs))
    out = func(*held[0], **held[1])
    if not on_device:
        if not kwargs.get("non_blocking"):
            return out
        copy = torch.full_like(out, 1)  # something else, until the device is waited for
        _arriving.append((copy, out.clone()))
        return copy
    if func is torch.ops.aten.copy_.default:
        return args[0]
    # An operation in place returns what it was given.
    same = {id(x.held): x for x in given if isinstance(x, OnDevice)}
    return tree_map_only(Tensor, lambda x: same[id(x)] if id(x) in same else OnDevice(x), out)


def tensors_in(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def _is_on_device(tensors: list[Tensor]) -> bool:
    return any(isinstance(x, OnDevice) for x in tensors)


def _waits(name: str, given: list[Tensor], made: list[Tensor], kwargs: dict[str, Any]) -> bool:
    """Whether the host waits for the device."""
    if not _is_on_device([*given, *made]):
        return False
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    if name in _COPIES and len({x.device for x in (*given, *made)}) > 1:
        # Memory of the CPU that can be swapped out is copied first, by the host.
        pageable = _is_on_device(made) and not hasattr(given[-1], "is_pinned_here")
        return given[-1].numel() > 0 and (pageable or not kwargs.get("non_blocking"))
    return name in WAITS
