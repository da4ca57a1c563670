#!/bin/sh
# SPDX-License-Identifier: MIT
# usage: tests/build/parts.sh PART BUILD_DIR      from the top folder; `make test` and `make check` call it
#
#     readme        compiles what README.md shows, and checks that what it names exists: CC
#     callers       programs of several units, languages and copies of the library: CC, CXX, NVCC, NCCL_INCLUDE
#     emulated      runs the kernels of kvprim_cuda.cuh thread by thread on the CPU, under sanitizers if there are any
#     pictures      the pictures and figures match the results
#     format        sources are formatted by clang-format
#     matrix        every way to include the headers x language standards x gcc and clang, strict warnings as errors
#     symbols       the names and macros that the headers leave defined
#     systems       the tests compiled for this very processor, for AArch64 under qemu, and for Windows
#     sanitizers    the tests under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer
#     fuzzers       FUZZ_SECONDS each
#
# and in tests/build/parts_gpu.sh
#
#     nccl          the tests of kvprim_nccl.h that need no GPU: CC, CXX, NVCC, CUDA_INCLUDE, NCCL_INCLUDE, NCCL_LIBRARY
#     nccl_cuda     the same compiled by nvcc, with what runs on GPUs; its kernels for every architecture, as `kernels`
#     profile       what `make ncu`, `make ncu-compare`, `make sass` and `make cfg` print for recorded input
#     kernels       compiles the kernels for every architecture: no spills, no stack, 128-bit accesses on main paths
#     programs      compiles examples, tests and benchmarks for a GPU, and runs those that run without one
#
# A part is the function of the same name. Each test says what it lacks on this machine.

part=$1 build=$2
: "${CC=cc}" "${CXX=c++}" "${FUZZ_SECONDS=10}"
. tests/gpu/environment.sh
warnings='-Wall -Wextra -Wpedantic -Wconversion -Wsign-conversion -Wshadow -Wundef -Werror'
strict='-Xcompiler -Wall,-Wextra,-Werror' # for nvcc
prototypes='-Wstrict-prototypes -Wmissing-prototypes'
address='-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all'
thread='-O1 -g -fsanitize=thread'
headers='kvprim.h kvprim_cuda.cuh kvprim_nccl.h'
launcher= passed=0 failed=0 skipped=0
mkdir -p "$build" || exit 1

has()
{
    command -v "$1" >/dev/null 2>&1
}

skip()
{
    echo "skip $1"
    skipped=$((skipped + 1))
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
        [ "$cells_failed" -gt 2 ] || { echo "  $*"; tail -n 30 "$build/log"; }
    fi
}

# group NAME: prints one line for the cells since the last group.
group()
{
    [ "$cells_failed" -gt 0 ] || [ "$cells" -eq 0 ] || echo "ok $1: $cells"
    cells=0 cells_failed=0
}

