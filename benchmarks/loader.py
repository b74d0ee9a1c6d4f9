"""Steps over a data loader that waits, as one on slow storage does, on the real Megatron-Core."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset

from benchmarks import megatron
from benchmarks.megatron import Batch, Training
from benchmarks.results import Results

NAMES = ("stock", "prefetch", "no prefetch")
DELAY = 0.5  # of the time that a microbatch computes, for each batch
ROUNDS = 5


def measure(results: Results) -> None:
    """A loader that waits in the process, for which stock pays; and a worker, where it does not."""
    with megatron.groups():
        from megatron.core.rerun_state_machine import initialize_rerun_state_machine

        initialize_rerun_state_machine()
        gpt, step = results.shapes.model, results.shapes.loader_step
        ddp, data = megatron.build(gpt, step.length), megatron.batches(gpt, step)
        where = f"GPT {gpt.layers} x {gpt.hidden}, {step.microbatches} x {step.length} tokens"

        def steps(name: str, delay: float, workers: int) -> Steps:
            return Steps(name, ddp, step, SlowDataset(data, delay), workers)

        no_delay = steps("stock", 0.0, 0)
        no_delay.run()
        compute = statistics.median(no_delay.run()[0] for _ in range(results.rounds(ROUNDS)))
        results.add("stock step, no delay", where, 1e3 * compute, "ms")
        delay = DELAY * compute / step.microbatches
        _times(results, where, no_delay, [steps(name, delay, 0) for name in NAMES])
        for name in NAMES:
            of_worker = steps(name, delay, 1)
            of_worker.run()
            waited = [of_worker.run()[1] for _ in range(results.rounds(ROUNDS))]
            what, goal = f"{name} waits for a worker", "loader_wait" if name == "prefetch" else ""
            results.add(what, where, statistics.median(waited) / compute, "of a step", goal)


def _times(results: Results, where: str, no_delay: Steps, kinds: list[Steps]) -> None:
    """Of steps over a loader without workers."""
    found = []
    for _ in range(results.rounds(ROUNDS)):
        stock, *others = [steps.next_of_series()[0] for steps in kinds]
        found.append([stock / no_delay.run()[0], *(other / stock for other in others)])
    for name, ratios in zip(NAMES, zip(*found, strict=True), strict=True):
        unit = "x no delay" if name == "stock" else "x stock"
        goal = "slow_loader" if name == "prefetch" else ""
        results.add(f"{name}, delay in the process", where, statistics.median(ratios), unit, goal)


class Steps:
    """Training steps of one kind, over a loader that goes on where the step before left it.

    Args:
        name: ``stock``; or the hook, as the flags install it (``prefetch``), or as in a loop that
            is not Megatron's and has no `Prefetch` (``no prefetch``).
        workers: processes that the loader draws in, each two batches ahead; 0: none.
    """

    def __init__(
        self, name: str, ddp: Any, step: Any, dataset: Dataset[Batch], workers: int
    ) -> None:
        from megatron_loss_agg.mcore import Loop

        loader = DataLoader(dataset, batch_size=None)
        # The stand-in for a GPU refuses workers to a loader that is being made.
        loader.num_workers, loader.prefetch_factor = workers, 2 if workers else None
        self._data = _timed(iter(loader))
        options = {} if name == "stock" else {"loop": Loop(of_megatron=name == "prefetch")}
        self._training = Training("prompt_mean", bool(options), ddp, step, self._data, **options)

    def run(self) -> tuple[float, float]:
        """Wall-clock seconds of a step, and those of them in which it waited for a batch."""
        begin, waited = time.perf_counter(), self._data.waited
        self._training.run()
        return time.perf_counter() - begin, self._data.waited - waited

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
