/* SPDX-License-Identifier: MIT */
/* Records what a program does with the GPU into a trace (trace.h), through CUPTI's activity API: kernels, copies
   and memsets with the GPU's times, calls of the CUDA runtime, and NVTX ranges, all on one clock.

       trace t = {};
       cupti_trace_start(&t);   // begins phase 1, the next time phase 2, and so on: t.phase
       ...                      // the program, with nvtxRangePushA and nvtxRangePop around parts of it
       cudaDeviceSynchronize();
       if (cupti_trace_stop())  // the number of missing records
           ...

   Use it in one .cu or .cpp file, as C++, linked with -lcupti; it needs CUDA 12 or newer, and Linux. If CUPTI returns
   an error, start and stop print it and exit. Only one trace can be recorded at a time, and none under a profiler,
   which takes CUPTI for itself. Work that is launched as a graph appears as its kernels and copies, without calls for
   them. A range is recorded if it begins and ends between start and stop.

   On an H200 host it cost 0.2 us for each call of the runtime, and 0.2 us more for each NVTX range: a loop of 4,600
   launches took 1.02 times as long. Events around each call cost 0.13 us and tell less; to synchronise around each call
   took 24 times as long, and times what the program does not do otherwise. */
#ifndef CUPTI_TRACE_H
#define CUPTI_TRACE_H

#include "trace.h"
#include <cupti.h>
#include <cxxabi.h>
#include <mutex>
#include <nvtx3/nvToolsExt.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

/* The newest record types that all headers of a CUDA release have. Later types add fields after those read here. */
#if CUPTI_API_VERSION >= 130000
typedef CUpti_ActivityKernel10 cupti_trace_kernel;
#else
typedef CUpti_ActivityKernel9 cupti_trace_kernel; /* CUDA 12.0 to 12.9 */
#endif
#if CUPTI_API_VERSION >= 26 /* CUDA 12.8 */
typedef CUpti_ActivityMemcpy6 cupti_trace_copy;
#else
typedef CUpti_ActivityMemcpy5 cupti_trace_copy;
#endif

enum { cupti_trace_buffer_bytes = 4 << 20, cupti_trace_depth = 32 };

static const CUpti_ActivityKind cupti_trace_kinds[] = {CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL,
                                                       CUPTI_ACTIVITY_KIND_MEMCPY, CUPTI_ACTIVITY_KIND_MEMCPY2,
                                                       CUPTI_ACTIVITY_KIND_MEMSET, CUPTI_ACTIVITY_KIND_RUNTIME};

/* Global, because CUPTI and NVTX pass no argument of ours to callbacks. CUPTI calls from its own threads. */
static struct {
    trace *into; /* NULL: nothing is recorded */
    std::mutex lock;
    size_t missing; /* records that CUPTI dropped, that are not readable or have no times; ranges nested too deep */
} cupti_tracing;

static void cupti_trace_check(CUptiResult result, const char *what)
{
    const char *text = "unknown error";
    if (result == CUPTI_SUCCESS)
        return;
    cuptiGetResultString(result, &text);
    fprintf(stderr, "CUPTI, %s: %s\n", what, text);
    exit(1);
}

static const std::string *cupti_trace_kernel_name(trace *t, const char *mangled)
{
    int status;
    char *const readable = abi::__cxa_demangle(mangled ? mangled : "unnamed", NULL, NULL, &status);
    const std::string *const name = trace_name(t, readable ? readable : mangled ? mangled : "unnamed");
    free(readable);
    return name;
}

/* Names copies as torch and Perfetto's guides do. H: host, D: device, A: array, P: peer. */
static const std::string *cupti_trace_copy_name(trace *t, unsigned kind)
{
    static const char *const names[] = {"Memcpy ?to?", "Memcpy HtoD", "Memcpy DtoH", "Memcpy HtoA",
                                        "Memcpy AtoH", "Memcpy AtoA", "Memcpy AtoD", "Memcpy DtoA",
                                        "Memcpy DtoD", "Memcpy HtoH", "Memcpy PtoP"};
    return trace_name(t, names[kind < sizeof names / sizeof *names ? kind : 0]);
}

