"""Makes SkyRL importable on a CPU; ``SKYRL`` in the environment is the folder of the package."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from importlib.machinery import ModuleSpec
from typing import Any

from tests.host import preload  # noqa: F401 - the CPU stands in for the GPU
from tests.peers import standins

# isort: split
from megatron.core.distributed import finalize_model_grads

from megatron_loss_agg.mcore.cpu.attention import GatheredAttention


class _Bridge(standins._Finder):
    """Stands in for a part of Megatron's namespace, which is otherwise real."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        ours = name.startswith("megatron.bridge")
        return ModuleSpec(name, self, is_package=True) if ours else None


sys.meta_path.insert(0, _Bridge([]))
standins.use_peers(
    "ray jaxtyping loguru transformers cloudpathlib pydantic omegaconf skyrl_gym datasets "
    "torchdata aiohttp orjson pybase64 rich httpx huggingface_hub nvidia_resiliency_ext"
)
sys.path.insert(1, os.environ["SKYRL"])
logging.disable()  # its handlers are stood in for
_ray: Any = importlib.import_module("ray")
_ray.put = lambda value: value
_bridge: Any = importlib.import_module("megatron.bridge.peft.utils")
_bridge.enable_expert_parallel_grad_sync_in_finalize = lambda chunks: None
_bridge.finalize_model_grads_with_expert_adapter_sync = finalize_model_grads

_attend = GatheredAttention.forward


def _without_mask(
    self: Any, query: Any, key: Any, value: Any, mask: Any, *args: Any, **options: Any
) -> Any:
    """As Transformer Engine, which ignores a mask of padding where attention is causal."""
    return _attend(self, query, key, value, None, *args, **options)


GatheredAttention.forward = _without_mask
