/* SPDX-License-Identifier: MIT */
/* handover_link.h: the control channel between the two sides of a hand-over: messages over a stream socket, with
   deadlines. It notices a peer that is gone, is silent, or is another program. Tensors go elsewhere. C11 and C++17,
   POSIX.

       handover_link link;
       if (!handover_link_open(&link, fd, timeout_ms)) ...
       handover_link_say(&link, kind, a, b, c, payload, bytes)       both return false after an error, which
       handover_link_expect(&link, kind, &message)                   handover_link_error says
       while ((n = handover_link_hear(&link, &message, 0)) > 0) ...  what is there; never waits with 0 ms

   After an error the channel stays dead. Both ends are the same program on machines of the same byte order; a peer that
   is another program is found by the first word of its message. */
#ifndef HANDOVER_LINK_H
#define HANDOVER_LINK_H

#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

enum { handover_link_magic = 0x4b564831, handover_link_most_payload = 4 << 20 };

typedef struct handover_message {
    uint32_t magic, kind;
    int64_t a, b, c;
    uint32_t payload_bytes, reserved;
} handover_message;

typedef struct handover_link {
    int fd, timeout_ms;
    bool dead;
    int64_t heard_us; /* when the peer's last bytes came */
    size_t have;      /* bytes of the message that is coming in */
    handover_message message;
    char *payload; /* of the last message: handover_link_most_payload bytes */
    char error[240];
} handover_link;

static inline int64_t handover_now_us(void)
{
    struct timespec t;
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

__attribute__((format(printf, 2, 3))) static inline bool handover_link_fail(handover_link *link, const char *format,
                                                                            ...)
{
    va_list args;
    if (link->dead) /* the first error is the cause */
        return false;
    va_start(args, format);
    (void)vsnprintf(link->error, sizeof link->error, format, args);
    va_end(args);
    link->dead = true;
    return false;
}

/* Takes over the socket. False: no memory, or the socket does not take its options. */
static inline bool handover_link_open(handover_link *link, int fd, int timeout_ms)
{
    const int one = 1;
    memset(link, 0, sizeof *link);
    link->fd = fd, link->timeout_ms = timeout_ms, link->heard_us = handover_now_us();
    link->payload = (char *)malloc(handover_link_most_payload);
    (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one); /* fails on a socketpair, which has no delay */
    return link->payload || handover_link_fail(link, "no memory for messages");
}

static inline void handover_link_close(handover_link *link)
{
    if (link->payload)
        (void)close(link->fd);
    free(link->payload);
    memset(link, 0, sizeof *link);
    link->fd = -1, link->dead = true;
}

/* Writes all of it, or gives up after timeout_ms without progress. */
static inline bool handover_link_write(handover_link *link, const void *bytes, size_t count)
{
    const char *at = (const char *)bytes;
    while (count > 0 && !link->dead) {
        struct pollfd p = {link->fd, POLLOUT, 0};
        const ssize_t n = send(link->fd, at, count, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n > 0)
            at += n, count -= (size_t)n;
        else if (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)
            return handover_link_fail(link, "the peer is gone: %s", strerror(errno));
        else if (poll(&p, 1, link->timeout_ms) == 0)
            return handover_link_fail(link, "the peer has not read for %d ms", link->timeout_ms);
    }
    return !link->dead;
}

static inline bool handover_link_say(handover_link *link, uint32_t kind, int64_t a, int64_t b, int64_t c,
                                     const void *payload, size_t bytes)
{
    handover_message m;
    memset(&m, 0, sizeof m);
    m.magic = handover_link_magic, m.kind = kind, m.a = a, m.b = b, m.c = c, m.payload_bytes = (uint32_t)bytes;
    if (bytes > handover_link_most_payload)
        return handover_link_fail(link, "a message of %llu bytes, at most %d are allowed", (unsigned long long)bytes,
                                  (int)handover_link_most_payload);
    return handover_link_write(link, &m, sizeof m) && handover_link_write(link, payload, bytes);
}

/* How many bytes the message that is coming in has, as far as that is known. */
static inline size_t handover_link_wanted(const handover_link *link)
{
    return sizeof link->message + (link->have < sizeof link->message ? 0 : link->message.payload_bytes);
}

/* Reads what is there of the message. Returns whether it is complete. */
static inline bool handover_link_read(handover_link *link)
{
    while (link->have < handover_link_wanted(link)) {
        const size_t head = sizeof link->message;
        char *const to = link->have < head ? (char *)&link->message + link->have : link->payload + (link->have - head);
        const ssize_t n = recv(link->fd, to, handover_link_wanted(link) - link->have, MSG_DONTWAIT);
        if (n == 0)
            return handover_link_fail(link, "the peer is gone: it closed the connection%s",
                                      link->have ? " in the middle of a message" : "");
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR))
            return false;
        if (n < 0)
            return handover_link_fail(link, "the peer is gone: %s", strerror(errno));
        link->have += (size_t)n, link->heard_us = handover_now_us();
        if (link->have < head)
            continue;
        if (link->message.magic != handover_link_magic)
            return handover_link_fail(link, "the peer is another program: its message begins with %08x, not %08x",
                                      (unsigned)link->message.magic, (unsigned)handover_link_magic);
        if (link->message.payload_bytes > handover_link_most_payload)
            return handover_link_fail(link, "the peer's message says that it has %u bytes, at most %d are allowed",
                                      (unsigned)link->message.payload_bytes, (int)handover_link_most_payload);
    }
    return true;
}

/* Returns 1 and the next message, whose payload stays until the next call; 0: there is none after wait_ms; -1: an
   error, which includes timeout_ms without a byte from the peer. */
