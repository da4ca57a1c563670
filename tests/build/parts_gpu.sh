# SPDX-License-Identifier: MIT
# The parts for kernels and collectives. parts.sh reads this file, and defines cell, group, program and skip.

# ---- what several parts use ----

# frugally NVCC...: compiles kernels; none of them may use the stack.
frugally()
{
    "$@" -Xptxas -v $strict >"$build/ptxas" 2>&1 || { cat "$build/ptxas"; return 1; }
    grep 'bytes stack frame' "$build/ptxas" >"$build/stacks" || return 1
    ! grep -v ' 0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads' "$build/stacks"
}

# kernels_for ARCH...: compiles those of $build/kernels.cu, sets newest to the last one that this nvcc knows, and leaves
# its PTX in $build/kept.
kernels_for()
{
    newest=75
    rm -rf "$build/kept" && mkdir "$build/kept"
    for arch; do
        case $arch in 86 | 89 | 100) less=-DKVPRIM_NO_CONVERT ;; *) less= ;; esac # conversions: one of each family
        if $NVCC --list-gpu-arch | grep -q "^compute_$arch\$"; then
            cell "kernels for sm_$arch, no stack and no spills" frugally $NVCC -std=c++17 -O3 -arch=sm_$arch -I. \
                $less $nccl_flags --keep --keep-dir "$build/kept" -cubin "$build/kernels.cu" \
                -o "$build/kernels_sm_$arch.cubin"
            newest=$arch
        else
            skip "kernels for sm_$arch: this nvcc does not know it"
        fi
    done
}

# assembled_for PTX ARCH...: no kernel may use the stack there either.
assembled_for()
{
    ptx=$1
    shift
    for arch; do
        if $NVCC --list-gpu-arch | grep -q "^compute_$arch\$"; then
            cell "kernels for sm_$arch, no stack and no spills" frugally $NVCC -arch=sm_$arch -cubin "$ptx" \
                -o "$build/kernels_sm_$arch.cubin"
        else
            skip "kernels for sm_$arch: this nvcc does not know it"
        fi
    done
}

# newest_asked ARCH HEADER: it asks for this value of __CUDA_ARCH__, and for no larger one.
newest_asked()
{
    [ "$(grep -o '__CUDA_ARCH__ [<>=]* [0-9]*' "$2" | awk '{ print $3 }' | sort -n | tail -n 1)" -eq "$1" ]
}

# sass CUBIN [PTX]: checks it as `make sass` does. Without cuobjdump, only whether the kernels in PTX for sm_90 or newer
# wait for the one before.
sass()
{
    if ! has python3; then
        skip "SASS of $1: no python3"
    elif tool cuobjdump '' >/dev/null 2>&1; then
        cell "SASS of $1" python3 tests/profile/profile.py sass "$1"
        group "SASS: $(tail -n 1 "$build/log")"
    else
        skip "SASS of $1: no cuobjdump"
        [ -n "${2-}" ] || return 0
        cell 'waits in PTX' python3 tests/profile/profile.py ptx "$2"
        group 'kernels wait for the one before, PTX'
    fi
}

# weighs CUBIN: its kernels keep within their budget, which is of one version's code.
weighs()
{
    if ! $NVCC --version | grep -q 'release 13\.0,'; then
        skip "weight of $1: the budget is of nvcc 13.0"
    elif has python3; then
        cell "weight of $1" python3 tests/profile/weight.py check "$1"
        group 'weight of kernels'
    else
        skip "weight of $1: no python3"
    fi
}

# ---- nccl ----

# meets_once PTX: in sm_90's kernels for norms, each meeting of a block is one place in the code, as CUDA asks and
# synccheck checks. The numbers are the barriers of each form: of its turn, sum, scale and cluster.
meets_once()
{
    awk '
        /[.]entry/ {
            form = match($0, /kvpn_norm_form[0-3]/) ? substr($0, RSTART + 14, 1) + 1 : /kvpn_norm_kernel/ ? 5 : 0
            kernels[form]++
        }
        /bar[.]sync|cluster[.]arrive/ { barriers[form]++ }
        END {
            split("2 3 5 8 2", expected)
            for (form = 1; form <= 5; form++)
                if (barriers[form] != expected[form] * kernels[form] || !kernels[form]) {
                    print "form " form - 1 ": " barriers[form] " barriers in " kernels[form] " kernels"
                    exit 1
                }
        }' "$1"
}

