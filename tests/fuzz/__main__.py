"""Search for wrong numbers and unnamed errors: ``python -m tests.fuzz --seed 0 --number 10000``."""

from __future__ import annotations

import argparse

from tests.fuzz.search import search, search_ranks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--seed", type=int, default=0, help="of the first input; then the next ones"
    )
    parser.add_argument("--number", type=int, default=10_000, help="of inputs")
    parser.add_argument("--ranks", type=int, default=1, help="steps over this many gloo ranks")
    given = parser.parse_args()
    if given.ranks == 1:
        report = search(given.seed, given.number)
    else:
        report = search_ranks(given.seed, given.number, given.ranks)
    print(report)
    return 1 if report.findings else 0


if __name__ == "__main__":
    raise SystemExit(main())
