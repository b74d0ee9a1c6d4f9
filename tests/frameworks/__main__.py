"""Run a framework's checkouts, as ci/frameworks.sh does, and write the table of errors.

    python -m tests.frameworks MODULE ARGUMENTS... TABLE

The function `report` of the module takes the arguments, and returns rows and what failed.
"""

import sys
from importlib import import_module
from pathlib import Path

module, *arguments, table = sys.argv[1:]
rows, failures = import_module(f"tests.frameworks.{module}").report(*arguments)
head = ("ranks", "aggregation", "gradient", "metrics", "stock's gradient")
lines = [head, ("---",) * len(head), *rows]
Path(table).write_text("".join(f"| {' | '.join(line)} |\n" for line in lines))
sys.exit("\n".join(failures) or None)
