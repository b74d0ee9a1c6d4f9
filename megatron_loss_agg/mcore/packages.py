"""What the packages beside Megatron are: torch, Transformer Engine, apex."""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Literal, NamedTuple

import torch

_OLDEST_TORCH = (2, 6)


class Finding(NamedTuple):
    """What one check found. FAIL: the plugin would not run, or would not be exact."""

    level: Literal["OK", "WARN", "FAIL"]
    check: str
    text: str


def check_torch() -> Finding:
    """Its version, and whether it sees a GPU."""
    version, name = str(torch.__version__), "torch"
    if not torch.distributed.is_available():
        return Finding("FAIL", name, f"{version} is built without torch.distributed; install torch")
    if release(version) < _OLDEST_TORCH:
        oldest = ".".join(map(str, _OLDEST_TORCH))
        return Finding(
            "WARN", name, f"{version} is older than {oldest}; pip install --upgrade torch"
        )
    if not torch.cuda.is_available():
        return Finding("WARN", name, f"{version} sees no GPU: start scripts with --cpu here")
    return Finding("OK", name, f"{version}, {torch.cuda.device_count()} GPU")


def check_transformer_engine() -> Finding:
    """Its version, if it can be imported."""
    name = "transformer-engine"
    module = try_import("transformer_engine.pytorch")
    if isinstance(module, ModuleType):
        package = importlib.import_module("transformer_engine")
        return Finding("OK", name, getattr(package, "__version__", "of unknown version"))
    if isinstance(module, ModuleNotFoundError) and module.name == "transformer_engine":
        text = (
            "not installed: Megatron needs --transformer-impl local, which on a GPU has no context "
            "parallelism and no packing; pip install 'transformer-engine[pytorch]'"
        )
        return Finding("WARN", name, text)
    return Finding("WARN", name, f"cannot be imported ({one_line(module)}); Megatron goes without")


def check_apex() -> Finding:
    """Whether an ``apex`` is NVIDIA's, by its files: an unrelated one is not to be imported."""
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return Finding("OK", "apex", "not installed; Megatron has its own replacement")
    folders = [Path(folder) for folder in spec.submodule_search_locations or []]
    parts = ("optimizers/fused_adam.py", "multi_tensor_apply/__init__.py")
    if not any(all((folder / part).is_file() for part in parts) for folder in folders):
        text = (
            f"{spec.origin} is an unrelated project of this name, and Megatron takes it for "
            "NVIDIA's; pip uninstall apex"
        )
        return Finding("WARN", "apex", text)
    if importlib.util.find_spec("amp_C") is None:
        text = "NVIDIA's, but without its kernels (amp_C): build it again with its CUDA extensions"
        return Finding("WARN", "apex", text)
    return Finding("OK", "apex", f"NVIDIA's, in {folders[0]}")


def try_import(name: str) -> ModuleType | Exception:
    """The module, or what its import raised."""
    try:
        return importlib.import_module(name)
    except Exception as error:  # whatever an import raises is a finding
        return error


def release(version: str) -> tuple[int, int]:
    """(major, minor); zeros for a version of another form."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def one_line(error: object) -> str:
    """An error as its name and its message."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
