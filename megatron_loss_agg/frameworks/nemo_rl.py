"""NeMo-RL's GRPO, PPO and SFT on Megatron: a policy whose `train` weights every sample.

Relies on `PolicyInterface.train(data, loss_fn)`, called by the driver with the whole batch, and on
the `LossFunction` protocol: NeMo-RL sends the loss function to its workers with the batch. Here the
driver adds a column with ``c_s`` to the batch. With ``v = sample_mask``, NeMo-RL's loss for a
global batch is

    L = (1 / G) sum_s v_s sum_t m_t l_t                G = global_valid_toks, or
    L = (1 / N) sum_s v_s (1 / M_s) sum_t m_t l_t      N = global_valid_seqs, if not token_level_loss

so multiplying the gradient of each log-probability by ``c_s G / v_s``, or ``c_s M_s N / v_s``,
gives the gradient of ``sum_t m_t c_s l_t``. The reported loss is aggregated, too; other metrics
remain NeMo-RL's own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_loss_agg import LossAggregation, StepPlan, weigh
from megatron_loss_agg.frameworks import (
    check_aggregation,
    print_first_lines,
    prompts_by_tokens,
    read_aggregation,
    required_release,
)
from megatron_loss_agg.frameworks.refusals import SETTINGS as REFUSED
from megatron_loss_agg.frameworks.refusals import check_settings, refused

with required_release("NeMo-RL", "nemo_rl", "0.6.0"):
    from nemo_rl.algorithms.loss import ClippedPGLossFn, NLLLossFn
    from nemo_rl.algorithms.loss.interfaces import LossType
    from nemo_rl.data.multimodal_utils import PackedTensor

SETTINGS = """\
export MEGATRON_LOSS_AGG_FLAGS="--loss-aggregation prompt_mean"

# in run_grpo.py, run_ppo.py or run_sft.py, after `setup(...)`:
from megatron_loss_agg.frameworks.nemo_rl import aggregate_losses
aggregate_losses(policy)
"""

COLUMN = "loss_coefficients"


def aggregate_losses(policy: Any) -> Any:
    """Make ``policy.train`` aggregate losses as MEGATRON_LOSS_AGG_FLAGS says; return the policy.

    Evaluation remains NeMo-RL's own. Without the variable, nothing changes.

    Raises:
        OptionError: a mode that needs more than NeMo-RL sends.
        HostError: a policy whose workers do not use Megatron or do not get the driver's batch.
    """
    agg = read_aggregation("NeMo-RL")
    if agg is None:
        return policy
    check_settings(policy.cfg, *REFUSED["nemo_rl"])
    if hasattr(policy, "train_from_meta"):
        raise refused("nemo_rl, data plane", "a policy of the data plane")
    # The defaults are those of NeMo-RL's own means.
    agg = replace(
        agg, rejected=agg.rejected or "skip", sample_weights=agg.sample_weights or "count"
    )
    train = policy.train

    def train_aggregated(
        data: Any, loss_fn: Any, eval_mode: bool = False, gbs: int | None = None, **more: Any
    ) -> Any:
        if not eval_mode:
            _check_loss(agg, data, loss_fn)
            size = gbs or policy.cfg["train_global_batch_size"]
            data = type(data)({**data, COLUMN: _coefficients(agg, data, size)})
            loss_fn = AggregatedLoss(loss_fn)
        return train(data, loss_fn, eval_mode=eval_mode, gbs=gbs, **more)

    policy.train = train_aggregated
    return policy


def _check_loss(agg: LossAggregation, data: Any, loss_fn: Any) -> None:
    """Raise if the weights do not fit the loss, or the batch does not distinguish its prompts."""
    if type(loss_fn) not in (ClippedPGLossFn, NLLLossFn):
        raise refused("nemo_rl, loss", type(loss_fn).__name__)
    check_settings(loss_fn, *REFUSED["nemo_rl, loss"])
    if type(loss_fn) is NLLLossFn:
        check_aggregation(agg, "NeMo-RL's SFT")
    if "prompt" in agg.units and any(isinstance(x, PackedTensor) for x in data.values()):
        raise refused("nemo_rl, images", "images, video or audio")


def _coefficients(agg: LossAggregation, data: Any, size: int) -> Tensor:
    """``c_s`` of every sample in its global batch of ``size``: fp32 [samples]."""
    sample_mask = data["sample_mask"].double()
    # The token at position 0 has no log-probability.
    mask_sums = data["token_mask"][:, 1:].double().sum(-1)
    prompts = _prompts(data) if "prompt" in agg.units else None
    parts = []
    for start in range(0, len(mask_sums), size):
        batch = slice(start, start + size)
        rejected = sample_mask[batch] == 0
        plan = StepPlan.from_mask_sums(
            agg,
            mask_sums[batch],
            prompt_ids=None if prompts is None else prompts[batch],
            rejected=rejected,
            sample_weights=sample_mask[batch].where(~rejected, 1.0),
        )
        print_first_lines(plan)
        parts.append(plan.coefficients(0))
    return torch.cat(parts).to(sample_mask.device, torch.float32)


def _prompts(data: Any) -> list[str]:
    """An id for each row's prompt: the tokens before the first generated one, as for advantages.

    A row's position does not identify its prompt, since dynamic sampling drops single samples.
    """
    tokens, positions = data["input_ids"], torch.arange(data["input_ids"].shape[1])
    is_generated = data["token_mask"] != 0
    lengths = torch.where(
        is_generated.any(-1), is_generated.int().argmax(-1), data["input_lengths"]
    )
    return prompts_by_tokens(tokens, positions < lengths.unsqueeze(-1))


class AggregatedLoss:
    """A NeMo-RL loss function with each sample weighted by a column of the batch."""

    def __init__(self, loss_fn: Any) -> None:
        self.loss_fn = loss_fn

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "loss_fn":  # missing during unpickling
            raise AttributeError(name)
        return getattr(self.loss_fn, name)

    def __call__(
        self,
        next_token_logprobs: Tensor,
        data: Any,
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
    ) -> tuple[Tensor, dict[str, Any]]:
        sample_mask = data["sample_mask"].to(next_token_logprobs).detach().requires_grad_()
        with torch.no_grad():
            denominator = global_valid_toks
            if self.loss_fn.loss_type == LossType.SEQUENCE_LEVEL:
                denominator = global_valid_seqs * data["token_mask"][:, 1:].sum(-1)
            weights = data[COLUMN] * denominator / sample_mask.where(sample_mask != 0, 1.0)
        weights_T = weights.unsqueeze(-1).expand_as(next_token_logprobs)
        data = type(data)({**data, "sample_mask": sample_mask})
        if "curr_logprobs_unfiltered" in data:  # of top-k and top-p sampling, for the KL term
            unfiltered = data["curr_logprobs_unfiltered"]
            data["curr_logprobs_unfiltered"] = weigh(unfiltered, weights_T)
        loss, metrics = self.loss_fn(
            weigh(next_token_logprobs, weights_T),
            data=data,
            global_valid_seqs=global_valid_seqs,
            global_valid_toks=global_valid_toks,
        )
        # The loss is a sum of sample_mask times each sample's loss: its derivative is that loss.
        (losses,) = torch.autograd.grad(loss, sample_mask, retain_graph=True)
        aggregated = (weights * sample_mask.detach() * losses).sum()
        return loss, {**metrics, "loss": aggregated.item()}
