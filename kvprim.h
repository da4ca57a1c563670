/* kvprim.h: the bytes of a KV cache, found, gathered, stored, transferred and unpacked on the CPU. C11, no dependency.

   Do this:

       #define KVPRIM_IMPLEMENTATION
       #include "kvprim.h"
       #include <stdio.h>

       int main(void)
       {
           const int32_t cached[] = {11, 12, 13, 14, 15, 16, 17, 18}, prompt[] = {11, 12, 13, 14, 15, 99};
           const size_t matched = kvprim_prefix_i32(prompt, 6, cached, 8);
           printf("%zu tokens are cached, %zu of them in whole pages of 4 (compared with %s)\n",
                  matched, kvprim_prefix_pages(matched, 4), kvprim_isa());
           return matched == 5 ? 0 : 1;
       }

   What it does: says how much of a prompt is already cached (prefix compare), and moves rows of keys and values:
   gather (cache to contiguous rows), store (new rows into cache slots), transfer (rows or pages of every layer, cache
   to cache) and unpack (fragments of a receive buffer to their places). These functions are also the reference for
   kvprim_cuda.cuh, which takes the same descriptors.

   What it does NOT do: own or allocate memory, start threads, print, do arithmetic on what it moves.

   Contents, search for the tag:
       >>config      macros you may define
       >>status      kvprim_status, errors and their text
       >>prefix      prefix compare
       >>table       kvprim_table: rows, pages, heads; the index rule
       >>gather      >>store      >>transfer      >>unpack
       >>check       the checks alone
       >>impl        the implementation

   Rules that hold for every function here
       Errors     A descriptor is checked before the first byte moves: on an error nothing was written, the status is
                  not KVPRIM_OK, and kvprim_last_error() names the field and the values. count == 0 is KVPRIM_OK and
                  looks at nothing else.
       Threads    Every function may be called from any number of threads at once. The bytes are the caller's to share.
       Alignment  Rows: any, of any number of bytes >= 1. Tokens, indices and counters: as their C types.
       Aliasing   What is written must not overlap what is read, from the first byte of a table to its last; neither
                  rows nor indices, fragments, layer arrays or descriptors. Checked, but for the last two. Rows of one
                  cache may be copied inside it: see same_cache.
*/

/* >>config ---------------------------------------------------------------------------------------------------------

   KVPRIM_IMPLEMENTATION       in one translation unit: implements every kvprim header included there
   KVPRIM_CORE_IMPLEMENTATION  in one translation unit: implements this header alone
   KVPRIM_STATIC               in every translation unit that uses this copy: all functions are static to the unit,
                               which must implement them too. Lets two vendored copies live in one program.
   KVPRIM_NO_SIMD              in every translation unit, or none: portable C only, no named variants but _scalar
   KVPRIM_DEBUG                in the implementing one: unpack refuses fragments whose destinations overlap. It sorts
                               them, in memory from malloc; where there is none they are not checked
   KVPRIM_NVTX                 in the implementing ones, before the first kvprim header: an NVTX range around every call
                               that moves or compares, but for the named variants, named after the function, as
                               profilers show. Needs NVTX's header-only C API, nvtx3/ of the CUDA Toolkit, C++ or a
                               compiler with the attribute `cleanup`, and -ldl where dlopen is not in libc. Left out:
                               no cost
*/
#ifndef KVPRIM_H
#define KVPRIM_H

#include <stddef.h>
#include <stdint.h>

#define KVPRIM_VERSION_MAJOR 0
#define KVPRIM_VERSION_MINOR 1
#define KVPRIM_VERSION_PATCH 0

#if defined(KVPRIM_STATIC) && (defined(__GNUC__) || defined(__clang__))
#define KVPRIM_API static __attribute__((unused))
#elif defined(KVPRIM_STATIC)
#define KVPRIM_API static
#else
#define KVPRIM_API extern
#endif

/* Which variants of the prefix compare exist here. Other compilers and processors use the scalar one. */
#if !defined(KVPRIM_NO_SIMD) && (defined(__GNUC__) || defined(__clang__))
#if defined(__x86_64__) && !defined(__ILP32__) &&                                                                      \
    !defined(_WIN32) /* gcc misaligns vectors on Windows' stack: bug 54412 */
#define KVPRIM_X86 1
#elif defined(__aarch64__) && !defined(__AARCH64EB__)
#define KVPRIM_NEON 1
#endif
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* >>status --------------------------------------------------------------------------------------------------------- */

/* name, value, text. Values are stable: a new status goes to the end. */
#define KVPRIM_STATUS_LIST(X)                                                                                          \
    X(KVPRIM_OK, 0, "success")                                                                                         \
    X(KVPRIM_ERROR_NULL, 1, "a pointer that must be set is NULL")                                                      \
    X(KVPRIM_ERROR_SIZE, 2, "a size, count or stride is out of its range")                                             \
    X(KVPRIM_ERROR_OVERLAP, 3, "memory that is written overlaps memory that is read")                                  \
    X(KVPRIM_ERROR_BOUNDS, 4, "a fragment reaches outside its buffer")                                                 \
    X(KVPRIM_ERROR_ARGUMENT, 5, "an argument has no meaning here")                                                     \
    X(KVPRIM_ERROR_UNSUPPORTED, 6, "this machine, driver or build cannot do it")                                       \
    X(KVPRIM_ERROR_CUDA, 7, "a CUDA call failed")                                                                      \
    X(KVPRIM_ERROR_NCCL, 8, "an NCCL call failed")                                                                     \
    X(KVPRIM_ERROR_TIMEOUT, 9, "another rank did not answer in time")

typedef enum kvprim_status {
#define KVPRIM_STATUS_ENUM(name, value, text) name = value,
    KVPRIM_STATUS_LIST(KVPRIM_STATUS_ENUM)
#undef KVPRIM_STATUS_ENUM
} kvprim_status;

/* "KVPRIM_ERROR_SIZE" for KVPRIM_ERROR_SIZE; "unknown kvprim_status" for a number that is none. Static storage. */
KVPRIM_API const char *kvprim_status_name(kvprim_status status);

/* One sentence for a status, without the particulars. Static storage. */
KVPRIM_API const char *kvprim_status_text(kvprim_status status);

/* What went wrong in this thread's last failed call: function, field, values. "" before the first failure; calls that
   succeed leave it alone. Valid until the thread's next failure. */
KVPRIM_API const char *kvprim_last_error(void);

/* >>prefix ---------------------------------------------------------------------------------------------------------

   How many leading tokens two arrays share: 0 to min(a_len, b_len). Nothing past either array's end is read, and the
   arrays may be the same or overlap. An array may be NULL if its length is 0; NULL with a length gives 0 and sets
   kvprim_last_error(). Thread-safe from the first call on. */
KVPRIM_API size_t kvprim_prefix_i32(const int32_t *a, size_t a_len, const int32_t *b, size_t b_len);
KVPRIM_API size_t kvprim_prefix_i64(const int64_t *a, size_t a_len, const int64_t *b, size_t b_len);

/* `matched` rounded down to whole pages of `page_rows` tokens; page_rows 0 or 1: `matched` itself. */
KVPRIM_API size_t kvprim_prefix_pages(size_t matched, size_t page_rows);

/* One query against keys_count keys: out_len[i] = kvprim_prefix_i32(query, query_len, keys[i], key_lens[i]); out_len
   may be NULL and must not overlap the rest. Returns the index of the longest match, of several the first; 0 if there
   are no keys. A NULL where a length or count says otherwise: returns 0, sets kvprim_last_error(), writes nothing. */
KVPRIM_API size_t kvprim_prefix_many_i32(const int32_t *query, size_t query_len, const int32_t *const *keys,
                                         const size_t *key_lens, size_t keys_count, size_t *out_len);

/* What the three names above run on here: "avx512", "avx2", "neon" or "scalar". */
KVPRIM_API const char *kvprim_isa(void);

/* The variants by name: the same results; arrays with a length must not be NULL. On x86-64 _avx2 may be called where
   kvprim_isa() says "avx2" or "avx512", _avx512 (F, BW, VL, BMI1, BMI2) where it says "avx512". */
KVPRIM_API size_t kvprim_prefix_i32_scalar(const int32_t *a, size_t a_len, const int32_t *b, size_t b_len);
KVPRIM_API size_t kvprim_prefix_i64_scalar(const int64_t *a, size_t a_len, const int64_t *b, size_t b_len);
#ifdef KVPRIM_X86
KVPRIM_API size_t kvprim_prefix_i32_avx2(const int32_t *a, size_t a_len, const int32_t *b, size_t b_len);
KVPRIM_API size_t kvprim_prefix_i64_avx2(const int64_t *a, size_t a_len, const int64_t *b, size_t b_len);
KVPRIM_API size_t kvprim_prefix_i32_avx512(const int32_t *a, size_t a_len, const int32_t *b, size_t b_len);
KVPRIM_API size_t kvprim_prefix_i64_avx512(const int64_t *a, size_t a_len, const int64_t *b, size_t b_len);
#endif
#ifdef KVPRIM_NEON
KVPRIM_API size_t kvprim_prefix_i32_neon(const int32_t *a, size_t a_len, const int32_t *b, size_t b_len);
KVPRIM_API size_t kvprim_prefix_i64_neon(const int64_t *a, size_t a_len, const int64_t *b, size_t b_len);
#endif

/* >>table ----------------------------------------------------------------------------------------------------------

   Where the rows of a cache or tensor lie. Zero-initialise, then set what differs. All sizes are bytes unless they say
   rows. Row r of a table that is not paged starts at data + r * stride; of a paged one at

       data + (r / page_rows) * page_stride + (r % page_rows) * stride

   and piece h of a row that lies in `heads` equal pieces starts h * head_stride further. Token-major caches (NHD) have
   heads = 0; head-major ones (HND) have heads = H, and the defaults of the rest are right where nothing is padded.

   Index rule, the same everywhere: row = index - base. 0 <= row < rows: the row is moved. Otherwise the table is not
   touched: gather writes a row of zeros, store and transfer skip it. Negative rows are padding and no error; rows >=
   `rows` also add one to *rejected, if there is such a counter. So -1 padding (base 0), a reserved slot 0 (data at slot
   1, base 1) and a shard of a vocabulary (base = its first id) are one rule. There is no unchecked mode. */
typedef struct kvprim_table {
    void *data;          /* byte 0 of row 0; may be NULL if rows is 0 */
    int64_t rows;        /* the bound that every index is checked against; a side without an index has >= count rows */
    int64_t stride;      /* row to row; 0: packed, that is one row, or one piece if heads > 1. At least that. */
    int64_t page_rows;   /* rows per page; 0: not paged */
    int64_t page_stride; /* page to page; 0: packed. Rows must not overlap each other. */
    int32_t heads;       /* a row lies in this many equal pieces, and divides by it; 0 or 1: in one */
    int64_t head_stride; /* piece to piece; 0: packed, all rows of the page (or table) of one head, then the next */
} kvprim_table;

typedef enum kvprim_index_type { KVPRIM_I32 = 0, KVPRIM_I64 = 1 } kvprim_index_type;

/* The table with every 0 that stands for a default replaced by its value, for rows of row_bytes; heads at least 1. */
KVPRIM_API kvprim_table kvprim_table_resolve(kvprim_table table, int64_t row_bytes);

/* Where row `row` (its first piece) starts; the table resolved, 0 <= row < rows, unchecked. */
KVPRIM_API void *kvprim_table_row(const kvprim_table *resolved, int64_t row);

/* >>gather ---------------------------------------------------------------------------------------------------------

   dst row i = src row (index[i] - index_base), or zeros by the index rule, for i in [0, count). */
typedef struct kvprim_gather_desc {
    kvprim_table dst, src;
    int64_t row_bytes;
    const void *index; /* count int32 or int64, naturally aligned */
    kvprim_index_type index_type;
    int64_t index_base, count;
    uint32_t *rejected; /* optional; indices past src.rows are added to it. Memory that the executing side can write; on
                           the CPU not atomically: one per thread */
} kvprim_gather_desc;

/* Aliasing: dst must not overlap src. Repeated indices are fine.
   Errors: NULL (descriptor, index, data), SIZE (names field and values), OVERLAP, ARGUMENT (index_type). */
KVPRIM_API kvprim_status kvprim_gather(const kvprim_gather_desc *desc);

/* >>store ----------------------------------------------------------------------------------------------------------

   k_cache row (slot[i] - slot_base) = k row i, and likewise v, for i in [0, count); other slots: the index rule. */
typedef struct kvprim_store_desc {
    kvprim_table k_cache, v_cache, k, v; /* v_cache.data NULL: K only, whatever v and v_bytes are (MLA) */
    int64_t k_bytes, v_bytes;            /* bytes of a row; K and V may differ */
    const void *slot;                    /* count int32 or int64, naturally aligned */
    kvprim_index_type slot_type;
    int64_t slot_base, count;
    uint32_t *rejected; /* optional; slots past the caches' rows, counted once for K and V */
} kvprim_store_desc;

