"""The order of all tests, and which release of Megatron-Core they ran with."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest

# The core's first: Hypothesis also draws numbers that are in the modules imported by then.
ORDER = ("core", "frameworks", "sweep", "test_examples.py", "host", "launch", "peers")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files early: where files are shared out over cores, all have work until the end."""
    tests = Path(__file__).parent
    folders = {item: item.path.relative_to(tests).parts[0] for item in items}
    items.sort(key=lambda i: ORDER.index(folders[i]) if folders[i] in ORDER else len(ORDER))
    of_host = [item for item in items if folders[item] == "host"]
    # Of every test: what is said of all is lost where several processes run the tests.
    releases = [("megatron-core", version("megatron-core"))] if of_host else []
    for item in of_host:
        item.user_properties += releases
