"""A process with several models, losses or loops: what was checked for one is not taken for all."""

from __future__ import annotations

import functools
import sys
from typing import Any

import pytest

from tests.host.harness import error_of, run_host_ranks

pytestmark = pytest.mark.host


def squared(loss_mask: Any, output: Any) -> tuple[Any, Any, Any]:
    """A loss that is no sum of the model's output, in the form of a stock one."""
    loss = (output.reshape(-1).square() * loss_mask.reshape(-1)).sum()
    return loss, loss_mask.sum().to(int), {}


def facts_of_rank() -> dict[str, Any]:
    import torch
    from megatron.core.pipeline_parallel import get_forward_backward_func, schedules

    from megatron_loss_agg import LossAggregation
    from megatron_loss_agg.mcore import LossHook
    from megatron_loss_agg.mcore.install import install
    from tests.host import gpt
    from tests.host.steps import Counted

    gpt.initialize()
    models = [gpt.ddp_model(), gpt.ddp_model()]

    def squares(data_iterator: Any, model: Any) -> Any:
        output, loss_func = gpt.forward_step(data_iterator, model)
        return output, functools.partial(squared, loss_func.args[0])

    def call(model: Any, schedule: Any = None, step: Any = gpt.forward_step, **options: Any) -> Any:
        if options.pop("zero", True):
            model.zero_grad_buffer()
        schedule = schedule or get_forward_backward_func()
        data = options.pop("data", None) or Counted(0)
        return schedule(
            forward_step_func=step,
            data_iterator=data,
            model=[model],
            num_microbatches=2,
            seq_length=1,
            micro_batch_size=1,
            **{"forward_only": False, **options},
        )

    def installed(*flags: str) -> Any:
        sys.argv = ["script", "--loss-aggregation", *flags]
        return install(watch_exit=False)

    facts: dict[str, Any] = {}
    hook = LossHook(LossAggregation(mode="sample_mean"))
    hooked = hook.wrap(get_forward_backward_func())
    facts["first model"] = error_of(call, models[0], hooked)
    facts["first model, other loss"] = error_of(call, models[0], hooked, squares)
    facts["second model, same hook"] = error_of(call, models[1], hooked)
    facts["second model, forward only"] = error_of(call, models[1], hooked, forward_only=True)

    uninstall = installed("sum")
    sgd = torch.optim.SGD(models[0].parameters(), lr=0.0)
    call(models[0], forward_only=True)
    facts["only evaluated"] = error_of(sgd.step)
    facts["reports"] = sorted(call(models[0])[0])
    facts["two calls"] = error_of(call, models[0], zero=False)
    facts["trained"] = error_of(sgd.step)
    facts["zeroed"] = error_of(call, models[0])
    facts["second model, other loss"] = error_of(call, models[1], None, squares)
    kept = get_forward_backward_func()

    @functools.wraps(kept)
    def counting(**arguments: Any) -> Any:
        facts["calls of the loop's wrapper"] = 1
        return kept(**arguments)

    own = LossHook(LossAggregation(mode="token_mean")).wrap(counting)
    facts["through a wrapper"] = error_of(call, models[0], own)
    uninstall()
    facts["restored"] = get_forward_backward_func() is schedules.forward_backward_no_pipelining
    facts["nothing taken"] = sys.argv[1:]

    uninstall = installed("sum", "--loss-aggregation-empty-step", "skip")
    call(models[0], data=Counted(0, active=()))
    facts["skip by torch"] = error_of(sgd.step)
    facts["skip of two models"] = error_of(call, models[1])
    uninstall()
    return facts


@functools.cache
def facts() -> dict[str, Any]:
    return run_host_ranks(facts_of_rank, 1)[0]


def test_a_hook_trains_one_model() -> None:
    assert facts()["first model"] is facts()["second model, forward only"] is None
    error = facts()["second model, same hook"]
    assert error.startswith("HostError: a LossHook trains a second model; expected a hook for each")


@pytest.mark.parametrize("which", ["first model", "second model"])
def test_every_loss_function_is_checked(which: str) -> None:
    error = facts()[f"{which}, other loss"]
    assert error.startswith("HostError: the loss function returned")
    assert "expected a masked sum" in error


def test_an_evaluation_is_no_training() -> None:
    assert "--loss-aggregation sum has no effect: SGD" in facts()["only evaluated"]
    assert facts()["trained"] is None
    assert facts()["reports"] == ["lm loss", "sum loss"]


def test_calls_that_would_add_up_are_refused() -> None:
    error = facts()["two calls"]
    assert error.startswith(
        "StepError: a forward-backward call on the gradients that the last one left"
    )
    assert facts()["zeroed"] is None


def test_an_uninstall_restores_the_schedule_and_the_flags() -> None:
    assert facts()["restored"]
    assert facts()["nothing taken"] == ["--loss-aggregation", "sum"]


def test_a_wrapper_of_the_loop_is_called() -> None:
    # Beneath it the flags' hook is called, and refuses the loss function of the loop's own hook.
    assert facts()["calls of the loop's wrapper"] == 1
    assert "has no mask; expected" in facts()["through a wrapper"]


def test_empty_steps_of_several_models_or_of_torch_are_not_skipped() -> None:
    assert "SGD is about to step without any token" in facts()["skip by torch"]
    assert "skip, and several models train in this process" in facts()["skip of two models"]
