"""Steps of the host as cases: the gradient of each is compared with the fp64 reference."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from covertable import make

from megatron_loss_agg import LossAggregation
from tests.host.harness import Topology, build_chunks, data_for, run_host_ranks
from tests.host.reference import reference
from tests.host.steps import PLACES, Places, Weights, aggregation, weights_of

# Set by the version matrix, which asks whether a release is as the newest one is.
COVERS = os.environ.get("TEST_GRIDS") == "covering"


def grid(strength: int, *axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Rows of one value of each axis: all of them; or under `COVERS` few, in which every
    ``strength`` axes still have all combinations of their values.
    """
    rows = list(product(*(range(len(axis)) for axis in axes)))
    if COVERS:
        rows = sorted(
            map(tuple, make([list(range(len(axis))) for axis in axes], strength=strength))
        )
    return [tuple(axis[i] for axis, i in zip(axes, row, strict=True)) for row in rows]


@dataclass(frozen=True)
class Case:
    """One step of the host: an aggregation, and how its samples are laid out."""

    mode: str
    options: tuple[tuple[str, Any], ...] = ()
    masks: str = "01"
    layout: str = "thd"
    places: Places = PLACES[2]
    per_token: bool = False
    dtype: torch.dtype = torch.float64

    @property
    def aggregation(self) -> LossAggregation:
        return aggregation(self.mode, **dict(self.options))

    @property
    def weights(self) -> Weights:
        """The oracle's."""
        return weights_of(self.mode, self.places, self.masks, **dict(self.options))

    @property
    def loss(self) -> tuple[Any, ...]:
        """What decides the loss of the step: equal for cases that are run in another way."""
        return self.mode, self.options, self.masks, self.places

    @property
    def name(self) -> str:
        options = "-".join(str(value) for _, value in self.options)
        flag = "per_token" if self.per_token else "default"
        dtype = str(self.dtype).removeprefix("torch.")
        number = len(self.places[0])
        return f"{self.mode}{options}-{self.masks}-{dtype}-{self.layout}-{number}mb-{flag}"


def gradient_errors(topology: Topology, cases: Iterable[Case]) -> dict[Case, float]:
    """The largest error of each case on some rank, over this rank's own parameters."""
    losses = {case.loss: case.weights for case in cases}
    expected = {loss: reference(topology.model).gradient(w) for loss, w in losses.items()}
    wanted = {case: expected[case.loss] for case in cases}
    ranks = run_host_ranks(_errors, topology.world_size, topology, wanted, timeout=600)
    return {case: max(rank[case] for rank in ranks) for case in wanted}


def _errors(topology: Topology, wanted: dict[Case, Any]) -> dict[Case, float]:
    from megatron_loss_agg.mcore import LossHook
    from tests.host import gpt, gradients

    gpt.initialize(**topology.sizes)
    errors = {}
    for dtype, per_token in dict.fromkeys((case.dtype, case.per_token) for case in wanted):
        chunks = build_chunks(topology, per_token, dtype)
        for case in (c for c in wanted if (c.dtype, c.per_token) == (dtype, per_token)):
            data = data_for(topology, case.places, case.layout, case.masks)
            gpt.run_step(LossHook(case.aggregation), chunks, data, len(case.places[0]))
            errors[case] = gradients.error(chunks, wanted[case])
    return errors
