#!/bin/sh
# SPDX-License-Identifier: MIT
# usage: tests/build/parts.sh PART BUILD_DIR [quick]      from the top folder; `make test` and `make check` call it
#
# A part is a function of the same name, here or in a file that is read below. Parts of `make test` are
#
#     readme        compiles what README.md and its pages show, and checks that what they name exists: CC
#     callers       programs of several units, languages and copies of the library, and targets of make: CC, CXX
#     nccl          the tests of kvprim_nccl.h that need no GPU, except those of its kernels: CC, CXX, CUDA_INCLUDE,
#                   NCCL_INCLUDE, NCCL_LIBRARY
#     trace         the part of examples/10_trace that reads traces; its SQL files, where Perfetto is (TRACE_PROCESSOR)
#     profile       what `make ncu`, `make sass`, `make sanitize` and the like print for recorded input
#
# of `make test` (quick: fewer cases) and of `make check`
#
#     emulated      runs the kernels of kvprim_cuda.cuh thread by thread on the CPU, under sanitizers if there are any
#     collectives   the same for the kernels of kvprim_nccl.h
#     core          the tests of kvprim.h under AddressSanitizer and UndefinedBehaviorSanitizer
#
# and of `make check`
#
#     sanitizers    the replay under these two, and tests that have threads under ThreadSanitizer
#     fuzzers       so many inputs each, or FUZZ_SECONDS if they are given
#     kernels       compiles the kernels for every architecture: no spills, no stack, 128-bit accesses on main paths
#     programs      compiles examples, tests and benchmarks for a GPU, and runs those that run without one
#     nccl_cuda     both for kvprim_nccl.h
#     callers_cuda  callers beside headers of CUDA, NCCL and NVTX
#     nccl_headers  kvprim_nccl.h with compilers of the host, under ThreadSanitizer, with the headers of several NCCLs
#     compilers     zig, tcc, i386 and clang as CUDA compiler
#     matrix        every way to include the headers x language standards x gcc and clang, strict warnings as errors
#     symbols       the names and macros that the headers leave defined
#     systems       the tests compiled for this very processor, for AArch64 under qemu, and for Windows
#     pictures      the pictures and figures match the results; of which headers these are
#     documents     the rows of tests/documents.md that need no GPU
#     format        sources are formatted by clang-format; no line has more than 120 columns; the headers' lines
#
# Each test says what it lacks on this machine. All variables are global: sh has no others.

part=$1 build=$2 quick=${3-}
: "${CC=cc}" "${CXX=c++}" "${FUZZ_SECONDS=}"
. tests/gpu/environment.sh
warnings='-Wall -Wextra -Wpedantic -Wconversion -Wsign-conversion -Wshadow -Wundef -Werror'
strict='-Xcompiler -Wall,-Wextra,-Werror' # for nvcc
quickly='-Xcicc -O0 -Xptxas -O0'          # the same
only_ptx='-arch=compute_90 -Xcicc -O0'    # the same, without ptxas
lto_90='-rdc=true -gencode arch=compute_90,code=lto_90' # kernels are only read: no PTX
parsed='-fdevice-syntax-only' # the same, for no other kernels than the headers': that they call no host is not seen
no_kernels='-DKVPRIM_NO_CONVERT -DKVPRIM_NO_KERNELS' # of those that take long to compile
prototypes='-Wstrict-prototypes -Wmissing-prototypes'
# Undefined behaviour traps, which takes a seventh less to compile and to run than a report of its own. ASAN_OPTIONS let
# AddressSanitizer say where.
address='-O1 -g1 -fsanitize=address,undefined -fsanitize-undefined-trap-on-error'
export ASAN_OPTIONS="${ASAN_OPTIONS:+$ASAN_OPTIONS:}handle_sigill=1"
thread='-O1 -g1 -fsanitize=thread'
headers='kvprim.h kvprim_cuda.cuh kvprim_nccl.h' units=tests/build/units
test_kvprim='-I. tests/core/test_kvprim.c -std=c11 -pthread'
launcher= passed=0 failed=0 skipped=0
mkdir -p "$build" || exit 1

# has COMMAND: it may have arguments, such as `zig c++`.
has()
{
    command -v "${1%% *}" >/dev/null 2>&1
}

skip()
{
    echo "skip $1"
    skipped=$((skipped + 1))
}

# skip_tests SOURCE WHY: skips a program, and counts every test that it names. One in a loop runs more often.
skip_tests()
{
    tests=$(grep -c '^ *\(run\|run_timed\|live\|test_world\|CALL\|check\|judge\|both\|sampled\)(' "$1")
    echo "skip $1, $tests tests or more: $2"
    skipped=$((skipped + tests))
}