# program NAME COMMAND...: adds the counts in the program's last line.
program()
{
    program=$1
    shift
    if "$@" >"$build/log" 2>&1 && line=$(tail -n 1 "$build/log") &&
        counts=$(expr "$line" : '\([0-9]* passed, 0 failed, [0-9]*\) skipped$'); then
        passed=$((passed + ${counts%% *})) skipped=$((skipped + ${counts##* }))
        echo "ok $program: $line"
    else
        failed=$((failed + 1))
        echo "FAIL $program: $*"
        tail -n 30 "$build/log"
    fi
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

# Every way to include the headers, each in its own unit. Sets units, and differing: those whose code differs.
write_units()
{
    unit declared "$include"
    unit declared_cuda '#include "kvprim_cuda.cuh"'
    unit declared_nccl '#include "kvprim_nccl.h"'
    unit declared_twice "$include" "$include"
    unit implemented "$implement" "$include"
    unit core '#define KVPRIM_CORE_IMPLEMENTATION' "$include"
    unit twice "$include" "$implement" "$include" "$include"
    unit late "$include" 'const char *late(void);' 'const char *late(void) { return kvprim_isa(); }' \
        "$implement" "$include"
    unit static_copy '#define KVPRIM_STATIC' "$implement" "$include"
    unit static_twice '#define KVPRIM_STATIC' "$implement" "$include" "$include"
    unit no_simd '#define KVPRIM_NO_SIMD' "$implement" "$include"
    units='declared declared_cuda declared_nccl declared_twice implemented core twice late'
    units="$units static_copy static_twice no_simd"
    differing='declared declared_cuda declared_nccl implemented core static_copy no_simd'
    for a in $headers; do
        for b in $headers; do
            for c in $headers; do
                [ "$a" != "$b" ] && [ "$b" != "$c" ] && [ "$a" != "$c" ] || continue
                name=order_${a#kvprim}_${b#kvprim}_${c#kvprim}
                unit "$name" '#define KVPRIM_CORE_IMPLEMENTATION' "#include \"$a\"" "#include \"$b\"" "#include \"$c\""
                units="$units $name"
            done
        done
    done
}

# matrix_of UNITS COMPILER...
matrix_of()
{
    some=$1
    shift
    for unit in $some; do
        cell "$unit $*" "$@" $warnings -I. -c "$build/$unit.c" -o "$build/unit.o"
    done
    for flag in -DKVPRIM_IMPLEMENTATION -DKVPRIM_CORE_IMPLEMENTATION; do
        cell "command line $*" "$@" $warnings -I. $flag -c "$build/declared_twice.c" -o "$build/unit.o"
    done
    group "$*"
}

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
        has "$cc" && starts "$cc" "$@" && return
    done
    return 1
}

# ---- readme ----

# What README.md may name: targets of make, files, and names in the headers.
target_exists()
{
    # What a target needs may be missing here. Only the answer that there is no such target counts.
    LC_ALL=C make -n A=a B=b NVCC=nvcc CXX=c++ "$1" 2>&1 | grep 'No rule to make target' || return 0
    return 1
}

file_exists()
{
    [ -e "$1" ] || [ -e "examples/$1" ] || [ -e "tests/$1" ] || [ -e "tests/results/$1" ]
}

# Compiles the snippets as strictly as everything else, except for variables that only the reader uses. Runs the first.
readme()
{
    rm -rf "$build"/snippet_*.c "$build/named" "$build/fresh"
    mkdir "$build/fresh" && ln -s "$PWD/kvprim.h" "$PWD/examples" "$build/fresh"
    cell 'README.md has at most 200 lines' [ "$(wc -l <README.md)" -le 200 ]
    cell 'README.md has snippets, and ends them' sh tests/build/readme.sh README.md "$build"
    cell "README.md's first snippet" $CC -std=c11 $warnings -I. "$build/snippet_1.c" -o "$build/snippet_1"
    cell "README.md's first snippet, run" "$build/snippet_1"
    for source in "$build"/snippet_*.c; do
        cell "README.md's ${source##*/}" $CC -std=c11 $warnings -Wno-unused -I. -c "$source" -o "$build/unit.o"
    done
    group "README.md's snippets"
    while read -r kind what; do
        case $kind in
        command) cell "README.md: $what" sh -c "cd '$build/fresh' && $CC ${what#cc }" ;;
        program) cell "README.md: $what" sh -c "MAKEFLAGS= make -s '${what%% *}' && $what" ;;
        target) cell "README.md: make $what" target_exists "$what" ;;
        file) cell "README.md: $what" file_exists "$what" ;;
        symbol) cell "README.md: $what" grep -qw "$what" $headers ;;
        esac
    done <"$build/named"
    group 'what README.md names exists'
}

# ---- callers ----

# linked NAME LINKER OBJECT...: links a program of main.c and callers, which must find nothing wrong.
linked()
{
    binary=$build/$1 linker=$2
    shift 2
    cell "link $binary" $linker "$@" -pthread -o "$binary"
    cell "run $binary" "$binary"
}

callers_in_c()
{
    unit implemented "$implement" "$include"
    cell 'main in C' $c -c tests/build/main.c -o "$build/main.o"
    cell 'implementation in C' $c -c "$build/implemented.c" -o "$build/implemented_c.o"
    cell 'caller in C' $c -c $use -o "$build/caller_c.o"
    linked two_units "$CC" "$build/main.o" "$build/caller_c.o" "$build/implemented_c.o"
    cell 'macro from the command line' $c -DKVPRIM_CORE_IMPLEMENTATION -c $use -o "$build/caller_one.o"
    linked one_unit "$CC" "$build/main.o" "$build/caller_one.o"
    cell 'no SIMD' $c -DKVPRIM_NO_SIMD -DKVPRIM_CORE_IMPLEMENTATION -c $use -o "$build/caller_no_simd.o"
    linked no_simd "$CC" "$build/main.o" "$build/caller_no_simd.o"

    cell 'main of three callers' $c '-DCALLERS(X)=X(caller)X(caller_a)X(caller_b)' -c tests/build/main.c \
        -o "$build/main_three.o"
    cell 'vendored copy a' $c $static -DCALLER=caller_a -c $use -o "$build/caller_a.o"
    cell 'vendored copy b' $c $static -DCALLER=caller_b -c $use -o "$build/caller_b.o"
    linked vendored "$CC" "$build/main_three.o" "$build/caller_c.o" "$build/implemented_c.o" "$build/caller_a.o" \
        "$build/caller_b.o"
    group "units in C, $CC"
}

