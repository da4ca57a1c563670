/* SPDX-License-Identifier: MIT */
/* Reads a trace file into a trace (trace_events.h), front to back; only events of trace_categories stay in memory.
   It accepts
   - Chrome's JSON, {"traceEvents": [...]} or an array, with complete events ("ph": "X") and pairs ("B", "E"): what
     torch's profiler, kvprim's 10_trace and converters of nsys's SQLite files write;
   - the lines of `nsys export --type jsonlines`: rows of the tables that NVIDIA documents for SQLite. The JSON of older
     versions is refused, because its fields are not documented;
   - either of them compressed by gzip.
   A trace is of one process: equal correlations in several processes are taken for the same call. */
#ifndef TRACE_READ_H
#define TRACE_READ_H

#include "trace_events.h"
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <sys/wait.h>

enum {
    trace_read_depth = 64,        /* values inside each other; torch's traces have 5 */
    trace_members_most = 128,     /* of an event; later ones are skipped; torch's have 30 */
    trace_name_bytes = 4096,      /* longer names are cut; torch's kernels have up to 2,000 bytes */
    trace_most_default = 1 << 24, /* events that are kept, 48 bytes each */
};

/* By kind: categories of Chrome's JSON (cuda, cuda_api and nvtx are those of converters) and tables of nsys. */
static const char *const trace_categories[] = {
    " kernel cuda CUPTI_ACTIVITY_KIND_KERNEL ",
    " gpu_memcpy gpu_memset CUPTI_ACTIVITY_KIND_MEMCPY CUPTI_ACTIVITY_KIND_MEMSET ",
    " cuda_runtime cuda_driver cuda_api CUPTI_ACTIVITY_KIND_RUNTIME ", " user_annotation nvtx NVTX_EVENTS "};

typedef struct trace_reading {
    const char *path;     /* "-": standard input */
    const char *as_range; /* events of this category are ranges, too; NULL: of none */
    bool keep_cut;        /* if the file is cut, keep the events before the cut, and say so in `cut` */
    size_t most;          /* events to keep */
    char error[640], cut[640], others[200]; /* categories that are not read */
    size_t seen;                            /* events in the file */

    /* the bytes */
    const unsigned char *bytes;
    size_t at, size;
    uint64_t before; /* bytes before these */
    int file;        /* -1: there are no more bytes */
    FILE *gzip;      /* NULL: not compressed */
    unsigned char buffer[1 << 16];
    jmp_buf failed; /* where an error leads */
    bool ended;     /* the error is that the file ends */

    /* the event that is being read: its members and those of its members, such as "args.stream" */
    struct {
        char path[32], value[64];
    } members[trace_members_most];
    int members_count;
    char name[trace_name_bytes];
    bool found; /* "traceEvents" */

    trace_event *open; /* have begun ("B"): process and thread are `end` and `phase`; no name: not to be read */
    size_t open_count;
    trace_entries strings; /* nsys's: numbers, and the strings as `shown` */
    trace *into;
} trace_reading;

/* ---- errors and bytes ---- */

/* Ends the reading with an error and its place. */
__attribute__((format(printf, 2, 3), noreturn)) static void trace_fail(trace_reading *r, const char *format, ...)
{
    char what[500];
    va_list args;
    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    snprintf(r->error, sizeof r->error, "%.100s: byte %llu%s: %s", r->path, (unsigned long long)(r->before + r->at),
             r->gzip ? " of its text" : "", what);
    trace_show(r->error);
    longjmp(r->failed, 1);
}

/* Reads more bytes. Returns false at the end. */
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
        trace_fail(r, "cannot be read: %s", strerror(errno));
    r->bytes = r->buffer;
    r->size = (size_t)got;
    if (isatty(2) && r->before >> 25 != (r->before + r->size) >> 25) /* every 32 MB */
        fprintf(stderr, "\r%s: %llu MB, %zu events\033[K\r", r->path, (unsigned long long)r->before >> 20, r->seen);
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
    for (; byte == ' ' || byte == '\n' || byte == '\r' || byte == '\t'; byte = trace_peek(r))
        r->at++;
    return byte;
}

