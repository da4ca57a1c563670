#!/bin/sh
# SPDX-License-Identifier: MIT
# Tests the replay: compares its counts with an independent count from the trace's ids, and tries every bad input.
#
#     test_replay.sh BINARY SCRATCH        BINARY: 02_kv_replay, built without CUDA; SCRATCH: a directory for files,
#                                          made if missing
#     test_replay.sh quick BINARY SCRATCH  leaves out what takes long: wide rows, each of CUDA's calls that fails
#     test_replay.sh gpu BINARY SCRATCH    BINARY: built with CUDA; only compares a GPU's figures with the CPU's
#
# CC (default cc) builds two variants. Both can run on a fake GPU, where the CPU does everything as late as a GPU may
# (late_cuda/). One checks the tree after every request, under sanitizers if there are any; the other damages a byte.
set -u
mode=all
case ${1-} in gpu | quick) mode=$1; shift ;; esac
[ $# -eq 2 ] || { echo "usage: $0 [gpu|quick] BINARY SCRATCH" >&2; exit 2; }
root=$(cd "$(dirname "$0")/../.." && pwd)
case $1 in /*) replay=$1 ;; *) replay=$PWD/$1 ;; esac
mkdir -p "$2" && cd "$2" || exit 2
trace=$root/examples/02_kv_replay/trace_small.jsonl
passed=0 failed=0 skipped=0
export LC_ALL=C

ok() { passed=$((passed + 1)); echo "ok $1"; }
fail() { failed=$((failed + 1)); echo "FAIL $1: $2"; return 1; }
skip() { skipped=$((skipped + 1)); echo "skip $1: $2"; }

finish() {
    echo "$passed passed, $failed failed, $skipped skipped"
    [ $failed -eq 0 ]
    exit
}

# oracle TRACE PAGE SLOTS [HOST-SLOTS DISK-SLOTS]: requests, tokens, tokens matched, pages evicted, tokens matched in
# the cache, in host memory and on disk, and pages dropped, counted page by page from the ids, which name their whole
# history. A page is known by its last id. `younger` and `older` chain the pages by last use; pages of one request go
# from last to first. The oldest are on disk, the next in host memory; `first` is the oldest of each tier. 0 slots: no
# limit. $last: tokens at a prompt's end that are never matched.
last=0
oracle() {
    awk -v last="$last" -v P="$2" -v slots="$3" -v host="${4-0}" -v disk="${5-0}" '
        function number(key, s) { s = $0; sub(".*\"" key "\": *", "", s); return s + 0 }
        function page(i) { return id[int(((i + 1) * P - 1) / 512) + 1] ":" i }
        function leave(k, t) { t = tier[k]; held[t]--; if (first[t] == k) first[t] = held[t] ? younger[k] : "" }
        function enter(k, t) { tier[k] = t; if (!held[t]++) first[t] = k }
        function unlink(k) {
            leave(k)
            younger[older[k]] = younger[k]; older[younger[k]] = older[k]
            delete older[k]; delete younger[k]; delete tier[k]
        }
        function append(k, last) {
            last = older[""]; older[k] = last; younger[k] = ""; younger[last] = k; older[""] = k
            enter(k, 0)
        }
        function down(t, k, u) { # moves the oldest page of a tier down, or drops it
            k = first[t]
            for (u = t + 1; u < 3 && !room[u]; u++) ;
            if (u == 3) { unlink(k); dropped++; return }
            if (held[u] == room[u]) down(u)
            leave(k); enter(k, u)
        }
        BEGIN {
            older[""] = younger[""] = ""
            room[0] = int(slots / P); room[1] = int(host / P); room[2] = int(disk / P)
        }
        {
            tokens += length_ = number("input_length")
            s = $0; sub(/.*"hash_ids": *\[/, "", s); sub(/\].*/, "", s); split(s, id, /, */)
            whole = int(length_ / P)
            for (hit = 0; hit < int((length_ - last) / P) && (page(hit) in younger); hit++) ;
            matched += hit * P
            for (i = 0; i < hit; i++) { hits[tier[page(i)]] += P; unlink(page(i)) }
            need = int((length_ + P - 1) / P) + held[0] - room[0]
            for (; slots && need > 0; need--) { down(0); evicted++ }
            for (i = whole - 1; i >= 0; i--) {
                if (page(i) in younger) unlink(page(i))
                append(page(i))
            }
        }
        END { print NR, tokens, matched, evicted + 0, hits[0] + 0, hits[1] + 0, hits[2] + 0, dropped + 0 }' "$1"
}