# lacks_norms COMPILER...: the unit's object has kernels, but none of norms.
lacks_norms()
{
    "$@" -c "$build/kernels.cu" -o "$build/unit.o" && nm "$build/unit.o" >"$build/names" || return 1
    grep -q 'kvpn_kernel' "$build/names" && ! grep 'kvpn_\(few\|norm\)_kernel' "$build/names"
}

# nccl_emulated FLAGS [quick]: runs the kernels of kvprim_nccl.h on the CPU.
nccl_emulated()
{
    flags=$1
    shift
    if ! cxx_with $flags; then
        skip_tests tests/nccl/test_nccl_emulated.cpp "no C++ compiler with $flags"
        skip_tests tests/nccl/test_norm_emulated.cpp "no C++ compiler with $flags"
        return
    fi
    case $flags in *thread*) by=threads ;; *) by=address ;; esac
    for name in test_nccl_emulated test_norm_emulated; do
        cell "$name, $cxx $flags" once "build/${name}_$by" $cxx -std=c++17 -Wall -Wextra $flags -I. \
            tests/nccl/$name.cpp -pthread
        group "$name compiled, $cxx $flags"
        program "$name, $by $*" $launcher "build/${name}_$by" "$@"
    done
}

# nccl_life FLAGS: runs a communicator's life over fakes of CUDA and NCCL.
nccl_life()
{
    if ! compiler_with $1; then
        skip_tests tests/nccl/test_nccl_life.c "no C compiler with $1"
        return
    fi
    linked_sanitized tests/nccl/test_nccl_life.c "$1" $warnings $system -o "$build/test_nccl_life"
    group "test_nccl_life compiled, $cc $1"
    program 'test_nccl_life' env TSAN_OPTIONS=history_size=7 $launcher "$build/test_nccl_life"
}

# Prints how to link with NCCL_LIBRARY and CUDA's runtime, from their folders.
nccl_libraries()
{
    runtime=
    for folder in "$CUDA_INCLUDE/../lib64" "$CUDA_INCLUDE/../lib" /usr/lib/x86_64-linux-gnu \
        /usr/lib/aarch64-linux-gnu; do
        [ -n "$runtime" ] || [ ! -e "$folder/libcudart.so" ] || runtime=$folder
    done
    [ -n "$runtime" ] || return 1
    echo "$NCCL_LIBRARY -L$runtime -lcudart -Wl,--disable-new-dtags,-rpath,$(dirname "$NCCL_LIBRARY"),-rpath,$runtime"
}

# Compiles where compilers warn as they do for the other headers.
nccl_implemented()
{
    unit implemented_nccl "$implement" '#include "kvprim_nccl.h"'
    for compiler in 'gcc -std=c11' 'clang -std=c11' 'g++ -x c++ -std=c++11' 'g++ -x c++ -std=c++20' \
        'clang++ -x c++ -std=c++17'; do
        has "${compiler%% *}" || continue
        for flag in -DKVPRIM_OTHER -DKVPRIM_STATIC; do
            cell "implementation, $compiler $flag" $compiler $warnings $flag -I. $system \
                -c "$build/implemented_nccl.c" -o "$build/unit.o"
        done
        case $compiler in *c++*) continue ;; esac # in C++ CUDA's own headers leave symbols
        has nm || continue
        cell "exports only kvprim_*, $compiler" exports_only '^kvprim_' "$build/implemented_nccl.c" \
            $compiler $system
    done
    group 'implementation of kvprim_nccl.h'
}

