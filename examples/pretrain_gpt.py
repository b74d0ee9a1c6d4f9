"""Pretrain a GPT on the standard library's documented functions, in packs or rows.

An ordinary script on `megatron.training` that knows nothing about loss aggregation. Started by

    torchrun ... -m megatron_loss_agg [--cpu] examples/pretrain_gpt.py ... --loss-aggregation MODE

its loss is aggregated by MODE; started by torchrun alone, it trains like stock Megatron.
`examples/quickstart.sh` holds a full set of flags.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.datasets import utils as datasets_utils
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.training import get_args, get_timers, pretrain, print_rank_0
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from stdlib_pairs import VOCAB_SIZE, PackedPairs
from torch import Tensor

from megatron_loss_agg import CPLayout

# Entries of a batch with a value for each token, [B, T]; the others describe its samples.
TOKEN_KEYS = ("tokens", "labels", "loss_mask", "position_ids")


def get_batch(
    data_iterator: Iterator[dict[str, Tensor]],
) -> tuple[dict[str, Tensor], PackedSeqParams | None]:
    """Next microbatch: this context-parallel rank's share of its tokens, and the offsets of a pack."""
    batch = next(data_iterator)
    cp_size, cp_rank = mpu.get_context_parallel_world_size(), mpu.get_context_parallel_rank()
    packed = None
    if "cu_seqlens_padded" in batch:
        offsets = batch["cu_seqlens_padded"].squeeze(0)
        layout = CPLayout.thd(offsets, cp_size, cp_rank)
        longest = int(batch["max_seqlen"])
        offsets = offsets.cuda(non_blocking=True)
        # Attention runs over padded samples: padding follows a sample's tokens, so causality hides it.
        packed = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=offsets,
            cu_seqlens_kv=offsets,
            cu_seqlens_q_padded=offsets,
            cu_seqlens_kv_padded=offsets,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )
    else:
        layout = CPLayout.bshd(batch["tokens"].shape[1], cp_size, cp_rank)
    local = {key: layout.shard(batch[key]).cuda(non_blocking=True) for key in TOKEN_KEYS}
    return local, packed


def loss_func(loss_mask: Tensor, output_tensor: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Megatron's loss: sum over this rank's tokens, their number, and both as a report."""
    mask = loss_mask.view(-1).float()
    loss = (output_tensor.view(-1).float() * mask).sum()
    num_tokens = mask.sum().to(torch.int)
    report = {"lm loss": torch.stack([loss.detach(), num_tokens])}
    return loss, num_tokens, report


def forward_step(
    data_iterator: Iterator[dict[str, Tensor]], model: GPTModel
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]]]:
    """Per-token losses of one microbatch, and the function that sums them."""
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    batch, packed = get_batch(data_iterator)
    timers("batch-generator").stop()
    losses = model(
        batch["tokens"],
        batch["position_ids"],
        attention_mask=None,
        labels=batch["labels"],
        packed_seq_params=packed,
    )
    return losses, partial(loss_func, batch["loss_mask"])


def datasets_provider(num_samples: list[int]) -> tuple[PackedPairs, PackedPairs | None, None]:
    """Training and validation packs: the same on every rank; Megatron's sampler divides them."""
    training, validation, _ = num_samples
    args = get_args()
    shards = 2 * args.context_parallel_size
    if args.sequence_parallel:
        shards *= args.tensor_model_parallel_size
    build = partial(
        PackedPairs,
        seq_length=args.seq_length,
        pad_to=args.pad_samples_to or shards,
        seed=args.seed,
        per_module=args.samples_per_module,
        longest=args.longest_sample,
    )
    print_rank_0(f"> standard library: {training} training and {validation} validation packs")
    # None for --eval-iters 0, since Megatron does not accept an empty data set.
    valid = build("valid", packs=validation) if validation else None
    return build("train", packs=training), valid, None


# All ranks of a tensor-parallel group read the data themselves.
datasets_provider.is_distributed = True  # type: ignore[attr-defined]


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """This script's own flags, in addition to Megatron's."""
    group = parser.add_argument_group(title="standard library")
    group.add_argument(
        "--samples-per-module",
        type=int,
        default=8,
        help="Functions of one module, at most, that follow one another as one prompt group.",
    )
    group.add_argument("--longest-sample", type=int, help="Tokens; longer functions are left out.")
    group.add_argument(
        "--pad-samples-to",
        type=int,
        help="Each sample takes a multiple of this number of tokens. That of --seq-length makes rows "
        "of one sample each. Default: what context parallelism needs.",
    )
    return parser


def keep_packaged_helpers() -> None:
    """Keep an installed megatron-core from calling `make` at startup, since that would end the run.

    The wheel contains the compiled data set helpers without their Makefile; a source checkout
    compiles them.
    """
    if not Path(datasets_utils.__file__).with_name("Makefile").exists():
        datasets_utils.compile_helpers = lambda: None


def main(**functions: Any) -> None:
    """Parse the flags, and run Megatron's training loop with ``functions`` as further arguments."""
    keep_packaged_helpers()
    args = parse_and_validate_args(
        extra_args_provider=add_arguments,
        args_defaults={"tokenizer_type": "NullTokenizer", "vocab_size": VOCAB_SIZE},
    )
    if args.micro_batch_size != 1 and args.pad_samples_to != args.seq_length:
        raise SystemExit(
            f"--micro-batch-size {args.micro_batch_size}: a microbatch is one pack of many "
            "samples; set --micro-batch-size 1 and choose the pack's size by --seq-length, or make "
            "rows by a --pad-samples-to of that size"
        )
    if getattr(args, "full_validation", False):
        raise SystemExit("--full-validation: the packs are drawn without end; drop that flag")
    if args.pipeline_model_parallel_size > 1:
        args.variable_seq_lengths = True  # packs differ in length, and stages exchange them
        args.moe_token_dispatcher_type = "alltoall"  # the default refuses, even without experts
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, datasets_provider, ModelType.encoder_or_decoder, forward_step, **functions)


if __name__ == "__main__":
    main()
