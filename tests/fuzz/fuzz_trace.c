/* SPDX-License-Identifier: MIT */
/* Fuzzes the lines of the trace reader. What it accepts must be a request, and what it refuses must have a reason.

       clang -g -O1 -fsanitize=fuzzer,address,undefined -I. tests/fuzz/fuzz_trace.c -o build/fuzz_trace */
#include "examples/02_kv_replay/kv_trace.h"
#include <ctype.h>

#define CHECK(condition)                                                                                               \
    ((condition) ? (void)0 : (fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition), abort()))

static void check_request(const kv_trace_request *request, const int64_t *ids)
{
    CHECK(request->timestamp >= 0 && request->input_length > 0 && request->output_length >= 0);
    CHECK(request->id_count == ((uint64_t)request->input_length - 1) / KV_TRACE_BLOCK + 1);
    for (size_t i = 0; i < request->id_count; i++)
        CHECK(ids[i] >= 0);
}

static void check_error(const char *error, size_t size)
{
    CHECK(error[0] != '\0' && memchr(error, '\0', size));
    for (; *error; error++)
        CHECK(isprint((unsigned char)*error));
}

/* Writes the request as the format has it; it must be read as the same request. */
static void check_round_trip(const kv_trace_request *request, const int64_t *ids)
{
    const size_t capacity = 160 + 21 * request->id_count;
    char *const line = (char *)malloc(capacity), error[96];
    int64_t *const again = (int64_t *)malloc((capacity / 2 + 1) * sizeof *again);
    kv_trace_request copy = {0};
    CHECK(line && again);
    size_t size = (size_t)snprintf(
        line, capacity, "{\"timestamp\": %lld, \"input_length\": %lld, \"output_length\": %lld, ",
        (long long)request->timestamp, (long long)request->input_length, (long long)request->output_length);
    for (size_t i = 0; i < request->id_count; i++)
        size +=
            (size_t)snprintf(line + size, capacity - size, "%s%lld", i ? ", " : "\"hash_ids\": [", (long long)ids[i]);
    size += (size_t)snprintf(line + size, capacity - size, "]}");
    CHECK(kv_trace_parse(line, size, &copy, again, error, sizeof error));
    CHECK(copy.timestamp == request->timestamp && copy.input_length == request->input_length);
    CHECK(copy.output_length == request->output_length && copy.id_count == request->id_count);
    CHECK(memcmp(again, ids, request->id_count * sizeof *ids) == 0);
    free(again);
    free(line);
}

/* Reads all of the input as one line, in buffers of exactly the promised size. */
static void check_parse(const uint8_t *data, size_t size)
{
    char *const line = (char *)malloc(size + !size), error[96] = "";
    int64_t *const ids = (int64_t *)malloc((size / 2 + 1) * sizeof *ids);
    kv_trace_request request = {0};
    CHECK(line && ids);
    if (size)
        memcpy(line, data, size);
    if (kv_trace_parse(line, size, &request, ids, error, sizeof error)) {
        check_request(&request, ids);
        check_round_trip(&request, ids);
    } else {
        check_error(error, sizeof error);
    }
    free(ids);
    free(line);
}

/* Reads the input's lines as a file's lines. */
static void check_lines(const uint8_t *data, size_t size)
{
    kv_trace trace = {0};
    bool ok = true;
    size_t number = 0, ids = 0;
    for (size_t begin = 0, end; ok && begin < size; begin = end + 1) {
        for (end = begin; end < size && data[end] != '\n'; end++)
            continue;
        const size_t before = trace.count;
        ok = kv_trace_add_line(&trace, (const char *)data + begin, end - begin, ++number);
        CHECK(trace.count == before || (trace.count == before + 1 && trace.requests[before].line == number));
    }
    for (size_t i = 0; i < trace.count; i++) {
        CHECK(trace.requests[i].first_id == ids);
        ids += trace.requests[i].id_count;
        check_request(&trace.requests[i], trace.ids + trace.requests[i].first_id);
    }
    CHECK(ids == trace.id_count);
    if (!ok) {
        CHECK(trace.error_line == number);
        check_error(trace.error, sizeof trace.error);
    }
    kv_trace_free(&trace);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    check_parse(data, size);
    check_lines(data, size);
    return 0;
}
