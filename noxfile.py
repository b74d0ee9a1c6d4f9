"""The version matrix: the same exactness tests on every supported release of Megatron-Core.

bash ci/matrix.sh                         all of them
bash ci/matrix.sh -s megatron-core-0.16.1   one
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import nox

nox.options.default_venv_backend = "venv"
nox.options.reuse_venv = "yes"

CI = Path(__file__).parent / "ci"
REPORTS = CI.parent / "build" / "verified"
TESTS = tuple(
    f"tests/host/test_{name}.py"
    for name in ("gradients", "parallelism", "terms", "audit", "reports")
)


class Host(NamedTuple):
    """A release of Megatron-Core, and what it needs that the constraints do not say."""

    version: str
    python: str  # wheels up to 0.16 are for 3.11 and older, and lack megatron.training
    constraints: str
    instead: tuple[str, ...] = ()


HOSTS = [
    Host("0.14.0", "3.11", "constraints-3.11.txt", ("numpy==1.26.4",)),
    Host("0.15.3", "3.11", "constraints-3.11.txt", ("numpy==1.26.4",)),
    Host("0.16.1", "3.11", "constraints-3.11.txt"),
    Host("0.17.1", "3.12", "constraints.txt"),
    Host("0.18.2", "3.12", "constraints.txt"),
    Host("0.19.2", "3.12", "constraints.txt"),
]


def interpreter(version: str) -> str:
    """A Python of ``version``; a name on the PATH may be a shim that refuses to start."""
    pyenv = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python"))
    for candidate in (f"python{version}", "python3", *map(str, pyenv)):
        code = "import sys; print('%d.%d' % sys.version_info[:2])"
        found = shutil.which(candidate)
        if found is None:
            continue
        done = subprocess.run([found, "-c", code], capture_output=True, text=True)
        if done.stdout.strip() == version:
            return found
    return version  # nox says that it is missing


def constraints_for(host: Host) -> str:
    """The constraints file of ``host``'s Python, with its own versions in place of some."""
    own = (f"megatron-core=={host.version}", *host.instead)
    replaced = {requirement.partition("==")[0] for requirement in own}
    pins = (CI / host.constraints).read_text().splitlines()
    return "\n".join([*(pin for pin in pins if pin.partition("==")[0] not in replaced), *own, ""])


def test_on(session: nox.Session, host: Host) -> None:
    """Install ``host`` into an environment of its own and run the tests that it can run."""
    constraints = Path(session.create_tmp()) / "constraints.txt"
    constraints.write_text(constraints_for(host))
    tools = ("setuptools>=70.1", "pytest", "pytest-timeout", "hypothesis")
    session.install("-q", "-c", str(constraints), "megatron-core", *tools)
    session.install("-q", "-c", str(constraints), "--no-build-isolation", "-e", ".")
    session.run(
        *("python", "-m", "pytest", "--timeout", "600", "-q", "-W", "ignore"),
        f"--junitxml={REPORTS / host.version}.xml",
        *(session.posargs or TESTS),
        env={"OMP_NUM_THREADS": "1"},
    )


for host in HOSTS:

    def matrix(session: nox.Session, host: Host = host) -> None:
        test_on(session, host)

    nox.session(name=f"megatron-core-{host.version}", python=interpreter(host.python))(matrix)
