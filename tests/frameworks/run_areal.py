"""AReaL's actor, SFT engine, batches, losses and training step on a real GPT over two ranks.

    python -m tests.frameworks.run_areal STOCK PATCHED TABLE

Two checkouts, without and with the patch; the table goes to a file. The training step is that of
its Megatron engine. Stood in for: Ray, mbridge and Megatron-Bridge, which load models, the
inference servers, and the optimizer, which keeps the gradient that it is given.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tests.frameworks.checkout_report import (
    MODES,
    REFUSALS,
    STEPS,
    Answer,
    LogProbs,
    Report,
    Run,
    Steps,
    exact,
    nll,
    refused,
    stock,
)
from tests.frameworks.harness import CLIP, KL, KeepGradients, Terms, attempt, grpo
from tests.peers.standins import use_peers

STANDINS = (
    "ray transformers mbridge megatron.bridge wandb torch_memory_saver aiohttp httpx requests "
    "datasets tenacity flask torchdata lark uvloop numba aiofiles openai safetensors peft swanlab "
    "trackio tensorboardX tabulate pybase64"
)
CISPO = {"use_cispo_loss": True}
SFT = "SFT"


def train(root: str, cp: int, runs: list[Run], log_probs: list[LogProbs]) -> list[Steps | str]:
    """On a rank; see `checkout_report.Train`."""
    use_peers(STANDINS)
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    sys.path.insert(0, root)
    from tests.host import gpt

    gpt.initialize(cp)
    return [attempt(_train, run, cp, log_probs, errors=REFUSALS) for run in runs]


def _train(run: Run, cp: int, log_probs: list[LogProbs]) -> Steps:
    from megatron.core import mpu

    from tests.host import gpt

    options = {"engine": "MegatronPPOActor", **run.options}
    engine = _engine(options.pop("engine"), _aggregation(run.flags), **options)
    optimizer = _set_up(engine, gpt.ddp_model(dtype=torch.float32), cp)
    losses = _keep_losses(engine)
    rank, ranks = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
    for step, given in zip(STEPS, log_probs, strict=True):
        groups = _groups(step, given)[rank::ranks]
        if hasattr(engine, "train_lm"):
            engine.train_lm(groups)
        else:
            engine.ppo_update([_advantages(x) for x in engine.compute_advantages(groups)])
    return list(zip(optimizer.gradients, losses, strict=True))


def _aggregation(flags: str) -> dict[str, Any]:
    """``flags`` as the key `loss_aggregation` of the configuration."""
    if not flags:
        return {}
    from areal.api.cli_args import LossAggConfig

    words = flags.split()
    names = [word.removeprefix("--loss-aggregation").strip("-") or "mode" for word in words[::2]]
    values: dict[str, Any] = dict(zip(names, words[1::2], strict=True))
    if "divisor" in values:
        values["divisor"] = float(values["divisor"])
    return {"loss_aggregation": LossAggConfig(**values)}


def _engine(name: str, aggregation: dict[str, Any], **options: Any) -> Any:
    """One of AReaL's own, with a configuration of its own."""
    from areal.api import cli_args
    from areal.engine import fsdp_engine, megatron_engine
    from areal.experimental.engine import archon_engine

    config, actor = cli_args.TrainEngineConfig, {}
    if "Actor" in name:
        config, actor = cli_args.PPOActorConfig, _ACTOR
    elif "DPO" in name:
        config = cli_args.DPOEngineConfig
    modules = {"FSDP": fsdp_engine, "Archon": archon_engine}
    module = next((x for key, x in modules.items() if key in name), megatron_engine)
    settings = {**_CONFIG, **actor, **aggregation, **options}
    settings["mb_spec"] = cli_args.MicroBatchSpec(max_tokens_per_mb=40)
    return getattr(module, name)(config(**settings))


_CONFIG: dict[str, Any] = {
    "experiment_name": "test",
    "trial_name": "test",
    "backend": "megatron:d1",
    "dtype": "float32",
}
_ACTOR: dict[str, Any] = {
    "ppo_n_minibatches": 1,
    "eps_clip": CLIP,
    "eps_clip_higher": CLIP,
    "kl_ctl": 0.0,
    "recompute_logprob": True,
    "use_decoupled_loss": False,
}


def _set_up(engine: Any, ddp: Any, cp: int) -> Any:
    """What its `initialize` does after it has loaded a model; returns the optimizer."""
    from areal.api import ParallelStrategy
    from areal.engine.megatron_engine import _MegatronModelList

    optimizer = KeepGradients(ddp)
    optimizer.get_loss_scale = lambda: torch.tensor(1.0)
    engine.create_process_group(ParallelStrategy(context_parallel_size=cp))
    vars(engine).update(
        model=_MegatronModelList([ddp]),
        optimizer=optimizer,
        device=torch.device("cpu"),
        use_padded_seq=False,
    )
    return optimizer


