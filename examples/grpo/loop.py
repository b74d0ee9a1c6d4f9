"""The loop: sample, score, and make several optimizer steps on the samples."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from examples.grpo import checkpoint, loss, model, packing, rollout, task
from examples.grpo.metrics import Log, Metrics, progress
from examples.grpo.options import Options
from megatron_loss_agg.report import Metric, reduce_reports


class Trainer:
    """Models, optimizer and hooks of one run. A step changes nothing that is not in `state`."""

    def __init__(self, options: Options) -> None:
        model.start(options)
        self.options = options
        self.policy = model.distribute(model.build(options))
        self.reference = model.build(options).requires_grad_(False)
        self.optimizer = model.build_optimizer(self.policy, options)
        self.grpo = loss.Objective(loss.grpo_hook(options), partial(loss.grpo_losses, options.clip))
        self.data_group = parallel_state.get_data_parallel_group()
        ranks = dist.get_world_size(self.data_group)
        if options.answers % ranks:
            raise ValueError(
                f"--answers {options.answers} cannot be dealt to {ranks} data-parallel ranks; "
                "expected a multiple"
            )
        self.token_group = parallel_state.get_data_parallel_group(with_context_parallel=True)

    def state(self) -> dict[str, Any]:
        """All values that the next step depends on, apart from the options and its number."""
        return {
            "policy": self.policy.module.state_dict(),
            "reference": self.reference.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore a result of `state`."""
        self.policy.module.load_state_dict(state["policy"])
        self.reference.load_state_dict(state["reference"])
        self.optimizer.load_state_dict(state["optimizer"])

    def warm_up(self) -> None:
        """Train briefly with supervision; the resulting model is the reference."""
        rank, ranks = dist.get_rank(self.data_group), dist.get_world_size(self.data_group)
        supervised = loss.Objective(loss.supervised_hook(), loss.supervised_losses)
        number = self.options.prompts * self.options.answers
        self._set_learning_rate(self.options.warmup_lr)
        for step in progress("warm-up", 0, self.options.warmup, dist.get_rank() == 0):
            examples = task.examples(number, self.options.largest, _seed(self.options, step, 1))
            fields, lengths = _as_rows(examples[rank::ranks])
            samples = torch.arange(len(lengths), device=lengths.device)
            self._optimize(supervised, fields, lengths, samples)
        self.reference.load_state_dict(self.policy.module.state_dict())

    def step(self, step: int) -> Metrics:
        """One batch of rollouts and the optimizer steps on it."""
        options = self.options
        texts = task.prompts(options.prompts, options.largest, _seed(options, step, 2))
        batch = rollout.collect(
            self.policy.module, self.reference, texts, options.answers, _seed(options, step, 3)
        )
        prompts = options.prompts // options.updates
        self._set_learning_rate(options.lr * (1 - step / options.steps))
        reports = []
        for update in range(options.updates):
            rows = batch.rows((batch.prompt_ids // prompts == update).nonzero().squeeze(1))
            reports += self._optimize(self.grpo, rows.fields(), rows.lengths, rows.prompt_ids)
        # Context-parallel ranks have the same answers, so count those over data-parallel ranks
        # only; but each rank has its own part of the tokens.
        return {
            **reduce_reports([batch.report()], self.data_group),
            **reduce_reports(reports, self.token_group),
        }

    def _set_learning_rate(self, value: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = value

    def _optimize(
        self,
        objective: loss.Objective,
        fields: dict[str, Tensor],
        lengths: Tensor,
        prompt_ids: Tensor,
    ) -> list[dict[str, Metric | Tensor]]:
        """Make one optimizer step on this rank's rows; return the report of each microbatch."""
        packs = packing.microbatches(
            fields,
            lengths,
            prompt_ids,
            multiple=rollout.width_of(1),
            budget=self.options.token_budget,
            group=self.data_group,
        )
        self.policy.zero_grad_buffer()
        self.optimizer.zero_grad()
        reports: list[dict[str, Metric | Tensor]] = objective.forward_backward(
            forward_step_func=objective.forward_step,
            data_iterator=iter(packs),
            model=[self.policy],
            num_microbatches=len(packs),
            seq_length=self.options.token_budget,
            micro_batch_size=1,
        )
        if not objective.hook.step_is_empty:
            self.optimizer.step()
        return reports


def _as_rows(examples: list[tuple[list[int], list[int]]]) -> tuple[dict[str, Tensor], Tensor]:
    """Prompts with answers as padded rows, and their lengths."""
    whole = [prompt + answer for prompt, answer in examples]
    width = rollout.width_of(max(map(len, whole)))
    padded = [tokens + [task.PAD] * (width - len(tokens)) for tokens in whole]
    tokens, lengths = torch.tensor(padded).cuda(), torch.tensor([*map(len, whole)]).cuda()
    return {"tokens": tokens, "loss_mask": rollout.answer_mask(tokens, lengths)}, lengths


def _seed(options: Options, step: int, purpose: int) -> int:
    return (options.seed * 1_000_003 + step) * 8 + purpose


def train(options: Options) -> Trainer:
    """Train, write metrics and checkpoints into the output folder, and return the trainer."""
    trainer = Trainer(options)
    if options.resume:
        state = checkpoint.load(options.output, options)
        start = state["step"]
        trainer.load_state(state)
    else:
        start = 0
        checkpoint.clear(options.output)
        trainer.warm_up()
    log = Log(options.output, start, writes=dist.get_rank() == 0)
    for step in log.steps(start, options.steps):
        log.write(step, trainer.step(step))
        done = step + 1
        if done % options.save_every == 0 or done == options.steps:
            checkpoint.save(options.output, done, options, trainer.state())
    log.close()
    return trainer
