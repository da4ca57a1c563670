/* SPDX-License-Identifier: MIT */
/* Reads a trace file into a trace (trace_events.h). It accepts

   - Chrome's JSON, {"traceEvents": [...]} or a bare array: what torch's profiler, kvprim's 10_trace, and converters of
     nsys's SQLite files write. Read are complete events ("ph": "X") and pairs ("B", "E") of these categories: kernel,
     gpu_memcpy, gpu_memset, cuda_runtime, cuda_driver, user_annotation, and of converters cuda, cuda_api, nvtx;
   - the lines of `nsys export --type jsonlines`: one object per row of the tables that NVIDIA documents for SQLite.
     Read are CUPTI_ACTIVITY_KIND_KERNEL, _MEMCPY, _MEMSET, _RUNTIME, NVTX_EVENTS (push and pop) and StringIds. The JSON
     of older versions ("CudaEvent": ...) is refused, because its fields are not documented;
   - either of them compressed; this calls gzip.

   A trace is of one process: equal correlations in several processes are taken for the same call.

       trace t = {0};
       trace_reading *r = trace_reading_new("trace.json.gz");
       if (trace_read(r, &t) != 0)
           fprintf(stderr, "%s\n", r->error);  // trace.json.gz: byte 512 of its text: the file ends in a string
       free(r);

   The file is read once, front to back; memory is needed only for the events of these categories. Linux, C11 or C++. */
#ifndef TRACE_READ_H
#define TRACE_READ_H

#include "trace_events.h"
#include <fcntl.h>
#include <stdarg.h>
#include <stdbool.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum {
    trace_read_depth = 64,        /* values inside each other; torch's traces have 5 */
    trace_name_bytes = 4096,      /* longer names are cut; torch's kernels have up to 2,000 bytes */
    trace_names_most = 1 << 20,   /* different names; more are an error */
    trace_open_most = 1 << 16,    /* events that have begun ("B") and not ended */
    trace_most_default = 1 << 24, /* events that are kept, 48 bytes each */
    trace_buffer_bytes = 1 << 16,
    trace_other_most = 6 /* categories that an error names */
};

/* What is read of an event. */
enum {
    TRACE_PH,
    TRACE_CAT,
    TRACE_TS,
    TRACE_DUR,
    TRACE_PID,
    TRACE_TID,
    TRACE_STREAM,
    TRACE_DEVICE,
    TRACE_CORRELATION,
    TRACE_BYTES,
    TRACE_TABLE,
    TRACE_BEGIN,
    TRACE_END,
    TRACE_COPY_KIND,
    TRACE_SHORT_ID,
    TRACE_FULL_ID,
    TRACE_TYPE,
    TRACE_ID,
    TRACE_OLD_NSYS,
    TRACE_NAME,
    TRACE_FIELDS
};

typedef struct trace_open_event {
    trace_event event;
    bool read;
    uint64_t place; /* of its process and thread */
} trace_open_event;

typedef struct trace_reading {
    const char *path;     /* "-": standard input */
    const char *category; /* its events are ranges, too; NULL: none */
    bool full_names;      /* names of kernels with namespaces, template arguments and parameters */
    bool keep_cut;        /* if the file is cut, keep the events before the cut, and say so in `cut` */
    size_t most;          /* events to keep */
    char error[640], cut[640];
    size_t seen; /* events in the file */
    char other[trace_other_most][32];
    size_t other_count[trace_other_most]; /* events of categories that are not read */

    /* the bytes */
    const unsigned char *bytes;
    size_t at, size;
    uint64_t before; /* bytes before these */
    int file;        /* -1: there are no more bytes */
    pid_t gzip;      /* 0: not compressed */
    time_t told;     /* when progress was printed */
    unsigned char buffer[trace_buffer_bytes];

    /* the event that is being read */
    uint32_t half; /* the first of two escapes that are one character */
    bool ended;    /* the error is that the file ends */
    bool found;    /* "traceEvents" */
    bool has[TRACE_FIELDS];
    char field[TRACE_NAME][64], name[trace_name_bytes];

    trace_open_event *open;
    size_t open_count;
    trace ids; /* nsys: the numbers of strings, and the strings in the same order */
    char **strings;
    trace *into;
} trace_reading;

