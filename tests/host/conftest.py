"""Say in a test report which release of the host it is about."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version

import pytest


@pytest.fixture(autouse=True)
def release(record_property: Callable[[str, object], None]) -> None:
    # Of every test: what is said of all of them is lost where several processes run the tests.
    record_property("megatron-core", version("megatron-core"))
