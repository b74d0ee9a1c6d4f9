"""verl, Megatron engine: an engine of `EngineRegistry`, which verl prefers to its own by its vendor.

With ``loss_agg_mode=token-mean`` each of verl's losses is a sum over tokens, and Megatron averages
its gradient over data-parallel ranks:

    dp_size / batch_num_tokens * sum_t m_t * loss_t

Here ``batch_num_tokens`` is 1, and `weigh` multiplies the gradient of the model's outputs by the
coefficient ``c_s`` of their row. So the gradient is that of ``sum_t m_t * c_s * loss_t``, whichever
losses are added up: policy, KL, entropy, distillation, value. For the reported losses, verl's loss
function is called once more, within `SumsByRow`.

`VERL_USE_EXTERNAL_MODULES` loads this module into every process that imports verl.
``model.external_lib`` would not do: a critic with processes of its own does not import it.
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
from verl import __version__
from verl.utils import device
from verl.utils import tensordict_utils as tu
from verl.utils.metric import AggregationType, Metric
from verl.workers.engine import EngineRegistry

from megatron_loss_agg import LossAggregation, StepPlan, weigh
from megatron_loss_agg.errors import DataError, HostError, OptionError
from megatron_loss_agg.frameworks import aggregation_from_environment, print_first_lines, print_none

SETTINGS = """\
+ray_kwargs.ray_init.runtime_env.env_vars.VERL_USE_EXTERNAL_MODULES=megatron_loss_agg.frameworks.verl
'+ray_kwargs.ray_init.runtime_env.env_vars.MEGATRON_LOSS_AGG_FLAGS="--loss-aggregation prompt_mean"'
actor_rollout_ref.actor.loss_agg_mode=token-mean"""
"""Further arguments of ``python -m verl.trainer.main_ppo``; Ray hands the variables to all workers."""

COEFFICIENTS = "loss_coefficients"
"""The column of a batch that has ``c_s`` of each row."""
UID_OF_PADDING = re.compile(r"pad[0-9a-f]{32}")
"""The uids of rows that verl adds to even out ranks."""
WITHOUT_TOKEN_MEAN = {
    "sapo": "always is a mean over samples",
    "geo_mean": "has a mean of its own",
    "clip_cov": "draws tokens at random, so that the reported loss would be of others",
}
"""Policy losses that cannot be weighed: why."""

Metrics = dict[str, Any]
LossFunction = Callable[..., tuple[Tensor, Metrics]]


def aggregation() -> LossAggregation | None:
    """The aggregation in the environment, in which rows of padding do not count unless told to.

    Raises:
        OptionError: bad flags, or a mode that needs more than verl's rows have.
    """
    agg = aggregation_from_environment()
    if agg is None:
        return None
    if "microbatch" in agg.units:
        raise OptionError(
            f"{agg.label} needs the microbatches before the step, which verl makes in the step. "
            "Choose another --loss-aggregation, such as token_mean."
        )
    return agg if agg.rejected is not None else replace(agg, rejected="skip")


def step_plan(agg: LossAggregation, data: Any, group: Any) -> StepPlan:
    """Count the mini-batch over the data-parallel ranks. A rollout is a session of a prompt.

    Under dynamic context parallelism every rank has the whole mini-batch, and verl's group is the
    rank alone: no sample is counted twice.
    """
    if "response_mask" not in data:
        raise HostError(
            "verl's batch must have a response_mask, got none, as in SFT. Unset "
            "MEGATRON_LOSS_AGG_FLAGS, or train by main_ppo."
        )
    prompts = sessions = padding = None
    if "uid" in data:
        prompts = [str(uid) for uid in tu.get(data, "uid")]
        padding = torch.tensor([bool(UID_OF_PADDING.fullmatch(uid)) for uid in prompts])
    if "is_padding" in data:
        padding = data["is_padding"].bool()
    if prompts and "session_id" in data:
        sessions = [
            f"{uid}_{x}" for uid, x in zip(prompts, tu.get(data, "session_id"), strict=True)
        ]
    if "rollout" in agg.by_id and sessions is None:
        raise DataError(
            f"{agg.label} needs the column session_id, which only verl's v1 trainer writes, got "
            "none. Choose sample instead of rollout, since each row is a rollout of its own."
        )
    return StepPlan.from_mask_sums(
        agg,
        data["response_mask"].bool().sum(-1),
        prompt_ids=prompts,
        rollout_ids=sessions,
        rejected=padding,
        group=group,
    )


def check_settings(loss_function: LossFunction) -> None:
    """Raise HostError if verl's configuration says that a loss is no token mean."""
    config = getattr(loss_function, "keywords", {}).get("config")
    mode = getattr(config, "loss_agg_mode", "token-mean")
    if mode != "token-mean":
        raise HostError(
            f"loss_agg_mode must be token-mean, got {mode}, which would weigh rows a second time. "
            "Set loss_agg_mode=token-mean, and choose the mode by MEGATRON_LOSS_AGG_FLAGS."
        )
    name = getattr(getattr(config, "policy_loss", None), "loss_mode", "vanilla")
    if name in WITHOUT_TOKEN_MEAN:
        raise HostError(
            f"policy_loss.loss_mode must be a token mean, got {name}, which "
            f"{WITHOUT_TOKEN_MEAN[name]}. Choose another, such as vanilla or gspo."
        )