/* Where a field is: the object that it is in, "" for the event itself, and its key. */
static const struct trace_known {
    const char *parent, *key;
    int field;
} trace_known[] = {
    {"", "ph", TRACE_PH},
    {"", "cat", TRACE_CAT},
    {"", "name", TRACE_NAME},
    {"", "ts", TRACE_TS},
    {"", "dur", TRACE_DUR},
    {"", "pid", TRACE_PID},
    {"", "tid", TRACE_TID},
    {"args", "stream", TRACE_STREAM},
    {"args", "device", TRACE_DEVICE},
    {"args", "correlation", TRACE_CORRELATION},
    {"args", "bytes", TRACE_BYTES},
    /* columns of nsys's tables */
    {"", "table", TRACE_TABLE},
    {"", "start", TRACE_BEGIN},
    {"", "end", TRACE_END},
    {"", "deviceId", TRACE_DEVICE},
    {"", "streamId", TRACE_STREAM},
    {"", "correlationId", TRACE_CORRELATION},
    {"", "globalTid", TRACE_TID},
    {"", "bytes", TRACE_BYTES},
    {"", "copyKind", TRACE_COPY_KIND},
    {"", "shortName", TRACE_SHORT_ID},
    {"", "demangledName", TRACE_FULL_ID},
    {"", "nameId", TRACE_SHORT_ID},
    {"", "textId", TRACE_SHORT_ID},
    {"", "text", TRACE_NAME},
    {"", "eventType", TRACE_TYPE},
    {"", "id", TRACE_ID},
    {"", "value", TRACE_NAME},
    {"CudaEvent", "startNs", TRACE_OLD_NSYS},
    {"TraceProcessEvent", "startNs", TRACE_OLD_NSYS},
};

/* ---- errors and bytes ---- */

/* Keeps the first error, with its place. Returns false. */
__attribute__((format(printf, 2, 3))) static bool trace_fail(trace_reading *r, const char *format, ...)
{
    char what[400];
    va_list args;
    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    if (r->error[0] == 0)
        snprintf(r->error, sizeof r->error, "%.200s: byte %llu%s: %s", r->path, (unsigned long long)(r->before + r->at),
                 r->gzip ? " of its text" : "", what);
    trace_show(r->error);
    return false;
}

/* Says on a terminal how far it is, once a second. */
static void trace_tell(trace_reading *r)
{
    const time_t now = time(NULL);
    if (now == r->told || !isatty(2))
        return;
    if (r->told)
        fprintf(stderr, "\r%s: %llu MB, %zu events", r->path, (unsigned long long)r->before >> 20, r->seen);
    r->told = now;
}

/* Reads more bytes. Returns false at the end, and if they cannot be read. */
static bool trace_fill(trace_reading *r)
{
    ssize_t got = 0;
    if (r->file < 0)
        return false;
    do
        got = read(r->file, r->buffer, sizeof r->buffer);
    while (got < 0 && errno == EINTR);
    r->before += r->size;
    r->at = r->size = 0;
    if (got < 0)
        return trace_fail(r, "cannot be read: %s", strerror(errno));
    r->bytes = r->buffer;
    r->size = (size_t)got;
    trace_tell(r);
    return got > 0;
}

/* Returns the next byte, or -1 at the end. */
static int trace_peek(trace_reading *r)
{
    return r->at < r->size || trace_fill(r) ? r->bytes[r->at] : -1;
}

static int trace_after_space(trace_reading *r)
{
    int byte = trace_peek(r);
    while (byte == ' ' || byte == '\n' || byte == '\r' || byte == '\t') {
        r->at++;
        byte = trace_peek(r);
    }
    return byte;
}

/* Fails because of the next byte, or because there is none. */
static bool trace_expected(trace_reading *r, const char *what)
{
    const int byte = trace_peek(r);
    if (byte < 0) {
        r->ended |= r->error[0] == 0;
        return trace_fail(r, "the file ends where %s is expected", what);
    }
    return byte > 32 && byte < 127 ? trace_fail(r, "expected %s, found '%c'", what, byte)
                                   : trace_fail(r, "expected %s, found byte 0x%02x", what, (unsigned)byte);
}

/* ---- JSON ---- */

typedef struct trace_text {
    char *to; /* NULL: nowhere */
    size_t used, room;
} trace_text;

static void trace_put(trace_text *text, unsigned byte)
{
    if (text->used + 1 < text->room)
        text->to[text->used++] = (char)byte;
}

/* Puts a code point as UTF-8. */
static void trace_put_code(trace_text *text, uint32_t code)
{
    const int more = code < 0x80 ? 0 : code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
    static const uint32_t first[4] = {0, 0xc0, 0xe0, 0xf0};
    if (text->used + (size_t)more + 1 >= text->room)
        return;
    trace_put(text, first[more] | code >> 6 * more);
    for (int i = more - 1; i >= 0; i--)
        trace_put(text, 0x80 | (code >> 6 * i & 63));
}

