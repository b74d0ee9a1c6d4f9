"""SkyRL's real training loop, Megatron worker, model wrapper and loss, without our adapter and with it.

The adapter runs on SkyRL as it is, and on SkyRL with the seam's patch, which the command of its page
applies. Every rank runs the trainer, and keeps its own part of the data, which Ray would send to it.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import itertools
import logging
import os
import re
import shlex
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from megatron_loss_agg.launch.flags import VARIABLE
from megatron_loss_agg.presets import PRESETS, presets_of
from tests import oracle
from tests.distributed import run_ranks
from tests.frameworks import report
from tests.frameworks.harness import (
    CLIP,
    ENTROPY,
    KL,
    KeepGradients,
    attempt,
    finding_without_megatron,
    ignore_padding_masks,
    is_passed_on,
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
from tests.oracle import Sample
from tests.peers.standins import PEERS, needs_peers

pytestmark = [pytest.mark.extended, needs_peers]

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
}
METRICS = {"policy_loss": "pg_loss", "policy_kl": "kl_loss", "policy_entropy": "entropy_loss"}
"""SkyRL's names, and those of `with_entropy`."""
SETTINGS = {
    **{"strategy": "megatron", "logger": "console", "epochs": 1},
    **{"resume_mode": None, "enable_ray_gpu_monitor": False, "print_example_interval": -1},
    **dict.fromkeys(("eval_interval", "ckpt_interval", "hf_save_interval"), -1),
    "placement.colocate_all": False,
    **{"train_batch_size": 6, "policy_mini_batch_size": 3},  # prompts
    "micro_train_batch_size_per_gpu": PAIRS,
    "remove_microbatch_padding": False,
    **{"algorithm.use_kl_loss": True, "algorithm.kl_loss_coef": KL},
    **{"algorithm.use_entropy_loss": True, "algorithm.entropy_loss_coef": ENTROPY},
    **{"algorithm.eps_clip_low": CLIP, "algorithm.eps_clip_high": CLIP},
}
"""Of SkyRL's trainer. So are the options of runs, besides ``calls`` and those of the generator."""
ALONE = {"algorithm.use_kl_loss": False, "algorithm.use_entropy_loss": False}
BOTH = {"algorithm.reduce_kl_and_entropy": True}
CRITIC = {"strategy": "fsdp", "critic_mini_batch_size": 3, "critic.model.path": "value"}
FILTER = {"algorithm.zero_variance_filter": True}
SHORTEST = ("trainer.strategy=megatron", "trainer.logger=console")
ADAPTER = "megatron_loss_agg.frameworks.skyrl"


def use(package: str) -> None:
    from megatron.core.distributed import finalize_model_grads

    use_framework(STANDINS, package)
    logging.disable()  # its handlers are stood in for
    ray: Any = importlib.import_module("ray")
    ray.put = lambda value: value
    bridge: Any = importlib.import_module("megatron.bridge.peft.utils")
    bridge.enable_expert_parallel_grad_sync_in_finalize = lambda chunks: None
    bridge.finalize_model_grads_with_expert_adapter_sync = finalize_model_grads
    ignore_padding_masks()


def adapt() -> None:
    importlib.import_module(ADAPTER)


def train(log_probs: list[LogProbs], _: Any, calls: int = 1, **options: Any) -> list[Step]:
    cfg = _configured({**SETTINGS, **options})
    main = sys.modules.get(ADAPTER) or importlib.import_module("skyrl.train.entrypoints.main_base")
    experiment = object.__new__(getattr(main, "Experiment", None) or main.BasePPOExp)
    nothing = dict.fromkeys(("inference_engine_client", "generator", "colocate_pg"))
    trainer = experiment.get_trainer(
        cfg=cfg,
        tracker=Namespace(log=lambda log, **_: logs.append(log), finish=lambda: None),
        tokenizer=Namespace(pad_token_id=0),
        train_dataset=None,
        eval_dataset=None,
        **nothing,
    )
    logs: list[dict[str, Any]] = []
    model = gpt.ddp_model(False, torch.float32)
    trainer.dispatch = _Dispatch(cfg.trainer, model, calls)
    uids = [f"{prompt}-" for prompt in dict.fromkeys(answer.prompt for answer in ANSWERS)]
    trainer.train_dataloader = [
        [{"prompt": "", "env_class": None, "env_extras": None, "uid": uid} for uid in uids]
    ]
    trainer.total_training_steps = 1
    trainer.init_weight_sync_state = lambda: None
    trainer.generate = _generate
    trainer.fwd_logprobs_values_reward = partial(_fill_in, log_probs)
    trainer.compute_advantages_and_returns = lambda data: data  # they are filled in, too
    asyncio.run(trainer.train())
    (log,) = logs
    total = {
        name.removeprefix("policy/"): x for name, x in log.items() if name.startswith("policy/")
    }
    steps = zip(trainer.dispatch.optimizer.gradients, trainer.dispatch.metrics, strict=True)
    return [Step(gradient, {**metrics, "all steps": total}) for gradient, metrics in steps]


