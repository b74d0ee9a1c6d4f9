#!/usr/bin/env bash
# Starts the ranks of this node; run it on every node of the job, by hand or by slurm.sh.
#
#   NNODES=2 HOST=first-node bash examples/cluster/node.sh SCRIPT FLAGS... --loss-aggregation MODE
#
#   NNODES  nodes of the job                  HOST  the node that the others meet at
#   RANKS   ranks of this node, by default 8  PORT  a free port of HOST, by default 29500
#   JOB     a name of the job's own, where several meet at one HOST and PORT
#
# Without the line marked below, and without --loss-aggregation..., stock Megatron trains.
set -euo pipefail
export CUDA_DEVICE_MAX_CONNECTIONS=1 # Megatron asks for it

command=(
    torchrun
    --nnodes "$NNODES"
    --nproc-per-node "${RANKS:-8}"
    --rdzv-backend c10d
    --rdzv-endpoint "$HOST:${PORT:-29500}"
    --rdzv-id "${JOB:-train}"
    -m megatron_loss_agg # the plugin
    "$@"
)
exec "${command[@]}"
