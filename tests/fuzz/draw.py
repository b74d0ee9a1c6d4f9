"""Draws inputs by seed: valid ones, and strange ones in place of them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor

F64 = torch.float64
FLOATS = (torch.float32, F64, torch.bfloat16, torch.float16)
INTEGERS = (torch.bool, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
NUMBERS = (math.nan, math.inf, -math.inf, -1.0, -0.0, 1e-320, 1e-45, 1e-39, 1e-30)
NUMBERS += (1e30, 3e38, 1e300)
LIMITS = (-(2**63), 2**63 - 1, -1, 2**31, 2**53 + 1, 7)
OBJECTS = (
    None,
    True,
    0,
    -1,
    2.5,
    math.nan,
    "token_mean",
    b"x",
    10**400,
    Fraction(1, 3),
    (),
    [],
    {},
    {1, 2},
    object,
    np.float32(0.5),
    np.array(1.0),
    np.ones((2, 3)),
    ["a", "b"],
    [1, 2],
    [[1.0], [2.0, 3.0]],
    [None],
)


EXOTIC: tuple[Callable[[Tensor], Any], ...] = (
    lambda x: x.to_sparse(),
    lambda x: x.float().reshape(1, -1).to_sparse_csr(),
    lambda x: torch.nested.nested_tensor([x, x]),
    lambda x: torch.nested.nested_tensor([x.reshape(-1)] * 2, layout=torch.jagged),
    lambda x: x.float().to_mkldnn(),
    lambda x: torch.zeros_like(x).to(torch.complex64),
)

RESHAPED: tuple[Callable[[Tensor], Any], ...] = (
    lambda x: x.unsqueeze(0),
    lambda x: x.reshape(-1),
    lambda x: x.sum(),
    lambda x: x[..., :0],
    lambda x: x[:-1],
    lambda x: torch.cat([x, x]),
    lambda x: x.transpose(0, -1),
    lambda x: x.reshape(-1)[:1].expand(3, 3),
    lambda x: x.flip(0),
)


class Draw(random.Random):
    """A generator whose every input may be replaced by a strange one, at a ``rate``."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.rate = self.choice((0.0, 0.05, 0.2))
        # Whether masks and divisors lie near the ends of fp32, where both answers are right.
        self.far = self.rate > 0 and self.flag(0.2)
        self.strange = self.far  # whether the input may be refused

    def maybe(self, x: Any) -> Any:
        """``x``, or something strange that resembles it."""
        if self.random() >= self.rate:
            return x
        self.strange = True
        if not isinstance(x, Tensor) or self.random() < 0.15:
            return self.choice(OBJECTS)
        kinds = (self._other_values, self._cast, self._reshaped, self._converted, self._exotic)
        return self.choice(kinds)(x)

    def option(self, x: Any, *others: Any) -> Any:
        """``x``, or one of ``others``, or a strange object."""
        if self.random() >= self.rate:
            return x
        self.strange = True
        return self.choice((*others, *OBJECTS))

    def flag(self, chance: float = 0.5) -> bool:
        return self.random() < chance

    def dressed(self, x: Tensor) -> Tensor:
        """The same values with other strides, or as part of a graph."""
        kind = self.randrange(6)
        if kind == 0 and x.dim() > 1:
            return x.transpose(0, -1).contiguous().transpose(0, -1)
        if kind == 1:
            return torch.stack([x, torch.zeros_like(x)], dim=-1)[..., 0]
        if kind == 2 and x.is_floating_point():
            return x.clone().requires_grad_()
        if kind == 3 and x.is_floating_point():
            return (-x)._neg_view()
        return x

    def _other_values(self, x: Tensor) -> Tensor:
        """With one element, or all of them, replaced."""
        x = x.detach().resolve_neg().clone(memory_format=torch.contiguous_format)
        if x.is_floating_point():
            element = torch.tensor(self.choice(NUMBERS), dtype=F64).to(x.dtype)
        elif x.dtype == torch.bool:
            element = torch.tensor(self.flag())
        else:
            info = torch.iinfo(x.dtype)
            element = torch.tensor(min(max(self.choice(LIMITS), info.min), info.max), dtype=x.dtype)
        if not x.numel() or self.flag():
            return element.expand(x.shape).clone()
        x.view(-1)[self.randrange(x.numel())] = element
        return x

    def _cast(self, x: Tensor) -> Tensor:
        return x.detach().to(self.choice(FLOATS + INTEGERS))

    def _reshaped(self, x: Tensor) -> Any:
        return self._tried(self.choice(RESHAPED), x)

    def _converted(self, x: Tensor) -> Any:
        x = x.detach().resolve_neg()
        x = x.float() if x.dtype == torch.bfloat16 else x  # numpy has none
        return self.choice((Tensor.tolist, Tensor.numpy))(x)

    def _exotic(self, x: Tensor) -> Any:
        return self._tried(self.choice(EXOTIC), x.detach())

    def _tried(self, change: Callable[[Tensor], Any], x: Tensor) -> Any:
        """None where torch cannot make it: a 0-dim tensor has no ``[:-1]``."""
        try:
            return change(x)
        except (RuntimeError, IndexError, NotImplementedError):
            return None