def _keep_losses(engine: Any) -> list[dict[str, float]]:
    """Of each training step, which AReaL does not report: what it calls backward on, unscaled."""
    from megatron.core import mpu

    kept: list[dict[str, float]] = []
    of_step: list[Tensor] = []
    compute, step = engine._compute_logprobs_and_loss, engine.optimizer_step

    def compute_and_keep(*args: Any, loss_multiplier: float) -> Tensor:
        loss = compute(*args, loss_multiplier=loss_multiplier)
        of_step.append(loss.detach() / loss_multiplier)
        return loss

    def step_and_sum_up() -> Any:
        total = torch.stack(of_step).sum()
        dist.all_reduce(total, group=mpu.get_data_parallel_group(with_context_parallel=True))
        kept.append({"loss": total.item()})
        of_step.clear()
        return step()

    engine._compute_logprobs_and_loss, engine.optimizer_step = compute_and_keep, step_and_sum_up
    return kept


def _groups(step: Sequence[Answer], log_probs: LogProbs) -> list[dict[str, Any]]:
    """A trajectory of each prompt, with all its samples, as the rollout makes them."""
    by_prompt = sorted(zip(step, *log_probs, strict=True), key=lambda sample: sample[0].prompt)
    return [
        _trajectory(list(samples))
        for _, samples in groupby(by_prompt, key=lambda sample: sample[0].prompt)
    ]


def _trajectory(samples: list[tuple[Answer, Tensor, Tensor]]) -> dict[str, Any]:
    answers = [answer for answer, _, _ in samples]
    tokens = [answer.tokens() for answer in answers]

    def padded(values: Sequence[Tensor]) -> Tensor:
        return pad_sequence(list(values), batch_first=True)

    def placed(values: Sequence[Tensor], shift: int = 0) -> Tensor:
        """At the answers' tokens, or ``shift`` before them."""
        pairs = zip(answers, values, strict=True)
        ends = [(a.prompt_length - shift, shift, value) for a, value in pairs]
        return padded([torch.nn.functional.pad(value, (b, e)) for b, e, value in ends])

    old, ref = ([sample[i] for sample in samples] for i in (1, 2))
    return {
        "input_ids": padded(tokens),
        "attention_mask": padded([torch.ones(len(x), dtype=torch.bool) for x in tokens]),
        "loss_mask": placed([torch.tensor(answer.kept()).int() for answer in answers]),
        "logprobs": placed(old),
        # Of the policy and of a teacher, by their forward passes: where a token is predicted.
        "prox_logp": placed(old, shift=1),
        "teacher_logp": placed(ref, shift=1),
        "distill_loss_weight": KL,
        "rewards": torch.tensor([answer.reward for answer in answers]),
    }


def _advantages(group: dict[str, Any]) -> dict[str, Any]:
    """The rewards: AReaL's own advantages are 0 where an answer's last token is masked."""
    rewards = group["rewards"].unsqueeze(-1)
    return {**group, "advantages": rewards.expand_as(group["advantages"]).contiguous()}


def with_teacher(lp: Tensor, entropy: Tensor, old: Tensor, ref: Tensor, reward: float) -> Terms:
    """A clipped policy loss, and the distance to a teacher."""
    return {"loss": grpo(lp, entropy, old, ref, reward)["policy"] + KL * (lp - ref)}


def cispo(lp: Tensor, entropy: Tensor, old: Tensor, ref: Tensor, reward: float) -> Terms:
    ratio = (lp - old).exp().clamp(1 - CLIP, 1 + CLIP).detach()
    return {"loss": -ratio * reward * lp + KL * (lp - ref)}


def main(without: str, patched: str, table: str) -> None:
    modes = [mode for mode in MODES if mode != "rollout_mean"]
    sft = {"engine": "MegatronLMEngine"}
    others = ("FSDPPPOActor", "ArchonPPOActor", "MegatronRWEngine", "MegatronDPOEngine")
    report = Report(
        "AReaL",
        train,
        (without, patched),
        own={
            "token_mean": stock(with_teacher, "token_mean"),
            "token_mean, CISPO": stock(cispo, "token_mean", **CISPO),
            SFT: (Run("", sft), None),  # divides by 1e-5 + the tokens of a microbatch
        },
        runs={
            **{mode: exact(with_teacher, mode) for mode in modes},
            **{f"{mode}, CISPO": exact(cispo, mode, **CISPO) for mode in modes},
            **{f"{mode}, {SFT}": exact(nll, mode, **sft) for mode in ("sample_mean", "constant")},
            "sample_mean, without empty ones": exact(with_teacher, "sample_mean", empty="skip"),
            "rollout_mean": refused("rollout_mean"),
            f"prompt_mean, {SFT}": refused("prompt_mean", **sft),
            "tree training": refused("token_mean", enable_tree_training=True),
            **{name: refused("token_mean", engine=name) for name in others},
        },
    )
    report.compare("DP 2", 1)
    report.compare("CP 2", 2)
    report.close(table)


if __name__ == "__main__":
    main(*sys.argv[1:])
