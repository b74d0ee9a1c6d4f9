"""Rollouts that share prefixes, computed once as a tree, in every mode of aggregation.

    torchrun --nproc-per-node 2 examples/prefix_tree.py --cpu      # or without --cpu, on GPUs

The answers to a prompt share the prompt, and two of them also share a turn that is trained. The
model computes each shared token once. The rollouts are averaged: masks, ids and losses are by rows,
and a token's log-probability is taken from its node in the tree. The example proves that every gradient
equals that of the rows, without a tree, in one process.

The model, the data and the losses come from `custom_loop.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from custom_loop import (
    ANSWERS,
    LENGTH,
    PROMPTS,
    Batch,
    logits_of,
    my_microbatches,
    next_log_probs,
    prove,
    rollouts,
    start,
    token_losses,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from megatron_loss_agg import LossAggregation, token_weights, weighted_sum
from megatron_loss_agg.mcore import LossHook, TokenLoss

AGGREGATIONS = [
    LossAggregation(mode="token_mean"),
    LossAggregation(mode="sample_mean"),
    LossAggregation(mode="prompt_mean"),
    LossAggregation(mode="nested_mean", levels=("prompt", "sample")),
    LossAggregation(mode="constant", divisor=LENGTH),
]


class Tree(NamedTuple):
    """The distinct prefixes of some rows, each as a node that holds its last token."""

    tokens: Tensor  # [nodes]
    depth: Tensor  # [nodes], the position in its rows
    is_hidden: Tensor  # [nodes, nodes], true for nodes that are not on the path to a node
    node: Tensor  # [rows, seq], the node of each token; 0 for padding


def tree_of(rows: Tensor, lengths: list[int]) -> Tree:
    numbers: dict[tuple[int, ...], int] = {}  # of nodes, by prefix; a parent's is smaller
    node = torch.zeros_like(rows)
    for row, length in enumerate(lengths):
        for t in range(length):
            prefix = tuple(rows[row, : t + 1].tolist())
            node[row, t] = numbers.setdefault(prefix, len(numbers))
    is_seen = torch.zeros(len(numbers), len(numbers), dtype=torch.bool)
    for path, length in zip(node, lengths, strict=True):
        path = path[:length]
        is_seen[path.unsqueeze(1), path] |= torch.ones(length, length, dtype=torch.bool).tril()
    tokens = torch.tensor([prefix[-1] for prefix in numbers])
    depth = torch.tensor([len(prefix) - 1 for prefix in numbers])
    return Tree(tokens, depth, ~is_seen, node)


def rotary_positions(model: Any, depth: Tensor) -> RemovableHandle:
    """Megatron's rotary embedding counts tokens and ignores `position_ids`: give it the depths.

    Use it as a context, whose end removes the hook.
    """
    rotary = model.module.rotary_pos_emb
    return rotary.register_forward_hook(lambda module, args, embedding: embedding[depth])


def forward_step(data_iterator: Iterator[Batch], model: Any) -> tuple[Tensor, TokenLoss]:
    batch = next(data_iterator)
    tree = Tree(*(x.cuda() for x in tree_of(batch["tokens"], batch["lengths"].tolist())))
    batch = {key: value.cuda() for key, value in batch.items()}
    with rotary_positions(model, tree.depth):
        output = model(tree.tokens[None], tree.depth[None], tree.is_hidden[None, None])

    following = batch["tokens"].roll(-1, dims=1)

    def compute(logits: Tensor) -> Tensor:  # [1, nodes, vocab] -> [rows, seq]
        # One softmax for each node, not for each token of each row.
        log_probs = logits[0].log_softmax(-1)[tree.node, following]
        return token_losses(log_probs, batch)

    return output, TokenLoss(compute, batch["loss_mask"])


def rollouts_that_share(step: int) -> Batch:
    """From `custom_loop.py`; a prompt's answers share it, and two also share what follows."""
    whole = rollouts(step)
    tokens = whole["tokens"].view(PROMPTS, ANSWERS, LENGTH)
    tokens[:, 1:, :2] = tokens[:, :1, :2]
    tokens[:, 1, :8] = tokens[:, 0, :8]
    whole["loss_mask"][-1] = 0  # an answer may have no loss
    return whole


def true_gradient(aggregation: LossAggregation, model: Any, whole: Batch) -> list[Tensor]:
    """The gradient of the step without a tree: rows, in one process."""
    whole = {key: value.cuda() for key, value in whole.items()}
    losses = token_losses(next_log_probs(logits_of(model, whole), whole["tokens"]), whole)
    mask, prompts = whole["loss_mask"], whole["prompt_ids"]
    weights = token_weights(aggregation, mask, prompt_ids=prompts, dtype=torch.float64)
    return list(torch.autograd.grad(weighted_sum(weights, losses), list(model.parameters())))


def main() -> None:
    ddp, _ = start()
    for step, aggregation in enumerate(AGGREGATIONS):
        forward_backward = LossHook(aggregation).wrap(get_forward_backward_func())
        whole = rollouts_that_share(step)
        microbatches = my_microbatches(whole)
        ddp.zero_grad_buffer()
        forward_backward(
            forward_step_func=forward_step,
            data_iterator=iter(microbatches),
            model=[ddp],
            num_microbatches=len(microbatches),
            seq_length=LENGTH,
            micro_batch_size=1,
        )
        error = prove(step, ddp, true_gradient(aggregation, ddp.module, whole))
        if dist.get_rank() == 0:
            print(f"{aggregation.mode}: gradient error {error:.1e}")


if __name__ == "__main__":
    main()
