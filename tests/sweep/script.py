"""A script on the host's own `pretrain`, with the sweep's data; and what it should have done.

The forward step asks the host's functions for its part of a batch, as Megatron-LM's own script for
a GPT does, with and without packs. The sweep calls `rank_main` on its ranks. Started as a script,
every rank writes what its loss function got to a file of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core import mpu
from megatron.core.datasets import utils as datasets_utils
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks, mtp_on_this_rank
from megatron.core.utils import (
    flatten_batch_for_packed_sequences,
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training import arguments, get_args, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args
from megatron.training.initialize import initialize_megatron
from megatron.training.utils import is_first_or_last_pipeline_stage
from torch import Tensor

from megatron_loss_agg import AggregationError
from megatron_loss_agg.mcore.cpu import set_default_flags
from tests.host import gradients
from tests.oracle import Sample, step_weights
from tests.sweep import data

KEYS = (
    *("tokens", "labels", "loss_mask", "position_ids", "attention_mask"),
    *("cu_seqlens", "cu_seqlens_padded", "max_seqlen", "hybrid_cp_group", "local_cp_size"),
)


def is_gated(name: str, config: Any) -> bool:
    return config.gated_linear_unit and "linear_fc1." in name


def fill(model: Any) -> None:
    """Weights that do not depend on how the model is divided, the same in fp32, bf16 and fp16."""
    for name, parameter in gradients.parts(model):
        value = gradients.initial_value(name, parameter, is_gated(name, model.config))
        parameter.data.copy_(value.bfloat16())


def parameters_of(model: Any) -> dict[str, Tensor]:
    """Undivided."""
    return {
        name: gradients.whole_of(parameter, is_gated(name, model.config))
        for name, parameter in gradients.parts(model)
    }


class Ended(Exception):
    """The end of a rank without a result, as JSON: an error of ours or not, and its text."""


class Seen(NamedTuple):
    """A call of the loss function, on one rank."""

    trains: bool
    items: list[int]  # none on tensor-parallel ranks that read no data
    mask: Tensor
    losses: Tensor


@dataclass
class Result:
    """The results of one rank of a launch."""

    parameters: dict[str, Tensor] = field(default_factory=dict)  # of its models, as they are now
    data_rank: int = 0
    seen: list[Seen] = field(default_factory=list)
    microbatches: int = 0  # of the last step

    def last_step(self) -> list[list[int]]:
        """The items of its microbatches."""
        trained = [x.items for x in self.seen if x.trains and x.items]
        return trained[-self.microbatches :]


def loss_func(
    loss_mask: Tensor, output_tensor: Tensor, trains: bool, items: list[int], result: Result
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The stock loss: the sum over this rank's tokens, with the host's checks of a result."""
    from megatron.core.rerun_state_machine import get_rerun_state_machine

    args, machine = get_args(), get_rerun_state_machine()
    mask, losses = loss_mask.view(-1).float(), output_tensor.view(-1).float()
    result.seen.append(Seen(trains, items, mask, losses.detach()))
    if trains:
        result.microbatches = get_num_microbatches()
    loss = (losses * mask).sum()
    num_tokens = mask.sum().detach().to(torch.int)
    validate = partial(machine.validate_result, loss, tolerance=0.0)
    if args.check_for_nan_in_loss_and_grad:
        validate(rejection_func=torch.isnan, message="NaN in the loss", fatal=True)
        validate(rejection_func=torch.isinf, message="Inf in the loss", fatal=True)
    if args.check_for_spiky_loss:
        large = partial(machine.is_unexpectedly_large, threshold=10, context="loss")
        validate(rejection_func=large, message="spiky loss", fatal=False)
    return loss, num_tokens, {"lm loss": torch.stack([loss.detach(), num_tokens])}


