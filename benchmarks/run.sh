#!/usr/bin/env bash
# Measures what the plugin costs beside stock Megatron; prints every figure, says which goals are met,
# and writes build/benchmarks.json. Exits 1 if a goal is missed.
#
#   bash benchmarks/run.sh                  on this machine's CPU, in 2 to 3 minutes
#   bash benchmarks/run.sh --only plan      one part alone: see benchmarks/__main__.py
#   bash benchmarks/run.sh --quick          small shapes once: does it run?
#
# Shapes, seeds and goals are in benchmarks/shapes.py; the environment is made by ci/python.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=$(bash ci/python.sh mcore)
export OMP_NUM_THREADS=1
export CUDA_DEVICE_MAX_CONNECTIONS=1 # Megatron asks for it
export PYTHONWARNINGS=ignore
exec "$python" -m benchmarks "$@"
