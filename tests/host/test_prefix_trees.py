"""Rollouts that share prefixes, computed once as a tree, against each rollout computed alone.

The mask and the ids are those of the rollouts, as rows; the model sees each shared token once, and a
row's token takes the logits of its node in the tree.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.host import gpt
from tests.host.cases import Case, Expected, assert_exact, covering, in_calls
from tests.host.harness import TOPOLOGIES, Topology, run_host_ranks
from tests.host.reference import Reference, of_samples
from tests.host.steps import MULTIPLE, VOCAB, Places, Sequence, weights_with
from tests.oracle import Sample

# By name: the tokens of a turn, and those of them that are trained.
TURNS = {
    **{"system": (3, 0), "p": (2, 0), "q": (4, 0), "r": (2, 0), "tool": (2, 0)},
    **{"plan": (4, 3), "act": (3, 3), "short": (1, 1), "long": (7, 6)},
}
# Turns, prompt and rollout. Two rollouts share a turn that is trained, as its tokens are the same
# after the same turns; three levels are shared below the system prompt; `q` and `r` are trees of
# their own; the rollout of one turn has no trained token, and is the beginning of others.
ROLLOUTS = (
    ("system p plan act", 7, 0),
    ("system p plan tool short", 7, 0),
    ("system p plan tool long", 7, 1),
    ("system p long", 7, 2),
    ("q plan act", -3, 3),
    ("q plan", -3, 4),
    ("q short", -3, 4),
    ("r long", 5, 5),
    ("r", 5, 6),
    ("system r plan", 5, 6),
)
LENGTH = 24  # of a row
# By data-parallel rank: the rollouts of each microbatch, and the microbatches of each call of a
# stream, in which prompts are whole.
STEPS: dict[int, tuple[Places, tuple[tuple[int, ...], ...]]] = {
    1: ((((0, 1, 2), (3,), (4, 5, 6), (7, 8, 9)),), ((2, 2),)),
    2: ((((0, 1, 2), (3,)), ((4, 5, 6), (7, 8, 9))), ((2,), (1, 1))),
}
# Several trees in a microbatch, and a prompt's rollouts on two ranks.
MIXED: dict[int, Places] = {
    1: (((0, 4, 1, 7), (2, 3, 9, 8), (6, 5)),),
    2: (((0, 4, 1, 7),), ((2, 3, 9, 8), (6, 5))),
}
MODES: dict[str, dict[str, Any]] = {
    "token_mean": {},
    "sample_mean": {},
    "rollout_mean": {},
    "prompt_mean": {},
    "nested_mean": {"levels": ("prompt", "rollout", "sample")},
    "sample_sum": {},
}


@functools.cache
def turn(name: str, before: str) -> list[int]:
    """Its tokens, which depend on the turns before."""
    seed = int.from_bytes(f"{before} {name}".encode(), "little") % 2**31
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (TURNS[name][0],), generator=generator).tolist()


@functools.cache
def rollouts() -> tuple[Sequence, ...]:
    result = []
    for text, prompt, rollout in ROLLOUTS:
        names = text.split()
        tokens = [x for i, name in enumerate(names) for x in turn(name, " ".join(names[:i]))]
        # The trained tokens are the last ones of a turn; the loss of a token is one before it.
        sizes = [TURNS[name] for name in names]
        mask = [float(i >= size - trained) for size, trained in sizes for i in range(size)]
        sample = Sample((*mask[1:],), prompt, rollout)
        result.append(Sequence(torch.tensor(tokens[:-1]), torch.tensor(tokens[1:]), sample))
    return tuple(result)


def batch_of_tree(_: dict[str, Any], samples: tuple[int, ...]) -> dict[str, Any]:
    """The rollouts as rows, and the tree of their prefixes as the model sees it."""
    chosen = [rollouts()[i] for i in samples]
    numbers: dict[tuple[int, ...], int] = {}  # of nodes, by prefix
    node = torch.zeros(len(chosen), LENGTH, dtype=torch.int64)
    for row, x in enumerate(chosen):
        tokens = x.tokens.tolist()
        for t in range(len(tokens)):
            node[row, t] = numbers.setdefault((*tokens[: t + 1],), len(numbers))
    assert len(numbers) < sum(len(x.tokens) for x in chosen) or len(chosen) == 1
    size = -(-len(numbers) // MULTIPLE) * MULTIPLE
    is_seen = torch.eye(size, dtype=torch.bool)
    for prefix, number in numbers.items():
        for t in range(len(prefix)):
            is_seen[number, numbers[prefix[: t + 1]]] = True

    def padded(values: list[int]) -> Tensor:
        return torch.tensor(values + [0] * (size - len(values)))

    def rows(values: list[Tensor]) -> Tensor:
        return torch.stack([torch.nn.functional.pad(x, (0, LENGTH - len(x))) for x in values])

    return {
        "nodes": padded([prefix[-1] for prefix in numbers]).unsqueeze(0),
        "depth": padded([len(prefix) - 1 for prefix in numbers]),
        "is_hidden": ~is_seen[None, None],
        "node": node,
        "targets": rows([x.labels for x in chosen]),
        "loss_mask": rows([torch.tensor(x.sample.mask, dtype=torch.float64) for x in chosen]),
        "prompt_ids": torch.tensor([x.sample.prompt for x in chosen]),
        "rollout_ids": torch.tensor([x.sample.rollout for x in chosen]),
    }


@contextlib.contextmanager
def rotary_positions(model: Any, depth: Tensor) -> Iterator[None]:
    """Let the rotary embedding give the nodes their depths, where it counts tokens."""
    rotary = gpt.get_attr_wrapped_model(model, "rotary_pos_emb")
    handle = rotary.register_forward_hook(lambda *_: rotary.get_emb(LENGTH)[depth])
    yield
    handle.remove()


def tree_step(data_iterator: Any, model: Any) -> Any:
    from megatron_loss_agg import CPLayout
    from megatron_loss_agg.mcore import TokenLoss

    batch = gpt.received(data_iterator)
    cp = gpt.parallel_state.get_context_parallel_group()
    nodes = CPLayout.bshd(batch["nodes"].shape[1], cp.size(), cp.rank())
    row = CPLayout.bshd(LENGTH, cp.size(), cp.rank())
    tokens, depth = nodes.shard(batch["nodes"]), nodes.shard(batch["depth"])
    with rotary_positions(model, depth):
        output = model(tokens, depth.unsqueeze(0), nodes.shard(batch["is_hidden"], dim=2))
    if not gpt.get_attr_wrapped_model(model, "post_process"):
        return output, None
    node, targets, mask = (row.shard(batch[key]) for key in ("node", "targets", "loss_mask"))

    def compute(logits: Tensor) -> Tensor:
        logits = gpt.gather_from_tensor_model_parallel_region(logits)
        whole = nodes.unshard(logits, cp, dim=1) if cp.size() > 1 else logits
        by_token = whole[0, node].flatten(0, 1)
        losses = gpt.F.cross_entropy(by_token, targets.flatten(), reduction="none")
        return losses.view_as(targets)

    return output, TokenLoss(compute, mask)


@functools.cache
def alone() -> Reference:
    """Of every rollout, computed alone."""
    return run_host_ranks(_alone, 1)[0]  # type: ignore[no-any-return]


def _alone() -> Reference:
    gpt.initialize()
    model = gpt.build()
    losses = ({"alone": gpt.plain_losses(model, x)} for x in rollouts())
    return of_samples(model, losses)["alone"]


def by_the_rollouts(case: Case) -> Expected:
    weights = weights_with(
        case.mode, case.places, lambda i, _: rollouts()[i].sample, **case.options
    )
    return alone().gradient(weights), {f"{case.mode} loss": alone().loss(weights)}


def trees(topology: Topology, places: Places, **more: Any) -> list[Case]:
    rows = covering(2, [*MODES], topology.per_token_flags)
    return [
        Case(
            mode,
            options=MODES[mode],
            per_token=per_token,
            places=places,
            batch=batch_of_tree,
            step=tree_step,
            **more,
        )
        for mode, per_token in rows
    ]


@pytest.mark.parametrize("name", ["dp2", "tp2-sp", "pp2", "cp2"])
def test_trees_weigh_as_their_rollouts(name: str) -> None:
    topology = TOPOLOGIES[name]
    size = topology.data_parallel_size
    cases = trees(topology, STEPS[size][0]) + trees(topology, MIXED[size])
    assert_exact(topology, cases, by_the_rollouts)


@pytest.mark.parametrize("name", ["dp2", "pp2"])
def test_trees_in_a_stream_weigh_as_their_rollouts(name: str) -> None:
    topology = TOPOLOGIES[name]
    sizes = {ranks: x for ranks, (_, x) in STEPS.items()}
    run = functools.partial(in_calls, sizes)
    cases = trees(topology, STEPS[topology.data_parallel_size][0], run=run)
    assert_exact(topology, cases, by_the_rollouts)
