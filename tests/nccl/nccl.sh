#!/bin/sh
# SPDX-License-Identifier: MIT
# usage: tests/nccl/nccl.sh test [quick]|bench|limits|handover|sanitize      from the top folder, by make's gpu-test,
# gpu-bench, nccl-limits, handover and sanitize; quick: fewer sizes and environments
#
# Needs NCCL and at least one GPU; otherwise it says what is missing. Builds the tests or the benchmarks of the
# collectives and runs them on 2 GPUs, and on more if there are so many: the benchmarks on 4 and 8; the tests on 3, 4
# and 8, and except for quick ones on 5, 6 and 7; limits on 3 to 8. With one GPU, tests run as two processes that share
# it, and as 2, 3, 4, 5 and 8 threads whose kernels run on it at the same time, without NCCL (nccl_ranks.h).
# compute-sanitizer's tools run on 2, 4 and 8 such threads. A program that hangs is killed after ten minutes. What the
# programs print also goes to build/results/, after the checksums of the headers.
#
# limits measures every way of each collective, and ends with the limits of kvprim_nccl.h and those that the times
# suggest, which can be pasted into its kvpn_limits_of.
#
# WORLDS, of test, bench and limits: on how many GPUs, each from 2 to 8, such as '3 5 8' or 2; of test with one GPU: how
# many threads. The result is then kept as nccl_test_3_5_8.txt, say, beside that of a whole run.
#
# Tests run as threads and as processes; on two GPUs also in the environments that engines set, with each libnccl.so.2
# that NCCL_OTHERS lists (files of other versions than the one they were built with), and in 3, 5 and 8 processes
# (quick: 8) that share the GPUs if there are fewer.

: "${NCCL_OTHERS=}" "${WORLDS=}"
quick=$2
. tests/gpu/environment.sh
if [ "$gpus" -eq 0 ]; then
    echo 'no GPU here: nvidia-smi lists none' >&2
    exit 1
fi
worlds='2 3 4 5 6 7 8' part=
most=$gpus
case $1 in
test)
    [ -z "$quick" ] || worlds='2 3 4 8' # 3: not a power of two, and fewer than the kernels for 4 allow
    [ "$gpus" -ne 1 ] || worlds='2 3 4 5 8' most=8
    ;;
bench) worlds='2 4 8' ;;
handover | sanitize) worlds=2 WORLDS= ;;
esac
for world in $WORLDS; do
    case $world in
    [2-8]) [ "$world" -gt "$most" ] || continue ;;
    esac
    echo "WORLDS='$WORLDS': each must be a number from 2 to 8, and at most that of the GPUs here, $gpus" >&2
    exit 1
done
WORLDS=$(echo $WORLDS) # run searches for them between single spaces
if [ -n "$WORLDS" ]; then
    worlds=$WORLDS
    part=$(printf '_%s' $WORLDS)
fi
least=2
case $1 in test | sanitize) least=1 ;; esac
if [ "$gpus" -lt $least ]; then
    echo "skip collectives: $gpus GPUs here, at least $least needed"
    exit 0
fi
if [ -z "$NVCC" ] || [ -z "$NCCL_INCLUDE" ] || [ -z "$NCCL_LIBRARY$(echo "$1" | grep sanitize)" ]; then
    echo 'skip collectives: no nvcc, no nccl.h or no libnccl.so.2 (under NCCL_HOME or in the usual places)'
    exit 0
fi

cuda="$NVCC -std=c++17 -O3 $architectures -lineinfo -I. $nccl_flags"

# build SOURCE [FLAG...]: compiles it as CUDA into build/. If that fails, no program of an older run is left.
build()
{
    source=$1 output=build/$(basename "${1%.*}")
    shift
    rm -f "$output"
    $cuda -x cu "$source" "$@" -o "$output" $nccl_link
}

# build_one TEST IMPLEMENTATION: links with nccl_none.cpp in place of NCCL, for threads that share a GPU.
build_one()
{
    rm -f "build/$1_one"
    $cuda -x cu "tests/nccl/$1.cu" tests/nccl/nccl_none.cpp -Xlinker "build/$2.o" -o "build/$1_one" -lpthread
}

# Compiles the implementation, which most programs link with.
build_implementation()
{
    printf '#include "%s"\n' kvprim_nccl.h tests/nccl/norm_numbers.h >build/kvprim_nccl.cu
    $cuda -DKVPRIM_IMPLEMENTATION -c build/kvprim_nccl.cu -o build/kvprim_nccl.o
}

