"""verl's Megatron engine: engines in `EngineRegistry` that verl prefers to its own by their vendor.

With ``loss_agg_mode=token-mean``, each of verl's losses is a sum over tokens, and Megatron averages
its gradient over data-parallel ranks:

    dp_size / batch_num_tokens * sum_t m_t * loss_t

Here ``batch_num_tokens`` is 1, and `weigh` multiplies the gradient of the model's outputs by the
coefficient ``c_s`` of their row. So the gradient is that of ``sum_t m_t * c_s * loss_t`` for every
loss in the sum: policy, KL, entropy, distillation, value. For the reported losses, verl's loss
function is called a second time, within `WeightedSums`.

`VERL_USE_EXTERNAL_MODULES` loads this module into every process that imports verl.
``model.external_lib`` would not do, since a critic with its own processes does not import it.
"""

from __future__ import annotations

import inspect
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megatron_loss_agg import LossAggregation, StepPlan, weigh
from megatron_loss_agg.frameworks import (
    aggregation_from_environment,
    check_aggregation,
    print_first_lines,
    print_inactive,
    required_release,
    same_on_all_ranks,
)
from megatron_loss_agg.frameworks.refusals import SETTINGS as REFUSED
from megatron_loss_agg.frameworks.refusals import check_settings, refused

with required_release("verl", "verl", "0.9.0"):
    from verl.utils import device
    from verl.utils import tensordict_utils as tu
    from verl.utils.metric import AggregationType, Metric
    from verl.workers.engine import EngineRegistry

    if "vendor" not in inspect.signature(EngineRegistry.register).parameters:
        raise ImportError("engines are registered without a vendor", name="verl")

SETTINGS = """\
+ray_kwargs.ray_init.runtime_env.env_vars.VERL_USE_EXTERNAL_MODULES=megatron_loss_agg.frameworks.verl
'+ray_kwargs.ray_init.runtime_env.env_vars.MEGATRON_LOSS_AGG_FLAGS="--loss-aggregation prompt_mean"'
actor_rollout_ref.actor.loss_agg_mode=token-mean"""
"""More arguments of ``python -m verl.trainer.main_ppo``; Ray hands the variables to all workers."""

COEFFICIENTS = "loss_coefficients"
"""The column of a batch that holds ``c_s`` of each row."""
PADDING_UID = re.compile(r"pad[0-9a-f]{32}")
"""Matches the uids of rows that verl adds so that all ranks have the same number of rows."""
OTHER_POLICY_LOSSES = {
    "sapo": "is always a mean over samples",
    "geo_mean": "has a mean of its own",
    "clip_cov": "draws tokens at random, so that the reported loss would be of other tokens",
}
"""Policy losses that cannot be weighted, each with the reason."""

Metrics = dict[str, Any]
LossFunction = Callable[..., tuple[Tensor, Metrics]]


def aggregation() -> LossAggregation | None:
    """The aggregation in the environment; by default, padding rows do not count.

    Raises:
        OptionError: bad flags, or a mode that needs more than verl's rows have.
    """
    agg = aggregation_from_environment()
    if agg is None:
        return None
    check_aggregation(agg, "verl")
    return agg if agg.rejected is not None else replace(agg, rejected="skip")


def step_plan(agg: LossAggregation, data: Any, group: Any) -> StepPlan:
    """Count the mini-batch over the data-parallel ranks. A rollout is a session of a prompt.

    With dynamic context parallelism, every rank has the whole mini-batch and verl's group is just
    that rank, so no sample is counted twice.
    """
    if "response_mask" not in data:
        raise refused("verl, SFT", "none, as in SFT")
    prompts = sessions = padding = None
    if "uid" in data:
        prompts = [str(uid) for uid in tu.get(data, "uid")]
        padding = torch.tensor([bool(PADDING_UID.fullmatch(uid)) for uid in prompts])
    if "is_padding" in data:
        padding = data["is_padding"].bool()
    if prompts and "session_id" in data:
        sessions = [
            f"{uid}_{x}" for uid, x in zip(prompts, tu.get(data, "session_id"), strict=True)
        ]
    if "rollout" in agg.by_id and sessions is None:
        raise refused("verl, sessions", "none", label=agg.label)
    return StepPlan.from_mask_sums(
        agg,
        data["response_mask"].bool().sum(-1),
        prompt_ids=prompts,
        rollout_ids=sessions,
        rejected=padding,
        group=group,
    )


