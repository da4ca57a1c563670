# SPDX-License-Identifier: MIT
# The parts readme, callers and callers_cuda of tests/build/parts.sh, which reads this file: programs as users write
# them.

# ---- readme ----

# What the pages may name: targets of make, files, and names in the headers.
target_exists()
{
    # What a target needs may be missing here. Only the answer that there is no such target counts, or that it does
    # nothing. The GPU is a fake: without one make stops before it looks for the target.
    ! PATH=$PWD/$build/gpu:$PATH LC_ALL=C make -n A=a B=b NVCC=nvcc CXX=c++ "$1" 2>&1 |
        grep "No rule to make target\|Nothing to be done for .$1'"
}

file_exists()
{
    [ -e "$1" ] || [ -e "examples/$1" ] || [ -e "tests/$1" ] || [ -e "tests/results/$1" ]
}

# The program in kvprim.h's first comment, which must print what README.md says of examples/01_rows.c.
first_program()
{
    sed -n '/^       #define KVPRIM_IMPLEMENTATION$/,/^       }$/s/^       //p; /^\*\/$/q' kvprim.h >"$build/first.c"
    $CC -std=c11 $warnings -I. "$build/first.c" -o "$build/first" && shown=$("$build/first") && echo "$shown" &&
        [ -n "$shown" ] && grep -F "prints \`$shown\`" README.md
}

# Compiles what the pages show as strictly as everything else, except for variables that only the reader uses.
readme()
{
    pages='examples/LAYOUTS.md examples/FORMATS.md'
    rm -rf "$build"/snippet_*.c "$build"/*.h "$build/named" "$build/fresh"
    mkdir -p "$build/gpu" && printf '#!/bin/sh\necho GPU 0\n' >"$build/gpu/nvidia-smi" &&
        chmod +x "$build/gpu/nvidia-smi"
    mkdir "$build/fresh" && ln -s "$PWD/kvprim.h" "$PWD/examples" "$build/fresh"
    cell 'README.md has at most 150 lines' [ "$(wc -l <README.md)" -le 150 ]
    cell 'lines of the pages' narrow README.md $pages tests/README.md tests/results/FIGURES.md
    cell 'the pages have snippets, and end them' sh tests/build/readme.sh "$build" README.md $pages
    for source in "$build"/snippet_*.c; do
        cell "README.md's ${source##*/}" $CC -std=c11 $warnings -Wno-unused -Wno-unused-parameter -I. -c "$source" \
            -o "$build/unit.o"
    done
    for name in layouts formats; do
        cell "what README.md and the page of $name show" $CC -std=c11 $warnings -Wno-unused-function -I. -I"$build" \
            tests/build/$name.c -o "$build/$name"
        cell "what README.md and the page of $name show, run" "$build/$name"
    done
    cell "kvprim.h's first program" first_program
    group 'snippets, layouts and formats of README.md and its pages'
    cell 'the pages name something' [ -s "$build/named" ]
    while read -r kind what; do
        case $kind in
        command) cell "pages: $what" sh -c "cd '$build/fresh' && $CC ${what#cc }" ;;
        program) cell "pages: $what" sh -c "MAKEFLAGS= make -s '${what%% *}' && $what" ;;
        target) cell "pages: make $what" target_exists "$what" ;;
        file) cell "pages: $what" file_exists "$what" ;;
        symbol) cell "pages: $what" grep -qw "$what" $headers ;;
        preset) cell "pages: $what" grep -q "{\"$what\"," kvprim.h ;;
        esac
    done <"$build/named"
    group 'what README.md and its pages name exists'
}

# ---- callers: units and languages ----

# linked NAME LINKER OBJECT...: links a program of main.c and callers, which must find nothing wrong.
linked()
{
    binary=$build/$1 linker=$2
    shift 2
    cell "link $binary" $linker "$@" -pthread -o "$binary"
    cell "run $binary" "$binary"
}

use=tests/build/use.c c="$CC -std=c11" cxx="$CXX -x c++ -std=c++17"
static='-DKVPRIM_STATIC -DKVPRIM_CORE_IMPLEMENTATION'