/* The caches have the same number of rows and may interleave, as in [page][K or V][row]. k and v may be parts of one
   tensor (packed QKV). Duplicate slots: of each aligned 16 bytes inside the row, and of each byte at its edges, one of
   the rows is kept, unspecified which (where either side has heads: inside what is one piece on both, and its edges).
   That no K row overlaps a V row is checked for row 0 only.
   Aliasing: no cache overlaps an input. Errors: as kvprim_gather. */
KVPRIM_API kvprim_status kvprim_store(const kvprim_store_desc *desc);

/* >>transfer -------------------------------------------------------------------------------------------------------

   In every layer: dst row dst_index[i] = src row src_index[i], for i in [0, count). Whole pages are rows too: give
   row_bytes = a page. With K and V caches pass twice the layers: K and V of each. dst and src may differ in every field
   of their geometry. */
typedef struct kvprim_transfer_desc {
    kvprim_table dst, src;   /* geometry, and layer 0's memory */
    void *const *dst_layers; /* optional host arrays of `layers` base pointers, instead of dst.data ... */
    void *const *src_layers; /* ... and src.data; free to reuse when the call returns */
    int64_t dst_layer_stride, src_layer_stride; /* layer to layer where those are NULL; 0: packed, padding included */
    int32_t layers;                             /* 0 means 1 */
    int64_t row_bytes;
    const void *dst_index, *src_index; /* count int32 or int64, naturally aligned; NULL: row i */
    kvprim_index_type index_type;
    int64_t count;
    uint32_t *rejected; /* optional; an i with either index past its table is counted once */
    int32_t same_cache; /* 1: dst and src are one cache, inside which rows are copied (copy-on-write) */
} kvprim_transfer_desc;

/* A row moves if both of its indices are in range. Repeated dst indices: as duplicate slots.
   Aliasing: no layer of dst overlaps a layer of src (checked) or of dst (not checked). With same_cache dst and src have
   the same layers and geometry instead (checked), and the caller promises that no row is both written and read in this
   call, whatever i it is named by: where one is, its bytes and those of the rows it goes to are unspecified.
   Errors: as kvprim_gather; ARGUMENT also for same_cache (neither 0 nor 1, or with two caches). */
KVPRIM_API kvprim_status kvprim_transfer(const kvprim_transfer_desc *desc);

/* >>unpack ---------------------------------------------------------------------------------------------------------

   Each fragment moves: dst[dst_offset .. + bytes) = src[src_offset .. + bytes). */
typedef struct kvprim_fragment {
    uint64_t src_offset, dst_offset, bytes; /* bytes may be 0 */
} kvprim_fragment;

typedef struct kvprim_unpack_desc {
    const void *src;
    uint64_t src_bytes; /* no fragment may reach past them */
    void *dst;
    uint64_t dst_bytes; /* no fragment may reach past them */
    const kvprim_fragment *fragments;
    size_t count;     /* of fragments; they are host memory, free to reuse when the call returns */
    int64_t reserved; /* must be 0 */
} kvprim_unpack_desc;

/* Sources may overlap each other. Destinations must not: the bytes where they do are unspecified (with KVPRIM_DEBUG the
   call fails with KVPRIM_ERROR_OVERLAP).
   Aliasing: [dst, dst + dst_bytes) must not overlap [src, src + src_bytes) or the fragments.
   Errors: NULL, ARGUMENT (reserved), SIZE, OVERLAP, BOUNDS (names the fragment). */
KVPRIM_API kvprim_status kvprim_unpack(const kvprim_unpack_desc *desc);

/* >>check ----------------------------------------------------------------------------------------------------------

   The checks that the functions above make before they start, alone: for callers that check once and launch often, and
   for kvprim_cuda.cuh. The same status and text; if `resolved` is not NULL and all is well, it receives the descriptor
   with every default filled in. */
KVPRIM_API kvprim_status kvprim_gather_check(const kvprim_gather_desc *desc, kvprim_gather_desc *resolved);
KVPRIM_API kvprim_status kvprim_store_check(const kvprim_store_desc *desc, kvprim_store_desc *resolved);
KVPRIM_API kvprim_status kvprim_transfer_check(const kvprim_transfer_desc *desc, kvprim_transfer_desc *resolved);
KVPRIM_API kvprim_status kvprim_unpack_check(const kvprim_unpack_desc *desc);

/* Sets kvprim_last_error() from a printf format and returns `status`: for kvprim's other headers and for wrappers. */
#if defined(__GNUC__) || defined(__clang__)
__attribute__((format(printf, 2, 3)))
#endif
KVPRIM_API kvprim_status
kvprim_fail(kvprim_status status, const char *format, ...);

#ifdef __cplusplus
}
#endif

/* For kvprim's headers alone: KVPRIM_RANGE(name) lasts until the function returns. */
#ifndef KVPRIM_NVTX
#define KVPRIM_RANGE(name) ((void)0)
#else
#include <nvtx3/nvToolsExt.h>
#ifdef __cplusplus
namespace /* no symbol that another copy's range could be taken for */
{
struct kvpi_range {
    explicit kvpi_range(const char *name)
    {
        (void)nvtxRangePushA(name);
    }
    ~kvpi_range()
    {
        (void)nvtxRangePop();
    }
};
} /* namespace */
#define KVPRIM_RANGE(name) const kvpi_range kvpi_this_range(name)
#else
static inline void kvpi_end_range(const int *level)
{
    (void)level;
    (void)nvtxRangePop();
}
#define KVPRIM_RANGE(name)                                                                                             \
    const int kvpi_this_range __attribute__((cleanup(kvpi_end_range), unused)) = nvtxRangePushA(name)
#endif
#endif
#endif /* KVPRIM_H */

/* Stop here if you only use the library. */

/* >>impl ----------------------------------------------------------------------------------------------------------- */
#if (defined(KVPRIM_IMPLEMENTATION) || defined(KVPRIM_CORE_IMPLEMENTATION)) && !defined(KVPRIM_CORE_IMPLEMENTED)
#define KVPRIM_CORE_IMPLEMENTED

#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#ifdef KVPRIM_DEBUG
#include <stdlib.h>
#endif

#ifdef KVPRIM_X86
#include <immintrin.h>
#endif
#ifdef KVPRIM_NEON
#include <arm_neon.h>
#endif

#if defined(__cplusplus)
#define KVPRIM_THREAD_LOCAL thread_local
#elif defined(_MSC_VER) && !defined(__clang__)
#define KVPRIM_THREAD_LOCAL __declspec(thread)
#else
#define KVPRIM_THREAD_LOCAL _Thread_local
#endif

/* Names that begin with kvpi_ are internal: static, and free to change. */

#if defined(__SANITIZE_ADDRESS__)
#define KVPRIM_SANITIZED
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define KVPRIM_SANITIZED
#endif
#endif

#if defined(__GNUC__) || defined(__clang__)
#define KVPRIM_LIKELY(x) __builtin_expect(!!(x), 1) /* for the order of the code: a taken branch costs up to 2 cycles */
#define KVPRIM_INLINE __attribute__((always_inline)) static inline
#else
#define KVPRIM_LIKELY(x) (x)
#define KVPRIM_INLINE static inline
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- status ---- */

static KVPRIM_THREAD_LOCAL char kvpi_error_text[256];

KVPRIM_API const char *kvprim_status_name(kvprim_status status)
{
    switch (status) {
#define KVPRIM_STATUS_CASE(name, value, text)                                                                          \
    case name:                                                                                                         \
        return #name;
        KVPRIM_STATUS_LIST(KVPRIM_STATUS_CASE)
#undef KVPRIM_STATUS_CASE
    }
    return "unknown kvprim_status";
}

KVPRIM_API const char *kvprim_status_text(kvprim_status status)
{
    switch (status) {
#define KVPRIM_STATUS_CASE(name, value, text)                                                                          \
    case name:                                                                                                         \
        return text;
        KVPRIM_STATUS_LIST(KVPRIM_STATUS_CASE)
#undef KVPRIM_STATUS_CASE
    }
    return "unknown kvprim_status";
}

KVPRIM_API const char *kvprim_last_error(void)
{
    return kvpi_error_text;
}

KVPRIM_API kvprim_status kvprim_fail(kvprim_status status, const char *format, ...)
{
    char text[sizeof kvpi_error_text]; /* an argument may be the text of before */
    va_list args;
    va_start(args, format);
    (void)vsnprintf(text, sizeof text, format, args);
    va_end(args);
    memcpy(kvpi_error_text, text, sizeof text);
    return status;
}

/* ---- prefix: scalar ---- */

typedef size_t kvpi_prefix_fn(const int32_t *a, size_t a_len, const int32_t *b, size_t b_len);

static size_t kvpi_min(size_t a, size_t b)
{
    return a < b ? a : b;
}

/* memcpy, so that no alignment is assumed */
static uint64_t kvpi_load_u64(const void *p)
{
    uint64_t v;
    memcpy(&v, p, sizeof v);
    return v;
}

static uint32_t kvpi_load_u32(const void *p)
{
    uint32_t v;
    memcpy(&v, p, sizeof v);
    return v;
}

KVPRIM_API size_t kvprim_prefix_i32_scalar(const int32_t *a, size_t a_len, const int32_t *b, size_t b_len)
{
    const size_t n = kvpi_min(a_len, b_len);
    size_t i = 0;
    for (; i + 4 <= n; i += 4)
        if (((kvpi_load_u64(a + i) ^ kvpi_load_u64(b + i)) | (kvpi_load_u64(a + i + 2) ^ kvpi_load_u64(b + i + 2))) !=
            0)
            break;
    while (i < n && kvpi_load_u32(a + i) == kvpi_load_u32(b + i))
        i++;
    return i;
}

/* Two int64 are equal where both halves are: every int64 compare is an int32 one of twice the length. */
#define KVPRIM_PREFIX_I64(name, prefix_i32)                                                                            \
    KVPRIM_API size_t name(const int64_t *a, size_t a_len, const int64_t *b, size_t b_len)                             \
    {                                                                                                                  \
        const size_t n = 2 * kvpi_min(a_len, b_len);                                                                   \
        return prefix_i32((const int32_t *)(const void *)a, n, (const int32_t *)(const void *)b, n) / 2;               \
    }
KVPRIM_PREFIX_I64(kvprim_prefix_i64_scalar, kvprim_prefix_i32_scalar)

static size_t kvpi_many_each(const int32_t *query, size_t query_len, const int32_t *const *keys, const size_t *key_lens,
                             size_t keys_count, size_t *out_len)
{
    size_t best = 0, best_len = 0;
    for (size_t i = 0; i < keys_count; i++) {
        const size_t len = kvprim_prefix_i32(query, query_len, keys[i], key_lens[i]);
        if (out_len)
            out_len[i] = len;
        if (len > best_len) {
            best_len = len;
            best = i;
        }
    }
    return best;
}

/* ---- prefix: x86-64 ---- */
#ifdef KVPRIM_X86
#define KVPRIM_AVX2 __attribute__((target("avx2,bmi")))
#define KVPRIM_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,bmi,bmi2")))

/* Bit i of these is set where token i differs. */
static inline uint32_t kvpi_diff4_sse2(const int32_t *a, const int32_t *b)
{
    const __m128i x = _mm_loadu_si128((const __m128i *)(const void *)a);
    const __m128i y = _mm_loadu_si128((const __m128i *)(const void *)b);
    return (uint32_t)_mm_movemask_ps(_mm_castsi128_ps(_mm_cmpeq_epi32(x, y))) ^ 0xfu;
}

KVPRIM_AVX2 static inline __m256i kvpi_equal8_avx2(const int32_t *a, const int32_t *b)
{
    const __m256i x = _mm256_loadu_si256((const __m256i *)(const void *)a);
    const __m256i y = _mm256_loadu_si256((const __m256i *)(const void *)b);
    return _mm256_cmpeq_epi32(x, y);
}

KVPRIM_AVX2 static inline uint64_t kvpi_diff8_avx2(const int32_t *a, const int32_t *b)
{
    return (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(kvpi_equal8_avx2(a, b))) ^ 0xffu;
}

KVPRIM_AVX2 static inline uint64_t kvpi_diff32_avx2(const int32_t *a, const int32_t *b)
{
    return kvpi_diff8_avx2(a, b) | kvpi_diff8_avx2(a + 8, b + 8) << 8 | kvpi_diff8_avx2(a + 16, b + 16) << 16 |
           kvpi_diff8_avx2(a + 24, b + 24) << 24;
}

KVPRIM_AVX2 static inline __m256i kvpi_equal32_avx2(const int32_t *a, const int32_t *b)
{
    const __m256i low = _mm256_and_si256(kvpi_equal8_avx2(a, b), kvpi_equal8_avx2(a + 8, b + 8));
    const __m256i high = _mm256_and_si256(kvpi_equal8_avx2(a + 16, b + 16), kvpi_equal8_avx2(a + 24, b + 24));
    return _mm256_and_si256(low, high);
}

