/* SPDX-License-Identifier: MIT */
/* kv_trace.h: reads request traces in the Mooncake format: JSON lines, one request each. C11, no dependency.

       {"timestamp": 27482, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 2353]}

   The timestamp is in ms, lengths are in tokens. There is one id per block of 512 input tokens; the last block may be
   partial. Equal ids mean equal blocks with equal history. Keys may come in any order; without "timestamp" it is 0, the
   others are required. Unknown keys may hold any JSON value and are skipped, as are blank lines and a byte order mark
   of UTF-8 before the first line. Everything else is refused, with the line's number. */
#ifndef KV_TRACE_H
#define KV_TRACE_H

#include <ctype.h>
#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define KV_TRACE_BLOCK 512                  /* tokens */
#define KV_TRACE_LINE_MAX ((size_t)1 << 20) /* bytes; longer lines are refused */
#define KV_TRACE_DEPTH_MAX 32               /* nested values under unknown keys */

typedef struct kv_trace_request {
    int64_t timestamp, input_length, output_length;
    size_t first_id, id_count; /* its ids in kv_trace.ids */
    size_t line;               /* in the file, from 1 */
} kv_trace_request;

typedef struct kv_trace { /* zero-initialise */
    kv_trace_request *requests;
    int64_t *ids; /* of all requests, one after another */
    size_t count, capacity, id_count, id_capacity;
    size_t error_line; /* the line that was refused; 0: the whole file */
    char error[96];
} kv_trace;

/* ---- JSON -------------------------------------------------------------------------------------------------------- */

typedef struct kv_trace__cursor {
    const char *at, *begin, *end;
    char *error;
    size_t error_size;
} kv_trace__cursor;

/* Returns the byte at the cursor, or EOF at the end. */
static inline int kv_trace__peek(const kv_trace__cursor *c)
{
    return c->at < c->end ? (unsigned char)*c->at : EOF;
}

static inline bool kv_trace__fail(kv_trace__cursor *c, const char *what)
{
    snprintf(c->error, c->error_size, "%s at column %zu", what, (size_t)(c->at - c->begin) + 1);
    return false;
}

static inline void kv_trace__space(kv_trace__cursor *c)
{
    while (c->at < c->end && (*c->at == ' ' || *c->at == '\t' || *c->at == '\r' || *c->at == '\n'))
        c->at++;
}

/* If `byte` is next, skips it and the space around it. */
static inline bool kv_trace__take(kv_trace__cursor *c, char byte)
{
    kv_trace__space(c);
    if (c->at == c->end || *c->at != byte)
        return false;
    c->at++;
    kv_trace__space(c);
    return true;
}

/* Calls item() for each of the values between two brackets, which commas separate. */
static inline bool kv_trace__list(kv_trace__cursor *c, bool object, bool (*item)(kv_trace__cursor *c, void *state),
                                  void *state)
{
    const char close = object ? '}' : ']';
    if (!kv_trace__take(c, object ? '{' : '['))
        return kv_trace__fail(c, object ? "expected '{'" : "expected '['");
    if (kv_trace__take(c, close))
        return true;
    do {
        if (!item(c, state))
            return false;
    } while (kv_trace__take(c, ','));
    return kv_trace__take(c, close) || kv_trace__fail(c, object ? "expected ',' or '}'" : "expected ',' or ']'");
}

/* Skips a string. What lies between the quotes, with escapes as written, is then in c->at[-1 - *size .. -1). */
static inline bool kv_trace__string(kv_trace__cursor *c, size_t *size)
{
    if (kv_trace__peek(c) != '"')
        return kv_trace__fail(c, "expected a string");
    const char *const text = ++c->at;
    for (; kv_trace__peek(c) != '"'; c->at++) {
        if (kv_trace__peek(c) < 0x20)
            return kv_trace__fail(c, c->at == c->end ? "the string does not end" : "control character in a string");
        if (*c->at != '\\')
            continue;
        c->at++;
        const int escape = kv_trace__peek(c);
        if (escape <= 0 || !strchr("\"\\/bfnrtu", escape))
            return kv_trace__fail(c, "no such escape");
        for (int i = 0; escape == 'u' && i < 4; i++) {
            c->at++;
            if (!isxdigit(kv_trace__peek(c)))
                return kv_trace__fail(c, "expected four hex digits");
        }
    }
    *size = (size_t)(c->at++ - text);
    return true;
}

/* Reads a whole number from 0 to INT64_MAX. */
static inline bool kv_trace__count(kv_trace__cursor *c, int64_t *value)
{
    const char *const first = c->at;
    if (kv_trace__peek(c) == '-')
        return kv_trace__fail(c, "negative number");
    if (!isdigit(kv_trace__peek(c)))
        return kv_trace__fail(c, "expected a whole number");
    for (*value = 0; isdigit(kv_trace__peek(c)); c->at++) {
        const int digit = *c->at - '0';
        if (*value > (INT64_MAX - digit) / 10)
            return kv_trace__fail(c, "number too large");
        *value = *value * 10 + digit;
    }
    if (*first == '0' && c->at - first > 1)
        return kv_trace__fail(c, "number with a leading zero");
    if (kv_trace__peek(c) == '.' || kv_trace__peek(c) == 'e' || kv_trace__peek(c) == 'E')
        return kv_trace__fail(c, "expected a whole number");
    return true;
}

