"""Tests on the real host.

Importing Megatron takes seconds and needs stand-ins for a GPU, which only ranks have. So here its
modules, and ours that import it, are names alone: each is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import Any


class _OnRanks:
    def __init__(self, name: str) -> None:
        vars(self)["name"] = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self.name), attribute)

    def __setattr__(self, attribute: str, value: Any) -> None:
        setattr(importlib.import_module(self.name), attribute, value)


gpt, gradients, distillation = (
    _OnRanks(f"{__name__}.{name}") for name in ("gpt", "gradients", "distillation")
)
parallel_state = _OnRanks("megatron.core.parallel_state")
pipeline_parallel = _OnRanks("megatron.core.pipeline_parallel")
