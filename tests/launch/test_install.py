"""The plugin in a process: what it wraps and restores of Megatron, and whose hook trains what."""

from __future__ import annotations

import argparse
import contextlib
import enum
import functools
import sys
from importlib.metadata import version
from typing import Any
from unittest import mock

import pytest
import torch
from packaging.version import Version

from megatron_loss_agg.errors import AggregationError, HostError
from megatron_loss_agg.launch.install import hook_from_args
from tests.host.harness import error_of, run_host_ranks
from tests.host.refusals import assert_says


def _functions() -> dict[tuple[str, str], Any]:
    """Everything that Megatron's modules and optimizers define."""
    from megatron.core.optimizer import optimizer

    holders = [(n, m) for n, m in sys.modules.items() if n == "megatron" or n[:9] == "megatron."]
    holders += [(n, c) for n, c in vars(optimizer).items() if isinstance(c, type)]
    return {(n, key): value for n, holder in holders for key, value in vars(holder).items()}


def install_on_rank() -> None:
    from megatron.training import arguments, training

    from megatron_loss_agg.launch.install import install

    def changed() -> list[tuple[str, str]]:
        """The names that are not as they were ``before``."""
        now = _functions()
        keys = {key for key in before if now.get(key) is not before[key]}
        return sorted(x for x in keys if x[1] != "print_rank_last")

    def has_flags() -> bool:
        parser = arguments.add_megatron_arguments(argparse.ArgumentParser())
        return hasattr(parser.parse_known_args([])[0], "loss_aggregation")

    before = _functions()
    uninstall = install()
    assert ("megatron.training.training", "get_forward_backward_func") in changed()
    assert has_flags()
    uninstall()
    assert changed() == [] and not has_flags()
    uninstall = install()
    # A second install, as by the launcher before a script that has the patch, changes nothing.
    before = _functions()
    uninstall_again = install()
    assert changed() == []
    uninstall_again()
    assert changed() == [] and has_flags()
    uninstall()
    # A Megatron that lacks a function is left as it is.
    before = _functions()
    get_schedule = training.get_forward_backward_func
    del training.get_forward_backward_func
    text = f"HostError: megatron.training.training of megatron-core {version('megatron-core')}"
    text += " ... has no get_forward_backward_func. Install"  # after the commit of its checkout
    assert_says(error_of(install), text)
    training.get_forward_backward_func = get_schedule
    assert changed() == [] and not has_flags()


def test_functions_are_restored_and_a_megatron_that_lacks_one_is_refused() -> None:
    run_host_ranks(install_on_rank, 1)


Scope = enum.Enum("Scope", ["full_iteration", "attn", "full_iteration_inference"])
GRAPHS = "--cuda-graph-scope full_iteration"
LOCAL = {"cuda_graph_impl": "local"}
FUSED = {"cross_entropy_loss_fusion": True}
INSTANCES, STAGES = {"num_distributed_optimizer_instances": 2}, {"pipeline_model_parallel_size": 2}
PER_TOKEN = {"calculate_per_token_loss": True}
SKIPS = {"loss_aggregation_empty_step": "skip"}
# Megatron's parsed flags, and how their refusal begins.
FLAGS_OF_MEGATRON: list[tuple[dict[str, Any], str | None]] = [
    ({"gtp_weight_remat_size": 2}, "--gtp-weight-remat-size"),
    ({"expert_gtp_weight_remat_size": 2}, "--expert-gtp-weight-remat-size"),
    ({"gtp_weight_remat_size": 1}, None),
    ({**INSTANCES, **STAGES, **PER_TOKEN}, "--num-distributed-optimizer-instances > 1"),
    ({**INSTANCES, **STAGES}, None),
    ({**INSTANCES, **PER_TOKEN}, None),
    ({**STAGES, **PER_TOKEN}, None),
    # A graph of the whole iteration, however it is spelled: today, in 0.14, and in 0.15 to 0.17,
    # where a scope is an enumeration in the end; and in later ones, before flags are validated.
    ({"cuda_graph_impl": "full_iteration"}, "--cuda-graph-impl full_iteration"),
    ({"enable_cuda_graph": True, "cuda_graph_scope": "full_iteration"}, GRAPHS),
    ({**LOCAL, "cuda_graph_scope": [Scope.attn, Scope.full_iteration]}, GRAPHS),
    ({**LOCAL, "cuda_graph_modules": ["full_iteration"]}, "--cuda-graph-modules full_iteration"),
    ({**LOCAL, "cuda_graph_scope_deprecated": ["full_iteration"]}, GRAPHS),
    ({"cuda_graph_impl": "none", "cuda_graph_scope": "full_iteration"}, None),
    ({**FUSED, "cross_entropy_fusion_impl": "native"}, None),
    ({"cross_entropy_fusion_impl": "te"}, None),
    ({**LOCAL, "cuda_graph_scope": [Scope.full_iteration_inference]}, None),
    ({**SKIPS, "optimizer_cuda_graph": True}, "--loss-aggregation-empty-step"),
    ({"optimizer_cuda_graph": True}, None),
]


