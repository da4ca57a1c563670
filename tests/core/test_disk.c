/* SPDX-License-Identifier: MIT */
/* Tests the temporary file of examples 02 and 09 (kv_disk.h, bandwidth_disk.h): what a system does only now and then,
   such as short writes, EINTR, a late refusal of O_DIRECT and a full disk, its calls do here when they are asked to. */
#define _GNU_SOURCE
#include "../harness.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/uio.h>
#include <unistd.h>

static struct {
    long calls, fail_at; /* the call that fails, from 1 on; 0: none */
    int error;
    size_t most, flip; /* bytes of a call, 0: any; flip: a byte of all that is read, from 1 on; 0: none */
    size_t moved;
} fake;

static ssize_t fake_move(ssize_t (*move)(int, const struct iovec *, int, off_t), int file, const struct iovec *pieces,
                         int count, off_t offset)
{
    struct iovec piece = pieces[0];
    if (++fake.calls == fake.fail_at) {
        errno = fake.error;
        return -1;
    }
    if (fake.most == 0)
        return move(file, pieces, count, offset);
    piece.iov_len = piece.iov_len < fake.most ? piece.iov_len : fake.most;
    return move(file, &piece, 1, offset);
}

static ssize_t fake_pwritev(int file, const struct iovec *pieces, int count, off_t offset)
{
    return fake_move(pwritev, file, pieces, count, offset);
}

static ssize_t fake_preadv(int file, const struct iovec *pieces, int count, off_t offset)
{
    const ssize_t moved = fake_move(preadv, file, pieces, count, offset);
    if (moved > 0 && fake.flip > fake.moved && fake.flip <= fake.moved + (size_t)moved)
        ((unsigned char *)pieces[0].iov_base)[fake.flip - fake.moved - 1] ^= 1;
    fake.moved += moved > 0 ? (size_t)moved : 0;
    return moved;
}

#define pwritev fake_pwritev
#define preadv fake_preadv
#include "examples/09_bandwidth/bandwidth_disk.h"
#undef pwritev
#undef preadv

enum { block_bytes = 64 << 10, file_bytes = 3 * block_bytes };

static char folder[] = "/tmp/test_disk_XXXXXX";

static int entries(void)
{
    int n = 0;
    DIR *const d = opendir(folder);
    while (d && readdir(d))
        n++;
    if (d)
        closedir(d);
    return n - 2;
}

/* Measures a small file, with the fake as it is now. */
static bool measure(bandwidth_disk *m)
{
    unsigned char *const memory = (unsigned char *)allocate(block_bytes + KV_DISK_BLOCK);
    memset(m, 0, sizeof *m);
    m->block = memory + KV_DISK_BLOCK - (uintptr_t)memory % KV_DISK_BLOCK;
    m->block_bytes = block_bytes;
    m->bytes = file_bytes;
    const bool opened = kv_disk_open(&m->file, NULL, folder, m->bytes);
    if (!opened)
        fail("%s", m->file.error);
    CHECK(entries() == 0);
    fake.calls = 0;
    fake.moved = 0;
    const bool ok = opened && bandwidth_disk_measure(m);
    CHECK(ok == (m->write_gbs > 0) && ok == (m->read_gbs > 0));
    kv_disk_close(&m->file);
    free(memory);
    return ok;
}

static void test_measures(void)
{
    bandwidth_disk m;
    memset(&fake, 0, sizeof fake);
    if (!measure(&m))
        fail("%s", m.file.error);
    CHECK(fake.calls == 6);
    CHECK(m.file.align == (m.file.direct ? KV_DISK_BLOCK : 1));
}

static void test_short_and_interrupted(void)
{
    bandwidth_disk m;
    memset(&fake, 0, sizeof fake);
    fake.most = KV_DISK_BLOCK;
    fake.fail_at = 5;
    fake.error = EINTR;
    if (!measure(&m))
        fail("%s", m.file.error);
    CHECK(fake.calls == 2 * file_bytes / KV_DISK_BLOCK + 1);
}

