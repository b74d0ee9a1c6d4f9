"""Print a table of `tests.frameworks`, with a line for each aggregation and a column for its ranks.

    python ci/by_aggregation.py TABLE.md

The table has a line for each aggregation on each layout of ranks.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

LARGEST = ("metrics", "stock's gradient")  # over all layouts of ranks


def by_aggregation(table: str) -> str:
    cells_of: dict[str, dict[str, str]] = defaultdict(dict)  # by aggregation, and then by column
    columns: dict[str, None] = {}
    for row in table.splitlines()[2:]:  # without the names of the columns
        ranks, aggregation, gradient, *others = (cell.strip() for cell in row.split("|")[1:-1])
        columns[ranks] = None
        cells = cells_of[aggregation]
        if not gradient:  # of stock itself
            cells[ranks] = others[-1]
            continue
        cells[ranks] = gradient
        for name, cell in zip(LARGEST, others, strict=True):
            cells[name] = max(
                cells.get(name, ""), cell, key=lambda error: (error == "nan", float(error or 0))
            )
    head = ["aggregation", *columns, *LARGEST]
    lines = [[name, *(cells.get(c, "") for c in head[1:])] for name, cells in cells_of.items()]
    return "".join(f"| {' | '.join(line)} |\n" for line in [head, ["---"] * len(head), *lines])


if __name__ == "__main__":
    print(by_aggregation(Path(sys.argv[1]).read_text()), end="")