# Some of those in C.
callers_in_cxx()
{
    cell 'implementation in C++' $cxx -c "$build/implemented.c" -o "$build/implemented_cxx.o"
    cell 'caller in C++' $cxx -c $use -o "$build/caller_cxx.o"
    cell 'vendored copy in C++' $cxx $static -DCALLER=caller_b -c $use -o "$build/caller_b.o"
    linked cxx_calls_c "$CXX" "$build/main.o" "$build/caller_cxx.o" "$build/implemented_c.o"
    linked c_calls_cxx "$CXX" "$build/main.o" "$build/caller_c.o" "$build/implemented_cxx.o"
    linked vendored_mixed "$CXX" "$build/main_three.o" "$build/caller_cxx.o" "$build/implemented_c.o" \
        "$build/caller_a.o" "$build/caller_b.o"
    group "units in C and C++, $CC and $CXX"
}

# Descriptors as README.md shows them, in every C++ since 2011.
descriptors_in_cxx()
{
    for compiler in g++ clang++; do
        if ! has $compiler; then
            skip "descriptors in C++, $compiler: not on this machine"
            continue
        fi
        for standard in 11 14 17 20; do
            cell "descriptors in C++$standard, $compiler" $compiler -std=c++$standard $warnings -I. \
                -c tests/build/cxx.cpp -o "$build/cxx.o"
        done
        linked cxx_descriptors $compiler "$build/cxx.o" "$build/implemented_c.o"
        group "descriptors in C++11 to C++20, $compiler"
    done
}

# warns_of_all UNIT COMPILER...: every line of the unit that is a call ignores a status, and each of them must warn.
warns_of_all()
{
    source=$build/$1.c
    shift
    "$@" -I. -Wunused-result -c "$source" -o "$build/unit.o" >"$build/warned" 2>&1
    [ "$(grep -c 'warning: ignoring return value' "$build/warned")" -eq "$(grep -c '^kvprim_.*;$' "$source")" ] &&
        return
    cat "$build/warned"
    return 1
}

# needs_same_version HEADER COMPILER...: beside a kvprim.h of another version the header stops with an #error.
needs_same_version()
{
    header=$1
    shift
    rm -rf "$build/other" && mkdir "$build/other" && cp "$header" "$build/other" || return 1
    sed 's/^\(#define KVPRIM_VERSION_MINOR\) .*/\1 77/' kvprim.h >"$build/other/kvprim.h"
    ! cmp -s kvprim.h "$build/other/kvprim.h" || { echo 'kvprim.h has no KVPRIM_VERSION_MINOR'; return 1; }
    echo "#include \"$header\"" >"$build/other/unit.c"
    ! "$@" -fsyntax-only "$build/other/unit.c" 2>"$build/other/errors" || { echo 'compiles'; return 1; }
    cat "$build/other/errors"
    grep -qi '#error.*version' "$build/other/errors"
}

# hides_symbols COMPILER...: a shared library exports kvprim_*, but none of them with -fvisibility=hidden.
hides_symbols()
{
    "$@" -I. -shared -fPIC "$build/implemented.c" -o "$build/shown.so" &&
        "$@" -I. -shared -fPIC -fvisibility=hidden "$build/implemented.c" -o "$build/hidden.so" &&
        nm -D --defined-only "$build/shown.so" | grep -q ' kvprim_gather$' || return 1
    ! nm -D --defined-only "$build/hidden.so" | grep ' kvprim_'
}

