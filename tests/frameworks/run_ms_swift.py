"""What the ranks of `test_ms_swift` do: steps of ms-swift's trainer, and their fp64 reference."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron_loss_agg.mcore.flags import VARIABLE
from tests.frameworks.reference import references, text_of, token_values
from tests.host.harness import error_of
from tests.host.reference import Gradient, Reference
from tests.host.steps import EMPTY, PLACES, Places, sequences

ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / "examples/ms_swift_plugin.py"
REFUSED = (
    ("Trainer", "seq_cls"),
    ("MegatronEmbeddingTrainer", "embedding"),
    ("MegatronRerankerTrainer", "reranker"),
)


class Case(NamedTuple):
    cp: int
    layout: str  # rows, padding_free, or packing
    per_token: bool
    masks: str = "01"  # see `sequences`; the fractions are ms-swift's loss_scale
    dft: bool = False
    pp: int = 1

    @property
    def places(self) -> Places:
        return PLACES[2 // self.cp // self.pp]


class Outcome(NamedTuple):
    gradient: Gradient
    logs: dict[str, float]


def trainer_for(case: Case, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    from tests.frameworks import ms_swift_host as host
    from tests.host import gpt

    gpt.initialize(cp=case.cp, pipeline_model_parallel_size=case.pp)
    torch.set_default_dtype(dtype)
    settings = {
        "packing": case.layout == "packing",
        "fp8_recipe": "mxfp8",  # without FP8 all that it does is padding, also of packs
        "calculate_per_token_loss": case.per_token,
        "num_microbatches": len(case.places[0]),
        "pipeline_model_parallel_size": case.pp,
        "enable_dft_loss": case.dft,
        "enable_channel_loss": case.dft,
        **changes,
    }
    args = host.arguments(case.cp, case.layout != "rows", dtype, **settings)
    trainer = host.Trainer(args, host.template_for(args))
    trainer.setup_model_training()
    return trainer


def encoded(i: int, masks: str) -> dict[str, Any]:
    """A sample as ms-swift's template encodes it: labels at their own token, -100 where masked."""
    sequence = sequences(masks)[i]
    tokens, scale = [*sequence.tokens.tolist(), int(sequence.labels[-1])], sequence.sample.mask
    labels = [token if m else -100 for token, m in zip(tokens, (0, *scale), strict=True)]
    sample = {"input_ids": tokens, "labels": labels, "length": len(tokens)}
    return sample if masks == "01" else {**sample, "loss_scale": [0.0, *scale]}


def batches(trainer: Any, case: Case) -> Any:
    """This rank's batches, from ms-swift's data collator."""
    from megatron.core import mpu

    place = case.places[mpu.get_data_parallel_rank()]
    samples = [[encoded(i, case.masks) for i in microbatch] for microbatch in place]
    return iter([trainer.data_collator([s] if trainer.args.packing else s) for s in samples])


def load_plugin(trainer: Any, flags: str | None) -> None:
    """As ms-swift does with --external_plugins."""
    if flags is not None:
        os.environ[VARIABLE] = flags
    trainer.args.external_plugins = [str(PLUGIN)]
    trainer.args._import_external_plugins()


def one_step(trainer: Any, case: Case) -> Outcome:
    from tests.host import gradients

    trainer.run_train_step(batches(trainer, case), None)
    (model,) = trainer.wrapped_models
    gradient = gradients.of(model)
    return Outcome(gradient, dict(trainer.callbacks[0].logs))


def stock_and_hooked(case: Case, masks: Sequence[str], flags: str) -> dict[Any, Outcome]:
    """Steps without the plugin, then with it; their logs with those of an evaluation."""
    trainer = trainer_for(case)
    found = {("stock", kind): one_step(trainer, case._replace(masks=kind)) for kind in masks}
    load_plugin(trainer, flags)
    for kind in masks:
        hooked = one_step(trainer, of_kind := case._replace(masks=kind))
        trainer.evaluate(batches(trainer, of_kind))
        found["hooked", kind] = hooked._replace(logs=dict(trainer.callbacks[0].logs))
    return found


def without_effect(flags: str | None) -> tuple[str, str]:
    """What the plugin changes without its variable; with it, in a worker of a data loader."""
    from megatron.core.pipeline_parallel import schedules
    from torch.utils.data import _utils

    trainer = trainer_for(case := Case(1, "rows", True))
    before, schedule = one_step(trainer, case), schedules.forward_backward_no_pipelining
    if flags is not None:
        _utils.worker._worker_info = object()
    load_plugin(trainer, flags)
    after = one_step(trainer, case)
    same = all(before.gradient[name].equal(g) for name, g in after.gradient.items())
    same = same and before.logs == after.logs
    stock = schedules.forward_backward_no_pipelining is schedule
    return "bit-identical" if same else "changed", "stock schedule" if stock else "hooked schedule"


def empty_step(flags: str) -> tuple[Gradient, Gradient, dict[str, float]]:
    """Parameters before and after a step whose tokens are all masked, and its logs."""
    decay = dict.fromkeys(("weight_decay", "start_weight_decay", "end_weight_decay"), 0.1)
    trainer = trainer_for(Case(1, "rows", True), num_microbatches=1, lr=0.1, **decay)
    load_plugin(trainer, flags)
    (model,) = trainer.unwrapped_models
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer.run_train_step(iter([trainer.data_collator([encoded(EMPTY, "01")])]), None)
    after = {name: p.detach().clone() for name, p in model.named_parameters()}
    return before, after, dict(trainer.callbacks[0].logs)


def refusals(flags: str) -> list[str | None]:
    """What the trainers `REFUSED` raise when they are made."""
    from swift.megatron import trainers

    from tests.frameworks import ms_swift_host as host
    from tests.host import gpt

    gpt.initialize()
    errors = []
    for name, task in REFUSED:
        args = host.arguments(1, False, torch.float32, task_type=task)
        template = host.template_for(args)
        args.external_plugins = [str(PLUGIN)]
        os.environ[VARIABLE] = flags
        args._import_external_plugins()
        cls = host.Trainer if name == "Trainer" else getattr(trainers, name)
        errors.append(error_of(cls, args, template))
    return errors


def reference() -> dict[str, Reference]:
    """Of every sample alone, in fp64: ``loss``, and ``dft`` scaled by the token's probability."""
    (model,) = trainer_for(Case(1, "rows", True), torch.float64).unwrapped_models
    log_probs = (token_values(model, text_of(sequence), 1)[0] for sequence in sequences())
    terms = ({"loss": -lp, "dft": -lp * lp.detach().exp()} for lp in log_probs)
    return references(model, terms, ("loss", "dft"))
