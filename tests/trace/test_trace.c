/* SPDX-License-Identifier: MIT */
/* Tests the reader of traces from memory: exact times and names, and that cut or spoilt files are refused with a reason
   and a place, whatever the byte. test_trace.py tests the program.

       test_trace FOLDER    with chrome.json, pairs.json and nsys.jsonl */
#define _POSIX_C_SOURCE 200809L
#include "examples/10_trace/trace_answers.h"
#include "examples/10_trace/trace_read.h"

#include "../harness.h"

static const char *folder;

/* Reads the bytes, of which exactly `size` may be touched. */
static int read_bytes(trace *t, const char *bytes, size_t size, char *error)
{
    trace_reading *const r = trace_reading_new("memory");
    unsigned char *const copy = (unsigned char *)allocate(size);
    memcpy(copy, bytes, size);
    r->bytes = copy;
    r->size = size;
    memset(t, 0, sizeof *t);
    const int result = trace_read(r, t);
    CHECK(result == 0 || result == -1);
    CHECK((result == 0) == (r->error[0] == 0));
    CHECK(result == 0 || strncmp(r->error, "memory: byte ", 13) == 0);
    CHECK(strlen(r->error) < sizeof r->error - 1 && !strpbrk(r->error, "\n\r\t"));
    snprintf(error, sizeof r->error, "%s", r->error);
    free(r), free(copy);
    return result;
}

static void refuse(const char *bytes, size_t size, const char *words)
{
    char error[640];
    trace t;
    if (read_bytes(&t, bytes, size, error) == 0 || !strstr(error, words))
        fail("\"%s\" does not say \"%s\"", error, words);
    trace_free(&t);
}

/* What was read can be projected, answered and written, whatever it is. */
static void check_use(trace *t)
{
    (void)trace_project(t, NULL);
    for (size_t i = 0; i < t->count; i++) {
        const trace_event *const e = t->events + i;
        CHECK(e->end >= e->begin && e->name->full[0] != 1 && e->name->full[0] != 0 && e->name->shown[0] != 0);
    }
    trace_figures g = trace_figures_of(t, 0);
    CHECK(trace_total(&g.parts, "idle: ").ns == g.idles.ns);
    CHECK(trace_total(&g.parts, "all: ").ns == g.runs.ns + g.idles.ns);
    CHECK(trace_total(&g.operations, "").count <= t->count);
    trace_figures_free(&g);
    FILE *const null = fopen("/dev/null", "w");
    trace_write_all(null, t);
    fclose(null);
}

static char *file_of(const char *name, size_t *size)
{
    char path[500];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *const f = fopen(path, "rb");
    char *const bytes = (char *)allocate(1 << 16);
    *size = f ? fread(bytes, 1, 1 << 16, f) : 0;
    CHECK(f && *size > 1000 && *size < 1 << 16);
    if (f)
        fclose(f);
    return bytes;
}

static const char *const files[] = {"chrome.json", "pairs.json", "nsys.jsonl"};

/* Every prefix of Chrome's JSON is refused because it ends, with its length as the place. Of nsys's lines, those that
   end after a line are whole files. */
static void cut(void)
{
    for (int f = 0; f < 3; f++) {
        size_t size;
        char *const bytes = file_of(files[f], &size), error[640];
        for (size_t cut = 1; cut + 2 < size; cut += cut < 1500 ? 1 : 41) {
            trace t;
            char words[60];
            snprintf(words, sizeof words, "memory: byte %zu: the file ends where", cut);
            if (f < 2 || (bytes[cut - 1] != '\n' && bytes[cut] != '\n')) {
                refuse(bytes, cut, words);
                continue;
            }
            CHECK(read_bytes(&t, bytes, cut, error) == 0 || strstr(error, "none of its"));
            trace_free(&t);
        }
        free(bytes);
    }
}

/* Changes a few bytes; what is still accepted must be usable. */
static void spoilt(void)
{
    size_t accepted = 0;
    random_state = 17;
    for (int round = 0; round < 1500; round++) {
        static const char parts[] = "\"\\{}[]:,0179-+eE.u \n\1BEX";
        static char *bytes[3];
        static size_t sizes[3];
        char copy[1 << 12], error[640];
        const int f = round % 3;
        trace t;
        if (!bytes[f])
            bytes[f] = file_of(files[f], &sizes[f]);
        size_t size = sizes[f] < sizeof copy ? sizes[f] : sizeof copy - 2;
        memcpy(copy, bytes[f], size);
        for (; copy[size - 1] != '\n'; size--) /* whole lines, with what closes them */
            continue;
        if (f < 2) /* instead of the comma */
            memcpy(copy + size - 2, f ? "] " : "]}", 2);
        for (uint64_t changes = below(4); changes; changes--)
            copy[below(size)] = below(3) ? parts[below(sizeof parts - 1)] : (char)below(256);
        if (read_bytes(&t, copy, size, error) == 0) {
            check_use(&t);
            accepted++;
        }
        trace_free(&t);
    }
    CHECK(accepted > 300 && accepted < 1200);
}

