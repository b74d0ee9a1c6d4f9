"""What a microbatch tells about its loss: mask, sequence bounds, groups.

Suffixes: ``_S`` samples, ``_T`` tokens.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from megatron_loss_agg.errors import GroupError, MaskError


@dataclass(frozen=True, eq=False)
class Microbatch:
    """The loss mask of one microbatch of this rank, and how its tokens group into samples.

    Rows (bshd): ``loss_mask`` is [samples, seq]. Packed (thd): it is [tokens] or [1, tokens], and
    ``cu_seqlens`` [samples + 1] cuts it. Where sequences are padded inside the pack, sample ``s``
    starts at ``cu_seqlens_padded[s]`` and is ``cu_seqlens[s + 1] - cu_seqlens[s]`` long; mask
    outside of all samples must be 0.

    Args:
        loss_mask: non-negative and finite; may be fractional.
        cu_seqlens: integer offsets from 0, non-decreasing.
        cu_seqlens_padded: offsets in the padded pack; ``cu_seqlens`` itself when absent.
        prompt_ids: int64 [samples]; equal ids are one prompt, over all microbatches and ranks.
        rollout_ids: int64 [samples]; likewise for samples cut from one rollout.
        rejected: bool [samples]; samples that weigh nothing. Whether they are counted all the same
            is `LossAggregation.rejected`.

    Raises:
        MaskError, GroupError: a wrong shape or dtype. Values are checked by `StepPlan.build`.
    """

    loss_mask: Tensor
    cu_seqlens: Tensor | None = None
    prompt_ids: Tensor | None = None
    rollout_ids: Tensor | None = None
    _: KW_ONLY
    cu_seqlens_padded: Tensor | None = None
    rejected: Tensor | None = None

    def __post_init__(self) -> None:
        mask = self.loss_mask
        if not isinstance(mask, Tensor) or mask.is_complex() or not _is_dense(mask):
            raise MaskError(f"loss_mask is {_kind(mask)}; expected a real, dense tensor")
        if self.cu_seqlens is None:
            if self.cu_seqlens_padded is not None:
                raise GroupError("cu_seqlens_padded without cu_seqlens; give the real offsets too")
            if self.loss_mask.dim() != 2:
                raise MaskError(
                    f"loss_mask has shape {tuple(self.loss_mask.shape)}; expected [samples, seq], "
                    "or [tokens] with cu_seqlens"
                )
        else:
            self._check_packed(self.cu_seqlens)
        for name, dtype in _BY_SAMPLE.items():
            self._check_by_sample(name, dtype)

    @property
    def num_samples(self) -> int:
        """Number of samples, empty ones included."""
        if self.cu_seqlens is None:
            return self.loss_mask.shape[0]
        return self.cu_seqlens.numel() - 1

    @property
    def sample_starts(self) -> Tensor | None:
        """Offsets of the samples in the (padded) pack, [samples + 1]; None for rows."""
        return self.cu_seqlens if self.cu_seqlens_padded is None else self.cu_seqlens_padded

    def sample_index(self, position: Tensor | None = None) -> Tensor | None:
        """The sample that each token belongs to, or ``num_samples`` for none; None for rows.

        Args:
            position: int64 positions in the pack; all of them in order when absent.
        """
        if self.cu_seqlens is None or self.sample_starts is None:
            return None
        if position is None:
            position = torch.arange(self.loss_mask.numel(), device=self.loss_mask.device)
        starts_S = self.sample_starts.to(position)
        sample_T = torch.searchsorted(starts_S[1:].contiguous(), position, right=True)
        if self.cu_seqlens_padded is None or self.num_samples == 0:
            return sample_T
        # Past the last start there is no sample; clamp only to read a harmless length there.
        nearest_T = sample_T.clamp(max=self.num_samples - 1)
        length_S = self.cu_seqlens.diff().to(position)
        inside = position - starts_S[nearest_T] < length_S[nearest_T]
        return torch.where(inside, sample_T, self.num_samples)

    def _check_packed(self, cu_seqlens: Tensor) -> None:
        if self.loss_mask.dim() != 1 and (
            self.loss_mask.dim() != 2 or self.loss_mask.shape[0] != 1
        ):
            raise MaskError(
                f"loss_mask has shape {tuple(self.loss_mask.shape)} beside cu_seqlens; "
                "expected [tokens] or [1, tokens]"
            )
        for name in ("cu_seqlens", "cu_seqlens_padded"):
            offsets = getattr(self, name)
            if offsets is None:
                continue
            if not are_offsets(offsets):
                raise GroupError(
                    f"{name} is {_kind(offsets)}; expected int32 or int64 [samples + 1]"
                )
            if offsets.numel() != cu_seqlens.numel():
                raise GroupError(
                    f"{name} has {offsets.numel()} offsets and cu_seqlens has "
                    f"{cu_seqlens.numel()}; expected the same number"
                )

    def _check_by_sample(self, name: str, dtype: torch.dtype) -> None:
        given = getattr(self, name)
        if given is None:
            return
        expected = f"{dtype}".removeprefix("torch.")
        if not isinstance(given, Tensor) or given.dtype != dtype or not _is_dense(given):
            raise GroupError(
                f"{name} is {_kind(given)}; expected {_ARTICLE[dtype]} {expected} tensor [samples]"
            )
        if given.shape != (self.num_samples,):
            raise GroupError(
                f"{name} has shape {tuple(given.shape)}; expected one for each of the "
                f"{self.num_samples} samples"
            )


_BY_SAMPLE = {"prompt_ids": torch.int64, "rollout_ids": torch.int64, "rejected": torch.bool}
_ARTICLE = {torch.int64: "an", torch.bool: "a"}


def are_offsets(x: object) -> bool:
    """Whether ``x`` is a vector of integers, and has a first one; its values are not looked at."""
    if not isinstance(x, Tensor) or x.dtype not in (torch.int32, torch.int64):
        return False
    return _is_dense(x) and x.dim() == 1 and x.numel() >= 1


def _is_dense(x: Tensor) -> bool:
    return x.layout == torch.strided and not x.is_nested


def _kind(x: object) -> str:
    if isinstance(x, Tensor) and not _is_dense(x):
        return f"a sparse or nested {x.dtype} tensor"
    if isinstance(x, Tensor):
        return f"a {x.dtype} tensor of shape {tuple(x.shape)}"
    return f"a {type(x).__name__}"
