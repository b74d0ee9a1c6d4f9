"""Dynamic packing: answers of various lengths into microbatches of a bounded number of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

Pack = dict[str, Tensor]
"""One microbatch. Per token [1, tokens]: the fields that were packed, ``position_ids`` and
``labels``. Offsets [samples + 1]: ``cu_seqlens``, ``cu_seqlens_padded``; ``prompt_ids`` [samples].
"""

IGNORED = 0  # the token and label at padding, where there is no loss


def bins(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices of ``lengths`` in bins that hold at most ``budget`` each: first fit, longest first.

    Raises:
        ValueError: a length does not fit in any bin.
    """
    filled: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[index]
        if length > budget:
            raise ValueError(f"a sample of {length} tokens; the token budget is {budget}: raise it")
        fits = next((b for b, free in enumerate(room) if free >= length), None)
        if fits is None:
            filled.append([])
            room.append(budget)
            fits = len(room) - 1
        filled[fits].append(index)
        room[fits] -= length
    return filled


def pack(fields: Mapping[str, Tensor], lengths: Tensor, prompt_ids: Tensor, multiple: int) -> Pack:
    """The rows of ``fields`` one after the other, each padded to a multiple of ``multiple``.

    Args:
        fields: [rows, width] each, including ``tokens``; ``loss_mask`` is 0 beyond the length.
            The width is a multiple of ``multiple``.
        lengths, prompt_ids: [rows].
    """
    width = fields["tokens"].shape[1]
    padded = -(-lengths // multiple) * multiple
    position = torch.arange(width, device=lengths.device).expand(len(lengths), -1)
    in_pack = position < padded.unsqueeze(1)
    real = position < lengths.unsqueeze(1)
    tokens = fields["tokens"].where(real, IGNORED)
    rows = {
        **fields,
        "tokens": tokens,
        "labels": tokens.roll(-1, dims=1),
        "position_ids": position,
    }
    flat = {name: value[in_pack].unsqueeze(0) for name, value in rows.items()}
    return {
        **flat,
        "cu_seqlens": _offsets(lengths),
        "cu_seqlens_padded": _offsets(padded),
        "prompt_ids": prompt_ids,
    }


def padding_like(other: Pack, multiple: int) -> Pack:
    """A microbatch without a sample, for a rank that has fewer microbatches than the others.

    It is one row of ``multiple`` tokens with mask 0. The model must run on it, since the other ranks
    wait in collectives. With ``cu_seqlens`` [0] it has no samples, so no denominator counts it.
    """
    tokens = {
        name: value.new_zeros(1, multiple) for name, value in other.items() if value.dim() == 2
    }
    offsets = torch.tensor([0, multiple], dtype=torch.int32, device=other["tokens"].device)
    return {
        **tokens,
        "cu_seqlens": offsets[:1],
        "cu_seqlens_padded": offsets,
        "prompt_ids": other["prompt_ids"][:0],
    }


def microbatches(
    fields: Mapping[str, Tensor],
    lengths: Tensor,
    prompt_ids: Tensor,
    *,
    multiple: int,
    budget: int,
    group: dist.ProcessGroup | None,
) -> list[Pack]:
    """This rank's rows as packs of at most ``budget`` tokens; the same number of packs on all ranks.

    Args:
        fields, lengths, prompt_ids, multiple: as in `pack`.
        group: the data-parallel ranks; None: only this rank. All of them call Megatron's schedule
            with the same number of microbatches.
    """
    padded = -(-lengths // multiple) * multiple
    packs = []
    for chosen in bins(padded.tolist(), budget):
        rows = torch.tensor(chosen, device=lengths.device)
        these = {name: value[rows] for name, value in fields.items()}
        packs.append(pack(these, lengths[rows], prompt_ids[rows], multiple))
    number = torch.tensor(len(packs), device=lengths.device)
    if group is not None:
        dist.all_reduce(number, op=dist.ReduceOp.MAX, group=group)
    return packs + [padding_like(packs[0], multiple)] * (int(number) - len(packs))


def _offsets(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(torch.int32)
