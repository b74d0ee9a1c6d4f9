"""Makes SkyRL importable on a CPU."""

from __future__ import annotations

import importlib
import logging
import sys
from typing import Any

from tests.peers.standins import use_peers

STANDINS = (
    "ray jaxtyping loguru transformers cloudpathlib pydantic wandb omegaconf skyrl_gym datasets "
    "torchdata aiohttp orjson pybase64 rich httpx huggingface_hub nvidia_resiliency_ext "
    "megatron.bridge"
)


def use_skyrl(package: str) -> None:
    """Let this process, which has Megatron-Core, import SkyRL from the folder ``package``."""
    from megatron.core.distributed import finalize_model_grads

    from megatron_loss_agg.mcore.cpu.attention import GatheredAttention

    use_peers(STANDINS)
    sys.path.insert(1, package)
    logging.disable()  # its handlers are stood in for
    ray: Any = importlib.import_module("ray")
    ray.put = lambda value: value
    bridge: Any = importlib.import_module("megatron.bridge.peft.utils")
    bridge.enable_expert_parallel_grad_sync_in_finalize = lambda chunks: None
    bridge.finalize_model_grads_with_expert_adapter_sync = finalize_model_grads
    attend = GatheredAttention.forward

    def without_mask(
        self: Any, query: Any, key: Any, value: Any, mask: Any, *args: Any, **options: Any
    ) -> Any:
        """As Transformer Engine, which ignores a mask of padding where attention is causal."""
        return attend(self, query, key, value, None, *args, **options)

    GatheredAttention.forward = without_mask
