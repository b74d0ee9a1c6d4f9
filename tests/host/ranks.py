"""Run a function on several ranks that have the real Megatron-Core imported, on the CPU."""

from __future__ import annotations

import functools

from tests.distributed import run_ranks

run_host_ranks = functools.partial(run_ranks, preload="tests.host.preload")
