#!/usr/bin/env bash
# Trains the same model on the same data from the same seed under several modes, plots the loss by
# length of answer, and prints the gradients' norms. "stock" is Megatron without --loss-aggregation.
#
#   bash docs/images/compare_modes.sh [Megatron's flags]     about a minute for each run, on 2 cores
#
# The environment is made first, as for examples/quickstart.sh. All goes to build/compare_modes.
# MODES names the runs, OUTPUT another folder.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

python=$(bash ci/python.sh mcore,rl)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export CUDA_DEVICE_MAX_CONNECTIONS=1 # Megatron asks for it
export PYTHONWARNINGS=ignore PYTHONPATH=$PWD/examples # for its data and its training script
MODES=${MODES:-stock token_mean sample_mean prompt_mean sample_sum sum}
OUTPUT=${OUTPUT:-build/compare_modes}
# Standalone: the rendezvous takes a free port. One node, whatever PET_NNODES of a cluster says.
torchrun=("$python" -m torch.distributed.run --standalone --nnodes 1 --nproc-per-node 2)

flags=(
    --num-layers 2
    --hidden-size 64
    --ffn-hidden-size 176
    --num-attention-heads 4
    --swiglu
    --normalization RMSNorm
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --position-embedding-type rope
    --attention-dropout 0
    --hidden-dropout 0
    --seq-length 1024
    --max-position-embeddings 1024
    --micro-batch-size 1
    --global-batch-size 8
    --train-iters 120
    --lr 5e-3
    --lr-warmup-iters 5
    --lr-decay-style cosine
    --eval-interval 10
    --eval-iters 1
    --log-interval 1
    --logging-level 40
)

for mode in $MODES; do
    echo "$mode"
    aggregation=()
    [[ $mode == stock ]] || aggregation=(--loss-aggregation "$mode")
    mkdir -p "$OUTPUT/$mode"
    rm -f "$OUTPUT/$mode/losses.jsonl" # lines are added to it
    COMPARE_MODES_OUTPUT=$OUTPUT/$mode/losses.jsonl "${torchrun[@]}" -m megatron_loss_agg --cpu \
        docs/images/compare_modes.py "${flags[@]}" "${aggregation[@]}" "$@" \
        </dev/null >"$OUTPUT/$mode/log.txt" 2>&1 ||
        { tail -n 40 "$OUTPUT/$mode/log.txt"; exit 1; }
done
"$python" docs/images/compare_modes_plot.py "$OUTPUT" stock token_mean sample_mean prompt_mean
