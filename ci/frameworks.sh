#!/usr/bin/env bash
# bash ci/frameworks.sh --slime PATH --nemo-rl PATH --areal PATH
#
# Runs the training steps of slime, NeMo-RL and AReaL, with and without our patches, against one fp64
# process; then writes ci/frameworks.md, a section of docs/verified.md. With some of the three, their
# tables are only printed.
#
# A path is a git clone, or its git directory, that has the commit in the patch's name. It is only
# read: the commit is unpacked twice into a scratch folder, and one copy is patched by the command on
# the framework's page.
set -euo pipefail
unset PYTHONOPTIMIZE # without assertions, tests pass that should fail

usage() { sed -n '2,11s/^# \?//p' "${BASH_SOURCE[0]}" >&2 && exit 1; }

declare -A clones=() urls=(
    [slime]=https://github.com/THUDM/slime
    [nemo-rl]=https://github.com/NVIDIA-NeMo/RL
    [areal]=https://github.com/areal-project/AReaL
)
while [[ $# -ge 2 && ($1 == --slime || $1 == --nemo-rl || $1 == --areal) ]]; do
    clones[${1#--}]=$(realpath "$2")
    shift 2
done
[[ $# -eq 0 && ${#clones[@]} -gt 0 ]] || usage

cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=$(bash ci/python.sh mcore,test,docs,plot,rl)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONPATH=$PWD
READS_FLAGS="from megatron_loss_agg.mcore.flags import aggregation_from_environment as read
assert read() is not None"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# The section on one framework: its commit, and the table of its run.
section() {
    local name=$1 clone=$2 page=docs/frameworks/$1.md patch commit copy command flags
    patch=$(echo patches/"$name"/*.patch)
    commit=$(git -C "$clone" rev-parse --verify "$(basename "$patch" .patch)^{commit}")
    for copy in stock patched; do
        mkdir -p "$scratch/$name/$copy"
        git -C "$clone" archive "$commit" | tar -x -C "$scratch/$name/$copy"
    done
    git init -q "$scratch/$name/patched" # as a clone is one, wherever the scratch folder lies
    command=$(grep -m 1 "^git -C path/to/$name apply" "$page")
    bash -c "${command//path\/to\/$name/$scratch/$name/patched}"
    flags=$(sed -n 's/^export \(MEGATRON_LOSS_AGG_FLAGS=\)"\(.*\)"$/\1\2/p' "$page")
    # AReaL has its configuration alone.
    if [[ -n $flags ]]; then env "$flags" "$python" -c "$READS_FLAGS"; fi
    if ! "$python" -W ignore -m "tests.frameworks.run_${name//-/_}" "$scratch/$name/stock" \
        "$scratch/$name/patched" "$scratch/$name.md" </dev/null >"$scratch/$name.log" 2>&1; then
        tail -n 30 "$scratch/$name.log" >&2
        return 1
    fi
    printf '\n[%s](%s) at `%s`, with `%s`:\n\n' "$name" "${urls[$name]}" "$commit" "$patch"
    cat "$scratch/$name.md"
}

for name in slime nemo-rl areal; do
    if [[ -n ${clones[$name]:-} ]]; then section "$name" "${clones[$name]}" >>"$scratch/tables.md"; fi
done
cat "$scratch/tables.md"
if [[ ${#clones[@]} -eq 3 ]]; then
    cat - "$scratch/tables.md" >ci/frameworks.md <<'HEAD'
## slime, NeMo-RL and AReaL

Written by `bash ci/frameworks.sh`. Their own batch, loss and training-step code with a real GPT of
Megatron-Core, over two gloo ranks on a CPU, in fp32: two optimizer steps of ragged samples, some of
them without tokens, removed, or cut from one rollout, in microbatches of unequal size. `gradient`:
of all parameters, norm-wise, relative to one fp64 process which shares no code with the package or
the framework. `metrics`: their reported losses, against that process. `stock's gradient`: how far
the unpatched code is from that aggregation, in the nearest mode that it has. Without the flags, the
patched code is bit-identical to stock.
HEAD
fi
