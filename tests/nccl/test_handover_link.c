/* SPDX-License-Identifier: MIT */
/* Tests the control channel and the command line of examples/14_handover, without a GPU. C11, POSIX.

       cc -std=c11 -I. tests/nccl/test_handover_link.c -lpthread && ./a.out */
#define _GNU_SOURCE
#define KVPRIM_IMPLEMENTATION
#include "../../kvprim.h"
#include "../../examples/14_handover/handover_guard.h"
#include "../../examples/14_handover/handover_options.h"
#include "../harness.h"

/* What must time out, and what must not, however busy the machine is. */
enum { short_ms = 60, patient_ms = 60000 };

/* Two ends of a connection: a link, and a bare socket or another link. */
static handover_link link_of(int *other, int timeout_ms)
{
    handover_link link;
    int fds[2] = {-1, -1};
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, fds) == 0);
    CHECK(handover_link_open(&link, fds[0], timeout_ms));
    *other = fds[1];
    return link;
}

static bool says(const handover_link *link, const char *words)
{
    if (link->dead && strstr(link->error, words))
        return true;
    printf("  %s: %s\n", link->dead ? "dead" : "alive", link->error);
    return false;
}

/* Sends a message of many bytes, which do not fit into the socket, while the test reads. */
static void *say_much(void *argument)
{
    handover_link *const link = (handover_link *)argument;
    char *const bytes = (char *)allocate(handover_link_most_payload);
    memset(bytes, 7, handover_link_most_payload);
    bytes[handover_link_most_payload - 1] = 9;
    CHECK(handover_link_say(link, 5, 1, 2, 3, bytes, handover_link_most_payload));
    CHECK(handover_link_say(link, 6, -1, INT64_MIN, INT64_MAX, NULL, 0));
    free(bytes);
    return NULL;
}

static void test_messages(void)
{
    handover_link a, b;
    handover_message m;
    pthread_t thread;
    int fd;
    a = link_of(&fd, patient_ms);
    CHECK(handover_link_open(&b, fd, patient_ms));
    CHECK(handover_link_hear(&b, &m, 0) == 0 && handover_link_hear(&b, &m, 5) == 0);
    CHECK(pthread_create(&thread, NULL, say_much, &a) == 0);
    CHECK(handover_link_expect(&b, 5, &m, handover_link_most_payload) && m.a == 1 && m.b == 2 && m.c == 3);
    CHECK(m.payload_bytes == handover_link_most_payload && b.payload[0] == 7);
    CHECK(b.payload[handover_link_most_payload - 1] == 9);
    CHECK(handover_link_expect(&b, 6, &m, 0) && m.a == -1 && m.b == INT64_MIN && m.c == INT64_MAX &&
          m.payload_bytes == 0);
    CHECK(pthread_join(thread, NULL) == 0);
    for (int k = 0; k < 3; k++) /* several at once, and each payload with its message */
        CHECK(handover_link_say(&b, 10, k, 0, 0, &k, sizeof k));
    for (int k = 0; k < 3; k++)
        CHECK(handover_link_hear(&a, &m, 0) == 1 && m.a == k && memcmp(a.payload, &k, sizeof k) == 0);
    CHECK(handover_link_hear(&a, &m, 0) == 0);
    CHECK(!handover_link_say(&a, 1, 0, 0, 0, a.payload, handover_link_most_payload + 1) && says(&a, "at most 4194304"));
    CHECK(!handover_link_say(&a, 1, 0, 0, 0, NULL, 0) && handover_link_hear(&a, &m, 0) == -1);
    handover_link_close(&a), handover_link_close(&b);
    handover_link_close(&b); /* again */
}

/* Writes all bytes of a message but the last one by one. */
static void *dribble(void *argument)
{
    const handover_message m = {handover_link_magic, 4, 0, 0, 99, 3, 0};
    char bytes[sizeof m + 3] = "";
    memcpy(bytes, &m, sizeof m);
    memcpy(bytes + sizeof m, "abc", 3);
    for (size_t k = 0; k < sizeof bytes - 1; k++) {
        CHECK(write(*(int *)argument, bytes + k, 1) == 1);
        (void)poll(NULL, 0, 1);
    }
    return NULL;
}