class SumsByRow(TorchFunctionMode):
    """Multiplies rows by weights wherever a matrix of [rows, tokens] with a gradient is summed up.

    Sums without a gradient are of other things, such as a mean of importance weights.
    """

    def __init__(self, weights: Tensor) -> None:
        super().__init__()
        self.weights = weights

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        sums_all = all(x is None for x in (*args[1:], *options.values()))
        if function is Tensor.sum and sums_all and args[0].dim() == 2 and args[0].requires_grad:
            return (args[0] * self.weights.unsqueeze(-1)).sum()
        return function(*args, **options)


def weighed(
    loss_function: LossFunction, check: bool, model_output: Any, data: Any, dp_group: Any
) -> tuple[Tensor, Metrics]:
    """verl's loss of a microbatch with weights ``m_t * c_s``, times ``dp_size``; and its metrics."""
    c = data[COEFFICIENTS]
    call = partial(loss_function, data=data, dp_group=dp_group)
    if check:
        check_loss(call, model_output, data)
    tu.assign_non_tensor(data, batch_num_tokens=1)
    of_gradient, metrics = call(model_output={k: weigh_rows(x, c) for k, x in model_output.items()})
    with SumsByRow(c):
        loss, reported = call(model_output=model_output)
    metrics.update({name: x for name, x in reported.items() if is_sum(x)})
    return loss.detach() + (of_gradient - of_gradient.detach()), metrics


def check_loss(call: Callable[..., Any], model_output: Any, data: Any) -> None:
    """Raise HostError if not all of the loss is divided by the tokens, and summed up by rows."""
    ones, advantages = torch.ones_like(data[COEFFICIENTS]), data.get("advantages")
    if advantages is not None:  # those of a first step may all be 0
        data["advantages"] = torch.ones_like(advantages)
    for tokens, weights in (math.inf, ones), (1, 0 * ones):
        tu.assign_non_tensor(data, batch_num_tokens=tokens)
        with SumsByRow(weights):
            loss, _ = call(model_output=model_output)
        if loss != 0:
            raise HostError(
                "verl's loss must be a sum that agg_loss divides by batch_num_tokens, got another. "
                "Give config.global_batch_info to agg_loss in a policy loss of your own."
            )
    if advantages is not None:
        data["advantages"] = advantages


def weigh_rows(x: Any, c: Tensor) -> Any:
    """The jagged ``x`` itself, whose gradient is multiplied by the coefficient of its row."""
    if not x.requires_grad:
        return x
    values = x.values()
    of_token = c.repeat_interleave(x.offsets().diff(), output_size=len(values))
    weights = of_token.view(-1, *[1] * (values.dim() - 1)).expand_as(values)
    return torch.nested.nested_tensor_from_jagged(weigh(values, weights), x.offsets())