static inline bool kv_trace__skip_member(kv_trace__cursor *c, void *depth);

/* Skips any value. *depth (an int) is how deep it is nested. A number may be any row of a number's characters. */
static inline bool kv_trace__skip(kv_trace__cursor *c, void *depth)
{
    static const char *const words[] = {"true", "false", "null"};
    const int byte = kv_trace__peek(c);
    int deeper = *(const int *)depth + 1;
    size_t size;
    if ((byte == '{' || byte == '[') && deeper > KV_TRACE_DEPTH_MAX)
        return kv_trace__fail(c, "nested too deep");
    if (byte == '{' || byte == '[')
        return kv_trace__list(c, byte == '{', byte == '{' ? kv_trace__skip_member : kv_trace__skip, &deeper);
    if (byte == '"')
        return kv_trace__string(c, &size);
    if (byte == '-' || isdigit(byte)) {
        while (kv_trace__peek(c) > 0 && strchr("+-.0123456789Ee", kv_trace__peek(c)))
            c->at++;
        return true;
    }
    for (int i = 0; i < 3; i++) {
        size = strlen(words[i]);
        if ((size_t)(c->end - c->at) >= size && memcmp(c->at, words[i], size) == 0) {
            c->at += size;
            return true;
        }
    }
    return kv_trace__fail(c, "expected a value");
}

static inline bool kv_trace__skip_member(kv_trace__cursor *c, void *depth)
{
    size_t size;
    if (!kv_trace__string(c, &size))
        return false;
    return kv_trace__take(c, ':') ? kv_trace__skip(c, depth) : kv_trace__fail(c, "expected ':'");
}

/* ---- one request ------------------------------------------------------------------------------------------------- */

static const char *const kv_trace__keys[] = {"timestamp", "input_length", "output_length", "hash_ids"};

typedef struct kv_trace__line {
    kv_trace_request *out;
    int64_t *ids;
    unsigned seen; /* bit k: key k of kv_trace__keys has been read */
} kv_trace__line;

static inline bool kv_trace__id(kv_trace__cursor *c, void *state)
{
    kv_trace__line *const line = (kv_trace__line *)state;
    return kv_trace__count(c, &line->ids[line->out->id_count++]);
}

/* Reads one "key": value of the request. */
static inline bool kv_trace__member(kv_trace__cursor *c, void *state)
{
    kv_trace__line *const line = (kv_trace__line *)state;
    int64_t *const counts[] = {&line->out->timestamp, &line->out->input_length, &line->out->output_length};
    const char *const start = c->at;
    size_t size;
    unsigned k = 0;
    int depth = 0;
    if (!kv_trace__string(c, &size))
        return false;
    while (k < 4 && (strlen(kv_trace__keys[k]) != size || memcmp(kv_trace__keys[k], start + 1, size) != 0))
        k++;
    if (k < 4 && (line->seen & 1u << k)) {
        c->at = start;
        return kv_trace__fail(c, "key given twice");
    }
    if (!kv_trace__take(c, ':'))
        return kv_trace__fail(c, "expected ':'");
    line->seen |= 1u << k;
    if (k < 3)
        return kv_trace__count(c, counts[k]);
    return k == 3 ? kv_trace__list(c, false, kv_trace__id, line) : kv_trace__skip(c, &depth);
}

static inline bool kv_trace__complete(kv_trace__cursor *c, const kv_trace__line *line)
{
    const kv_trace_request *const request = line->out;
    const uint64_t blocks = ((uint64_t)request->input_length + KV_TRACE_BLOCK - 1) / KV_TRACE_BLOCK;
    unsigned k = 1;
    while (k < 4 && (line->seen & 1u << k))
        k++;
    if (k < 4)
        snprintf(c->error, c->error_size, "no \"%s\"", kv_trace__keys[k]);
    else if (request->input_length == 0)
        snprintf(c->error, c->error_size, "input_length is 0");
    else if (blocks != request->id_count)
        snprintf(c->error, c->error_size, "%llu tokens are %llu blocks, but hash_ids has %zu",
                 (unsigned long long)request->input_length, (unsigned long long)blocks, request->id_count);
    else
        return true;
    return false;
}

/* Reads the request in line[0 .. size), which needs no terminator. Sets the lengths, timestamp and id_count of *out,
   which are 0 before, and ids, which must have room for size / 2 + 1 numbers: more than a line of that size can hold.
   If it returns false, error says why. */
