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
from megatron_loss_agg.errors import DataError, OptionError

_ROWS = ("tokens", "input_ids", "text", "labels")  # keys, of which the first that is present counts
_READER = (
    "give a function batch -> LateMicrobatch (--loss-aggregation-batch module:name, or in a loop "
    "of your own LossHook(read_batch=...))"
)
_OF_TOKENS = frozenset({"masks", "stages", "dataset", "prompt", "rollout"})
"""What extensions may need, and is not known before the step."""
_SCALED_BY_TOKENS = ("num_moe_experts", "mtp_num_layers", "experimental_attention_variant")
"""Settings of models with a further loss, which the host scales by the tokens of the step."""


@dataclass(frozen=True)
class LateMicrobatch:
    """A microbatch of this rank whose loss mask the model makes.

    Args:
        samples: number of samples, those without a loss token included.
    """

    samples: int


def read_samples(batch: Any) -> LateMicrobatch:
    """The number of rows of a batch; every row is one sample.

    Counts the rows of the first of the keys ``tokens``, ``input_ids``, ``text`` and ``labels``.

    Raises:
        DataError: there is none, or it is no tensor [samples, seq].
        DataError: the batch has rejected samples or sample weights.
    """
    given = batch if isinstance(batch, Mapping) else {}
    rows = next((given[key] for key in _ROWS if key in given), None)
    if not isinstance(rows, Tensor) or rows.dim() != 2:
        raise DataError(
            f"the data iterator gave {sorted(given) or type(batch).__name__}; expected a mapping "
            f"with one of the tensors {', '.join(_ROWS)}, [samples, seq], to count its rows: "
            f"otherwise {_READER}"
        )
    for key in ("rejected", "sample_weights"):
        if given.get(key) is not None:
            raise DataError(
                f"the batch has the key {key!r} beside a mask that the model makes, of whose "
                "samples only the number is read; expected none: drop it"
            )
    return LateMicrobatch(rows.shape[0])


def check_possible(
    terms: Mapping[str, Term],
    *,
    needs: Collection[str],
    empty_step: str,
    averages_quotients: bool,
    per_token: bool | None = None,  # calculate_per_token_loss; None: not known yet
    config: Any = None,  # of the model
) -> None:
    """Raise OptionError for what needs the tokens of the whole step before the first forward pass."""
    aggregations = [term.aggregation for term in terms.values()]
    # `token_mean` is divided by the host, which has one divisor.
    known = {"sample", "microbatch", *(["step"] if len(terms) == 1 else [])}
    refused = [repr(x.label) for x in aggregations if x.function or not x.units <= known]
    if any(x.empty == "skip" and x.across is not None for x in aggregations):
        refused.append("empty='skip'")
    if any(x.sample_weights is not None for x in aggregations):
        refused.append("sample_weights")
    if empty_step != "step":
        refused.append(f"empty_step={empty_step!r}")
    if averages_quotients:
        refused.append("Loop(averages_quotients=True) (Megatron's --sft)")
    refused += [f"an extension that needs {x!r}" for x in sorted(_OF_TOKENS.intersection(needs))]
    divided_by_host = any(x.within == "step" for x in aggregations)
    if divided_by_host and per_token is False:
        refused.append("calculate_per_token_loss=False and 'token_mean'")
    if per_token and not divided_by_host:
        scaled = [x for x in _SCALED_BY_TOKENS if getattr(config, x, None) is not None]
        refused += [f"calculate_per_token_loss and the model's {x}" for x in scaled]
    if refused:
        raise OptionError(
            f"{' and '.join(refused)} with a mask that the model makes (--loss-aggregation-mask "
            "model), whose tokens are not known before the step; expected mode sum, constant, "
            "sample_sum, sample_mean or microbatch_mean, and --calculate-per-token-loss only for "
            "models without experts and multi-token prediction; or token_mean alone, with it; and "
            "none of --sft, --loss-aggregation-empty, -empty-step, -mtp, -moe, -report-datasets"
        )


def check_mask(
    mask: Tensor, samples: int, packed: int | None, aggregation: LossAggregation
) -> None:
    """Raise DataError unless a model's mask has ``samples`` samples that the mode can tell apart.

    ``packed``: the number of sequences that the model was called with; None: rows.
    """
    rows = mask.shape[0] if mask.dim() == 2 else None
    found, what = (rows, "rows") if packed is None else (packed, "packed sequences")
    cannot_tell = packed is not None and samples > 1 and aggregation.within == "sample"
    if found != samples or cannot_tell:
        raise DataError(
            f"{aggregation.label!r} of a model's mask of shape {tuple(mask.shape)} with {found} "
            f"{what}, for {samples} samples of the batch; expected [samples, seq], or in modes "
            "other than sample_mean as many packed sequences: see LateMicrobatch(samples=...)"
        )