@pytest.mark.parametrize("flags, refused", FLAGS_OF_MEGATRON)
def test_flags_of_megatron_that_cannot_be_exact_are_refused(
    flags: dict[str, Any], refused: str | None
) -> None:
    args = argparse.Namespace(loss_aggregation="token_mean", **flags)
    if refused is None:
        assert hook_from_args(args) is not None
        return
    with pytest.raises(AggregationError, match=f"^{refused}.*(drop|change|choose)"):
        hook_from_args(args)


@pytest.mark.parametrize("is_scaled", [True, False])
def test_the_loss_of_an_indexer_is_taken_from_the_release_on_that_averages_it(
    is_scaled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core.transformer.transformer_config import TransformerConfig

    name = "experimental_attention_variant_loss_scale_func"
    monkeypatch.setattr(TransformerConfig, name, None, raising=False)
    if not is_scaled:
        monkeypatch.delattr(TransformerConfig, name)
    loss = {"experimental_attention_variant": "dsa", "dsa_indexer_loss_coeff": 0.1}
    args = argparse.Namespace(loss_aggregation="token_mean", **loss)
    raises = pytest.raises(HostError, match=r"^--dsa-indexer-loss-coeff.*before 0\.19")
    with contextlib.nullcontext() if is_scaled else raises:
        assert hook_from_args(args) is not None


# 0.0.0: Megatron has none, and raises its own error in training.
@pytest.mark.parametrize("engine, refused", [("2.10.9", True), ("2.11.0", False), ("0.0.0", False)])
def test_a_fused_cross_entropy_is_taken_from_the_release_on_that_weighs_each_token(
    engine: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron.core.utils._te_version", Version(engine))
    fused = FUSED | {"cross_entropy_fusion_impl": "te"}
    args = argparse.Namespace(loss_aggregation="token_mean", **fused)
    raises = pytest.raises(HostError, match=f"Transformer Engine {engine}, like all before 2.11")
    with raises if refused else contextlib.nullcontext():
        assert hook_from_args(args) is not None


# A process with several models, losses or loops: what was checked for one does not hold for all.


def squared(loss_mask: Any, output: Any) -> tuple[Any, Any, Any]:
    """A loss that is no sum of the model's output, in the form of a stock one."""
    loss = (output.reshape(-1).square() * loss_mask.reshape(-1)).sum()
    return loss, loss_mask.sum().to(int), {}


OTHER_LOSS = "HostError: a loss function must return the masked sum of the model's losses"


def train_several_models() -> None:
    from megatron.core.pipeline_parallel import get_forward_backward_func, schedules
    from megatron.training import global_vars

    from megatron_loss_agg import LossAggregation
    from megatron_loss_agg.launch.install import install
    from megatron_loss_agg.mcore import LossHook
    from tests.host import gpt
    from tests.host.steps import NO_TOKENS, SHORT, batches

    gpt.initialize()
    first, second = gpt.ddp_model(), gpt.ddp_model()

    def squares(iterator: Any, model: Any) -> Any:
        losses, loss_func = gpt.forward_step(iterator, model)
        return losses, functools.partial(squared, *loss_func.args)

    def call(model: Any, schedule: Any = None, places: Any = SHORT, **options: Any) -> Any:
        data = batches(places[0], "bshd")
        return gpt.run_step(None, model, data, 2, schedule=schedule, **options)

    def assert_refused(error: str, *args: Any, **options: Any) -> None:
        assert_says(error_of(call, *args, **options), error)

    def installed(*flags: str) -> Any:
        sys.argv = ["script", "--loss-aggregation", "sum", *flags]
        return install(watch_exit=False)

    hooked = LossHook(LossAggregation(mode="sample_mean")).wrap(get_forward_backward_func())
    call(first, hooked)
    assert_refused(OTHER_LOSS, first, hooked, forward_step_func=squares)
    call(second, hooked)

    uninstall = installed()
    sgd = torch.optim.SGD(first.parameters(), lr=0.0)
    call(first, forward_only=True)
    # An evaluation is no training.
    assert_says(error_of(sgd.step), "HostError: --loss-aggregation sum has no effect: SGD")
    assert sorted(call(first)[0]) == ["lm loss", "sum loss"]
    sgd.step()
    assert_refused(OTHER_LOSS, second, forward_step_func=squares)
    original, calls = get_forward_backward_func(), []

    @functools.wraps(original)
    def counting(**arguments: Any) -> Any:
        calls.append("called")
        return original(**arguments)

    # Beneath it the flags' hook is called, and refuses the loss function of the loop's own hook.
    own = LossHook(LossAggregation(mode="token_mean")).wrap(counting)
    assert_refused(
        "HostError: a forward step must return functools.partial(loss_func, loss_mask)", first, own
    )
    assert calls == ["called"]
    uninstall()
    assert get_forward_backward_func() is schedules.forward_backward_no_pipelining
    assert sys.argv[1:] == ["--loss-aggregation", "sum"]

    wraps = []

    class Counting(LossHook):
        def wrap(self, schedule: Any) -> Any:
            wraps.append(schedule)
            return super().wrap(schedule)

    def counting_hook(*_: Any) -> LossHook:
        return Counting(LossAggregation(mode="sum"))

    uninstall = install(make_hook=counting_hook, watch_exit=False)
    for model in (first, second, first, first):
        call(model)
    assert wraps == [schedules.forward_backward_no_pipelining.__wrapped__] * 2
    uninstall()

    # Flags that Megatron has read from a YAML file.
    from_yaml = argparse.Namespace(loss_aggregation="sum", loss_aggregation_empty_step="skip")
    sys.argv = ["script"]
    uninstall = install(watch_exit=False)
    with mock.patch.object(global_vars, "_GLOBAL_ARGS", from_yaml):
        assert_says(error_of(sgd.step), "HostError: --loss-aggregation sum has no effect: SGD")
        call(first)
        assert_refused("HostError: skip needs a single model ... got several", second)
    uninstall()

    # An extension takes its share of the loss from Megatron's flags; this loss function has none.
    extension = "distillation:Distillation"
    uninstall = installed("--loss-aggregation-extension", extension)
    teacher = {"logits_load_dir": "logits", "logits_load_kd_loss_alpha": 0.5}
    with mock.patch.object(global_vars, "_GLOBAL_ARGS", argparse.Namespace(**teacher)):
        assert_refused("HostError: one distillation loss", first)
    uninstall()

    uninstall = installed("--loss-aggregation-empty-step", "skip")
    call(first, places=NO_TOKENS)
    assert_says(error_of(sgd.step), "HostError: got SGD, which is about to step without any")
    assert_refused("HostError: skip needs a single model ... got several", second)
    uninstall()


def test_every_model_and_every_loss_is_checked_for_itself_until_an_uninstall() -> None:
    run_host_ranks(train_several_models, 1)