# Compiles with NCCL's headers of other versions. nvcc only takes the oldest, as the kernels need nothing of NCCL.
nccl_versions()
{
    versions='2.19 2.21 2.24 2.27 2.28 2.29 2.30'
    if ! has python3 || ! python3 tests/nccl/nccl_headers.py build/nccl_headers $versions >"$build/folders"; then
        skip "kvprim_nccl.h with the headers of NCCL $versions: no python3, or PyPI is out of reach"
        return
    fi
    unit nccl_version "$implement" '#include "kvprim_nccl.h"' '#if NCCL_MINOR != MINOR' '#error another nccl.h' '#endif'
    while read -r folder; do
        for compiler in "$CC -std=c11" "$CXX -x c++ -std=c++11"; do
            ! has "${compiler%% *}" || cell "$compiler, $folder" $compiler $warnings -DMINOR="${folder##*.}" -I. \
                -isystem "$folder" $(system_headers "$CUDA_INCLUDE") -fsyntax-only "$build/nccl_version.c"
        done
    done <"$build/folders"
    folder=build/nccl_headers/2.19 # included by path: nvcc searches its own folder first
    [ -z "$NVCC" ] || ! has "$CXX" || cell "$NVCC, $folder" $NVCC -x cu -std=c++17 -arch=compute_90 $parsed \
        -DKVPRIM_NO_KERNELS $strict -DMINOR=19 -I. -include $folder/nccl.h -c "$build/nccl_version.c" -o "$build/unit.o"
    group "kvprim_nccl.h with the headers of NCCL $versions"
}

nccl_programs()
{
    cell 'test_nccl in C' $CC -std=c11 $warnings -I. $system tests/nccl/test_nccl.c $libraries -lm -o "$build/test_nccl"
    cell 'example 06 in C' $CC -std=c11 $warnings -I. $system examples/06_allreduce.c $libraries -lpthread \
        -o "$build/06_allreduce"
    ! has "$CXX" || cell 'counted.cu in C++' $CXX -x c++ -std=c++17 $warnings -I. $system -fsyntax-only \
        tests/nccl/counted.cu
    if has mpicc; then
        cell 'example 06 for MPI' mpicc -std=c11 $warnings -I. $system examples/06_allreduce_mpi.c $libraries \
            -o "$build/06_allreduce_mpi"
    else
        skip 'example 06 for MPI: no mpicc'
    fi
    group "test_nccl and examples compiled, $CC"
    program 'test_nccl' "$build/test_nccl"
}

# lacks TEXT FILE
lacks()
{
    [ -f "$2" ] && ! grep -q "$1" "$2"
}

