"""Lets a process import Megatron-Bridge's training code without what needs a GPU or a server.

Its training loop, loss and data code are real, and so are its GPT and its configuration. Stood in
for are packages that are heavy and unused here, and parts of Bridge that need them: its bridges to
Hugging Face models, adapters, and other loaders of data.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

from tests.peers.standins import Anything, use_peers

STANDINS = (
    "transformers diffusers datasets huggingface_hub safetensors rich modelopt "
    "nvidia_resiliency_ext megatron.energon megatron.bridge.diffusion megatron.bridge.peft "
    "megatron.bridge.models.conversion megatron.bridge.models.megatron_mimo"
)
IMPORT_EVERY_MODEL = ("megatron.bridge", "megatron.bridge.models")
"""Packages whose ``__init__`` imports every model; here they import what is asked for."""


def use_bridge() -> None:
    """Let this process import Megatron-Bridge; call it after the CPU stands in for the GPU."""
    from megatron.core.datasets import utils

    utils.compile_helpers = lambda: None  # the wheel ships them compiled
    use_peers(STANDINS)
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
