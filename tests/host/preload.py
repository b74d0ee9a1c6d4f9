"""The imports of every rank of the host tests; they change torch for the process."""

from __future__ import annotations

import importlib
import importlib.util
import os

from megatron_loss_agg.mcore.cpu import enable

# The stand-ins count as many devices as a launch may have ranks.
os.environ["LOCAL_WORLD_SIZE"] = "4"
enable()
_MODULES = [
    "megatron.core.datasets.gpt_dataset",
    "megatron.core.distributed",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
    "pytest",
    "torch._dynamo",
    "torch.distributed.checkpoint",
]
if importlib.util.find_spec("megatron.training"):  # not in the wheels of older releases
    _MODULES += ["megatron.training.argument_utils", "megatron.training.training"]
for _module in _MODULES:
    importlib.import_module(_module)