callers_in_c()
{
    cell 'main in C' $c -c tests/build/main.c -o "$build/main.o"
    cell 'implementation in C' $c -c $units/implemented.c -o "$build/implemented_c.o"
    cell 'caller in C' $c -c $use -o "$build/caller_c.o"
    linked two_units "$CC" "$build/main.o" "$build/caller_c.o" "$build/implemented_c.o"
    cell 'macro from the command line' $c -DKVPRIM_CORE_IMPLEMENTATION -c $use -o "$build/caller_one.o"
    linked one_unit "$CC" "$build/main.o" "$build/caller_one.o"
    cell 'no SIMD' $c -DKVPRIM_NO_SIMD -DKVPRIM_CORE_IMPLEMENTATION -c $use -o "$build/caller_no_simd.o"
    linked no_simd "$CC" "$build/main.o" "$build/caller_no_simd.o"
    cell 'no keys' $c -DKVPRIM_NO_KEYS -DKVPRIM_CORE_IMPLEMENTATION -c $use -o "$build/caller_no_keys.o"
    linked no_keys "$CC" "$build/main.o" "$build/caller_no_keys.o"
    cell 'no layouts' $c -DKVPRIM_NO_LAYOUTS -DKVPRIM_CORE_IMPLEMENTATION -c $use -o "$build/caller_no_layouts.o"
    linked no_layouts "$CC" "$build/main.o" "$build/caller_no_layouts.o"
    cell 'no fetch' $c -DKVPRIM_NO_FETCH -DKVPRIM_CORE_IMPLEMENTATION -c $use -o "$build/caller_no_fetch.o"
    linked no_fetch "$CC" "$build/main.o" "$build/caller_no_fetch.o"
    cell 'words that others define' $c -DSIZE=1 -DARGUMENT=2 -DUNSUPPORTED=3 -DOVERLAP=4 -DBOUNDS=5 -Dsmall=char \
        -DERROR=8 -DCHECK=9 -DKVPRIM_CORE_IMPLEMENTATION -c $use -o "$build/caller_words.o"

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
    cell 'implementation in C++' $cxx -c $units/implemented.c -o "$build/implemented_cxx.o"
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
            cell "descriptors in C++$standard, $compiler" $compiler -std=c++$standard $warnings \
                -x c++ -c $use -o "$build/cxx.o"
        done
        linked cxx_descriptors $compiler "$build/main.o" "$build/cxx.o" "$build/implemented_c.o"
        group "descriptors in C++11 to C++20, $compiler"
    done
}

# ---- callers: promises to compiler and linker ----

# warns_of_all SOURCE COMPILER...: each line that begins with a call ignores a status, and must warn.
warns_of_all()
{
    source=$1
    shift
    "$@" -Wunused-result -c "$source" -o "$build/unit.o" >"$build/warned" 2>&1
    [ "$(grep -c 'warning: ignoring return value' "$build/warned")" -eq "$(grep -c '^ *kvprim_.*;$' "$source")" ] &&
        return
    cat "$build/warned"
    return 1
}

# other_version: puts the headers into $build/other as version 0.77.0, and each of ours beside that kvprim.h.
other_version()
{
    rm -rf "$build/other" "$build/mixed" && mkdir "$build/other" "$build/mixed" || return 1
    for header in $headers; do
        sed 's/^\(#define KVPRIM_VERSION_MINOR\) .*/\1 77/; s/\(KVPRIM_VERSION != \)[0-9]*/\17700/' $header \
            >"$build/other/$header" && ! cmp -s $header "$build/other/$header" && cp $header "$build/mixed" || return 1
    done
    cp "$build/other/kvprim.h" "$build/mixed"
}

# refuses_version COMPILER...: $build/version.c stops with an #error about versions.
refuses_version()
{
    ! "$@" -fsyntax-only "$build/version.c" 2>"$build/errors" || { echo 'compiles'; return 1; }
    cat "$build/errors"
    grep -qi '#error.*version' "$build/errors"
}

# versions COMPILER...: a header and another version of it or of kvprim.h, in one unit.
versions()
{
    for header in $headers; do
        unit version "#include \"$PWD/$header\"" "#include \"other/$header\""
        cell "$header of two versions, $*" refuses_version "$@"
        unit version "#include \"other/$header\"" "#include \"other/$header\""
        cell "$header of another version, $*" "$@" -fsyntax-only "$build/version.c"
        unit version "#include \"mixed/$header\""
        [ $header = kvprim.h ] || cell "$header and another kvprim.h, $*" refuses_version "$@"
    done
}