async def _generate(_: Any) -> dict[str, Any]:
    """The output of SkyRL's generator."""
    texts = [(a.tokens()[: a.prompt_length], a.tokens()[a.prompt_length :]) for a in ANSWERS]
    prompts = [answer.prompt for answer in ANSWERS]
    rollouts = [*(answer.rollout for answer in ANSWERS), None]
    return {
        "prompt_token_ids": [prompt.tolist() for prompt, _ in texts],
        "response_ids": [response.tolist() for _, response in texts],
        # Those of the removed samples are equal.
        "rewards": [prompts[i] + (a.prompt != 2) * i / 99 for i, a in enumerate(ANSWERS)],
        "loss_masks": [list(map(float, answer.mask)) for answer in ANSWERS],
        "is_last_step": [a != b for a, b in itertools.pairwise(rollouts)],
        "trajectory_ids": [Namespace(instance_id=f"{prompt}-") for prompt in prompts],
    }


def _configured(settings: dict[str, Any]) -> Any:
    from skyrl.train.config import SkyRLTrainConfig
    from skyrl.train.utils.utils import validate_cfg

    cfg = SkyRLTrainConfig()
    for path, value in settings.items():
        *parents, name = path.split(".")
        if parents != ["generator"]:
            setattr(functools.reduce(getattr, parents, cfg.trainer), name, value)
    cfg.generator.n_samples_per_prompt = 2
    cfg.generator.inference_engine.enable_ray_prometheus_stats = False
    validate_cfg(cfg)
    # Lets prompts differ in their number of samples. Set after the validation, which would refuse
    # it for means over microbatches: padding, at the end, leaves the microbatches of these steps.
    cfg.generator.step_wise_trajectories = True
    merge = "generator.merge_stepwise_output"
    cfg.generator.merge_stepwise_output = settings.get(merge, False)
    return cfg


class _Dispatch:
    """In place of Ray: gives this rank's worker its part of the trainer's batch."""

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

    async def save_weights_for_sampler(self) -> None: ...

    def get_timing_metrics(self) -> dict[str, float]:
        return {}

    def empty_cache(self) -> None: ...

    def finalize_pending_saves(self, model: str) -> None: ...


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


def _fill_in(log_probs: list[LogProbs], data: Any) -> Any:
    """Add the columns of the trainer's inference steps; responses are aligned to the right."""
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
    return data


def policy_alone(*sample: Any) -> dict[str, torch.Tensor]:
    policy = with_entropy(*sample)["pg_loss"]
    return {"loss": policy, "pg_loss": policy}


def pairs(step: Sequence[Answer]) -> Places:
    """A step's microbatches."""
    present = [i for i, answer in enumerate(step) if not answer.removed]
    return (tuple(itertools.batched(present, PAIRS)),)


def exact(losses: Losses, mode: str, rejected: str = "", **options: Any) -> Run:
    options.setdefault("batch", FILTERED if FILTER.items() <= options.items() else ALL)
    options |= {"places": pairs} if mode == "microbatch_mean" else {}
    return report.exact(losses, mode, rejected, divisor=DIVISOR, **options)


def stock(mode: str, **options: Any) -> Run:
    options |= {"algorithm.max_seq_len": DIVISOR} if mode == "constant" else {}
    return Run(options={"algorithm.loss_reduction": MODES[mode], **options})


def stock_is_exact(losses: Losses, mode: str, **options: Any) -> Run:
    batch = EVEN if mode == "microbatch_mean" else ALL
    return exact(losses, mode, batch=batch, our_flags="", **stock(mode, **options).options)