/* Bytes come one by one, each in time but the message too late, and the last one never. */
static void test_dribble(void)
{
    for (int whole = 0; whole < 2; whole++) {
        handover_message m;
        pthread_t thread;
        int fd;
        handover_link a = link_of(&fd, whole ? patient_ms : short_ms / 3);
        CHECK(pthread_create(&thread, NULL, dribble, &fd) == 0);
        if (whole) {
            CHECK(pthread_join(thread, NULL) == 0 && write(fd, "c", 1) == 1);
            CHECK(handover_link_hear(&a, &m, patient_ms) == 1 && m.kind == 4 && m.c == 99);
            CHECK(memcmp(a.payload, "abc", 3) == 0);
        } else {
            CHECK(handover_link_hear(&a, &m, patient_ms) == -1 && says(&a, "has not sent a whole message in 20 ms"));
            CHECK(pthread_join(thread, NULL) == 0);
        }
        handover_link_close(&a);
        close(fd);
    }
}

/* A peer that ends between two messages, or inside one; one that is another program; one that says too much. */
static void test_bad_peers(void)
{
    static const char *const words[] = {"it closed the connection", "it closed the connection", "another program",
                                        "says that it has 4194305 bytes", "message 8 of 0 bytes where 7 of 0 was due"};
    for (int k = 0; k < 5; k++) {
        handover_message m;
        int fd;
        handover_link a = link_of(&fd, patient_ms);
        memset(&m, 0, sizeof m);
        m.magic = k == 2 ? 0x20545450 : handover_link_magic, m.kind = 8;
        m.payload_bytes = k == 3 ? handover_link_most_payload + 1 : 0;
        const size_t bytes = k == 0 ? 0 : k == 1 ? sizeof m - 1 : sizeof m;
        CHECK(write(fd, &m, bytes) == (ssize_t)bytes);
        if (k < 2)
            close(fd);
        CHECK(!handover_link_expect(&a, 7, &m, 0) && says(&a, words[k]));
        CHECK(handover_link_hear(&a, &m, 0) == -1 && says(&a, words[k])); /* the first error stays */
        handover_link_close(&a);
        if (k >= 2)
            close(fd);
    }
}

/* A message of the right kind, whose payload is not what is due. */
static void test_payloads(void)
{
    for (unsigned bytes = 0; bytes <= 8; bytes += 4) {
        handover_message m;
        int fd;
        handover_link a = link_of(&fd, patient_ms), b;
        CHECK(handover_link_open(&b, fd, patient_ms) && handover_link_say(&b, 7, 0, 0, 0, "12345678", bytes));
        CHECK(handover_link_expect(&a, 7, &m, 4) == (bytes == 4));
        CHECK(bytes == 4 || says(&a, bytes ? "7 of 8 bytes where 7 of 4 was due" : "7 of 0 bytes where 7 of 4"));
        handover_link_close(&a), handover_link_close(&b);
    }
}

static void test_deadlines(void)
{
    handover_message m;
    int fd;
    handover_link a = link_of(&fd, short_ms);
    const int64_t begun_us = handover_now_us();
    CHECK(!handover_link_expect(&a, 1, &m, 0) && says(&a, "the peer has said nothing for"));
    CHECK(handover_now_us() - begun_us >= short_ms * 1000 && handover_now_us() - begun_us < 20000000);
    handover_link_close(&a);
    close(fd);
    a = link_of(&fd, short_ms); /* a peer that does not read */
    for (int k = 0; k < 4 && !a.dead; k++)
        (void)handover_link_say(&a, 1, 0, 0, 0, a.payload, handover_link_most_payload);
    CHECK(says(&a, "has not read a whole message in 60 ms"));
    handover_link_close(&a);
    close(fd);
    a = link_of(&fd, patient_ms);
    close(fd);
    CHECK(!handover_link_say(&a, 1, 0, 0, 0, NULL, 0) && says(&a, "the peer is gone: Broken pipe"));
    handover_link_close(&a);
}

