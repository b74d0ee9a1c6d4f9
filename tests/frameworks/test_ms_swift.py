"""ms-swift 4.6.0: its command line on the real Megatron-Core, with our plugin file.

Each run trains a checkpoint for one step, on two ranks. Its gradient is what that step, of SGD,
subtracts from the weights that are saved. Stock is exact for the token mean under the per-token
flag: four times its error there bounds ours.
"""

from __future__ import annotations

import json
import random
import re
import shlex
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any, NamedTuple

import pytest
from torch import Tensor

from megatron_loss_agg.launch.flags import VARIABLE
from tests import oracle
from tests.distributed import run_ranks
from tests.frameworks.harness import FP32, ROOT, page, run_in_bash
from tests.host.reference import Gradient, Reference, relative_error
from tests.host.steps import Weights
from tests.oracle import Sample
from tests.peers.standins import needs_peers

pytestmark = [pytest.mark.extended, needs_peers]

PLUGIN = ROOT / "megatron_loss_agg/frameworks/ms_swift/plugin.py"
SAMPLE_MEAN = "--loss-aggregation sample_mean"
FOLDER = TemporaryDirectory()
INPUTS = Path(FOLDER.name)  # checkpoints and data sets

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
    "model": INPUTS / "model",
    "dataset": INPUTS / "plain.jsonl",
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
    "load_from_cache_file": True,  # of an earlier run here
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
SCALED: Settings = {"dataset": INPUTS / "scaled.jsonl", "is_binary_loss_scale": False}
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


def conversation(text: tuple[str, str], **options: Any) -> dict[str, Any]:
    prompt, answer = text
    said = {"role": "assistant", "content": answer, **options}
    return {"messages": [{"role": "user", "content": prompt}, said]}


def on_ranks(name: str, number: int, *args: Any, initialized: bool = True) -> list[Any]:
    """The results of a function of `tests.frameworks.ms_swift`; only ranks import that module."""
    preload = "tests.frameworks.ms_swift"
    return run_ranks(_call, number, name, *args, preload=preload, initialized=initialized)


def _call(name: str, *args: Any) -> Any:
    from tests.frameworks import ms_swift

    return getattr(ms_swift, name)(*args)


@pytest.fixture(scope="module", autouse=True)
def inputs() -> None:
    on_ranks("save_models", 1, INPUTS)
    scales = [scale for *_, scale in SAMPLES]
    sets = {
        "plain": [conversation(text) for text in TEXTS],
        "scaled": [conversation(x, loss_scale=s) for x, s in zip(TEXTS, scales, strict=True)],
        "empty": [conversation(TEXTS[-1])] * 8,
        "labelled": [{**conversation(text), "label": True} for text in TEXTS],
        "pairs": [{**conversation(chosen), "rejected_response": y[1]} for chosen, y in PAIRED],
    }
    for name, rows in sets.items():
        (INPUTS / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))


class Trained(NamedTuple):
    """By one step, and the losses of each text after it, in fp64."""

    gradient: Gradient
    logs: dict[str, float]
    losses: list[Tensor]


def arguments(output: Path, settings: Settings) -> list[str]:
    given = {**COMMON, **settings, "output_dir": output}
    return [x for name, value in given.items() for x in (f"--{name}", f"{value}")]


def train(
    command: str,
    flags: str | None,
    *settings: Settings,
    plugin: bool = True,
    worker: bool = False,
    ranks: int = 2,
    flagged_rank: int | None = None,
) -> Any:
    """The trained model, or the error; of stock ms-swift without ``flags``."""
    output = Path(mkdtemp(dir=INPUTS))
    given = arguments(output, {name: x for some in settings for name, x in some.items()})
    given += ["--external_plugins", str(PLUGIN)] if plugin else []
    environment = {} if flags is None else {VARIABLE: flags}
    run = command, given, environment, worker, flagged_rank
    errors = on_ranks("train", ranks, *run, initialized=False)
    if flagged_rank is not None:
        return errors
    return errors[0] or result(output)


def result(output: Path) -> Trained:
    return Trained(*on_ranks("trained", 1, INPUTS / "model", output, LR, TEXTS)[0])


@cache
def references() -> dict[str, Reference]:
    found: dict[str, Reference] = on_ranks("all_references", 1, INPUTS, TEXTS, PAIRED)[0]
    return found


