"""Batches whose loss mask the model makes, as vision-language models do.

Such a mask is known only after the forward pass. ``w_t = m_t * c_s`` then comes from what is known
before, the numbers N of samples and K of microbatches of the step, and from sums over one
microbatch:

=================== ============= ==============================================================
mode                ``c_s``
=================== ============= ==============================================================
``sum``             1 / D
``constant``        1 / (N D)
``sample_sum``      1 / N
``sample_mean``     1 / (N M_s)   M_s: summed over context-parallel ranks
``microbatch_mean`` 1 / (K M_k)   M_k: likewise
``token_mean``      1             the host divides by its token count, after the last microbatch
=================== ============= ==============================================================

The last one needs ``calculate_per_token_loss``. Under it, the loss of the other modes must be
multiplied by the host's token count, so that count must be known, too: each rank then reports one
token a microbatch, which the host's own auxiliary losses would be scaled by.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron_loss_agg.aggregation import LossAggregation, Term
from megatron_loss_agg.errors import FunctionError, GroupError, HostError, MaskError, ModeError
from megatron_loss_agg.microbatch import listed

_ROWS = ("tokens", "input_ids", "text", "labels")  # keys, of which the first that is present counts
_READER = (
    "give a function batch -> LateMicrobatch (--loss-aggregation-batch module:name, or in a loop "
    "of your own LossHook(read_batch=...))"
)
_POSSIBLE = (
    "expected mode sum, constant, sample_sum, sample_mean or microbatch_mean, which count samples "
    "or microbatches with empty='count'; or token_mean as the only term, under "
    "--calculate-per-token-loss"
)
_UNKNOWN = {  # what extensions may need, and the flag that asks for it
    "masks": "--loss-aggregation-mtp",
    "stages": "--loss-aggregation-moe",
    "dataset": "--loss-aggregation-report-datasets",
    "prompt": "an extension of your own",
    "rollout": "an extension of your own",
}
_SCALED_BY_TOKENS = ("num_moe_experts", "mtp_num_layers", "experimental_attention_variant")


@dataclass(frozen=True)
class LateMicrobatch:
    """A microbatch of this rank whose loss mask the model makes.

    Args:
        samples: number of samples, those without a loss token included.

    Raises:
        MaskError: it is not an int above 0.
    """

    samples: int

    def __post_init__(self) -> None:
        if type(self.samples) is not int or self.samples < 1:
            raise MaskError(f"samples={self.samples!r}; expected an int > 0")


def read_samples(batch: Any) -> LateMicrobatch:
    """The number of rows of a batch; every row is one sample.

    Counts the rows of the first of the keys ``tokens``, ``input_ids``, ``text`` and ``labels``.

    Raises:
        MaskError: there is none, or it is no tensor [samples, seq].
        GroupError: the batch has offsets of packed samples, rejected samples or sample weights.
    """
    keys = sorted(batch) if isinstance(batch, Mapping) else type(batch).__name__
    found = [batch[key] for key in _ROWS if key in batch] if isinstance(batch, Mapping) else []
    if not found or not isinstance(found[0], Tensor) or found[0].dim() != 2:
        raise MaskError(
            f"the data iterator gave {keys}; expected a mapping with one of the tensors "
            f"{', '.join(_ROWS)}, [samples, seq], to count its rows: otherwise {_READER}"
        )
    refused = [
        key
        for key in batch
        if batch[key] is not None
        and (key in ("rejected", "sample_weights") or str(key).startswith("cu_seqlens"))
    ]
    if refused:
        raise GroupError(
            f"the batch has the keys {refused} beside a mask that the model makes; expected one "
            f"sample in each row, none rejected and none weighted: otherwise {_READER}"
        )
    return LateMicrobatch(found[0].shape[0])


def checked_samples(microbatches: Any, number: int) -> list[int]:
    """The number of samples of each of ``number`` microbatches.

    Raises:
        FunctionError: another number of them, or other types.
    """
    found = listed(microbatches)
    if len(found) != number or not all(isinstance(m, LateMicrobatch) for m in found):
        kinds = sorted({type(m).__name__ for m in found})
        raise FunctionError(
            f"{len(found)} microbatches of type {', '.join(kinds)} for {number} whose masks the "
            f"model makes; expected as many LateMicrobatch: {_READER}"
        )
    return [m.samples for m in found]


def check_late(terms: Mapping[str, Term], call: Any, needs: Collection[str]) -> None:
    """Refuse a step whose masks the model makes, if it cannot be exact.

    Args:
        call: of the schedule.
        needs: of its extensions.

    Raises:
        ModeError: as `check_possible`.
        HostError: as `check_host`.
    """
    check_possible(
        terms,
        needs=needs,
        empty_step=call.settings["empty_step"],
        averages_quotients=call.loop.averages_quotients,
    )
    check_host(terms, call.scale.per_token, call.config)


def check_possible(
    terms: Mapping[str, Term],
    *,
    needs: Collection[str],
    empty_step: str,
    averages_quotients: bool,
) -> None:
    """Refuse what needs the masks, or the tokens, of the whole step before the first forward pass.

    Raises:
        ModeError: names the mode or the setting.
    """
    what = "with a mask that the model makes (--loss-aggregation-mask model)"
    for term in terms.values():
        _check_aggregation(term.aggregation, what, alone=len(terms) == 1)
    if empty_step != "step":
        raise ModeError(
            f"empty_step={empty_step!r} {what}, so that an empty step is not known in time; "
            "expected 'step'"
        )
    if averages_quotients:
        raise ModeError(
            f"Loop(averages_quotients=True) (Megatron's --sft) {what}; expected an evaluation that "
            "adds up sums and counts: drop one of the two"
        )
    for need in sorted(_UNKNOWN.keys() & set(needs)):
        raise ModeError(
            f"an extension that needs {need!r} ({_UNKNOWN[need]}) {what}, whose tokens are not "
            "known before the step; expected one of the two: drop it"
        )


def _check_aggregation(agg: LossAggregation, what: str, alone: bool) -> None:
    known = (None, "sample", "microbatch")
    possible = agg.function is None and agg.across in known and agg.within in (*known, "step")
    if not possible or (agg.within == "step" and not alone):
        raise ModeError(f"{agg.label!r} {what}; {_POSSIBLE}")
    options = {"sample_weights": agg.sample_weights}
    if agg.name is None:  # a preset says of rejected samples what its system does
        options["rejected"] = agg.rejected
    for option, value in options.items():
        if value is not None:
            raise ModeError(
                f"{option}={value!r} {what}, whose batches are read for their number of samples "
                f"alone; expected none: drop --loss-aggregation-{option.replace('_', '-')}"
            )
    if agg.empty == "skip" and agg.across is not None:
        raise ModeError(
            f"empty='skip' {what}, so that the number of {agg.across}s with tokens is not known in "
            "time; expected empty='count'"
        )


def check_host(terms: Mapping[str, Term], per_token: bool, config: Any) -> None:
    """Refuse ``calculate_per_token_loss`` if ``terms`` need it the other way round.

    Args:
        per_token: whether it is on.
        config: the model's.

    Raises:
        HostError: names the setting.
    """
    if any(term.aggregation.within == "step" for term in terms.values()):
        if not per_token:
            raise HostError(
                "'token_mean' of masks that the model makes, without calculate_per_token_loss: "
                "the tokens of the step are not known in time, and the host would not divide by "
                f"them; {_POSSIBLE}"
            )
        return
    scaled = [name for name in _SCALED_BY_TOKENS if getattr(config, name, None) is not None]
    if per_token and scaled:
        raise HostError(
            f"the model's {scaled[0]} with calculate_per_token_loss and masks that the model "
            "makes: the host scales a loss of its own by the tokens of the step, which are not "
            "known in time; expected calculate_per_token_loss off, or mode token_mean"
        )


def check_mask(
    mask: Tensor, samples: int, packed: int | None, aggregation: LossAggregation
) -> None:
    """Check a mask of a model, of a microbatch of ``samples`` samples.

    Args:
        packed: sequences that the model was called with; None: rows.

    Raises:
        MaskError: it is of another number of samples.
        GroupError: samples are packed, and the mode needs to know which tokens are whose.
    """
    found = packed if packed is not None else mask.shape[0] if mask.dim() == 2 else None
    if found != samples:
        raise MaskError(
            f"a model's mask of shape {tuple(mask.shape)} with {found} "
            f"{'rows' if packed is None else 'packed sequences'}, for {samples} samples of the "
            "batch; expected a mask [samples, seq], or LateMicrobatch(samples=...) with the number "
            "of the model's samples"
        )
    if packed is not None and samples > 1 and aggregation.within == "sample":
        raise GroupError(
            f"{aggregation.label!r} with {samples} samples packed by the script, whose masks the "
            "model makes; expected samples in rows, or mode sum, constant, sample_sum or "
            "microbatch_mean"
        )
