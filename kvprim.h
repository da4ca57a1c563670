/* SPDX-License-Identifier: MIT */
/* kvprim.h: finds, gathers, stores, transfers and unpacks the bytes of a KV cache on the CPU. C11, no dependency.

   Do this:

       #define KVPRIM_IMPLEMENTATION
       #include "kvprim.h"
       #include <stdio.h>

       int main(void)
       {
           char k_cache[6][8] = {{0}}, v_cache[6][8] = {{0}}; // 6 slots, rows of 8 bytes
           char k[3][8] = {"key 0", "key 1", "-"}, v[3][8] = {"value 0", "value 1", "-"};
           const int32_t slot[] = {4, 1, -1}; // token 0 goes to slot 4, token 1 to slot 1; -1: padding
           kvprim_store_desc store = {
               .k_cache = {.data = k_cache, .rows = 6}, .v_cache = {.data = v_cache, .rows = 6},
               .k = {.data = k, .rows = 3}, .v = {.data = v, .rows = 3}, .k_bytes = 8, .v_bytes = 8,
               .slot = slot, .slot_type = KVPRIM_I32, .count = 3};
           if (kvprim_store(&store) != KVPRIM_OK) {
               fprintf(stderr, "%s\n", kvprim_last_error());
               return 1;
           }
           printf("slot 1 holds \"%s\", slot 4 \"%s\"\n", v_cache[1], v_cache[4]);
       }

   It finds how much of a prompt is already cached (prefix compare), turns page tables into slots, and moves rows of
   keys and values: gather (cache to contiguous rows), store (new rows into cache slots), transfer (rows or pages of
   every layer, cache to cache), unpack (fragments of a receive buffer to their places) and copy (a list of addresses).
   Gather, store and transfer can convert elements on the way, into and out of FP8 and INT8 caches; without a format
   (>>format) they move bytes, and do not look at them. kvprim_cuda.cuh takes the same descriptors; the functions here
   are its reference. They do NOT own or allocate memory, start threads, or print.

   Contents (search for the tag):
       >>config      macros that you may define
       >>version     what a binding compares
       >>status      kvprim_status, errors and their text
       >>dtype       element types
       >>prefix      prefix compare
       >>format      element types and scales: FP8 and INT8 caches
       >>table       kvprim_table: rows, pages, heads; the index rule
       >>gather      >>store      >>slots      >>transfer      >>unpack      >>unpack_meta      >>copy
       >>fetch       rows of wanted tokens into a small set of hot rows, least recently used out
       >>keys        keys of blocks as engines compute them; a table of keys: the longest known prefix
       >>move        checked moves: check once, run often, several in one launch
       >>layout      the caches of engines by name; a staging area for a slice of heads; moves as runs
       >>launch      how kvprim_cuda.cuh runs a call: stream, overlap with the kernel before, share of the GPU
       >>check       the checks alone
       >>impl_rows       where a row starts: index rule, page arithmetic; for kernels, too
       >>impl_elements   conversions of one element; what a new element type touches
       >>impl_types      ... by type: its bytes, its largest value, both conversions
       >>impl            the implementation, from >>impl_status on:
           prefix        >>impl_prefix_scalar   >>impl_prefix_x86   >>impl_prefix_arm   >>impl_prefix_pick
           checks        >>impl_table   >>impl_check   >>impl_check_format   >>impl_check_side   >>impl_check_layers
                         >>impl_check_areas   >>impl_check_uses
           rows          >>impl_moves   >>impl_cpu_move   >>impl_cpu_blocks   >>impl_cpu_convert
           layouts       >>impl_layout   >>impl_runs
           lists         >>impl_slots   >>impl_list   >>impl_copy   >>impl_unpack   >>impl_unpack_meta
           fetch         >>impl_check_fetch   >>impl_fetch
           keys          >>impl_keys_sha   >>impl_keys   >>impl_keys_run   >>impl_key_table

   Rules that hold for every function here
       Errors     A function checks its descriptor before it moves the first byte. On an error it has written nothing,
                  the status is not KVPRIM_OK, and kvprim_last_error() names the field and the values. With count == 0
                  it returns KVPRIM_OK and looks at nothing else.
       Threads    Any number of threads may call every function at once. Sharing the bytes is the caller's business.
       Alignment  Rows may have any alignment and any number of bytes >= 1. Tokens, indices and counters are aligned
                  as their C types, and so are elements that a move converts, and scales.
       Aliasing   The destination must not overlap source rows, scales, indices, counters, fragments, layer arrays or
                  descriptors, from the first byte of a table to the last. All except the last two are checked. To
                  copy rows inside one cache, see same_cache. Unpack and copy compare their items one by one instead of
                  whole buffers, so both may work inside one buffer.
*/

/* >>config ---------------------------------------------------------------------------------------------------------

   KVPRIM_IMPLEMENTATION       one translation unit: implements every kvprim header that it includes
   KVPRIM_CORE_IMPLEMENTATION  one translation unit: implements this header only
   KVPRIM_EXPORT               every translation unit of a shared library that exports these functions, and of its
                               callers (not on Windows). Without it they are hidden on ELF systems: the libraries of a
                               process each call their own copy of kvprim, whatever its version
   KVPRIM_STATIC               every translation unit that uses this copy: makes all functions static to the unit,
                               which must implement them too. Two vendored copies can then live in one program.
   KVPRIM_API                  every translation unit: the attribute of all public functions, in place of KVPRIM_EXPORT.
                               KVPRIM_STATIC overrides it
   KVPRIM_NO_SIMD              every translation unit or none: portable C only, no named variants except _scalar
   KVPRIM_NO_KEYS              every translation unit or none: leaves out >>keys
   KVPRIM_NO_LAYOUTS           every translation unit or none: leaves out >>layout
   KVPRIM_NO_FETCH             every translation unit or none: leaves out >>fetch, here and in kvprim_cuda.cuh
   KVPRIM_DEBUG                the implementing unit: unpack and copy refuse destinations that overlap. All items are
                               then sorted as >>copy says of the slowest check.
   KVPRIM_NVTX                 the implementing units, before the first kvprim header: puts an NVTX range with the
                               function's name around every call that moves or compares, except the named variants.
                               Needs NVTX's header-only C API (nvtx3/ in the CUDA Toolkit), C++ or a compiler with the
                               attribute `cleanup`, and -ldl where dlopen is not in libc. Undefined, it costs nothing.
*/
#if defined(KVPRIM_H) && KVPRIM_VERSION != 300
#error "kvprim.h 0.3.0 meets another version of it in one unit"
#endif
#ifndef KVPRIM_H
#define KVPRIM_H

#include <stddef.h>
#include <stdint.h>

#define KVPRIM_VERSION_MAJOR 0
#define KVPRIM_VERSION_MINOR 3
#define KVPRIM_VERSION_PATCH 0
#define KVPRIM_VERSION (KVPRIM_VERSION_MAJOR * 10000 + KVPRIM_VERSION_MINOR * 100 + KVPRIM_VERSION_PATCH)

#ifdef KVPRIM_STATIC
#undef KVPRIM_API
#if defined(__GNUC__) || defined(__clang__)
#define KVPRIM_API static __attribute__((unused))
#else
#define KVPRIM_API static
#endif
#elif defined(KVPRIM_API) /* the caller's */
#elif defined(KVPRIM_EXPORT) && defined(_WIN32)
#define KVPRIM_API extern __declspec(dllexport)
#elif defined(KVPRIM_EXPORT) && defined(__ELF__)
#define KVPRIM_API extern __attribute__((visibility("default")))
#elif defined(__ELF__)
#define KVPRIM_API extern __attribute__((visibility("hidden")))
#else
#define KVPRIM_API extern
#endif

/* CHECKED: compilers warn if a result is ignored. LIKELY, for kvprim alone: a taken branch costs up to 2 cycles. */
#if defined(__GNUC__) || defined(__clang__)
#define KVPRIM_CHECKED __attribute__((warn_unused_result))
#define KVPRIM_LIKELY(x) __builtin_expect(!!(x), 1)
#else
#define KVPRIM_CHECKED
#define KVPRIM_LIKELY(x) (x)
#endif

/* Which variants of the prefix compare exist here. Other compilers and processors use the scalar one. */
#if !defined(KVPRIM_NO_SIMD) && (defined(__GNUC__) || defined(__clang__))
#if defined(__x86_64__) && !defined(__ILP32__) && !defined(_WIN32) /* gcc misaligns vectors on its stack: bug 54412 */
#define KVPRIM_X86 1
#elif defined(__aarch64__) && !defined(__AARCH64EB__)
#define KVPRIM_NEON 1
#if defined(__ARM_FEATURE_SHA2) || (defined(__linux__) && (!defined(__clang__) || __clang_major__ >= 16))
#define KVPRIM_ARM_SHA 1
#endif
#endif
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* >>version -------------------------------------------------------------------------------------------------------- */

/* KVPRIM_VERSION of the implementing unit. A caller that was compiled with another header must not use it. */
KVPRIM_API uint32_t kvprim_version(void);

/* sizeof a structure of this header by its name ("kvprim_table"), for bindings; 0 for an unknown name. */
KVPRIM_API size_t kvprim_sizeof(const char *struct_name);

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

/* "KVPRIM_ERROR_SIZE" for KVPRIM_ERROR_SIZE; "unknown kvprim_status" for any other number. Static storage. */
KVPRIM_API const char *kvprim_status_name(kvprim_status status);

/* One sentence for a status, without the particulars. Static storage. */
KVPRIM_API const char *kvprim_status_text(kvprim_status status);

/* What went wrong in this thread's last failed call: function, field, values. "" before the first failure; valid until
   the next, as calls that succeed do not change it. tcc has no thread-local storage: all threads share one text. */
KVPRIM_API const char *kvprim_last_error(void);

/* >>dtype ---------------------------------------------------------------------------------------------------------- */

/* Element types. They begin at 16: neither an index type (KVPRIM_I64) nor an enum that was left at 0 is one. */
typedef enum kvprim_dtype {
    KVPRIM_U8 = 16,
    KVPRIM_F16 = 17,
    KVPRIM_BF16 = 18,
    KVPRIM_F32 = 19,
    KVPRIM_F64 = 20,
    KVPRIM_INT8 = 21,
    KVPRIM_INT32 = 22,
    KVPRIM_INT64 = 23,
    KVPRIM_F8E4M3 = 24,
    KVPRIM_F8E5M2 = 25,
    KVPRIM_F8E8M0 = 26, /* a power of two, 2^(byte - 127): scales only */
    KVPRIM_F4E2M1 = 27, /* two elements to a byte, the first in the low half: caches only. 0, 0.5, 1, 1.5, 2, 3, 4, 6 */
    KVPRIM_INT4 = 28    /* the same with two's complement; a store writes -7 to 7, a gather reads -8, too */
} kvprim_dtype;

/* >>prefix ---------------------------------------------------------------------------------------------------------

   Returns how many leading tokens two arrays share: 0 to min(a_len, b_len). Nothing past the end of either array is
   read. The arrays may be the same or overlap. An array may be NULL if its length is 0; NULL with a length returns 0
   and sets kvprim_last_error(). Thread-safe, including the first call. */
KVPRIM_API size_t kvprim_prefix_i32(const int32_t *a, size_t a_len, const int32_t *b, size_t b_len);
KVPRIM_API size_t kvprim_prefix_i64(const int64_t *a, size_t a_len, const int64_t *b, size_t b_len);

/* Rounds `matched` down to whole pages of `page_rows` tokens. With page_rows 0 or 1 returns `matched` itself. */
KVPRIM_API size_t kvprim_prefix_pages(size_t matched, size_t page_rows);

/* What kvprim_prefix_many_i32 returns instead of an index. */
#define KVPRIM_PREFIX_NONE SIZE_MAX        /* no key shares a token with the query, or there are no keys */
#define KVPRIM_PREFIX_ERROR (SIZE_MAX - 1) /* an argument is wrong: see kvprim_last_error() */

/* Compares one query with keys_count keys: out_len[i] = kvprim_prefix_i32(query, query_len, keys[i], key_lens[i]).
   Returns the index of the key with the longest match, the first of several, or KVPRIM_PREFIX_NONE. out_len may be NULL
   and must not overlap the other arguments. A query or key may be NULL if its length is 0, and without keys nothing
   else is looked at. Any other NULL is an error: nothing is written. */
KVPRIM_API size_t kvprim_prefix_many_i32(const int32_t *query, size_t query_len, const int32_t *const *keys,
                                         const size_t *key_lens, size_t keys_count, size_t *out_len);

/* Which variant the functions above use on this processor: "avx512", "avx2", "neon" or "scalar". */
KVPRIM_API const char *kvprim_isa(void);

/* The variants by name return the same results, but an array with a length must not be NULL. On x86-64 call _avx2 only
   if kvprim_isa() is "avx2" or "avx512", and _avx512 (F, BW, VL, BMI1, BMI2) only if it is "avx512". */
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

/* >>format ---------------------------------------------------------------------------------------------------------

   kvprim_table.format says what a table's elements are. If both sides of a move have a format, elements change their
   type on the way. If neither has one, or both have the same type without scales, bytes move as they are.

       from                to                  how
       F32, F16, BF16      F8E4M3, F8E5M2,     stored = x / scale in fp32, rounded to the nearest value of the type
                           INT8, F4E2M1, INT4  (ties to even), saturated to its largest: 448, 57,344, 127, 6, 7
       F8E4M3, F8E5M2,     F32, F16, BF16      x = stored * scale in fp32, then rounded once (ties to even)
       INT8, F4E2M1, INT4
       F32, F16, BF16      F32, F16, BF16      rounded once

   All other pairs are KVPRIM_ERROR_UNSUPPORTED. To move quantised rows as they are, leave both formats NULL; scales in
   memory of their own then need a move of their own. row_bytes counts the bytes of the src row's elements, without
   scales; the dst row has as many elements. A row and each of its pieces hold whole elements, which are aligned: the
   data of a table and of its layers, and all strides, are multiples of an element's bytes.

   Elements of 4 bits lie in pairs: beside them, pieces of both sides and tiles have an even number of elements.

   The CPU and the GPU give the same bits. Infinity saturates to the largest value of a quantised type, as large numbers
   do; fp32, fp16 and bf16 keep it, and overflow to it. NaN stays NaN, with the bits 0x7f, 0x7fff or 0x7fffffff; in INT8
   and elements of 4 bits it becomes 0 and adds one to *nans, if that is set. Signs of zeros stay, denormals count. The
   CPU's bits need IEEE 754's fp32: an implementing unit without -ffast-math or its parts (most are an #error; clang
   hides -freciprocal-math and -funsafe-math-optimizations), a thread that rounds to nearest and flushes no denormals.

   Scales. Only a quantised side (F8E4M3, F8E5M2, INT8, F4E2M1, INT4) has them:

       0                    none: every scale is 1
       KVPRIM_SCALE_TENSOR  one number, read when the move runs
       KVPRIM_SCALE_HEAD    one for each `tile` elements of a row, the same for all rows; read when the move runs
       KVPRIM_SCALE_TILE    one for each `tile` elements of each row, or for the whole row. A move from it reads them. A
                            move to it computes them, and writes them beside each row that it writes:
                            scale = max(largest |x| of the tile / largest value of the type, scale_min) in fp32, and
                            with scale_power_of_two (always in F8E8M0) the power of two at or above that. NaN does not
                            count, infinity counts as the largest finite fp32
                            Scales beside elements of 4 bits may be F8E4M3 or F16, rounded to nearest even and
                            saturated, and *tensor_scale may multiply all of them (NVFP4 has both): scale =
                            max(largest |x| / largest value / *tensor_scale, scale_min), each step in fp32, then the
                            power of two if there is one, then the type. Quotients count as 2^127 at most, and as 0 if
                            they are NaN or negative. Elements are divided by scale * *tensor_scale, rounded to fp32,
                            or multiplied by its inverse; if that is 0, they become zeros, infinities as NaNs do

   A row that the index rule skips gets no scales either. If a scale that is read is 0, negative, infinite or NaN, the
   result is what fp32 arithmetic gives, by the rules above. Fields without a meaning for a kind of scale must be 0.

   Where they lie: the scale of tile t of row r is at

       scales + (r / page_rows) * scale_page_stride + (r % page_rows) * scale_stride + t * scale_tile_stride

   with the page_rows of the table, and the first two terms for SCALE_TILE only. `scales` NULL: they lie in the memory
   of the table, and data + scale_offset of each layer takes the place of scales. So scales lie inside the row
   (scale_offset = the row's bytes), after all rows of the page (scale_offset = page_rows * stride; set page_stride,
   too), or in memory of their own. Scales after all rows of a layer extend its default layer stride.

   With scale_heads the formula differs: a row's tiles of 4 bits form as many heads (it divides them), each of S scales
   of 1 byte. They lie as in HND caches: packed, all rows of a page (or table) for one head, then for the next;
   scale_tile_stride and scale_stride stay 0. KVPRIM_SCALES_SWIZZLED: within each head and four rows, scale s of row r
   takes the place of scale s % (S / 4) * 4 + r % 4 of row r / 4 * 4 + s / (S / 4), as TensorRT-LLM's kernels for sm_100
   read V's (vLLM, SGLang); S, page_rows and rows are multiples of 4. To move those as bytes, move four rows together.

   Scales of a move's dst must not overlap a row of it or, in a store, a row of the other cache. Scales that are written
   must not overlap any other scale; those that are only read may be shared, as by K and V. These checks compare single
   rows and scales, which may interleave, but may refuse tables whose strides have nothing in common. */
typedef enum kvprim_scale_kind { KVPRIM_SCALE_TENSOR = 1, KVPRIM_SCALE_HEAD, KVPRIM_SCALE_TILE } kvprim_scale_kind;

typedef struct kvprim_format {
    kvprim_dtype dtype;         /* of the elements */
    kvprim_scale_kind scale;    /* 0: none */
    kvprim_dtype scale_dtype;   /* F32 (0 means the same) or F8E8M0; SCALE_TILE of 4-bit elements: F8E4M3 or F16, too */
    int32_t scale_power_of_two; /* 1: computed scales are powers of two */
    int32_t scale_inverse;      /* 1: store multiplies. SCALE_TENSOR, SCALE_HEAD: stored = x * scale, the engine's
                                   inverse of what a gather takes. SCALE_TILE: stored = x * (1 / scale), the inverse
                                   rounded to fp32. Moves from this side need 0, or ignore it (SCALE_TILE) */
    float scale_min;            /* the least scale that is computed, 2^-126 to 2^127; 0: 2^-126 */
    int64_t tile;               /* elements that share a scale; a row has a multiple. SCALE_TILE: 0 is the whole row.
                                   SCALE_HEAD: 0 is the row's elements / heads of the table, if heads is more than 1 */
    void *scales;               /* aligned to their type, in memory of the executing side; a move to SCALE_TILE writes
                                   them. NULL: they are in the table's memory */
    int64_t scale_offset;       /* bytes from the layer's start to the first scale, more than 0; 0 with `scales` */
    int64_t scale_tile_stride;  /* bytes from one tile's or head's scale to the next; 0: packed */
    int64_t scale_stride;       /* bytes from one row's to the next; 0: packed, or the table's without `scales` */
    int64_t scale_page_stride;  /* bytes from one page's to the next; 0: likewise */
    int64_t scale_layer_stride; /* bytes from layer to layer, only with `scales`. SCALE_TILE: 0 is packed. Others: with
                                   several layers it must be set, to KVPRIM_SCALES_SHARED if all have the same */
    uint32_t *nans;             /* optional, as `rejected`: NaNs that became 0 in INT8 and 4 bits; others ignore it */
    int64_t scales_bytes;       /* of the memory at `scales`, for all layers; 0: unknown. Scales past it are an error */
    const float *tensor_scale;  /* optional, SCALE_TILE of elements of 4 bits: multiplies all scales of all layers. Read
                                   by the executing side when the move runs */
    int32_t scale_order;        /* KVPRIM_SCALES_LINEAR or KVPRIM_SCALES_SWIZZLED, which needs scale_heads */
    int32_t scale_heads;        /* heads that a row's tiles form (4 bits, scales of 1 byte), see above; 0: none */
} kvprim_format;

enum { KVPRIM_SCALES_SHARED = -1 }; /* a scale_layer_stride: all layers have the same scales */
enum { KVPRIM_SCALES_LINEAR = 0, KVPRIM_SCALES_SWIZZLED = 1 }; /* a scale_order */
enum { KVPRIM_HEADS_SHARED = -1 };                             /* a head_stride, see there */

/* >>table ----------------------------------------------------------------------------------------------------------

   Where the rows of a cache or tensor lie. Zero-initialise it, then set what differs. All sizes are bytes except where
   they say rows. Row r starts at data + r * stride, or, in a table of pages, at

       data + (r / page_rows) * page_stride + (r % page_rows) * stride

   If a row lies in `heads` equal pieces, piece h starts h * head_stride after that. Token-major caches (NHD) leave
   heads at 0: their rows are whole. Head-major caches (HND) set heads = H and head_stride = page_rows * piece, where
   a piece has row_bytes / H bytes; the other defaults are right if nothing is padded.

   Index rule of every indexed side: row = index - base. If 0 <= row < rows, the row moves. Otherwise nothing touches
   the table: gather writes a row of zeros, unless keep_padding is set; store and transfer skip the row. A negative row
   is padding; a row >= `rows` adds one to *rejected, if that is set. So -1 as padding (base 0), a reserved slot 0 (data
   at slot 1, base 1) and a vocabulary's shard (base = its first id) are one rule. There is no unchecked mode. */
typedef struct kvprim_table {
    void *data;                  /* byte 0 of row 0; may be NULL if rows is 0 */
    int64_t rows;                /* bounds every index; without one, at least `count`. 0 with data set is an error */
    int64_t stride;              /* row to row; 0: packed: a row's bytes, or one piece where head_stride is more */
    int64_t page_rows;           /* rows per page; 0: no pages */
    int64_t page_stride;         /* page to page; 0: packed. Strides nest: each step clears all that lies inside it */
    int32_t heads;               /* a row lies in this many equal pieces (row_bytes is a multiple); 0 or 1: in one */
    int32_t reserved_heads;      /* reserved fields are 0, here and below */
    int64_t head_stride;         /* piece to piece; required if heads > 1. KVPRIM_HEADS_SHARED: every head of a source
                                    is the same piece, as an MLA's k_pe is for all heads */
    int64_t bytes;               /* of the memory at data, with all layers that start there and scales that lie in it;
                                    0: unknown. A table that reaches past it is an error */
    const kvprim_format *format; /* what its elements are, if a move converts them; NULL: bytes. Host memory, free to
                                    reuse when the call returns */
    int64_t reserved;
} kvprim_table;

/* The type of indices and slots; KVPRIM_INT32 and KVPRIM_INT64 are element types. 0 is an error beside an index. */
typedef enum kvprim_index_type { KVPRIM_I32 = 1, KVPRIM_I64 = 2 } kvprim_index_type;

/* Returns the table with its defaults filled in for rows of row_bytes; heads is at least 1. */
KVPRIM_API kvprim_table kvprim_table_resolve(kvprim_table table, int64_t row_bytes);

/* Where row `row` (its first piece) starts, in a resolved table; 0 <= row < rows, which is not checked. */
KVPRIM_API void *kvprim_table_row(const kvprim_table *resolved, int64_t row);

/* >>gather ---------------------------------------------------------------------------------------------------------

   For i in [0, count): dst row i = src row (index[i * index_stride] - index_base), or zeros by the index rule. */
typedef struct kvprim_gather_desc {
    kvprim_table dst, src;
    int64_t row_bytes;
    const void *index; /* int32 or int64, aligned as its C type */
    kvprim_index_type index_type;
    int32_t keep_padding; /* 1: what would become a row of zeros, and its scales, is left alone */
    int64_t index_base, count;
    uint32_t *rejected;   /* optional; indices past src.rows add to it. The executing side writes it: the GPU
                             atomically, the CPU not (one per thread) */
    int64_t index_stride; /* elements from one index to the next; 0: 1 */
    int64_t reserved;
} kvprim_gather_desc;

/* A row of zeros also gets computed scales, those of a tile of zeros.
   Aliasing: dst must not overlap src. Repeated indices are fine.
   Errors: NULL (descriptor, index, data), SIZE (names the field and the values), OVERLAP, ARGUMENT (index type, an
   index or counter that is not aligned, a reserved field that is not 0). With a format also NULL (neither scales nor
   scale_offset), ARGUMENT (a format on one side only, a field that has no such value or no meaning, data or scales that
   are not aligned; strides that are not are SIZE) and UNSUPPORTED (a pair of types). */
KVPRIM_API KVPRIM_CHECKED kvprim_status kvprim_gather(const kvprim_gather_desc *desc);

/* >>store ----------------------------------------------------------------------------------------------------------

   For i in [0, count): k_cache row (slot[i * slot_stride] - slot_base) = k row i, and so v; see the index rule. */
typedef struct kvprim_store_desc {
    kvprim_table k_cache, v_cache, k, v; /* K only (MLA): leave v_cache, v and v_bytes at zero */
    int64_t k_bytes, v_bytes;            /* bytes of a row; K and V may differ */
    const void *slot;                    /* int32 or int64, aligned as its C type */
    kvprim_index_type slot_type;
    int32_t reserved_slot;
    int64_t slot_base, count;
    uint32_t *rejected;  /* optional; slots past the caches' rows, counted once for K and V */
    int64_t slot_stride; /* elements from one slot to the next; 0: 1 */
    int64_t reserved;
} kvprim_store_desc;

/* Both caches have the same number of rows and may interleave, as in [page][K or V][row]. k and v may be parts of one
   tensor (packed QKV). With duplicate slots, each aligned 16-byte block of a row (and each byte at an unaligned end)
   comes from one of the rows; which one is unspecified. Where a side has heads, "row" means what is contiguous on both
   sides. In rows that convert, this holds for each element and each computed scale alone, so a scale may belong to
   another row than the elements beside it. K and V convert or not, each by its own formats.
   Aliasing: no cache overlaps an input. No K row overlaps a V row: the check compares all rows, or only row 0 if the
   strides have so little in common that it would take too many steps.
   Errors: as kvprim_gather; NULL also if v or v_bytes is set but v_cache is not. */
KVPRIM_API KVPRIM_CHECKED kvprim_status kvprim_store(const kvprim_store_desc *desc);

/* >>slots ----------------------------------------------------------------------------------------------------------

   Turns page tables into slots: finds the cache row of every token from its request's page numbers.

       slot[i] = pages[request][position / page_rows] * page_rows + position % page_rows

   The tokens are given in one of two forms. Either token i is at position[i] of request[i]. Or cu_seqlens holds
   requests + 1 cumulative token counts in ascending order: request r has the tokens cu_seqlens[r] to
   cu_seqlens[r + 1] - 1 (none if the two are equal), and token i is at position starts[r] + i - cu_seqlens[r].

   Page numbers come in two forms, too: each request has max_pages, or page_starts holds requests + 1 cumulative counts
   of pages (FlashInfer's kv_indptr, beside kv_indices): request r has pages page_starts[r] to page_starts[r + 1] - 1.

   A negative request, position or page number is padding, whatever the others are: slot[i] is -1. slot[i] is also -1,
   and one is added to *rejected if that is set, for: a request >= requests, a token in no request (i < cu_seqlens[0] or
   i >= cu_seqlens[requests]), a position on none of the request's pages, a request whose page_starts descend or leave
   [0, max_pages], and a slot >= rows. So whatever the arrays hold, each slot is -1 or in [0, rows), and nothing outside
   the arrays is read. If cu_seqlens descends somewhere, it is unspecified which of these values a token gets.

   kvprim_store_desc.slot and kvprim_gather_desc.index take these slots, with base 0. To gather pages by cumulative
   lengths, call this and then kvprim_gather. */
typedef struct kvprim_slots_desc {
    const void *pages; /* page numbers, requests x max_pages, or with page_starts max_pages of all requests. All arrays
                          are aligned as their C types */
    kvprim_index_type pages_type;
    int32_t reserved_pages;
    int64_t requests, max_pages, pages_stride; /* pages_stride: elements from one request to the next; 0: max_pages */
    int64_t page_rows, rows;                   /* of a page, of the cache. All sizes are at least 1 */
    const void *request, *position;            /* `count` of each. Or both are NULL, and there are ... */
    const void *cu_seqlens, *starts;           /* ... requests + 1, and requests. starts may be NULL: all are 0 */
    kvprim_index_type token_type;              /* of request, position, cu_seqlens and starts */
    int32_t reserved_token;
    void *slot; /* `count`; written by the executing side: on the GPU, later work in the stream may use them */
    kvprim_index_type slot_type; /* int32 holds the slots of up to 2^31 rows */
    int32_t reserved_slot;
    int64_t count;
    uint32_t *rejected;      /* optional, as in kvprim_gather_desc */
    const void *page_starts; /* optional: requests + 1 of pages_type; pages_stride must be 0 */
} kvprim_slots_desc;

/* Aliasing: slot and rejected must overlap neither each other nor any other array (checked).
   Errors: NULL (descriptor, pages, slot, or neither cu_seqlens nor request and position), SIZE (names the field and the
   values), OVERLAP, ARGUMENT (both forms at once, starts without cu_seqlens, pages_stride beside page_starts, types, an
   array or counter that is not aligned, a reserved field that is not 0). */
KVPRIM_API KVPRIM_CHECKED kvprim_status kvprim_slots(const kvprim_slots_desc *desc);

/* >>transfer -------------------------------------------------------------------------------------------------------

   In every layer, for i in [0, count): dst row (dst_index[i] - dst_index_base) = src row (src_index[i] -
   src_index_base). A whole page can be a row: set row_bytes to the bytes of a page. For K and V caches pass twice the
   layers: K and V of each. dst and src may differ in every field of their geometry. */
typedef struct kvprim_transfer_desc {
    kvprim_table dst, src;   /* geometry, and layer 0's memory */
    void *const *dst_layers; /* optional host arrays of `layers` base pointers, in place of dst.data ... */
    void *const *src_layers; /* ... and src.data; free to reuse when kvprim_transfer returns */
    int64_t dst_layer_stride, src_layer_stride; /* layer to layer without such an array; 0: packed, padding included */
    int32_t layers;                             /* at most KVPRIM_MAX_LAYERS; 0 means 1 */
    int32_t same_cache; /* 1: dst and src are one cache, inside which rows are copied (copy-on-write) */
    int64_t row_bytes;
    const void *dst_index, *src_index;                /* int32 or int64, aligned as its C type; NULL: row i */
    kvprim_index_type index_type;                     /* of both, except ... */
    kvprim_index_type dst_index_type, src_index_type; /* ... where one of these says otherwise */
    int32_t host_index; /* 1: the indices are host memory, read before the call returns. The CPU ignores it */
    int64_t count;
    uint32_t *rejected; /* optional; counts each i once for which either index is past its table */
    int64_t dst_index_base, src_index_base;
    int64_t dst_index_stride, src_index_stride; /* elements from one index to the next; 0: 1 */
    void *const *dst_device_layers; /* optional, in place of dst_layers: `layers` base pointers that the executing */
    void *const *src_device_layers; /* ... side reads when it runs: device memory for kvprim_cuda_transfer */
    int64_t reserved;
} kvprim_transfer_desc;

/* More is KVPRIM_ERROR_SIZE. The check of so many layers takes less than 0.1 s in any order; the stride, in elements,
   fits 32 bits in bytes. */
enum { KVPRIM_MAX_LAYERS = 65536, KVPRIM_MAX_INDEX_STRIDE = 1 << 28 };

/* A row moves if both of its indices are in range. Repeated dst indices behave as duplicate slots do. Rows that convert
   cannot stay inside one cache: with same_cache the formats, if there are any, have the same type and no scales.
   Aliasing: no layer of dst overlaps a layer of src, or is the same as another layer of dst (checked), or overlaps one
   (not checked: layers may interleave). With same_cache dst and src have the same layers and geometry instead
   (checked), and the caller promises that this call does not both write and read a row, whatever i names it. If one
   does, the bytes of that row and of the rows it goes to are unspecified.
   With more than one layer the check takes about 34 KB of stack.
   Device layers: `rows` bounds every index, as always; dst.data (or src.data) is ignored. The pointers in the array are
   not known at the call, so nothing that depends on them is checked: NULL, overlap, memory that rows, strides and
   `bytes` describe. The array must not overlap what is written (checked if known). With same_cache there is one array.
   Errors: as kvprim_gather; ARGUMENT also for same_cache and host_index (neither 0 nor 1), same_cache with two caches,
   two arrays of layers or an array and a layer stride on one side, and device layers that are not aligned. */
KVPRIM_API KVPRIM_CHECKED kvprim_status kvprim_transfer(const kvprim_transfer_desc *desc);

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

/* Only sources may overlap each other. Where destinations do, bytes are unspecified (with KVPRIM_DEBUG: OVERLAP).
   Aliasing: no fragment's destination may share a byte with any fragment's source. src and dst may be one buffer. If
   the sources then lie between the destinations, there may be at most KVPRIM_MAX_COPIES fragments, and the check takes
   as long as that of kvprim_copy. [dst, dst + dst_bytes) must not overlap the array of fragments.
   Errors: NULL, ARGUMENT (reserved), SIZE, OVERLAP and BOUNDS (name the fragment). */
KVPRIM_API KVPRIM_CHECKED kvprim_status kvprim_unpack(const kvprim_unpack_desc *desc);

/* >>unpack_meta ----------------------------------------------------------------------------------------------------

   Unpack by descriptors that a network plugin writes, with a count that is known late. The layout is NCCL's: `union
   loadMeta` and `struct netUnpackMeta` in src/device/network/unpack/unpack_defs.h, read in NCCL 2.29.7. A plugin with
   device offload (NCCL_NET_DEVICE_UNPACK, such as GPUDirect-TCPX) receives into a bounce buffer. For each request it
   writes up to 2,048 descriptors (twice the 4 KB pages of 4 MB) and then their number, a uint64_t, to memory that is
   mapped for the GPU. 16 requests make a ring: request r uses row r % 16 of `mem` and element r % 16 of `cnt`:

       desc.meta = (const kvprim_unpack_meta_item *)meta->mem[r % 16], desc.count = &meta->cnt[r % 16];
       desc.max_count = 2048;

   Each descriptor moves: dst[dst_offset .. + bytes) = src[src_offset .. + bytes). */
typedef struct kvprim_unpack_meta_item {
    uint32_t src_offset, bytes; /* src_off, len; bytes may be 0 */
    uint64_t dst_offset;        /* dst_off */
} kvprim_unpack_meta_item;

typedef struct kvprim_unpack_meta_desc {
    const void *src; /* the receive buffer, of any alignment, as dst; fastest where both are multiples of 16 bytes */
    uint64_t src_bytes;
    void *dst;
    uint64_t dst_bytes;
    const kvprim_unpack_meta_item *meta; /* max_count of them, aligned to 16 bytes */
    const uint64_t *count;               /* of the descriptors to move */
    uint64_t max_count;                  /* at most KVPRIM_MAX_UNPACK_META */
    uint32_t *rejected;                  /* optional counter */
    int64_t reserved;                    /* must be 0 */
} kvprim_unpack_meta_desc;

enum { KVPRIM_MAX_UNPACK_META = 1 << 28 }; /* more is KVPRIM_ERROR_SIZE */

/* The side that executes reads *count and the descriptors when it does, and they must not change meanwhile. On the GPU
   they may hold anything until then, so nothing that they say is an error of the call:
   - A fragment that reaches past src_bytes or dst_bytes is skipped, and adds one to *rejected.
   - If *count is more than max_count, the first max_count are moved, and *rejected gets the excess, at most 2^31 - 1.
   max_count == 0 is KVPRIM_OK, as count == 0 is elsewhere.
   Aliasing: destinations must overlap neither each other nor any fragment's source. Nobody checks that: where they do,
   the bytes are unspecified. src and dst may be one buffer. [dst, dst + dst_bytes) and rejected must overlap neither
   each other nor the descriptors nor count (checked).
   Errors: NULL (desc, meta, count; src, dst unless of 0 bytes), ARGUMENT (reserved; not aligned), SIZE, OVERLAP. */
KVPRIM_API KVPRIM_CHECKED kvprim_status kvprim_unpack_meta(const kvprim_unpack_meta_desc *desc);

/* >>copy -----------------------------------------------------------------------------------------------------------

   Copies each item, in any order: `bytes` bytes from src, or zeros, to dst. Any size and alignment, also mixed. */
typedef struct kvprim_copy_item {
    const void *src; /* NULL: zeros */
    void *dst;
    uint64_t bytes; /* may be 0; then src and dst are ignored */
} kvprim_copy_item;

typedef struct kvprim_copy_desc {
    const kvprim_copy_item *items; /* host memory, free to reuse when the call returns */
    size_t count;                  /* at most KVPRIM_MAX_COPIES */
    int64_t reserved;              /* must be 0 */
} kvprim_copy_desc;

enum { KVPRIM_MAX_COPIES = 1 << 18 }; /* more is KVPRIM_ERROR_SIZE */

/* Only sources may overlap each other. Where destinations do, bytes are unspecified (with KVPRIM_DEBUG: OVERLAP).
   Aliasing: no destination may share a byte with any source or with the array of items (checked, with 42 KB of stack).
   Two passes over the items do if all destinations lie before or after all sources. Pages, whose addresses and sizes
   are multiples of one power of two, take a few passes more (4,096 pages of 4 KB: 0.07 ms). Otherwise starts are
   sorted, 4,096 a pass: up to 0.6 ms for 4,096 items, 0.07 s for KVPRIM_MAX_COPIES, 0.7 s if they crowd together.
   Errors: NULL (descriptor, items, dst), ARGUMENT (reserved), SIZE (count; an item past the last address), OVERLAP. */
KVPRIM_API KVPRIM_CHECKED kvprim_status kvprim_copy(const kvprim_copy_desc *desc);

#ifndef KVPRIM_NO_FETCH
/* >>fetch ----------------------------------------------------------------------------------------------------------

   For sparse attention: a request's rows lie in host memory, and hot_rows of them also in a hot table, which attention
   reads. Each call names the tokens each request wants. Those not hot are fetched into the least recently used rows.

   A state is the set of one request: state s owns the hot rows s * hot_rows to (s + 1) * hot_rows - 1, and knows which
   token each of them holds and in what order they were used. The entries of a request are its fresh tokens, then the
   tokens that its steps want, row by row. They are looked up in this order, and the last entry of a token counts as its
   last use. A token that is not in the set takes the hot row that was used first, of those that no entry of this call
   names (after a reset: the lowest that is empty). So what a call wants never evicts something else that it wants. */
typedef struct kvprim_fetch_set {
    void *memory;  /* of the executing side, aligned to 16 bytes; kvprim_fetch_reset() before the first call */
    int64_t bytes; /* there; at least kvprim_fetch_state_bytes() */
    int64_t states;
    int64_t hot_rows; /* of each state, at most KVPRIM_MAX_HOT_ROWS */
    int64_t tokens;   /* of each state, less than 2^31; numbers of tokens are less. 4 bytes each */
    int64_t entries;  /* of a request in one call, at most KVPRIM_MAX_FETCH_ENTRIES */
    int64_t reserved; /* 0 */
} kvprim_fetch_set;

enum { KVPRIM_MAX_HOT_ROWS = 65536, KVPRIM_MAX_FETCH_ENTRIES = 32768 }; /* more is KVPRIM_ERROR_SIZE */

typedef struct kvprim_fetch_desc {
    kvprim_fetch_set set;
    int64_t count;     /* requests, at most set.states */
    const void *state; /* `count`: the state of each request, or a negative number: padding. No two are the same */
    kvprim_index_type state_type;
    kvprim_index_type wanted_type; /* of wanted and fresh */
    const void *wanted;            /* count * steps rows of top_k tokens; negative: padding. Tokens may repeat */
    int64_t top_k, wanted_stride;  /* wanted_stride: elements from row to row; 0: top_k */
    int32_t steps;                 /* rows of each request, which make one working set; 0: 1 */
    int32_t reserved_steps;
    const void *fresh; /* optional: `count` rows of fresh_count tokens whose hot rows the caller writes */
    int64_t fresh_count, fresh_stride; /* after this call: they get one, and nothing is fetched. 0: fresh_count */
    /* Where the row of a token lies in k and v: row page * page_rows + token % page_rows, where page is number token /
       page_rows of the request's max_pages in `pages`. page_rows = 1: a table of rows. No pages: token t is row t. */
    const void *pages;
    kvprim_index_type pages_type;
    int32_t pages_by_state;                     /* 0: request i has row i of `pages`; 1: row state[i] */
    int64_t max_pages, pages_stride, page_rows; /* < 2^31 pages; pages_stride: elements from row to row; 0: max_pages */
    int64_t host_rows;                          /* the bound of rows in k and v, less than 2^31; 0: k.rows */
    kvprim_table k_hot, v_hot, k, v; /* without formats. K only: leave all of v at zero; a plan alone: all of k, too */
    int64_t k_bytes, v_bytes;        /* of a row */
    int32_t *rows;                   /* count * steps * top_k: the hot row of each wanted token, or -1 */
    int32_t *fresh_rows;             /* count * fresh_count: those of fresh ones */
    /* Optional, count * (fresh_count + steps * top_k) of each: what was fetched from where to where. Request i's rows
       begin at i times that many. Of fresh tokens the source is -1, and all that is not used is -1. So
       kvprim_transfer() with these indices fetches the same for other layers. */
    int32_t *plan_src, *plan_dst;
    /* Optional, as in kvprim_gather_desc. Of entries with a number that is not negative: misses were fetched, hits are
       all others with a row, fresh ones excepted, and rejected have none. */
    uint32_t *hits, *misses, *rejected;
    int64_t reserved; /* 0 */
} kvprim_fetch_desc;

/* A set's bytes, by its other fields: just over 24 * (hot_rows + entries) + 4 * tokens a state; 0: out of range. */
KVPRIM_API size_t kvprim_fetch_state_bytes(const kvprim_fetch_set *set);

/* Makes a state empty, for a new request; state -1: all states, before the first call. A copy of all of a set's memory
   is the same set, on CPU and GPU: its first bytes count launches, which the list after them names.
   Errors: NULL, SIZE (names the field and the values), ARGUMENT (memory that is not aligned, reserved). */
KVPRIM_API KVPRIM_CHECKED kvprim_status kvprim_fetch_reset(const kvprim_fetch_set *set, int64_t state);

/* An entry has no row and counts as rejected if its token is >= tokens; if it is not hot, and the request has no page
   for it, or its row is outside host_rows; if more tokens are wanted than hot_rows, for those that come too late; if
   state[i] is >= states, or another request of the call has the same (one of them is served; on the CPU the first). A
   rejected entry evicts nothing. Whatever the arrays and the set hold, nothing outside them and the tables is touched.
   Aliasing: all that is written (set.memory, hot tables, rows, plan, counters) must overlap nothing else (checked).
   Errors: as kvprim_transfer; NULL (set.memory, state, wanted, rows, fresh_rows, one of two plan arrays), SIZE also for
   fields of `pages` without it, ARGUMENT also for formats. */
KVPRIM_API KVPRIM_CHECKED kvprim_status kvprim_fetch(const kvprim_fetch_desc *desc);
#endif

#ifndef KVPRIM_NO_KEYS
/* >>keys -----------------------------------------------------------------------------------------------------------

   Keys of blocks of tokens, bit for bit as engines make them: each is a hash of the key before it, the parent, and of
   a block's tokens, so equal keys mean equal prefixes. What remains of count / block_tokens gets no key.

   rule               read in           a block's key                                without a parent
   VLLM_SHA256        vLLM 0.33.0       SHA-256(pickle(parent, tokens, extra))       the first parent is the hash of
   VLLM_SHA256_CBOR                     SHA-256(CBOR of the same)                    ... "vllm-none-hash", in that form
   VLLM_XXHASH(_CBOR)                   XXH3-128(either)                             an error: vLLM draws a seed
   SGLANG             SGLang 0.5.23     SHA-256(parent, tokens: uint32)              SHA-256(tokens)
   TRTLLM             TensorRT-LLM, V2  SHA-256(parent, tokens: uint32)              the first parent: SHA-256(a byte 0)
   LMCACHE            LMCache 0.5.6     SHA-256(CBOR(parent, tokens, ())), 8 bytes   the first parent is 0
   DYNAMO             Dynamo 1.6.1      XXH3-64(parent, own), seed 1337              own: XXH3-64(tokens: uint32, extra)
   XXH3               kvprim            XXH3-128(parent, tokens: int32)              the first parent is 0

   Parents    The last key of a call continues its chain in the next one. In older vLLM, or with PYTHONHASHSEED, and
              for XXHASH, the first parent is its NONE_HASH; LMCache beside vLLM takes its first 8 bytes. SGLang's
              extra_key and cache_salt, TensorRT-LLM's LoRA and salt are in its first parent alone, a SHA-256.
   Tokens     vLLM's and LMCache's are any int64. SGLang's are at least 0; where one of a block is above 2^32 - 1, all
              are uint64, after a byte 255. TensorRT-LLM's are in [0, 2^31), Dynamo's in [0, 2^32), XXH3's int32.
              Numbers are little-endian, in CBOR big-endian.
   Extra      vLLM: pickle or CBOR, in place of None, of the tuple of ("lora", name, path), ("mm", identifier,
              offset), ("cache_salt", salt), ("prompt_embeds", digest); pickle's memo goes on from 2. TensorRT-LLM:
              digests of 32 bytes, each in place of a token where an image begins. Dynamo: sorted hashes of images
              (uint64). SGLang has images in its tokens.
   Not here   LMCache's hashes without pre_caching_hash_algorithm: sha256_cbor (Python's own, BLAKE3); TensorRT-LLM's
              keys before V2 as of its commit 065ff9e (then with 8 bytes a token); Dynamo's positional ones. For a
              partial last block call again with block_tokens that small. */
typedef enum kvprim_key_rule {
    KVPRIM_KEY_VLLM_SHA256 = 1,
    KVPRIM_KEY_VLLM_SHA256_CBOR,
    KVPRIM_KEY_VLLM_XXHASH, /* rules of XXH3 need xxhash.h, 0.8 or newer, before this header in the implementing unit */
    KVPRIM_KEY_VLLM_XXHASH_CBOR,
    KVPRIM_KEY_SGLANG,
    KVPRIM_KEY_TRTLLM,
    KVPRIM_KEY_LMCACHE,
    KVPRIM_KEY_DYNAMO,
    KVPRIM_KEY_XXH3
} kvprim_key_rule;

/* What a block's key covers beside its tokens. */
typedef struct kvprim_key_extra {
    int64_t block; /* of this call; ascending. At most one for a block, except ... */
    int64_t token; /* ... in TRTLLM, where it replaces this token of the block; ascending. Elsewhere 0 */
    const void *data;
    int64_t bytes;
} kvprim_key_extra;

typedef struct kvprim_keys_desc {
    const void *tokens;           /* int32 or int64, aligned as its C type */
    kvprim_index_type token_type; /* the keys are the same for both */
    kvprim_key_rule rule;
    int64_t count, block_tokens;
    const void *parent;            /* NULL: see above */
    int64_t parent_bytes;          /* 0: a key's; vLLM takes up to 64 */
    const kvprim_key_extra *extra; /* extra_count of them, or NULL */
    int64_t extra_count;
    void *keys;         /* count / block_tokens of kvprim_key_bytes(rule), packed */
    int64_t keys_bytes; /* the room for them */
    /* DYNAMO's own; 0: 1337. Add the XXH3-64 of a LoRA's name, and that of a cache namespace with seed 1. */
    uint64_t seed;
    /* 1 for EAGLE: SGLANG hashes pairs (i, i + 1), DYNAMO also a block's next token; (count - 1) / block_tokens keys */
    int32_t bigrams, reserved;
} kvprim_keys_desc;

/* Of a block: 5 for each int32 token, 10 for an int64, twice that with bigrams, and its extra. */
enum { KVPRIM_MAX_KEY_BLOCK = 24576 };

/* The bytes of a key: 32, 16 or 8. 0 for an unknown rule. */
KVPRIM_API int64_t kvprim_key_bytes(kvprim_key_rule rule);

/* Computes the keys of n requests. Chains of SHA-256 run two at a time, each in 0.62 to 0.71 of its time alone. Takes
   51 KB of stack, and uses SHA-NI, ARMv8's SHA-2 and AVX-512 VBMI2 if the processor has them.
   Aliasing: keys must not overlap tokens, parent and extra (checked), what extra points to, or another request's.
   Errors name the request: NULL, SIZE, OVERLAP, ARGUMENT (rule, types, a field that has no such value or no meaning for
   the rule, alignment), UNSUPPORTED (compiled without xxhash.h). */
KVPRIM_API KVPRIM_CHECKED kvprim_status kvprim_keys(const kvprim_keys_desc *requests, size_t n);

/* The number that stands for a key in events of its engine: vLLM's last 8 bytes, others' first (big-endian, except
   DYNAMO's). SGLang's is this as int64. */
KVPRIM_API uint64_t kvprim_key_event(kvprim_key_rule rule, const void *key);

/* SHA-256 of a buffer, 32 bytes: for first parents. */
KVPRIM_API void kvprim_sha256(const void *data, size_t bytes, void *digest);

/* Keys and their values (page numbers) in the caller's memory. The caller locks: any number of threads may be in
   kvprim_key_table_longest, but none beside put, erase and init. The fields are read-only. */
typedef struct kvprim_key_table {
    void *memory;
    uint64_t slots;
    int64_t count, key_bytes, reserved;
} kvprim_key_table;

/* The bytes in which so many keys are found fast. 0 if keys or key_bytes (a multiple of 8 up to 64) is out of range. */
KVPRIM_API size_t kvprim_key_table_bytes(int64_t keys, int64_t key_bytes);

/* init makes an empty table in `memory`, aligned as int64_t. put adds a key or replaces its value; values are at least
   0. Errors: NULL, SIZE (names the value; a table keeps one slot empty), ARGUMENT (alignment). */
KVPRIM_API KVPRIM_CHECKED kvprim_status kvprim_key_table_init(kvprim_key_table *table, void *memory, size_t bytes,
                                                              int64_t key_bytes);
KVPRIM_API KVPRIM_CHECKED kvprim_status kvprim_key_table_put(kvprim_key_table *table, const void *key, int64_t value);

/* Removes a key and returns its value, or -1 if it was not there. */
KVPRIM_API int64_t kvprim_key_table_erase(kvprim_key_table *table, const void *key);

/* How many of n packed keys are there before the first that is not. Their values go to `values`, unless it is NULL. */
KVPRIM_API size_t kvprim_key_table_longest(const kvprim_key_table *table, const void *keys, size_t n, int64_t *values);
#endif

/* >>move -----------------------------------------------------------------------------------------------------------

   Gather, store and transfer come down to moves: in every layer, dst row = src row, where either side may name its
   rows by an index. These functions check a descriptor once and write the moves that it stands for. Run them as often
   as needed with kvprim_cpu_move() or kvprim_cuda_move(), which check nothing again.

   A move holds the pointers of its descriptor, not what they point to: each run reads the layer arrays and the indices
   again. Between runs the caller may lower count, and point table.data (or layers or device_layers, if set), index,
   rejected, format.scales, nans and tensor_scale at other memory of the same kind, layout and alignment. All other
   fields are read-only, and rejected of a store's V move, which does not count. A graph keeps its pointers. */

/* One side: where its rows lie and what names them. */
typedef struct kvprim_side {
    kvprim_table table;           /* resolved, format NULL; pages and heads without gaps between them are left out */
    const void *index;            /* NULL: row i */
    kvprim_index_type index_type; /* KVPRIM_I32 or KVPRIM_I64, or 0 without an index */
    int32_t page_shift;           /* page_rows == 1 << page_shift; -1: no power of two */
    int64_t index_base, index_stride;
    void *const *layers; /* one base pointer per layer; NULL: they lie layer_stride bytes apart from table.data on */
    int64_t layer_stride;
    int64_t piece_bytes;        /* of a row's elements in this side's type, / heads */
    uint64_t bytes;             /* of one layer, from data to the end of the last row that a move can touch */
    void *const *device_layers; /* as `layers`, but the executing side reads it when it runs; NULL: not used */
    int32_t host_index, reserved;
    /* The table's, with its defaults. If bytes move as they are, dtype, scale, scales and nans are 0, and the rest is
       unspecified. An empty table has no scales. If layers share theirs, scale_layer_stride is 0 */
    kvprim_format format;
} kvprim_side;

/* The names of a descriptor's fields, for errors. */
typedef struct kvprim_move_names {
    const char *function, *row_bytes, *dst, *dst_index, *src, *src_index;
} kvprim_move_names;

typedef struct kvprim_move {
    kvprim_side dst, src;
    int64_t row_bytes, count; /* row_bytes: of src's elements; dst's are dst.piece_bytes * dst.table.heads */
    int32_t layers;
    int32_t zero; /* 1: a dst row whose source is out of range becomes zeros; 0: it is left alone */
    int32_t same_cache, reserved_cache;
    uint32_t *rejected; /* counted in layer 0 */
    const kvprim_move_names *names;
} kvprim_move;

/* Each checks `desc` as kvprim_gather(), _store() or _transfer() does, with the same status and text, and writes its
   moves: one, or two for a store (K, V; count 0 if no V). A move converts if dst.format.dtype is not 0; it is 0 where
   both formats are one type without scales. After an error `moves` is unspecified. Errors also: NULL (moves). */
KVPRIM_API KVPRIM_CHECKED kvprim_status kvprim_gather_moves(const kvprim_gather_desc *desc, kvprim_move *moves);
KVPRIM_API KVPRIM_CHECKED kvprim_status kvprim_store_moves(const kvprim_store_desc *desc, kvprim_move *moves);
KVPRIM_API KVPRIM_CHECKED kvprim_status kvprim_transfer_moves(const kvprim_transfer_desc *desc, kvprim_move *moves);

/* Runs n moves one after the other. Errors: NULL (moves, with n > 0). */
KVPRIM_API KVPRIM_CHECKED kvprim_status kvprim_cpu_move(const kvprim_move *moves, size_t n);

/* Where layer `layer` of a side starts; 0 <= layer < layers. NULL if the table is empty, or if device_layers is set. */
KVPRIM_API char *kvprim_side_layer(const kvprim_side *side, int64_t layer);

#ifndef KVPRIM_NO_LAYOUTS
/* >>layout ---------------------------------------------------------------------------------------------------------

   Caches of engines by name. A layout is the order of its dimensions, the slowest first: L layers, B pages, H heads, N
   rows of a page, 2 for K and V, and C, the bytes of a head, which are last. So "LB2NHC" is [layer][page][K, V][row]
   [head][bytes]. Without 2, each head is K and then V. Any order is a name, so vLLM's six are ("LBHNC", "BLNHC", ...).
   examples/LAYOUTS.md lists the other names: flashinfer_, sglang_, trtllm, dynamo_, and LMCache's.

   Caches whose rows hold quantised elements (K of a store), scales, and elements that are copied (V):

       fp8_ds_mla         DeepSeek V3.2 in vLLM 0.33, rows of 656 bytes: 512 F8E4M3, an fp32 scale for each 128 of them,
                          64 bf16. Scales are powers of two, 2^-13 or more; FlashMLA reads only such scales exactly
       fp8_ds_mla_sglang  the same with SGLang's scales, any of 2^-126 or more; stored = x * (1 / scale). vLLM before
                          July 2026 divided by such scales: set k_format.scale_inverse to 0
       fp8_ds_mla_v4      DeepSeek V4, pages of rows of 448 F8E4M3 and 64 bf16; then 7 F8E8M0 scales for each row, of 64
                          elements each, and a byte that is not touched
       fp8_ds_mla_v41     DeepSeek V4.1, pages of rows of 512 F8E4M3; then 16 F8E8M0 scales for each row
       fp8_indexer        DeepSeek's indexer, pages of rows of 128 F8E4M3; then an fp32 scale for each row
       fp8_indexer_ue8m0  the same with scales that are powers of two

   In the last four, as in the engines, no scale is less than 1e-4 / 448. A store needs k of k_elements bf16, with a
   format that says so, and v of v_elements * 2 bytes (0: none) without. */
typedef struct kvprim_layout_sizes {
    void *data;               /* byte 0; NULL: the tables have no data, but all else is known */
    int64_t rows, page_rows;  /* of a layer; of a page. The last page need not be full */
    int64_t page_stride;      /* page to page; 0: packed */
    int64_t k_bytes, v_bytes; /* of a row with all its heads; v_bytes 0: no V, as with MLA. Both 0 if quantised */
    int32_t layers, heads;    /* 0 means 1 */
} kvprim_layout_sizes;

typedef struct kvprim_layout {
    kvprim_table k_cache, v_cache; /* layer 0. A quantised k_cache.format points to k_format: keep this structure */
    kvprim_format k_format;
    int64_t k_elements, v_elements;         /* of a row, if quantised: what is converted, and what is copied */
    int64_t k_bytes, v_bytes;               /* of a row's elements in the cache: the row_bytes of its transfers */
    int64_t k_layer_stride, v_layer_stride; /* of transfers. If layers are tensors of their own, give transfers an
                                               array of pointers instead, V's v_offset after K's in the same tensor */
    int64_t v_offset;                       /* from data to V. After an order with 2 first V may lie elsewhere, too */
    int64_t bytes;                          /* of the memory at data, with V and all layers */
    int32_t layers, reserved;
} kvprim_layout;

/* Fills *layout. Errors: NULL (name, sizes, layout), SIZE (no rows, page_rows or bytes, a negative one, heads that do
   not divide a row, page_stride less than a page, too large), ARGUMENT (unknown name; heads or bytes if quantised). */
KVPRIM_API KVPRIM_CHECKED kvprim_status kvprim_layout_find(const char *name, const kvprim_layout_sizes *sizes,
                                                           kvprim_layout *layout);

/* Hands rows, all layers and some heads of them, to a rank with other heads, pages or another layout, by an area on
   each side: [layer][K, V][row][head][bytes], whatever the caches are. So each rank plans alone, the area (or a layer)
   is one run, where a cache has one for each piece, and transfers pack and unpack it. */
typedef struct kvprim_pack_desc {
    const kvprim_layout *cache; /* of this rank, without a format */
    int32_t head, heads;        /* of this cache; heads 0: all from `head` on. Of the two ranks the same heads */
    const void *slot;           /* row i of the area is row slot[i] of the cache (NULL: row i). Rows out of range are */
    kvprim_index_type slot_type; /* ... skipped: the area keeps what it held, so the other rank must skip them, too */
    int64_t count;
    void *staging; /* NULL: only `bytes` is of use */
    int64_t staging_bytes;
} kvprim_pack_desc;

typedef struct kvprim_pack {
    kvprim_transfer_desc pack[2], unpack[2]; /* cache to area, area to cache: K, V. count is 0 if there is no V */
    int64_t head_offset[2];                  /* of K and V, in the cache's tables; an array of pointers to layers that
                                                replaces their `data` must have it added to each */
    int64_t bytes;                           /* of the area */
} kvprim_pack;

/* Errors: NULL (desc, plan, cache), SIZE (count, heads, a cache of no layers, staging_bytes), ARGUMENT (a format). */
KVPRIM_API KVPRIM_CHECKED kvprim_status kvprim_pack_plan(const kvprim_pack_desc *desc, kvprim_pack *plan);

/* Lists what n moves copy, for NIXL, Mooncake, UCX, cudaMemcpyBatchAsync or kvprim_copy: row by row, each head by head,
   each of all layers. Rows that follow each other on both sides, their heads and layers, and then items, become one if
   there are no gaps. src NULL: a gather's zeros. Indices and layers are host memory; *rejected is left alone. Writes at
   most `max` items and returns how many there are, or -1 on an error: then items are unspecified. Errors: NULL (moves,
   items), UNSUPPORTED (rows that convert, device layers, heads of which neither size divides the other). */
KVPRIM_API int64_t kvprim_runs(const kvprim_move *moves, size_t n, kvprim_copy_item *items, int64_t max);
#endif

/* >>launch --------------------------------------------------------------------------------------------------------- */

/* How kvprim_cuda.cuh runs a call. Zero-initialise, then set what differs. A NULL launch is one of zeros. */
typedef struct kvprim_cuda_launch {
    struct CUstream_st *stream; /* a cudaStream_t. NULL: the legacy default stream, however the file is compiled */
    int32_t pdl;                /* 1: programmatic dependent launch, on sm_90 and newer if this file is compiled for it
                                   and the driver supports CUDA 12.3 (no effect elsewhere). The kernel may start before
                                   its predecessor in the stream ends; it waits for it before its first access. Between
                                   kernels that are not launched that way it costs 0.2 us (H200). Do not put it right
                                   before one that is and does not wait, as some of NCCL's are */
    int32_t max_sms;            /* multiprocessors to use at most; 0: no limit, except that a transfer to or from the
                                   host may take few by itself: see kvprim_cuda_transfer */
    int64_t reserved;           /* 0 */
} kvprim_cuda_launch;

/* >>check ----------------------------------------------------------------------------------------------------------

   The checks alone. If the descriptor is good and `resolved` is not NULL, it becomes a copy in which all tables and
   indices that the call uses have their defaults. Formats are not copied: moves have them with their defaults. */
KVPRIM_API KVPRIM_CHECKED kvprim_status kvprim_gather_check(const kvprim_gather_desc *desc,
                                                            kvprim_gather_desc *resolved);
KVPRIM_API KVPRIM_CHECKED kvprim_status kvprim_store_check(const kvprim_store_desc *desc, kvprim_store_desc *resolved);
KVPRIM_API KVPRIM_CHECKED kvprim_status kvprim_transfer_check(const kvprim_transfer_desc *desc,
                                                              kvprim_transfer_desc *resolved);
KVPRIM_API KVPRIM_CHECKED kvprim_status kvprim_slots_check(const kvprim_slots_desc *desc, kvprim_slots_desc *resolved);
KVPRIM_API KVPRIM_CHECKED kvprim_status kvprim_unpack_check(const kvprim_unpack_desc *desc);
KVPRIM_API KVPRIM_CHECKED kvprim_status kvprim_unpack_meta_check(const kvprim_unpack_meta_desc *desc);
KVPRIM_API KVPRIM_CHECKED kvprim_status kvprim_copy_check(const kvprim_copy_desc *desc);
#ifndef KVPRIM_NO_FETCH
/* Also writes K's and V's moves (count 0 if none) unless `moves` is NULL. Their indices are in the set's memory. */
KVPRIM_API KVPRIM_CHECKED kvprim_status kvprim_fetch_check(const kvprim_fetch_desc *desc, kvprim_fetch_desc *resolved,
                                                           kvprim_move *moves);
KVPRIM_API KVPRIM_CHECKED kvprim_status kvprim_fetch_reset_check(const kvprim_fetch_set *set, int64_t state);
#endif

/* Sets kvprim_last_error() from a printf format and returns `status`: for kvprim's other headers and for wrappers. */
KVPRIM_API kvprim_status kvprim_fail(kvprim_status status, const char *format, ...)
#if defined(__GNUC__) || defined(__clang__)
    __attribute__((format(printf, 2, 3)))
#endif
    ;

#ifdef __cplusplus
}
#endif

/* For kvprim's headers alone: clang before 20 has none. Then kernels may copy their parameters to local memory. */
#if defined(__clang__) && defined(__CUDA__) && __clang_major__ < 20
#define KVPRIM_GRID_CONSTANT
#else
#define KVPRIM_GRID_CONSTANT __grid_constant__
#endif

/* For kvprim's headers alone. KVPRIM_TRY returns any status except KVPRIM_OK; KVPRIM_REFUSE fails on the condition. */
#define KVPRIM_TRY(call)                                                                                               \
    do {                                                                                                               \
        const kvprim_status try_status = (call);                                                                       \
        if (!KVPRIM_LIKELY(try_status == KVPRIM_OK))                                                                   \
            return try_status;                                                                                         \
    } while (0)
#define KVPRIM_REFUSE(condition, status, ...)                                                                          \
    do {                                                                                                               \
        if (!KVPRIM_LIKELY(!(condition)))                                                                              \
            return kvprim_fail(KVPRIM_ERROR_##status, __VA_ARGS__);                                                    \
    } while (0)

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

/* >>impl_rows -- the index rule and the page arithmetic, for this header and for kernels */
#if (defined(KVPRIM_IMPLEMENTATION) || defined(KVPRIM_CORE_IMPLEMENTATION) || defined(KVPRIM_CUDA_IMPLEMENTATION) ||   \
     defined(KVPRIM_ELEMENTS) || defined(__CUDACC__) || defined(KVPRIM_CUDA_EMULATE)) &&                               \
    !defined(KVPRIM_ANYWHERE)
#ifdef __CUDACC__
#define KVPRIM_ANYWHERE static __host__ __device__ __forceinline__
#else
#define KVPRIM_ANYWHERE static inline
#endif

/* The index rule (>>table): index - base is the row if it is inside, and cannot overflow where index >= base. */
KVPRIM_ANYWHERE int kvpi_is_inside(int64_t index, int64_t base, uint64_t rows)
{
    return index >= base && (uint64_t)index - (uint64_t)base < rows;
}

/* The number of row i of a side, or -1 by the index rule; *past is set if the index is past the table. */
KVPRIM_ANYWHERE int64_t kvpi_find_number(const kvprim_side *side, int64_t i, int *past)
{
    if (!side->index)
        return i;
    const int64_t at = i * side->index_stride, base = side->index_base;
    const int64_t index =
        side->index_type == KVPRIM_I64 ? ((const int64_t *)side->index)[at] : ((const int32_t *)side->index)[at];
    if (kvpi_is_inside(index, base, (uint64_t)side->table.rows))
        return (int64_t)((uint64_t)index - (uint64_t)base);
    *past |= index >= base;
    return -1;
}

/* a / b; neither is negative. 32 bits take a quarter of the instructions that 64 do. */
KVPRIM_ANYWHERE int64_t kvpi_divided(int64_t a, int64_t b)
{
    return ((uint64_t)a | (uint64_t)b) >> 32 ? a / b : (int64_t)((uint32_t)a / (uint32_t)b);
}

/* Bytes from where a layer starts to a row of a side. */
KVPRIM_ANYWHERE int64_t kvpi_row_offset(const kvprim_side *side, int64_t row)
{
    const kvprim_table *const t = &side->table;
    if (t->page_rows == 0)
        return row * t->stride;
    const int64_t page = side->page_shift >= 0 ? row >> side->page_shift : kvpi_divided(row, t->page_rows);
    return page * t->page_stride + (row - page * t->page_rows) * t->stride;
}

#ifndef KVPRIM_NO_FETCH
/* A set's memory. First what a running call uses (zeros after a full reset): kvpi_fetch_words of 8 bytes, each state's
   last launch, and from `list` on rows to copy: source, launch, destination, launch. Then states, `each` int32 apart:

       head, tail, 0, 0      of the log
       log[logged]           slots in the order of their use
       stamp[hot_rows]       where in the log a slot lies: its other entries there are dead
       tag[hot_rows]         the token that a slot holds, or -1
       map[tokens]           the slot of a token, or -1

   Every slot is in the log once, and what is before head is dead. A call appends an entry for each of its own, and
   then, if the next call had no room, moves what is alive to the log's start. */
enum { kvpi_fetch_words = 8, kvpi_fetch_ends = 4 };

typedef struct kvpi_fetch_layout {
    int64_t hot_rows, tokens, logged, each; /* each: int32 */
    int64_t list, states, bytes;            /* list, states: where they begin, in bytes */
} kvpi_fetch_layout;

KVPRIM_ANYWHERE kvpi_fetch_layout kvpi_fetch_layout_of(const kvprim_fetch_set *set)
{
    kvpi_fetch_layout l;
    l.hot_rows = set->hot_rows, l.tokens = set->tokens;
    l.logged = 4 * set->hot_rows + 2 * set->entries;
    l.each = (kvpi_fetch_ends + l.logged + 2 * l.hot_rows + l.tokens + 3) / 4 * 4;
    l.list = (8 * kvpi_fetch_words + 4 * set->states + 15) / 16 * 16;
    l.states = l.list + 16 * set->states * set->entries;
    l.bytes = l.states + 4 * set->states * l.each;
    return l;
}

/* Word w of a state that is empty. */
KVPRIM_ANYWHERE int32_t kvpi_fetch_empty(const kvpi_fetch_layout *l, int64_t w)
{
    if (w < kvpi_fetch_ends)
        return w == 1 ? (int32_t)l->hot_rows : 0;
    w -= kvpi_fetch_ends;
    w -= w < l->logged ? 0 : l->logged;
    return w < l->hot_rows ? (int32_t)w : -1;
}
#endif
#endif /* KVPRIM_ANYWHERE */

/* >>impl_elements -- conversions of elements. The other headers include this one again with KVPRIM_ELEMENTS for them.

   They work on bits, and use fp32 arithmetic only for sums rounded to nearest that no fast-math option changes. Those
   of one element have no branches, so compilers vectorise them. kvpi_quotient() and kvpi_product() do depend on these.

   A new element type touches
       here              the enum (>>dtype), kvpi_to_ and kvpi_of_ its name, kvpi_dtype_bytes() to kvpi_to_element(),
                         KVPRIM_NARROW_LIST, kvpi_converts(); the table of >>format
       kvprim_cuda.cuh   kvpc_decode_word(), kvpc_encode_word(), KVPRIM_BY_TYPE or KVPRIM_BY_PACKED_TYPE. Kernels of
                         plain rows know fewer types: kvpc_is_plain_conversion()
       kvprim_nccl.h     kvpn_type_of(); if own kernels reduce it, a struct of >>impl_pack, its bit beside kvpn_is_f32,
                         kvpn_reduction<kvpn_any>. Its all ones must be a NaN */
#if (defined(KVPRIM_IMPLEMENTATION) || defined(KVPRIM_CORE_IMPLEMENTATION) || defined(KVPRIM_ELEMENTS)) &&             \
    !defined(KVPRIM_ELEMENT)

#if defined(__FAST_MATH__) || defined(__RECIPROCAL_MATH__) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__)
#error "kvprim converts elements as IEEE 754 has it: compile this unit without -ffast-math"
#endif

#include <float.h>
#include <string.h>

#define KVPRIM_ELEMENT KVPRIM_ANYWHERE

/* PTX knows the 8-bit floating types from sm_89 on (by CUDA 12.1). */
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ >= 900 || (__CUDA_ARCH__ >= 890 && CUDART_VERSION >= 12010))
#define KVPRIM_PTX_F8
#endif

KVPRIM_ELEMENT uint32_t kvpi_bits_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

KVPRIM_ELEMENT float kvpi_float_of(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* The x87 rounds to fp32 only when it stores to memory. */
KVPRIM_ELEMENT float kvpi_rounded(float x)
{
#if !defined(__CUDA_ARCH__) && defined(FLT_EVAL_METHOD) && FLT_EVAL_METHOD != 0
    volatile float y = x;
    return y;
#else
    return x;
#endif
}

KVPRIM_ELEMENT float kvpi_quotient(float x, float y)
{
    return kvpi_rounded(x / y);
}

KVPRIM_ELEMENT float kvpi_product(float x, float y)
{
    return kvpi_rounded(x * y);
}

KVPRIM_ELEMENT int kvpi_is_nan(float x)
{
    return (kvpi_bits_of(x) & 0x7fffffff) > 0x7f800000;
}

/* From fp32, rounded to nearest, ties to even. Results below the least normal value are `tiny`: adding a float whose
   last bit stands for the type's least value rounds to a multiple of that, and leaves it in the low bits. Others are
   `large`: the exponent gets the type's bias, and half a unit of the type's last bit is added before the shift. */
KVPRIM_ELEMENT uint32_t kvpi_to_e4m3(float x)
{
    const uint32_t bits = kvpi_bits_of(x), a = bits & 0x7fffffff;
    const uint32_t tiny = kvpi_bits_of(kvpi_float_of(a) + 16384.0f) - 0x46800000;
    const uint32_t large = (a - 0x3c000000 + 0x7ffff + (a >> 20 & 1)) >> 20;
    const uint32_t nearest = a < 0x3c800000 ? tiny : large, most = nearest < 0x7e ? nearest : 0x7e;
    return a > 0x7f800000 ? 0x7f : most | (bits >> 24 & 0x80);
}

KVPRIM_ELEMENT uint32_t kvpi_to_e5m2(float x)
{
    const uint32_t bits = kvpi_bits_of(x), a = bits & 0x7fffffff;
    const uint32_t tiny = kvpi_bits_of(kvpi_float_of(a) + 128.0f) - 0x43000000;
    const uint32_t large = (a - 0x38000000 + 0xfffff + (a >> 21 & 1)) >> 21;
    const uint32_t nearest = a < 0x38800000 ? tiny : large, most = nearest < 0x7b ? nearest : 0x7b;
    return a > 0x7f800000 ? 0x7f : most | (bits >> 24 & 0x80);
}

/* NaN becomes 0. Adding 2^23 leaves the rounded magnitude, at most 127, in the low bits. */
KVPRIM_ELEMENT uint32_t kvpi_to_int8(float x)
{
    const uint32_t bits = kvpi_bits_of(x), a = bits & 0x7fffffff, most = a < 0x42fe0000 ? a : 0x42fe0000;
    const uint32_t nearest = kvpi_bits_of(kvpi_float_of(most) + 8388608.0f) - 0x4b000000;
    const uint32_t value = a > 0x7f800000 ? 0 : nearest;
    return (bits >> 31 ? 0 - value : value) & 0xff;
}

KVPRIM_ELEMENT uint32_t kvpi_to_int4(float x)
{
    const uint32_t bits = kvpi_bits_of(x), a = bits & 0x7fffffff, most = a < 0x40e00000 ? a : 0x40e00000;
    const uint32_t nearest = kvpi_bits_of(kvpi_float_of(most) + 8388608.0f) - 0x4b000000;
    const uint32_t value = a > 0x7f800000 ? 0 : nearest;
    return (bits >> 31 ? 0 - value : value) & 0xf;
}

/* NaN becomes 0. Adding 2^22 times the power of two at or below the magnitude (1 at least) rounds it to halves of that
   power, whose number is left in the low bits. The code is this number, plus 2 for each doubling of the power. */
KVPRIM_ELEMENT uint32_t kvpi_to_e2m1(float x)
{
    const uint32_t bits = kvpi_bits_of(x), a = bits & 0x7fffffff, most = a < 0x40c00000 ? a : 0x40c00000;
    const uint32_t power = most < 0x3f800000 ? 0x3f800000 : most & 0x7f800000;
    const uint32_t sum = kvpi_bits_of(kvpi_float_of(most) + kvpi_float_of(power + 0x0b000000));
    const uint32_t code = (sum + (sum >> 22) - (0x4a800000 >> 22)) & 7;
    return a > 0x7f800000 ? 0 : code | (bits >> 28 & 8);
}

KVPRIM_ELEMENT uint32_t kvpi_to_f16(float x)
{
    const uint32_t bits = kvpi_bits_of(x), a = bits & 0x7fffffff;
    const uint32_t tiny = kvpi_bits_of(kvpi_float_of(a) + 0.5f) - 0x3f000000;
    const uint32_t large = (a - 0x38000000 + 0xfff + (a >> 13 & 1)) >> 13;
    const uint32_t nearest = a < 0x38800000 ? tiny : large, most = nearest < 0x7c00 ? nearest : 0x7c00;
    return a > 0x7f800000 ? 0x7fff : most | (bits >> 16 & 0x8000);
}

KVPRIM_ELEMENT uint32_t kvpi_to_bf16(float x)
{
    const uint32_t bits = kvpi_bits_of(x), nearest = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (bits & 0x7fffffff) > 0x7f800000 ? 0x7fff : nearest;
}

KVPRIM_ELEMENT uint32_t kvpi_to_f32(float x)
{
    const uint32_t bits = kvpi_bits_of(x);
    return (bits & 0x7fffffff) > 0x7f800000 ? 0x7fffffff : bits;
}

/* To fp32, which holds every value of these types. Values below the least normal one are `tiny`: their bits are put
   into such a float, which is then subtracted. */
KVPRIM_ELEMENT float kvpi_of_e4m3(uint32_t x)
{
    const uint32_t a = x & 0x7f, sign = (x & 0x80) << 24, tiny = kvpi_bits_of(kvpi_float_of(0x46800000 + a) - 16384.0f);
    const uint32_t large = (a << 20) + 0x3c000000, value = a < 8 ? tiny : large;
    return kvpi_float_of(a == 0x7f ? 0x7fffffff : value | sign);
}

KVPRIM_ELEMENT float kvpi_of_e5m2(uint32_t x)
{
    const uint32_t a = x & 0x7f, sign = (x & 0x80) << 24, tiny = kvpi_bits_of(kvpi_float_of(0x43000000 + a) - 128.0f);
    const uint32_t large = (a << 21) + (a < 0x7c ? 0x38000000 : 0x70000000), value = a < 4 ? tiny : large;
    return kvpi_float_of(a > 0x7c ? 0x7fffffff : value | sign);
}

KVPRIM_ELEMENT float kvpi_of_int8(uint32_t x)
{
    return (float)(int32_t)((x ^ 0x80) & 0xff) - 128.0f;
}

/* The low 4 bits of x. */
KVPRIM_ELEMENT float kvpi_of_int4(uint32_t x)
{
    return (float)(int32_t)((x ^ 8) & 0xf) - 8.0f;
}

KVPRIM_ELEMENT float kvpi_of_e2m1(uint32_t x)
{
    const uint32_t a = x & 7, value = a < 2 ? a * 0x3f000000 : (a << 22) + 0x3f000000;
    return kvpi_float_of(value | (x & 8) << 28);
}

KVPRIM_ELEMENT float kvpi_of_f16(uint32_t x)
{
    const uint32_t a = x & 0x7fff, sign = (x & 0x8000) << 16, tiny = kvpi_bits_of(kvpi_float_of(0x3f000000 + a) - 0.5f);
    const uint32_t large = (a << 13) + (a < 0x7c00 ? 0x38000000 : 0x70000000), value = a < 0x400 ? tiny : large;
    return kvpi_float_of(value | sign);
}

KVPRIM_ELEMENT float kvpi_of_bf16(uint32_t x)
{
    return kvpi_float_of(x << 16);
}

/* 2^(x - 127), which for 0 is a denormal of fp32; 255 is NaN. */
KVPRIM_ELEMENT float kvpi_of_e8m0(uint32_t x)
{
    const uint32_t value = x == 0 ? 0x00400000 : x << 23;
    return kvpi_float_of(x == 255 ? 0x7fffffff : value);
}

/* Takes a power of two, 2^-126 or more. */
KVPRIM_ELEMENT uint32_t kvpi_to_e8m0(float x)
{
    return kvpi_bits_of(x) >> 23;
}

/* >>impl_types -- The bytes of an element; 0 for anything but a kvprim_dtype. One digit a type, KVPRIM_U8's lowest. */
KVPRIM_ELEMENT int32_t kvpi_dtype_bytes(kvprim_dtype dtype)
{
    const uint64_t digits = 0x11184184221;
    const uint32_t type = (uint32_t)dtype - (uint32_t)KVPRIM_U8;
    return type < 16 ? (int32_t)(digits >> 4 * type & 15) : 0;
}

KVPRIM_ELEMENT int kvpi_is_four_bit(kvprim_dtype dtype)
{
    return dtype == KVPRIM_F4E2M1 || dtype == KVPRIM_INT4;
}

KVPRIM_ELEMENT int kvpi_is_quantised(kvprim_dtype dtype)
{
    return dtype == KVPRIM_F8E4M3 || dtype == KVPRIM_F8E5M2 || dtype == KVPRIM_INT8 || kvpi_is_four_bit(dtype);
}

KVPRIM_ELEMENT int64_t kvpi_elements_in(kvprim_dtype dtype, int64_t bytes)
{
    return kvpi_is_four_bit(dtype) ? 2 * bytes : bytes / kvpi_dtype_bytes(dtype);
}

KVPRIM_ELEMENT int64_t kvpi_bytes_of(kvprim_dtype dtype, int64_t elements)
{
    return kvpi_is_four_bit(dtype) ? elements / 2 : elements * kvpi_dtype_bytes(dtype);
}

/* The largest finite value of a quantised type. */
KVPRIM_ELEMENT float kvpi_largest(kvprim_dtype dtype)
{
    return dtype == KVPRIM_F8E4M3   ? 448.0f
           : dtype == KVPRIM_F8E5M2 ? 57344.0f
           : dtype == KVPRIM_F4E2M1 ? 6.0f
           : dtype == KVPRIM_INT4   ? 7.0f
                                    : 127.0f;
}

/* An element's bits, and back. Both take the types that kvprim_format.dtype converts. */
KVPRIM_ELEMENT float kvpi_of_element(kvprim_dtype dtype, uint32_t x)
{
    return dtype == KVPRIM_F8E4M3   ? kvpi_of_e4m3(x)
           : dtype == KVPRIM_F8E5M2 ? kvpi_of_e5m2(x)
           : dtype == KVPRIM_INT8   ? kvpi_of_int8(x)
           : dtype == KVPRIM_F16    ? kvpi_of_f16(x)
           : dtype == KVPRIM_BF16   ? kvpi_of_bf16(x)
                                    : kvpi_float_of(x);
}

KVPRIM_ELEMENT uint32_t kvpi_to_element(kvprim_dtype dtype, float x)
{
    return dtype == KVPRIM_F8E4M3   ? kvpi_to_e4m3(x)
           : dtype == KVPRIM_F8E5M2 ? kvpi_to_e5m2(x)
           : dtype == KVPRIM_INT8   ? kvpi_to_int8(x)
           : dtype == KVPRIM_F16    ? kvpi_to_f16(x)
           : dtype == KVPRIM_BF16   ? kvpi_to_bf16(x)
                                    : kvpi_to_f32(x);
}

KVPRIM_ELEMENT void kvpi_of_f16x2(float *x, uint32_t word)
{
#ifdef __CUDA_ARCH__
    asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}"
        : "=f"(x[0]), "=f"(x[1])
        : "r"(word));
#else
    x[0] = kvpi_of_f16(word & 0xffff), x[1] = kvpi_of_f16(word >> 16);
#endif
}

KVPRIM_ELEMENT void kvpi_of_f8x4(kvprim_dtype dtype, float *x, uint32_t word)
{
#ifdef KVPRIM_PTX_F8
    uint32_t low, high; /* each two fp16 */
    if (dtype == KVPRIM_F8E4M3)
        asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.rn.f16x2.e4m3x2 %0, a; cvt.rn.f16x2.e4m3x2 %1, b;}"
            : "=r"(low), "=r"(high)
            : "r"(word));
    else
        asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.rn.f16x2.e5m2x2 %0, a; cvt.rn.f16x2.e5m2x2 %1, b;}"
            : "=r"(low), "=r"(high)
            : "r"(word));
    kvpi_of_f16x2(x, low), kvpi_of_f16x2(x + 2, high);
#else
    for (int k = 0; k < 4; k++)
        x[k] = kvpi_of_element(dtype, word >> 8 * k & 0xff);
#endif
}

KVPRIM_ELEMENT uint32_t kvpi_to_f8x4(kvprim_dtype dtype, const float *x)
{
    uint32_t word = 0;
#ifdef KVPRIM_PTX_F8
    if (dtype == KVPRIM_F8E4M3)
        asm("{.reg .b16 a, b; cvt.rn.satfinite.e4m3x2.f32 a, %2, %1; cvt.rn.satfinite.e4m3x2.f32 b, %4, %3; "
            "mov.b32 %0, {a, b};}"
            : "=r"(word)
            : "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]));
    else
        asm("{.reg .b16 a, b; cvt.rn.satfinite.e5m2x2.f32 a, %2, %1; cvt.rn.satfinite.e5m2x2.f32 b, %4, %3; "
            "mov.b32 %0, {a, b};}"
            : "=r"(word)
            : "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]));
#else
    for (int k = 0; k < 4; k++)
        word |= kvpi_to_element(dtype, x[k]) << 8 * k;
#endif
    return word;
}

/* A tile's largest magnitude (amax), by the bits of its elements, which order as magnitudes do, NaN last:
   kvpi_tile_most() takes the result of the elements before, 0 at first; kvpi_tile_largest() makes the last a float. */
KVPRIM_ELEMENT uint32_t kvpi_tile_most(uint32_t most, float x)
{
    const uint32_t a = kvpi_bits_of(x) & 0x7fffffff, number = a > 0x7f800000 ? 0 : a;
    return number > most ? number : most;
}

KVPRIM_ELEMENT float kvpi_tile_largest(uint32_t most)
{
    return kvpi_float_of(most < 0x7f7fffff ? most : 0x7f7fffff);
}

/* A tile's scale, from the quotient of its largest magnitude and the type's largest value. Positive floats compare as
   their bits do. scale_min and power_of_two have no defaults here. */
KVPRIM_ELEMENT float kvpi_tile_scale(float quotient, float scale_min, int power_of_two)
{
    const uint32_t a = kvpi_bits_of(quotient), b = kvpi_bits_of(scale_min), scale = a > b ? a : b;
    return kvpi_float_of(power_of_two ? (scale + 0x7fffff) & 0x7f800000 : scale);
}

/* A quotient by a tensor's scale as kvpi_tile_scale() takes it: see >>format. */
KVPRIM_ELEMENT float kvpi_tile_quotient(float quotient)
{
    const uint32_t a = kvpi_bits_of(quotient), most = a < 0x7f000000 ? a : 0x7f000000;
    return kvpi_float_of(a > 0x7f800000 ? 0 : most);
}

/* What elements are divided by, where the scale that the tile got is read back. */
KVPRIM_ELEMENT float kvpi_tile_divisor(float scale)
{
    return kvpi_float_of(kvpi_bits_of(scale) << 1 ? kvpi_bits_of(scale) : 0x7f800000);
}

/* Scales of a byte or two, and back. */
KVPRIM_ELEMENT float kvpi_of_short_scale(kvprim_dtype dtype, uint32_t x)
{
    float scales[4];
    if (dtype != KVPRIM_F8E4M3)
        return dtype == KVPRIM_F8E8M0 ? kvpi_of_e8m0(x) : kvpi_of_f16(x);
    kvpi_of_f8x4(KVPRIM_F8E4M3, scales, x);
    return scales[0];
}

KVPRIM_ELEMENT uint32_t kvpi_to_short_scale(kvprim_dtype dtype, float scale)
{
    const float scales[4] = {scale, 0, 0, 0};
    return dtype == KVPRIM_F8E8M0   ? kvpi_to_e8m0(scale)
           : dtype == KVPRIM_F8E4M3 ? kvpi_to_f8x4(KVPRIM_F8E4M3, scales)
                                    : kvpi_to_f16(scale < 65504.0f ? scale : 65504.0f);
}
#endif /* KVPRIM_ELEMENT */

/* >>impl ----------------------------------------------------------------------------------------------------------- */
#if (defined(KVPRIM_IMPLEMENTATION) || defined(KVPRIM_CORE_IMPLEMENTATION)) && !defined(KVPRIM_CORE_IMPLEMENTED)
#define KVPRIM_CORE_IMPLEMENTED

#include <stdarg.h>
#include <stdio.h>

#ifdef KVPRIM_X86
#include <immintrin.h>
#elif defined(KVPRIM_NEON)
#include <arm_neon.h>
#endif
#if defined(KVPRIM_ARM_SHA) && !defined(__ARM_FEATURE_SHA2)
#include <sys/auxv.h>
#endif

#if defined(__cplusplus)
#define KVPRIM_THREAD_LOCAL thread_local
#elif defined(_MSC_VER) && !defined(__clang__)
#define KVPRIM_THREAD_LOCAL __declspec(thread)
#elif defined(__TINYC__) /* it has none: see kvprim_last_error */
#define KVPRIM_THREAD_LOCAL
#else
#define KVPRIM_THREAD_LOCAL _Thread_local
#endif

/* Names that begin with kvpi_ are internal: static, and free to change. */

#ifdef __cplusplus
#define KVPRIM_STATIC_ASSERT static_assert
#else
#define KVPRIM_STATIC_ASSERT _Static_assert /* tcc's assert.h has no other name */
#endif

#if defined(__GNUC__) || defined(__clang__)
#define KVPRIM_INLINE __attribute__((always_inline)) static inline
#define KVPRIM_SELDOM __attribute__((noinline)) static /* inlined, it would slow down its caller */
#define KVPRIM_PREFETCH(p) __builtin_prefetch(p, 0, 2) /* to the second-level cache: the first has too few lines */
#else
#define KVPRIM_INLINE static inline
#define KVPRIM_SELDOM static
#define KVPRIM_PREFETCH(p) ((void)(p))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* >>impl_status ---------------------------------------------------------------------------------------------------- */

KVPRIM_STATIC_ASSERT(offsetof(kvprim_unpack_meta_item, bytes) == 4, "kvprim_unpack_meta_item is NCCL's loadMeta");
KVPRIM_STATIC_ASSERT(offsetof(kvprim_unpack_meta_item, dst_offset) == 8, "kvprim_unpack_meta_item is NCCL's loadMeta");

KVPRIM_API uint32_t kvprim_version(void)
{
    return KVPRIM_VERSION;
}

/* With the bytes on 64-bit systems: structures may grow with a version, but not by accident. */
KVPRIM_API size_t kvprim_sizeof(const char *struct_name)
{
#define KVPRIM_SIZE(name, bytes)                                                                                       \
    KVPRIM_STATIC_ASSERT(UINTPTR_MAX != UINT64_MAX || sizeof(name) == (bytes), #name ": -fshort-enums?");              \
    if (struct_name && strcmp(struct_name, #name) == 0)                                                                \
        return sizeof(name);
    KVPRIM_SIZE(kvprim_table, 80)
    KVPRIM_SIZE(kvprim_format, 112)
    KVPRIM_SIZE(kvprim_gather_desc, 224)
    KVPRIM_SIZE(kvprim_store_desc, 392)
    KVPRIM_SIZE(kvprim_slots_desc, 136)
    KVPRIM_SIZE(kvprim_transfer_desc, 312)
    KVPRIM_SIZE(kvprim_fragment, 24)
    KVPRIM_SIZE(kvprim_unpack_desc, 56)
    KVPRIM_SIZE(kvprim_unpack_meta_item, 16)
    KVPRIM_SIZE(kvprim_unpack_meta_desc, 72)
    KVPRIM_SIZE(kvprim_copy_item, 24)
    KVPRIM_SIZE(kvprim_copy_desc, 24)
#ifndef KVPRIM_NO_FETCH
    KVPRIM_SIZE(kvprim_fetch_set, 56)
    KVPRIM_SIZE(kvprim_fetch_desc, 584)
#endif
#ifndef KVPRIM_NO_KEYS
    KVPRIM_SIZE(kvprim_key_extra, 32)
    KVPRIM_SIZE(kvprim_keys_desc, 96)
    KVPRIM_SIZE(kvprim_key_table, 40)
#endif
    KVPRIM_SIZE(kvprim_side, 272)
    KVPRIM_SIZE(kvprim_move_names, 48)
    KVPRIM_SIZE(kvprim_move, 592)
#ifndef KVPRIM_NO_LAYOUTS
    KVPRIM_SIZE(kvprim_layout_sizes, 56)
    KVPRIM_SIZE(kvprim_layout, 344)
    KVPRIM_SIZE(kvprim_pack_desc, 56)
    KVPRIM_SIZE(kvprim_pack, 1272)
#endif
    KVPRIM_SIZE(kvprim_cuda_launch, 24)
#undef KVPRIM_SIZE
    return 0;
}

static KVPRIM_THREAD_LOCAL char kvpi_error_text[256];

static const char *kvpi_status_words(kvprim_status status, int text)
{
#define KVPRIM_STATUS_WORDS(name, value, words)                                                                        \
    if (status == name)                                                                                                \
        return text ? words : #name;
    KVPRIM_STATUS_LIST(KVPRIM_STATUS_WORDS)
#undef KVPRIM_STATUS_WORDS
    return "unknown kvprim_status";
}

KVPRIM_API const char *kvprim_status_name(kvprim_status status)
{
    return kvpi_status_words(status, 0);
}

KVPRIM_API const char *kvprim_status_text(kvprim_status status)
{
    return kvpi_status_words(status, 1);
}

KVPRIM_API const char *kvprim_last_error(void)
{
    return kvpi_error_text;
}

KVPRIM_API kvprim_status kvprim_fail(kvprim_status status, const char *format, ...)
{
    char text[sizeof kvpi_error_text]; /* an argument may point to kvpi_error_text */
    va_list args;
    va_start(args, format);
    (void)vsnprintf(text, sizeof text, format, args);
    va_end(args);
    memcpy(kvpi_error_text, text, sizeof text);
    return status;
}

/* >>impl_prefix_scalar -- prefix compare in portable C, and int64 by int32 */

typedef size_t kvpi_prefix_fn(const int32_t *a, size_t a_len, const int32_t *b, size_t b_len);

static size_t kvpi_min(size_t a, size_t b)
{
    return a < b ? a : b;
}

/* memcpy assumes no alignment. */
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
        if ((kvpi_load_u64(a + i) ^ kvpi_load_u64(b + i)) | (kvpi_load_u64(a + i + 2) ^ kvpi_load_u64(b + i + 2)))
            break;
    while (i < n && kvpi_load_u32(a + i) == kvpi_load_u32(b + i))
        i++;
    return i;
}

/* Two int64 are equal if both halves are, so an int64 compare is an int32 compare of twice the length. */
#define KVPRIM_PREFIX_I64(name, prefix_i32)                                                                            \
    KVPRIM_API size_t name(const int64_t *a, size_t a_len, const int64_t *b, size_t b_len)                             \
    {                                                                                                                  \
        const size_t n = 2 * kvpi_min(a_len, b_len);                                                                   \
        return prefix_i32((const int32_t *)(const void *)a, n, (const int32_t *)(const void *)b, n) / 2;               \
    }
KVPRIM_PREFIX_I64(kvprim_prefix_i64_scalar, kvprim_prefix_i32_scalar)

/* >>impl_prefix_x86 -- prefix compare with AVX2 and AVX-512 */
#ifdef KVPRIM_X86
#define KVPRIM_AVX2 __attribute__((target("avx2,bmi")))
#define KVPRIM_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,bmi,bmi2")))

/* Each kvpi_diff function sets bit i if token i differs. */
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

/* The index of the lowest set bit of diff, at most n. diff may be 0, and may have bits set from n on. */
KVPRIM_AVX2 static inline size_t kvpi_first(uint64_t diff, size_t n)
{
    return kvpi_min((size_t)_tzcnt_u64(diff), n);
}

/* Compares up to 32 tokens. Vectors from the start and from the end overlap, so nothing outside the arrays is read. */
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
    return kvprim_prefix_i32_scalar(a, n, b, n);
}

KVPRIM_API KVPRIM_AVX2 size_t kvprim_prefix_i32_avx2(const int32_t *a, size_t a_len, const int32_t *b, size_t b_len)
{
    const size_t n = kvpi_min(a_len, b_len);
    if (n <= 32)
        return kvpi_short_avx2(a, b, n);
    if (_mm256_movemask_epi8(kvpi_equal32_avx2(a, b)) != -1)
        return (size_t)_tzcnt_u64(kvpi_diff32_avx2(a, b));
    size_t i = 32 - ((uintptr_t)a >> 2) % 8; /* a + i is aligned to 32 bytes */
    while (i + 64 <= n && _mm256_movemask_epi8(_mm256_and_si256(kvpi_equal32_avx2(a + i, b + i),
                                                                kvpi_equal32_avx2(a + i + 32, b + i + 32))) == -1)
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

/* Returns x with every bit set in which 16 tokens of a and b differ. 0xf6 is the truth table of x | (y ^ z). */
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

/* 128 tokens per branch: then the loop runs at the speed of the L1 cache wherever the linker places it. */
KVPRIM_AVX512 static inline int kvpi_same128_avx512(const int32_t *a, const int32_t *b)
{
    const __m512i x = kvpi_also64_avx512(kvpi_also64_avx512(_mm512_setzero_si512(), a, b), a + 64, b + 64);
    return _mm512_test_epi32_mask(x, x) == 0;
}

/* True if a vector from p may cross into the next page. Masked lanes on a page that is not mapped cost ~700 cycles. */
static inline int kvpi_near_page_end(const void *p)
{
    return ((uintptr_t)p & 4095) > 4096 - 64;
}

/* Loads as many tokens from p as lanes has bits set, its lowest, and zeros after them. */
KVPRIM_AVX512 static inline __m512i kvpi_load_avx512(const int32_t *p, __mmask16 lanes)
{
#ifdef __SANITIZE_ADDRESS__ /* gcc does not check masked loads, so show it the last byte */
    if (lanes)
        (void)((const volatile char *)p)[4 * __builtin_popcount(lanes) - 1];
#endif
    return _mm512_maskz_loadu_epi32(lanes, p);
}

/* Compares up to 16 tokens. */
KVPRIM_AVX512 static inline size_t kvpi_short_avx512(const int32_t *a, const int32_t *b, size_t n)
{
    if (!KVPRIM_LIKELY(!kvpi_near_page_end(a) && !kvpi_near_page_end(b)))
        return kvpi_short_avx2(a, b, n);
    const __mmask16 lanes = (__mmask16)_bzhi_u32(0xffff, (uint32_t)n);
    const __mmask16 diff = _mm512_mask_cmpneq_epi32_mask(lanes, kvpi_load_avx512(a, lanes), kvpi_load_avx512(b, lanes));
    return (size_t)_tzcnt_u32(diff | ~(uint32_t)lanes);
}

/* a + i is aligned to a cache line and b + i is not, so every load from b + i would cross two lines. This function
   permutes each vector out of two whole lines of b. Returns i, advanced past the equal blocks of 64 tokens. */
KVPRIM_AVX512 static inline size_t kvpi_shifted_avx512(const int32_t *a, const int32_t *b, size_t i, size_t n)
{
    const size_t shift = ((uintptr_t)(b + i) >> 2) % 16;
    const __m512i count = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i window = _mm512_add_epi32(count, _mm512_set1_epi32((int)shift));
    const int32_t *lines = b + i - shift;
    __m512i line0 = _mm512_loadu_si512(lines);
    for (; i + 80 <= n; i += 64, lines += 64) { /* reads b up to the end of the line after the block */
        __m512i line1 = _mm512_loadu_si512(lines + 16), line2 = _mm512_loadu_si512(lines + 32);
        __m512i line3 = _mm512_loadu_si512(lines + 48), line4 = _mm512_loadu_si512(lines + 64);
        __asm__("" : "+v"(line1), "+v"(line2), "+v"(line3), "+v"(line4)); /* or gcc loads each of them twice */
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

KVPRIM_API KVPRIM_AVX512 size_t kvprim_prefix_i32_avx512(const int32_t *a, size_t a_len, const int32_t *b, size_t b_len)
{
    const size_t n = kvpi_min(a_len, b_len);
    if (n <= 16)
        return kvpi_short_avx512(a, b, n);
    if (n <= 32)
        return kvpi_first(kvpi_diff16_avx512(a, b) | (uint64_t)kvpi_diff16_avx512(a + n - 16, b + n - 16) << (n - 16),
                          n);
    if (n <= 64)
        return kvpi_first(kvpi_diff32_avx512(a, b) | kvpi_diff32_avx512(a + n - 32, b + n - 32) << (n - 32), n);
    if (!kvpi_same64_avx512(a, b))
        return (size_t)_tzcnt_u64(kvpi_diff64_avx512(a, b));
    size_t i = 64 - ((uintptr_t)a >> 2) % 16; /* a + i is aligned to 64 bytes */
    /* 14 % faster at 4,096 tokens, 3 % at 1,024, and no gain at 256 (Zen 4) */
    if (n >= 512 && (uintptr_t)(b + i) % 64 != 0 && (((uintptr_t)a | (uintptr_t)b) & 3) == 0)
        i = kvpi_shifted_avx512(a, b, i, n);
    while (i + 128 <= n && kvpi_same128_avx512(a + i, b + i))
        i += 128;
    for (; i + 64 <= n; i += 64)
        if (!kvpi_same64_avx512(a + i, b + i))
            return i + (size_t)_tzcnt_u64(kvpi_diff64_avx512(a + i, b + i));
    return i == n ? n : n - 64 + kvpi_first(kvpi_diff64_avx512(a + n - 64, b + n - 64), 64);
}
KVPRIM_PREFIX_I64(kvprim_prefix_i64_avx512, kvprim_prefix_i32_avx512)

/* Inlining this would take registers from the loop below. */
KVPRIM_AVX512 KVPRIM_SELDOM size_t kvpi_many_rest_avx512(const int32_t *query, const int32_t *key, size_t n)
{
    return kvprim_prefix_i32_avx512(query, n, key, n);
}

/* The query's first 16 tokens stay in a register. Keys that share all or start near a page's end are compared apart. */
KVPRIM_AVX512 static size_t kvpi_many_avx512(const int32_t *query, size_t query_len, const int32_t *const *keys,
                                             const size_t *key_lens, size_t keys_count, size_t *out_len)
{
    const __m512i query16 = kvpi_load_avx512(query, (__mmask16)_bzhi_u32(0xffff, (uint32_t)kvpi_min(query_len, 16)));
    size_t best = KVPRIM_PREFIX_NONE, best_len = 0;
    for (size_t i = 0; i < keys_count; i++) {
        const size_t n = kvpi_min(query_len, key_lens[i]), n16 = kvpi_min(n, 16);
        const __mmask16 lanes = (__mmask16)_bzhi_u32(0xffff, (uint32_t)n16);
        const int near_end = kvpi_near_page_end(keys[i]);
        size_t len = n;
        if (KVPRIM_LIKELY(!near_end)) {
            const uint32_t diff = _mm512_mask_cmpneq_epi32_mask(lanes, query16, kvpi_load_avx512(keys[i], lanes));
            len = (size_t)_tzcnt_u32(diff | 1u << n16);
        }
        if (!KVPRIM_LIKELY(len < 16 && !near_end))
            len = kvpi_many_rest_avx512(query, keys[i], n);
        if (out_len)
            out_len[i] = len;
        best = len > best_len ? i : best, best_len = len > best_len ? len : best_len;
    }
    return best;
}
#endif /* KVPRIM_X86 */

/* >>impl_prefix_arm -- prefix compare with NEON, on AArch64 */
#ifdef KVPRIM_NEON
/* Byte i is 0xff if token i is equal, else 0. */
static inline uint8x8_t kvpi_equal8_neon(const int32_t *a, const int32_t *b)
{
    const uint16x4_t low = vmovn_u32(vceqq_s32(vld1q_s32(a), vld1q_s32(b)));
    const uint16x4_t high = vmovn_u32(vceqq_s32(vld1q_s32(a + 4), vld1q_s32(b + 4)));
    return vmovn_u16(vcombine_u16(low, high));
}

/* How many of 8 or 16 leading tokens are equal. */
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

/* >>impl_prefix_pick -- the plain names: the NULL rule, and which variant they call */

/* At least one array is NULL, so nothing matches. That is an error if the array has a length. */
static size_t kvpi_prefix_null(const char *function, const void *a, size_t a_len, const void *b, size_t b_len)
{
    if (!a && a_len)
        (void)kvprim_fail(KVPRIM_ERROR_NULL, "%s: a is NULL and a_len is %llu", function, (unsigned long long)a_len);
    else if (!b && b_len)
        (void)kvprim_fail(KVPRIM_ERROR_NULL, "%s: b is NULL and b_len is %llu", function, (unsigned long long)b_len);
    return 0;
}

#ifdef KVPRIM_X86
/* The variant for a processor with these bits in ebx of cpuid's leaf 7, under a system that saves these registers, as
   xgetbv counts them: 0x06, the lower and upper halves of ymm; 0xe0, what AVX-512 added. */
static kvpi_prefix_fn *kvpi_prefix_for(uint32_t features, uint32_t saved)
{
    const uint32_t avx2 = 1u << 3 | 1u << 5;                                 /* BMI1, AVX2 */
    const uint32_t avx512 = avx2 | 1u << 8 | 1u << 16 | 1u << 30 | 1u << 31; /* BMI2, AVX512F, AVX512BW, AVX512VL */
#ifdef __APPLE__
    saved |= 0xe0; /* macOS saves them from a thread's first use on, and does not show them before */
#endif
    if ((features & avx512) == avx512 && (saved & 0xe6) == 0xe6)
        return kvprim_prefix_i32_avx512;
    return (features & avx2) == avx2 && (saved & 0x06) == 0x06 ? kvprim_prefix_i32_avx2 : kvprim_prefix_i32_scalar;
}

static void kvpi_cpuid(uint32_t leaf, uint32_t *r)
{
    __asm__ volatile("cpuid" : "=a"(r[0]), "=b"(r[1]), "=c"(r[2]), "=d"(r[3]) : "a"(leaf), "c"(0));
}

/* Not by __builtin_cpu_supports: zig cc's always says no, and clang refuses it in CUDA's device pass. */
static kvpi_prefix_fn *kvpi_prefix_pick(void)
{
    const uint32_t osxsave_avx = 1u << 27 | 1u << 28;
    uint32_t r[4], saved;
    kvpi_cpuid(0, r);
    if (r[0] < 7)
        return kvprim_prefix_i32_scalar;
    kvpi_cpuid(1, r);
    if ((r[2] & osxsave_avx) != osxsave_avx)
        return kvprim_prefix_i32_scalar;
    kvpi_cpuid(7, r);
    __asm__ volatile("xgetbv" : "=a"(saved), "=d"(r[3]) : "c"(0));
    return kvpi_prefix_for(r[1], saved);
}

/* kvpi_prefix starts as a function that replaces it. Threads that race there all store the same pointer. */
static size_t kvpi_prefix_first_call(const int32_t *a, size_t a_len, const int32_t *b, size_t b_len);
static kvpi_prefix_fn *kvpi_prefix = kvpi_prefix_first_call;

KVPRIM_INLINE kvpi_prefix_fn *kvpi_prefix_variant(void)
{
    return __atomic_load_n(&kvpi_prefix, __ATOMIC_RELAXED);
}

static kvpi_prefix_fn *kvpi_prefix_picked(void)
{
    if (kvpi_prefix_variant() == kvpi_prefix_first_call)
        __atomic_store_n(&kvpi_prefix, kvpi_prefix_pick(), __ATOMIC_RELAXED);
    return kvpi_prefix_variant();
}

static size_t kvpi_prefix_first_call(const int32_t *a, size_t a_len, const int32_t *b, size_t b_len)
{
    return kvpi_prefix_picked()(a, a_len, b, b_len);
}

/* The copies of rows use the same instruction set. */
static int kvpi_has_avx512(void)
{
    return kvpi_prefix_picked() == kvprim_prefix_i32_avx512;
}

static int kvpi_has_avx2(void)
{
    return kvpi_prefix_picked() != kvprim_prefix_i32_scalar;
}

#else /* there is one variant */
KVPRIM_INLINE kvpi_prefix_fn *kvpi_prefix_variant(void)
{
#ifdef KVPRIM_NEON
    return kvprim_prefix_i32_neon;
#else
    return kvprim_prefix_i32_scalar;
#endif
}
#endif

/* Equal tokens of up to 3, without a call. */
#define KVPRIM_SAME(load, a, b, i) (load((a) + (i)) == load((b) + (i)))
#define KVPRIM_PREFIX_FEW(load, a, b, n)                                                                               \
    ((n) == 0 || !KVPRIM_SAME(load, a, b, 0)   ? 0                                                                     \
     : (n) == 1 || !KVPRIM_SAME(load, a, b, 1) ? 1                                                                     \
                                               : 2 + (size_t)((n) == 3 && KVPRIM_SAME(load, a, b, 2)))

#define KVPRIM_PREFIX(name, type, load)                                                                                \
    KVPRIM_API size_t name(const type *a, size_t a_len, const type *b, size_t b_len)                                   \
    {                                                                                                                  \
        KVPRIM_RANGE(#name);                                                                                           \
        const size_t n = kvpi_min(a_len, b_len), each = sizeof(type) / 4;                                              \
        const int32_t *const x = (const int32_t *)(const void *)a, *const y = (const int32_t *)(const void *)b;        \
        if (!KVPRIM_LIKELY(a && b))                                                                                    \
            return kvpi_prefix_null(#name, a, a_len, b, b_len);                                                        \
        return n > 3 ? kvpi_prefix_variant()(x, each * n, y, each * n) / each : KVPRIM_PREFIX_FEW(load, a, b, n);      \
    }
KVPRIM_PREFIX(kvprim_prefix_i32, int32_t, kvpi_load_u32)
KVPRIM_PREFIX(kvprim_prefix_i64, int64_t, kvpi_load_u64)
#undef KVPRIM_PREFIX
#undef KVPRIM_PREFIX_FEW
#undef KVPRIM_SAME

KVPRIM_API size_t kvprim_prefix_pages(size_t matched, size_t page_rows)
{
    return page_rows ? matched - matched % page_rows : matched;
}

/* A pointer must not be NULL if its length or count is not 0. */
static kvprim_status kvpi_check_many(const int32_t *query, size_t query_len, const int32_t *const *keys,
                                     const size_t *key_lens, size_t keys_count)
{
    const char *const null = !query && query_len ? "query" : !keys ? "keys" : !key_lens ? "key_lens" : NULL;
    KVPRIM_REFUSE(null, NULL, "kvprim_prefix_many_i32: %s is NULL, query_len is %llu, keys_count is %llu", null,
                  (unsigned long long)query_len, (unsigned long long)keys_count);
    for (size_t i = 0; i < keys_count; i++)
        KVPRIM_REFUSE(!keys[i] && key_lens[i], NULL,
                      "kvprim_prefix_many_i32: keys[%llu] is NULL and its length is %llu", (unsigned long long)i,
                      (unsigned long long)key_lens[i]);
    return KVPRIM_OK;
}

static size_t kvpi_many_each(const int32_t *query, size_t query_len, const int32_t *const *keys, const size_t *key_lens,
                             size_t keys_count, size_t *out_len)
{
    kvpi_prefix_fn *const prefix_i32 = kvpi_prefix_variant();
    size_t best = KVPRIM_PREFIX_NONE, best_len = 0;
    for (size_t i = 0; i < keys_count; i++) {
        const size_t len = prefix_i32(query, query_len, keys[i], key_lens[i]);
        if (out_len)
            out_len[i] = len;
        best = len > best_len ? i : best, best_len = len > best_len ? len : best_len;
    }
    return best;
}

KVPRIM_API size_t kvprim_prefix_many_i32(const int32_t *query, size_t query_len, const int32_t *const *keys,
                                         const size_t *key_lens, size_t keys_count, size_t *out_len)
{
    KVPRIM_RANGE("kvprim_prefix_many_i32");
    if (keys_count == 0)
        return KVPRIM_PREFIX_NONE;
    if (kvpi_check_many(query, query_len, keys, key_lens, keys_count) != KVPRIM_OK)
        return KVPRIM_PREFIX_ERROR;
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

/* >>impl_table -- defaults; where a layer starts; how far a table reaches */

/* Bytes of a table: what pointers can span, with room for one addition. 2^62 where they have 64 bits. */
static const uint64_t kvpi_too_large = (uint64_t)PTRDIFF_MAX / 2 + 1;

/* Products and sums of sizes, which stay at kvpi_too_large instead of wrapping. Most factors have half the bits, and
   the test for that spares a division, which is much of what a check costs. */
static uint64_t kvpi_mul(uint64_t a, uint64_t b)
{
    if ((a | b) >> (4 * sizeof(void *) - 1) == 0)
        return a * b;
    return a && b > kvpi_too_large / a ? kvpi_too_large : a * b;
}

static uint64_t kvpi_add(uint64_t a, uint64_t b)
{
    return b > kvpi_too_large || a > kvpi_too_large - b ? kvpi_too_large : a + b;
}

static int kvpi_overlap(const void *a, uint64_t a_bytes, const void *b, uint64_t b_bytes)
{
    const uint64_t x = (uint64_t)(uintptr_t)a, y = (uint64_t)(uintptr_t)b;
    return x <= y ? y - x < a_bytes && b_bytes : x - y < b_bytes && a_bytes;
}

static int64_t kvpi_piece_of(const kvprim_table *t, int64_t row_bytes)
{
    return t->heads > 1 ? row_bytes / t->heads : row_bytes;
}

static void kvpi_resolve(kvprim_table *t, int64_t row_bytes)
{
    const int64_t piece = kvpi_piece_of(t, row_bytes);
    t->heads = t->heads > 1 ? t->heads : 1;
    if (t->stride == 0)
        t->stride = t->heads > 1 && (t->head_stride > piece || t->head_stride <= 0) ? piece : row_bytes;
    if (t->page_rows > 0 && t->page_stride == 0) { /* either loop may be outside: heads of a row, or rows of a head */
        const uint64_t rows = kvpi_mul((uint64_t)t->page_rows, (uint64_t)t->stride);
        const int apart = t->heads > 1 && t->head_stride > 0; /* not KVPRIM_HEADS_SHARED */
        const uint64_t heads = apart ? kvpi_mul((uint64_t)t->heads, (uint64_t)t->head_stride) : 0;
        t->page_stride = (int64_t)(heads > rows ? heads : rows);
    }
}

KVPRIM_API kvprim_table kvprim_table_resolve(kvprim_table t, int64_t row_bytes)
{
    kvpi_resolve(&t, row_bytes);
    return t;
}

KVPRIM_API void *kvprim_table_row(const kvprim_table *t, int64_t row)
{
    if (t->page_rows > 0)
        return (char *)t->data + row / t->page_rows * t->page_stride + row % t->page_rows * t->stride;
    return (char *)t->data + row * t->stride;
}

KVPRIM_API char *kvprim_side_layer(const kvprim_side *side, int64_t layer)
{
    if (side->layers)
        return (char *)side->layers[layer];
    return side->table.data ? (char *)side->table.data + layer * side->layer_stride : NULL;
}

/* Fills in the format of a side. Its table has its defaults, and all its heads. */
KVPRIM_SELDOM void kvpi_resolve_format(kvprim_side *side)
{
    const kvprim_table *const t = &side->table;
    kvprim_format *const f = &side->format;
    *f = *t->format;
    if (t->rows == 0) { /* no scale is ever read or written: data may be NULL */
        memset(f, 0, sizeof *f);
        f->dtype = t->format->dtype, f->nans = t->format->nans;
    }
    if (!f->scale)
        return;
    f->scale_dtype = f->scale_dtype ? f->scale_dtype : KVPRIM_F32;
    f->scale_power_of_two |= f->scale_dtype == KVPRIM_F8E8M0;
    f->scale_min = f->scale_min > 0 ? f->scale_min : FLT_MIN;
    const int64_t elements = kvpi_elements_in(f->dtype, side->piece_bytes);
    if (f->tile == 0)
        f->tile = f->scale == KVPRIM_SCALE_HEAD ? elements / t->heads : elements;
    if (f->scale_heads) {
        const uint64_t in_page = (uint64_t)(t->page_rows ? t->page_rows : t->rows);
        f->scale_stride = elements / f->tile / f->scale_heads;
        f->scale_tile_stride = (int64_t)kvpi_mul(in_page, (uint64_t)f->scale_stride);
        if (f->scales && f->scale_page_stride == 0)
            f->scale_page_stride = (int64_t)kvpi_mul((uint64_t)f->scale_heads, (uint64_t)f->scale_tile_stride);
    }
    if (f->scale_tile_stride == 0)
        f->scale_tile_stride = kvpi_dtype_bytes(f->scale_dtype);
    if (f->scale_layer_stride == KVPRIM_SCALES_SHARED)
        f->scale_layer_stride = 0;
    if (f->scale != KVPRIM_SCALE_TILE)
        return;
    const uint64_t tiles = (uint64_t)(elements / f->tile);
    if (f->scale_stride == 0)
        f->scale_stride = f->scales ? (int64_t)kvpi_mul(tiles, (uint64_t)f->scale_tile_stride) : t->stride;
    if (f->scale_page_stride == 0)
        f->scale_page_stride = f->scales      ? (int64_t)kvpi_mul((uint64_t)t->page_rows, (uint64_t)f->scale_stride)
                               : t->page_rows ? t->page_stride
                                              : 0;
}

/* Where rows 0 to `rows` - 1 end; rows > 0. A whole page may reach further than a last one that is not full. */
static uint64_t kvpi_reach(const kvprim_table *t, int64_t rows, int64_t row_bytes)
{
    const uint64_t used = (uint64_t)rows, page_rows = (uint64_t)t->page_rows, stride = (uint64_t)t->stride;
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
    if (t->heads > 1)
        last = kvpi_add(last, kvpi_mul((uint64_t)t->heads - 1, (uint64_t)t->head_stride));
    return kvpi_add(last, (uint64_t)kvpi_piece_of(t, row_bytes));
}

/* Leaves out pages that follow each other without a gap, unless there are gaps between their scales; and such heads. */
static void kvpi_simplify(kvprim_side *side, int64_t row_bytes)
{
    kvprim_table *const t = &side->table;
    const kvprim_format *const f = &side->format;
    if (t->heads > 1 && t->head_stride == row_bytes / t->heads)
        t->heads = 1;
    if (t->page_rows > 0 && t->page_stride / t->page_rows == t->stride && t->page_stride % t->page_rows == 0 &&
        (f->scale != KVPRIM_SCALE_TILE ||
         (uint64_t)f->scale_page_stride == kvpi_mul((uint64_t)t->page_rows, (uint64_t)f->scale_stride)))
        t->page_rows = 0;
    side->piece_bytes = kvpi_piece_of(t, row_bytes), side->page_shift = 0;
    while (t->page_rows >> side->page_shift > 1)
        side->page_shift++;
    if (t->page_rows != (int64_t)1 << side->page_shift)
        side->page_shift = -1;
}

/* >>impl_check -- checks of a table */

static const char *kvpi_name(const kvprim_move *m, const kvprim_side *side)
{
    return side == &m->dst ? m->names->dst : m->names->src;
}

/* "kvprim_store: k_cache.stride is 8, less than a row's bytes, 16". A layer stride is no field of the table. */
static kvprim_status kvpi_fail_field(const kvprim_move *m, const kvprim_side *side, const char *field, int64_t value,
                                     const char *why, uint64_t other)
{
    const char *const joint = strcmp(field, "layer_stride") == 0 ? "_" : ".";
    return kvprim_fail(KVPRIM_ERROR_SIZE, "%s: %s%s%s is %lld, %s %llu", m->names->function, kvpi_name(m, side), joint,
                       field, (long long)value, why, (unsigned long long)other);
}

typedef struct kvpi_number {
    const char *field;
    int64_t value;
} kvpi_number;

/* `of`: " of " and a name, or "". */
static kvprim_status kvpi_check_reserved(int64_t field, const char *function, const char *of, const char *name)
{
    KVPRIM_REFUSE(field != 0, ARGUMENT, "%s: a reserved field%s%s is not 0: zero-initialise the structure", function,
                  of, name);
    return KVPRIM_OK;
}

/* The rows of a side that a move can touch. */
static int64_t kvpi_used_rows(const kvprim_move *m, const kvprim_side *side)
{
    return side->index ? side->table.rows : m->count;
}

/* One of these numbers is negative. The last one may be KVPRIM_HEADS_SHARED. */
KVPRIM_SELDOM kvprim_status kvpi_fail_negative(const kvprim_move *m, const kvprim_side *side)
{
    const kvprim_table *const t = &side->table;
    const kvpi_number fields[] = {{"rows", t->rows},           {"stride", t->stride},
                                  {"bytes", t->bytes},         {"layer_stride", side->layer_stride},
                                  {"heads", t->heads},         {"page_stride", t->page_stride},
                                  {"page_rows", t->page_rows}, {"head_stride", t->head_stride}};
    int k = 0;
    while (fields[k].value >= 0)
        k++;
    return kvpi_fail_field(m, side, fields[k].field, fields[k].value, "less than", 0);
}

/* The fields one by one, before the defaults. */
static kvprim_status kvpi_check_fields(const kvprim_move *m, const kvprim_side *side)
{
    const kvprim_table *const t = &side->table;
    const int64_t row_bytes = side->piece_bytes, piece = kvpi_piece_of(t, row_bytes);
    const int shared = t->head_stride == KVPRIM_HEADS_SHARED && t->heads > 1 && side == &m->src && !m->same_cache;
    const char *const least = t->heads > 1 ? "less than the bytes of one head," : "less than a row's bytes,";
    if ((t->rows | t->page_rows | t->heads | t->stride | t->page_stride | (shared ? 0 : t->head_stride) | t->bytes |
         side->layer_stride) < 0)
        return kvpi_fail_negative(m, side);
    if (t->rows < kvpi_used_rows(m, side))
        return kvpi_fail_field(m, side, "rows", t->rows, "less than count, which is", (uint64_t)m->count);
    KVPRIM_REFUSE(t->rows == 0 && (t->data || side->layers || side->device_layers), SIZE,
                  "%s: %s.rows is 0, but its data is set", m->names->function, kvpi_name(m, side));
    if (t->heads > 1 && piece * t->heads != row_bytes)
        return kvpi_fail_field(m, side, "heads", t->heads, "which does not divide the bytes of a row,",
                               (uint64_t)row_bytes);
    if (t->stride && t->stride < piece)
        return kvpi_fail_field(m, side, "stride", t->stride, least, (uint64_t)piece);
    if (t->page_rows && t->page_stride && t->page_stride < piece)
        return kvpi_fail_field(m, side, "page_stride", t->page_stride, least, (uint64_t)piece);
    if (t->heads > 1 && t->head_stride < piece && !shared)
        return kvpi_fail_field(m, side, "head_stride", t->head_stride, least, (uint64_t)piece);
    return kvpi_check_reserved(t->reserved_heads | t->reserved, m->names->function, " of ", kvpi_name(m, side));
}

/* One loop over a table's memory: n steps of `stride` bytes. */
typedef struct kvpi_loop {
    const char *field;
    uint64_t stride, n;
} kvpi_loop;

/* The bytes that `piece` bytes at every combination of steps span. From the smallest stride up, each step must clear
   all that lies inside it: rows that overlap each other are an error. */
static kvprim_status kvpi_span(const kvprim_move *m, const kvprim_side *side, kvpi_loop *loops, int count,
                               uint64_t piece, uint64_t *span)
{
    *span = piece;
    for (int k = 0; k < count; k++) {
        int least = k;
        for (int i = k + 1; i < count; i++)
            if (loops[i].stride < loops[least].stride)
                least = i;
        const kvpi_loop loop = loops[least];
        loops[least] = loops[k];
        if (loop.n > 1 && loop.stride < *span)
            return kvpi_fail_field(m, side, loop.field, (int64_t)loop.stride,
                                   "but what lies inside that step takes bytes:", *span);
        if (loop.n > 1)
            *span = kvpi_add(*span, kvpi_mul(loop.n - 1, loop.stride));
    }
    return KVPRIM_OK;
}

/* The default layer stride: the outermost of a table's loops, padding included. */
static uint64_t kvpi_packed_layer(const kvpi_loop *loops, int count)
{
    uint64_t most = 0;
    for (int k = 0; k < count; k++) {
        const uint64_t bytes = kvpi_mul(loops[k].n, loops[k].stride);
        most = bytes > most ? bytes : most;
    }
    return most;
}

/* How many layers lie in the memory of one table: with an array, each layer is a table of its own. */
static uint64_t kvpi_stacked(const kvprim_move *m, const kvprim_side *side)
{
    return side->layers || side->device_layers ? 1 : (uint64_t)m->layers;
}

/* A table of pages, heads or layers: no two pieces overlap, and it is not too large. */
static kvprim_status kvpi_check_loops(const kvprim_move *m, kvprim_side *side)
{
    const kvprim_table *const t = &side->table;
    const uint64_t rows = (uint64_t)t->rows, page_rows = t->page_rows ? (uint64_t)t->page_rows : rows;
    kvpi_loop loops[4] = {{"stride", (uint64_t)t->stride, page_rows < rows ? page_rows : rows},
                          {"head_stride", t->heads > 1 ? (uint64_t)t->head_stride : 0,
                           t->head_stride ? (uint64_t)t->heads : 1}, /* 0: they are shared */
                          {"page_stride", t->page_rows ? (uint64_t)t->page_stride : 0, (rows - 1) / page_rows + 1},
                          {"layer_stride", (uint64_t)side->layer_stride, kvpi_stacked(m, side)}};
    if (side->layer_stride == 0)
        side->layer_stride = (int64_t)(loops[3].stride = kvpi_packed_layer(loops, 3));
    uint64_t span;
    KVPRIM_TRY(kvpi_span(m, side, loops, 4, (uint64_t)(side->piece_bytes / t->heads), &span));
    if (span >= kvpi_too_large)
        return kvpi_fail_field(m, side, "rows", t->rows, "which makes the table larger than", kvpi_too_large);
    side->bytes = kvpi_reach(t, kvpi_used_rows(m, side), side->piece_bytes);
    return KVPRIM_OK;
}

/* The same for rows one after the other, in less time: the check is most of what a call costs the host. */
static kvprim_status kvpi_check_plain(const kvprim_move *m, kvprim_side *side)
{
    const uint64_t stride = (uint64_t)side->table.stride, row_bytes = (uint64_t)side->piece_bytes;
    const uint64_t rows = (uint64_t)side->table.rows, used = (uint64_t)kvpi_used_rows(m, side);
    if (kvpi_add(kvpi_mul(rows - 1, stride), row_bytes) >= kvpi_too_large)
        return kvpi_fail_field(m, side, "rows", side->table.rows, "which makes the table larger than", kvpi_too_large);
    side->bytes = (used - 1) * stride + row_bytes;
    if (side->layer_stride == 0)
        side->layer_stride = (int64_t)kvpi_mul(rows, stride);
    return KVPRIM_OK;
}

/* >>impl_check_format -- checks of a side's element type, and of its scales */

/* Whether elements of `dst` are made from those of `src`: see >>format. */
static int kvpi_converts(const kvprim_format *dst, const kvprim_format *src)
{
    const int to_float = dst->dtype == KVPRIM_F16 || dst->dtype == KVPRIM_BF16 || dst->dtype == KVPRIM_F32;
    const int from_float = src->dtype == KVPRIM_F16 || src->dtype == KVPRIM_BF16 || src->dtype == KVPRIM_F32;
    return (to_float && (from_float || kvpi_is_quantised(src->dtype))) || (from_float && kvpi_is_quantised(dst->dtype));
}

static int kvpi_same_bytes(const kvprim_format *dst, const kvprim_format *src)
{
    return dst->dtype == src->dtype && !dst->scale && !src->scale;
}

/* Elements that lie in one byte on either side: pieces and tiles have a multiple. */
static int64_t kvpi_packed(const kvprim_move *m)
{
    return kvpi_is_four_bit(m->dst.table.format->dtype) || kvpi_is_four_bit(m->src.table.format->dtype) ? 2 : 1;
}

/* Both sides have a format, of types that convert, and whole elements. Each gets its own bytes of a row. */
KVPRIM_SELDOM kvprim_status kvpi_check_types(kvprim_move *m)
{
    const kvprim_format *const dst = m->dst.table.format, *const src = m->src.table.format;
    const char *const function = m->names->function;
    KVPRIM_REFUSE(!dst || !src, ARGUMENT, "%s: %s.format is set, but %s.format is NULL", function,
                  dst ? m->names->dst : m->names->src, dst ? m->names->src : m->names->dst);
    for (int k = 0; k < 2; k++)
        if (kvpi_dtype_bytes(k ? src->dtype : dst->dtype) == 0 && !kvpi_is_four_bit(k ? src->dtype : dst->dtype))
            return kvprim_fail(KVPRIM_ERROR_ARGUMENT, "%s: %s.format.dtype is %d, which is no element type", function,
                               k ? m->names->src : m->names->dst, (int)(k ? src->dtype : dst->dtype));
    KVPRIM_REFUSE(!kvpi_same_bytes(dst, src) && !kvpi_converts(dst, src), UNSUPPORTED,
                  "%s: no conversion from %s.format.dtype, which is %d, to %s.format.dtype, which is %d", function,
                  m->names->src, (int)src->dtype, m->names->dst, (int)dst->dtype);
    KVPRIM_REFUSE(m->same_cache && !kvpi_same_bytes(dst, src), ARGUMENT,
                  "%s: same_cache is 1, but elements of %s become those of %s", function, m->names->src, m->names->dst);
    KVPRIM_REFUSE(m->row_bytes >= (int64_t)(kvpi_too_large / 4), SIZE, "%s: %s is %lld, too large for a conversion",
                  function, m->names->row_bytes, (long long)m->row_bytes);
    const int64_t elements = kvpi_elements_in(src->dtype, m->row_bytes);
    KVPRIM_REFUSE(kvpi_bytes_of(src->dtype, elements) != m->row_bytes, SIZE,
                  "%s: %s is %lld, no multiple of an element's bytes, %d", function, m->names->row_bytes,
                  (long long)m->row_bytes, (int)kvpi_dtype_bytes(src->dtype));
    KVPRIM_REFUSE(elements % kvpi_packed(m) != 0, SIZE,
                  "%s: %s is %lld, an odd number of elements, which %s.format.dtype packs in pairs", function,
                  m->names->row_bytes, (long long)m->row_bytes, m->names->dst);
    m->dst.piece_bytes = kvpi_bytes_of(dst->dtype, elements);
    return KVPRIM_OK;
}

/* "kvprim_store: k_cache.format.tile is 96, which ...". */
static kvprim_status kvpi_fail_format(const kvprim_move *m, const kvprim_side *side, const char *field, int64_t value,
                                      const char *why)
{
    return kvprim_fail(KVPRIM_ERROR_ARGUMENT, "%s: %s.format.%s is %lld, %s", m->names->function, kvpi_name(m, side),
                       field, (long long)value, why);
}

/* The fields of a format that have few values. */
static kvprim_status kvpi_check_format_values(const kvprim_move *m, const kvprim_side *side)
{
    const kvprim_format *const f = side->table.format;
    const int kind = (int)f->scale;
    if (kind < 0 || kind > KVPRIM_SCALE_TILE)
        return kvpi_fail_format(m, side, "scale", kind, "no kind of scale");
    if (kind && !kvpi_is_quantised(f->dtype))
        return kvpi_fail_format(m, side, "scale", kind, "but elements that are not quantised have none");
    const int narrow = f->scale_dtype == KVPRIM_F8E4M3 || f->scale_dtype == KVPRIM_F16;
    const int tiles_of_four = kind == KVPRIM_SCALE_TILE && kvpi_is_four_bit(f->dtype);
    if (f->scale_dtype && f->scale_dtype != KVPRIM_F32 && f->scale_dtype != KVPRIM_F8E8M0 && !(narrow && tiles_of_four))
        return kvpi_fail_format(m, side, "scale_dtype", (int64_t)f->scale_dtype,
                                narrow ? "which only tiles of elements of 4 bits have"
                                       : "neither KVPRIM_F32 nor KVPRIM_F8E8M0");
    if (f->tensor_scale && !tiles_of_four)
        return kvpi_fail_format(m, side, "scale", kind, "but tensor_scale is set, which only tiles of 4 bits have");
    if (f->scale_heads && !(tiles_of_four && kvpi_dtype_bytes(f->scale_dtype) == 1))
        return kvpi_fail_format(m, side, "scale_heads", f->scale_heads,
                                "which only tiles of 4 bits with scales of 1 byte have");
    if (f->scale_order != KVPRIM_SCALES_LINEAR && (f->scale_order != KVPRIM_SCALES_SWIZZLED || f->scale_heads == 0))
        return kvpi_fail_format(m, side, "scale_order", f->scale_order,
                                f->scale_heads ? "no order of scales" : "but scale_heads is 0");
    if (f->scale_power_of_two != 0 && f->scale_power_of_two != 1)
        return kvpi_fail_format(m, side, "scale_power_of_two", f->scale_power_of_two, "neither 0 nor 1");
    if (f->scale_inverse != 0 && f->scale_inverse != 1)
        return kvpi_fail_format(m, side, "scale_inverse", f->scale_inverse, "neither 0 nor 1");
    if (f->scale_inverse && side == &m->src && kind != KVPRIM_SCALE_TILE)
        return kvpi_fail_format(m, side, "scale_inverse", 1, "but only a move to this side multiplies by an inverse");
    if (f->scale_min != 0 && (kvpi_bits_of(f->scale_min) < 0x00800000 || kvpi_bits_of(f->scale_min) > 0x7f000000))
        return kvprim_fail(KVPRIM_ERROR_ARGUMENT, "%s: %s.format.scale_min is %g, neither 0 nor from 2^-126 to 2^127",
                           m->names->function, kvpi_name(m, side), (double)f->scale_min);
    if (f->scales && f->scale_offset)
        return kvpi_fail_format(m, side, "scale_offset", f->scale_offset, "but scales is set");
    return KVPRIM_OK;
}

/* Fields that have no meaning with a format's kind of scale are 0, and no size is negative. */
static kvprim_status kvpi_check_format_fields(const kvprim_move *m, const kvprim_side *side)
{
    const kvprim_format *const f = side->table.format;
    const int kind = (int)f->scale, own = f->scales != NULL;
    const int shared = f->scale_layer_stride == KVPRIM_SCALES_SHARED && kind != KVPRIM_SCALE_TILE;
    enum { tensor = KVPRIM_SCALE_TENSOR, head = KVPRIM_SCALE_HEAD, tile = KVPRIM_SCALE_TILE, none };
    const struct {
        const char *name;
        int64_t value;
        int least; /* the least kind of scale that has such a field; 0: scales in memory of their own have it */
    } fields[] = {{"scale_dtype", (int64_t)f->scale_dtype, tensor},
                  {"scale_power_of_two", f->scale_power_of_two, tile},
                  {"scale_inverse", f->scale_inverse, tensor},
                  {"scale_min", f->scale_min != 0, tile},
                  {"tile", f->tile, head},
                  {"scales", own, tensor},
                  {"scale_offset", f->scale_offset, tensor},
                  {"scale_heads", f->scale_heads, tile},
                  {"scale_tile_stride", f->scale_tile_stride, f->scale_heads ? none : head},
                  {"scale_stride", f->scale_stride, f->scale_heads ? none : tile},
                  {"scale_page_stride", f->scale_page_stride, tile},
                  {"scale_layer_stride", shared ? 1 : f->scale_layer_stride, 0},
                  {"scales_bytes", f->scales_bytes, 0}};
    for (size_t k = 0; k < sizeof fields / sizeof *fields; k++)
        if (!KVPRIM_LIKELY(fields[k].value == 0)) {
            KVPRIM_REFUSE(fields[k].least ? kind < fields[k].least : !own, ARGUMENT,
                          "%s: %s.format.%s is set, but has no meaning with scale %d%s", m->names->function,
                          kvpi_name(m, side), fields[k].name, kind,
                          fields[k].least == none ? ": scales of heads are packed"
                          : kind && !own          ? " in the table's memory"
                                                  : "");
            KVPRIM_REFUSE(fields[k].value < 0, SIZE, "%s: %s.format.%s is %lld, less than 0", m->names->function,
                          kvpi_name(m, side), fields[k].name, (long long)fields[k].value);
        }
    return KVPRIM_OK;
}

/* A pointer that a conversion uses is aligned to `bytes`, a power of two. */
static kvprim_status kvpi_check_aligned(const kvprim_move *m, const kvprim_side *side, const char *field,
                                        const void *pointer, int32_t bytes)
{
    if (((uintptr_t)pointer & (uintptr_t)(bytes - 1)) == 0)
        return KVPRIM_OK;
    return kvprim_fail(KVPRIM_ERROR_ARGUMENT, "%s: %s.%s (%p) is not aligned to %d bytes", m->names->function,
                       kvpi_name(m, side), field, pointer, (int)bytes);
}

/* The same for distances between such pointers. */
static kvprim_status kvpi_check_multiples(const kvprim_move *m, const kvprim_side *side, const kvpi_number *d, int n,
                                          int32_t bytes)
{
    for (int k = 0; k < n; k++)
        if (d[k].value & (bytes - 1))
            return kvpi_fail_field(m, side, d[k].field, d[k].value, "no multiple of the bytes of an element or scale,",
                                   (uint64_t)bytes);
    return KVPRIM_OK;
}

/* All elements of all rows, or all scales in their memory, are aligned to `bytes`: each layer, and `n` distances. */
static kvprim_status kvpi_check_all_aligned(const kvprim_move *m, const kvprim_side *side, const kvpi_number *d, int n,
                                            int32_t bytes)
{
    const kvpi_number layers = {"layer_stride", kvpi_stacked(m, side) > 1 ? side->layer_stride : 0};
    if (bytes == 1)
        return KVPRIM_OK;
    KVPRIM_TRY(kvpi_check_aligned(m, side, "data", side->table.data, bytes));
    KVPRIM_TRY(kvpi_check_multiples(m, side, d, n, bytes));
    for (int32_t l = 1; side->layers && l < m->layers; l++)
        KVPRIM_TRY(kvpi_check_aligned(m, side, "data of a layer", side->layers[l], bytes));
    return kvpi_check_multiples(m, side, &layers, 1, bytes);
}

/* Checks a format. Its table has its defaults; where its rows and scales lie is checked later. */
KVPRIM_SELDOM kvprim_status kvpi_check_format(const kvprim_move *m, const kvprim_side *side)
{
    const kvprim_table *const t = &side->table;
    const kvprim_format *const f = t->format;
    const int32_t bytes = kvpi_is_four_bit(f->dtype) ? 1 : kvpi_dtype_bytes(f->dtype);
    const int64_t elements = kvpi_elements_in(f->dtype, side->piece_bytes);
    const int64_t tiles = f->tile ? elements / f->tile : 1, packed = kvpi_packed(m);
    KVPRIM_TRY(kvpi_check_format_values(m, side));
    KVPRIM_TRY(kvpi_check_format_fields(m, side));
    if (kvpi_same_bytes(m->dst.table.format, m->src.table.format))
        return KVPRIM_OK;
    KVPRIM_REFUSE(f->scale && !f->scales && f->scale_offset == 0 && t->rows > 0, NULL,
                  "%s: %s.format.scales is NULL, and scale_offset is 0", m->names->function,
                  kvpi_name(m, side)); /* the first scale would be the first element */
    if (t->heads > 1 && elements % t->heads != 0)
        return kvpi_fail_field(m, side, "heads", t->heads, "which does not divide the elements of a row,",
                               (uint64_t)elements);
    if (t->heads > 1 && elements % (t->heads * packed) != 0)
        return kvpi_fail_field(m, side, "heads", t->heads,
                               "which makes odd pieces, beside 4 bits, of a row's elements,", (uint64_t)elements);
    if (f->tile % packed != 0)
        return kvpi_fail_format(m, side, "tile", f->tile, "an odd number of elements of 4 bits");
    if (f->scale == KVPRIM_SCALE_HEAD && f->tile == 0 && t->heads == 1)
        return kvpi_fail_format(m, side, "tile", 0, "and heads is not more than 1: KVPRIM_SCALE_HEAD needs either");
    if (f->tile && elements % f->tile != 0)
        return kvpi_fail_field(m, side, "format.tile", f->tile, "which does not divide the elements of a row,",
                               (uint64_t)elements);
    if (tiles > INT32_MAX)
        return kvpi_fail_field(m, side, "format.tile", f->tile, "which makes more tiles than", INT32_MAX);
    if (f->scale_heads && tiles % ((int64_t)f->scale_heads * (f->scale_order ? 4 : 1)) != 0)
        return kvpi_fail_field(m, side, "format.scale_heads", f->scale_heads,
                               f->scale_order ? "which swizzled scales need to divide, by fours, a row's tiles,"
                                              : "which does not divide a row's tiles,",
                               (uint64_t)tiles);
    if (f->scale_order && (t->page_rows | t->rows) % 4 != 0)
        return kvpi_fail_field(m, side, t->page_rows % 4 ? "page_rows" : "rows",
                               t->page_rows % 4 ? t->page_rows : t->rows, "and scales are swizzled: no multiple of", 4);
    if (f->scales && f->scale != KVPRIM_SCALE_TILE && f->scale_layer_stride == 0 && m->layers > 1 && t->rows > 0)
        return kvpi_fail_format(m, side, "scale_layer_stride", 0,
                                "and there are several layers: set it, or KVPRIM_SCALES_SHARED");
    if (f->scales)
        KVPRIM_TRY(kvpi_check_aligned(m, side, "format.scales", f->scales,
                                      f->scale_dtype ? kvpi_dtype_bytes(f->scale_dtype) : 4));
    const kvpi_number distances[] = {{"stride", t->stride},
                                     {"page_stride", t->page_rows ? t->page_stride : 0},
                                     {"head_stride", t->heads > 1 ? t->head_stride : 0}};
    return kvpi_check_all_aligned(m, side, distances, 3, bytes);
}

/* The memory of a side's rows, or of its scales. Scales form a table, too: its heads are their tiles. */
typedef struct kvpi_area {
    kvprim_table table; /* of layer 0 */
    int64_t row_bytes, rows, layer_stride;
    int32_t layers;
} kvpi_area;

static kvpi_area kvpi_rows_area(const kvprim_move *m, const kvprim_side *side)
{
    const kvpi_area area = {side->table, side->piece_bytes, kvpi_used_rows(m, side), side->layer_stride,
                            (int32_t)kvpi_stacked(m, side)};
    return area;
}

/* A side's scales, whose layers are the table's if they lie in its memory. Sets fields one by one, as copying a table
   took a third of a check: its wide loads wait for the narrow stores just before them. */
static kvpi_area kvpi_scales_area(const kvprim_move *m, const kvprim_side *side)
{
    const kvprim_table *const t = &side->table;
    const kvprim_format *const f = &side->format;
    const int tiled = f->scale == KVPRIM_SCALE_TILE;
    char *const inside = t->data ? (char *)t->data + f->scale_offset : NULL;
    kvpi_area a;
    a.table.heads =
        f->scale == KVPRIM_SCALE_TENSOR ? 1 : (int32_t)(kvpi_elements_in(f->dtype, side->piece_bytes) / f->tile);
    a.row_bytes = (int64_t)a.table.heads * kvpi_dtype_bytes(f->scale_dtype);
    a.table.heads = f->scale_heads ? f->scale_heads : a.table.heads;
    a.table.data = f->scales ? f->scales : inside;
    a.table.head_stride = f->scale_tile_stride;
    a.table.rows = tiled ? t->rows : 1, a.rows = tiled && !f->scale_order ? kvpi_used_rows(m, side) : a.table.rows;
    a.table.stride = tiled ? f->scale_stride : a.row_bytes;
    a.table.page_rows = tiled ? t->page_rows : 0, a.table.page_stride = a.table.page_rows ? f->scale_page_stride : 0;
    a.layers = f->scales ? m->layers : (int32_t)kvpi_stacked(m, side);
    a.layer_stride = f->scales ? f->scale_layer_stride : side->layer_stride;
    return a;
}

/* From an area's first byte to its last, of one layer or of all. */
static uint64_t kvpi_area_bytes(const kvpi_area *a, int32_t layers)
{
    const uint64_t one = kvpi_reach(&a->table, a->rows, a->row_bytes);
    return kvpi_add(one, kvpi_mul((uint64_t)layers - 1, (uint64_t)a->layer_stride));
}

/* Scales are aligned, lie apart from each other if they are written, and inside their memory if its size is known. In
   the table's memory they extend the side's bytes and the default layer stride. */
KVPRIM_SELDOM kvprim_status kvpi_check_scales(const kvprim_move *m, kvprim_side *side, int packed_layers)
{
    kvprim_format *const f = &side->format;
    const int32_t bytes = kvpi_dtype_bytes(f->scale_dtype);
    kvpi_area a = kvpi_scales_area(m, side);
    const int64_t used_rows = a.rows;
    const uint64_t rows = (uint64_t)a.table.rows, offset = (uint64_t)f->scale_offset;
    const uint64_t page_rows = a.table.page_rows ? (uint64_t)a.table.page_rows : rows;
    kvpi_loop loops[4] = {
        {"format.scale_tile_stride", (uint64_t)a.table.head_stride, (uint64_t)a.table.heads},
        {"format.scale_stride", (uint64_t)a.table.stride, page_rows < rows ? page_rows : rows},
        {"format.scale_page_stride", (uint64_t)a.table.page_stride, page_rows < rows ? (rows - 1) / page_rows + 1 : 1},
        {f->scales ? "format.scale_layer_stride" : "layer_stride", (uint64_t)a.layer_stride, (uint64_t)a.layers}};
    if (f->scale == KVPRIM_SCALE_TILE && f->scales && f->scale_layer_stride == 0) { /* packed, whole pages at least */
        const uint64_t whole = kvpi_mul(page_rows, loops[1].stride), packed = kvpi_packed_layer(loops, 3);
        a.layer_stride = f->scale_layer_stride = (int64_t)(whole > packed ? whole : packed);
        loops[3].stride = (uint64_t)a.layer_stride;
    }
    const kvpi_number distances[] = {{"format.scale_offset", f->scale_offset},
                                     {"format.scale_tile_stride", f->scale_tile_stride},
                                     {"format.scale_stride", f->scale_stride},
                                     {"format.scale_page_stride", f->scale_page_stride},
                                     {"format.scale_layer_stride", f->scale_layer_stride}};
    a.rows = a.table.rows;
    const uint64_t one = kvpi_area_bytes(&a, 1 /* layer */);
    if (!f->scales && packed_layers && kvpi_add(offset, one) > (uint64_t)side->layer_stride) { /* after all rows */
        a.layer_stride = side->layer_stride = (int64_t)kvpi_add(offset, kvpi_packed_layer(loops, 3));
        loops[3].stride = (uint64_t)a.layer_stride;
    }
    /* where `scales` is set, kvpi_check_format() has looked at it */
    KVPRIM_TRY(f->scales ? kvpi_check_multiples(m, side, distances, 5, bytes)
                         : kvpi_check_all_aligned(m, side, distances, 5, bytes));
    const uint64_t layers = kvpi_mul((uint64_t)a.layers - 1, (uint64_t)a.layer_stride);
    const uint64_t reach = kvpi_add(offset, kvpi_add(one, layers));
    if (reach >= kvpi_too_large)
        return kvpi_fail_field(m, side, "rows", side->table.rows, "which makes its scales reach further than",
                               kvpi_too_large);
    if (side == &m->dst && f->scale == KVPRIM_SCALE_TILE) {
        uint64_t span;
        KVPRIM_TRY(kvpi_span(m, side, loops, 4, (uint64_t)(a.row_bytes / a.table.heads), &span));
    }
    if (f->scales && f->scales_bytes && reach > (uint64_t)f->scales_bytes)
        return kvpi_fail_field(m, side, "format.scales_bytes", f->scales_bytes, "but its scales reach", reach);
    if (f->scales)
        return KVPRIM_OK;
    if (side->table.bytes && reach > (uint64_t)side->table.bytes)
        return kvpi_fail_field(m, side, "bytes", side->table.bytes, "but its scales reach", reach);
    a.rows = used_rows;
    const uint64_t used = kvpi_add(offset, used_rows == a.table.rows ? one : kvpi_area_bytes(&a, 1));
    side->bytes = used > side->bytes ? used : side->bytes;
    return KVPRIM_OK;
}

/* >>impl_check_side -- checks of one side, its index and `rejected` */

/* Checks a side and fills in its defaults and its bytes. */
static kvprim_status kvpi_check_side(const kvprim_move *m, kvprim_side *side)
{
    kvprim_table *const t = &side->table;
    KVPRIM_TRY(kvpi_check_fields(m, side));
    t->head_stride = t->head_stride > 0 ? t->head_stride : 0; /* KVPRIM_HEADS_SHARED */
    kvpi_resolve(t, side->piece_bytes);
    if (!KVPRIM_LIKELY(!t->format)) {
        KVPRIM_TRY(kvpi_check_format(m, side));
        if (!kvpi_same_bytes(m->dst.table.format, m->src.table.format))
            kvpi_resolve_format(side);
    }
    const int packed_layers = side->layer_stride == 0;
    if (t->rows == 0) {
        side->layer_stride = 0; /* nothing of it is ever touched */
        return KVPRIM_OK;
    }
    const int plain = t->page_rows == 0 && t->heads == 1 && kvpi_stacked(m, side) == 1;
    KVPRIM_TRY(plain ? kvpi_check_plain(m, side) : kvpi_check_loops(m, side));
    if (t->bytes) { /* the table, and all layers that start in its memory, end inside it */
        const uint64_t layers = kvpi_mul(kvpi_stacked(m, side) - 1, (uint64_t)side->layer_stride);
        const uint64_t reach = kvpi_add(kvpi_reach(t, t->rows, side->piece_bytes), layers);
        if (reach > (uint64_t)t->bytes)
            return kvpi_fail_field(m, side, "bytes", t->bytes, "but its rows, strides, heads and layers reach", reach);
    }
    if (!KVPRIM_LIKELY(!side->format.scale))
        KVPRIM_TRY(kvpi_check_scales(m, side, packed_layers));
    KVPRIM_REFUSE(!t->data && !side->device_layers, NULL, "%s: %s.data is NULL", m->names->function,
                  kvpi_name(m, side));
    return KVPRIM_OK;
}

/* For the alignment of int64_t: 4 on 32-bit x86. GPUs need 8, and every processor that CUDA runs on has 8. */
typedef struct kvpi_aligned_i64 {
    char before;
    int64_t i64;
} kvpi_aligned_i64;

static size_t kvpi_index_align(kvprim_index_type type)
{
    return type == KVPRIM_I64 ? offsetof(kvpi_aligned_i64, i64) : 4;
}

/* >>impl_check_layers -- overlap of layers */

enum { kvpi_sorted_layers = 2048 }; /* layers sorted at a time; two such arrays take 32 KB of stack */

/* Merges ascending runs of n > 0 addresses into one, in `a` or `other`. Layers form few: all of K, then all of V. */
static uint64_t *kvpi_sort(uint64_t *a, uint64_t *other, int32_t n)
{
    for (;;) {
        uint64_t *const from = a;
        int32_t out = 0, merges = 0;
        for (int32_t x = 0; x < n; merges++) {
            int32_t x_end = x + 1;
            while (x_end < n && from[x_end] >= from[x_end - 1])
                x_end++;
            if (x_end - x == n)
                return from;
            int32_t y = x_end, y_end = x_end < n ? x_end + 1 : n;
            while (y_end < n && from[y_end] >= from[y_end - 1])
                y_end++;
            while (x < x_end && y < y_end)
                other[out++] = from[x] <= from[y] ? from[x++] : from[y++];
            while (x < x_end)
                other[out++] = from[x++];
            while (y < y_end)
                other[out++] = from[y++];
            x = y_end;
        }
        a = other, other = from;
        if (merges == 1)
            return a;
    }
}

static uint64_t kvpi_layer_address(const kvprim_side *side, int32_t l)
{
    return (uint64_t)(uintptr_t)kvprim_side_layer(side, l);
}

/* The first of n > 0 sorted addresses that is at least x, or n. No branch depends on addresses: none is predictable. */
static int32_t kvpi_lower_bound(const uint64_t *sorted, int32_t n, uint64_t x)
{
    const uint64_t *low = sorted;
    while (n > 1) {
        const int32_t half = n / 2;
        low += half & -(int32_t)(low[half - 1] < x);
        n -= half;
    }
    return (int32_t)(low - sorted) + (*low < x);
}

/* None of some layers of dst, sorted, is the same as another of them, or as a layer of dst from `later` on. */
static kvprim_status kvpi_check_layers_differ(const kvprim_move *m, const uint64_t *sorted, int32_t n, int32_t later)
{
    for (int32_t k = 1; k < n; k++)
        KVPRIM_REFUSE(sorted[k] == sorted[k - 1], OVERLAP, "%s: %p is more than one layer of dst", m->names->function,
                      (void *)(uintptr_t)sorted[k]);
    for (int32_t l = later; l < m->layers; l++) {
        const uint64_t dst = kvpi_layer_address(&m->dst, l);
        if (dst < sorted[0] || dst > sorted[n - 1])
            continue;
        KVPRIM_REFUSE(sorted[kvpi_lower_bound(sorted, n, dst)] == dst, OVERLAP,
                      "%s: dst layer %d (%p) is another layer of dst, too", m->names->function, (int)l,
                      (void *)(uintptr_t)dst);
    }
    return KVPRIM_OK;
}

/* None of some layers of dst, sorted, overlaps a layer of src. */
static kvprim_status kvpi_check_layers_apart(const kvprim_move *m, const uint64_t *sorted, int32_t n)
{
    for (int32_t l = 0; l < m->layers; l++) {
        const uint64_t src = kvpi_layer_address(&m->src, l), reach = m->dst.bytes - 1;
        if (src > sorted[n - 1] + reach || sorted[0] >= src + m->src.bytes)
            continue;
        const int32_t k = kvpi_lower_bound(sorted, n, src > reach ? src - reach : 0);
        if (sorted[k] >= src && sorted[k] - src >= m->src.bytes)
            continue;
        int32_t i = 0;
        while (kvpi_layer_address(&m->dst, i) != sorted[k])
            i++;
        return kvprim_fail(KVPRIM_ERROR_OVERLAP,
                           "%s: dst layer %d (%p, %llu bytes) overlaps src layer %d (%p, %llu bytes)%s",
                           m->names->function, (int)i, (void *)(uintptr_t)sorted[k], (unsigned long long)m->dst.bytes,
                           (int)l, (void *)(uintptr_t)src, (unsigned long long)m->src.bytes,
                           sorted[k] == src ? "; to copy rows inside one cache set same_cache" : "");
    }
    return KVPRIM_OK;
}

/* With `apart` no layer of dst overlaps a layer of src. Otherwise none is the same as another layer of dst. */
KVPRIM_SELDOM kvprim_status kvpi_check_layers(const kvprim_move *m, int apart)
{
    const kvprim_side *const dst = &m->dst;
    uint64_t layers[kvpi_sorted_layers], other[kvpi_sorted_layers];
    for (int32_t l = 0; l < m->layers; l += kvpi_sorted_layers) {
        const int32_t left = m->layers - l, n = left < kvpi_sorted_layers ? left : (int32_t)kvpi_sorted_layers;
        const int falls = n > 2 && kvpi_layer_address(dst, l + 1) < kvpi_layer_address(dst, l);
        const int alternate = n > 2 && (kvpi_layer_address(dst, l + 2) < kvpi_layer_address(dst, l + 1)) != falls;
        for (int32_t k = 0; k < n; k++) { /* if K's and V's layers alternate, every other one makes two ordered runs */
            const int32_t at = !alternate ? k : k % 2 ? (n + 1) / 2 + k / 2 : k / 2;
            layers[at] = kvpi_layer_address(dst, l + k);
        }
        const uint64_t *const sorted = kvpi_sort(layers, other, n);
        KVPRIM_TRY(apart ? kvpi_check_layers_apart(m, sorted, n) : kvpi_check_layers_differ(m, sorted, n, l + n));
    }
    return KVPRIM_OK;
}

/* One cache on both sides: the same layers, and rows that lie in them in the same way. */
static kvprim_status kvpi_check_same_cache(const kvprim_move *m)
{
    const char *const function = m->names->function;
    const kvprim_table *const to = &m->dst.table, *const from = &m->src.table;
    const struct {
        const char *field;
        int64_t dst, src;
    } same[] = {{"stride", to->stride, from->stride},
                {"page_rows", to->page_rows, from->page_rows},
                {"page_stride", to->page_rows ? to->page_stride : 0, from->page_rows ? from->page_stride : 0},
                {"heads", to->heads, from->heads},
                {"head_stride", to->heads > 1 ? to->head_stride : 0, from->heads > 1 ? from->head_stride : 0}};
    KVPRIM_REFUSE(m->dst.device_layers != m->src.device_layers, ARGUMENT,
                  "%s: same_cache is 1, but dst_device_layers is %p and src_device_layers %p", function,
                  (const void *)m->dst.device_layers, (const void *)m->src.device_layers);
    for (size_t k = 0; k < sizeof same / sizeof *same; k++)
        KVPRIM_REFUSE(same[k].dst != same[k].src, ARGUMENT, "%s: same_cache is 1, but dst.%s is %lld and src.%s %lld",
                      function, same[k].field, (long long)same[k].dst, same[k].field, (long long)same[k].src);
    for (int32_t l = 0; l < m->layers; l++)
        KVPRIM_REFUSE(kvprim_side_layer(&m->dst, l) != kvprim_side_layer(&m->src, l), ARGUMENT,
                      "%s: same_cache is 1, but layer %d is at %p in dst, at %p in src", function, (int)l,
                      (void *)kvprim_side_layer(&m->dst, l), (void *)kvprim_side_layer(&m->src, l));
    return KVPRIM_OK;
}

/* >>impl_check_areas -- whether a row or a scale of one area shares a byte with one of another */

typedef struct kvpi_step {
    int64_t stride, n;
} kvpi_step;

/* Pieces of equal size at all steps of some loops; the loop with the largest stride comes first. */
typedef struct kvpi_pieces {
    kvpi_step loops[4];
    int count;
    int64_t at, piece, span; /* bytes: from the area's start to the first piece, of a piece, of all pieces and gaps */
} kvpi_pieces;

/* `pages` pages of an area, from byte `at` on, of `rows` rows each. */
static void kvpi_set_pieces(kvpi_pieces *p, const kvpi_area *a, int64_t at, int64_t pages, int64_t rows)
{
    const kvprim_table *const t = &a->table;
    const kvpi_step loops[4] = {
        {t->stride, rows}, {t->head_stride, t->heads}, {t->page_stride, pages}, {a->layer_stride, a->layers}};
    p->at = at, p->piece = p->span = kvpi_piece_of(t, a->row_bytes), p->count = 0;
    for (int k = 0; k < 4; k++) {
        int place = p->count;
        if (loops[k].n < 2 || loops[k].stride == 0)
            continue;
        for (; place > 0 && p->loops[place - 1].stride < loops[k].stride; place--)
            p->loops[place] = p->loops[place - 1];
        p->loops[place] = loops[k];
        p->span += (loops[k].n - 1) * loops[k].stride;
        p->count++;
    }
}

/* An area's full pages, and its last page if that is not full. Returns how many parts there are. */
static int kvpi_parts_of(const kvpi_area *a, kvpi_pieces *parts)
{
    const kvprim_table *const t = &a->table;
    const int64_t in_page = t->page_rows && t->page_rows < a->rows ? t->page_rows : a->rows;
    const int64_t pages = a->rows / in_page, in_last = a->rows - pages * in_page;
    kvpi_set_pieces(&parts[0], a, 0, pages, in_page);
    if (in_last)
        kvpi_set_pieces(&parts[1], a, pages * t->page_stride, 1, in_last);
    return in_last ? 2 : 1;
}

/* floor(a / b); b > 0. */
static int64_t kvpi_floor(int64_t a, int64_t b)
{
    return a / b - (a % b < 0);
}

static void kvpi_enter_loop(kvpi_pieces *p)
{
    p->span -= (p->loops[0].n - 1) * p->loops[0].stride;
    p->count--;
    for (int k = 0; k < p->count; k++)
        p->loops[k] = p->loops[k + 1];
}

/* Whether a piece of `a`, which starts at 0, and one of `b`, at `delta`, overlap. The outer loop of both goes first; if
   they have the same stride, both go at once: s is a's step minus b's. Only steps at which the inner loops may overlap
   are looked at: 1 to 5 for the engines' caches of 4 million rows, but as many as there are rows if the strides have
   nothing in common. So after `budget` steps the answer is yes. */
static int kvpi_any_meet(int64_t delta, kvpi_pieces a, kvpi_pieces b, int *budget)
{
    if (delta >= a.span || -delta >= b.span)
        return 0;
    if ((a.count == 0 && b.count == 0) || --*budget < 0)
        return 1;
    const kvpi_step x = a.loops[0], y = b.loops[0];
    const int in_a = a.count > 0 && (b.count == 0 || x.stride >= y.stride);
    const int in_b = b.count > 0 && (a.count == 0 || y.stride >= x.stride);
    const int64_t stride = in_a ? x.stride : y.stride;
    if (in_a)
        kvpi_enter_loop(&a);
    if (in_b)
        kvpi_enter_loop(&b);
    int64_t first = kvpi_floor(delta - a.span, stride) + 1, end = -kvpi_floor(-delta - b.span, stride);
    const int64_t least = in_b ? 1 - y.n : 0, most = in_a ? x.n : 1;
    first = first > least ? first : least, end = end < most ? end : most;
    for (int64_t s = first; s < end; s++)
        if (kvpi_any_meet(delta - s * stride, a, b, budget))
            return 1;
    return 0;
}

static int kvpi_areas_meet(const kvpi_area *a, const kvpi_area *b, int *budget)
{
    const int64_t delta = (int64_t)((uint64_t)(uintptr_t)b->table.data - (uint64_t)(uintptr_t)a->table.data);
    kvpi_pieces x[2], y[2];
    const int x_parts = kvpi_parts_of(a, x), y_parts = kvpi_parts_of(b, y);
    for (int k = 0; k < x_parts * y_parts; k++) {
        const kvpi_pieces *const of_a = &x[k % x_parts], *const of_b = &y[k / x_parts];
        if (kvpi_any_meet(delta + of_b->at - of_a->at, *of_a, *of_b, budget))
            return 1;
    }
    return 0;
}

enum { kvpi_meet_budget = 1 << 16 }; /* steps of kvpi_any_meet: about 1 ms. Then scales are refused */
enum { kvpi_pair_budget = 1 << 12 }; /* for K beside V: about 60 us. Then row 0 of both decides */

/* >>impl_check_uses -- whether two things that a call uses meet, and it writes one of them */

/* Errors name the later of two kinds first. */
typedef enum kvpi_use_kind {
    kvpi_src_rows,
    kvpi_dst_rows,
    kvpi_array,
    kvpi_layer_array,
    kvpi_scales,
    kvpi_tensor_scale,
    kvpi_counter,
    kvpi_nans
} kvpi_use_kind;

/* Something that a call reads or writes. */
typedef struct kvpi_use {
    const char *name;
    const void *data;
    uint64_t bytes; /* from the lowest byte to the highest: rows and scales have gaps */
    kvpi_use_kind kind;
    int written, align;      /* align: bytes, a power of two */
    const kvprim_move *move; /* rows and scales: whose they are */
    const kvprim_side *side;
} kvpi_use;

enum { kvpi_most_uses = 18 }; /* a fetch of K and V has 16, and one that is NULL is written after them */

typedef struct kvpi_uses {
    const char *function;
    int count;
    kvpi_use use[kvpi_most_uses];
} kvpi_uses;

/* What is NULL is not used. */
KVPRIM_INLINE kvpi_use *kvpi_add_use(kvpi_uses *u, kvpi_use_kind kind, int written, const char *name, const void *data,
                                     uint64_t bytes, size_t align)
{
    kvpi_use *const use = &u->use[u->count];
    u->count += data != NULL;
    use->name = name, use->data = data, use->bytes = bytes;
    use->kind = kind, use->written = written, use->align = (int)align;
    return use;
}

/* What an error says after a use's name. */
static const char *kvpi_use_field(const kvpi_use *use)
{
    return use->kind == kvpi_layer_array    ? "_device_layers"
           : use->kind == kvpi_scales       ? ".format.scales"
           : use->kind == kvpi_nans         ? ".format.nans"
           : use->kind == kvpi_tensor_scale ? ".format.tensor_scale"
                                            : "";
}

/* Rows and scales of what a move writes, which may interleave: they are compared one by one. With an array of layers,
   each layer is an area of its own; scales in the table's memory then lie in each of them in the same way. */
static kvprim_status kvpi_check_areas(const char *function, const kvpi_use *a, const kvpi_use *b)
{
    const int a_rows = a->kind == kvpi_dst_rows, b_rows = b->kind == kvpi_dst_rows;
    const kvpi_area x = a_rows ? kvpi_rows_area(a->move, a->side) : kvpi_scales_area(a->move, a->side);
    kvpi_area y = b_rows ? kvpi_rows_area(b->move, b->side) : kvpi_scales_area(b->move, b->side);
    const int32_t layers = b->side->layers && a->side->format.scales ? b->move->layers : 1;
    int budget = a_rows ? (int)kvpi_pair_budget : kvpi_meet_budget + 16 * layers, meet = 0;
    for (int32_t l = 0; l < layers && !meet; l++) {
        y.table.data = l > 0 ? kvprim_side_layer(b->side, l) : y.table.data;
        if (layers == 1 || kvpi_overlap(a->data, a->bytes, y.table.data, b->side->bytes))
            meet = kvpi_areas_meet(&x, &y, &budget);
    }
    if (meet && a_rows && budget < 0)
        meet = kvpi_overlap(x.table.data, (uint64_t)kvpi_piece_of(&x.table, x.row_bytes), y.table.data,
                            (uint64_t)kvpi_piece_of(&y.table, y.row_bytes));
    KVPRIM_REFUSE(meet, OVERLAP, "%s: a %s of %s (%p, %llu bytes) overlaps a %s of %s (%p, %llu bytes)", function,
                  a_rows ? "row" : "scale", a->name, a->data, (unsigned long long)a->bytes, b_rows ? "row" : "scale",
                  b->name, y.table.data, (unsigned long long)kvpi_area_bytes(&y, y.layers));
    return KVPRIM_OK;
}

/* Two uses that may meet, as their bytes overlap, gaps included. a's kind is the later one. */
KVPRIM_SELDOM kvprim_status kvpi_check_pair(const char *function, const kvpi_use *a, const kvpi_use *b)
{
    const kvprim_move *const m = b->kind <= kvpi_dst_rows || b->kind == kvpi_scales ? b->move : NULL;
    const int both_rows = a->kind == kvpi_dst_rows && b->kind == kvpi_src_rows;
    const int in_cache = b->kind == kvpi_dst_rows || (b->kind == kvpi_scales && b->side == &m->dst);
    const int scales = a->kind == kvpi_scales && a->side == &a->move->dst;
    if ((both_rows && m->same_cache) || (a->kind == kvpi_nans && b->kind == kvpi_nans)) /* K and V may count together */
        return KVPRIM_OK;
    if (both_rows && m->layers > 1)
        return kvpi_check_layers(m, 1);
    if (in_cache && (scales || a->kind == kvpi_dst_rows))
        return kvpi_check_areas(function, a, b);
    if ((scales && !a->side->format.scales) || (b->kind == kvpi_scales && !b->side->format.scales))
        return KVPRIM_OK; /* the rows' bytes include those of scales in the same memory */
    kvpi_use layer = *b;
    for (int32_t l = 0; b->kind <= kvpi_dst_rows && l < m->layers; l++) {
        layer.data = kvprim_side_layer(b->side, l), layer.bytes = b->side->bytes;
        if (kvpi_overlap(a->data, a->bytes, layer.data, layer.bytes))
            break;
        if (l + 1 == m->layers)
            return KVPRIM_OK;
    }
    const int transfer = both_rows && m->names->dst_index && m->names->src_index && a->data == b->data;
    return kvprim_fail(KVPRIM_ERROR_OVERLAP, "%s: %s%s (%p, %llu bytes) overlaps %s%s (%p, %llu bytes)%s", function,
                       a->name, kvpi_use_field(a), a->data, (unsigned long long)a->bytes, layer.name,
                       kvpi_use_field(&layer), layer.data, (unsigned long long)layer.bytes,
                       transfer ? "; to copy rows inside one cache set same_cache" : "");
}

/* Checks the uses from `first` on, beside each other and beside those before. */
static kvprim_status kvpi_check_uses(const kvpi_uses *u, int first)
{
    const char *const function = u->function;
    for (const kvpi_use *a = u->use + first, *const end = u->use + u->count; a < end; a++) {
        KVPRIM_REFUSE(!KVPRIM_LIKELY(((uintptr_t)a->data & (uintptr_t)(a->align - 1)) == 0), ARGUMENT,
                      "%s: %s%s (%p) is not aligned to %d bytes", function, a->name, kvpi_use_field(a), a->data,
                      a->align);
        for (const kvpi_use *b = u->use; b < a; b++)
            if ((a->written | b->written) && !KVPRIM_LIKELY(!kvpi_overlap(a->data, a->bytes, b->data, b->bytes)))
                KVPRIM_TRY(a->kind >= b->kind ? kvpi_check_pair(function, a, b) : kvpi_check_pair(function, b, a));
    }
    return KVPRIM_OK;
}

/* A side's rows. Its device layers are not known here. */
KVPRIM_INLINE kvprim_status kvpi_add_rows(kvpi_uses *u, const kvprim_move *m, const kvprim_side *side)
{
    const int written = side == &m->dst;
    const char *first = (const char *)side->table.data, *last = first; /* the lowest layer, and the highest */
    const int32_t layers = first ? m->layers : 1;
    int ascends = 1;
    for (int32_t l = 1; l < layers; l++) {
        const char *const data = kvprim_side_layer(side, l);
        ascends &= data > last;
        first = data < first ? data : first, last = data > last ? data : last;
    }
    const uint64_t bytes = (uint64_t)((uintptr_t)last - (uintptr_t)first) + side->bytes;
    kvpi_use *const use =
        kvpi_add_use(u, written ? kvpi_dst_rows : kvpi_src_rows, written, kvpi_name(m, side), first, bytes, 1);
    use->move = m, use->side = side;
    return written && !ascends ? kvpi_check_layers(m, 0) : KVPRIM_OK;
}

/* A side's scales. Those that are only read and lie in the table's memory are among the bytes of its rows. */
KVPRIM_SELDOM void kvpi_add_scales(kvpi_uses *u, const kvprim_move *m, const kvprim_side *side)
{
    if (!side->format.scales && side != &m->dst)
        return;
    const kvpi_area a = kvpi_scales_area(m, side);
    const int written = side == &m->dst && side->format.scale == KVPRIM_SCALE_TILE;
    kvpi_use *const use =
        kvpi_add_use(u, kvpi_scales, written, kvpi_name(m, side), a.table.data, kvpi_area_bytes(&a, a.layers), 1);
    use->move = m, use->side = side;
}

/* `first`: no move before has the same index, as K and V do. */
static kvprim_status kvpi_add_index(kvpi_uses *u, const kvprim_move *m, kvprim_side *side, int first)
{
    const char *const function = m->names->function, *const name =
                                                         side == &m->dst ? m->names->dst_index : m->names->src_index;
    const kvprim_index_type type = side->index_type;
    const uint64_t size = type == KVPRIM_I64 ? 8 : 4;
    if (!side->index_stride)
        side->index_stride = 1;
    KVPRIM_REFUSE(type != KVPRIM_I32 && type != KVPRIM_I64, ARGUMENT,
                  "%s: %s_type is %d, neither KVPRIM_I32 nor KVPRIM_I64", function, name, (int)type);
    KVPRIM_REFUSE(side->index_stride < 0 || side->index_stride > KVPRIM_MAX_INDEX_STRIDE, SIZE,
                  "%s: %s_stride is %lld, less than 0 or more than %lld", function, name, (long long)side->index_stride,
                  (long long)KVPRIM_MAX_INDEX_STRIDE);
    const uint64_t steps = kvpi_mul((uint64_t)m->count - 1, (uint64_t)side->index_stride);
    const uint64_t bytes = kvpi_add(kvpi_mul(steps, size), size);
    KVPRIM_REFUSE(bytes >= kvpi_too_large, SIZE, "%s: count is %lld, which makes %s larger than %llu", function,
                  (long long)m->count, name, (unsigned long long)kvpi_too_large);
    if (first)
        (void)kvpi_add_use(u, kvpi_array, 0, name, side->index, bytes, kvpi_index_align(type));
    return KVPRIM_OK;
}

/* Checks a move by itself, except its index, and fills in all its defaults. */
static kvprim_status kvpi_check_sides(kvprim_move *m)
{
    KVPRIM_REFUSE(m->row_bytes < 1, SIZE, "%s: %s is %lld, less than 1", m->names->function, m->names->row_bytes,
                  (long long)m->row_bytes);
    m->dst.piece_bytes = m->src.piece_bytes = m->row_bytes; /* of whole rows, until kvpi_simplify() */
    if (!KVPRIM_LIKELY(!m->dst.table.format && !m->src.table.format))
        KVPRIM_TRY(kvpi_check_types(m));
    KVPRIM_TRY(kvpi_check_side(m, &m->dst));
    return kvpi_check_side(m, &m->src);
}

/* Whether a table and its format differ from another one's only in memory of the same alignment. They then pass the
   same checks, with the same defaults and sizes. Structures are compared from one pointer to the next. */
static int kvpi_is_like(const kvprim_table *a, const kvprim_table *b)
{
    const kvprim_format *const f = a->format, *const g = b->format;
    const size_t table = offsetof(kvprim_table, format) - offsetof(kvprim_table, rows);
    const size_t first = offsetof(kvprim_format, scales);
    const size_t strides = offsetof(kvprim_format, nans) - offsetof(kvprim_format, scale_offset);
    if (!f || !g || !a->data || !b->data || ((uintptr_t)a->data ^ (uintptr_t)b->data) % 16 != 0 ||
        a->reserved != b->reserved || memcmp(&a->rows, &b->rows, table) != 0)
        return 0;
    return f == g || (!f->scales == !g->scales && ((uintptr_t)f->scales ^ (uintptr_t)g->scales) % 16 == 0 &&
                      f->scales_bytes == g->scales_bytes && f->scale_order == g->scale_order &&
                      f->scale_heads == g->scale_heads && !f->tensor_scale == !g->tensor_scale &&
                      memcmp(f, g, first) == 0 && memcmp(&f->scale_offset, &g->scale_offset, strides) == 0);
}

/* Makes a side of one that is checked, for a table that kvpi_is_like() its own. */
static void kvpi_copy_side(kvprim_side *side, const kvprim_side *checked, const kvprim_table *t)
{
    *side = *checked;
    side->table.data = t->data, side->table.format = t->format;
    if (side->format.dtype)
        side->format.scales = t->format->scales, side->format.nans = t->format->nans,
        side->format.tensor_scale = t->format->tensor_scale;
}

/* Checks a move by itself and beside the moves whose uses `u` holds. `done`: its sides are checked. */
static kvprim_status kvpi_check_move(kvprim_move *m, kvpi_uses *u, int done)
{
    const int before = u->count;
    if (m->dst.index)
        KVPRIM_TRY(kvpi_add_index(u, m, &m->dst, before == 0));
    if (m->src.index)
        KVPRIM_TRY(kvpi_add_index(u, m, &m->src, 1));
    if (!done)
        KVPRIM_TRY(kvpi_check_sides(m));
    if (m->same_cache)
        KVPRIM_TRY(kvpi_check_same_cache(m));
    KVPRIM_TRY(kvpi_add_rows(u, m, &m->dst));
    KVPRIM_TRY(kvpi_add_rows(u, m, &m->src));
    for (int k = 0; k < 2; k++) {
        const kvprim_side *const side = k ? &m->src : &m->dst;
        if (side->device_layers)
            (void)kvpi_add_use(u, kvpi_layer_array, 0, kvpi_name(m, side), side->device_layers,
                               (uint64_t)m->layers * sizeof(void *), sizeof(void *));
        if (!KVPRIM_LIKELY(!side->format.scale)) {
            kvpi_add_scales(u, m, side);
            (void)kvpi_add_use(u, kvpi_tensor_scale, 0, kvpi_name(m, side), side->format.tensor_scale, 4, 4);
        }
    }
    if (m->dst.format.nans)
        (void)kvpi_add_use(u, kvpi_nans, 1, m->names->dst, m->dst.format.nans, 4, 4);
    if (m->rejected)
        (void)kvpi_add_use(u, kvpi_counter, 1, "rejected", m->rejected, 4, 4);
    return kvpi_check_uses(u, before);
}

/* >>impl_moves -- descriptors into moves */

/* `moves`: where they are written; a function that writes none passes its name. */
static kvprim_status kvpi_check_desc(const char *function, const void *desc, const int64_t *count, const void *moves)
{
    KVPRIM_REFUSE(!moves, NULL, "%s_moves: moves is NULL", function);
    KVPRIM_REFUSE(!desc, NULL, "%s: desc is NULL", function);
    KVPRIM_REFUSE(*count < 0, SIZE, "%s: count is %lld, less than 0", function, (long long)*count);
    return KVPRIM_OK;
}

static void kvpi_set_side(kvprim_side *side, const kvprim_table *table, const void *index, kvprim_index_type type,
                          int64_t base, int64_t stride)
{
    side->table = *table;
    side->index = index, side->index_type = index ? type : (kvprim_index_type)0;
    side->index_base = base, side->index_stride = stride;
    side->layers = NULL, side->layer_stride = 0, side->device_layers = NULL;
    side->host_index = side->reserved = 0, side->bytes = 0;
    side->format.dtype = (kvprim_dtype)0, side->format.scale = (kvprim_scale_kind)0;
    side->format.scales = NULL, side->format.nans = NULL, side->format.tensor_scale = NULL;
}

static void kvpi_set_move(kvprim_move *m, const kvprim_move_names *names, int64_t row_bytes, int64_t count,
                          uint32_t *rejected)
{
    m->names = names, m->row_bytes = row_bytes, m->count = count;
    m->layers = 1, m->zero = 0, m->same_cache = 0, m->reserved_cache = 0, m->rejected = rejected;
}

static kvprim_status kvpi_check_gather(const kvprim_gather_desc *d, kvprim_move *m)
{
    static const kvprim_move_names names = {"kvprim_gather", "row_bytes", "dst", NULL, "src", "index"};
    KVPRIM_TRY(kvpi_check_desc(names.function, d, d ? &d->count : NULL, m));
    kvpi_set_move(m, &names, d->row_bytes, d->count, d->rejected);
    kvpi_set_side(&m->dst, &d->dst, NULL, (kvprim_index_type)0, 0, 1);
    kvpi_set_side(&m->src, &d->src, d->index, d->index_type, d->index_base, d->index_stride);
    m->zero = !d->keep_padding;
    if (m->count == 0)
        return KVPRIM_OK;
    KVPRIM_REFUSE(!d->index, NULL, "kvprim_gather: index is NULL");
    KVPRIM_REFUSE(d->keep_padding != 0 && d->keep_padding != 1, ARGUMENT,
                  "kvprim_gather: keep_padding is %d, neither 0 nor 1", (int)d->keep_padding);
    KVPRIM_TRY(kvpi_check_reserved(d->reserved, "kvprim_gather", "", ""));
    kvpi_uses uses;
    uses.count = 0, uses.function = names.function;
    return kvpi_check_move(m, &uses, 0);
}

static kvprim_status kvpi_check_store(const kvprim_store_desc *d, kvprim_move *m)
{
    static const kvprim_move_names k_names = {"kvprim_store", "k_bytes", "k_cache", "slot", "k", NULL},
                                   v_names = {"kvprim_store", "v_bytes", "v_cache", "slot", "v", NULL};
    KVPRIM_TRY(kvpi_check_desc("kvprim_store", d, d ? &d->count : NULL, m));
    const int has_v = d->v_cache.data != NULL;
    kvpi_set_move(&m[0], &k_names, d->k_bytes, d->count, d->rejected);
    kvpi_set_move(&m[1], &v_names, d->v_bytes, has_v ? d->count : 0, NULL); /* a slot counts once */
    kvpi_set_side(&m[0].dst, &d->k_cache, d->slot, d->slot_type, d->slot_base, d->slot_stride);
    kvpi_set_side(&m[0].src, &d->k, NULL, (kvprim_index_type)0, 0, 1);
    const int alike = d->k_cache.format && d->count > 0 && d->k_bytes == d->v_bytes &&
                      kvpi_is_like(&d->k_cache, &d->v_cache) && kvpi_is_like(&d->k, &d->v);
    if (!alike) {
        kvpi_set_side(&m[1].dst, &d->v_cache, d->slot, d->slot_type, d->slot_base, d->slot_stride);
        kvpi_set_side(&m[1].src, &d->v, NULL, (kvprim_index_type)0, 0, 1);
    }
    if (d->count == 0)
        return KVPRIM_OK;
    KVPRIM_REFUSE(!d->slot, NULL, "kvprim_store: slot is NULL");
    KVPRIM_TRY(kvpi_check_reserved(d->reserved_slot | d->reserved, "kvprim_store", "", ""));
    KVPRIM_REFUSE(!has_v && (d->v.data || d->v_bytes) && d->k_cache.rows, NULL,
                  "kvprim_store: v_cache.data is NULL, but %s is set", d->v.data ? "v.data" : "v_bytes");
    kvpi_uses uses;
    uses.count = 0, uses.function = k_names.function;
    KVPRIM_TRY(kvpi_check_move(&m[0], &uses, 0));
    if (alike) { /* most of a check's time is that of its sides */
        kvpi_copy_side(&m[1].dst, &m[0].dst, &d->v_cache);
        kvpi_copy_side(&m[1].src, &m[0].src, &d->v);
    }
    if (has_v)
        KVPRIM_TRY(kvpi_check_move(&m[1], &uses, alike));
    if (has_v && d->v_cache.rows != d->k_cache.rows)
        return kvpi_fail_field(&m[1], &m[1].dst, "rows", d->v_cache.rows, "but k_cache.rows is",
                               (uint64_t)d->k_cache.rows);
    return KVPRIM_OK;
}

/* The layers of one side, before its table is checked. */
static kvprim_status kvpi_check_layer_array(kvprim_move *m, kvprim_side *side)
{
    const char *const name = kvpi_name(m, side), *const device = side->device_layers ? "device_" : "";
    if (!side->layers && !side->device_layers)
        return KVPRIM_OK;
    KVPRIM_REFUSE(side->layers && side->device_layers, ARGUMENT, "%s: both %s_layers and %s_device_layers are set",
                  m->names->function, name, name);
    KVPRIM_REFUSE(side->layer_stride, ARGUMENT, "%s: both %s_%slayers and %s_layer_stride are set", m->names->function,
                  name, device, name);
    side->table.data = side->layers ? side->layers[0] : NULL;
    for (int32_t l = 0; side->layers && l < m->layers && kvpi_used_rows(m, side) > 0; l++)
        KVPRIM_REFUSE(!side->layers[l], NULL, "%s: %s_layers[%d] is NULL", m->names->function, name, (int)l);
    return KVPRIM_OK;
}

static kvprim_status kvpi_check_transfer(const kvprim_transfer_desc *d, kvprim_move *m)
{
    static const kvprim_move_names names = {"kvprim_transfer", "row_bytes", "dst", "dst_index", "src", "src_index"};
    KVPRIM_TRY(kvpi_check_desc(names.function, d, d ? &d->count : NULL, m));
    kvpi_set_move(m, &names, d->row_bytes, d->count, d->rejected);
    kvpi_set_side(&m->dst, &d->dst, d->dst_index, d->dst_index_type ? d->dst_index_type : d->index_type,
                  d->dst_index_base, d->dst_index_stride);
    kvpi_set_side(&m->src, &d->src, d->src_index, d->src_index_type ? d->src_index_type : d->index_type,
                  d->src_index_base, d->src_index_stride);
    m->dst.layers = d->dst_layers, m->dst.layer_stride = d->dst_layer_stride;
    m->src.layers = d->src_layers, m->src.layer_stride = d->src_layer_stride;
    m->dst.device_layers = d->dst_device_layers, m->src.device_layers = d->src_device_layers;
    m->dst.host_index = m->src.host_index = d->host_index;
    m->layers = d->layers == 0 ? 1 : d->layers, m->same_cache = d->same_cache;
    if (m->count == 0)
        return KVPRIM_OK;
    KVPRIM_TRY(kvpi_check_reserved(d->reserved, "kvprim_transfer", "", ""));
    KVPRIM_REFUSE(d->host_index != 0 && d->host_index != 1, ARGUMENT,
                  "kvprim_transfer: host_index is %d, neither 0 nor 1", (int)d->host_index);
    KVPRIM_REFUSE(d->layers < 0 || d->layers > KVPRIM_MAX_LAYERS, SIZE,
                  "kvprim_transfer: layers is %d, less than 0 or more than %d", (int)d->layers, (int)KVPRIM_MAX_LAYERS);
    KVPRIM_REFUSE(m->same_cache != 0 && m->same_cache != 1, ARGUMENT,
                  "kvprim_transfer: same_cache is %d, neither 0 nor 1", (int)m->same_cache);
    KVPRIM_TRY(kvpi_check_layer_array(m, &m->dst));
    KVPRIM_TRY(kvpi_check_layer_array(m, &m->src));
    kvpi_uses uses;
    uses.count = 0, uses.function = names.function;
    KVPRIM_TRY(kvpi_check_move(m, &uses, 0));
    KVPRIM_REFUSE(m->dst.device_layers && m->dst.device_layers == m->src.device_layers && !m->same_cache, OVERLAP,
                  "kvprim_transfer: dst_device_layers and src_device_layers are both %p; to copy rows inside "
                  "one cache set same_cache",
                  (const void *)m->dst.device_layers);
    return KVPRIM_OK;
}

KVPRIM_API kvprim_status kvprim_gather_check(const kvprim_gather_desc *desc, kvprim_gather_desc *resolved)
{
    kvprim_move m;
    KVPRIM_TRY(kvpi_check_gather(desc, &m));
    if (resolved) {
        m.src.table.head_stride = desc->src.head_stride; /* KVPRIM_HEADS_SHARED stays; desc may be `resolved` */
        *resolved = *desc;
        resolved->dst = m.dst.table, resolved->src = m.src.table;
        resolved->index_stride = m.src.index_stride;
    }
    return KVPRIM_OK;
}

KVPRIM_API kvprim_status kvprim_store_check(const kvprim_store_desc *desc, kvprim_store_desc *resolved)
{
    kvprim_move m[2];
    KVPRIM_TRY(kvpi_check_store(desc, m));
    if (resolved) {
        m[0].src.table.head_stride = desc->k.head_stride, m[1].src.table.head_stride = desc->v.head_stride;
        *resolved = *desc;
        resolved->k_cache = m[0].dst.table, resolved->k = m[0].src.table;
        resolved->v_cache = m[1].dst.table, resolved->v = m[1].src.table;
        resolved->slot_stride = m[0].dst.index_stride;
    }
    return KVPRIM_OK;
}

KVPRIM_API kvprim_status kvprim_transfer_check(const kvprim_transfer_desc *desc, kvprim_transfer_desc *resolved)
{
    kvprim_move m;
    KVPRIM_TRY(kvpi_check_transfer(desc, &m));
    if (resolved) {
        m.src.table.head_stride = desc->src.head_stride;
        *resolved = *desc;
        resolved->dst = m.dst.table, resolved->src = m.src.table, resolved->layers = m.layers;
        resolved->dst_layer_stride = desc->dst_layers || desc->dst_device_layers ? 0 : m.dst.layer_stride;
        resolved->src_layer_stride = desc->src_layers || desc->src_device_layers ? 0 : m.src.layer_stride;
        resolved->dst_index_type = m.dst.index_type, resolved->src_index_type = m.src.index_type;
        resolved->dst_index_stride = m.dst.index_stride, resolved->src_index_stride = m.src.index_stride;
    }
    return KVPRIM_OK;
}

/* After a check that returned `status`: the moves leave out what they do not need. */
static kvprim_status kvpi_finish_moves(kvprim_status status, kvprim_move *moves, size_t n)
{
    for (kvprim_move *m = moves; status == KVPRIM_OK && m < moves + n; m++) {
        m->dst.table.format = m->src.table.format = NULL;
        if (m->count == 0) {
            m->dst.piece_bytes = m->src.piece_bytes = 0;
            continue;
        }
        kvpi_simplify(&m->dst, m->dst.piece_bytes);
        kvpi_simplify(&m->src, m->src.piece_bytes);
        if (m->dst.table.rows == 0 || (m->src.table.rows == 0 && !m->zero))
            m->layers = 1; /* no row moves: layer 0 counts */
    }
    return status;
}

/* >>impl_cpu_move -- the executor: `rejected`, zero fill, copies */

enum {
    kvpi_rows_ahead = 32,       /* rows found and prefetched before one is moved */
    kvpi_ring_rows = 64,        /* rows remembered: a power of two above kvpi_rows_ahead */
    kvpi_prefetch_bytes = 1024, /* of a row; the hardware foresees the rest */
    kvpi_run_bytes = 4096       /* rows that are neighbours on both sides move as one until they have so many bytes */
};
/* Larger layers are written past the caches: no line is read first. Smaller ones may stay there for their reader. */
static const int64_t kvpi_stream_bytes = (int64_t)32 << 20;

KVPRIM_INLINE int64_t kvpi_element(const void *data, kvprim_index_type type, int64_t i)
{
    return KVPRIM_LIKELY(type == KVPRIM_I32) ? ((const int32_t *)data)[i] : ((const int64_t *)data)[i];
}

/* Row i of a side, or NULL by the index rule; *past is set if the index is past the table. */
KVPRIM_INLINE char *kvpi_find_row(const kvprim_side *side, int64_t i, int *past)
{
    const int64_t row = kvpi_find_number(side, i, past);
    return KVPRIM_LIKELY(row >= 0) ? (char *)side->table.data + kvpi_row_offset(side, row) : NULL;
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

/* A row in pieces on at least one side, or without a source (zeros): from piece's end to piece's end of either side. */
static void kvpi_move_pieces(const kvprim_move *m, char *dst, const char *src)
{
    const int64_t dst_piece = m->dst.piece_bytes, src_piece = m->src.piece_bytes;
    for (int64_t b = 0; b < m->row_bytes;) {
        const int64_t in_dst = b % dst_piece, in_src = b % src_piece;
        const int64_t dst_left = dst_piece - in_dst, src_left = src_piece - in_src;
        const int64_t step = dst_left < src_left ? dst_left : src_left;
        char *const to = dst + b / dst_piece * m->dst.table.head_stride + in_dst;
        if (src)
            kvpi_copy(to, src + b / src_piece * m->src.table.head_stride + in_src, (size_t)step, 0);
        else
            memset(to, 0, (size_t)step);
        b += step;
    }
}

/* Without the line more that a row touches if it starts inside one: prefetching that costs more than it gains. */
KVPRIM_INLINE void kvpi_prefetch(const char *row, size_t bytes)
{
    for (size_t b = 0; b < bytes; b += 64)
        KVPRIM_PREFETCH(row + b);
}

static void kvpi_prefetch_pieces(const kvprim_side *side, const char *row, size_t bytes)
{
    const size_t piece = (size_t)side->piece_bytes;
    for (size_t done = 0; done < bytes; done += piece, row += side->table.head_stride)
        kvpi_prefetch(row, piece < bytes - done ? piece : bytes - done);
}

/* The most common moves have code of their own: packed int32 indices on one side, no pages or heads. */
typedef enum kvpi_kind { kvpi_any_move, kvpi_plain_gather, kvpi_plain_store } kvpi_kind;

static kvprim_move kvpi_specialise(const kvprim_move *m, kvpi_kind kind)
{
    kvprim_move s = *m;
    if (kind == kvpi_any_move)
        return s;
    s.dst.index_type = s.src.index_type = KVPRIM_I32, s.dst.index_stride = s.src.index_stride = 1;
    s.dst.table.page_rows = s.src.table.page_rows = 0, s.dst.table.heads = s.src.table.heads = 1;
    s.zero = kind == kvpi_plain_gather;
    *(kind == kvpi_plain_gather ? &s.dst.index : &s.src.index) = NULL;
    return s;
}

/* Moves one layer. Each turn finds the row that is kvpi_rows_ahead further on, prefetches it if an index names it, and
   moves row i: memory takes only so many prefetches at once. `stream`: see kvpi_stream_bytes. */
KVPRIM_INLINE void kvpi_move_rows(const kvprim_move *move, kvpi_copy_fn *copy, kvpi_kind kind, int stream)
{
    /* A copy, so that the compiler knows that no row lies over it. No call gets its address: it would escape. */
    const kvprim_move m = kvpi_specialise(move, kind);
    const size_t row_bytes = (size_t)m.row_bytes, most_ahead = kvpi_prefetch_bytes;
    const size_t ahead_bytes = row_bytes < most_ahead ? row_bytes : most_ahead;
    const int whole = m.dst.table.heads == 1 && m.src.table.heads == 1;
    char *dst_at[kvpi_ring_rows], *src_at[kvpi_ring_rows]; /* of row i at i % kvpi_ring_rows. No dst: skip; no src: 0 */
    size_t run = 0; /* bytes of the rows before row i that move with it: row i is whole and follows them */
    for (int64_t i = -kvpi_rows_ahead; i < m.count; i++) {
        const int64_t ahead = i + kvpi_rows_ahead;
        if (KVPRIM_LIKELY(ahead < m.count)) {
            int past = 0;
            char *dst = kvpi_find_row(&m.dst, ahead, &past);
            char *const src = kvpi_find_row(&m.src, ahead, &past);
            if (!KVPRIM_LIKELY(!past) && m.rejected)
                ++*m.rejected;
            if (!KVPRIM_LIKELY(src) && !m.zero)
                dst = NULL;
            if (src && m.src.index && KVPRIM_LIKELY(m.src.table.heads == 1))
                kvpi_prefetch(src, ahead_bytes);
            else if (src && m.src.index)
                kvpi_prefetch_pieces(&move->src, src, ahead_bytes);
            if (dst && m.dst.index && !stream && KVPRIM_LIKELY(m.dst.table.heads == 1))
                kvpi_prefetch(dst, ahead_bytes);
            else if (dst && m.dst.index && !stream)
                kvpi_prefetch_pieces(&move->dst, dst, ahead_bytes);
            dst_at[ahead % kvpi_ring_rows] = dst, src_at[ahead % kvpi_ring_rows] = src;
        }
        if (!KVPRIM_LIKELY(i >= 0))
            continue;
        char *const dst = dst_at[i % kvpi_ring_rows], *const src = src_at[i % kvpi_ring_rows];
        const int64_t next = (i + 1) % kvpi_ring_rows;
        if (!KVPRIM_LIKELY(dst))
            continue;
        if (!KVPRIM_LIKELY(whole && src)) {
            kvpi_move_pieces(move, dst, src);
            continue;
        }
        run += row_bytes;
        if (i + 1 < m.count && src_at[next] == src + row_bytes && dst_at[next] == dst + row_bytes &&
            run < kvpi_run_bytes)
            continue;
        copy(dst + row_bytes - run, src + row_bytes - run, run, stream);
        run = 0;
    }
}

#ifdef KVPRIM_X86
/* kvpi_copy() with vectors; `stream` needs rows of whole, aligned lines. */
#define KVPRIM_COPY(name, target, vector, load, store, store_past_caches)                                              \
    target static inline void name(char *dst, const char *src, size_t bytes, int stream)                               \
    {                                                                                                                  \
        const size_t width = sizeof(vector);                                                                           \
        size_t b = 0;                                                                                                  \
        if (bytes < width) {                                                                                           \
            kvpi_copy(dst, src, bytes, 0);                                                                             \
            return;                                                                                                    \
        }                                                                                                              \
        if (stream)                                                                                                    \
            for (; b + width <= bytes; b += width)                                                                     \
                store_past_caches((vector *)(void *)(dst + b), load((const vector *)(const void *)(src + b)));         \
        for (; b + width <= bytes; b += width)                                                                         \
            store((vector *)(void *)(dst + b), load((const vector *)(const void *)(src + b)));                         \
        if (b < bytes)                                                                                                 \
            store((vector *)(void *)(dst + bytes - width), load((const vector *)(const void *)(src + bytes - width))); \
    }
KVPRIM_COPY(kvpi_copy_avx2, KVPRIM_AVX2, __m256i, _mm256_loadu_si256, _mm256_storeu_si256, _mm256_stream_si256)
KVPRIM_COPY(kvpi_copy_avx512, KVPRIM_AVX512, __m512i, _mm512_loadu_si512, _mm512_storeu_si512, _mm512_stream_si512)

static kvpi_kind kvpi_kind_of(const kvprim_move *m)
{
    const kvprim_side *const indexed = m->dst.index ? &m->dst : &m->src;
    if (m->dst.table.page_rows || m->src.table.page_rows || m->dst.table.heads != 1 || m->src.table.heads != 1 ||
        indexed->index_type != KVPRIM_I32 || indexed->index_stride != 1 || (m->dst.index && m->src.index))
        return kvpi_any_move;
    if (m->src.index && m->zero)
        return kvpi_plain_gather;
    return m->dst.index && !m->zero ? kvpi_plain_store : kvpi_any_move;
}

/* Whether a layer is large, and all rows of dst are whole, aligned cache lines. */
static int kvpi_streams(const kvprim_move *m)
{
    const kvprim_table *const t = &m->dst.table;
    const uint64_t bits =
        (uint64_t)(uintptr_t)t->data | (uint64_t)t->stride | (uint64_t)t->page_stride | (uint64_t)m->row_bytes;
    return m->count >= kvpi_stream_bytes / m->row_bytes && bits % 64 == 0 && t->heads == 1 && m->src.table.heads == 1;
}

#define KVPRIM_MOVE(name, target, copy)                                                                                \
    target static void name(const kvprim_move *m, int stream)                                                          \
    {                                                                                                                  \
        const kvpi_kind kind = kvpi_kind_of(m);                                                                        \
        if (kind == kvpi_plain_gather)                                                                                 \
            kvpi_move_rows(m, copy, kvpi_plain_gather, stream);                                                        \
        else if (kind == kvpi_plain_store)                                                                             \
            kvpi_move_rows(m, copy, kvpi_plain_store, stream);                                                         \
        else                                                                                                           \
            kvpi_move_rows(m, copy, kvpi_any_move, stream);                                                            \
        _mm_sfence(); /* after streaming stores */                                                                     \
    }
KVPRIM_MOVE(kvpi_move_avx2, KVPRIM_AVX2, kvpi_copy_avx2)
KVPRIM_MOVE(kvpi_move_avx512, KVPRIM_AVX512, kvpi_copy_avx512)
#endif

static void kvpi_move_layer(const kvprim_move *m)
{
#ifdef KVPRIM_X86
    if (kvpi_has_avx512())
        kvpi_move_avx512(m, kvpi_streams(m));
    else if (kvpi_has_avx2())
        kvpi_move_avx2(m, kvpi_streams(m));
    else
#endif
        kvpi_move_rows(m, kvpi_copy, kvpi_any_move, 0);
}

/* >>impl_cpu_blocks -- conversion of a few elements */

/* Elements that are converted at a time, in local arrays: gcc's -O2 vectorises only loops of a constant length. */
enum { kvpi_block = 64 };

/* What is done with a number between decoding and encoding it. */
typedef enum kvpi_scaling { kvpi_unscaled, kvpi_divide, kvpi_multiply } kvpi_scaling;

/* Elements of less than 32 bits: type, that of the bits that hold `packed` of them, and name in kvpi_of_, kvpi_to_. */
#define KVPRIM_NARROW_LIST(X)                                                                                          \
    X(KVPRIM_F16, uint16_t, 1, f16)                                                                                    \
    X(KVPRIM_BF16, uint16_t, 1, bf16)                                                                                  \
    X(KVPRIM_F8E4M3, uint8_t, 1, e4m3)                                                                                 \
    X(KVPRIM_F8E5M2, uint8_t, 1, e5m2)                                                                                 \
    X(KVPRIM_INT8, uint8_t, 1, int8)                                                                                   \
    X(KVPRIM_F4E2M1, uint8_t, 2, e2m1)                                                                                 \
    X(KVPRIM_INT4, uint8_t, 2, int4)

/* Copies a block's first n of `all` bytes, whose rest becomes 0. A memcpy of a constant size is no call. */
KVPRIM_INLINE void kvpi_read_block(void *block, const char *src, size_t n, size_t all)
{
    if (n == all) {
        memcpy(block, src, all);
    } else {
        memset(block, 0, all);
        memcpy(block, src, n);
    }
}

KVPRIM_INLINE void kvpi_write_block(char *dst, const void *block, size_t n, size_t all)
{
    if (n == all)
        memcpy(dst, block, all);
    else
        memcpy(dst, block, n);
}

KVPRIM_INLINE void kvpi_load_block(float *x, const char *src, kvprim_dtype from, size_t n)
{
    switch ((int)from) {
#define KVPRIM_LOAD(type, bits, packed, name)                                                                          \
    case type: {                                                                                                       \
        bits block[kvpi_block / (packed)];                                                                             \
        kvpi_read_block(block, src, n * sizeof *block / (packed), sizeof block);                                       \
        for (int i = 0; i < kvpi_block; i++)                                                                           \
            x[i] = kvpi_of_##name((uint32_t)block[i / (packed)] >> 4 * (i % (packed)));                                \
        break;                                                                                                         \
    }
        KVPRIM_NARROW_LIST(KVPRIM_LOAD)
#undef KVPRIM_LOAD
    default:
        kvpi_read_block(x, src, n * sizeof *x, kvpi_block * sizeof *x);
    }
}

KVPRIM_INLINE void kvpi_store_block(char *dst, const float *x, kvprim_dtype to, size_t n)
{
    switch ((int)to) {
#define KVPRIM_STORE(type, bits, packed, name)                                                                         \
    case type: {                                                                                                       \
        bits block[kvpi_block / (packed)];                                                                             \
        for (int i = 0; i < kvpi_block; i += (packed))                                                                 \
            block[i / (packed)] = (bits)(kvpi_to_##name(x[i]) | ((packed) == 2 ? kvpi_to_##name(x[i + 1]) << 4 : 0));  \
        kvpi_write_block(dst, block, n * sizeof *block / (packed), sizeof block);                                      \
        break;                                                                                                         \
    }
        KVPRIM_NARROW_LIST(KVPRIM_STORE)
        KVPRIM_STORE(KVPRIM_F32, uint32_t, 1, f32)
#undef KVPRIM_STORE
    }
}

/* Converts n elements that lie one after the other on both sides. Returns how many NaNs there were. */
typedef uint32_t kvpi_convert_fn(char *dst, kvprim_dtype to, const char *src, kvprim_dtype from, size_t n,
                                 kvpi_scaling scaling, float scale);

KVPRIM_INLINE uint32_t kvpi_convert_blocks(char *dst, kvprim_dtype to, const char *src, kvprim_dtype from, size_t n,
                                           kvpi_scaling scaling, float scale)
{
    const int counts = to == KVPRIM_INT8 || kvpi_is_four_bit(to);
    uint32_t nans = 0;
    for (size_t done = 0; done < n; done += kvpi_block) {
        float x[kvpi_block];
        const size_t some = n - done < (size_t)kvpi_block ? n - done : (size_t)kvpi_block;
        kvpi_load_block(x, src + kvpi_bytes_of(from, (int64_t)done), from, some);
        if (scaling == kvpi_divide)
            for (int i = 0; i < kvpi_block; i++)
                x[i] = kvpi_quotient(x[i], scale);
        else if (scaling == kvpi_multiply)
            for (int i = 0; i < kvpi_block; i++)
                x[i] = kvpi_product(x[i], scale);
        if (counts)
            for (int i = 0; i < kvpi_block; i++)
                nans += (uint32_t)(kvpi_is_nan(x[i]) & (i < (int)some));
        kvpi_store_block(dst + kvpi_bytes_of(to, (int64_t)done), x, to, some);
    }
    return nans;
}

/* kvpi_tile_most() of n elements. */
typedef uint32_t kvpi_most_fn(uint32_t most, const char *src, kvprim_dtype from, size_t n);

/* With 16 maxima side by side, because gcc's -O2 vectorises no loop that reduces to one number. */
KVPRIM_INLINE uint32_t kvpi_most_of_blocks(uint32_t most, const char *src, kvprim_dtype from, size_t n)
{
    enum { maxima = 16 };
    const size_t from_bytes = (size_t)kvpi_dtype_bytes(from);
    uint32_t most_of[maxima] = {most};
    for (size_t done = 0; done < n; done += kvpi_block) {
        float x[kvpi_block];
        const size_t some = n - done < (size_t)kvpi_block ? n - done : (size_t)kvpi_block;
        kvpi_load_block(x, src + done * from_bytes, from, some);
        for (int first = 0; first < kvpi_block; first += maxima)
            for (int i = 0; i < maxima; i++)
                most_of[i] = kvpi_tile_most(most_of[i], x[first + i]);
    }
    for (int i = 1; i < maxima; i++)
        most_of[0] = most_of[i] > most_of[0] ? most_of[i] : most_of[0];
    return most_of[0];
}

#define KVPRIM_CONVERT(suffix, target)                                                                                 \
    target static uint32_t kvpi_convert_##suffix(char *dst, kvprim_dtype to, const char *src, kvprim_dtype from,       \
                                                 size_t n, kvpi_scaling scaling, float scale)                          \
    {                                                                                                                  \
        return kvpi_convert_blocks(dst, to, src, from, n, scaling, scale);                                             \
    }                                                                                                                  \
    target static uint32_t kvpi_most_##suffix(uint32_t most, const char *src, kvprim_dtype from, size_t n)             \
    {                                                                                                                  \
        return kvpi_most_of_blocks(most, src, from, n);                                                                \
    }
KVPRIM_CONVERT(plain, )
#ifdef KVPRIM_X86
KVPRIM_CONVERT(avx2, KVPRIM_AVX2)
KVPRIM_CONVERT(avx512, KVPRIM_AVX512)
#endif

/* >>impl_cpu_convert -- the executor's loop over rows whose elements change their type */

/* A move that converts, in one layer: table.data and format.scales of its sides are the layer's. */
typedef struct kvpi_conversion {
    kvprim_move move;
    const kvprim_side *scaled; /* the side that has scales, or NULL */
    int64_t elements, tile;    /* elements of a row and of a tile */
    kvpi_scaling scaling;
    int computed;
    kvpi_convert_fn *convert;
    kvpi_most_fn *most;
} kvpi_conversion;

static void kvpi_set_conversion(kvpi_conversion *c)
{
    const kvprim_side *const dst = &c->move.dst, *const src = &c->move.src;
    c->scaled = dst->format.scale ? dst : src->format.scale ? src : NULL;
    c->elements = kvpi_elements_in(src->format.dtype, c->move.row_bytes);
    c->tile = c->scaled && c->scaled->format.scale != KVPRIM_SCALE_TENSOR ? c->scaled->format.tile : c->elements;
    c->computed = dst->format.scale == KVPRIM_SCALE_TILE;
    c->scaling = !c->scaled                                      ? kvpi_unscaled
                 : c->scaled == src || dst->format.scale_inverse ? kvpi_multiply
                                                                 : kvpi_divide;
    c->convert = kvpi_convert_plain, c->most = kvpi_most_plain;
#ifdef KVPRIM_X86
    if (kvpi_has_avx512())
        c->convert = kvpi_convert_avx512, c->most = kvpi_most_avx512;
    else if (kvpi_has_avx2())
        c->convert = kvpi_convert_avx2, c->most = kvpi_most_avx2;
#endif
}

/* The scale of a row's first tile. */
static char *kvpi_scales_at(const kvprim_side *side, int64_t row)
{
    const kvprim_format *const f = &side->format;
    const int64_t page_rows = side->table.page_rows, page = page_rows ? row / page_rows : 0;
    const int64_t at = page * f->scale_page_stride + (row - page * page_rows) * f->scale_stride;
    const int64_t swizzled = f->scale_order ? row % 4 * (1 - f->scale_stride) : 0;
    return (char *)f->scales + (f->scale == KVPRIM_SCALE_TILE ? at + swizzled : 0);
}

/* The scale of tile t, in a row whose first is at `scales`. */
static char *kvpi_tile_at(const kvpi_conversion *c, char *scales, int64_t t)
{
    const kvprim_format *const f = &c->scaled->format;
    if (!f->scale_heads)
        return scales + t * f->scale_tile_stride;
    const int64_t tiles = c->elements / c->tile / f->scale_heads;
    return scales + t / tiles * f->scale_tile_stride + t % tiles * (f->scale_order ? 4 : 1);
}

static float kvpi_read_scale(const kvprim_format *f, const char *at)
{
    uint32_t bits = *(const uint8_t *)at;
    uint16_t code;
    if (f->scale_dtype == KVPRIM_F32)
        memcpy(&bits, at, sizeof bits);
    else if (f->scale_dtype == KVPRIM_F16)
        memcpy(&code, at, sizeof code), bits = code;
    const float scale = f->scale_dtype == KVPRIM_F32 ? kvpi_float_of(bits) : kvpi_of_short_scale(f->scale_dtype, bits);
    return f->tensor_scale ? kvpi_product(scale, *f->tensor_scale) : scale;
}

static void kvpi_write_scale(const kvprim_format *f, char *at, float scale)
{
    const uint32_t bits = kvpi_bits_of(scale);
    const uint16_t code = (uint16_t)(f->scale_dtype == KVPRIM_F32 ? 0 : kvpi_to_short_scale(f->scale_dtype, scale));
    if (f->scale_dtype == KVPRIM_F32)
        memcpy(at, &bits, sizeof bits);
    else if (f->scale_dtype == KVPRIM_F16)
        memcpy(at, &code, sizeof code);
    else
        *(uint8_t *)at = (uint8_t)code;
}

/* Element e of a row, and how many of `left` elements from there on follow each other. */
static char *kvpi_element_at(const kvprim_side *side, char *row, int64_t e, int64_t *left)
{
    const int64_t at = kvpi_bytes_of(side->format.dtype, e), piece = at / side->piece_bytes;
    const int64_t in_piece = at - piece * side->piece_bytes;
    const int64_t most = kvpi_elements_in(side->format.dtype, side->piece_bytes - in_piece);
    *left = *left < most ? *left : most;
    return row + piece * side->table.head_stride + in_piece;
}

/* Converts the elements from `first` to `end` - 1 with one scale. src NULL: zeros. Returns how many NaNs there were. */
static uint32_t kvpi_convert_elements(const kvpi_conversion *c, char *dst, char *src, int64_t first, int64_t end,
                                      float scale)
{
    uint32_t nans = 0;
    for (int64_t e = first, n; e < end; e += n) {
        n = end - e;
        char *const to = kvpi_element_at(&c->move.dst, dst, e, &n);
        if (!src) {
            memset(to, 0, (size_t)kvpi_bytes_of(c->move.dst.format.dtype, n));
            continue;
        }
        const char *const from = kvpi_element_at(&c->move.src, src, e, &n);
        nans += c->convert(to, c->move.dst.format.dtype, from, c->move.src.format.dtype, (size_t)n, c->scaling, scale);
    }
    return nans;
}

/* The scale that the elements from `first` to `end` - 1 need. src NULL: they are zeros. */
static float kvpi_compute_scale(const kvpi_conversion *c, char *src, int64_t first, int64_t end)
{
    const kvprim_format *const f = &c->move.dst.format;
    uint32_t most = 0;
    for (int64_t e = first, n; src && e < end; e += n) {
        n = end - e;
        const char *const from = kvpi_element_at(&c->move.src, src, e, &n);
        most = c->most(most, from, c->move.src.format.dtype, (size_t)n);
    }
    float quotient = kvpi_quotient(kvpi_tile_largest(most), kvpi_largest(f->dtype));
    if (f->tensor_scale)
        quotient = kvpi_tile_quotient(kvpi_quotient(quotient, *f->tensor_scale));
    return kvpi_tile_scale(quotient, f->scale_min, f->scale_power_of_two);
}

/* `scales`: of the row's first tile, NULL if there are none or none is read. Returns how many NaNs there were. */
static uint32_t kvpi_convert_row(const kvpi_conversion *c, char *dst, char *src, char *scales)
{
    uint32_t nans = 0;
    for (int64_t e = 0, t = 0; e < c->elements; e += c->tile, t++) {
        float scale = 1;
        char *const at = scales ? kvpi_tile_at(c, scales, t) : NULL;
        if (c->computed) {
            kvpi_write_scale(&c->move.dst.format, at, kvpi_compute_scale(c, src, e, e + c->tile));
            scale = kvpi_tile_divisor(kvpi_read_scale(&c->move.dst.format, at));
            scale = c->move.dst.format.scale_inverse ? kvpi_quotient(1, scale) : scale;
        } else if (c->scaled && src) {
            scale = kvpi_read_scale(&c->scaled->format, at);
        }
        nans += kvpi_convert_elements(c, dst, src, e, e + c->tile, scale);
    }
    return nans;
}

static void kvpi_convert_layer(const kvpi_conversion *c)
{
    const kvprim_move *const m = &c->move;
    uint32_t nans = 0;
    for (int64_t i = 0; i < m->count; i++) {
        int past = 0;
        const int64_t to = kvpi_find_number(&m->dst, i, &past), from = kvpi_find_number(&m->src, i, &past);
        if (past && m->rejected)
            ++*m->rejected;
        if (to < 0 || (from < 0 && !m->zero))
            continue;
        const int64_t scaled = c->scaled == &m->dst ? to : from;
        char *const scales = c->scaled && scaled >= 0 ? kvpi_scales_at(c->scaled, scaled) : NULL;
        char *const src = from < 0 ? NULL : (char *)kvprim_table_row(&m->src.table, from);
        nans += kvpi_convert_row(c, (char *)kvprim_table_row(&m->dst.table, to), src, scales);
    }
    if (nans && m->dst.format.nans)
        *m->dst.format.nans += nans;
}

/* A side of `layer`, from that of the move: where its rows and scales lie. Here the CPU is the executing side. */
static void kvpi_enter_layer(kvprim_side *layer, const kvprim_side *side, int32_t l)
{
    const kvprim_format *const f = &side->format;
    char *const data = side->device_layers ? (char *)side->device_layers[l] : kvprim_side_layer(side, l);
    layer->table.data = data;
    if (f->scale && (f->scales || data))
        layer->format.scales = f->scales ? (char *)f->scales + l * f->scale_layer_stride : data + f->scale_offset;
}

/* After a check that returned `status`. */
static kvprim_status kvpi_run_moves(kvprim_status status, const kvprim_move *moves, size_t n)
{
    for (size_t k = 0; status == KVPRIM_OK && k < n; k++) {
        kvpi_conversion c;
        if (moves[k].count == 0)
            continue;
        c.move = moves[k];
        if (c.move.dst.format.dtype)
            kvpi_set_conversion(&c);
        for (int32_t l = 0; l < moves[k].layers; l++) {
            kvpi_enter_layer(&c.move.dst, &moves[k].dst, l);
            kvpi_enter_layer(&c.move.src, &moves[k].src, l);
            if (c.move.dst.format.dtype)
                kvpi_convert_layer(&c);
            else
                kvpi_move_layer(&c.move);
            c.move.rejected = NULL; /* counted in layer 0 */
        }
    }
    return status;
}

KVPRIM_API kvprim_status kvprim_cpu_move(const kvprim_move *moves, size_t n)
{
    KVPRIM_RANGE("kvprim_cpu_move");
    KVPRIM_REFUSE(!moves && n, NULL, "kvprim_cpu_move: moves is NULL");
    return kvpi_run_moves(KVPRIM_OK, moves, n);
}

/* The moves of a descriptor, and the call that runs them. */
#define KVPRIM_MOVES(name, n)                                                                                          \
    KVPRIM_API kvprim_status kvprim_##name##_moves(const kvprim_##name##_desc *desc, kvprim_move *moves)               \
    {                                                                                                                  \
        return kvpi_finish_moves(kvpi_check_##name(desc, moves), moves, n);                                            \
    }                                                                                                                  \
    KVPRIM_API kvprim_status kvprim_##name(const kvprim_##name##_desc *desc)                                           \
    {                                                                                                                  \
        KVPRIM_RANGE("kvprim_" #name);                                                                                 \
        kvprim_move m[n];                                                                                              \
        return kvpi_run_moves(kvprim_##name##_moves(desc, m), m, n);                                                   \
    }
KVPRIM_MOVES(gather, 1)
KVPRIM_MOVES(store, 2)
KVPRIM_MOVES(transfer, 1)
#undef KVPRIM_MOVES

#ifndef KVPRIM_NO_LAYOUTS
/* >>impl_layout -- caches of engines, the staging area */

/* What the caches hold. scale_stride: from one row's scales to the next after all rows of a page; 0: they lie in the
   row. scale_min: except in rows of 656 bytes, engines take a tile's largest magnitude as 1e-4 at least. */
typedef struct kvpi_quantised_rows {
    const char *name;
    int64_t converted, copied, tile, row_bytes, scale_stride;
    kvprim_dtype scale_dtype;
    int32_t power_of_two, inverse;
    float scale_min;
} kvpi_quantised_rows;

/* Writes the order that a name stands for, with a 2. Returns 0 if there is none. */
static int kvpi_find_order(const char *name, char order[8])
{
    static const char names[] =
        " flashinfer_nhd=LB2NHC flashinfer_hnd=LB2HNC flashinfer_nhd_split=2LBNHC flashinfer_hnd_split=2LBHNC "
        "sglang_mha=2LBNHC sglang_layer_first=2LBNHC sglang_page_first=2BNLHC sglang_page_first_direct=2BLNHC "
        "sglang_page_head=2BHNLC sglang_page_unified=BHL2NC trtllm=BL2HNC dynamo_operational_nhd=BL2NHC "
        "dynamo_operational_hnd=BL2HNC dynamo_universal=BHL2NC KV_2LTD=B2LNHC KV_2TD=LB2NHC KV_T2D=LBN2HC "
        "KV_MLA_FMT=BLNH2C NB_NL_TWO_BS_NH_HS=BL2NHC NB_NL_TWO_NH_BS_HS=BL2HNC NL_X_TWO_NB_BS_NH_HS=L2BNHC "
        "NL_X_TWO_NB_NH_BS_HS=L2BHNC NL_X_NB_TWO_BS_NH_HS=LB2NHC NL_X_NB_TWO_NH_BS_HS=LB2HNC NL_X_NB_BS_HS=LBNH2C "
        "NL_X_NB_NH_BS_TWO_HS=LBHN2C NL_X_NB_BS_NH_TWO_HS=LBNH2C NL_X_NB_NH_BS_CS=LBHN2C NL_X_NB_BS_NH_CS=LBNH2C "
        "NL_X_NBBS_ONE_HS=LBNH2C TWO_X_NL_X_NBBS_NH_HS=2LBNHC TWO_X_NL_X_NB_BS_NH_HS=2LBNHC ";
    char key[32];
    const int whole = snprintf(key, sizeof key, " %s=", name) < (int)sizeof key && !strchr(name, '=');
    const char *const found = whole ? strstr(names, key) : NULL;
    (void)snprintf(order, 8, "%.6s", found ? found + strlen(key) : name);
    if (strlen(order) == 5 && order[4] == 'C') /* K and V in one head */
        memcpy(order + 4, "2C", 3);
    int known = strlen(order) == 6 && order[5] == 'C' && (found || strlen(name) <= 6);
    for (const char *letter = "LBHN2"; *letter; letter++)
        known &= strchr(order, *letter) != NULL;
    return known;
}

/* The strides of K and V, from the fastest dimension to the slowest. */
static kvprim_status kvpi_set_strides(const char *order, const kvprim_layout_sizes *z, kvprim_layout *o)
{
    kvprim_table *const k = &o->k_cache, *const v = &o->v_cache;
    const int64_t steps[] = {z->heads, z->page_rows, (z->rows - 1) / z->page_rows + 1, z->layers};
    int64_t *const strides[2][4] = {{&k->head_stride, &k->stride, &k->page_stride, &o->k_layer_stride},
                                    {&v->head_stride, &v->stride, &v->page_stride, &o->v_layer_stride}};
    uint64_t size[2] = {(uint64_t)(z->k_bytes / z->heads), (uint64_t)(z->v_bytes / z->heads)};
    for (const char *at = order + 5; at-- > order;) {
        const uint64_t most = size[0] > size[1] ? size[0] : size[1];
        if (*at == '2') {
            o->v_offset = (int64_t)size[0];
            size[0] = size[1] = kvpi_add(size[0], size[1]);
            continue; /* from here on both parts have the same strides */
        }
        if (*at == 'B' && z->page_stride) {
            KVPRIM_REFUSE((uint64_t)z->page_stride < most, SIZE,
                          "kvprim_layout_find: page_stride is %lld, less than a page's bytes, %llu",
                          (long long)z->page_stride, (unsigned long long)most);
            size[0] = (uint64_t)z->page_stride;
            size[1] = size[1] ? size[0] : 0; /* 0: there is no V, and no 2 inside the page */
        }
        const size_t dimension = (size_t)(strchr("HNBL", *at) - "HNBL");
        for (int part = 0; part < 2; part++) {
            *strides[part][dimension] = (int64_t)size[part];
            size[part] = kvpi_mul(size[part], (uint64_t)steps[dimension]);
        }
    }
    o->bytes = (int64_t)size[0];
    KVPRIM_REFUSE(size[0] >= kvpi_too_large, SIZE,
                  "kvprim_layout_find: rows is %lld, page_rows %lld, page_stride %lld, k_bytes %lld, v_bytes %lld and "
                  "layers %d, too large together",
                  (long long)z->rows, (long long)z->page_rows, (long long)z->page_stride, (long long)z->k_bytes,
                  (long long)z->v_bytes, (int)z->layers);
    return KVPRIM_OK;
}

static void kvpi_set_quantised(const kvpi_quantised_rows *p, int64_t page_rows, kvprim_layout *o)
{
    kvprim_format *const f = &o->k_format;
    f->dtype = KVPRIM_F8E4M3, f->scale = KVPRIM_SCALE_TILE, f->tile = p->tile;
    f->scale_dtype = p->scale_dtype, f->scale_power_of_two = p->power_of_two, f->scale_min = p->scale_min;
    f->scale_offset = p->scale_stride ? page_rows * p->row_bytes : p->converted;
    f->scale_inverse = p->inverse, f->scale_stride = p->scale_stride; /* 0: the row's */
    o->k_cache.stride = o->v_cache.stride = p->row_bytes;
    o->k_elements = p->converted, o->v_elements = p->copied;
    o->k_bytes = p->converted, o->v_bytes = 2 * p->copied;
    o->v_offset = p->row_bytes - o->v_bytes, o->v_layer_stride = o->k_layer_stride;
}

KVPRIM_API kvprim_status kvprim_layout_find(const char *name, const kvprim_layout_sizes *sizes, kvprim_layout *layout)
{
    static const kvpi_quantised_rows quantised[] = {
        {"fp8_ds_mla", 512, 64, 128, 656, 0, KVPRIM_F32, 1, 0, 1e-4f},
        {"fp8_ds_mla_sglang", 512, 64, 128, 656, 0, KVPRIM_F32, 0, 1, 0},
        {"fp8_ds_mla_v4", 448, 64, 64, 576, 8, KVPRIM_F8E8M0, 1, 0, 2.23214286e-07f},
        {"fp8_ds_mla_v41", 512, 0, 32, 512, 16, KVPRIM_F8E8M0, 1, 0, 2.23214286e-07f},
        {"fp8_indexer", 128, 0, 128, 128, 4, KVPRIM_F32, 0, 0, 2.23214286e-07f},
        {"fp8_indexer_ue8m0", 128, 0, 128, 128, 4, KVPRIM_F32, 1, 0, 2.23214286e-07f}};
    const kvpi_quantised_rows *p = NULL;
    char order[8];
    const char *const null = !name ? "name" : !sizes ? "sizes" : !layout ? "layout" : NULL;
    KVPRIM_REFUSE(null, NULL, "kvprim_layout_find: %s is NULL", null);
    kvprim_layout_sizes z = *sizes;
    z.layers += z.layers == 0, z.heads += z.heads == 0;
    for (size_t k = 0; k < sizeof quantised / sizeof *quantised; k++)
        p = strcmp(name, quantised[k].name) == 0 ? &quantised[k] : p;
    KVPRIM_REFUSE(!kvpi_find_order(p ? "LBNHC" : name, order), ARGUMENT,
                  "kvprim_layout_find: '%.64s' is neither a name of >>layout nor an order of LBHN2C", name);
    KVPRIM_REFUSE(p && (z.k_bytes || z.v_bytes || z.heads != 1), ARGUMENT,
                  "kvprim_layout_find: '%s' has its own k_bytes, v_bytes and heads, not %lld, %lld and %d", name,
                  (long long)z.k_bytes, (long long)z.v_bytes, (int)z.heads);
    z.k_bytes = p ? p->row_bytes + p->scale_stride : z.k_bytes;
    const kvpi_number fields[] = {
        {"rows", z.rows},       {"page_rows", z.page_rows}, {"layers", z.layers},          {"heads", z.heads},
        {"k_bytes", z.k_bytes}, {"v_bytes", z.v_bytes},     {"page_stride", z.page_stride}};
    for (int k = 0; k < 7; k++)
        KVPRIM_REFUSE(fields[k].value < (k < 5), SIZE, "kvprim_layout_find: %s is %lld, less than %d", fields[k].field,
                      (long long)fields[k].value, k < 5);
    KVPRIM_REFUSE(z.k_bytes % z.heads || z.v_bytes % z.heads, SIZE,
                  "kvprim_layout_find: heads is %d, but k_bytes %lld and v_bytes %lld", (int)z.heads,
                  (long long)z.k_bytes, (long long)z.v_bytes);
    kvprim_layout o;
    memset(&o, 0, sizeof o);
    o.k_cache.data = z.data, o.k_cache.rows = z.rows, o.k_cache.page_rows = z.page_rows, o.k_cache.heads = z.heads;
    o.v_cache = o.k_cache, o.k_bytes = z.k_bytes, o.v_bytes = z.v_bytes, o.layers = z.layers;
    KVPRIM_TRY(kvpi_set_strides(order, &z, &o));
    if (p)
        kvpi_set_quantised(p, z.page_rows, &o);
    o.v_cache.data = z.data ? (char *)z.data + o.v_offset : NULL;
    if (o.v_bytes == 0)
        memset(&o.v_cache, 0, sizeof o.v_cache), o.v_offset = o.v_layer_stride = 0;
    *layout = o;
    layout->k_cache.format = p ? &layout->k_format : NULL;
    return KVPRIM_OK;
}

KVPRIM_API kvprim_status kvprim_pack_plan(const kvprim_pack_desc *desc, kvprim_pack *plan)
{
    const char *const null = !desc ? "desc" : !plan ? "plan" : !desc->cache ? "cache" : NULL;
    KVPRIM_REFUSE(null, NULL, "kvprim_pack_plan: %s is NULL", null);
    const kvprim_layout *const c = desc->cache;
    const int64_t all = c->k_cache.heads > 1 ? c->k_cache.heads : 1;
    const int64_t heads = desc->heads ? desc->heads : all - desc->head;
    KVPRIM_REFUSE(c->k_cache.format, ARGUMENT, "kvprim_pack_plan: cache has a format: find it by an order");
    KVPRIM_REFUSE(desc->count < 0 || desc->head < 0 || heads < 1 || heads > all - desc->head || c->layers < 1, SIZE,
                  "kvprim_pack_plan: count is %lld, head %d and heads %d; the cache has %d, and %d layers",
                  (long long)desc->count, (int)desc->head, (int)desc->heads, (int)all, (int)c->layers);
    const int64_t bytes[2] = {c->k_bytes / all * heads, c->v_bytes / all * heads}; /* of a row */
    const uint64_t layer = kvpi_mul((uint64_t)desc->count, (uint64_t)(bytes[0] + bytes[1]));
    const uint64_t area = kvpi_mul(layer, (uint64_t)c->layers);
    KVPRIM_REFUSE(area >= kvpi_too_large, SIZE, "kvprim_pack_plan: count is %lld, too large", (long long)desc->count);
    KVPRIM_REFUSE(desc->staging && desc->staging_bytes < (int64_t)area, SIZE,
                  "kvprim_pack_plan: staging_bytes is %lld, less than the area's, %llu", (long long)desc->staging_bytes,
                  (unsigned long long)area);
    memset(plan, 0, sizeof *plan);
    plan->bytes = (int64_t)area;
    for (int part = 0; part < 2; part++) {
        kvprim_transfer_desc *const t = &plan->pack[part], *const u = &plan->unpack[part];
        t->row_bytes = u->row_bytes = bytes[part];
        t->count = u->count = t->row_bytes ? desc->count : 0, t->layers = u->layers = c->layers;
        t->dst.data = desc->staging ? (char *)desc->staging + (part ? desc->count * bytes[0] : 0) : NULL;
        t->dst.rows = desc->count + (desc->count == 0), t->dst.stride = bytes[part];
        t->dst.heads = (int32_t)heads, t->dst.head_stride = bytes[part] / heads, u->src = t->dst;
        t->dst_layer_stride = u->src_layer_stride = (int64_t)layer;
        t->src = part ? c->v_cache : c->k_cache, t->src.heads = (int32_t)heads;
        plan->head_offset[part] = t->row_bytes ? desc->head * t->src.head_stride : 0;
        t->src.data = t->src.data ? (char *)t->src.data + plan->head_offset[part] : NULL;
        u->dst = t->src;
        t->src_layer_stride = u->dst_layer_stride = part ? c->v_layer_stride : c->k_layer_stride;
        t->src_index = u->dst_index = desc->slot, t->src_index_type = u->dst_index_type = desc->slot_type;
    }
    return KVPRIM_OK;
}

/* >>impl_runs -- moves as runs */

typedef struct kvpi_stride {
    int64_t n, from, to; /* steps, and bytes of each on either side */
} kvpi_stride;

/* Rows at equal distances, from the first byte of a layer; `zero`: they have no source, and `from` is `to`. */
typedef struct kvpi_box {
    int64_t from, to, rows, bytes;
    int zero, whole;        /* whole: one run of each layer */
    kvpi_stride strides[4]; /* rows, heads (two), layers */
} kvpi_box;

typedef struct kvpi_run_list {
    kvprim_copy_item *items, last;
    int64_t count, max;
} kvpi_run_list;

/* Leaves out the strides that have no gaps. Returns whether one run is left of each layer. */
static int kvpi_join_strides(kvpi_box *b)
{
    for (int k = 0; k < 4; k++)
        if (b->strides[k].n > 1 && b->strides[k].from == b->bytes && b->strides[k].to == b->bytes) {
            b->bytes *= b->strides[k].n, b->strides[k].n = 1;
            k = -1; /* another may have no gaps now */
        }
    return b->strides[0].n * b->strides[1].n * b->strides[2].n == 1;
}

static void kvpi_list_box(const kvprim_move *m, kvpi_box *b, kvpi_run_list *list)
{
    const kvprim_side src = m->src, dst = m->dst; /* copies: for the compiler, items could be the same memory */
    const kvpi_stride *const s = b->strides;
    kvpi_run_list l = *list;
    if (b->rows == 0)
        return;
    (void)kvpi_join_strides(b);
    for (int64_t i = 0; i < s[0].n; i++)
        for (int64_t j = 0; j < s[1].n; j++)
            for (int64_t k = 0; k < s[2].n; k++)
                for (int64_t layer = 0; layer < s[3].n; layer++) {
                    const int64_t at = b->from + i * s[0].from + j * s[1].from + k * s[2].from;
                    const char *const from = b->zero ? NULL : kvprim_side_layer(&src, layer) + at;
                    char *const to = kvprim_side_layer(&dst, layer) + b->to + i * s[0].to + j * s[1].to + k * s[2].to;
                    const int joins = l.count > 0 && (char *)l.last.dst + l.last.bytes == to && !from == !l.last.src &&
                                      (!from || (const char *)l.last.src + l.last.bytes == from);
                    l.last.src = joins ? l.last.src : from, l.last.dst = joins ? l.last.dst : to;
                    l.last.bytes = (joins ? l.last.bytes : 0) + (uint64_t)b->bytes, l.count += !joins;
                    if (l.count <= l.max)
                        l.items[l.count - 1] = l.last;
                }
    *list = l;
}

/* Joins rows to the box before, or lists that first. */
static void kvpi_add_box(const kvprim_move *m, kvpi_box *b, kvpi_box *before, kvpi_run_list *l)
{
    if (b->rows == 0)
        return;
    const kvprim_side *const d = &m->dst, *const s = b->zero ? d : &m->src;
    const int64_t s_piece = s->piece_bytes, d_piece = d->piece_bytes, piece = s_piece < d_piece ? s_piece : d_piece;
    const int64_t ratio = (s_piece + d_piece - piece) / piece; /* pieces of one side in one of the other's */
    const kvpi_stride strides[4] = {
        {b->rows, s->table.stride, d->table.stride},
        {m->row_bytes / piece / ratio, s->table.head_stride * (s_piece == piece ? ratio : 1),
         d->table.head_stride * (d_piece == piece ? ratio : 1)},
        {ratio, s_piece == piece ? s->table.head_stride : piece, d_piece == piece ? d->table.head_stride : piece},
        {m->layers, s->layers ? -1 : s->layer_stride, d->layers ? -1 : d->layer_stride}};
    memcpy(b->strides, strides, sizeof strides);
    b->bytes = piece, b->whole = kvpi_join_strides(b);
    if (before->rows && before->whole && b->whole && before->zero == b->zero &&
        before->strides[3].n == b->strides[3].n && before->to + before->bytes == b->to &&
        before->from + before->bytes == b->from) {
        before->bytes += b->bytes;
        return;
    }
    kvpi_list_box(m, before, l);
    *before = *b;
}

static kvprim_status kvpi_list_move(const kvprim_move *m, kvpi_run_list *l)
{
    const int64_t s_piece = m->src.piece_bytes, d_piece = m->dst.piece_bytes;
    kvpi_box now, before;
    now.rows = before.rows = 0, now.zero = -1;
    if (m->count == 0)
        return KVPRIM_OK;
    KVPRIM_REFUSE(
        m->dst.format.dtype || m->dst.device_layers || m->src.device_layers || (s_piece % d_piece && d_piece % s_piece),
        UNSUPPORTED, "kvprim_runs: a move of %s converts rows, or has device layers or heads that share no piece",
        m->names->function);
    for (int64_t i = 0; i < m->count; i++) {
        int past = 0;
        const int64_t d = kvpi_find_number(&m->dst, i, &past), s = kvpi_find_number(&m->src, i, &past);
        if (d < 0 || (s < 0 && !m->zero))
            continue;
        const int64_t to = kvpi_row_offset(&m->dst, d), from = s < 0 ? to : kvpi_row_offset(&m->src, s);
        const int64_t to_step = m->dst.table.stride, from_step = s < 0 ? to_step : m->src.table.stride;
        if (now.zero != (s < 0) || to - now.to != now.rows * to_step || from - now.from != now.rows * from_step) {
            kvpi_add_box(m, &now, &before, l);
            now.from = from, now.to = to, now.rows = 0, now.zero = s < 0;
        }
        now.rows++;
    }
    kvpi_add_box(m, &now, &before, l);
    kvpi_list_box(m, &before, l);
    return KVPRIM_OK;
}

KVPRIM_API int64_t kvprim_runs(const kvprim_move *moves, size_t n, kvprim_copy_item *items, int64_t max)
{
    kvpi_run_list list;
    memset(&list, 0, sizeof list);
    list.items = items, list.max = max;
    kvprim_status status = KVPRIM_OK;
    if ((!moves && n > 0) || (!items && max > 0))
        status = kvprim_fail(KVPRIM_ERROR_NULL, "kvprim_runs: %s is NULL", !moves && n > 0 ? "moves" : "items");
    for (size_t k = 0; status == KVPRIM_OK && k < n; k++)
        status = kvpi_list_move(&moves[k], &list);
    return status == KVPRIM_OK ? list.count : -1;
}
#endif /* KVPRIM_NO_LAYOUTS */

/* >>impl_slots -- page tables into slots */

/* An array of `elements`, of which there are as many as `field` says, `value`. */
static kvprim_status kvpi_add_array(kvpi_uses *u, int written, const char *name, const void *data,
                                    kvprim_index_type type, uint64_t elements, const char *field, int64_t value)
{
    const uint64_t bytes = kvpi_mul(elements, type == KVPRIM_I64 ? 8 : 4);
    KVPRIM_REFUSE(data && bytes >= kvpi_too_large, SIZE, "%s: %s is %lld, which makes %s larger than %llu bytes",
                  u->function, field, (long long)value, name, (unsigned long long)kvpi_too_large);
    (void)kvpi_add_use(u, written ? kvpi_counter : kvpi_array, written, name, data, bytes, kvpi_index_align(type));
    return KVPRIM_OK;
}

static kvprim_status kvpi_check_arrays(const char *function, const kvprim_slots_desc *d)
{
    const kvprim_index_type type = d->token_type;
    const int64_t count = d->count, requests = d->requests;
    const uint64_t n = (uint64_t)count, each = (uint64_t)requests;
    const uint64_t pages = kvpi_add(kvpi_mul(each - 1, (uint64_t)d->pages_stride), (uint64_t)d->max_pages);
    const int many = d->pages_stride && requests > d->pages_stride, apart = d->pages_stride > d->max_pages;
    const char *const field = many ? "requests" : apart ? "pages_stride" : "max_pages"; /* what makes pages large */
    const int64_t large = many ? requests : apart ? d->pages_stride : d->max_pages;
    kvpi_uses u;
    u.count = 0, u.function = function;
    (void)kvpi_add_use(&u, kvpi_counter, 1, "rejected", d->rejected, 4, 4);
    KVPRIM_TRY(kvpi_add_array(&u, 1, "slot", d->slot, d->slot_type, n, "count", count));
    KVPRIM_TRY(kvpi_add_array(&u, 0, "pages", d->pages, d->pages_type, pages, field, large));
    KVPRIM_TRY(kvpi_add_array(&u, 0, "page_starts", d->page_starts, d->pages_type, each + 1, "requests", requests));
    KVPRIM_TRY(kvpi_add_array(&u, 0, "request", d->request, type, n, "count", count));
    KVPRIM_TRY(kvpi_add_array(&u, 0, "position", d->position, type, n, "count", count));
    KVPRIM_TRY(kvpi_add_array(&u, 0, "cu_seqlens", d->cu_seqlens, type, each + 1, "requests", requests));
    KVPRIM_TRY(kvpi_add_array(&u, 0, "starts", d->starts, type, each, "requests", requests));
    return kvpi_check_uses(&u, 0);
}

static kvprim_status kvpi_check_slots(const char *function, kvprim_slots_desc *d)
{
    const int64_t int32_rows = (int64_t)1 << 31;
    const kvpi_number sizes[] = {
        {"requests", d->requests}, {"max_pages", d->max_pages}, {"page_rows", d->page_rows}, {"rows", d->rows}};
    const char *const mixed = d->request ? "request" : d->position ? "position" : NULL;
    const char *const null = !d->pages                     ? "pages"
                             : !d->slot                    ? "slot"
                             : d->cu_seqlens || d->starts  ? NULL
                             : !d->request && !d->position ? "request, position and cu_seqlens: each"
                             : !d->request                 ? "request"
                             : !d->position                ? "position"
                                                           : NULL;
    KVPRIM_REFUSE(null, NULL, "%s: %s is NULL", function, null);
    KVPRIM_REFUSE(d->cu_seqlens && mixed, ARGUMENT, "%s: both cu_seqlens (%p) and %s (%p) are set", function,
                  d->cu_seqlens, mixed, d->request ? d->request : d->position);
    KVPRIM_REFUSE(d->starts && !d->cu_seqlens, ARGUMENT, "%s: starts (%p) is set, but cu_seqlens is NULL", function,
                  d->starts);
    KVPRIM_TRY(kvpi_check_reserved(d->reserved_pages | d->reserved_token | d->reserved_slot, function, "", ""));
    const kvpi_number types[] = {
        {"pages_type", d->pages_type}, {"token_type", d->token_type}, {"slot_type", d->slot_type}};
    for (int k = 0; k < 3; k++)
        KVPRIM_REFUSE(types[k].value != KVPRIM_I32 && types[k].value != KVPRIM_I64, ARGUMENT,
                      "%s: %s is %d, neither KVPRIM_I32 nor KVPRIM_I64", function, types[k].field, (int)types[k].value);
    for (int k = 0; k < 4; k++)
        KVPRIM_REFUSE(sizes[k].value < 1, SIZE, "%s: %s is %lld, less than 1", function, sizes[k].field,
                      (long long)sizes[k].value);
    KVPRIM_REFUSE(d->page_starts && d->pages_stride, ARGUMENT, "%s: pages_stride is %lld, but page_starts (%p) is set",
                  function, (long long)d->pages_stride, d->page_starts);
    if (d->pages_stride == 0 && !d->page_starts)
        d->pages_stride = d->max_pages;
    KVPRIM_REFUSE(d->pages_stride < d->max_pages && !d->page_starts, SIZE,
                  "%s: pages_stride is %lld, less than max_pages, %lld", function, (long long)d->pages_stride,
                  (long long)d->max_pages);
    KVPRIM_REFUSE(d->slot_type == KVPRIM_I32 && d->rows > int32_rows, SIZE,
                  "%s: rows is %lld, more than int32 slots can name, %lld", function, (long long)d->rows,
                  (long long)int32_rows);
    return kvpi_check_arrays(function, d);
}

KVPRIM_API kvprim_status kvprim_slots_check(const kvprim_slots_desc *desc, kvprim_slots_desc *resolved)
{
    static const char function[] = "kvprim_slots";
    KVPRIM_TRY(kvpi_check_desc(function, desc, desc ? &desc->count : NULL, function));
    kvprim_slots_desc d = *desc;
    if (d.count > 0)
        KVPRIM_TRY(kvpi_check_slots(function, &d));
    if (resolved)
        *resolved = d;
    return KVPRIM_OK;
}

/* Finds token i's request and position. *request must hold that of token i - 1, from where the search goes on. Returns
   whether the token is in no request, or its position does not fit. */
static int kvpi_find_token(const kvprim_slots_desc *d, int64_t i, int64_t *request, int64_t *position)
{
    const kvprim_index_type type = d->token_type;
    if (!d->cu_seqlens) {
        *request = kvpi_element(d->request, type, i), *position = kvpi_element(d->position, type, i);
        return 0;
    }
    while (*request < d->requests && kvpi_element(d->cu_seqlens, type, *request + 1) <= i)
        ++*request;
    const int64_t first = kvpi_element(d->cu_seqlens, type, *request);
    if (*request == d->requests || i < first)
        return 1;
    const int64_t start = d->starts ? kvpi_element(d->starts, type, *request) : 0;
    const uint64_t further = (uint64_t)i - (uint64_t)first;
    *position = (int64_t)((uint64_t)start + further);
    return further > (uint64_t)INT64_MAX - (uint64_t)start; /* the sum does not fit */
}

/* Returns how many pages the request has, and where their numbers begin. */
static int64_t kvpi_find_pages(const kvprim_slots_desc *d, int64_t request, int64_t *begin)
{
    *begin = request * d->pages_stride;
    if (!d->page_starts)
        return d->max_pages;
    *begin = kvpi_element(d->page_starts, d->pages_type, request);
    const int64_t end = kvpi_element(d->page_starts, d->pages_type, request + 1);
    return *begin < 0 || end > d->max_pages || end < *begin ? 0 : end - *begin;
}

/* Returns the slot or -1. Sets *past if that -1 counts as rejected. */
static int64_t kvpi_find_slot(const kvprim_slots_desc *d, int64_t request, int64_t position, int *past)
{
    int64_t begin = 0;
    if (request < 0 || position < 0)
        return -1;
    *past = 1;
    if (request >= d->requests || position / d->page_rows >= kvpi_find_pages(d, request, &begin))
        return -1;
    const int64_t page = kvpi_element(d->pages, d->pages_type, begin + position / d->page_rows);
    *past = page > d->rows / d->page_rows; /* then the product could overflow */
    if (page < 0 || *past)
        return -1;
    const uint64_t slot = (uint64_t)(page * d->page_rows) + (uint64_t)(position % d->page_rows);
    *past = slot >= (uint64_t)d->rows;
    return *past ? -1 : (int64_t)slot;
}

KVPRIM_API kvprim_status kvprim_slots(const kvprim_slots_desc *desc)
{
    KVPRIM_RANGE("kvprim_slots");
    kvprim_slots_desc d;
    KVPRIM_TRY(kvprim_slots_check(desc, &d));
    for (int64_t i = 0, request = 0, position = 0; i < d.count; i++) {
        int past = kvpi_find_token(&d, i, &request, &position);
        const int64_t slot = past ? -1 : kvpi_find_slot(&d, request, position, &past);
        if (d.slot_type == KVPRIM_I32)
            ((int32_t *)d.slot)[i] = (int32_t)slot;
        else
            ((int64_t *)d.slot)[i] = slot;
        if (past && d.rejected)
            ++*d.rejected;
    }
    return KVPRIM_OK;
}

/* >>impl_list -- what copy and unpack share: whether any destination meets any source */

enum { kvpi_dst, kvpi_src };
#ifdef KVPRIM_DEBUG
enum { kvpi_debug = 1 }; /* destinations must not overlap each other, too */
#else
enum { kvpi_debug = 0 };
#endif

typedef struct kvpi_list {
    const char *function, *name;      /* of the array, for errors */
    const kvprim_copy_item *items;    /* either these ... */
    const kvprim_fragment *fragments; /* ... or these, which count from base[kvpi_dst] and base[kvpi_src] */
    uint64_t base[2], count;
} kvpi_list;

/* Where item i begins on one side, and how many bytes it has there: 0 if it is the source of zeros. */
KVPRIM_INLINE uint64_t kvpi_start(const kvpi_list *l, int side, uint64_t i)
{
    if (l->items)
        return (uint64_t)(side == kvpi_src ? (uintptr_t)l->items[i].src : (uintptr_t)l->items[i].dst);
    return l->base[side] + (side == kvpi_src ? l->fragments[i].src_offset : l->fragments[i].dst_offset);
}

KVPRIM_INLINE uint64_t kvpi_size(const kvpi_list *l, int side, uint64_t i)
{
    if (l->items)
        return side == kvpi_src && !l->items[i].src ? 0 : l->items[i].bytes;
    return l->fragments[i].bytes;
}

/* The address of the last of `bytes` > 0 bytes, or the highest address: unpack does not check that a buffer fits. */
static uint64_t kvpi_last_byte(uint64_t start, uint64_t bytes)
{
    return bytes - 1 > UINT64_MAX - start ? UINT64_MAX : start + bytes - 1;
}

/* The addresses of the first and last byte of all destinations, or of all sources; first > last if there are none. */
typedef struct kvpi_ends {
    uint64_t first, last;
} kvpi_ends;

static kvpi_ends kvpi_list_ends(const kvpi_list *l, int side)
{
    kvpi_ends ends = {UINT64_MAX, 0};
    for (uint64_t i = 0; i < l->count; i++) {
        const uint64_t bytes = kvpi_size(l, side, i), start = bytes ? kvpi_start(l, side, i) : UINT64_MAX;
        const uint64_t last = bytes ? kvpi_last_byte(start, bytes) : 0;
        ends.first = start < ends.first ? start : ends.first, ends.last = last > ends.last ? last : ends.last;
    }
    return ends;
}

/* A sweep visits destinations and sources in the order of their first bytes, their starts. A destination overlaps a
   source exactly if the one that starts later starts before the last byte that the other side has reached so far.
   There is no memory to sort all starts at once. So the addresses are cut into ranges of at most kvpi_sweep_starts
   starts; a pass over the list collects those of one range, which are then sorted on the stack. */
enum {
    kvpi_sweep_starts = 4096,  /* sorted at a time; two such arrays take 32 KB of stack */
    kvpi_sweep_buckets = 4096, /* into which a range with more starts is cut; a power of two */
    kvpi_sweep_digit = 256,    /* values of a digit of the radix sort */
    kvpi_granule_bits = 18,    /* 2^18 granules are looked at in a pass, with one bit for each: 32 KB of stack */
    kvpi_granule_words = 1 << kvpi_granule_bits >> 6,
    kvpi_granule_items = 256 /* with fewer, clearing the bits takes longer than sorting */
};

typedef struct kvpi_sweep {
    const kvpi_list *list;
    uint64_t last[2], item[2]; /* of each side: the last byte that its items reach so far, and which one does */
    union {
        uint32_t starts[2][kvpi_sweep_starts]; /* twice the item, plus 1 for its source */
        uint32_t buckets[kvpi_sweep_buckets];
        uint64_t granules[kvpi_granule_words];
    } memory;
} kvpi_sweep;

/* Visits the next start in order. */
static kvprim_status kvpi_sweep_one(kvpi_sweep *s, int side, uint64_t i)
{
    const kvpi_list *const l = s->list;
    const uint64_t start = kvpi_start(l, side, i), last = kvpi_last_byte(start, kvpi_size(l, side, i));
    if (kvpi_debug && side == kvpi_dst && s->last[side] >= start) {
        const uint64_t a = s->item[side] < i ? s->item[side] : i, b = s->item[side] < i ? i : s->item[side];
        return kvprim_fail(KVPRIM_ERROR_OVERLAP, "%s: %s[%llu] and %s[%llu] overlap in dst", l->function, l->name,
                           (unsigned long long)a, l->name, (unsigned long long)b);
    }
    if (s->last[!side] >= start) {
        const uint64_t d = side == kvpi_dst ? i : s->item[kvpi_dst], r = side == kvpi_src ? i : s->item[kvpi_src];
        return kvprim_fail(
            KVPRIM_ERROR_OVERLAP, "%s: dst of %s[%llu] (%p, %llu bytes) overlaps src of %s[%llu] (%p, %llu bytes)",
            l->function, l->name, (unsigned long long)d, (void *)(uintptr_t)kvpi_start(l, kvpi_dst, d),
            (unsigned long long)kvpi_size(l, kvpi_dst, d), l->name, (unsigned long long)r,
            (void *)(uintptr_t)kvpi_start(l, kvpi_src, r), (unsigned long long)kvpi_size(l, kvpi_src, r));
    }
    if (last > s->last[side])
        s->last[side] = last, s->item[side] = i;
    return KVPRIM_OK;
}

/* Visits those that start in [low, low + width], which are all equal or of one side: their order does not matter. */
static kvprim_status kvpi_sweep_unsorted(kvpi_sweep *s, uint64_t low, uint64_t width)
{
    const kvpi_list *const l = s->list;
    for (uint64_t i = 0; i < l->count; i++)
        for (int side = 0; side < 2; side++)
            if (kvpi_start(l, side, i) - low <= width && kvpi_size(l, side, i))
                KVPRIM_TRY(kvpi_sweep_one(s, side, i));
    return KVPRIM_OK;
}

/* Stores the starts in [*low, *low + *width]. Returns their number. If there is no room for all, it is one more than
   there is room for, and *low and *width become those of the starts: the next level then cuts no empty addresses. */
static int32_t kvpi_sweep_collect(kvpi_sweep *s, uint64_t *low, uint64_t *width)
{
    const kvpi_list *const l = s->list;
    const uint64_t from = *low, most = *width;
    uint64_t first = UINT64_MAX, last = 0; /* counted from `from` */
    int32_t n = 0;
    for (uint64_t i = 0; i < l->count; i++)
        for (int side = 0; side < 2; side++) {
            const uint64_t at = kvpi_start(l, side, i) - from;
            if (KVPRIM_LIKELY(at > most) || !kvpi_size(l, side, i))
                continue;
            first = at < first ? at : first, last = at > last ? at : last;
            if (n < kvpi_sweep_starts)
                s->memory.starts[0][n] = (uint32_t)(i << 1) | (uint32_t)side;
            n += n <= kvpi_sweep_starts;
        }
    if (n > kvpi_sweep_starts)
        *low = from + first, *width = last - first;
    return n;
}

static uint64_t kvpi_sweep_key(const kvpi_sweep *s, uint32_t start)
{
    return kvpi_start(s->list, (int)(start & 1), start >> 1);
}

/* A radix sort of n starts, 8 bits at a time, from the lowest bit in which they differ to the highest. */
static const uint32_t *kvpi_sweep_sort(kvpi_sweep *s, int32_t n)
{
    uint32_t *from = s->memory.starts[0], *to = s->memory.starts[1];
    uint64_t differ = 0;
    int shift = 0;
    for (int32_t k = 1; k < n; k++)
        differ |= kvpi_sweep_key(s, from[k]) ^ kvpi_sweep_key(s, from[0]);
    while (differ && (differ >> shift & 1) == 0)
        shift++;
    for (; shift < 64 && differ >> shift; shift += 8) {
        uint32_t at[kvpi_sweep_digit] = {0}, *const sorted = to;
        for (int32_t k = 0; k < n; k++)
            at[kvpi_sweep_key(s, from[k]) >> shift & (kvpi_sweep_digit - 1)]++;
        for (uint32_t d = 0, sum = 0, next; d < kvpi_sweep_digit; d++, sum = next)
            next = sum + at[d], at[d] = sum;
        for (int32_t k = 0; k < n; k++)
            sorted[at[kvpi_sweep_key(s, from[k]) >> shift & (kvpi_sweep_digit - 1)]++] = from[k];
        to = from, from = sorted;
    }
    return from;
}

/* Counts the starts in [low, low + width] in buckets of 1 << shift bytes, then sets a bit of `ends` for each bucket
   that ends a group. A group is as many buckets as can be sorted at a time, or a single one that is too full. */
static void kvpi_sweep_group(kvpi_sweep *s, uint64_t low, uint64_t width, int shift, uint8_t *ends)
{
    const kvpi_list *const l = s->list;
    uint32_t *const buckets = s->memory.buckets;
    uint64_t sum = 0, first = 0;
    memset(buckets, 0, sizeof s->memory.buckets);
    for (uint64_t i = 0; i < l->count; i++)
        for (int side = 0; side < 2; side++) {
            const uint64_t at = kvpi_start(l, side, i) - low;
            if (at <= width && kvpi_size(l, side, i))
                buckets[at >> shift]++;
        }
    for (uint64_t b = 0; b < kvpi_sweep_buckets; b++) {
        sum += buckets[b];
        if (b > first && sum > kvpi_sweep_starts) {
            ends[(b - 1) / 8] |= (uint8_t)(1 << (b - 1) % 8);
            first = b, sum = buckets[b];
        }
    }
}

/* Visits those that start in [low, low + width], in order. Each of at most 6 levels takes 12 bits of the width. */
static kvprim_status kvpi_sweep_range(kvpi_sweep *s, uint64_t low, uint64_t width)
{
    uint8_t ends[kvpi_sweep_buckets / 8] = {0};
    int shift = 0;
    const int32_t n = kvpi_sweep_collect(s, &low, &width);
    if (n <= kvpi_sweep_starts) {
        const uint32_t *const sorted = kvpi_sweep_sort(s, n);
        for (int32_t k = 0; k < n; k++)
            KVPRIM_TRY(kvpi_sweep_one(s, (int)(sorted[k] & 1), sorted[k] >> 1));
        return KVPRIM_OK;
    }
    if (width == 0)
        return kvpi_sweep_unsorted(s, low, 0);
    while (width >> shift >= kvpi_sweep_buckets)
        shift++;
    kvpi_sweep_group(s, low, width, shift, ends);
    for (uint64_t b = 0, first = 0; b <= width >> shift; b++)
        if (ends[b / 8] >> b % 8 & 1 || b == width >> shift) {
            const uint64_t at = first << shift, end = ((b + 1) << shift) - 1;
            KVPRIM_TRY(kvpi_sweep_range(s, low + at, (end < width ? end : width) - at));
            first = b + 1;
        }
    return KVPRIM_OK;
}

/* Marks the granules of 1 << shift bytes in [low, high] that destinations touch. Returns 1 if no source touches one of
   these. 0 decides nothing: it is also returned if items overlap each other so much that this takes long. */
static int kvpi_granules_apart(kvpi_sweep *s, uint64_t low, uint64_t high, int shift)
{
    const kvpi_list *const l = s->list;
    uint64_t *const granules = s->memory.granules, words = 0;
    memset(granules, 0, sizeof s->memory.granules);
    for (int side = 0; side < 2; side++)
        for (uint64_t i = 0; i < l->count; i++) {
            const uint64_t bytes = kvpi_size(l, side, i), start = kvpi_start(l, side, i);
            const uint64_t last = bytes ? kvpi_last_byte(start, bytes) : 0;
            if (start > high || last < low)
                continue;
            const uint64_t a = (start > low ? start - low : 0) >> shift;
            const uint64_t b = ((last < high ? last : high) - low) >> shift;
            for (uint64_t w = a / 64; w <= b / 64; w++) {
                const uint64_t mask =
                    UINT64_MAX << (w == a / 64 ? a % 64 : 0) & UINT64_MAX >> (w == b / 64 ? 63 - b % 64 : 0);
                if (side == kvpi_src && (granules[w] & mask))
                    return 0;
                granules[w] |= side == kvpi_dst ? mask : 0;
            }
            words += (b - a) / 64;
            if (words > 8 * kvpi_granule_words)
                return 0;
        }
    return 1;
}

/* Returns 1 if granules of [low, high] show that no destination shares a byte with a source; 0 decides nothing. A
   granule is the largest power of two that divides all starts and sizes. 4,096 pages of 4 KB take 70 us, not 280. */
static int kvpi_pages_apart(kvpi_sweep *s, uint64_t low, uint64_t high)
{
    const kvpi_list *const l = s->list;
    uint64_t any = 0;
    int shift = 0;
    for (uint64_t i = 0; i < l->count; i++)
        any |= kvpi_start(l, kvpi_dst, i) | kvpi_start(l, kvpi_src, i) | kvpi_size(l, kvpi_dst, i);
    while ((any >> shift & 1) == 0)
        shift++;
    if (l->count < kvpi_granule_items || shift >= 64 - kvpi_granule_bits ||
        (high - low) >> shift >> kvpi_granule_bits > 8 + l->count / 8192)
        return 0;
    const uint64_t range = (uint64_t)1 << shift << kvpi_granule_bits;
    for (; high - low >= range; low += range)
        if (!kvpi_granules_apart(s, low, low + range - 1, shift))
            return 0;
    return kvpi_granules_apart(s, low, high, shift);
}

/* No destination shares a byte with a source; with kvpi_debug, nor with another destination. */
static kvprim_status kvpi_check_list(const kvpi_list *l, kvpi_ends dst, kvpi_ends src)
{
    kvpi_sweep s;
    const uint64_t first = dst.first < src.first ? dst.first : src.first, low = dst.first + src.first - first;
    const uint64_t last = dst.last > src.last ? dst.last : src.last, high = dst.last + src.last - last;
    KVPRIM_REFUSE(low <= high && l->count > KVPRIM_MAX_COPIES, SIZE,
                  "%s: count is %llu, more than %d, and sources lie between destinations", l->function,
                  (unsigned long long)l->count, (int)KVPRIM_MAX_COPIES);
    s.list = l, s.last[0] = s.last[1] = s.item[0] = s.item[1] = 0;
    if (kvpi_debug)
        return first > last ? KVPRIM_OK : kvpi_sweep_range(&s, first, last - first);
    if (low > high || kvpi_pages_apart(&s, low, high))
        return KVPRIM_OK;
    KVPRIM_TRY(kvpi_sweep_unsorted(&s, 0, low - 1)); /* below `low` all are of one side; low > 0, as NULL is refused */
    return kvpi_sweep_range(&s, low, high - low);
}

/* >>impl_copy ------------------------------------------------------------------------------------------------------ */

/* What copy, unpack and unpack_meta have in common. `null`: another pointer that must be set and is not, or NULL. */
static kvprim_status kvpi_check_buffers(const char *function, const char *null, int64_t reserved, const void *src,
                                        uint64_t src_bytes, const void *dst, uint64_t dst_bytes)
{
    null = null ? null : !src && src_bytes ? "src" : !dst && dst_bytes ? "dst" : NULL;
    KVPRIM_REFUSE(null, NULL, "%s: %s is NULL", function, null);
    KVPRIM_REFUSE(reserved, ARGUMENT, "%s: reserved is %lld, not 0", function, (long long)reserved);
    KVPRIM_REFUSE((uint64_t)(size_t)src_bytes != src_bytes || (uint64_t)(size_t)dst_bytes != dst_bytes, SIZE,
                  "%s: src_bytes %llu or dst_bytes %llu is more than an address holds", function,
                  (unsigned long long)src_bytes, (unsigned long long)dst_bytes);
    return KVPRIM_OK;
}

/* No destination shares a byte with the items, either. */
static kvprim_status kvpi_check_item(const kvprim_copy_desc *d, size_t i)
{
    const kvprim_copy_item c = d->items[i];
    const uint64_t dst = (uint64_t)(uintptr_t)c.dst, src = (uint64_t)(uintptr_t)c.src;
    const uint64_t room = (uint64_t)UINTPTR_MAX - (dst > src ? dst : src), items_bytes = d->count * sizeof *d->items;
    if (c.bytes == 0 || (c.dst && c.bytes - 1 <= room && !kvpi_overlap(c.dst, c.bytes, d->items, items_bytes)))
        return KVPRIM_OK;
    KVPRIM_REFUSE(!c.dst, NULL, "kvprim_copy: items[%llu].dst is NULL, and its bytes are %llu", (unsigned long long)i,
                  (unsigned long long)c.bytes);
    KVPRIM_REFUSE(c.bytes - 1 > room, SIZE,
                  "kvprim_copy: items[%llu] is %llu bytes from %s %p on, past the last address", (unsigned long long)i,
                  (unsigned long long)c.bytes, dst > src ? "dst" : "src", dst > src ? c.dst : c.src);
    return kvprim_fail(KVPRIM_ERROR_OVERLAP,
                       "kvprim_copy: dst of items[%llu] (%p, %llu bytes) overlaps items (%p, %llu bytes)",
                       (unsigned long long)i, c.dst, (unsigned long long)c.bytes, (const void *)d->items,
                       (unsigned long long)items_bytes);
}

KVPRIM_API kvprim_status kvprim_copy_check(const kvprim_copy_desc *desc)
{
    static const char function[] = "kvprim_copy";
    KVPRIM_REFUSE(!desc, NULL, "%s: desc is NULL", function);
    if (desc->count == 0)
        return KVPRIM_OK;
    KVPRIM_TRY(kvpi_check_buffers(function, desc->items ? NULL : "items", desc->reserved, NULL, 0, NULL, 0));
    KVPRIM_REFUSE(desc->count > KVPRIM_MAX_COPIES, SIZE, "%s: count is %llu, more than %d", function,
                  (unsigned long long)desc->count, (int)KVPRIM_MAX_COPIES);
    for (size_t i = 0; i < desc->count; i++)
        KVPRIM_TRY(kvpi_check_item(desc, i));
    const kvpi_list list = {function, "items", desc->items, NULL, {0, 0}, desc->count};
    return kvpi_check_list(&list, kvpi_list_ends(&list, kvpi_dst), kvpi_list_ends(&list, kvpi_src));
}

KVPRIM_API kvprim_status kvprim_copy(const kvprim_copy_desc *desc)
{
    KVPRIM_RANGE("kvprim_copy");
    KVPRIM_TRY(kvprim_copy_check(desc));
    const kvprim_copy_desc d = *desc; /* a destination may overlap the descriptor, which is not checked */
    for (size_t i = 0; i < d.count; i++) {
        const kvprim_copy_item c = d.items[i];
        if (c.bytes && c.src)
            memcpy(c.dst, c.src, (size_t)c.bytes);
        else if (c.bytes)
            memset(c.dst, 0, (size_t)c.bytes);
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

KVPRIM_API kvprim_status kvprim_unpack_check(const kvprim_unpack_desc *desc)
{
    static const char function[] = "kvprim_unpack";
    KVPRIM_REFUSE(!desc, NULL, "%s: desc is NULL", function);
    if (desc->count == 0)
        return KVPRIM_OK;
    KVPRIM_TRY(kvpi_check_buffers(function, desc->fragments ? NULL : "fragments", desc->reserved, desc->src,
                                  desc->src_bytes, desc->dst, desc->dst_bytes));
    const uint64_t fragments_bytes = kvpi_mul(desc->count, sizeof(kvprim_fragment));
    KVPRIM_REFUSE(kvpi_overlap(desc->dst, desc->dst_bytes, desc->fragments, fragments_bytes), OVERLAP,
                  "%s: dst (%p, %llu bytes) overlaps fragments (%p)", function, desc->dst,
                  (unsigned long long)desc->dst_bytes, (const void *)desc->fragments);
    for (size_t i = 0; i < desc->count; i++)
        KVPRIM_TRY(kvpi_check_fragment(desc, i));
    const kvpi_list list = {
        function, "fragments", NULL, desc->fragments, {(uintptr_t)desc->dst, (uintptr_t)desc->src}, desc->count};
    if (!kvpi_debug && !kvpi_overlap(desc->dst, desc->dst_bytes, desc->src, desc->src_bytes))
        return KVPRIM_OK;
    return kvpi_check_list(&list, kvpi_list_ends(&list, kvpi_dst), kvpi_list_ends(&list, kvpi_src));
}

KVPRIM_API kvprim_status kvprim_unpack(const kvprim_unpack_desc *desc)
{
    KVPRIM_RANGE("kvprim_unpack");
    KVPRIM_TRY(kvprim_unpack_check(desc));
    const kvprim_unpack_desc d = *desc; /* which dst may overlap: not checked */
    for (size_t i = 0; i < d.count; i++) {
        const kvprim_fragment f = d.fragments[i];
        if (f.bytes)
            memcpy((char *)d.dst + f.dst_offset, (const char *)d.src + f.src_offset, (size_t)f.bytes);
    }
    return KVPRIM_OK;
}

/* >>impl_unpack_meta ----------------------------------------------------------------------------------------------- */

KVPRIM_API kvprim_status kvprim_unpack_meta_check(const kvprim_unpack_meta_desc *desc)
{
    static const char function[] = "kvprim_unpack_meta";
    KVPRIM_REFUSE(!desc, NULL, "%s: desc is NULL", function);
    if (desc->max_count == 0)
        return KVPRIM_OK;
    const char *const null = !desc->meta ? "meta" : !desc->count ? "count" : NULL;
    KVPRIM_TRY(
        kvpi_check_buffers(function, null, desc->reserved, desc->src, desc->src_bytes, desc->dst, desc->dst_bytes));
    KVPRIM_REFUSE(desc->max_count > KVPRIM_MAX_UNPACK_META, SIZE, "%s: max_count is %llu, more than %d", function,
                  (unsigned long long)desc->max_count, (int)KVPRIM_MAX_UNPACK_META);
    kvpi_uses u;
    u.count = 0, u.function = function;
    (void)kvpi_add_use(&u, kvpi_counter, 1, "rejected", desc->rejected, 4, 4);
    (void)kvpi_add_use(&u, kvpi_counter, 1, "dst", desc->dst, desc->dst_bytes, 1);
    (void)kvpi_add_use(&u, kvpi_array, 0, "meta", desc->meta, desc->max_count * sizeof *desc->meta, 16);
    (void)kvpi_add_use(&u, kvpi_array, 0, "count", desc->count, sizeof *desc->count, 8);
    return kvpi_check_uses(&u, 0);
}

KVPRIM_API kvprim_status kvprim_unpack_meta(const kvprim_unpack_meta_desc *desc)
{
    KVPRIM_RANGE("kvprim_unpack_meta");
    KVPRIM_TRY(kvprim_unpack_meta_check(desc));
    const kvprim_unpack_meta_desc d = *desc;
    const uint64_t given = d.max_count ? *d.count : 0, excess = given > d.max_count ? given - d.max_count : 0;
    uint32_t rejected = excess < INT32_MAX ? (uint32_t)excess : INT32_MAX;
    for (uint64_t i = 0; i < given - excess; i++) {
        const kvprim_unpack_meta_item m = d.meta[i];
        const int inside = m.src_offset <= d.src_bytes && m.bytes <= d.src_bytes - m.src_offset &&
                           m.dst_offset <= d.dst_bytes && m.bytes <= d.dst_bytes - m.dst_offset;
        rejected += !inside;
        if (inside && m.bytes)
            memmove((char *)d.dst + m.dst_offset, (const char *)d.src + m.src_offset, m.bytes); /* they may overlap */
    }
    if (d.rejected)
        *d.rejected += rejected;
    return KVPRIM_OK;
}

/* >>impl_check_fetch -- checks of a fetch and of its set */
#ifndef KVPRIM_NO_FETCH

typedef struct kvpi_bounds {
    const char *field;
    int64_t value, least, most;
    kvprim_status status;
} kvpi_bounds;

static kvprim_status kvpi_check_ranges(const char *function, const kvpi_bounds *r, size_t n)
{
    for (; n-- > 0; r++)
        if (r->value < r->least || r->value > r->most)
            return kvprim_fail(r->status, "%s: %s is %lld, less than %lld or more than %lld", function, r->field,
                               (long long)r->value, (long long)r->least, (long long)r->most);
    return KVPRIM_OK;
}
#define KVPRIM_CHECK_RANGES(function, ranges) kvpi_check_ranges(function, ranges, sizeof(ranges) / sizeof *(ranges))

static kvprim_status kvpi_check_set(const char *function, const kvprim_fetch_set *d)
{
    KVPRIM_REFUSE(!d, NULL, "%s: set is NULL", function);
    const int64_t least = 128, rows = d->hot_rows > least ? d->hot_rows : least; /* 2^24 states: no product overflows */
    const kvpi_bounds ranges[] = {{"set.hot_rows", d->hot_rows, 1, KVPRIM_MAX_HOT_ROWS, KVPRIM_ERROR_SIZE},
                                  {"set.states", d->states, 1, INT32_MAX / rows, KVPRIM_ERROR_SIZE},
                                  {"set.tokens", d->tokens, 1, INT32_MAX, KVPRIM_ERROR_SIZE},
                                  {"set.entries", d->entries, 1, KVPRIM_MAX_FETCH_ENTRIES, KVPRIM_ERROR_SIZE},
                                  {"set.reserved", d->reserved, 0, 0, KVPRIM_ERROR_ARGUMENT}};
    KVPRIM_TRY(KVPRIM_CHECK_RANGES(function, ranges));
    const kvpi_bounds bytes[] = {
        {"the set's size", kvpi_fetch_layout_of(d).bytes, 1, (int64_t)kvpi_too_large - 1, KVPRIM_ERROR_SIZE}};
    return KVPRIM_CHECK_RANGES(function, bytes);
}

static kvprim_status kvpi_check_set_memory(const char *function, const kvprim_fetch_set *d)
{
    KVPRIM_TRY(kvpi_check_set(function, d));
    const kvpi_bounds bytes[] = {{"set.bytes", d->bytes, kvpi_fetch_layout_of(d).bytes, INT64_MAX, KVPRIM_ERROR_SIZE}};
    KVPRIM_TRY(KVPRIM_CHECK_RANGES(function, bytes));
    KVPRIM_REFUSE(!d->memory, NULL, "%s: set.memory is NULL", function);
    KVPRIM_REFUSE((uintptr_t)d->memory % 16, ARGUMENT, "%s: set.memory (%p) is not aligned to 16 bytes", function,
                  d->memory);
    return KVPRIM_OK;
}

/* Sizes and what must be set, and the defaults. */
static kvprim_status kvpi_check_fetch_fields(const char *function, kvprim_fetch_desc *d)
{
    const int has_k = d->k_hot.data || d->k.data || d->k_bytes, fresh = d->fresh_count > 0, pages = d->pages != NULL;
    const char *const null = !d->state                     ? "state"
                             : !d->wanted                  ? "wanted"
                             : !d->rows                    ? "rows"
                             : !d->fresh && fresh          ? "fresh"
                             : !d->fresh_rows && fresh     ? "fresh_rows"
                             : !d->plan_src && d->plan_dst ? "plan_src"
                             : !d->plan_dst && d->plan_src ? "plan_dst"
                                                           : NULL;
    d->steps = d->steps ? d->steps : 1;
    d->wanted_stride = d->wanted_stride ? d->wanted_stride : d->top_k;
    d->fresh_stride = d->fresh_stride ? d->fresh_stride : d->fresh_count;
    d->pages_stride = d->pages_stride ? d->pages_stride : d->max_pages;
    d->host_rows = d->host_rows || !has_k ? d->host_rows : d->k.rows;
    const int64_t most = d->set.entries, left = most - (fresh ? d->fresh_count : 0); /* a negative one is an error */
    const int64_t in_steps = d->steps > 0 ? left / d->steps : 0;
    const kvprim_status size = KVPRIM_ERROR_SIZE, argument = KVPRIM_ERROR_ARGUMENT;
    const kvpi_bounds ranges[] = {
        {"count", d->count, 0, d->set.states, size},
        {"steps", d->steps, 1, most, size},
        {"fresh_count", d->fresh_count, 0, most, size},
        {"top_k", d->top_k, 1, in_steps, size}, /* all steps fit set.entries, beside fresh_count */
        {"wanted_stride", d->wanted_stride, d->top_k, INT64_MAX, size},
        {"fresh_stride", d->fresh_stride, d->fresh_count, INT64_MAX, size},
        {"host_rows", d->host_rows, !has_k, INT32_MAX, size},
        {"max_pages", d->max_pages, pages, pages ? INT32_MAX : 0, size}, /* as tokens are */
        {"page_rows", d->page_rows, pages, pages ? INT32_MAX : 0, size},
        {"pages_stride", d->pages_stride, d->max_pages, pages ? INT64_MAX : 0, size},
        {"pages_by_state", d->pages_by_state, 0, pages, pages ? argument : size},
        {"state_type", d->state_type, KVPRIM_I32, KVPRIM_I64, argument},
        {"wanted_type", d->wanted_type, KVPRIM_I32, KVPRIM_I64, argument},
        {"pages_type", d->pages_type, pages ? KVPRIM_I32 : 0, KVPRIM_I64, argument},
        {"reserved_steps", d->reserved_steps, 0, 0, argument},
        {"reserved", d->reserved, 0, 0, argument}};
    KVPRIM_REFUSE(null, NULL, "%s: %s is NULL", function, null);
    return KVPRIM_CHECK_RANGES(function, ranges);
}

/* K or V: the tables by themselves, and their rows among the uses. Nothing is done if all of it is left at zero. */
static kvprim_status kvpi_check_fetch_part(const kvprim_fetch_desc *d, int part, kvprim_move *m, kvpi_uses *u)
{
    static const kvprim_move_names names[2] = {{"kvprim_fetch", "k_bytes", "k_hot", "set.memory", "k", NULL},
                                               {"kvprim_fetch", "v_bytes", "v_hot", "set.memory", "v", NULL}};
    const kvprim_table *const hot = part ? &d->v_hot : &d->k_hot, *const src = part ? &d->v : &d->k;
    const int64_t row_bytes = part ? d->v_bytes : d->k_bytes, hot_rows = d->set.states * d->set.hot_rows;
    char *const list = (char *)d->set.memory + kvpi_fetch_layout_of(&d->set).list;
    const int used = hot->data || src->data || row_bytes;
    kvpi_set_move(m, &names[part], row_bytes, used, NULL);
    kvpi_set_side(&m->dst, hot, list + 8, KVPRIM_I32, 0, 4);
    kvpi_set_side(&m->src, src, list, KVPRIM_I32, 0, 4);
    if (!used)
        return KVPRIM_OK;
    for (int side = 0; side < 2; side++)
        KVPRIM_REFUSE((side ? src : hot)->format, ARGUMENT, "kvprim_fetch: %s.format is set, but rows move as they are",
                      side ? names[part].src : names[part].dst);
    KVPRIM_TRY(kvpi_check_sides(m));
    if (hot->rows < hot_rows)
        return kvpi_fail_field(m, &m->dst, "rows", hot->rows, "less than set.states * set.hot_rows,",
                               (uint64_t)hot_rows);
    if (src->rows < d->host_rows)
        return kvpi_fail_field(m, &m->src, "rows", src->rows, "less than host_rows,", (uint64_t)d->host_rows);
    KVPRIM_TRY(kvpi_add_rows(u, m, &m->dst));
    return kvpi_add_rows(u, m, &m->src);
}

/* m: two moves. */
static kvprim_status kvpi_check_fetch(const char *function, kvprim_fetch_desc *d, kvprim_move *m)
{
    kvpi_uses u;
    u.count = 0, u.function = function;
    KVPRIM_TRY(kvpi_check_set_memory(function, &d->set));
    if (!d->k_hot.data && !d->k.data && !d->k_bytes && (d->v_hot.data || d->v.data || d->v_bytes))
        return kvprim_fail(KVPRIM_ERROR_NULL, "%s: v_hot, v or v_bytes is set, but k_hot.data is NULL", function);
    KVPRIM_TRY(kvpi_check_fetch_fields(function, d));
    KVPRIM_TRY(kvpi_check_fetch_part(d, 0, &m[0], &u));
    KVPRIM_TRY(kvpi_check_fetch_part(d, 1, &m[1], &u));
    const uint64_t n = (uint64_t)d->count, steps = (uint64_t)d->steps, top_k = (uint64_t)d->top_k;
    const uint64_t fresh = (uint64_t)d->fresh_count, entries = n * (fresh + steps * top_k);
    const uint64_t of_pages = d->pages_by_state ? (uint64_t)d->set.states : n;
    const uint64_t in_wanted = kvpi_add(kvpi_mul(n * steps - 1, (uint64_t)d->wanted_stride), top_k);
    const uint64_t in_fresh = kvpi_add(kvpi_mul(n - 1, (uint64_t)d->fresh_stride), fresh);
    const uint64_t in_pages = kvpi_add(kvpi_mul(of_pages - 1, (uint64_t)d->pages_stride), (uint64_t)d->max_pages);
    (void)kvpi_add_use(&u, kvpi_counter, 1, "set.memory", d->set.memory, (uint64_t)d->set.bytes, 16);
    KVPRIM_TRY(kvpi_add_array(&u, 0, "state", d->state, d->state_type, n, "count", d->count));
    KVPRIM_TRY(
        kvpi_add_array(&u, 0, "wanted", d->wanted, d->wanted_type, in_wanted, "wanted_stride", d->wanted_stride));
    KVPRIM_TRY(kvpi_add_array(&u, 0, "fresh", d->fresh, d->wanted_type, in_fresh, "fresh_stride", d->fresh_stride));
    KVPRIM_TRY(kvpi_add_array(&u, 0, "pages", d->pages, d->pages_type, in_pages, "pages_stride", d->pages_stride));
    KVPRIM_TRY(kvpi_add_array(&u, 1, "rows", d->rows, KVPRIM_I32, n * steps * top_k, "count", d->count));
    KVPRIM_TRY(kvpi_add_array(&u, 1, "fresh_rows", d->fresh_rows, KVPRIM_I32, n * fresh, "count", d->count));
    KVPRIM_TRY(kvpi_add_array(&u, 1, "plan_src", d->plan_src, KVPRIM_I32, entries, "count", d->count));
    KVPRIM_TRY(kvpi_add_array(&u, 1, "plan_dst", d->plan_dst, KVPRIM_I32, entries, "count", d->count));
    (void)kvpi_add_use(&u, kvpi_counter, 1, "hits", d->hits, 4, 4);
    (void)kvpi_add_use(&u, kvpi_counter, 1, "misses", d->misses, 4, 4);
    (void)kvpi_add_use(&u, kvpi_counter, 1, "rejected", d->rejected, 4, 4);
    return kvpi_check_uses(&u, 0);
}

KVPRIM_API kvprim_status kvprim_fetch_check(const kvprim_fetch_desc *desc, kvprim_fetch_desc *resolved,
                                            kvprim_move *moves)
{
    static const char function[] = "kvprim_fetch";
    kvprim_move m[2];
    KVPRIM_TRY(kvpi_check_desc(function, desc, desc ? &desc->count : NULL, function));
    kvprim_fetch_desc d = *desc;
    memset(m, 0, sizeof m);
    if (d.count > 0) {
        KVPRIM_TRY(kvpi_check_fetch(function, &d, m));
        d.k_hot = m[0].dst.table, d.k = m[0].src.table, d.v_hot = m[1].dst.table, d.v = m[1].src.table;
        d.k.head_stride = desc->k.head_stride, d.v.head_stride = desc->v.head_stride; /* KVPRIM_HEADS_SHARED stays */
    }
    if (resolved)
        *resolved = d;
    if (moves) {
        (void)kvpi_finish_moves(KVPRIM_OK, m, 2);
        memcpy(moves, m, sizeof m);
    }
    return KVPRIM_OK;
}

KVPRIM_API size_t kvprim_fetch_state_bytes(const kvprim_fetch_set *set)
{
    const kvprim_status status = kvpi_check_set("kvprim_fetch_state_bytes", set);
    return status == KVPRIM_OK ? (size_t)kvpi_fetch_layout_of(set).bytes : 0;
}

KVPRIM_API kvprim_status kvprim_fetch_reset_check(const kvprim_fetch_set *set, int64_t state)
{
    static const char function[] = "kvprim_fetch_reset";
    KVPRIM_TRY(kvpi_check_set_memory(function, set));
    KVPRIM_REFUSE(state < -1 || state >= set->states, SIZE,
                  "%s: state is %lld, less than -1 or not less than set.states, %lld", function, (long long)state,
                  (long long)set->states);
    return KVPRIM_OK;
}

/* >>impl_fetch -- the order of use, and what each call does to it. The GPU does the same, entry by entry */

KVPRIM_API kvprim_status kvprim_fetch_reset(const kvprim_fetch_set *set, int64_t state)
{
    KVPRIM_RANGE("kvprim_fetch_reset");
    KVPRIM_TRY(kvprim_fetch_reset_check(set, state));
    const kvpi_fetch_layout l = kvpi_fetch_layout_of(set);
    const int64_t first = state < 0 ? 0 : state, end = state < 0 ? set->states : state + 1;
    if (state < 0)
        memset(set->memory, 0, (size_t)l.states);
    for (int64_t s = first; s < end; s++) {
        int32_t *const words = (int32_t *)((char *)set->memory + l.states) + s * l.each;
        for (int64_t w = 0; w < l.each; w++)
            words[w] = kvpi_fetch_empty(&l, w);
    }
    return KVPRIM_OK;
}

/* A call under way. `launch` is its number; `busy` says which one each state was used in last. */
typedef struct kvpi_fetch {
    kvprim_fetch_desc d; /* resolved */
    kvpi_fetch_layout layout;
    int64_t entries; /* of a request */
    uint32_t launch, *busy;
    int32_t *list; /* of four words each, of which there are ... */
    int64_t listed;
} kvpi_fetch;

/* A state under way: entry e of the call lies in the log at base + e. */
typedef struct kvpi_fetch_state {
    int32_t *ends, *log, *stamp, *tag, *map;
    int64_t head, base, number, request;
} kvpi_fetch_state;

/* The token of an entry: -1 is padding, -2 is no token of a state. */
static int64_t kvpi_entry_token(const kvprim_fetch_desc *d, int64_t request, int64_t e)
{
    const int64_t in_wanted = e - d->fresh_count, row = request * d->steps + in_wanted / d->top_k;
    const int64_t token = in_wanted < 0
                              ? kvpi_element(d->fresh, d->wanted_type, request * d->fresh_stride + e)
                              : kvpi_element(d->wanted, d->wanted_type, row * d->wanted_stride + in_wanted % d->top_k);
    return token < 0 ? -1 : token < d->set.tokens ? token : -2;
}

/* The row of a token in k and v; -1: there is none. */
static int64_t kvpi_host_row(const kvprim_fetch_desc *d, int64_t request, int64_t state, int64_t token)
{
    int64_t row = token;
    if (d->pages) {
        const int64_t in_pages = token / d->page_rows, at = (d->pages_by_state ? state : request) * d->pages_stride;
        const int64_t page = in_pages < d->max_pages ? kvpi_element(d->pages, d->pages_type, at + in_pages) : -1;
        row = page < 0 || page > INT32_MAX ? INT64_MAX : page * d->page_rows + token % d->page_rows;
    }
    return row < d->host_rows ? row : -1;
}

static int kvpi_is_slot(const kvpi_fetch *f, int32_t slot)
{
    return slot >= 0 && slot < f->layout.hot_rows;
}

static int kvpi_is_alive(const kvpi_fetch *f, const kvpi_fetch_state *s, int64_t at)
{
    return kvpi_is_slot(f, s->log[at]) && s->stamp[s->log[at]] == at;
}

/* Moves what is alive to the log's start, unless there is room for the entries of another call. */
static void kvpi_make_room(const kvpi_fetch *f, kvpi_fetch_state *s)
{
    int64_t alive = 0;
    if (s->base <= f->layout.logged - f->d.set.entries)
        return;
    for (int64_t at = s->head; at < s->base; at++)
        if (kvpi_is_alive(f, s, at)) {
            const int32_t slot = s->log[at];
            s->log[alive] = slot, s->stamp[slot] = (int32_t)alive++;
        }
    s->head = 0, s->base = alive;
}

/* Takes the slot that was used first for a token, or returns -1. `host`: where its row lies, -1 for a fresh one. */
static int32_t kvpi_take_slot(kvpi_fetch *f, kvpi_fetch_state *s, int64_t token, int64_t host)
{
    for (; s->head < s->base; s->head++)
        if (kvpi_is_alive(f, s, s->head)) {
            const int32_t slot = s->log[s->head++], old = s->tag[slot];
            if (old >= 0 && old < f->layout.tokens)
                s->map[old] = -1;
            s->tag[slot] = (int32_t)token, s->map[token] = slot;
            f->list[4 * f->listed] = (int32_t)host;
            f->list[4 * f->listed++ + 2] = (int32_t)(s->number * f->layout.hot_rows + slot);
            return slot;
        }
    return -1;
}

/* The slot of an entry, or -1, and counts it. */
static int32_t kvpi_fetch_entry(kvpi_fetch *f, kvpi_fetch_state *s, int64_t e, int64_t token)
{
    const int fresh = e < f->d.fresh_count;
    int32_t slot = token < 0 ? -1 : s->map[token];
    if (kvpi_is_slot(f, slot)) {
        if (!fresh && f->d.hits)
            ++*f->d.hits;
        return slot;
    }
    const int64_t host = token < 0 || fresh ? -1 : kvpi_host_row(&f->d, s->request, s->number, token);
    slot = token < 0 || (!fresh && host < 0) ? -1 : kvpi_take_slot(f, s, token, host);
    uint32_t *const counter = slot < 0 ? token == -1 ? NULL : f->d.rejected : fresh ? NULL : f->d.misses;
    if (counter)
        ++*counter;
    return slot;
}

/* What was listed from `first` on is the request's plan. */
static void kvpi_write_plan(const kvpi_fetch *f, int64_t request, int64_t first)
{
    for (int64_t e = 0, at = request * f->entries; f->d.plan_src && e < f->entries; e++, at++) {
        const int used = first + e < f->listed;
        f->d.plan_src[at] = used ? f->list[4 * (first + e)] : -1;
        f->d.plan_dst[at] = used ? f->list[4 * (first + e) + 2] : -1;
    }
}

static void kvpi_fetch_request(kvpi_fetch *f, int64_t request)
{
    const kvprim_fetch_desc *const d = &f->d;
    const kvpi_fetch_layout *const l = &f->layout;
    const int64_t number = kvpi_element(d->state, d->state_type, request), first = f->listed;
    const int served = number >= 0 && number < d->set.states && f->busy[number] != f->launch;
    kvpi_fetch_state s;
    memset(&s, 0, sizeof s);
    if (served) {
        f->busy[number] = f->launch;
        s.number = number, s.request = request;
        s.ends = (int32_t *)((char *)d->set.memory + l->states) + number * l->each;
        s.log = s.ends + kvpi_fetch_ends, s.stamp = s.log + l->logged;
        s.tag = s.stamp + l->hot_rows, s.map = s.tag + l->hot_rows;
        const uint32_t room = (uint32_t)(l->logged - f->entries), head = (uint32_t)s.ends[0],
                       base = (uint32_t)s.ends[1];
        s.base = base < room ? base : room, s.head = head < s.base ? head : s.base;
    }
    for (int64_t e = 0; served && e < f->entries; e++) { /* what is there stays there */
        const int64_t token = kvpi_entry_token(d, request, e);
        if (token >= 0 && kvpi_is_slot(f, s.map[token]))
            s.stamp[s.map[token]] = (int32_t)(s.base + e);
    }
    for (int64_t e = 0; e < f->entries; e++) {
        const int64_t token = kvpi_entry_token(d, request, e);
        const int32_t slot = served ? kvpi_fetch_entry(f, &s, e, token) : -1;
        int32_t *const told = e < d->fresh_count ? d->fresh_rows + request * d->fresh_count + e
                                                 : d->rows + request * d->steps * d->top_k + e - d->fresh_count;
        *told = slot < 0 ? -1 : (int32_t)(number * l->hot_rows + slot);
        if (served)
            s.log[s.base + e] = slot;
        else if (number >= 0 && token != -1 && d->rejected)
            ++*d->rejected;
        if (slot >= 0)
            s.stamp[slot] = (int32_t)(s.base + e);
    }
    if (served) {
        s.base += f->entries;
        kvpi_make_room(f, &s);
        s.ends[0] = (int32_t)s.head, s.ends[1] = (int32_t)s.base;
    }
    kvpi_write_plan(f, request, first);
}

KVPRIM_API kvprim_status kvprim_fetch(const kvprim_fetch_desc *desc)
{
    KVPRIM_RANGE("kvprim_fetch");
    kvpi_fetch f;
    kvprim_move m[2];
    KVPRIM_TRY(kvprim_fetch_check(desc, &f.d, m));
    if (f.d.count == 0)
        return KVPRIM_OK;
    f.layout = kvpi_fetch_layout_of(&f.d.set);
    f.entries = f.d.fresh_count + f.d.steps * f.d.top_k, f.listed = 0;
    f.list = (int32_t *)((char *)f.d.set.memory + f.layout.list);
    uint32_t *const words = (uint32_t *)f.d.set.memory; /* the first one of 8 bytes counts launches in its upper half */
    f.busy = words + 2 * kvpi_fetch_words;
    f.launch = ++words[1] ? words[1] : ++words[1]; /* 0 is what a reset leaves in the list */
    memset(words + 2, 0, 8 * (kvpi_fetch_words - 1));
    for (int64_t request = 0; request < f.d.count; request++)
        kvpi_fetch_request(&f, request);
    for (int part = 0; part < 2; part++)
        m[part].count *= f.listed;
    return kvpi_run_moves(KVPRIM_OK, m, 2);
}
#endif /* KVPRIM_NO_FETCH */

/* >>impl_keys_sha -- SHA-256. States are digests: big-endian bytes */
#ifndef KVPRIM_NO_KEYS

static const uint32_t kvpi_sha_k[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

static int kvpi_is_little(void)
{
    const uint16_t one = 1;
    return *(const uint8_t *)&one;
}

KVPRIM_INLINE uint64_t kvpi_swapped(uint64_t v)
{
#if defined(__GNUC__) || defined(__clang__)
    return __builtin_bswap64(v);
#else
    v = (v & 0x00ff00ff00ff00ff) << 8 | (v >> 8 & 0x00ff00ff00ff00ff);
    v = (v & 0x0000ffff0000ffff) << 16 | (v >> 16 & 0x0000ffff0000ffff);
    return v << 32 | v >> 32;
#endif
}

KVPRIM_INLINE void kvpi_put_le(uint8_t *p, uint64_t v)
{
    v = kvpi_is_little() ? v : kvpi_swapped(v);
    memcpy(p, &v, 8);
}

KVPRIM_INLINE void kvpi_put_be(uint8_t *p, uint64_t v)
{
    kvpi_put_le(p, kvpi_swapped(v));
}

KVPRIM_INLINE uint64_t kvpi_get_be(const uint8_t *p)
{
    const uint64_t v = kvpi_load_u64(p);
    return kvpi_is_little() ? kvpi_swapped(v) : v;
}

/* A chain under way: `pieces` pieces of 64 bytes at `at` change a state, and the next one goes to `to`. */
typedef struct kvpi_lane {
    const uint8_t *state, *at;
    uint8_t *to;
    size_t pieces;
} kvpi_lane;

KVPRIM_INLINE uint32_t kvpi_rotated(uint32_t x, int right)
{
    return x >> right | x << (32 - right);
}

static void kvpi_sha_portable(kvpi_lane *const *lanes, int n, size_t pieces)
{
    for (size_t k = 0; k < pieces * (size_t)n; k++) {
        const size_t piece = k % pieces;
        const kvpi_lane *const lane = lanes[k / pieces];
        const uint8_t *const state = piece ? lane->to : lane->state, *const at = lane->at + 64 * piece;
        uint32_t w[64], s[8];
        for (int i = 0; i < 16; i++)
            w[i] = (uint32_t)(kvpi_get_be(at + 8 * (i / 2)) >> (i % 2 ? 0 : 32));
        for (int i = 16; i < 64; i++) {
            const uint32_t a = w[i - 15], b = w[i - 2];
            w[i] = w[i - 16] + (kvpi_rotated(a, 7) ^ kvpi_rotated(a, 18) ^ a >> 3) + w[i - 7] +
                   (kvpi_rotated(b, 17) ^ kvpi_rotated(b, 19) ^ b >> 10);
        }
        for (int i = 0; i < 8; i++)
            s[i] = (uint32_t)(kvpi_get_be(state + 8 * (i / 2)) >> (i % 2 ? 0 : 32));
        for (int i = 0; i < 64; i++) {
            const uint32_t a = s[0], e = s[4];
            const uint32_t t = s[7] + (kvpi_rotated(e, 6) ^ kvpi_rotated(e, 11) ^ kvpi_rotated(e, 25)) +
                               ((e & s[5]) ^ (~e & s[6])) + kvpi_sha_k[i] + w[i];
            const uint32_t u = (kvpi_rotated(a, 2) ^ kvpi_rotated(a, 13) ^ kvpi_rotated(a, 22)) +
                               ((a & s[1]) ^ (a & s[2]) ^ (s[1] & s[2]));
            memmove(s + 1, s, 7 * sizeof *s);
            s[4] += t, s[0] = t + u;
        }
        for (int i = 0; i < 8; i += 2) {
            const uint64_t old = kvpi_get_be(state + 4 * i);
            const uint32_t high = s[i] + (uint32_t)(old >> 32), low = s[i + 1] + (uint32_t)old;
            kvpi_put_be(lane->to + 4 * i, (uint64_t)high << 32 | low);
        }
    }
}

#if defined(KVPRIM_X86)
#define KVPRIM_SHA __attribute__((target("sha,sse4.1")))
#define KVPRIM_SUM _mm_add_epi32
typedef __m128i kvpi_words; /* four of a message or a state */

/* Four words as they lie in memory, big-endian, become numbers: the first one lowest, or highest. */
KVPRIM_SHA KVPRIM_INLINE kvpi_words kvpi_sha_swap(kvpi_words x, int highest)
{
    return _mm_shuffle_epi8(x, highest ? _mm_set_epi64x(0x0001020304050607, 0x08090a0b0c0d0e0f)
                                       : _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203));
}

/* Rounds 4 * i to 4 * i + 3 of a state. w: the last 16 words of the message. */
KVPRIM_SHA KVPRIM_INLINE void kvpi_sha_rounds(kvpi_words *s, kvpi_words *w, const uint8_t *data, const int i)
{
    w[i % 4] = i < 4 ? kvpi_sha_swap(_mm_loadu_si128((const __m128i *)(const void *)(data + 16 * i)), 0)
                     : _mm_sha256msg2_epu32(_mm_add_epi32(_mm_sha256msg1_epu32(w[i % 4], w[(i + 1) % 4]),
                                                          _mm_alignr_epi8(w[(i + 3) % 4], w[(i + 2) % 4], 4)),
                                            w[(i + 3) % 4]);
    const kvpi_words t = _mm_add_epi32(w[i % 4], _mm_loadu_si128((const __m128i *)(const void *)(kvpi_sha_k + 4 * i)));
    s[1] = _mm_sha256rnds2_epu32(s[1], s[0], t);
    s[0] = _mm_sha256rnds2_epu32(s[0], s[1], _mm_shuffle_epi32(t, 0x0e));
}

/* The instructions want the words a, b, e and f of a state together, and c, d, g and h. */
KVPRIM_SHA KVPRIM_INLINE void kvpi_sha_begin(kvpi_words *s, const uint8_t *state)
{
    const kvpi_words abcd = kvpi_sha_swap(_mm_loadu_si128((const __m128i *)(const void *)state), 1);
    const kvpi_words efgh = kvpi_sha_swap(_mm_loadu_si128((const __m128i *)(const void *)(state + 16)), 1);
    s[0] = _mm_unpackhi_epi64(efgh, abcd), s[1] = _mm_unpacklo_epi64(efgh, abcd);
}

KVPRIM_SHA KVPRIM_INLINE void kvpi_sha_end(const kvpi_words *s, uint8_t *state)
{
    _mm_storeu_si128((__m128i *)(void *)state, kvpi_sha_swap(_mm_unpackhi_epi64(s[1], s[0]), 1));
    _mm_storeu_si128((__m128i *)(void *)(state + 16), kvpi_sha_swap(_mm_unpacklo_epi64(s[1], s[0]), 1));
}
#elif defined(KVPRIM_ARM_SHA)
#ifdef __clang__
#define KVPRIM_SHA __attribute__((target("sha2")))
#else
#define KVPRIM_SHA __attribute__((target("+crypto"))) /* gcc 12 has no intrinsics for "+sha2" alone */
#endif
#define KVPRIM_SUM vaddq_u32
typedef uint32x4_t kvpi_words;

KVPRIM_SHA KVPRIM_INLINE kvpi_words kvpi_sha_load(const uint8_t *p)
{
    return vreinterpretq_u32_u8(vrev32q_u8(vld1q_u8(p)));
}

KVPRIM_SHA KVPRIM_INLINE void kvpi_sha_rounds(kvpi_words *s, kvpi_words *w, const uint8_t *data, const int i)
{
    w[i % 4] = i < 4 ? kvpi_sha_load(data + 16 * i)
                     : vsha256su1q_u32(vsha256su0q_u32(w[i % 4], w[(i + 1) % 4]), w[(i + 2) % 4], w[(i + 3) % 4]);
    const kvpi_words t = vaddq_u32(w[i % 4], vld1q_u32(kvpi_sha_k + 4 * i)), before = s[0];
    s[0] = vsha256hq_u32(s[0], s[1], t), s[1] = vsha256h2q_u32(s[1], before, t);
}

KVPRIM_SHA KVPRIM_INLINE void kvpi_sha_begin(kvpi_words *s, const uint8_t *state)
{
    s[0] = kvpi_sha_load(state), s[1] = kvpi_sha_load(state + 16);
}

KVPRIM_SHA KVPRIM_INLINE void kvpi_sha_end(const kvpi_words *s, uint8_t *state)
{
    vst1q_u8(state, vrev32q_u8(vreinterpretq_u8_u32(s[0])));
    vst1q_u8(state + 16, vrev32q_u8(vreinterpretq_u8_u32(s[1])));
}
#endif

#ifdef KVPRIM_SHA
/* A chain waits for the result of each round: two of them keep the units busy. */
KVPRIM_SHA KVPRIM_INLINE void kvpi_sha_lanes(kvpi_lane *const *lanes, const int n, size_t pieces)
{
    const kvpi_lane *const a = lanes[0], *const b = lanes[n - 1];
    kvpi_words s[2], t[2], v[4], w[4];
    kvpi_sha_begin(s, a->state);
    kvpi_sha_begin(t, b->state);
    for (size_t p = 0; p < 64 * pieces; p += 64) {
        const kvpi_words s0 = s[0], s1 = s[1], t0 = t[0], t1 = t[1];
#define KVPRIM_SHA_BOTH(i)                                                                                             \
    kvpi_sha_rounds(s, v, a->at + p, i);                                                                               \
    if (n == 2)                                                                                                        \
    kvpi_sha_rounds(t, w, b->at + p, i)
#define KVPRIM_SHA_FOUR(i)                                                                                             \
    KVPRIM_SHA_BOTH(i);                                                                                                \
    KVPRIM_SHA_BOTH(i + 1);                                                                                            \
    KVPRIM_SHA_BOTH(i + 2);                                                                                            \
    KVPRIM_SHA_BOTH(i + 3)
        KVPRIM_SHA_FOUR(0);
        KVPRIM_SHA_FOUR(4);
        KVPRIM_SHA_FOUR(8);
        KVPRIM_SHA_FOUR(12);
#undef KVPRIM_SHA_FOUR
#undef KVPRIM_SHA_BOTH
        s[0] = KVPRIM_SUM(s[0], s0), s[1] = KVPRIM_SUM(s[1], s1);
        t[0] = KVPRIM_SUM(t[0], t0), t[1] = KVPRIM_SUM(t[1], t1);
    }
    kvpi_sha_end(s, a->to);
    if (n == 2)
        kvpi_sha_end(t, b->to);
}

KVPRIM_SHA static void kvpi_sha_fast(kvpi_lane *const *lanes, int n, size_t pieces)
{
    if (n == 2)
        kvpi_sha_lanes(lanes, 2, pieces);
    else
        kvpi_sha_lanes(lanes, 1, pieces);
}

enum { kvpi_isa_known = 1, kvpi_isa_sha = 2, kvpi_isa_vbmi2 = 4 };
static uint32_t kvpi_isa; /* 0 until it is asked for: a virtual machine takes many microseconds for cpuid */

KVPRIM_SELDOM uint32_t kvpi_find_isa(void)
{
    uint32_t isa = kvpi_isa_known;
#if defined(KVPRIM_X86)
    uint32_t r[4];
    kvpi_cpuid(1, r);
    const uint32_t sse = r[2] >> 9 & r[2] >> 19 & 1; /* SSSE3, SSE4.1 */
    kvpi_cpuid(0, r);
    if (r[0] >= 7) {
        kvpi_cpuid(7, r);
        isa |= (r[1] >> 29 & sse) * kvpi_isa_sha;
        isa |= (r[1] >> 8 & r[2] >> 6 & (uint32_t)kvpi_has_avx512()) * kvpi_isa_vbmi2; /* and BMI2 */
    }
#elif defined(__ARM_FEATURE_SHA2)
    isa |= kvpi_isa_sha;
#else
    isa |= (uint32_t)(getauxval(AT_HWCAP) >> 6 & 1) * kvpi_isa_sha; /* HWCAP_SHA2 */
#endif
    __atomic_store_n(&kvpi_isa, isa, __ATOMIC_RELAXED); /* threads that race here all store the same */
    return isa;
}

KVPRIM_INLINE int kvpi_has_isa(uint32_t wanted)
{
    const uint32_t isa = __atomic_load_n(&kvpi_isa, __ATOMIC_RELAXED);
    return ((isa ? isa : kvpi_find_isa()) & wanted) != 0;
}
#endif

/* Runs one or two lanes, until one of them has read its pieces. */
KVPRIM_INLINE void kvpi_sha_run(kvpi_lane *const *lanes, int n)
{
    const size_t pieces = kvpi_min(lanes[0]->pieces, lanes[n - 1]->pieces);
#ifdef KVPRIM_SHA
    if (kvpi_has_isa(kvpi_isa_sha))
        kvpi_sha_fast(lanes, n, pieces);
    else
#endif
        kvpi_sha_portable(lanes, n, pieces);
    for (int l = 0; l < n; l++)
        lanes[l]->state = lanes[l]->to, lanes[l]->at += 64 * pieces, lanes[l]->pieces -= pieces;
}

static const uint8_t kvpi_sha_start[33] = "\x6a\x09\xe6\x67\xbb\x67\xae\x85\x3c\x6e\xf3\x72\xa5\x4f\xf5\x3a"
                                          "\x51\x0e\x52\x7f\x9b\x05\x68\x8c\x1f\x83\xd9\xab\x5b\xe0\xcd\x19";

/* Ends a message of which `data` holds the last `bytes` bytes, with room for 72 more. Returns its pieces of 64. */
KVPRIM_INLINE size_t kvpi_sha_pad(uint8_t *data, size_t bytes, uint64_t all)
{
    const size_t pieces = (bytes + 8) / 64 + 1;
    memset(data + bytes, 0, 72);
    data[bytes] = 0x80;
    kvpi_put_be(data + 64 * pieces - 8, 8 * all);
    return pieces;
}

KVPRIM_API void kvprim_sha256(const void *data, size_t bytes, void *digest)
{
    uint8_t end[136];
    kvpi_lane lane = {kvpi_sha_start, (const uint8_t *)data, (uint8_t *)digest, bytes / 64}, *const one = &lane;
    if (bytes >= 64)
        kvpi_sha_run(&one, 1);
    if (bytes % 64)
        memcpy(end, lane.at, bytes % 64);
    lane.at = end, lane.pieces = kvpi_sha_pad(end, bytes % 64, bytes);
    kvpi_sha_run(&one, 1);
}

/* >>impl_keys -- rules, requests under way, tokens as engines encode them */

#if defined(XXH_VERSION_NUMBER) && !defined(XXH_NO_XXH3) && XXH_VERSION_NUMBER >= 800
#define KVPRIM_XXH3
#endif

enum { kvpi_by_sha, kvpi_by_xxh3, kvpi_pickle, kvpi_cbor, kvpi_raw };
typedef struct kvpi_key_rule {
    int hash, form, bytes, extra; /* bytes of a key; extra for a block: 0, 1, or 2: any number */
    int64_t least, most;          /* tokens */
    int first_bytes;              /* the first parent is the SHA-256 of these; none: zeros */
    const char *first;
} kvpi_key_rule;

static const kvpi_key_rule *kvpi_rule_of(kvprim_key_rule rule)
{
    static const kvpi_key_rule rules[] = {
        {kvpi_by_sha, kvpi_pickle, 32, 1, INT64_MIN, INT64_MAX, 29,
         "\x80\x05\x95\x12\0\0\0\0\0\0\0\x8c\x0evllm-none-hash\x94."},
        {kvpi_by_sha, kvpi_cbor, 32, 1, INT64_MIN, INT64_MAX, 15, "\x6evllm-none-hash"},
        {kvpi_by_xxh3, kvpi_pickle, 16, 1, INT64_MIN, INT64_MAX, 0, NULL},
        {kvpi_by_xxh3, kvpi_cbor, 16, 1, INT64_MIN, INT64_MAX, 0, NULL},
        {kvpi_by_sha, kvpi_raw, 32, 0, 0, INT64_MAX, 0, NULL},
        {kvpi_by_sha, kvpi_raw, 32, 2, 0, INT32_MAX, 1, ""},
        {kvpi_by_sha, kvpi_cbor, 8, 0, INT64_MIN, INT64_MAX, 0, NULL},
        {kvpi_by_xxh3, kvpi_raw, 8, 1, 0, UINT32_MAX, 0, NULL},
        {kvpi_by_xxh3, kvpi_raw, 16, 0, INT32_MIN, INT32_MAX, 0, NULL}};
    return rule >= KVPRIM_KEY_VLLM_SHA256 && rule <= KVPRIM_KEY_XXH3 ? &rules[rule - 1] : NULL;
}

/* A request under way, and the message of one of its blocks. */
typedef struct kvpi_chain {
    const kvprim_keys_desc *d;
    const kvpi_key_rule *rule;
    const kvprim_key_extra *extra, *extra_end; /* of this block and those after it */
    const uint8_t *parent;
    size_t parent_bytes;
    int64_t blocks, block, written; /* the block that is hashed; messages so far */
    uint8_t *key;                   /* of this block */
    kvpi_lane lane;
    size_t ready[2], half; /* messages alternate between the halves of `data`, if they fit, ... */
    uint8_t *hole[2];      /* ... and are written before their parent is known, which goes here */
    uint8_t first[32], digest[40], data[KVPRIM_MAX_KEY_BLOCK + 256]; /* 40: `data` is aligned to 16, on 64 bits */
} kvpi_chain;

/* These write a token, and some bytes more, and return its end. 2 bytes or 4 is hard to foresee, hence no branch. */
KVPRIM_INLINE uint8_t *kvpi_put_pickled(uint8_t *p, int64_t v)
{
    const uint64_t four = (0xffff - (uint64_t)v) >> 63;
    int bytes = 5;
    if (KVPRIM_LIKELY((uint64_t)v - 256 <= INT32_MAX - 256)) {
        kvpi_put_le(p, ((uint64_t)v << 8) + 'M' - 3 * four); /* BININT2 'M', BININT 'J' */
        return p + 3 + 2 * four;
    }
    if (v == (int32_t)v) { /* BININT1 'K' */
        kvpi_put_le(p, (uint64_t)(uint32_t)v << 8 | (v < 0 ? 'J' : 'K'));
        return p + (v < 0 ? 5 : 2);
    }
    while (bytes < 8 && v >> (8 * bytes - 1) != 0 && v >> (8 * bytes - 1) != -1)
        bytes++;
    *p = 0x8a, p[1] = (uint8_t)bytes; /* LONG1 */
    kvpi_put_le(p + 2, (uint64_t)v);
    return p + 2 + bytes;
}

/* type: the upper three bits. */
KVPRIM_INLINE uint8_t *kvpi_put_cbor(uint8_t *p, uint64_t type, uint64_t u)
{
    const uint64_t four = (0xffff - u) >> 63, swapped = kvpi_swapped(u) >> 24;
    if (KVPRIM_LIKELY(u - 256 <= UINT32_MAX - 256)) {
        kvpi_put_le(p, (four ? swapped : swapped >> 16) + (type << 5) + 25 + four);
        return p + 3 + 2 * four;
    }
    *p = (uint8_t)(type << 5 | (u < 24 ? u : u < 256 ? 24 : 27));
    kvpi_put_be(p + 1, u < 256 ? u << 56 : u);
    return p + (u < 24 ? 1 : u < 256 ? 2 : 9);
}

#ifdef KVPRIM_X86
/* Eight tokens at a time, from token *i on: each becomes a word of 8 bytes, from which the bytes go that its size does
   not have. Stops at tokens that are no int32. Up to 64 bytes more change. */
__attribute__((target("avx512f,avx512bw,avx512vl,avx512vbmi2,bmi2,popcnt"))) static uint8_t *
kvpi_put_eights(uint8_t *p, const kvprim_keys_desc *d, int form, int64_t *i)
{
    const __mmask8 all = 0xff; /* gcc 12's forms without a mask are said to read something uninitialized */
    const uint64_t each = 0x0101010101010101, cbor = form == kvpi_cbor;
    const __m256i zero = _mm256_setzero_si256();
    const __m256i swap = _mm256_broadcastsi128_si256(_mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203));
    for (const int64_t end = *i + d->block_tokens; *i + 8 <= end; *i += 8) {
        __m256i v = zero;
        if (d->token_type == KVPRIM_I32) {
            v = _mm256_loadu_si256((const __m256i *)(const void *)((const int32_t *)d->tokens + *i));
        } else {
            const __m512i x = _mm512_loadu_si512((const int64_t *)d->tokens + *i);
            v = _mm512_maskz_cvtepi64_epi32(all, x);
            if (_mm512_cmpneq_epi64_mask(_mm512_maskz_cvtepi32_epi64(all, v), x))
                break;
        }
        /* Pickle: 'K', 'M', 'J' and 1, 2, 4 bytes. CBOR: a byte, or 24, 25, 26 and 1, 2, 4; + 32 if negative. */
        const __m256i sign = cbor ? _mm256_srai_epi32(v, 31) : zero, w = _mm256_xor_si256(v, sign);
        const __mmask8 one = _mm256_cmpge_epu32_mask(w, _mm256_set1_epi32(cbor ? 24 : 0));
        const __mmask8 two = _mm256_cmpgt_epu32_mask(w, _mm256_set1_epi32(0xff));
        const __mmask8 four = _mm256_cmpgt_epu32_mask(w, _mm256_set1_epi32(0xffff));
        const uint64_t keep = each | _pdep_u64(one, each * (cbor ? 16 : 2)) | _pdep_u64(two, each * (cbor ? 8 : 4)) |
                              _pdep_u64(four, each * (cbor ? 2 : 8)) * 3;
        __m256i head = _mm256_mask_mov_epi32(w, one, _mm256_set1_epi32(cbor ? 24 : 'K'));
        head = _mm256_or_si256(head, _mm256_and_si256(sign, _mm256_set1_epi32(0x20)));
        head = _mm256_mask_add_epi32(head, two, head, _mm256_set1_epi32(cbor ? 1 : 'M' - 'K'));
        head = _mm256_mask_add_epi32(head, four, head, _mm256_set1_epi32(cbor ? 1 : 'J' - 'M'));
        const __m256i rest = cbor ? _mm256_shuffle_epi8(w, swap) : w;
        const __m512i words = _mm512_or_si512(_mm512_maskz_slli_epi64(all, _mm512_maskz_cvtepu32_epi64(all, rest), 8),
                                              _mm512_maskz_cvtepu32_epi64(all, head));
        _mm512_storeu_si512(p, _mm512_maskz_compress_epi8(keep, words));
        p += _mm_popcnt_u64(keep);
    }
    return p;
}
#endif

/* type and form are constants. */
KVPRIM_INLINE uint8_t *kvpi_put_tokens(uint8_t *p, const kvprim_keys_desc *d, int64_t first, kvprim_index_type type,
                                       int form)
{
    const void *const tokens = d->tokens; /* what p points to may be d for all that a compiler knows */
    const int64_t end = first + d->block_tokens;
    int64_t i = first;
#ifdef KVPRIM_X86
    if (kvpi_has_isa(kvpi_isa_vbmi2))
        p = kvpi_put_eights(p, d, form, &i);
#endif
    for (; i < end; i++) {
        const int64_t v = kvpi_element(tokens, type, i);
        p = form == kvpi_pickle ? kvpi_put_pickled(p, v)
            : v >= 0            ? kvpi_put_cbor(p, 0, (uint64_t)v)
                                : kvpi_put_cbor(p, 1, (uint64_t)~v);
    }
    return p;
}

KVPRIM_INLINE uint8_t *kvpi_put(uint8_t *p, const void *data, size_t bytes)
{
    if (bytes == 32) /* a key: a few instructions, no call */
        memcpy(p, data, 32);
    else if (bytes == 16)
        memcpy(p, data, 16);
    else if (bytes)
        memcpy(p, data, bytes);
    return p + bytes;
}

/* Tokens of 4 bytes; SGLang's of 8, after a byte, where one needs them. */
static uint8_t *kvpi_put_raw(uint8_t *p, const kvprim_keys_desc *d, int64_t first, int64_t n)
{
    const int sglang = d->rule == KVPRIM_KEY_SGLANG, pairs = sglang && d->bigrams;
    const kvprim_index_type type = d->token_type;
    const void *const tokens = d->tokens;
    const int32_t *const narrow = (const int32_t *)tokens + first;
    uint64_t any = 0;
    if (type == KVPRIM_I32 && !pairs && kvpi_is_little()) {
        if (n == 16)
            memcpy(p, narrow, 64); /* the usual block, without a call */
        else
            memcpy(p, narrow, 4 * (size_t)n);
        return p + 4 * n;
    }
    for (int64_t i = 0; sglang && i < n + pairs; i++)
        any |= (uint64_t)kvpi_element(tokens, type, first + i);
    const size_t width = any >> 32 ? 8 : 4;
    *p = 0xff;
    p += width == 8;
    for (int64_t i = 0; i < n << pairs; i++, p += width)
        kvpi_put_le(p, (uint64_t)kvpi_element(tokens, type, first + ((i + pairs) >> pairs)));
    return p;
}

/* Writes what is hashed for the next block, and returns its bytes; `sha`: padded, with the pieces in c->ready. */
static size_t kvpi_key_message(kvpi_chain *c, int sha)
{
    const kvprim_keys_desc *const d = c->d;
    const kvprim_key_extra *const extra = c->extra < c->extra_end && c->extra->block == c->written ? c->extra : NULL;
    const int64_t n = d->block_tokens, first = c->written * n;
    const int narrow = d->token_type == KVPRIM_I32, number = c->rule->bytes == 8, dynamo = d->rule == KVPRIM_KEY_DYNAMO;
    uint8_t *const start = c->data + (size_t)(c->written & 1) * c->half, *p = start;
    uint8_t **const hole = &c->hole[c->written & 1];
    if (c->rule->form == kvpi_pickle) {
        memcpy(p, "\x80\x05\x95\0\0\0\0\0\0\0\0C", 12); /* protocol 5, a frame of 8 bytes' length, bytes */
        p[12] = (uint8_t)c->parent_bytes, *hole = p + 13;
        p = kvpi_put(*hole, c->parent, c->parent_bytes);
        p[0] = 0x94, p[1] = '('; /* MEMOIZE; MARK, but up to three tokens have a TUPLE of their own */
        p += n > 3 ? 2 : 1;
        p = narrow ? kvpi_put_tokens(p, d, first, KVPRIM_I32, kvpi_pickle)
                   : kvpi_put_tokens(p, d, first, KVPRIM_I64, kvpi_pickle);
        p[0] = (uint8_t)(n > 3 ? 't' : 0x84 + n), p[1] = 0x94, p[2] = 'N';
        p = extra ? kvpi_put(p + 2, extra->data, (size_t)extra->bytes) : p + 3;
        p[0] = 0x87, p[1] = 0x94, p[2] = '.', p += 3; /* TUPLE3 */
        kvpi_put_le(start + 3, (uint64_t)(p - start - 11));
    } else if (c->rule->form == kvpi_cbor) {
        *p++ = 0x83; /* an array of three */
        p = kvpi_put_cbor(p, number ? 0 : 2, number ? kvpi_get_be(c->parent) : c->parent_bytes);
        p = kvpi_put_cbor(kvpi_put(*hole = p, c->parent, number ? 0 : c->parent_bytes), 4, (uint64_t)n);
        p = narrow ? kvpi_put_tokens(p, d, first, KVPRIM_I32, kvpi_cbor)
                   : kvpi_put_tokens(p, d, first, KVPRIM_I64, kvpi_cbor);
        *p = number ? 0x80 : 0xf6; /* an empty tuple, or None */
        p = extra ? kvpi_put(p, extra->data, (size_t)extra->bytes) : p + 1;
    } else {
        int64_t at = 0;
        p = kvpi_put(*hole = p, c->parent, dynamo ? 0 : c->parent_bytes);
        for (; !dynamo && c->extra < c->extra_end && c->extra->block == c->written; at = c->extra++->token + 1)
            p = kvpi_put(kvpi_put_raw(p, d, first + at, c->extra->token - at), c->extra->data, 32);
        p = kvpi_put_raw(p, d, first + at, n - at + (dynamo && d->bigrams));
        p = dynamo && extra ? kvpi_put(p, extra->data, (size_t)extra->bytes) : p;
    }
    if (extra && c->extra == extra)
        c->extra++;
    if (sha)
        c->ready[c->written & 1] = kvpi_sha_pad(start, (size_t)(p - start), (uint64_t)(p - start));
    c->written++;
    return (size_t)(p - start);
}

/* >>impl_keys_run -- blocks hashed, of two requests at a time; checks */

/* A block's key is the parent of the next one. */
KVPRIM_INLINE void kvpi_end_block(kvpi_chain *c)
{
    c->parent = c->key, c->parent_bytes = (size_t)c->rule->bytes;
    c->key += c->parent_bytes, c->block++;
}

static void kvpi_begin_chain(kvpi_chain *c, const kvprim_keys_desc *d)
{
    memset(c, 0, offsetof(kvpi_chain, data));
    c->d = d, c->rule = kvpi_rule_of(d->rule), c->blocks = (d->count - d->bigrams) / d->block_tokens,
    c->key = (uint8_t *)d->keys;
    c->extra = d->extra, c->extra_end = c->blocks > 0 && d->extra_count ? d->extra + d->extra_count : d->extra;
    c->parent_bytes = (size_t)(d->parent && d->parent_bytes ? d->parent_bytes : c->rule->bytes);
    c->half = c->rule->bytes == 32 && !d->extra_count && d->block_tokens <= 600 ? sizeof c->data / 2 : 0;
    c->parent = d->parent ? (const uint8_t *)d->parent : c->first;
    if (!d->parent && d->rule == KVPRIM_KEY_SGLANG)
        c->parent_bytes = 0;
    if (!d->parent && c->rule->first)
        kvprim_sha256(c->rule->first, (size_t)c->rule->first_bytes, c->first);
}

KVPRIM_SELDOM void kvpi_keys_xxh3(kvpi_chain *c)
{
#ifdef KVPRIM_XXH3
    const int own = c->d->rule == KVPRIM_KEY_XXH3;
    const int64_t n = c->d->block_tokens;
    uint64_t high = own ? kvpi_get_be(c->parent) : 0, low = own ? kvpi_get_be(c->parent + 8) : 0;
    while (c->block < c->blocks) {
        uint8_t *const p = c->data;
        if (own) /* not through memory: a processor cannot forward two stores to one load */
            kvpi_put_be(p, high), kvpi_put_be(p + 8, low);
        const size_t bytes = own ? (size_t)(kvpi_put_raw(p + 16, c->d, c->block * n, n) - p) : kvpi_key_message(c, 0);
        if (c->rule->bytes == 16) {
            const XXH128_hash_t hash = XXH3_128bits(p, bytes);
            high = hash.high64, low = hash.low64;
            kvpi_put_be(c->key, high), kvpi_put_be(c->key + 8, low);
        } else {
            low = XXH3_64bits_withSeed(p, bytes, c->d->seed ? c->d->seed : 1337);
            kvpi_put_le(kvpi_put(p, c->parent, 8), low);
            kvpi_put_le(c->key, c->parent != c->first ? XXH3_64bits_withSeed(p, 16, 1337) : low);
        }
        kvpi_end_block(c);
    }
#else
    (void)c;
#endif
}

/* Ends a block that has been read, and begins the next one, of the next request if need be. 0 when all are done. */
static int kvpi_sha_next(kvpi_chain *c, const kvprim_keys_desc **next, const kvprim_keys_desc *end)
{
    if (c->lane.pieces)
        return 1;
    if (c->block < c->blocks) {
        (void)kvpi_put(c->key, c->lane.to, (size_t)c->rule->bytes);
        kvpi_end_block(c);
    }
    while (c->block >= c->blocks) {
        if (*next == end)
            return 0;
        const kvprim_keys_desc *const d = (*next)++;
        if (d->count > 0)
            kvpi_begin_chain(c, d);
        if (d->count > 0 && c->rule->hash == kvpi_by_xxh3)
            kvpi_keys_xxh3(c); /* alone: its blocks take few instructions */
    }
    if (c->written == c->block)
        (void)kvpi_key_message(c, 1);
    c->lane.at = c->data + (size_t)(c->block & 1) * c->half, c->lane.pieces = c->ready[c->block & 1];
    c->lane.state = kvpi_sha_start, c->lane.to = c->digest;
    if (c->half && c->written < c->blocks) { /* while this block is hashed; its key goes there, where a parent does */
        c->parent = kvpi_sha_start, c->parent_bytes = (size_t)c->rule->bytes;
        (void)kvpi_key_message(c, 1);
        c->lane.to = c->hole[(c->block + 1) & 1];
    }
    return 1;
}

static void kvpi_run_keys(const kvprim_keys_desc *requests, size_t n)
{
    const kvprim_keys_desc *next = requests, *const end = requests + n;
    kvpi_chain c[2];
    kvpi_lane *live[2];
    int lanes = 2;
    c[0].block = c[1].block = c[0].blocks = c[1].blocks = 0, c[0].lane.pieces = c[1].lane.pieces = 0;
    while (lanes > 0) {
        lanes = 0;
        for (int l = 0; l < 2; l++)
            if (kvpi_sha_next(&c[l], &next, end))
                live[lanes++] = &c[l].lane;
        if (lanes > 0)
            kvpi_sha_run(live, lanes);
    }
}

/* Not by KVPRIM_REFUSE: `status` would be expanded on the way, and is a word that others define. */
#define KVPRIM_REFUSE_FIELD(condition, status, field, why)                                                             \
    do {                                                                                                               \
        if (!KVPRIM_LIKELY(!(condition)))                                                                              \
            return kvprim_fail(KVPRIM_ERROR_##status, "kvprim_keys: " #field " is %lld, " why, (long long)d->field);   \
    } while (0)

/* Of the blocks' n tokens, the first that the rule cannot hold. */
static kvprim_status kvpi_check_tokens(const kvprim_keys_desc *d, int64_t n)
{
    const kvpi_key_rule *const rule = kvpi_rule_of(d->rule);
    const int narrow = d->token_type == KVPRIM_I32;
    const uint64_t signs = 0x8000000080000000u;
    int64_t i = 0;
    if (rule->least <= (narrow ? INT32_MIN : INT64_MIN))
        return KVPRIM_OK;
    for (const int32_t *t = (const int32_t *)d->tokens; narrow && i + 4 <= n; i += 4) /* fast: most calls have none */
        if ((kvpi_load_u64(t + i) | kvpi_load_u64(t + i + 2)) & signs)
            break;
    for (; i < n; i++) {
        const int64_t v = kvpi_element(d->tokens, d->token_type, i);
        KVPRIM_REFUSE(v < rule->least || v > rule->most, SIZE,
                      "kvprim_keys: tokens[%lld] is %lld, less than %lld or more than %lld", (long long)i, (long long)v,
                      (long long)rule->least, (long long)rule->most);
    }
    return KVPRIM_OK;
}

/* room: bytes for a block's extra. */
static kvprim_status kvpi_check_extra(const kvprim_keys_desc *d, int64_t blocks, int64_t room)
{
    const int kind = kvpi_rule_of(d->rule)->extra;
    uint64_t sum = 0;
    for (int64_t k = 0; k < d->extra_count; k++) {
        const kvprim_key_extra x = d->extra[k], last = k ? d->extra[k - 1] : x;
        const int same = k && x.block == last.block;
        sum = (uint64_t)x.bytes + (same ? sum : 0);
        KVPRIM_REFUSE(!x.data, NULL, "kvprim_keys: extra[%lld].data is NULL", (long long)k);
        KVPRIM_REFUSE(x.block < (k ? last.block : 0) || x.block >= blocks || x.token < (same ? last.token + 1 : 0) ||
                          x.token >= (kind == 2 ? d->block_tokens : 1),
                      SIZE, "kvprim_keys: extra[%lld] has block %lld and token %lld, out of range or not ascending",
                      (long long)k, (long long)x.block, (long long)x.token);
        KVPRIM_REFUSE(x.bytes < 1 || sum > (uint64_t)room || (kind == 2 && x.bytes != 32), SIZE,
                      "kvprim_keys: extra[%lld].bytes is %lld, less than 1 or more than fits: %lld%s", (long long)k,
                      (long long)x.bytes, (long long)room, kind == 2 ? ", or not 32" : "");
    }
    return KVPRIM_OK;
}

static kvprim_status kvpi_check_keys(const kvprim_keys_desc *d)
{
    const kvpi_key_rule *const rule = kvpi_rule_of(d->rule);
    KVPRIM_REFUSE_FIELD(d->count < 0, SIZE, count, "less than 0");
    if (d->count == 0)
        return KVPRIM_OK;
    KVPRIM_REFUSE_FIELD(!rule, ARGUMENT, rule, "no kvprim_key_rule");
#ifndef KVPRIM_XXH3
    KVPRIM_REFUSE_FIELD(rule->hash == kvpi_by_xxh3, UNSUPPORTED, rule,
                        "which needs xxhash.h (0.8 or newer) before kvprim.h in the implementing unit");
#endif
    const int wide = d->token_type == KVPRIM_I64, dynamo = d->rule == KVPRIM_KEY_DYNAMO;
    const int vllm = d->rule <= KVPRIM_KEY_VLLM_XXHASH_CBOR, xxhash = vllm && rule->bytes == 16;
    KVPRIM_REFUSE_FIELD(!wide && d->token_type != KVPRIM_I32, ARGUMENT, token_type,
                        "neither KVPRIM_I32 nor KVPRIM_I64");
    KVPRIM_REFUSE_FIELD(d->bigrams != 0 && (d->bigrams != 1 || (!dynamo && d->rule != KVPRIM_KEY_SGLANG)), ARGUMENT,
                        bigrams, "neither 0 nor, for SGLANG and DYNAMO, 1");
    KVPRIM_REFUSE_FIELD(d->seed != 0 && !dynamo, ARGUMENT, seed, "but the rule has none");
    KVPRIM_REFUSE_FIELD(d->reserved != 0, ARGUMENT, reserved, "not 0: zero-initialise the structure");
    KVPRIM_REFUSE(d->parent_bytes != 0 && d->parent_bytes != rule->bytes &&
                      (!vllm || d->parent_bytes < 0 || d->parent_bytes > 64),
                  ARGUMENT, "kvprim_keys: parent_bytes is %lld, not as the rule's keys, %d%s",
                  (long long)d->parent_bytes, (int)rule->bytes, vllm ? ", nor up to 64" : "");
    const int64_t each = (wide ? 10 : 5) << d->bigrams;
    KVPRIM_REFUSE(d->block_tokens < 1 || d->block_tokens > KVPRIM_MAX_KEY_BLOCK / each, SIZE,
                  "kvprim_keys: block_tokens is %lld, less than 1 or more than fit into KVPRIM_MAX_KEY_BLOCK, %lld",
                  (long long)d->block_tokens, (long long)(KVPRIM_MAX_KEY_BLOCK / each));
    const int64_t blocks = (d->count - d->bigrams) / d->block_tokens,
                  n = blocks ? blocks * d->block_tokens + d->bigrams : 0;
    KVPRIM_REFUSE_FIELD(d->extra_count < 0 || (d->extra_count > 0 && !rule->extra), ARGUMENT, extra_count,
                        "less than 0, or more than the rule takes");
    KVPRIM_REFUSE(d->keys_bytes / rule->bytes < blocks || d->keys_bytes < 0, SIZE,
                  "kvprim_keys: keys_bytes is %lld, less than the keys of all blocks, %lld times %d",
                  (long long)d->keys_bytes, (long long)blocks, (int)rule->bytes);
    if (blocks == 0)
        return KVPRIM_OK;
    const int64_t most = rule->extra == 2 ? n : blocks; /* more cannot ascend, and their bytes could wrap */
    KVPRIM_REFUSE(d->extra_count > most, SIZE, "kvprim_keys: extra_count is %lld, more than the %lld %s",
                  (long long)d->extra_count, (long long)most, rule->extra == 2 ? "tokens of all blocks" : "blocks");
    const char *const null = !d->tokens                        ? "tokens"
                             : !d->keys                        ? "keys"
                             : !d->parent && xxhash            ? "parent"
                             : !d->extra && d->extra_count > 0 ? "extra"
                                                               : NULL;
    KVPRIM_REFUSE(null, NULL, "kvprim_keys: %s is NULL", null);
    const size_t align = kvpi_index_align(KVPRIM_I64);
    kvpi_uses u;
    u.count = 0, u.function = "kvprim_keys";
    (void)kvpi_add_use(&u, kvpi_counter, 1, "keys", d->keys, (uint64_t)(blocks * rule->bytes), 1);
    (void)kvpi_add_use(&u, kvpi_array, 0, "tokens", d->tokens, kvpi_mul((uint64_t)n, wide ? 8 : 4),
                       kvpi_index_align(d->token_type));
    (void)kvpi_add_use(&u, kvpi_array, 0, "parent", d->parent,
                       (uint64_t)(d->parent_bytes ? d->parent_bytes : rule->bytes), 1);
    (void)kvpi_add_use(&u, kvpi_array, 0, "extra", d->extra, (uint64_t)d->extra_count * sizeof *d->extra, align);
    KVPRIM_TRY(kvpi_check_uses(&u, 0));
    KVPRIM_TRY(kvpi_check_extra(d, blocks, KVPRIM_MAX_KEY_BLOCK - d->block_tokens * each));
    return kvpi_check_tokens(d, n);
}

KVPRIM_API kvprim_status kvprim_keys(const kvprim_keys_desc *requests, size_t n)
{
    KVPRIM_RANGE("kvprim_keys");
    KVPRIM_REFUSE(!requests && n, NULL, "kvprim_keys: requests is NULL");
    for (size_t i = 0; i < n; i++) {
        const kvprim_status status = kvpi_check_keys(&requests[i]);
        if (status != KVPRIM_OK)
            return kvprim_fail(status, "%s (requests[%llu])", kvprim_last_error(), (unsigned long long)i);
    }
    if (n > 0)
        kvpi_run_keys(requests, n);
    return KVPRIM_OK;
}

KVPRIM_API int64_t kvprim_key_bytes(kvprim_key_rule rule)
{
    return kvpi_rule_of(rule) ? kvpi_rule_of(rule)->bytes : 0;
}

KVPRIM_API uint64_t kvprim_key_event(kvprim_key_rule rule, const void *key)
{
    const uint8_t *const p = (const uint8_t *)key;
    const int64_t bytes = kvprim_key_bytes(rule), last = rule <= KVPRIM_KEY_VLLM_XXHASH_CBOR ? bytes - 8 : 0;
    const uint64_t number = bytes ? kvpi_get_be(p + last) : 0;
    return rule == KVPRIM_KEY_DYNAMO ? kvpi_swapped(number) : number;
}

/* >>impl_key_table -- open addressing, linear probing. A slot is a value, -1 if it is empty, and a key */

static size_t kvpi_slot_bytes(int64_t key_bytes)
{
    return key_bytes >= 8 && key_bytes <= 64 && key_bytes % 8 == 0 ? 8 + (size_t)key_bytes : 0;
}

static int64_t *kvpi_slot(const kvprim_key_table *t, uint64_t slot)
{
    return (int64_t *)t->memory + slot * (uint64_t)(1 + t->key_bytes / 8);
}

/* Where a key is first looked for: keys are hashes, but their low bits may also choose the caller's shard. */
static uint64_t kvpi_home(const kvprim_key_table *t, const void *key)
{
    return (kvpi_load_u64(key) * 0x9e3779b97f4a7c15u >> 32) * t->slots >> 32;
}

/* The slot of a key, or the empty one that ends its search. */
static uint64_t kvpi_find_slot_of(const kvprim_key_table *t, const void *key)
{
    for (uint64_t at = kvpi_home(t, key);; at = at + 1 == t->slots ? 0 : at + 1) {
        const int64_t *const slot = kvpi_slot(t, at);
        uint64_t differ = 0;
        for (int64_t k = 0; k < t->key_bytes; k += 8)
            differ |= kvpi_load_u64((const char *)key + k) ^ kvpi_load_u64((const char *)(slot + 1) + k);
        if (*slot < 0 || !differ)
            return at;
    }
}

KVPRIM_API size_t kvprim_key_table_bytes(int64_t keys, int64_t key_bytes)
{
    const uint64_t slots = keys > 0 ? (uint64_t)keys + (uint64_t)keys / 3 + 2 : 0; /* three quarters full */
    return slots <= UINT32_MAX && slots <= SIZE_MAX / 72 ? (size_t)slots * kvpi_slot_bytes(key_bytes) : 0;
}

KVPRIM_API kvprim_status kvprim_key_table_init(kvprim_key_table *table, void *memory, size_t bytes, int64_t key_bytes)
{
    const size_t slot = kvpi_slot_bytes(key_bytes);
    KVPRIM_REFUSE(!table || !memory, NULL, "kvprim_key_table_init: %s is NULL", table ? "memory" : "table");
    KVPRIM_REFUSE(!slot || bytes / slot < 2, SIZE, "kvprim_key_table_init: %s is %lld, %s",
                  slot ? "bytes" : "key_bytes", slot ? (long long)bytes : (long long)key_bytes,
                  slot ? "less than two slots" : "not a multiple of 8 up to 64");
    KVPRIM_REFUSE((uintptr_t)memory % kvpi_index_align(KVPRIM_I64), ARGUMENT,
                  "kvprim_key_table_init: memory (%p) is not aligned as int64_t", memory);
    memset(table, 0, sizeof *table);
    table->memory = memory, table->key_bytes = key_bytes;
    table->slots = bytes / slot < UINT32_MAX ? bytes / slot : UINT32_MAX;
    memset(memory, 0xff, (size_t)table->slots * slot);
    return KVPRIM_OK;
}

KVPRIM_API kvprim_status kvprim_key_table_put(kvprim_key_table *table, const void *key, int64_t value)
{
    KVPRIM_REFUSE(!table || !key, NULL, "kvprim_key_table_put: %s is NULL", table ? "key" : "table");
    KVPRIM_REFUSE(value < 0, SIZE, "kvprim_key_table_put: value is %lld, less than 0", (long long)value);
    int64_t *const slot = kvpi_slot(table, kvpi_find_slot_of(table, key));
    if (*slot < 0) {
        KVPRIM_REFUSE((uint64_t)table->count + 1 >= table->slots, SIZE,
                      "kvprim_key_table_put: the table is full: count is %lld", (long long)table->count);
        memcpy(slot + 1, key, (size_t)table->key_bytes);
        table->count++;
    }
    *slot = value;
    return KVPRIM_OK;
}

KVPRIM_API int64_t kvprim_key_table_erase(kvprim_key_table *table, const void *key)
{
    const uint64_t slots = table->slots;
    uint64_t hole = kvpi_find_slot_of(table, key), at = hole;
    const int64_t value = *kvpi_slot(table, hole);
    table->count -= value >= 0;
    while (*kvpi_slot(table, at) >= 0) { /* later keys that would not be found past a hole move into it */
        at = at + 1 == slots ? 0 : at + 1;
        const int64_t *const slot = kvpi_slot(table, at);
        const uint64_t home = *slot < 0 ? 0 : kvpi_home(table, slot + 1);
        if (*slot >= 0 && (at - home + (at < home ? slots : 0)) >= (at - hole + (at < hole ? slots : 0))) {
            memcpy(kvpi_slot(table, hole), slot, 8 + (size_t)table->key_bytes);
            hole = at;
        }
    }
    *kvpi_slot(table, hole) = -1;
    return value;
}

KVPRIM_API size_t kvprim_key_table_longest(const kvprim_key_table *table, const void *keys, size_t n, int64_t *values)
{
    enum { ahead = 16 }; /* keys whose slots are under way from memory */
    const char *const key = (const char *)keys;
    const size_t bytes = (size_t)table->key_bytes;
    for (size_t i = 0; i < ahead && i < n; i++)
        KVPRIM_PREFETCH(kvpi_slot(table, kvpi_home(table, key + i * bytes)));
    for (size_t i = 0; i < n; i++) {
        if (i + ahead < n)
            KVPRIM_PREFETCH(kvpi_slot(table, kvpi_home(table, key + (i + ahead) * bytes)));
        const int64_t value = *kvpi_slot(table, kvpi_find_slot_of(table, key + i * bytes));
        if (value < 0)
            return i;
        if (values)
            values[i] = value;
    }
    return n;
}
#endif /* KVPRIM_NO_KEYS */

#ifdef __cplusplus
}
#endif

#undef KVPRIM_THREAD_LOCAL
#undef KVPRIM_STATIC_ASSERT
#undef KVPRIM_PREFIX_I64
#undef KVPRIM_AVX2
#undef KVPRIM_AVX512
#undef KVPRIM_SHA
#undef KVPRIM_SUM
#undef KVPRIM_XXH3
#undef KVPRIM_REFUSE_FIELD
#undef KVPRIM_CHECK_RANGES
#undef KVPRIM_COPY
#undef KVPRIM_MOVE
#undef KVPRIM_CONVERT
#undef KVPRIM_NARROW_LIST
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