KVPRIM_AVX2 static inline int kvpi_same64_avx2(const int32_t *a, const int32_t *b)
{
    return _mm256_movemask_epi8(_mm256_and_si256(kvpi_equal32_avx2(a, b), kvpi_equal32_avx2(a + 32, b + 32))) == -1;
}

/* The lowest set bit of diff, or n if that is less: diff may say nothing of the n tokens. */
KVPRIM_AVX2 static inline size_t kvpi_first(uint64_t diff, size_t n)
{
    return kvpi_min((size_t)_tzcnt_u64(diff), n);
}

/* Up to 32 tokens, by vectors that overlap in the middle: nothing outside the arrays is read, whatever n is. */
KVPRIM_AVX2 static inline size_t kvpi_short_avx2(const int32_t *a, const int32_t *b, size_t n)
{
    if (n > 16)
        return kvpi_first(kvpi_diff8_avx2(a, b) | kvpi_diff8_avx2(a + 8, b + 8) << 8 |
                              kvpi_diff8_avx2(a + n - 16, b + n - 16) << (n - 16) |
                              kvpi_diff8_avx2(a + n - 8, b + n - 8) << (n - 8),
                          n);
    if (n >= 8)
        return kvpi_first(kvpi_diff8_avx2(a, b) | kvpi_diff8_avx2(a + n - 8, b + n - 8) << (n - 8), n);
    if (n >= 4)
        return kvpi_first(kvpi_diff4_sse2(a, b) | (uint64_t)kvpi_diff4_sse2(a + n - 4, b + n - 4) << (n - 4), n);
    size_t i = 0;
    while (i < n && kvpi_load_u32(a + i) == kvpi_load_u32(b + i))
        i++;
    return i;
}

KVPRIM_API KVPRIM_AVX2 size_t kvprim_prefix_i32_avx2(const int32_t *a, size_t a_len, const int32_t *b, size_t b_len)
{
    const size_t n = kvpi_min(a_len, b_len);
    if (n <= 32)
        return kvpi_short_avx2(a, b, n);
    if (_mm256_movemask_epi8(kvpi_equal32_avx2(a, b)) != -1)
        return (size_t)_tzcnt_u64(kvpi_diff32_avx2(a, b));
    size_t i = 32 - ((uintptr_t)a >> 2) % 8; /* from here a is aligned to 32 bytes */
    while (i + 64 <= n && kvpi_same64_avx2(a + i, b + i))
        i += 64;
    for (; i + 32 <= n; i += 32)
        if (_mm256_movemask_epi8(kvpi_equal32_avx2(a + i, b + i)) != -1)
            return i + (size_t)_tzcnt_u64(kvpi_diff32_avx2(a + i, b + i));
    return i == n ? n : n - 32 + kvpi_first(kvpi_diff32_avx2(a + n - 32, b + n - 32), 32);
}
KVPRIM_PREFIX_I64(kvprim_prefix_i64_avx2, kvprim_prefix_i32_avx2)

KVPRIM_AVX512 static inline __mmask16 kvpi_diff16_avx512(const int32_t *a, const int32_t *b)
{
    return _mm512_cmpneq_epi32_mask(_mm512_loadu_si512(a), _mm512_loadu_si512(b));
}

KVPRIM_AVX512 static inline uint64_t kvpi_diff32_avx512(const int32_t *a, const int32_t *b)
{
    return _mm512_kunpackw(kvpi_diff16_avx512(a + 16, b + 16), kvpi_diff16_avx512(a, b));
}

KVPRIM_AVX512 static inline uint64_t kvpi_diff64_avx512(const int32_t *a, const int32_t *b)
{
    return kvpi_diff32_avx512(a, b) | kvpi_diff32_avx512(a + 32, b + 32) << 32;
}

/* x with the bits set in which 16 tokens of a and b differ. 0xf6 stands for x | (y ^ z). */
KVPRIM_AVX512 static inline __m512i kvpi_also_avx512(__m512i x, const int32_t *a, const int32_t *b)
{
    return _mm512_ternarylogic_epi32(x, _mm512_loadu_si512(a), _mm512_loadu_si512(b), 0xf6);
}

KVPRIM_AVX512 static inline __m512i kvpi_also64_avx512(__m512i x, const int32_t *a, const int32_t *b)
{
    x = kvpi_also_avx512(kvpi_also_avx512(x, a, b), a + 16, b + 16);
    return kvpi_also_avx512(kvpi_also_avx512(x, a + 32, b + 32), a + 48, b + 48);
}

KVPRIM_AVX512 static inline int kvpi_same64_avx512(const int32_t *a, const int32_t *b)
{
    const __m512i x = kvpi_also64_avx512(_mm512_setzero_si512(), a, b);
    return _mm512_test_epi32_mask(x, x) == 0;
}

/* Twice the work per branch: the loop then runs at the cache's speed wherever the linker puts it. */
KVPRIM_AVX512 static inline int kvpi_same128_avx512(const int32_t *a, const int32_t *b)
{
    const __m512i x = kvpi_also64_avx512(kvpi_also64_avx512(_mm512_setzero_si512(), a, b), a + 64, b + 64);
    return _mm512_test_epi32_mask(x, x) == 0;
}

/* A masked load whose masked-out lanes lie in a page that is not mapped takes ~700 cycles to find that out. */
static inline int kvpi_near_page_end(const void *p)
{
    return ((uintptr_t)p & 4095) > 4096 - 64;
}

/* Whether a vector of `bytes` from here may leave its page. Also true of NULL, which is seen to later, and of a page's
   first byte, which is then only slower. */
static inline int kvpi_near_page_end_or_null(const void *p, uintptr_t bytes)
{
    return (((uintptr_t)p - 1) & 4095) >= 4096 - bytes;
}

KVPRIM_AVX512 static inline size_t kvpi_short_avx512(const int32_t *a, const int32_t *b, size_t n)
{
    if (kvpi_near_page_end(a) || kvpi_near_page_end(b))
        return kvpi_short_avx2(a, b, n);
    const __mmask16 lanes = (__mmask16)_bzhi_u32(0xffff, (uint32_t)n);
    const __mmask16 diff =
        _mm512_mask_cmpneq_epi32_mask(lanes, _mm512_maskz_loadu_epi32(lanes, a), _mm512_maskz_loadu_epi32(lanes, b));
    return (size_t)_tzcnt_u32(diff | ~(uint32_t)lanes);
}

/* Where a + i begins a line and b + i does not, every load of b would straddle two. This loads b's lines whole and
   takes each vector from two of them. Returns i, advanced by the blocks of 64 tokens that are equal. */
KVPRIM_AVX512 static inline size_t kvpi_shifted_avx512(const int32_t *a, const int32_t *b, size_t i, size_t n)
{
    const size_t shift = ((uintptr_t)(b + i) >> 2) % 16;
    const __m512i count = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i window = _mm512_add_epi32(count, _mm512_set1_epi32((int)shift));
    const int32_t *lines = b + i - shift;
    __m512i line0 = _mm512_loadu_si512(lines);
    for (; i + 80 <= n; i += 64, lines += 64) { /* reads b to the end of the line after the block */
        __m512i line1 = _mm512_loadu_si512(lines + 16), line2 = _mm512_loadu_si512(lines + 32);
        __m512i line3 = _mm512_loadu_si512(lines + 48), line4 = _mm512_loadu_si512(lines + 64);
        __asm__(""
                : "+v"(line1), "+v"(line2), "+v"(line3), "+v"(line4)); /* keeps gcc from loading each of them twice */
        __m512i x = _mm512_xor_si512(_mm512_loadu_si512(a + i), _mm512_permutex2var_epi32(line0, window, line1));
        x = _mm512_ternarylogic_epi32(x, _mm512_loadu_si512(a + i + 16),
                                      _mm512_permutex2var_epi32(line1, window, line2), 0xf6);
        x = _mm512_ternarylogic_epi32(x, _mm512_loadu_si512(a + i + 32),
                                      _mm512_permutex2var_epi32(line2, window, line3), 0xf6);
        x = _mm512_ternarylogic_epi32(x, _mm512_loadu_si512(a + i + 48),
                                      _mm512_permutex2var_epi32(line3, window, line4), 0xf6);
        if (_mm512_test_epi32_mask(x, x) != 0)
            break;
        line0 = line4;
    }
    return i;
}

/* More than 16 tokens, or few that end near their page. */
KVPRIM_AVX512 __attribute__((aligned(64))) static size_t kvpi_long_avx512(const int32_t *a, const int32_t *b, size_t n)
{
    if (n <= 16)
        return kvpi_short_avx512(a, b, n);
    if (n <= 32)
        return kvpi_first(kvpi_diff16_avx512(a, b) | (uint64_t)kvpi_diff16_avx512(a + n - 16, b + n - 16) << (n - 16),
                          n);
    if (n <= 64)
        return kvpi_first(kvpi_diff32_avx512(a, b) | kvpi_diff32_avx512(a + n - 32, b + n - 32) << (n - 32), n);
    if (!kvpi_same64_avx512(a, b))
        return (size_t)_tzcnt_u64(kvpi_diff64_avx512(a, b));
    size_t i = 64 - ((uintptr_t)a >> 2) % 16; /* from here a is aligned to 64 bytes */
    if (n >= 512 && (uintptr_t)(b + i) % 64 != 0 && (((uintptr_t)a | (uintptr_t)b) & 3) == 0)
        i = kvpi_shifted_avx512(a, b, i, n);
    while (i + 128 <= n && kvpi_same128_avx512(a + i, b + i))
        i += 128;
    for (; i + 64 <= n; i += 64)
        if (!kvpi_same64_avx512(a + i, b + i))
            return i + (size_t)_tzcnt_u64(kvpi_diff64_avx512(a + i, b + i));
    return i == n ? n : n - 64 + kvpi_first(kvpi_diff64_avx512(a + n - 64, b + n - 64), 64);
}

KVPRIM_API KVPRIM_AVX512 size_t kvprim_prefix_i32_avx512(const int32_t *a, size_t a_len, const int32_t *b, size_t b_len)
{
    const size_t n = kvpi_min(a_len, b_len);
    return n <= 16 ? kvpi_short_avx512(a, b, n) : kvpi_long_avx512(a, b, n);
}
KVPRIM_PREFIX_I64(kvprim_prefix_i64_avx512, kvprim_prefix_i32_avx512)

/* Kept out of the loop below, which would otherwise keep less in registers. */
KVPRIM_AVX512 __attribute__((noinline)) static size_t kvpi_many_rest_avx512(const int32_t *query, const int32_t *key,
                                                                            size_t n)
{
    return kvprim_prefix_i32_avx512(query, n, key, n);
}

/* The query's first 16 tokens stay in a register; only keys that share them all are compared further. */
KVPRIM_AVX512 static size_t kvpi_many_avx512(const int32_t *query, size_t query_len, const int32_t *const *keys,
                                             const size_t *key_lens, size_t keys_count, size_t *out_len)
{
    int32_t start[16] = {0};
    memcpy(start, query, 4 * kvpi_min(query_len, 16));
    const __m512i head = _mm512_loadu_si512(start);
    size_t best = 0, best_len = 0;
    for (size_t i = 0; i < keys_count; i++) {
        const size_t n = kvpi_min(query_len, key_lens[i]), n16 = kvpi_min(n, 16);
        const __mmask16 lanes = (__mmask16)_bzhi_u32(0xffff, (uint32_t)n16);
        const int near_end = kvpi_near_page_end_or_null(keys[i], 64); /* NULL is a key of length 0 */
        size_t len = n;
        if (KVPRIM_LIKELY(!near_end)) {
            const __m512i key = _mm512_maskz_loadu_epi32(lanes, keys[i]);
            const uint32_t diff = _mm512_mask_cmpneq_epi32_mask(lanes, head, key);
            len = (size_t)_tzcnt_u32(diff | 1u << n16);
        }
        if (!KVPRIM_LIKELY(len < 16 && !near_end))
            len = kvpi_many_rest_avx512(query, keys[i], n);
        if (out_len)
            out_len[i] = len;
        best = len > best_len ? i : best;
        best_len = len > best_len ? len : best_len;
    }
    return best;
}
#endif /* KVPRIM_X86 */

/* ---- prefix: AArch64 ---- */
#ifdef KVPRIM_NEON
/* Token i in byte i: 0xff where equal. */
static inline uint8x8_t kvpi_equal8_neon(const int32_t *a, const int32_t *b)
{
    const uint16x4_t low = vmovn_u32(vceqq_s32(vld1q_s32(a), vld1q_s32(b)));
    const uint16x4_t high = vmovn_u32(vceqq_s32(vld1q_s32(a + 4), vld1q_s32(b + 4)));
    return vmovn_u16(vcombine_u16(low, high));
}

