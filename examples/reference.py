"""The true gradient of an optimizer step: one process, fp64, plain loops over the samples.

Nothing here comes from `megatron_loss_agg`, from the packing, or from any parallelism: every
sample goes through the model alone and unpadded, and attention and each average are written out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import sqrt
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from stdlib_pairs import Pair
from torch import Tensor

Step = Sequence[tuple[str, Tensor]]
"""For each sample of a step, the module it comes from and the losses of its response tokens."""


def token_mean(step: Step) -> Tensor:
    """Mean over all tokens of the step."""
    return torch.cat([losses for _, losses in step]).mean()


def prompt_mean(step: Step) -> Tensor:
    """Mean over the prompts of each prompt's mean over all its tokens."""
    means = []
    for module in sorted({module for module, _ in step}):
        means.append(torch.cat([losses for name, losses in step if name == module]).mean())
    return torch.stack(means).mean()


def gradients(
    model: GPTModel, pairs: Sequence[Pair], average: Callable[[Step], Tensor]
) -> dict[str, Tensor]:
    """Gradient of every parameter for the whole step at once."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    step = [(pair.module, _response_losses(model, pair)) for pair in pairs]
    return dict(zip(names, torch.autograd.grad(average(step), parameters), strict=True))


def _response_losses(model: GPTModel, pair: Pair) -> Tensor:
    """Losses of the response's bytes and of the end token."""
    text = torch.tensor(pair.tokens)
    positions = torch.arange(pair.length).unsqueeze(0)
    logits = model(text[:-1].unsqueeze(0), positions, attention_mask=None).squeeze(0)
    return F.cross_entropy(logits, text[1:], reduction="none")[len(pair.prompt) :]


class PlainAttention(torch.nn.Module):
    """Textbook causal attention."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        """All [seq, 1, heads, head_dim]; returns [seq, 1, heads * head_dim]."""
        scores = torch.einsum("sbhd,tbhd->bhst", query, key) / sqrt(query.shape[-1])
        later = torch.ones_like(scores, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, float("-inf")).softmax(-1)
        return torch.einsum("bhst,tbhd->sbhd", weights, value).flatten(2)


def build(vocab_size: int, max_length: int, **shape: Any) -> GPTModel:
    """A GPTModel in fp64, with only this process in all of its process groups.

    Every rank of the world must call: building a process group is collective.
    """
    solo = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    groups = ProcessGroupCollection(
        **dict.fromkeys(("tp", "pp", "cp", "tp_cp", "embd", "pos_embd", "dp", "dp_cp"), solo)
    )
    config = TransformerConfig(**shape)
    spec = get_gpt_layer_local_spec(normalization=config.normalization)
    spec.submodules.self_attention.submodules.core_attention = PlainAttention
    return GPTModel(
        config,
        spec,
        vocab_size,
        max_length,
        position_embedding_type="rope",
        parallel_output=False,
        pg_collection=groups,
    )
