"""Steps over a slow data loader, as with slow storage, on the real Megatron-Core."""

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
DELAY = 0.5  # per batch, as a share of a microbatch's compute
ROUNDS = 5


def measure(results: Results) -> None:
    """Measure a loader that waits in the process, so that Megatron waits; and one in a worker."""
    with megatron.groups():
        from megatron.core import rerun_state_machine as rerun

        rerun.initialize_rerun_state_machine()
        gpt, step = results.shapes.model, results.shapes.loader_step
        ddp, data = megatron.build(gpt, step.length), megatron.batches(gpt, step)
        where = f"GPT {gpt.layers} x {gpt.hidden}, {step.microbatches} x {step.length} tokens"
        rounds = results.rounds(ROUNDS)

        no_delay = Steps("stock", ddp, step, SlowDataset(data, 0.0), 0)
        compute = statistics.median(no_delay.second()[0] for _ in range(rounds))
        results.add("stock step, no delay", where, 1e3 * compute, "ms")
        slow = SlowDataset(data, DELAY * compute / step.microbatches)
        alone, behind = ([Steps(name, ddp, step, slow, n) for name in NAMES] for n in (0, 1))
        taken = [[steps.second()[0] for steps in (no_delay, *alone)] for _ in range(rounds)]
        for k, steps in enumerate(alone, start=1):
            base, unit = (0, "x no delay") if k == 1 else (1, "x stock")
            ratio = statistics.median(row[k] / row[base] for row in taken)
            goal = "slow_loader" if steps.name == "prefetch" else ""
            results.add(f"{steps.name}, delay in the process", where, ratio, unit, goal)
        for steps in behind:
            waited = statistics.median(steps.second()[1] for _ in range(rounds))
            goal = "loader_wait" if steps.name == "prefetch" else ""
            what = f"{steps.name} waits for a worker"
            results.add(what, where, waited / compute, "of a step", goal)
        rerun.destroy_rerun_state_machine()


class Steps:
    """Training steps of one kind, over a loader that continues from step to step.

    Args:
        name: ``stock``; or the hook, either as installed by the flags (``prefetch``), or as in a
            loop other than Megatron's without a `Prefetch` (``no prefetch``).
        workers: number of processes of the loader, each two batches ahead; 0: none.
    """

    def __init__(
        self, name: str, ddp: Any, step: Any, dataset: Dataset[Batch], workers: int
    ) -> None:
        self.name = name
        loader = DataLoader(dataset, batch_size=None)
        # Set these afterwards, since the stand-in for a GPU makes loaders without workers.
        loader.num_workers, loader.prefetch_factor = workers, 2 if workers else None
        self._data = _timed(iter(loader))
        options = {} if name == "stock" else {"prefetch": name == "prefetch"}
        self._training = Training(bool(options), ddp, step, self._data, **options)

    def second(self) -> tuple[float, float]:
        """Wall-clock seconds of the second of two steps, and of its waits for batches.

        The second is measured, since its batches are drawn ahead during the first.
        """
        self._training.run()
        begin, waited = time.perf_counter(), self._data.waited
        self._training.run()
        return time.perf_counter() - begin, self._data.waited - waited


def _timed(loader: Iterator[Batch]) -> Any:
    """Megatron's data iterator, as made by its training loop; counts seconds in ``waited``."""
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
    """``batches`` again and again, each with a delay of ``delay`` seconds."""

    def __init__(self, batches: list[Batch], delay: float) -> None:
        self._batches = batches
        self._delay = delay

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, i: int) -> Batch:
        time.sleep(self._delay)
        return self._batches[i % len(self._batches)]
