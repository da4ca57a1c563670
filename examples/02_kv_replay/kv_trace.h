/* SPDX-License-Identifier: MIT */
/* kv_trace.h: reads request traces in the Mooncake format: JSON lines, one request each. C11, no dependency.

       {"timestamp": 27482, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 2353]}

   The timestamp is in ms, lengths are in tokens. There is one id per block of 512 input tokens; the last block may be
   partial. Equal ids mean equal blocks with equal history. Keys may come in any order; without "timestamp" it is 0, the
   others are required. Unknown keys may hold any JSON value and are skipped by their brackets, as are blank lines and a byte
   order mark of UTF-8 before the first line. Everything else is refused, with the line's number. */
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

#define KV_TRACE_BLOCK 512 /* tokens */

typedef struct kv_trace_request {
    int64_t timestamp, input_length, output_length;
    size_t first_id, id_count; /* its ids in kv_trace.ids */
    size_t line;               /* in the file, from 1 */
} kv_trace_request;

typedef struct kv_trace { /* zero-initialise */
    kv_trace_request *requests;
    int64_t *ids; /* of all requests, one after another */
    size_t count, id_count;
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

static inline bool kv_trace__expect(kv_trace__cursor *c, char byte, const char *what)
{
    return kv_trace__take(c, byte) || kv_trace__fail(c, what);
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

/* Skips any value: as far as its brackets go. What is between them need only be made of JSON's words and signs. */
static inline bool kv_trace__skip(kv_trace__cursor *c)
{
    size_t depth = 0, size;
    do {
        const char *const begin = c->at;
        if (kv_trace__peek(c) == '"') {
            if (!kv_trace__string(c, &size))
                return false;
        } else if (kv_trace__take(c, '{') || kv_trace__take(c, '[')) {
            depth++;
        } else if (depth && (kv_trace__take(c, '}') || kv_trace__take(c, ']'))) {
            depth--;
        } else if (!depth || !(kv_trace__take(c, ',') || kv_trace__take(c, ':'))) {
            while (isalnum(kv_trace__peek(c)) || (kv_trace__peek(c) > 0 && strchr("+-.", kv_trace__peek(c))))
                c->at++;
            if (c->at == begin)
                return kv_trace__fail(c, "expected a value");
        }
        kv_trace__space(c);
    } while (depth > 0);
    return true;
}

/* ---- one request ------------------------------------------------------------------------------------------------- */

static const char *const kv_trace__keys[] = {"timestamp", "input_length", "output_length", "hash_ids"};

/* Reads one "key": value of the request. Bit k of *seen: key k has been read. */
static inline bool kv_trace__member(kv_trace__cursor *c, kv_trace_request *out, int64_t *ids, unsigned *seen)
{
    int64_t *const counts[] = {&out->timestamp, &out->input_length, &out->output_length};
    const char *const start = c->at;
    size_t size;
    unsigned k = 0;
    if (!kv_trace__string(c, &size))
        return false;
    while (k < 4 && (strlen(kv_trace__keys[k]) != size || memcmp(kv_trace__keys[k], start + 1, size) != 0))
        k++;
    if (k < 4 && (*seen & 1u << k)) {
        c->at = start;
        return kv_trace__fail(c, "key given twice");
    }
    *seen |= 1u << k;
    if (!kv_trace__expect(c, ':', "expected ':'"))
        return false;
    if (k != 3)
        return k < 3 ? kv_trace__count(c, counts[k]) : kv_trace__skip(c);
    if (!kv_trace__expect(c, '[', "expected '['"))
        return false;
    if (kv_trace__take(c, ']'))
        return true;
    do {
        if (!kv_trace__count(c, &ids[out->id_count++]))
            return false;
    } while (kv_trace__take(c, ','));
    return kv_trace__expect(c, ']', "expected ',' or ']'");
}

static inline bool kv_trace__complete(kv_trace__cursor *c, const kv_trace_request *request, unsigned seen)
{
    const uint64_t blocks = ((uint64_t)request->input_length + KV_TRACE_BLOCK - 1) / KV_TRACE_BLOCK;
    unsigned k = 1;
    while (k < 4 && (seen & 1u << k))
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
    unsigned seen = 0;
    if (!kv_trace__expect(&c, '{', "expected '{'"))
        return false;
    if (!kv_trace__take(&c, '}')) {
        do {
            if (!kv_trace__member(&c, out, ids, &seen))
                return false;
        } while (kv_trace__take(&c, ','));
        if (!kv_trace__expect(&c, '}', "expected ',' or '}'"))
            return false;
    }
    return c.at == c.end ? kv_trace__complete(&c, out, seen) : kv_trace__fail(&c, "text after the request");
}

/* ---- the file ---------------------------------------------------------------------------------------------------- */

static inline bool kv_trace__refuse(kv_trace *trace, size_t line, const char *what, const char *why)
{
    trace->error_line = line;
    snprintf(trace->error, sizeof trace->error, "%s%s%s", what, why ? ": " : "", why ? why : "");
    return false;
}

/* Adds the requests in the lines of text[0 .. size), which needs no terminator. Fails as kv_trace_read. */
static inline bool kv_trace_add(kv_trace *trace, const char *text, size_t size)
{
    const char *const end = text + size;
    size_t lines = 1, number = 0;
    for (const char *c = text; c < end; c++)
        lines += *c == '\n';
    void *const requests = realloc(trace->requests, (trace->count + lines) * sizeof *trace->requests);
    trace->requests = requests ? (kv_trace_request *)requests : trace->requests;
    void *const ids = realloc(trace->ids, (trace->id_count + size / 2 + 1) * sizeof *trace->ids);
    trace->ids = ids ? (int64_t *)ids : trace->ids;
    if (!requests || !ids)
        return kv_trace__refuse(trace, 0, "out of memory", NULL);
    if (size >= 3 && memcmp(text, "\xef\xbb\xbf", 3) == 0)
        text += 3;
    for (const char *newline; text < end; text = newline + 1) {
        newline = (const char *)memchr(text, '\n', (size_t)(end - text));
        newline = newline ? newline : end;
        kv_trace_request request = {.first_id = trace->id_count, .line = ++number};
        kv_trace__cursor c = {text, text, newline, NULL, 0};
        kv_trace__space(&c);
        if (c.at == newline)
            continue;
        trace->error_line = number;
        if (!kv_trace_parse(text, (size_t)(newline - text), &request, trace->ids + trace->id_count, trace->error,
                            sizeof trace->error))
            return false;
        trace->requests[trace->count++] = request;
        trace->id_count += request.id_count;
    }
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
    size_t size;
    char *const bytes = kv_trace_load(trace, path, &size);
    bool ok = bytes && kv_trace_add(trace, bytes, size);
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
