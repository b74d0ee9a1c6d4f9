#!/usr/bin/env bash
# Usage: python=$(bash ci/python.sh EXTRAS)
#
# Makes, or uses again, the virtual environment of this checkout with the package and the given
# extras ("mcore" or "mcore,test") installed, and prints the path of its interpreter. Progress goes
# to stderr. With "test", the packages of ci/peers.txt and of ci/hugging_face.txt are installed into
# the environment's folders peers and hugging_face.
#
#   PYTHON                  the interpreter to build on; by default the first fit one that is found;
#                           that of a virtual environment stands for the one behind it
#   MEGATRON_LOSS_AGG_VENV  where the environment lies; by default .venv in the checkout
#
# An interpreter that has torch already, as in a GPU container, keeps it: the environment then sees
# the interpreter's packages, and of the constraints only those on missing packages apply.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
extras=${1:?usage: bash ci/python.sh EXTRAS}
venv=${MEGATRON_LOSS_AGG_VENV:-$root/.venv}

unset PYTHONPATH  # the environment would seem to have what only this shell has
export PIP_USER=0 # pip refuses to install for a user into an environment

say() { echo "ci/python.sh: $*" >&2; }

# The interpreter behind a fit candidate, which is run, since a name on the PATH may be a shim that
# refuses to start. A virtual environment stands for what it was made from: it may be the one that
# is made here, and its packages are not seen from another one. megatron-core has wheels for Python
# 3.12 and 3.13.
base_of() {
    "$1" -c 'import sys, venv, ensurepip
if not (3, 12) <= sys.version_info < (3, 14): sys.exit(1)
print(sys._base_executable)' 2>/dev/null
}

has_torch() {
    "$1" -c 'import sys, importlib.util as u; sys.exit(u.find_spec("torch") is None)' 2>/dev/null
}

find_python() {
    local candidate base versions=${PYENV_ROOT:-~/.pyenv}/versions
    if [[ -n ${PYTHON:-} ]]; then
        base_of "$PYTHON" && return
        say "PYTHON=$PYTHON is not a Python 3.12 or 3.13 with the modules venv and ensurepip."
        return 1
    fi
    for candidate in python3 python; do
        if base=$(base_of "$candidate") && has_torch "$base"; then echo "$base" && return; fi
    done
    for candidate in python3.12 python3.13 python3 python "$versions"/3.1[23]*/bin/python; do
        base_of "$candidate" && return
    done
    say "found no Python 3.12 or 3.13 with the modules venv and ensurepip." \
        "Install one, or name it: PYTHON=/path/to/python3.12 bash ..."
    return 1
}

# The constraints, without those on packages that the interpreter brings along. megatron-core is
# always our own: an older one has no megatron.training.
constraints_for() {
    if [[ -z $2 ]]; then cat "$root/ci/constraints.txt" && return; fi
    "$1" - "$root/ci/constraints.txt" <<'PY'
import re, sys
from importlib.metadata import distributions

name = lambda text: re.sub(r"[-_.]+", "-", text).lower()
present = {name(dist.metadata["Name"]) for dist in distributions()} - {"megatron-core"}
for line in open(sys.argv[1], encoding="utf-8"):
    if name(line.partition("==")[0]) not in present:
        print(line, end="")
PY
}

base=$(find_python)
site=""
if has_torch "$base"; then site=--system-site-packages; fi

# What lies there may be removed, so it must be ours.
if [[ -n $(ls -A "$venv" 2>/dev/null) && ! -e $venv/foundation ]]; then
    say "$venv exists and was not made here: remove it, or set MEGATRON_LOSS_AGG_VENV."
    exit 1
fi

# Two runs at once must not install into the same environment.
mkdir -p "$(dirname "$venv")"
if command -v flock >/dev/null; then
    exec 9>"$venv.lock"
    flock -n 9 || { say "waiting for another run that is at work on $venv"; flock 9; }
fi

# What the environment is made of: the interpreter, by whatever name, then what is installed into it.
foundation="$("$base" -c 'import sys; print(sys.base_prefix, sys.version)') $site"
contents="$root "$("$base" -c 'import hashlib, sys
print(hashlib.sha256(b"".join(open(path, "rb").read() for path in sys.argv[1:])).hexdigest())' \
    "$root/setup.py" "$root/pyproject.toml" "$root"/ci/*.txt)
stamp=$venv/stamp-${extras//,/-}

if [[ $(cat "$venv/foundation" 2>/dev/null) != "$foundation" ]]; then
    say "making $venv with $base ${site:+(and the packages installed there)}"
    # The mark that it is ours comes first and stays, for a run cut short.
    mkdir -p "$venv" && echo unfinished >"$venv/foundation"
    find "$venv" -mindepth 1 -maxdepth 1 ! -name foundation -exec rm -rf {} +
    "$base" -m venv $site "$venv" >&2
    echo "$foundation" >"$venv/foundation"
fi
if [[ $(cat "$stamp" 2>/dev/null) != "$contents" ]]; then
    say "installing megatron-loss-agg[$extras] into $venv (once; torch is a large download)"
    # Stamps of another checkout or commit cease to be true; those of other extras stay.
    for other in "$venv"/stamp-*; do
        if [[ $(cat "$other" 2>/dev/null) != "$contents" ]]; then rm -f "$other"; fi
    done
    constraints_for "$base" "$site" >"$venv/constraints.txt"
    pip=("$venv/bin/python" -m pip --disable-pip-version-check --no-input install
        --constraint "$venv/constraints.txt")
    if [[ ! -t 2 ]]; then pip+=(--quiet); fi
    "${pip[@]}" "setuptools>=77" >&2
    "${pip[@]}" --no-build-isolation --editable "$root[$extras]" >&2
    if [[ ,$extras, == *,test,* ]]; then
        # Out of sight of every other import, without what they need, on any Python.
        for folder in peers hugging_face; do
            rm -rf "${venv:?}/$folder"
            "${pip[@]}" --no-deps --no-compile --ignore-requires-python --target "$venv/$folder" \
                --requirement "$root/ci/$folder.txt" >&2
        done
    fi
    echo "$contents" >"$stamp"
fi
echo "$venv/bin/python"
