/* SPDX-License-Identifier: MIT */
/* handover_link.h: the control channel between the two sides of a hand-over: messages over a stream socket, with
   deadlines. It notices a peer that is gone, is silent, or is another program. Tensors go elsewhere. C11 and C++17,
   POSIX.

       handover_link link;
       if (!handover_link_open(&link, fd, timeout_ms)) ...
       handover_link_say(&link, kind, a, b, c, payload, bytes)       both return false after an error, which
       handover_link_expect(&link, kind, &message, bytes)            link.error says
       while ((n = handover_link_hear(&link, &message, 0)) > 0) ...  what is there

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
    int64_t heard_us; /* when the peer's last message came */
    char *payload;    /* of the last message: handover_link_most_payload bytes */
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

/* Takes over the socket. False: no memory. */
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

/* Sends (POLLOUT) or receives (POLLIN) all of it, or gives up after timeout_ms. */
static inline bool handover_link_move(handover_link *link, short way, char *at, size_t count)
{
    const int64_t until_us = handover_now_us() + (int64_t)link->timeout_ms * 1000;
    while (count > 0 && !link->dead) {
        struct pollfd p = {link->fd, way, 0};
        const ssize_t n = way == POLLOUT ? send(link->fd, at, count, MSG_NOSIGNAL | MSG_DONTWAIT)
                                         : recv(link->fd, at, count, MSG_DONTWAIT);
        const int64_t left_ms = (until_us - handover_now_us()) / 1000;
        if (n > 0)
            at += n, count -= (size_t)n;
        else if (n == 0)
            return handover_link_fail(link, "the peer is gone: it closed the connection");
        else if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)
            return handover_link_fail(link, "the peer is gone: %s", strerror(errno));
        else if (left_ms <= 0 || poll(&p, 1, (int)left_ms) == 0)
            return handover_link_fail(link, "the peer has not %s a whole message in %d ms",
                                      way == POLLOUT ? "read" : "sent", link->timeout_ms);
    }
    return !link->dead;
}

static inline bool handover_link_say(handover_link *link, uint32_t kind, int64_t a, int64_t b, int64_t c,
                                     const void *payload, size_t bytes)
{
    handover_message m = {handover_link_magic, kind, a, b, c, (uint32_t)bytes, 0};
    if (bytes > handover_link_most_payload)
        return handover_link_fail(link, "a message of %llu bytes, at most %d are allowed", (unsigned long long)bytes,
                                  (int)handover_link_most_payload);
    return handover_link_move(link, POLLOUT, (char *)&m, sizeof m) &&
           handover_link_move(link, POLLOUT, (char *)(uintptr_t)payload, bytes);
}

/* Returns 1 and the next message, whose payload stays until the next call; 0: none has begun after wait_ms; -1: an
   error, which includes timeout_ms without a message. */
static inline int handover_link_hear(handover_link *link, handover_message *m, int wait_ms)
{
    struct pollfd p = {link->fd, POLLIN, 0};
    const bool some = !link->dead && poll(&p, 1, wait_ms) > 0;
    const int64_t silent_ms = (handover_now_us() - link->heard_us) / 1000;
    if (!some && !link->dead && silent_ms > link->timeout_ms)
        (void)handover_link_fail(link, "the peer has said nothing for %lld ms", (long long)silent_ms);
    if (!some)
        return link->dead ? -1 : 0;
    if (!handover_link_move(link, POLLIN, (char *)m, sizeof *m))
        return -1;
    if (m->magic != handover_link_magic)
        (void)handover_link_fail(link, "the peer is another program: its message begins with %08x, not %08x",
                                 (unsigned)m->magic, (unsigned)handover_link_magic);
    else if (m->payload_bytes > handover_link_most_payload)
        (void)handover_link_fail(link, "the peer's message says that it has %u bytes, at most %d are allowed",
                                 (unsigned)m->payload_bytes, (int)handover_link_most_payload);
    else if (handover_link_move(link, POLLIN, link->payload, m->payload_bytes))
        link->heard_us = handover_now_us();
    return link->dead ? -1 : 1;
}

