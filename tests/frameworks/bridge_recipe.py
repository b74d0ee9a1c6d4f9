"""Megatron-Bridge's recipe ``vanilla_gpt_pretrain_config``, for a tiny GPT on a CPU.

It is trained for two steps, at a learning rate of 0 so that they have one gradient, and evaluated.
A step is of ragged samples, as rows or as packs. Bridge's training loop, loss, data code, GPT and
configuration are real. Stood in for are packages that are heavy and unused here, and parts of
Bridge that need them: its bridges to Hugging Face models, adapters, and other loaders of data.
Importing this module lets a process import the rest.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib
import importlib.util
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from megatron_loss_agg.mcore.cpu import enable
from tests.frameworks.harness import fill
from tests.host import steps
from tests.host.steps import EMPTY, VOCAB
from tests.peers.standins import Anything, use_peers

STANDINS = (
    "transformers diffusers datasets huggingface_hub safetensors rich modelopt "
    "nvidia_resiliency_ext megatron.energon megatron.bridge.diffusion megatron.bridge.peft "
    "megatron.bridge.models.conversion megatron.bridge.models.megatron_mimo"
)


def use_bridge() -> None:
    enable()
    from megatron.core.datasets import utils

    utils.compile_helpers = lambda: None  # the wheel ships them compiled
    use_peers(STANDINS)
    # Their ``__init__`` import every model; here they import a model when it is asked for.
    for name in ("megatron.bridge", "megatron.bridge.models", "megatron.bridge.recipes"):
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


use_bridge()

from megatron.bridge.data.base import DatasetBuildContext, DatasetProvider  # noqa: E402
from megatron.bridge.data.builders import GPTSFTDatasetConfig  # noqa: E402
from megatron.bridge.data.packing import PackedSequenceSpecs  # noqa: E402
from megatron.bridge.models.gpt_provider import local_layer_spec  # noqa: E402
from megatron.bridge.recipes.gpt import vanilla_gpt_pretrain_config  # noqa: E402
from megatron.bridge.training.callbacks import Callback, CallbackContext  # noqa: E402
from megatron.bridge.training.config import ConfigContainer  # noqa: E402
from megatron.bridge.training.gpt_step import forward_step  # noqa: E402
from megatron.bridge.training.pretrain import pretrain  # noqa: E402
from megatron.bridge.training.utils.omegaconf_utils import (  # noqa: E402
    process_config_with_overrides,
)

from tests.host import gradients  # noqa: E402

gc.freeze()  # Bridge collects garbage in every run, which would look at all that is imported
EOS = VOCAB - 1  # Bridge pads packs with it, and never trains on it
LENGTHS = (23, 3, 9, 1, 17, 6, 12, 2, 20, 5, 4, 8)
ROW = 32  # length of every row
PACKS = ((0, 1), (EMPTY,), (2, 3, 10, 11), (4, 6, 7, 8, 9))
PACK = 64  # length of every pack
FUSIONS = ("masked_softmax", "bias_dropout", "bias_activation", "gradient_accumulation")
TINY = (
    # The model of `tests.host.gpt.build`, in fp32.
    *(f"model.{fusion}_fusion=false" for fusion in (*FUSIONS, "cross_entropy_loss")),
    *("model.num_layers=2", "model.hidden_size=16", "model.num_attention_heads=2"),
    *(f"model.vocab_size={VOCAB}", f"tokenizer.vocab_size={VOCAB}"),
    *("model.position_embedding_type=rope", "model.apply_rope_fusion=false"),
    "model.share_embeddings_and_output_weights=false",
    *("model.attention_dropout=0.0", "model.hidden_dropout=0.0"),
    *("mixed_precision=null", "optimizer.bf16=false", "model.use_cpu_initialization=true"),
    # Two steps with one gradient, and an evaluation.
    *("train.train_iters=2", "validation.eval_interval=2", "validation.eval_iters=1"),
    *("optimizer.lr=0.0", "optimizer.min_lr=0.0", "optimizer.clip_grad=0.0"),
    *("scheduler.lr_warmup_iters=0", "logger.log_interval=1"),
    # No GPU, and no files.
    *("dist.distributed_backend=gloo", "checkpoint.save=null", "logger.tensorboard_dir=null"),
)
SHAPES = {
    "rows": (
        *(f"model.seq_length={ROW}", f"train.global_batch_size={len(LENGTHS)}"),
        "train.micro_batch_size=2",
    ),
    "packs": (
        *(f"model.seq_length={PACK}", f"train.global_batch_size={len(PACKS)}"),
        "train.micro_batch_size=1",
        # Communication overlaps as in Bridge's recipes.
        *("ddp.use_distributed_optimizer=true", "optimizer.use_distributed_optimizer=true"),
        *("ddp.overlap_param_gather=true", "optimizer.overlap_param_gather=true"),
        *("ddp.overlap_grad_reduce=true", "ddp.bucket_size=2000"),
    ),
}
LOADER: dict[str, Any] = {"num_workers": 0, "persistent_workers": False, "pin_memory": False}
sequences = functools.partial(steps.sequences, lengths=LENGTHS, vocab=EOS, seed=3)
"""The samples of the step."""


def main(arguments: list[str]) -> dict[str, Any]:
    """Train, and return the results of this rank."""
    parser = argparse.ArgumentParser(epilog="Other arguments are overrides, as run_recipe.py's.")
    parser.add_argument("layout", choices=["rows", "packs"])
    parser.add_argument("--multiple", type=int, default=1, help="of a sample's length in a pack")
    parser.add_argument("--results", type=Path, help="a folder in which to save what ranks see")
    parser.add_argument("--script", type=Path, help="Bridge's run_recipe.py, which then runs it")
    args, overrides = parser.parse_known_args(arguments)
    watch = Watch()
    with TemporaryDirectory() as folder:
        recipe = vanilla_gpt_pretrain_config()
        recipe.model.transformer_layer_spec = local_layer_spec
        recipe.model.register_pre_wrap_hook(_with_weights)
        if args.layout == "rows":
            recipe.dataset = _Rows(dataloader_type="single", **LOADER)
        else:
            recipe.dataset = packs(Path(folder), args.multiple)
        overrides = [*TINY, *SHAPES[args.layout], *overrides]
        if args.script:
            _run_recipe(args.script, recipe, overrides, watch)
        else:
            config = process_config_with_overrides(recipe, cli_overrides=overrides)
            pretrain(config, forward_step, callbacks=[watch])
    if args.results:
        torch.save(watch.seen, args.results / f"{os.environ['RANK']}.pt")
    return watch.seen


def _run_recipe(script: Path, recipe: ConfigContainer, overrides: list[str], watch: Watch) -> None:
    """Run Bridge's script; it finds recipes and training loops by name."""
    sys.path.insert(0, str(script.parent))
    recipes: Any = sys.modules["megatron.bridge.recipes"]
    recipes.vanilla_gpt_pretrain_config = lambda: recipe
    train = functools.partial(pretrain, callbacks=[watch])
    importlib.import_module("recipe_runner").TRAIN_FUNCTIONS["pretrain"] = train
    importlib.import_module("run_recipe").main(
        ["--recipe", "vanilla_gpt_pretrain_config", "--mode", "pretrain", *overrides]
    )


