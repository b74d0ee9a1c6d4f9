"""Modules in place of those that a system imports and its loss does not use, such as a server's."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

# ci/python.sh installs the systems here, and those for ms-swift's command line alone.
PEERS = Path(sys.prefix) / "peers"
HUGGING_FACE = Path(sys.prefix) / "hugging_face"
needs_peers = pytest.mark.skipif(
    not (PEERS.is_dir() and HUGGING_FACE.is_dir()), reason="needs the systems of ci/test.sh"
)


class _Anything(type):
    """Makes one class do for every class, decorator and constant that a module may define."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is not Anything:  # a subclass of the system's own
            return super().__call__(*args, **kwargs)
        decorates = len(args) == 1 and not kwargs and callable(args[0])
        return args[0] if decorates else cls

    def __getitem__(cls, key: Any) -> Any:
        return cls

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __add__ = __radd__ = __or__


class Anything(metaclass=_Anything):
    """Every name in a stand-in."""


class _StandIn(ModuleType):
    __path__: Sequence[str] = []
    __version__ = "99.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name.startswith("is_"):  # is_vllm_available and the like
            return lambda *args, **kwargs: False
        return Anything


class _Finder(MetaPathFinder, Loader):
    def __init__(self, names: Iterable[str]) -> None:
        self.names = frozenset(names)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if not any(f"{name}.".startswith(f"{ours}.") for ours in self.names):
            return None
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def use_peers(standins: str) -> None:
    """Let this process import the systems at their pinned versions, and stand-ins for the rest.

    The checkout stays first: one of the systems brings a package `tests` of its own.

    Args:
        standins: the modules to stand in for with all below them, separated by spaces.
    """
    sys.path.insert(1, str(PEERS))
    sys.meta_path.insert(0, _Finder(standins.split()))
