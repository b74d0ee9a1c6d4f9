"""Apply each mutant to a copy of the repository, and run the tests that must fail on it.

    python -m tests.mutants                       # all of them: some hours on two cores
    python -m tests.mutants scale "weighted sum"  # those with one of these texts in their name
    python -m tests.mutants --resume              # without those that build/mutants.jsonl has as killed

At the end the tests that failed run without a mutant, where they must pass.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import multiprocessing
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

from tests.mutants import ROOT, Mutant, read_mutants

RESULTS = ROOT / "build" / "mutants.jsonl"
LIMIT = 600.0
"""Seconds after which tests count as failed, since a mutant may hang."""
NO_TESTS = 5
"""Exit status of pytest if it selected none."""
_PRELOADED = ("torch._dynamo", "hypothesis", "numpy", "pytest")
_FORKS = multiprocessing.get_context("fork")


class Run(NamedTuple):
    """Tests of one mutant, or of none, in a process of their own."""

    process: Any
    arguments: list[str]  # of pytest
    mutant: Mutant | None
    copy: Path
    began: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the mutants that were asked for; 1 if one is not killed."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", help="texts in the names of mutants; all by default")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time (2)")
    parser.add_argument("--resume", action="store_true", help="leave out those killed before")
    options = parser.parse_args(arguments)
    mutants = [
        x for x in read_mutants() if not options.names or any(n in x.name for n in options.names)
    ]
    RESULTS.parent.mkdir(exist_ok=True)
    results = _earlier_results() if options.resume else {}
    left = [x for x in mutants if results.get(x, ("", ""))[0] != "killed"]
    with tempfile.TemporaryDirectory() as folder, RESULTS.open("a", encoding="utf-8") as file:
        copies = [_copied(Path(folder) / str(i)) for i in range(options.jobs)]
        jobs = [(shlex.split(x.tests), x) for x in left]
        for number, (_, mutant, result, by, seconds) in enumerate(_run(jobs, copies), start=1):
            assert mutant is not None
            results[mutant] = result, by
            row = {"mutant": mutant, "result": result, "by": by, "seconds": seconds}
            file.write(json.dumps(row) + "\n")
            file.flush()
            print(f"{number}/{len(left)} {result} in {seconds} s: {mutant.name}", flush=True)
        killers = sorted({by for x in mutants if (by := results[x][1])})
        for (by,), _, result, *_ in _run([([x], None) for x in killers], copies):
            if result != "survived":
                print(f"fails without a mutant, too: {by}", flush=True)
                results |= {x: ("unclear", by) for x in mutants if results[x][1] == by}
    _print_table({x: results[x][0] for x in mutants})
    return int(any(results[x][0] != "killed" for x in mutants))


def _earlier_results() -> dict[Mutant, tuple[str, str]]:
    """The last result of each mutant, killed, survived or no tests; and the test that failed."""
    if not RESULTS.exists():
        return {}
    rows = map(json.loads, RESULTS.read_text(encoding="utf-8").splitlines())
    return {Mutant(*row["mutant"]): (row["result"], row["by"]) for row in rows}


def _copied(folder: Path) -> Path:
    """A copy of the working tree, without the files that git ignores."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).exists():  # git lists deleted files, too
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def _run(
    jobs: Sequence[tuple[list[str], Mutant | None]], copies: Sequence[Path]
) -> Iterator[tuple[list[str], Mutant | None, str, str, int]]:
    """As each job ends: it, its result, the test that failed, and its seconds."""
    for module in _PRELOADED:  # once for all, since these imports take seconds
        importlib.import_module(module)
    sources = {x: (ROOT / x.path).read_text(encoding="utf-8") for _, x in jobs if x}
    times = iter(range(1_000_000_000, 2_000_000_000))
    waiting, free = list(reversed(jobs)), list(copies)
    running: dict[Any, Run] = {}
    while waiting or running:
        while waiting and free:
            arguments, mutant = waiting.pop()
            copy = free.pop()
            if mutant:
                _write(copy / mutant.path, mutant.applied_to(sources[mutant]), next(times))
            process = _FORKS.Process(target=_test, args=(copy, arguments))
            process.start()
            running[process.sentinel] = Run(process, arguments, mutant, copy, time.monotonic())
        deadline = min(x.began for x in running.values()) + LIMIT
        ended = wait([*running], timeout=max(deadline - time.monotonic(), 0))
        late = [key for key, x in running.items() if time.monotonic() - x.began > LIMIT]
        for key in {*ended, *late}:
            process, arguments, mutant, copy, began = running.pop(key)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with the ranks that it started
            process.join()
            if mutant:
                _write(copy / mutant.path, sources[mutant], next(times))
            free.append(copy)
            result = {0: "survived", NO_TESTS: "no tests"}.get(process.exitcode, "killed")
            by = (copy / "failed").read_text(encoding="utf-8")
            died = key in late or process.exitcode < 0  # of a hang, or of bad memory
            if result == "killed" and not by and not died:
                result = "not run"  # pytest itself failed: no test has
            yield arguments, mutant, result, by, round(time.monotonic() - began)


def _write(path: Path, text: str, mtime: int) -> None:
    """Write a file with a time of its own, by which Python sees that its bytecode is stale."""
    path.write_text(text, encoding="utf-8")
    os.utime(path, (mtime, mtime))


class _FirstFailure:
    """A plugin of pytest that writes the name of the test, or of the file, that failed."""

    def __init__(self, file: Path) -> None:
        self._file = file
        file.write_text("", encoding="utf-8")

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self._file.write_text(report.nodeid, encoding="utf-8")

    pytest_collectreport = pytest_runtest_logreport  # a mutant may fail the import of the tests


def _test(copy: Path, arguments: list[str]) -> None:
    """Run pytest on the copy, in a process that was forked for it."""
    os.setsid()
    output = os.open(copy / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.chdir(copy)
    os.environ["PYTHONPATH"] = str(copy)
    sys.path[:] = [str(copy), *(x for x in sys.path if x not in ("", str(ROOT)))]
    first_failure = _FirstFailure(copy / "failed")
    for name in [*sys.modules]:  # this module's own names stay
        if name.partition(".")[0] in ("tests", "megatron_loss_agg"):
            del sys.modules[name]
    import pytest
    from hypothesis import Phase, settings

    # Cases are the same each time, and the first that fails is enough.
    phases = (Phase.explicit, Phase.generate)
    settings.register_profile("mutants", settings.get_profile("ci"), phases=phases)
    options = ["-x", "-q", "-p", "no:cacheprovider", "--hypothesis-profile", "mutants"]
    code = pytest.main([*options, "--timeout", "300", *arguments], plugins=[first_failure])
    sys.stdout.flush()
    os._exit(int(code))


def _print_table(results: dict[Mutant, str]) -> None:
    print("\n| area | mutants | killed | survived |\n|---|---|---|---|")
    rows = {area: Counter[str]() for area in dict.fromkeys(x.area for x in results)}
    for x, result in results.items():
        rows[x.area][result] += 1
    for area, counts in [*rows.items(), ("all", Counter(results.values()))]:
        print(f"| {area} | {counts.total()} | {counts['killed']} | {counts['survived']} |")
    for x, result in results.items():
        if result != "killed":
            print(f"\n{result}: {x.name} ({x.tests})\n-   {x.old}\n+   {x.new}")


if __name__ == "__main__":
    sys.exit(main())