def check_loss_config(loss_function: LossFunction) -> None:
    """Raise HostError if, by verl's configuration, a loss is not a token mean."""
    config = getattr(loss_function, "keywords", {}).get("config")
    check_settings(config, *REFUSED["verl"])
    name = getattr(getattr(config, "policy_loss", None), "loss_mode", "vanilla")
    if name in OTHER_POLICY_LOSSES:
        raise refused("verl, policy loss", f"{name}, which {OTHER_POLICY_LOSSES[name]}")


class WeightedSums(TorchFunctionMode):
    """Multiplies rows by weights wherever a matrix [rows, tokens] with a gradient is summed up.

    Only for reports and for `check_loss`; gradients get their weights from `weigh_rows`. None of
    verl's registries reaches these sums: its losses look up `agg_loss` by name in their module and
    get boolean masks; only the policy's functions are registered, without KL, entropy, value and
    distillation; and a separate call for each row would draw different tokens in ``kl_cov``.

    A sum without a gradient is not a loss but a statistic, such as a mean of importance weights.
    """

    def __init__(self, row_weights: Tensor) -> None:
        super().__init__()
        self.row_weights = row_weights

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        is_whole_sum = function is Tensor.sum and all(
            x is None for x in (*args[1:], *options.values())
        )
        if is_whole_sum and args[0].dim() == 2 and args[0].requires_grad:
            return (args[0] * self.row_weights.unsqueeze(-1)).sum()
        return function(*args, **options)


def weighed_loss(
    loss_function: LossFunction, is_first: bool, model_output: Any, data: Any, dp_group: Any
) -> tuple[Tensor, Metrics]:
    """verl's loss of a microbatch with weights ``m_t * c_s``, times ``dp_size``; and its metrics.

    Args:
        is_first: True in the first step, in which the loss function is checked.
    """
    c = data[COEFFICIENTS]
    call = partial(loss_function, data=data, dp_group=dp_group)
    if is_first:
        check_loss(call, model_output, data)
    tu.assign_non_tensor(data, batch_num_tokens=1)
    weighed_output = {key: weigh_rows(x, c) for key, x in model_output.items()}
    gradient_loss, metrics = call(model_output=weighed_output)
    with WeightedSums(c):
        loss, weighted_metrics = call(model_output=model_output)
    metrics.update({name: x for name, x in weighted_metrics.items() if is_sum(x)})
    # The value of one with the gradient of the other.
    return loss.detach() + (gradient_loss - gradient_loss.detach()), metrics


def check_loss(call: Callable[..., Any], model_output: Any, data: Any) -> None:
    """Raise HostError if a part of the loss is not divided by the tokens, or not summed by rows.

    The whole loss must be 0 if it is divided by infinitely many tokens, and if all rows have weight
    0.
    """
    ones, advantages = torch.ones_like(data[COEFFICIENTS]), data.get("advantages")
    if advantages is not None:  # in a first step they may all be 0, which would hide a part
        data["advantages"] = torch.ones_like(advantages)
    for num_tokens, row_weights in (math.inf, ones), (1, 0 * ones):
        tu.assign_non_tensor(data, batch_num_tokens=num_tokens)
        with WeightedSums(row_weights):
            loss, _ = call(model_output=model_output)
        if loss != 0:
            raise refused("verl, own loss", "another")
    if advantages is not None:
        data["advantages"] = advantages


def weigh_rows(x: Any, c: Tensor) -> Any:
    """The jagged ``x``, with its gradient multiplied by the coefficient of each row."""
    if not x.requires_grad:
        return x
    values = x.values()
    token_weights = c.repeat_interleave(x.offsets().diff(), output_size=len(values))
    weights = token_weights.view(-1, *[1] * (values.dim() - 1)).expand_as(values)
    return torch.nested.nested_tensor_from_jagged(weigh(values, weights), x.offsets())


