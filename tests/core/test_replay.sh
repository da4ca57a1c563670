#!/bin/sh
# SPDX-License-Identifier: MIT
# Tests the replay: compares its counts with an independent count from the trace's ids, and tries every bad input.
#
#     test_replay.sh BINARY SCRATCH      BINARY: 02_kv_replay, built without CUDA; SCRATCH: a directory for files, made
#                                        if missing
#     test_replay.sh gpu BINARY SCRATCH  BINARY: built with CUDA; only compares a GPU's figures with the CPU's
#
# CC (default cc) builds variants: one checks the tree after every request, one damages a byte, and in one the CPU
# stands in for the GPU and does everything as late as a GPU may (late_cuda/).
set -u
only_gpu=false
[ "${1-}" != gpu ] || { only_gpu=true; shift; }
[ $# -eq 2 ] || { echo "usage: $0 [gpu] BINARY SCRATCH" >&2; exit 2; }
root=$(cd "$(dirname "$0")/../.." && pwd)
case $1 in /*) replay=$1 ;; *) replay=$PWD/$1 ;; esac
mkdir -p "$2" && cd "$2" || exit 2
trace=$root/examples/02_kv_replay/trace_small.jsonl
passed=0 failed=0 skipped=0
export LC_ALL=C

ok() { passed=$((passed + 1)); echo "ok $1"; }
fail() { failed=$((failed + 1)); echo "FAIL $1: $2"; }
skip() { skipped=$((skipped + 1)); echo "skip $1: $2"; }

# Prints the number after a label of the last run's table.
field() {
    awk -v label="$1" '{ l = substr($0, 1, 18); sub(/ +$/, "", l) }
        l == label { split(substr($0, 19), f, " "); gsub(/,/, "", f[1]); print f[1] }' out
}

# oracle TRACE PAGE SLOTS: requests, tokens, tokens matched and pages evicted, counted page by page from the ids, which
# name their whole history. A page is known by its last id. `younger` and `older` chain the pages by last use; pages of
# one request go from last to first. 0 slots: no limit.
oracle() {
    awk -v P="$2" -v slots="$3" '
        function number(key, s) { s = $0; sub(".*\"" key "\": *", "", s); return s + 0 }
        function page(i) { return id[int(((i + 1) * P - 1) / 512) + 1] ":" i }
        function unlink(k) {
            younger[older[k]] = younger[k]; older[younger[k]] = older[k]
            delete older[k]; delete younger[k]; held--
        }
        function append(k, last) {
            last = older[""]; older[k] = last; younger[k] = ""; younger[last] = k; older[""] = k; held++
        }
        BEGIN { older[""] = younger[""] = "" }
        {
            tokens += length_ = number("input_length")
            s = $0; sub(/.*"hash_ids": *\[/, "", s); sub(/\].*/, "", s); split(s, id, /, */)
            whole = int(length_ / P)
            for (hit = 0; hit < whole && (page(hit) in younger); hit++) ;
            matched += hit * P
            for (i = 0; i < hit; i++) unlink(page(i))
            need = int((length_ + P - 1) / P) + held - int(slots / P)
            for (; slots && need > 0; need--) { unlink(younger[""]); evicted++ }
            for (i = whole - 1; i >= 0; i--) append(page(i))
        }
        END { print NR, tokens, matched, evicted + 0 }' "$1"
}

