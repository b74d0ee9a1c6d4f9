"""A microbatch as the loss sees it: its mask, the bounds of its samples, and their groups.

Suffixes: ``_S`` samples, ``_T`` tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_loss_agg.aggregation import BY_ID, WITHOUT_IDS, Unit
from megatron_loss_agg.errors import DataError
from megatron_loss_agg.ids import ids_from
from megatron_loss_agg.tensors import described, is_plain

BY_SAMPLE = {f"{unit}_ids": torch.int64 for unit in BY_ID}
BY_SAMPLE |= {"rejected": torch.bool, "sample_weights": torch.float64}
"""Fields with a value for each sample, and the dtype that each is counted in."""


_MASK_DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)
"""Dtypes that torch can compare and add up."""


class MicrobatchShape(NamedTuple):
    """The shape of a whole mask, before context parallelism, and the offsets of its samples."""

    mask: tuple[int, ...]
    starts: Tensor | None  # int64 [samples + 1] in the (padded) pack, on the CPU; None: rows
    local_cp_size: int | None = None  # of `Microbatch`


@dataclass(frozen=True, eq=False)
class Microbatch:
    """The loss mask of one microbatch of this rank, and how its tokens group into samples.

    Rows (bshd): ``loss_mask`` is [samples, seq]. Packed (thd): it is [tokens] or [1, tokens], and
    ``cu_seqlens`` [samples + 1] splits it. If sequences are padded inside the pack, sample ``s``
    starts at ``cu_seqlens_padded[s]`` and is ``cu_seqlens[s + 1] - cu_seqlens[s]`` long; the mask
    must be 0 outside all samples. For losses by sample, see `of_samples`.

    Args:
        loss_mask: non-negative and finite; may be fractional.
        cu_seqlens: integer offsets from 0, non-decreasing.
        cu_seqlens_padded: offsets in the padded pack; by default ``cu_seqlens`` itself. Ignored
            if there are no samples.
        prompt_ids: one per sample; equal ids are one prompt, over all microbatches and ranks. An
            int64 tensor [samples], ints, or strings. Strings become int64 by a hash (BLAKE2b) that
            is the same on every machine; among a million distinct strings, the probability of any
            collision is 3e-8.
        rollout_ids: likewise for samples cut from one rollout.
        dataset_ids: likewise for samples of one data set.
        ids: likewise for groups of any other name, as levels of ``nested_mean``.
        rejected: bool [samples]; True for samples of weight 0. `LossAggregation.rejected` says
            whether they count in the denominators.
        sample_weights: floating-point [samples], finite and >= 0; multiply the weights of each
            sample's tokens. `LossAggregation.sample_weights` says whether they count in the
            denominators. Either all samples of a step have one, or none.
        model_inputs: integer tensors of the whole microbatch that the model is called with: labels,
            tokens or positions, with as many elements as the mask; one tensor, or several. The hook
            uses them to verify how the script splits the microbatch over context-parallel ranks.
        routed_tokens: Megatron's token count under ``calculate_per_token_loss``, if it is not the
            number of active tokens: the number of tokens that the model routes to experts, over all
            context-parallel ranks. It scales the losses that Megatron itself adds, such as the
            router's, but not the aggregated loss. Either all microbatches of a step have it, or
            none.
        sequences: for losses by sample, the token sequences that they are computed from.
        local_cp_size: under dynamic context parallelism, the number of ranks that hold this
            microbatch, each a part of its tokens. These are consecutive ranks of the data- and
            context-parallel group, starting at a multiple of that number. Each passes the whole
            microbatch, and its samples are counted once. None: only this rank holds it.
        gid: a number that identifies the microbatch on all ranks that hold it. Without gids, these
            ranks must pass the microbatches that they hold together in the same order.

    Raises:
        DataError: a wrong shape or dtype. Values are checked by `StepPlan.build`.
    """

    loss_mask: Tensor
    cu_seqlens: Tensor | None = None
    prompt_ids: Any = None  # int64 [samples] once constructed, or None
    rollout_ids: Any = None
    _: KW_ONLY
    cu_seqlens_padded: Tensor | None = None
    dataset_ids: Any = None
    ids: Mapping[str, Any] = field(default_factory=dict)  # values like `prompt_ids`
    rejected: Tensor | None = None
    sample_weights: Tensor | None = None
    model_inputs: Any = ()  # a tuple of tensors in the mask's shape once constructed
    routed_tokens: Any = None  # int
    sequences: Microbatch | None = None
    local_cp_size: int | None = None
    gid: int | None = None

    def __post_init__(self) -> None:
        if not is_plain(self.loss_mask):
            raise DataError(
                f"loss_mask must be a real, dense tensor, got {described(self.loss_mask)}. Convert "
                "it."
            )
        if self.loss_mask.dtype not in _MASK_DTYPES:
            raise DataError(
                "loss_mask must be bool, uint8, a signed integer, or floating-point of 16 bits or "
                f"more, got {described(self.loss_mask)}. Convert it, for example with "
                "loss_mask.float()."
            )
        if are_offsets(self.cu_seqlens) and self.cu_seqlens.numel() == 1:
            object.__setattr__(self, "cu_seqlens_padded", None)  # no samples: all is padding
        self._check_shape()
        for name in BY_SAMPLE:
            values = getattr(self, name)
            if values is not None:
                object.__setattr__(self, name, checked_by_sample(name, values, self.num_samples))
        object.__setattr__(self, "ids", self._checked_ids())
        object.__setattr__(self, "model_inputs", self._checked_model_inputs())
        for name, least in (("routed_tokens", 0), ("local_cp_size", 1), ("gid", 0)):
            number = getattr(self, name)
            if number is not None and (not isinstance(number, int) or number < least):
                raise DataError(
                    f"{name} must be an int >= {least}, got {number!r}. Give a Python int."
                )

    @classmethod
    def of_samples(
        cls,
        number: int,
        *,
        sequences: Microbatch | None = None,
        routed_tokens: int | None = None,
        **by_sample: Any,
    ) -> Microbatch:
        """A microbatch with one loss per sample, or per pair (DPO, reward models).

        The modes treat each as a sample of one token: ``sample_mean`` is the mean over samples,
        ``prompt_mean`` the mean over prompts.

        Args:
            number: the number of samples, or of pairs.
            sequences: the token sequences that the losses are computed from, such as a chosen and a
                rejected answer for each pair; needed for `SampleLoss(per_token=)`.
            routed_tokens: by default the number of positions in ``sequences``.
            by_sample: ``prompt_ids``, ``rejected``, ``sample_weights`` and so on, as in
                `Microbatch`.

        Raises:
            DataError: a bad ``number`` or ``sequences``, or as for `Microbatch`.
        """
        if not isinstance(number, int) or number < 0:
            raise DataError(
                f"the number of samples must be an int >= 0, got {number!r}. Change it."
            )
        if sequences is not None and not isinstance(sequences, Microbatch):
            raise DataError(
                f"sequences must be a Microbatch, got a {type(sequences).__name__}. Give "
                "Microbatch(loss_mask, cu_seqlens) of all token sequences."
            )
        if routed_tokens is None and sequences is not None:
            routed_tokens = sequences.loss_mask.numel()
        mask = torch.ones(number, 1)
        return cls(mask, sequences=sequences, routed_tokens=routed_tokens, **by_sample)

    @cached_property
    def num_samples(self) -> int:
        """Number of samples, including empty ones."""
        if self.cu_seqlens is None:
            return self.loss_mask.shape[0]
        return self.cu_seqlens.numel() - 1

    @property
    def has_losses_by_sample(self) -> bool:
        """True if there is one loss per sample: made by `of_samples`, or rows of one token."""
        has_one_token = self.cu_seqlens is None and self.loss_mask.shape[1:] == (1,)
        return self.sequences is not None or has_one_token

    def ids_of(self, unit: Unit) -> Tensor | None:
        """Ids by ``unit``, int64 [samples]; None if the microbatch has none."""
        return getattr(self, f"{unit}_ids") if unit in BY_ID else self.ids.get(unit)

    @property
    def sample_starts(self) -> Tensor | None:
        """Offsets of the samples in the (padded) pack, [samples + 1]; None for rows."""
        return self.cu_seqlens if self.cu_seqlens_padded is None else self.cu_seqlens_padded

    @property
    def shape(self) -> MicrobatchShape:
        """The shape of the mask. Waits for the device if the offsets are on one."""
        starts = self.sample_starts
        if starts is not None:
            starts = starts.to("cpu", torch.int64)
        return MicrobatchShape(tuple(self.loss_mask.shape), starts, self.local_cp_size)

    def sample_index(self, position: Tensor | None = None) -> Tensor | None:
        """Index of each token's sample, ``num_samples`` outside all samples; None for rows.

        Args:
            position: int64 positions in the pack; by default all of them, in order.
        """
        if self.cu_seqlens is None or self.sample_starts is None:
            return None
        if position is None:
            position = torch.arange(self.loss_mask.numel(), device=self.loss_mask.device)
        starts_S = self.sample_starts.to(position)
        length_S = pad(self.cu_seqlens.diff(), (0, 1)).to(position)
        sample_T = torch.searchsorted(starts_S[1:].contiguous(), position, right=True)
        is_inside = position - starts_S[sample_T] < length_S[sample_T]
        return torch.where(is_inside, sample_T, self.num_samples)

    def copied(self) -> Microbatch:
        """A copy with a copy of every tensor except the `model_inputs`."""
        return self.with_tensors(lambda x: x.detach().clone())

    def tensors(self) -> list[Tensor]:
        """All tensors except the `model_inputs`."""
        values = (*vars(self).values(), *self.ids.values())
        behind = [] if self.sequences is None else self.sequences.tensors()
        return [*(x for x in values if isinstance(x, Tensor)), *behind]

    def with_tensors(self, change: Callable[[Tensor], Tensor]) -> Microbatch:
        """A copy with every tensor changed, except the `model_inputs`."""
        changed: dict[str, Any] = {
            name: change(x) for name, x in vars(self).items() if isinstance(x, Tensor)
        }
        ids = {unit: change(x) for unit, x in self.ids.items()}
        sequences = None if self.sequences is None else self.sequences.with_tensors(change)
        return replace(self, ids=ids, sequences=sequences, **changed)

    def _check_shape(self) -> None:
        """Raise DataError unless mask and offsets have the shapes of rows or of a pack."""
        shape, tokens = tuple(self.loss_mask.shape), self.loss_mask.numel()
        offsets: Any = self.cu_seqlens
        if offsets is None and self.cu_seqlens_padded is not None:
            raise DataError("cu_seqlens_padded needs cu_seqlens. Give the real offsets too.")
        if offsets is None and len(shape) != 2:
            raise DataError(
                f"loss_mask must be [samples, seq], got {shape}. Add the leading axis, or pass "
                "cu_seqlens for a pack."
            )
        if offsets is not None and shape not in ((tokens,), (1, tokens)):
            raise DataError(
                f"loss_mask of a pack must be [tokens] or [1, tokens], got {shape}. Flatten it, or "
                "drop cu_seqlens for rows."
            )
        for name in ("cu_seqlens", "cu_seqlens_padded"):
            x = getattr(self, name)
            if x is not None and not (are_offsets(x) and x.shape == offsets.shape):
                raise DataError(
                    f"{name} must be int32 or int64 [samples + 1], as long as cu_seqlens, got "
                    f"{described(x)}. Convert it."
                )

    def _checked_ids(self) -> dict[str, Tensor]:
        if not isinstance(self.ids, Mapping) or self.ids.keys() & {*WITHOUT_IDS, *BY_ID}:
            raise DataError(
                f"ids must be a mapping with names of your own, got {self.ids!r}. Give "
                "prompt_ids=, rollout_ids= or dataset_ids= for those units."
            )
        return {
            unit: checked_by_sample(f"{unit}_ids", x, self.num_samples)
            for unit, x in self.ids.items()
        }

    def _checked_model_inputs(self) -> tuple[Tensor, ...]:
        several = not isinstance(self.model_inputs, Tensor)
        inputs = tuple(self.model_inputs) if several else (self.model_inputs,)
        for x in inputs:
            if not holds_integers(x) or x.numel() != self.loss_mask.numel():
                raise DataError(
                    f"model_inputs must have an integer for each of the {self.loss_mask.numel()} "
                    f"elements of loss_mask, got {described(x)}. Give the whole labels or tokens."
                )
        return tuple(x.reshape(self.loss_mask.shape) for x in inputs)


TermMicrobatches = Microbatch | Mapping[str, Microbatch]
"""A microbatch for all terms of the loss; or one for each term by name, if their masks differ."""


def term_microbatches(microbatch: Any) -> list[Microbatch]:
    """The microbatch of each term; a single one if all terms share it.

    Raises:
        DataError: neither a `Microbatch` nor a mapping of term name to `Microbatch`.
    """
    several = list(microbatch.values()) if isinstance(microbatch, Mapping) else [microbatch]
    if not several or not all(isinstance(x, Microbatch) for x in several):
        keys = f" of {sorted(map(str, microbatch))}" if isinstance(microbatch, Mapping) else ""
        raise DataError(
            "microbatches must be of class Microbatch, or mappings of terms to Microbatch, got a "
            f"{type(microbatch).__name__}{keys}. Give read_batch(batch), or correct the function "
            "that reads batches (read_batch=, or --loss-aggregation-batch)."
        )
    return several


def term_microbatch(name: str, microbatch: Any) -> Microbatch:
    """The microbatch of the term ``name``, from one for all terms or one for each."""
    term_microbatches(microbatch)
    if isinstance(microbatch, Mapping) and name not in microbatch:
        raise DataError(
            f"a microbatch must have a mask for each term, got {sorted(microbatch)} without "
            f"{name!r}. Add that term's Microbatch."
        )
    return microbatch[name] if isinstance(microbatch, Mapping) else microbatch


def listed(microbatches: Any) -> list[Any]:
    """The microbatches as a list, since each term iterates over them."""
    if not isinstance(microbatches, Iterable) or isinstance(microbatches, Mapping):
        raise DataError(
            f"microbatches must be a list of Microbatch, got a {type(microbatches).__name__}. Give "
            "one for each microbatch."
        )
    return list(microbatches)


def brought_to_cpu(microbatches: Sequence[Microbatch]) -> list[Microbatch]:
    """Microbatches with all tensors on the CPU, except the `model_inputs`.

    Waits for the device once if any tensor is on it.
    """
    devices = {x.device for m in microbatches for x in m.tensors() if not x.is_cpu}
    if not devices:
        return list(microbatches)
    moved = [m.with_tensors(lambda x: x.to("cpu", non_blocking=True)) for m in microbatches]
    for device in devices:
        torch.accelerator.current_stream(device).synchronize()
    return moved


def checked_by_sample(name: str, values: Any, number: int) -> Tensor:
    """The field ``name`` of `BY_SAMPLE`, or ids of another name, as a tensor [samples].

    Raises:
        DataError: a wrong dtype (weights may have any floating one), or not ``number`` values.
    """
    dtype = BY_SAMPLE.get(name, torch.int64)
    x = values
    if dtype == torch.int64 and not isinstance(values, Tensor):
        x = ids_from(name, values)
    has_dtype = is_plain(x) and (
        x.dtype == dtype or (x.is_floating_point() and dtype.is_floating_point)
    )
    kind = "floating-point" if dtype.is_floating_point else dtype
    if not has_dtype:
        raise DataError(f"{name} must be {kind} [samples], got {described(x)}. Convert it.")
    if x.shape != (number,):
        raise DataError(
            f"{name} must be {kind} [{number}], one for each sample, got {described(x)}. Give one for "
            "each (a pack of several samples needs cu_seqlens)."
        )
    return x


def are_offsets(x: object) -> TypeGuard[Tensor]:
    """True if ``x`` is a non-empty int32 or int64 vector; its values are not checked."""
    if not isinstance(x, Tensor) or x.dtype not in (torch.int32, torch.int64):
        return False
    return x.dim() == 1 and len(x) >= 1


def starts_at_zero_and_never_decreases(offsets: Tensor) -> bool:
    # Compare neighbours, since differences of huge numbers would wrap.
    return not offsets[0] and bool((offsets[1:] >= offsets[:-1]).all())


def holds_integers(x: object) -> TypeGuard[Tensor]:
    """True if ``x`` is a tensor of integers. Booleans are not integers."""
    if not isinstance(x, Tensor) or x.is_floating_point() or x.is_complex():
        return False
    return x.dtype != torch.bool