/* Fails because of the next byte, or because there is none. */
__attribute__((noreturn)) static void trace_unexpected(trace_reading *r, const char *what)
{
    const int byte = trace_peek(r);
    r->ended = byte < 0;
    if (byte < 0)
        trace_fail(r, "the file ends where %s is expected", what);
    if (byte > 32 && byte < 127)
        trace_fail(r, "expected %s, found '%c'", what, byte);
    trace_fail(r, "expected %s, found byte 0x%02x", what, (unsigned)byte);
}

static void trace_take(trace_reading *r, int byte, const char *what)
{
    if (trace_after_space(r) != byte)
        trace_unexpected(r, what);
    r->at++;
}

/* ---- JSON ---- */

/* Where a string goes. What does not fit is left out. */
typedef struct trace_string {
    char *to;
    size_t used, room;
    uint32_t half; /* the first of two escapes that are one character */
} trace_string;

/* Puts a code point as UTF-8. */
static void trace_put_code(trace_string *s, uint32_t code)
{
    static const uint32_t first[4] = {0, 0xc0, 0xe0, 0xf0};
    const int more = code < 0x80 ? 0 : code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
    if (s->used + (size_t)more + 1 >= s->room)
        return;
    s->to[s->used++] = (char)(first[more] | code >> 6 * more);
    for (int i = more - 1; i >= 0; i--)
        s->to[s->used++] = (char)(0x80 | (code >> 6 * i & 63));
}

/* Reads what follows a backslash. Two escapes are one character of more than 16 bits; half of one is left out, as
   is 0, which would end the name. */
static void trace_escape(trace_reading *r, trace_string *s)
{
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t", hex[] = "0123456789abcdef";
    const int escape = trace_peek(r);
    const char *const known = escape > 0 ? strchr(from, escape) : NULL;
    uint32_t code = known ? (unsigned char)to[known - from] : 0;
    if (!known && escape != 'u')
        trace_unexpected(r, "one of \"\\/bfnrtu after \\");
    r->at++;
    for (int i = 0; i < 4 && !known; i++, r->at++) {
        const int c = trace_peek(r);
        const char *const digit = c > 0 ? strchr(hex, c >= 'A' && c <= 'F' ? c + 32 : c) : NULL;
        if (!digit)
            trace_unexpected(r, "a hex digit after \\u");
        code = code << 4 | (uint32_t)(digit - hex);
    }
    const bool second = code >> 10 == 0xdc00 >> 10;
    if (second && s->half)
        code = 0x10000 + ((s->half & 0x3ff) << 10 | (code & 0x3ff));
    s->half = code >> 10 == 0xd800 >> 10 ? code : 0;
    if (!s->half && code && (!second || code > 0xffff))
        trace_put_code(s, code);
}

static void trace_read_string(trace_reading *r, trace_string s, const char *what)
{
    trace_take(r, '"', what);
    for (int c = trace_peek(r); c != '"'; c = trace_peek(r)) {
        if (c < 32)
            trace_unexpected(r, "the rest of a string");
        r->at++;
        if (c == '\\') {
            trace_escape(r, &s);
            continue;
        }
        s.half = 0;
        if (s.used + 1 < s.room)
            s.to[s.used++] = (char)c;
    }
    r->at++;
    if (s.room)
        s.to[s.used] = 0;
}

static bool trace_is_number(const char *text)
{
    char *end;
    const char *const digits = text + (*text == '-');
    (void)strtod(text, &end);
    return *digits >= '0' && *digits <= '9' && *end == 0 && !(*digits == '0' && digits[1] >= '0' && digits[1] <= '9');
}

/* Reads a number, true, false or null, which is as good as not there. */
static void trace_read_literal(trace_reading *r, trace_string s)
{
    char token[64];
    size_t n = 0;
    for (int c = trace_peek(r); c > 0 && strchr("+-.0123456789aeflnrstuE", c); c = trace_peek(r)) {
        if (n + 1 == sizeof token)
            trace_fail(r, "a number of more than %zu characters", n);
        token[n++] = (char)c;
        r->at++;
    }
    token[n] = 0;
    if (n == 0 || trace_peek(r) < 0) /* it may go on */
        trace_unexpected(r, n ? "the rest of a value" : "a value");
    const bool null = strcmp(token, "null") == 0;
    if (!null && !trace_is_number(token) && strcmp(token, "true") != 0 && strcmp(token, "false") != 0)
        trace_fail(r, "'%s' is no value", token);
    if (s.room)
        strcpy(s.to, null ? "" : token); /* values have as much room */
}