static bool trace_hex(trace_reading *r, uint32_t *code)
{
    *code = 0;
    for (int i = 0; i < 4; i++) {
        const int c = trace_peek(r);
        const bool digit = c >= '0' && c <= '9', letter = (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F');
        if (!digit && !letter)
            return trace_expected(r, "a hex digit after \\u");
        *code = *code << 4 | (uint32_t)(digit ? c - '0' : (c | 32) - 'a' + 10);
        r->at++;
    }
    return true;
}

/* Reads what follows a backslash. Two escapes are one character of more than 16 bits; half of one is left out, as
   is 0, which would end the name. */
static bool trace_escape(trace_reading *r, trace_text *text)
{
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    const int escape = trace_peek(r);
    const char *const known = escape > 0 ? strchr(from, escape) : NULL;
    uint32_t code;
    if (!known && escape != 'u')
        return trace_expected(r, "one of \"\\/bfnrtu after \\");
    r->at++;
    if (known) {
        r->half = 0;
        trace_put(text, (unsigned char)to[known - from]);
        return true;
    }
    if (!trace_hex(r, &code))
        return false;
    const bool second = code >> 10 == 0xdc00 >> 10;
    if (second && r->half)
        code = 0x10000 + ((r->half & 0x3ff) << 10 | (code & 0x3ff));
    r->half = code >> 10 == 0xd800 >> 10 ? code : 0;
    if (!r->half && code && (!second || code > 0xffff))
        trace_put_code(text, code);
    return true;
}

/* Reads a string; the next byte is its quote. What does not fit into the text is left out. */
static bool trace_string(trace_reading *r, trace_text *text)
{
    r->at++;
    r->half = 0;
    for (;;) {
        const int c = trace_peek(r);
        if (c != '\\')
            r->half = 0;
        if (c == '"') {
            r->at++;
            if (text->room)
                text->to[text->used] = 0;
            return true;
        }
        if (c < 32)
            return trace_expected(r, "the rest of a string");
        r->at++;
        if (c != '\\')
            trace_put(text, (unsigned)c);
        else if (!trace_escape(r, text))
            return false;
    }
}

/* Skips digits. Returns whether there were any. */
static bool trace_digits(const char **c)
{
    const size_t count = strspn(*c, "0123456789");
    *c += count;
    return count > 0;
}

/* Returns whether the text is a number as JSON has them. */
static bool trace_is_number(const char *c)
{
    c += *c == '-';
    const bool zero = *c == '0';
    const char *const first = c;
    if (!trace_digits(&c) || (zero && c - first > 1))
        return false;
    if (*c == '.' && (c++, !trace_digits(&c)))
        return false;
    if ((*c == 'e' || *c == 'E') && (c += 1 + (c[1] == '+' || c[1] == '-'), !trace_digits(&c)))
        return false;
    return *c == 0;
}

/* Reads a number, true, false or null. */
static bool trace_literal(trace_reading *r, trace_text *text)
{
    char token[64];
    size_t n = 0;
    for (int c = trace_peek(r); c > 0 && strchr("+-.0123456789abcdefghijklmnopqrstuvwxyzE", c); c = trace_peek(r)) {
        if (n + 1 == sizeof token)
            return trace_fail(r, "a number of more than %zu characters", n);
        token[n++] = (char)c;
        r->at++;
    }
    token[n] = 0;
    if (n == 0)
        return trace_expected(r, "a value");
    if (trace_peek(r) < 0) /* it may go on */
        return trace_expected(r, "the rest of a value");
    if (!trace_is_number(token) && strcmp(token, "true") != 0 && strcmp(token, "false") != 0 &&
        strcmp(token, "null") != 0)
        return trace_fail(r, "'%s' is no value", token);
    for (size_t i = 0; i < n; i++)
        trace_put(text, (unsigned char)token[i]);
    if (text->room)
        text->to[text->used] = 0;
    return true;
}

static trace_text trace_field(trace_reading *r, const char *parent, const char *key)
{
    const size_t count = sizeof trace_known / sizeof *trace_known;
    trace_text text = {NULL, 0, 0};
    for (size_t i = 0; i < count; i++) {
        const struct trace_known *const known = trace_known + i;
        if (known->key[0] != key[0] || strcmp(known->key, key) != 0 || strcmp(known->parent, parent) != 0)
            continue;
        r->has[known->field] = true;
        text.to = known->field == TRACE_NAME ? r->name : r->field[known->field];
        text.room = known->field == TRACE_NAME ? sizeof r->name : sizeof r->field[0];
        break;
    }
    return text;
}

static bool trace_members(trace_reading *r, const char *parent, int depth);
static bool trace_events_array(trace_reading *r);

/* Reads a value, and keeps it if it is a known field. */
static bool trace_value(trace_reading *r, const char *parent, const char *key, int depth)
{
    const int c = trace_after_space(r);
    if ((c == '{' || c == '[') && depth == trace_read_depth)
        return trace_fail(r, "more than %d values inside each other", (int)trace_read_depth);
    if (c == '{')
        return trace_members(r, key, depth + 1);
    if (c == '[') {
        r->at++;
        for (int first = 1; trace_after_space(r) != ']'; first = 0) {
            if (!first && trace_peek(r) != ',')
                return trace_expected(r, "',' or ']' of an array");
            r->at += (size_t)!first;
            if (!trace_value(r, "[]", "[]", depth + 1))
                return false;
        }
        r->at++;
        return true;
    }
    trace_text text = trace_field(r, parent, key);
    const bool read = c == '"' ? trace_string(r, &text) : trace_literal(r, &text);
    if (read && c != '"' && text.to && strcmp(text.to, "null") == 0) /* as good as not there */
        text.to[0] = 0;
    return read;
}

/* Reads an object; its brace is next. The outermost has depth 0: there "traceEvents" is what is searched for. */
static bool trace_members(trace_reading *r, const char *parent, int depth)
{
    char key[32]; /* longer ones are none that is read */
    r->at++;
    for (int first = 1; trace_after_space(r) != '}'; first = 0) {
        trace_text text = {key, 0, sizeof key};
        if (!first && trace_peek(r) != ',')
            return trace_expected(r, "',' or '}' of an object");
        r->at += (size_t)!first;
        if (trace_after_space(r) != '"')
            return trace_expected(r, "a key");
        if (!trace_string(r, &text))
            return false;
        if (trace_after_space(r) != ':')
            return trace_expected(r, "':' after a key");
        r->at++;
        if (depth == 0 && strcmp(key, "traceEvents") == 0) {
            if (trace_after_space(r) != '[')
                return trace_expected(r, "'[' of traceEvents");
            r->found = true;
            if (!trace_events_array(r))
                return false;
        } else if (!trace_value(r, parent, key, depth))
            return false;
    }
    r->at++;
    return true;
}

/* ---- what events mean ---- */

/* Reads an unsigned number. An empty field is 0. */
static bool trace_integer(trace_reading *r, int field, const char *what, uint64_t most, uint64_t *value)
{
    const char *const text = r->field[field];
    char *end = NULL;
    errno = 0;
    *value = text[0] >= '0' && text[0] <= '9' ? strtoull(text, &end, 10) : 0;
    if (text[0] && (end == NULL || *end || errno || *value > most))
        return trace_fail(r, "before this, %s is '%s', expected 0 to %llu", what, text, (unsigned long long)most);
    return true;
}

static bool trace_not_us(trace_reading *r, const char *what, const char *text)
{
    return trace_fail(r, "before this, %s is '%s', expected microseconds from 0 to 9e15", what, text);
}

/* Reads microseconds as nanoseconds, exactly. */
static bool trace_time(trace_reading *r, int field, const char *what, uint64_t *ns)
{
    const char *c = r->field[field];
    uint64_t value = 0;
    int digits = 0;
    if (!trace_is_number(c))
        return c[0] ? trace_not_us(r, what, c) : trace_fail(r, "before this, an event has no %s", what);
    if (strchr(c, 'e') || strchr(c, 'E')) {
        const double us = strtod(c, NULL);
        *ns = us >= 0 && us < 9e15 ? (uint64_t)(us * 1000 + 0.5) : 0;
        return (us >= 0 && us < 9e15) || trace_not_us(r, what, c);
    }
    for (int point = 0; *c && digits < 3; c++) {
        if (*c == '.' && !point++)
            continue;
        if (*c < '0' || *c > '9' || value > INT64_MAX / 10 - 9)
            break;
        value = value * 10 + (uint64_t)(*c - '0');
        digits += point;
    }
    for (; digits < 3 && value <= INT64_MAX / 10; digits++)
        value *= 10;
    if (digits < 3 || strspn(c, "0123456789") != strlen(c))
        return trace_not_us(r, what, r->field[field]);
    *ns = value + (*c >= '5' && *c <= '9'); /* the fourth decimal */
    return true;
}

/* Returns the number that the text ends with ("stream 7"), or one made of the text. */
static uint32_t trace_track(const char *text)
{
    uint32_t number = 0, hash = 2166136261u;
    const char *digits = text + strlen(text);
    while (digits > text && digits[-1] >= '0' && digits[-1] <= '9')
        digits--;
    for (const char *c = text; *c; c++)
        hash = (hash ^ (unsigned char)*c) * 16777619u;
    for (const char *c = digits; *c; c++)
        number = number * 10 + (uint32_t)(*c - '0');
    return *digits && strlen(digits) < 10 ? number : hash;
}

static const struct trace_category {
    const char *text;
    trace_kind kind;
} trace_categories[] = {
    {"kernel", TRACE_KERNEL},   {"cuda", TRACE_KERNEL},           {"gpu_memcpy", TRACE_COPY},
    {"gpu_memset", TRACE_COPY}, {"cuda_runtime", TRACE_CALL},     {"cuda_driver", TRACE_CALL},
    {"cuda_api", TRACE_CALL},   {"user_annotation", TRACE_RANGE}, {"nvtx", TRACE_RANGE},
};

/* Returns whether events of this category are read. Counts the first few others. */
static bool trace_is_read(trace_reading *r, const char *category, trace_kind *kind)
{
    const size_t count = sizeof trace_categories / sizeof *trace_categories;
    size_t i = 0;
    while (i < count && strcmp(trace_categories[i].text, category) != 0)
        i++;
    *kind = i < count ? trace_categories[i].kind : TRACE_RANGE;
    if (i < count || (r->category && strcmp(category, r->category) == 0))
        return true;
    for (i = 0; i < trace_other_most; i++) {
        if (r->other_count[i] == 0)
            snprintf(r->other[i], sizeof r->other[i], "%.31s", category[0] ? category : "(none)");
        else if (strncmp(r->other[i], category[0] ? category : "(none)", 31) != 0)
            continue;
        r->other_count[i]++;
        break;
    }
    return false;
}

/* "Memcpy HtoD (Pageable -> Device)" is "copy HtoD", "Memset (Device)" is "memset", "cudaMalloc_v3020" is "cudaMalloc"
   and of a kernel's name only the function's is left. */
static void trace_usual_name(trace_reading *r, trace_kind kind)
{
    char usual[trace_name_bytes];
    char *const version = strstr(r->name, "_v");
    if (kind == TRACE_KERNEL && !r->full_names)
        trace_short_name(r->name, usual, sizeof usual);
    else if (kind == TRACE_COPY && strncmp(r->name, "Memcpy ", 7) == 0)
        snprintf(usual, sizeof usual, "copy %.*s", (int)strcspn(r->name + 7, " ("), r->name + 7);
    else if (kind == TRACE_COPY && (strncmp(r->name, "Memset", 6) == 0))
        strcpy(usual, "memset");
    else if (kind == TRACE_CALL && version && version[2 + strspn(version + 2, "0123456789")] == 0)
        snprintf(usual, sizeof usual, "%.*s", (int)(version - r->name), r->name);
    else
        return;
    strcpy(r->name, usual);
}

static bool trace_keep(trace_reading *r, trace_kind kind, trace_event event)
{
    if (event.end < event.begin)
        return trace_fail(r, "before this, an event ends before it begins");
    if (r->into->count >= r->most)
        return trace_fail(r, "more than %zu events of a GPU and of its calls; --most N allows more, 48 bytes each",
                          r->most);
    if (r->into->names_count >= trace_names_most)
        return trace_fail(r, "more than %d different names", (int)trace_names_most);
    trace_usual_name(r, kind);
    trace_add(r->into, trace_name(r->into, kind, r->name[0] ? r->name : "unnamed"), event);
    return true;
}

/* Reads the fields that operations and calls share. */
static bool trace_common(trace_reading *r, trace_kind kind, trace_event *event)
{
    uint64_t device = 0, correlation = 0;
    if (kind <= TRACE_COPY) {
        const char *const stream = r->field[r->field[TRACE_STREAM][0] ? TRACE_STREAM : TRACE_TID];
        event->track = trace_track(stream);
        if (r->field[TRACE_DEVICE][0] == 0)
            device = trace_track(r->field[TRACE_PID]) % 1024; /* a converter's "Device 0" */
        else if (!trace_integer(r, TRACE_DEVICE, "the device", 1023, &device))
            return false;
    } else
        event->track = trace_track(r->field[TRACE_TID]);
    event->device = (uint32_t)device;
    if (kind != TRACE_RANGE && !trace_integer(r, TRACE_CORRELATION, "the correlation", UINT32_MAX, &correlation))
        return false;
    event->correlation = (uint32_t)correlation;
    return kind != TRACE_COPY || trace_integer(r, TRACE_BYTES, "the number of bytes", UINT64_MAX, &event->bytes);
}

static uint64_t trace_place_of(const trace_reading *r)
{
    return (uint64_t)trace_track(r->field[TRACE_PID]) << 32 | trace_track(r->field[TRACE_TID]);
}

/* Keeps a pair's begin until its end comes. */
static bool trace_begin(trace_reading *r)
{
    trace_kind kind;
    const size_t count = r->open_count;
    if (count == trace_open_most)
        return trace_fail(r, "more than %d events have begun (\"B\") and not ended (\"E\")", (int)trace_open_most);
    if ((count & (count - 1)) == 0)
        r->open = (trace_open_event *)trace_room(r->open, (2 * count + 1) * sizeof *r->open);
    trace_open_event *const open = r->open + r->open_count++;
    memset(open, 0, sizeof *open);
    open->place = trace_place_of(r);
    open->read = trace_is_read(r, r->field[TRACE_CAT], &kind);
    if (!open->read)
        return true;
    trace_usual_name(r, kind);
    open->event.name = trace_name(r->into, kind, r->name[0] ? r->name : "unnamed");
    return trace_time(r, TRACE_TS, "ts", &open->event.begin) && trace_common(r, kind, &open->event);
}

static bool trace_end(trace_reading *r)
{
    const uint64_t place = trace_place_of(r);
    size_t i = r->open_count;
    while (i && r->open[i - 1].place != place)
        i--;
    if (i == 0)
        return trace_fail(r, "before this, an event ends (\"E\") that has not begun (\"B\")");
    trace_open_event open = r->open[i - 1];
    memmove(r->open + i - 1, r->open + i, (r->open_count - i) * sizeof *r->open);
    r->open_count--;
    if (!open.read)
        return true;
    if (!trace_time(r, TRACE_TS, "ts", &open.event.end))
        return false;
    snprintf(r->name, sizeof r->name, "%s", r->into->names[open.event.name].text);
    return trace_keep(r, r->into->names[open.event.name].kind, open.event);
}

/* Takes the event whose fields have been read. */
static bool trace_chrome_event(trace_reading *r)
{
    trace_event event = {0, 0, 0, 0, 0, 0, 0, 0};
    trace_kind kind;
    uint64_t duration;
    r->seen++;
    if (strcmp(r->field[TRACE_PH], "B") == 0)
        return trace_begin(r);
    if (strcmp(r->field[TRACE_PH], "E") == 0)
        return trace_end(r);
    if (strcmp(r->field[TRACE_PH], "X") != 0 || !trace_is_read(r, r->field[TRACE_CAT], &kind))
        return r->field[TRACE_PH][0] || trace_fail(r, "before this, an event has no \"ph\"");
    if (!trace_time(r, TRACE_TS, "ts", &event.begin) || !trace_time(r, TRACE_DUR, "dur", &duration))
        return false;
    event.end = event.begin + duration;
    return trace_common(r, kind, &event) && trace_keep(r, kind, event);
}

static void trace_clear(trace_reading *r)
{
    for (int i = 0; i < TRACE_NAME; i++)
        r->field[i][0] = 0;
    r->name[0] = 0;
    memset(r->has, 0, sizeof r->has);
}

/* Reads the array of events; its bracket is next. */
static bool trace_events_array(trace_reading *r)
{
    r->at++;
    for (int first = 1; trace_after_space(r) != ']'; first = 0) {
        if (!first && trace_peek(r) != ',')
            return trace_expected(r, "',' or ']' after an event");
        r->at += (size_t)!first;
        trace_clear(r);
        if (trace_after_space(r) != '{')
            return trace_expected(r, "an event");
        if (!trace_members(r, "", 1) || !trace_chrome_event(r))
            return false;
    }
    r->at++;
    return true;
}

/* ---- nsys ---- */

/* Sets the name to that of a string's number; the string may come later. */
static void trace_name_of_id(trace_reading *r, int field)
{
    if (r->field[field][0])
        snprintf(r->name, sizeof r->name, "\1%s", r->field[field]);
}

static bool trace_add_string(trace_reading *r)
{
    const int before = r->ids.names_count;
    if (before >= trace_names_most)
        return trace_fail(r, "more than %d strings", (int)trace_names_most);
    const int n = trace_name(&r->ids, TRACE_CALL, r->field[TRACE_ID]);
    if (n < before)
        return trace_fail(r, "before this, the string %s is there for the second time", r->field[TRACE_ID]);
    if ((before & (before - 1)) == 0)
        r->strings = (char **)trace_room(r->strings, (2 * (size_t)before + 1) * sizeof *r->strings);
    r->strings[n] = strcpy((char *)trace_room(NULL, strlen(r->name) + 1), r->name);
    return true;
}

/* NVTX ranges that push and pop have type 59. A row without an end is a range that was not popped. */
static bool trace_is_nsys(trace_reading *r, trace_kind *kind)
{
    static const struct trace_category tables[] = {{"CUPTI_ACTIVITY_KIND_KERNEL", TRACE_KERNEL},
                                                   {"CUPTI_ACTIVITY_KIND_MEMCPY", TRACE_COPY},
                                                   {"CUPTI_ACTIVITY_KIND_MEMSET", TRACE_COPY},
                                                   {"CUPTI_ACTIVITY_KIND_RUNTIME", TRACE_CALL},
                                                   {"NVTX_EVENTS", TRACE_RANGE}};
    for (size_t i = 0; i < sizeof tables / sizeof *tables; i++) {
        if (strcmp(tables[i].text, r->field[TRACE_TABLE]) != 0)
            continue;
        *kind = tables[i].kind;
        return *kind != TRACE_RANGE || (strcmp(r->field[TRACE_TYPE], "59") == 0 && r->field[TRACE_END][0]);
    }
    return false;
}

/* Takes the row whose fields have been read. */
static bool trace_nsys_row(trace_reading *r)
{
    trace_event event = {0, 0, 0, 0, 0, 0, 0, 0};
    trace_kind kind;
    uint64_t direction, thread;
    r->seen++;
    if (strcmp(r->field[TRACE_TABLE], "StringIds") == 0)
        return trace_add_string(r);
    if (!trace_is_nsys(r, &kind))
        return true;
    if (r->field[TRACE_BEGIN][0] == 0 || r->field[TRACE_END][0] == 0)
        return trace_fail(r, "before this, a row of %s has no start or no end", r->field[TRACE_TABLE]);
    if (!trace_integer(r, TRACE_BEGIN, "the start", INT64_MAX, &event.begin) ||
        !trace_integer(r, TRACE_END, "the end", INT64_MAX, &event.end) ||
        !trace_integer(r, TRACE_COPY_KIND, "copyKind", UINT32_MAX, &direction) || !trace_common(r, kind, &event))
        return false;
    if (kind > TRACE_COPY) { /* the thread is the lower 24 bits of its number */
        if (!trace_integer(r, TRACE_TID, "globalTid", UINT64_MAX, &thread))
            return false;
        event.track = (uint32_t)(thread & 0xffffff);
    }
    if (strcmp(r->field[TRACE_TABLE], "CUPTI_ACTIVITY_KIND_MEMSET") == 0)
        strcpy(r->name, "memset");
    else if (kind == TRACE_COPY)
        trace_copy_name(direction, r->name);
    else
        trace_name_of_id(r, kind == TRACE_KERNEL && r->full_names ? TRACE_FULL_ID : TRACE_SHORT_ID);
    return trace_keep(r, kind, event);
}

/* Reads rows, one object each, after the first one. */
static bool trace_nsys_rows(trace_reading *r)
{
    while (trace_after_space(r) >= 0) {
        trace_clear(r);
        if (trace_peek(r) != '{')
            return trace_expected(r, "'{' of the next row");
        if (!trace_members(r, "", 1))
            return false;
        if (r->field[TRACE_TABLE][0] == 0)
            return trace_fail(r, "before this, a row has no \"table\"");
        if (!trace_nsys_row(r))
            return false;
    }
    return true;
}

/* Replaces the numbers of strings by the strings. */
static void trace_resolve(trace_reading *r)
{
    trace *const t = r->into;
    trace fresh = {NULL, 0, 0, NULL, 0, NULL, 0, 0};
    int *const number = (int *)trace_room(NULL, ((size_t)t->names_count + 1) * sizeof *number);
    for (int n = 0; n < t->names_count; n++) {
        const char *const text = t->names[n].text;
        snprintf(r->name, sizeof r->name, "%s", text);
        if (text[0] == '\1') {
            const int known = r->ids.names_count;
            const int id = known ? r->ids.slots[trace_slot(&r->ids, TRACE_CALL, text + 1)] - 1 : -1;
            snprintf(r->name, sizeof r->name, "%s", id < 0 ? "unnamed" : r->strings[id]);
            trace_usual_name(r, t->names[n].kind);
        }
        number[n] = trace_name(&fresh, t->names[n].kind, r->name);
    }
    for (size_t i = 0; i < t->count; i++)
        t->events[i].name = number[t->events[i].name];
    fresh.events = t->events, fresh.count = t->count, fresh.room = t->room, fresh.phase = t->phase;
    t->events = NULL;
    trace_free(t);
    *t = fresh;
    free(number);
}

/* ---- the file ---- */

/* Opens the file, and starts gzip if it is compressed. */
static bool trace_open(trace_reading *r)
{
    int ends[2];
    r->file = strcmp(r->path, "-") == 0 ? dup(0) : open(r->path, O_RDONLY);
    if (r->file < 0)
        return trace_fail(r, "cannot be opened: %s", strerror(errno));
    if (!trace_fill(r) || r->size < 2 || r->bytes[0] != 0x1f || r->bytes[1] != 0x8b)
        return r->error[0] == 0;
    if (lseek(r->file, 0, SEEK_SET) != 0)
        return trace_fail(r, "compressed, and it cannot be rewound: decompress it with gzip -dc first");
    if (pipe(ends) != 0 || (r->gzip = fork()) < 0) {
        r->gzip = 0;
        return trace_fail(r, "gzip cannot be started: %s", strerror(errno));
    }
    if (r->gzip == 0) {
        dup2(r->file, 0), dup2(ends[1], 1), dup2(open("/dev/null", O_WRONLY), 2);
        for (int i = 0; i < 3; i++) { /* those of a caller that has closed its own are among the first three */
            const int unused = i < 2 ? ends[i] : r->file;
            if (unused > 2)
                close(unused);
        }
        execlp("gzip", "gzip", "-dcq", (char *)NULL);
        _exit(127);
    }
    close(ends[1]), close(r->file);
    r->file = ends[0];
    r->size = 0;
    return true;
}

/* Closes the file. Fails if gzip could not decompress all of it. */
static void trace_close(trace_reading *r)
{
    int status = 0;
    char before[sizeof r->error];
    while (r->gzip && r->error[0] == 0 && trace_fill(r)) /* gzip checks its sum at the end */
        continue;
    if (r->file >= 0)
        close(r->file);
    r->file = -1;
    if (r->gzip && waitpid(r->gzip, &status, 0) == r->gzip && status != 0 && (r->ended || r->error[0] == 0)) {
        const int code = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status); /* as a shell says it */
        memcpy(before, r->error, sizeof before);
        r->error[0] = 0;
        if (code == 127)
            trace_fail(r, "it is compressed, and there is no gzip here");
        else
            trace_fail(r, "gzip reports damage or an early end (exit code %d)%s%.300s", code, before[0] ? ": " : "",
                       before[0] ? strstr(before, " of its text: ") + 14 : "");
    }
    if (r->told && isatty(2))
        fprintf(stderr, "\r\033[K");
}