def own(run: Callable[..., Run], **options: Any) -> Runs:
    return {
        **{mode: run(mode, **options) for mode in MODES},
        **{way: run("prompt_mean", **options, **WAYS[way]) for way in WAYS},
    }


def ours(losses: Losses, **options: Any) -> Runs:
    followed = [mode for mode in MODES if mode != "microbatch_mean"]
    run = partial(exact, losses, **options)
    return {
        **{mode: run(mode) for mode in followed},
        **{way: run("prompt_mean", **WAYS[way]) for way in WAYS},
        "preset": run("prompt_mean", our_flags="--loss-aggregation skyrl/prompt_mean"),
        "rollouts": run("rollout_mean"),
        "sums": run("sample_sum"),
        "sum": run("sum"),
        "without empty samples": run("sample_mean", empty="skip"),
        "filtered": run("prompt_mean", **FILTER),
        "rejected skipped": run("prompt_mean", "skip", **FILTER),
        "rejected counted": run("token_mean", "count", **FILTER),
    }


def refused(error: str, text: str = report.flags("prompt_mean"), **options: Any) -> Run:
    return Run(text, {**ALONE, **options}, refusal=error)


REFUSED: Runs = {
    "KL": refused("HostError: .*use_kl_loss must be false", **{"algorithm.use_kl_loss": True}),
    "entropy": refused(
        "HostError: .*use_entropy_loss must be false", **{"algorithm.use_entropy_loss": True}
    ),
    **{
        name: refused(f"HostError: .*got {name}. Choose", **{"algorithm.policy_loss_type": name})
        for name in ("clip_cov", "kl_cov", "cross_entropy")
    },
    "another reduction": refused(
        "HostError: .*loss_reduction must be token_mean", **stock("sample_mean").options
    ),
    "critic": refused(
        "HostError: .*critic.model.path must be unset",
        strategy="fsdp",
        critic_mini_batch_size=3,
        **{"critic.model.path": "value"},
    ),
    "per token": refused(
        "HostError: .*calculate_per_token_loss must be off",
        **{"policy.megatron_config.transformer_config_kwargs": {"calculate_per_token_loss": True}},
    ),
    "microbatches": refused(
        "OptionError: .*got microbatch .skyrl/token_mean_legacy.",
        "--loss-aggregation skyrl/token_mean_legacy",
    ),
    "data sets": refused("OptionError: .*got dataset", "--loss-aggregation dataset_mean"),
    "weights of samples": refused(
        "OptionError: .*sample-weights needs weights",
        "--loss-aggregation sum --loss-aggregation-sample-weights skip",
    ),
    "rejected without filter": refused(
        "OptionError: .*zero_variance_filter=true rejects, got false",
        report.flags("token_mean", "skip"),
    ),
    "rejected and merged": refused(
        "OptionError: .*merge_stepwise_output=true",
        report.flags("token_mean", "skip"),
        **FILTER,
        **{"generator.merge_stepwise_output": True},
    ),
    "negative coefficients": refused(
        "OptionError: coefficients that scale advantages must be >= 0",
        f"--loss-aggregation custom --loss-aggregation-function {__name__}:negative",
    ),
}


def negative(samples: Any) -> torch.Tensor:
    return torch.full_like(samples.mask_sum, -1.0)


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("skyrl")
    patched_copy("skyrl", folder)
    return str(folder)


def test_the_policy_loss_is_exact_in_skyrl_as_it_is() -> None:
    """Every aggregation is exact or refused; without one no bit changes."""
    skyrls = own(partial(stock_is_exact, policy_alone), **ALONE)
    runs = {**ours(policy_alone, **ALONE), **REFUSED}
    comparison = Report(
        use, train, (str(PEERS), str(PEERS)), skyrls, runs, batch=ALL, vocab=VOCAB, adapt=adapt
    )
    comparison.compare("DP 2", 1)
    comparison.compare("CP 2", 2, **PACKED)
    assert comparison.failures == [] and len(MODES) == len(presets_of("skyrl"))


