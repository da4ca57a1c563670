/* SPDX-License-Identifier: MIT */
/* kv_disk.h: a temporary file that memory is written to and read back from. C11 or C++11, POSIX.

   The file has no name after it is opened, so nothing is left on the disk however the program ends. Where the file
   system can, its bytes go past the page cache (O_DIRECT): addresses, sizes and offsets must then be multiples of
   `align`. Functions that can fail return false and set `error`. */
#ifndef KV_DISK_H
#define KV_DISK_H

#include <errno.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if !defined(_WIN32)
#include <fcntl.h>
#include <signal.h>
#include <sys/statvfs.h>
#include <sys/uio.h>
#include <unistd.h>
#else
struct iovec {
    void *iov_base;
    size_t iov_len;
};
#endif

/* Linux takes up to 1024 pieces in a call. Blocks of all disks in use have at most 4096 bytes. */
enum { KV_DISK_PIECES = 1024, KV_DISK_BLOCK = 4096 };

typedef struct kv_disk {
    int file; /* open if `path` is not empty */
    bool direct;
    size_t align;    /* 1 if the bytes go through the page cache */
    uint64_t bytes;  /* that the caller has asked for */
    char path[1024]; /* the name that the file had */
    char error[1536];
} kv_disk;

#if defined(_WIN32)

static inline bool kv_disk_open(kv_disk *d, const char *path, const char *folder, uint64_t bytes)
{
    (void)path, (void)folder, (void)bytes;
    memset(d, 0, sizeof *d);
    snprintf(d->error, sizeof d->error, "files on disk are not built for Windows");
    return false;
}

static inline bool kv_disk_move(kv_disk *d, bool write, struct iovec *pieces, size_t count, uint64_t offset)
{
    (void)d, (void)write, (void)pieces, (void)count, (void)offset;
    return false;
}

static inline bool kv_disk_flush(kv_disk *d)
{
    return kv_disk_move(d, true, NULL, 0, 0);
}

static inline void kv_disk_close(kv_disk *d)
{
    (void)d;
}

#else

/* Creates the file and takes its name away. Signals wait meanwhile, so that none leaves the name behind. */
static inline bool kv_disk__create(kv_disk *d, bool named)
{
    sigset_t all, before;
    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, &before);
    d->file = named ? open(d->path, O_RDWR | O_CREAT | O_EXCL, 0600) : mkstemp(d->path);
    const bool ok = d->file >= 0 && unlink(d->path) == 0;
    const int error = errno;
    if (!ok && d->file >= 0)
        close(d->file);
    sigprocmask(SIG_SETMASK, &before, NULL);
    if (!ok)
        snprintf(d->error, sizeof d->error, "%s: %s%s", d->path, strerror(error),
                 error == EEXIST ? "; name a file that does not exist" : "");
    return ok;
}

static inline bool kv_disk__has_room(kv_disk *d, uint64_t bytes)
{
    struct statvfs system;
    if (fstatvfs(d->file, &system) != 0 || system.f_blocks == 0)
        return true; /* unknown: writing will tell */
    const uint64_t block = system.f_frsize ? system.f_frsize : system.f_bsize, blocks = system.f_bavail;
    if (bytes / block < blocks)
        return true;
    snprintf(d->error, sizeof d->error, "%s: %llu bytes are needed, and its file system has %llu free", d->path,
             (unsigned long long)bytes, (unsigned long long)(blocks * block));
    return false;
}

/* Some file systems say now that they have no O_DIRECT, others in the first read or write. */
static inline void kv_disk__set_direct(kv_disk *d, bool wanted)
{
#if defined(O_DIRECT)
    const int flags = fcntl(d->file, F_GETFL);
    d->direct = flags >= 0 && fcntl(d->file, F_SETFL, wanted ? flags | O_DIRECT : flags & ~O_DIRECT) == 0 && wanted;
#elif defined(F_NOCACHE)
    d->direct = fcntl(d->file, F_NOCACHE, (int)wanted) == 0 && wanted;
#else
    d->direct = false;
    (void)wanted;
#endif
}

static inline void kv_disk_close(kv_disk *d)
{
    if (d->path[0])
        close(d->file);
    d->path[0] = '\0';
}

/* Opens a new file at `path`, or if that is NULL in `folder`, or if that is NULL too in $TMPDIR or /tmp. Fails if there
   is something at `path`, or if the file system has no room for `bytes`. */
static inline bool kv_disk_open(kv_disk *d, const char *path, const char *folder, uint64_t bytes)
{
    memset(d, 0, sizeof *d);
    folder = folder ? folder : getenv("TMPDIR");
    folder = folder && *folder ? folder : "/tmp";
    const int length = path ? snprintf(d->path, sizeof d->path, "%s", path)
                            : snprintf(d->path, sizeof d->path, "%s/kv_disk_XXXXXX", folder);
    const bool fits = length >= 0 && (size_t)length < sizeof d->path;
    if (!fits)
        snprintf(d->error, sizeof d->error, "a path of %d bytes, more than %zu", length, sizeof d->path - 1);
    if (!fits || !kv_disk__create(d, path != NULL)) {
        d->path[0] = '\0';
        return false;
    }
    if (!kv_disk__has_room(d, bytes)) {
        kv_disk_close(d);
        return false;
    }
    (void)signal(SIGXFSZ, SIG_IGN); /* a limit to the size of files is then an error, as a full disk is */
    kv_disk__set_direct(d, true);
    d->align = d->direct ? KV_DISK_BLOCK : 1;
    d->bytes = bytes;
    return true;
}

/* Writes the pieces one after the other to the file from `offset` on, or reads them from there. Changes the array. */
static inline bool kv_disk_move(kv_disk *d, bool write, struct iovec *pieces, size_t count, uint64_t offset)
{
    while (count > 0) {
        const int some = count < KV_DISK_PIECES ? (int)count : KV_DISK_PIECES;
        ssize_t moved =
            write ? pwritev(d->file, pieces, some, (off_t)offset) : preadv(d->file, pieces, some, (off_t)offset);
        if (moved < 0 && errno == EINTR)
            continue;
        if (moved < 0 && errno == EINVAL && d->direct) { /* from here on through the page cache */
            kv_disk__set_direct(d, false);
            continue;
        }
        if (moved <= 0) {
            snprintf(d->error, sizeof d->error, "%s: %s at byte %llu of %llu: %s", d->path,
                     write ? "writing" : "reading", (unsigned long long)offset, (unsigned long long)d->bytes,
                     moved < 0 ? strerror(errno) : "the file ends");
            return false;
        }
        offset += (uint64_t)moved;
        for (; count > 0 && (size_t)moved >= pieces->iov_len; pieces++, count--)
            moved -= (ssize_t)pieces->iov_len;
        if (count > 0) { /* a piece of which only the first bytes have moved */
            pieces->iov_base = (char *)pieces->iov_base + moved;
            pieces->iov_len -= (size_t)moved;
        }
    }
    return true;
}

/* Waits until all that was written is on the disk, and drops it from the page cache where that can be asked for. */
static inline bool kv_disk_flush(kv_disk *d)
{
    if (fsync(d->file) != 0) {
        snprintf(d->error, sizeof d->error, "%s: fsync: %s", d->path, strerror(errno));
        return false;
    }
#if defined(POSIX_FADV_DONTNEED)
    (void)posix_fadvise(d->file, 0, 0, POSIX_FADV_DONTNEED);
#endif
    return true;
}

#endif
#endif /* KV_DISK_H */