def weights(mode: str, scaled: bool = False) -> Weights:
    """The weights of every answer and its EOS, times ``loss_scale``; no denominator counts that."""
    step = [
        Sample((float(len(prompt) < MAX_LENGTH),) * (len(answer) + 1), 0, 0)
        for prompt, answer in TEXTS
    ]
    found = oracle.step_weights(mode, [[step]])[0][0]
    scales = [[scale if scaled else 1.0] * n + [1.0] for _, n, scale in SAMPLES]
    both = enumerate(zip(found, scales, strict=True))
    return [(i, [x * y for x, y in zip(*pair, strict=True)]) for i, pair in both]


def error(trained: Any, expected: Reference, w: Weights) -> float:
    return relative_error(trained.gradient, expected.gradient(w))


@cache
def sft(flags: str | None, layout: str, parallel: str, per_token: bool, scaled: bool) -> Any:
    settings = [LAYOUTS[layout], PARALLEL[parallel], {"calculate_per_token_loss": per_token}]
    return train("sft", flags, *settings, SCALED if scaled else {})


def own_error() -> float:
    stock = sft(None, "rows", "dp", per_token=True, scaled=False)
    return error(stock, references()["loss"], weights("token_mean"))


@pytest.mark.parametrize(
    "layout, parallel, per_token, mode, scaled, off",
    [
        # The error of stock is on the page, or not.
        ("packing", "cp", False, "token_mean", False, 0.40),
        ("rows", "dp", False, "token_mean", False, 0.83),
        ("packing", "cp", True, "token_mean", True, 0.0),
        ("packing", "cp", False, "token_mean", True, 0.38),
        ("packing", "cp", True, "sample_mean", False, 0.70),
        ("packing", "cp", False, "sample_mean", False, 0.71),
        ("rows", "dp", False, "sample_mean", False, 0.47),
        ("rows", "cp", True, "sample_mean", True, 0.76),
        ("padding_free", "dp", False, "sample_mean", True, 0.69),
        ("packing", "pp", True, "sample_mean", False, 0.70),
    ],
)
def test_sft_is_exact_and_logs_the_token_mean_and_the_aggregated_loss(
    layout: str, parallel: str, per_token: bool, mode: str, scaled: bool, off: float
) -> None:
    flags = f"--loss-aggregation {mode}"
    hooked, stock = (sft(x, layout, parallel, per_token, scaled) for x in (flags, None))
    whole, w = references()["loss"], weights(mode, scaled)
    assert error(hooked, whole, w) <= min(4 * own_error(), FP32)
    assert error(stock, whole, w) == pytest.approx(off, abs=5e-3)
    assert hooked.logs[f"{mode}_loss"] == pytest.approx(whole.loss(w), rel=1e-6)
    token_mean = whole.loss(weights("token_mean", scaled))
    assert hooked.logs["loss"] == pytest.approx(token_mean, rel=1e-6)


DPO: Settings = {
    "rlhf_type": "dpo",
    "dataset": INPUTS / "pairs.jsonl",
    "val_dataset": INPUTS / "pairs.jsonl",
    "ref_model": INPUTS / "frozen",
}
ONE_PAIR: Settings = {**LAYOUTS["rows"], "global_batch_size": 6, "micro_batch_size": 1}


# With the error of stock, which is on the page: packs have unequal numbers of pairs.
@pytest.mark.parametrize(
    "layout, parallel, off",
    [(LAYOUTS["packing"], "dp", 0.46), (LAYOUTS["packing"], "cp", 0.46), (ONE_PAIR, "cp", 0.0)],
)
def test_dpo_is_exact_over_all_pairs_of_the_step(
    layout: Settings, parallel: str, off: float
) -> None:
    settings = (layout, PARALLEL[parallel], DPO)
    hooked, stock = (train("rlhf", flags, *settings) for flags in (SAMPLE_MEAN, None))
    whole, w = references()["pairs"], [(i, [1 / len(PAIRS)]) for i in range(len(PAIRS))]
    # In both, log-probabilities of long answers cancel.
    assert error(hooked, whole, w) < 4e-6
    assert error(stock, whole, w) == pytest.approx(off, abs=5e-3)
    assert hooked.logs["sample_mean_loss"] == pytest.approx(whole.loss(w), rel=1e-6)
    assert hooked.logs["loss"] == stock.logs["loss"]
    assert 0 < hooked.logs["eval_sample_mean_loss"] != hooked.logs["sample_mean_loss"]