/* Equal leading tokens of 8 or 16. */
static inline size_t kvpi_first8_neon(const int32_t *a, const int32_t *b)
{
    const uint64_t diff = ~vget_lane_u64(vreinterpret_u64_u8(kvpi_equal8_neon(a, b)), 0);
    return diff ? (size_t)__builtin_ctzll(diff) / 8 : 8;
}

static inline size_t kvpi_first16_neon(const int32_t *a, const int32_t *b)
{
    const uint8x16_t equal = vcombine_u8(kvpi_equal8_neon(a, b), kvpi_equal8_neon(a + 8, b + 8));
    const uint64_t diff = ~vget_lane_u64(vreinterpret_u64_u8(vshrn_n_u16(vreinterpretq_u16_u8(equal), 4)), 0);
    return diff ? (size_t)__builtin_ctzll(diff) / 4 : 16;
}

static inline int kvpi_same16_neon(const int32_t *a, const int32_t *b)
{
    const uint32x4_t low =
        vandq_u32(vceqq_s32(vld1q_s32(a), vld1q_s32(b)), vceqq_s32(vld1q_s32(a + 4), vld1q_s32(b + 4)));
    const uint32x4_t high =
        vandq_u32(vceqq_s32(vld1q_s32(a + 8), vld1q_s32(b + 8)), vceqq_s32(vld1q_s32(a + 12), vld1q_s32(b + 12)));
    return vminvq_u32(vandq_u32(low, high)) == UINT32_MAX;
}

KVPRIM_API size_t kvprim_prefix_i32_neon(const int32_t *a, size_t a_len, const int32_t *b, size_t b_len)
{
    const size_t n = kvpi_min(a_len, b_len);
    size_t i = 0;
    if (n < 8)
        return kvprim_prefix_i32_scalar(a, n, b, n);
    if (n < 16) {
        const size_t first = kvpi_first8_neon(a, b);
        return first < 8 ? first : n - 8 + kvpi_first8_neon(a + n - 8, b + n - 8);
    }
    for (; i + 16 <= n; i += 16)
        if (!kvpi_same16_neon(a + i, b + i))
            return i + kvpi_first16_neon(a + i, b + i);
    return i == n ? n : n - 16 + kvpi_first16_neon(a + n - 16, b + n - 16);
}
KVPRIM_PREFIX_I64(kvprim_prefix_i64_neon, kvprim_prefix_i32_neon)
#endif /* KVPRIM_NEON */

/* ---- prefix: dispatch ---- */

/* A NULL array: an error if it has a length, and never a match. */
static size_t kvpi_prefix_null(const char *function, const void *a, size_t a_len, const void *b, size_t b_len)
{
    if (!a && a_len)
        (void)kvprim_fail(KVPRIM_ERROR_NULL, "%s: a is NULL and a_len is %llu", function, (unsigned long long)a_len);
    else if (!b && b_len)
        (void)kvprim_fail(KVPRIM_ERROR_NULL, "%s: b is NULL and b_len is %llu", function, (unsigned long long)b_len);
    return 0;
}

#ifdef KVPRIM_X86
static kvpi_prefix_fn *kvpi_prefix_pick(void)
{
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2"))
        return kvprim_prefix_i32_avx512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi"))
        return kvprim_prefix_i32_avx2;
    return kvprim_prefix_i32_scalar;
}

/* The pointer starts at a function that replaces it: threads that race there all write the same values. */
static size_t kvpi_prefix_resolve(const int32_t *a, size_t a_len, const int32_t *b, size_t b_len);
static kvpi_prefix_fn *kvpi_prefix = kvpi_prefix_resolve;
static size_t kvpi_inline_end; /* fewer tokens than this take the inlined AVX-512 path: 17, or 0 where there is none */

static kvpi_prefix_fn *kvpi_prefix_resolved(void)
{
    if (__atomic_load_n(&kvpi_prefix, __ATOMIC_RELAXED) == kvpi_prefix_resolve) {
        kvpi_prefix_fn *const pick = kvpi_prefix_pick();
        __atomic_store_n(&kvpi_inline_end, pick == kvprim_prefix_i32_avx512 ? 17 : 0, __ATOMIC_RELAXED);
        __atomic_store_n(&kvpi_prefix, pick, __ATOMIC_RELAXED);
    }
    return __atomic_load_n(&kvpi_prefix, __ATOMIC_RELAXED);
}

static size_t kvpi_prefix_resolve(const int32_t *a, size_t a_len, const int32_t *b, size_t b_len)
{
    return kvpi_prefix_resolved()(a, a_len, b, b_len);
}

/* The same choice, for what is not a prefix compare. */
static int kvpi_has_avx512(void)
{
    return kvpi_prefix_resolved() == kvprim_prefix_i32_avx512;
}

static int kvpi_has_avx2(void)
{
    return kvpi_prefix_resolved() != kvprim_prefix_i32_scalar;
}

/* The kvpi_inline_ functions are assembly because a function compiled for AVX-512 is never inlined into one that must
   also run without it, and a jump there and its vzeroupper would cost a third of a short compare. zmm16 and up need no
   vzeroupper: nothing older shares them. A compiler that was not told of AVX-512 refuses the names of these registers,
   so the functions they end up in must be real calls for every caller: KVPRIM_HOT, and the calling convention. */
#ifdef __AVX512F__
#define KVPRIM_CLOBBERS "cc", "memory", "k1", "k2", "xmm16", "xmm17"
#else
#define KVPRIM_CLOBBERS "cc", "memory"
#endif

/* Equal leading tokens of n <= 16; neither array near its page's end. */
static inline size_t kvpi_inline16(const int32_t *a, const int32_t *b, size_t n)
{
    size_t first, lanes = (size_t)-1;
    __asm__("bzhi %3, %1, %1\n\t"
            "kmovd %k1, %%k1\n\t"
            "vmovdqu32 (%2), %%zmm16%{%%k1%}%{z%}\n\t"
            "vpcmpneqd (%4), %%zmm16, %%k1%{%%k1%}\n\t"
            "kmovd %%k1, %k0\n\t"
            "bts %k3, %k0\n\t"
            "tzcnt %k0, %k0"
            : "=&a"(first), "+&r"(lanes)
            : "r"(a), "r"(n), "r"(b)
            : KVPRIM_CLOBBERS);
    return first;
}

/* The same for n <= 32, at twice the loads: for int64. */
static inline size_t kvpi_inline32(const int32_t *a, const int32_t *b, size_t n)
{
    size_t first, lanes = (size_t)-1;
    __asm__("bzhi %3, %1, %1\n\t"
            "kmovd %k1, %%k1\n\t"
            "kshiftrd $16, %%k1, %%k2\n\t"
            "vmovdqu32 (%2), %%zmm16%{%%k1%}%{z%}\n\t"
            "vmovdqu32 64(%2), %%zmm17%{%%k2%}%{z%}\n\t"
            "vpcmpneqd (%4), %%zmm16, %%k1%{%%k1%}\n\t"
            "vpcmpneqd 64(%4), %%zmm17, %%k2%{%%k2%}\n\t"
            "kunpckwd %%k1, %%k2, %%k1\n\t"
            "kmovd %%k1, %k0\n\t"
            "bts %3, %0\n\t"
            "tzcnt %0, %0"
            : "=&a"(first), "+&r"(lanes)
            : "r"(a), "r"(n), "r"(b)
            : KVPRIM_CLOBBERS);
    return first;
}

/* As kvpi_diff16_avx512 and kvpi_diff32_avx512. */
static inline uint64_t kvpi_inline_diff16(const int32_t *a, const int32_t *b)
{
    uint64_t diff;
    __asm__("vmovdqu32 (%1), %%zmm16\n\t"
            "vpcmpneqd (%2), %%zmm16, %%k1\n\t"
            "kmovd %%k1, %k0"
            : "=r"(diff)
            : "r"(a), "r"(b)
            : KVPRIM_CLOBBERS);
    return diff;
}

static inline uint64_t kvpi_inline_diff32(const int32_t *a, const int32_t *b)
{
    uint64_t diff;
    __asm__("vmovdqu32 (%1), %%zmm16\n\t"
            "vmovdqu32 64(%1), %%zmm17\n\t"
            "vpcmpneqd (%2), %%zmm16, %%k1\n\t"
            "vpcmpneqd 64(%2), %%zmm17, %%k2\n\t"
            "kunpckwd %%k1, %%k2, %%k1\n\t"
            "kmovd %%k1, %k0"
            : "=r"(diff)
            : "r"(a), "r"(b)
            : KVPRIM_CLOBBERS);
    return diff;
}

/* The lowest bit set in low | high << shift, or n if there is none. */
static inline size_t kvpi_inline_first(uint64_t low, uint64_t high, size_t shift, size_t n)
{
    size_t first;
    __asm__("shlx %2, %1, %0\n\t"
            "or %3, %0\n\t"
            "tzcnt %0, %0\n\t"
            "cmovc %4, %0"
            : "=&r"(first)
            : "r"(high), "r"(shift), "r"(low), "r"(n)
            : "cc");
    return first;
}

/* Neither pointer is NULL: one branch for two, as no address of a program on x86-64 has the top bit set. */
static inline int kvpi_both_set(const void *a, const void *b)
{
    return (intptr_t)(((uintptr_t)a - 1) | ((uintptr_t)b - 1)) >= 0;
}

/* The plain names are these few lines: inlined, as what they cost is measured in cycles. `words` int32 are a token. */
KVPRIM_INLINE size_t kvpi_prefix_inline(const char *function, const int32_t *a, size_t a_len, const int32_t *b,
                                        size_t b_len, size_t words)
{
    const size_t tokens = kvpi_min(a_len, b_len), n = words * tokens;
#ifdef KVPRIM_SANITIZED /* which sees neither assembly nor masked loads: show it both ends */
    if (n && a && b) {
        (void)*(const volatile int32_t *)(a + n - 1);
        (void)*(const volatile int32_t *)(b + n - 1);
    }
#endif
    const size_t inline_end = __atomic_load_n(&kvpi_inline_end, __ATOMIC_RELAXED);
    if (KVPRIM_LIKELY(tokens < inline_end))
        if (KVPRIM_LIKELY(!kvpi_near_page_end_or_null(a, 64 * words)) &&
            KVPRIM_LIKELY(!kvpi_near_page_end_or_null(b, 64 * words)))
            return words == 1 ? kvpi_inline16(a, b, n) : kvpi_inline32(a, b, n);
    if (!KVPRIM_LIKELY(kvpi_both_set(a, b)))
        return kvpi_prefix_null(function, a, a_len, b, b_len);
    if (!KVPRIM_LIKELY(inline_end))
        return __atomic_load_n(&kvpi_prefix, __ATOMIC_RELAXED)(a, n, b, n);
    if (KVPRIM_LIKELY(n <= 64)) {
        if (KVPRIM_LIKELY(n > 32))
            return kvpi_inline_first(kvpi_inline_diff32(a, b), kvpi_inline_diff32(a + n - 32, b + n - 32), n - 32, n);
        if (KVPRIM_LIKELY(n > 16))
            return kvpi_inline_first(kvpi_inline_diff16(a, b), kvpi_inline_diff16(a + n - 16, b + n - 16), n - 16, n);
    }
    return kvpi_long_avx512(a, b, n);
}
#if defined(__clang__) || __GNUC__ < 8
#define KVPRIM_HOT __attribute__((aligned(64), noinline))
#else
#define KVPRIM_HOT __attribute__((aligned(64), noipa))
#endif

#else /* one variant: nothing to pick */
#ifdef KVPRIM_NEON
#define KVPRIM_PREFIX_ONLY kvprim_prefix_i32_neon
#else
#define KVPRIM_PREFIX_ONLY kvprim_prefix_i32_scalar
#endif
KVPRIM_INLINE size_t kvpi_prefix_inline(const char *function, const int32_t *a, size_t a_len, const int32_t *b,
                                        size_t b_len, size_t words)
{
    const size_t n = words * kvpi_min(a_len, b_len);
    return a && b ? KVPRIM_PREFIX_ONLY(a, n, b, n) : kvpi_prefix_null(function, a, a_len, b, b_len);
}
#define KVPRIM_HOT
#endif

KVPRIM_API KVPRIM_HOT size_t kvprim_prefix_i32(const int32_t *a, size_t a_len, const int32_t *b, size_t b_len)
{
    KVPRIM_RANGE("kvprim_prefix_i32");
    return kvpi_prefix_inline("kvprim_prefix_i32", a, a_len, b, b_len, 1);
}

KVPRIM_API KVPRIM_HOT size_t kvprim_prefix_i64(const int64_t *a, size_t a_len, const int64_t *b, size_t b_len)
{
    KVPRIM_RANGE("kvprim_prefix_i64");
    return kvpi_prefix_inline("kvprim_prefix_i64", (const int32_t *)(const void *)a, a_len,
                              (const int32_t *)(const void *)b, b_len, 2) /
           2;
}

