#!/usr/bin/env bash
# Trains a small GPT on sums by GRPO: four CPU processes, context parallel 2 x data parallel 2.
#
#   bash examples/grpo/run.sh [flags of train.py]             one run
#   bash examples/grpo/run.sh --compare [flags of train.py]   one run for each of five aggregations
#
# Metrics, checkpoints, TensorBoard files and plots go to build/grpo.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

python=$(bash ci/python.sh mcore,rl)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export CUDA_DEVICE_MAX_CONNECTIONS=1 # Megatron asks for it
export PYTHONWARNINGS=ignore
# Standalone: the rendezvous takes a free port. One node, whatever PET_NNODES of a cluster says.
train=("$python" -m torch.distributed.run --standalone --nnodes 1 --nproc-per-node 4
    -m examples.grpo.train --cpu)

if [[ ${1:-} == --compare ]]; then
    shift
    folders=()
    for mode in prompt_mean token_mean sample_mean constant microbatch_mean; do
        folders+=("build/grpo/compare/$mode")
        echo "$mode"
        "${train[@]}" "$@" --mode "$mode" --output "${folders[-1]}" </dev/null
    done
    "$python" -m examples.grpo.plot build/grpo/compare.png "${folders[@]}"
else
    "${train[@]}" "$@" </dev/null
fi
