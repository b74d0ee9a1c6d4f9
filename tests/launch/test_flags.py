"""The flags: which there are, and what hook they make."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import Any

import pytest

from megatron_loss_agg import LossAggregation
from megatron_loss_agg.errors import OptionError
from megatron_loss_agg.launch import install
from megatron_loss_agg.launch.flags import (
    VARIABLE,
    add_arguments,
    aggregation_from_environment,
    aggregations_beside,
)
from megatron_loss_agg.launch.install import hook_from_args
from megatron_loss_agg.mcore import DatasetReports, LossHook, aggregate_mtp, aggregate_routers

FLAG = "--loss-aggregation"


def parsed(arguments: str, **of_megatron: Any) -> argparse.Namespace:
    """The flags, with @ for ``--loss-aggregation``, among those of Megatron."""
    parser = add_arguments(argparse.ArgumentParser(allow_abbrev=False))
    args = parser.parse_args(arguments.replace("@", FLAG).split())
    return argparse.Namespace(**{**vars(args), **of_megatron})


def hook(arguments: str, in_training_loop: bool = False, **of_megatron: Any) -> LossHook:
    found = hook_from_args(parsed(arguments, **of_megatron), in_training_loop)
    assert found is not None
    return found


def test_the_flag_set_is_frozen() -> None:
    parser = add_arguments(argparse.ArgumentParser(add_help=False))
    found = {a.option_strings[0]: (a.dest, a.nargs, a.default) for a in parser._actions}
    values = ["", "-divisor", "-empty", "-rejected", "-function", "-batch", "-empty-step"]
    values += ["-split", "-evaluation", "-unmeasured", "-mtp", "-moe", "-sample-weights", "-levels"]
    values += ["-dataset-weights", "-sft-prompt-field"]
    expected = {FLAG + x: ((FLAG[2:] + x).replace("-", "_"), None, None) for x in values}
    expected[f"{FLAG}-also"] = ("loss_aggregation_also", "+", None)
    for x in ("audit", "report_datasets", "report_weights"):
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
    "@ sample_mean @-dataset-weights 1:2,0:.5 @-sample-weights count": LossAggregation(
        mode="sample_mean", dataset_weights={0: 0.5, 1: 2.0}, sample_weights="count"
    ),
    "@ trl/grpo @-dataset-weights 0:3 @-sample-weights skip": LossAggregation(
        mode="sample_mean", dataset_weights={0: 3.0}, sample_weights="skip"
    ),
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


BESIDE = LossAggregation(mode="constant", divisor=7.0, rejected="skip")
MODES_BESIDE = {
    "@ token_mean @-also sample_mean verl/seq-mean-token-mean": [
        LossAggregation(mode="sample_mean"),
        LossAggregation.preset("verl/seq-mean-token-mean"),
    ],
    # Flags of the aggregation are those of every mode that takes them.
    "@ token_mean @-also constant sample_mean @-divisor 7 @-rejected skip": [BESIDE, SKIPS],
    "@ constant @-divisor 9 @-also sum": [LossAggregation(mode="sum", divisor=9.0)],
    "@ sample_mean @-also nested_mean @-levels prompt,sample": [
        LossAggregation(mode="nested_mean", levels=("prompt", "sample"))
    ],
    "@ sample_mean @-also custom @-function json:dumps": [
        LossAggregation(mode="custom", function=json.dumps)
    ],
}


@pytest.mark.parametrize("flags", MODES_BESIDE)
def test_modes_beside_the_loss_take_its_flags(flags: str) -> None:
    assert aggregations_beside(parsed(flags)) == MODES_BESIDE[flags]
    (term,) = hook(flags).terms.values()
    mode = flags.split()[1]
    own = {"rejected": "skip"} if "skip" in flags else {}
    own |= {"divisor": 9.0} if mode == "constant" else {}
    assert term.aggregation == LossAggregation(mode=mode, **own)


REFUSED_BESIDE = {
    "@ token_mean @-also token_mean": r"^also must .* got 'token_mean' twice\. Remove it",
    "@ token_mean @-also sum sum": r"^also must .* got 'sum' twice\. Remove it",
    "@ token_mean @-also meen": r"^unknown mode 'meen'",
    "@ token_mean @-also constant": r"^mode 'constant' needs a divisor",
    "@ token_mean @-also sample_mean @-divisor 7": r"^mode 'token_mean' takes no divisor",
    "@ token_mean @-also nested_mean @-levels turn,sample": (
        r"^also must group by dataset, prompt, rollout or sample, .* got \['turn'\] in 'nested_mean'"
    ),
}


@pytest.mark.parametrize("flags", REFUSED_BESIDE)
def test_modes_beside_the_loss_that_cannot_be_reported_are_refused(flags: str) -> None:
    with pytest.raises(OptionError, match=REFUSED_BESIDE[flags]):
        hook(flags)


def test_without_flags_there_is_no_hook() -> None:
    assert hook_from_args(parsed("")) is hook_from_args(argparse.Namespace()) is None


def test_flags_from_a_yaml_file_are_read() -> None:
    file = argparse.Namespace(loss_aggregation="constant", loss_aggregation_divisor=7, yaml_cfg="x")
    found = hook_from_args(file)
    assert found is not None
    assert found.terms["constant"].aggregation.divisor == 7
    for name in ("loss_aggregation_emtpy", "loss-aggregation-empty"):
        with pytest.raises(OptionError, match=f"^{name} is not a setting .*Write one of "):
            hook_from_args(argparse.Namespace(loss_aggregation="sum", **{name: "skip"}))
    with pytest.raises(OptionError, match=r"^--loss-aggregation-mask was removed: .*\. Compute"):
        hook_from_args(argparse.Namespace(loss_aggregation="sum", loss_aggregation_mask="batch"))


LOOP = {"aggregate_evaluation": True, "prefetch": True}
DOCUMENTS = {"dataloader_inter_document_masking": True}
# Our flags; Megatron's, in its own training loop, or None elsewhere; and what they change of the
# arguments that the hook is made with.
CHANGES: list[tuple[str, dict[str, Any] | None, dict[str, Any]]] = [
    # Defaults leave a run as it was.
    ("@-empty-step train @-unmeasured refuse @-mtp megatron @-moe megatron", None, {}),
    ("@-empty-step error", None, {"empty_step": "error"}),
    ("@-empty-step skip", None, {"empty_step": "skip"}),
    ("@-split zigzag", None, {"split": "zigzag"}),
    ("@-split contiguous", None, {"split": "contiguous"}),
    ("@-batch json:dumps", None, {"read_batch": json.dumps}),
    ("@-mtp same", None, {"extensions": [MTPAggregation()], "settings": {"mtp": "same"}}),
    ("@-moe whole", None, {"wrappers": [aggregate_routers], "settings": {"moe": "whole"}}),
    ("@-audit", None, {"audit": True}),
    ("@-unmeasured trust", None, {"trust_unmeasured": True}),
    ("@-evaluation same", None, {"aggregate_evaluation": True}),
    ("@-evaluation megatron", None, {}),
    ("", {}, LOOP),
    # How --sft averages its reports is no business of the hook.
    ("", {"sft": True}, LOOP),
    # Megatron lays rows of documents whole on context-parallel ranks, but packs of --sft.
    ("", DOCUMENTS, {**LOOP, "split": "zigzag_pack"}),
    ("", {**DOCUMENTS, "sft": True}, LOOP),
    ("@-split zigzag", DOCUMENTS, {**LOOP, "split": "zigzag"}),
]


def arguments_of_hook(
    monkeypatch: pytest.MonkeyPatch, flags: str, of_megatron: dict[str, Any] | None
) -> dict[str, Any]:
    """The arguments of the hook of these flags."""
    hooks = []

    class Noting(LossHook):
        def __init__(self, terms: Any, **arguments: Any) -> None:
            super().__init__(terms, **arguments)
            hooks.append(arguments)

    monkeypatch.setattr(install, "LossHook", Noting)
    hook(flags, of_megatron is not None, **(of_megatron or {}))
    return dict(hooks.pop())


@pytest.mark.parametrize("flags, of_megatron, changed", CHANGES)
def test_a_flag_changes_its_own_argument_of_the_hook_and_no_other(
    flags: str,
    of_megatron: dict[str, Any] | None,
    changed: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stock = arguments_of_hook(monkeypatch, "@ sum", None)
    found = arguments_of_hook(monkeypatch, f"@ sum {flags}", of_megatron)
    assert {name: x for name, x in found.items() if stock[name] != x} == changed


def test_losses_of_mtp_have_a_mode_of_their_own_and_the_other_options_of_the_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flags = "@ trl/dr_grpo @-divisor 8 @-empty skip @-rejected skip @-mtp token_mean"
    monkeypatch.setattr(install, "LossHook", lambda *_, **arguments: arguments)
    arguments: Any = hook(flags)
    (wrapper,) = arguments["wrappers"]
    assert (wrapper.func, arguments["settings"]) == (aggregate_mtp, {"mtp": "token_mean"})
    of_mtp = LossAggregation(mode="token_mean", empty="skip", rejected="skip")
    assert wrapper.keywords["aggregation"] == of_mtp
    assert of_mtp.label == wrapper.keywords["aggregation"].label
    with pytest.raises(
        OptionError, match=r"^--loss-aggregation-mtp must be one of megatron, same, tok"
    ):
        hook("@ token_mean @-mtp constant")


@pytest.mark.parametrize("of_megatron, interval", [(None, 1), ({"log_interval": 5}, 5)])
def test_reports_by_data_set_average_as_megatrons_log_does(
    of_megatron: dict[str, Any] | None, interval: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = arguments_of_hook(monkeypatch, "@ sum @-report-datasets", of_megatron)
    (extension,) = arguments["extensions"]
    assert isinstance(extension, DatasetReports)
    assert extension._log_interval == interval


def test_a_teacher_of_megatron_is_a_second_term() -> None:
    teacher = {"logits_load_dir": "logits", "logits_load_kd_loss_alpha": 0.25}
    found = hook("@ token_mean", **teacher)
    assert [term.multiplier for term in found.terms.values()] == [0.75, 0.25]


def test_a_loop_without_a_hook_reads_the_aggregation_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert aggregation_from_environment() is None
    monkeypatch.setenv(VARIABLE, f"{FLAG} sum {FLAG}-divisor 4")
    assert aggregation_from_environment() == LossAggregation(mode="sum", divisor=4)
    for useless in (f"{FLAG}-audit", "token_mean", "--lr 1"):
        monkeypatch.setenv(VARIABLE, f"{FLAG} token_mean {useless}")
        with pytest.raises(OptionError, match=rf"^{VARIABLE} must hold {FLAG}.*got {useless}\. Re"):
            aggregation_from_environment()