class Watch(Callback):
    """Keeps a rank's gradients and reports of each step, and of the evaluation."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {"gradients": [], "reports": []}

    def on_train_step_end(self, context: CallbackContext) -> None:
        self.seen["gradients"].append(gradients.of(context.model))
        self.seen["reports"].append({k: float(x) for k, x in context.loss_dict.items()})

    def on_eval_end(self, context: CallbackContext) -> None:
        self.seen["evaluation"] = {k: float(x) for k, x in context.total_loss_dict.items()}


class _Rows(DatasetProvider):
    def build_datasets(self, context: DatasetBuildContext) -> tuple[Any, Any, None]:
        step = [_row(sequence) for sequence in sequences()]
        return 100 * step, 100 * step, None


def _row(sequence: steps.Sequence) -> dict[str, torch.Tensor]:
    """As Megatron's pretraining data sets give it."""
    mask = torch.tensor(sequence.sample.mask, dtype=torch.float32)
    columns = {"tokens": sequence.tokens, "labels": sequence.labels, "loss_mask": mask}
    fill = (0, ROW - len(mask))
    row = {name: torch.nn.functional.pad(x, fill) for name, x in columns.items()}
    return {**row, "position_ids": torch.arange(ROW)}


def packs(folder: Path, multiple: int) -> GPTSFTDatasetConfig:
    """For supervised fine-tuning, prepared before."""
    file = folder / "packs.npy"
    file.with_suffix(".json").write_text("[]")  # of packs for CUDA graphs
    np.save(file, np.array([_pack(x, multiple) for x in PACKS], dtype=object), allow_pickle=True)
    specs = PackedSequenceSpecs(
        packed_sequence_size=PACK,
        packed_train_data_path=file,
        packed_val_data_path=file,
        packed_metadata_path=file.with_suffix(".json"),
        pad_seq_to_mult=multiple,
    )
    return GPTSFTDatasetConfig(
        dataset_root=folder,
        seq_length=PACK,
        enable_offline_packing=True,
        offline_packing_specs=specs,
        do_test=False,
        **LOADER,
    )


def _pack(chosen: tuple[int, ...], multiple: int) -> dict[str, list[int]]:
    """As Bridge prepares it: text one longer than its tokens, padded with EOS to a multiple."""
    pack: dict[str, list[int]] = {"input_ids": [], "loss_mask": [], "seq_start_id": []}
    for sequence in (sequences()[i] for i in chosen):
        fill = -len(sequence.tokens) % multiple
        pack["seq_start_id"].append(len(pack["input_ids"]))
        pack["input_ids"] += [*sequence.tokens.tolist(), int(sequence.labels[-1])] + [EOS] * fill
        pack["loss_mask"] += [*map(int, sequence.sample.mask), 0] + [0] * fill
    return pack


def _with_weights(chunks: list[Any]) -> list[Any]:
    for chunk in chunks:
        fill(chunk)
    return chunks


if __name__ == "__main__":
    main(sys.argv[1:])
