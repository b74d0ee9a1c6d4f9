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
    aggregations_from,
)
from megatron_loss_agg.launch.install import hook_from_args
from megatron_loss_agg.mcore import DatasetReports, LossHook, MTPAggregation
from tests.launch.my_extensions import Doubled

FLAG = "--loss-aggregation"


def parsed(arguments: str, **megatron_flags: Any) -> argparse.Namespace:
    """The flags, with @ for ``--loss-aggregation``, among those of Megatron."""
    parser = add_arguments(argparse.ArgumentParser(allow_abbrev=False))
    args = parser.parse_args(arguments.replace("@", FLAG).split())
    return argparse.Namespace(**{**vars(args), **megatron_flags})


def hook(arguments: str, in_training_loop: bool = False, **megatron_flags: Any) -> LossHook:
    result = hook_from_args(parsed(arguments, **megatron_flags), in_training_loop)
    assert result is not None
    return result


def test_the_flag_set_is_frozen() -> None:
    parser = add_arguments(argparse.ArgumentParser(add_help=False))
    flags = {a.option_strings[0]: (a.dest, a.nargs, a.default) for a in parser._actions}
    values = ["", "-divisor", "-empty", "-rejected", "-function", "-batch", "-empty-step"]
    values += ["-split", "-evaluation", "-unmeasured", "-mtp", "-sample-weights"]
    values += ["-sft-prompt-field", "-mismatch", "-count"]
    values += ["-sft-weight-field", "-sft-turns", "-sft-turn-field"]
    expected = {FLAG + x: ((FLAG[2:] + x).replace("-", "_"), None, None) for x in values}
    for x in ("also", "extension", "levels", "dataset_weights"):
        expected[f"{FLAG}-{x}".replace("_", "-")] = (f"loss_aggregation_{x}", "+", None)
    for x in ("audit", "report_datasets", "report_weights"):
        expected[f"{FLAG}-{x}".replace("_", "-")] = (f"loss_aggregation_{x}", 0, False)
    assert flags == expected


SKIPS = LossAggregation(mode="sample_mean", rejected="skip")
PRESET_SKIPS = replace(SKIPS, name="nemo-rl/sequence_level")
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
    "@ nested_mean @-levels prompt sample": LossAggregation(
        mode="nested_mean", levels=("prompt", "sample")
    ),
    "@ nested_mean @-levels prompt, rollout sample": LossAggregation(
        mode="nested_mean", levels=("prompt", "rollout", "sample")
    ),
    "@ custom @-function json:dumps": LossAggregation(mode="custom", function=json.dumps),
    "@ token_mean @-sample-weights skip": LossAggregation(mode="token_mean", sample_weights="skip"),
    "@ sample_mean @-dataset-weights 1:2,0:.5 @-sample-weights count": LossAggregation(
        mode="sample_mean", dataset_weights={0: 0.5, 1: 2.0}, sample_weights="count"
    ),
    "@ sample_mean @-sample-weights count @-dataset-weights 1:2 0:.5": LossAggregation(
        mode="sample_mean", dataset_weights={0: 0.5, 1: 2.0}, sample_weights="count"
    ),
    "@ trl/grpo @-dataset-weights 0:3 @-sample-weights skip": LossAggregation(
        mode="sample_mean", dataset_weights={0: 3.0}, sample_weights="skip", name="trl/grpo"
    ),
    # A preset keeps its own choice unless told.
    "@ nemo-rl/sequence_level": PRESET_SKIPS,
    "@ nemo-rl/sequence_level @-empty skip": replace(PRESET_SKIPS, empty="skip"),
    "@ nemo-rl/sequence_level @-rejected count": replace(PRESET_SKIPS, rejected="count"),
    "@ areal/seq_mean @-empty count": LossAggregation(mode="sample_mean", name="areal/seq_mean"),
}


@pytest.mark.parametrize("flags", AGGREGATIONS)
def test_every_option_reaches_the_aggregation(flags: str) -> None:
    (term,) = hook(flags).terms.values()
    assert term.aggregation == AGGREGATIONS[flags]


