"""Sampling answers with the context-parallel model, and their values for training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from examples.grpo import task
from megatron_loss_agg import CPLayout, predicting_mask
from megatron_loss_agg.report import Mean


@dataclass(frozen=True)
class Rollouts:
    """Answers of one data-parallel rank, one per row. Shapes [rows, width] or [rows].

    Values for the prediction of token ``t + 1`` are at position ``t``.
    """

    tokens: Tensor
    lengths: Tensor
    loss_mask: Tensor
    old_log_probs: Tensor
    reference_log_probs: Tensor
    rewards: Tensor
    advantages: Tensor
    prompt_ids: Tensor

    def rows(self, indices: Tensor) -> Rollouts:
        """The rows with these indices."""
        return Rollouts(**{name: value[indices] for name, value in vars(self).items()})

    def fields(self) -> dict[str, Tensor]:
        """A microbatch's values for each token, [rows, width]."""
        return {
            "tokens": self.tokens,
            "loss_mask": self.loss_mask,
            "old_log_probs": self.old_log_probs,
            "reference_log_probs": self.reference_log_probs,
            "advantages": self.advantages.unsqueeze(1).expand_as(self.loss_mask),
        }

    def report(self) -> dict[str, Mean]:
        """Means over the answers of this rank."""
        each = torch.ones_like(self.rewards)
        return {
            "reward": Mean.of(self.rewards, each),
            "length": Mean.of(self.lengths - task.PROMPT, each),
        }


def answer_mask(tokens: Tensor, lengths: Tensor) -> Tensor:
    """1 where the next token is in the answer, [rows, width]."""
    position = torch.arange(tokens.shape[1], device=tokens.device)
    answer = (position >= task.PROMPT) & (position < lengths.unsqueeze(1))
    return predicting_mask(answer.float())


def width_of(tokens: int) -> int:
    """``tokens``, rounded up so that it can be split over the context-parallel ranks."""
    multiple = 2 * parallel_state.get_context_parallel_world_size()
    return -(-tokens // multiple) * multiple


@torch.no_grad()
def whole_logits(model: Any, tokens: Tensor) -> Tensor:
    """Logits of whole rows, the same on all context-parallel ranks.

    Every rank computes its part and gets the other parts by an all-gather. That only copies, so the
    results are bitwise identical.

    Args:
        tokens: [rows, width], a multiple of 2 * context-parallel size wide; the same on all ranks.
    """
    width = tokens.shape[1]
    size = parallel_state.get_context_parallel_world_size()
    layout = CPLayout.bshd(width, size, parallel_state.get_context_parallel_rank())
    positions = torch.arange(width, device=tokens.device).expand_as(tokens)
    logits = model(layout.shard(tokens), layout.shard(positions), attention_mask=None)
    return layout.unshard(logits, parallel_state.get_context_parallel_group(), dim=1).float()


def noise(shape: tuple[int, ...], seed: int) -> Tensor:
    """Gumbel noise: ``argmax(log_probs + noise)`` is a sample.

    Drawn for the whole step at once, it does not depend on the number of ranks, and a resumed run
    needs no generator state.
    """
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(shape, generator=generator).clamp_(min=1e-20)
    return -(-uniform.log()).log()


def sample(model: Any, prompts: Tensor, gumbel: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """An answer to every prompt.

    Args:
        prompts: [rows, prompt].
        gumbel: [rows, longest answer, vocabulary].

    Returns:
        tokens [rows, width], with padding after the end; lengths [rows], including prompt and end;
        log-probabilities of the sampled tokens [rows, width], at the position before each.
    """
    rows, prompt = prompts.shape
    longest = gumbel.shape[1]
    width = width_of(prompt + longest)
    tokens = prompts.new_full((rows, width), task.PAD)
    tokens[:, :prompt] = prompts
    lengths = prompts.new_full((rows,), prompt + longest)
    log_probs = gumbel.new_zeros(rows, width)
    for position in range(prompt, prompt + longest):
        running = lengths > position
        if not running.any():  # the same on all ranks that compute this together
            break
        logits = whole_logits(model, tokens[:, : width_of(position)])[:, position - 1]
        scores = logits.log_softmax(-1)
        chosen = (scores + gumbel[:, position - prompt]).argmax(-1)
        tokens[running, position] = chosen[running]
        chosen_log_probs = scores.gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
        log_probs[running, position - 1] = chosen_log_probs[running]
        lengths[running & (chosen == task.END)] = position + 1
    return tokens, lengths, log_probs


def log_probs_of(model: Any, tokens: Tensor) -> Tensor:
    """Log-probability of every next token [rows, width]; 0 at the last position."""
    scores = whole_logits(model, tokens).log_softmax(-1)
    log_probs = scores.new_zeros(tokens.shape)
    log_probs[:, :-1] = scores[:, :-1].gather(-1, tokens[:, 1:].unsqueeze(-1)).squeeze(-1)
    return log_probs


def collect(model: Any, reference: Any, texts: list[str], answers: int, seed: int) -> Rollouts:
    """Sample ``answers`` answers to each prompt over all data-parallel ranks, and score them.

    Answer ``i`` of the step belongs to rank ``i % ranks``, so a prompt's answers are on several ranks.
    """
    group = parallel_state.get_data_parallel_group()
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    total = len(texts) * answers
    mine = torch.arange(rank, total, ranks)
    prompt_ids = mine // answers
    encoded = torch.tensor([task.encode(text) for text in texts])[prompt_ids]
    gumbel = noise((total, task.MAX_ANSWER, task.VOCAB_SIZE), seed)[mine]
    tokens, lengths, old_log_probs = sample(model, encoded.cuda(), gumbel.cuda())
    reference_log_probs = log_probs_of(reference, tokens)

    answered = [
        row[task.PROMPT : length]
        for row, length in zip(tokens.tolist(), lengths.tolist(), strict=True)
    ]
    pairs = zip(prompt_ids.tolist(), answered, strict=True)
    rewards = torch.tensor([task.reward(texts[p], answer) for p, answer in pairs]).cuda()
    parts = [torch.empty_like(rewards) for _ in range(ranks)]
    dist.all_gather(parts, rewards, group=group)
    step_rewards = torch.stack(parts, dim=1).view(-1)  # in the order of the answers of the step
    advantages = task.group_advantages(step_rewards, answers)[mine.to(step_rewards.device)]

    return Rollouts(
        tokens=tokens,
        lengths=lengths,
        loss_mask=answer_mask(tokens, lengths),
        old_log_probs=old_log_probs,
        reference_log_probs=reference_log_probs,
        rewards=rewards,
        advantages=advantages,
        prompt_ids=prompt_ids.to(tokens.device),
    )
