#!/usr/bin/env bash
# Usage: python=$(bash ci/python.sh EXTRAS)
#
# Prints the interpreter of this checkout's virtual environment, in which the package and EXTRAS
# ("mcore" or "mcore,test") are installed in the versions of ci/constraints.txt. What is missing is
# installed; for another checkout, interpreter or other versions all is made anew. "test" includes
# what is in ci/peers.txt and ci/hugging_face.txt, in the folders peers and hugging_face.
#
#   PYTHON                  the interpreter to build on; by default the first fit one that is found;
#                           that of an environment stands for the one behind it. One that has torch,
#                           as in a GPU container, keeps its packages: only megatron-core is pinned
#   MEGATRON_LOSS_AGG_VENV  where the environment lies; by default .venv in the checkout
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
extras=${1:?usage: bash ci/python.sh EXTRAS}
venv=${MEGATRON_LOSS_AGG_VENV:-$root/.venv}
unset PYTHONPATH  # the environment would seem to have what only this shell has
export PIP_USER=0 # pip refuses to install for a user into an environment

say() { echo "ci/python.sh: $*" >&2; }

# megatron-core has wheels for Python 3.12 and 3.13. Candidates are run, since a name on the PATH
# may be a shim that refuses to start; one of an environment stands for the interpreter behind it.
pyenv=${PYENV_ROOT:-${HOME:-}/.pyenv}/versions
candidates=(python3 python3.12 python3.13 "$pyenv"/3.1[23].*/bin/python)
if [[ -n ${PYTHON:-} ]]; then candidates=("$PYTHON"); fi
base=
for candidate in "${candidates[@]}"; do
    base=$("$candidate" -c 'import ensurepip, os, sys
if not (3, 12) <= sys.version_info < (3, 14): sys.exit(1)
print(os.path.realpath(sys._base_executable))' 2>/dev/null) && break
done
if [[ -z $base ]]; then
    say "no Python 3.12 or 3.13 with ensurepip among ${candidates[*]}; name one in PYTHON"
    exit 1
fi
options=() pinned=.
if "$base" -c 'from importlib.metadata import version; version("torch")' 2>/dev/null; then
    options=(--system-site-packages) pinned='^megatron-core=='
fi

mkdir -p "$(dirname "$venv")"
exec 9>"$venv.lock"
flock -n 9 || { say "waiting for another run that is at work on $venv" && flock 9; }

mark=$venv/made-of # which also says that what lies there was made here, and may be removed
if [[ -n $(ls -A "$venv" 2>/dev/null) && ! -e $mark ]]; then
    say "$venv exists and was not made here: remove it, or set MEGATRON_LOSS_AGG_VENV"
    exit 1
fi
versions=$(cat "$root"/{pyproject.toml,ci/*.txt} | sha256sum)
made_of="$root, $base $("$base" -VV) ${options[*]}, $versions"
if [[ $(cat "$mark" 2>/dev/null) != "$made_of" ]]; then
    say "making $venv with $base ${options[*]}"
    mkdir -p "$venv"
    : >"$mark" # first, and kept: the folder is ours also if this run is cut short
    find "$venv" -mindepth 1 -maxdepth 1 ! -path "$mark" -exec rm -rf {} +
    "$base" -m venv "${options[@]}" "$venv" >&2
    grep "$pinned" "$root/ci/constraints.txt" >"$venv/constraints.txt"
    echo "$made_of" >"$mark"
fi
if [[ ! -e $venv/has-$extras ]]; then
    say "installing megatron-loss-agg[$extras] into $venv (once; torch is a large download)"
    pip=("$venv/bin/python" -m pip --disable-pip-version-check --no-input install
        --constraint "$venv/constraints.txt")
    if [[ ! -t 2 ]]; then pip+=(--quiet); fi
    "${pip[@]}" "setuptools>=77" >&2
    "${pip[@]}" --no-build-isolation --editable "$root[$extras]" >&2
    if [[ ,$extras, == *,test,* ]]; then
        # Out of sight of every other import, without what they need, on any Python.
        for folder in peers hugging_face; do
            "${pip[@]}" --no-deps --no-compile --ignore-requires-python --upgrade \
                --target "$venv/$folder" --requirement "$root/ci/$folder.txt" >&2
        done
    fi
    touch "$venv/has-$extras"
fi
echo "$venv/bin/python"