# differs LABELS: says which number of the last run's table is not as in LABELS, `label=number,label=number`.
differs() {
    awk -v pairs="$1" '
        { l = substr($0, 1, 18); sub(/ +$/, "", l); split(substr($0, 19), f, " "); gsub(/,/, "", f[1]); got[l] = f[1] }
        END {
            n = split(pairs, p, ",")
            for (i = 1; i <= n; i++) {
                split(p[i], want, "=")
                if (got[want[1]] "" != want[2] "") print want[1] " is \"" got[want[1]] "\", expected " want[2]
            }
        }' out
}

# runs NAME STATUS LABELS ARGUMENTS...: fails NAME unless the replay exits so and its table has these numbers.
runs() {
    name=$1 want=$2 labels=$3; shift 3
    "$replay" "$@" >out 2>err
    got=$?
    [ $got -eq "$want" ] || fail "$name" "exit status $got, expected $want: $(head -n 2 err | tr '\n' ' ')" || return
    wrong=$(differs "$labels")
    [ -z "$wrong" ] || fail "$name" "$wrong"
}

# counts NAME LABELS ARGUMENTS...
counts() {
    name=$1 labels=$2; shift 2
    runs "$name" 0 "$labels" "$@" && ok "$name"
}

silent() { # NAME: the last run wrote nothing to stderr
    [ ! -s err ] || fail "$1" "wrote to stderr: $(head -n 1 err)"
}

# same_figures NAME ARGUMENTS...: --device cuda prints what --device cpu prints, except for what depends on time.
same_figures() {
    name=$1; shift
    for device in cpu cuda; do
        runs "$name" 0 "device=$device,mismatches=0,rows rejected=0" "$trace" "$@" --device $device &&
            silent "$name" || return
        awk '/^(device|time in)/ { next }
            { note = substr($0, 38); print substr($0, 1, 37) (note ~ /(B\/s| M\/s| s)$/ ? "" : note) }' out >$device
    done
    case "$*" in *--disk-slots*) lines=21 ;; *) lines=12 ;; esac
    [ "$(wc -l <cpu)" -eq $lines ] && cmp -s cpu cuda || fail "$name" "$(diff cpu cuda | head -n 4 | tr '\n' ' ')" ||
        return
    ok "$name"
}

same_on_both() { # PREFIX
    same_figures "$1: room for all"
    same_figures "$1: small cache" --slots 8000
    same_figures "$1: pages of 1, requests together" --page 1 --slots 6144 --running 5
    same_figures "$1: pages of 48, layers, odd rows" --page 48 --slots 12000 --layers 3 --running 7 --kv-bytes 66
    same_figures "$1: rows of one byte" --slots 8000 --kv-bytes 2
    same_figures "$1: verify off" --slots 8000 --verify 0
    same_figures "$1: host memory and disk" --slots 7000 --host-slots 5000 --disk-slots 9000 --disk-file tiers
    same_figures "$1: disk, pages of 5, requests together" --slots 7000 --disk-slots 9000 --disk-file tiers --page 5 \
        --kv-bytes 66 --running 5
    [ "$mode" != quick ] || return 0
    same_figures "$1: many batches" --slots 6144 --layers 2 --kv-bytes 16000 --requests 20
    same_figures "$1: rows wider than a batch" --slots 16 --kv-bytes 9000000 --requests 1
}

if [ "$mode" = gpu ]; then
    same_on_both "CPU and GPU"
    finish
fi

