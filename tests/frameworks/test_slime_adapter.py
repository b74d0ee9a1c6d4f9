"""The adapters of slime and miles on data of their form, over two ranks and without the frameworks.

Their losses and training steps run in `tests.frameworks.slime` and `miles`, by ci/frameworks.sh.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_loss_agg.launch.flags import VARIABLE
from tests.frameworks.harness import attempt
from tests.frameworks.report import ROLLOUTS, STEPS, flags
from tests.host.harness import error_of, run_host_ranks
from tests.oracle import Sample, step_weights

OFF = """
    calculate_per_token_loss custom_pg_loss_reducer_function_path enable_mtp_training use_tis
    get_mismatch_metrics use_critic multi_lora delay_split_train_data_by_dp
    use_dynamic_global_batch_size
"""
ARGS: dict[str, Any] = {
    **dict.fromkeys(OFF.split()),
    **{"loss_type": "policy_loss", "n_samples_per_prompt": 2, "custom_tis_function_path": "some.f"},
    **{"object_store_backend": "ray", "train_backend": "megatron"},
    "data_source_path": "slime.rollout.data_source.RolloutDataSourceWithBuffer",
}
# By rank, microbatch and sample: numbers of a step's samples; and a rank's rows of them.
PLACES = (((4, 1), (6,), (7,)), ((0,), (2, 5), (3,)))
ROWS = (((2, 0), (3,), (1,)), ((3,), (1, 2), (0,)))
SEAM = ("group_indices", "remove_samples", "effective_response_lengths")
MODES = ("token_mean", "sample_mean", "rollout_mean", "prompt_mean", "sample_sum", "sum")


def shipped(rank: int, seam: bool = False, **changes: Any) -> dict[str, Any]:
    """A rank's data of both steps, as slime ships it."""
    numbers: list[tuple[int, int]] = []
    microbatches: list[list[int]] = []
    for step in range(len(STEPS)):
        start = len(numbers)
        order = dict(zip(sum(ROWS[rank], ()), sum(PLACES[rank], ()), strict=True))
        numbers += [(step, order[row]) for row in sorted(order)]
        microbatches += [[start + row for row in rows] for rows in ROWS[rank]]
    answers = [STEPS[step][i] for step, i in numbers]
    data = {
        "loss_masks": [
            torch.tensor(list(map(int, a.trained_mask())), dtype=torch.int) for a in answers
        ],
        "rollout_ids": [a.rollout for a in answers],
        "sample_indices": [a.rollout for a in answers],
        "rollout_mask_sums": torch.full((len(answers),), 9.0),
        "micro_batch_indices": microbatches,
        "num_microbatches": [len(PLACES[rank])] * len(STEPS),
        "global_batch_sizes": [ROLLOUTS] * len(STEPS),
        "group_indices": [f"prompt {a.prompt}" for a in answers],
        "remove_samples": [a.removed for a in answers],
        "effective_response_lengths": [sum(a.mask) for a in answers],
    }
    return {k: v for k, v in (data | changes).items() if seam or k not in SEAM}


def weights(data: dict[str, Any]) -> list[list[float]]:
    """The weight of every token in slime's loss."""
    rows = zip(data["loss_masks"], data["rollout_mask_sums"], strict=True)
    return [(mask / denominator.clamp(min=1) / ROLLOUTS).tolist() for mask, denominator in rows]


def postprocess(framework: str, variable: str, data: dict[str, Any], **options: Any) -> Any:
    from tests.host import gpt

    gpt.initialize()
    os.environ[VARIABLE] = variable
    adapter = importlib.import_module(f"megatron_loss_agg.frameworks.{framework}")
    adapter.postprocess(Namespace(**{**ARGS, **options}), 0, data)
    return data


def weights_by_mode(modes: list[tuple[str, str]], seam: bool) -> Any:
    rank = dist.get_rank()
    return [
        weights(postprocess("slime", flags(mode, rejected), shipped(rank, seam)))
        for mode, rejected in modes
    ]


def expected(mode: str, rejected: str = "") -> list[list[list[float]]]:
    """The weights of each rank, in the order of its rows."""
    by_rank: list[list[list[float]]] = [[], []]
    for answers in STEPS:
        masks = [tuple(map(float, a.mask)) if rejected else a.trained_mask() for a in answers]
        samples = [Sample(m, a.prompt, a.rollout) for m, a in zip(masks, answers, strict=True)]
        left_out = {i for i, a in enumerate(answers) if a.removed and rejected == "skip"}
        step = [
            [[samples[i] for i in mb if i not in left_out] for mb in places] for places in PLACES
        ]
        rank_weights = step_weights(mode, step)
        for rank, places in enumerate(PLACES):
            sample_weights: dict[int, list[float]] = {}
            for mb, mb_weights in zip(places, rank_weights[rank], strict=True):
                present = [i for i in mb if i not in left_out]
                sample_weights.update(zip(present, mb_weights, strict=True))
            order = dict(zip(sum(ROWS[rank], ()), sum(places, ()), strict=True))
            for row in sorted(order):
                answer = answers[order[row]]
                w = [0.0] * len(answer.mask) if answer.removed else sample_weights[order[row]]
                by_rank[rank].append(w)
    return by_rank


