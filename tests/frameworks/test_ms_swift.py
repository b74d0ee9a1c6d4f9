"""ms-swift 4.6.0: its command line on the real Megatron-Core, with the plugin file of its page.

Each run trains a checkpoint for one step, on two ranks. Its gradient is what that step, of SGD,
subtracts from the weights that are saved. Stock is exact for the token mean under the per-token
flag, if nothing is weighted by ``loss_scale``: twice its error there bounds ours.
"""

from __future__ import annotations

import json
import random
import re
import shlex
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any, NamedTuple

import pytest
from torch import Tensor

from megatron_loss_agg.errors import AggregationError
from megatron_loss_agg.mcore.flags import VARIABLE
from tests import oracle
from tests.distributed import run_ranks
from tests.frameworks.harness import FP32, ROOT, attempt, page, run_in_bash
from tests.host.reference import Gradient, Reference, relative_error
from tests.host.steps import Weights
from tests.oracle import Sample

pytestmark = pytest.mark.host

PLUGIN = "examples/ms_swift_plugin.py"
SAMPLE_MEAN = "--loss-aggregation sample_mean"
run = partial(run_ranks, preload="tests.frameworks.ms_swift")

LR = 10.0
MAX_LENGTH = 40
# Letters of prompt and answer, and loss_scale of the answer; the last is cut before its answer.
SAMPLES = (
    *((3, 24, 1.5), (4, 3, 0.25), (3, 9, 1.0), (2, 1, 0.5)),
    *((3, 17, 0.75), (3, 6, 2.0), (3, 12, 1.0), (45, 3, 1.0)),
)
# Letters of prompt, chosen and rejected answer.
PAIRS = ((3, 9, 2), (2, 5, 8), (1, 7, 20), (4, 12, 3), (2, 3, 3), (3, 2, 4))
Settings = dict[str, object]
COMMON: Settings = {
    **{"model_type": "llama", "tuner_type": "full", "torch_dtype": "float32"},
    "template": "dummy",  # the prompt, the answer and EOS
    **{"optimizer": "sgd", "lr": LR, "weight_decay": 0, "clip_grad": 0},
    **{"train_iters": 1, "eval_iters": 1, "split_dataset_ratio": 0},
    **{"max_length": MAX_LENGTH, "truncation_strategy": "right"},
    **dict.fromkeys(("no_save_optim", "no_save_rng"), True),
    **dict.fromkeys(("dataset_shuffle", "train_dataloader_shuffle", "add_version"), False),
    **dict.fromkeys(("fp16", "bf16", "use_distributed_optimizer", "check_model"), False),
    # For a CPU.
    "ddp_backend": "gloo",
    "megatron_extra_kwargs": json.dumps({"persist_layer_norm": False}),
    **dict.fromkeys(("masked_softmax_fusion", "bias_dropout_fusion"), False),
    **dict.fromkeys(("bias_activation_fusion", "gradient_accumulation_fusion"), False),
    "cross_entropy_loss_fusion": False,
    **{"dataloader_num_workers": 0, "dataloader_multiprocessing_context": "fork"},
}
LAYOUTS: dict[str, Settings] = {
    "rows": {"padding_free": False, "micro_batch_size": 2, "global_batch_size": 8},
    "padding_free": {"padding_free": True, "micro_batch_size": 2, "global_batch_size": 8},
    "packing": {
        **{"packing": True, "packing_strategy": "sequential", "packing_length": MAX_LENGTH},
        **{"micro_batch_size": 1, "global_batch_size": 4},
        "fp8_recipe": "mxfp8",  # without FP8 all that it does is padding
    },
}
PARALLEL: dict[str, Settings] = {
    "dp": {},
    "cp": {"context_parallel_size": 2},
    "pp": {"pipeline_model_parallel_size": 2},
}


def drawn(*lengths: int) -> list[str]:
    generator = random.Random(str(lengths))
    return ["".join(generator.choices("abcdefghijklmnopqrstuvwxyz", k=n)) for n in lengths]


TEXTS = [tuple(drawn(*lengths[:2])) for lengths in SAMPLES]
PAIRED = [[(prompt, x) for x in answers] for prompt, *answers in (drawn(*x) for x in PAIRS)]


def conversation(text: tuple[str, str], **of_answer: Any) -> dict[str, Any]:
    user, assistant = {"role": "user"}, {"role": "assistant", **of_answer}
    return {"messages": [{**x, "content": y} for x, y in zip((user, assistant), text, strict=True)]}