/* Returns where a member's value goes: nowhere if no event is read. */
static trace_string trace_member(trace_reading *r, const char *path)
{
    trace_string value = {NULL, 0, 0, 0};
    if (strcmp(path, "name") == 0 || strcmp(path, "text") == 0 || strcmp(path, "value") == 0) {
        value.to = r->name, value.room = sizeof r->name;
    } else if (r->members_count < trace_members_most && strlen(path) < sizeof r->members->path) {
        value.to = r->members[r->members_count].value, value.room = sizeof r->members->value;
        strcpy(r->members[r->members_count++].path, path);
    }
    return value;
}

/* Returns a member of the event, or another one instead, "" if there is none. */
static const char *trace_get(const trace_reading *r, const char *path, const char *instead)
{
    for (int i = 0; i < r->members_count; i++)
        if (r->members[i].value[0] && strcmp(r->members[i].path, path) == 0)
            return r->members[i].value;
    return instead ? trace_get(r, instead, NULL) : "";
}

/* Comes to the next element of an array or object. Returns false at its end. */
static bool trace_next(trace_reading *r, int close, bool first, const char *what)
{
    const int byte = trace_after_space(r);
    if (byte != close && byte != ',' && !first)
        trace_unexpected(r, what);
    r->at += byte == close || !first;
    return byte != close;
}

static void trace_read_events(trace_reading *r);

/* Reads a value, and keeps it if it is a member of an event. The outermost has depth 0: there "traceEvents" is what is
   searched for. */
static void trace_read_value(trace_reading *r, const char *path, int depth)
{
    const int open = trace_after_space(r);
    const char *const what = open == '[' ? "',' or ']' of an array" : "',' or '}' of an object";
    if (open == '"' || (open != '{' && open != '[')) {
        const trace_string value = trace_member(r, path);
        open == '"' ? trace_read_string(r, value, "") : trace_read_literal(r, value);
        return;
    }
    if (depth == trace_read_depth)
        trace_fail(r, "more than %d values inside each other", (int)trace_read_depth);
    r->at++;
    for (bool first = true; trace_next(r, open == '[' ? ']' : '}', first, what); first = false) {
        char member[64] = "an element of an array, which is not kept";
        if (open == '{') {
            const int used = path[0] ? snprintf(member, sizeof member, "%.40s.", path) : 0;
            const trace_string key = {member, (size_t)used, sizeof member, 0};
            trace_after_space(r);
            trace_read_string(r, key, "a key");
            trace_take(r, ':', "':' after a key");
        }
        if (depth == 0 && strcmp(member, "traceEvents") == 0)
            trace_read_events(r);
        else
            trace_read_value(r, member, depth + 1);
    }
}

/* ---- what events mean ---- */

/* Reads an unsigned number. An empty text is 0. */
static uint64_t trace_integer(trace_reading *r, const char *text, const char *what, uint64_t most)
{
    char *end = NULL;
    errno = 0;
    const uint64_t value = text[0] >= '0' && text[0] <= '9' ? strtoull(text, &end, 10) : 0;
    if (text[0] && (end == NULL || *end || errno || value > most))
        trace_fail(r, "before this, %s is '%s', expected 0 to %llu", what, text, (unsigned long long)most);
    return value;
}

/* Reads microseconds as nanoseconds, exactly unless there is an exponent. */
static uint64_t trace_time(trace_reading *r, const char *what)
{
    const char *const text = trace_get(r, what, NULL);
    const double us = trace_is_number(text) ? strtod(text, NULL) : -1;
    if (text[0] == 0)
        trace_fail(r, "before this, an event has no %s", what);
    if (!(us >= 0 && us < 9e15))
        trace_fail(r, "before this, %s is '%s', expected microseconds from 0 to 9e15", what, text);
    if (strpbrk(text, "eE"))
        return (uint64_t)(us * 1000 + 0.5);
    char *c;
    uint64_t tenths = 0;
    const uint64_t whole = strtoull(text, &c, 10);
    for (uint64_t unit = 1000; unit && *c && *++c; unit /= 10)
        tenths += unit * (uint64_t)(*c - '0');
    return whole * 1000 + (tenths + 5) / 10;
}