static const char event[] =
    "[{\"ph\":\"X\",\"cat\":\"%s\",\"name\":\"%s\",\"pid\":1,\"tid\":\"%s\",\"ts\":%s,\"dur\":%s}]";

/* Reads one event. */
static trace_event read_event(const char *category, const char *name, const char *tid, const char *ts, const char *dur,
                              char *got)
{
    char text[3000], error[640];
    trace t;
    trace_event e;
    memset(&e, 0, sizeof e);
    snprintf(text, sizeof text, event, category, name, tid, ts, dur);
    (void)read_bytes(&t, text, strlen(text), error); /* a trace of calls alone is an error */
    if (t.count == 1) {
        e = t.events[0];
        snprintf(got, 300, "%s", e.name->shown);
    } else
        fail("%s: %s", text, error);
    trace_free(&t);
    return e;
}

/* A byte order mark may come before anything else. */
static void marked(void)
{
    for (int f = 0; f < 3; f++) {
        size_t size;
        char *const bytes = file_of(files[f], &size), *const with = (char *)allocate(size + 3), error[640];
        trace t;
        memcpy(with, "\xef\xbb\xbf", 3);
        memcpy(with + 3, bytes, size);
        CHECK(read_bytes(&t, with, size + 3, error) == 0 && t.count > 0);
        trace_free(&t);
        refuse(with + 1, size + 2, "byte 0: expected '{'");
        memcpy(with + 2, bytes, size);
        refuse(with, size + 2, "byte 2: expected the rest of");
        free(with), free(bytes);
    }
}

static void times(void)
{
    static const struct {
        const char *us;
        uint64_t ns;
    } cases[] = {{"0", 0},
                 {"0.001", 1},
                 {"0.0005", 1},
                 {"0.0004", 0},
                 {"1.5", 1500},
                 {"4524124798798.264", 4524124798798264u},
                 {"1790857026000000.999", 1790857026000000999u},
                 {"1.5e3", 1500000},
                 {"12E-1", 1200}};
    char name[300];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const trace_event e = read_event("kernel", "k", "7", cases[i].us, cases[i].us, name);
        if (e.begin != cases[i].ns || e.end != 2 * cases[i].ns)
            fail("%s us are %llu to %llu ns", cases[i].us, (unsigned long long)e.begin, (unsigned long long)e.end);
    }
}

/* A pair is of a process and a thread, whatever the stream; pairs lie inside each other. */
static void pairs(void)
{
    static const char text[] =
        "[{\"ph\":\"B\",\"cat\":\"kernel\",\"name\":\"k\",\"pid\":1,\"tid\":5,\"ts\":1,\"args\":{\"stream\":9}},"
        "{\"ph\":\"B\",\"cat\":\"x\",\"pid\":1,\"tid\":5},{\"ph\":\"B\",\"cat\":\"kernel\",\"name\":\"l\",\"pid\":2,"
        "\"tid\":5,\"ts\":2},"
        "{\"ph\":\"E\",\"pid\":1,\"tid\":5},{\"ph\":\"E\",\"pid\":1,\"tid\":5,\"ts\":7},{\"ph\":\"E\",\"pid\":2,"
        "\"tid\":5,\"ts\":9}]";
    char error[640];
    trace t;
    CHECK(read_bytes(&t, text, sizeof text - 1, error) == 0 && t.count == 2);
    CHECK(t.count == 2 && t.events[0].track == 9 && t.events[0].begin == 1000 && t.events[0].end == 7000);
    CHECK(t.count == 2 && t.events[1].track == 5 && t.events[1].begin == 2000 && t.events[1].end == 9000);
    trace_free(&t);
}

static void names(void)
{
    static const char *const cases[][3] = {
        {"kernel", "void at::native::(anonymous namespace)::CatArrayBatchedCopy<c10::half, (int)4>(long, int)",
         "CatArrayBatchedCopy"},
        {"kernel",
         "std::enable_if<!(false), void>::type internal::gemvx::kernel<int, a<(b)1>>(cublasGemvParamsEx<int>)",
         "kernel"},
        {"kernel", "ncclDevKernel_AllReduce_Sum_f16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
         "ncclDevKernel_AllReduce_Sum_f16_RING_LL"},
        {"kernel", "<>", "<>"},
        {"kernel", "", "unnamed"},
        {"kernel", "\\u00e9\\ud83d\\ude00\\ud83d\\n\\u0000\\udc00x", "\xc3\xa9\xf0\x9f\x98\x80?x"},
        {"gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", "Memcpy HtoD"},
        {"cuda_runtime", "cudaMalloc_v3020", "cudaMalloc"},
        {"cuda_runtime", "cudaGraph_version", "cudaGraph_version"},
        {"gpu_memset", "Memset (Unknown)", "Memset"},
    };
    char name[300];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        (void)read_event(cases[i][0], cases[i][1], "7", "1", "1", name);
        if (strcmp(name, cases[i][2]) != 0)
            fail("\"%s\" is named \"%s\"", cases[i][1], name);
    }
    CHECK(read_event("cuda", "k", "Stream 13", "1", "1", name).track == 13);
    CHECK(read_event("cuda", "k", "default", "1", "1", name).track !=
          read_event("cuda", "k", "other", "1", "1", name).track);
}