def save_models(folder: Path) -> None:
    from tests.frameworks import ms_swift

    for seed, name in enumerate(("model", "frozen")):
        ms_swift.save_model(folder / name, seed)


FOLDER = TemporaryDirectory()


@cache
def inputs() -> Path:
    """A folder with checkpoints and data sets."""
    folder = Path(FOLDER.name)
    run(save_models, 1, folder)
    scales = [scale for *_, scale in SAMPLES]
    sets = {
        "plain": [conversation(text) for text in TEXTS],
        "scaled": [conversation(x, loss_scale=s) for x, s in zip(TEXTS, scales, strict=True)],
        "empty": [conversation(TEXTS[-1])] * 8,
        "labelled": [{**conversation(text), "label": True} for text in TEXTS],
        "pairs": [{**conversation(chosen), "rejected_response": y[1]} for chosen, y in PAIRED],
    }
    for name, rows in sets.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def on_a_rank(worker: bool, *args: Any) -> str | None:
    """Its error; as a ``worker`` of a data loader, or not."""
    from torch.utils.data import _utils

    from tests.frameworks import ms_swift

    _utils.worker._worker_info = object() if worker else None
    return attempt(ms_swift.train, *args, errors=AggregationError)


class Trained(NamedTuple):
    """By one step, and the losses of each text after it, in fp64."""

    gradient: Gradient
    logs: dict[str, float]
    losses: list[Tensor]


def read(*args: Any) -> Trained:
    from tests.frameworks import ms_swift

    return Trained(*ms_swift.trained(*args))


def arguments(output: Path, settings: Settings) -> list[str]:
    """Of the command line, in which names of data sets and models become their paths."""
    given = {**COMMON, "model": "model", "dataset": "plain", **settings}
    paths = {key: inputs() / f"{given[key]}" for key in ("model", "ref_model") if key in given}
    paths |= {
        key: inputs() / f"{given[key]}.jsonl" for key in ("dataset", "val_dataset") if key in given
    }
    given |= {**paths, "output_dir": output}
    return [x for name, value in given.items() for x in (f"--{name}", f"{value}")]


def train(
    command: str,
    flags: str | None,
    *settings: Settings,
    plugin: bool = True,
    worker: bool = False,
    ranks: int = 2,
) -> Any:
    """What was trained, or the error. Stock without ``flags``."""
    merged = {name: value for some in settings for name, value in some.items()}
    return _train(command, flags, tuple(merged.items()), plugin, worker, ranks)


@cache
def _train(
    command: str,
    flags: str | None,
    settings: tuple[tuple[str, object], ...],
    plugin: bool,
    worker: bool,
    ranks: int,
) -> Any:
    output = Path(mkdtemp(dir=inputs()))
    given = arguments(output, dict(settings))
    given += ["--external_plugins", str(ROOT / PLUGIN)] if plugin else []
    environment = {} if flags is None else {VARIABLE: flags}
    (error, *_) = run(on_a_rank, ranks, worker, command, given, environment, initialized=False)
    return error or result(output)


def result(output: Path) -> Any:
    return run(read, 1, inputs() / "model", output, LR, TEXTS)[0]


def compute_references(folder: Path) -> dict[str, Reference]:
    from tests.frameworks import ms_swift

    pairs = ms_swift.pair_reference(folder / "model", folder / "frozen", PAIRED)
    return {**ms_swift.token_references(folder / "model", TEXTS), "pairs": pairs}


@cache
def references() -> dict[str, Reference]:
    return run(compute_references, 1, inputs())[0]


def weights(mode: str, scaled: bool = False) -> Weights:
    """Of every answer and its EOS, times the ``loss_scale``, which no denominator counts."""
    step = [
        Sample((float(len(prompt) < MAX_LENGTH),) * (len(answer) + 1), 0, 0)
        for prompt, answer in TEXTS
    ]
    found = oracle.step_weights(mode, [[step]])[0][0]
    scales = [[scale if scaled else 1.0] * n + [1.0] for _, n, scale in SAMPLES]
    both = enumerate(zip(found, scales, strict=True))
    return [(i, [x * y for x, y in zip(*of_sample, strict=True)]) for i, of_sample in both]