static bool trace_read_all(trace_reading *r)
{
    static const unsigned char mark[] = {0xef, 0xbb, 0xbf}; /* UTF-8's byte order mark, which some editors write */
    int marked = 0;
    while (marked < 3 && trace_peek(r) == mark[marked])
        marked++, r->at++;
    if (marked == 1 || marked == 2)
        return trace_expected(r, "the rest of a byte order mark");
    const int first = trace_after_space(r);
    if (first < 0)
        return trace_fail(r, "the file is empty");
    if (first == 'S' && r->size - r->at > 15 && memcmp(r->bytes + r->at, "SQLite format 3", 15) == 0)
        return trace_fail(r, "an SQLite file; export nsys's report with --type jsonlines");
    if (first == '[') {
        if (!trace_events_array(r))
            return false;
    } else if (first != '{')
        return trace_expected(r, "'{' or '[' of a trace in JSON");
    else if (!trace_members(r, "", 0))
        return false;
    else if (!r->found && r->field[TRACE_TABLE][0])
        return trace_nsys_row(r) && trace_nsys_rows(r);
    else if (!r->found)
        return trace_fail(r, r->has[TRACE_OLD_NSYS] ? "the JSON of an older nsys; export with --type jsonlines"
                                                    : "neither \"traceEvents\" nor a \"table\" of nsys is in the file");
    if (trace_after_space(r) >= 0)
        return trace_expected(r, "the end of the file");
    if (r->open_count)
        return trace_fail(r, "%zu events have begun (\"B\") and not ended (\"E\")", r->open_count);
    return true;
}