# run WORLD COMMAND...: runs it on so many GPUs, if there are so many, and it is one of worlds or 1.
code=0
run()
{
    some=$(echo 0,1,2,3,4,5,6,7 | cut -c "1-$((2 * $1 - 1))")
    case " 1 $worlds " in
    *" $1 "*) [ "$1" -le "$gpus" ] || return 0 ;;
    *) return 0 ;;
    esac
    shift
    echo "== $*, GPUs $some"
    CUDA_VISIBLE_DEVICES=$some timeout -k 10 600 "$@" || code=1
}

# run_with LIBRARY COMMAND...: runs it with another libnccl.so.2. LD_PRELOAD would only skip a file that is missing.
run_with()
{
    library=$1
    shift
    if [ -f "$library" ]; then
        run 2 env LD_PRELOAD="$library" "$@"
    else
        echo "FAIL NCCL_OTHERS: no file $library"
        code=1
    fi
}

# Runs the tests with what engines and users set, and with other versions of NCCL. Own kernels must be on, except where
# GPUs may not write to each other.
environments()
{
    for setting in NCCL_CUMEM_ENABLE=0 NCCL_WIN_ENABLE=0 NCCL_COMM_BLOCKING=0 NCCL_P2P_DISABLE=1; do
        own=on
        [ $setting != NCCL_P2P_DISABLE=1 ] || own=off
        run 2 env $setting build/test_nccl_gpu $1 quick $own
    done
    for library in $NCCL_OTHERS; do
        run_with "$library" build/test_nccl_gpu $1 quick on
    done
}

build_handover()
{
    rm -f build/14_handover
    $cuda examples/14_handover/handover.cu -o build/14_handover $nccl_link
}

# Hands requests over whose sides differ in everything, through NVLink and sockets; some are cancelled, and either side
# dies.
handover_tests()
{
    differing='--layers 64 --heads 8 --to-layout hnd --to-page-rows 32 --chunk-bytes 1M'
    run 2 build/14_handover $differing --from-tp 4 --to-tp 2 --tokens 700 --requests 30 --cancel-every 5 --mode all
    run 2 build/14_handover $differing --from-tp 2 --to-tp 4 --tokens 300 --requests 10 --cancel-every 3 --sockets
    run 2 build/14_handover $differing --tokens 700 --requests 8 --timeout-ms 2000 --kill-at 30
    run 2 build/14_handover $differing --tokens 700 --requests 8 --timeout-ms 2000 --kill-at 30 --kill-side prefill \
        --stop
}

# Verifies many requests, and measures the ways by chunk size, between two GPUs and as between two machines.
run_handover()
{
    build_handover && build tests/bench/bench_handover.cu || return 1
    several='--requests 1000 --tokens 1024 --chunk-bytes 4M'
    run 2 build/14_handover $several --from-tp 4 --to-tp 2 --to-layout hnd --to-page-rows 64
    run 2 build/14_handover $several --from-tp 2 --to-tp 4 --from-layout hnd --cancel-every 4
    run 2 build/14_handover $several --head-bytes 2048 --heads 2 --mode straight
    handover_tests
    chunks=64M,512K,4M,8M,16M,32M,128M
    run 2 build/bench_handover 9 $chunks --mode all --requests 2
    run 2 build/bench_handover 9 $chunks --mode all --requests 2 --lanes 1 --to-layout hnd
    run 2 build/bench_handover 5 8M,1M,2M,4M --sockets --requests 2 --tokens 1024 --lanes 1
    run 2 build/bench_handover 5 8M,1M,2M,4M,16M,32M --sockets --requests 2 --tokens 1024
    return $code
}

# Runs the tests of faults where NCCL itself behaves differently.
faults_elsewhere()
{
    run 2 env NCCL_CUMEM_ENABLE=0 build/test_nccl_faults quick on
    for library in $NCCL_OTHERS; do
        run_with "$library" build/test_nccl_faults quick on
    done
}

# Runs the protocol of more ranks than there are GPUs. Processes that share a GPU take turns: this says nothing of time.
shared_tests()
{
    for ranks in $1; do
        [ "$ranks" -le "$gpus" ] || run 2 build/test_nccl_gpu processes "ranks=$ranks" quick on
    done
}