def is_sum(metric: Any) -> bool:
    """Whether verl adds the metric up, as it does losses; it averages others."""
    return isinstance(metric, Metric) and metric.aggregation is AggregationType.SUM


class Aggregating:
    """Mixed into verl's Megatron engines."""

    role = ""  # for the first line
    checks_loss = True  # in the first step

    def train_batch(self: Any, data: Any, loss_function: LossFunction) -> Any:
        agg = aggregation()
        if agg is not None:
            check_settings(loss_function)
            plan = step_plan(agg, data, self.get_data_parallel_group())
            print_first_lines(plan, self.role)
            data[COEFFICIENTS] = plan.coefficients(0).float()
        else:
            print_none("verl's")
        output = super().train_batch(data, loss_function)  # type: ignore[misc]
        self.checks_loss = False
        return output

    def forward_backward_batch(
        self, data: Any, loss_function: LossFunction, forward_only: bool = False
    ) -> Any:
        if not forward_only and COEFFICIENTS not in data and aggregation() is not None:
            raise HostError(
                "An optimizer step must be one train_batch, got a forward_backward of its own, as "
                "by Tinker's worker. Unset MEGATRON_LOSS_AGG_FLAGS, or use TrainingWorker."
            )
        return super().forward_backward_batch(data, loss_function, forward_only)  # type: ignore[misc]

    def postprocess_micro_batch_func(
        self: Any, output: Any, data: Any, forward_only: bool, loss_function: Any, **more: Any
    ) -> Any:
        weighs = COEFFICIENTS in data and not forward_only
        if weighs:
            loss_function = partial(weighed, loss_function, self.checks_loss)
        result = super().postprocess_micro_batch_func(  # type: ignore[misc]
            output, data, forward_only, loss_function, **more
        )
        floors_tokens = len(result) == 3 and not self.engine_config.dynamic_context_parallel
        if weighs and floors_tokens:
            loss, tokens, report = result
            return loss, self.with_missing_tokens(tokens, data), report
        return result

    def with_missing_tokens(self: Any, tokens: Tensor, data: Any) -> Tensor:
        """Token count of this rank; the first one adds those that all context-parallel ranks lack.

        Megatron divides gradients by the sum of the counts, and verl multiplies the loss by all
        tokens. Where it floors the share of a rank, some are in no count.
        """
        group = self.get_context_parallel_group()
        total = tokens.clone()
        dist.all_reduce(total, group=group)
        missing = self._routed_num_tokens(data) - total
        return tokens + (missing.to(tokens) if dist.get_rank(group) == 0 else 0)


class Refusing:
    """Mixed into verl's other engines, which would train without the aggregation."""

    def initialize(self: Any) -> None:
        if aggregation() and not self.engine_config.forward_only:
            raise HostError(
                f"The engine must be Megatron's, got {type(self).__name__}. Set "
                "model_engine=megatron, or unset MEGATRON_LOSS_AGG_FLAGS."
            )
        super().initialize()  # type: ignore[misc]


def register() -> None:
    """Register an engine beside each of verl's, for the vendor of this machine."""
    vendor = os.getenv("VERL_ENGINE_VENDOR") or device.get_vendor()
    for kind, backends in EngineRegistry._engines.items():
        role = {"role": "critic" if kind == "value_model" else ""}
        for backend, engines in backends.items():
            mixin = Aggregating if backend == "megatron" else Refusing
            for name, engine in [(x, y) for x, y in engines.items() if isinstance(x, str)]:
                ours = type(engine.__name__, (mixin, engine), role)
                EngineRegistry.register(kind, backend, name, vendor)(ours)


def refuse_flags() -> None:
    """Raise OptionError or DataError now for flags that need more than verl's rows have."""
    agg = aggregation()
    if agg is not None:
        StepPlan.from_mask_sums(agg, [1.0], prompt_ids=["0"], rollout_ids=["0"])


if "vendor" not in inspect.signature(EngineRegistry.register).parameters:
    raise HostError(
        f"verl must be 0.9.0 or newer, whose engines are registered by vendor, got {__version__}. "
        "Install verl>=0.9.0."
    )
refuse_flags()
register()
