"""Say in a test report which release of the host it is about."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version

import pytest


@pytest.fixture(scope="session", autouse=True)
def release(record_testsuite_property: Callable[[str, object], None]) -> None:
    record_testsuite_property("megatron-core", version("megatron-core"))
