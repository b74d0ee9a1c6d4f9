"""Runs the parts of the GPU script one after another, and writes what they found."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from benchmarks.gpu import page, runner

LIMIT = 470.0  # seconds, of all parts together


def main() -> int:
    parser = argparse.ArgumentParser(prog="bash benchmarks/gpu.sh", description=__doc__)
    parser.add_argument("--dry", action="store_true", help="tiny shapes on a CPU; no evidence")
    parser.add_argument("--only", choices=runner.PARTS, action="append", help="repeatable")
    parser.add_argument("--out", type=Path, default=Path("build"), help="where results go")
    arguments = parser.parse_args()
    dry, folder = arguments.dry, arguments.out / "gpu"
    folder.mkdir(parents=True, exist_ok=True)
    if dry:
        print(page.DRY, flush=True)
        runner.preload()
    elif (reason := runner.no_gpu()) is not None:
        print(f"{reason}: nothing ran. --dry tries the script on a CPU.")
        return 2
    end, found = time.monotonic() + LIMIT, {}
    for name in arguments.only or runner.PARTS:
        found[name] = runner.run(name, dry, end - time.monotonic(), folder)
        print("\n".join(page.lines(name, found[name])), flush=True)
    results = arguments.out / "gpu.json"
    rows = {"dry_run": dry, "parts": found}
    results.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    pages = page.paths(arguments.out, dry, whole=arguments.only is None)
    for path in pages:
        page.write(path, found, dry)
    print(f"\n{page.summary(found)} See {results} and {pages[-1]}.")
    return 1 if page.count(found)["failed"] or page.count(found)["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
