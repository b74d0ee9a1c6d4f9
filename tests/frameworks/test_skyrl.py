"""SkyRL's real trainer, Megatron worker, model wrapper and loss, without our patch and with it.

The patch is applied by the command of its page. Every rank runs the trainer, and keeps its own part
of the data, which Ray would send to it.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import logging
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from megatron_loss_agg.presets import PRESETS, presets_of
from tests.frameworks import report
from tests.frameworks.harness import (
    CLIP,
    ENTROPY,
    KL,
    KeepGradients,
    ignore_masks_of_padding,
    patched_copy,
    run_tests,
    use_framework,
)
from tests.frameworks.report import (
    Answer,
    LogProbs,
    Losses,
    Report,
    Run,
    Runs,
    Step,
    answers,
    with_entropy,
)
from tests.host import gpt
from tests.host.harness import run_host_ranks
from tests.host.steps import Places
from tests.peers.standins import PEERS

STANDINS = (
    "ray jaxtyping loguru transformers cloudpathlib pydantic wandb omegaconf skyrl_gym datasets "
    "torchdata aiohttp orjson pybase64 rich httpx huggingface_hub nvidia_resiliency_ext "
    "megatron.bridge"
)
VOCAB = 100  # SkyRL fills microbatches of padding with any tokens below
# With two data-parallel ranks, the first step is padded by a row. Where it is on, SkyRL's filter
# removes a prompt whose rewards are equal. Samples of one rollout are steps of a trajectory.
FILTERED = (
    answers("""
        0 3 0 110111011 1.1
        0 3 0 11 -0.6
        0 3 1 10110111110111011 0.4
        1 5 2 1 -1.3
        1 5 3 000000 0.8
        2 2 4 111011011101 0.9 removed
        2 2 4 10111 0.9 removed
    """),
    answers("""
        3 4 5 11101101111011011101 -0.5
        3 4 6 101 1.2
        4 1 7 00000000 0.3
        5 3 8 11011110111 0.7
    """),
)
ALL = tuple(tuple(replace(a, removed=False) for a in step) for step in FILTERED)
# What SkyRL's mean over microbatches is of: it leaves out the last of an odd number of samples.
EVEN = ((*ALL[0][:-1], replace(ALL[0][-1], removed=True)), ALL[1])
ANSWERS = [answer for step in ALL for answer in step]
PAIRS = 2  # samples of a microbatch
DIVISOR = 2.0  # so small that weights of a microbatch add up to more than 1, to which SkyRL clamps
MODES = {PRESETS[name].mode: name.partition("/")[2] for name in presets_of("skyrl")}
"""Ours, under SkyRL's names."""
PACKED = {"remove_microbatch_padding": True}  # which context parallelism requires
# By tokens, microbatches differ in their number of samples, and a rank gets one of padding.
WAYS: dict[str, dict[str, Any]] = {
    "packed": PACKED,
    "two calls": {"calls": 2},  # of forward_backward in each optimizer step
    "by tokens": {**PACKED, "max_tokens_per_microbatch": 30},
    "clip_cov": {"algorithm.policy_loss_type": "clip_cov"},
}
METRICS = {"policy_loss": "pg_loss", "policy_kl": "kl_loss", "policy_entropy": "entropy_loss"}
"""SkyRL's names, and those of `with_entropy`."""
SETTINGS = {
    **{"strategy": "megatron", "logger": "console"},
    **{"train_batch_size": 6, "policy_mini_batch_size": 3},  # prompts
    "micro_train_batch_size_per_gpu": PAIRS,
    "remove_microbatch_padding": False,
    **{"algorithm.use_kl_loss": True, "algorithm.kl_loss_coef": KL},
    **{"algorithm.use_entropy_loss": True, "algorithm.entropy_loss_coef": ENTROPY},
    **{"algorithm.eps_clip_low": CLIP, "algorithm.eps_clip_high": CLIP},
    # All of a window.
    **{"algorithm.clip_cov.clip_ratio": 1.0, "algorithm.clip_cov.clip_cov_lb": 0.1},
}
"""Of SkyRL's trainer. So are the options of runs, besides ``calls``."""


def use(package: str) -> None:
    from megatron.core.distributed import finalize_model_grads

    use_framework(STANDINS, package)
    logging.disable()  # its handlers are stood in for
    ray: Any = importlib.import_module("ray")
    ray.put = lambda value: value
    bridge: Any = importlib.import_module("megatron.bridge.peft.utils")
    bridge.enable_expert_parallel_grad_sync_in_finalize = lambda chunks: None
    bridge.finalize_model_grads_with_expert_adapter_sync = finalize_model_grads
    ignore_masks_of_padding()


