"""The flags: which there are, and what hook they make."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import Any

import pytest

from megatron_loss_agg import LossAggregation
from megatron_loss_agg.errors import OptionError
from megatron_loss_agg.launch.flags import VARIABLE, add_arguments, aggregation_from_environment
from megatron_loss_agg.launch.install import hook_from_args
from megatron_loss_agg.mcore import LossHook

FLAG = "--loss-aggregation"


def parsed(arguments: str, **of_host: Any) -> argparse.Namespace:
    """The flags, with @ for ``--loss-aggregation``, among those of the host."""
    parser = add_arguments(argparse.ArgumentParser(allow_abbrev=False))
    args = parser.parse_args(arguments.replace("@", FLAG).split())
    return argparse.Namespace(**{**vars(args), **of_host})


def hook(arguments: str, in_training_loop: bool = False, **of_host: Any) -> LossHook:
    found = hook_from_args(parsed(arguments, **of_host), in_training_loop)
    assert found is not None
    return found


def test_the_flag_set_is_frozen() -> None:
    parser = add_arguments(argparse.ArgumentParser(add_help=False))
    found = {a.option_strings[0]: (a.dest, a.nargs, a.default) for a in parser._actions}
    values = ["", "-divisor", "-empty", "-rejected", "-function", "-batch", "-empty-step"]
    values += ["-mask", "-unmeasured", "-mtp", "-moe", "-sample-weights", "-levels", "-factors"]
    expected = {FLAG + x: ((FLAG[2:] + x).replace("-", "_"), None, None) for x in values}
    for x in ("audit", "report_datasets"):
        expected[f"{FLAG}-{x}".replace("_", "-")] = (f"loss_aggregation_{x}", 0, False)
    assert found == expected


SKIPS = LossAggregation(mode="sample_mean", rejected="skip")
AGGREGATIONS = {
    "@ rollout_mean": LossAggregation(mode="rollout_mean"),
    "@ verl/seq-mean-token-mean": LossAggregation.preset("verl/seq-mean-token-mean"),
    "@ trl/dr_grpo @-divisor 8": LossAggregation.preset("trl/dr_grpo", divisor=8.0),
    "@ constant @-divisor 7.5 @-empty skip": LossAggregation(
        mode="constant", divisor=7.5, empty="skip"
    ),
    "@ nested_mean @-levels prompt,sample": LossAggregation(
        mode="nested_mean", levels=("prompt", "sample")
    ),
    "@ custom @-function json:dumps": LossAggregation(mode="custom", function=json.dumps),
    "@ token_mean @-sample-weights skip": LossAggregation(mode="token_mean", sample_weights="skip"),
    # A preset keeps its own choice unless told.
    "@ nemo-rl/sequence_level": SKIPS,
    "@ nemo-rl/sequence_level @-empty skip": replace(SKIPS, empty="skip"),
    "@ nemo-rl/sequence_level @-rejected count": replace(SKIPS, rejected="count"),
    "@ areal/seq_mean @-empty count": LossAggregation(mode="sample_mean"),
}


@pytest.mark.parametrize("flags", AGGREGATIONS)
def test_every_option_reaches_the_aggregation(flags: str) -> None:
    (term,) = hook(flags).terms.values()
    assert term.aggregation == AGGREGATIONS[flags]


def test_without_flags_there_is_no_hook() -> None:
    assert hook_from_args(parsed("")) is hook_from_args(argparse.Namespace()) is None


def test_flags_from_a_yaml_file_are_read() -> None:
    file = argparse.Namespace(loss_aggregation="constant", loss_aggregation_divisor=7, yaml_cfg="x")
    found = hook_from_args(file)
    assert found is not None
    assert found.terms["constant"].aggregation.divisor == 7
    for name in ("loss_aggregation_emtpy", "loss-aggregation-empty"):
        with pytest.raises(OptionError, match=f"unknown setting {name}; expected one of "):
            hook_from_args(argparse.Namespace(loss_aggregation="sum", **{name: "skip"}))


IN_LOOP = {"of_megatron": True}
# Flags, the host's flags in its own training loop, or None elsewhere; and what of the hook's
# settings, which it compares over all ranks, these change.
SETTINGS: list[tuple[str, dict[str, Any] | None, dict[str, Any]]] = [
    # Defaults leave a run as it was.
    ("@-empty-step step @-unmeasured refuse @-mask batch @-mtp host @-moe host", None, {}),
    ("@-empty-step error", None, {"empty_step": "error"}),
    ("@-empty-step skip", None, {"empty_step": "skip"}),
    ("@-mask model", None, {"mask": "model"}),
    ("@-factors w", None, {"factors": "w"}),
    ("@-mtp same", None, {"mtp": "same"}),
    ("@-moe step", None, {"moe": "step"}),
    ("@-audit", None, {"audit": True}),
    ("@-unmeasured trust", None, {"unmeasured": "trust"}),
    ("@-audit @-unmeasured trust", None, {"audit": True, "unmeasured": "trust"}),
    ("@-report-datasets", None, {"report_datasets": 1}),
    # A reader of the user's own, if there is one.
    ("@-mask model @-batch json:dumps", None, {}),
    ("", {}, IN_LOOP),
    ("", {"sft": True}, {**IN_LOOP, "averages_quotients": True}),
    ("@-report-datasets", {"log_interval": 5}, {**IN_LOOP, "report_datasets": 5}),
]


@pytest.mark.parametrize("flags, of_host, changed", SETTINGS)
def test_a_flag_changes_its_own_setting_and_no_other(
    flags: str, of_host: dict[str, Any] | None, changed: dict[str, Any]
) -> None:
    stock = hook("@ sum")._settings
    found = hook(f"@ sum {flags}", of_host is not None, **(of_host or {}))._settings
    assert {name: x for name, x in found.items() if stock.get(name) != x} == changed


def test_a_teacher_of_the_host_is_a_second_term() -> None:
    teacher = {"logits_load_dir": "logits", "logits_load_kd_loss_alpha": 0.25}
    found = hook("@ token_mean", **teacher)
    assert [term.coefficient for term in found.terms.values()] == [0.75, 0.25]


# What needs the tokens of the whole step has them too late from a model.
@pytest.mark.parametrize(
    "flags, of_host, got",
    [
        ("sample_sum @-empty skip", {}, "empty='skip'"),
        ("prompt_mean @-empty-step skip", {}, "'prompt_mean' and empty_step='skip'"),
        ("sum @-report-datasets", {}, "an extension that needs 'dataset'"),
        ("sum", {"sft": True}, "--sft"),
        ("sum @-sample-weights count", {}, "sample_weights"),
        # As soon as the teacher is known.
        ("token_mean", {"logits_load_dir": "x", "logits_load_kd_loss_alpha": 0.2}, "'token_mean'"),
    ],
)
def test_masks_of_a_model_are_refused_where_they_come_too_late(
    flags: str, of_host: dict[str, Any], got: str
) -> None:
    with pytest.raises(OptionError, match=f"{got}.*with a mask that the model makes"):
        hook(f"@ {flags} @-mask model", in_training_loop=True, **of_host)


def test_a_loop_without_a_hook_reads_the_aggregation_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert aggregation_from_environment() is None
    monkeypatch.setenv(VARIABLE, f"{FLAG} sum {FLAG}-divisor 4")
    assert aggregation_from_environment() == LossAggregation(mode="sum", divisor=4)
    for useless in (f"{FLAG}-audit", "token_mean", "--lr 1"):
        monkeypatch.setenv(VARIABLE, f"{FLAG} token_mean {useless}")
        with pytest.raises(OptionError, match=f"{VARIABLE} holds {useless}.*expected {FLAG}"):
            aggregation_from_environment()
