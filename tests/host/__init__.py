"""Tests on the real host: steps of Megatron-Core's own schedule, on gloo ranks of the CPU.

Read first `cases` (a step as a row of a table, and `assert_exact`), `test_gradients` (every mode
and every parallelism), and `refusals` (a case that goes wrong, and what each rank is told).

- `steps` has the samples that nearly all steps are of, and the oracle's weights of their tokens;
  `reference` the gradients of their losses, each alone in one fp64 process.
- `harness` has the topologies and the models, and `on_ranks_of` for tests that ranks run
  themselves; `gpt` the model and its forward step on a rank; `gradients` what of a whole gradient
  is a rank's.
- `scripts` is what users' forward steps do, right and wrong.

Importing Megatron takes seconds and needs stand-ins for a GPU, which only ranks have (`preload`).
So here its modules, and ours that import it, are names alone: each is imported when first used.
"""

from __future__ import annotations

import importlib
from typing import Any


class _OnRanks:
    def __init__(self, name: str) -> None:
        vars(self)["name"] = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self.name), attribute)

    def __setattr__(self, attribute: str, value: Any) -> None:
        setattr(importlib.import_module(self.name), attribute, value)


gpt, gradients = (_OnRanks(f"{__name__}.{name}") for name in ("gpt", "gradients"))
parallel_state = _OnRanks("megatron.core.parallel_state")
pipeline_parallel = _OnRanks("megatron.core.pipeline_parallel")
