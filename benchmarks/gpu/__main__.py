"""Runs the parts of the GPU script one after another, and writes their results."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch

from benchmarks.gpu import page, runner
from benchmarks.gpu.parts import PARTS
from benchmarks.results import counted, line

LIMIT = 470.0  # seconds, of all parts together


def main() -> int:
    parser = argparse.ArgumentParser(prog="bash benchmarks/gpu.sh", description=__doc__)
    parser.add_argument("--dry", action="store_true", help="tiny shapes on a CPU; no evidence")
    parser.add_argument("--only", choices=PARTS, action="append", help="repeatable")
    parser.add_argument("--out", type=Path, default=Path("build"), help="where results go")
    arguments = parser.parse_args()
    dry, folder = arguments.dry, arguments.out / "gpu"
    if dry:
        print(page.DRY, flush=True)
    elif not torch.cuda.is_available():
        print(f"torch {torch.__version__} sees no GPU: nothing ran. --dry tries it on a CPU.")
        return 2
    folder.mkdir(parents=True, exist_ok=True)
    times = 2 if dry else 1  # a CPU may be busy with other work
    end, parts = time.monotonic() + times * LIMIT, {}
    for name in arguments.only or PARTS:
        limited = PARTS[name]._replace(seconds=times * PARTS[name].seconds)
        parts[name] = part = runner.run(name, limited, dry, end - time.monotonic(), folder)
        print(f"\n{name}: {part['seconds']} s")
        for figure in part["figures"]:
            print("  " + line(figure))
        for kind in ("facts", "failed", "could_not_run"):
            for row in part.get(kind, []):
                print(f"  {kind.replace('_', ' ')}: {row['what']}: {row['reason']}", flush=True)
    results = arguments.out / "gpu.json"
    results.write_text(json.dumps({"dry_run": dry, "parts": parts}, indent=1), encoding="utf-8")
    pages = page.paths(arguments.out, dry, whole=arguments.only is None)
    for path in pages:
        page.write(path, parts, dry)
    counts = counted([*parts.values()])
    print(f"\n{page.summary(counts)} See {results} and {pages[-1]}.")
    return 1 if counts["failed"] or counts["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