MEAN_OF_PAIRS: Weights = [(i, [1 / len(PAIRS)]) for i in range(len(PAIRS))]


def error(trained: Any, expected: Reference, w: Weights) -> float:
    return relative_error(trained.gradient, expected.gradient(w))


def own_error() -> float:
    stock = train("sft", None, LAYOUTS["rows"], per_token(True))
    return error(stock, references()["loss"], weights("token_mean"))


def per_token(flag: bool) -> Settings:
    return {"calculate_per_token_loss": flag}


def scales(given: bool) -> Settings:
    return {"dataset": "scaled", "is_binary_loss_scale": False} if given else {}


@pytest.mark.parametrize(
    "layout, parallel, flag, mode, scaled",
    [
        ("rows", "dp", True, "sample_mean", False),
        ("rows", "dp", False, "sample_mean", True),
        ("rows", "cp", False, "token_mean", True),
        ("rows", "cp", True, "sample_mean", False),
        ("padding_free", "dp", True, "sample_mean", True),
        ("padding_free", "dp", False, "token_mean", False),
        ("packing", "cp", True, "sample_mean", True),
        ("packing", "cp", False, "token_mean", False),
        ("packing", "pp", True, "sample_mean", False),
    ],
)
def test_sft_is_exact_and_logs_the_token_mean_and_the_aggregated_loss(
    layout: str, parallel: str, flag: bool, mode: str, scaled: bool
) -> None:
    settings = (LAYOUTS[layout], PARALLEL[parallel], per_token(flag), scales(scaled))
    hooked = train("sft", f"--loss-aggregation {mode}", *settings)
    whole, w = references()["loss"], weights(mode, scaled)
    assert error(hooked, whole, w) <= min(2 * own_error(), FP32)
    assert error(train("sft", None, *settings), whole, w) > 1e-2
    assert hooked.logs[f"{mode}_loss"] == pytest.approx(whole.loss(w), rel=1e-6)
    of_tokens = whole.loss(weights("token_mean", scaled))
    assert hooked.logs["loss"] == pytest.approx(of_tokens, rel=1e-6)


STOCK = {
    ("token_mean", False, "packing", "cp"): (0.0, 0.40),
    ("token_mean", False, "rows", "dp"): (0.0, 0.83),
    ("token_mean", True, "packing", "cp"): (0.0, 0.38),
    ("sample_mean", False, "packing", "cp"): (0.70, 0.71),
    ("sample_mean", False, "rows", "dp"): (0.70, 0.47),
}
"""On the page: errors of stock with the per-token flag and without."""


@pytest.mark.parametrize("mode, scaled, layout, parallel", STOCK)
def test_stock_is_as_wrong_as_the_page_says(
    mode: str, scaled: bool, layout: str, parallel: str
) -> None:
    settings = (LAYOUTS[layout], PARALLEL[parallel], scales(scaled))
    found = [
        error(
            train("sft", None, *settings, per_token(flag)),
            references()["loss"],
            weights(mode, scaled),
        )
        for flag in (True, False)
    ]
    assert found == pytest.approx(STOCK[mode, scaled, layout, parallel], abs=5e-3)


DPO: Settings = {"rlhf_type": "dpo", "dataset": "pairs", "ref_model": "frozen"}
DPO_FP32 = 2e-6
"""Bound of the error of stock, in which log-probabilities of long answers cancel."""
DPO_STOCK = 0.46
"""On the page: the error where packs have unequal numbers of pairs."""


def dpo(flags: str | None, layout: str, parallel: str) -> Any:
    of_rows: Settings = {"global_batch_size": 6, "micro_batch_size": 1} if layout == "rows" else {}
    return train("rlhf", flags, LAYOUTS[layout], of_rows, PARALLEL[parallel], DPO)


@pytest.mark.parametrize("layout, parallel", [("packing", "dp"), ("packing", "cp"), ("rows", "cp")])
def test_dpo_is_exact_where_packs_have_unequal_numbers_of_pairs(layout: str, parallel: str) -> None:
    hooked, stock = (dpo(flags, layout, parallel) for flags in (SAMPLE_MEAN, None))
    whole, w = references()["pairs"], MEAN_OF_PAIRS
    own = error(dpo(None, "rows", "cp"), whole, w)  # of one pair in every microbatch
    assert error(hooked, whole, w) <= 2 * own < 2 * DPO_FP32
    if layout == "packing":
        assert error(stock, whole, w) == pytest.approx(DPO_STOCK, abs=5e-3)
    assert hooked.logs["sample_mean_loss"] == pytest.approx(whole.loss(w), rel=1e-6)
    assert hooked.logs["loss"] == stock.logs["loss"]