# counts NAME EXPECTED-LABEL-VALUE-PAIRS... of the last run
counts() {
    name=$1; shift
    while [ $# -ge 2 ]; do
        got=$(field "$1")
        [ "$got" = "$2" ] || { fail "$name" "$1 is '$got', expected $2"; return 1; }
        shift 2
    done
}

runs() { # NAME STATUS ARGUMENTS...
    name=$1 want=$2; shift 2
    "$replay" "$@" >out 2>err
    got=$?
    [ $got -eq "$want" ] ||
        { fail "$name" "exit status $got, expected $want: $(head -n 2 err | tr '\n' ' ')"; return 1; }
}

# same_figures NAME ARGUMENTS...: --device cuda prints what --device cpu prints, except for what depends on time.
same_figures() {
    name=$1; shift
    for device in cpu cuda; do
        runs "$name" 0 "$@" --device $device && counts "$name" device $device mismatches 0 "rows rejected" 0 || return
        [ -s err ] && { fail "$name" "wrote to stderr: $(head -n 1 err)"; return; }
        awk '/^(device|time in|peak memory)/ { next }
            { note = substr($0, 38); print substr($0, 1, 37) (note ~ /(B\/s| M\/s| s)$/ ? "" : note) }' out >$device
    done
    [ "$(wc -l <cpu)" -eq 12 ] && cmp -s cpu cuda ||
        { fail "$name" "$(diff cpu cuda | head -n 4 | tr '\n' ' ')"; return; }
    ok "$name"
}

same_on_both() { # PREFIX
    same_figures "$1: room for all" "$trace"
    same_figures "$1: small cache" "$trace" --slots 8000
    same_figures "$1: pages of 1, requests together" "$trace" --page 1 --slots 6144 --running 5
    same_figures "$1: pages of 48, layers, odd rows" "$trace" --page 48 --slots 12000 --layers 3 --running 7 \
        --kv-bytes 66
    same_figures "$1: rows of one byte" "$trace" --slots 8000 --kv-bytes 2
    same_figures "$1: many batches" "$trace" --slots 6144 --layers 2 --kv-bytes 16000 --requests 20
    same_figures "$1: rows wider than a batch" "$trace" --slots 16 --kv-bytes 9000000 --requests 1
    same_figures "$1: verify off" "$trace" --slots 8000 --verify 0
}

finish() {
    echo "$passed passed, $failed failed, $skipped skipped"
    [ $failed -eq 0 ]
    exit
}

if $only_gpu; then
    same_on_both "CPU and GPU"
    finish
fi

# good NAME PAGE SLOTS LAYERS KV-BYTES: checks everything in the table that can be known beforehand
good() {
    # shellcheck disable=SC2046
    set -- "$1" "$2" "$3" "$4" "$5" $(oracle "$trace" "$2" "$3")
    runs "$1" 0 "$trace" --page "$2" --slots "$3" --layers "$4" --kv-bytes "$5" || return
    counts "$1" requests "$6" tokens "$7" "tokens matched" "$8" "pages evicted" "$9" mismatches 0 "rows rejected" 0 \
        "rows verified" $((2 * $4 * $7)) "bytes stored" $((($7 - $8) * $4 * $5)) "bytes gathered" $(($7 * $4 * $5)) \
        || return
    [ "$3" -eq 0 ] || [ "$9" -gt 0 ] || { fail "$1" "nothing was evicted"; return; }
    [ -s err ] && { fail "$1" "wrote to stderr: $(head -n 1 err)"; return; }
    ok "$1"
}

good "unlimited, pages of 16" 16 0 1 64
good "unlimited, pages of 1" 1 0 1 64
good "unlimited, pages of 48" 48 0 1 66
good "unlimited, pages of 1024" 1024 0 3 64
good "small cache, pages of 16" 16 8000 1 64
good "small cache, pages of 1" 1 6144 1 64
good "small cache, pages of 48, 3 layers, odd rows" 48 7000 3 66
good "small cache, pages of 1024" 1024 9000 1 256
good "rows of one byte" 16 8000 1 2

name="a cache as large as its largest request"
runs "$name" 0 "$trace" --slots 6144 && counts "$name" mismatches 0 requests 60 && ok "$name"

name="verify off"
runs "$name" 0 "$trace" --verify 0 && counts "$name" "rows verified" 0 "bytes gathered" $((150280 * 256)) && ok "$name"

name="first requests only, another seed, --option=value"
runs "$name" 0 "$trace" --requests=3 --seed=18446744073709551615 &&
    counts "$name" requests 3 tokens 1026 mismatches 0 && ok "$name"

together() {
    for n in 2 3 8 60 100; do
        runs "$1" 0 "$trace" --running $n && counts "$1" "pages evicted" 0 mismatches 0 || return
        runs "$1" 0 "$trace" --running $n --slots 12000 && counts "$1" mismatches 0 || return
    done
    ok "$1"
}
together "requests that run together"

# 1,000 bytes: 62 pages of 16, and 8 more tokens
awk 'BEGIN { for (i = 0; i < 125; i++) printf "%07d\n", i * i * 31 }' >prompt.txt
head -n 50 prompt.txt >shorter.txt
name="text, twice the same and once a part of it"
runs "$name" 0 --text prompt.txt --text prompt.txt --text shorter.txt &&
    counts "$name" requests 3 tokens 2400 "tokens matched" $((992 + 400)) mismatches 0 && ok "$name"
head -n 12 prompt.txt >96.txt
name="rows wider than a chunk"
runs "$name" 0 --text 96.txt --text 96.txt --kv-bytes 300002 &&
    counts "$name" "tokens matched" 96 "bytes stored" $((96 * 300002)) mismatches 0 "rows verified" 384 && ok "$name"
name="text after a trace"
# shellcheck disable=SC2046
set -- $(oracle "$trace" 1 0)
runs "$name" 0 --text prompt.txt "$trace" --page 1 --text prompt.txt &&
    counts "$name" requests 62 "tokens matched" $(($3 + 1000)) mismatches 0 && ok "$name"

helps() {
    runs "$1" 0 "$1" || return
    for option in --device --kv-bytes --page --slots --layers --running --requests --verify --seed --text --help; do
        grep -q -e "  $option " out || { fail "$1" "does not name $option"; return; }
    done
    ok "$1"
}
helps --help
helps -h

name="a trace from standard input"
runs "$name" 0 - <"$trace" && counts "$name" requests 60 mismatches 0 && ok "$name"

awk 'BEGIN { for (i = 0; i < 5000; i++)
    printf "{\"timestamp\": 0, \"input_length\": 1, \"output_length\": 0, \"hash_ids\": [%d]}\n", i }' >unlike
