"""A microbatch as the loss sees it: mask, sequence bounds and groups.

Suffixes: ``_S`` samples, ``_T`` tokens.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_loss_agg.aggregation import BY_ID, WITHOUT_IDS, Unit
from megatron_loss_agg.errors import DataError
from megatron_loss_agg.tensors import check_tensors, described, detached, is_plain

Ids = Tensor | Sequence[str]
"""One id per sample: int64 [samples], or strings."""
BY_SAMPLE = {f"{unit}_ids": torch.int64 for unit in BY_ID}
BY_SAMPLE |= {"rejected": torch.bool, "sample_weights": torch.float64}
"""Fields with a value for each sample, and the dtype they are counted in."""


@dataclass(frozen=True, eq=False)
class Microbatch:
    """The loss mask of one microbatch of this rank, and how its tokens group into samples.

    Rows (bshd): ``loss_mask`` is [samples, seq]. Packed (thd): it is [tokens] or [1, tokens], and
    ``cu_seqlens`` [samples + 1] splits it. If sequences are padded inside the pack, sample ``s``
    starts at ``cu_seqlens_padded[s]`` and is ``cu_seqlens[s + 1] - cu_seqlens[s]`` long; the mask
    must be 0 outside all samples.

    Args:
        loss_mask: non-negative and finite; may be fractional.
        cu_seqlens: integer offsets from 0, non-decreasing.
        cu_seqlens_padded: offsets in the padded pack; ``cu_seqlens`` itself when absent.
        prompt_ids: one per sample; equal ids are one prompt, over all microbatches and ranks. int64
            [samples]; or strings, which become int64 by a hash (BLAKE2b) that is the same on every
            machine. Two of a million distinct strings collide with probability 3e-8.
        rollout_ids: likewise for samples cut from one rollout.
        dataset_ids: likewise for samples of one data set.
        ids: likewise for groups of any other name, as levels of ``nested_mean``.
        rejected: bool [samples]; True for samples of weight 0. `LossAggregation.rejected` says
            whether they count in the denominators.
        sample_weights: floating-point [samples], finite and >= 0; multiply the weights of each
            sample's tokens. `LossAggregation.sample_weights` says whether they count in the
            denominators; if it does, every sample of the step has one. A function of mode
            ``custom`` applies them itself.
        token_factors: real numbers in the shape of ``loss_mask``, finite, also negative or 0; they
            multiply the weights of tokens, those of a function of mode ``custom`` too, and are in
            no denominator: ``w_t = m_t * f_t * c_s``.
        token_ids: integers that tell tokens apart, as the model is called with: labels, tokens or
            positions; a tensor with as many elements as the mask, or several. The hook recognises
            by them how the script splits the microbatch over context-parallel ranks.
        routed_tokens: Megatron's token count under ``calculate_per_token_loss``, if not the active
            tokens: how many tokens the model routes to experts, over all context-parallel ranks.
            It scales the losses that the host adds by itself, such as the router's, and not the
            aggregated loss. All microbatches of a step have it, or none.

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
    token_factors: Tensor | None = None
    token_ids: Any = ()  # a tuple of tensors in the mask's shape once constructed
    routed_tokens: Any = None  # int

    def __post_init__(self) -> None:
        mask = self.loss_mask
        if not is_plain(mask):
            raise DataError(f"loss_mask is {described(mask)}; expected a real, dense tensor")
        self._check_layout()
        if (factors := self.token_factors) is not None:
            check_tensors(DataError, "real", loss_mask=mask, token_factors=factors)
        for name in BY_SAMPLE:
            if (given := getattr(self, name)) is not None:
                object.__setattr__(self, name, checked_by_sample(name, given, self.num_samples))
        if not isinstance(self.ids, Mapping) or self.ids.keys() & {*WITHOUT_IDS, *BY_ID}:
            raise DataError(
                f"ids={self.ids!r}; expected a mapping by names of your own, and for others "
                "prompt_ids=, rollout_ids= or dataset_ids="
            )
        of_names = {
            unit: checked_by_sample(f"{unit}_ids", x, self.num_samples)
            for unit, x in self.ids.items()
        }
        object.__setattr__(self, "ids", of_names)
        given = (self.token_ids,) if isinstance(self.token_ids, Tensor) else (*self.token_ids,)
        for ids in given:
            if not holds_integers(ids) or ids.numel() != mask.numel():
                raise DataError(
                    f"token_ids is {described(ids)} beside a loss_mask of {mask.numel()} elements; "
                    "expected an integer for each token"
                )
        object.__setattr__(self, "token_ids", tuple(ids.reshape(mask.shape) for ids in given))
        routed = self.routed_tokens
        if routed is not None and (not isinstance(routed, int) or routed < 0):
            raise DataError(f"routed_tokens={routed!r}; expected an int >= 0, such as x.numel()")

    @property
    def num_samples(self) -> int:
        """Number of samples, empty ones included."""
        if self.cu_seqlens is None:
            return self.loss_mask.shape[0]
        return self.cu_seqlens.numel() - 1

    def ids_of(self, unit: Unit) -> Tensor | None:
        """int64 [samples]; None if it has none."""
        return getattr(self, f"{unit}_ids") if unit in BY_ID else self.ids.get(unit)

    @property
    def sample_starts(self) -> Tensor | None:
        """Offsets of the samples in the (padded) pack, [samples + 1]; None for rows."""
        return self.cu_seqlens if self.cu_seqlens_padded is None else self.cu_seqlens_padded

    def sample_index(self, position: Tensor | None = None) -> Tensor | None:
        """Index of each token's sample, ``num_samples`` outside all samples; None for rows.

        Args:
            position: int64 positions in the pack; when absent all of them, in order.
        """
        if self.cu_seqlens is None or self.sample_starts is None:
            return None
        if position is None:
            position = torch.arange(self.loss_mask.numel(), device=self.loss_mask.device)
        starts_S = self.sample_starts.to(position)
        length_S = pad(self.cu_seqlens.diff(), (0, 1)).to(position)
        sample_T = torch.searchsorted(starts_S[1:].contiguous(), position, right=True)
        inside = position - starts_S[sample_T] < length_S[sample_T]
        return torch.where(inside, sample_T, self.num_samples)

    def copied(self) -> Microbatch:
        """With tensors of its own, but the `token_ids`."""
        return self.changed(lambda x: detached(x).clone())

    def changed(self, change: Callable[[Tensor], Tensor]) -> Microbatch:
        """A copy with each tensor but the `token_ids` changed; itself if none changes."""
        given = {name: x for name, x in vars(self).items() if isinstance(x, Tensor)}
        own: dict[str, Any] = {n: y for n, x in given.items() if (y := change(x)) is not x}
        ids = {unit: change(x) for unit, x in self.ids.items()}
        if any(ids[unit] is not x for unit, x in self.ids.items()):
            own["ids"] = ids
        if not own:
            return self
        other = copy.copy(self)  # shapes and dtypes are as they were, and were checked
        vars(other).update(own)
        return other

    def _check_layout(self) -> None:
        """Raise unless the shapes of mask and offsets are those of rows, or of a pack."""
        shape, tokens = tuple(self.loss_mask.shape), self.loss_mask.numel()
        offsets: Any = self.cu_seqlens
        if offsets is None and self.cu_seqlens_padded is not None:
            raise DataError("cu_seqlens_padded without cu_seqlens; give the real offsets too")
        if len(shape) != 2 if offsets is None else shape not in ((tokens,), (1, tokens)):
            raise DataError(
                f"loss_mask has shape {shape} {'without' if offsets is None else 'beside'} "
                "cu_seqlens; expected [samples, seq] without, or [tokens] or [1, tokens] beside it"
            )
        for name in ("cu_seqlens", "cu_seqlens_padded"):
            x = getattr(self, name)
            if x is not None and not (are_offsets(x) and x.shape == offsets.shape):
                raise DataError(
                    f"{name} is {described(x)}; expected int32 or int64 [samples + 1], as many as "
                    "in cu_seqlens"
                )


