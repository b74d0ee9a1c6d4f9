"""The tensor operations of calls, by name: tests count, and need not time."""

from __future__ import annotations

import importlib
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests import device

# The module, whose name in the package is that of its function.
weighted_sum = importlib.import_module("megatron_loss_agg.weighted_sum")

WAITS = {f"aten::{name}" for name in device.WAITS}


class Operations(TorchDispatchMode):
    """Operations that the calls inside made, and dtypes of their results of several elements.

    As on a GPU, where nothing is known of a sum before it is waited for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.but_views = 0
        self.dtypes: set[torch.dtype] = set()
        self._as_on_gpu = mock.patch.object(weighted_sum, "_is_known_finite", return_value=False)

    def __enter__(self) -> Operations:
        self._as_on_gpu.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._as_on_gpu.stop()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name != "aten::promote_types":  # of no tensors; known after the first time
            self.names.append(func._schema.name)
            self.but_views += not func.is_view
        out = func(*args, **(kwargs or {}))
        made = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        self.dtypes.update(x.dtype for x in made if x.numel() > 1)
        return out

    @property
    def collectives(self) -> list[str]:
        return [name for name in self.names if name.startswith("c10d::")]

    @property
    def waits(self) -> bool:
        """Whether the host waited for the device."""
        return not WAITS.isdisjoint(self.names)
