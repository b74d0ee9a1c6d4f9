#!/usr/bin/env bash
# bash ci/sweep.sh           every case of tests/sweep that has no good result in build/sweep yet;
#                            then writes docs/verification/sweep.md
# bash ci/sweep.sh cp2 sum   only the cases that have these values of tests/sweep/factors.py
# bash ci/sweep.sh --jobs 4  four launches at once, of up to four ranks each
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONOPTIMIZE # without assertions, tests pass that should fail

python=$(bash ci/python.sh mcore,test,docs,plot,rl)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONPATH=$PWD
exec "$python" -W ignore -m tests.sweep "$@" </dev/null