MicrobatchOfTerms = Microbatch | Mapping[str, Microbatch]
"""One for all terms of the loss, or one for each by name if their masks differ."""


def of_term(name: str, microbatch: MicrobatchOfTerms) -> Microbatch:
    """The microbatch of one term."""
    if not isinstance(microbatch, Mapping):
        return microbatch
    if name not in microbatch:
        raise DataError(
            f"a microbatch with masks for {sorted(microbatch)} has none for the term {name!r}; "
            "expected one Microbatch for each term"
        )
    return microbatch[name]


def for_each_term(change: Callable[[Any], Any], microbatch: Any) -> Any:
    """``change(microbatch)``; of a mapping by term, of each, and terms that share one still do."""
    if not isinstance(microbatch, Mapping):
        return change(microbatch)
    changed = {id(x): change(x) for x in microbatch.values()}
    return {name: changed[id(x)] for name, x in microbatch.items()}


def listed(microbatches: Any) -> list[Any]:
    """A list, since the microbatches are iterated over once per term."""
    if not isinstance(microbatches, Iterable):
        raise DataError(f"a {type(microbatches).__name__}; expected a list of Microbatch")
    return list(microbatches)


def tensors_in(x: Any) -> list[Tensor]:
    """The tensors in mappings, lists and tuples."""
    if isinstance(x, Tensor):
        return [x]
    if isinstance(x, Mapping):
        x = x.values()
    elif not isinstance(x, (list, tuple)):
        return []
    return [tensor for part in x for tensor in tensors_in(part)]