# why LOG: prints all lines that say FAIL, and the last 30.
why()
{
    awk '{ line[NR] = $0 } END { for (i = 1; i <= NR; i++) if (i > NR - 30 || line[i] ~ /FAIL/) print line[i] }' "$1"
}

# cell NAME COMMAND...: one test, silent if it passes. The first few failures of a group say why.
cells=0 cells_failed=0
cell()
{
    cell=$1
    shift
    if "$@" >"$build/log" 2>&1; then
        passed=$((passed + 1)) cells=$((cells + 1))
    else
        failed=$((failed + 1)) cells_failed=$((cells_failed + 1))
        echo "FAIL $cell"
        [ "$cells_failed" -gt 2 ] || { echo "  $*"; why "$build/log"; }
    fi
}

# group NAME: prints one line for the cells since the last group.
group()
{
    [ "$cells_failed" -gt 0 ] || [ "$cells" -eq 0 ] || echo "ok $1: $cells"
    cells=0 cells_failed=0
}

# program NAME COMMAND...: adds the counts in the program's last line, and prints what has failed or was skipped.
program()
{
    program=$1 code=0
    shift
    "$@" >"$build/log" 2>&1 || code=$?
    line=$(tail -n 1 "$build/log")
    if counts=$(expr "$line" : '\([0-9]* passed, [0-9]* failed, [0-9]*\) skipped$'); then
        passed=$((passed + ${counts%% *})) skipped=$((skipped + ${counts##* }))
        counts=${counts#*, } counts=${counts%% *}
        failed=$((failed + counts))
    else
        counts=0 code="$code, and the last line does not say 'N passed, N failed, N skipped'"
    fi
    if [ "$code" = 0 ] && [ "$counts" -eq 0 ]; then
        echo "ok $program: $line"
        grep '^skip ' "$build/log"
        return
    fi
    [ "$counts" -gt 0 ] || { failed=$((failed + 1)) && echo "FAIL $program: exit code $code"; }
    echo "  $*"
    grep -v '^ok ' "$build/log"
}

# Prints what the sources are.
sources()
{
    find -H kvprim* examples tests -type f ! -path 'tests/results/*' -exec cksum {} +
}

# once OUTPUT COMMAND...: compiles a program or an object, unless this command has made it from these very sources.
# `make test` and `make check` share what takes long, and so do parts, which may run at the same time.
once()
{
    output=$1
    shift
    made=$(echo "$*" && sources)
    [ ! -e "$output" ] || [ "$made" != "$(cat "$output.made" 2>/dev/null)" ] || return 0
    "$@" -o "$output.$part" || { rm -f "$output.$part"; return 1; }
    mv "$output.$part" "$output" && printf '%s\n' "$made" >"$output.made"
}

# said NAME: keeps what the last program printed, for documents, if it ran whole and passed.
said()
{
    [ -z "$quick" ] && [ "$failed" -eq 0 ] || return 0
    cp "$build/log" "build/said_$1.$part" && mv "build/said_$1.$part" "build/said_$1" && sources >"build/said_$1.made"
}

# unit NAME LINE...: writes a source file of these lines.
unit()
{
    file=$build/$1.c
    shift
    printf '%s\n' "$@" >"$file"
}
implement='#define KVPRIM_IMPLEMENTATION'
include='#include "kvprim.h"'

# ---- what several parts use ----

# exports_only NAMES SOURCE COMPILER...: the object exports something, and only names that match the pattern.
exports_only()
{
    names=$1 source=$2
    shift 2
    "$@" -I. -c "$source" -o "$build/symbols.o" && nm -g "$build/symbols.o" >"$build/names" || return 1
    awk -v names="$names" 'NF == 3 && $3 ~ names { known++ }
        NF == 3 && $3 !~ names { print "exports " $3; bad = 1 }
        END { exit bad || !known }' "$build/names"
}

# exports_library FILE NAMES...: it exports these names, and only kvprim_*.
exports_library()
{
    nm -D --defined-only "$1" >"$build/names" || return 1
    shift
    for name; do
        grep -q " T $name\$" "$build/names" || { echo "does not export $name"; return 1; }
    done
    ! grep -v ' kvprim_[a-z0-9_]*$' "$build/names"
}

# works COMPILER...: its programs link, and run here through $launcher.
works()
{
    unit empty 'int main(void) { return 0; }'
    "$@" "$build/empty.c" -o "$build/empty" >/dev/null 2>&1 && $launcher "$build/empty" >/dev/null 2>&1
}

# starts COMPILER...: the same, but sets launcher. ThreadSanitizer does not start on kernels that randomise addresses
# further than it expects.
starts()
{
    launcher=
    works "$@" || { launcher='setarch -R' && has setarch && works "$@"; }
}

# Sets cc and launcher to the first of clang, gcc and $CC whose programs run with these flags.
compiler_with()
{
    for cc in clang gcc "$CC"; do
        has "$cc" && starts $cc "$@" && return
    done
    return 1
}

# implemented FLAGS: compiles test_kvprim with $cc and sanitizers, and so kvprim.h's implementation, and sets object.
# That takes most of the time that a program takes, so it is compiled once, for several programs, with KVPRIM_DEBUG,
# which only checks more. Those have a main() of their own; the object with $run_tests is test_kvprim.
implemented()
{
    case $1 in *thread*) object=build/implemented_threads.o ;; *) object=build/implemented_address.o ;; esac
    cell "test_kvprim, $cc $1" once $object $cc $test_kvprim -DKVPRIM_DEBUG -Dmain=tests $1 -c
}
unit run_tests 'int tests(int, char **);' 'int main(int count, char **words) { return tests(count, words); }'
run_tests="$build/run_tests.c -pthread"

# linked_sanitized SOURCE FLAGS MORE...: compiles a program that implements kvprim.h, with that implementation.
linked_sanitized()
{
    source=$1 flags=$2
    shift 2
    implemented "$flags"
    cell "$source, $cc $flags" $cc -std=c11 $flags -I. -DKVPRIM_CORE_IMPLEMENTED "$source" $object -pthread "$@"
}

# The same for cxx and C++. What clang++ makes takes a quarter less time here than what g++ makes.
cxx_with()
{
    for cxx in clang++ "$CXX"; do
        has "$cxx" && starts $cxx -x c++ "$@" && return
    done
    return 1
}

# ---- emulated ----

emulated()
{
    if ! has "$CXX"; then
        skip_tests tests/gpu/test_list.h 'no C++ compiler'
        return
    fi
    checks=$address
    cxx_with $checks || { cxx=$CXX checks=-O1 launcher=; }
    case $cxx in clang*) cc=clang ;; *) cc=$CC ;; esac # their sanitizers do not mix
    cell "test_cuda_emulated, $cxx $checks" once "$build/test_cuda_emulated.o" $cxx -std=c++17 -Wall -Wextra $checks \
        -I. -DKVPRIM_CORE_IMPLEMENTED -c tests/gpu/test_cuda_emulated.cpp
    implemented "$checks" # the part core has begun it
    cell 'test_cuda_emulated linked' $cxx $checks "$build/test_cuda_emulated.o" $object -o "$build/test_cuda_emulated"
    group "test_cuda_emulated compiled, $cxx $checks"
    program "test_cuda_emulated $quick" $launcher "$build/test_cuda_emulated" $quick
    for switch in no_convert no_four_bit no_unpack no_fetch; do
        cell "$switch, $CXX" once "$build/$switch" $CXX -std=c++17 -Wall -Wextra -Werror -I. tests/build/$switch.cpp
        group "$switch compiled, $CXX"
        program "$switch" "$build/$switch"
    done
}