# What the headers promise to a caller's compiler and linker.
promises()
{
    unit ignored "$include" '#include "kvprim_cuda.cuh"' '#include "kvprim_nccl.h"' 'void ignored(kvprim_move *);' \
        'void ignored(kvprim_move *m) {' 'kvprim_gather(NULL);' 'kvprim_store(NULL);' 'kvprim_transfer(NULL);' \
        'kvprim_unpack(NULL);' 'kvprim_gather_check(NULL, NULL);' 'kvprim_store_check(NULL, NULL);' \
        'kvprim_transfer_check(NULL, NULL);' 'kvprim_unpack_check(NULL);' 'kvprim_gather_moves(NULL, m);' \
        'kvprim_store_moves(NULL, m);' 'kvprim_transfer_moves(NULL, m);' 'kvprim_cpu_move(m, 1);' \
        'kvprim_cuda_gather(NULL, NULL);' 'kvprim_cuda_store(NULL, NULL);' 'kvprim_cuda_transfer(NULL, NULL);' \
        'kvprim_cuda_unpack(NULL, NULL);' 'kvprim_cuda_move(m, 1, NULL);' 'kvprim_comm_init(NULL, NULL);' \
        'kvprim_comm_check(NULL);' 'kvprim_send(NULL, NULL, 1, KVPRIM_F32, 0, NULL);' '}'
    unit may_ignore "$include" '#include "kvprim_nccl.h"' 'void may_ignore(void);' 'void may_ignore(void) {' \
        '    kvprim_fail(KVPRIM_OK, "-"); kvprim_comm_destroy(NULL); kvprim_comm_abort(NULL);' '}'
    for compiler in 'gcc -std=c11' 'clang -std=c11' 'g++ -x c++ -std=c++17'; do
        has "${compiler%% *}" || continue
        cell "a status that is ignored warns, $compiler" warns_of_all ignored $compiler
        cell "a status that may be ignored, $compiler" $compiler $warnings -I. -c "$build/may_ignore.c" \
            -o "$build/unit.o"
        cell "kvprim_cuda.cuh and another version, $compiler" needs_same_version kvprim_cuda.cuh $compiler
        cell "kvprim_nccl.h and another version, $compiler" needs_same_version kvprim_nccl.h $compiler
        has nm || continue
        cell "-fvisibility=hidden, $compiler" hides_symbols $compiler
    done
    group 'statuses, versions, hidden symbols'
}

callers_of_cuda()
{
    if [ -n "$NVCC" ] && has "$CXX"; then
        cell 'CUDA unit' "$NVCC" -I. tests/build/cuda_unit.cu -o "$build/cuda_unit"
        cell 'run CUDA unit' "$build/cuda_unit"
        group "unit in CUDA, $NVCC"
    else
        skip 'unit in CUDA: no nvcc (on PATH, under CUDA_HOME or in the usual places), or no C++ compiler for it'
    fi

    if [ -n "$NCCL_INCLUDE" ] && [ -n "$CUDA_INCLUDE" ]; then
        cell 'next to nccl.h' $c -Wall -Wextra -Werror $(system_headers "$NCCL_INCLUDE" "$CUDA_INCLUDE") \
            -c tests/build/nccl_unit.c -o "$build/unit.o"
        group "declarations next to $NCCL_INCLUDE/nccl.h"
    else
        skip "declarations next to NCCL's: no nccl.h (under NCCL_HOME or in the usual places) or no cuda_runtime.h"
    fi
}

# no_cuda_header SOURCE FLAGS...: compiles without CUDA's and NCCL's headers; kvprim's have their names, too.
no_cuda_header()
{
    $CC -std=c11 $warnings $prototypes -O2 -I. "$@" -c -o "$build/unit.o" -MD -MF "$build/headers" || return 1
    tr ' ' '\n' <"$build/headers" | grep -i 'cuda\|nccl' >"$build/named"
    grep -q kvprim_nccl.h "$build/named" && ! grep -v 'kvprim_cuda.cuh$\|kvprim_nccl.h$' "$build/named"
}

# exits CODE COMMAND...
exits()
{
    code=$1
    shift
    "$@"
    [ $? -eq "$code" ]
}