nccl_cuda()
{
    if [ -z "$NVCC" ] || ! has "$CXX" || [ -z "$NCCL_INCLUDE" ] || [ -z "$NCCL_LIBRARY" ]; then
        skip_tests tests/nccl/test_nccl.c \
            'no nvcc or C++ compiler for it, no nccl.h or libnccl.so.2 (CUDA_HOME, NCCL_HOME)'
        return
    fi
    cu="$NVCC -x cu -std=c++17 -arch=sm_90 -I. $nccl_flags"
    read="$NVCC -x cu -std=c++17 -I. $nccl_flags"
    unit kernels "$implement" '#include "kvprim_nccl.h"'
    mv "$build/kernels.c" "$build/kernels.cu"
    # sm_80 does in one instruction what sm_75 does in several, for bf16 and fp16. So its source is only read, without
    # the host's, and sm_75's PTX is assembled for it; the shorter instructions are assembled for sm_90, below.
    kernels_for 75
    assembled_for "$build/kept/kernels.ptx" 80
    cell 'kernels for compute_80' $read -rdc=true -dlto -ltoir -arch=sm_80 "$build/kernels.cu" -o "$build/unit.ltoir"
    cell 'KVPRIM_NO_NORM' lacks_norms $read -arch=compute_80 $parsed $strict -DKVPRIM_NO_NORM
    # The implementation, for sm_90. Its own program is test_nccl; what uses only the API is linked with it.
    cell 'test_nccl and kernels for sm_90, no stack and no spills' frugally $cu --keep --keep-dir "$build/kept" \
        -c tests/nccl/test_nccl.c -o "$build/test_nccl.o"
    # Nothing in them depends on whether an architecture is newer than that, so its PTX is assembled for those.
    cell 'kernels of kvprim_nccl.h ask for no architecture after sm_90' newest_asked 900 kvprim_nccl.h
    assembled_for "$build/kept/test_nccl.ptx" 100 120
    group 'kernels of kvprim_nccl.h'
    cell 'PTX of kvprim_nccl.h' grep -x '[.]target sm_90' "$build/kept/test_nccl.ptx"
    cell 'warps of a block meet in one place' meets_once "$build/kept/test_nccl.ptx"
    group 'PTX of kvprim_nccl.h'
    sass "$build/test_nccl.o" "$build/kept/test_nccl.ptx"
    weighs "$build/kept/test_nccl.sm_90.cubin"
    cu="$cu $quickly" # what follows is only compiled
    cell 'test_nccl linked' $NVCC "$build/test_nccl.o" $nccl_link -o "$build/test_nccl_cuda"
    for source in tests/nccl/test_nccl_gpu.cu tests/nccl/test_nccl_faults.cu tests/bench/bench_nccl.cu; do
        cell "$source, nvcc" $cu $source -Xlinker "$build/test_nccl.o" $nccl_link -o "$build/program"
    done
    cell 'what ranks of one GPU have in place of NCCL' $cu tests/nccl/nccl_none.cpp -Xlinker "$build/test_nccl.o" \
        -o "$build/program" -lpthread
    # In KVPRIM_NO_EXCHANGE's program there are no such kernels.
    cell 'no_exchange, nvcc' $read -arch=compute_90 $parsed $strict tests/build/no_exchange.cu $nccl_link \
        -o "$build/no_exchange"
    cell 'kernels of parts in test_nccl' grep -q kvpn_parts_kernel "$build/test_nccl_cuda"
    cell 'none in no_exchange' lacks kvpn_parts_kernel "$build/no_exchange"
    cell 'bench_nccl with every way, nvcc' $read -arch=compute_90 $parsed $strict -DBENCH_WAYS \
        -c tests/bench/bench_nccl.cu -o "$build/unit.o"
    # As if this unit had implemented the headers already.
    implemented='-DKVPRIM_CORE_IMPLEMENTED -DKVPRIM_NCCL_IMPLEMENTED -DKVPRIM_NCCL_LAYOUT -DKVPRIM_NCCL_KERNELS'
    cell '14_handover, nvcc' $read $lto_90 $strict $implemented -DKVPRIM_CUDA_IMPLEMENTED \
        -c examples/14_handover/handover.cu -o "$build/unit.o"
    cell 'bench_handover, nvcc' $read $lto_90 $strict $implemented -DKVPRIM_CUDA_IMPLEMENTED \
        -c tests/bench/bench_handover.cu -o "$build/unit.o"
    cell '20_ring_unpack, nvcc' $read $lto_90 $strict $implemented -DKVPRIM_CUDA_IMPLEMENTED \
        -c examples/20_ring_unpack.cu -o "$build/unit.o"
    cell '06_allreduce, nvcc' $cu $implemented examples/06_allreduce.c -Xlinker "$build/test_nccl.o" $nccl_link \
        -o "$build/program"
    cell '17_all_reduce_norm, nvcc' $cu $implemented examples/17_all_reduce_norm.cu -Xlinker "$build/test_nccl.o" \
        $nccl_link -o "$build/program"
    cell 'bench_decode, nvcc' $read $lto_90 $strict -c tests/bench/bench_decode.cu -o "$build/unit.o"
    # It uses more than the API.
    cell 'tests/profile/profile.cu, nvcc' $NVCC -std=c++17 $only_ptx $no_kernels -I. $nccl_flags -DPROFILE_NCCL \
        tests/profile/profile.cu $nccl_link -o "$build/program"
    group "test_nccl and what runs on GPUs compiled, $NVCC"
    program 'test_nccl, CUDA' "$build/test_nccl_cuda"
    program 'without kernels that exchange' "$build/no_exchange"
}

# nccl_here SOURCE...: sets system and libraries, or skips these programs.
nccl_here()
{
    if [ -z "$NCCL_INCLUDE" ] || [ -z "$CUDA_INCLUDE" ] || [ -z "$NCCL_LIBRARY" ] || ! libraries=$(nccl_libraries); then
        for source; do
            skip_tests "$source" 'no nccl.h, libnccl.so.2, cuda_runtime.h or libcudart.so (NCCL_HOME, CUDA_HOME)'
        done
        return 1
    fi
    system=$(system_headers "$NCCL_INCLUDE" "$CUDA_INCLUDE")
    [ "$NCCL_INCLUDE" != /usr/include ] || system="-idirafter $CUDA_INCLUDE" # which may hold another nccl.h
}

# The plan, the control channel and the options of example 14.
handover()
{
    checks=$address
    compiler_with $checks || { cc=$CC checks=-O1 launcher=; }
    for name in core/test_handover nccl/test_handover_link; do
        linked_sanitized tests/$name.c "$checks" $warnings -o "$build/${name#*/}"
        group "${name#*/} compiled, $cc $checks"
        program "${name#*/}" $launcher "$build/${name#*/}"
    done
}