KVPRIM_API size_t kvprim_prefix_pages(size_t matched, size_t page_rows)
{
    return page_rows ? matched - matched % page_rows : matched;
}

/* Every pointer that a length says something of is set, or the error is. */
static int kvpi_many_check(const int32_t *query, size_t query_len, const int32_t *const *keys, const size_t *key_lens,
                           size_t keys_count)
{
    const char *const null = !query && query_len ? "query" : !keys ? "keys" : !key_lens ? "key_lens" : NULL;
    if (null) {
        (void)kvprim_fail(KVPRIM_ERROR_NULL,
                          "kvprim_prefix_many_i32: %s is NULL, query_len is %llu, keys_count is %llu", null,
                          (unsigned long long)query_len, (unsigned long long)keys_count);
        return 0;
    }
    for (size_t i = 0; i < keys_count; i++)
        if (!keys[i] && key_lens[i]) {
            (void)kvprim_fail(KVPRIM_ERROR_NULL, "kvprim_prefix_many_i32: keys[%llu] is NULL and its length is %llu",
                              (unsigned long long)i, (unsigned long long)key_lens[i]);
            return 0;
        }
    return 1;
}

KVPRIM_API size_t kvprim_prefix_many_i32(const int32_t *query, size_t query_len, const int32_t *const *keys,
                                         const size_t *key_lens, size_t keys_count, size_t *out_len)
{
    KVPRIM_RANGE("kvprim_prefix_many_i32");
    static const int32_t none[1] = {0};
    if (keys_count == 0 || !kvpi_many_check(query, query_len, keys, key_lens, keys_count))
        return 0;
    if (!query)
        query = none; /* of length 0 */
#ifdef KVPRIM_X86
    if (kvpi_has_avx512())
        return kvpi_many_avx512(query, query_len, keys, key_lens, keys_count, out_len);
#endif
    return kvpi_many_each(query, query_len, keys, key_lens, keys_count, out_len);
}

KVPRIM_API const char *kvprim_isa(void)
{
#ifdef KVPRIM_X86
    return kvpi_has_avx512() ? "avx512" : kvpi_has_avx2() ? "avx2" : "scalar";
#elif defined(KVPRIM_NEON)
    return "neon";
#else
    return "scalar";
#endif
}

/* ---- tables: defaults and checks ---- */

/* Leaves the function with the status unless it is KVPRIM_OK. */
#define KVPRIM_TRY(call)                                                                                               \
    do {                                                                                                               \
        const kvprim_status try_status = (call);                                                                       \
        if (try_status != KVPRIM_OK)                                                                                   \
            return try_status;                                                                                         \
    } while (0)

/* Bytes of a table: what pointers can span, with room for one addition. 2^62 where they have 64 bits. */
static const uint64_t kvpi_too_large = (uint64_t)PTRDIFF_MAX / 2 + 1;

/* Products and sums of sizes that stay at kvpi_too_large instead of wrapping. Mostly both sizes have half its bits:
   a division is much of what a check costs. */
static uint64_t kvpi_mul(uint64_t a, uint64_t b)
{
    if ((a | b) >> (4 * sizeof(void *) - 1) == 0)
        return a * b;
    return a && b > kvpi_too_large / a ? kvpi_too_large : a * b;
}

static uint64_t kvpi_add(uint64_t a, uint64_t b)
{
    return a > kvpi_too_large - b ? kvpi_too_large : a + b;
}

static void kvpi_resolve(kvprim_table *t, int64_t row_bytes)
{
    if (t->heads < 1)
        t->heads = 1;
    if (t->stride == 0)
        t->stride = t->heads == 1 ? row_bytes : row_bytes / t->heads;
    if (t->heads == 1 && t->page_rows == 0)
        return;
    const uint64_t page = kvpi_mul((uint64_t)(t->page_rows ? t->page_rows : t->rows), (uint64_t)t->stride);
    if (t->head_stride == 0 && t->heads > 1)
        t->head_stride = (int64_t)page;
    if (t->page_stride == 0 && t->page_rows > 0) { /* whichever is outside: all heads of a row, or all rows of a head */
        const uint64_t pieces = t->heads > 1 ? kvpi_mul((uint64_t)t->heads, (uint64_t)t->head_stride) : 0;
        t->page_stride = (int64_t)(pieces > page ? pieces : page);
    }
}

KVPRIM_API kvprim_table kvprim_table_resolve(kvprim_table t, int64_t row_bytes)
{
    kvpi_resolve(&t, row_bytes);
    return t;
}

KVPRIM_API void *kvprim_table_row(const kvprim_table *resolved, int64_t row)
{
    const kvprim_table *const t = resolved;
    if (t->page_rows > 0)
        return (char *)t->data + row / t->page_rows * t->page_stride + row % t->page_rows * t->stride;
    return (char *)t->data + row * t->stride;
}

/* One side of a move while it is checked, and what an error calls it: "kvprim_store: k_cache.stride ...". */
typedef struct kvpi_side {
    const char *function, *name;
    kvprim_table *table;
    const char *row_bytes_field;
    int64_t row_bytes, used; /* used: rows that can be touched */
    int32_t layers;
    int64_t layer_stride;
    uint64_t bytes; /* result: from the first byte of row 0 to the last that can be touched, in one layer */
} kvpi_side;

static kvprim_status kvpi_bad(const kvpi_side *side, const char *field, int64_t value, const char *why, uint64_t other)
{
    const char *const joint = strcmp(field, "layer_stride") == 0 ? "_" : "."; /* src_layer_stride is no field of src */
    return kvprim_fail(KVPRIM_ERROR_SIZE, "%s: %s%s%s is %lld, %s %llu", side->function, side->name, joint, field,
                       (long long)value, why, (unsigned long long)other);
}

/* The fields on their own, before the defaults. */
static kvprim_status kvpi_check_fields(const kvpi_side *side)
{
    const kvprim_table *const t = side->table;
    const int64_t row_bytes = side->row_bytes, heads = t->heads > 1 ? t->heads : 1;
    const int64_t piece = heads == 1 ? row_bytes : row_bytes / heads;
    if (row_bytes < 1)
        return kvprim_fail(KVPRIM_ERROR_SIZE, "%s: %s is %lld, less than 1", side->function, side->row_bytes_field,
                           (long long)row_bytes);
    if (t->rows < 0)
        return kvpi_bad(side, "rows", t->rows, "less than", 0);
    if (t->rows < side->used)
        return kvpi_bad(side, "rows", t->rows, "less than count, which is", (uint64_t)side->used);
    if (t->page_rows < 0)
        return kvpi_bad(side, "page_rows", t->page_rows, "less than", 0);
    if (t->heads < 0)
        return kvpi_bad(side, "heads", t->heads, "less than", 0);
    if (piece * heads != row_bytes)
        return kvpi_bad(side, "heads", t->heads, "which does not divide the bytes of a row,", (uint64_t)row_bytes);
    if (t->stride && t->stride < piece)
        return kvpi_bad(side, "stride", t->stride,
                        heads > 1 ? "less than the bytes of one head," : "less than a row's bytes,", (uint64_t)piece);
    if (t->page_stride < 0 || (t->page_rows && t->page_stride && t->page_stride < piece))
        return kvpi_bad(side, "page_stride", t->page_stride, "less than a row's bytes,", (uint64_t)piece);
    if (t->head_stride < 0 || (heads > 1 && t->head_stride && t->head_stride < piece))
        return kvpi_bad(side, "head_stride", t->head_stride, "less than the bytes of one head,", (uint64_t)piece);
    if (side->layer_stride < 0)
        return kvpi_bad(side, "layer_stride", side->layer_stride, "less than", 0);
    return KVPRIM_OK;
}

/* One loop over a table's memory: n steps of `stride` bytes. */
typedef struct kvpi_dim {
    const char *field;
    uint64_t stride, n;
} kvpi_dim;

/* The bytes that `piece` bytes at every combination of steps span. From the smallest stride up, each step must clear
   all that lies inside it: rows that overlap each other are an error. */
static kvprim_status kvpi_span(const kvpi_side *side, kvpi_dim *dims, int count, uint64_t piece, uint64_t *span)
{
    *span = piece;
    for (int k = 0; k < count; k++) {
        int least = k;
        for (int i = k + 1; i < count; i++)
            if (dims[i].stride < dims[least].stride)
                least = i;
        const kvpi_dim dim = dims[least];
        dims[least] = dims[k];
        if (dim.n > 1 && dim.stride < *span)
            return kvpi_bad(side, dim.field, (int64_t)dim.stride, "but what lies inside that step takes bytes:", *span);
        if (dim.n > 1)
            *span = kvpi_add(*span, kvpi_mul(dim.n - 1, dim.stride));
    }
    return KVPRIM_OK;
}

/* Where the last byte of the rows in use ends. A whole page may reach further than a last one in part behind it. */
static uint64_t kvpi_reach(const kvpi_side *side)
{
    const kvprim_table *const t = side->table;
    const uint64_t used = (uint64_t)side->used, page_rows = (uint64_t)t->page_rows, stride = (uint64_t)t->stride;
    if (used == 0)
        return 0;
    uint64_t last = kvpi_mul(used - 1, stride);
    if (page_rows) {
        const uint64_t page = (used - 1) / page_rows, in_last = kvpi_mul((used - 1) % page_rows, stride);
        last = kvpi_add(kvpi_mul(page, (uint64_t)t->page_stride), in_last);
        if (page > 0) {
            const uint64_t before = kvpi_mul(page - 1, (uint64_t)t->page_stride);
            const uint64_t whole = kvpi_add(before, kvpi_mul(page_rows - 1, stride));
            last = whole > last ? whole : last;
        }
    }
    last = kvpi_add(last, kvpi_mul((uint64_t)t->heads - 1, (uint64_t)t->head_stride));
    return kvpi_add(last, (uint64_t)(side->row_bytes / t->heads));
}

/* Layers one after the other: the outermost of a table's loops, padding included. */
static uint64_t kvpi_packed_layer(const kvpi_dim *dims, int count)
{
    uint64_t most = 0;
    for (int k = 0; k < count; k++) {
        const uint64_t bytes = dims[k].stride == 0 ? 0 : kvpi_mul(dims[k].n, dims[k].stride);
        most = bytes > most ? bytes : most;
    }
    return most;
}

/* Of a table of pages, heads or layers: that no two pieces overlap, that it is not too large, and side->bytes. */
static kvprim_status kvpi_check_dims(kvpi_side *side)
{
    const kvprim_table *const t = side->table;
    const uint64_t rows = (uint64_t)t->rows, page_rows = t->page_rows ? (uint64_t)t->page_rows : rows;
    kvpi_dim dims[4] = {{"stride", (uint64_t)t->stride, page_rows < rows ? page_rows : rows},
                        {"head_stride", t->heads > 1 ? (uint64_t)t->head_stride : 0, (uint64_t)t->heads},
                        {"page_stride", t->page_rows ? (uint64_t)t->page_stride : 0, (rows - 1) / page_rows + 1},
                        {"layer_stride", (uint64_t)side->layer_stride, (uint64_t)side->layers}};
    if (side->layer_stride == 0)
        side->layer_stride = (int64_t)(dims[3].stride = kvpi_packed_layer(dims, 3));
    uint64_t span;
    KVPRIM_TRY(kvpi_span(side, dims, 4, (uint64_t)(side->row_bytes / t->heads), &span));
    if (span >= kvpi_too_large)
        return kvpi_bad(side, "rows", t->rows, "which makes the table larger than", kvpi_too_large);
    side->bytes = kvpi_reach(side);
    return KVPRIM_OK;
}

/* The same for rows one after the other, in less time: the check is most of what a call costs the host. */
static kvprim_status kvpi_check_plain(kvpi_side *side)
{
    const uint64_t stride = (uint64_t)side->table->stride, row_bytes = (uint64_t)side->row_bytes;
    const uint64_t rows = (uint64_t)side->table->rows, used = (uint64_t)side->used;
    if (kvpi_add(kvpi_mul(rows - 1, stride), row_bytes) >= kvpi_too_large)
        return kvpi_bad(side, "rows", side->table->rows, "which makes the table larger than", kvpi_too_large);
    side->bytes = used ? (used - 1) * stride + row_bytes : 0;
    if (side->layer_stride == 0)
        side->layer_stride = (int64_t)kvpi_mul(rows, stride);
    return KVPRIM_OK;
}

/* Checks the side, fills in its table's defaults and its bytes. */
static kvprim_status kvpi_check_side(kvpi_side *side)
{
    KVPRIM_TRY(kvpi_check_fields(side));
    kvprim_table *const t = side->table;
    kvpi_resolve(t, side->row_bytes);
    if (t->rows == 0) {
        side->layer_stride = 0; /* nothing of it is ever touched */
        return KVPRIM_OK;
    }
    if (t->page_rows == 0 && t->heads == 1 && side->layers == 1)
        KVPRIM_TRY(kvpi_check_plain(side));
    else
        KVPRIM_TRY(kvpi_check_dims(side));
    if (side->used > 0 && !t->data)
        return kvprim_fail(KVPRIM_ERROR_NULL, "%s: %s.data is NULL", side->function, side->name);
    return KVPRIM_OK;
}

