/* SPDX-License-Identifier: MIT */
/* The disk of 09_bandwidth: GB/s of writing memory to a temporary file and of reading it back. C11 or C++11.

   The file is as large as the caller says and goes past the page cache where it can, so the disk is measured and not
   memory. It is written and read once, a block at a time; only these calls are timed, and the end of writing, after
   which all is on the disk. Each 4096 bytes begin with their number in the file; all that is read is compared. */
#ifndef BANDWIDTH_DISK_H
#define BANDWIDTH_DISK_H

#include "../02_kv_replay/kv_disk.h"
#include <time.h>

typedef struct bandwidth_disk {
    kv_disk file;
    unsigned char *block; /* of the caller: memory aligned to KV_DISK_BLOCK, pinned if a GPU is to use it */
    size_t block_bytes;   /* a multiple of KV_DISK_BLOCK, as `bytes` is of this */
    uint64_t bytes;
    bool progress;              /* on stderr */
    double write_gbs, read_gbs; /* 1e9 bytes per second */
} bandwidth_disk;

/* Measures with block, block_bytes and bytes in the file that the caller has opened. Returns false and sets file.error
   if a call fails or a byte is wrong. */
static inline bool bandwidth_disk_measure(bandwidth_disk *m);

static inline double bandwidth_disk__seconds(void)
{
    struct timespec now;
    timespec_get(&now, TIME_UTC);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static inline uint64_t bandwidth_disk__word(size_t i)
{
    const uint64_t z = ((uint64_t)i + 1) * 0x9e3779b97f4a7c15u;
    return z ^ z >> 29;
}

static inline void bandwidth_disk__number(bandwidth_disk *m, uint64_t offset)
{
    for (size_t at = 0; at < m->block_bytes; at += KV_DISK_BLOCK) {
        const uint64_t number = (offset + at) / KV_DISK_BLOCK;
        memcpy(m->block + at, &number, sizeof number);
    }
}

static inline void bandwidth_disk__fill(bandwidth_disk *m)
{
    for (size_t i = 0; i < m->block_bytes / sizeof(uint64_t); i++) {
        const uint64_t word = bandwidth_disk__word(i);
        memcpy(m->block + i * sizeof word, &word, sizeof word);
    }
}

static inline bool bandwidth_disk__compare(bandwidth_disk *m, uint64_t offset)
{
    for (size_t i = 0; i < m->block_bytes / sizeof(uint64_t); i++) {
        const size_t at = i * sizeof(uint64_t);
        const uint64_t want = at % KV_DISK_BLOCK ? bandwidth_disk__word(i) : (offset + at) / KV_DISK_BLOCK;
        uint64_t word;
        memcpy(&word, m->block + at, sizeof word);
        if (word == want)
            continue;
        snprintf(m->file.error, sizeof m->file.error, "%s: byte %llu: read %016llx, and %016llx was written",
                 m->file.path, (unsigned long long)(offset + at), (unsigned long long)word, (unsigned long long)want);
        return false;
    }
    return true;
}

/* Moves the whole file, and adds to *seconds what the calls take. */
static inline bool bandwidth_disk__pass(bandwidth_disk *m, bool write, double *seconds)
{
    for (uint64_t offset = 0; offset < m->bytes; offset += m->block_bytes) {
        struct iovec piece;
        piece.iov_base = m->block;
        piece.iov_len = m->block_bytes;
        if (m->progress && offset % ((uint64_t)64 << 20) == 0)
            fprintf(stderr, "\r%s %llu of %llu MiB ", write ? "writing" : "reading", (unsigned long long)offset >> 20,
                    (unsigned long long)m->bytes >> 20);
        if (write)
            bandwidth_disk__number(m, offset);
        else
            memset(m->block, 0xee, m->block_bytes);
        const double start = bandwidth_disk__seconds();
        if (!kv_disk_move(&m->file, write, &piece, 1, offset))
            return false;
        *seconds += bandwidth_disk__seconds() - start;
        if (!write && !bandwidth_disk__compare(m, offset))
            return false;
    }
    return true;
}

static inline bool bandwidth_disk_measure(bandwidth_disk *m)
{
    double writing = 0, reading = 0;
    bandwidth_disk__fill(m);
    bool ok = bandwidth_disk__pass(m, true, &writing);
    const double start = bandwidth_disk__seconds();
    ok = ok && kv_disk_flush(&m->file);
    writing += bandwidth_disk__seconds() - start;
    ok = ok && bandwidth_disk__pass(m, false, &reading);
    if (m->progress)
        fprintf(stderr, "\r%40s\r", "");
    m->write_gbs = ok && writing > 0 ? 1e-9 * (double)m->bytes / writing : 0;
    m->read_gbs = ok && reading > 0 ? 1e-9 * (double)m->bytes / reading : 0;
    return ok;
}

#endif /* BANDWIDTH_DISK_H */