# own_copies COMPILER...: two shared libraries with copies of other versions, in one process.
own_copies()
{
    less='-DKVPRIM_NO_KEYS -DKVPRIM_NO_FETCH -DKVPRIM_NO_LAYOUTS' # to compile
    "$@" -shared -fPIC $less -I. -DVERSION_OF=version_of_ours $units/copy.c -o "$build/libours.so" &&
        "$@" -shared -fPIC $less -I"$build/other" -DVERSION_OF=version_of_other $units/copy.c -o "$build/libother.so" &&
        "$@" -I. -DOTHER_VERSION=7700 $units/copies.c -L"$build" -lours -lother \
            -Wl,-rpath,"$PWD/$build" -o "$build/copies" && "$build/copies"
}

refuses_fast_math()
{
    "$@" 2>&1 >"$build/unit.ii" | grep '#error.*-ffast-math'
}

# Conversions need IEEE 754, and so does a unit that implements them; others may do without, and so may GPU code.
fast_math()
{
    for flags in -ffast-math -Ofast -ffinite-math-only; do
        cell "$flags, $*" refuses_fast_math "$@" $flags -E $units/implemented.c
        cell "$flags in a caller, $*" "$@" $flags $warnings -fsyntax-only $units/declared.c
    done
}

# knows_structs: kvprim_sizeof knows each public structure of kvprim.h and kvprim_cuda.cuh.
knows_structs()
{
    {
        printf '#include "%s"\n' kvprim_cuda.cuh stdio.h
        echo 'int main(void) { int wrong = 0;'
        sed -n 's/^typedef struct \(kvprim_[a-z_]*\) {$/wrong += kvprim_sizeof("\1") != sizeof(\1) \&\& puts("\1");/p' \
            kvprim.h kvprim_cuda.cuh
        echo '    return wrong; }'
    } >"$build/structs.c"
    [ "$(grep -c kvprim_sizeof "$build/structs.c")" -ge 17 ] &&
        $c $warnings -I. "$build/structs.c" "$build/implemented_c.o" -o "$build/structs" && "$build/structs"
}

# names_what_died COMMAND...: each test that fails or ends the program is named, and those after it run.
names_what_died()
{
    "$@" >"$build/said"
    [ $? -eq 1 ] && printf '%s\n' 'ok first' '  signal 6 ended it' 'FAIL aborts: 1 faults' \
        '  line 13: false: counts->passed == 0' '  exit code 0 ended it' 'FAIL exits: 2 faults' 'ok last' \
        '2 passed, 2 failed, 0 skipped' | diff "$build/said" -
}

promises()
{
    cell 'headers of another version' other_version
    for compiler in 'gcc -std=c11' 'clang -std=c11' 'g++ -x c++ -std=c++17'; do
        has "${compiler%% *}" || continue
        cell "a status that is ignored warns, $compiler" warns_of_all $units/ignored.c $compiler
        cell "a status that may be ignored, $compiler" $compiler $warnings -c $units/may_ignore.c -o "$build/unit.o"
        versions $compiler
        cell "copies of two versions in two libraries, $compiler" own_copies $compiler
        fast_math $compiler
    done
    cell 'kvprim_sizeof knows every structure' knows_structs
    cell 'tests that die' $CC -std=c11 $warnings $units/dies.c -o "$build/dies"
    [ "$(uname)" != Linux ] || cell 'tests that die, run' names_what_died "$build/dies"
    group 'statuses, versions, copies, structures and tests that die'
}

# ---- callers: the example engine ----

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
    compiler_with $checks || { cc=$CC checks=-O1 launcher=; }
    cell "$engine without NCCL, no CUDA header" no_cuda_header $engine
    cell "$engine, no CUDA header" no_cuda_header $engine -DENGINE_NCCL
    linked_sanitized $engine "$checks" $warnings -DENGINE_NCCL tests/build/engine_host.c -o "$build/engine"
    for ranks in 1 3 4; do
        cell "engine, $ranks ranks, on the CPU" $launcher "$build/engine" --gpus $ranks --steps 70
    done
    cell 'engine, a gathered byte wrong' exits 1 env DAMAGE=1 $launcher "$build/engine" --gpus 1 --steps 1
    cell 'engine, a stored byte wrong' exits 1 env DAMAGE=2 $launcher "$build/engine" --gpus 2 --steps 1
    cell 'engine, a rank left out of the sum' exits 1 env DAMAGE=3 $launcher "$build/engine" --gpus 2 --steps 1
    cell 'engine, more GPUs than there are' exits 2 $launcher "$build/engine" --gpus 5
    group "examples/07_engine on the CPU, $cc $checks"
}

