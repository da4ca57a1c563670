# SPDX-License-Identifier: MIT
# The parts matrix, symbols and systems of tests/build/parts.sh, which reads this file.

# Each unit includes the headers in another way. `differing` are those whose code differs.
differing='declared declared_cuda declared_nccl implemented static_copy no_simd'
repeating='core declared_twice twice late static_twice'
orders='1,2,3 1,3,2 2,1,3 2,3,1 3,1,2 3,2,1'

# text_compiles UNIT COMPILER...: compiles it, unless its text after preprocessing is the same as that of a unit that
# this compiler has compiled. $texts: those of such units.
text_compiles()
{
    source=$units/$1.c
    shift
    "$@" $warnings -Wno-unused-command-line-argument -E -P "$source" >"$build/text" || return 1
    text=$(cksum <"$build/text")
    case $texts in *"<$text>"*) return ;; esac
    "$@" $warnings -c "$source" -o "$build/unit.o" && texts="$texts<$text>"
}

# compiled COMPILER...: compiles the units whose code differs.
compiled()
{
    texts=
    for unit in $differing; do
        cell "$unit $*" text_compiles $unit "$@"
    done
}

# defined COMPILER...: the implementation is asked for on the command line.
defined()
{
    for flag in -DKVPRIM_IMPLEMENTATION -DKVPRIM_CORE_IMPLEMENTATION; do
        cell "command line $flag $*" text_compiles declared_twice "$@" $flag -fsyntax-only
    done
}

# all_units COMPILER...: those with the same code as another are at most parsed.
all_units()
{
    compiled "$@"
    for unit in $repeating; do
        cell "$unit $*" text_compiles $unit "$@" -fsyntax-only
    done
    for order in $orders; do
        cell "order $order $*" text_compiles order "$@" -DORDER=$order -fsyntax-only
    done
    defined "$@"
    group "$*"
}

# differing_units COMPILER...
differing_units()
{
    compiled "$@"
    defined "$@"
    group "$*"
}

# same_text COMPILER UNIT UNIT: they are the same after preprocessing.
same_text()
{
    $1 -E -P "$units/$2.c" >"$build/text" && $1 -E -P "$units/$3.c" | cmp - "$build/text" && [ -s "$build/text" ]
}

matrix()
{
    cell 'core is no other code than implemented' same_text "$CC" core implemented
    group 'core and implemented'
    for pair in gcc:g++ clang:clang++; do
        cc=${pair%:*} cxx=${pair#*:}
        if has "$cc"; then
            all_units "$cc" -std=c11 $prototypes
            differing_units "$cc" -std=c11 $prototypes -O3 # warnings that need optimization
            differing_units "$cc" -std=c2x $prototypes -fsyntax-only
        else
            skip "$cc: not on this machine"
        fi
        if has "$cxx"; then
            all_units "$cxx" -x c++ -std=c++17
            all_units "$cxx" -x c++ -std=c++11 -fsyntax-only
            all_units "$cxx" -x c++ -std=c++20 -fsyntax-only
        else
            skip "$cxx: not on this machine"
        fi
    done
}

# ---- symbols ----

# Lists the macros without KVPRIM_ that one of our headers defines and does not undefine.
macros_left()
{
    "$@" -dD -E "$units/macros.c" >"$build/macros" || return 1
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
    source=$units/$1.c why=$2
    shift 2
    "$@" -fsyntax-only "$source" 2>&1 | grep "$why"
}

# hides_symbols COMPILER...: a shared library exports none of kvprim_*. What it exports if asked to is in compilers.sh.
hides_symbols()
{
    "$@" -shared -fPIC $units/implemented.c -o "$build/hidden.so" || return 1
    ! nm -D --defined-only "$build/hidden.so" | grep ' kvprim_'
}

symbols()
{
    unit needs_nccl '#include <nccl.h>' '#include <cuda_runtime_api.h>'
    for compiler in 'gcc -std=c11' 'clang -std=c11' 'g++ -x c++ -std=c++17' 'clang++ -x c++ -std=c++17'; do
        has "${compiler%% *}" || continue
        cell "macros, $compiler" macros_left $compiler
        cell "macros with KVPRIM_STATIC, $compiler" macros_left $compiler -DKVPRIM_STATIC
        cell "KVPRIM_CUDA_IMPLEMENTATION, $compiler" refuses refused_cuda 'is implemented by nvcc' $compiler
        if $compiler -fsyntax-only "$build/needs_nccl.c" >/dev/null 2>&1; then
            skip "KVPRIM_NCCL_IMPLEMENTATION without NCCL, $compiler: it finds NCCL's headers by itself"
        else
            cell "KVPRIM_NCCL_IMPLEMENTATION, $compiler" refuses refused_nccl 'is implemented with <nccl.h>' $compiler
        fi
        has nm || continue
        cell "no KVPRIM_EXPORT, $compiler" hides_symbols $compiler
        case $compiler in gcc*) levels='-O0 -O2' ;; *) levels=-O0 ;; esac # optimized, fewer names are left to export
        for level in $levels; do
            cell "exports only kvprim_*, $compiler $level" exports_only '^kvprim_' $units/implemented.c $compiler $level
            cell "KVPRIM_STATIC exports nothing, $compiler $level" exports_only '^caller$' tests/build/use.c \
                $compiler $level -DKVPRIM_STATIC -DKVPRIM_CORE_IMPLEMENTATION
        done
    done
    has nm || skip 'exported symbols: no nm'
    [ $((cells + cells_failed)) -gt 0 ] || skip 'macros and symbols: neither gcc nor clang'
    group 'macros and symbols'
}

