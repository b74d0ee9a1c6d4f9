#!/usr/bin/env bash
# Trains a GPT with exact loss aggregation on four CPU processes, then proves its gradient exact.
#
#   bash examples/quickstart.sh
#
# Needs Python 3.12 or 3.13 and nothing else: an environment is made first (ci/python.sh says where
# and how to choose another interpreter). The exit status is that of the training or of the proof.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=$(bash ci/python.sh mcore)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export CUDA_DEVICE_MAX_CONNECTIONS=1 # Megatron asks for it
export PYTHONWARNINGS=ignore
# Standalone: the rendezvous takes a free port. One node, whatever PET_NNODES of a cluster says.
torchrun=("$python" -m torch.distributed.run --standalone --nnodes 1 --nproc-per-node 4)

flags=(
    --num-layers 2
    --hidden-size 128
    --ffn-hidden-size 352
    --num-attention-heads 4
    --swiglu
    --normalization RMSNorm
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --position-embedding-type rope
    --attention-dropout 0
    --hidden-dropout 0
    --seq-length 1280
    --max-position-embeddings 1280
    --context-parallel-size 2
    --micro-batch-size 1
    --global-batch-size 4
    --train-iters 24
    --lr 5e-3
    --lr-warmup-iters 3
    --lr-decay-style cosine
    --eval-interval 1000
    --eval-iters 2
    --log-interval 1
    --logging-level 40
    --loss-aggregation prompt_mean
)

# Megatron lists its 800 arguments first, a line each: "  name ... value".
"${torchrun[@]}" -m megatron_loss_agg --cpu examples/pretrain_gpt.py "${flags[@]}" </dev/null 2>&1 |
    sed -u -E '/^  [A-Za-z0-9_]+ (\.+ | [^ :])/d'
"${torchrun[@]}" examples/proof.py </dev/null