# ---- callers: the shared library ----

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
    cell 'make lib CFLAGS=-fno-such-flag' exits 2 lib_target CFLAGS=-fno-such-flag
    for debug in -DKVPRIM_DEBUG ''; do
        cell "make lib CPPFLAGS=$debug" lib_target CPPFLAGS=$debug CFLAGS=-O0
        cell 'a program of that library' $CC -std=c11 $warnings -DKVPRIM_EXPORT $units/fragments.c \
            "$build/lib/build/libkvprim.so" -Wl,-rpath,"$PWD/$build/lib/build" -o "$build/fragments"
        cell "the library, CPPFLAGS=$debug" exits "$([ -n "$debug" ] && echo 0 || echo 3)" "$build/fragments"
    done
    cell 'make lib gives its flags to nvcc' nvcc_flags
    group 'flags of make lib'
}

# Calls what `make lib` has built without nvcc from Python.
library()
{
    library=$build/lib/build/libkvprim_host.so
    if has nm; then
        cell "${library##*/} exports only kvprim_*" exports_library $library kvprim_gather kvprim_last_error
    else
        skip "what ${library##*/} exports: no nm"
    fi
    group 'shared library'
}

# python_modules MODULE...: python3 imports them.
python_modules()
{
    has python3 && python3 -c "import $(echo "$@" | tr ' ' ,)" >/dev/null 2>&1
}

# installed: makes the wheel of examples/python without nvcc, and installs it in a virtual environment of its own. It
# sees what is installed beside python3, but bare, its PATH, has no nvcc. Nothing is optimized: it takes half the time.
installed()
{
    rm -rf "$build/venv" "$build"/kvprim-*.whl
    printf '#!/bin/sh\nexec "$@" -O0\n' >"$build/plainly" && chmod +x "$build/plainly" || return 1
    plainly="'$PWD/$build/plainly'"
    (cd examples/python && KVPRIM_CUDA_ARCH=none CC="$plainly $CC" CXX="$plainly $CXX" python3 -c \
        'import build_backend, sys; build_backend.build_wheel(sys.argv[1])' "$OLDPWD/$build") &&
        python3 -m venv --without-pip "$build/venv" && python3 -m pip --python "$build/venv/bin/python3" install \
        -q --no-index --no-deps "$build"/kvprim-*.whl && python3 -c 'import sys; print(*sys.path[1:], sep="\n")' \
        >"$(echo "$build"/venv/lib/python3*/site-packages)/beside.pth" || return 1
    bare=$(echo "$PATH" | tr : '\n' | while read -r folder; do [ -e "$folder/nvcc" ] || printf '%s:' "$folder"; done)
}

# A folder of that name which is no package that was built here stays as it is.
others_folder()
{
    mkdir -p "$build/clones/kvprim" && echo notes >"$build/clones/kvprim/notes" || return 1
    if KVPRIM_CUDA_ARCH=none python3 examples/python/build_backend.py "$build/clones" 2>"$build/said"; then
        return 1
    fi
    grep -q 'clones/kvprim is there, but no package' "$build/said" && [ "$(cat "$build/clones/kvprim/notes")" = notes ]
}

# The package for Python. What its tests lack, such as torch, they say themselves.
package()
{
    where='import pip, venv, sysconfig; print(sysconfig.get_path("include"))'
    if ! has python3 || ! has "$CXX" || [ ! -e "$(python3 -c "$where")/Python.h" ]; then
        skip 'examples/python: no python3 with its headers, pip and venv, or no C++ compiler'
        return
    fi
    export PYTHONDONTWRITEBYTECODE=1
    cell 'wheel of examples/python, installed' installed
    cell 'examples/python, a folder that it did not build' others_folder
    for test in kvprim engines; do
        program "test_$test.py of examples/python, installed, on the CPU" env PATH="$bare" \
            "$build/venv/bin/python3" examples/python/tests/test_$test.py
    done
    if python_modules torch transformers; then
        cell 'examples/13_transformers on the CPU' "$build/venv/bin/python3" examples/13_transformers/run.py
    else
        skip 'examples/13_transformers: python3 has no torch or no transformers'
    fi
    unset PYTHONDONTWRITEBYTECODE
    group 'examples/python'
}

