#!/usr/bin/env bash
#SBATCH --job-name=loss-aggregation
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --output=%x-%j.log
#
#   sbatch examples/cluster/slurm.sh pretrain_gpt.py FLAGS... --loss-aggregation MODE
#
# One task a node starts node.sh, whose torchrun starts a rank a GPU. Submit it in the folder that
# holds examples/.
set -euo pipefail
export NNODES=$SLURM_JOB_NUM_NODES RANKS=$SLURM_GPUS_ON_NODE JOB=$SLURM_JOB_ID
HOST=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export HOST PORT=$((20000 + SLURM_JOB_ID % 10000)) # jobs that share a node need ports of their own
# As soon as the ranks of one node have failed, those of the others are ended. Of the job's CPUs, srun
# of Slurm 22.05 and later gives a task one, unless it is told.
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 --label \
    bash examples/cluster/node.sh "$@"
