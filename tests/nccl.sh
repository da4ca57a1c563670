#!/bin/sh
# usage: tests/nccl.sh test|bench|sanitize      from the top folder; make's gpu-test, gpu-bench and sanitize call it
#
# On a machine with two GPUs or more and NCCL: builds the tests or the benchmark of the collectives and runs them on 2,
# 4 and 8 of the GPUs, the tests on 3 too (under compute-sanitizer's memcheck: 2); what they print goes to
# tests/results/ too, behind the headers' checksums. A program that hangs is ended after ten minutes. Elsewhere it says
# what is missing.

. tests/gpu.sh
if [ "$gpus" -lt 2 ]; then
    echo "skip collectives: $gpus GPUs here, they take two"
    exit 0
fi
if [ -z "$NVCC" ] || [ -z "$NCCL_INCLUDE" ] || [ -z "$NCCL_LIBRARY" ]; then
    echo 'skip collectives: no nvcc, no nccl.h or no libnccl.so.2 (under NCCL_HOME or in the usual places)'
    exit 0
fi

program()
{
    echo "build/$(basename "${1%.*}")"
}

# build SOURCE: into build/, as CUDA. One that does not compile leaves no program of an older run.
build()
{
    rm -f "$(program "$1")"
    "$NVCC" -x cu -std=c++17 -O3 -arch="$CUDA_ARCH" -lineinfo -I. $nccl_headers "$1" -o "$(program "$1")" $nccl_link
}

# Every program on every number of GPUs, whatever became of the others.
run_all()
{
    code=0
    for source in $sources; do
        build "$source" &
    done
    wait
    for source in $sources; do
        for some in $some_gpus; do
            [ "$gpus" -ge $(((${#some} + 1) / 2)) ] || continue
            echo "== $(program "$source"), GPUs $some"
            CUDA_VISIBLE_DEVICES=$some $launcher "$(program "$source")" $arguments || code=1
        done
    done
    return $code
}

some_gpus='0,1 0,1,2,3 0,1,2,3,4,5,6,7' launcher='timeout -k 10 600' arguments=
case $1 in
test)
    sources='examples/06_allreduce.c tests/test_nccl_gpu.cu'
    some_gpus="0,1,2 $some_gpus" # 3: no power of two, and fewer than the kernels for 4 have room for
    ;;
bench) sources=tests/bench_nccl.cu ;;
sanitize)
    sanitizer=$(tool compute-sanitizer "the toolkit's package cuda-sanitizer-X-Y") || exit 1
    # NCCL asks CUDA for what is not there, and takes the error for an answer: no errors of the API.
    sources=tests/test_nccl_gpu.cu some_gpus=0,1 arguments=quick
    launcher="$launcher $sanitizer --tool memcheck --report-api-errors no --error-exitcode 1"
    ;;
*)
    echo 'usage: tests/nccl.sh test|bench|sanitize' >&2
    exit 2
    ;;
esac
recorded "nccl_$1.txt" 'kvprim.h kvprim_nccl.h' run_all