@pytest.mark.parametrize("seam", [False, True], ids=["", "seam"])
def test_weights_of_a_step_are_those_of_the_mode(seam: bool) -> None:
    modes = [(mode, "") for mode in MODES]
    modes += [("sample_mean", "skip"), ("token_mean", "count")] if seam else []
    found = run_host_ranks(weights_by_mode, 2, modes, seam)
    for number, (mode, rejected) in enumerate(modes):
        for rank, rows in enumerate(expected(mode, rejected)):
            for row, w in enumerate(rows):
                assert found[rank][number][row] == pytest.approx(w, rel=1e-6), (mode, rank, row)


def test_without_flags_nothing_changes() -> None:
    assert run_host_ranks(unchanged, 1) == [[True, True]]


def unchanged() -> list[bool]:
    found = []
    for framework in ("slime", "miles"):
        data = shipped(0)
        before = dict(data)
        after = postprocess(framework, "", data, calculate_per_token_loss=True)
        found.append(after.keys() == before.keys() and all(after[k] is before[k] for k in before))
    return found


def conversions() -> list[Any]:
    from megatron_loss_agg.frameworks import miles

    found = []
    for variable in ("", flags("token_mean")):
        os.environ[VARIABLE] = variable
        found.append(callable(miles.convert))
    return found


def test_without_flags_miles_loads_no_conversion_and_takes_its_own() -> None:
    assert run_host_ranks(conversions, 1) == [[False, True]]


def on_one_rank() -> str:
    variable = flags("token_mean") if dist.get_rank() else ""
    return str(attempt(partial(postprocess, "slime", variable, shipped(dist.get_rank()))))


def test_the_variable_on_one_rank_alone_is_refused_on_all() -> None:
    for error in run_host_ranks(on_one_rank, 2):
        assert re.match(r"OptionError: .* got none on rank\(s\) \[0\] of 2", error)


def with_bad_flags_on_one_rank() -> str:
    variable = flags("token_mean" if dist.get_rank() else "mean")
    return str(attempt(partial(postprocess, "slime", variable, shipped(dist.get_rank()))))


def test_bad_flags_on_one_rank_are_refused_on_all() -> None:
    first, second = run_host_ranks(with_bad_flags_on_one_rank, 2)
    assert first.startswith("OptionError: unknown mode 'mean'")
    assert second.startswith("PeerError: rank(s) [0] of the group failed while reading MEGATRON")


REFUSED: dict[str, dict[str, Any]] = {
    "HostError: .*--calculate-per-token-loss": {"calculate_per_token_loss": True},
    "HostError: .*--custom-pg-loss-reducer": {"custom_pg_loss_reducer_function_path": "some.f"},
    "HostError: .*--multi-lora": {"multi_lora": True},
    "HostError: --loss-type .*custom_loss": {"loss_type": "custom_loss"},
    "OptionError: .*got dataset": {"variable": flags("dataset_mean")},
    "OptionError: --loss-aggregation-sample-weights": {
        "variable": "--loss-aggregation token_mean --loss-aggregation-sample-weights skip"
    },
    "OptionError: .*--loss-aggregation-mtp": {
        "variable": "--loss-aggregation token_mean --loss-aggregation-mtp same"
    },
    "HostError: --loss-aggregation-rejected": {"variable": flags("token_mean", "skip")},
    "HostError: samples must be numbered.*some.Source": {"data_source_path": "some.Source"},
    "HostError: sample_indices must number 3 rollouts.*got 3 prompts": {"n_samples_per_prompt": 3},
    "HostError: sample_indices must number 2 rollouts.*got 1 prompts": {
        "data": {"sample_indices": [0] * 8}
    },
    "HostError: denominators .*--custom-tis-function-path.*got 0.5": {"use_tis": True},
    "HostError: denominators .*--enable-mtp-training.*got 0.167": {
        "variable": flags("sum"),
        "enable_mtp_training": True,
    },
    "HostError: denominators .*--use-opsm.*got 0.167": {"variable": flags("sum"), "use_opsm": True},
    "OptionError: coefficients must be >= 0": {
        "variable": f"--loss-aggregation custom --loss-aggregation-function {__name__}:negative"
    },
    "HostError: .*got none of rollout_mask_sums": {"missing_key": "rollout_mask_sums"},
    "HostError: .*got none of micro_batch_indices": {"missing_key": "micro_batch_indices"},
    "HostError: the ranks of a step must have its 7 rollouts, got 6": {
        "data": {"global_batch_sizes": [7, 5]}
    },
    "(Data|Peer)Error: .*prompt_ids": {"rank_1_data": {"sample_indices": [None] * 8}},
}


