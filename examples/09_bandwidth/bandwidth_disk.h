/* SPDX-License-Identifier: MIT */
/* The disk of 09_bandwidth: GB/s of writing memory to a temporary file and of reading it back. C11 or C++11.

   The file is as large as the caller says and goes past the page cache where it can, so the disk is measured and not
   memory. It is written and read once, a block at a time; only these calls are timed, and the end of writing, after
   which all is on the disk. Each word depends on its place in the file; all that is read is compared. */
#ifndef BANDWIDTH_DISK_H
#define BANDWIDTH_DISK_H

#include "../02_kv_replay/kv_disk.h"
#include <time.h>

typedef struct bandwidth_disk {
    kv_disk file;
    unsigned char *block; /* of the caller: memory aligned to KV_DISK_BLOCK, pinned if a GPU is to use it */
    size_t block_bytes;   /* a multiple of KV_DISK_BLOCK, as `bytes` is of this */
    uint64_t bytes;
    double write_gbs, read_gbs; /* 1e9 bytes per second */
} bandwidth_disk;

static inline double bandwidth_disk__seconds(void)
{
    struct timespec now;
    timespec_get(&now, TIME_UTC);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Returns the word at this byte of the file. */
static inline uint64_t bandwidth_disk__word(uint64_t at)
{
    const uint64_t z = (at + 1) * 0x9e3779b97f4a7c15u;
    return z ^ z >> 29;
}

static inline void bandwidth_disk__fill(bandwidth_disk *m, uint64_t offset)
{
    for (size_t at = 0; at < m->block_bytes; at += sizeof(uint64_t)) {
        const uint64_t word = bandwidth_disk__word(offset + at);
        memcpy(m->block + at, &word, sizeof word);
    }
}

static inline bool bandwidth_disk__compare(bandwidth_disk *m, uint64_t offset)
{
    for (size_t at = 0; at < m->block_bytes; at += sizeof(uint64_t)) {
        const uint64_t want = bandwidth_disk__word(offset + at);
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
        if (write)
            bandwidth_disk__fill(m, offset);
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

/* Measures with block, block_bytes and bytes in the file that the caller has opened. Returns false and sets file.error
   if a call fails or a byte is wrong. */
static inline bool bandwidth_disk_measure(bandwidth_disk *m)
{
    double writing = 0, reading = 0;
    bool ok = bandwidth_disk__pass(m, true, &writing);
    const double start = bandwidth_disk__seconds();
    ok = ok && kv_disk_flush(&m->file);
    writing += bandwidth_disk__seconds() - start;
    ok = ok && bandwidth_disk__pass(m, false, &reading);
    m->write_gbs = ok && writing > 0 ? 1e-9 * (double)m->bytes / writing : 0;
    m->read_gbs = ok && reading > 0 ? 1e-9 * (double)m->bytes / reading : 0;
    return ok;
}

#endif /* BANDWIDTH_DISK_H */
