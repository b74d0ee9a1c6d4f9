"""Losses of multi-token prediction, aggregated as the main loss is, against one fp64 process."""

from __future__ import annotations

import dataclasses
import functools
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_loss_agg.mcore import LossHook
from tests.host.harness import TOPOLOGIES, Topology, build_chunks, data_for, run_host_ranks
from tests.host.reference import Gradient
from tests.host.steps import N_MB, PLACES, Weights, aggregation, sequences, weights_of
from tests.host.test_auxiliary_losses import forward_step

pytestmark = pytest.mark.host

DEPTHS, FACTOR = 2, 0.5
CONFIG = {"mtp_num_layers": DEPTHS, "mtp_loss_scaling_factor": FACTOR}
LABELS = {"token_mean": "token_mean", "prompt_mean": "prompt_mean"}


def with_mtp(name: str) -> Topology:
    topology = TOPOLOGIES[name]
    return dataclasses.replace(topology, config={**topology.config, **CONFIG})


def oracle(cases: list[tuple[str, Weights]]) -> list[tuple[Gradient, list[float]]]:
    """One process that runs every sample alone: gradient, and the weighted sum at each depth.

    At depth d, the logits of position t predict label t + d, with the weight of that label.
    """
    from tests.host import gpt

    gpt.initialize()
    model = gpt.build(**CONFIG)
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = []
    for masks, weights in cases:
        sums = [torch.zeros((), dtype=torch.float64) for _ in range(DEPTHS + 1)]
        for i, of_sample in weights:
            sequence, w = sequences(masks)[i], torch.tensor(of_sample, dtype=torch.float64)
            for depth, logits in enumerate(logits_of(model, sequence)):
                kept = max(len(w) - depth, 0)
                losses = F.cross_entropy(logits[:kept], sequence.labels[depth:], reduction="none")
                sums[depth] = sums[depth] + (w[depth:] * losses).sum()
        loss = sums[0] + FACTOR / DEPTHS * sum(sums[1:])
        gradients = torch.autograd.grad(loss, parameters, materialize_grads=True)
        found.append((dict(zip(names, gradients, strict=True)), [float(x) for x in sums]))
    return found


def logits_of(model: Any, sequence: Any) -> list[Tensor]:
    """[tokens, vocabulary] of the main head, then of each depth; nothing else is the host's."""
    from tests.host import gpt

    seen: list[Tensor] = []

    def see(labels: Tensor, logits: Tensor) -> Tensor:
        seen.append(logits.squeeze(1))
        return torch.zeros_like(labels, dtype=torch.float64)

    model.compute_language_model_loss = see
    tokens = sequence.tokens.unsqueeze(0)
    arguments = {"labels": tokens, "loss_mask": torch.ones_like(tokens)}
    with gpt.precision(model.config):
        model(tokens, gpt.positions_like(tokens), None, **arguments)
    del model.compute_language_model_loss
    return [seen[-1], *seen[:-1]]


Case = tuple[str, bool, str, str]  # layout, per-token flag, mode, masks


def run(topology: Topology, cases: dict[Case, Any], mtp: str) -> list[Any]:
    """Every rank: for each case, the gradient's error, and the reports of MTP."""
    from tests.host import gpt, gradients

    gpt.initialize(**topology.sizes)
    chunks = {flag: build_chunks(topology, flag) for flag in (False, True)}
    found = []
    for (layout, per_token, mode, masks), (expected, _) in cases.items():
        model, hook = chunks[per_token], LossHook(aggregation(mode), mtp=mtp)
        data = data_for(topology, PLACES[topology.data_parallel_size], layout, masks)
        reports = gpt.run_step(hook, model, data, N_MB, forward_step_func=forward_step)
        names = [f"{part}{mode} loss" for part in ("", "mtp_1 ", "mtp_2 ")]
        sums = [gpt.reported(reports, name) for name in names if reports and name in reports[0]]
        found.append((gradients.error(model, expected), sums))
    return found


@functools.cache
def references(ranks: int) -> dict[tuple[str, str], Any]:
    wanted = list(product(("token_mean", "prompt_mean"), ("01", "single")))
    weights = [(masks, weights_of(mode, PLACES[ranks], masks)) for mode, masks in wanted]
    return dict(zip(wanted, run_host_ranks(oracle, 1, weights, timeout=200)[0], strict=True))


CASES: list[Case] = [
    ("thd", False, "token_mean", "01"),
    ("thd", True, "prompt_mean", "01"),
    ("bshd", True, "token_mean", "01"),
    ("bshd", False, "prompt_mean", "01"),
    ("thd", False, "token_mean", "single"),
    ("bshd", True, "prompt_mean", "single"),
]


@pytest.mark.parametrize("name", ["dp2", "cp2", "pp2", "tp2"])
def test_losses_are_aggregated_as_the_main_loss(name: str) -> None:
    topology = with_mtp(name)
    known = references(topology.data_parallel_size)
    cases = {case: known[case[2], case[3]] for case in CASES}
    ranks = run_host_ranks(run, topology.world_size, topology, cases, "same", timeout=300)
    for rank in ranks:
        for case, (error, sums) in zip(cases, rank, strict=True):
            print(name, case, error, sums, cases[case][1])