def test_with_the_seam_kl_and_entropy_are_exact_too(patched: str) -> None:
    """With our aggregations, and with SkyRL's own."""
    some = ("rollouts", "sum", "rejected counted", *MODES, *WAYS)
    runs = {name: run for name, run in ours(with_entropy, **BOTH).items() if name in some}
    runs |= {f"SkyRL's {mode}": stock_is_exact(with_entropy, mode, **BOTH) for mode in MODES}
    skyrls = {mode: stock(mode) for mode in ("prompt_mean", "token_mean")}
    checkouts = str(PEERS), patched
    comparison = Report(use, train, checkouts, skyrls, runs, batch=ALL, vocab=VOCAB, adapt=adapt)
    by_code = comparison.compare("DP 2", 1)
    comparison.compare("CP 2", 2, **PACKED)
    assert comparison.failures == []
    before, after = (steps["prompt_mean"][0].metrics["all steps"] for steps in by_code)
    total = after["policy_loss"] + KL * after["policy_kl"] - ENTROPY * after["policy_entropy"]
    assert after["final_loss"] == pytest.approx(total, rel=1e-5)
    followed = {name: after[name] for name in (*METRICS, "final_loss")}
    assert after == {**before, **followed}  # all others stay


def test_skyrls_unit_tests_pass(patched: str) -> None:
    file = "tests/backends/skyrl_train/utils/test_reduce_kl_and_entropy.py"
    assert run_host_ranks(run_tests, 1, use, patched, file) == [0]


def test_a_policy_loss_is_proportional_to_advantages_or_refused() -> None:
    run_host_ranks(compare_losses, 1)


def compare_losses() -> None:
    """Compare the loss of weighted advantages with the weighted sum of the samples' losses."""
    use(str(PEERS))
    from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry, PolicyLossType
    from skyrl.train.config import SkyRLTrainConfig

    from megatron_loss_agg.frameworks.skyrl import PROPORTIONAL

    config = SkyRLTrainConfig().trainer.algorithm
    correction = config.off_policy_correction
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, 5, 8, generator=generator, dtype=torch.float64)
    log_probs = draw() - 3
    old, rollout = log_probs + 0.3 * draw(), log_probs + 0.3 * draw()
    advantages, mask = 10 * draw(), (draw() < 0.7).double()
    weights = torch.tensor([0.01, 3.0, 0.0, 0.5, 20.0], dtype=torch.float64).unsqueeze(-1)
    names = {str(name) for name in PolicyLossType}
    assert names - PROPORTIONAL == {"clip_cov", "kl_cov", "cross_entropy"} and names > PROPORTIONAL
    for name in names:
        config.policy_loss_type = name
        correction.sequence_mask_metric = "geometric" if name in PROPORTIONAL else None
        correction.tis_ratio_type = "sequence" if name in PROPORTIONAL else None
        correction.geo_mask_low, correction.geo_mask_high = 0.9, 1.1
        loss = PolicyLossRegistry.get(name)

        def of(some: torch.Tensor, loss: Any = loss) -> torch.Tensor:
            return loss(log_probs, old, some, config, mask, rollout)[0]

        weighted = sum(
            weights[i] * of(advantages * (torch.arange(5) == i)[:, None]) for i in range(5)
        )
        is_proportional = of(weights * advantages).isclose(weighted, rtol=1e-9).item()
        assert is_proportional == (name in PROPORTIONAL), name


def test_skyrls_entry_point_starts_it_by_the_settings_of_the_page() -> None:
    run_host_ranks(start, 1)


def start() -> None:
    use_framework(STANDINS.replace("omegaconf ", ""), str(PEERS))
    from skyrl.train.entrypoints import main_base

    started: list[Any] = []
    ray: Any = importlib.import_module("ray")
    ray.get = lambda value: value
    ray.remote = lambda **options: (
        lambda function: Namespace(remote=lambda cfg: started.append((options, function, cfg)))
    )
    adapter = importlib.import_module(ADAPTER)
    adapter.initialize_ray = lambda cfg: None  # type: ignore[attr-defined]
    _, *words = shlex.split(adapter.SETTINGS.replace("\\\n", "").replace(" ...", ""))
    variable, flags = words[0].split("=", 1)
    os.environ[variable] = flags
    sys.argv = ["main_base", *(x for x in words if x.startswith("trainer.")), *SHORTEST]
    main_base.main()
    (options, function, cfg), *_ = started
    assert function is adapter.run and cfg.trainer.strategy == "megatron"
    assert options["runtime_env"]["env_vars"] == {variable: flags}
    sys.argv.append("trainer.algorithm.use_kl_loss=true")
    error = attempt(main_base.main, errors=ValueError)
    assert error.startswith("HostError") and len(started) == 1


