"""Loss masks by turns of a conversation: which assistant turns carry loss, and how much."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_loss_agg.errors import DataError

TURNS = ("all", "last", "each")


def is_answer(message: Mapping[str, Any]) -> bool:
    """True if a message is a turn of the assistant."""
    return str(message["role"]).lower() == "assistant"


@dataclass(frozen=True)
class Turns:
    """Turns of the assistant that carry loss.

    Args:
        which: ``all`` turns; the ``last`` turn of each conversation; or ``each``: all turns, with
            the mask of each divided by its sum, so that it weighs 1 whatever its length.
        field: the field of a message that says whether its turn carries loss.
    """

    which: str = "all"
    field: str | None = None

    def have_loss(self, messages: Sequence[Mapping[str, Any]], where: str) -> list[bool]:
        """For each message of a conversation, True if it carries loss.

        Raises:
            DataError: a message of the assistant says neither yes nor no; ``where`` names the line.
        """
        answers = [k for k, message in enumerate(messages) if is_answer(message)]
        if self.field is not None:
            for k in answers:
                value = messages[k].get(self.field)
                if value not in (0, 1):  # these include False and True
                    raise DataError(
                        f"the field {self.field!r} of the assistant's messages must be true, false, 1 "
                        f"or 0, got {value!r} for message {k + 1} in {where}. Correct it, or name "
                        "another field (--loss-aggregation-sft-turn-field; in explain --sft-turn-field)."
                    )
        chosen = answers[-1:] if self.which == "last" else answers
        return [
            k in chosen and (self.field is None or bool(message[self.field]))
            for k, message in enumerate(messages)
        ]

    def mask(self, mask_T: Tensor, turn_T: Tensor, has_loss: Sequence[bool]) -> Tensor:
        """The loss mask [tokens] of a row that holds the tokens of these turns.

        Args:
            mask_T: the mask of all turns.
            turn_T: int64, the turn that the token of each mask value belongs to.
            has_loss: for each turn, True if it carries loss.
        """
        has_loss_U = torch.tensor(has_loss, dtype=mask_T.dtype)
        mask_T = mask_T * has_loss_U[turn_T]
        if self.which != "each":
            return mask_T
        sum_U = torch.zeros_like(has_loss_U).index_add_(0, turn_T, mask_T)
        return torch.where(mask_T > 0, mask_T / sum_U[turn_T], 0.0).to(mask_T.dtype)


ALL_TURNS = Turns()
