"""The samples of one optimizer step, as verl's workers get them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.host.steps import sequences

PROMPTS = ("ab", "ab", "c3", "d4", "ab", "c3", "d4", "e5", "e5", "c3")
SESSIONS = (0, 0, 0, 0, 1, 1, 1, 0, 1, 2)  # samples 0 and 1 are one rollout
PADDING = 2  # rows that verl adds, so that ranks get equally many
ROWS = len(PROMPTS) + PADDING


def made_up(i: int) -> dict[str, Tensor]:
    """What rollout and trainer leave for every token of sample ``i``'s answer, in fp32."""
    from tests.host.rl import data_of

    names = ("old_log_probs", "ref_log_prob", "advantages", "values", "returns")
    data = data_of(sequences()[i].tokens, sequences()[i].labels)
    return {name: value.float() for name, value in zip(names, data, strict=True)}


def row(i: int) -> dict[str, Any]:
    """Sample ``i``, or padding, as verl's agent loop writes it down."""
    if i < len(PROMPTS):
        text, mask = sequences()[i], torch.tensor(sequences()[i].sample.mask).long()
        prompts, responses, fields = text.tokens[:1], text.labels, made_up(i)
        fields |= {"uid": PROMPTS[i], "session_id": SESSIONS[i]}
    else:
        prompts, responses, mask = torch.ones(4).long(), torch.ones(1).long(), torch.zeros(1).long()
        fields = {name: torch.zeros(1) for name in made_up(0)}
        fields |= {"uid": "pad0", "session_id": i}
    fields["is_padding"] = torch.tensor(i >= len(PROMPTS))
    whole = torch.cat([prompts, responses])
    teacher = F.pad(fields["ref_log_prob"], (len(prompts) - 1, 1))  # where tokens are predicted
    fields["teacher_logprobs"] = teacher.unsqueeze(-1)
    positions = torch.arange(len(whole))
    fields |= {"prompts": prompts, "responses": responses, "input_ids": whole}
    return {**fields, "position_ids": positions, "response_mask": mask, "loss_mask": mask}


def columns(rows: Sequence[int]) -> dict[str, Any]:
    """The batch of ``rows``, ragged, as verl's workers get it."""
    chosen = [row(i) for i in rows]
    found = {name: [fields[name] for fields in chosen] for name in chosen[0]}
    return {
        name: values if not isinstance(values[0], Tensor) else _column(values)
        for name, values in found.items()
    }


def _column(values: list[Tensor]) -> Tensor:
    if values[0].dim() == 0:
        return torch.stack(values)
    ragged: Tensor = torch.nested.as_nested_tensor(values, layout=torch.jagged)
    return ragged


def rows_of(rank: int, ranks: int) -> list[int]:
    """The same number on every rank, of which the last rank has the padding."""
    each = ROWS // ranks
    return list(range(rank * each, (rank + 1) * each))