# good NAME PAGE SLOTS LAYERS KV-BYTES: checks everything in the table that can be known beforehand.
good() {
    # shellcheck disable=SC2046
    set -- "$1" "$2" "$3" "$4" "$5" $(oracle "$trace" "$2" "$3")
    numbers="requests=$6,tokens=$7,tokens matched=$8,pages evicted=$9,mismatches=0,rows rejected=0"
    numbers="$numbers,rows verified=$((2 * $4 * $7)),bytes stored=$((($7 - $8) * $4 * $5))"
    runs "$1" 0 "$numbers,bytes gathered=$(($7 * $4 * $5))" "$trace" --page "$2" --slots "$3" --layers "$4" \
        --kv-bytes "$5" --recompute-last $last && silent "$1" || return
    [ "$3" -eq 0 ] || [ "$9" -gt 0 ] || fail "$1" "nothing was evicted" || return
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
last=1
good "the last token is computed, pages of 16" 16 0 1 64
good "the last token is computed, pages of 1" 1 0 1 64
good "the last token is computed, small cache, pages of 4" 4 6144 1 64
last=0

counts "a cache as large as its largest request" mismatches=0,requests=60 "$trace" --slots 6144
counts "verify off" "rows verified=0,bytes gathered=$((150280 * 256))" "$trace" --verify 0
counts "first requests only, another seed, --option=value" requests=3,tokens=1026,mismatches=0 "$trace" --requests=3 \
    --seed=18446744073709551615

# keys RULE PAGE SLOTS RUNNING: the replay ends if keys and the tree do not find the same pages.
keys() {
    # shellcheck disable=SC2046
    set -- "$1" "$2" "$3" "$4" $(oracle "$trace" "$2" "$3")
    numbers=mismatches=0
    [ "$4" -gt 1 ] || numbers="tokens matched=$7,pages evicted=$8,mismatches=0"
    runs "keys: $1" 0 "$numbers" "$trace" --keys "$1" --page "$2" --slots "$3" --running "$4" --kv-bytes 64 \
        --recompute-last $last && silent "keys: $1" || return
    [ "$(grep -c -e '^time in prefix ' -e '^time in keys ' out)" -eq 2 ] ||
        fail "keys: $1" "does not print both times" || return
    ok "keys: $1, pages of $2, $3 slots, $4 at a time"
}
keys vllm_sha256 16 0 1
keys vllm_sha256 16 8000 1
keys vllm_sha256_cbor 48 7000 1
keys sglang 1 6144 1
keys sglang 4 12000 5
keys trtllm 1024 9000 1
keys lmcache 256 0 60
last=1
keys trtllm 4 6144 1
last=0
keys_of_xxh3() {
    "$replay" --keys xxh3 "$trace" >out 2>err
    if grep -q 'needs xxhash.h' err; then skip "keys of XXH3" "no xxhash.h"; return; fi
    for rule in xxh3 dynamo vllm_xxhash vllm_xxhash_cbor; do keys $rule 16 8000 1; done
}
keys_of_xxh3

together() {
    for n in 2 3 8 60 100; do
        runs "$1" 0 "pages evicted=0,mismatches=0" "$trace" --running $n &&
            runs "$1" 0 mismatches=0 "$trace" --running $n --slots 12000 || return
    done
    ok "$1"
}
together "requests that run together"

# 1,000 bytes: 62 pages of 16, and 8 more tokens
awk 'BEGIN { for (i = 0; i < 125; i++) printf "%07d\n", i * i * 31 }' >prompt.txt
head -n 50 prompt.txt >shorter.txt
head -n 12 prompt.txt >96.txt
counts "text, twice the same and once a part of it" \
    "requests=3,tokens=2400,tokens matched=$((992 + 400)),mismatches=0" --text prompt.txt --text prompt.txt \
    --text shorter.txt
for sizes in 1:999 8:992 16:992 1000:0; do # 1,000 tokens, all cached: the last page is computed, if it is a whole one
    counts "the last token is computed, a text in pages of ${sizes%:*}" "tokens matched=${sizes#*:},mismatches=0" \
        --text prompt.txt --text prompt.txt --page "${sizes%:*}" --recompute-last 1
done
counts "rows wider than a chunk" "tokens matched=96,bytes stored=$((96 * 300002)),mismatches=0,rows verified=384" \
    --text 96.txt --text 96.txt --kv-bytes 300002
# shellcheck disable=SC2046
set -- $(oracle "$trace" 1 0)
counts "text after a trace" "requests=62,tokens matched=$(($3 + 1000)),mismatches=0" --text prompt.txt "$trace" \
    --page 1 --text prompt.txt
counts "a trace from standard input" requests=60,mismatches=0 - <"$trace"
awk 'BEGIN { for (i = 0; i < 5000; i++)
    printf "{\"timestamp\": 0, \"input_length\": 1, \"output_length\": 0, \"hash_ids\": [%d]}\n", i }' >unlike
