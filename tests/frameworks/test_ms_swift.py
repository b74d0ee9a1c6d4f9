from __future__ import annotations
import pytest, re, functools, os
from tests.distributed import run_ranks
from tests.frameworks.run_ms_swift import *
from tests.host.reference import relative_error
from tests.host.steps import PLACES, weights_of
run = functools.partial(run_ranks, preload="tests.frameworks.ms_swift_host", timeout=60)