/* Fails if there is nothing to answer questions about. */
static void trace_check_kinds(trace_reading *r)
{
    char others[300] = "";
    size_t used = 0;
    for (size_t i = 0; i < r->into->count; i++)
        if (trace_kind_of(r->into, r->into->events + i) <= TRACE_COPY)
            return;
    for (int i = 0; i < trace_other_most && r->other_count[i]; i++)
        used += (size_t)snprintf(others + used, sizeof others - used, "%s%.31s", i ? ", " : "; others are of ",
                                 r->other[i]);
    trace_fail(r, "none of its %zu events is a kernel, copy or memset of a GPU%s", r->seen, others);
}

static inline trace_reading *trace_reading_new(const char *path)
{
    trace_reading *const r = (trace_reading *)memset(trace_room(NULL, sizeof *r), 0, sizeof *r);
    r->path = path;
    r->file = -1;
    r->most = trace_most_default;
    return r;
}

/* Adds the file's events to the trace, as its phase. Returns 0, or -1; then r->error says why, in one line. */
static inline int trace_read(trace_reading *r, trace *t)
{
    const bool from_memory = r->size > 0;
    r->into = t;
    if (from_memory || trace_open(r))
        (void)trace_read_all(r);
    trace_close(r);
    if (r->ended && r->keep_cut) {
        memcpy(r->cut, r->error, sizeof r->cut);
        r->error[0] = 0;
    }
    if (r->ids.names_count || t->count)
        trace_resolve(r);
    if (r->error[0] == 0)
        trace_check_kinds(r);
    for (int i = 0; i < r->ids.names_count; i++)
        free(r->strings[i]);
    free(r->strings), free(r->open);
    trace_free(&r->ids);
    return r->error[0] ? -1 : 0;
}
#endif