/* Returns the number that the text ends with ("stream 7"), or one made of the text. */
static uint32_t trace_track(const char *text)
{
    const char *digits = text + strlen(text);
    uint32_t hash = 2166136261u; /* FNV-1a */
    while (digits > text && digits[-1] >= '0' && digits[-1] <= '9')
        digits--;
    for (const char *c = text; *c; c++)
        hash = (hash ^ (unsigned char)*c) * 16777619u;
    return *digits && strlen(digits) < 10 ? (uint32_t)strtoul(digits, NULL, 10) : hash;
}

/* Returns whether events of this category or table are read. Keeps the first few others for an error. */
static bool trace_is_read(trace_reading *r, const char *category, trace_kind *kind)
{
    char word[80];
    snprintf(word, sizeof word, " %s ", category);
    for (int k = TRACE_KERNEL; k <= TRACE_RANGE; k++) {
        *kind = (trace_kind)k;
        if (strstr(trace_categories[k], word))
            return true;
    }
    const size_t used = strlen(r->others);
    if (!strstr(r->others, category) && used < sizeof r->others / 2)
        snprintf(r->others + used, sizeof r->others - used, "%s%s", used ? ", " : "; others are of ", category);
    return r->as_range && strcmp(category, r->as_range) == 0;
}

/* Reads what operations, calls and ranges share. */
static trace_event trace_common(trace_reading *r, trace_kind kind)
{
    const char *const stream = trace_get(r, "args.stream", "streamId"), *const tid = trace_get(r, "tid", NULL);
    const char *const device = trace_get(r, "args.device", "deviceId");
    trace_event e;
    memset(&e, 0, sizeof e);
    e.track = trace_track(kind <= TRACE_COPY && stream[0] ? stream : tid);
    if (kind <= TRACE_COPY && device[0] == 0)
        e.device = trace_track(trace_get(r, "pid", NULL)) % 1024; /* a converter's "Device 0" */
    else if (kind <= TRACE_COPY)
        e.device = (uint32_t)trace_integer(r, device, "the device", 1023);
    if (kind == TRACE_COPY)
        e.bytes = trace_integer(r, trace_get(r, "args.bytes", "bytes"), "the number of bytes", UINT64_MAX);
    if (kind != TRACE_RANGE)
        e.correlation = (uint32_t)trace_integer(r, trace_get(r, "args.correlation", "correlationId"), "the correlation",
                                                UINT32_MAX);
    return e;
}

static void trace_keep(trace_reading *r, const trace_event *e)
{
    if (e->end < e->begin)
        trace_fail(r, "before this, an event ends before it begins");
    if (r->into->count >= r->most)
        trace_fail(r, "more than %zu events of a GPU and of its calls; --most N allows more, 48 bytes each", r->most);
    trace_add(r->into, *e);
}

/* Takes the event of Chrome's JSON whose members have been read. */
static void trace_take_event(trace_reading *r)
{
    const char *const phase = trace_get(r, "ph", NULL);
    const uint32_t process = trace_track(trace_get(r, "pid", NULL));
    const int thread = (int)trace_track(trace_get(r, "tid", NULL));
    trace_kind kind;
    r->seen++;
    if (phase[0] == 0)
        trace_fail(r, "before this, an event has no \"ph\"");
    if (strchr("BEX", phase[0]) == NULL || phase[1])
        return;
    if (phase[0] == 'E') {
        size_t i = r->open_count;
        while (i && (r->open[i - 1].end != process || r->open[i - 1].phase != thread))
            i--;
        if (i == 0)
            trace_fail(r, "before this, an event ends (\"E\") that has not begun (\"B\")");
        trace_event e = r->open[i - 1];
        memmove(r->open + i - 1, r->open + i, (r->open_count-- - i) * sizeof e);
        if (e.name) {
            e.end = trace_time(r, "ts");
            trace_keep(r, &e);
        }
        return;
    }
    const bool reads = trace_is_read(r, trace_get(r, "cat", NULL), &kind);
    trace_event e = trace_common(r, reads ? kind : TRACE_RANGE);
    e.name = reads ? trace_name(r->into, kind, r->name[0] ? r->name : "unnamed") : NULL;
    e.begin = reads ? trace_time(r, "ts") : 0;
    if (phase[0] == 'B') {
        r->open = (trace_event *)trace_one_more(r->open, r->open_count, sizeof e);
        e.end = process, e.phase = thread;
        r->open[r->open_count++] = e;
    } else if (reads) {
        e.end = e.begin + trace_time(r, "dur");
        trace_keep(r, &e);
    }
}