static void cupti_trace_add(trace *t, trace_kind kind, const std::string *name, uint64_t begin, uint64_t end,
                            uint64_t bytes, uint32_t device, uint32_t track, uint32_t correlation)
{
    if (begin == 0 || end < begin)
        cupti_tracing.missing++;
    else
        t->events.push_back({kind, name, begin, end, bytes, device, track, correlation, t->phase});
}

/* Adds a record of an operation; all types have these fields. */
template <typename record>
static void cupti_trace_operation(trace *t, trace_kind kind, const std::string *name, const record *r, uint64_t bytes)
{
    cupti_trace_add(t, kind, name, r->start, r->end, bytes, r->deviceId, r->streamId, r->correlationId);
}

static void cupti_trace_record(trace *t, const CUpti_Activity *record)
{
    if (record->kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL || record->kind == CUPTI_ACTIVITY_KIND_KERNEL) {
        const cupti_trace_kernel *const k = (const cupti_trace_kernel *)record;
        cupti_trace_operation(t, TRACE_KERNEL, cupti_trace_kernel_name(t, k->name), k, 0);
    } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMCPY) {
        const cupti_trace_copy *const c = (const cupti_trace_copy *)record;
        cupti_trace_operation(t, TRACE_COPY, cupti_trace_copy_name(t, c->copyKind), c, c->bytes);
    } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMCPY2) { /* between GPUs */
        const CUpti_ActivityMemcpyPtoP4 *const c = (const CUpti_ActivityMemcpyPtoP4 *)record;
        cupti_trace_operation(t, TRACE_COPY, cupti_trace_copy_name(t, c->copyKind), c, c->bytes);
    } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMSET) {
        const CUpti_ActivityMemset4 *const m = (const CUpti_ActivityMemset4 *)record;
        cupti_trace_operation(t, TRACE_MEMSET, trace_name(t, "Memset"), m, m->bytes);
    } else if (record->kind == CUPTI_ACTIVITY_KIND_RUNTIME) {
        const CUpti_ActivityAPI *const a = (const CUpti_ActivityAPI *)record;
        const char *call = NULL;
        if (cuptiGetCallbackName(CUPTI_CB_DOMAIN_RUNTIME_API, a->cbid, &call) != CUPTI_SUCCESS)
            call = "unknown call";
        cupti_trace_add(t, TRACE_CALL, trace_name(t, call), a->start, a->end, 0, 0, a->threadId, a->correlationId);
    }
}

static void CUPTIAPI cupti_trace_new_buffer(uint8_t **buffer, size_t *bytes, size_t *most_records)
{
    *buffer = (uint8_t *)malloc(cupti_trace_buffer_bytes); /* NULL: CUPTI drops records, which are counted */
    *bytes = cupti_trace_buffer_bytes;
    *most_records = 0; /* 0: as many as fit */
}

static void CUPTIAPI cupti_trace_read_buffer(CUcontext context, uint32_t stream, uint8_t *buffer, size_t, size_t valid)
{
    CUpti_Activity *record = NULL;
    CUptiResult result = CUPTI_ERROR_MAX_LIMIT_REACHED;
    size_t dropped = 0;
    const std::lock_guard<std::mutex> guard(cupti_tracing.lock);
    while (cupti_tracing.into && (result = cuptiActivityGetNextRecord(buffer, valid, &record)) == CUPTI_SUCCESS)
        cupti_trace_record(cupti_tracing.into, record);
    cupti_tracing.missing += result != CUPTI_ERROR_MAX_LIMIT_REACHED; /* the normal end */
    if (cuptiActivityGetNumDroppedRecords(context, stream, &dropped) != CUPTI_SUCCESS)
        dropped = 1; /* do not exit in CUPTI's thread with the lock held */
    cupti_tracing.missing += dropped;
    free(buffer);
}

/* ---- NVTX: the program itself is the tool that receives its ranges ---- */

