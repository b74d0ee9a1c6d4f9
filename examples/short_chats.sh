#!/usr/bin/env bash
# Short chats in long rows under context parallelism: stock Megatron's gradient is half as large.
#
#   bash examples/short_chats.sh
#
# One step of four samples, each alone in a row of 1024 tokens, on two context-parallel ranks, as
# Megatron lays out the chats of --sft. A sample has at most 256 tokens, so that zigzag lays it on
# the first rank. The second one's part has no loss token, and adds 0 to Megatron's mean over ranks.
# The step is taken twice, without and with the plugin; before, `explain` says what will come out:
# 1.00 in a Megatron that has the fix (docs/explain.md), or else 0.50. The exit status is 0 if the two
# gradient norms are to one another as it says.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=$(bash ci/python.sh mcore)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export CUDA_DEVICE_MAX_CONNECTIONS=1 # Megatron asks for it
export PYTHONWARNINGS=ignore
torchrun=("$python" -m torch.distributed.run --standalone --nnodes 1 --nproc-per-node 2)
folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT

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
    --longest-sample 256
    --context-parallel-size 2
    --micro-batch-size 1
    --global-batch-size 4
    --train-iters 1
    --lr 1e-3
    --eval-interval 1000
    --eval-iters 0
    --log-interval 1
)

PYTHONPATH=examples "$python" -c 'import json; from stdlib_pairs import PackedPairs
packs = PackedPairs("train", packs=4, seq_length=1024, pad_to=1024, longest=256)
for pack in packs: print(json.dumps({"loss_mask": pack["loss_mask"].tolist()}))' >"$folder/rows.jsonl"
"$python" -m megatron_loss_agg explain --data "$folder/rows.jsonl" -- "${flags[@]}" |
    tee "$folder/explained"

# The gradient norm that Megatron logs.
norm() {
    "${torchrun[@]}" -m megatron_loss_agg --cpu examples/pretrain_gpt.py "${flags[@]}" "$@" \
        </dev/null >"$folder/log" 2>&1 || { cat "$folder/log" >&2 && return 1; }
    sed -nE 's/.* grad norm: ([0-9.]+) .*/\1/p' "$folder/log"
}
stock=$(norm)
plugin=$(norm --loss-aggregation sample_mean)

echo
printf '%-50s %s\n' "gradient norm of stock Megatron" "$stock" \
    "gradient norm with --loss-aggregation sample_mean" "$plugin"
explained=$(sed -nE 's/^Its weights add up to ([0-9.]+) .*/\1/p' "$folder/explained")
awk -v stock="$stock" -v plugin="$plugin" -v explained="$explained" 'BEGIN {
    ratio = stock / plugin
    printf "%-50s %.2f\n", "stock / plugin", ratio
    if (ratio > 0.999) print "This Megatron divides by the tokens of all context-parallel ranks: it has the fix."
    exit !(ratio > explained - 0.001 && ratio < explained + 0.001)
}'