collectives()
{
    nccl_emulated "$address" $quick
}

nccl()
{
    handover
    nccl_here tests/nccl/test_nccl_life.c tests/nccl/test_nccl.c || return
    nccl_life "$address"
    nccl_programs
}

nccl_headers()
{
    nccl_emulated "$thread -O2" quick # whole in collectives
    nccl_here tests/nccl/test_nccl_life.c || return
    nccl_life "$thread"
    nccl_implemented
    nccl_versions
}

# ---- profile ----

profile()
{
    if has python3; then
        program 'what make ncu, sass, sanitize and the like print' python3 tests/profile/test_profile.py
    else
        skip_tests tests/profile/test_profile.py 'no python3'
    fi
}

# ---- kernels ----

kernels_of_all()
{
    printf '%s\n' "$implement" '#include "kvprim_cuda.cuh"' >"$build/kernels.cu"
    kernels_for 75 80 86 89 90 100 120
    cell 'PTX of the newest' grep -x "[.]target sm_$newest" "$build/kept/kernels.ptx"
    group "kernels and PTX, $NVCC"
}

# Builds the library as `make` does, in a folder of its own. Nothing is optimized, and no kernel compiled again.
library_of_cuda()
{
    rm -rf "$build/lib" && mkdir "$build/lib" &&
        ln -s "$PWD/kvprim.h" "$PWD/kvprim_cuda.cuh" "$PWD/Makefile" "$build/lib" &&
        NVCC_APPEND_FLAGS=-O0 MAKEFLAGS='' make -s -C "$build/lib" NVCC="$NVCC $parsed" CUDA_ARCH=compute_90 \
            CPPFLAGS=-DKVPRIM_NO_CONVERT \
            build/libkvprim_cuda.so
}

kernels()
{
    if [ -z "$NVCC" ]; then
        skip 'kernels: no nvcc (on PATH, under CUDA_HOME or in the usual places)'
        return
    fi
    kernels_of_all
    if has nm; then
        cell 'make build/libkvprim_cuda.so' library_of_cuda
        cell 'build/libkvprim_cuda.so exports only kvprim_*' exports_library "$build/lib/build/libkvprim_cuda.so" \
            kvprim_gather kvprim_cuda_gather kvprim_cuda_unpack
        group 'build/libkvprim_cuda.so'
    else
        skip 'what build/libkvprim_cuda.so exports: no nm'
    fi
    if [ "$newest" -ge 90 ]; then
        sass "$build/kernels_sm_90.cubin" "$build/kept/kernels.ptx"
        weighs "$build/kernels_sm_90.cubin"
        cell 'opponents of benchmarks' frugally $NVCC -std=c++17 -O3 -arch=sm_90 -I. -cubin tests/profile/opponents.cu \
            -o "$build/opponents.cubin"
        sass "$build/opponents.cubin"
    else
        skip "SASS and waits of kernels: $NVCC does not know sm_90"
    fi
}

# ---- programs ----

# implements SOURCE: it asks for the implementation before it includes the header.
implements()
{
    awk '$1 == "#define" && $2 == "KVPRIM_IMPLEMENTATION" { asked = 1 }
        /^#include ".*kvprim_cuda[.]cuh"/ { included = asked; exit }
        END { exit !included }' "$1"
}

# device_flags SOURCE: prints how nvcc compiles a source that is only compiled. To PTX takes half the time; ptxas checks
# what the source writes as assembly text.
device_flags()
{
    if grep -q '\<asm\>' "$1"; then
        echo "-arch=sm_90 $quickly"
    else
        echo "$only_ptx"
    fi
}

# says_why PROGRAM: without a GPU it fails, with CUDA's reason, such as a driver that is too old.
says_why()
{
    ! "$1" >"$build/said" && grep 'this program needs a CUDA device: .*\(CUDA driver\|CUDA-capable\)' "$build/said"
}