# The example engine, with its threads and messages but without a GPU. Damage must be noticed.
engine()
{
    engine=examples/07_engine/engine.c
    checks=$address
    works "$CC" $checks || checks=-O1
    cell "$engine without NCCL, no CUDA header" no_cuda_header $engine
    cell "$engine, no CUDA header" no_cuda_header $engine -DENGINE_NCCL
    for damage in 0 1 2 3; do
        cell "$engine for the CPU" $CC -std=c11 $warnings $checks -I. -DENGINE_NCCL -DDAMAGE=$damage $engine \
            tests/build/engine_host.c -pthread -o "$build/engine_$damage"
    done
    for gpus in 1 3 4; do
        cell "engine, $gpus ranks, on the CPU" "$build/engine_0" --gpus $gpus --steps 70
    done
    cell 'engine, a gathered byte wrong' exits 1 "$build/engine_1" --gpus 1 --steps 1
    cell 'engine, a stored byte wrong' exits 1 "$build/engine_2" --gpus 2 --steps 1
    cell 'engine, a rank left out of the sum' exits 1 "$build/engine_3" --gpus 2 --steps 1
    cell 'engine, more GPUs than there are' exits 2 "$build/engine_0" --gpus 5
    group "examples/07_engine on the CPU, $CC $checks"
}

# has_layout: the structures of examples/08_torch.py match the headers.
has_layout()
{
    python3 examples/08_torch.py --layout >"$build/layout.c" &&
        $CC -std=c11 -Wall -Wextra -Wpedantic -Werror -I. -c "$build/layout.c" -o "$build/unit.o"
}

# lib_target ARGUMENT...: runs `make lib` without nvcc, in a folder of its own.
lib_target()
{
    rm -rf "$build/lib" && mkdir "$build/lib" || return 1
    ln -s "$PWD/kvprim.h" "$PWD/kvprim_cuda.cuh" "$PWD/Makefile" "$build/lib" &&
        (cd "$build/lib" && MAKEFLAGS='' make -s NVCC= CC="$CC" "$@" lib)
}

# nvcc_flags: flags given to `make lib` reach nvcc. It only prints the command, so nvcc need not be here.
nvcc_flags()
{
    (cd "$build/lib" && MAKEFLAGS='' make -n NVCC=nvcc CPPFLAGS=-DKVPRIM_DEBUG CFLAGS='-O1 -Wa,--one' \
        build/libkvprim_cuda.so) >"$build/named" &&
        grep -q "nvcc.* -DKVPRIM_DEBUG.* -Xcompiler '-O1' -Xcompiler '-Wa\\\\,--one'.* -shared" "$build/named"
}

# CPPFLAGS and CFLAGS reach the library: with KVPRIM_DEBUG it refuses fragments that overlap.
library_flags()
{
    unit fragments "$include" 'int main(void) {' '    char src[4] = "abc", dst[4];' \
        '    const kvprim_fragment f[2] = {{0, 0, 2}, {1, 1, 2}};' \
        '    const kvprim_unpack_desc d = {.src = src, .src_bytes = 4, .dst = dst, .dst_bytes = 4, .fragments = f,' \
        '                                  .count = 2};' \
        '    return kvprim_unpack(&d) == KVPRIM_ERROR_OVERLAP ? 0 : 3; }'
    for debug in '' -DKVPRIM_DEBUG; do
        cell "make lib CPPFLAGS=$debug" lib_target CPPFLAGS=$debug CFLAGS=-O0
        cell 'a program of that library' $CC -std=c11 $warnings -I. "$build/fragments.c" \
            "$build/lib/build/libkvprim.so" -Wl,-rpath,"$PWD/$build/lib/build" -o "$build/fragments"
        cell "the library, CPPFLAGS=$debug" exits "$([ -n "$debug" ] && echo 0 || echo 3)" "$build/fragments"
    done
    cell 'make lib CFLAGS=-fno-such-flag' exits 2 lib_target CFLAGS=-fno-such-flag
    cell 'make lib gives its flags to nvcc' nvcc_flags
    group 'flags of make lib'
}

# Calls what `make lib` builds without nvcc from Python.
library()
{
    library=build/libkvprim_host.so
    if has nm; then
        cell "$library exports only kvprim_*" exports_library $library kvprim_gather kvprim_last_error
    else
        skip "what $library exports: no nm"
    fi
    if ! has python3; then
        skip 'examples/08_torch.py: no python3'
    else
        cell 'structures of examples/08_torch.py' has_layout
        if python3 -c 'import torch' >/dev/null 2>&1; then
            cell 'examples/08_torch.py on the CPU' python3 examples/08_torch.py $library
        else
            skip 'examples/08_torch.py, all but its structures: python3 has no torch'
        fi
    fi
    group 'shared library and Python'
}