def negative(samples: Any) -> torch.Tensor:
    return torch.full_like(samples.mask_sum, -1.0)


def errors() -> list[str]:
    found = []
    for case in REFUSED.values():
        options = dict(case)
        variable = options.pop("variable", flags("prompt_mean"))
        rank_1_data = options.pop("rank_1_data", {})
        changes = options.pop("data", {}) | (rank_1_data if dist.get_rank() else {})
        data = shipped(dist.get_rank(), **changes)
        data.pop(options.pop("missing_key", ""), None)
        found.append(attempt(partial(postprocess, "slime", variable, data, **options)))
    return found


def test_every_rank_refuses_what_would_be_another_sum() -> None:
    for rank_errors in run_host_ranks(errors, 2):
        for pattern, error in zip(REFUSED, rank_errors, strict=True):
            assert isinstance(error, str), pattern
            assert re.match(pattern, error), error


def error_without_data(framework: str) -> str:
    return str(attempt(partial(postprocess, framework, flags("token_mean"), None)))


@pytest.mark.parametrize(
    ("framework", "words"), [("slime", "Use slime of"), ("miles", "frameworks.miles.convert")]
)
def test_a_function_that_gets_no_data_says_what_to_do(framework: str, words: str) -> None:
    (error,) = run_host_ranks(error_without_data, 1, framework)
    assert re.match(rf"HostError: {framework} must hand its data .*{words}", error)


REFUSED_BY_CONVERT: dict[str, dict[str, Any]] = {
    "HostError: .*--calculate-per-token-loss": {"calculate_per_token_loss": True},
    "HostError: .*--delay-split-train-data-by-dp": {"delay_split_train_data_by_dp": True},
    "HostError: .*--use-dynamic-global-batch-size": {"use_dynamic_global_batch_size": True},
    "HostError: --object-store-backend": {"object_store_backend": "mooncake"},
    "HostError: --train-backend": {"train_backend": "fsdp"},
    "OptionError: .*got microbatch ": {"mode": "microbatch_mean"},
}


def convert_errors() -> list[str]:
    from megatron_loss_agg.frameworks import miles

    found = []
    for case in REFUSED_BY_CONVERT.values():
        options = {**ARGS, **case}
        os.environ[VARIABLE] = flags(options.pop("mode", "token_mean"))
        found.append(attempt(lambda args: miles.convert(args, []), Namespace(**options)))
    return found


def test_convert_refuses_what_would_be_another_sum() -> None:
    (found,) = run_host_ranks(convert_errors, 1)
    for pattern, error in zip(REFUSED_BY_CONVERT, found, strict=True):
        assert re.match(pattern, error), error


def import_error(framework: str, folder: Path) -> str | None:
    """The error of the adapter's import, with the framework in ``folder``."""
    sys.path.insert(0, str(folder))
    return error_of(importlib.import_module, f"megatron_loss_agg.frameworks.{framework}")


def package_in(folder: Path, framework: str) -> Path:
    """The folder of the modules of a new package."""
    utils = folder / framework / "utils"
    utils.mkdir(parents=True)
    for package in (utils, utils.parent):
        (package / "__init__.py").touch()
    return utils


def test_miles_does_not_mind_an_older_slime_beside_it(tmp_path: Path) -> None:
    package_in(tmp_path, "slime")
    (package_in(tmp_path, "miles") / "dp_schedule.py").touch()
    assert run_host_ranks(import_error, 1, "miles", tmp_path) == [None]


def test_a_folder_of_the_name_is_no_framework(tmp_path: Path) -> None:
    (tmp_path / "slime").mkdir()
    assert run_host_ranks(import_error, 1, "slime", tmp_path) == [None]


@pytest.mark.parametrize("framework", ["slime", "miles"])
def test_an_older_framework_is_refused_at_import(framework: str, tmp_path: Path) -> None:
    utils = package_in(tmp_path, framework)
    (error,) = run_host_ranks(import_error, 1, framework, tmp_path)
    assert re.match(rf"HostError: {framework} must be commit \w+ .* or later", str(error))
    (utils / "dp_schedule.py").touch()
    assert run_host_ranks(import_error, 1, framework, tmp_path) == [None]