name="blocks that are not alike do not begin alike"
runs "$name" 0 unlike --page 1 && counts "$name" requests 5000 "tokens matched" 0 && ok "$name"

# ---- what the format allows
request='{"timestamp": 0, "input_length": 513, "output_length": 0, "hash_ids": [7, 8]}'
accepts() { # NAME REQUESTS, the trace in file `case`
    runs "$1" 0 case && counts "$1" requests "$2" mismatches 0 && ok "$1"
}
printf '%s\r\n\r\n \t\n%s' "$request" "$request" >case
accepts "CRLF, blank lines, no newline at the end" 2
printf '\t{ "hash_ids" :[ 1 ,2],"x":[{"a\\u00e9\\"":[-0.5e+3,true,null,""]},{},[]],' >case
printf '"output_length":0 , "input_length":600,"timestamp":5 }  ' >>case
accepts "any order, any space, unknown keys" 1
pad() { # BYTES: a request padded with spaces to so many bytes
    printf '%s' "$request"
    dd if=/dev/zero bs=$(($1 - ${#request})) count=1 2>/dev/null | tr '\0' ' '
}
pad 1048576 >case
accepts "a line of 1 MiB" 1

# ---- bad input: exit status 2, nothing but the reason, and where
refuses() { # NAME MESSAGE ARGUMENTS...
    name=$1 message=$2; shift 2
    runs "$name" 2 "$@" || return
    [ -s out ] && { fail "$name" "wrote to stdout"; return; }
    [ "$(wc -l <err)" -eq 1 ] || { fail "$name" "not one line on stderr"; return; }
    grep -q -F -e "$message" err || { fail "$name" "said '$(cat err)', expected '$message'"; return; }
    ok "$name"
}
line() { # NAME MESSAGE LINE: bad in line 3, after a good one and a blank one
    printf '%s\n\n%s\n%s\n' "$request" "$3" "$request" >case
    refuses "$1" "case:3: $2" case
}
line "a line that is no JSON" "expected '{' at column 1" 'hello'
line "a line cut short" "expected ',' or '}' at column 34" '{"timestamp": 0, "input_length":6'
line "a list cut short" "expected ',' or ']' at column 20" '{"hash_ids": [1, 2 3]}'
line "a key without quotes" "expected a string at column 2" '{timestamp: 0}'
line "text after the request" "text after the request at column 78" "$request,"
line "two requests in a line" "text after the request" "$request $request"
line "an empty object" 'no "timestamp"' '{}'
line "no timestamp" 'no "timestamp"' '{"input_length": 5, "output_length": 0, "hash_ids": [1]}'
line "no input_length" 'no "input_length"' '{"timestamp": 0, "output_length": 0, "hash_ids": [1]}'
line "no output_length" 'no "output_length"' '{"timestamp": 0, "input_length": 5, "hash_ids": [1]}'
line "no hash_ids" 'no "hash_ids"' '{"timestamp": 0, "input_length": 5, "output_length": 0}'
line "a key given twice" "key given twice at column 17" '{"timestamp": 0,"timestamp": 0}'
line "a negative input_length" "negative number at column 18" '{"input_length": -5}'
line "a negative output_length" "negative number" '{"output_length": -1}'
line "a negative id" "negative number" '{"hash_ids": [1, -2]}'
line "an input_length of 0" "input_length is 0" \
    '{"timestamp": 0, "input_length": 0, "output_length": 0, "hash_ids": []}'
line "too few ids" "513 tokens are 2 blocks, but hash_ids has 1" \
    '{"timestamp": 0, "input_length": 513, "output_length": 0, "hash_ids": [1]}'
line "too many ids" "512 tokens are 1 blocks, but hash_ids has 2" \
    '{"timestamp": 0, "input_length": 512, "output_length": 0, "hash_ids": [1, 2]}'
line "the largest length without its blocks" \
    "9223372036854775807 tokens are 18014398509481984 blocks, but hash_ids has 1" \
    '{"timestamp": 0, "input_length": 9223372036854775807, "output_length": 0, "hash_ids": [1]}'
line "a length of 2^63" "number too large" '{"input_length": 9223372036854775808}'
line "a fraction" "expected a whole number" '{"input_length": 5.0}'
line "a length in quotes" "expected a whole number" '{"input_length": "5"}'
line "a leading zero" "number with a leading zero" '{"input_length": 05}'
line "an escape that is none" "no such escape" '{"x": "\q"}'
line "a string without end" "the string does not end" '{"x": "abc'
line "a tab in a string" "control character in a string" "{\"x\": \"$(printf '\t')\"}"
line "a wrong word" "expected a value" '{"x": nul}'
line "nested too deep" "nested too deep" "{\"x\": $(printf '%040d' 0 | tr 0 '[')}"
printf '%s\n{"x\0": 1}\n' "$request" >case
refuses "a byte of 0" "case:2: control character in a string" case
{ echo "$request"; pad 1048577; echo; } >case
refuses "a line of 1 MiB and a byte" "case:2: longer than 1 MiB" case
{ echo "$request"; dd if=/dev/zero bs=1048576 count=10 2>/dev/null | tr '\0' 1; echo; } >case
refuses "a line of 10 MB" "case:2: longer than 1 MiB" case
: >case
refuses "an empty trace" "case: holds no request" case
refuses "an empty text" "case: empty" --text case
printf '\n\n' >case
refuses "a trace of blank lines" "case: holds no request" case
refuses "a missing trace" "no such file: cannot be opened" "no such file"
refuses "a directory" ".: cannot be" .
refuses "a missing text" "none.txt: " --text none.txt
refuses "a cache smaller than a request" \
    "$trace:60: the request needs 6144 slots (6144 tokens in pages of 16), the cache has 6128" "$trace" --slots 6143
refuses "a cache smaller than a text" "prompt.txt: the request needs 1008 slots" --text prompt.txt --slots 1000
refuses "a cache smaller than a page" "--slots 15 holds no page of 16 tokens" "$trace" --slots 15
refuses "a cache larger than memory" "more than this machine's memory" "$trace" --layers 1024 --kv-bytes 16777216
refuses "a cache larger than memory with rows of any size" "more than this machine's memory" "$trace" --layers 1024 \
    --slots 2147483632
refuses "an unknown option" "unknown option --nonsense" "$trace" --nonsense
refuses "an option without value" "--page needs a value" "$trace" --page
refuses "a page of 0" "--page is '0', not a number from 1 to 1048576" "$trace" --page 0
refuses "a page of x" "--page is '16x', not a number" "$trace" --page 16x
refuses "an empty number" "--page is '', not a number" "$trace" --page=
refuses "negative slots" "--slots is '-1', not a number" "$trace" --slots -1
refuses "odd --kv-bytes" "--kv-bytes is 7," "$trace" --kv-bytes 7
refuses "a seed of 2^64" "--seed is '18446744073709551616', not a number" "$trace" --seed 18446744073709551616
refuses "--verify 2" "--verify is '2', not a number from 0 to 1" "$trace" --verify 2
refuses "a device that is none" "--device is 'gpu', neither cpu nor cuda" "$trace" --device gpu
refuses "a device without name" "--device is '', neither" "$trace" --device=
refuses "--device without value" "--device needs a value" "$trace" --device
refuses "CUDA where none was built in" "--device cuda: built without CUDA" "$trace" --device cuda
name="--device cpu, and none"
runs "$name" 0 "$trace" --device=cpu && counts "$name" device cpu && runs "$name" 0 "$trace" &&
    counts "$name" device cpu && grep -q '^device .* cpu   built without CUDA$' out && ok "$name"
refuses "two traces" "more than one trace" "$trace" "$trace"
refuses "nothing to replay" "no TRACE and no --text"

# ---- variants built here
build() { # OUTPUT FLAGS...
    output=$1; shift
    $compiler -g -O1 "$@" -I"$root" "$root/examples/02_kv_replay/kv_replay.c" -o "$output" 2>err
}
compiler=${CC:-cc}
if ! command -v "${compiler%% *}" >err; then
    skip "a damaged byte is found" "no $compiler to build it with"
    skip "the tree's invariants" "no $compiler to build it with"
    skip "a late GPU" "no $compiler to build it with"
elif ! build corrupt -DKV_REPLAY_CORRUPT; then
    fail "a damaged byte is found" "does not build: $(head -n 1 err)"
else
    replay=./corrupt
    # The damaged row belongs to line 1. With pages of 1 token it is cached, and line 59 is the same request.
    name="a damaged byte is found"
    runs "$name" 1 "$trace" --page 1 && counts "$name" mismatches 2 &&
        if grep -q "jsonl:1: token 0, layer 0, V row in slot 0: byte 0 is 0x" err &&
            grep -q "jsonl:59: token 0" err; then
            ok "$name"
        else
            fail "$name" "said '$(cat err)'"
        fi
    name="not comparing finds nothing"
    runs "$name" 0 "$trace" --page 1 --verify 0 && counts "$name" mismatches 0 && ok "$name"

    sanitizers="under address and undefined behaviour sanitizers"
    build checked -DKV_REPLAY_CHECK -fsanitize=address,undefined -fno-sanitize-recover=all &&
        ./checked --help >out 2>&1 || {
        sanitizers="without sanitizers, which do not work here"
        build checked -DKV_REPLAY_CHECK
    }
    replay=./checked
    tree() {
        for arguments in "" "--slots 8000" "--page 1 --slots 6144 --running 5" "--page 48 --slots 12000 --running 7" \
            "--page 512 --running 60" "--running 8 --layers 2 --kv-bytes 66"; do
            # shellcheck disable=SC2086
            runs "$1" 0 "$trace" $arguments && counts "$1" mismatches 0 || return
        done
        ok "$1"
    }
    tree "the tree's invariants, $sanitizers"

    build_late() { # OUTPUT FLAGS...
        build "$@" -DKV_REPLAY_CUDA "-I$root/tests/nccl/late_cuda"
    }
    sanitizers="under address and undefined behaviour sanitizers"
    build_late late -fsanitize=address,undefined -fno-sanitize-recover=all && ./late --help >out 2>&1 || {
        sanitizers="without sanitizers, which do not work here"
        build_late late
    }
    replay=./late
    same_on_both "a late GPU, $sanitizers"
    name="a GPU where there is one"
    runs "$name" 0 "$trace" --requests 3 && counts "$name" device cuda && ok "$name"
    name="times without verification"
    if runs "$name" 0 "$trace" --requests 3 --verify 0; then
        grep -q ' 0\.00 GB/s' out && fail "$name" "none for $(grep ' 0\.00 GB/s' out)" || ok "$name"
    fi

    # Whichever of CUDA's calls fails, the replay says why and leaks nothing. If one of the first three fails, there is
    # no GPU.
    failing_calls() {
        for n in 1 2 3; do
            LATE_CUDA_FAIL=$n ./late "$trace" --requests 3 >out 2>err
            [ $? -eq 0 ] && counts "$1" device cpu mismatches 0 ||
                { fail "$1" "call $n, any device: $(cat err)"; return; }
        done
        n=1
        while LATE_CUDA_FAIL=$n ./late "$trace" --requests 2 --device cuda >out 2>err; status=$?; [ $status -eq 2 ]; do
            [ ! -s out ] && [ "$(wc -l <err)" -eq 1 ] &&
                grep -q -e 'error that was asked for' -e KVPRIM_ERROR_CUDA err ||
                { fail "$1" "call $n: said '$(cat out err)'"; return; }
            n=$((n + 1))
        done
        [ $status -eq 0 ] && [ $n -gt 60 ] || { fail "$1" "call $n: exit status $status, $(head -n 1 err)"; return; }
        ok "$1: $((n - 1)) calls"
    }
    failing_calls "CUDA's calls fail"

    name="a damaged byte on a late GPU"
    replay=./late_corrupt
    build_late late_corrupt -DKV_REPLAY_CORRUPT || fail "$name" "does not build: $(head -n 1 err)"
    runs "$name" 1 "$trace" --page 1 --device cuda && counts "$name" device cuda mismatches 2 && ok "$name"
fi
finish