static void test_sockets(void)
{
    static const char *const bad[] = {"", ":", "host", "host:", ":5"};
    struct sockaddr_in at;
    socklen_t bytes = sizeof at;
    char why[160], address[32];
    for (size_t k = 0; k < sizeof bad / sizeof *bad; k++)
        CHECK(handover_socket(bad[k], true, why) == -2 && strstr(why, "is not HOST:PORT"));
    const int listener = handover_socket("127.0.0.1:0", true, why);
    CHECK(listener >= 0 && getsockname(listener, (struct sockaddr *)(void *)&at, &bytes) == 0);
    (void)snprintf(address, sizeof address, "127.0.0.1:%d", (int)ntohs(at.sin_port));
    CHECK(handover_accept(listener, 0) == -1);
    const int one = handover_connect(address, patient_ms, why), other = handover_accept(listener, patient_ms);
    CHECK(one >= 0 && other >= 0);
    close(one), close(other), close(listener);
    CHECK(handover_connect(address, short_ms, why) == -1 && strstr(why, "refused"));
    const int64_t begun_us = handover_now_us();
    CHECK(handover_connect("host", 60000, why) == -2 && strstr(why, "is not HOST:PORT"));
    CHECK(handover_now_us() - begun_us < 30000000);
}

/* A peer whose kernel does not answer. */
static void test_connect_deadline(void)
{
    struct sockaddr_in at;
    socklen_t bytes = sizeof at;
    char why[160], address[32];
    int waiting[16], n = 0;
    const int listener = handover_socket("127.0.0.1:0", true, why);
    CHECK(listener >= 0 && getsockname(listener, (struct sockaddr *)(void *)&at, &bytes) == 0);
    (void)snprintf(address, sizeof address, "127.0.0.1:%d", (int)ntohs(at.sin_port));
    const int64_t begun_us = handover_now_us();
    while (n < 16 && (waiting[n] = handover_connect(address, 0, why)) >= 0) /* until nobody accepts any more */
        n++;
    CHECK(n == 16 || strstr(why, "timed out"));
    CHECK(handover_now_us() - begun_us < (handover_attempt_ms + 30000) * 1000);
    while (n > 0)
        close(waiting[--n]);
    close(listener);
}

/* What a guard ends: it takes a while. */
static int32_t ended, ending;

static void end_slowly(void *context)
{
    (void)context;
    __atomic_store_n(&ending, 1, __ATOMIC_SEQ_CST);
    (void)__atomic_add_fetch(&ended, 1, __ATOMIC_SEQ_CST);
    (void)poll(NULL, 0, short_ms);
    __atomic_store_n(&ending, 0, __ATOMIC_SEQ_CST);
}

/* A call that waits for a peer, and returns when it is ended, or after a minute. */
static bool call_ends(void)
{
    const int32_t before = __atomic_load_n(&ended, __ATOMIC_SEQ_CST);
    const int64_t begun_us = handover_now_us();
    while (__atomic_load_n(&ended, __ATOMIC_SEQ_CST) == before && handover_now_us() - begun_us < patient_ms * 1000)
        (void)poll(NULL, 0, 1);
    return __atomic_load_n(&ended, __ATOMIC_SEQ_CST) != before;
}

static void test_guard(void)
{
    static handover_guard g;
    int fds[2] = {-1, -1};
    CHECK(handover_guard_start(&g, end_slowly, NULL) && socketpair(AF_UNIX, SOCK_STREAM, 0, fds) == 0);
    handover_guard_begin(&g, fds[0], 60000);
    CHECK(handover_guard_end(&g) && __atomic_load_n(&ended, __ATOMIC_SEQ_CST) == 0);
    for (int k = 0; k < 2; k++) { /* a deadline; a connection that ends */
        handover_guard_begin(&g, fds[0], k ? 10 * patient_ms : 5);
        if (k)
            (void)close(fds[1]);
        CHECK(call_ends() && call_ends()); /* the second began after the first was ended */
        CHECK(handover_guard_fired(&g) && !handover_guard_end(&g) && !__atomic_load_n(&ending, __ATOMIC_SEQ_CST));
    }
    const int32_t before = __atomic_load_n(&ended, __ATOMIC_SEQ_CST);
    (void)poll(NULL, 0, 5 * handover_guard_ms);
    CHECK(__atomic_load_n(&ended, __ATOMIC_SEQ_CST) == before);
    handover_guard_begin(&g, -1, 60000); /* what was ended before does not count */
    CHECK(!handover_guard_fired(&g) && handover_guard_end(&g));
    (void)close(fds[0]);
}

