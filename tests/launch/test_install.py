"""What the plugin wraps of the installed Megatron, what it restores, and what it refuses."""

from __future__ import annotations

import argparse
import enum
import functools
import re
import sys
from importlib.metadata import version
from typing import Any

import pytest

from megatron_loss_agg.mcore.extensions.inexact import check_exact
from tests.host.harness import run_host_ranks

pytestmark = pytest.mark.host

Scope = enum.Enum("Scope", ["full_iteration", "attn", "full_iteration_inference"])

REFUSED: dict[str, Any] = {
    "hybrid_context_parallel": True,
    "dynamic_context_parallel": True,
    "overlap_moe_expert_parallel_comm": True,
    "gtp_weight_remat_size": 2,
    "expert_gtp_weight_remat_size": 2,
    "cuda_graph_impl": "full_iteration",
}


def _functions() -> dict[tuple[str, str], Any]:
    """Everything that Megatron's modules and optimizers define."""
    from megatron.core.optimizer import optimizer

    holders = [(n, m) for n, m in sys.modules.items() if n == "megatron" or n[:9] == "megatron."]
    holders += [(n, c) for n, c in vars(optimizer).items() if isinstance(c, type)]
    return {(n, key): value for n, holder in holders for key, value in vars(holder).items()}


def error_of(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def what_is_wrapped() -> dict[str, Any]:
    from megatron.training import arguments

    from megatron_loss_agg.mcore.install import install

    def found() -> tuple[list[tuple[str, str]], bool]:
        """What is not as it was, and whether Megatron has the flags."""
        now = _functions()
        parser = arguments.add_megatron_arguments(argparse.ArgumentParser())
        has_flags = hasattr(parser.parse_known_args([])[0], "loss_aggregation")
        return sorted(key for key in before if now.get(key) is not before[key]), has_flags

    facts: dict[str, Any] = {}
    before = _functions()
    uninstall = install()
    facts["wrapped"] = found()
    uninstall()
    facts["left"] = found()
    uninstall = install()
    before = _functions()
    uninstall_again = install()
    facts["wrapped again"] = found()
    uninstall_again()
    facts["left by the second"] = found()
    uninstall()
    return facts


def what_is_refused() -> dict[str, Any]:
    from megatron.training import arguments, training
    from megatron.training.global_vars import set_args

    from megatron_loss_agg.mcore import flags
    from megatron_loss_agg.mcore.install import install

    facts: dict[str, Any] = {}
    for name, value in REFUSED.items():
        parser = flags.add_arguments(arguments.add_megatron_arguments(argparse.ArgumentParser()))
        args, _ = parser.parse_known_args(["--loss-aggregation", "token_mean"])
        setattr(args, name, value)
        set_args(args)
        uninstall = install()
        facts[name] = error_of(training.get_forward_backward_func)
        facts[f"{name} at the start"] = error_of(training.setup_model_and_optimizer)
        uninstall()
    return facts


def seams_on_host() -> dict[str, Any]:
    """One rank: facts by the names that the tests below ask for."""
    from megatron.core import parallel_state
    from megatron.training import arguments, training
    from megatron.training.global_vars import set_args

    from megatron_loss_agg.mcore.install import install

    parallel_state.initialize_model_parallel()
    set_args(argparse.Namespace())
    facts = what_is_wrapped() | what_is_refused()
    # At last, a host with other seams.
    add_arguments = arguments.add_megatron_arguments
    get_schedule = training.get_forward_backward_func
    del training.get_forward_backward_func
    facts["missing"] = error_of(install)
    facts["untouched"] = arguments.add_megatron_arguments is add_arguments
    training.get_forward_backward_func = get_schedule
    return facts


@functools.cache
def seams() -> dict[str, Any]:
    return run_host_ranks(seams_on_host, 1)[0]


def test_what_is_wrapped_is_restored() -> None:
    schedules = "megatron.core.pipeline_parallel.schedules"
    wrapped = [
        ("ChainedOptimizer", "step"),
        ("FP32Optimizer", "step"),
        ("MegatronOptimizer", "__init__"),
        ("MixedPrecisionOptimizer", "step"),
        (schedules, "forward_backward_no_pipelining"),
        (schedules, "forward_backward_pipelining_with_interleaving"),
        (schedules, "forward_backward_pipelining_without_interleaving"),
        ("megatron.training.arguments", "add_megatron_arguments"),
        ("megatron.training.training", "get_forward_backward_func"),
        ("megatron.training.training", "setup_model_and_optimizer"),
    ]
    assert (seams()["wrapped"], seams()["left"]) == ((wrapped, True), ([], False))
    # A second install, as by the launcher before a script that has the patch, changes nothing.
    assert seams()["wrapped again"] == seams()["left by the second"] == ([], True)


@pytest.mark.parametrize("name", REFUSED)
def test_flags_of_the_host_that_cannot_be_exact_are_refused(name: str) -> None:
    assert seams()[name].startswith("HostError: ")
    assert "--" + name.replace("_", "-") in seams()[name]
    assert re.search("drop|choose", seams()[name])
    # Before the model is built, which takes long.
    assert seams()[f"{name} at the start"] == seams()[name]


def test_a_host_with_other_seams_is_refused_by_name_and_version() -> None:
    error = seams()["missing"]
    # The host adds the commit of the checkout that it runs in to its version.
    assert error.startswith(f"HostError: megatron-core {version('megatron-core')}")
    assert ": megatron.training.training has no get_forward_backward_func; expected" in error
    assert seams()["untouched"]


@pytest.mark.parametrize(
    "flags, refused",
    [
        ({"cuda_graph_impl": "full_iteration"}, "--cuda-graph-impl full_iteration,"),
        # 0.14, and 0.15 to 0.17, where a scope is an enumeration in the end.
        (
            {"enable_cuda_graph": True, "cuda_graph_scope": "full_iteration"},
            "--cuda-graph-scope full_iteration,",
        ),
        (
            {"cuda_graph_impl": "local", "cuda_graph_scope": [Scope.attn, Scope.full_iteration]},
            "--cuda-graph-scope full_iteration,",
        ),
        # Later ones, before their flags are validated.
        (
            {"cuda_graph_impl": "local", "cuda_graph_modules": ["full_iteration"]},
            "--cuda-graph-modules full_iteration,",
        ),
        (
            {"cuda_graph_impl": "local", "cuda_graph_scope_deprecated": ["full_iteration"]},
            "--cuda-graph-scope full_iteration,",
        ),
        ({"cuda_graph_impl": "none", "cuda_graph_scope": "full_iteration"}, None),
        ({"cuda_graph_impl": "local", "cuda_graph_scope": [Scope.full_iteration_inference]}, None),
        ({"enable_cuda_graph": True, "cuda_graph_scope": "full"}, None),
    ],
)
def test_a_graph_of_the_whole_iteration_is_refused_however_it_is_spelled(
    flags: dict[str, Any], refused: str | None
) -> None:
    args = argparse.Namespace(**flags)
    error = error_of(lambda: check_exact(args, args))
    assert error == "none" if refused is None else error.startswith(f"HostError: {refused}")
