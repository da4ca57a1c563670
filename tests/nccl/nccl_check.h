/* SPDX-License-Identifier: MIT */
/* How test_nccl.c and test_nccl_life.c count failed checks. Include it after kvprim_nccl.h. */
static int passed, failed, skipped, faults;

#define CHECK(condition)                                                                                               \
    do                                                                                                                 \
        if (!(condition)) {                                                                                            \
            printf("  line %d: false: %s (last error: %s)\n", __LINE__, #condition, kvprim_last_error());              \
            faults++;                                                                                                  \
        }                                                                                                              \
    while (0)

/* The call returns this status, and its error text contains `word`. */
#define FAILS(call, status, word)                                                                                      \
    do {                                                                                                               \
        CHECK((call) == (status));                                                                                     \
        CHECK(strstr(kvprim_last_error(), word) != NULL);                                                              \
    } while (0)
