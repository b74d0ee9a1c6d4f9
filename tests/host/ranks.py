"""Where other test folders find `run_host_ranks`."""

from tests.host.harness import run_host_ranks

__all__ = ["run_host_ranks"]
