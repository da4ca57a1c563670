/* SPDX-License-Identifier: MIT */
/* Drives a libFuzzer target without libFuzzer, for compilers that have no such library. Inputs come from a generator
   with a fixed seed, or from the files named as arguments, once each. It takes libFuzzer's names for the options that
   it has, and ignores others:

       fuzz_x [-seed=N] [-runs=N] [-max_total_time=SECONDS] [-max_len=BYTES] [-artifact_prefix=PATH] [FILE...]

   Each input lies in PATHlast_input while it is tried, so that a crash leaves it there. */
#define _POSIX_C_SOURCE 200809L
#include "../harness.h"
#include <fcntl.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* Makes any bytes, or mostly small ones, or runs of one byte, so that counters, sizes and text all look plausible. */
static void generate(uint8_t *data, size_t size)
{
    const uint64_t kind = below(4);
    fill(data, size);
    for (size_t i = 1; kind && i < size; i++)
        if (data[i] % 16)
            data[i] = kind == 1 ? data[i] >> 5 : kind == 2 ? data[i] >> 1 : data[i - 1];
}

/* Runs a copy of exactly the input's size, so that AddressSanitizer sees reads past it. */
static void try(const uint8_t *data, size_t size)
{
    uint8_t *const copy = allocate(size);
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

/* Returns whether the argument is "-name=value", and points *value to the value. */
static int has_name(const char *argument, const char *name, const char **value)
{
    const size_t n = strlen(name);
    *value = argument + n;
    return strncmp(argument, name, n) == 0;
}

/* Every second sixteen inputs have the full length. Sixteen, because it takes time to tell the file's size. */
static void try_inputs(uint64_t runs, double limit, size_t max_len, const char *path)
{
    const int file = open(path, O_RDWR | O_CREAT | O_TRUNC, 0644);
    uint8_t *const data = mmap(NULL, max_len, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    const double start = seconds();
    uint64_t done = 0;
    size_t size = 0;
    for (; done < runs && seconds() - start < limit; done++) {
        if (done % 16 == 0)
            size = done % 32 ? max_len : 1 + below(max_len);
        if (data == MAP_FAILED || (done % 16 == 0 && ftruncate(file, (off_t)size) != 0)) {
            fprintf(stderr, "%s: cannot be written\n", path);
            exit(2);
        }
        generate(data, size);
        try(data, size);
    }
    (void)munmap(data, max_len);
    (void)close(file);
    (void)remove(path);
    printf("Done %llu runs in %.0f second(s)\n", (unsigned long long)done, seconds() - start);
}

int main(int argc, char **argv)
{
    uint64_t runs = UINT64_MAX;
    size_t max_len = 4096;
    double limit = 1e300;
    int files = 0;
    char path[4096] = "last_input";
    for (int i = 1; i < argc; i++) {
        const char *value;
        if (has_name(argv[i], "-seed=", &value))
            random_state = strtoull(value, NULL, 10) << 40;
        else if (has_name(argv[i], "-runs=", &value))
            runs = strtoull(value, NULL, 10);
        else if (has_name(argv[i], "-max_total_time=", &value))
            limit = strtod(value, NULL);
        else if (has_name(argv[i], "-max_len=", &value))
            max_len = (size_t)strtoull(value, NULL, 10);
        else if (has_name(argv[i], "-artifact_prefix=", &value))
            (void)snprintf(path, sizeof path, "%slast_input", value);
        else if (argv[i][0] != '-')
            try_file(argv[i]), files++;
    }
    if (files == 0)
        try_inputs(runs, limit, max_len, path);
    return 0;
}
