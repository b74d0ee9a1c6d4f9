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
from megatron_loss_agg.mcore.reading.offsets import OFFSET_KEYS
from megatron_loss_agg.microbatch import listed

_ROWS = ("tokens", "input_ids", "text", "labels")  # keys, of which the first that is present counts
_UNREAD = ("rejected", "sample_weights", *OFFSET_KEYS)
_READER = (
    "give a function batch -> LateMicrobatch (--loss-aggregation-batch module:name, or in a loop "
    "of your own LossHook(read_batch=...))"
)
_POSSIBLE = (
    "mode sum, constant, sample_sum, sample_mean or microbatch_mean; or token_mean as the only "
    "term, under --calculate-per-token-loss"
)
_OF_TOKENS = frozenset({"masks", "stages", "dataset", "prompt", "rollout"})
"""What extensions may need, and is not known before the step."""
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
    given = batch if isinstance(batch, Mapping) else {}
    rows = next((given[key] for key in _ROWS if key in given), None)
    if not isinstance(rows, Tensor) or rows.dim() != 2:
        raise MaskError(
            f"the data iterator gave {sorted(given) or type(batch).__name__}; expected a mapping "
            f"with one of the tensors {', '.join(_ROWS)}, [samples, seq], to count its rows: "
            f"otherwise {_READER}"
        )
    unread = [key for key in _UNREAD if given.get(key) is not None]
    if unread:
        raise GroupError(
            f"the batch has the keys {unread} beside a mask that the model makes; expected one "
            f"sample in each row, none rejected and none weighted: otherwise {_READER}"
        )
    return LateMicrobatch(rows.shape[0])


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
    """`check_possible` and `check_host` for a call of the schedule, a `mcore.host.Call`."""
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
    aggregations = [term.aggregation for term in terms.values()]
    refused = [repr(x.label) for x in aggregations if not _is_possible(x, alone=len(terms) == 1)]
    if any(x.empty == "skip" and x.across is not None for x in aggregations):
        refused.append("empty='skip'")
    if empty_step != "step":
        refused.append(f"empty_step={empty_step!r}")
    if averages_quotients:
        refused.append("Loop(averages_quotients=True) (Megatron's --sft)")
    refused += [f"an extension that needs {x!r}" for x in sorted(_OF_TOKENS.intersection(needs))]
    if refused:
        raise ModeError(
            f"{' and '.join(refused)} with a mask that the model makes (--loss-aggregation-mask "
            f"model), which is not known before the step; expected {_POSSIBLE}; without --sft and "
            "--loss-aggregation-empty, -empty-step, -mtp, -moe and -report-datasets"
        )


def _is_possible(aggregation: LossAggregation, alone: bool) -> bool:
    """Whether its weights need no sums over other microbatches, or the host divides by them."""
    known = (None, "sample", "microbatch")
    within, across = aggregation.within, aggregation.across
    if aggregation.function is not None or across not in known:
        return False
    return within in known or (within == "step" and alone)


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
                "'token_mean' of masks that the model makes, without calculate_per_token_loss, "
                f"under which the host divides by their tokens; expected {_POSSIBLE}"
            )
        return
    scaled = [name for name in _SCALED_BY_TOKENS if getattr(config, name, None) is not None]
    if per_token and scaled:
        raise HostError(
            f"the model's {scaled[0]} with calculate_per_token_loss and masks that the model "
            "makes: the host scales a loss of its own by tokens of the step that are not known; "
            "expected calculate_per_token_loss off, or mode token_mean"
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
            "batch; expected [samples, seq], or LateMicrobatch(samples=...) with the model's number"
        )
    if packed is not None and samples > 1 and aggregation.within == "sample":
        raise GroupError(
            f"{aggregation.label!r} with {samples} samples packed by the script, whose masks the "
            "model makes; expected samples in rows, or another mode"
        )