static int kvpi_overlap(const void *a, uint64_t a_bytes, const void *b, uint64_t b_bytes)
{
    const uint64_t x = (uint64_t)(uintptr_t)a, y = (uint64_t)(uintptr_t)b;
    return x <= y ? y - x < a_bytes && b_bytes : x - y < b_bytes && a_bytes;
}

static kvprim_status kvpi_check_apart(const kvpi_side *a, const kvpi_side *b)
{
    if (!kvpi_overlap(a->table->data, a->bytes, b->table->data, b->bytes))
        return KVPRIM_OK;
    return kvprim_fail(KVPRIM_ERROR_OVERLAP, "%s: %s (%p, %llu bytes) overlaps %s (%p, %llu bytes)", a->function,
                       a->name, a->table->data, (unsigned long long)a->bytes, b->name, b->table->data,
                       (unsigned long long)b->bytes);
}

static kvprim_status kvpi_check_index(const char *function, const char *field, const void *index,
                                      kvprim_index_type type)
{
    if (!index)
        return kvprim_fail(KVPRIM_ERROR_NULL, "%s: %s is NULL", function, field);
    if (type != KVPRIM_I32 && type != KVPRIM_I64)
        return kvprim_fail(KVPRIM_ERROR_ARGUMENT, "%s: %s_type is %d, neither KVPRIM_I32 nor KVPRIM_I64", function,
                           field, (int)type);
    if ((uintptr_t)index % (type == KVPRIM_I64 ? 8 : 4) != 0)
        return kvprim_fail(KVPRIM_ERROR_ARGUMENT, "%s: %s (%p) is not aligned to its type", function, field, index);
    return KVPRIM_OK;
}

/* The indices do not lie in what is written. */
static kvprim_status kvpi_check_index_apart(const kvpi_side *dst, const char *field, const void *index,
                                            kvprim_index_type type, int64_t count)
{
    const uint64_t bytes = kvpi_mul((uint64_t)count, type == KVPRIM_I64 ? 8 : 4);
    if (!index || !kvpi_overlap(dst->table->data, dst->bytes, index, bytes))
        return KVPRIM_OK;
    return kvprim_fail(KVPRIM_ERROR_OVERLAP, "%s: %s (%p, %llu bytes) overlaps %s (%p, %llu bytes)", dst->function,
                       field, index, (unsigned long long)bytes, dst->name, dst->table->data,
                       (unsigned long long)dst->bytes);
}

static kvprim_status kvpi_check_count(const char *function, int64_t count)
{
    if (count < 0)
        return kvprim_fail(KVPRIM_ERROR_SIZE, "%s: count is %lld, less than 0", function, (long long)count);
    return KVPRIM_OK;
}

static kvprim_status kvpi_check_desc(const char *function, const void *desc)
{
    return desc ? KVPRIM_OK : kvprim_fail(KVPRIM_ERROR_NULL, "%s: desc is NULL", function);
}

KVPRIM_API kvprim_status kvprim_gather_check(const kvprim_gather_desc *desc, kvprim_gather_desc *resolved)
{
    static const char function[] = "kvprim_gather";
    KVPRIM_TRY(kvpi_check_desc(function, desc));
    KVPRIM_TRY(kvpi_check_count(function, desc->count));
    kvprim_gather_desc d = *desc;
    if (d.count > 0) {
        kvpi_side dst = {function, "dst", &d.dst, "row_bytes", d.row_bytes, d.count, 1, 0, 0};
        kvpi_side src = {function, "src", &d.src, "row_bytes", d.row_bytes, d.src.rows, 1, 0, 0};
        KVPRIM_TRY(kvpi_check_index(function, "index", d.index, d.index_type));
        KVPRIM_TRY(kvpi_check_side(&dst));
        KVPRIM_TRY(kvpi_check_side(&src));
        KVPRIM_TRY(kvpi_check_apart(&dst, &src));
        KVPRIM_TRY(kvpi_check_index_apart(&dst, "index", d.index, d.index_type, d.count));
    }
    if (resolved)
        *resolved = d;
    return KVPRIM_OK;
}

/* K, or V: cache and input. */
static kvprim_status kvpi_check_store_pair(kvpi_side *cache, kvpi_side *input)
{
    KVPRIM_TRY(kvpi_check_side(cache));
    KVPRIM_TRY(kvpi_check_side(input));
    return kvpi_check_apart(cache, input);
}

KVPRIM_API kvprim_status kvprim_store_check(const kvprim_store_desc *desc, kvprim_store_desc *resolved)
{
    static const char function[] = "kvprim_store";
    KVPRIM_TRY(kvpi_check_desc(function, desc));
    KVPRIM_TRY(kvpi_check_count(function, desc->count));
    kvprim_store_desc d = *desc;
    if (d.count > 0) {
        kvpi_side k_cache = {function, "k_cache", &d.k_cache, "k_bytes", d.k_bytes, d.k_cache.rows, 1, 0, 0};
        kvpi_side v_cache = {function, "v_cache", &d.v_cache, "v_bytes", d.v_bytes, d.v_cache.rows, 1, 0, 0};
        kvpi_side k = {function, "k", &d.k, "k_bytes", d.k_bytes, d.count, 1, 0, 0};
        kvpi_side v = {function, "v", &d.v, "v_bytes", d.v_bytes, d.count, 1, 0, 0};
        KVPRIM_TRY(kvpi_check_index(function, "slot", d.slot, d.slot_type));
        KVPRIM_TRY(kvpi_check_store_pair(&k_cache, &k));
        KVPRIM_TRY(kvpi_check_index_apart(&k_cache, "slot", d.slot, d.slot_type, d.count));
        if (d.v_cache.data) {
            KVPRIM_TRY(kvpi_check_store_pair(&v_cache, &v));
            KVPRIM_TRY(kvpi_check_index_apart(&v_cache, "slot", d.slot, d.slot_type, d.count));
            KVPRIM_TRY(kvpi_check_apart(&k_cache, &v));
            KVPRIM_TRY(kvpi_check_apart(&v_cache, &k));
            if (d.v_cache.rows != d.k_cache.rows)
                return kvpi_bad(&v_cache, "rows", d.v_cache.rows, "but k_cache.rows is", (uint64_t)d.k_cache.rows);
            /* The caches may interleave, but not row 0 of both. */
            k_cache.bytes = (uint64_t)(d.k_bytes / d.k_cache.heads);
            v_cache.bytes = (uint64_t)(d.v_bytes / d.v_cache.heads);
            if (d.k_cache.rows > 0)
                KVPRIM_TRY(kvpi_check_apart(&v_cache, &k_cache));
        }
    }
    if (resolved)
        *resolved = d;
    return KVPRIM_OK;
}

/* Layer l's memory on one side of a transfer. */
static char *kvpi_layer(void *data, void *const *layers, int64_t layer_stride, int32_t l)
{
    if (layers)
        return (char *)layers[l];
    return data ? (char *)data + l * layer_stride : NULL; /* NULL: an empty table */
}

static char *kvpi_side_layer(const kvpi_side *side, void *const *layers, int32_t l)
{
    return kvpi_layer(side->table->data, layers, side->layer_stride, l);
}

/* From the lowest byte of a side's layers to the highest. */
static uint64_t kvpi_all_layers(const kvpi_side *side, void *const *layers, char **first)
{
    char *last = *first = kvpi_side_layer(side, layers, 0);
    for (int32_t l = 1; l < side->layers; l++) {
        char *const data = kvpi_side_layer(side, layers, l);
        *first = data < *first ? data : *first;
        last = data > last ? data : last;
    }
    return (uint64_t)((uintptr_t)last - (uintptr_t)*first) + side->bytes;
}

/* No layer of one side overlaps a layer of the other. Each with each only where the layers of both interleave. */
static kvprim_status kvpi_check_layers_apart(const kvprim_transfer_desc *d, const kvpi_side *dst, const kvpi_side *src)
{
    char *dst_first, *src_first;
    const uint64_t dst_bytes = kvpi_all_layers(dst, d->dst_layers, &dst_first);
    const uint64_t src_bytes = kvpi_all_layers(src, d->src_layers, &src_first);
    if (!kvpi_overlap(dst_first, dst_bytes, src_first, src_bytes))
        return KVPRIM_OK;
    for (int32_t i = 0; i < d->layers; i++)
        for (int32_t j = 0; j < d->layers; j++) {
            const char *const to = kvpi_side_layer(dst, d->dst_layers, i), *const from =
                                                                               kvpi_side_layer(src, d->src_layers, j);
            if (kvpi_overlap(to, dst->bytes, from, src->bytes))
                return kvprim_fail(KVPRIM_ERROR_OVERLAP,
                                   "%s: dst layer %d (%p, %llu bytes) overlaps src layer %d (%p, %llu bytes)",
                                   dst->function, (int)i, (const void *)to, (unsigned long long)dst->bytes, (int)j,
                                   (const void *)from, (unsigned long long)src->bytes);
        }
    return KVPRIM_OK;
}

/* One cache on both sides: the same layers, and rows that lie in them in the same way. */
static kvprim_status kvpi_check_same_cache(const kvprim_transfer_desc *d, const kvpi_side *dst, const kvpi_side *src)
{
    const kvprim_table *const to = dst->table, *const from = src->table;
    const struct {
        const char *field;
        int64_t dst, src;
    } same[] = {{"stride", to->stride, from->stride},
                {"page_rows", to->page_rows, from->page_rows},
                {"page_stride", to->page_rows ? to->page_stride : 0, from->page_rows ? from->page_stride : 0},
                {"heads", to->heads, from->heads},
                {"head_stride", to->heads > 1 ? to->head_stride : 0, from->heads > 1 ? from->head_stride : 0}};
    for (size_t k = 0; k < sizeof same / sizeof *same; k++)
        if (same[k].dst != same[k].src)
            return kvprim_fail(KVPRIM_ERROR_ARGUMENT, "%s: same_cache is 1, but dst.%s is %lld and src.%s %lld",
                               dst->function, same[k].field, (long long)same[k].dst, same[k].field,
                               (long long)same[k].src);
    for (int32_t l = 0; l < d->layers; l++) {
        const char *const dst_layer = kvpi_side_layer(dst, d->dst_layers, l);
        const char *const src_layer = kvpi_side_layer(src, d->src_layers, l);
        if (dst_layer != src_layer)
            return kvprim_fail(KVPRIM_ERROR_ARGUMENT, "%s: same_cache is 1, but layer %d is at %p in dst, at %p in src",
                               dst->function, (int)l, (const void *)dst_layer, (const void *)src_layer);
    }
    return KVPRIM_OK;
}

/* One side of a transfer; with an array of layers each of them is a table of its own. */
static kvprim_status kvpi_check_transfer_side(kvpi_side *side, void *const *layers)
{
    const int32_t count = side->layers;
    if (!layers)
        return kvpi_check_side(side);
    for (int32_t l = 0; l < count; l++)
        if (!layers[l] && side->used > 0)
            return kvprim_fail(KVPRIM_ERROR_NULL, "%s: %s_layers[%d] is NULL", side->function, side->name, (int)l);
    side->table->data = layers[0];
    side->layers = 1;
    side->layer_stride = 0; /* not looked at */
    KVPRIM_TRY(kvpi_check_side(side));
    side->layers = count;
    return KVPRIM_OK;
}

KVPRIM_API kvprim_status kvprim_transfer_check(const kvprim_transfer_desc *desc, kvprim_transfer_desc *resolved)
{
    static const char function[] = "kvprim_transfer";
    KVPRIM_TRY(kvpi_check_desc(function, desc));
    KVPRIM_TRY(kvpi_check_count(function, desc->count));
    kvprim_transfer_desc d = *desc;
    if (d.count > 0) {
        if (d.layers < 0)
            return kvprim_fail(KVPRIM_ERROR_SIZE, "%s: layers is %d, less than 0", function, (int)d.layers);
        if (d.same_cache != 0 && d.same_cache != 1)
            return kvprim_fail(KVPRIM_ERROR_ARGUMENT, "%s: same_cache is %d, neither 0 nor 1", function,
                               (int)d.same_cache);
        d.layers = d.layers ? d.layers : 1;
        const int64_t dst_used = d.dst_index ? d.dst.rows : d.count, src_used = d.src_index ? d.src.rows : d.count;
        kvpi_side dst = {function, "dst", &d.dst, "row_bytes", d.row_bytes, dst_used, d.layers, d.dst_layer_stride, 0};
        kvpi_side src = {function, "src", &d.src, "row_bytes", d.row_bytes, src_used, d.layers, d.src_layer_stride, 0};
        if (d.dst_index || d.src_index)
            KVPRIM_TRY(kvpi_check_index(function, "index", d.dst_index ? d.dst_index : d.src_index, d.index_type));
        if (d.dst_index && d.src_index)
            KVPRIM_TRY(kvpi_check_index(function, "index", d.src_index, d.index_type));
        KVPRIM_TRY(kvpi_check_transfer_side(&dst, d.dst_layers));
        KVPRIM_TRY(kvpi_check_transfer_side(&src, d.src_layers));
        d.dst_layer_stride = dst.layer_stride;
        d.src_layer_stride = src.layer_stride;
        KVPRIM_TRY((d.same_cache ? kvpi_check_same_cache : kvpi_check_layers_apart)(&d, &dst, &src));
        for (int32_t l = 0; l < d.layers; l++) {
            kvprim_table layer = d.dst;
            kvpi_side side = dst;
            layer.data = kvpi_side_layer(&dst, d.dst_layers, l);
            side.table = &layer;
            KVPRIM_TRY(kvpi_check_index_apart(&side, "dst_index", d.dst_index, d.index_type, d.count));
            KVPRIM_TRY(kvpi_check_index_apart(&side, "src_index", d.src_index, d.index_type, d.count));
        }
    }
    if (resolved)
        *resolved = d;
    return KVPRIM_OK;
}

