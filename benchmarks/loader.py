"""Steps over a data loader that waits, as one on slow storage does, on the real Megatron-Core."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset

from benchmarks import megatron
from benchmarks.megatron import Batch
from benchmarks.results import Results, rounds_of
from benchmarks.shapes import AGGREGATIONS, LOADER_DELAY, LOADER_STEP, MODEL

SAVED = "prefetch, position saved"
NAMES = ("stock", "prefetch", SAVED, "no prefetch")
ROUNDS = 5


def measure(results: Results) -> None:
    """Steps over slow loaders."""
    with megatron.one_rank():
        from megatron.core.rerun_state_machine import initialize_rerun_state_machine

        initialize_rerun_state_machine()
        _slow_loaders(results)


def _slow_loaders(results: Results) -> None:
    """One that waits in the process, for which stock pays; and a worker, for which it does not."""
    ddp = megatron.build(MODEL, LOADER_STEP.length)
    batches = megatron.batches(LOADER_STEP, MODEL.vocabulary)
    number = LOADER_STEP.microbatches
    no_delay = Steps("stock", ddp, SlowDataset(batches, 0.0), workers=0)
    no_delay.run()
    compute = statistics.median(no_delay.run()[0] for _ in range(rounds_of(5)))
    dataset = SlowDataset(batches, LOADER_DELAY * compute / number)
    alone, behind = ([Steps(name, ddp, dataset, w) for name in NAMES] for w in (0, 1))
    tokens = LOADER_STEP.rows * LOADER_STEP.length
    where = f"GPT {MODEL.layers} x {MODEL.hidden}, {number} x {tokens} tokens"
    results.add("stock step, no delay", where, compute, "s")
    _times(results, where, no_delay, alone)
    _waits(results, where, compute, behind)


def _times(results: Results, where: str, no_delay: Steps, kinds: list[Steps]) -> None:
    found = []
    for _ in range(rounds_of(ROUNDS)):
        stock, *others = [steps.next_of_series()[0] for steps in kinds]
        found.append([stock / no_delay.run()[0], *(other / stock for other in others)])
    for name, ratios in zip(NAMES, zip(*found, strict=True), strict=True):
        unit = "x no delay" if name == "stock" else "x stock"
        goal = "slow_loader" if name in ("prefetch", SAVED) else ""
        what = f"{name}, delay in the process"
        results.add(what, where, statistics.median(ratios), unit, goal)


def _waits(results: Results, where: str, compute: float, kinds: list[Steps]) -> None:
    """Not the whole step, since its compute varies by more than a worker that keeps up costs."""
    for steps in kinds:
        steps.run()
        waited = [steps.run()[1] for _ in range(rounds_of(ROUNDS))]
        goal = "loader_wait" if steps.name in ("prefetch", SAVED) else ""
        what = f"{steps.name} waits for a worker"
        results.add(what, where, statistics.median(waited) / compute, "of a step", goal)


class Steps:
    """Training steps of one kind, over a loader that goes on where the step before left it.

    Args:
        name: ``stock``; or the hook, as the flags install it (``prefetch``), the same over a loader
            that saves its position (`SAVED`), or without drawing ahead (``no prefetch``).
        workers: processes that the loader draws in, each two batches ahead; 0: none.
    """

    def __init__(self, name: str, ddp: Any, dataset: SlowDataset, workers: int) -> None:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        from megatron_loss_agg.mcore import LossHook

        self.name = name
        self._schedule = get_forward_backward_func()
        if name != "stock":
            in_training_loop = name != "no prefetch"
            hook = LossHook(AGGREGATIONS["prompt_mean"], in_training_loop=in_training_loop)
            self._schedule = hook.wrap(self._schedule)
        loader = DataLoader(dataset, batch_size=None)
        # The stand-in for a GPU refuses workers to a loader that is being made.
        loader.num_workers, loader.prefetch_factor = workers, 2 if workers else None
        iterator: Any = iter(loader)
        if name == SAVED:
            iterator.state_dict = lambda: {"position": iterator._num_yielded}
        self._data_iterator = _timed(iterator)
        self._ddp = ddp

    def run(self) -> tuple[float, float]:
        """Wall-clock seconds of a step, and those of them in which it waited for a batch."""
        begin, waited = time.perf_counter(), self._data_iterator.waited
        megatron.train(self._schedule, self._ddp, self._data_iterator, LOADER_STEP)
        return time.perf_counter() - begin, self._data_iterator.waited - waited

    def next_of_series(self) -> tuple[float, float]:
        """`run`, after a step of the same kind, behind which alone batches are drawn ahead."""
        self.run()
        return self.run()


def _timed(loader: Iterator[Batch]) -> Any:
    """Megatron's own data iterator, as its training loop makes it; counts seconds in ``waited``."""
    from megatron.core.rerun_state_machine import RerunDataIterator

    class Timed(RerunDataIterator):
        waited = 0.0

        def __next__(self) -> Any:
            begin = time.perf_counter()
            batch = super().__next__()
            self.waited += time.perf_counter() - begin
            return batch

    return Timed(loader)


class SlowDataset(Dataset[Batch]):
    """``batches`` again and again, each of them ``delay`` seconds after it was asked for."""

    def __init__(self, batches: list[Batch], delay: float) -> None:
        self._batches = batches
        self._delay = delay

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, i: int) -> Batch:
        time.sleep(self._delay)
        return self._batches[i % len(self._batches)]
