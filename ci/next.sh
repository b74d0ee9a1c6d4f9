#!/usr/bin/env bash
# bash ci/next.sh CHECKOUT[@COMMIT] [PATCH ...]
#
# Runs the exactness tests, the audit and launches of two stock scripts on CHECKOUT instead of the
# released Megatron-Core; then, for its HEAD without patches, writes docs/verification/next.md.
#
# CHECKOUT is a clone of Megatron-LM, or its git directory; COMMIT another commit than its HEAD, such
# as dev. It is only read: its commit is unpacked into build/next, patched, and installed into an
# environment that sees the packages of ours.
set -euo pipefail
unset PYTHONOPTIMIZE # without assertions, tests pass that should fail

[[ $# -ge 1 ]] || { sed -n '2,10s/^# \?//p' "${BASH_SOURCE[0]}" >&2 && exit 1; }
commit=HEAD
if [[ $1 == *@* ]]; then commit=${1##*@}; fi
checkout=$(realpath "${1%@*}")
patches=()
for patch in "${@:2}"; do patches+=("$(realpath "$patch")"); done

cd "$(dirname "${BASH_SOURCE[0]}")/.."
ours=$(bash ci/python.sh mcore,test,docs,plot,rl)
out=$PWD/build/next
host=$out/host
rm -rf "$out" && mkdir -p "$host"
git -C "$checkout" archive "$commit" | tar -x -C "$host"
git init -q "$host" # else git apply would skip what lies in a folder that this repository ignores
for patch in "${patches[@]}"; do git -C "$host" apply "$patch"; done
rm -rf "$host/tests" # ours have that name, too

"$ours" -m venv "$out/venv"
python=$out/venv/bin/python
packages=$("$ours" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "import site; site.addsitedir('$packages')" >"$(echo "$out"/venv/lib/python3*/site-packages)/shared.pth"
# Into the unpacked folder, whose scripts then import the same Megatron with its compiled helper.
"$python" -m pip install --quiet --no-deps --config-settings editable_mode=compat --editable "$host"

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} CUDA_DEVICE_MAX_CONNECTIONS=1 PYTHONWARNINGS=ignore
export PYTHONPATH=$PWD:$out
cat >"$out/local_layers.py" <<'PY'
"""For --spec: layers that need no Transformer Engine."""

from tests.host.test_other_models import hybrid_stack

stack = hybrid_stack()
PY

# launch RESULT SCRIPT FLAG ...: two ranks for two steps, without an error; RESULT is what the log
# must have.
launch() {
    local result=$1 script=$2 log=$out/launch.log flags="${*:3}" ended=0
    (cd "$host" && "$python" -m torch.distributed.run --standalone --nnodes 1 --nproc-per-node 2 \
        -m megatron_loss_agg --cpu "$script" --num-layers 4 --hidden-size 32 --ffn-hidden-size 64 \
        --num-attention-heads 2 --position-embedding-type rope --attention-dropout 0 \
        --hidden-dropout 0 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 1 \
        --global-batch-size 4 --train-iters 2 --lr 1e-3 --eval-interval 100 --eval-iters 1 \
        --log-interval 1 --mock-data --tokenizer-type NullTokenizer --vocab-size 128 \
        --loss-aggregation sample_mean --loss-aggregation-audit "${@:3}") >"$log" 2>&1 </dev/null || ended=$?
    if [[ $ended -ne 0 ]] || ! grep -q "$result" "$log"; then
        tail -n 40 "$log" >&2
        echo "ci/next.sh: $script $flags ended with $ended, or did not say '$result'" >&2
        return 1
    fi
    echo "| \`$script${flags:+ $flags}\` | $(grep -o -m 1 "$result" "$log") |" >>"$out/launches.md"
}

status=0
exact="gradients are 1.000000 times the planned ones"
launch "$exact" pretrain_gpt.py || status=1
launch "$exact" pretrain_gpt.py --context-parallel-size 2 --calculate-per-token-loss || status=1
launch "$exact" pretrain_hybrid.py --hybrid-layer-pattern '*-*-' --spec local_layers stack || status=1

mapfile -t tests < <("$ours" -c 'import noxfile; print(*noxfile.NEXT_TESTS, sep="\n")')
"$python" -m pytest --timeout 1200 -q -W ignore --show-capture=no \
    -n logical --maxprocesses 8 --dist loadfile --no-loadscope-reorder \
    --junitxml="$out/report.xml" "${tests[@]}" </dev/null || status=1

if [[ $commit == HEAD && ${#patches[@]} -eq 0 ]]; then
    dated=$(git -C "$checkout" log -1 --format='%H, %cs')
    "$ours" ci/next.py "$out/report.xml" "$dated" "$out/launches.md" >docs/verification/next.md
fi
exit "$status"
