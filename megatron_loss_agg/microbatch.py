"""What a microbatch tells about its loss: mask, sequence bounds, groups.

Suffixes: ``_S`` samples, ``_T`` tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from megatron_loss_agg.errors import AggregationError, GroupError, MaskError


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
        if not isinstance(self.loss_mask, Tensor) or self.loss_mask.is_complex():
            raise MaskError(f"loss_mask is {_kind(self.loss_mask)}; expected a real tensor")
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

    def sample_sums(self) -> Tensor:
        """fp64 [samples + 1]: every sample's mask sum, and last the mask outside of all samples."""
        mask = self.loss_mask.detach()
        if self.cu_seqlens is None or self.sample_starts is None:
            sums = mask.sum(dim=1, dtype=torch.float64)
            return torch.cat([sums, sums.new_zeros(1)])
        starts = self.sample_starts.to(mask.device, torch.int64)
        if self.cu_seqlens_padded is None:
            return _segment_sums(mask, starts)
        # Two segments a sample: its tokens, and its padding.
        begin_S = starts[:-1]
        end_S = begin_S + self.cu_seqlens.diff().to(starts)
        sums = _segment_sums(mask, torch.stack([begin_S, end_S], dim=1).view(-1))
        return torch.cat([sums[0:-1:2], sums[1::2].sum(dim=0, keepdim=True)])

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
            if not _is_offsets(offsets):
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
        if not isinstance(given, Tensor) or given.dtype != dtype:
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


def check_values(
    microbatches: Sequence[Microbatch],
    sums: Sequence[Tensor],
    places: Sequence[int] = (0,),
) -> AggregationError | None:
    """The first defect in the values of ``microbatches``, or None. One device synchronisation.

    Args:
        sums: what `Microbatch.sample_sums` returned for each.
        places: of each in its step, which the error names.
    """
    if not microbatches:
        return None
    defects = [_defects(m, total) for m, total in zip(microbatches, sums, strict=True)]
    found = on_cpu(defects, torch.bool).view(len(microbatches), len(_DEFECTS)).nonzero()
    if not found.numel():
        return None
    i, which = found[0].tolist()
    kind, text = _DEFECTS[which]
    microbatch = microbatches[i]
    offsets = {
        name: getattr(microbatch, name).tolist()
        for name in ("cu_seqlens", "cu_seqlens_padded")
        if kind is GroupError and getattr(microbatch, name) is not None
    }
    got = f" (of {microbatch.loss_mask.numel()} tokens; {offsets})" if offsets else ""
    return kind(f"microbatch {places[i]}: {text}{got}")


_DEFECTS: tuple[tuple[type[AggregationError], str], ...] = (
    (
        MaskError,
        "loss_mask has negative, infinite or NaN values, or some beyond fp32; expected finite "
        "values >= 0",
    ),
    (
        GroupError,
        "cu_seqlens must start at 0 and not decrease; expected the running sum of the lengths",
    ),
    (
        GroupError,
        "cu_seqlens_padded must start at 0 and not decrease; expected the running sum of the "
        "padded lengths",
    ),
    (
        GroupError,
        "a sample is longer than its padded place, or ends beyond the mask; expected cu_seqlens "
        "within cu_seqlens_padded within the tokens",
    ),
    (MaskError, "loss_mask is not 0 on tokens outside of every sample; expected 0 on padding"),
)


def _defects(microbatch: Microbatch, sums: Tensor) -> Tensor:
    """bool, one for each of `_DEFECTS`: whether ``microbatch`` has it."""
    mask = microbatch.loss_mask.detach()
    # A sum that is finite, in fp32 too, has no NaN or inf in it.
    finite = sums.sum().float().isfinite()
    good_mask = finite & (mask.amin() >= 0) if mask.numel() else finite
    if microbatch.cu_seqlens is None or microbatch.sample_starts is None:
        return torch.nn.functional.pad(~good_mask.view(1), (0, len(_DEFECTS) - 1))
    real = microbatch.cu_seqlens.to(mask.device, torch.int64)
    length_S = real.diff()
    good_real = good_padded = (real[0] == 0) & (length_S >= 0).all()
    good_places = real[-1] <= mask.numel()
    if microbatch.cu_seqlens_padded is not None:
        padded = microbatch.cu_seqlens_padded.to(real)
        place_S = padded.diff()
        good_padded = (padded[0] == 0) & (place_S >= 0).all()
        good_places = (length_S <= place_S).all() & (padded[-1] <= mask.numel())
    good = [good_mask, good_real, good_padded, good_places, sums[-1] == 0]
    return torch.stack(good).logical_not_()


def _segment_sums(mask: Tensor, starts: Tensor) -> Tensor:
    """fp64: sums of ``mask`` between ``starts``, the last one up to its end.

    Of starts that decrease or leave the mask the sums mean nothing, but nothing else is read.
    """
    bounds = torch.nn.functional.pad(starts, (0, 1), value=mask.numel())
    bounds = bounds.clamp_(0, mask.numel()).cummax(0).values
    return torch.segment_reduce(mask.reshape(-1).double(), "sum", offsets=bounds, unsafe=True)


def active_tokens(mask: Tensor) -> Tensor:
    """Positions with a mask above 0; a scalar. Faster on a CPU than `torch.count_nonzero`."""
    # In fp32, which is several times as fast again, numbers up to 2**24 are exact.
    computed = torch.float32 if mask.numel() <= 2**24 else torch.float64
    return mask.detach().sign().sum(dtype=computed)


def on_cpu(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """``parts`` as one vector on the CPU, of ``dtype`` also when there is none.

    One copy, and so one device synchronisation, if they are all on one device.
    """
    if len({part.device for part in parts}) > 1:
        parts = [part.cpu() for part in parts]
    return torch.cat([*parts]).to("cpu", dtype) if parts else torch.empty(0, dtype=dtype)


def _is_offsets(x: object) -> bool:
    integers = isinstance(x, Tensor) and x.dtype in (torch.int32, torch.int64)
    return integers and x.dim() == 1 and x.numel() >= 1  # type: ignore[attr-defined]


def _kind(x: object) -> str:
    if isinstance(x, Tensor):
        return f"a {x.dtype} tensor of shape {tuple(x.shape)}"
    return f"a {type(x).__name__}"
