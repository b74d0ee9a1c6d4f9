"""Checks of the packages that Megatron uses: torch, Transformer Engine, apex."""

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
    """The result of one check. FAIL: the plugin would not run, or would not be exact."""

    level: Literal["OK", "WARN", "FAIL"]
    check: str
    text: str


def check_torch() -> Finding:
    """The version, and whether a GPU is visible."""
    version, name = str(torch.__version__), "torch"
    if not torch.distributed.is_available():
        return Finding("FAIL", name, f"{version} lacks torch.distributed; use another build")
    if release(version) < _OLDEST_TORCH:
        oldest = ".".join(map(str, _OLDEST_TORCH))
        text = f"{version} is older than {oldest}; pip install --upgrade torch"
        return Finding("WARN", name, text)
    if not torch.cuda.is_available():
        return Finding("WARN", name, f"{version} sees no GPU: for trials on the CPU only")
    return Finding("OK", name, f"{version}, {torch.cuda.device_count()} GPU")


def check_transformer_engine() -> Finding:
    """The version, if it can be imported."""
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
    """Whether ``apex`` is NVIDIA's, judged by its files: do not import an unrelated one."""
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return Finding("OK", "apex", "not installed; Megatron has its own replacement")
    folders = [Path(folder) for folder in spec.submodule_search_locations or []]
    parts = ("optimizers/fused_adam.py", "multi_tensor_apply/__init__.py")
    if not any(all((folder / part).is_file() for part in parts) for folder in folders):
        text = (
            f"{spec.origin} is an unrelated project of the same name, which Megatron takes for "
            "NVIDIA's; pip uninstall apex"
        )
        return Finding("WARN", "apex", text)
    if importlib.util.find_spec("amp_C") is None:
        text = "NVIDIA's, but without its kernels (amp_C): rebuild it with its CUDA extensions"
        return Finding("WARN", "apex", text)
    return Finding("OK", "apex", f"NVIDIA's, in {folders[0]}")


def try_import(name: str) -> ModuleType | Exception:
    """The module, or the exception that its import raised."""
    try:
        return importlib.import_module(name)
    except Exception as error:
        return error


def release(version: str) -> tuple[int, int]:
    """(major, minor); (0, 0) if it cannot be parsed."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def one_line(error: object) -> str:
    """The name and message of an error, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
