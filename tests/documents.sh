#!/bin/sh
# SPDX-License-Identifier: MIT
# usage: tests/documents.sh host [SAID...] | gpu      from the top folder; `make check` and `make gpu-test` call it
#
# host: runs the commands in tests/documents.md that need no GPU, and searches for the words of each row in what they
# print; build/said_NAME is what tests/*/NAME has already printed. gpu: searches in what targets have left in
# build/results/; one that failed left nothing, and said so itself.

kept=build/document_rows passed=0 failed=0 skipped=0
rm -rf $kept && mkdir -p $kept build/results || exit 1

# print_for COMMAND: sets output to what it has printed, in its first run. Fails if that is not to be had here.
print_for()
{
    name=${1#make } name=${name%%,*} output=$kept/$(basename "${1%% *}")
    case $mode$1 in
    gpu'make torch') output=build/results/gpu_torch_ops.txt ;;
    gpumake*) output=build/results/$(echo "$name" | sed 's/^cuda-/gpu_/; s/^nccl-/nccl_/; s/^[a-z]*$/gpu_&/').txt ;;
    hostbuild/02*) set -- "$1" --slots 8192 --host-slots 4096 --disk-slots 16000 "$trace" ;;
    hostbuild/*) set -- $1 ;;
    host*answers.py) set -- python3 "$1" tests/trace/samples/torch_dynamic.json.gz ;;
    host*.py) set -- python3 "$1" ;;
    *) return 1 ;;
    esac
    if [ ! -e "$output" ]; then
        case $1 in build/*) MAKEFLAGS='' make -s "$1" >"$kept/make" 2>&1 || cp "$kept/make" "$output" ;; esac
    fi
    [ "$mode" = gpu ] || [ -e "$output" ] || ! command -v "$1" >/dev/null || "$@" >"$output" 2>&1
    case $1 in *', 2 GPUs') [ "$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')" -gt 1 ] || return ;; esac
    [ -e "$output" ]
}

mode=$1
shift
for said; do cp "$said" "$kept/${said#build/said_}" || exit 1; done
trace=examples/02_kv_replay/trace_small.jsonl
while IFS='|' read -r _ document asked command words _; do
    command=${command#*\`} command=${command%\`*} words=${words#*\`} words=${words%\`*}
    case $document in ' '[A-E]' ') ;; *) continue ;; esac
    if ! print_for "$command"; then
        skipped=$((skipped + 1))
    elif grep -q -e "$words" "$output"; then
        passed=$((passed + 1))
    else
        echo "FAIL$document:$asked: $command prints no '$words' (see $output)"
        failed=$((failed + 1))
    fi
done <tests/documents.md
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