def checked_by_sample(name: str, given: Any, number: int) -> Tensor:
    """The field ``name`` of `BY_SAMPLE`, or else ids, as a tensor [samples]; strings are hashed.

    Raises:
        DataError: another dtype (weights have any floating one), or not ``number`` values.
    """
    dtype = BY_SAMPLE.get(name, torch.int64)
    x = hashed(name, given) if dtype == torch.int64 and not isinstance(given, Tensor) else given
    fits = is_plain(x) and x.shape == (number,)
    if not fits or (x.dtype != dtype and not (x.is_floating_point() and dtype.is_floating_point)):
        kind = "floating-point" if dtype.is_floating_point else dtype
        raise DataError(
            f"{name} is {described(x)}; expected {kind} [{number}], one for each sample"
        )
    return x


def hashed(name: str, strings: Iterable[str]) -> Tensor:
    """int64 [samples] on the CPU: the first 8 bytes of each string's BLAKE2b hash."""
    values = list(strings) if isinstance(strings, Iterable) else [strings]
    if isinstance(strings, str) or not all(isinstance(x, str) for x in values):
        raise DataError(
            f"{name} is {described(strings)}; expected an int64 tensor [samples], or a sequence of "
            "strings"
        )
    digests = [hashlib.blake2b(x.encode(), digest_size=8).digest() for x in values]
    numbers = [int.from_bytes(digest, "little", signed=True) for digest in digests]
    return torch.tensor(numbers, dtype=torch.int64)


def are_offsets(x: object) -> TypeGuard[Tensor]:
    """Whether ``x`` is a non-empty int32 or int64 vector; its values are not checked."""
    if not isinstance(x, Tensor) or x.dtype not in (torch.int32, torch.int64):
        return False
    return x.dim() == 1 and len(x) >= 1


def rise_from_0(offsets: Tensor) -> bool:
    """Whether they start at 0 and never decrease; `diff` would wrap for huge ones."""
    return not offsets[0] and bool((offsets[1:] >= offsets[:-1]).all())


def holds_integers(x: object) -> TypeGuard[Tensor]:
    """Whether ``x`` is a tensor of integers, which booleans are not."""
    if not isinstance(x, Tensor) or x.is_floating_point() or x.is_complex():
        return False
    return x.dtype != torch.bool