def train(log_probs: list[LogProbs], key: Any, calls: int = 1, **options: Any) -> list[Step]:
    from skyrl.train.trainer import RayPPOTrainer

    aggregation = {f"algorithm.loss_aggregation.{name}": value for name, value in key.items()}
    settings = {**SETTINGS, **options, **aggregation}
    trainer = object.__new__(RayPPOTrainer)
    trainer.cfg, trainer.all_metrics = _configured(settings), {}
    trainer.tokenizer = Namespace(pad_token_id=0)
    model = gpt.ddp_model(False, torch.float32)
    trainer.dispatch = _Dispatch(trainer.cfg.trainer, model, calls)
    texts = [(a.tokens()[: a.prompt_length], a.tokens()[a.prompt_length :]) for a in ANSWERS]
    prompts = [answer.prompt for answer in ANSWERS]
    rollouts = [*(answer.rollout for answer in ANSWERS), None]
    generated = {  # what SkyRL's generator returns
        "prompt_token_ids": [prompt.tolist() for prompt, _ in texts],
        "response_ids": [response.tolist() for _, response in texts],
        # Those of the removed samples are equal.
        "rewards": [prompts[i] + (a.prompt != 2) * i / 99 for i, a in enumerate(ANSWERS)],
        "loss_masks": [list(map(float, answer.mask)) for answer in ANSWERS],
        "is_last_step": [a != b for a, b in itertools.pairwise(rollouts)],
    }
    uids = ["" if prompt == 4 else f"{prompt}-" for prompt in prompts]
    output, uids = trainer.postprocess_generator_output(generated, uids)
    data = trainer.convert_to_training_input(output, uids)
    _fill_in(data, log_probs)
    total = trainer._execute_training_step("policy", data)
    steps = zip(trainer.dispatch.optimizer.gradients, trainer.dispatch.metrics, strict=True)
    return [Step(gradient, {**metrics, "all steps": total}) for gradient, metrics in steps]


def _configured(settings: dict[str, Any]) -> Any:
    from skyrl.train.config import SkyRLTrainConfig
    from skyrl.train.utils.utils import validate_cfg

    cfg = SkyRLTrainConfig()
    for path, value in settings.items():
        *parents, name = path.split(".")
        setattr(functools.reduce(getattr, parents, cfg.trainer), name, value)
    cfg.generator.n_samples_per_prompt = 2
    validate_cfg(cfg)
    # Lets prompts differ in their number of samples. Set after the validation, which would refuse
    # it for means over microbatches: padding, at the end, leaves the microbatches of these steps.
    cfg.generator.step_wise_trajectories = True
    return cfg