CONSTANT = LossAggregation(mode="constant", divisor=7.0, rejected="skip")
ALSO = {
    "@ token_mean @-also sample_mean verl/seq-mean-token-mean": [
        LossAggregation(mode="sample_mean"),
        LossAggregation.preset("verl/seq-mean-token-mean"),
    ],
    "@ token_mean @-also sample_mean @-also=prompt_mean": [
        LossAggregation(mode="sample_mean"),
        LossAggregation(mode="prompt_mean"),
    ],
    "@ token_mean @-also sample_mean,prompt_mean": [
        LossAggregation(mode="sample_mean"),
        LossAggregation(mode="prompt_mean"),
    ],
    # Flags of the aggregation are those of every mode that takes them.
    "@ token_mean @-also constant sample_mean @-divisor 7 @-rejected skip": [CONSTANT, SKIPS],
    "@ constant @-divisor 9 @-also sum": [LossAggregation(mode="sum", divisor=9.0)],
    "@ sample_mean @-also nested_mean @-levels prompt,sample": [
        LossAggregation(mode="nested_mean", levels=("prompt", "sample"))
    ],
    "@ sample_mean @-also custom @-function json:dumps": [
        LossAggregation(mode="custom", function=json.dumps)
    ],
}


@pytest.mark.parametrize("flags", ALSO)
def test_further_modes_take_the_flags_of_the_loss(flags: str) -> None:
    aggregation, *also = aggregations_from(parsed(flags))
    assert also == ALSO[flags]
    (term,) = hook(flags).terms.values()
    mode = flags.split()[1]
    options = {"rejected": "skip"} if "skip" in flags else {}
    options |= {"divisor": 9.0} if mode == "constant" else {}
    assert term.aggregation == aggregation == LossAggregation(mode=mode, **options)


REFUSED_ALSO = {
    "@ token_mean @-also token_mean": r"^also= must .* got 'token_mean' twice\. Remove it",
    "@ token_mean @-also sum sum": r"^also= must .* got 'sum' twice\. Remove it",
    "@ token_mean @-also meen": r"^unknown mode 'meen'",
    "@ token_mean @-also constant": r"^mode 'constant' needs a divisor",
    "@ token_mean @-also sample_mean @-divisor 7": r"^mode 'token_mean' takes no divisor",
    "@ token_mean @-also nested_mean @-levels turn,sample": (
        r"^also= must group by dataset, prompt, rollout or sample, .* got \['turn'\] in 'nested_mea"
    ),
}


@pytest.mark.parametrize("flags", REFUSED_ALSO)
def test_further_modes_that_cannot_be_reported_are_refused(flags: str) -> None:
    with pytest.raises(OptionError, match=REFUSED_ALSO[flags]):
        hook(flags)


def test_without_flags_there_is_no_hook() -> None:
    assert hook_from_args(parsed("")) is hook_from_args(argparse.Namespace()) is None


def test_flags_from_a_yaml_file_are_read() -> None:
    file = argparse.Namespace(loss_aggregation="constant", loss_aggregation_divisor=7, yaml_cfg="x")
    result = hook_from_args(file)
    assert result is not None
    assert result.terms["constant"].aggregation.divisor == 7
    words = argparse.Namespace(loss_aggregation="sum", loss_aggregation_also="constant token_mean")
    words.loss_aggregation_divisor = 2
    assert [x.mode for x in aggregations_from(words)] == ["sum", "constant", "token_mean"]
    paths = argparse.Namespace(loss_aggregation="nested_mean")
    for levels in ("prompt sample", "prompt,sample", ["prompt", "sample"]):
        paths.loss_aggregation_levels = levels
        assert [x.levels for x in aggregations_from(paths)] == [("prompt", "sample")]
    weights = argparse.Namespace(loss_aggregation="sum", loss_aggregation_sample_weights="skip")
    for by_id in ("0:0.5 1:2", {0: 0.5, 1: 2}):
        weights.loss_aggregation_dataset_weights = by_id
        assert [x.dataset_weights for x in aggregations_from(weights)] == [{0: 0.5, 1: 2.0}]
    for name in ("loss_aggregation_emtpy", "loss-aggregation-empty"):
        with pytest.raises(OptionError, match=f"^{name} is not a setting .*Write one of "):
            hook_from_args(argparse.Namespace(loss_aggregation="sum", **{name: "skip"}))
    with pytest.raises(OptionError, match=r"^--loss-aggregation-moe was removed: .*\. Write"):
        hook_from_args(argparse.Namespace(loss_aggregation="sum", loss_aggregation_moe="whole"))


LOOP = {"aggregate_evaluation": True, "prefetch": True}
DOCUMENTS = {"dataloader_inter_document_masking": True}
MINE = "tests.launch.my_extensions"


def named(extensions: str) -> dict[str, Any]:
    return {"settings": {"extension": extensions}}