# ---- callers: targets of make ----

# leaves_results TARGET: without a GPU it fails, and leaves tests/results/ and what was measured as they are.
leaves_results()
{
    cat tests/results/* build/results/* 2>/dev/null | cksum >"$build/results"
    ! MAKEFLAGS= make -s "$1" NVCC="$NVCC" >"$build/said" 2>&1 && grep 'no GPU here' "$build/said" &&
        cat tests/results/* build/results/* 2>/dev/null | cksum | cmp - "$build/results"
}

# copies_results: `make results` fails where nothing was measured, and copies what was.
copies_results()
{
    rm -rf "$build/measured" && mkdir -p "$build/measured/tests/results" && cp Makefile "$build/measured" || return 1
    (cd "$build/measured" && ! MAKEFLAGS= make results && mkdir -p build/results && echo 1 >build/results/some.txt &&
        MAKEFLAGS= make results && cmp build/results/some.txt tests/results/some.txt)
}

# builds_for_two: programs for the GPU, the engine and the collectives are compiled for two architectures.
builds_for_two()
{
    two='-gencode arch=compute_80,code=sm_80 -gencode arch=compute_90,code=sm_90 -lineinfo'
    MAKEFLAGS= make -nB build/bench_cuda NVCC=nvcc CUDA_ARCH='sm_80 sm_90' | grep -e "$two" &&
        MAKEFLAGS= make -nB -C examples/07_engine NVCC=nvcc CUDA_ARCH='sm_80 sm_90' BUILD=nowhere | grep -e "$two" &&
        (CUDA_ARCH='sm_80 sm_90' && . tests/gpu/environment.sh && [ "$architectures -lineinfo" = " $two" ])
}

# runs_quoted: `make run` takes a trace with any name.
runs_quoted()
{
    name="it's a \"trace\".jsonl"
    head -n 2 examples/02_kv_replay/trace_small.jsonl >"$build/$name" &&
        MAKEFLAGS= make -s run DEVICE=cpu TRACE="$build/$name" | grep 'requests  *2 '
}

# builds_elsewhere: in a folder that BUILD= names, with a trace that is found from here.
builds_elsewhere()
{
    rm -rf "$build/it's else where" && MAKEFLAGS= make -s BUILD="$PWD/$build/it's else where" CFLAGS=-O0 DEVICE=cpu \
        ARGS='--requests 2' run build/01_rows build/18_step build/21_keys | grep 'requests  *2 ' &&
        "$build/it's else where/01_rows" && "$build/it's else where/18_step" && "$build/it's else where/21_keys" &&
        ! MAKEFLAGS= make -s BUILD="$build/it's else where" CFLAGS=-O0 LDFLAGS=--no-such build/01_rows &&
        ! MAKEFLAGS= make BUILD="$build/it's else where" clean && [ -x "$build/it's else where/02_kv_replay" ]
}

# named_architectures: without a GPU `make lib` and `make examples` name what they build for, as far as nvcc knows it.
named_architectures()
(
    mkdir -p "$build/tools" && printf '#!/bin/sh\necho compute_75\necho compute_90\necho compute_100\n' \
        >"$build/tools/nvcc" && printf '#!/bin/sh\necho "$GPU"\n' >"$build/tools/nvidia-smi" &&
        chmod +x "$build/tools/nvcc" "$build/tools/nvidia-smi" || return 1
    export MAKEFLAGS=
    PATH=$PWD/$build/tools:$PATH GPU= make -nB NVCC=nvcc lib examples >"$build/named" &&
        ! grep arch=native "$build/named" && grep 'libkvprim.so: .* sm_90 sm_100 (no GPU' "$build/named" &&
        grep 'code=sm_90 -gencode arch=compute_100,code=sm_100 .* -shared' "$build/named" &&
        grep 'examples for a GPU: built for sm_90 (no GPU' "$build/named" &&
        grep 'build/20_ring_unpack' "$build/named" && grep 'build/06_allreduce_mpi' "$build/named" || return 1
    PATH=$PWD/$build/tools:$PATH GPU='GPU 0: H200 (UUID: GPU-0)' make -nB NVCC=nvcc lib examples >"$build/named" &&
        grep 'arch=native .* -shared' "$build/named" && grep 'arch=native .*03_kv_store' "$build/named" &&
        ! grep 'sm_90\|no GPU' "$build/named"
)

# missing_homes: a CUDA_HOME without nvcc is an error, and `make lib` says what it leaves out without NCCL.
missing_homes()
{
    MAKEFLAGS= env -u NVCC make -n CUDA_HOME=/none lib 2>&1 | grep 'CUDA_HOME=/none: no bin/nvcc there' &&
        MAKEFLAGS= env -u NCCL_INCLUDE -u NCCL_LIBRARY make -n NVCC=nvcc NCCL_HOME=/none lib |
        grep "skip libkvprim_nccl.so: no nccl.h or no libnccl.so.2"
}

targets()
{
    cell 'make BUILD=' builds_elsewhere
    cell 'architectures without a GPU, and with one' named_architectures
    cell 'make CUDA_HOME=, NCCL_HOME=' missing_homes
    cell "make run TRACE=it's" runs_quoted
    if [ "$gpus" -eq 0 ]; then
        for target in gpu-test gpu-bench cuda-test cuda-bench convert-bench transfer-bench bandwidth sanitize engine \
            ncu ncu-source transformers; do
            cell "make $target without a GPU" leaves_results $target
        done
    fi
    cell 'make CUDA_ARCH of two' builds_for_two
    cell 'make results' copies_results
    group 'targets of make that measure'
}

callers()
{
    callers_in_c
    if has "$CXX"; then
        callers_in_cxx
    else
        skip 'units in C++: no C++ compiler'
    fi
    descriptors_in_cxx
    promises
    engine
    library_flags
    library
    package
    targets
}

# ---- callers_cuda ----

callers_of_cuda()
{
    if [ -n "$NVCC" ] && has "$CXX"; then
        cell 'CUDA unit' $NVCC $only_ptx -DKVPRIM_NO_CONVERT tests/build/cuda_unit.cu -o "$build/cuda_unit"
        cell 'run CUDA unit' "$build/cuda_unit"
        cell "-Xcompiler -ffast-math, $NVCC" refuses_fast_math $NVCC -E -Xcompiler -ffast-math $units/cuda.cu
        cell "--use_fast_math, $NVCC" $NVCC -E --use_fast_math $units/cuda.cu -o "$build/unit.ii"
        group "unit in CUDA, $NVCC"
    else
        skip 'unit in CUDA: no nvcc (on PATH, under CUDA_HOME or in the usual places), or no C++ compiler for it'
    fi

    if [ -n "$NCCL_INCLUDE" ] && [ -n "$CUDA_INCLUDE" ]; then
        cell 'next to nccl.h' $CC -std=c11 -Wall -Wextra -Werror $(system_headers "$NCCL_INCLUDE" "$CUDA_INCLUDE") \
            -c tests/build/nccl_unit.c -o "$build/unit.o"
        group "declarations next to $NCCL_INCLUDE/nccl.h"
    else
        skip "declarations next to NCCL's: no nccl.h (under NCCL_HOME or in the usual places) or no cuda_runtime.h"
    fi
}

ranges()
{
    if [ -z "$CUDA_INCLUDE" ] || [ ! -f "$CUDA_INCLUDE/nvtx3/nvToolsExt.h" ]; then
        skip "ranges of KVPRIM_NVTX: no nvtx3/nvToolsExt.h beside CUDA's headers"
        return
    fi
    for compiler in "$CC -std=c11 $prototypes" "${CXX:+$CXX -x c++ -std=c++17}"; do
        has "${compiler%% *}" || continue
        cell "test_nvtx, $compiler" $compiler $warnings -I. $(system_headers "$CUDA_INCLUDE") \
            tests/build/test_nvtx.c -ldl -o "$build/test_nvtx"
        program "test_nvtx, ${compiler%% *}" "$build/test_nvtx"
        has nm || continue
        cell "exports only kvprim_* and NVTX's, $compiler" \
            exports_only '^kvprim_|[Nn]vtx|gxx_personality|^__clang_call' $units/implemented.c $compiler -O0 \
            -DKVPRIM_NVTX $(system_headers "$CUDA_INCLUDE")
    done
    group 'ranges of KVPRIM_NVTX compiled'
}

callers_cuda()
{
    callers_of_cuda
    ranges
}
