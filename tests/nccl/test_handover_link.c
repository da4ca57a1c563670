/* SPDX-License-Identifier: MIT */
/* Tests the control channel and the command line of examples/14_handover, without a GPU. C11, POSIX.

       cc -std=c11 -I. tests/nccl/test_handover_link.c -lpthread && ./a.out */
#define _GNU_SOURCE
#define KVPRIM_IMPLEMENTATION
#include "../../kvprim.h"
#include "../../examples/14_handover/handover_link.h"
#include "../../examples/14_handover/handover_options.h"
#include "../harness.h"
#include <pthread.h>
#include <sys/wait.h>

/* What must time out, and what must not, however busy the machine is. */
enum { short_ms = 60, patient_ms = 60000 };

/* Two ends of a connection: a link, and a bare socket or another link. */
static handover_link link_of(int *other, int timeout_ms)
{
    handover_link link;
    int fds[2] = {-1, -1};
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, fds) == 0);
    handover_link_open(&link, fds[0], timeout_ms);
    *other = fds[1];
    return link;
}

static void close_link(handover_link *link)
{
    (void)close(link->fd);
    free(link->payload);
}

/* Collects in `text` what is written to standard error up to end_collecting. */
static int collecting = -1;

static void collect(FILE *file)
{
    (void)fflush(stderr);
    collecting = dup(2);
    CHECK(file && collecting >= 0 && dup2(fileno(file), 2) == 2);
}

static void end_collecting(FILE *file, char *text, size_t size)
{
    (void)fflush(stderr);
    (void)dup2(collecting, 2);
    (void)close(collecting);
    rewind(file);
    text[fread(text, 1, size - 1, file)] = 0;
    (void)fclose(file);
}

/* Runs `call` in a process of its own, which must end with code 1 after these words. */
static void check_dies(void (*call)(handover_link *link), handover_link *link, const char *words)
{
    char text[400];
    int status = 0;
    FILE *const file = tmpfile();
    collect(file);
    const pid_t pid = fork();
    if (pid == 0) {
        call(link);
        _exit(0);
    }
    CHECK(pid > 0 && waitpid(pid, &status, 0) == pid);
    end_collecting(file, text, sizeof text);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 1 || !strstr(text, words))
        fail("status %d, expected \"%s\": %s", status, words, text);
}

static void expect_7(handover_link *link)
{
    handover_message m;
    handover_link_expect(link, 7, &m, 4);
}

static void say_1(handover_link *link)
{
    handover_link_say(link, 1, 0, 0, 0, NULL, 0);
}

/* Sends a message of many bytes, which do not fit into the socket, while the test reads. */
static void *say_much(void *argument)
{
    handover_link *const link = (handover_link *)argument;
    char *const bytes = (char *)allocate(handover_link_most_payload);
    memset(bytes, 7, handover_link_most_payload);
    bytes[handover_link_most_payload - 1] = 9;
    handover_link_say(link, 5, 1, 2, 3, bytes, handover_link_most_payload);
    handover_link_say(link, 6, -1, INT64_MIN, INT64_MAX, NULL, 0);
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
    handover_link_open(&b, fd, patient_ms);
    CHECK(!handover_link_hear(&b, &m, 0) && !handover_link_hear(&b, &m, 5));
    CHECK(pthread_create(&thread, NULL, say_much, &a) == 0);
    handover_link_expect(&b, 5, &m, handover_link_most_payload);
    CHECK(m.a == 1 && m.b == 2 && m.c == 3);
    CHECK(m.payload_bytes == handover_link_most_payload && b.payload[0] == 7);
    CHECK(b.payload[handover_link_most_payload - 1] == 9);
    handover_link_expect(&b, 6, &m, 0);
    CHECK(m.a == -1 && m.b == INT64_MIN && m.c == INT64_MAX && m.payload_bytes == 0);
    CHECK(pthread_join(thread, NULL) == 0);
    for (int k = 0; k < 3; k++) /* several at once, and each payload with its message */
        handover_link_say(&b, 10, k, 0, 0, &k, sizeof k);
    for (int k = 0; k < 3; k++)
        CHECK(handover_link_hear(&a, &m, 0) && m.a == k && memcmp(a.payload, &k, sizeof k) == 0);
    CHECK(!handover_link_hear(&a, &m, 0));
    close_link(&a), close_link(&b);
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
            CHECK(handover_link_hear(&a, &m, patient_ms) && m.kind == 4 && m.c == 99);
            CHECK(memcmp(a.payload, "abc", 3) == 0);
        } else {
            CHECK(pthread_join(thread, NULL) == 0);
            check_dies(expect_7, &a, "has not sent a whole message in 20 ms");
        }
        close_link(&a);
        close(fd);
    }
}

