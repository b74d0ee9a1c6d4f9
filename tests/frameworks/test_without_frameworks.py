"""The adapters of NeMo-RL and AReaL without the frameworks: early refusals.

Their modules are stood in for by the names that the adapters import. Their code runs in
ci/frameworks.sh.
"""

from __future__ import annotations

import math
import sys
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_loss_agg.errors import HostError, OptionError
from megatron_loss_agg.frameworks import prompts_by_tokens, required_release
from megatron_loss_agg.launch.flags import VARIABLE
from tests.frameworks.harness import ROOT

ADAPTERS = ROOT / "megatron_loss_agg" / "frameworks"
NAMES = {
    "nemo_rl": {
        "nemo_rl.algorithms.loss": "ClippedPGLossFn NLLLossFn",
        "nemo_rl.algorithms.loss.interfaces": "LossType",
        "nemo_rl.data.multimodal_utils": "PackedTensor",
    },
    "areal": {
        "areal": "PPOTrainer SFTTrainer",
        "areal.engine.megatron_engine": (
            "MegatronDPOEngine MegatronLMEngine MegatronPPOActor MegatronPPOCritic"
        ),
        "areal.trainer.ppo.actor": "grpo_loss_fn",
        "areal.trainer.ppo.critic": "ppo_loss_fn",
        "areal.trainer.sft.lm_engine": "compute_packed_sft_loss",
        "areal.utils.data": "concat_batch",
        "areal.utils.environ": "is_single_controller",
    },
}
METHODS = (
    *("_create_train_engine", "_create_critic", "_create_actor"),
    *("train_batch", "as_controller", "create_process_group", "ppo_update"),
)
ACTOR = {"enable_tree_training": False, "m2_threshold": None, "ppo_n_minibatches": 1}


def imported(name: str, monkeypatch: pytest.MonkeyPatch, methods: tuple[str, ...] = METHODS) -> Any:
    for path, names in NAMES[name].items():
        module = ModuleType(path)
        for x in names.split():
            setattr(module, x, type(x, (), dict.fromkeys(methods)))
        monkeypatch.setitem(sys.modules, path, module)
    return executed(name)


def executed(name: str) -> Any:
    spec = spec_from_file_location(name, ADAPTERS / f"{name}.py")
    assert spec and spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name, oldest", {"nemo_rl": "0.6.0", "areal": "1.0.4"}.items())
def test_an_older_framework_is_refused_at_import(
    name: str, oldest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    with pytest.raises(HostError, match=f"must be {oldest} or later"):
        executed(name)


@pytest.mark.parametrize(
    "error, words",
    [
        (ModuleNotFoundError("No", name="nemo_rl"), "importable here, got No. Install nemo_rl in"),
        (ModuleNotFoundError("No", name="tqdm"), "importable here, got No. Install tqdm in"),
        (ImportError("no B", name="ray.a"), "importable here, got no B. Install ray.a in"),
        (ModuleNotFoundError("No", name="nemo_rl.new"), "must be 0.6.0 or later, got No. Install"),
        (ImportError("no B", name="nemo_rl.a"), "must be 0.6.0 or later, got no B. Install such"),
        (AttributeError("no b"), "must be 0.6.0 or later, got no b. Install such"),
        (AttributeError("no xpu", obj=math), "importable here, got no xpu. Install math in"),
        (
            AttributeError("no c", obj=ModuleType("nemo_rl.a")),
            "must be 0.6.0 or later, got no c. In",
        ),
    ],
)
def test_a_failed_import_names_the_missing_module_or_the_version(
    error: Exception, words: str
) -> None:
    with pytest.raises(HostError, match=words), required_release("NeMo-RL", "nemo_rl", "0.6.0"):
        raise error


def test_a_failed_import_of_no_module_stays_as_it_is() -> None:
    error = ImportError("cannot load libfoo")
    with (
        pytest.raises(ImportError, match="libfoo"),
        required_release("NeMo-RL", "nemo_rl", "0.6.0"),
    ):
        raise error


@pytest.mark.parametrize("method", METHODS)
def test_a_trainer_without_the_overridden_method_is_refused(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = tuple(x for x in METHODS if x != method)
    with pytest.raises(HostError, match=method):
        imported("areal", monkeypatch, others)


@pytest.mark.parametrize(
    "mode, policy, error",
    [
        ("prompt_mean", {"cfg": {"dtensor_cfg": {"enabled": True}}}, HostError),
        ("prompt_mean", {"train_from_meta": None}, HostError),
        ("rollout_mean", {}, OptionError),
        ("dataset_mean", {}, OptionError),
        ("microbatch_mean", {}, OptionError),
        ("prompt_mean", {}, None),
    ],
)
def test_policies_of_nemo_rl(
    mode: str, policy: Any, error: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = imported("nemo_rl", monkeypatch)
    monkeypatch.setenv(VARIABLE, f"--loss-aggregation {mode}")
    settings = {"cfg": {"megatron_cfg": {"enabled": True}}, "train": None, **policy}
    if error is not None:
        with pytest.raises(error):
            adapter.aggregate_losses(SimpleNamespace(**settings))
    else:
        assert callable(adapter.aggregate_losses(SimpleNamespace(**settings)).train)
    monkeypatch.setenv(VARIABLE, "")
    assert adapter.aggregate_losses(SimpleNamespace(**settings)).train is None


@pytest.mark.parametrize(
    "flags, config, has_prompts, error",
    [
        ("", {}, True, HostError),
        ("prompt_mean", {"ppo_n_minibatches": 2}, True, HostError),
        ("sample_mean", {"ppo_n_minibatches": 2}, True, None),
        ("prompt_mean", {}, True, None),
        ("prompt_mean", {}, False, OptionError),
        ("token_mean", {"enable_tree_training": True}, True, None),
        ("token_mean", {"m2_threshold": 0.1}, True, HostError),
        ("token_mean --loss-aggregation-rejected skip", {}, True, OptionError),
        ("rollout_mean", {}, True, OptionError),
        ("dataset_mean", {}, True, OptionError),
        ("microbatch_mean", {}, True, OptionError),
    ],
)
def test_engines_of_areal(
    flags: str, config: Any, has_prompts: bool, error: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = imported("areal", monkeypatch)
    monkeypatch.setenv(VARIABLE, flags and f"--loss-aggregation {flags}")
    settings = SimpleNamespace(**{**ACTOR, **config})
    if error is None:
        assert adapter._aggregation(settings, has_prompts) is not None
        return
    with pytest.raises(error):
        adapter._aggregation(settings, has_prompts)


def test_prompts_by_tokens_are_told_apart_by_the_tokens_of_the_prompt_alone() -> None:
    tokens = torch.tensor([[0, 5, 6, 7], [5, 6, 8, 9], [0, 5, 7, 7]])
    is_prompt = torch.tensor([[0, 1, 1, 0], [1, 1, 0, 0], [0, 1, 1, 0]]) != 0
    padded, same, other = prompts_by_tokens(tokens, is_prompt)
    assert padded == same != other
