"""Lets a process import Megatron-Bridge's training code without what needs a GPU or a server.

Its training loop, loss and data code are real, and so are its GPT and its configuration. Stood in
for are packages that are heavy and unused here, and parts of Bridge that need them: its bridges to
Hugging Face models, adapters, and other loaders of data.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from tests.peers.standins import Anything, use_peers

PACKAGES = "transformers diffusers datasets huggingface_hub safetensors rich modelopt"
NEEDS_GPU = "nvidia_resiliency_ext"
BELOW_MEGATRON = (
    "megatron.bridge.diffusion",
    "megatron.bridge.models.conversion",
    "megatron.bridge.models.megatron_mimo",
    "megatron.bridge.peft",
    "megatron.energon",
)
IMPORT_EVERY_MODEL = ("megatron.bridge", "megatron.bridge.models")
"""Packages whose ``__init__`` imports every model; here they import what is asked for."""


class _BelowMegatron(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not any(f"{name}.".startswith(f"{part}.") for part in BELOW_MEGATRON):
            return None
        standin = importlib.util.find_spec(NEEDS_GPU)  # as any package that is stood in for
        assert standin is not None
        return ModuleSpec(name, standin.loader, is_package=True)


def use_bridge() -> None:
    """Let this process import Megatron-Bridge; call it after the CPU stands in for the GPU."""
    from megatron.core.datasets import utils

    utils.compile_helpers = lambda: None  # the wheel ships them compiled
    use_peers(f"{PACKAGES} {NEEDS_GPU}")
    sys.meta_path.insert(0, _BelowMegatron())
    for name in IMPORT_EVERY_MODEL:
        _import_empty(name)
    distillation = importlib.import_module("modelopt.torch.distill.plugins.megatron")
    # What it returns for a model that is not distilled.
    distillation.get_tensor_shapes_adjust_fn_for_distillation = lambda *args, **kwargs: None
    tokenizers = importlib.import_module("megatron.core.tokenizers.text.libraries.null_tokenizer")
    tokenizers.NullTokenizer.eos_id = tokenizers.NullTokenizer.eod  # asked for by packs


def _import_empty(name: str) -> None:
    spec = importlib.util.find_spec(name)
    assert spec is not None, f"no {name}; bash ci/test.sh installs the systems of ci/peers.txt"
    module: Any = importlib.util.module_from_spec(spec)
    module.__getattr__ = lambda _: Anything
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    setattr(importlib.import_module(parent), child, module)