def test_an_evaluation_is_aggregated() -> None:
    settings = (LAYOUTS["packing"], PARALLEL["cp"], {"val_dataset": INPUTS / "plain.jsonl"})
    trained = train("sft", SAMPLE_MEAN, *settings)
    after = Reference(trained.losses, [])
    for name, mode in (("eval_sample_mean_loss", "sample_mean"), ("eval_loss", "token_mean")):
        assert trained.logs[name] == pytest.approx(after.loss(weights(mode)), rel=1e-5)


def test_mismatches_of_a_rank_are_logged_on_each() -> None:
    # A rank reports its own mismatches, times the number of ranks.
    assert on_ranks("logged", 2, "mismatches", (2.0, 1.0), (0.0, 1.0)) == [1.0, 1.0]


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


def test_without_the_variable_ms_swifts_function_gets_the_trainer_and_a_line_says_it() -> None:
    ((same, printed),) = on_ranks("passed_on", 1)
    assert same and printed.startswith("loss aggregation: none, since MEGATRON_LOSS_AGG_FLAGS")


def test_the_variable_on_one_rank_alone_is_refused_on_all() -> None:
    errors = train("sft", SAMPLE_MEAN, LAYOUTS["rows"], flagged_rank=1)
    for error in errors:
        assert error.startswith("OptionError: MEGATRON_LOSS_AGG_FLAGS must be set on all ranks")
        assert "got none on rank(s) [0] of 2" in error


def test_doctor_names_the_version_and_an_argument_that_is_not_there() -> None:
    (((level, text), error),) = on_ranks("examine", 1, "cp_partition_mode")
    assert level == "OK" and text.startswith("4.6.0, tried; ")
    assert re.match(r"HostError: ms-swift must be 4.6.0 .*'cp_partition_mode'", error)


def test_an_empty_step_can_be_skipped() -> None:
    settings = (LAYOUTS["rows"], {"dataset": INPUTS / "empty.jsonl", "weight_decay": 0.1})
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
    given = {**LAYOUTS["rows"], "dataset": INPUTS / "labelled.jsonl", **settings}
    said = train(command, SAMPLE_MEAN, given, ranks=1)
    assert said.startswith(
        "HostError: the plugin needs megatron sft or pt with --task_type causal_lm"
    )
    assert f"got {trainer} with --task_type" in said
    assert said.endswith("Unset MEGATRON_LOSS_AGG_FLAGS.")


def test_modes_by_ids_are_refused_before_the_model_is_built() -> None:
    said = train("sft", "--loss-aggregation prompt_mean", LAYOUTS["rows"], ranks=1)
    assert said.startswith("OptionError: --loss-aggregation must group tokens by sample or microb")
    assert "in ms-swift, got prompt" in said


def test_a_count_at_the_end_is_refused_before_the_model_is_built() -> None:
    said = train("sft", f"{SAMPLE_MEAN} --loss-aggregation-count end", LAYOUTS["rows"], ranks=1)
    assert said.startswith("OptionError: --loss-aggregation-count must be before in ms-swift")


def test_the_settings_of_the_page_are_exact(tmp_path: Path) -> None:
    (settings,) = on_ranks("settings", 1)
    text, pins = page("ms-swift"), (ROOT / "ci/peers.txt").read_text().split()
    assert all(pin in text for pin in pins if pin.startswith(("ms-swift", "mcore-bridge")))
    # What starts the ranks logs by the hub's logger.
    (tmp_path / "sitecustomize.py").write_text(
        "import os\nfrom tests.peers.standins import use_peers\nuse_peers('modelscope')\n"
        "if 'RANK' in os.environ:\n    import tests.frameworks.ms_swift\n"
    )
    output = tmp_path / "output"
    given = shlex.join(arguments(output, LAYOUTS["padding_free"]))
    megatron = 'megatron() { python -m swift.cli._megatron.main "$@"; }\n'
    environment = {"NPROC_PER_NODE": "2", "PET_STANDALONE": "1", "OMP_NUM_THREADS": "1"}
    paths = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    run_in_bash(megatron + settings.replace(" ... ", f" {given} "), **environment, **paths)
    assert error(result(output), references()["loss"], weights("sample_mean")) < FP32


def test_to_import_the_adapter_changes_nothing_and_a_change_of_ms_swift_is_noticed() -> None:
    (error,) = on_ranks("import_adapter", 1)
    assert re.match("HostError: ms-swift must be 4.6.0 .* or later, .*'prepare_model'", error)