def test_an_evaluation_is_aggregated() -> None:
    settings = (LAYOUTS["packing"], PARALLEL["cp"], {"val_dataset": "plain"})
    trained = train("sft", SAMPLE_MEAN, *settings)
    after = Reference(trained.losses, [])
    for name, mode in (("eval_sample_mean_loss", "sample_mean"), ("eval_loss", "token_mean")):
        assert trained.logs[name] == pytest.approx(after.loss(weights(mode)), rel=1e-5)


def test_dft_and_losses_by_channel_stay() -> None:
    more: Settings = {"enable_dft_loss": True, "enable_channel_loss": True}
    settings = (LAYOUTS["packing"], PARALLEL["cp"], more)
    hooked, stock = (train("sft", flags, *settings) for flags in (SAMPLE_MEAN, None))
    assert error(hooked, references()["dft"], weights("sample_mean")) < FP32
    for log in ("loss_None", "loss"):
        assert hooked.logs[log] == stock.logs[log]


def test_without_the_variable_or_in_a_worker_of_a_data_loader_nothing_changes() -> None:
    before = train("sft", None, LAYOUTS["rows"], plugin=False)
    for after in (
        train("sft", None, LAYOUTS["rows"]),
        train("sft", SAMPLE_MEAN, LAYOUTS["rows"], worker=True),
    ):
        assert after.logs["loss"] == before.logs["loss"]
        assert all(before.gradient[name].equal(g) for name, g in after.gradient.items())
        assert "sample_mean_loss" not in after.logs


def test_an_empty_step_can_be_skipped() -> None:
    settings = (LAYOUTS["rows"], {"dataset": "empty", "weight_decay": 0.1})
    skipped = train("sft", f"{SAMPLE_MEAN} --loss-aggregation-empty-step skip", *settings)
    assert not any(g.any() for g in skipped.gradient.values())
    assert skipped.logs["grad_norm"] == 0
    decayed = train("sft", SAMPLE_MEAN, *settings)
    assert any(g.any() for g in decayed.gradient.values())


@pytest.mark.parametrize(
    "command, trainer, settings",
    [
        ("sft", "MegatronTrainer", {"task_type": "seq_cls", "num_labels": 2}),
        ("rlhf", "MegatronKTOTrainer", {"rlhf_type": "kto"}),
        ("rlhf", "MegatronRewardTrainer", {**DPO, "rlhf_type": "rm"}),
        ("rlhf", "MegatronDPOTrainer", {**DPO, "rpo_alpha": 0.1}),
    ],
)
def test_other_losses_are_refused_before_the_model_is_built(
    command: str, trainer: str, settings: Settings
) -> None:
    given = {**LAYOUTS["rows"], "dataset": "labelled", **settings}
    said = train(command, SAMPLE_MEAN, given, ranks=1)
    assert said.startswith(f"HostError: {trainer} with --task_type ")
    assert said.endswith("unset MEGATRON_LOSS_AGG_FLAGS")


def test_the_command_of_the_page_is_exact(tmp_path: Path) -> None:
    text, pins = page("ms-swift"), (ROOT / "ci/peers.txt").read_text().split()
    (command,) = re.findall(r"^MEGATRON_LOSS_AGG_FLAGS.*?$\n.*?$", text, re.M)
    assert all(pin in text for pin in pins if pin.startswith(("ms-swift", "mcore-bridge")))
    # Every process but torchrun's has the stand-ins.
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nif 'torch.distributed.run' not in sys.orig_argv:\n"
        "    import tests.frameworks.ms_swift\n"
    )
    output = tmp_path / "output"
    given = shlex.join(arguments(output, LAYOUTS["padding_free"]))
    megatron = 'megatron() { python -m swift.cli._megatron.main "$@"; }\n'
    environment = {"NPROC_PER_NODE": "2", "PET_STANDALONE": "1", "OMP_NUM_THREADS": "1"}
    paths = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    run_in_bash(megatron + command.replace(" ... ", f" {given} "), **environment, **paths)
    assert error(result(output), references()["loss"], weights("sample_mean")) < FP32