# Runs them as threads that share a GPU.
one_gpu_tests()
{
    for ranks in $worlds; do
        run 1 build/test_nccl_gpu_one "ranks=$ranks" $quick on
        run 1 build/test_nccl_faults_one "ranks=$ranks" $quick on
    done
}

run_tests()
{
    [ "$gpus" -eq 1 ] || build examples/06_allreduce.c &
    [ "$gpus" -eq 1 ] || build examples/20_ring_unpack.cu &
    [ "$gpus" -eq 1 ] || build_handover &
    build_implementation || code=1
    build examples/17_all_reduce_norm.cu -DKVPRIM_CORE_IMPLEMENTED -DKVPRIM_NCCL_IMPLEMENTED -DKVPRIM_NCCL_LAYOUT \
        -DKVPRIM_NCCL_KERNELS -Xlinker build/kvprim_nccl.o & # as if it had implemented the headers: in seconds
    build tests/nccl/test_nccl_gpu.cu -Xlinker build/kvprim_nccl.o &
    build tests/nccl/test_nccl_faults.cu -Xlinker build/kvprim_nccl.o &
    [ "$gpus" -ne 1 ] || build_one test_nccl_gpu kvprim_nccl &
    [ "$gpus" -ne 1 ] || build_one test_nccl_faults kvprim_nccl &
    wait # a program that does not compile is missing when it is run
    run 1 build/17_all_reduce_norm
    if [ "$gpus" -eq 1 ]; then
        one_gpu_tests
        [ -z "$part" ] || return $code
        run 1 build/test_nccl_gpu processes $quick on
        run 1 build/test_nccl_faults processes $quick on
        return $code
    fi
    run 2 build/20_ring_unpack
    for world in $worlds; do
        run "$world" build/06_allreduce
        run "$world" build/17_all_reduce_norm
        for kind in '' processes; do
            run "$world" build/test_nccl_faults $kind $quick on
            run "$world" build/test_nccl_gpu $kind $quick on
        done
    done
    handover_tests
    environments processes
    if [ -n "$quick" ]; then
        shared_tests 8
    else
        shared_tests '3 5 8'
        environments
        faults_elsewhere
    fi
    return $code
}

run_benches()
{
    cublas=
    [ ! -e "$CUDA_INCLUDE/cublas_v2.h" ] || cublas='-DBENCH_CUBLAS -lcublas'
    build_implementation || return 1
    build tests/bench/bench_nccl.cu -Xlinker build/kvprim_nccl.o $cublas &
    build tests/bench/bench_decode.cu -Xlinker build/kvprim_nccl.o &
    wait # a program that does not compile is missing when it is run
    for world in $worlds; do
        run "$world" build/bench_nccl
        run "$world" build/bench_decode
    done
    return $code
}

# Ends with the limits of all worlds, one below the other.
run_limits()
{
    build tests/bench/bench_nccl.cu -DBENCH_WAYS || return 1
    for world in $worlds; do
        run "$world" build/bench_nccl --only ways
    done
    lines=$(sed -n '/^limits of /p' "$result")
    printf '\n%s\n' "$lines"
    return $code
}

# Runs compute-sanitizer's four tools. The implementation also says which kernels were launched.
run_sanitizers()
{
    $cuda -c tests/nccl/counted.cu -o build/kvprim_nccl_counted.o &&
        build_one test_nccl_gpu kvprim_nccl_counted || return 1
    CUDA_VISIBLE_DEVICES=0 python3 tests/profile/profile.py sanitize-collectives
}

case $1 in
test) recorded "nccl_test$part.txt" 'kvprim.h kvprim_nccl.h' run_tests ;;
bench) recorded "nccl_bench$part.txt" 'kvprim.h kvprim_nccl.h' run_benches ;;
limits) recorded "nccl_limits$part.txt" 'kvprim.h kvprim_nccl.h' run_limits ;;
handover) recorded handover.txt 'kvprim.h kvprim_cuda.cuh kvprim_nccl.h' run_handover ;;
sanitize)
    tool compute-sanitizer "the toolkit's package cuda-sanitizer-X-Y" >/dev/null || exit 1
    command -v python3 >/dev/null || { echo 'no python3; install it, it needs nothing else' >&2; exit 1; }
    recorded nccl_sanitize.txt 'kvprim.h kvprim_nccl.h' run_sanitizers
    ;;
*)
    echo 'usage: tests/nccl/nccl.sh test [quick]|bench|limits|handover|sanitize' >&2
    exit 2
    ;;
esac
