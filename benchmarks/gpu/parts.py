"""The short parts: the machine, one microbatch's loss, Transformer Engine's indices, the tests."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import platform
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from datetime import datetime, timezone
from pathlib import Path

import torch

from benchmarks.gpu import world
from benchmarks.gpu.evidence import CannotRun, Evidence
from benchmarks.gpu.model import transformer_engine

PACKAGES = ("megatron-core", "transformer-engine", "flash-attn", "apex", "numpy", "pytest")


def machine(evidence: Evidence, dry: bool, seconds: float, folder: Path) -> None:
    """Chips and versions; nothing is judged."""
    now = datetime.now(timezone.utc)
    evidence.fact("date", f"{now:%Y-%m-%d %H:%M} UTC")
    if dry:
        evidence.fact("device", "none: dry run on a CPU")
    else:
        for i in range(torch.cuda.device_count()):
            chip = torch.cuda.get_device_properties(i)
            evidence.fact(f"GPU {i}", f"{chip.name}, {chip.total_memory / 1e9:.0f} GB")
        evidence.fact(
            "driver", _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        )
        evidence.fact("NCCL", ".".join(map(str, torch.cuda.nccl.version())))
    evidence.fact("python", platform.python_version())
    evidence.fact("torch", f"{torch.__version__}, CUDA {torch.version.cuda}")
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            evidence.fact(name, importlib.metadata.version(name))
    evidence.fact("commit", _output("git", "rev-parse", "--short", "HEAD"))


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.split("\n")[0].strip() or "unknown"


def microbatch(evidence: Evidence, dry: bool, seconds: float, folder: Path) -> None:
    """The hook's work on one microbatch's loss against the least, launches, graph capture."""
    world.enter(dry)
    from benchmarks.gpu import microbatch

    if dry:
        microbatch.measure(evidence, shapes=((4, 16),), kernels=False)
        raise CannotRun("dry run: no kernels are launched and no graph is captured")
    microbatch.measure(evidence)


def indices(evidence: Evidence, dry: bool, seconds: float, folder: Path) -> None:
    """Transformer Engine's own split of packs, against `CPLayout`: every rank of 2, 4 and 8."""
    from megatron_loss_agg import CPLayout

    if dry or not transformer_engine():
        raise CannotRun("transformer-engine is not installed" if not dry else "dry run")
    import transformer_engine_torch as tex

    world.enter(dry)
    generator = torch.Generator().manual_seed(1)
    differing = compared = 0
    for size in (2, 4, 8):
        for _ in range(20):
            lengths = 2 * size * torch.randint(1, 9, (7,), generator=generator)
            offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
            total = int(offsets[-1])
            for rank in range(size):
                theirs = tex.thd_get_partitioned_indices(offsets.cuda(), total, size, rank)
                ours = CPLayout.thd(offsets, size, rank).index
                differing += not torch.equal(theirs.cpu().long(), ours)
                compared += 1
    evidence.add(
        "splits that differ from Transformer Engine's",
        f"{compared} splits",
        differing,
        "splits",
        "gpu_indices",
    )


def tests(evidence: Evidence, dry: bool, seconds: float, folder: Path) -> None:
    """``pytest -m gpu``; a test that skips could not run."""
    if importlib.util.find_spec("pytest") is None:
        raise CannotRun("pytest is not installed")
    report = folder / "pytest.xml"
    report.unlink(missing_ok=True)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "gpu",
        "tests/gpu",
        "-q",
        "-p",
        "no:cacheprovider",
    ]
    done = subprocess.run([*command, f"--junitxml={report}"], check=False)
    if not report.exists():
        return evidence.fail("pytest -m gpu", f"ended with {done.returncode}; see its log")
    results = [
        (case, case[0].tag if len(case) else "passed")
        for case in ElementTree.parse(report).iter("testcase")
    ]
    passed = sum(tag == "passed" for _, tag in results)
    evidence.add("pytest -m gpu", "tests/gpu", passed, "tests passed")
    skipped = [case[0].get("message", "") for case, tag in results if tag == "skipped"]
    if skipped or not results:
        reason = skipped[0] if skipped else "there is none"
        evidence.could_not_run(f"{len(skipped)} tests of pytest -m gpu", reason)
    for case, tag in results:
        if tag in ("failure", "error"):
            evidence.fail(f"pytest -m gpu: {case.get('name')}", case[0].get("message", "")[:300])
