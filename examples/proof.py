"""Proof by measurement: the gradient of one optimizer step, compared with that from one process.

    torchrun --nproc-per-node 4 examples/proof.py

A GPTModel in fp64 goes through Megatron's schedule, DDP and finalize_model_grads at CP 2 x DP 2,
in several microbatches, once with the plugin and once with stock Megatron's averaging. The
reference is `reference.py`. Exit status 1 unless the plugin's gradient is the reference's to 1e-14.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from megatron_loss_agg.mcore import cpu

cpu.enable()  # all in fp64, so on the CPU, even if there is a GPU

import reference  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from stdlib_pairs import VOCAB_SIZE, PackedPairs  # noqa: E402
from torch import Tensor  # noqa: E402

from megatron_loss_agg import CPLayout, LossAggregation  # noqa: E402
from megatron_loss_agg.mcore import LossHook  # noqa: E402

BOUND = 1e-14
CP_SIZE = 2
MICROBATCHES = 2
# The data, step and model are the same as in quickstart.sh.
SEQ_LENGTH = 1280
SHAPE: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 128,
    "ffn_hidden_size": 352,
    "num_attention_heads": 4,
    "gated_linear_unit": True,
    "activation_func": F.silu,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "use_cpu_initialization": True,
    "params_dtype": torch.float64,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "masked_softmax_fusion": False,
    "bias_dropout_fusion": False,
    "gradient_accumulation_fusion": False,
}
MODES = {"prompt_mean": reference.prompt_mean, "token_mean": reference.token_mean}

Gradients = dict[str, Tensor]


def loss_func(loss_mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Megatron's loss function, in fp64."""
    loss = (losses.view(-1) * loss_mask.view(-1)).sum()
    num_tokens = loss_mask.sum().to(torch.int)
    return loss, num_tokens, {"lm loss": torch.stack([loss.detach(), num_tokens])}


def forward_step(
    data_iterator: Iterator[dict[str, Tensor]], model: DistributedDataParallel
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]]]:
    """As in `pretrain_gpt.py`, but with the cross entropy in fp64; Megatron computes it in fp32."""
    batch = next(data_iterator)
    offsets, longest = batch["cu_seqlens_padded"], int(batch["max_seqlen"])
    layout = CPLayout.thd(offsets, CP_SIZE, parallel_state.get_context_parallel_rank())
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=offsets,
        cu_seqlens_kv=offsets,
        cu_seqlens_q_padded=offsets,
        cu_seqlens_kv_padded=offsets,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    tokens, positions, labels, mask = (
        layout.shard(batch[key]).unsqueeze(0)
        for key in ("tokens", "position_ids", "labels", "loss_mask")
    )
    logits = model(tokens, positions, attention_mask=None, packed_seq_params=packed)
    losses = F.cross_entropy(logits.squeeze(0), labels.squeeze(0), reduction="none").unsqueeze(0)
    return losses, partial(loss_func, mask.double())


def megatron_gradients(
    data: PackedPairs, weights: Gradients, mode: str | None, per_token_flag: bool
) -> Gradients:
    """Gradients that Megatron passes to its optimizer; without `mode`, stock Megatron's."""
    config = TransformerConfig(
        **SHAPE,
        context_parallel_size=CP_SIZE,
        calculate_per_token_loss=per_token_flag,
        finalize_model_grads_func=finalize_model_grads,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization=config.normalization),
        VOCAB_SIZE,
        SEQ_LENGTH,
        position_embedding_type="rope",
        parallel_output=False,
    )
    model.load_state_dict(weights, strict=False)
    chunk = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    chunk.zero_grad_buffer()
    forward_backward = get_forward_backward_func()
    if mode is not None:
        hook = LossHook(LossAggregation(mode=mode))
        forward_backward = hook.wrap(forward_backward)
    forward_backward(
        forward_step_func=forward_step,
        data_iterator=_packs_of_this_rank(data),
        model=[chunk],
        num_microbatches=MICROBATCHES,
        seq_length=SEQ_LENGTH,
        micro_batch_size=1,
    )
    return {name: parameter.main_grad for name, parameter in model.named_parameters()}