def passed_on() -> dict[str, bool]:
    """For each function without the variable, whether SkyRL's gets the same objects."""
    use(str(PEERS))
    os.environ[VARIABLE] = ""
    adapter = importlib.import_module(ADAPTER)
    from skyrl.train.entrypoints import main_base
    from skyrl.train.trainer import RayPPOTrainer

    trainer = object.__new__(adapter.ExactTrainer)
    trainer.aggregation = trainer.checked_aggregation(None)
    output, uids = {"loss_masks": [[1]]}, ["a"]
    sys.argv = ["main_base", f"trainer.override_entrypoint={ADAPTER}", *SHORTEST]
    methods = {
        "postprocess_generator_output": (output, uids),
        "convert_to_training_input": (output, uids),
        "_normalize_advantages": ({"loss_mask": torch.ones(1, 1)}, [(0, 1)], None),
    }
    found = {
        name: is_passed_on(RayPPOTrainer, name, getattr(trainer, name), *args)
        for name, args in methods.items()
    }
    found["main"] = is_passed_on(main_base, "main", adapter.main)
    assert sys.argv == ["main_base", *SHORTEST]
    return found


def test_without_the_variable_skyrls_functions_get_the_same_objects() -> None:
    (found,) = run_host_ranks(passed_on, 1)
    assert all(found.values()), found


def test_doctor_needs_no_megatron_where_skyrl_starts() -> None:
    ((level, text),) = run_ranks(finding_without_megatron, 1, STANDINS, str(PEERS), "skyrl")
    assert level != "FAIL", text


def test_an_older_skyrl_is_refused_at_import() -> None:
    (error,) = run_host_ranks(import_without_extension_point, 1)
    assert re.match("HostError: SkyRL must be 0.2.0 or later, .*'_normalize_advantages'", error)


def import_without_extension_point() -> str:
    use(str(PEERS))
    del importlib.import_module("skyrl.train.trainer").RayPPOTrainer._normalize_advantages
    return str(attempt(importlib.import_module, ADAPTER, errors=ValueError))


def test_the_fully_asynchronous_trainer_weighs_advantages_too() -> None:
    step = [Sample(answer.trained_mask(), answer.prompt, answer.rollout) for answer in ANSWERS]
    (weights,) = oracle.step_weights("prompt_mean", [[step]])[0]
    (advantages,) = run_host_ranks(train_asynchronously, 1)
    for row, w in zip(advantages, weights, strict=False):  # the last row is padding
        assert row[len(row) - len(w) :].tolist() == pytest.approx(w)


def train_asynchronously() -> torch.Tensor:
    """The advantages that the workers get, where all were 1."""
    use(str(PEERS))
    os.environ[VARIABLE] = "--loss-aggregation prompt_mean"
    adapter = importlib.import_module(ADAPTER)
    trainer = object.__new__(adapter.ExactAsyncTrainer)
    cfg = trainer.cfg = _configured({**SETTINGS, **ALONE, "policy_mini_batch_size": 6})
    trainer.aggregation = trainer.checked_aggregation(cfg)
    trainer.all_metrics, trainer.all_timings, trainer.global_step = {}, {}, 1
    trainer.tokenizer, staged = Namespace(pad_token_id=0), []
    trainer.dispatch = Namespace(
        get_lcm_dp_size=lambda: 2,
        stage_data=lambda model, data, boundaries: staged.append(data) or [],
        empty_cache=lambda: None,
    )
    trainer.fwd_logprobs_values_reward = lambda data: data

    def unit_advantages(data: Any) -> Any:
        data["advantages"] = torch.ones_like(data["loss_mask"])
        return data

    trainer.compute_advantages_and_returns = unit_advantages
    output = asyncio.run(_generate(None))
    uids = [x.instance_id for x in output["trajectory_ids"]]
    output, uids = trainer.postprocess_generator_output(output, uids)
    data = trainer.convert_to_training_input(output, uids)
    asyncio.run(trainer._run_training(data))
    (data,) = staged
    result: torch.Tensor = data["advantages"] * data["loss_mask"]
    return result