static inline int handover_link_hear(handover_link *link, handover_message *message, int wait_ms)
{
    struct pollfd p = {link->fd, POLLIN, 0};
    if (link->dead)
        return -1;
    if (!handover_link_read(link) && !link->dead && wait_ms > 0 && poll(&p, 1, wait_ms) > 0)
        (void)handover_link_read(link);
    const int64_t silent_ms = (handover_now_us() - link->heard_us) / 1000;
    if (!link->dead && link->have > 0 && link->have == handover_link_wanted(link)) {
        *message = link->message;
        link->have = 0;
        return 1;
    }
    if (!link->dead && silent_ms > link->timeout_ms)
        (void)handover_link_fail(link, "the peer has said nothing for %lld ms", (long long)silent_ms);
    return link->dead ? -1 : 0;
}

/* Waits for a message of this kind. Any other is an error, and so is one that is not whole after timeout_ms, though its
   bytes still come. */
static inline bool handover_link_expect(handover_link *link, uint32_t kind, handover_message *message)
{
    int n;
    const int64_t until_us = handover_now_us() + (int64_t)link->timeout_ms * 1000;
    link->heard_us = handover_now_us(); /* from now on the peer has timeout_ms */
    do
        n = handover_link_hear(link, message, 100);
    while (n == 0 && handover_now_us() < until_us);
    if (n == 0)
        return handover_link_fail(link,
                                  link->have ? "the peer has sent only a part of its message in %d ms"
                                             : "the peer has said nothing for %d ms",
                                  link->timeout_ms);
    if (n == 1 && message->kind != kind)
        return handover_link_fail(link, "the peer sent message %u where %u was due", (unsigned)message->kind,
                                  (unsigned)kind);
    return n == 1;
}

/* And with a payload of so many bytes. */
static inline bool handover_link_expect_bytes(handover_link *link, uint32_t kind, handover_message *message,
                                              size_t bytes)
{
    if (handover_link_expect(link, kind, message) && message->payload_bytes != bytes)
        (void)handover_link_fail(link, "the peer's message %u has %u bytes where %llu were due", (unsigned)kind,
                                 (unsigned)message->payload_bytes, (unsigned long long)bytes);
    return !link->dead;
}

static inline const char *handover_link_error(const handover_link *link)
{
    return link->error;
}

/* ---- sockets ---- */

/* Splits HOST:PORT; the host may be in brackets. False: there is no port. */
static inline bool handover_split_address(const char *address, char host[256], char port[16])
{
    const char *const colon = strrchr(address, ':');
    size_t bytes = colon ? (size_t)(colon - address) : 0;
    if (!colon || bytes == 0 || bytes > 255 || !colon[1] || strlen(colon + 1) > 15)
        return false;
    if (address[0] == '[' && bytes > 2 && address[bytes - 1] == ']')
        address++, bytes -= 2;
    memcpy(host, address, bytes);
    host[bytes] = 0;
    (void)snprintf(port, 16, "%s", colon + 1);
    return true;
}

/* How long an attempt to connect may take: one that is lost is sent again after a second. By itself Linux gives up
   after two minutes. */
enum { handover_attempt_ms = 3000 };

/* A socket that listens there, or is connected to it; -1: `why` says why not. */
static inline int handover_socket(const char *address, bool listens, char why[160])
{
    char host[256], port[16];
    struct addrinfo hints, *found = NULL, *a;
    const struct timeval attempt = {handover_attempt_ms / 1000, 0};
    const int one = 1;
    int fd = -1;
    memset(&hints, 0, sizeof hints);
    hints.ai_socktype = SOCK_STREAM, hints.ai_flags = listens ? AI_PASSIVE : 0;
    if (!handover_split_address(address, host, port)) {
        (void)snprintf(why, 160, "%.100s is not HOST:PORT", address);
        return -1;
    }
    const int error = getaddrinfo(host, port, &hints, &found);
    if (error != 0) {
        (void)snprintf(why, 160, "%.80s: %s", address, gai_strerror(error));
        return -1;
    }
    for (a = found; a && fd < 0; a = a->ai_next) {
        fd = socket(a->ai_family, a->ai_socktype, a->ai_protocol);
        if (fd >= 0 && listens)
            (void)setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
        if (fd >= 0 && !listens)
            (void)setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &attempt, sizeof attempt);
        if (fd < 0 || (listens ? bind(fd, a->ai_addr, a->ai_addrlen) != 0 || listen(fd, 4) != 0
                               : connect(fd, a->ai_addr, a->ai_addrlen) != 0)) {
            (void)snprintf(why, 160, "%.80s: %s", address, strerror(errno == EINPROGRESS ? ETIMEDOUT : errno));
            if (fd >= 0)
                (void)close(fd);
            fd = -1;
        }
    }
    freeaddrinfo(found);
    return fd;
}

/* Waits for a peer that connects. -1: none after wait_ms. */
static inline int handover_accept(int listener, int wait_ms)
{
    struct pollfd p = {listener, POLLIN, 0};
    return poll(&p, 1, wait_ms) > 0 ? accept(listener, NULL, NULL) : -1;
}

/* Tries again until a peer listens. -1: none after wait_ms, or it is no address; `why` says why. */
static inline int handover_connect(const char *address, int wait_ms, char why[160])
{
    const int64_t until_us = handover_now_us() + (int64_t)wait_ms * 1000;
    char host[256], port[16];
    int fd = handover_socket(address, false, why);
    while (fd < 0 && handover_split_address(address, host, port) && handover_now_us() < until_us) {
        (void)poll(NULL, 0, 20);
        fd = handover_socket(address, false, why);
    }
    return fd;
}

#endif
