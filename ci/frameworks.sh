#!/usr/bin/env bash
# bash ci/frameworks.sh [--newest] --slime PATH --miles PATH --nemo-rl PATH --areal PATH \
#     --rlinf PATH --roll PATH --megatron-bridge PATH
#
# Runs the training steps of slime, miles, NeMo-RL, AReaL, RLinf and ROLL, with and without our adapters, and
# Megatron-Bridge's script, against one fp64 process; then writes docs/verification/frameworks.md.
# With some of the paths, their tables are only printed.
#
# A path is a git clone, or its git directory, that has the commit in the patch's name, or else the
# newest is taken. It is only read: the commit is unpacked into a scratch folder, and a second copy
# is patched by the command on the framework's page, if there is one. Of Megatron-Bridge, whose
# package is installed, the newest commit's scripts are taken. Each section names the Megatron-Core
# that it ran on, and the one that the framework ships: MEGATRON=path/to/Megatron-LM runs on that one.
#
# --newest takes the newest commit of each clone, and of the frameworks in ci/peers.txt the newest
# release on the package index. It prints a line for each, and writes nothing: the version, whether
# the patch fits, and the largest errors of the gradient. Paths may then be left out.
set -euo pipefail
unset PYTHONOPTIMIZE # without assertions, tests pass that should fail

usage() { sed -n '2,21s/^# \?//p' "${BASH_SOURCE[0]}" >&2 && exit 1; }

declare -A clones=() urls=(
    [slime]=https://github.com/THUDM/slime
    [miles]=https://github.com/radixark/miles
    [nemo-rl]=https://github.com/NVIDIA-NeMo/RL
    [areal]=https://github.com/areal-project/AReaL
    [rlinf]=https://github.com/RLinf/RLinf
    [roll]=https://github.com/alibaba/ROLL
    [megatron-bridge]=https://github.com/NVIDIA-NeMo/Megatron-Bridge
)
newest=
if [[ ${1:-} == --newest ]]; then newest=yes && shift; fi
while [[ $# -ge 2 && $1 == --* && -n ${urls[${1#--}]:-} ]]; do
    clones[${1#--}]=$(realpath "$2")
    shift 2
done
[[ $# -eq 0 && ($newest || ${#clones[@]} -gt 0) ]] || usage

megatron=${MEGATRON:+:$(realpath "$MEGATRON")}
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=$(bash ci/python.sh mcore,test,docs,plot,rl)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONPATH=$PWD$megatron
core=$("$python" -W ignore -c 'import megatron.core; print(megatron.core.__version__.partition("+")[0])')
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# Unpack a commit of a framework, and a copy that its page patches; fails if the patch does not fit.
unpack() {
    local name=$1 clone=$2 commit=$3 command
    if [[ $name == megatron-bridge ]]; then
        mkdir -p "$scratch/$name/stock/scripts"
        git -C "$clone" archive "$commit:scripts" | tar -x -C "$scratch/$name/stock/scripts"
        return
    fi
    local folders=()
    if [[ $name == roll ]]; then folders=(roll mcore_adapter); fi # others hold large files
    mkdir -p "$scratch/$name/stock"
    git -C "$clone" archive "$commit" "${folders[@]}" | tar -x -C "$scratch/$name/stock"
    if ! command=$(grep -m 1 "^git -C path/to/$name apply" docs/frameworks.md); then
        ln -s stock "$scratch/$name/patched"
        return
    fi
    cp -r "$scratch/$name/stock" "$scratch/$name/patched"
    git init -q "$scratch/$name/patched" # as a clone is one, wherever the scratch folder lies
    bash -c "${command//path\/to\/$name/$scratch/$name/patched}"
}

# Run both copies; the table goes to a file beside them.
compare() {
    local name=$1
    if ! "$python" -W ignore -m tests.frameworks "${name//-/_}" "$scratch/$name/stock" \
        "$scratch/$name/patched" "$scratch/$name.md" </dev/null >"$scratch/$name.log" 2>&1; then
        tail -n 30 "$scratch/$name.log" >&2
        return 1
    fi
}

# The Megatron-Core that a commit of a framework ships, and the Megatron-Bridge, by its own files.
shipped() {
    local name=$1
    file() { git -C "$clone" show "$commit:$1" 2>/dev/null; }
    case $name in
    slime) file docker/Dockerfile | sed -n 's/^ARG MEGATRON_COMMIT=/commit /p' ;;
    miles) file docker/Dockerfile | sed -n 's/^ARG MEGATRON_\(REPO\|BRANCH\)=//p' ;;
    nemo-rl) git -C "$clone" ls-tree -r "$commit" 3rdparty | sed -n 's/.*commit \([0-9a-f]*\).*Megatron-Bridge$/that of Megatron-Bridge \1/p' ;;
    areal) file pyproject.toml | grep -oE 'megatron-(core|bridge)==[0-9.]+' | sort -ru ;;
    rlinf) file requirements/install.sh | grep -oE '(core_r|rlinf-megatron-bridge==)0[.0-9]*' | sort -ru ;;
    roll) file mcore_adapter/requirements.txt | grep -m 1 '^megatron-core' ;;
    megatron-bridge) file pyproject.toml | grep -o -m 1 'megatron-core[^"]*' ;;
    esac | paste -sd ' '
}

