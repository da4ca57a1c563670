/* SPDX-License-Identifier: MIT */
/* kv_trace.h: reads request traces in the Mooncake format: JSON lines, one request each. C11, no dependency.

       {"timestamp": 27482, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 2353]}

   The timestamp is in ms, lengths are in tokens. There is one id per block of 512 input tokens; the last block may be
   partial. Equal ids mean equal blocks with equal history. Keys may come in any order; without "timestamp" it is 0, the
   others are required. Unknown keys may hold any JSON value and are skipped, as are blank lines and a byte order mark
   of UTF-8 before the first line. Everything else is refused, with the line's number. */
#ifndef KV_TRACE_H
#define KV_TRACE_H

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

/* Adds a file's requests; "-" is standard input. Returns false if it refuses the file, and sets error_line and error;
   kv_trace_free is still needed. */
static inline bool kv_trace_read(kv_trace *trace, const char *path);

/* Adds the request in line[0 .. size), which needs no terminator; a blank line adds none. Before line 1 a byte order
   mark is skipped. Fails as kv_trace_read. */
static inline bool kv_trace_add_line(kv_trace *trace, const char *line, size_t size, size_t number);

static inline void kv_trace_free(kv_trace *trace);

/* ---- one line ---------------------------------------------------------------------------------------------------- */

typedef struct kv_trace__cursor {
    const char *at, *begin, *end;
    char *error;
    size_t error_size;
} kv_trace__cursor;

/* Returns the byte at the cursor, or -1 at the end. */
static inline int kv_trace__peek(const kv_trace__cursor *c)
{
    return c->at < c->end ? (unsigned char)*c->at : -1;
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

static inline bool kv_trace__is_digit(int byte)
{
    return byte >= '0' && byte <= '9';
}

static inline bool kv_trace__is_hex(int byte)
{
    return kv_trace__is_digit(byte) || (byte >= 'a' && byte <= 'f') || (byte >= 'A' && byte <= 'F');
}

/* Reads a string. *text is what lies between the quotes, with escapes as written. */
static inline bool kv_trace__string(kv_trace__cursor *c, const char **text, size_t *size)
{
    if (kv_trace__peek(c) != '"')
        return kv_trace__fail(c, "expected a string");
    *text = ++c->at;
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
            if (!kv_trace__is_hex(kv_trace__peek(c)))
                return kv_trace__fail(c, "expected four hex digits");
        }
    }
    *size = (size_t)(c->at++ - *text);
    return true;
}

static inline bool kv_trace__digits(kv_trace__cursor *c)
{
    if (!kv_trace__is_digit(kv_trace__peek(c)))
        return kv_trace__fail(c, "expected a digit");
    while (kv_trace__is_digit(kv_trace__peek(c)))
        c->at++;
    return true;
}

static inline bool kv_trace__number(kv_trace__cursor *c)
{
    if (kv_trace__peek(c) == '-')
        c->at++;
    if (kv_trace__peek(c) == '0')
        c->at++;
    else if (!kv_trace__digits(c))
        return false;
    if (kv_trace__peek(c) == '.') {
        c->at++;
        if (!kv_trace__digits(c))
            return false;
    }
    if (kv_trace__peek(c) != 'e' && kv_trace__peek(c) != 'E')
        return true;
    c->at++;
    if (kv_trace__peek(c) == '+' || kv_trace__peek(c) == '-')
        c->at++;
    return kv_trace__digits(c);
}

static inline bool kv_trace__word(kv_trace__cursor *c, const char *word)
{
    const size_t size = strlen(word);
    if ((size_t)(c->end - c->at) < size || memcmp(c->at, word, size) != 0)
        return kv_trace__fail(c, "expected a value");
    c->at += size;
    return true;
}

static inline bool kv_trace__skip(kv_trace__cursor *c, int depth);

static inline bool kv_trace__skip_member(kv_trace__cursor *c, int depth)
{
    const char *text;
    size_t size;
    if (!kv_trace__string(c, &text, &size))
        return false;
    return kv_trace__take(c, ':') ? kv_trace__skip(c, depth) : kv_trace__fail(c, "expected ':'");
}

/* Skips an array or object; the cursor is at its bracket. */
static inline bool kv_trace__skip_nested(kv_trace__cursor *c, int depth)
{
    const bool object = *c->at == '{';
    const char close = object ? '}' : ']';
    if (depth == KV_TRACE_DEPTH_MAX)
        return kv_trace__fail(c, "nested too deep");
    c->at++;
    if (kv_trace__take(c, close))
        return true;
    do {
        if (!(object ? kv_trace__skip_member(c, depth + 1) : kv_trace__skip(c, depth + 1)))
            return false;
    } while (kv_trace__take(c, ','));
    kv_trace__space(c);
    if (kv_trace__peek(c) != close)
        return kv_trace__fail(c, object ? "expected ',' or '}'" : "expected ',' or ']'");
    c->at++;
    return true;
}

/* Skips any value. */
static inline bool kv_trace__skip(kv_trace__cursor *c, int depth)
{
    const char *text;
    size_t size;
    switch (kv_trace__peek(c)) {
    case '{':
    case '[':
        return kv_trace__skip_nested(c, depth);
    case '"':
        return kv_trace__string(c, &text, &size);
    case 't':
        return kv_trace__word(c, "true");
    case 'f':
        return kv_trace__word(c, "false");
    case 'n':
        return kv_trace__word(c, "null");
    default:
        return kv_trace__peek(c) == '-' || kv_trace__is_digit(kv_trace__peek(c))
                   ? kv_trace__number(c)
                   : kv_trace__fail(c, "expected a value");
    }
}

