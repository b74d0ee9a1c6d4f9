"""Steps of several ranks, and a count of the collectives, for the tests over processes."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests import oracle
from tests.core.steps import IDS, flatten
from tests.oracle import Sample, Step

F64 = torch.float64
CONFIGS = [(mode, empty) for mode in sorted(oracle.INNER) for empty in ("count", "skip")]


class Collectives(TorchDispatchMode):
    """Names of the collectives that the calls inside made."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def divisor_of(mode: str) -> float | None:
    return 3.0 if mode in ("constant", "sum") else None


def random_step(seed: int, ranks: int) -> Step:
    """Ranks with 0 to 3 microbatches of 0 to 3 samples; groups lie across ranks at random."""
    rng = random.Random(seed)
    prompts, rollouts = rng.sample(IDS, 3), rng.sample(IDS, 4)

    def sample() -> Sample:
        fill = rng.choice([[0.0, 1.0], [1.0], [0.0], [0.0, 0.3, 2.5]])
        mask = tuple(rng.choice(fill) for _ in range(rng.randrange(6)))
        return Sample(mask, rng.choice(prompts), rng.choice(rollouts))

    return [
        [[sample() for _ in range(rng.randrange(4))] for _ in range(rng.randrange(4))]
        for _ in range(ranks)
    ]


def assert_weights(got: list[Any], expected: list[Any]) -> None:
    got, expected = (torch.tensor(flatten(x), dtype=F64) for x in (got, expected))
    torch.testing.assert_close(got, expected, rtol=1e-13, atol=0)


def fixed_step(ranks: int) -> Step:
    """Groups lie on several ranks; ranks differ in microbatches and samples."""
    return [
        [
            [Sample((1.0,) * (r + s + k), 7 if s == 0 else 2**53, 2**53 + s) for s in range(r + 1)]
            for k in range(1 + r % 3)
        ]
        for r in range(ranks)
    ]


FULL = Sample((1.0, 0.0, 1.0), prompt=1, rollout=-1)
EMPTY = Sample((0.0, 0.0), prompt=1, rollout=-1)
HOLES = [
    [[], [[FULL], [FULL, EMPTY]]],  # a rank without microbatches
    [[[FULL]], [[EMPTY], [EMPTY, EMPTY]]],  # a rank without active tokens
    [[[]], [[FULL, FULL]]],  # a microbatch without samples
    [[[EMPTY]], [[EMPTY]]],  # nobody has a token
    [[], []],  # nobody has anything
]