# Compiles what runs on a GPU, as programs or objects.
gpu_programs()
{
    cu="$NVCC -std=c++17 -I."
    # The headers' implementation takes most of the time that a program takes to compile. Those that use only the API
    # are compiled as if their unit had implemented the headers already, and linked with one that has. The part kernels
    # compiles what that has for a GPU.
    printf '%s\n' "$implement" '#include "kvprim_cuda.cuh"' >"$build/implementation.cu"
    cell 'implementation' $cu -arch=compute_90 $parsed -O1 $strict -c "$build/implementation.cu" \
        -o "$build/implementation.o"
    implemented='-DKVPRIM_CORE_IMPLEMENTED -DKVPRIM_CUDA_IMPLEMENTED'
    for source in examples/0[345]_*.cu examples/11_*.cu examples/1[56]_*.cu tests/bench/bench_[clpstu]*.cu; do
        level=-O1
        case $source in # at -O1 gcc warns that CUB may use what it has not set; benchmarks are only to compile
        examples/11_compact.cu | tests/bench/*) level=-O0 ;;
        esac
        cell "$source asks for the implementation" implements "$source"
        cell "$source" $cu $(device_flags "$source") $level $strict $implemented "$source" "$build/implementation.o" \
            -o "$build/program"
        case $gpus$source in 0examples/*) cell "$source without a GPU" says_why "$build/program" ;; esac
    done
    cell 'examples/19_warp_copy.cu' $cu $only_ptx -O1 $strict examples/19_warp_copy.cu -o "$build/program"
    [ "$gpus" -ne 0 ] || cell 'examples/19_warp_copy.cu without a GPU' says_why "$build/program"
    cell 'examples/09_bandwidth' $cu -arch=sm_90 $quickly -O1 $strict -c examples/09_bandwidth/bandwidth.cu \
        -o "$build/unit.o"
    [ -n "$NCCL_LIBRARY" ] || cell 'tests/profile/profile.cu' $cu $only_ptx -O1 $strict -DKVPRIM_NO_CONVERT \
        -c tests/profile/profile.cu -o "$build/unit.o" # with NCCL the part nccl_cuda compiles it
    cupti=$(ls "$CUDA_INCLUDE/cupti.h" "$CUDA_INCLUDE/../extras/CUPTI/include/cupti.h" 2>/dev/null | head -n 1)
    if [ -n "$cupti" ]; then
        cell 'examples/10_trace/trace.cu' $cu $only_ptx -O1 $strict $implemented -I"${cupti%/*}" \
            -c examples/10_trace/trace.cu -o "$build/unit.o"
    else
        skip 'examples/10_trace/trace.cu: no cupti.h'
    fi
    cell 'test_cuda' $cu $only_ptx -O0 tests/gpu/test_cuda.cu -o "$build/test_cuda"
    # KVPRIM_DEBUG changes no kernel, and what the host's compiler makes of it is never run.
    cell 'test_cuda with KVPRIM_DEBUG' $cu -arch=compute_90 $parsed -Xcompiler -fsyntax-only -DKVPRIM_DEBUG \
        -c tests/gpu/test_cuda.cu -o "$build/unit.o"
    # It has no kernels of its own, and waits for none.
    cell 'test_nvtx' $cu $only_ptx $no_kernels -O0 -x cu ${NCCL_LIBRARY:+-DTEST_NCCL} $nccl_flags \
        tests/build/test_nvtx.c $nccl_link -o "$build/test_nvtx"
    cell '02_kv_replay with CUDA' $CC -std=c11 -Wall -Wextra -Werror $(system_headers "$CUDA_INCLUDE") -I. \
        -DKV_REPLAY_CUDA -c examples/02_kv_replay/kv_replay.c -o "$build/unit.o"
    group "examples, tests and benchmarks for a GPU, $NVCC"
}

# Makes a place of NCCL's that is not beside CUDA, and sets home. Whatever includes its nccl.h has a mark.
make_home()
{
    home=$(mktemp -d) && mkdir "$home/include" "$home/lib" && ln -s "$NCCL_LIBRARY" "$home/lib/libnccl.so.2" &&
        printf '#pragma once\n#include "%s/nccl.h"\n%s\n' "$NCCL_INCLUDE" \
            'static const char kvprim_mark[] __attribute__((used)) = "the mark of this nccl.h";' \
            >"$home/include/nccl.h"
}

# at_home COMMAND...: runs it with NCCL_HOME set, and nothing else that says where NCCL is.
at_home()
{
    env -u NCCL_INCLUDE -u NCCL_LIBRARY MAKEFLAGS= NCCL_HOME="$home" "$@"
}

# is_of_home PROGRAM: it was compiled with the nccl.h of home, and finds the library there, not beside CUDA.
is_of_home()
{
    grep -q 'the mark of this nccl.h' "$1" || { echo "$1: another nccl.h"; return 1; }
    LD_LIBRARY_PATH=$(dirname "$NCCL_LIBRARY") ldd "$1" >"$build/named"
    grep "$home/lib/libnccl.so.2" "$build/named" || { cat "$build/named"; return 1; }
}

# The flags for nvcc and for C, for NCCL in home.
compiled_at_home()
{
    unit nccl_home '#include <nccl.h>' 'int main(void) { int version; return (int)ncclGetVersion(&version); }'
    (
        NCCL_INCLUDE=$home/include NCCL_LIBRARY=$home/lib/libnccl.so.2
        . tests/gpu/environment.sh
        $NVCC -x cu $nccl_flags "$build/nccl_home.c" $nccl_link -o "$build/nccl_home" && nccl_here &&
            $CC $system "$build/nccl_home.c" $libraries -o "$build/nccl_home_in_c"
    ) && is_of_home "$build/nccl_home" && is_of_home "$build/nccl_home_in_c"
}

found_at_home()
{
    at_home make -n nccl-test | grep "NCCL_INCLUDE='$home/include' NCCL_LIBRARY='$home/lib/libnccl.so.2'"
}

# Builds it as its two builds do: without NCCL, and with an NCCL_HOME that is not beside CUDA. Nothing is optimized, as
# nvcc takes the last -O; other parts assemble the kernels.
engine_built()
{
    export NVCC_APPEND_FLAGS=-O0
    home= less="$NVCC $parsed $no_kernels"
    cell 'examples/07_engine, NCCL=no' make -C examples/07_engine CC="$CC" NVCC="$less" NCCL=no CUDA_ARCH=compute_90 \
        BUILD="../../$build/engine_alone"
    if [ -n "$NCCL_LIBRARY" ]; then
        cell 'an NCCL_HOME' make_home
        cell 'NCCL_HOME, Makefile' found_at_home
        cell 'NCCL_HOME, nvcc and C' compiled_at_home
        cell 'examples/07_engine, NCCL_HOME' at_home make -C examples/07_engine CC="$CC" \
            NVCC="$less" CUDA_ARCH=compute_90 BUILD="../../$build/engine"
        cell 'examples/07_engine, of NCCL_HOME' is_of_home "$build/engine/engine"
    fi
    if has cmake; then
        rm -rf "$build/cmake" # CMake remembers where the sources were
        cell 'examples/07_engine, CMake' at_home CC="$CC" CUDACXX="$NVCC" \
            CUDAFLAGS="$parsed $no_kernels" cmake -S examples/07_engine -B "$build/cmake" \
            -DCMAKE_CUDA_ARCHITECTURES=90-virtual
        cell 'examples/07_engine, built by CMake' cmake --build "$build/cmake"
        [ -z "$home" ] || cell 'examples/07_engine by CMake, of NCCL_HOME' is_of_home "$build/cmake/engine"
    else
        skip 'examples/07_engine by CMake: no cmake'
    fi
    [ -z "$home" ] || rm -rf "$home"
    unset NVCC_APPEND_FLAGS
    group "NCCL_HOME and examples/07_engine, $NVCC"
}

programs()
{
    if [ -z "$NVCC" ]; then
        skip_tests tests/gpu/test_list.h 'no nvcc (on PATH, under CUDA_HOME or in the usual places)'
        skip_tests tests/build/test_nvtx.c 'no nvcc'
        return
    fi
    gpu_programs
    engine_built
    program 'test_cuda, here or without a GPU' "$build/test_cuda"
    program 'test_nvtx, CUDA' "$build/test_nvtx"
    if has python3 && python3 -c 'import torch' >/dev/null 2>&1; then
        cell 'examples/python builds with nvcc' env NVCC="$NVCC" KVPRIM_CUDA_ARCH=90 \
            python3 examples/python/build_backend.py "$build/python"
        program 'examples/python' env PYTHONPATH="$build/python" python3 examples/python/tests/test_kvprim.py
        program 'engines of examples/python' env PYTHONPATH="$build/python" \
            python3 examples/python/tests/test_engines.py
        program 'collectives of examples/python' env PYTHONPATH="$build/python" \
            python3 examples/python/tests/test_collectives.py
    else
        skip 'examples/python with nvcc: no python3, or it has no torch'
    fi
}