def is_sum(metric: Any) -> bool:
    """True for a metric that verl adds up, like losses; it averages all others."""
    return isinstance(metric, Metric) and metric.aggregation is AggregationType.SUM


class AggregatingEngine:
    """Mixed into verl's Megatron engines."""

    model_name = ""  # for the first line
    is_first_step = True

    def train_batch(self: Any, data: Any, loss_function: LossFunction) -> Any:
        agg = same_on_all_ranks(aggregation) if self.is_first_step else aggregation()
        if agg is not None:
            check_loss_config(loss_function)
            plan = step_plan(agg, data, self.get_data_parallel_group())
            print_first_lines(plan, self.model_name)
            data[COEFFICIENTS] = plan.coefficients(0).float()
        else:
            print_inactive("verl")
        output = super().train_batch(data, loss_function)  # type: ignore[misc]
        self.is_first_step = False
        return output

    def forward_backward_batch(
        self, data: Any, loss_function: LossFunction, forward_only: bool = False
    ) -> Any:
        if not forward_only and COEFFICIENTS not in data and aggregation() is not None:
            raise refused("verl, calls", "a separate forward_backward, as in Tinker's worker")
        return super().forward_backward_batch(data, loss_function, forward_only)  # type: ignore[misc]

    def postprocess_micro_batch_func(
        self: Any, output: Any, data: Any, forward_only: bool, loss_function: Any, **more: Any
    ) -> Any:
        post = super().postprocess_micro_batch_func  # type: ignore[misc]
        if forward_only or COEFFICIENTS not in data:
            return post(output, data, forward_only, loss_function, **more)
        weighed = partial(weighed_loss, loss_function, self.is_first_step)
        result = post(output, data, forward_only, weighed, **more)
        if len(result) == 3 and not self.engine_config.dynamic_context_parallel:
            loss, tokens, report = result
            return loss, self.with_missing_tokens(tokens, data), report
        return result

    def with_missing_tokens(self: Any, tokens: Tensor, data: Any) -> Tensor:
        """This rank's token count; the first context-parallel rank adds the uncounted tokens.

        Megatron divides gradients by the sum of the counts, and verl multiplies the loss by the
        number of tokens. verl rounds each rank's share down, so the counts sum to less.
        """
        group = self.get_context_parallel_group()
        total = tokens.clone()
        dist.all_reduce(total, group=group)
        missing = self._routed_num_tokens(data) - total
        return tokens + (missing.to(tokens) if dist.get_rank(group) == 0 else 0)


class RefusingEngine:
    """Mixed into verl's other engines, which would train without the aggregation."""

    def initialize(self: Any) -> None:
        if aggregation() and not self.engine_config.forward_only:
            raise refused("verl, engine", type(self).__name__)
        super().initialize()  # type: ignore[misc]


def register() -> None:
    """Register an engine for each of verl's, under the vendor of this machine."""
    vendor = os.getenv("VERL_ENGINE_VENDOR") or device.get_vendor()
    for kind, backends in EngineRegistry._engines.items():
        attributes = {"model_name": "critic" if kind == "value_model" else ""}
        for backend, engines in backends.items():
            mixin = AggregatingEngine if backend == "megatron" else RefusingEngine
            # A copy, since the registry grows. Keys that are not strings are for other vendors.
            for name, engine in [(x, y) for x, y in engines.items() if isinstance(x, str)]:
                mixed = type(engine.__name__, (mixin, engine), attributes)
                EngineRegistry.register(kind, backend, name, vendor)(mixed)


def refuse_flags() -> None:
    """Plan one row, to raise an error now for flags that need more than verl's rows have."""
    agg = aggregation()
    if agg is not None:
        StepPlan.from_mask_sums(agg, [1.0], prompt_ids=["0"], rollout_ids=["0"])


refuse_flags()
register()