class _Dispatch:
    """In place of Ray: gives this rank's worker its own part of what the trainer sends to all."""

    def __init__(self, cfg: Any, model: Any, calls: int) -> None:
        from megatron.core import parallel_state

        self.calls = calls
        self.optimizer = KeepGradients(model)
        self.worker = _worker(cfg, model, self.optimizer)
        self.size = parallel_state.get_data_parallel_world_size()
        self.rank = parallel_state.get_data_parallel_rank()
        self.metrics: list[dict[str, Any]] = []

    def stage_data(self, model: str, data: Any, boundaries: Any) -> Any:
        from skyrl.backends.skyrl_train.distributed.dispatch import MeshDispatch

        return MeshDispatch.stage_chunks(self.size, data, boundaries)

    def get_lcm_dp_size(self) -> int:
        return self.size

    def forward_backward_from_staged(self, model: str, chunks: Any) -> Any:
        mine = chunks[self.rank]
        for part in mine.chunk(-(-len(mine) // self.calls)):
            output = self.worker.forward_backward(part)
        known = METRICS.keys() & output.metrics.keys() if self.calls == 1 else ()  # of all calls
        self.metrics.append({METRICS[name]: output.metrics[name] for name in known})
        return output

    def optim_step(self, model: str) -> Any:
        return self.worker.optim_step()


def _worker(cfg: Any, model: Any, optimizer: KeepGradients) -> Any:
    """As after ``init_model``."""
    from skyrl.backends.skyrl_train.distributed.megatron.megatron_strategy import MegatronStrategy
    from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry
    from skyrl.backends.skyrl_train.workers.megatron import megatron_model_wrapper, megatron_worker

    worker = object.__new__(megatron_worker.MegatronPolicyWorkerBase)
    worker.cfg, worker.optimizer, worker.actor_module = cfg, optimizer, [model]
    worker.scheduler = Namespace(step=lambda increment: None)
    worker.strategy = object.__new__(MegatronStrategy)
    worker.enable_router_replay = worker.enable_sample_support_replay = False
    worker.empty_cuda_cache = False
    loss = PolicyLossRegistry.get(cfg.algorithm.policy_loss_type)
    wrapper = megatron_model_wrapper.MegatronModelWrapper
    worker.model = wrapper(cfg, [model], optimizer, loss)
    return worker


def _fill_in(data: Any, log_probs: list[LogProbs]) -> None:
    """What the trainer's inference steps add; responses are aligned to the right."""
    shape = data["loss_mask"].shape
    for name in ("action_log_probs", "base_action_log_probs", "advantages"):
        data[name] = torch.zeros(shape, dtype=torch.float32)
    old, ref = ([x for step in log_probs for x in step[i]] for i in (0, 1))
    for i, answer in enumerate(ANSWERS):
        where = slice(shape[1] - len(answer.mask), None)
        data["action_log_probs"][i, where] = old[i]
        data["base_action_log_probs"][i, where] = ref[i]
        data["advantages"][i, where] = answer.reward
    data["rollout_logprobs"] = data["action_log_probs"] + 0.01


def policy_alone(*given: Any) -> dict[str, torch.Tensor]:
    policy = with_entropy(*given)["pg_loss"]
    return {"loss": policy, "pg_loss": policy}


FILTER = {"algorithm.zero_variance_filter": True}


def pairs(step: Sequence[Answer]) -> Places:
    """A step's microbatches."""
    present = [i for i, answer in enumerate(step) if not answer.removed]
    return (tuple(itertools.batched(present, PAIRS)),)


def exact(losses: Losses, mode: str, rejected: str = "", **options: Any) -> Run:
    options.setdefault("batch", FILTERED if FILTER.items() <= options.items() else ALL)
    options |= {"places": pairs} if mode == "microbatch_mean" else {}
    return report.exact(losses, mode, rejected, divisor=DIVISOR, **options)


ours = partial(exact, with_entropy, configured=True)


def stock(mode: str, **options: Any) -> Run:
    options |= {"algorithm.max_seq_len": DIVISOR} if mode == "constant" else {}
    return Run(options={"algorithm.loss_reduction": MODES[mode], **options})


def policy(mode: str) -> Run:
    """SkyRL's own mode without KL and entropy, which are means of microbatches."""
    alone = {"algorithm.use_kl_loss": False, "algorithm.use_entropy_loss": False}
    batch = EVEN if mode == "microbatch_mean" else ALL
    return exact(policy_alone, mode, batch=batch, given="", **stock(mode, **alone).options)


FLAGS = {"given": "--loss-aggregation skyrl/prompt_mean"}
SAMPLE_WEIGHTS = "--loss-aggregation sum --loss-aggregation-sample-weights skip"
OWN: Runs = {
    **{mode: stock(mode) for mode in MODES},
    **{f"{mode}, policy alone": policy(mode) for mode in MODES},
    **{way: stock("prompt_mean", **options) for way, options in WAYS.items()},
}
RUNS: Runs = {
    **{mode: ours(mode) for mode in MODES},
    **{way: ours("prompt_mean", **WAYS[way]) for way in WAYS if way != "clip_cov"},
    "flags": exact(with_entropy, "prompt_mean", **FLAGS),
    "rollouts": ours("rollout_mean"),
    "sums": ours("sample_sum"),
    "without empty samples": ours("sample_mean", empty="skip"),
    "filtered": ours("prompt_mean", **FILTER),
    "rejected skipped": ours("prompt_mean", "skip", **FILTER),
    "rejected counted": ours("token_mean", "count", **FILTER),
    SAMPLE_WEIGHTS: Run(SAMPLE_WEIGHTS, refusal="ValueError: .*has flags without a counterpart"),
    "clip_cov": replace(ours("prompt_mean", **WAYS["clip_cov"]), losses=None),
}


@pytest.fixture(scope="session")
def patched(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("skyrl")
    patched_copy("skyrl", folder)
    return str(folder)


@pytest.fixture(scope="session")
def compared(patched: str) -> tuple[list[str], tuple[Any, Any]]:
    """What failed; and all steps of two data-parallel ranks, of stock and of patched code."""
    found = Report(use, train, (str(PEERS), patched), OWN, RUNS, batch=ALL, vocab=VOCAB)
    steps = found.compare("DP 2", 1)
    found.compare("CP 2", 2, **PACKED)
    return found.failures, steps


def test_every_aggregation_is_exact_or_refused_and_without_one_no_bit_changes(
    compared: tuple[list[str], Any],
) -> None:
    failures, _ = compared
    assert failures == [] and len(MODES) == len(presets_of("skyrl"))


def of_all_steps(compared: tuple[Any, tuple[Any, Any]], name: str) -> Iterator[dict[str, float]]:
    """The metrics of a run, of the stock code and of the patched."""
    return (steps[name][0].metrics["all steps"] for steps in compared[1])


def test_losses_follow_the_aggregation_and_other_metrics_stay(compared: Any) -> None:
    theirs, ours = of_all_steps(compared, "prompt_mean")
    total = ours["policy_loss"] + KL * ours["policy_kl"] - ENTROPY * ours["policy_entropy"]
    assert ours["final_loss"] == pytest.approx(total, rel=1e-5)
    followed = {name: ours[name] for name in (*METRICS, "final_loss")}
    assert ours == {**theirs, **followed}


def test_clip_cov_sees_the_advantages_as_they_are(compared: Any) -> None:
    theirs, ours = of_all_steps(compared, "clip_cov")
    # SkyRL rescales them.
    assert ours["loss_metrics/clip_ratio"] > 10 * theirs["loss_metrics/clip_ratio"]


def test_skyrls_unit_tests_pass(patched: str) -> None:
    file = "tests/backends/skyrl_train/utils/test_loss_aggregation.py"
    but_one = ("-k", "not test_tinker")  # which needs Ray and pydantic
    assert run_host_ranks(run_tests, 1, use, patched, file, *but_one) == [0]
