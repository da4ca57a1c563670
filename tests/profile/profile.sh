#!/bin/sh
# SPDX-License-Identifier: MIT
# usage: tests/profile/profile.sh sass|cfg [CUBIN...]      from the top folder; `make sass` and so on call it
#        tests/profile/profile.sh ncu|sanitize
#        tests/profile/profile.sh compare A B              two copies of build/ncu.csv, or two of ncu's reports
#
#     sass      prints registers, stack and widths of memory accesses of every kernel; checks main paths for 128 bits
#     cfg       draws control-flow graphs of the kernels: build/cfg/*.dot, and .svg if there is Graphviz
#     ncu       prints counters of one launch of each operation, as a table and a checklist; needs a GPU
#     sanitize  runs compute-sanitizer's four tools on a tenth of the tests, build/test_cuda; needs a GPU
#
# Searches for NVIDIA's tools on PATH, beside nvcc, and where their packages put them. Exits with 1 if something is not
# as it should be, or a tool is missing.

. tests/gpu/environment.sh
export LC_ALL=C
headers='kvprim.h kvprim_cuda.cuh'
[ -z "$NCCL_INCLUDE" ] || headers="$headers kvprim_nccl.h"

need_gpu()
{
    [ "$gpus" -gt 0 ] || { echo "no GPU here (nvidia-smi lists none)" >&2; return 1; }
}

need_nvcc()
{
    [ -n "$NVCC" ] || { echo "no nvcc on PATH, under CUDA_HOME or in the usual places: install CUDA" >&2; return 1; }
}

# Compiles the kernels of both headers and sets cubins.
compile_kernels()
{
    need_nvcc || return 1
    arch=$CUDA_ARCH cubins=
    [ "$arch" != native ] || [ "$gpus" -gt 0 ] || arch=sm_90
    mkdir -p build/sass || return 1
    for header in $headers; do
        [ "$header" != kvprim.h ] || continue
        unit=build/sass/${header%.*}
        printf '#define KVPRIM_IMPLEMENTATION\n#include "%s"\n' "$header" >"$unit.cu"
        echo "$header for $arch"
        "$NVCC" -std=c++17 -O3 -arch="$arch" -lineinfo -I. $nccl_headers -cubin "$unit.cu" -o "$unit.cubin" ||
            return 1
        cubins="$cubins $unit.cubin"
    done
    [ -n "$NCCL_INCLUDE" ] || echo 'without kvprim_nccl.h: no nccl.h under NCCL_HOME or in the usual places'
}