static thread_local struct {
    int depth;
    const std::string *name[cupti_trace_depth]; /* NULL: nothing was recorded when it began */
    uint64_t begin[cupti_trace_depth];
} cupti_trace_open;

static int NVTX_API cupti_trace_push(const char *name)
{
    const int depth = cupti_trace_open.depth++;
    const std::lock_guard<std::mutex> guard(cupti_tracing.lock);
    trace *const t = cupti_tracing.into;
    if (depth >= cupti_trace_depth) {
        cupti_tracing.missing += t != NULL;
        return depth;
    }
    cupti_trace_open.name[depth] = t ? trace_name(t, name) : NULL;
    cupti_trace_open.begin[depth] = 0; /* still 0 after an error: counted as missing when the range ends */
    if (t)
        (void)cuptiGetTimestamp(&cupti_trace_open.begin[depth]);
    return depth;
}

static int NVTX_API cupti_trace_pop(void)
{
    uint64_t end = 0;
    if (cupti_trace_open.depth == 0)
        return -1;
    (void)cuptiGetTimestamp(&end); /* still 0 after an error: counted as missing */
    const int depth = --cupti_trace_open.depth;
    const std::lock_guard<std::mutex> guard(cupti_tracing.lock);
    if (cupti_tracing.into && depth < cupti_trace_depth && cupti_trace_open.name[depth])
        cupti_trace_add(cupti_tracing.into, TRACE_RANGE, cupti_trace_open.name[depth], cupti_trace_open.begin[depth],
                        end, 0, 0, (uint32_t)syscall(SYS_gettid), 0);
    return depth;
}

/* NVTX calls this at the program's first range, so that a tool can install its functions. */
static int NVTX_API cupti_trace_nvtx(NvtxGetExportTableFunc_t table_of)
{
    const NvtxExportTableCallbacks *const table = (const NvtxExportTableCallbacks *)table_of(NVTX_ETID_CALLBACKS);
    NvtxFunctionTable functions;
    unsigned int count = 0;
    if (table == NULL || !table->GetModuleFunctionTable(NVTX_CB_MODULE_CORE, &functions, &count) ||
        count <= NVTX_CBID_CORE_RangePop)
        return 0;
    *functions[NVTX_CBID_CORE_RangePushA] = (NvtxFunctionPointer)cupti_trace_push;
    *functions[NVTX_CBID_CORE_RangePop] = (NvtxFunctionPointer)cupti_trace_pop;
    return 1;
}

/* Runs before main, because NVTX looks for a tool only once. A tool that NVTX_INJECTION64_PATH names has precedence. */
__attribute__((constructor)) static void cupti_trace_hook(void)
{
    InitializeInjectionNvtx2_fnptr = cupti_trace_nvtx;
}

/* ---- start and stop ---- */

static void cupti_trace_start(trace *t)
{
    static bool started;
    if (!started) {
        cupti_trace_check(cuptiActivityRegisterCallbacks(cupti_trace_new_buffer, cupti_trace_read_buffer), "callbacks");
        cupti_trace_check(cuptiSetThreadIdType(CUPTI_ACTIVITY_THREAD_ID_TYPE_SYSTEM), "thread ids");
        started = true;
    }
    cupti_tracing.missing = 0;
    t->phase++;
    for (CUpti_ActivityKind kind : cupti_trace_kinds)
        cupti_trace_check(cuptiActivityEnable(kind), "cuptiActivityEnable");
    const std::lock_guard<std::mutex> guard(cupti_tracing.lock);
    cupti_tracing.into = t;
}

/* Call this after cudaDeviceSynchronize. Returns the number of missing records; 0: the trace is complete. */
static size_t cupti_trace_stop(void)
{
    for (CUpti_ActivityKind kind : cupti_trace_kinds)
        cupti_trace_check(cuptiActivityDisable(kind), "cuptiActivityDisable");
    cupti_trace_check(cuptiActivityFlushAll(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED), "cuptiActivityFlushAll");
    const std::lock_guard<std::mutex> guard(cupti_tracing.lock);
    cupti_tracing.into = NULL;
    return cupti_tracing.missing;
}
#endif
