/* SPDX-License-Identifier: MIT */
/* handover_link.h: the control channel between the two sides of a hand-over: messages over a stream socket, with
   deadlines. Tensors go elsewhere. A peer that is gone, is silent, or is another program ends this program, which says
   so: its own connection then ends, and the peer notices. C11 and C++17, POSIX.

       handover_link_open(&link, fd, timeout_ms)
       handover_link_say(&link, kind, a, b, c, payload, bytes)
       handover_link_expect(&link, kind, &message, bytes)      waits for this message
       handover_link_hear(&link, &message, wait_ms)            takes the next one, if there is one

   Both ends are the same program on machines of the same byte order; another one is found by its first word. */
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
    int64_t heard_us; /* when the peer's last message came */
    char *payload;    /* of the last message: handover_link_most_payload bytes */
} handover_link;

/* Ends the program at once: what CUDA and NCCL do at an orderly exit could wait for the peer. */
__attribute__((format(printf, 1, 2), noreturn)) static inline void handover_die(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    (void)fflush(stdout);
    fputs("14_handover: ", stderr);
    (void)vfprintf(stderr, format, args);
    fputc('\n', stderr);
    _exit(1);
}

static inline int64_t handover_now_us(void)
{
    struct timespec t;
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

/* ---- messages ---- */

/* Takes over the socket. */
static inline void handover_link_open(handover_link *link, int fd, int timeout_ms)
{
    const int one = 1;
    link->fd = fd, link->timeout_ms = timeout_ms, link->heard_us = handover_now_us();
    link->payload = (char *)malloc(handover_link_most_payload);
    if (!link->payload)
        handover_die("no memory for messages");
    (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one); /* fails on a socketpair, which has no delay */
}

/* Sends (POLLOUT) or receives (POLLIN) all of it, within timeout_ms. */
static inline void handover_link_move(handover_link *link, short way, char *at, size_t count)
{
    const int64_t until_us = handover_now_us() + (int64_t)link->timeout_ms * 1000;
    while (count > 0) {
        struct pollfd p = {link->fd, way, 0};
        const ssize_t n = way == POLLOUT ? send(link->fd, at, count, MSG_NOSIGNAL | MSG_DONTWAIT)
                                         : recv(link->fd, at, count, MSG_DONTWAIT);
        const int64_t left_ms = (until_us - handover_now_us()) / 1000;
        if (n > 0)
            at += n, count -= (size_t)n;
        else if (n == 0)
            handover_die("the peer is gone: it closed the connection");
        else if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)
            handover_die("the peer is gone: %s", strerror(errno));
        else if (left_ms <= 0 || poll(&p, 1, (int)left_ms) == 0)
            handover_die("the peer has not %s a whole message in %d ms", way == POLLOUT ? "read" : "sent",
                         link->timeout_ms);
    }
}

/* At most handover_link_most_payload bytes. */
static inline void handover_link_say(handover_link *link, uint32_t kind, int64_t a, int64_t b, int64_t c,
                                     const void *payload, size_t bytes)
{
    handover_message m = {handover_link_magic, kind, a, b, c, (uint32_t)bytes, 0};
    handover_link_move(link, POLLOUT, (char *)&m, sizeof m);
    handover_link_move(link, POLLOUT, (char *)(uintptr_t)payload, bytes);
}

/* Takes the next message, whose payload stays until the next call. False: none has begun after wait_ms. timeout_ms
   without any are an error. */
static inline bool handover_link_hear(handover_link *link, handover_message *m, int wait_ms)
{
    struct pollfd p = {link->fd, POLLIN, 0};
    if (poll(&p, 1, wait_ms) <= 0) {
        const int64_t silent_ms = (handover_now_us() - link->heard_us) / 1000;
        if (silent_ms > link->timeout_ms)
            handover_die("the peer has said nothing for %lld ms", (long long)silent_ms);
        return false;
    }
    handover_link_move(link, POLLIN, (char *)m, sizeof *m);
    if (m->magic != handover_link_magic || m->payload_bytes > handover_link_most_payload)
        handover_die("the peer is another program: its message begins with %08x and has %u bytes", (unsigned)m->magic,
                     (unsigned)m->payload_bytes);
    handover_link_move(link, POLLIN, link->payload, m->payload_bytes);
    link->heard_us = handover_now_us();
    return true;
}

/* Waits for a message of this kind, with a payload of so many bytes. Any other is an error. */
static inline void handover_link_expect(handover_link *link, uint32_t kind, handover_message *m, size_t bytes)
{
    link->heard_us = handover_now_us(); /* from now on the peer has timeout_ms */
    while (!handover_link_hear(link, m, 100))
        continue;
    if (m->kind != kind || m->payload_bytes != bytes)
        handover_die("the peer sent message %u of %u bytes where %u of %llu was due", (unsigned)m->kind,
                     (unsigned)m->payload_bytes, (unsigned)kind, (unsigned long long)bytes);
}

/* ---- sockets ---- */

/* How long an attempt to connect may take: one that is lost is sent again after a second. By itself Linux gives up
   after two minutes. */
enum { handover_attempt_ms = 3000 };

/* Returns a socket that listens at HOST:PORT, or is connected to it; -1: errno says why not. */
static inline int handover_socket(const char *address, bool listens)
{
    const int one = 1;
    const struct timeval attempt = {handover_attempt_ms / 1000, 0};
    const char *const colon = strrchr(address, ':');
    struct addrinfo hints, *found = NULL;
    char host[256];
    int fd = -1, error = 0;
    if (!colon || colon == address || !colon[1] || colon - address >= (int)sizeof host)
        handover_die("%s is not HOST:PORT", address);
    (void)snprintf(host, sizeof host, "%.*s", (int)(colon - address), address);
    memset(&hints, 0, sizeof hints);
    hints.ai_socktype = SOCK_STREAM, hints.ai_flags = listens ? AI_PASSIVE : 0;
    if ((error = getaddrinfo(host, colon + 1, &hints, &found)) != 0)
        handover_die("%s: %s", address, gai_strerror(error));
    for (const struct addrinfo *a = found; a && fd < 0; a = a->ai_next) {
        fd = socket(a->ai_family, a->ai_socktype, a->ai_protocol);
        (void)setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
        (void)setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &attempt, sizeof attempt);
        if (listens ? bind(fd, a->ai_addr, a->ai_addrlen) == 0 && listen(fd, 4) == 0
                    : connect(fd, a->ai_addr, a->ai_addrlen) == 0)
            break;
        error = errno == EINPROGRESS ? ETIMEDOUT : errno;
        (void)close(fd);
        fd = -1;
    }
    freeaddrinfo(found);
    errno = error;
    return fd;
}

/* Waits for a peer that connects. */
static inline int handover_accept(int listener, int wait_ms)
{
    struct pollfd p = {listener, POLLIN, 0};
    const int fd = poll(&p, 1, wait_ms) > 0 ? accept(listener, NULL, NULL) : -1;
    if (fd < 0)
        handover_die("no decode side has connected");
    return fd;
}

/* Tries until a peer listens. */
static inline int handover_connect(const char *address, int wait_ms)
{
    const int64_t until_us = handover_now_us() + (int64_t)wait_ms * 1000;
    int fd;
    while ((fd = handover_socket(address, false)) < 0) {
        if (handover_now_us() >= until_us)
            handover_die("%s: %s", address, strerror(errno));
        (void)poll(NULL, 0, 20);
    }
    return fd;
}

#endif
