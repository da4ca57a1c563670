/* SPDX-License-Identifier: MIT */
/* Fuzzes the lines of the trace reader. What it accepts must be a request, and what it refuses must have a reason. An
   input is read as it is, and says which lines to write and spoil. */
#include "examples/02_kv_replay/kv_trace.h"

#include "fuzz.h"
#include <ctype.h>
#include <inttypes.h>

enum { MAX_TEXT = 8000, MAX_LINES = 20 };

static struct reach reaches[4] = {{"trace", "lines", 400, MAX_LINES, 0, 0, 0}};

#define REQUIRE(condition) require(condition, #condition)

static void check_request(const kv_trace_request *request, const int64_t *ids)
{
    REQUIRE(request->timestamp >= 0 && request->input_length > 0 && request->output_length >= 0);
    REQUIRE(request->id_count == ((uint64_t)request->input_length - 1) / KV_TRACE_BLOCK + 1);
    for (size_t i = 0; i < request->id_count; i++)
        REQUIRE(ids[i] >= 0);
}

static void check_error(const char *error, size_t size)
{
    REQUIRE(error[0] != '\0' && memchr(error, '\0', size));
    for (; *error; error++)
        REQUIRE(isprint((unsigned char)*error));
}

/* Writes the request as the format has it; it must be read as the same request. */
static void check_round_trip(const kv_trace_request *request, const int64_t *ids)
{
    const size_t capacity = 160 + 21 * request->id_count;
    char *const line = allocate(capacity), error[96];
    int64_t *const again = allocate((capacity / 2 + 1) * sizeof *again);
    kv_trace_request copy = {0};
    size_t size = (size_t)snprintf(
        line, capacity, "{\"timestamp\": %lld, \"input_length\": %lld, \"output_length\": %lld, ",
        (long long)request->timestamp, (long long)request->input_length, (long long)request->output_length);
    for (size_t i = 0; i < request->id_count; i++)
        size +=
            (size_t)snprintf(line + size, capacity - size, "%s%lld", i ? ", " : "\"hash_ids\": [", (long long)ids[i]);
    size += (size_t)snprintf(line + size, capacity - size, "]}");
    REQUIRE(kv_trace_parse(line, size, &copy, again, error, sizeof error));
    REQUIRE(copy.timestamp == request->timestamp && copy.input_length == request->input_length);
    REQUIRE(copy.output_length == request->output_length && copy.id_count == request->id_count);
    REQUIRE(memcmp(again, ids, request->id_count * sizeof *ids) == 0);
    free(again);
    free(line);
}

/* Reads all of the input as one line, in buffers of exactly the promised size. */
static void check_parse(const uint8_t *data, size_t size)
{
    char *const line = allocate(size), error[96] = "";
    int64_t *const ids = allocate((size / 2 + 1) * sizeof *ids);
    kv_trace_request request = {0};
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

/* Reads the lines as a file's lines. Returns how many requests there are. */
static size_t check_lines(const uint8_t *data, size_t size)
{
    kv_trace trace = {0};
    size_t lines = 1, ids = 0, before = 0;
    for (size_t i = 0; i < size; i++)
        lines += data[i] == '\n';
    char *const text = allocate(size); /* exactly as much as may be read */
    if (size)
        memcpy(text, data, size);
    const bool ok = kv_trace_add(&trace, text, size);
    for (size_t i = 0; i < trace.count; i++) {
        REQUIRE(trace.requests[i].first_id == ids);
        REQUIRE(trace.requests[i].line > before && trace.requests[i].line <= lines);
        before = trace.requests[i].line;
        ids += trace.requests[i].id_count;
        check_request(&trace.requests[i], trace.ids + trace.requests[i].first_id);
    }
    REQUIRE(ids == trace.id_count);
    if (!ok) {
        REQUIRE(trace.error_line > before && trace.error_line <= lines);
        check_error(trace.error, sizeof trace.error);
    }
    const size_t count = trace.count;
    kv_trace_free(&trace);
    free(text);
    return count;
}

/* Writes lines as the format has them, and then changes a few of their bytes. */
static size_t write_lines(struct input *in, char *text)
{
    static const char *const keys[] = {"timestamp", "input_length", "output_length", "hash_ids"};
    const uint64_t changes = chance(in, 2) ? take(in, 1) % 4 : 0, seed = take(in, 4);
    char *at = text;
    for (int lines = 0; in->next < in->end && lines < MAX_LINES; lines++) {
        const uint64_t ids = 1 + take(in, 1) % 6, first = take(in, 1) % 4;
        at += sprintf(at, "%s", chance(in, 8) ? "{\"more\": [1e-3, {\"\\u00e9\": null}], " : "{");
        for (size_t k = 0; k < 4; k++) {
            const size_t key = (first + k) % 4;
            uint64_t number = key == 3 ? take(in, 3) : take(in, 7);
            if (key == 1) /* one id per block */
                number = ids * KV_TRACE_BLOCK - number % KV_TRACE_BLOCK;
            at += sprintf(at, "%s\"%s\": %s%" PRIu64, k ? ", " : "", keys[key], key == 3 ? "[" : "", number);
            for (uint64_t i = 1; key == 3 && i < ids; i++)
                at += sprintf(at, ",%" PRIu64, take(in, 3));
            at += sprintf(at, "%s", key == 3 ? "]" : "");
        }
        at += sprintf(at, "}\n");
    }
    const size_t size = (size_t)(at - text);
    for (uint64_t i = 0; size && i < changes; i++)
        text[hash_u64(seed + i) % size] = (char)hash_u64(~seed - i);
    return size;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static char text[MAX_TEXT];
    struct input in = {data, data + size};
    check_parse(data, size);
    (void)check_lines(data, size);
    const size_t written = write_lines(&in, text);
    count_reach(reaches, size, check_lines((const uint8_t *)text, written));
    return 0;
}
