"""ms-swift's Megatron trainer on the CPU: its own code, but for what needs a GPU.

For the ranks alone, as importing it changes the process. Real are the defaults of its arguments,
its data collator, trainer, model class, wrapping, optimizer and callbacks. Stood in for are
Transformer Engine's layers, by Megatron's own, and packages that this path does not use.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import sys
from types import SimpleNamespace
from typing import Any

import torch

import tests.host.preload  # noqa: F401
from tests.peers.standins import use_peers

# Not stood in for: Megatron goes on without it.
sys.modules["modelopt"] = None  # type: ignore[assignment]
os.environ["LOG_LEVEL"] = "WARNING"  # it logs the whole configuration
use_peers(
    "accelerate aiohttp datasets huggingface_hub json_repair modelscope pandas peft pydantic "
    "requests safetensors transformer_engine transformers urllib3"
)
importlib.import_module("modelscope.hub.utils.utils").get_cache_dir = lambda *args: "/nonexistent"
importlib.import_module("transformers.modeling_rope_utils").ROPE_INIT_FUNCTIONS = {}
# mcore-bridge patches these classes, which are None without Transformer Engine.
_layers = importlib.import_module("megatron.core.extensions.transformer_engine")
for _name in dir(_layers):
    if _name.startswith("TE") and getattr(_layers, _name) is None:
        setattr(_layers, _name, type(_name, (), {}))

import mcore_bridge.model  # noqa: F401, E402
from mcore_bridge.model.register import ModelLoader, get_model_meta  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import (  # noqa: E402
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
)
from megatron.core.transformer.enums import AttnBackend  # noqa: E402
from swift.megatron.arguments import MegatronSftArguments  # noqa: E402
from swift.megatron.callbacks import megatron_callbacks_map  # noqa: E402
from swift.megatron.callbacks.base import MegatronCallback  # noqa: E402
from swift.megatron.trainers import MegatronTrainer  # noqa: E402
from swift.template import Template  # noqa: E402

from tests.frameworks.harness import fill  # noqa: E402

_attention = get_gpt_layer_local_spec().submodules.self_attention.submodules.core_attention


class CausalAttention(_attention):
    """Leaves the mask of padding away, as Transformer Engine does where attention is causal."""

    def forward(self, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
        return super().forward(query, key, value, None, **kwargs)


class LocalLayers(ModelLoader):
    """Builds mcore-bridge's model of layers without Transformer Engine."""

    def get_transformer_layer_spec(self, vp_stage: int | None = None) -> Any:
        spec = get_gpt_decoder_block_spec(
            self.config, False, normalization=self.config.normalization, vp_stage=vp_stage
        )
        self._deepcopy_layer_spec(spec)
        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = CausalAttention
        return spec


class Recorder(MegatronCallback):
    """Asks for a log of every step, and keeps it."""

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        self.logs: dict[str, float] = {}

    def on_step_end(self) -> None:
        self.state.should_log = True

    def on_log(self, logs: dict[str, float]) -> None:
        self.logs.update(logs)


megatron_callbacks_map["recorder"] = Recorder


class Trainer(MegatronTrainer):
    """With weights that do not depend on the parallelism instead of those of a checkpoint."""

    def _prepare_peft_model(self, models: list[Any]) -> list[Any]:
        for model in models:
            fill(model)
        return models


# As much of a checkpoint's configuration as mcore-bridge reads.
_LLAMA = SimpleNamespace(
    name_or_path=None,
    model_type="llama",
    num_hidden_layers=2,
    hidden_size=16,
    intermediate_size=32,
    num_attention_heads=2,
    num_key_value_heads=2,
    max_position_embeddings=256,
    rms_norm_eps=1e-5,
    rope_theta=10000,
    vocab_size=32,
    tie_word_embeddings=False,
    hidden_act="silu",
)
_FP32 = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
_ZERO = ("lr", "weight_decay", "start_weight_decay", "end_weight_decay", "clip_grad")
_OFF = (
    *("use_distributed_optimizer", "overlap_p2p_comm", "is_multimodal", "check_model"),
    *("fp16", "bf16", "masked_softmax_fusion", "bias_dropout_fusion", "bias_activation_fusion"),
    *("gradient_accumulation_fusion", "cross_entropy_loss_fusion"),
)
SETTINGS = {
    **dict.fromkeys(_FP32, torch.float32),
    **dict.fromkeys(_ZERO, 0.0),
    **dict.fromkeys(_OFF, False),
    "task_type": "causal_lm",
    "calculate_per_token_loss": True,
    "callbacks": ["recorder"],
    "eval_iters": 1,
    "train_iters": 9,
    "num_microbatches": 1,
    "seq_length": 8,
    "attention_backend": AttnBackend.flash,
    "use_cpu_initialization": True,
    "recompute_granularity": None,
    "megatron_extra_kwargs": {"persist_layer_norm": False},
}
"""What a CPU, this model and a step that changes nothing need."""


def arguments(cp: int, padding_free: bool, dtype: torch.dtype, **changes: Any) -> Any:
    """ms-swift's defaults, `SETTINGS`, and ``changes``."""
    args = object.__new__(MegatronSftArguments)  # its initialization wants a checkpoint
    for field in dataclasses.fields(MegatronSftArguments):
        if field.default_factory is not dataclasses.MISSING:
            setattr(args, field.name, field.default_factory())
        elif field.default is not dataclasses.MISSING:
            setattr(args, field.name, field.default)
    meta = get_model_meta("gpt")
    meta.loader = LocalLayers
    of_call = {
        "context_parallel_size": cp,
        "padding_free": padding_free,
        "torch_dtype": dtype,
        "megatron_model_meta": meta,
    }
    for name, value in {**SETTINGS, **of_call, **changes}.items():
        setattr(args, name, value)
    return args


def template_for(args: Any) -> Template:
    """ms-swift's template, as far as it collates encoded samples."""
    template = object.__new__(Template)  # its initialization wants a tokenizer
    vars(template).update(
        task_type=args.task_type,
        mode="train",
        packing=args.packing,
        padding_free=args.padding_free,
        padding_side="right",
        use_megatron=True,
        sequence_parallel_size=args.context_parallel_size,
        remove_unused_columns=True,
        processor=SimpleNamespace(pad_token_id=0),
        config=_LLAMA,
    )
    return template