# With KVPRIM_NVTX, if NVTX is here.
ranges()
{
    if [ -z "$CUDA_INCLUDE" ] || [ ! -f "$CUDA_INCLUDE/nvtx3/nvToolsExt.h" ]; then
        skip "ranges of KVPRIM_NVTX: no nvtx3/nvToolsExt.h beside CUDA's headers"
        return
    fi
    for compiler in "$CC -std=c11 $prototypes" "${CXX:+$CXX -x c++ -std=c++17}"; do
        has "${compiler%% *}" || continue
        cell "test_nvtx, $compiler" $compiler $warnings -I. $(system_headers "$CUDA_INCLUDE") tests/build/test_nvtx.c -ldl \
            -o "$build/test_nvtx"
        program "test_nvtx, ${compiler%% *}" "$build/test_nvtx"
        has nm || continue
        cell "exports only kvprim_* and NVTX's, $compiler" \
            exports_only '^kvprim_|[Nn]vtx|gxx_personality|^__clang_call' "$build/implemented.c" $compiler -O0 \
            -DKVPRIM_NVTX $(system_headers "$CUDA_INCLUDE")
    done
    group 'ranges of KVPRIM_NVTX compiled'
}

callers()
{
    use=tests/build/use.c c="$CC -std=c11 -O1 -I." cxx="$CXX -x c++ -std=c++17 -O1 -I."
    static='-DKVPRIM_STATIC -DKVPRIM_CORE_IMPLEMENTATION'
    callers_in_c
    if has "$CXX"; then
        callers_in_cxx
    else
        skip 'units in C++: no C++ compiler'
    fi
    descriptors_in_cxx
    promises
    callers_of_cuda
    engine
    library
    library_flags
    ranges
}

# ---- emulated ----

emulated()
{
    if ! has "$CXX"; then
        skip 'kernels emulated on the CPU: no C++ compiler'
        return
    fi
    checks=$address
    works "$CXX" -x c++ $checks || checks=-O1
    cell "test_cuda_emulated, $CXX $checks" "$CXX" -std=c++17 -Wall -Wextra $checks -I. tests/gpu/test_cuda_emulated.cpp \
        -o "$build/test_cuda_emulated"
    group "test_cuda_emulated compiled, $CXX $checks"
    program 'test_cuda_emulated' "$build/test_cuda_emulated"
}

# ---- pictures ----

pictures()
{
    if ! has python3; then
        skip 'pictures and figures of the results: no python3'
        return
    fi
    cell 'tests/results/*.svg and the figures of README.md (make plots)' python3 tests/bench/plots.py --check
    group 'pictures and figures match tests/results'
}

# ---- format ----

format()
{
    format=clang-format-14
    has $format || format=clang-format
    if ! has $format || ! $format --version | grep -q ' version 14\.'; then
        skip 'format of the sources: no clang-format 14 (other versions format some lines differently)'
        return
    fi
    for source in $(find *.h *.cuh examples tests -name '*.h' -o -name '*.cuh' -o -name '*.c' -o -name '*.cu' \
        -o -name '*.cpp'); do
        cell "$source is formatted by clang-format" $format --dry-run -Werror "$source"
    done
    group 'sources are formatted by clang-format'
}

# ---- matrix ----

