"""A recipe for Megatron-Bridge: a tiny GPT, trained for two steps and evaluated.

It takes overrides as Bridge's own scripts do: whatever its parser does not know, such as
``model.context_parallel_size=2``. The learning rate is 0, so that every step has one gradient.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from tests.frameworks.bridge import data
from tests.frameworks.bridge.standins import use_bridge
from tests.host import gradients

if __name__ == "__main__":  # not on a rank that finds Bridge imported
    use_bridge()

from megatron.bridge.data.base import DatasetBuildContext, DatasetProvider
from megatron.bridge.data.builders import GPTSFTDatasetConfig
from megatron.bridge.data.packing import PackedSequenceSpecs
from megatron.bridge.models.gpt_provider import GPTModelProvider, local_layer_spec
from megatron.bridge.training import config as bridge
from megatron.bridge.training.callbacks import Callback, CallbackContext
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from megatron.bridge.training.tokenizers.config import TokenizerConfig
from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides

LOADER = {"num_workers": 0, "persistent_workers": False, "pin_memory": False}


def main(arguments: list[str]) -> dict[str, Any]:
    """Train, and return what this rank has seen."""
    parser = argparse.ArgumentParser()
    parser.add_argument("layout", choices=["rows", "packs"])
    parser.add_argument("--multiple", type=int, default=1, help="of a sample's length in a pack")
    parser.add_argument("--results", type=Path, help="a folder in which to save what ranks see")
    args, overrides = parser.parse_known_args(arguments)
    rank, watch = os.environ["RANK"], Watch()
    with TemporaryDirectory() as folder:
        recipe = rows() if args.layout == "rows" else packs(Path(folder), args.multiple)
        config = process_config_with_overrides(recipe, cli_overrides=overrides)
        pretrain(config, forward_step, callbacks=[watch])
    if args.results:
        torch.save(watch.seen, args.results / f"{rank}.pt")
    return watch.seen


def rows() -> bridge.ConfigContainer:
    """Pretraining on padded rows."""
    dataset = _Rows(dataloader_type="single", **LOADER)
    return _recipe(dataset, data.ROW, data.MICRO_BATCH, len(data.LENGTHS))


def packs(folder: Path, multiple: int) -> bridge.ConfigContainer:
    """Supervised fine-tuning on packs that were prepared before."""
    file = folder / "packs.npy"
    data.write_packs(file, multiple)
    specs = PackedSequenceSpecs(
        packed_sequence_size=data.PACK,
        packed_train_data_path=file,
        packed_val_data_path=file,
        packed_metadata_path=file.with_suffix(".json"),
        pad_seq_to_mult=multiple,
    )
    dataset = GPTSFTDatasetConfig(
        dataset_root=folder,
        seq_length=data.PACK,
        enable_offline_packing=True,
        offline_packing_specs=specs,
        do_test=False,
        **LOADER,
    )
    return _recipe(dataset, data.PACK, 1, len(data.PACKS))


class _Rows(DatasetProvider):
    def build_datasets(self, context: DatasetBuildContext) -> tuple[Any, Any, None]:
        return data.Rows(), data.Rows(), None


class Watch(Callback):
    """Keeps what a rank sees: gradients and reports of each step, and of the evaluation."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {"gradients": [], "reports": []}

    def on_train_step_end(self, context: CallbackContext) -> None:
        self.seen["gradients"].append(gradients.of(context.model))
        self.seen["reports"].append({k: float(x) for k, x in context.loss_dict.items()})

    def on_eval_end(self, context: CallbackContext) -> None:
        self.seen["evaluation"] = {k: float(x) for k, x in context.total_loss_dict.items()}


def _recipe(
    dataset: Any, length: int, micro_batch: int, global_batch: int
) -> bridge.ConfigContainer:
    return bridge.ConfigContainer(
        model=_model(length),
        train=bridge.TrainingConfig(
            micro_batch_size=micro_batch, global_batch_size=global_batch, train_iters=2
        ),
        validation=bridge.ValidationConfig(eval_interval=2, eval_iters=1),
        optimizer=bridge.OptimizerConfig(lr=0.0, min_lr=0.0, weight_decay=0.0, clip_grad=0.0),
        scheduler=bridge.SchedulerConfig(start_weight_decay=0.0, end_weight_decay=0.0),
        ddp=bridge.DistributedDataParallelConfig(),
        dataset=dataset,
        logger=bridge.LoggerConfig(log_interval=1),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=data.VOCAB),
        checkpoint=bridge.CheckpointConfig(),
        dist=bridge.DistributedInitConfig(distributed_backend="gloo"),
    )


def _model(length: int) -> GPTModelProvider:
    """The model of `tests.host.gpt.build`, in fp32, with the same weights."""
    model = GPTModelProvider(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=2,
        vocab_size=data.VOCAB,
        seq_length=length,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        transformer_layer_spec=local_layer_spec,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
        cross_entropy_loss_fusion=False,
        apply_rope_fusion=False,
    )
    model.register_pre_wrap_hook(_with_weights)
    return model


def _with_weights(chunks: list[Any]) -> list[Any]:
    for chunk in chunks:
        for name, parameter in gradients.parts(chunk):
            parameter.data = gradients.initial_value(name, parameter).to(parameter.dtype)
    return chunks


if __name__ == "__main__":
    main(sys.argv[1:])