/* A peer that ends between two messages, or inside one; one that is another program; one that says too much; messages
   that are not due, or have a payload that is not. */
static void test_bad_peers(void)
{
    static const char *const words[] = {"it closed the connection",
                                        "it closed the connection",
                                        "another program: its message begins with 20545450",
                                        "has 4194305 bytes",
                                        "message 8 of 4 bytes where 7 of 4 was due",
                                        "message 7 of 0 bytes where 7 of 4 was due"};
    for (int k = 0; k < 6; k++) {
        handover_message m;
        int fd;
        handover_link a = link_of(&fd, patient_ms);
        memset(&m, 0, sizeof m);
        m.magic = k == 2 ? 0x20545450 : handover_link_magic, m.kind = k == 5 ? 7 : 8;
        m.payload_bytes = k == 3 ? handover_link_most_payload + 1 : k == 4 ? 4 : 0;
        const size_t bytes = k == 0 ? 0 : k == 1 ? sizeof m - 1 : sizeof m;
        CHECK(write(fd, &m, bytes) == (ssize_t)bytes && (k != 4 || write(fd, "1234", 4) == 4));
        if (k < 2)
            close(fd);
        check_dies(expect_7, &a, words[k]);
        close_link(&a);
        if (k >= 2)
            close(fd);
    }
}

static void say_too_much(handover_link *link)
{
    for (int k = 0; k < 4; k++)
        handover_link_say(link, 1, 0, 0, 0, link->payload, handover_link_most_payload);
}

static void test_deadlines(void)
{
    int fd;
    handover_link a = link_of(&fd, short_ms);
    const int64_t begun_us = handover_now_us();
    check_dies(expect_7, &a, "the peer has said nothing for");
    CHECK(handover_now_us() - begun_us >= short_ms * 1000 && handover_now_us() - begun_us < 20000000);
    check_dies(say_too_much, &a, "has not read a whole message in 60 ms");
    close(fd);
    check_dies(say_1, &a, "the peer is gone: Broken pipe");
    close_link(&a);
}

static const char *address_that_is_none;

static void open_bad_address(handover_link *link)
{
    (void)link;
    (void)handover_socket(address_that_is_none, true);
}

static char where[32]; /* where nobody listens any more */

static void connect_to_nobody(handover_link *link)
{
    (void)link;
    (void)handover_connect(where, short_ms);
}

/* Listens at a port of its own, and writes it to `where`. */
static int listener_somewhere(void)
{
    struct sockaddr_in at;
    socklen_t bytes = sizeof at;
    const int listener = handover_socket("127.0.0.1:0", true);
    CHECK(listener >= 0 && getsockname(listener, (struct sockaddr *)(void *)&at, &bytes) == 0);
    (void)snprintf(where, sizeof where, "127.0.0.1:%d", (int)ntohs(at.sin_port));
    return listener;
}

static void test_sockets(void)
{
    static const char *const bad[] = {"", ":", "host", "host:", ":5"};
    for (size_t k = 0; k < sizeof bad / sizeof *bad; k++) {
        address_that_is_none = bad[k];
        check_dies(open_bad_address, NULL, "is not HOST:PORT");
    }
    const int listener = listener_somewhere();
    const int one = handover_connect(where, patient_ms), other = handover_accept(listener, patient_ms);
    CHECK(one >= 0 && other >= 0);
    close(one), close(other), close(listener);
    check_dies(connect_to_nobody, NULL, "refused");
}