# ---- systems ----

for_aarch64()
{
    if has aarch64-linux-gnu-gcc; then
        differing_units aarch64-linux-gnu-gcc -std=c11 $prototypes -O2
        cell 'test_kvprim for AArch64' aarch64-linux-gnu-gcc $test_kvprim -O2 $warnings -static \
            -o "$build/test_aarch64"
        group 'test_kvprim compiled for AArch64'
        if qemu=$(command -v qemu-aarch64 || command -v qemu-aarch64-static); then
            program 'test_kvprim on AArch64 (qemu)' "$qemu" "$build/test_aarch64" quick # qemu takes ten times as long
        else
            skip_tests tests/core/test_kvprim.c 'no qemu-aarch64'
        fi
    else
        skip_tests tests/core/test_kvprim.c 'no aarch64-linux-gnu-gcc'
    fi
    arm_include=/usr/aarch64-linux-gnu/include
    if has clang && [ -d $arm_include ]; then
        differing_units clang --target=aarch64-linux-gnu -isystem $arm_include -std=c11 $prototypes -O2
    else
        skip "AArch64 with clang: no clang or no $arm_include"
    fi
}

for_windows()
{
    if ! has x86_64-w64-mingw32-gcc; then
        skip_tests tests/core/test_kvprim.c 'no x86_64-w64-mingw32-gcc'
        return
    fi
    differing_units x86_64-w64-mingw32-gcc -std=c11 $prototypes -O2
    level=-O0 # whether they compile and link: warnings that need optimization are the same as elsewhere
    ! has wine || level=-O2
    cell 'test_kvprim for Windows' x86_64-w64-mingw32-gcc $test_kvprim $level $warnings -static \
        -o "$build/test_kvprim.exe"
    cell '02_kv_replay for Windows' x86_64-w64-mingw32-gcc -I. examples/02_kv_replay/kv_replay.c -std=c11 $level \
        -pthread $warnings -static -o "$build/02_kv_replay.exe"
    group 'programs for Windows'
    if has wine; then
        program 'test_kvprim on Windows (wine)' wine "$build/test_kvprim.exe"
    else
        skip_tests tests/core/test_kvprim.c 'no wine'
    fi
}

systems()
{
    for cc in gcc clang; do
        native='-O3 -march=native'
        [ $cc != gcc ] || native="$native -flto" # once: it adds a third to the compiler's time
        has $cc && works $cc $native || continue
        cell "test_kvprim, $cc $native" $cc $test_kvprim $native -o "$build/test_native"
        group "test_kvprim compiled for this processor, $cc"
        program "test_kvprim, $cc $native" "$build/test_native"
    done
    for_aarch64
    for_windows
}
