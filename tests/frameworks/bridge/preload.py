"""What a rank of the Megatron-Bridge tests finds imported."""

from __future__ import annotations

import gc
import importlib

from megatron_loss_agg.mcore.cpu import enable
from tests.frameworks.bridge.standins import use_bridge

enable()
use_bridge()
importlib.import_module("megatron.bridge.training.pretrain")
gc.freeze()  # Bridge collects garbage in every run, which would look at all that is imported
