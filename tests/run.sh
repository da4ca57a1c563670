#!/bin/sh
# Runs tests one after the other and sums what they report. Each argument is one of
#
#     test COMMAND          a program whose last line says `N passed, N failed, N skipped`; anything else is a failure
#     exits NAME COMMAND    passes if the command exits with 0; its output is shown if it does not
#     skip NAME: WHY        what this machine cannot run
#
# Lines that begin with `ok ` are left out, V=1 shows them. The last line is the sum. Exit code 1 if anything failed, or
# if nothing passed.

passed=0 failed=0 skipped=0
scratch=$(mktemp -d) || exit 1
trap 'rm -rf "$scratch"' EXIT
trap 'exit 130' HUP INT TERM

fail()
{
    echo "FAIL $1"
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

# Its input, as it comes, and the last line of it into a file.
show()
{
    line=
    while IFS= read -r next || [ -n "$next" ]; do
        line=$next
        case $line in
        'ok '*) [ "${V:-0}" = 0 ] || printf '%s\n' "$line" ;;
        *) printf '%s\n' "$line" ;;
        esac
    done
    printf '%s\n' "$line" >"$scratch/last"
}

run_test()
{
    echo "== $1"
    # A pipe gives the exit code of its last command: what else is to be known goes through files.
    { sh -c "$1"; echo $? >"$scratch/code"; } | show
    code=$(cat "$scratch/code")
    if ! closing_line "$(cat "$scratch/last")"; then
        fail "$1: exit code $code, and the last line does not say 'N passed, N failed, N skipped'"
        return
    fi
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
    if [ "$code" -ne 0 ] && [ "$f" -eq 0 ]; then
        fail "$1: exit code $code"
    elif [ "$((p + f + s))" -eq 0 ]; then
        fail "$1: ran no test"
    fi
}

run_exits()
{
    if sh -c "$2" >"$scratch/log" 2>&1; then
        echo "ok $1"
        passed=$((passed + 1))
    else
        code=$?
        cat "$scratch/log"
        fail "$1: exit code $code of: $2"
    fi
}

for job; do
    what=${job%% *} rest=${job#* }
    case $what in
    test) run_test "$rest" ;;
    exits) run_exits "${rest%% *}" "${rest#* }" ;;
    skip)
        echo "skip $rest"
        skipped=$((skipped + 1))
        ;;
    *) fail "tests/run.sh: '$job' begins with none of test, exits, skip" ;;
    esac
done

[ "$passed" -gt 0 ] || [ "$failed" -gt 0 ] || fail "no test passed"
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