counts "blocks that are not alike do not begin alike" "requests=5000,tokens matched=0" unlike --page 1

# Requests as long as in the trace that README names: the 7th has 23,141 tokens, the longest 126,195.
readme_line() {
    arguments=$(sed -n "s/.*\`make run TRACE=[^ ]* ARGS='\([^']*\)'\`.*/\1/p" "$root/README.md")
    [ -n "$arguments" ] || fail "$1" "README.md has no \`make run TRACE=... ARGS='...'\`" || return
    awk 'BEGIN {
        requests = split("6758 7322 7236 2290 6760 4834 23141 26888 126195 9996 126195", tokens)
        for (r = 1; r <= requests; r++) {
            printf "{\"timestamp\": 0, \"input_length\": %d, \"output_length\": 1, \"hash_ids\": [0", tokens[r]
            for (block = 1; block * 512 < tokens[r]; block++) printf ", %d", tokens[r] * 1000 + block
            print "]}"
        }
    }' >long
    # shellcheck disable=SC2086
    counts "$1" "requests=11,tokens=347615,tokens matched=$((9 * 512 + 126192)),mismatches=0" long $arguments
}
readme_line "README's command on requests as long as in its trace"

# tiers NAME PAGE SLOTS HOST-SLOTS DISK-SLOTS LAYERS KV-BYTES: what is found in each tier, and the bytes it makes.
tiers() {
    # shellcheck disable=SC2046
    set -- "$1" "$2" "$3" "$4" "$5" "$6" "$7" $(oracle "$trace" "$2" "$3" "$4" "$5")
    bytes=$(($6 * $7)) up=$((${13} + ${14}))
    numbers="tokens=$9,tokens matched=${10},pages evicted=${11},hits in the cache=${12},hits in host=${13}"
    numbers="$numbers,hits on disk=${14},pages dropped=${15},mismatches=0,rows rejected=0"
    numbers="$numbers,bytes to host=$((${11} * $2 * bytes)),bytes from host=$((up * bytes))"
    numbers="$numbers,bytes stored=$((($9 - ${10}) * bytes)),bytes gathered=$(($9 * bytes))"
    runs "$1" 0 "$numbers,rows verified=$((2 * $6 * $9))" "$trace" --page "$2" --slots "$3" --host-slots "$4" \
        --disk-slots "$5" --layers "$6" --kv-bytes "$7" --recompute-last $last --device cpu && silent "$1" || return
    [ $((${12} + up)) -eq "${10}" ] && [ "${15}" -gt 0 ] || fail "$1" "nothing was dropped" || return
    [ "$4" -eq 0 ] || [ "${13}" -gt 0 ] || fail "$1" "nothing was found in host memory" || return
    [ "$5" -eq 0 ] || [ "${14}" -gt 0 ] || fail "$1" "nothing was found on disk" || return
    ok "$1"
}
tiers "host memory" 16 8000 5000 0 1 64
tiers "disk" 16 8000 0 5000 1 64
tiers "host memory and disk" 16 7000 4000 9000 1 64
tiers "host memory of one page, pages of 48, 3 layers, odd rows" 48 7000 48 9000 3 66
tiers "pages of 4, rows of one byte, a small disk" 4 6144 7000 700 1 2
tiers "pages of 1024" 1024 6144 3072 9000 2 256
last=1
tiers "the last token is computed, tiers" 4 6144 4000 9000 1 64
last=0
# shellcheck disable=SC2046
set -- $(oracle "$trace" 16 0)
counts "tiers with room for all match as much as a cache with room for all" "tokens matched=$3,pages dropped=0" \
    "$trace" --slots 7000 --host-slots 4000 --disk-slots 200000
head -c 32 prompt.txt >32.txt && tail -c 32 prompt.txt >other.txt
counts "tiers with pages larger than what moves at once" \
    "mismatches=0,hits in host=32,hits on disk=32,pages dropped=0" --page 16 --slots 32 --host-slots 16 \
    --disk-slots 16 --kv-bytes 600002 --text 32.txt --text other.txt --text 32.txt --text other.txt