/* ---- moving rows ---- */

enum {
    kvpi_ahead = 32, /* rows found and prefetched before one is moved: more than a core has lines in flight */
    kvpi_ring = 64,  /* places kept: a power of two above kvpi_ahead */
    kvpi_prefetch_bytes = 1024, /* of a row; the hardware sees the rest coming */
    kvpi_run_bytes = 4096       /* rows that lie next to each other on both sides move as one, up to this many bytes */
};
/* From here on rows are written past the caches, which hold less: that saves reading each line before it is written. */
static const int64_t kvpi_stream_bytes = (int64_t)32 << 20;

/* To the second-level cache: the first has too few lines in flight. */
#if defined(__GNUC__) || defined(__clang__)
#define KVPRIM_PREFETCH(p) __builtin_prefetch(p, 0, 2)
#else
#define KVPRIM_PREFETCH(p) ((void)(p))
#endif

/* The rows of one side, ready to be found. */
typedef struct kvpi_rows {
    char *data;
    const void *index; /* NULL: row i */
    uint64_t rows;
    int64_t stride, page_rows, page_mask, page_stride, heads, head_stride, piece;
    int32_t page_shift; /* page_rows is 1 << page_shift, or this is -1 */
} kvpi_rows;

/* One table to another; gather indexes src, store dst, transfer either. */
typedef struct kvpi_job {
    kvpi_rows dst, src;
    int64_t row_bytes, count;
    kvprim_index_type type;
    int64_t base;
    int zero, stream; /* zero: a row without a source becomes zeros; stream: see kvpi_stream_bytes */
    uint32_t *rejected;
} kvpi_job;

/* Pages that follow each other without a gap are no pages, and heads that do so are one. */
static kvprim_table kvpi_simplify(kvprim_table t, int64_t row_bytes)
{
    if (t.heads > 1 && t.head_stride == row_bytes / t.heads)
        t.heads = 1;
    if (t.page_rows > 0 && t.page_stride / t.page_rows == t.stride && t.page_stride % t.page_rows == 0)
        t.page_rows = 0;
    return t;
}

static kvpi_rows kvpi_rows_of(const kvprim_table *table, const void *index, int64_t row_bytes)
{
    const kvprim_table t = kvpi_simplify(*table, row_bytes);
    kvpi_rows r;
    r.data = (char *)t.data;
    r.index = index;
    r.rows = (uint64_t)t.rows;
    r.stride = t.stride;
    r.page_rows = t.page_rows;
    r.page_mask = t.page_rows - 1;
    r.page_stride = t.page_stride;
    r.heads = t.heads;
    r.head_stride = t.head_stride;
    r.piece = row_bytes / t.heads;
    r.page_shift = 0;
    while (t.page_rows >> r.page_shift > 1)
        r.page_shift++;
    if (t.page_rows != (int64_t)1 << r.page_shift)
        r.page_shift = -1;
    return r;
}

static kvpi_job kvpi_job_of(kvpi_rows dst, kvpi_rows src, int64_t row_bytes, int64_t count, kvprim_index_type type)
{
    const kvpi_job job = {dst, src, row_bytes, count, type, 0, 0, 0, NULL};
    return job;
}

/* Row i of one side, or NULL by the index rule; *past says which. index - base is exact as an unsigned number wherever
   it is not negative. */
KVPRIM_INLINE char *kvpi_find(const kvpi_rows *r, kvprim_index_type type, int64_t base, int64_t i, int *past)
{
    int64_t row = i;
    if (r->index) {
        const int64_t value =
            !KVPRIM_LIKELY(type == KVPRIM_I32) ? ((const int64_t *)r->index)[i] : ((const int32_t *)r->index)[i];
        row = (int64_t)((uint64_t)value - (uint64_t)base);
        if (!KVPRIM_LIKELY((uint64_t)row < r->rows && value >= base)) {
            *past |= value >= base;
            return NULL;
        }
    }
    if (KVPRIM_LIKELY(r->page_rows == 0))
        return r->data + row * r->stride;
    if (KVPRIM_LIKELY(r->page_shift >= 0))
        return r->data + (row >> r->page_shift) * r->page_stride + (row & r->page_mask) * r->stride;
    return r->data + row / r->page_rows * r->page_stride + row % r->page_rows * r->stride;
}

typedef void kvpi_copy_fn(char *dst, const char *src, size_t bytes, int stream);

/* Short rows 16 bytes at a time and the last 16 once more: a call of memcpy costs as much as the row. */
static inline void kvpi_copy(char *dst, const char *src, size_t bytes, int stream)
{
    char block[16];
    (void)stream;
    if (bytes < 16 || bytes > 256) {
        memcpy(dst, src, bytes);
        return;
    }
    for (size_t b = 0; b + 16 < bytes; b += 16) {
        memcpy(block, src + b, 16);
        memcpy(dst + b, block, 16);
    }
    memcpy(block, src + bytes - 16, 16);
    memcpy(dst + bytes - 16, block, 16);
}

#ifdef KVPRIM_X86
/* The same with vectors; `stream` needs rows of whole, aligned lines. */
KVPRIM_AVX2 static inline void kvpi_copy_avx2(char *dst, const char *src, size_t bytes, int stream)
{
    size_t b = 0;
    if (bytes < 32) {
        kvpi_copy(dst, src, bytes, 0);
        return;
    }
    if (stream)
        for (; b + 32 <= bytes; b += 32)
            _mm256_stream_si256((__m256i *)(void *)(dst + b),
                                _mm256_loadu_si256((const __m256i *)(const void *)(src + b)));
    for (; b + 32 <= bytes; b += 32)
        _mm256_storeu_si256((__m256i *)(void *)(dst + b), _mm256_loadu_si256((const __m256i *)(const void *)(src + b)));
    if (b < bytes)
        _mm256_storeu_si256((__m256i *)(void *)(dst + bytes - 32),
                            _mm256_loadu_si256((const __m256i *)(const void *)(src + bytes - 32)));
}

KVPRIM_AVX512 static inline void kvpi_copy_avx512(char *dst, const char *src, size_t bytes, int stream)
{
    size_t b = 0;
    if (bytes < 64) {
        kvpi_copy(dst, src, bytes, 0);
        return;
    }
    if (stream)
        for (; b + 64 <= bytes; b += 64)
            _mm512_stream_si512((__m512i *)(void *)(dst + b), _mm512_loadu_si512(src + b));
    for (; b + 64 <= bytes; b += 64)
        _mm512_storeu_si512(dst + b, _mm512_loadu_si512(src + b));
    if (b < bytes)
        _mm512_storeu_si512(dst + bytes - 64, _mm512_loadu_si512(src + bytes - 64));
}
#endif

/* A row that lies in pieces on at least one side: up to the end of the nearer piece, until the row is done. */
static void kvpi_move_pieces(const kvpi_job *job, char *dst, const char *src)
{
    for (int64_t b = 0; b < job->row_bytes;) {
        const int64_t in_dst = b % job->dst.piece, in_src = b % job->src.piece;
        const int64_t dst_left = job->dst.piece - in_dst, src_left = job->src.piece - in_src;
        const int64_t step = dst_left < src_left ? dst_left : src_left;
        char *const to = dst + b / job->dst.piece * job->dst.head_stride + in_dst;
        if (src)
            kvpi_copy(to, src + b / job->src.piece * job->src.head_stride + in_src, (size_t)step, 0);
        else
            memset(to, 0, (size_t)step);
        b += step;
    }
}

/* A row that does not move as one copy. */
static void kvpi_move_special(const kvpi_job *job, char *dst, const char *src)
{
    if (job->dst.heads > 1 || job->src.heads > 1)
        kvpi_move_pieces(job, dst, src);
    else
        memset(dst, 0, (size_t)job->row_bytes);
}

/* A row that begins inside a line ends in one more: to ask for that one too costs more than it brings. */
KVPRIM_INLINE void kvpi_prefetch(const char *row, size_t bytes)
{
    for (size_t b = 0; b < bytes; b += 64)
        KVPRIM_PREFETCH(row + b);
}

/* The same for a row in pieces. */
static void kvpi_prefetch_pieces(const kvpi_rows *r, const char *row, size_t bytes)
{
    const size_t piece = (size_t)r->piece;
    for (size_t done = 0; done < bytes; done += piece, row += r->head_stride)
        kvpi_prefetch(row, piece < bytes - done ? piece : bytes - done);
}

/* The commonest moves, for which the compiler may leave out the rest: int32 indices on one side, no pages or heads. */
typedef enum kvpi_shape { kvpi_shape_any, kvpi_shape_gather, kvpi_shape_store } kvpi_shape;

/* Row i is moved when kvpi_ahead more are found and, where an index points at them, prefetched: one for each row that
   moves, as the memory takes only so much at once. */
KVPRIM_INLINE void kvpi_move_by(const kvpi_job *job, kvpi_copy_fn *copy, kvpi_shape shape)
{
    kvpi_job j = *job; /* a copy, which the compiler knows that no row lies over */
    if (shape != kvpi_shape_any) {
        j.type = KVPRIM_I32;
        j.dst.page_rows = j.src.page_rows = 0;
        j.dst.heads = j.src.heads = 1;
        j.zero = shape == kvpi_shape_gather;
        *(shape == kvpi_shape_gather ? &j.dst.index : &j.src.index) = NULL;
    }
    const size_t row_bytes = (size_t)j.row_bytes;
    const size_t most_ahead = kvpi_prefetch_bytes, ahead_bytes = row_bytes < most_ahead ? row_bytes : most_ahead;
    const int whole = j.dst.heads == 1 && j.src.heads == 1;
    char *dst_at[kvpi_ring], *src_at[kvpi_ring]; /* row i at i % kvpi_ring. dst NULL: nothing to do; src NULL: zeros */
    size_t run =
        0; /* bytes of the rows before row i that move with it: not 0 only if row i is whole and follows them */
    for (int64_t i = -kvpi_ahead; i < j.count; i++) {
        const int64_t ahead = i + kvpi_ahead;
        if (KVPRIM_LIKELY(ahead < j.count)) {
            int past = 0;
            char *dst = kvpi_find(&j.dst, j.type, j.base, ahead, &past);
            char *const src = kvpi_find(&j.src, j.type, j.base, ahead, &past);
            if (!KVPRIM_LIKELY(!past) && j.rejected)
                ++*j.rejected;
            if (!KVPRIM_LIKELY(src) && !j.zero)
                dst = NULL;
            if (src && j.src.index && KVPRIM_LIKELY(j.src.heads == 1))
                kvpi_prefetch(src, ahead_bytes);
            else if (src && j.src.index)
                kvpi_prefetch_pieces(&job->src, src, ahead_bytes);
            if (dst && j.dst.index && !j.stream && KVPRIM_LIKELY(j.dst.heads == 1))
                kvpi_prefetch(dst, ahead_bytes);
            else if (dst && j.dst.index && !j.stream)
                kvpi_prefetch_pieces(&job->dst, dst, ahead_bytes);
            dst_at[ahead % kvpi_ring] = dst;
            src_at[ahead % kvpi_ring] = src;
        }
        if (!KVPRIM_LIKELY(i >= 0))
            continue;
        char *const dst = dst_at[i % kvpi_ring], *const src = src_at[i % kvpi_ring];
        const int64_t next = (i + 1) % kvpi_ring;
        if (!KVPRIM_LIKELY(dst))
            continue;
        if (!KVPRIM_LIKELY(whole && src)) {
            kvpi_move_special(job, dst, src);
            continue;
        }
        run += row_bytes;
        if (i + 1 < j.count && src_at[next] == src + row_bytes && dst_at[next] == dst + row_bytes &&
            run < kvpi_run_bytes)
            continue;
        copy(dst + row_bytes - run, src + row_bytes - run, run, j.stream);
        run = 0;
    }
}