matrix()
{
    write_units
    for pair in gcc:g++ clang:clang++; do
        cc=${pair%:*} cxx=${pair#*:}
        if has "$cc"; then
            matrix_of "$units" "$cc" -std=c11 $prototypes
            matrix_of "$differing" "$cc" -std=c11 $prototypes -O2
            matrix_of "$differing" "$cc" -std=c11 $prototypes -O3
        else
            skip "$cc: not on this machine"
        fi
        if has "$cxx"; then
            matrix_of "$units" "$cxx" -x c++ -std=c++11
            matrix_of "$units" "$cxx" -x c++ -std=c++17
            matrix_of "$units" "$cxx" -x c++ -std=c++20
        else
            skip "$cxx: not on this machine"
        fi
    done
}

# ---- symbols ----

# Lists the macros without KVPRIM_ that one of our headers defines and does not undefine.
macros_left()
{
    "$@" -I. -dD -E "$build/macros.c" >"$build/macros" || return 1
    awk '/^# [0-9]+ "/ { ours = $3 ~ /kvprim[^\/]*"$/; seen += ours }
         ours && $1 == "#define" { sub(/\(.*/, "", $2); left[$2] = 1 }
         $1 == "#undef" { delete left[$2] }
         END {
             for (name in left)
                 if (name ~ /^KVPRIM_/) known++
                 else { print "leaves " name " defined"; bad = 1 }
             if (!seen || !known) { print "saw no header of ours"; bad = 1 }
             exit bad
         }' "$build/macros"
}

# refuses UNIT WHY COMPILER...: fails with the #error that says why, not for another reason.
refuses()
{
    source=$build/$1.c why=$2
    shift 2
    "$@" -I. -c "$source" -o "$build/unit.o" 2>&1 | grep "$why"
}

symbols()
{
    write_units
    unit macros '#define KVPRIM_CORE_IMPLEMENTATION' "$include" '#include "kvprim_cuda.cuh"' '#include "kvprim_nccl.h"'
    unit refused_cuda '#include "kvprim_cuda.cuh"' '#define KVPRIM_CUDA_IMPLEMENTATION' '#include "kvprim_cuda.cuh"'
    unit refused_nccl '#include "kvprim_nccl.h"' '#define KVPRIM_NCCL_IMPLEMENTATION' '#include "kvprim_nccl.h"'
    unit needs_nccl '#include <nccl.h>' '#include <cuda_runtime_api.h>'
    for compiler in 'gcc -std=c11' 'clang -std=c11' 'g++ -x c++ -std=c++17' 'clang++ -x c++ -std=c++17'; do
        has "${compiler%% *}" || continue
        cell "macros, $compiler" macros_left $compiler
        cell "macros with KVPRIM_STATIC, $compiler" macros_left $compiler -DKVPRIM_STATIC
        cell "KVPRIM_CUDA_IMPLEMENTATION, $compiler" refuses refused_cuda 'is implemented by nvcc' $compiler
        if $compiler -c "$build/needs_nccl.c" -o "$build/unit.o" >/dev/null 2>&1; then
            skip "KVPRIM_NCCL_IMPLEMENTATION without NCCL, $compiler: it finds NCCL's headers by itself"
        else
            cell "KVPRIM_NCCL_IMPLEMENTATION, $compiler" refuses refused_nccl 'is implemented with <nccl.h>' $compiler
        fi
        has nm || continue
        for level in -O0 -O2; do
            cell "exports only kvprim_*, $compiler $level" exports_only '^kvprim_' "$build/implemented.c" \
                $compiler $level
            cell "KVPRIM_STATIC exports nothing, $compiler $level" exports_only '^caller$' tests/build/use.c \
                $compiler $level -DKVPRIM_STATIC -DKVPRIM_CORE_IMPLEMENTATION
        done
    done
    has nm || skip 'exported symbols: no nm'
    [ $((cells + cells_failed)) -gt 0 ] || skip 'macros and symbols: neither gcc nor clang'
    group 'macros and symbols'
}

# ---- systems ----

systems()
{
    tests='-I. tests/core/test_kvprim.c -std=c11 -O2 -pthread'
    replay='-I. examples/02_kv_replay/kv_replay.c -std=c11 -O2 -pthread'
    write_units
    for cc in gcc clang; do
        has $cc && works $cc -O3 -march=native -flto || continue
        cell "test_kvprim, $cc -march=native" $cc $tests -O3 -march=native -flto -o "$build/test_native"
        group "test_kvprim compiled for this processor, $cc"
        program "test_kvprim, $cc -O3 -march=native -flto" "$build/test_native"
    done
    if has aarch64-linux-gnu-gcc; then
        matrix_of "$differing" aarch64-linux-gnu-gcc -std=c11 $prototypes -O2
        cell 'test_kvprim for AArch64' aarch64-linux-gnu-gcc $tests $warnings -static -o "$build/test_aarch64"
        group 'test_kvprim compiled for AArch64'
        if qemu=$(command -v qemu-aarch64 || command -v qemu-aarch64-static); then
            program 'test_kvprim on AArch64 (qemu)' "$qemu" "$build/test_aarch64"
        else
            skip 'test_kvprim on AArch64: no qemu-aarch64'
        fi
    else
        skip 'AArch64: no aarch64-linux-gnu-gcc'
    fi
    arm_include=/usr/aarch64-linux-gnu/include
    if has clang && [ -d $arm_include ]; then
        matrix_of "$differing" clang --target=aarch64-linux-gnu -isystem $arm_include -std=c11 $prototypes -O2
    else
        skip "AArch64 with clang: no clang or no $arm_include"
    fi
    if has x86_64-w64-mingw32-gcc; then
        matrix_of "$differing" x86_64-w64-mingw32-gcc -std=c11 $prototypes -O2
        cell 'test_kvprim for Windows' x86_64-w64-mingw32-gcc $tests $warnings -static -o "$build/test_kvprim.exe"
        cell '02_kv_replay for Windows' x86_64-w64-mingw32-gcc $replay $warnings -static -o "$build/02_kv_replay.exe"
        group 'programs for Windows'
        if has wine; then
            program 'test_kvprim on Windows (wine)' wine "$build/test_kvprim.exe"
        else
            skip 'test_kvprim on Windows: no wine'
        fi
    else
        skip 'Windows: no x86_64-w64-mingw32-gcc'
    fi
}

# ---- sanitizers ----

sanitizers()
{
    tests='-I. tests/core/test_kvprim.c -std=c11 -pthread'
    if compiler_with $address; then
        cell "test_kvprim, $cc $address" $cc $tests $address -o "$build/test_address"
        cell "02_kv_replay, $cc $address" $cc -I. examples/02_kv_replay/kv_replay.c -std=c11 -pthread $address \
            -o "$build/replay_address"
        cell '02_kv_replay, addresses and undefined behaviour' $launcher "$build/replay_address" \
            examples/02_kv_replay/trace_small.jsonl
        group "$cc $address, 02_kv_replay run"
        program 'test_kvprim, addresses and undefined behaviour' $launcher "$build/test_address"
    else
        skip 'AddressSanitizer: no compiler here has it'
    fi
    if compiler_with $thread; then
        cell "test_kvprim, $cc $thread" $cc $tests $thread -o "$build/test_thread"
        group "$cc $thread"
        program 'test_kvprim, threads' $launcher "$build/test_thread"
    else
        skip 'ThreadSanitizer: no compiler here has it, or its programs do not start'
    fi
}

# ---- fuzzers ----

fuzzers()
{
    unit probe '#include <stddef.h>' '#include <stdint.h>' 'int LLVMFuzzerTestOneInput(const uint8_t *, size_t);' \
        'int LLVMFuzzerTestOneInput(const uint8_t *d, size_t n) { return n > 9000 && d[0]; }'
    if clang -fsanitize=fuzzer,address,undefined "$build/probe.c" -o "$build/probe" >/dev/null 2>&1 &&
        "$build/probe" -runs=1 >/dev/null 2>&1; then
        cc="clang -fsanitize=fuzzer" by='libFuzzer, clang'
    elif compiler_with $address; then
        by="tests/fuzz/fuzz_main.c, $cc" cc="$cc tests/fuzz/fuzz_main.c"
    else
        skip 'fuzzers: no compiler here has AddressSanitizer'
        return
    fi
    # libFuzzer's own ramp would keep inputs at 20 to 40 bytes. A program whose inputs stay short, or lead nowhere, fails.
    for fuzzer in prefix:80 moves:600 unpack:400 trace:600; do
        name=${fuzzer%:*} by_name="$build/fuzz_${fuzzer%:*}"
        cell "compile fuzz_$name, $cc" $cc -I. "tests/fuzz/fuzz_$name.c" -std=c11 $address -o "$by_name"
        cell "fuzz_$name" $launcher "$by_name" -seed=1 -len_control=0 -max_len="${fuzzer#*:}" \
            -max_total_time="$FUZZ_SECONDS" -timeout=20 -artifact_prefix="$build/${name}_"
        cp "$build/log" "$by_name.log"
        cell "fuzz_$name reaches full lengths" grep -q 'inputs have at least .* up to' "$by_name.log"
        group "fuzz_$name ($by), $(sed -n 's/^Done \([0-9]* runs\) in.*/\1/p' "$by_name.log"); compiled and run"
        grep 'inputs have at least' "$by_name.log"
    done
}

. tests/build/parts_gpu.sh

case $part in
readme | callers | emulated | nccl | nccl_cuda | profile | \
    pictures | format | matrix | symbols | kernels | programs | systems | sanitizers | fuzzers)
    "$part"
    ;;
*)
    echo "tests/build/parts.sh: no part is called '$part'" >&2
    exit 2
    ;;
esac
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