/* Reads one event or row; its brace is next. */
static void trace_read_event(trace_reading *r, int depth)
{
    if (trace_after_space(r) != '{')
        trace_unexpected(r, depth ? "an event" : "'{' of a row");
    r->members_count = 0;
    r->name[0] = 0;
    trace_read_value(r, "", depth);
}

static void trace_read_events(trace_reading *r)
{
    trace_take(r, '[', "'[' of traceEvents");
    for (bool first = true; trace_next(r, ']', first, "',' or ']' after an event"); first = false) {
        trace_read_event(r, 1);
        trace_take_event(r);
    }
    r->found = true;
}

/* Takes the row of nsys whose members have been read. Names are numbers of strings, which may come later: until then
   byte 1 and the number. */
static void trace_take_row(trace_reading *r)
{
    const char *const table = trace_get(r, "table", NULL), *string = trace_get(r, "nameId", "textId");
    const char *const begin = trace_get(r, "start", NULL), *const end = trace_get(r, "end", NULL);
    trace_kind kind;
    r->seen++;
    if (strcmp(table, "StringIds") == 0) {
        trace_entry *const entry = trace_entry_of(&r->strings, TRACE_CALL, trace_get(r, "id", NULL));
        if (entry->shown)
            trace_fail(r, "before this, the string %s is there for the second time", entry->full);
        entry->shown = trace_copy_text(r->name, strlen(r->name));
        return;
    }
    /* NVTX ranges that push and pop have type 59. One without an end was not popped. */
    if (!trace_is_read(r, table, &kind) ||
        (kind == TRACE_RANGE && (strcmp(trace_get(r, "eventType", NULL), "59") != 0 || end[0] == 0)))
        return;
    if (begin[0] == 0 || end[0] == 0)
        trace_fail(r, "before this, a row of %s has no start or no end", table);
    trace_event e = trace_common(r, kind);
    e.begin = trace_integer(r, begin, "the start", INT64_MAX);
    e.end = trace_integer(r, end, "the end", INT64_MAX);
    if (kind > TRACE_COPY) /* the rest of the number says the process */
        e.track = (uint32_t)(trace_integer(r, trace_get(r, "globalTid", NULL), "globalTid", UINT64_MAX) & 0xffffff);
    string = kind == TRACE_KERNEL ? trace_get(r, "demangledName", "shortName") : string;
    if (strcmp(table, "CUPTI_ACTIVITY_KIND_MEMSET") == 0)
        strcpy(r->name, "Memset");
    else if (kind == TRACE_COPY)
        strcpy(r->name, trace_copy_name(trace_integer(r, trace_get(r, "copyKind", NULL), "copyKind", UINT32_MAX)));
    else if (string[0])
        snprintf(r->name, sizeof r->name, "\1%s", string);
    e.name = trace_name(r->into, kind, r->name[0] ? r->name : "unnamed");
    trace_keep(r, &e);
}

/* ---- the file ---- */

/* Makes the file standard input, so that gzip can inherit it, and starts gzip if it is compressed. */
static void trace_open(trace_reading *r)
{
    const int file = strcmp(r->path, "-") == 0 ? 0 : open(r->path, O_RDONLY);
    if (file < 0 || (file > 0 && (dup2(file, 0) < 0 || close(file) < 0)))
        trace_fail(r, "cannot be opened: %s", strerror(errno));
    r->file = 0;
    if (!trace_fill(r) || r->size < 2 || r->bytes[0] != 0x1f || r->bytes[1] != 0x8b)
        return;
    if (lseek(0, 0, SEEK_SET) != 0)
        trace_fail(r, "compressed, and it cannot be rewound: decompress it with gzip -dc first");
    r->gzip = popen("exec gzip -dcq 2>/dev/null", "r");
    if (r->gzip == NULL)
        trace_fail(r, "gzip cannot be started: %s", strerror(errno));
    r->file = fileno(r->gzip);
    r->size = 0;
}