# ---- traces ----

trace()
{
    if has python3; then
        program 'test_trace.py' python3 tests/trace/test_trace.py
        said test_trace.py
    else
        skip_tests tests/trace/test_trace.py 'no python3'
    fi
}

# ---- pictures ----

pictures()
{
    if ! has python3; then
        skip 'pictures and figures of the results: no python3'
        return
    fi
    cell 'tests/results/*.svg, FIGURES.md and the tables of README.md (make plots)' python3 tests/bench/plots.py --check
    group 'pictures and figures match tests/results'
    cell 'nothing failed in results of these headers' python3 tests/results.py
    group 'nothing failed in results of these headers'
    cat "$build/log" # a table: of which headers each is
    program 'the table of results' python3 tests/bench/test_results.py
}

# ---- documents ----

documents()
{
    said=
    for name in test_trace.py test_kvprim; do
        [ "$(sources)" != "$(cat build/said_$name.made 2>/dev/null)" ] || said="$said build/said_$name"
    done
    program 'rows of tests/documents.md' sh tests/documents.sh host $said
}

# ---- format ----

narrow()
{
    grep -Hn '.\{121\}' "$@"
    [ $? -eq 1 ] # 2: a file is missing
}

format()
{
    cell 'lines of scripts' narrow $(ls .ci/run 2>/dev/null) $(find -H Makefile examples tests -name '*.sh' \
        -o -name '*.py' -o -name Makefile)
    group 'scripts have lines of at most 120 columns'
    ! has python3 || cell 'lines of the headers' python3 tests/profile/weight.py check
    group 'headers keep within their budget of lines'
    format=clang-format-14
    has $format || format=clang-format
    if ! has $format || ! $format --version | grep -q ' version 14\.'; then
        skip 'format of the sources: no clang-format 14 (other versions format some lines differently)'
        return
    fi
    for source in $(find -H *.h *.cuh examples tests -name '*.h' -o -name '*.cuh' -o -name '*.c' -o -name '*.cu' \
        -o -name '*.cpp'); do
        cell "$source is formatted by clang-format" $format --dry-run -Werror "$source"
    done
    group 'sources are formatted by clang-format'
}

