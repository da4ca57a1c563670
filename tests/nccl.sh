#!/bin/sh
# usage: tests/nccl.sh test [quick]|bench|sanitize      from the top folder; make's gpu-test, gpu-bench and sanitize
# call it; quick: fewer sizes and environments
#
# On a machine with NCCL and a GPU or more: builds the tests or the benchmark of the collectives and runs them on 2, 4
# and 8 of the GPUs, the tests on 3 too (under compute-sanitizer's memcheck: 2); what they print goes to tests/results/
# too, after the headers' checksums. Of one GPU, tests with two processes that share it. A program that hangs is ended
# after ten minutes. Elsewhere it says what is missing.
#
# Tests run as threads and as processes, on two GPUs in the environments that engines set, and with each libnccl.so.2
# that NCCL_OTHERS lists (files of other versions than the one they were built with).

: "${NCCL_OTHERS=}"
quick=$2
. tests/gpu.sh
least=2
[ "$1" != test ] || least=1
if [ "$gpus" -lt $least ]; then
    echo "skip collectives: $gpus GPUs here, they take $least"
    exit 0
fi
if [ -z "$NVCC" ] || [ -z "$NCCL_INCLUDE" ] || [ -z "$NCCL_LIBRARY" ]; then
    echo 'skip collectives: no nvcc, no nccl.h or no libnccl.so.2 (under NCCL_HOME or in the usual places)'
    exit 0
fi

# build SOURCE [FLAG...]: into build/, as CUDA. One that does not compile leaves no program of an older run.
build()
{
    source=$1 output=build/$(basename "${1%.*}")
    shift
    rm -f "$output"
    "$NVCC" -x cu -std=c++17 -O3 -arch="$CUDA_ARCH" -lineinfo -I. $nccl_headers "$@" "$source" -o "$output" $nccl_link
}

# run GPUS COMMAND...: those of the GPUs that there are.
code=0
run()
{
    some=$1
    shift
    [ "$gpus" -ge $(((${#some} + 1) / 2)) ] || return 0
    echo "== $*, GPUs $some"
    CUDA_VISIBLE_DEVICES=$some timeout -k 10 600 "$@" || code=1
}

# run_with LIBRARY COMMAND...: another libnccl.so.2. A file that is missing would only be passed over.
run_with()
{
    library=$1
    shift
    if [ -f "$library" ]; then
        run 0,1 env LD_PRELOAD="$library" "$@"
    else
        echo "FAIL NCCL_OTHERS: no file $library"
        code=1
    fi
}

# What engines and users set, and other versions: own kernels are on, except where GPUs may not write to each other.
environments()
{
    for setting in NCCL_CUMEM_ENABLE=0 NCCL_WIN_ENABLE=0 NCCL_COMM_BLOCKING=0 NCCL_P2P_DISABLE=1; do
        own=on
        [ $setting != NCCL_P2P_DISABLE=1 ] || own=off
        run 0,1 env $setting build/test_nccl_gpu $1 quick $own
    done
    for library in $NCCL_OTHERS; do
        run_with "$library" build/test_nccl_gpu $1 quick on
    done
}

# Faults where NCCL itself differs.
faults_elsewhere()
{
    run 0,1 env NCCL_CUMEM_ENABLE=0 build/test_nccl_faults quick on
    for library in $NCCL_OTHERS; do
        run_with "$library" build/test_nccl_faults quick on
    done
}

run_tests()
{
    build tests/test_nccl_gpu.cu &
    build tests/test_nccl_faults.cu &
    [ "$gpus" -eq 1 ] || build examples/06_allreduce.c &
    wait # what does not compile is missed when it is run
    if [ "$gpus" -eq 1 ]; then
        run 0 build/test_nccl_gpu processes $quick on
        run 0 build/test_nccl_faults processes $quick on
        return $code
    fi
    for some in 0,1 0,1,2 0,1,2,3 0,1,2,3,4,5,6,7; do # 3: no power of two, fewer than the kernels for 4 have room for
        run $some build/06_allreduce
        for kind in '' processes; do
            run $some build/test_nccl_faults $kind $quick on
            run $some build/test_nccl_gpu $kind $quick on
        done
    done
    environments processes
    if [ -z "$quick" ]; then
        environments
        faults_elsewhere
    fi
    return $code
}

run_benches()
{
    cublas=
    [ ! -e "$CUDA_INCLUDE/cublas_v2.h" ] || cublas='-DBENCH_CUBLAS -lcublas'
    build tests/bench_nccl.cu $cublas || return 1
    for some in 0,1 0,1,2,3 0,1,2,3,4,5,6,7; do
        run $some build/bench_nccl
    done
    return $code
}

# NCCL asks CUDA for what is not there, and takes the error for an answer: no errors of the API.
run_memcheck()
{
    build tests/test_nccl_gpu.cu || return 1
    run 0,1 "$sanitizer" --tool memcheck --report-api-errors no --error-exitcode 1 build/test_nccl_gpu quick on
    return $code
}

case $1 in
test) recorded nccl_test.txt 'kvprim.h kvprim_nccl.h' run_tests ;;
bench) recorded nccl_bench.txt 'kvprim.h kvprim_nccl.h' run_benches ;;
sanitize)
    sanitizer=$(tool compute-sanitizer "the toolkit's package cuda-sanitizer-X-Y") || exit 1
    recorded nccl_sanitize.txt 'kvprim.h kvprim_nccl.h' run_memcheck
    ;;
*)
    echo 'usage: tests/nccl.sh test [quick]|bench|sanitize' >&2
    exit 2
    ;;
esac