# The section on one framework: its commit, and the table of its run.
section() {
    local name=$1 clone=$2 patch commit code
    patch=$(compgen -G "patches/$name/*.patch") || patch=
    code="${patch:+as it is, and with \`$patch\`}"
    if [[ $name == megatron-bridge ]]; then code="with \`scripts/training/run_recipe.py\`"; fi
    commit=$(basename "${patch:-HEAD}" .patch)
    commit=$(git -C "$clone" rev-parse --verify "$commit^{commit}")
    unpack "$name" "$clone" "$commit"
    compare "$name"
    printf '\n[%s](%s) at `%s`, %s, on Megatron-Core %s (it ships: %s):\n\n' "$name" \
        "${urls[$name]}" "$commit" "${code:-as it is}" "$core" "$(shipped "$name")"
    "$python" ci/by_aggregation.py "$scratch/$name.md"
}

# The line on a clone's newest commit. Gradients that a framework rounds to bf16 are left out.
newest_commit() {
    local name=$1 clone=$2 version result fits="its patch fits"
    version=$(git -C "$clone" log -1 --abbrev=7 --format='`%h` (%cs)')
    compgen -G "patches/$name/*.patch" >/dev/null || fits="has none"
    result="$fits | not exact"
    if ! unpack "$name" "$clone" HEAD 2>/dev/null; then
        result="its patch does not fit |"
    elif compare "$name"; then
        result="$fits | $(awk -F ' *[|] *' '
            /bf16/ || !/e[-+]/ { next }
            $3 ~ /^stock/ { if ($6 + 0 > own) own = $6 + 0; next }
            { if ($4 + 0 > ours) ours = $4 + 0 }
            $3 !~ /^constant/ && $6 + 0 > without { without = $6 + 0 }
            END { printf "%.1e; stock in its own modes %.1e, in others up to %.2f", ours, own, without }
            ' "$scratch/$name.md")"
    fi
    echo "| $name | $version | $result |"
}

# The line on a package's newest release, which its tests run on unless they always do.
newest_release() {
    local name=$1 version patch result="has none" venv=$scratch/$1
    version=$("$python" -m pip --disable-pip-version-check index versions "$name" 2>/dev/null |
        sed -n '1s/.*(\(.*\))/\1/p')
    if grep -q "^$name==$version\b" ci/peers.txt; then
        result="is that of ci/peers.txt | by bash ci/test.sh --all"
    else
        "$python" -m venv --without-pip "$venv"
        "$python" -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
            >"$(echo "$venv"/lib/python3*/site-packages)/shared.pth"
        cp -r "$(dirname "$python")/../peers" "$venv/peers"
        rm -rf "$venv/peers/${name//-/_}"-*.dist-info
        "$python" -m pip --quiet install --no-deps --no-compile --ignore-requires-python --upgrade \
            --target "$venv/peers" "$name==$version"
        if patch=$(compgen -G "patches/$name/*.patch"); then
            result="its patch fits"
            patch -p1 -d "$venv/peers" --dry-run --silent --force <"$patch" >/dev/null ||
                result="its patch does not fit"
        fi
        if "$venv/bin/python" -m pytest -q -W ignore --timeout 1200 "tests/frameworks/test_$2.py" \
            </dev/null >"$scratch/$name.log" 2>&1; then
            result+=" | exact"
        else
            tail -n 30 "$scratch/$name.log" >&2
            result+=" | not exact"
        fi
    fi
    echo "| $name | $version | $result |"
}

if [[ $newest ]]; then
    printf '| framework | newest, %s | patch | gradient |\n|---|---|---|---|\n' "$(date +%F)"
    newest_release verl verl
    newest_release skyrl skyrl
    newest_release ms-swift ms_swift
    newest_release megatron-bridge bridge
    for name in "${!clones[@]}"; do newest_commit "$name" "${clones[$name]}"; done
    exit
fi
for name in slime miles nemo-rl areal rlinf roll megatron-bridge; do
    if [[ -n ${clones[$name]:-} ]]; then section "$name" "${clones[$name]}" >>"$scratch/tables.md"; fi
done
cat "$scratch/tables.md"
if [[ ${#clones[@]} -eq ${#urls[@]} ]]; then
    cat - "$scratch/tables.md" >docs/verification/frameworks.md <<'HEAD'
# slime, miles, NeMo-RL, AReaL, RLinf, ROLL and Megatron-Bridge

Written by `bash ci/frameworks.sh`. Their own batch, loss and training-step code with a real GPT of
Megatron-Core, over two gloo ranks on a CPU, in fp32: two optimizer steps of ragged samples, some of
them without tokens, removed, or cut from one rollout, in microbatches of unequal size. By ranks:
the error of the gradient of all parameters, norm-wise, relative to one fp64 process which shares no
code with the package or the framework. `metrics`: their reported losses, against that process.
`stock's gradient`: how far the code alone is from that aggregation, in its run of the same name or
options, or else in its first. Both are the largest over all ranks. With an adapter and without the
flags, all is bit-identical to stock. Of Megatron-Bridge, the script runs on the package of
`ci/peers.txt`, with the launcher's flags and without.
HEAD
fi