/* What the program says about a command line, whose words are separated by one space. */
static int parsed(handover_options *o, const char *line, char *text, size_t size)
{
    static char copy[400];
    char *argv[40] = {copy};
    int argc = 0;
    FILE *const file = tmpfile();
    const int before = dup(2);
    (void)snprintf(copy, sizeof copy, "program %s", line);
    for (char *word = strtok(copy, " "); word; word = strtok(NULL, " "))
        argv[argc++] = word;
    CHECK(file && dup2(fileno(file), 2) == 2);
    const int code = handover_parse(o, argc, argv);
    (void)fflush(stderr);
    (void)dup2(before, 2);
    (void)close(before);
    rewind(file);
    text[fread(text, 1, size - 1, file)] = 0;
    (void)fclose(file);
    return code;
}

static void test_options(void)
{
    static const struct {
        const char *line, *words;
    } bad[] = {{"--bogus", "--bogus is unknown"},
               {"--layers", "--layers needs a value"},
               {"--layers 0", "--layers 0: must be a number from 1 to 1024"},
               {"--layers 0K", "must be a number"},
               {"--max-sms K", "--max-sms K: must be a number"},
               {"--heads 8x", "--heads 8x: must be a number"},
               {"--slots 33", "must be a number from 1 to 32"},
               {"--tokens 99999999999999999999", "must be a number"},
               {"--kill-at -2", "must be a number from -1 to"},
               {"--to-layout nhd|hnd", "must be nhd|hnd"},
               {"--to-layout nh", "must be nhd|hnd"},
               {"--mode fast", "must be ring|straight|all"},
               {"--listen", "--listen needs a value"},
               {"--mode straight --kill-at 0", "count chunks"},
               {"--stop", "--stop needs --kill-at"},
               {"--mode straight --page-rows 1 --tokens 1048577", "at most 1048576 pages"},
               {"--heads 6 --from-tp 4", "--heads must be a multiple of --from-tp and of --to-tp"},
               {"--head-bytes 100", "--head-bytes must be a multiple of 8"},
               {"--chunk-bytes 17G", "must be a number from 0 to 17179869184"},
               {"--chunk-bytes 4095", "--chunk-bytes is less than a token of one layer"},
               {"--layers 1024 --heads 65536 --head-bytes 1M --chunk-bytes 16G", "is less than a token of one layer"},
               {"--layers 1024 --heads 4096 --head-bytes 1M --chunk-bytes 16G --tokens 16M", "64 TB or more"},
               {"--sockets --mode straight", "keeps the sides from each other's memory"},
               {"--listen a:1 --connect b:2", "give one of them"}};
    static handover_options o;
    char text[400];
    for (size_t k = 0; k < sizeof bad / sizeof *bad; k++) {
        CHECK(parsed(&o, bad[k].line, text, sizeof text) == 2);
        if (!strstr(text, bad[k].words))
            fail("%s: %s", bad[k].line, text);
    }
    CHECK(
        parsed(&o,
               "--from-layout hnd --chunk-bytes 64K --from-tp 4 --to-tp 2 --mode all --stop --kill-at 1 --page-rows 8",
               text, sizeof text) == -1);
    CHECK(o.from.head_major == 1 && o.to.head_major == 0 && o.chunk_bytes == 64 << 10 && o.mode == mode_all);
    CHECK(o.from.tp == 4 && o.to.tp == 2 && o.to.page_rows == 8 && o.stop == 1 && o.kill_at == 1 && o.kill_side == 0);
    CHECK(parsed(&o, "", text, sizeof text) == -1 && o.chunk_bytes == 64 << 20 && o.layers == 64 && o.kill_at == -1);
    CHECK(parsed(&o, "--mode all --page-rows 1 --tokens 1M", text, sizeof text) == -1 && o.tokens == 1 << 20);
    CHECK(parsed(&o, "--connect host:5 --to-page-rows 4", text, sizeof text) == -1 && o.chunk_bytes == 8 << 20);
    CHECK(strcmp(o.connect, "host:5") == 0 && !o.listen && o.from.page_rows == 16 && o.to.page_rows == 4);
}

int main(void)
{
    run("handover: messages", test_messages);
    run("handover: bytes that come one by one", test_dribble);
    run("handover: peers that are gone, or others", test_bad_peers);
    run("handover: payloads", test_payloads);
    run("handover: deadlines", test_deadlines);
    run("handover: sockets", test_sockets);
    run("handover: a peer that does not answer", test_connect_deadline);
    run("handover: calls that wait for a peer", test_guard);
    run("handover: options", test_options);
    return finish();
}
