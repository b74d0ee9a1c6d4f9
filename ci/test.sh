#!/usr/bin/env bash
# bash ci/test.sh             sets up, checks style and types, runs the tests
# bash ci/test.sh --all       the same, and the tests that few changes break: those that run a
#                             framework's own code, further parallelisms, benchmarks
# bash ci/test.sh --quick     sets up, checks style, runs in a minute what a change of the modes, the
#                             count, the step or a page breaks most often: one process and two ranks
# bash ci/test.sh ARGUMENTS   sets up, runs pytest with these arguments
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONOPTIMIZE # without assertions, tests pass that should fail
unset PYTHONDONTWRITEBYTECODE # hundreds of processes would compile what they import
unset PYTHONUNBUFFERED # lines of several ranks would be torn

python=$(bash ci/python.sh mcore,test,docs,plot,rl)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

# Of one file, every test in the same process: they share ranks that take long to start. Drawn cases
# are the same in every run; pytest alone draws others each time.
workers=(-n logical --maxprocesses 8 --dist loadfile --no-loadscope-reorder --hypothesis-profile ci)
quick_tests=(
    tests/core/test_{modes,losses,refusals,reading,sequences,weigh,explain,rooms}.py
    tests/host/test_{terms,loss_functions,refused_steps,reading,mismatch}.py
    tests/launch/test_flags.py tests/test_docs.py
)

status=0
if [[ ${1:-} == --quick ]]; then
    "$python" -m ruff check . || status=$?
    "$python" -m ruff format --check . || status=$?
    set -- -q "${workers[@]}" "${quick_tests[@]}" "${@:2}"
elif [[ $# -eq 0 || $1 == --all ]]; then
    "$python" -m ruff check . || status=$?
    "$python" -m ruff format --check . || status=$?
    "$python" -m mypy || status=$?
    if [[ $status -ne 0 ]]; then
        echo "ci/test.sh: ruff or mypy failed, see above; this run will fail after the tests" >&2
    fi
    if [[ $# -eq 0 ]]; then
        set -- "${workers[@]}" -m "not extended"
    else
        rm -f build/verified/newest.xml # of a run before this one
        set -- --junitxml build/verified/newest.xml "${workers[@]}" "${@:2}"
    fi
fi
# A hang in a collective ends in a traceback instead of a silent job.
"$python" -m pytest --timeout 1200 "$@" </dev/null || status=$?
exit "$status"