/* What a file says cannot write to a terminal: neither as a name nor in an error. */
static void shown(void)
{
    char name[] = "\x1b[31m\xc2\x9b\n\xc3\xa9\xff\x7f\xc0\x80\xed\xa0\x80\xf4\x90\x80\x80\xf0\x9f\x98\x80\xc3";
    char text[600];
    CHECK(strcmp(trace_show(name), "?[31m???\xc3\xa9???????????\xf0\x9f\x98\x80?") == 0);
    snprintf(text, sizeof text, event, "kernel", "k", "7", "\"\\u001b[31m\\nx\"", "1");
    refuse(text, strlen(text), "ts is '?[31m?x'");
}

/* Sums of absurd times wrap, which is no undefined behaviour. */
static void absurd_times(void)
{
    trace_entry now, old;
    memset(&now, 0, sizeof now), memset(&old, 0, sizeof old);
    now.ns = 8900000000000000000u, old.ns = 17800000000000000000u;
    const trace_line line = {&now, &old};
    CHECK(trace_slower(&line) == -8900000000000000000);
}

/* Writes a trace into memory and reads it again. Names that are no UTF-8 are still valid JSON. */
static void written(void)
{
    static const char *const texts[] = {"plain",    "\"\\\x01", "\xc3\xa9", "\xe2\x82\xac\xf0\x9f\x98\x80",
                                        "\xff\xc3", "(x"};
    static const char *const back[] = {"plain", "\"\\?", "\xc3\xa9", "\xe2\x82\xac\xf0\x9f\x98\x80", "??", "(x"};
    trace t = {0}, again;
    char *bytes = NULL, error[640];
    size_t size = 0;
    for (uint32_t i = 0; i < 6; i++) {
        const trace_event e = {trace_name(&t, TRACE_KERNEL, texts[i]), 5000 + i, 12345678 + i, 0, i % 2, i, 0, 0};
        trace_add(&t, e);
    }
    FILE *const f = open_memstream(&bytes, &size);
    trace_write_all(f, &t);
    fclose(f);
    CHECK(read_bytes(&again, bytes, size, error) == 0 && again.count == 6);
    for (uint32_t i = 0; i < 6 && i < again.count; i++) {
        size_t at = 0;
        while (at < 6 && again.events[at].track != i)
            at++;
        const trace_event *const e = again.events + at % 6;
        if (strcmp(e->name->shown, back[i]) != 0)
            fail("name %u is read as \"%s\"", i, e->name->shown);
        CHECK(at < 6 && e->begin == i && e->end - e->begin == 12340678 && e->device == i % 2);
    }
    free(bytes);
    trace_free(&t), trace_free(&again);
}

/* 100,000 names are found again, one entry each; the same text of another kind is another name. */
static void many_names(void)
{
    static const trace_entry *entries[100000];
    trace t = {0};
    char text[20];
    for (int round = 0; round < 2; round++)
        for (int n = 0; n < 100000; n++) {
            snprintf(text, sizeof text, "name %d", n / 2);
            const trace_entry *const entry = trace_name(&t, n % 2 ? TRACE_CALL : TRACE_KERNEL, text);
            if (round ? entry != entries[n] : strcmp(entry->full, text) != 0)
                fail("name %d has another entry", n);
            entries[n] = entry;
        }
    CHECK(t.names.count == 100000);
    trace_free(&t);
}

/* Members after the first 128 are skipped, and long values and keys are cut, which is no overflow. */
static void many_members(void)
{
    char text[60000], error[640];
    size_t size = (size_t)sprintf(text, "[{\"ph\":\"X\",\"cat\":\"kernel\",\"ts\":1,\"dur\":2,\"name\":\"%05000d\"", 0);
    for (int i = 0; i < 300; i++)
        size += (size_t)sprintf(text + size, ",\"%0*d\":\"%0*d\",\"args\":{\"stream\":%d}", i % 80 + 1, i, i % 99 + 1,
                                i, i);
    size += (size_t)sprintf(text + size, "}]");
    trace t;
    CHECK(read_bytes(&t, text, size, error) == 0 && t.count == 1 && t.events[0].end == 3000);
    CHECK(t.count == 1 && strlen(t.events[0].name->full) == trace_name_bytes - 1);
    trace_free(&t);
}

int main(int argc, char **argv)
{
    folder = argc > 1 ? argv[1] : "tests/trace/samples";
    run("trace: times are read to the nanosecond", times);
    run("trace: pairs of events", pairs);
    run("trace: names", names);
    run("trace: names and errors have no control characters", shown);
    run("trace: absurd times", absurd_times);
    run("trace: many and long members", many_members);
    run("trace: what is written is read again", written);
    run("trace: many names", many_names);
    run("trace: a byte order mark", marked);
    run("trace: files that are cut at any byte", cut);
    run("trace: files with spoilt bytes", spoilt);
    return finish();
}