static void test_late_refusal(void)
{
    bandwidth_disk m;
    memset(&fake, 0, sizeof fake);
    fake.fail_at = 2;
    fake.error = EINVAL;
    const bool ok = measure(&m);
    if (ok)
        CHECK(!m.file.direct && m.file.align == KV_DISK_BLOCK);
    else /* it was not direct, and EINVAL is an error like others */
        CHECK(m.file.align == 1 && strstr(m.file.error, strerror(EINVAL)));
}

static void test_full_disk(void)
{
    bandwidth_disk m;
    memset(&fake, 0, sizeof fake);
    fake.most = KV_DISK_BLOCK;
    fake.fail_at = 17;
    fake.error = ENOSPC;
    CHECK(!measure(&m));
    CHECK(strstr(m.file.error, "writing at byte 65536 of 196608: No space left on device"));
    fake.fail_at = 17 + file_bytes / KV_DISK_BLOCK;
    fake.error = EIO;
    CHECK(!measure(&m));
    CHECK(strstr(m.file.error, "reading at byte 65536 of 196608: "));
}

static void test_wrong_bytes(void)
{
    static const size_t bytes[] = {1, 8, 9, KV_DISK_BLOCK + 1, block_bytes, file_bytes};
    bandwidth_disk m;
    memset(&fake, 0, sizeof fake);
    for (size_t i = 0; i < sizeof bytes / sizeof bytes[0]; i++) {
        char words[64];
        fake.flip = bytes[i];
        snprintf(words, sizeof words, ": byte %zu: read ", (bytes[i] - 1) / 8 * 8);
        CHECK(!measure(&m) && strstr(m.file.error, words));
    }
}

static void test_refusals(void)
{
    char path[64], text[sizeof(kv_disk)];
    kv_disk d;
    snprintf(path, sizeof path, "%s/file", folder);
    CHECK(!kv_disk_open(&d, path, NULL, (uint64_t)1 << 62));
    CHECK(strstr(d.error, "/file: 4611686018427387904 bytes are needed, and its file system has ") && entries() == 0);
    CHECK(!kv_disk_open(&d, folder, NULL, 1) && strstr(d.error, "File exists; name a file that does not exist"));
    CHECK(!kv_disk_open(&d, NULL, path, 1) && strstr(d.error, "/file/kv_disk_") && entries() == 0);
    memset(text, 'x', sizeof text - 1);
    text[sizeof text - 1] = '\0';
    CHECK(!kv_disk_open(&d, text, NULL, 1) && strstr(d.error, "more than 1023"));
    kv_disk_close(&d); /* of what was never open */
    CHECK(kv_disk_open(&d, path, NULL, 1) && entries() == 0);
    kv_disk_close(&d);
}

/* A file of somebody else stays as it is. */
static void test_keeps_files(void)
{
    char path[64], text[8] = "";
    kv_disk d;
    snprintf(path, sizeof path, "%s/theirs", folder);
    FILE *f = fopen(path, "w");
    CHECK(f && fputs("theirs", f) >= 0 && fclose(f) == 0);
    CHECK(!kv_disk_open(&d, path, NULL, 1) && entries() == 1);
    f = fopen(path, "r");
    CHECK(f && fgets(text, sizeof text, f) && strcmp(text, "theirs") == 0);
    if (f)
        fclose(f);
    CHECK(unlink(path) == 0);
}

int main(void)
{
    if (!mkdtemp(folder)) {
        printf("skip %s: %s\n0 passed, 0 failed, 1 skipped\n", folder, strerror(errno));
        return 0;
    }
    run("a file is written, read and compared", test_measures);
    run("short and interrupted calls are continued", test_short_and_interrupted);
    run("a file system that refuses O_DIRECT late", test_late_refusal);
    run("a full disk, and one that cannot be read", test_full_disk);
    run("each wrong byte is found", test_wrong_bytes);
    run("no room, a file that exists, no such folder, a long path", test_refusals);
    run("files that exist stay as they are", test_keeps_files);
    CHECK(rmdir(folder) == 0);
    finish_test("nothing is left");
    return finish();
}