# ---- sanitizers ----

core()
{
    checks=$address
    compiler_with $address || { cc=$CC checks=-O1 launcher=; }
    implemented "$checks"
    cell 'test_kvprim linked' $cc $checks $object $run_tests -o "$build/test_address"
    group "test_kvprim compiled, $cc $checks"
    program "test_kvprim, $checks" $launcher "$build/test_address" $quick
    said test_kvprim
}

sanitizers()
{
    if compiler_with $address; then
        linked_sanitized examples/02_kv_replay/kv_replay.c "$address" -o "$build/replay_address"
        cell '02_kv_replay, addresses and undefined behaviour' $launcher "$build/replay_address" \
            examples/02_kv_replay/trace_small.jsonl
        group "$cc $address, 02_kv_replay run"
    fi
    if compiler_with $thread; then
        implemented "$thread"
        cell 'test_kvprim linked' $cc $thread $object $run_tests -o "$build/test_thread"
        group "$cc $thread"
        program 'test_kvprim, threads' $launcher "$build/test_thread" threads
    else
        skip_tests tests/core/test_kvprim.c 'no compiler here has ThreadSanitizer, or its programs do not start'
    fi
}

# ---- fuzzers ----

# reached LOG: the fuzzer has judged its operations, and each of them had long inputs that led far.
reached()
{
    ! grep 'NOT reached' "$1" && grep -q '^[a-z0-9_]*: .* inputs have at least .*; reached$' "$1"
}

fuzzers()
{
    unit probe '#include <stddef.h>' '#include <stdint.h>' 'int LLVMFuzzerTestOneInput(const uint8_t *, size_t);' \
        'int LLVMFuzzerTestOneInput(const uint8_t *d, size_t n) { return n > 9000 && d[0]; }'
    if ! clang -fsanitize=fuzzer,address,undefined "$build/probe.c" -o "$build/probe" >/dev/null 2>&1 ||
        ! "$build/probe" -runs=1 >/dev/null 2>&1; then
        skip 'fuzzers: no clang with libFuzzer and AddressSanitizer'
        return
    fi
    # The implementation takes most of the time that a fuzzer takes to compile, so it is compiled once.
    cc='clang -fsanitize=fuzzer'
    cell 'implementation for fuzzers' $cc -I. -std=c11 $address -c $units/implemented.c -o "$build/implementation.o"
    # libFuzzer's own ramp would keep inputs at 20 to 40 bytes. A program fails whose inputs stay short or lead nowhere.
    # Each ends after so many inputs, however busy the machine is: some seconds of a processor.
    for fuzzer in prefix:80:200000 moves:600:40000 convert:600:2000 slots:600:100000 unpack:400:20000 fetch:60:6000 \
        keys:600:7000 trace:600:16000; do
        name=${fuzzer%%:*} by_name="$build/fuzz_${fuzzer%%:*}" limit=-runs=${fuzzer##*:} longest=${fuzzer#*:}
        [ -z "$FUZZ_SECONDS" ] || limit=-max_total_time=$FUZZ_SECONDS
        cell "compile fuzz_$name" $cc -I. -DKVPRIM_CORE_IMPLEMENTED "tests/fuzz/fuzz_$name.c" -std=c11 $address \
            "$build/implementation.o" -o "$by_name"
        cell "fuzz_$name" "$by_name" -seed=1 -len_control=0 -max_len="${longest%:*}" \
            $limit -timeout=20 -artifact_prefix="$build/${name}_"
        cp "$build/log" "$by_name.log"
        cell "fuzz_$name reaches full lengths" reached "$by_name.log"
        group "fuzz_$name, $(sed -n 's/^Done \([0-9]* runs\) in.*/\1/p' "$by_name.log"); compiled and run"
        grep 'inputs have at least' "$by_name.log"
    done
}

. tests/build/callers.sh
. tests/build/matrix.sh
. tests/build/parts_gpu.sh
. tests/build/compilers.sh

case $part in
readme | callers | emulated | collectives | core | nccl | profile | trace | sanitizers | fuzzers | kernels | \
    programs | nccl_cuda | nccl_headers | callers_cuda | compilers | matrix | symbols | systems | pictures | \
    documents | format)
    "$part"
    ;;
*)
    echo "tests/build/parts.sh: no part is called '$part'" >&2
    exit 2
    ;;
esac
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