rm -rf empty tiers x && mkdir empty

tiers_together() {
    for n in 2 5 60; do
        runs "$1" 0 "mismatches=0,pages dropped=0" "$trace" --running $n --slots 12000 --host-slots 3000 \
            --disk-slots 200000 --disk-file empty/file || return
        [ -z "$(ls empty)" ] || fail "$1" "left $(ls empty)" || return
        awk '{ n = substr($0, 19, 19); gsub(/,/, "", n) } /^hits/ { sum += n } /^tokens matched/ { all = n + 0 }
            END { exit sum != all || !all }' out ||
            fail "$1" "the tiers' hits are not all matches: $(grep -e hits -e matched out | tr '\n' ' ')" || return
    done
    ok "$1"
}
tiers_together "tiers and requests that run together"

# A limit to the size of files acts as a full disk does.
full_disk() {
    (ulimit -f 100 && runs "$1" 2 '' "$trace" --slots 7000 --disk-slots 20000 --kv-bytes 4096 --disk-file empty/file) ||
        fail "$1" "was not refused" || return
    grep -q "^02_kv_replay: empty/file: writing at byte [0-9]* of 81920000: File too large$" err ||
        fail "$1" "said '$(cat err)'" || return
    [ ! -s out ] && [ -z "$(ls empty)" ] || fail "$1" "left '$(ls empty)', wrote '$(head -n 1 out)'" || return
    ok "$1"
}
full_disk "a full disk"

killed() {
    [ -d /proc/self/fd ] || { skip "$1" "no /proc"; return; }
    "$replay" "$trace" --slots 7000 --disk-slots 20000 --layers 20 --disk-file empty/file >out 2>err &
    child=$! tries=0
    until ls -l /proc/$child/fd 2>/dev/null | grep -q 'empty/file (deleted)$'; do
        tries=$((tries + 1))
        [ $tries -lt 6000 ] || { kill $child; fail "$1" "has no file: $(cat err)"; return; }
        sleep 0.01
    done
    kill $child
    wait $child 2>/dev/null
    code=$?
    [ $code -eq 143 ] || fail "$1" "exit status $code, expected 143" || return
    [ -z "$(ls empty)" ] || fail "$1" "left $(ls empty)" || return
    ok "$1"
}
killed "a replay that is killed leaves no file"

helps() {
    runs "$1" 0 '' "$1" || return
    for option in --device --disk-file --host-slots --disk-slots --kv-bytes --page --slots --layers --running \
        --recompute-last --requests --verify --seed --keys --text --help; do
        grep -q -e "  $option " out || fail "$1" "does not name $option" || return
    done
    ok "$1"
}
helps --help
helps -h

# ---- what the format allows
request='{"timestamp": 0, "input_length": 513, "output_length": 0, "hash_ids": [7, 8]}'
printf '%s\r\n\r\n \t\n%s' "$request" "$request" >case
counts "CRLF, blank lines, no newline at the end" requests=2,mismatches=0 case
printf '\357\273\277%s\n%s' "$request" "$request" >case
counts "a byte order mark" requests=2,mismatches=0 case
echo '{"input_length": 5, "output_length": 0, "hash_ids": [1]}' >case
counts "no timestamp" requests=1,mismatches=0 case
printf '\t{ "hash_ids" :[ 1 ,2],"x":[{"a\\u00e9\\"":[-0.5e+3,true,null,""]},{},[]],' >case
printf '"output_length":0 , "input_length":600,"timestamp":5 }  ' >>case
counts "any order, any space, unknown keys" requests=1,mismatches=0 case

# ---- bad input: exit status 2, nothing but the reason, and where
refuses() { # NAME MESSAGE ARGUMENTS...
    name=$1 message=$2; shift 2
    runs "$name" 2 '' "$@" || return
    [ ! -s out ] || fail "$name" "wrote to stdout" || return
    [ "$(wc -l <err)" -eq 1 ] || fail "$name" "not one line on stderr" || return
    grep -q -F -e "$message" err || fail "$name" "said '$(cat err)', expected '$message'" || return
    ok "$name"
}

