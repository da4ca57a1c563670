#!/bin/sh
# SPDX-License-Identifier: MIT
# Runs tests, JOBS of them at a time (default: one per processor, and one more), and adds up what they report, in order.
# Each argument is one of
#
#     test COMMAND          a program whose last line says `N passed, N failed, N skipped`; anything else is a failure
#     exits NAME COMMAND    passes if the command exits with 0; if it does not, its output is shown
#     skip NAME: WHY        what this machine cannot run
#
# Lines that begin with `ok ` are left out unless V=1 is set. Lines that begin with `FAIL ` are repeated before the last
# line, which is the sum. Says on stderr what runs while nothing else is printed: all the time on a terminal, otherwise
# every 30 s. Exits with 1 if anything failed, or if nothing passed.

processors=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN 2>/dev/null)
jobs=${JOBS:-$((${processors:-0} + 1))} # one more than processors: some tests wait most of their time
case $jobs in *[!0-9]*) jobs=1 ;; esac
unset JOBS # a test that calls this script decides for itself
passed=0 failed=0 skipped=0 workers=
scratch=$(mktemp -d) || exit 1
trap 'rm -rf "$scratch"' EXIT
trap 'kill $workers 2>/dev/null; wait; exit 130' HUP PIPE TERM
trap 'trap "" TERM; kill -TERM 0; wait; exit 130' INT # Ctrl-C: what runs in the background ignores it

fail()
{
    echo "FAIL $1"
    echo "    FAIL $1" >>"$scratch/failures"
    failed=$((failed + 1))
}

# closing_line LINE: sets p, f and s to its numbers, or fails if it is no closing line.
closing_line()
{
    p='' f='' s=''
    case $1 in
    *' passed, '*' failed, '*' skipped') ;;
    *) return 1 ;;
    esac
    p=${1%% passed, *} f=${1#* passed, } s=${1##* failed, }
    f=${f%% failed, *} s=${s% skipped}
    for number in "$p" "$f" "$s"; do
        case $number in
        '' | *[!0-9]*) return 1 ;;
        esac
    done
}

# Prints its input as it comes, and writes the last line of it to a file.
show()
{
    line=
    while IFS= read -r next || [ -n "$next" ]; do
        case $next in 'make: *** '* | 'make['*) ;; *) line=$next ;; esac # a make that fails says so last
        case $next in
        'ok '*) [ "${V:-0}" != 0 ] || continue ;;
        'FAIL '*) printf '    %s\n' "$next" >>"$scratch/failures" ;;
        esac
        printf '%s\n' "$next"
    done
    printf '%s\n' "$line" >"$scratch/last"
}

# begin N COMMAND: writes its output to $scratch/N and then its exit code to N.code. While it runs, N.runs says since
# when, and what it is.
begin()
{
    echo "$(date +%s) ${2##*build/}" >"$scratch/$1.runs"
    sh -c "$2" >"$scratch/$1" 2>&1 &
    child=$!
    trap 'kill $child 2>/dev/null; exit 130' TERM
    wait $child
    echo $? >"$scratch/$1.end" && rm -f "$scratch/$1.runs" && mv "$scratch/$1.end" "$scratch/$1.code"
}

# progress SECONDS: says what runs, after SECONDS without other output.
progress()
{
    [ -t 2 ] || [ $(($1 % 30)) -eq 29 ] || return
    now=$(date +%s)
    doing=$(cat "$scratch"/*.runs 2>/dev/null | while read -r since what; do
        printf ', %s %d s' "$what" $((now - since))
    done)
    if [ -t 2 ]; then
        printf '\r\033[K.. %.70s\r' "${doing#, }" >&2
    else
        echo ".. ${doing#, }" >&2
    fi
}

# work JOB...: runs the jobs that no other worker has begun.
work()
{
    n=0
    for job; do
        n=$((n + 1))
        mkdir "$scratch/$n.begun" 2>/dev/null || continue
        case $job in
        'test '*) begin $n "${job#test }" ;;
        'exits '*) job=${job#exits } && begin $n "${job#* }" ;;
        esac
    done
}

# supervise N JOB...: runs worker N. Says when the worker has ended, even if it was killed.
supervise()
{
    worker=$1
    shift
    work "$@" &
    child=$!
    trap 'kill $child 2>/dev/null' TERM
    wait $child
    : >"$scratch/over$worker"
}

# output_of N COMMAND: prints the output: as it comes if one job runs at a time, otherwise when a worker has finished.
output_of()
{
    if [ "$jobs" -le 1 ]; then
        sh -c "$2" 2>&1
        echo $? >"$scratch/$1.code"
        return
    fi
    waited=0
    until [ -e "$scratch/$1.code" ] || [ ! -d "$scratch" ]; do
        sleep 1
        progress $waited
        waited=$((waited + 1))
        [ "$(ls "$scratch" | grep -c '^over')" -lt "$jobs" ] || [ -e "$scratch/$1.code" ] || break
    done
    [ ! -t 2 ] || printf '\033[K' >&2
    cat "$scratch/$1"
    [ -e "$scratch/$1.code" ] || echo 125 >"$scratch/$1.code" # its worker was killed
}

sum_test()
{
    echo "== $2"
    # A pipe returns only the exit code of its last command, so everything else goes through files.
    if [ "$jobs" -le 1 ]; then
        output_of "$1" "$2" | show
    else
        output_of "$1" "$2" | show &
        wait $! # a signal interrupts this wait
    fi
    code=$(cat "$scratch/$1.code")
    if ! closing_line "$(cat "$scratch/last")"; then
        fail "$2: exit code $code, and the last line does not say 'N passed, N failed, N skipped'"
        return
    fi
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
    if [ "$code" -ne 0 ] && [ "$f" -eq 0 ]; then
        fail "$2: exit code $code"
    elif [ "$((p + f + s))" -eq 0 ]; then
        fail "$2: ran no test"
    fi
}

sum_exits()
{
    output_of "$1" "$3" >"$scratch/log"
    code=$(cat "$scratch/$1.code")
    if [ "$code" -eq 0 ]; then
        echo "ok $2"
        passed=$((passed + 1))
    else
        cat "$scratch/log"
        fail "$2: exit code $code of: $3"
    fi
}

worker=1
while [ "$jobs" -gt 1 ] && [ "$worker" -le "$jobs" ]; do
    supervise "$worker" "$@" &
    workers="$workers $!" worker=$((worker + 1))
done

n=0
for job; do
    n=$((n + 1)) what=${job%% *} rest=${job#* }
    case $what in
    test) sum_test $n "$rest" ;;
    exits) sum_exits $n "${rest%% *}" "${rest#* }" ;;
    skip)
        echo "skip $rest"
        skipped=$((skipped + 1))
        ;;
    *) fail "tests/run.sh: '$job' begins with none of test, exits, skip" ;;
    esac
done

[ "$passed" -gt 0 ] || [ "$failed" -gt 0 ] || fail "no test passed"
if [ -s "$scratch/failures" ]; then
    echo 'what failed:'
    cat "$scratch/failures"
fi
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
