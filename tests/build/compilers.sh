# SPDX-License-Identifier: MIT
# The part compilers of tests/build/parts.sh, which reads this file: how variants are picked, KVPRIM_API, and other
# compilers than gcc, clang and nvcc. What this machine lacks comes from PyPI or Debian into build/, if they answer.

# pip COMMAND...
pip()
{
    python3 -m pip "$@" -q --no-deps --retries 1 --timeout 20 --disable-pip-version-check
}

# debian FOLDER PACKAGE...: unpacks packages without installing them.
debian()
{
    folder=$1
    shift
    [ ! -e "$folder/done" ] || return 0
    has apt-get && has dpkg && rm -rf "$folder" && mkdir -p "$folder" || return 1
    (cd "$folder" && apt-get -o Acquire::Retries=0 -o Acquire::http::Timeout=20 download "$@") &&
        for package in "$folder"/*.deb; do dpkg -x "$package" "$folder" || return 1; done && touch "$folder/done"
}

# ---- which variant this processor gets ----

variants()
{
    isa=
    for cc in gcc clang; do
        has $cc && starts $cc || continue
        cell "isa, $cc" $cc -std=c11 $warnings -O1 "$units/isa.c" -o "$build/isa"
        program "isa, $cc" $launcher "$build/isa"
        isa=$(sed -n 's/^isa //p' "$build/log")
    done
    if [ -z "$isa" ] || ! has qemu-x86_64 || [ "$(uname -m)" != x86_64 ]; then
        skip 'variants of other processors: no gcc or clang, or no qemu-x86_64'
        return
    fi
    for cpu in max Haswell EPYC; do # what they have depends on qemu's version
        cell "isa, $cpu" qemu-x86_64 -cpu $cpu "$build/isa"
    done
    for cpu in SandyBridge Nehalem qemu64 max,-avx max,-avx2 max,-bmi1 max,-xsave; do
        cell "isa, $cpu" qemu-x86_64 -cpu $cpu "$build/isa" scalar
    done
    group 'variants of other processors (qemu)'
}

# ---- KVPRIM_API ----

# reaches API SOURCE COMPILER...: with this KVPRIM_API a library exports what KVPRIM_EXPORT exports, though -fvisibility
# hides all else.
reaches()
{
    api=$1 source=$2
    shift 2
    for marks in -DKVPRIM_EXPORT "-DKVPRIM_API=$api"; do
        "$@" -shared -fPIC -fvisibility=hidden "$marks" "$source" -o "$build/marked.so" || return 1
        nm -D --defined-only "$build/marked.so" | grep -o ' T kvprim_.*' >"$build/names${marks%%=*}" || return 1
    done
    diff "$build/names-DKVPRIM_EXPORT" "$build/names-DKVPRIM_API"
}

# The same for Windows, where a library without a mark exports all functions, and one mark hides the others.
reaches_dll()
{
    for name in plain marked; do
        api=
        [ $name = plain ] || api=-DKVPRIM_EXPORT
        x86_64-w64-mingw32-gcc -std=c11 $warnings $api -shared "$units/implemented.c" -o "$build/$name.dll" &&
            x86_64-w64-mingw32-objdump -p "$build/$name.dll" | grep -o '\] .*kvprim_[a-z0-9_]*$' |
            sed 's/.* //' >"$build/$name" || return 1
    done
    [ -s "$build/plain" ] && diff "$build/plain" "$build/marked"
}

api()
{
    visible='__attribute__((visibility("default")))'
    for compiler in 'gcc -std=c11' 'clang -std=c11' 'g++ -x c++ -std=c++11' 'clang++ -x c++ -std=c++17'; do
        has "${compiler%% *}" && has nm || continue
        attribute=$visible
        case $compiler in *c++*) attribute='[[gnu::visibility("default")]]' ;; esac
        cell "kvprim.h, $compiler" reaches "$attribute" "$units/implemented.c" $compiler $warnings
        cell "KVPRIM_STATIC with KVPRIM_API, $compiler" exports_only '^caller$' tests/build/use.c $compiler -Werror \
            -DKVPRIM_STATIC -DKVPRIM_CORE_IMPLEMENTATION "-DKVPRIM_API=$visible"
    done
    ! has "$CXX" || ! has nm || cell 'kvprim_cuda.cuh' reaches "$visible" "$units/api_cuda.c" $CXX -x c++ -std=c++17
    if [ -n "$NCCL_INCLUDE" ] && [ -n "$CUDA_INCLUDE" ] && has nm; then
        cell 'kvprim_nccl.h' reaches "$visible" "$units/nccl.cu" $CC -x c -std=c11 \
            $(system_headers "$NCCL_INCLUDE" "$CUDA_INCLUDE")
    else
        skip 'KVPRIM_API of kvprim_nccl.h: no headers of CUDA or NCCL'
    fi
    ! has x86_64-w64-mingw32-gcc || cell 'KVPRIM_EXPORT for Windows' reaches_dll
    group 'KVPRIM_API reaches every function'
}

# ---- tcc ----

tiny()
{
    tcc=tcc
    if ! has tcc; then
        debian build/tcc tcc libtcc-dev >"$build/log" 2>&1 ||
            { skip 'tcc: not on this machine, and not from Debian'; return; }
        tcc="build/tcc/usr/bin/tcc -Bbuild/tcc/usr/lib/$(uname -m)-linux-gnu/tcc"
    fi
    works $tcc || { skip 'tcc: its programs do not run here'; return; }
    for unit in declared implemented static_copy no_simd twice late; do
        cell "$unit, tcc" $tcc -Wall -Werror -c "$units/$unit.c" -o "$build/unit.o"
    done
    cell 'a program by tcc' $tcc -Wall -Werror -DKVPRIM_CORE_IMPLEMENTATION tests/build/use.c tests/build/main.c \
        -o "$build/tcc"
    cell 'that program, run' "$build/tcc"
    group "$($tcc -v 2>&1 | head -n 1)"
}

# ---- 32-bit x86 ----

# Structures align int64_t to 4 there, and size_t has 32 bits.
i386()
{
    m32='gcc -m32'
    if ! has gcc || ! works $m32; then
        version=$(gcc -dumpversion 2>/dev/null) root=build/i386
        debian $root libc6-dev-i386 "lib32gcc-$version-dev" >"$build/log" 2>&1 ||
            { skip '32-bit x86: no gcc -m32, and no 32-bit C library from Debian'; return; }
        libraries=$root/usr/lib/gcc/x86_64-linux-gnu/$version/32
        m32="gcc -m32 -static -B$libraries/ -L$libraries -B$root/usr/lib32/ -L$root/usr/lib32"
        m32="$m32 -isystem $root/usr/include/x86_64-linux-gnu -isystem /usr/include/x86_64-linux-gnu"
        works $m32 || { skip '32-bit x86: its programs do not run here'; return; }
    fi
    compiled $m32 -std=c11 $prototypes
    cell 'test_kvprim for 32-bit x86' $m32 -std=c11 -Wall -Wextra -Werror -O1 -pthread tests/core/test_kvprim.c \
        -o "$build/test_i386"
    group 'gcc -m32'
    program 'test_kvprim on 32-bit x86' "$build/test_i386" quick
}

# ---- zig ----

zig_targets='x86_64-linux-gnu x86-linux-musl riscv64-linux-musl powerpc64-linux-musl aarch64-macos x86_64-macos
    x86_64-windows-gnu wasm32-wasi'

# zig_of VERSION: sets zig to a program that runs.
zig_of()
{
    zig=build/ziglang_$1/ziglang/zig
    ZIG_GLOBAL_CACHE_DIR=$PWD/build/zig_cache_$1 ZIG_LOCAL_CACHE_DIR=$PWD/build/zig_cache_$1
    export ZIG_GLOBAL_CACHE_DIR ZIG_LOCAL_CACHE_DIR
    [ -x $zig ] || { has python3 && pip install --no-compile --target "build/ziglang_$1" "ziglang==$1"; } \
        >"$build/log" 2>&1 || { skip "zig $1: no python3 with pip, or PyPI is out of reach"; return 1; }
}

# clang 17 warns of constants joined by && in C23, other versions do not.
clang_17()
{
    zig_of 0.12.1 || return
    clang="$zig cc -target x86_64-linux-gnu -fno-sanitize=all -std=c2x $prototypes"
    compiled $clang
    [ -z "$NCCL_INCLUDE" ] || [ -z "$CUDA_INCLUDE" ] || cell 'kvprim_nccl.h, clang 17, C23' $clang $warnings \
        $(system_headers "$NCCL_INCLUDE" "$CUDA_INCLUDE") -x c -c $units/nccl.cu -o "$build/unit.o"
    group "$($zig cc --version | head -n 1), C23"
}

zig()
{
    zig_of 0.17.1 || return
    for target in $zig_targets; do
        for unit in declared implemented static_copy; do
            cell "$unit, zig, $target" $zig cc -target "$target" -fno-sanitize=all -Wno-unused-command-line-argument \
                -std=c11 $warnings $prototypes -c "$units/$unit.c" -o "$build/unit.o"
        done
    done
    group "zig cc $($zig version)"
    # Linked by the machine's compiler: zig would first build a C library.
    [ "$isa" ] || { skip 'programs by zig: no gcc or clang'; return; }
    # The first has the implementation.
    for source in "$units/isa.c -Dmain=tests" tests/build/use.c tests/build/main.c; do
        object=$build/zig_$(basename "${source% *}" .c).o
        cell "$source, zig" $zig cc -target "$(uname -m)-linux-gnu" -O2 -c $source -o "$object"
    done
    cell 'link zig_use' $CC "$build/zig_use.o" "$build/zig_main.o" "$build/zig_isa.o" -o "$build/zig_use"
    cell 'run zig_use' "$build/zig_use"
    cell 'link zig_isa' $CC "$build/zig_isa.o" $run_tests -o "$build/zig_isa"
    group 'programs by zig'
    program 'isa, zig' "$build/zig_isa" "$isa"
}

# ---- clang as CUDA compiler ----

# CUDA 11.8: the headers that any clang for CUDA takes. A folder as --cuda-path wants it.
cuda_headers()
{
    [ ! -e build/cuda_11/done ] || return 0
    has python3 && rm -rf build/cuda_11 && mkdir -p build/cuda_11/bin build/cuda_11/lib64 || return 1
    pip download -d build/cuda_11 nvidia-cuda-nvcc-cu11==11.8.89 nvidia-cuda-runtime-cu11==11.8.89 || return 1
    for wheel in build/cuda_11/*.whl; do
        python3 -m zipfile -e "$wheel" build/cuda_11 || return 1
    done
    mkdir build/cuda_11/include && cp -R build/cuda_11/nvidia/cuda_runtime/include/. build/cuda_11/include &&
        cp -R build/cuda_11/nvidia/cuda_nvcc/include/. build/cuda_11/include && touch build/cuda_11/done
}

clang_cuda()
{
    has clang++ || { skip 'clang as CUDA compiler: no clang++'; return; }
    cuda_headers >"$build/log" 2>&1 ||
        { skip 'clang as CUDA compiler: no python3 with pip, or PyPI is out of reach'; return; }
    clang='clang++ -x cuda -std=c++17 -nocudalib --cuda-path=build/cuda_11 -isystem build/cuda_11/include'
    clang="$clang $nccl_flags -Wno-unknown-cuda-version ${warnings%-Wpedantic*} ${warnings#*-Wpedantic}"
    unit empty_cuda 'int empty;'
    for arch in sm_80 sm_90; do
        $clang --cuda-gpu-arch=$arch -fsyntax-only "$build/empty_cuda.c" >"$build/log" 2>&1 ||
            { skip "clang as CUDA compiler for $arch: $(clang++ --version | head -n 1) does not know it"; continue; }
        cell "kvprim_cuda.cuh, $arch, kernels" $clang --cuda-gpu-arch=$arch --cuda-device-only -O1 -S \
            "$units/cuda.cu" -o "$build/kernels.ptx"
        cell "kvprim_cuda.cuh, $arch, host" $clang --cuda-gpu-arch=$arch --cuda-host-only -c "$units/cuda.cu" \
            -o "$build/unit.o"
        [ -z "$NCCL_INCLUDE" ] ||
            cell "kvprim_nccl.h, $arch" $clang --cuda-gpu-arch=$arch -fsyntax-only "$units/nccl.cu"
    done
    group "clang as CUDA compiler, $(clang++ --version | head -n 1)"
}

compilers()
{
    variants
    api
    tiny
    i386
    clang_17
    zig
    clang_cuda
}