static void trace_read_all(trace_reading *r)
{
    static const unsigned char mark[] = {0xef, 0xbb, 0xbf}; /* UTF-8's byte order mark, which some editors write */
    for (int i = 0; i < 3 && (i || trace_peek(r) == mark[0]); i++, r->at++)
        if (trace_peek(r) != mark[i])
            trace_unexpected(r, "the rest of a byte order mark");
    const int first = trace_after_space(r);
    if (first < 0)
        trace_fail(r, "the file is empty");
    if (first == 'S' && r->size - r->at > 15 && memcmp(r->bytes + r->at, "SQLite format 3", 15) == 0)
        trace_fail(r, "an SQLite file; export nsys's report with --type jsonlines");
    if (first != '[' && first != '{')
        trace_unexpected(r, "'{' or '[' of a trace in JSON");
    if (first == '[')
        trace_read_events(r);
    for (bool row = false; !r->found && (!row || trace_after_space(r) >= 0); row = true) {
        trace_read_event(r, 0);
        if (!r->found && trace_get(r, "table", NULL)[0])
            trace_take_row(r);
        else if (!r->found && row)
            trace_fail(r, "before this, a row has no \"table\"");
        else if (!r->found)
            trace_fail(r, trace_get(r, "CudaEvent.startNs", "TraceProcessEvent.startNs")[0]
                              ? "the JSON of an older nsys; export with --type jsonlines"
                              : "neither \"traceEvents\" nor a \"table\" of nsys is in the file");
    }
    if (trace_after_space(r) >= 0)
        trace_unexpected(r, "the end of the file");
    if (r->open_count)
        trace_fail(r, "%zu events have begun (\"B\") and not ended (\"E\")", r->open_count);
    while (r->gzip && trace_fill(r)) /* gzip checks its sum at the end */
        continue;
}

/* Fails if gzip could not decompress all of the file, or if there is nothing to answer questions about. */
static void trace_check(trace_reading *r)
{
    const int gzip_status = r->gzip ? pclose(r->gzip) : 0;
    char before[sizeof r->error];
    const int code = WIFSIGNALED(gzip_status) ? 128 + WTERMSIG(gzip_status) : WEXITSTATUS(gzip_status); /* as in sh */
    memcpy(before, r->error, sizeof before);
    if (code && (r->ended || before[0] == 0))
        trace_fail(r, "%s (exit code %d)%s%s",
                   code == 127 ? "there is no gzip here" : "gzip reports damage or an early end", code,
                   before[0] ? ": " : "", before[0] ? strstr(before, " of its text: ") + 14 : "");
    if (r->ended && r->keep_cut) {
        memcpy(r->cut, r->error, sizeof r->cut);
        r->error[0] = 0;
    }
    for (size_t i = 0; i < r->into->count; i++)
        if (r->into->events[i].name->kind <= TRACE_COPY)
            return;
    if (r->error[0] == 0)
        trace_fail(r, "none of its %zu events is a kernel, copy or memset of a GPU%s", r->seen, r->others);
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
    r->into = t;
    if (setjmp(r->failed) == 0) {
        if (r->size == 0) /* a test has put bytes there */
            trace_open(r);
        trace_read_all(r);
    }
    if (setjmp(r->failed) == 0)
        trace_check(r);
    for (size_t i = 0; i < t->count; i++) { /* strings instead of their numbers */
        const trace_entry *const name = t->events[i].name;
        if (name->full[0] != 1)
            continue;
        const char *const text = trace_entry_of(&r->strings, TRACE_CALL, name->full + 1)->shown;
        t->events[i].name = trace_name(t, name->kind, text && text[0] ? text : "unnamed");
    }
    free(r->open);
    trace_entries_free(&r->strings);
    return r->error[0] ? -1 : 0;
}
#endif