/* Waits for a message of this kind, with a payload of so many bytes. Any other is an error. */
static inline bool handover_link_expect(handover_link *link, uint32_t kind, handover_message *m, size_t bytes)
{
    int n;
    link->heard_us = handover_now_us(); /* from now on the peer has timeout_ms */
    do
        n = handover_link_hear(link, m, 100);
    while (n == 0);
    if (n == 1 && (m->kind != kind || m->payload_bytes != bytes))
        return handover_link_fail(link, "the peer sent message %u of %u bytes where %u of %llu was due",
                                  (unsigned)m->kind, (unsigned)m->payload_bytes, (unsigned)kind,
                                  (unsigned long long)bytes);
    return n == 1;
}

/* ---- sockets ---- */

/* How long an attempt to connect may take: one that is lost is sent again after a second. By itself Linux gives up
   after two minutes. */
enum { handover_attempt_ms = 3000 };

/* -1: errno says why. */
static inline int handover_socket_at(const struct addrinfo *a, bool listens)
{
    const struct timeval attempt = {handover_attempt_ms / 1000, 0};
    const int one = 1, fd = socket(a->ai_family, a->ai_socktype, a->ai_protocol);
    if (fd < 0)
        return -1;
    if (listens)
        (void)setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    else
        (void)setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &attempt, sizeof attempt);
    if (listens ? bind(fd, a->ai_addr, a->ai_addrlen) == 0 && listen(fd, 4) == 0
                : connect(fd, a->ai_addr, a->ai_addrlen) == 0)
        return fd;
    const int error = errno == EINPROGRESS ? ETIMEDOUT : errno;
    (void)close(fd);
    errno = error;
    return -1;
}

/* A socket that listens at HOST:PORT, or is connected to it; -1: `why` says why not, -2: this is no address. */
static inline int handover_socket(const char *address, bool listens, char why[160])
{
    char host[256];
    struct addrinfo hints, *found = NULL;
    const char *const colon = strrchr(address, ':');
    int fd = -1;
    if (!colon || colon == address || !colon[1] || colon - address >= (int)sizeof host) {
        (void)snprintf(why, 160, "%.100s is not HOST:PORT", address);
        return -2;
    }
    (void)snprintf(host, sizeof host, "%.*s", (int)(colon - address), address);
    memset(&hints, 0, sizeof hints);
    hints.ai_socktype = SOCK_STREAM, hints.ai_flags = listens ? AI_PASSIVE : 0;
    const int error = getaddrinfo(host, colon + 1, &hints, &found);
    if (error != 0) {
        (void)snprintf(why, 160, "%.80s: %s", address, gai_strerror(error));
        return -1;
    }
    for (const struct addrinfo *a = found; a && fd < 0; a = a->ai_next)
        fd = handover_socket_at(a, listens);
    if (fd < 0)
        (void)snprintf(why, 160, "%.80s: %s", address, strerror(errno));
    freeaddrinfo(found);
    return fd;
}

/* Waits for a peer that connects. -1: none after wait_ms. */
static inline int handover_accept(int listener, int wait_ms)
{
    struct pollfd p = {listener, POLLIN, 0};
    return poll(&p, 1, wait_ms) > 0 ? accept(listener, NULL, NULL) : -1;
}

/* Tries again until a peer listens. Less than 0: as handover_socket, after wait_ms. */
static inline int handover_connect(const char *address, int wait_ms, char why[160])
{
    const int64_t until_us = handover_now_us() + (int64_t)wait_ms * 1000;
    int fd = handover_socket(address, false, why);
    while (fd == -1 && handover_now_us() < until_us) {
        (void)poll(NULL, 0, 20);
        fd = handover_socket(address, false, why);
    }
    return fd;
}

#endif
