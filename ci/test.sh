#!/usr/bin/env bash
# bash ci/test.sh             sets up, checks style, types and docs, runs every test
# bash ci/test.sh ARGUMENTS   sets up, runs pytest with these arguments
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONOPTIMIZE # without assertions, tests pass that should fail

python=$(bash ci/python.sh mcore,test,docs,plot,rl)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

status=0
if [[ $# -eq 0 ]]; then
    "$python" -m ruff check . || status=$?
    "$python" -m ruff format --check . || status=$?
    "$python" -m mypy || status=$?
    "$python" -m mkdocs build --strict || status=$?
    if [[ $status -ne 0 ]]; then
        echo "ci/test.sh: ruff, mypy or mkdocs failed, see above; this run will fail after the tests" >&2
    fi
    rm -f build/verified/newest.xml # of a run before this one
    # Of one file, every test in the same process: they share ranks that take long to start. Drawn
    # cases are the same in every run; pytest alone draws others each time.
    set -- --junitxml build/verified/newest.xml -n logical --maxprocesses 8 --dist loadfile \
        --no-loadscope-reorder --hypothesis-profile ci
fi
# A hang in a collective ends in a traceback instead of a silent job.
"$python" -m pytest --timeout 600 "$@" </dev/null || status=$?
exit "$status"
