"""What tensor-parallel ranks without data get of a step, against a pickle of it; two gloo ranks."""

from __future__ import annotations

import json
import pickle
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import multiprocessing

from benchmarks.hook import recognised
from benchmarks.results import Results
from benchmarks.shapes import AGGREGATIONS, BROADCAST, LAYOUTS, many_microbatches
from megatron_loss_agg import StepPlan
from megatron_loss_agg.mcore.host import ParallelGroups
from megatron_loss_agg.mcore.step_weights import StepWeights, Wanted
from megatron_loss_agg.mcore.tensor_parallel import on_group, packed

ROUNDS = 40


def measure(results: Results) -> None:
    """Bytes, and the time until the other rank has them."""
    samples, length, number = BROADCAST
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_rank, args=(Path(folder),), nprocs=2)  # type: ignore[no-untyped-call]
        for layout in LAYOUTS:
            found = json.loads((Path(folder) / layout).read_text())
            where = f"{samples} x {length} {layout}, {number} microbatches"
            results.add("sent to a rank without data", where, found["sent"], "B a token", "sent")
            results.add("as one pickle", where, found["pickle"], "B a token")
            results.add("as one pickle", where, found["seconds"] * 1e3, "ms")
            results.add("one message of tensors", where, found["ratio"], "x pickle", "message")


def _rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    one = [dist.new_group([other]) for other in range(2)][rank]
    whole = dist.group.WORLD
    assert whole is not None
    groups = ParallelGroups(one, one, whole, one, last_stage=True)
    for layout in LAYOUTS:
        step = many_microbatches(*BROADCAST, layout)
        plans = StepPlan.build_terms({"loss": AGGREGATIONS["prompt_mean"]}, step)
        weights = StepWeights.of(plans, groups, recognised(groups), Wanted(masks=False))

        def message(weights: StepWeights = weights) -> object:
            return on_group(lambda: weights, groups)

        def as_pickle(weights: StepWeights = weights) -> object:
            answer = [weights if rank == 0 else None]
            dist.broadcast_object_list(answer, src=0)
            return answer[0]

        tokens = sum(m.loss_mask.numel() for m in step)
        base, ratio = _times(as_pickle, message)
        found = {
            "sent": (packed(weights)[0].numel() + 16) / tokens,  # and its two sizes
            "pickle": len(pickle.dumps([weights])) / tokens,
            "seconds": base,
            "ratio": ratio,
        }
        if rank == 1:
            (folder / layout).write_text(json.dumps(found))
    dist.destroy_process_group()


def _times(base: Callable[[], object], other: Callable[[], object]) -> tuple[float, float]:
    """Median seconds of ``base``, and median ratio of ``other`` to it, in alternating calls."""
    taken: list[tuple[float, float]] = []
    for _ in range(ROUNDS + 3):
        seconds = []
        for function in (base, other):
            dist.barrier()
            begin = time.perf_counter()
            function()
            seconds.append(time.perf_counter() - begin)
        taken.append((seconds[0], seconds[1]))
    taken = taken[3:]
    return statistics.median(t for t, _ in taken), statistics.median(u / t for t, u in taken)