/* A peer whose kernel does not answer. */
static void test_connect_deadline(void)
{
    int waiting[16], n = 0;
    const int listener = listener_somewhere();
    const int64_t begun_us = handover_now_us();
    while (n < 16 && (waiting[n] = handover_socket(where, false)) >= 0) /* until nobody accepts any more */
        n++;
    CHECK(n == 16 || errno == ETIMEDOUT);
    CHECK(handover_now_us() - begun_us < (handover_attempt_ms + 30000) * 1000);
    while (n > 0)
        close(waiting[--n]);
    close(listener);
}

/* What the program says about a command line, whose words are separated by one space. */
static int parsed(handover_options *o, const char *line, char *text, size_t size)
{
    static char copy[400];
    char *argv[40] = {copy};
    int argc = 0;
    FILE *const file = tmpfile();
    (void)snprintf(copy, sizeof copy, "program %s", line);
    for (char *word = strtok(copy, " "); word; word = strtok(NULL, " "))
        argv[argc++] = word;
    collect(file);
    const int code = handover_parse(o, argc, argv);
    end_collecting(file, text, size);
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
               {"--heads 8x", "--heads 8x: must be a number"},
               {"--slots 33", "must be a number from 1 to 32"},
               {"--tokens 99999999999999999999", "must be a number"},
               {"--to-layout nhd|hnd", "must be nhd|hnd"},
               {"--to-layout nh", "must be nhd|hnd"},
               {"--mode fast", "must be ring|straight|all"},
               {"--listen", "--listen needs a value"},
               {"--mode straight --cancel-every 2", "counts chunks"},
               {"--mode straight --page-rows 1 --tokens 1048577", "at most 1048576 pages"},
               {"--heads 6 --from-tp 4", "--heads must be a multiple of --from-tp and of --to-tp"},
               {"--head-bytes 100", "--head-bytes must be a multiple of 8"},
               {"--chunk-bytes 17G", "must be a number from 0 to 17179869184"},
               {"--chunk-bytes 4095", "--chunk-bytes is less than a token of one layer"},
               {"--layers 1024 --heads 65536 --head-bytes 1M --chunk-bytes 16G", "is less than a token of one layer"},
               {"--layers 1024 --heads 4096 --head-bytes 1M --chunk-bytes 16G --tokens 16M", "64 TB or more"},
               {"--sockets --mode straight", "keep the sides from each other's memory"},
               {"--listen a:1 --mode all", "keep the sides from each other's memory"},
               {"--listen a:1 --connect b:2", "give one of them"}};
    static handover_options o;
    char text[400];
    for (size_t k = 0; k < sizeof bad / sizeof *bad; k++) {
        CHECK(parsed(&o, bad[k].line, text, sizeof text) == 2);
        if (!strstr(text, bad[k].words))
            fail("%s: %s", bad[k].line, text);
    }
    CHECK(parsed(&o, "--from-layout hnd --chunk-bytes 64K --from-tp 4 --to-tp 2 --mode all --page-rows 8", text,
                 sizeof text) == -1);
    CHECK(o.from.head_major == 1 && o.to.head_major == 0 && o.chunk_bytes == 64 << 10 && o.mode == mode_all);
    CHECK(o.from.tp == 4 && o.to.tp == 2 && o.to.page_rows == 8 && o.sockets == 0);
    CHECK(parsed(&o, "", text, sizeof text) == -1 && o.chunk_bytes == 64 << 20 && o.layers == 64);
    CHECK(parsed(&o, "--listen host:5 --sockets", text, sizeof text) == -1 && o.chunk_bytes == 8 << 20 && o.sockets);
    CHECK(parsed(&o, "--mode all --page-rows 1 --tokens 1M", text, sizeof text) == -1 && o.tokens == 1 << 20);
    CHECK(parsed(&o, "--connect host:5 --to-page-rows 4", text, sizeof text) == -1);
    CHECK(strcmp(o.connect, "host:5") == 0 && !o.listen && o.from.page_rows == 16 && o.to.page_rows == 4);
}

int main(void)
{
    run("handover: messages", test_messages);
    run("handover: bytes that come one by one", test_dribble);
    run("handover: peers that are gone, or others", test_bad_peers);
    run("handover: deadlines", test_deadlines);
    run("handover: sockets", test_sockets);
    run("handover: a peer that does not answer", test_connect_deadline);
    run("handover: options", test_options);
    return finish();
}
