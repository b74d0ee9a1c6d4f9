"""The order of all tests, and which need Megatron-Core."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest

LONG = ("frameworks", "sweep", "examples", "host", "launch", "core", "peers")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first: where files are shared out over cores, all have work until the end."""
    tests = Path(__file__).parent
    folders = {item: item.path.relative_to(tests).parts[0] for item in items}
    items.sort(key=lambda i: LONG.index(folders[i]) if folders[i] in LONG else len(LONG))
    for item in items:
        if folders[item] == "host":
            item.add_marker("host")
            # Of every test: what is said of all is lost where several processes run the tests.
            item.user_properties.append(("megatron-core", version("megatron-core")))