# Each is line 3, after a good one and a blank one: a name, what the replay says of the line, the line.
while IFS='|' read -r what message line; do
    printf '%s\n\n%s\n%s\n' "$request" "$line" "$request" >case
    refuses "$what" "case:3: $message" case
done <<END
a line that is no JSON|expected '{' at column 1|hello
a line cut short|expected ',' or '}' at column 34|{"timestamp": 0, "input_length":6
a list cut short|expected ',' or ']' at column 20|{"hash_ids": [1, 2 3]}
a key without quotes|expected a string at column 2|{timestamp: 0}
text after the request|text after the request at column 78|$request,
two requests in a line|text after the request|$request $request
an empty object|no "input_length"|{}
a byte order mark in line 3|expected '{' at column 1|$(printf '\357\273\277')$request
no input_length|no "input_length"|{"timestamp": 0, "output_length": 0, "hash_ids": [1]}
no output_length|no "output_length"|{"timestamp": 0, "input_length": 5, "hash_ids": [1]}
no hash_ids|no "hash_ids"|{"timestamp": 0, "input_length": 5, "output_length": 0}
a key given twice|key given twice at column 17|{"timestamp": 0,"timestamp": 0}
a negative input_length|negative number at column 18|{"input_length": -5}
a negative output_length|negative number|{"output_length": -1}
a negative id|negative number|{"hash_ids": [1, -2]}
an input_length of 0|input_length is 0|{"timestamp": 0, "input_length": 0, "output_length": 0, "hash_ids": []}
too few ids|513 tokens are 2 blocks, but hash_ids has 1|${request%, 8*}]}
too many ids|512 tokens are 1 blocks, but hash_ids has 2|{"timestamp": 0, "input_length": 512${request#*513}
the largest length without its blocks|9223372036854775807 tokens are 18014398509481984 blocks, but hash_ids has \
2|{"timestamp": 0, "input_length": 9223372036854775807${request#*513}
a length of 2^63|number too large|{"input_length": 9223372036854775808}
a fraction|expected a whole number|{"input_length": 5.0}
a length in quotes|expected a whole number|{"input_length": "5"}
a leading zero|number with a leading zero|{"input_length": 05}
an escape that is none|no such escape|{"x": "\q"}
a string without end|the string does not end|{"x": "abc
a tab in a string|control character in a string|{"x": "$(printf '\t')"}
a word that is none|expected a value|{"x": ?}
a value that does not end|expected a value|{"x": $(printf '%040d' 0 | tr 0 '[')}
END
printf '%s\n{"x\0": 1}\n' "$request" >case
refuses "a byte of 0" "case:2: control character in a string" case
{ echo "$request"; dd if=/dev/zero bs=1048576 count=10 2>/dev/null | tr '\0' 1; echo; } >case
refuses "a line of 10 MB" "case:2: expected '{' at column 1" case
: >case
refuses "an empty trace" "case: holds no request" case
refuses "an empty text" "case: empty" --text case
printf '\n\n' >case
refuses "a trace of blank lines" "case: holds no request" case
refuses "a missing trace" "no such file: cannot be opened" "no such file"
refuses "a directory" ".: cannot be" .
refuses "a missing text" "none.txt: " --text none.txt
refuses "a cache smaller than a text" "prompt.txt: the request needs 1008 slots" --text prompt.txt --slots 1000
refuses "two traces" "more than one trace" "$trace" "$trace"
refuses "nothing to replay" "no TRACE and no --text"

# A name, what the replay says, and the options after the trace.
while IFS='|' read -r what message options; do
    # shellcheck disable=SC2086
    refuses "$what" "$message" "$trace" $options
done <<END
a cache smaller than a request|$trace:60: the request needs 6144 slots (6144 tokens in pages of 16), the cache has \
6128|--slots 6143
a cache smaller than a page|--slots 15 holds no page of 16 tokens|--slots 15
a cache larger than memory|more than this machine's memory|--layers 1024 --kv-bytes 16777216
a cache larger than memory with rows of any size|more than this machine's memory|--layers 1024 --slots 2147483632
an unknown option|unknown option --nonsense|--nonsense
an unknown rule of keys|--keys is 'md5', not vllm_sha256|--keys md5
keys and tiers|--keys with --host-slots or --disk-slots|--keys sglang --slots 8000 --host-slots 5000
keys of pages that are too large|block_tokens is 8192, less than 1 or more|--keys sglang --page 8192
an option without value|--page needs a value|--page
a page of 0|--page is '0', not a number from 1 to 1048576|--page 0
a page of x|--page is '16x', not a number|--page 16x
an empty number|--page is '', not a number|--page=
negative slots|--slots is '-1', not a number|--slots -1
odd --kv-bytes|--kv-bytes is 7,|--kv-bytes 7
a seed of 2^64|--seed is '18446744073709551616', not a number|--seed 18446744073709551616
--recompute-last 2|--recompute-last is '2', not a number from 0 to 1|--recompute-last 2
--verify 2|--verify is '2', not a number from 0 to 1|--verify 2
a host tier smaller than a page|--host-slots 15 holds no page of 16 tokens|--slots 8000 --host-slots 15
a disk tier smaller than a page|--disk-slots 15 holds no page of 16 tokens|--slots 8000 --disk-slots 15
a tier below a cache for all|--host-slots 16 without --slots|--host-slots 16
a file without disk tier|--disk-file x without --disk-slots|--slots 8000 --disk-file x
a file without name|--disk-file is empty|--slots 8000 --disk-slots 8000 --disk-file=
a host tier larger than memory|--host-slots 2147483647 need 35184|--slots 1024 --requests 1 --host-slots 2147483647 \
--kv-bytes 16384
a disk tier larger than the disk|x: 35184371826688 bytes are needed, and its file system has|--slots 1024 --requests 1 \
--disk-slots 2147483647 --kv-bytes 16384 --disk-file x
a file that exists|err: File exists; name a file that does not exist|--slots 8000 --disk-slots 8000 --disk-file err
a folder as file|.: File exists|--slots 8000 --disk-slots 8000 --disk-file .
a device as file|/dev/full: File exists|--slots 8000 --disk-slots 8000 --disk-file /dev/full
a file in no folder|none/x: No such file or directory|--slots 8000 --disk-slots 8000 --disk-file none/x
a device that is none|--device is 'gpu', neither cpu nor cuda|--device gpu
a device without name|--device is '', neither|--device=
--device without value|--device needs a value|--device
CUDA where none was built in|--device cuda: built without CUDA|--device cuda
END
refuses_folder() {
    TMPDIR=$2
    export TMPDIR
    refuses "$1" "$2/kv_disk_" "$trace" --slots 8000 --disk-slots 8000
    unset TMPDIR
}
rm -rf locked && mkdir locked && chmod 500 locked
if [ "$(id -u)" -ne 0 ]; then refuses_folder "a folder that cannot be written" "$PWD/locked"; fi
refuses_folder "a folder that does not exist" "$PWD/none"
name="--device cpu, and none"
runs "$name" 0 device=cpu "$trace" --device=cpu && runs "$name" 0 device=cpu "$trace" &&
    { grep -q '^device .* cpu   built without CUDA$' out || fail "$name" "$(head -n 1 out)"; } && ok "$name"

# ---- variants built here
compiler=${CC:-cc}
build() { # OUTPUT FLAGS...
    output=$1; shift
    $compiler "$@" -DKV_REPLAY_CUDA -I"$root/tests/core/late_cuda" -I"$root" \
        "$root/examples/02_kv_replay/kv_replay.c" -o "$output" 2>err
}

damaged() {
    name="a damaged byte is found"
    replay=./corrupt
    build corrupt -O0 -DKV_REPLAY_CORRUPT || fail "$name" "does not build: $(head -n 1 err)" || return
    # The damaged row belongs to line 1. With pages of 1 token it is cached, and line 59 is the same request.
    runs "$name" 1 mismatches=2 "$trace" --page 1 --device cpu && {
        grep -q "jsonl:1: token 0, layer 0, V row in slot 0: byte 0 is 0x" err && grep -q "jsonl:59: token 0" err ||
            fail "$name" "said '$(cat err)'"
    } && ok "$name"
    counts "not comparing finds nothing" mismatches=0 "$trace" --page 1 --verify 0 --device cpu
    name="a damaged byte on a late GPU"
    runs "$name" 1 device=cuda,mismatches=2 "$trace" --page 1 --device cuda && ok "$name"
}

tree() { # NAME
    for arguments in "" "--slots 8000" "--page 1 --slots 6144 --running 5" "--page 48 --slots 12000 --running 7" \
        "--page 512 --running 60" "--running 8 --layers 2 --kv-bytes 66" \
        "--slots 8000 --host-slots 3000 --disk-slots 9000 --running 5 --page 4 --recompute-last 1"; do
        # shellcheck disable=SC2086
        runs "$1" 0 device=cpu,mismatches=0 "$trace" --device cpu $arguments || return
    done
    ok "$1"
}

# Whichever of CUDA's calls fails, the replay says why. If one of the first three fails, there is no GPU.
failing_calls() { # NAME
    for n in 1 2 3; do
        LATE_CUDA_FAIL=$n "$replay" "$trace" --requests 3 >out 2>err
        [ $? -eq 0 ] && [ -z "$(differs device=cpu,mismatches=0)" ] ||
            fail "$1" "call $n, any device: $(cat err)" || return
    done
    while LATE_CUDA_FAIL=$n "$replay" "$trace" --requests 2 --device cuda >out 2>err; status=$?; [ $status -eq 2 ]; do
        [ ! -s out ] && [ "$(wc -l <err)" -eq 1 ] &&
            grep -q -e 'error that was asked for' -e KVPRIM_ERROR_CUDA err ||
            fail "$1" "call $n: said '$(cat out err)'" || return
        n=$((n + 1))
    done
    [ $status -eq 0 ] && [ $n -gt 60 ] || fail "$1" "call $n: exit status $status, $(head -n 1 err)" || return
    ok "$1: $((n - 1)) calls"
}

# Of the calls that only tiers make, too: a page goes down to disk and comes up.
failing_tiers() { # NAME
    n=4
    while LATE_CUDA_FAIL=$n "$replay" --text 32.txt --text other.txt --text 32.txt --page 32 --slots 32 \
        --disk-slots 64 --kv-bytes 64 --disk-file empty/file --device cuda >out 2>err; status=$?; [ $status -eq 2 ]; do
        [ ! -s out ] && [ "$(wc -l <err)" -eq 1 ] && [ -z "$(ls empty)" ] &&
            grep -q -e 'error that was asked for' -e KVPRIM_ERROR_CUDA err ||
            fail "$1" "call $n: said '$(cat out err)'" || return
        n=$((n + 1))
    done
    [ $status -eq 0 ] && [ $n -gt 80 ] && [ -z "$(differs 'hits on disk=32,mismatches=0')" ] ||
        fail "$1" "call $n: exit status $status, $(head -n 1 err)" || return
    ok "$1: $((n - 1)) calls"
}

late() {
    checks="under address and undefined behaviour sanitizers"
    replay=./late
    build late -g1 -Og -DKV_REPLAY_CHECK -fsanitize=address,undefined -fno-sanitize-recover=all &&
        ./late --help >out 2>&1 || {
        checks="without sanitizers, which do not work here"
        build late -DKV_REPLAY_CHECK || fail "a late GPU" "does not build: $(head -n 1 err)" || return
    }
    tree "the tree's invariants, $checks"
    same_on_both "a late GPU, $checks"
    counts "a GPU where there is one" device=cuda "$trace" --requests 3
    name="times without verification"
    runs "$name" 0 '' "$trace" --requests 3 --verify 0 &&
        { ! grep ' 0\.00 GB/s' out >err || fail "$name" "none for $(cat err)"; } && ok "$name"
    name="rows that fit a small GPU"
    export LATE_CUDA_MEMORY=4000000
    runs "$name" 0 "device=cuda,mismatches=0,bytes gathered=$((150280 * 64))" "$trace" &&
        { grep -q "more than this GPU's memory: replaying with 64\$" err || fail "$name" "$(cat err)"; } && ok "$name"
    unset LATE_CUDA_MEMORY
    [ "$mode" != quick ] || return 0
    failing_calls "CUDA's calls fail"
    failing_tiers "CUDA's calls fail with pages on disk"
}

if command -v "${compiler%% *}" >err; then
    damaged
    late
else
    skip "a damaged byte is found, the tree's invariants, a late GPU" "no $compiler to build them with"
fi
finish
