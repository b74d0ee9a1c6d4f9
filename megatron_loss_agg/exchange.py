"""The exchange of a step: the samples of every rank become one table, the same on all ranks.

A rank sends two rows of int64 and no objects. The first is a `Header` of fixed length. The headers
of all ranks determine the `Columns`, and thus the length of the second row, which holds the columns
of microbatches and of samples. Every column is padded to the length needed by the rank with the
most microbatches or samples, so that all ranks are decoded at once:

    [ranks, length]  ->  [ranks, columns, most samples]  ->  [samples of the step] of each column

Ranks gather texts as objects only if one of them failed or they disagree on names.

Suffixes: ``_R`` one number for each rank, ``_M`` one for each microbatch, ``_S`` one for each sample.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loss_agg.aggregation import BY_ID, Unit
from megatron_loss_agg.collectives import (
    all_gather,
    failing_together,
    gather_objects,
    ranks_of,
    send_failure,
)
from megatron_loss_agg.counting import Samples, Sequences, read_samples
from megatron_loss_agg.dynamic_cp import HeldMicrobatches
from megatron_loss_agg.errors import OptionError
from megatron_loss_agg.ids import hashed
from megatron_loss_agg.microbatch import Microbatch, MicrobatchShape, brought_to_cpu

_READING = "reading the step"
_PADDING = -1
"""Pads columns of microbatches. No microbatch has this number of samples."""
_ANOTHER_RANK_DIFFERED = (
    "another rank has a microbatch that the first of its context-parallel ranks lacks. Fix its error "
    "first."
)


class Header(NamedTuple):
    """Facts about one rank that the others derive the columns from. All are integers."""

    failed: int = 0
    terms: int = 0  # a hash of the terms in words
    has_masks_by_term: int = 0
    num_microbatches: int = 0  # those that the rank sends
    num_samples: int = 0  # likewise
    # A column with a single value on all ranks is not sent.
    has_weights: int = 0
    has_rejected: int = 0
    has_routed_tokens: int = 0
    has_cp_sizes: int = 0
    has_prompt_ids: int = 0
    has_rollout_ids: int = 0
    has_dataset_ids: int = 0
    names: int = 0  # a hash of the user's own unit names; 0 for none


@dataclass(frozen=True)
class Columns:
    """The columns of every rank's row: first columns of microbatches, then columns of samples."""

    microbatch_names: Sequence[str]
    sample_names: Sequence[str]
    most_microbatches: int
    most_samples: int

    @classmethod
    def of(cls, headers: Tensor, names: Sequence[Unit] = ()) -> Columns:
        """The columns that ranks with these headers send.

        Args:
            headers: int64 [ranks, fields of `Header`].
            names: the user's own units that have ids on every rank.
        """
        most, least = Header(*headers.amax(0).tolist()), Header(*headers.amin(0).tolist())
        microbatch_names = ["num_samples", "active_tokens"]
        microbatch_names += ["routed_tokens"] if most.has_routed_tokens else []
        microbatch_names += ["num_holders", "number"] if most.has_cp_sizes else []
        sample_names = ["mask_sum"]
        sample_names += ["weight"] if most.has_weights else []
        sample_names += ["rejected"] if most.has_rejected else []
        units = [unit for unit in BY_ID if getattr(least, f"has_{unit}_ids")]
        sample_names += [f"{unit}_ids" for unit in sorted([*units, *names])]
        # At least one microbatch, since collectives do not accept empty tensors.
        return cls(microbatch_names, sample_names, max(most.num_microbatches, 1), most.num_samples)

    @property
    def has_cp_sizes(self) -> bool:
        """True if microbatches have their own context-parallel ranks."""
        return "num_holders" in self.microbatch_names

    @property
    def lengths(self) -> tuple[int, int]:
        """The lengths of a row's two parts."""
        return (
            len(self.microbatch_names) * self.most_microbatches,
            len(self.sample_names) * self.most_samples,
        )

    def blocks(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Views of ``rows``, [ranks, length]: columns of microbatches, and columns of samples.

        Their shapes are [ranks, columns, most microbatches] and [ranks, columns, most samples].
        """
        microbatches, samples = rows.split(self.lengths, dim=1)
        return (
            microbatches.view(len(rows), len(self.microbatch_names), self.most_microbatches),
            samples.view(len(rows), len(self.sample_names), self.most_samples),
        )


class RankTable:
    """The microbatches and samples of one rank.

    Args:
        microbatches: of one term, or of all terms that share masks.
        units: their ids are read if every microbatch with samples has them.
        rank, num_ranks: this rank in the process group of the exchange, and the group's size.

    Raises:
        DataError: bad masks, offsets or sample weights; or a ``local_cp_size`` of more ranks than
            there are.
    """

    def __init__(
        self,
        microbatches: Sequence[Microbatch],
        units: Sequence[Unit],
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        self.microbatches = microbatches
        self.rank, self._num_ranks = rank, num_ranks
        on_cpu = brought_to_cpu(microbatches)
        self.samples = read_samples(on_cpu, units)
        self.shapes: list[MicrobatchShape] = [m.shape for m in on_cpu]
        self.sequences = [
            None if m.sequences is None else Sequences.of(m.sequences) for m in on_cpu
        ]
        self.sizes = [m.num_samples for m in on_cpu]
        # This rank sends everything, unless another rank is the first to hold a microbatch.
        self.sent_microbatches: slice | Tensor = slice(None)
        self.sent_samples: slice | Tensor = slice(None)
        self.has_cp_sizes = any(m.local_cp_size is not None for m in microbatches)
        has_gids = any(m.gid is not None for m in microbatches)
        if self.has_cp_sizes or has_gids:  # raises here, before the exchange, if they are bad
            self.sent_microbatches = self.held.is_first
            self.sent_samples = self.held.is_first[self.samples.microbatch]

    @cached_property
    def held(self) -> HeldMicrobatches:
        """The microbatches under dynamic context parallelism, where several ranks may hold one."""
        return HeldMicrobatches(self.microbatches, self.rank, self._num_ranks)

    @property
    def names(self) -> list[Unit]:
        """The user's own units that have ids."""
        return sorted(self.samples.ids.keys() - {*BY_ID})

    def header(self, terms_hash: int = 0, has_masks_by_term: bool = False) -> Header:
        """This rank's header."""
        samples = self.samples
        return Header(
            terms=terms_hash,
            has_masks_by_term=has_masks_by_term,
            num_microbatches=len(samples.active_tokens[self.sent_microbatches]),
            num_samples=len(samples.mask_sum[self.sent_samples]),
            has_weights=bool((samples.weight != 1).any()),
            has_rejected=bool(samples.rejected.any()),
            has_routed_tokens=bool((samples.routed_tokens >= 0).any()),
            has_cp_sizes=self.has_cp_sizes,
            has_prompt_ids="prompt" in samples.ids,
            has_rollout_ids="rollout" in samples.ids,
            has_dataset_ids="dataset" in samples.ids,
            names=hashed("\n".join(self.names)) if self.names else 0,
        )

    def row(self, columns: Columns) -> Tensor:
        """The microbatches and samples that this rank sends: int64 [length of a row]."""
        row = torch.full((1, sum(columns.lengths)), _PADDING, dtype=torch.int64)
        microbatch_block, sample_block = columns.blocks(row)
        for name, column in zip(columns.microbatch_names, microbatch_block[0], strict=True):
            sent = self._microbatch_column(name)[self.sent_microbatches]
            column[: len(sent)] = sent
        for name, column in zip(columns.sample_names, sample_block[0], strict=True):
            sent = self._sample_column(name)[self.sent_samples]
            column[: len(sent)] = sent
        return row[0]

    def _microbatch_column(self, name: str) -> Tensor:
        if name == "num_samples":
            return torch.tensor(self.sizes, dtype=torch.int64)
        is_of_held = name in ("num_holders", "number")
        column: Tensor = getattr(self.held if is_of_held else self.samples, name)
        return column

    def _sample_column(self, name: str) -> Tensor:
        """As int64, fp64 numbers bit for bit, so that one collective sends all columns."""
        if name.endswith("_ids"):
            # A rank without samples may not have the name.
            return self.samples.ids.get(name.removesuffix("_ids"), self.samples.microbatch)
        column: Tensor = getattr(self.samples, name)
        return column.view(torch.int64) if column.is_floating_point() else column.long()


@dataclass(frozen=True, eq=False)
class StepTable:
    """The samples of all ranks, and which rows hold one rank's microbatches and samples."""

    samples: Samples
    rank_table: RankTable
    microbatch_rows: Tensor  # int64 [microbatches of the rank]
    sample_rows: slice | Tensor  # int64 [samples of the rank] if they are not a slice

    @classmethod
    def from_one_rank(cls, table: RankTable) -> StepTable:
        """The table of a step with one rank."""
        num_microbatches, num_samples = len(table.sizes), len(table.samples.mask_sum)
        return cls(table.samples, table, torch.arange(num_microbatches), slice(0, num_samples))


class TermsInWords(NamedTuple):
    """The terms of a loss, as ranks compare them."""

    words: str
    hash: int


@contextlib.contextmanager
def failing_in_exchange(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Wrap the code before an `exchange`: if it fails, the other ranks raise PeerError."""
    try:
        yield
    except BaseException as error:  # SystemExit and KeyboardInterrupt too
        if group is not None and ranks_of(group) > 1:
            _gather_headers(Header(failed=1), group)
            send_failure(error, group)
        raise


def exchange(
    terms: TermsInWords, tables: Mapping[str, RankTable], group: dist.ProcessGroup | None
) -> dict[str, StepTable]:
    """The table of all ranks for each term, in two collectives for each distinct table.

    All ranks of ``group`` must call, or fail in `failing_in_exchange`.

    Args:
        terms: must be the same on all ranks.
        tables: this rank's table for each term; terms that share masks have the same object.

    Returns:
        tables by term; the same object for all terms if they share masks on every rank.

    Raises:
        PeerError: another rank failed earlier.
        OptionError: the terms differ between ranks.
        DataError, PeerError: a microbatch is not held by the ranks that should hold it.
    """
    if group is None or ranks_of(group) == 1:
        distinct = {id(x): StepTable.from_one_rank(x) for x in tables.values()}
        return {name: distinct[id(x)] for name, x in tables.items()}
    first, *others = tables
    has_masks_by_term = len({*map(id, tables.values())}) > 1
    headers = _gather_headers(tables[first].header(terms.hash, has_masks_by_term), group)
    if bool(_values("failed", headers).any()):
        gather_objects(lambda: None, group, _READING)  # raises the PeerError
    if _differ("terms", headers):
        texts = dict.fromkeys(gather_objects(lambda: terms.words, group, _READING))
        raise OptionError(
            f"all ranks must have the same aggregations, got {' and '.join(texts)}. Give every "
            "rank the same terms in the same order."
        )
    table = _gather_table(tables[first], headers, group)
    if not bool(_values("has_masks_by_term", headers).any()):
        return dict.fromkeys(tables, table)
    further = {
        name: _gather_table(tables[name], _gather_headers(tables[name].header(), group), group)
        for name in others
    }
    return {first: table, **further}


def joined(rows: Tensor, columns: Columns, table: RankTable) -> StepTable:
    """The table of all ranks from their rows, int64 [ranks, length], on the rank of ``table``.

    Raises:
        DataError: another rank should hold a microbatch of this rank but does not.
    """
    microbatch_block, sample_block = columns.blocks(rows)
    is_microbatch = microbatch_block[:, 0] != _PADDING  # [ranks, most microbatches]
    num_samples_R = microbatch_block[:, 0].clamp(min=0).sum(1)
    is_sample = torch.arange(columns.most_samples) < num_samples_R.unsqueeze(1)
    values = {
        name: microbatch_block[:, c].masked_select(is_microbatch)
        for c, name in enumerate(columns.microbatch_names)
    }
    values |= {
        name: sample_block[:, c].masked_select(is_sample)
        for c, name in enumerate(columns.sample_names)
    }
    samples = _samples_from(values)
    if columns.has_cp_sizes:
        columns_M = (values[x] for x in ("num_holders", "number", "num_samples"))
        rows_M, rows_S = table.held.rows(is_microbatch.nonzero()[:, 0], *columns_M)
        return StepTable(samples, table, rows_M, rows_S)
    first_M, first_S = (int(x[: table.rank].sum()) for x in (is_microbatch, num_samples_R))
    return StepTable(
        samples,
        table,
        torch.arange(first_M, first_M + len(table.sizes)),
        slice(first_S, first_S + len(table.samples.mask_sum)),
    )


def _gather_headers(header: Header, group: dist.ProcessGroup) -> Tensor:
    """int64 [ranks, fields of `Header`]."""
    return all_gather(torch.tensor(header, dtype=torch.int64), group)


def _values(field: str, headers: Tensor) -> Tensor:
    """One field of all ranks' headers: int64 [ranks]."""
    return headers[:, Header._fields.index(field)]


def _differ(field: str, headers: Tensor) -> bool:
    values = _values(field, headers)
    return bool((values != values[0]).any())


def _gather_table(table: RankTable, headers: Tensor, group: dist.ProcessGroup) -> StepTable:
    names = table.names
    if _differ("names", headers):
        # A rank without samples has no microbatch that lacks ids.
        own = {*names} if len(table.samples.mask_sum) else None
        gathered = gather_objects(lambda: own, group, _READING)
        names = sorted(set.intersection(*([x for x in gathered if x is not None] or [set()])))
    columns = Columns.of(headers, names)
    rows = all_gather(table.row(columns), group)
    with failing_together([group], _ANOTHER_RANK_DIFFERED, when=columns.has_cp_sizes):
        return joined(rows, columns, table)


def _samples_from(values: Mapping[str, Tensor]) -> Samples:
    """The table of all ranks' samples, from the values of the columns that were sent."""
    num_samples_M, active_tokens = values["num_samples"], values["active_tokens"]
    mask_sum = values["mask_sum"].view(torch.float64)
    constant = {
        "weight": torch.ones_like(mask_sum).view(torch.int64),
        "rejected": torch.zeros_like(mask_sum, dtype=torch.bool),
        "routed_tokens": torch.full_like(active_tokens, -1),
    }
    values = {**constant, **values}
    return Samples(
        mask_sum=mask_sum,
        weight=values["weight"].view(torch.float64),
        rejected=values["rejected"].bool(),
        microbatch=torch.arange(len(num_samples_M)).repeat_interleave(num_samples_M),
        ids={x.removesuffix("_ids"): values[x] for x in values if x.endswith("_ids")},
        active_tokens=active_tokens,
        routed_tokens=values["routed_tokens"],
    )
