#!/bin/sh
# usage: tests/nccl.sh test|bench      from the top folder; `make gpu-test` and `make gpu-bench` call it
#
# On a machine with two GPUs or more and NCCL: builds the tests or the benchmark of the collectives and runs them on 2,
# 4 and 8 of the GPUs; what they print goes to tests/results/ too, behind the headers' checksums. Elsewhere it says what
# is missing. NVCC, CUDA_ARCH, NCCL_INCLUDE and NCCL_LIBRARY (a file) say what to build with. NVLink multicast stays off
# unless NCCL_NVLS_ENABLE says otherwise.

: "${NVCC=}" "${CUDA_ARCH=native}" "${NCCL_INCLUDE=}" "${NCCL_LIBRARY=}" "${NCCL_NVLS_ENABLE=0}"
export NCCL_NVLS_ENABLE
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')
if [ "$gpus" -lt 2 ]; then
    echo "skip collectives: $gpus GPUs here, they take two"
    exit 0
fi
if [ -z "$NVCC" ] || [ -z "$NCCL_INCLUDE" ] || [ -z "$NCCL_LIBRARY" ]; then
    echo 'skip collectives: no nvcc, no nccl.h or no libnccl.so (under NCCL_HOME or in the usual places)'
    exit 0
fi

# built SOURCE: into build/, as CUDA.
built()
{
    program=build/$(basename "${1%.*}")
    mkdir -p build
    "$NVCC" -x cu -std=c++17 -O3 -arch="$CUDA_ARCH" -lineinfo -I. -isystem "$NCCL_INCLUDE" "$1" -o "$program" \
        -Xlinker "$NCCL_LIBRARY" -Xlinker -rpath -Xlinker "$(dirname "$NCCL_LIBRARY")" -lpthread
}

case $1 in
test) sources='examples/06_allreduce.c tests/test_nccl_gpu.cu' ;;
bench) sources=tests/bench_nccl.cu ;;
*)
    echo 'usage: tests/nccl.sh test|bench' >&2
    exit 2
    ;;
esac
result=tests/results/nccl_$1.txt
mkdir -p tests/results
{
    sha256sum kvprim.h kvprim_nccl.h
    code=0
    for source in $sources; do
        built "$source" || { code=1; continue; }
        for some in 0,1 0,1,2,3 0,1,2,3,4,5,6,7; do
            [ "$gpus" -ge $(((${#some} + 1) / 2)) ] || continue
            echo "== $program, GPUs $some"
            CUDA_VISIBLE_DEVICES=$some "$program" || code=1
        done
    done
    echo $code >build/nccl_code
} >"$result" 2>&1
cat "$result"
exit "$(cat build/nccl_code)"