static inline bool kv_trace_parse(const char *line, size_t size, kv_trace_request *out, int64_t *ids, char *error,
                                  size_t error_size)
{
    kv_trace__cursor c = {line, line, line + size, error, error_size};
    kv_trace__line state = {out, ids, 0};
    if (!kv_trace__list(&c, true, kv_trace__member, &state))
        return false;
    return c.at == c.end ? kv_trace__complete(&c, &state) : kv_trace__fail(&c, "text after the request");
}

/* ---- the file ---------------------------------------------------------------------------------------------------- */

static inline bool kv_trace__refuse(kv_trace *trace, size_t line, const char *what, const char *why)
{
    trace->error_line = line;
    snprintf(trace->error, sizeof trace->error, "%s%s%s", what, why ? ": " : "", why ? why : "");
    return false;
}

/* Makes room for `more` elements after `count`. Returns NULL if memory runs out; `old` then stays as it is. */
static inline void *kv_trace__grow(void *old, size_t count, size_t more, size_t *capacity, size_t element)
{
    if (more <= *capacity - count)
        return old;
    if (*capacity > SIZE_MAX / element / 2 - more)
        return NULL;
    void *const bigger = realloc(old, (*capacity * 2 + more) * element);
    if (bigger)
        *capacity = *capacity * 2 + more;
    return bigger;
}

/* Adds the request in line[0 .. size), which needs no terminator; a blank line adds none. Before line 1 a byte order
   mark is skipped. Fails as kv_trace_read. */
static inline bool kv_trace_add_line(kv_trace *trace, const char *line, size_t size, size_t number)
{
    if (number == 1 && size >= 3 && memcmp(line, "\xef\xbb\xbf", 3) == 0)
        line += 3, size -= 3;
    kv_trace__cursor c = {line, line, line + size, NULL, 0};
    kv_trace__space(&c);
    if (c.at == c.end)
        return true;

    void *const requests = kv_trace__grow(trace->requests, trace->count, 1, &trace->capacity, sizeof *trace->requests);
    trace->requests = requests ? (kv_trace_request *)requests : trace->requests;
    void *const ids =
        kv_trace__grow(trace->ids, trace->id_count, size / 2 + 1, &trace->id_capacity, sizeof *trace->ids);
    trace->ids = ids ? (int64_t *)ids : trace->ids;
    if (!requests || !ids)
        return kv_trace__refuse(trace, number, "out of memory", NULL);

    kv_trace_request request = {.first_id = trace->id_count, .line = number};
    trace->error_line = number;
    if (!kv_trace_parse(line, size, &request, trace->ids + trace->id_count, trace->error, sizeof trace->error))
        return false;
    trace->requests[trace->count++] = request;
    trace->id_count += request.id_count;
    return true;
}

/* Returns all bytes of a file ("-": of standard input), which the caller frees. Returns NULL if it refuses the file, and
   sets error_line and error. */
static inline char *kv_trace_load(kv_trace *trace, const char *path, size_t *size)
{
    FILE *const file = strcmp(path, "-") == 0 ? stdin : fopen(path, "rb");
    char *bytes = NULL;
    size_t capacity = 0;
    bool ok = file || kv_trace__refuse(trace, 0, "cannot be opened", strerror(errno));
    for (*size = 0; ok && *size == capacity;) {
        capacity = capacity * 2 + 4096;
        char *const bigger = (char *)realloc(bytes, capacity);
        bytes = bigger ? bigger : bytes;
        *size += bigger ? fread(bytes + *size, 1, capacity - *size, file) : 0;
        ok = bigger || kv_trace__refuse(trace, 0, "out of memory", NULL);
    }
    if (ok && ferror(file))
        ok = kv_trace__refuse(trace, 0, "cannot be read", strerror(errno));
    if (file && file != stdin)
        fclose(file);
    if (ok)
        return bytes;
    free(bytes);
    return NULL;
}

/* Adds a file's requests. Returns false if it refuses the file, and sets error_line and error; kv_trace_free is still
   needed. */
static inline bool kv_trace_read(kv_trace *trace, const char *path)
{
    const size_t before = trace->count;
    size_t size, number = 0;
    char *const bytes = kv_trace_load(trace, path, &size);
    bool ok = bytes != NULL;
    for (size_t begin = 0, end; ok && begin < size; begin = end + 1) {
        const char *const newline = (const char *)memchr(bytes + begin, '\n', size - begin);
        end = newline ? (size_t)(newline - bytes) : size;
        number++;
        ok = end - begin <= KV_TRACE_LINE_MAX
                 ? kv_trace_add_line(trace, bytes + begin, end - begin, number)
                 : kv_trace__refuse(trace, number, "longer than 1 MiB, the limit for a line", NULL);
    }
    free(bytes);
    if (ok && trace->count == before)
        ok = kv_trace__refuse(trace, 0, "holds no request", NULL);
    return ok;
}

static inline void kv_trace_free(kv_trace *trace)
{
    free(trace->requests);
    free(trace->ids);
    memset(trace, 0, sizeof *trace);
}

#endif /* KV_TRACE_H */
