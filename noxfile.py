"""The version matrix: the exactness tests on the older releases of Megatron-Core.

bash ci/matrix.sh                     all of them
bash ci/matrix.sh -- 0.16.1 0.17.1    these, but for the tests marked extended

The newest release is that of ci/constraints.txt, on which ci/test.sh --all runs every test.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

import nox
from nox.command import CommandFailed

nox.options.default_venv_backend = "venv"
nox.options.reuse_venv = "yes"
nox.options.error_on_missing_interpreters = True  # else a release is skipped, and all is well

CI = Path(__file__).parent / "ci"
REPORTS = CI.parent / "build" / "verified"
TESTS = (
    "tests/host/test_gradients.py",
    "tests/host/test_reports.py",
    "tests/host/test_whole_losses.py",
    "tests/host/test_by_sample.py",
    "tests/host/test_mtp.py",
    "tests/host/test_terms.py",
    "tests/host/test_scaling.py",
    "tests/host/test_stream.py",
    "tests/launch/test_any_loop.py",
)
NEXT_TESTS = (
    *TESTS,
    "tests/host/test_dynamic_cp.py",
    "tests/host/test_host_losses.py",
    "tests/host/test_packing_schedulers.py",
    "tests/host/test_reading.py",
    "tests/host/test_refused_steps.py",
    "tests/host/test_wrappers.py",
    "tests/launch/test_install.py",
)
"""Those of `ci/next.sh`, on a commit of Megatron-LM."""
TOOLS = ("pytest", "pytest-timeout", "pytest-xdist[psutil]", "hypothesis", "covertable")
CONSTRAINTS = {"3.11": "constraints-3.11.txt", "3.12": "constraints.txt"}


class Host(NamedTuple):
    """A release of Megatron-Core, and what it needs in place of what the constraints say."""

    version: str
    python: str
    instead: tuple[str, ...] = ()


# The wheels up to 0.16 are for 3.11 and older, and lack megatron.training.
HOSTS = (
    Host("0.14.0", "3.11", ("numpy==1.26.4",)),
    Host("0.15.3", "3.11", ("numpy==1.26.4",)),
    Host("0.16.1", "3.11"),
    Host("0.17.1", "3.12"),
    Host("0.18.2", "3.12"),
)
RELEASES = [host.version for host in HOSTS]


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
    """The constraints of the host's Python, with its own versions in place of some."""
    own = (f"megatron-core=={host.version}", *host.instead)
    replaced = {requirement.partition("==")[0] for requirement in own}
    pins = (CI / CONSTRAINTS[host.python]).read_text().splitlines()
    return "\n".join([*(pin for pin in pins if pin.partition("==")[0] not in replaced), *own, ""])


def share_packages(session: nox.Session) -> None:
    """Let the session's environment see ours after its own: torch need not be installed again."""
    (site,) = Path(session.virtualenv.location).glob("lib/python*/site-packages")
    ours = sysconfig.get_path("purelib")
    (site / "shared.pth").write_text(f"import site; site.addsitedir({ours!r})\n")


def test_on(session: nox.Session, host: Host) -> None:
    """Install ``host`` in place of the one before it, and run the tests that it can run."""
    constraints = Path(session.create_tmp()) / "constraints.txt"
    constraints.write_text(constraints_for(host))
    install = ("-q", "-c", str(constraints))
    session.install(*install, "megatron-core", "setuptools>=77", *TOOLS)
    session.install(*install, "--no-build-isolation", "-e", ".")
    session.run(
        *("python", "-m", "pytest", "--timeout", "1200", "-q", "-W", "ignore"),
        *("-n", "logical", "--maxprocesses", "8", "--dist", "loadfile", "--no-loadscope-reorder"),
        *(("-m", "not extended") if session.posargs else ()),
        f"--junitxml={REPORTS / host.version}.xml",
        *TESTS,
        env={"OMP_NUM_THREADS": "1"},
    )


# Of one Python, releases are installed in turn into the same environment: torch is 5 GB.
for python in CONSTRAINTS:

    @nox.session(name=f"python-{python}", python=interpreter(python))
    def matrix(session: nox.Session, python: str = python) -> None:
        """Test every release on this Python, or those that are named, also after one that fails."""
        if unknown := set(session.posargs) - set(RELEASES):
            session.error(f"no release {', '.join(unknown)}; expected some of {RELEASES}")
        if python == f"{sys.version_info.major}.{sys.version_info.minor}":
            share_packages(session)
        failed = []
        for host in HOSTS:
            if host.python == python and host.version in (session.posargs or RELEASES):
                try:
                    test_on(session, host)
                except CommandFailed:
                    failed.append(host.version)
        if failed:
            session.error(f"failed on Megatron-Core {', '.join(failed)}")
