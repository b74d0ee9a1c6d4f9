#!/usr/bin/env bash
# The same training run in four layouts: stock Megatron's runs part, those with the plugin do not.
#
#   bash examples/layouts.sh [MODE]     about four minutes, on 2 cores
#
# Samples of mixed lengths, each alone in a row of 1024 tokens, 8 a step, 16 steps, with Megatron's
# default Adam and clipping. Each layout trains without the plugin, and with --loss-aggregation MODE
# (sample_mean). layouts.py then prints what each logged, and draws it, in build/layouts. The exit
# status is 0 if the plugin's runs agree and stock Megatron's do not.
# The environment is made first, as for quickstart.sh. OUTPUT names another folder.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=$(bash ci/python.sh mcore,plot)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export CUDA_DEVICE_MAX_CONNECTIONS=1 # Megatron asks for it
export PYTHONWARNINGS=ignore
MODE=${1:-sample_mean}
OUTPUT=${OUTPUT:-build/layouts}

# A name, the number of ranks, and flags.
layouts=(
    "1 rank: 1 --micro-batch-size 1"
    "1 rank, --micro-batch-size 4: 1 --micro-batch-size 4"
    "CP 2: 2 --micro-batch-size 1 --context-parallel-size 2"
    "DP 2, --micro-batch-size 2: 2 --micro-batch-size 2"
)
flags=(
    --num-layers 2
    --hidden-size 64
    --num-attention-heads 4
    --position-embedding-type rope
    --attention-dropout 0
    --hidden-dropout 0
    --seq-length 1024
    --max-position-embeddings 1024
    --pad-samples-to 1024
    --global-batch-size 8
    --train-iters 16
    --lr 3e-3
    --eval-interval 1000
    --eval-iters 0
    --log-interval 1
)

rm -rf "$OUTPUT"
for mode in stock "$MODE"; do
    mkdir -p "$OUTPUT/$mode"
    aggregation=()
    [[ $mode == stock ]] || aggregation=(--loss-aggregation "$mode")
    for layout in "${layouts[@]}"; do
        name=${layout%%:*}
        read -ra words <<<"${layout#*:}"
        echo "$mode, $name"
        # Standalone: the rendezvous takes a free port. One node, whatever PET_NNODES says.
        "$python" -m torch.distributed.run --standalone --nnodes 1 --nproc-per-node "${words[0]}" \
            -m megatron_loss_agg --cpu examples/pretrain_gpt.py "${flags[@]}" "${words[@]:1}" \
            "${aggregation[@]}" </dev/null >"$OUTPUT/$mode/$name.log" 2>&1 ||
            { tail -n 40 "$OUTPUT/$mode/$name.log" && exit 1; }
    done
done
"$python" examples/layouts.py "$OUTPUT"