def get_batch(iterator: Any, vp_stage: int | None) -> dict[str, Any]:
    """This rank's part of a microbatch, and under ``index`` the items of all of it."""
    args = get_args()
    config = core_transformer_config_from_args(args)
    packed = args.sft or args.dataloader_inter_document_masking
    mtp = mtp_on_this_rank(
        layout=config.pipeline_model_parallel_layout,
        mtp_num_layers=config.mtp_num_layers,
        ignore_virtual=False,
        vp_stage=vp_stage,
    )
    on_end = is_first_or_last_pipeline_stage(vp_stage) or mtp
    if not on_end and not packed:
        return dict.fromkeys(("index", *KEYS))
    whole: dict[str, Any] = {}
    batch: dict[str, Any] = {}
    tp_rank = mpu.get_tensor_model_parallel_rank()
    if tp_rank == 0:
        whole = next(iterator)
        batch = {key: whole.get(key) for key in KEYS}
    batch = get_batch_on_this_tp_rank(
        batch,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        has_cu_seqlens=packed,
        is_hybrid_cp=args.hybrid_context_parallel,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=mtp,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    batch = flatten_batch_for_packed_sequences(batch)
    if on_end:
        batch = get_batch_on_this_cp_rank(
            batch,
            is_hybrid_cp=args.hybrid_context_parallel,
            cp_group=mpu.get_context_parallel_group(),
            hybrid_cp_group_func=mpu.get_hybrid_data_context_parallel_groups,
            use_per_sequence_balancing=args.dataloader_inter_document_masking and not args.sft,
        )
    return {**batch, "index": whole.get("index")}


def packed_params(batch: dict[str, Any]) -> PackedSeqParams | None:
    if batch["cu_seqlens"] is None:
        return None
    real = batch["cu_seqlens"].squeeze(0)
    padded = batch["cu_seqlens_padded"]
    padded = real if padded is None else padded.squeeze(0)
    longest = int(batch["max_seqlen"].max())
    return PackedSeqParams("thd", padded, padded, padded, padded, longest, longest)


def losses_of(model: Any, batch: dict[str, Any], packed: PackedSeqParams | None = None) -> Any:
    return model(
        batch["tokens"],
        batch["position_ids"],
        batch.get("attention_mask"),
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
        packed_seq_params=packed,
    )


def forward_step(result: Result, iterator: Any, model: Any) -> tuple[Any, Any]:
    batch = get_batch(iterator, get_attr_wrapped_model(model, "vp_stage"))
    output = losses_of(model, batch, packed_params(batch))
    items = [] if batch["index"] is None else batch["index"].tolist()
    return output, partial(
        loss_func, batch["loss_mask"], trains=model.training, items=items, result=result
    )


def add_arguments(parser: Any) -> Any:
    group = parser.add_argument_group("sweep")
    group.add_argument("--sweep-data", default="rows", choices=data.KINDS)
    group.add_argument("--sweep-masks", default="uneven")
    group.add_argument("--blend", action="store_true", help="of several data sets")
    return parser


def parsed(argv: list[str]) -> Any:
    """Megatron's flags from ``argv``, checked by Megatron."""
    sys.argv = ["sweep", *argv]
    datasets_utils.compile_helpers = lambda: None  # the wheel ships them compiled
    return parse_and_validate_args(
        extra_args_provider=add_arguments,
        args_defaults={"tokenizer_type": "NullTokenizer", "vocab_size": data.VOCAB},
    )


def keep_models(found: list[GPTModel]) -> None:
    """Give every `GPTModel` that is built the sweep's weights, and list it in ``found``."""
    construct = GPTModel.__init__

    def construct_and_fill(self: GPTModel, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        fill(self)
        found.append(self)

    GPTModel.__init__ = construct_and_fill


def begin(argv: list[str]) -> None:
    """Be quiet, and set what Megatron wants of its launcher."""
    if any("fsdp" in flag for flag in argv):
        os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    else:
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def rank_main(argv: list[str], with_plugin: bool = True) -> Result:
    """Run `pretrain` with the flags ``argv`` on this rank of an initialised world."""
    from megatron_loss_agg.launch import flags
    from megatron_loss_agg.launch.install import hook_from_args, install

    begin(argv)
    models: list[GPTModel] = []
    result = Result()
    try:
        if with_plugin:
            install(lambda parser: flags.add_arguments(set_default_flags(parser)), hook_from_args)
        else:
            install(set_default_flags, lambda *_: None)
        keep_models(models)
        train(argv, result)
    except BaseException as error:
        if not isinstance(error, SystemExit) or error.code:
            ours = isinstance(error, AggregationError)
            raise Ended(json.dumps([ours, f"{type(error).__name__}: {error}"])) from error
    result.data_rank = mpu.get_data_parallel_rank()
    for model in models:
        result.parameters |= parameters_of(model)
    return result


def train(argv: list[str], result: Result) -> None:
    args = parsed(argv)
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))

    def provider(sizes: list[int | None], vp_stage: int | None = None) -> list[Any]:
        return data.datasets(args, sizes)

    provider.is_distributed = True  # type: ignore[attr-defined]
    pretrain(
        config,
        provider,
        ModelType.encoder_or_decoder,
        partial(forward_step, result),
        get_embedding_ranks=embedding_ranks,
    )


