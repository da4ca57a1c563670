/* SPDX-License-Identifier: MIT */
/* Drives a libFuzzer target without libFuzzer, for compilers that have no such library. Inputs come from a generator
   with a fixed seed, or from the files named as arguments, once each. It takes libFuzzer's names for the options that
   it has:

       fuzz_x [-seed=N] [-runs=N] [-max_total_time=SECONDS] [-max_len=BYTES] [-artifact_prefix=PATH] [FILE...]

   Each input is written to PATHlast_input before it is tried, so that a crash leaves it there. */
#define _POSIX_C_SOURCE 200809L
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static uint64_t state;

static uint64_t random_u64(void) /* splitmix64 */
{
    uint64_t z = state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* Makes any bytes, or mostly small ones, or runs of one byte, so that counters, sizes and text all look plausible. */
static size_t generate(uint8_t *data, size_t max_len)
{
    const size_t size = random_u64() % (max_len + 1);
    const uint64_t kind = random_u64() % 4;
    for (size_t i = 0; i < size; i++) {
        const uint64_t r = random_u64();
        data[i] = (uint8_t)(r >> 8);
        if (kind == 0 || r % 16 == 0 || i == 0)
            continue;
        data[i] = kind == 1 ? data[i] % 8 : kind == 2 ? data[i] % 128 : data[i - 1];
    }
    return size;
}

/* Runs a copy of exactly the input's size, so that AddressSanitizer sees reads past it. */
static void try(const uint8_t *data, size_t size)
{
    uint8_t *const copy = malloc(size ? size : 1);
    if (!copy)
        abort();
    memcpy(copy, data, size);
    (void)LLVMFuzzerTestOneInput(copy, size);
    free(copy);
}

static void try_file(const char *path)
{
    static uint8_t data[1 << 20];
    FILE *const file = fopen(path, "rb");
    if (!file) {
        fprintf(stderr, "%s: cannot be opened\n", path);
        exit(2);
    }
    try(data, fread(data, 1, sizeof data, file));
    fclose(file);
}

static double seconds(void)
{
    struct timespec t;
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Returns the value of "-name=value", or NULL for another argument. */
static const char *value_of(const char *argument, const char *name)
{
    const size_t n = strlen(name);
    return strncmp(argument, name, n) == 0 && argument[n] == '=' ? argument + n + 1 : NULL;
}

int main(int argc, char **argv)
{
    uint64_t runs = UINT64_MAX, done = 0, max_len = 4096;
    double limit = 1e300;
    int files = 0;
    char path[4096] = "last_input";
    for (int i = 1; i < argc; i++) {
        const char *value;
        if ((value = value_of(argv[i], "-seed")))
            state = strtoull(value, NULL, 10);
        else if ((value = value_of(argv[i], "-runs")))
            runs = strtoull(value, NULL, 10);
        else if ((value = value_of(argv[i], "-max_total_time")))
            limit = strtod(value, NULL);
        else if ((value = value_of(argv[i], "-max_len")))
            max_len = strtoull(value, NULL, 10);
        else if ((value = value_of(argv[i], "-artifact_prefix")))
            (void)snprintf(path, sizeof path, "%slast_input", value);
        else if (argv[i][0] != '-') {
            try_file(argv[i]);
            files++;
        }
    }
    if (files)
        return 0;

    uint8_t *const data = malloc((size_t)max_len + 1);
    const int file = open(path, O_RDWR | O_CREAT | O_TRUNC, 0644);
    if (!data || file < 0) {
        fprintf(stderr, "%s: cannot be written\n", path);
        return 2;
    }
    const double start = seconds();
    for (; done < runs && seconds() - start < limit; done++) {
        const size_t size = generate(data, (size_t)max_len);
        if (ftruncate(file, 0) != 0 || pwrite(file, data, size, 0) != (ssize_t)size)
            return 2;
        try(data, size);
    }
    close(file);
    (void)remove(path);
    free(data);
    printf("Done %llu runs in %.0f second(s)\n", (unsigned long long)done, seconds() - start);
    return 0;
}
