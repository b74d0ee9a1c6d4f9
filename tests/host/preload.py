"""What a rank of the host tests finds imported; importing it changes torch for the process."""

from __future__ import annotations

import importlib

from megatron_loss_agg.mcore.cpu import enable

enable()
for _module in (
    "megatron.core.distributed",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
):
    importlib.import_module(_module)