def embedding_ranks(pp_ranks: list[int]) -> list[int]:
    """Pipeline stages with word embeddings: the ends, if tied, and those that predict further."""
    args = get_args()
    last = [] if args.untie_embeddings_and_output_weights else [pp_ranks[-1]]
    config = core_transformer_config_from_args(args)
    return sorted({pp_ranks[0], *last, *get_mtp_ranks(pp_ranks, config)})


# What the step should have done: one process, the whole step, no plugin.

Items = list[list[list[int]]]  # of a step, by data-parallel rank and microbatch


def reference_main(
    argv: list[str], items: Items, mode: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Of every parameter: its value before the step, and in fp64 the gradient of the step's loss.

    Every sample of the step is run alone, so that packs and their attention play no part. ``mode``
    holds the arguments of `step_weights` apart from the step.
    """
    begin(argv)
    add = arguments.add_megatron_arguments
    arguments.add_megatron_arguments = lambda parser: set_default_flags(add(parser))
    keep_models([])
    args = parsed(argv)
    initialize_megatron()
    config = gpt_config_from_args(args)
    model = config.get_builder_cls()(config).build_model(
        ProcessGroupCollection.use_mpu_process_groups()
    )
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    # A sum over many samples loses more digits than one of them has.
    gradient = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in start.items()}
    train = data.datasets(args, [data.VALIDATION, 0, 0])[0]
    for sample, weights in _weighted(train, items, mode):
        model.zero_grad()
        losses = losses_of(model, {key: x[None] for key, x in sample.items()})
        (losses.view(-1) * torch.tensor(weights)).sum().backward()
        for name, p in model.named_parameters():
            if p.grad is not None:
                gradient[name] += p.grad
    return start, gradient


def _weighted(
    train: Any, items: Items, mode: dict[str, Any]
) -> list[tuple[dict[str, Tensor], list[float]]]:
    """The samples of the step that have tokens, with the weights of their tokens."""
    numbers = [item for rank in items for microbatch in rank for item in microbatch]
    samples = {item: data.samples_of(train[item]) for item in numbers}
    told = {
        item: [
            Sample(tuple(sample["loss_mask"].tolist()), *data.ids_of(item, place))
            for place, sample in enumerate(of_item)
        ]
        for item, of_item in samples.items()
    }
    step = [[[x for item in mb for x in told[item]] for mb in rank] for rank in items]
    nested = step_weights(step=step, **mode)
    flat = [weights for rank in nested for microbatch in rank for weights in microbatch]
    whole = [sample for item in numbers for sample in samples[item]]
    return [(s, w) for s, w in zip(whole, flat, strict=True) if any(w)]


def host_flags() -> list[str]:
    """All flags of Megatron's own parser, long forms."""
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    return sorted(flag for flag in parser._option_string_actions if flag.startswith("--"))


if __name__ == "__main__":
    launched = Result()
    train(sys.argv[1:], launched)
    torch.save([tuple(x) for x in launched.seen], f"{os.environ['SEEN']}.{os.environ['RANK']}")
