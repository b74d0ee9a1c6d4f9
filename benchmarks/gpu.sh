#!/usr/bin/env bash
# On a machine with one NVIDIA GPU or more: what a CPU cannot show, in at most 8 minutes and without
# a network. Writes build/gpu.json and benchmarks/gpu.md; each part's output is in build/gpu/. Exits 1 if
# something failed or missed its goal, 2 if there is no GPU or no torch.
#
#   bash benchmarks/gpu.sh                  python3 has torch, megatron-core and pytest
#   WHEELS=FOLDER bash benchmarks/gpu.sh    installs the folder's wheels into build/gpu-site first
#   bash benchmarks/gpu.sh --only training  parts alone: see benchmarks/gpu/__main__.py
#   bash benchmarks/gpu.sh --dry            tries the script on a CPU, in tiny shapes; no evidence
#
# PYTHON names the interpreter, python3 by default.
set -euo pipefail
[[ -z ${WHEELS:-} ]] || WHEELS=$(cd "$WHEELS" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
if [[ -n ${WHEELS:-} ]]; then
    rm -rf build/gpu-site
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --target build/gpu-site \
        "$WHEELS"/*.whl
    PYTHONPATH=$PWD/build/gpu-site${PYTHONPATH:+:$PYTHONPATH}
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
if ! "$python" -c 'import torch' 2>/dev/null; then
    echo "benchmarks/gpu.sh: $python has no torch: name another one by PYTHON=/path/to/python" >&2
    exit 2
fi
export CUDA_DEVICE_MAX_CONNECTIONS=1                    # Megatron asks for it
export NVIDIA_TF32_OVERRIDE=0                           # fp32 gradients are compared
export TORCHDYNAMO_DISABLE=1                            # compiling needs a C compiler, and time
export NCCL_IB_DISABLE=1                                # one machine needs no network
export PYTHONUNBUFFERED=1
exec "$python" -m benchmarks.gpu "$@"
