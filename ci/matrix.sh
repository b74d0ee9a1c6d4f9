#!/usr/bin/env bash
# bash ci/matrix.sh [nox arguments]: the tests on every supported release of Megatron-Core.
# Without arguments, what held is written to docs/verified.md.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=$(bash ci/python.sh mcore,test,docs,plot,rl)
"$python" -m nox --noxfile noxfile.py "$@" </dev/null
if [[ $# -eq 0 ]]; then
    "$python" ci/verified.py build/verified/*.xml >docs/verified.md
fi
