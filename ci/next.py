"""Print docs/verification/next.md, the page on Megatron-LM's next release.

python ci/next.py REPORT.xml "COMMIT, DATE" LAUNCHES.md
"""

from __future__ import annotations

import sys
from pathlib import Path

from verified import GRADIENTS, TITLES, gradient_row, held, passed, read, title

HEAD = """\
# The next release of Megatron-Core

Written by `bash ci/next.sh CHECKOUT`, on [Megatron-LM](https://github.com/NVIDIA/Megatron-LM) at
`{commit}`, dated {date}: Megatron-Core {version}.
The tests are those of the [older releases](index.md), and those of fully sharded wrappers, of the losses
that Megatron scales itself, of what is read and refused (settings such as generalized tensor
parallelism), of dynamic context parallelism and of packing schedulers.
"""


def main(report: str, checkout: str, launches: str) -> None:
    version, cases = read(report)
    commit, date = checkout.split(", ")
    print(HEAD.format(commit=commit, date=date, version=version))
    print(f"| Megatron-Core | comparisons that hold | {' | '.join(TITLES.values())} |")
    print("|---|---|---|---|")
    print(gradient_row(version, [case for case in cases if title(case) == GRADIENTS]))
    modules: dict[str, list[bool]] = {}
    for case in cases:
        if title(case) != GRADIENTS and case.find("skipped") is None:
            modules.setdefault(title(case)[0], []).append(passed(case))
    print("\n| tests | passed |\n|---|---|")
    for module, results in sorted(modules.items()):
        print(f"| `{module.replace('.', '/')}.py` | {held(results)} |")
    print("\nIts scripts, on two ranks with `--loss-aggregation sample_mean` and the audit:\n")
    print(f"| script | said |\n|---|---|\n{Path(launches).read_text()}", end="")


if __name__ == "__main__":
    main(*sys.argv[1:])
