"""What a rank of the sweep finds imported; importing it changes torch for the process."""

from __future__ import annotations

import importlib
import os

from megatron_loss_agg.mcore.cpu import enable

# The stand-ins count as many devices as a launch may have ranks.
os.environ["LOCAL_WORLD_SIZE"] = "4"
enable()
for _module in (
    "megatron.core.datasets.gpt_dataset",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.optimizer",
    "megatron.training.argument_utils",
    "megatron.training.training",
    "torch.distributed.checkpoint",
    "tests.sweep.reference",
):
    importlib.import_module(_module)
