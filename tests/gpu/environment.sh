# SPDX-License-Identifier: MIT
# Shared by the scripts about GPUs, which read it with `. tests/gpu/environment.sh` in the top folder. CUDA_HOME, NVCC,
# CUDA_ARCH, CUDA_INCLUDE, NCCL_INCLUDE and NCCL_LIBRARY (a file) say what to build with, as the Makefile found it.
#
# NVLink multicast stays off unless NCCL_NVLS_ENABLE says otherwise.

: "${CUDA_HOME=}" "${NVCC=}" "${CUDA_ARCH=native}" "${CUDA_INCLUDE=}" "${NCCL_INCLUDE=}" "${NCCL_LIBRARY=}"
: "${NCCL_NVLS_ENABLE=0}"
export NCCL_NVLS_ENABLE
architectures=-arch=$CUDA_ARCH
case $CUDA_ARCH in
*' '*)
    architectures=
    for arch in $CUDA_ARCH; do
        architectures="$architectures -gencode arch=compute_${arch#sm_},code=$arch"
    done
    ;;
esac
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')

# system_headers FOLDER...: prints the flags for them, except for /usr/include, which C++'s own headers must find last.
system_headers()
{
    for folder; do
        [ -z "$folder" ] || [ "$folder" = /usr/include ] || printf ' -isystem %s' "$folder"
    done
}

# nvcc's flags to compile with this very nccl.h: it is included by path, because nvcc searches its own folder, which may
# hold another one, before those of -isystem. And to link with this very library, whose only name may be libnccl.so.2,
# and find it before one on LD_LIBRARY_PATH.
nccl_flags=
[ -z "$NCCL_INCLUDE" ] || nccl_flags="-include $NCCL_INCLUDE/nccl.h$(system_headers "$NCCL_INCLUDE")"
nccl_link=
[ -z "$NCCL_LIBRARY" ] || nccl_link="-Xlinker $NCCL_LIBRARY -Xlinker --disable-new-dtags -Xlinker -rpath \
    -Xlinker $(dirname "$NCCL_LIBRARY") -lpthread"

# of_pip NAME: prints where pip put one of NVIDIA's tools: beside Python's modules.
of_pip()
{
    python3 -c 'import glob, sys
for folder in sys.path:
    for place in glob.glob(glob.escape(folder) + "/nvidia/*/bin/" + sys.argv[1]):
        sys.exit(print(place))' "$1" 2>/dev/null
}

# tool NAME PACKAGE: prints where one of NVIDIA's tools is, or says what to install.
tool()
{
    nvcc_folder=${NVCC##* } nvcc_folder=${nvcc_folder%/*} # NVCC may be `ccache /usr/local/cuda/bin/nvcc`
    for place in "$(command -v "$1")" "$CUDA_HOME/bin/$1" "$nvcc_folder/$1" /usr/local/cuda/bin/"$1" \
        /opt/cuda/bin/"$1" /opt/nvidia/nsight-compute/*/"$1" "$(of_pip "$1")"; do
        [ ! -x "$place" ] || [ -d "$place" ] || { echo "$place"; return; }
    done
    echo "no $1 on PATH, under CUDA_HOME or beside nvcc: it is in $2" >&2
    return 1
}

# recorded FILE HEADERS COMMAND...: prints the headers' checksums and the command's output, and keeps both in
# build/results/FILE, or under another name if the command fails.
recorded()
{
    result=build/results/$1 checked=$2
    shift 2
    mkdir -p build/results
    { sha256sum $checked && "$@"; echo $? >build/recorded_code; } >"$result" 2>&1
    cat "$result"
    [ "$(cat build/recorded_code)" -eq 0 ] || { mv "$result" "${result%.txt}.failed" && return 1; }
}