# Our flags; Megatron's, in its own training loop, or None elsewhere; and the arguments of the hook
# that they change, with the classes of its extensions.
CHANGES: list[tuple[str, dict[str, Any] | None, dict[str, Any]]] = [
    # Defaults leave a run as it was.
    ("@-empty-step train @-unmeasured refuse @-mtp megatron @-mismatch stop", None, {}),
    ("@-empty-step error", None, {"empty_step": "error"}),
    ("@-empty-step skip", None, {"empty_step": "skip"}),
    ("@-split zigzag", None, {"split": "zigzag"}),
    ("@-split contiguous", None, {"split": "contiguous"}),
    ("@-batch json:dumps", None, {"read_batch": json.dumps}),
    ("@-mtp same", None, {"extensions": [MTPAggregation], "settings": {"mtp": "same"}}),
    (f"@-extension {MINE}:Doubled", None, {"extensions": [Doubled], **named(f"{MINE}:Doubled")}),
    (
        f"@-extension {MINE}:Doubled,{MINE}:doubled @-report-datasets",
        None,
        {
            "extensions": [Doubled, Doubled, DatasetReports],
            **named(f"{MINE}:Doubled {MINE}:doubled"),
        },
    ),
    ("@-mismatch warn", None, {"mismatch": "warn"}),
    ("@-count end", None, {"count": "end"}),
    ("@-count end", {}, {"count": "end", "aggregate_evaluation": True}),
    ("@-audit", None, {"audit": True}),
    ("@-unmeasured trust", None, {"trust_unmeasured": True}),
    ("@-evaluation same", None, {"aggregate_evaluation": True}),
    ("@-evaluation megatron", None, {}),
    ("", {}, LOOP),
    # The hook does not depend on how --sft averages its reports.
    ("", {"sft": True}, LOOP),
    # Megatron lays rows of documents whole on context-parallel ranks, but packs of --sft.
    ("", DOCUMENTS, {**LOOP, "split": "zigzag_pack"}),
    ("", {**DOCUMENTS, "sft": True}, LOOP),
    ("@-split zigzag", DOCUMENTS, {**LOOP, "split": "zigzag"}),
]


def hook_arguments(
    monkeypatch: pytest.MonkeyPatch, flags: str, megatron_flags: dict[str, Any] | None
) -> dict[str, Any]:
    """The arguments of the hook of these flags."""
    hooks = []

    class Recorded(LossHook):
        def __init__(self, terms: Any, **arguments: Any) -> None:
            super().__init__(terms, **arguments)
            hooks.append(arguments)

    monkeypatch.setattr(install, "LossHook", Recorded)
    hook(flags, megatron_flags is not None, **(megatron_flags or {}))
    return dict(hooks.pop())


@pytest.mark.parametrize("flags, megatron_flags, changed", CHANGES)
def test_a_flag_changes_its_own_argument_of_the_hook_and_no_other(
    flags: str,
    megatron_flags: dict[str, Any] | None,
    changed: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stock = hook_arguments(monkeypatch, "@ sum", None)
    arguments = hook_arguments(monkeypatch, f"@ sum {flags}", megatron_flags)
    arguments["extensions"] = [type(x) for x in arguments["extensions"]]
    assert {name: x for name, x in arguments.items() if stock[name] != x} == changed


def test_losses_of_mtp_have_a_mode_of_their_own_and_the_other_options_of_the_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flags = "@ trl/dr_grpo @-divisor 8 @-empty skip @-rejected skip @-mtp token_mean"
    monkeypatch.setattr(install, "LossHook", lambda *_, **arguments: arguments)
    arguments: Any = hook(flags)
    (extension,) = arguments["extensions"]
    assert isinstance(extension, MTPAggregation)
    assert arguments["settings"] == {"mtp": "token_mean"}
    expected = LossAggregation(mode="token_mean", empty="skip", rejected="skip")
    assert extension.aggregation == expected
    assert extension.aggregation.label == expected.label
    with pytest.raises(
        OptionError, match=r"^--loss-aggregation-mtp must be one of megatron, same, tok"
    ):
        hook("@ token_mean @-mtp constant")


BAD_EXTENSIONS = {
    "json:dumps": "must be a class or function that is called without arguments, got json:dumps with",
    f"{MINE}:needs_argument": (
        f"is called without arguments, got {MINE}:needs_argument with TypeError: .*factor"
    ),
    "builtins:dict": "must make an Extension, got builtins:dict, which makes a dict. Derive its",
    f"{MINE}:missing": f"must be module:name of a function or class .* got '{MINE}:missing'",
}


@pytest.mark.parametrize("name", BAD_EXTENSIONS)
def test_names_that_make_no_extension_are_refused(name: str) -> None:
    with pytest.raises(OptionError, match=f"^{FLAG}-extension .*{BAD_EXTENSIONS[name]}"):
        hook(f"@ sum @-extension {name}")


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