def _packs_of_this_rank(data: PackedPairs) -> Iterator[dict[str, Tensor]]:
    rank = parallel_state.get_data_parallel_rank()
    return (data[index] for index in range(rank, len(data), dist.get_world_size() // CP_SIZE))


def difference(computed: Gradients, expected: Gradients) -> tuple[float, float]:
    """|computed - expected| / |expected| over all parameters together, and the worst single one."""
    off = torch.stack([(computed[name] - value).norm() for name, value in expected.items()])
    size = torch.stack([value.norm() for value in expected.values()])
    return float(off.norm() / size.norm()), float((off / size).max())


def row(title: str, computed: dict[str, Gradients], expected: dict[str, Gradients]) -> str:
    """One line of the table: two figures for each mode."""
    cells = []
    for mode, gradients in expected.items():
        together, worst = difference(computed[mode], gradients)
        cells.append(f"{together:9.1e} {worst:9.1e}")
    return f"  {title:46}" + "   ".join(cells)


def main() -> int:
    """Compute the step in every way and print the table; return the exit status."""
    logging.getLogger("megatron").setLevel(logging.ERROR)
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(context_parallel_size=CP_SIZE)
    model_parallel_cuda_manual_seed(1234)
    torch.set_default_dtype(torch.float64)
    dp_size = parallel_state.get_data_parallel_world_size()
    data = PackedPairs(
        "train", packs=MICROBATCHES * dp_size, seq_length=SEQ_LENGTH, pad_to=2 * CP_SIZE
    )
    alone = reference.build(VOCAB_SIZE, SEQ_LENGTH, **SHAPE)
    weights = alone.state_dict()

    plugin = {
        flag: {mode: megatron_gradients(data, weights, mode, flag) for mode in MODES}
        for flag in (False, True)
    }
    stock = {
        flag: dict.fromkeys(MODES, megatron_gradients(data, weights, None, flag))
        for flag in (False, True)
    }
    if dist.get_rank() != 0:
        return 0
    pairs = [pair for index in range(len(data)) for pair in data.pairs(index)]
    expected = {mode: reference.gradients(alone, pairs, average) for mode, average in MODES.items()}
    print(
        f"\nOne optimizer step in fp64: {len(pairs)} samples of {len({p.module for p in pairs})} "
        f"prompts, {sum(len(p.response) + 1 for p in pairs)} tokens with loss.\n"
        f"Megatron: CP {CP_SIZE} x DP {dp_size}, {MICROBATCHES} microbatches a rank. "
        "Reference: the whole step in one process.\n\n"
        "Relative gradient difference |g - reference| / |reference|:\n"
        f"  {'':46}" + "   ".join(f"{mode:^19}" for mode in MODES) + "\n"
        f"  {'':46}" + "   ".join(f"{'all':>9} {'worst':>9}" for _ in MODES)
    )
    per_token = ", --calculate-per-token-loss"
    for flag in (False, True):
        print(row("megatron_loss_agg" + per_token * flag, plugin[flag], expected))
    for flag in (False, True):
        print(row("stock Megatron" + per_token * flag, stock[flag], expected))
    errors = [
        difference(plugin[flag][mode], expected[mode])[1] for flag in plugin for mode in MODES
    ]
    worst = float(torch.tensor(errors).max())  # NaN if one is; Python's max may miss it
    verdict = "EXACT" if worst <= BOUND else "NOT EXACT"
    print("\nall: all parameters as one vector; worst: the worst single parameter.")
    print(f"{verdict}: megatron_loss_agg differs by {worst:.1e} at worst; the bound is {BOUND}")
    return int(verdict != "EXACT")


if __name__ == "__main__":
    sys.exit(main())