# sass CUBIN...: dumps each, and leaves the dump beside it.
sass()
{
    cuobjdump=$(tool cuobjdump "the toolkit's package cuda-cuobjdump-X-Y, or pip's nvidia-cuda-cuobjdump") || return 1
    [ $# -gt 0 ] || { compile_kernels && set -- $cubins; } || return 1
    code=0
    for cubin; do
        dump=${cubin%.cubin}.sass
        echo "== $dump"
        "$cuobjdump" --dump-resource-usage "$cubin" >"$dump" && "$cuobjdump" -sass "$cubin" >>"$dump" || return 1
        awk -v what=sass -f tests/profile/profile.awk "$dump" || code=1
    done
    return $code
}

cfg()
{
    nvdisasm=$(tool nvdisasm "the toolkit's package cuda-nvdisasm-X-Y, or pip's nvidia-cuda-nvdisasm") || return 1
    [ $# -gt 0 ] || { compile_kernels && set -- $cubins; } || return 1
    rm -rf build/cfg
    mkdir -p build/cfg || return 1
    for cubin; do
        echo "== $cubin"
        echo 'basic       back'
        echo 'blocks edges  edges loops  graph'
        "$nvdisasm" -bbcfg "$cubin" >build/cfg/all || return 1
        awk -v what=cfg -v into=build/cfg -f tests/profile/profile.awk build/cfg/all || return 1
    done
    rm -f build/cfg/all
    command -v dot >/dev/null || { echo 'no pictures: no dot, which is in the package graphviz'; return 0; }
    for graph in build/cfg/*.dot; do
        timeout 60 dot -Tsvg "$graph" -o "${graph%.dot}.svg" || echo "no picture of $graph"
    done
}

# ---- ncu ----

stalls='barrier branch_resolve dispatch_stall drain gmma imc_miss lg_throttle long_scoreboard math_pipe_throttle membar
    mio_throttle misc no_instruction not_selected short_scoreboard sleeping tex_throttle wait warpgroup_arrive'
counters='gpu__time_duration.sum dram__bytes.sum.per_second dram__throughput.avg.pct_of_peak_sustained_elapsed
    sm__warps_active.avg.pct_of_peak_sustained_active smsp__inst_executed_op_local_ld.sum
    smsp__inst_executed_op_local_st.sum'

# Sets metrics to those of the counters that this GPU has, according to ncu.
choose_metrics()
{
    metrics='' unknown=''
    "$ncu" --query-metrics >build/ncu/known 2>&1
    for stall in $stalls; do
        counters="$counters smsp__average_warps_issue_stalled_${stall}_per_issue_active.ratio"
    done
    for counter in $counters; do
        if grep -q "^ *${counter%%.*} " build/ncu/known || ! grep -q '^ *gpu__time_duration ' build/ncu/known; then
            metrics=$metrics${metrics:+,}$counter
        else
            unknown="$unknown $counter"
        fi
    done
    [ -z "$unknown" ] || echo "not counted on this GPU:$unknown"
}

# measure NAME SECONDS NCU_OPTION... PROGRAM...: writes build/ncu/NAME.ncu-rep and .csv.
measure()
{
    report=build/ncu/$1 seconds=$2
    shift 2
    rm -f "$report.ncu-rep" "$report.csv"
    timeout -k 10 "$seconds" "$ncu" --clock-control none --profile-from-start off --target-processes application-only \
        --force-overwrite --export "$report" --section LaunchStats --section Occupancy --metrics "$metrics" "$@" \
        >"$report.log" 2>&1
    ended=$?
    [ $ended -ne 0 ] || ! as_csv "$report.ncu-rep" "$report.csv" || return 0
    tail -n 20 "$report.log"
    ! grep -q ERR_NVGPUCTRPERM "$report.log" ||
        echo 'only root may read the counters, unless the driver is loaded with NVreg_RestrictProfilingToAdminUsers=0'
    echo "ncu made no $report.csv: exit code $ended (124: not done after $seconds s; 142: a rank waited too long)"
    return 1
}

# as_csv REPORT CSV
as_csv()
{
    "$ncu" --import "$1" --csv --page raw --print-units base >"$2" && [ -s "$2" ]
}

build_program()
{
    collectives=
    if [ "$gpus" -gt 1 ] && [ -n "$NCCL_INCLUDE" ] && [ -n "$NCCL_LIBRARY" ]; then
        collectives="-DPROFILE_NCCL $nccl_headers $nccl_link"
    fi
    "$NVCC" -std=c++17 -O3 -arch="$CUDA_ARCH" -lineinfo -I. tests/profile/profile.cu $collectives -o build/ncu/profile
}

# Kernels of two GPUs wait for each other, but ncu runs the kernels of a process one by one, and each as often as its
# counters need. So each rank is a process, rank 1 runs without ncu, and both processes are run again in place of the
# kernel. Neither lives long without the other: see tests/profile/profile.cu.
start_rank1()
{
    id=build/ncu/id
    rm -f $id $id.new build/ncu/all_reduce.*
    while build/ncu/profile all_reduce 1 $id; do :; done >build/ncu/rank1.log 2>&1 &
    rank1=$!
    trap end_rank1 EXIT
    trap 'exit 130' HUP INT TERM
}

# Writes a word where the other process waits for the next id.
end_rank1()
{
    trap - EXIT HUP INT TERM
    echo end >$id.new && mv $id.new $id
    wait $rank1
    rm -f $id
}

measure_all_reduce()
{
    export CUDA_VISIBLE_DEVICES=0,1 # with more GPUs each start takes longer
    start_rank1
    plan=build/ncu/all_reduce.plan wrong=
    build/ncu/profile all_reduce 0 $id >$plan 2>&1 || wrong="rank 0, without ncu: exit code $?"
    grep -v '^# ' $plan
    if [ -z "$wrong" ] && grep '^# ' $plan >build/ncu/all_reduce.lines; then
        if measure all_reduce 60 --replay-mode application --cache-control none build/ncu/profile all_reduce 0 $id; then
            cat build/ncu/all_reduce.lines build/ncu/all_reduce.csv >>build/ncu.csv
        else
            wrong='no counters; what stands above is all that was measured of it'
        fi
    fi
    end_rank1
    ! grep -q '^rank 1: ' build/ncu/rank1.log || wrong="${wrong:+$wrong; }wrong sums"
    [ -n "$wrong" ] || return 0
    echo "FAIL all-reduce: $wrong"
    echo 'the end of what rank 1 says:'
    tail -n 5 build/ncu/rank1.log
    return 1
}

operations()
{
    code=0
    rm -f build/ncu.csv
    build_program || return 1
    timeout -k 10 100 build/ncu/profile >build/ncu/rows.plan 2>&1 || { cat build/ncu/rows.plan; return 1; }
    grep -v '^# ' build/ncu/rows.plan
    choose_metrics
    measure rows 300 build/ncu/profile || return 1
    grep '^# ' build/ncu/rows.plan | cat - build/ncu/rows.csv >build/ncu.csv
    if [ -n "$collectives" ]; then
        measure_all_reduce || code=1
    else
        echo 'without all-reduce: it takes two GPUs and NCCL'
    fi
    echo
    awk -v what=table -f tests/profile/profile.awk build/ncu.csv || code=1
    return $code
}

ncu()
{
    need_gpu && need_nvcc || return 1
    ncu=$(tool ncu "Nsight Compute, the toolkit's package cuda-nsight-compute-X-Y") || return 1
    mkdir -p build/ncu && recorded gpu_ncu.txt "$headers" operations
}

# compare A B
compare()
{
    n=0
    for input; do
        n=$((n + 1)) table=$input
        [ -r "$input" ] || { echo "cannot read '$input': make ncu-compare A=before.csv B=after.csv" >&2; return 1; }
        case $input in
        *.ncu-rep)
            ncu=$(tool ncu "Nsight Compute, the toolkit's package cuda-nsight-compute-X-Y") || return 1
            mkdir -p build/ncu
            table=build/ncu/compare_$n.csv
            as_csv "$input" "$table" || return 1
            ;;
        esac
        [ $n -ne 1 ] || first=$table
    done
    [ $n -eq 2 ] || { echo 'usage: make ncu-compare A=before.csv B=after.csv' >&2; return 1; }
    awk -v what=compare -f tests/profile/profile.awk "$first" "$table"
}

# ---- sanitize ----

each_tool()
{
    code=0
    for check in memcheck initcheck racecheck synccheck; do
        case $check in memcheck | initcheck) some=quick ;; *) some=brief ;; esac
        echo "== $check, $some"
        timeout -k 10 600 "$sanitizer" --tool "$check" --error-exitcode 1 build/test_cuda $some
        ended=$?
        [ $ended -eq 0 ] || { echo "FAIL $check: exit code $ended"; code=1; }
    done
    return $code
}

sanitize()
{
    need_gpu || return 1
    sanitizer=$(tool compute-sanitizer "the toolkit's package cuda-sanitizer-X-Y") || return 1
    recorded gpu_sanitize.txt 'kvprim.h kvprim_cuda.cuh' each_tool # it tests only these
}

job=$1
[ $# -eq 0 ] || shift
case $job in
sass | cfg | ncu | compare | sanitize) "$job" "$@" ;;
*)
    sed -n '2,4s/^# //p' "$0" >&2
    exit 2
    ;;
esac