static void kvpi_move_portable(const kvpi_job *job)
{
    kvpi_move_by(job, kvpi_copy, kvpi_shape_any);
}

#ifdef KVPRIM_X86
static kvpi_shape kvpi_shape_of(const kvpi_job *j)
{
    if (j->type != KVPRIM_I32 || j->dst.page_rows || j->src.page_rows || j->dst.heads != 1 || j->src.heads != 1)
        return kvpi_shape_any;
    if (!j->dst.index && j->zero)
        return kvpi_shape_gather;
    return !j->src.index && !j->zero ? kvpi_shape_store : kvpi_shape_any;
}

#define KVPRIM_MOVE(name, target, copy)                                                                                \
    target static void name(const kvpi_job *job)                                                                       \
    {                                                                                                                  \
        const kvpi_shape shape = kvpi_shape_of(job);                                                                   \
        if (shape == kvpi_shape_gather)                                                                                \
            kvpi_move_by(job, copy, kvpi_shape_gather);                                                                \
        else if (shape == kvpi_shape_store)                                                                            \
            kvpi_move_by(job, copy, kvpi_shape_store);                                                                 \
        else                                                                                                           \
            kvpi_move_by(job, copy, kvpi_shape_any);                                                                   \
        _mm_sfence(); /* after streaming stores */                                                                     \
    }
KVPRIM_MOVE(kvpi_move_avx2, KVPRIM_AVX2, kvpi_copy_avx2)
KVPRIM_MOVE(kvpi_move_avx512, KVPRIM_AVX512, kvpi_copy_avx512)
#endif

static int kvpi_in_lines(const kvpi_rows *r, int64_t row_bytes)
{
    const uint64_t bits =
        (uint64_t)(uintptr_t)r->data | (uint64_t)r->stride | (uint64_t)r->page_stride | (uint64_t)row_bytes;
    return bits % 64 == 0;
}

static void kvpi_move(kvpi_job *job)
{
    job->stream = job->count >= kvpi_stream_bytes / job->row_bytes && kvpi_in_lines(&job->dst, job->row_bytes);
#ifdef KVPRIM_X86
    if (kvpi_has_avx512())
        kvpi_move_avx512(job);
    else if (kvpi_has_avx2())
        kvpi_move_avx2(job);
    else
#endif
        kvpi_move_portable(job);
}

KVPRIM_API kvprim_status kvprim_gather(const kvprim_gather_desc *desc)
{
    KVPRIM_RANGE("kvprim_gather");
    kvprim_gather_desc d;
    KVPRIM_TRY(kvprim_gather_check(desc, &d));
    if (d.count == 0)
        return KVPRIM_OK;
    kvpi_job job = kvpi_job_of(kvpi_rows_of(&d.dst, NULL, d.row_bytes), kvpi_rows_of(&d.src, d.index, d.row_bytes),
                               d.row_bytes, d.count, d.index_type);
    job.base = d.index_base;
    job.zero = 1;
    job.rejected = d.rejected;
    kvpi_move(&job);
    return KVPRIM_OK;
}

/* K, or V. */
static void kvpi_store_one(const kvprim_store_desc *d, const kvprim_table *cache, const kvprim_table *input,
                           int64_t row_bytes, uint32_t *rejected)
{
    kvpi_job job = kvpi_job_of(kvpi_rows_of(cache, d->slot, row_bytes), kvpi_rows_of(input, NULL, row_bytes), row_bytes,
                               d->count, d->slot_type);
    job.base = d->slot_base;
    job.rejected = rejected;
    kvpi_move(&job);
}

KVPRIM_API kvprim_status kvprim_store(const kvprim_store_desc *desc)
{
    KVPRIM_RANGE("kvprim_store");
    kvprim_store_desc d;
    KVPRIM_TRY(kvprim_store_check(desc, &d));
    if (d.count == 0)
        return KVPRIM_OK;
    kvpi_store_one(&d, &d.k_cache, &d.k, d.k_bytes, d.rejected);
    if (d.v_cache.data)
        kvpi_store_one(&d, &d.v_cache, &d.v, d.v_bytes, NULL);
    return KVPRIM_OK;
}

KVPRIM_API kvprim_status kvprim_transfer(const kvprim_transfer_desc *desc)
{
    KVPRIM_RANGE("kvprim_transfer");
    kvprim_transfer_desc d;
    KVPRIM_TRY(kvprim_transfer_check(desc, &d));
    if (d.count == 0)
        return KVPRIM_OK;
    kvpi_job job = kvpi_job_of(kvpi_rows_of(&d.dst, d.dst_index, d.row_bytes),
                               kvpi_rows_of(&d.src, d.src_index, d.row_bytes), d.row_bytes, d.count, d.index_type);
    job.rejected = d.rejected;
    for (int32_t l = 0; l < d.layers; l++) {
        job.dst.data = kvpi_layer(d.dst.data, d.dst_layers, d.dst_layer_stride, l);
        job.src.data = kvpi_layer(d.src.data, d.src_layers, d.src_layer_stride, l);
        kvpi_move(&job);
        job.rejected = NULL; /* counted in the first layer */
    }
    return KVPRIM_OK;
}

/* >>impl_unpack ---------------------------------------------------------------------------------------------------- */

static kvprim_status kvpi_check_fragment(const kvprim_unpack_desc *d, size_t i)
{
    const kvprim_fragment f = d->fragments[i];
    const int src_bad = f.bytes > d->src_bytes || f.src_offset > d->src_bytes - f.bytes;
    const int dst_bad = f.bytes > d->dst_bytes || f.dst_offset > d->dst_bytes - f.bytes;
    if (!src_bad && !dst_bad)
        return KVPRIM_OK;
    return kvprim_fail(KVPRIM_ERROR_BOUNDS,
                       "kvprim_unpack: fragments[%llu] is %llu bytes at %s_offset %llu, past %s_bytes %llu",
                       (unsigned long long)i, (unsigned long long)f.bytes, src_bad ? "src" : "dst",
                       (unsigned long long)(src_bad ? f.src_offset : f.dst_offset), src_bad ? "src" : "dst",
                       (unsigned long long)(src_bad ? d->src_bytes : d->dst_bytes));
}

/* Returns whether all fragments lie in buffers of less than 2^63 bytes: then no number below has bit 63. Nothing
   branches on the data: a GPU's launch takes only as long as the check of 3,000 fragments. */
static int kvpi_fragments_fit(const kvprim_unpack_desc *d)
{
    const kvprim_fragment *const f = d->fragments;
    const uint64_t src_bytes = d->src_bytes, dst_bytes = d->dst_bytes;
    uint64_t bits = src_bytes | dst_bytes;
    for (size_t i = 0; i < d->count; i++) {
        const uint64_t bytes = f[i].bytes, src = f[i].src_offset, dst = f[i].dst_offset;
        const uint64_t src_room = src_bytes - bytes, dst_room = dst_bytes - bytes;
        bits |= bytes | src | dst | src_room | dst_room | (src_room - src) | (dst_room - dst);
    }
    return bits >> 63 == 0;
}

#ifdef KVPRIM_DEBUG
static int kvpi_compare_places(const void *a, const void *b)
{
    const uint64_t x = (*(const kvprim_fragment *const *)a)->dst_offset;
    const uint64_t y = (*(const kvprim_fragment *const *)b)->dst_offset;
    return (x > y) - (x < y);
}

/* Checks whether a fragment begins before the previous one ends, in the order of their destinations. */
static kvprim_status kvpi_check_sorted_apart(const kvprim_fragment *first, const kvprim_fragment **sorted, size_t count)
{
    qsort(sorted, count, sizeof *sorted, kvpi_compare_places);
    for (size_t i = 1; i < count; i++) {
        const kvprim_fragment *const f = sorted[i], *const before = sorted[i - 1];
        if (f->dst_offset < before->dst_offset + before->bytes)
            return kvprim_fail(KVPRIM_ERROR_OVERLAP,
                               "kvprim_unpack: fragments[%llu] and fragments[%llu] overlap in dst",
                               (unsigned long long)((f < before ? f : before) - first),
                               (unsigned long long)((f < before ? before : f) - first));
    }
    return KVPRIM_OK;
}

static kvprim_status kvpi_check_fragments_apart(const kvprim_unpack_desc *d)
{
    size_t count = 0;
    const kvprim_fragment **const sorted = (const kvprim_fragment **)malloc(d->count * sizeof *sorted);
    if (!sorted)
        return KVPRIM_OK; /* without memory this check is left out */
    for (size_t i = 0; i < d->count; i++)
        if (d->fragments[i].bytes)
            sorted[count++] = &d->fragments[i];
    const kvprim_status status = count ? kvpi_check_sorted_apart(d->fragments, sorted, count) : KVPRIM_OK;
    free((void *)sorted);
    return status;
}
#endif

KVPRIM_API kvprim_status kvprim_unpack_check(const kvprim_unpack_desc *desc)
{
    static const char function[] = "kvprim_unpack";
    KVPRIM_TRY(kvpi_check_desc(function, desc));
    if (desc->count == 0)
        return KVPRIM_OK;
    const char *const null = !desc->fragments                ? "fragments"
                             : !desc->src && desc->src_bytes ? "src"
                             : !desc->dst && desc->dst_bytes ? "dst"
                                                             : NULL;
    if (null)
        return kvprim_fail(KVPRIM_ERROR_NULL, "%s: %s is NULL", function, null);
    if (desc->reserved)
        return kvprim_fail(KVPRIM_ERROR_ARGUMENT, "%s: reserved is %lld, not 0", function, (long long)desc->reserved);
    if ((uint64_t)(size_t)desc->src_bytes != desc->src_bytes || (uint64_t)(size_t)desc->dst_bytes != desc->dst_bytes)
        return kvprim_fail(KVPRIM_ERROR_SIZE, "%s: src_bytes %llu or dst_bytes %llu is more than an address holds",
                           function, (unsigned long long)desc->src_bytes, (unsigned long long)desc->dst_bytes);
    const uint64_t fragments_bytes = kvpi_mul(desc->count, sizeof(kvprim_fragment));
    if (kvpi_overlap(desc->dst, desc->dst_bytes, desc->fragments, fragments_bytes))
        return kvprim_fail(KVPRIM_ERROR_OVERLAP, "%s: dst (%p, %llu bytes) overlaps fragments (%p)", function,
                           desc->dst, (unsigned long long)desc->dst_bytes, (const void *)desc->fragments);
    if (kvpi_overlap(desc->dst, desc->dst_bytes, desc->src, desc->src_bytes))
        return kvprim_fail(KVPRIM_ERROR_OVERLAP, "%s: dst (%p, %llu bytes) overlaps src (%p, %llu bytes)", function,
                           desc->dst, (unsigned long long)desc->dst_bytes, desc->src,
                           (unsigned long long)desc->src_bytes);
    if (!kvpi_fragments_fit(desc))
        for (size_t i = 0; i < desc->count; i++)
            KVPRIM_TRY(kvpi_check_fragment(desc, i));
#ifdef KVPRIM_DEBUG
    KVPRIM_TRY(kvpi_check_fragments_apart(desc));
#endif
    return KVPRIM_OK;
}

KVPRIM_API kvprim_status kvprim_unpack(const kvprim_unpack_desc *desc)
{
    KVPRIM_RANGE("kvprim_unpack");
    KVPRIM_TRY(kvprim_unpack_check(desc));
    const kvprim_unpack_desc d = *desc; /* dst may overlap *desc */
    for (size_t i = 0; i < d.count; i++) {
        const kvprim_fragment f = d.fragments[i];
        if (f.bytes)
            memcpy((char *)d.dst + f.dst_offset, (const char *)d.src + f.src_offset, (size_t)f.bytes);
    }
    return KVPRIM_OK;
}

#ifdef __cplusplus
}
#endif

#undef KVPRIM_THREAD_LOCAL
#undef KVPRIM_PREFIX_I64
#undef KVPRIM_AVX2
#undef KVPRIM_AVX512
#undef KVPRIM_LIKELY
#undef KVPRIM_SANITIZED
#undef KVPRIM_HOT
#undef KVPRIM_CLOBBERS
#undef KVPRIM_MOVE
#undef KVPRIM_PREFIX_ONLY
#undef KVPRIM_TRY
#undef KVPRIM_PREFETCH
#undef KVPRIM_INLINE
#endif /* implementation */

/*
MIT License

Copyright (c) 2026 the kvprim authors

Permission is hereby granted, free of charge, to any person obtaining a copy of this software and associated
documentation files (the "Software"), to deal in the Software without restriction, including without limitation the
rights to use, copy, modify, merge, publish, distribute, sublicense, and/or sell copies of the Software, and to permit
persons to whom the Software is furnished to do so, subject to the following conditions:

The above copyright notice and this permission notice shall be included in all copies or substantial portions of the
Software.

THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO THE
WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR
COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR
OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.
*/