/* Reads a whole number from 0 to INT64_MAX. */
static inline bool kv_trace__count(kv_trace__cursor *c, int64_t *value)
{
    const char *const first = c->at;
    if (kv_trace__peek(c) == '-')
        return kv_trace__fail(c, "negative number");
    if (!kv_trace__is_digit(kv_trace__peek(c)))
        return kv_trace__fail(c, "expected a whole number");
    for (*value = 0; kv_trace__is_digit(kv_trace__peek(c)); c->at++) {
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

static inline bool kv_trace__ids(kv_trace__cursor *c, int64_t *ids, size_t *count)
{
    *count = 0;
    if (!kv_trace__take(c, '['))
        return kv_trace__fail(c, "expected '['");
    if (kv_trace__take(c, ']'))
        return true;
    do {
        if (!kv_trace__count(c, &ids[(*count)++]))
            return false;
    } while (kv_trace__take(c, ','));
    return kv_trace__take(c, ']') ? true : kv_trace__fail(c, "expected ',' or ']'");
}

/* Reads one "key": value of the request. Bit k of *seen says that known key k has been read. */
static inline bool kv_trace__member(kv_trace__cursor *c, kv_trace_request *out, int64_t *ids, unsigned *seen)
{
    static const char *const keys[] = {"timestamp", "input_length", "output_length", "hash_ids"};
    int64_t *const counts[] = {&out->timestamp, &out->input_length, &out->output_length};
    const char *text;
    size_t size;
    unsigned k = 0;
    const char *const start = c->at;
    if (!kv_trace__string(c, &text, &size))
        return false;
    while (k < 4 && (strlen(keys[k]) != size || memcmp(keys[k], text, size) != 0))
        k++;
    if (k < 4 && (*seen & 1u << k)) {
        c->at = start;
        return kv_trace__fail(c, "key given twice");
    }
    if (!kv_trace__take(c, ':'))
        return kv_trace__fail(c, "expected ':'");
    *seen |= 1u << k;
    if (k < 3)
        return kv_trace__count(c, counts[k]);
    return k == 3 ? kv_trace__ids(c, ids, &out->id_count) : kv_trace__skip(c, 0);
}

static inline bool kv_trace__complete(kv_trace__cursor *c, const kv_trace_request *request, unsigned seen)
{
    static const char *const missing[] = {"no \"input_length\"", "no \"output_length\"", "no \"hash_ids\""};
    for (unsigned k = 1; k < 4; k++) {
        if (!(seen & 1u << k)) {
            snprintf(c->error, c->error_size, "%s", missing[k - 1]);
            return false;
        }
    }
    if (request->input_length == 0) {
        snprintf(c->error, c->error_size, "input_length is 0");
        return false;
    }
    const uint64_t blocks = ((uint64_t)request->input_length + KV_TRACE_BLOCK - 1) / KV_TRACE_BLOCK;
    if (blocks == request->id_count)
        return true;
    snprintf(c->error, c->error_size, "%llu tokens are %llu blocks, but hash_ids has %zu",
             (unsigned long long)request->input_length, (unsigned long long)blocks, request->id_count);
    return false;
}

/* Reads the request in line[0 .. size), which needs no terminator. Sets the lengths, timestamp and id_count of *out,
   and ids, which must have room for size / 2 + 1 numbers: more than a line of that size can hold. If it returns false,
   error says why. */
static inline bool kv_trace_parse(const char *line, size_t size, kv_trace_request *out, int64_t *ids, char *error,
                                  size_t error_size)
{
    kv_trace__cursor c = {line, line, line + size, error, error_size};
    unsigned seen = 0;
    if (!kv_trace__take(&c, '{'))
        return kv_trace__fail(&c, "expected '{'");
    if (!kv_trace__take(&c, '}')) {
        do {
            if (!kv_trace__member(&c, out, ids, &seen))
                return false;
        } while (kv_trace__take(&c, ','));
        if (!kv_trace__take(&c, '}'))
            return kv_trace__fail(&c, "expected ',' or '}'");
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
    if (!kv_trace_parse(line, size, &request, trace->ids + trace->id_count, trace->error, sizeof trace->error)) {
        trace->error_line = number;
        return false;
    }
    trace->requests[trace->count++] = request;
    trace->id_count += request.id_count;
    return true;
}

static inline bool kv_trace__read_lines(kv_trace *trace, FILE *file, char *line)
{
    size_t size = 0, number = 1;
    int byte;
    while ((byte = getc(file)) != EOF) {
        if (byte == '\n') {
            if (!kv_trace_add_line(trace, line, size, number++))
                return false;
            size = 0;
        } else if (size == KV_TRACE_LINE_MAX) {
            return kv_trace__refuse(trace, number, "longer than 1 MiB, the limit for a line", NULL);
        } else {
            line[size++] = (char)byte;
        }
    }
    if (ferror(file))
        return kv_trace__refuse(trace, 0, "cannot be read", strerror(errno));
    return kv_trace_add_line(trace, line, size, number);
}

static inline bool kv_trace_read(kv_trace *trace, const char *path)
{
    const size_t before = trace->count;
    FILE *const file = strcmp(path, "-") == 0 ? stdin : fopen(path, "rb");
    if (!file)
        return kv_trace__refuse(trace, 0, "cannot be opened", strerror(errno));
    char *const line = (char *)malloc(KV_TRACE_LINE_MAX);
    bool ok = line ? kv_trace__read_lines(trace, file, line) : kv_trace__refuse(trace, 0, "out of memory", NULL);
    free(line);
    if (file != stdin)
        fclose(file);
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
