#!/usr/bin/env bash
# bash ci/matrix.sh                 the exactness tests on every older release of Megatron-Core; then
#                                   writes docs/verification/index.md, with what ci/test.sh --all found
# bash ci/matrix.sh -- 0.16.1 ...   on these releases, but for the tests marked extended
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONOPTIMIZE # without assertions, tests pass that should fail
unset PYTHONDONTWRITEBYTECODE # hundreds of processes would compile what they import
unset PYTHONUNBUFFERED # lines of several ranks would be torn

newest=build/verified/newest.xml
if [[ $# -eq 0 ]]; then
    if [[ ! -e $newest ]]; then
        echo "ci/matrix.sh: no $newest, the report on the newest release; run bash ci/test.sh --all" >&2
        exit 1
    fi
    find build/verified -name '*.xml' ! -path "$newest" -delete # of a run before this one
fi
python=$(bash ci/python.sh mcore,test,docs,plot,rl)
"$python" -m nox --noxfile noxfile.py "$@" </dev/null
if [[ $# -eq 0 ]]; then
    page=$("$python" ci/verified.py build/verified/*.xml)
    echo "$page" >docs/verification/index.md
fi
