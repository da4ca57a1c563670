/* SPDX-License-Identifier: MIT */
/* Moves that convert their elements. Part of test_kvprim.c. */
#ifndef TEST_CONVERT_H
#define TEST_CONVERT_H

#include "convert_cases.h"

enum { most_values = 1 << 17 };

static kvprim_format plain_format(kvprim_dtype dtype)
{
    const kvprim_format f = {.dtype = dtype};
    return f;
}

static kvprim_format tensor_format(kvprim_dtype dtype, float *scale)
{
    const kvprim_format f = {.dtype = dtype, .scale = KVPRIM_SCALE_TENSOR, .scales = scale};
    return f;
}

static kvprim_table formatted(kvprim_table t, const kvprim_format *format)
{
    t.format = format;
    return t;
}

/* ---- elements ---- */

/* Runs a test for each instruction set that moves use here. */
static void for_each_isa(void (*test)(void))
{
    test();
#ifdef KVPRIM_X86
    kvpi_prefix_fn *const best = kvpi_prefix;
    if (kvpi_has_avx512()) {
        kvpi_prefix = kvprim_prefix_i32_avx2;
        test();
    }
    if (kvpi_has_avx2()) {
        kvpi_prefix = kvprim_prefix_i32_scalar;
        test();
    }
    kvpi_prefix = best;
#endif
}

/* One row of n elements from src to dst, against what each must become. `scale` belongs to the quantised side. */
static void check_elements(kvprim_dtype from, kvprim_dtype to, const unsigned char *src, int64_t n, const float *scale,
                           int inverse)
{
    static unsigned char dst[4 * most_values + 8];
    const oracle_type *const tt = oracle_type_of(to);
    const int64_t from_bytes = oracle_bytes(from, n), to_bytes = oracle_bytes(to, n);
    float own = scale ? *scale : 0;
    static const uint32_t never = 0; /* where nobody may write */
    uint32_t nans = 40, want_nans = 40;
    kvprim_format src_format = plain_format(from), dst_format = plain_format(to);
    if (scale)
        *(tt->bytes == 1 ? &dst_format : &src_format) = tensor_format(tt->bytes == 1 ? to : from, &own);
    dst_format.nans = oracle_counts_nans(to) ? &nans : (uint32_t *)(uintptr_t)&never;
    dst_format.scale_inverse = inverse;
    const kvprim_transfer_desc d =
        transfer_of(formatted(table_of(dst, 1), &dst_format),
                    formatted(table_of((void *)(uintptr_t)src, 1), &src_format), from_bytes, 1);
    memset(dst, 0x5a, (size_t)to_bytes + 8);
    if (kvprim_transfer(&d) != KVPRIM_OK)
        fail("%s", kvprim_last_error());
    for (int64_t i = 0; i < n; i++) {
        const uint32_t code = oracle_code_of(from, src, i);
        float q = (float)oracle_decode(from, code);
        if (scale)
            q = tt->bytes == 1 && !inverse ? oracle_divide(q, own) : oracle_multiply(q, own);
        const uint32_t want = oracle_encode(to, q), got = oracle_code_of(to, dst, i);
        want_nans += oracle_counts_nans(to) && isnan(q);
        if (got != want)
            fail("%d 0x%x to %d, scale %g%s: 0x%x, expected 0x%x", (int)from, code, (int)to, scale ? (double)own : 1.0,
                 inverse ? ", inverse" : "", got, want);
    }
    if (nans != want_nans)
        fail("%d to %d: %u NaNs counted, expected %u", (int)from, (int)to, nans - 40, want_nans - 40);
    for (int k = 0; k < 8; k++)
        CHECK(dst[to_bytes + k] == 0x5a);
}

static const float odd_scales[] = {
    1,        0.037f, 3,         -2.5f,    0,        -0.0f,       FLT_MIN, 1.7014118e38f, FLT_MAX, 1e-40f,
    1.4e-45f, 448,    1 / 448.f, 0.00195f, 57344.0f, 16777215.0f, NAN,     INFINITY,      -1e30f,  1.17e-36f,
};

/* Every value of fp16 and bf16 into every type; every value of the quantised types back. */
static void test_every_value(void)
{
    static const kvprim_dtype halves[] = {KVPRIM_F16, KVPRIM_BF16},
                              quantised[] = {KVPRIM_F8E4M3, KVPRIM_F8E5M2, KVPRIM_INT8, KVPRIM_F4E2M1, KVPRIM_INT4},
                              floats[] = {KVPRIM_F16, KVPRIM_BF16, KVPRIM_F32};
    static uint16_t all[65536];
    unsigned char codes[256];
    for (uint32_t k = 0; k < 65536; k++)
        all[k] = (uint16_t)k;
    for (int k = 0; k < 256; k++)
        codes[k] = (unsigned char)k;
    const unsigned char *const src = (const unsigned char *)all;
    for (size_t h = 0; h < LENGTH(halves); h++) {
        for (size_t k = 0; k < LENGTH(floats); k++)
            if (floats[k] != halves[h])
                check_elements(halves[h], floats[k], src, 65536, NULL, 0);
        for (size_t k = 0; k < LENGTH(quantised); k++) {
            check_elements(halves[h], quantised[k], src, 65536, NULL, 0);
            for (size_t s = (h + k) % every; s < LENGTH(odd_scales); s += 3 * every)
                check_elements(halves[h], quantised[k], src, 65536, &odd_scales[(s + k) % LENGTH(odd_scales)],
                               s % 2 == 1);
        }
    }
    for (size_t k = 0; k < LENGTH(quantised); k++)
        for (size_t h = 0; h < LENGTH(floats); h++) {
            const int64_t n = 256 * oracle_packed(quantised[k]);
            check_elements(quantised[k], floats[h], codes, n, NULL, 0);
            for (size_t s = 0; s < LENGTH(odd_scales); s++)
                check_elements(quantised[k], floats[h], codes, n, &odd_scales[s], 0);
            for (int e = -126; e <= 127; e++) {
                const float power = (float)oracle_ldexp(e % 3 ? 1 : 1.37, e);
                check_elements(quantised[k], floats[h], codes, n, &power, 0);
            }
        }
}

/* A neighbour of a positive number. */
static float beside(float x, int step)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    bits += (uint32_t)step;
    memcpy(&x, &bits, sizeof bits);
    return x;
}

/* The middles between neighbours of a type and what lies beside them, scaled and not; and random bits. */
static int64_t edges_of(kvprim_dtype to, float scale, uint32_t step, float *out)
{
    const oracle_type *const t = oracle_type_of(to);
    int64_t n = 0;
    for (uint32_t code = 0; code <= t->most; code += step) {
        const double low = oracle_magnitude(t, code), high = oracle_magnitude(t, code + 1);
        const float middle = (float)((low + high) / 2 * (double)scale), exact = (float)(low * (double)scale);
        const float near[] = {beside(middle, -1), middle, beside(middle, 1), exact};
        for (size_t k = 0; k < LENGTH(near) && n + 2 <= most_values - 4096; k++)
            out[n++] = near[k], out[n++] = -near[k];
    }
    static const float others[] = {0, FLT_MAX, INFINITY, NAN, FLT_MIN, 1.4e-45f, 1e38f, 464, 465, 61440, 61441, 127.5f};
    for (size_t k = 0; k < LENGTH(others); k++)
        out[n++] = others[k], out[n++] = -others[k];
    for (int k = 0; k < 4000; k++) {
        const uint32_t bits = (uint32_t)random_u64();
        memcpy(&out[n++], &bits, sizeof bits);
    }
    return n;
}

static void test_edges_of_rounding(void)
{
    static float x[most_values];
    static const kvprim_dtype types[] = {KVPRIM_F8E4M3, KVPRIM_F8E5M2, KVPRIM_INT8, KVPRIM_F16,
                                         KVPRIM_BF16,   KVPRIM_F4E2M1, KVPRIM_INT4};
    for (size_t k = 0; k < LENGTH(types); k++) {
        const int quantised = oracle_type_of(types[k])->bytes == 1;
        const int64_t n = edges_of(types[k], 1, quantised ? 1 : 3 * (uint32_t)every, x);
        check_elements(KVPRIM_F32, types[k], (const unsigned char *)x, n, NULL, 0);
        for (size_t s = 0; quantised && s < LENGTH(odd_scales); s++) {
            const int64_t scaled = edges_of(types[k], odd_scales[s], 1, x);
            check_elements(KVPRIM_F32, types[k], (const unsigned char *)x, scaled, &odd_scales[s], 0);
            check_elements(KVPRIM_F32, types[k], (const unsigned char *)x, scaled, &odd_scales[s], 1);
        }
    }
}

/* Rows of one tile whose computed scale is hard: nothing but zeros or NaN, infinity, denormals, the least and the
   largest numbers. */
static void test_computed_scales(void)
{
    static const float rows[][4] = {{0, -0.0f, 0, 0},
                                    {NAN, -NAN, NAN, NAN},
                                    {NAN, 1, -3, 2},
                                    {INFINITY, 1, 2, 3},
                                    {-INFINITY, NAN, 0, 1e30f},
                                    {1e-45f, 0, 0, -1e-44f},
                                    {FLT_MAX, -FLT_MAX, 1, 0},
                                    {FLT_MIN, 0, 0, 0},
                                    {448, 447, -1, 0},
                                    {449, 1, 0, 0},
                                    {1, 1, 1, 1},
                                    {127, 63.5f, 0.5f, -126.5f},
                                    {57344, 1, 2, 1e-6f},
                                    {0.3f, 0.1f, -0.2f, 0.299999f},
                                    {1e-4f, -2e-5f, 0, 3e-7f}};
    static const kvprim_dtype types[] = {KVPRIM_F8E4M3, KVPRIM_F8E5M2, KVPRIM_INT8};
    static const float least[] = {0, FLT_MIN, 1e-4f / 448, 0.75f, 1.7014118e38f};
    enum { n = LENGTH(rows) };
    for (int kind = 0; kind < 3 * 5 * 2 * 2 * 2; kind++) {
        float scales[n + 1], want_scales[n + 1];
        unsigned char values[4 * n], want[4 * n];
        const int byte_scales = kind / 60 % 2;
        kvprim_format src = plain_format(KVPRIM_F32);
        kvprim_format dst = {.dtype = types[kind % 3], .scale = KVPRIM_SCALE_TILE, .scales = scales};
        dst.scale_min = least[kind / 3 % 5], dst.scale_power_of_two = kind / 15 % 2, dst.scale_inverse = kind / 30 % 2;
        dst.scale_dtype = byte_scales ? KVPRIM_F8E8M0 : KVPRIM_F32;
        fill(scales, sizeof scales);
        memcpy(want_scales, scales, sizeof scales);
        for (size_t r = 0; r < n; r++) {
            const float s = oracle_computed(&dst, rows[r], 4);
            if (byte_scales)
                ((unsigned char *)want_scales)[r] = (unsigned char)(127 + oracle_exponent(s));
            else
                want_scales[r] = s;
            for (int e = 0; e < 4; e++)
                want[4 * r + (size_t)e] = (unsigned char)oracle_encode(
                    dst.dtype, dst.scale_inverse ? oracle_multiply(rows[r][e], oracle_divide(1, s))
                                                 : oracle_divide(rows[r][e], s));
        }
        const kvprim_transfer_desc d = transfer_of(formatted(table_of(values, n), &dst),
                                                   formatted(table_of((void *)(uintptr_t)rows, n), &src), 16, n);
        CHECK(kvprim_transfer(&d) == KVPRIM_OK);
        CHECK(memcmp(values, want, sizeof want) == 0);
        CHECK(memcmp(scales, want_scales, sizeof scales) == 0);
    }
}

/* ---- layouts ---- */

/* Moves of all kinds, every byte of their memory compared. */
static void test_random_conversions(void)
{
    static _Alignas(16) unsigned char block[CASE_BYTES], before[CASE_BYTES], want[CASE_BYTES];
    static convert_case c, v;
    size_t kinds[3][4] = {{0}};
    for (int i = 0; i < (int)(3000 / every); i++) {
        const int operation = i % 3;
        fill(block, sizeof block);
        case_make(&c, below, below, block, operation, NULL);
        const int has_v = operation == case_store && i % 2;
        if (has_v)
            case_make(&v, below, below, block, operation, &c);
        kinds[operation][c.dst.scale]++;
        memcpy(before, block, sizeof block);
        oracle_run(&c.move);
        if (has_v)
            oracle_run(&v.move);
        memcpy(want, block, sizeof block);
        memcpy(block, before, sizeof block);
        if (case_run(&c, has_v ? &v : NULL, operation, 0) != KVPRIM_OK)
            fail("case %d: %s", i, kvprim_last_error());
        else if (memcmp(block, want, sizeof block) != 0)
            fail("case %d, operation %d: %d to %d, scales %d to %d, tiles %lld to %lld: bytes differ", i, operation,
                 (int)c.src.dtype, (int)c.dst.dtype, (int)c.src.scale, (int)c.dst.scale, (long long)c.src.tile,
                 (long long)c.dst.tile);
    }
    for (int operation = 0; operation < 3; operation++)
        for (int scale = 0; scale < 4; scale++)
            CHECK(kinds[operation][scale] > 10);
}

/* Caches of both K and V, as the engines keep them: a page holds K's rows and scales, then V's. V may be copied. */
static void test_store_conversions(void)
{
    enum {
        rows = 24,
        page = 8,
        n = 32,
        tiles = 4,
        tokens = 10,
        k_page = page * (n + 4 * tiles),
        v_page = page * 2 * n
    };
    static _Alignas(16) unsigned char cache[rows / page][k_page + v_page], want[rows / page][k_page + v_page];
    static uint16_t k[tokens][n], v[tokens][n];
    const int32_t slot[tokens] = {3, 9, -1, 8, 0, 23, 24, 16, 7, 30};
    uint32_t rejected = 0;
    kvprim_format k_format = {.dtype = KVPRIM_F8E4M3,
                              .scale = KVPRIM_SCALE_TILE,
                              .tile = n / tiles,
                              .scale_offset = page * n,
                              .scale_stride = 4 * tiles};
    kvprim_format v_format = {.dtype = KVPRIM_INT8,
                              .scale = KVPRIM_SCALE_TILE,
                              .scale_dtype = KVPRIM_F8E8M0,
                              .scale_offset = page * n,
                              .scale_stride = 1};
    const kvprim_format bf16 = plain_format(KVPRIM_BF16);
    for (int converts_v = 0; converts_v < 2; converts_v++) {
        fill(cache, sizeof cache);
        for (int i = 0; i < tokens * n; i++) {
            (&k[0][0])[i] = (uint16_t)oracle_encode(KVPRIM_BF16, (float)(int)below(2000) * 0.01f - 10);
            (&v[0][0])[i] = (uint16_t)oracle_encode(KVPRIM_BF16, (float)(int)below(2000) * 0.03f - 30);
        }
        memcpy(want, cache, sizeof cache);
        const int64_t stride = k_page + v_page;
        kvprim_table k_cache = formatted(paged_table(cache, rows, page, stride), &k_format);
        kvprim_table v_cache = paged_table(&cache[0][k_page], rows, page, stride);
        kvprim_store_desc d = store_of(k_cache, formatted(table_of(k, tokens), &bf16), 2 * n, slot, tokens);
        if (converts_v)
            v_cache.format = &v_format;
        add_v(&d, v_cache, table_of(v, tokens), 2 * n);
        d.v.format = converts_v ? &bf16 : NULL, d.rejected = &rejected;
        for (int i = 0; i < tokens; i++) {
            if (slot[i] < 0 || slot[i] >= rows)
                continue;
            unsigned char *const at = want[slot[i] / page], *const v_at = at + k_page;
            const int r = slot[i] % page;
            float x[n], y[n];
            for (int e = 0; e < n; e++) {
                x[e] = (float)oracle_decode(KVPRIM_BF16, k[i][e]);
                y[e] = (float)oracle_decode(KVPRIM_BF16, v[i][e]);
            }
            for (int t = 0; t < tiles; t++) {
                const float s = oracle_computed(&k_format, x + t * n / tiles, n / tiles);
                memcpy(at + page * n + r * 4 * tiles + 4 * t, &s, sizeof s);
                for (int e = t * n / tiles; e < (t + 1) * n / tiles; e++)
                    at[r * n + e] = (unsigned char)oracle_encode(KVPRIM_F8E4M3, oracle_divide(x[e], s));
            }
            if (converts_v) {
                const float s = oracle_computed(&v_format, y, n);
                v_at[page * n + r] = (unsigned char)(127 + oracle_exponent(s));
                for (int e = 0; e < n; e++)
                    v_at[r * n + e] = (unsigned char)oracle_encode(KVPRIM_INT8, oracle_divide(y[e], s));
            } else {
                memcpy(v_at + r * 2 * n, v[i], sizeof v[i]);
            }
        }
        if (kvprim_store(&d) != KVPRIM_OK)
            fail("%s", kvprim_last_error());
        CHECK(memcmp(cache, want, sizeof cache) == 0);
        CHECK(rejected == 2 + 2 * (uint32_t)converts_v);
    }
}

/* The same type without scales is bytes; a run reads scales again; other scales may be set between runs. */
static void test_converting_moves(void)
{
    static float scale[3] = {0.5f, 2, 0.25f};
    uint16_t src[4][6], copy[4][6];
    unsigned char dst[4][6];
    uint32_t nan_bits[2] = {0x7fc12345, 0xff812345}, nan_copy[2];
    const int32_t index[] = {0, 1, 2, 3};
    kvprim_format f = tensor_format(KVPRIM_F8E5M2, scale), half = plain_format(KVPRIM_F16),
                  f32 = plain_format(KVPRIM_F32);
    kvprim_move m;
    for (int i = 0; i < 24; i++)
        (&src[0][0])[i] = (uint16_t)oracle_encode(KVPRIM_F16, (float)i - 11.3f);
    kvprim_gather_desc d = gather_of(formatted(table_of(dst, 4), &f), formatted(table_of(src, 4), &half), 12, index, 4);
    CHECK(kvprim_gather_moves(&d, &m) == KVPRIM_OK && !m.dst.table.format && !m.src.table.format);
    CHECK(m.dst.format.dtype == KVPRIM_F8E5M2 && m.src.format.dtype == KVPRIM_F16);
    CHECK(m.row_bytes == 12 && m.src.piece_bytes == 12 && m.dst.piece_bytes == 6 && m.dst.bytes == 24);
    for (int run = 0; run < 3; run++) {
        if (run == 1)
            scale[0] = 8;
        m.dst.format.scales = run == 2 ? &scale[1] : scale, m.count = 4 - run;
        memset(dst, 77, sizeof dst);
        memset(&f, 0xff, sizeof f), memset(&half, 0xff, sizeof half); /* a move holds its formats */
        CHECK(kvprim_cpu_move(&m, 1) == KVPRIM_OK);
        for (int i = 0; i < 24; i++)
            CHECK((&dst[0][0])[i] ==
                  (i < 6 * (4 - run)
                       ? oracle_encode(KVPRIM_F8E5M2, oracle_divide((float)oracle_decode(KVPRIM_F16, (&src[0][0])[i]),
                                                                    run == 0   ? 0.5f
                                                                    : run == 1 ? 8.0f
                                                                               : 2.0f))
                       : 77));
    }
    f = half = plain_format(KVPRIM_F16);
    d = gather_of(formatted(table_of(copy, 4), &f), formatted(table_of(src, 4), &half), 12, index, 4);
    CHECK(kvprim_gather_moves(&d, &m) == KVPRIM_OK && m.dst.format.dtype == 0 && m.src.format.dtype == 0);
    CHECK(kvprim_gather(&d) == KVPRIM_OK && memcmp(copy, src, sizeof src) == 0);
    const kvprim_format other = f32;
    d = gather_of(formatted(table_of(nan_copy, 2), &f32), formatted(table_of(nan_bits, 2), &other), 4, index, 2);
    CHECK(kvprim_gather(&d) == KVPRIM_OK && memcmp(nan_copy, nan_bits, sizeof nan_bits) == 0);
}

/* The defaults of a move's formats, from what >>format says. */
static void test_side_format(void)
{
    static _Alignas(16) unsigned char cache[4][4096];
    static uint16_t k[64];
    float scales[4];
    const int32_t slot[] = {5};
    kvprim_format f = {.dtype = KVPRIM_F8E4M3, .scale = KVPRIM_SCALE_TILE, .tile = 16, .scale_offset = 512};
    const kvprim_format bf16 = plain_format(KVPRIM_BF16);
    kvprim_table t = formatted(paged_table(cache, 32, 8, 4096), &f);
    kvprim_store_desc d = store_of(t, formatted(table_of(k, 1), &bf16), 128, slot, 1);
    kvprim_move m[2];
    d.k_cache.stride = 128;
    CHECK(kvprim_store_moves(&d, m) == KVPRIM_ERROR_OVERLAP); /* 512 is row 4 */
    f.scale_offset = 64;
    CHECK(kvprim_store_moves(&d, m) == KVPRIM_OK);
    kvprim_format g = m[0].dst.format;
    CHECK(g.scale_dtype == KVPRIM_F32 && g.scale_tile_stride == 4 && g.scale_stride == 128 &&
          g.scale_page_stride == 4096 && g.scale_offset == 64 && g.tile == 16 && g.scale_min == FLT_MIN);
    d.k_cache.stride = 512; /* pages without a gap, in which scales lie with the rows, or not */
    f.scale_offset = 64, f.tile = 0, f.scale_dtype = KVPRIM_F8E8M0;
    CHECK(kvprim_store_moves(&d, m) == KVPRIM_OK);
    g = m[0].dst.format;
    CHECK(g.tile == 64 && g.scale_tile_stride == 1 && g.scale_stride == 512 && g.scale_power_of_two == 1 &&
          m[0].dst.table.page_rows == 0);
    f.scale_stride = 1;
    CHECK(kvprim_store_moves(&d, m) == KVPRIM_OK);
    g = m[0].dst.format;
    CHECK(g.scale_stride == 1 && g.scale_page_stride == 4096 && m[0].dst.table.page_rows == 8);
    f = (kvprim_format){.dtype = KVPRIM_INT8, .scale = KVPRIM_SCALE_HEAD, .scales = scales};
    d.k_cache = formatted(table_of(cache, 32), &f), d.k_cache.heads = 4, d.k_cache.head_stride = 16;
    CHECK(kvprim_store_moves(&d, m) == KVPRIM_OK);
    g = m[0].dst.format;
    CHECK(g.tile == 16 && g.scale_tile_stride == 4 && m[0].dst.table.heads == 1);
    g = m[0].src.format;
    CHECK(g.dtype == KVPRIM_BF16 && g.scale == 0 && g.tile == 0);

    f = (kvprim_format){.dtype = KVPRIM_F8E4M3, .scale = KVPRIM_SCALE_TENSOR, .scale_offset = 64};
    d.k_cache = formatted(table_of(NULL, 0), &f); /* no scale of an empty table is read, as there may be no memory */
    CHECK(kvprim_store_moves(&d, m) == KVPRIM_OK);
    CHECK(m[0].dst.format.dtype == KVPRIM_F8E4M3 && m[0].dst.format.scale == 0 && m[0].dst.format.scale_offset == 0);
    f.scale = KVPRIM_SCALE_TILE, d.count = 0; /* nothing is checked or moved */
    memset(m, 0xff, sizeof m); /* a GPU reads the tensor's scale of V that is only copied, if there is one */
    CHECK(kvprim_store_moves(&d, m) == KVPRIM_OK && m[0].dst.format.dtype == 0 && !m[0].dst.table.format);
    CHECK(!m[0].dst.format.tensor_scale && !m[0].src.format.tensor_scale);

    f.tile = 16; /* 4 scales after each row; only the first 2 of 32 rows can be touched */
    kvprim_gather_desc gather =
        gather_of(formatted(strided_table(cache, 32, 128), &f), formatted(table_of(k, 1), &bf16), 128, slot, 2);
    CHECK(kvprim_gather_moves(&gather, m) == KVPRIM_OK && m[0].dst.bytes == 128 + 64 + 4 * 4);
}

/* ---- presets ---- */

typedef struct ds_mla_row {
    uint8_t nope[512];
    float scales[4];
    uint16_t rope[64];
} ds_mla_row;

typedef struct ds_mla_v4_page {
    struct {
        uint8_t nope[448];
        uint16_t rope[64];
    } rows[64];
    uint8_t scales[64][8]; /* the last is not touched */
    uint8_t padding[64];
} ds_mla_v4_page;

typedef struct indexer_page {
    uint8_t values[64][128];
    float scales[64];
} indexer_page;

enum { preset_rows = 150, preset_tokens = 40, preset_pages = 3 };
_Static_assert(sizeof(ds_mla_row) == 656 && sizeof(ds_mla_v4_page) == 64 * 584 + 64 && sizeof(indexer_page) == 64 * 132,
               "the engines' sizes");

/* Where the parts of a row are, by subscripts. */
typedef struct ds_mla_v41_page {
    uint8_t values[64][512], scales[64][16];
} ds_mla_v41_page;

typedef struct preset_row {
    uint8_t *values;
    uint16_t *copied;
    void *scales;
} preset_row;

static preset_row find_preset_row(int which, void *cache, int row)
{
    preset_row r = {NULL, NULL, NULL};
    if (which < 2) {
        ds_mla_row *const x = (ds_mla_row *)cache + row;
        r.values = x->nope, r.copied = x->rope, r.scales = x->scales;
    } else if (which == 2) {
        ds_mla_v4_page *const x = (ds_mla_v4_page *)cache + row / 64;
        r.values = x->rows[row % 64].nope, r.copied = x->rows[row % 64].rope, r.scales = x->scales[row % 64];
    } else if (which == 5) {
        ds_mla_v41_page *const x = (ds_mla_v41_page *)cache + row / 64;
        r.values = x->values[row % 64], r.scales = x->scales[row % 64];
    } else {
        indexer_page *const x = (indexer_page *)cache + row / 64;
        r.values = x->values[row % 64], r.scales = &x->scales[row % 64];
    }
    return r;
}

/* A tile's scale, as the engine computes it, and whether it then multiplies by 1 / scale. */
typedef struct preset_rule {
    float least;
    int power_of_two, inverse;
} preset_rule;

static void expect_preset_row(const preset_row *r, int which, preset_rule rule, const uint16_t *k, const uint16_t *v,
                              int elements, int tile)
{
    const kvprim_format f = {.dtype = KVPRIM_F8E4M3, .scale_power_of_two = rule.power_of_two, .scale_min = rule.least};
    for (int t = 0; t < elements / tile; t++) {
        float x[128];
        for (int e = 0; e < tile; e++)
            x[e] = (float)oracle_decode(KVPRIM_BF16, k[t * tile + e]);
        const float s = oracle_computed(&f, x, tile), inverse = oracle_divide(1, s);
        if (which == 2 || which == 5)
            ((uint8_t *)r->scales)[t] = (uint8_t)(127 + oracle_exponent(s));
        else
            ((float *)r->scales)[t] = s;
        for (int e = 0; e < tile; e++) {
            const float y = rule.inverse ? oracle_multiply(x[e], inverse) : oracle_divide(x[e], s);
            r->values[t * tile + e] = (uint8_t)oracle_encode(KVPRIM_F8E4M3, y);
        }
    }
    if (v)
        memcpy(r->copied, v, 128);
}

static void test_presets(void)
{
    static const struct {
        const char *name;
        int elements, copied, tile;
        size_t page;
        preset_rule rule;
    } presets[] = {{"fp8_ds_mla", 512, 64, 128, 64 * 656, {1e-4f, 1, 0}},
                   {"fp8_ds_mla_sglang", 512, 64, 128, 64 * 656, {0, 0, 1}},
                   {"fp8_ds_mla_v4", 448, 64, 64, sizeof(ds_mla_v4_page), {1e-4f / 448, 1, 0}},
                   {"fp8_indexer", 128, 0, 128, sizeof(indexer_page), {1e-4f / 448, 0, 0}},
                   {"fp8_indexer_ue8m0", 128, 0, 128, sizeof(indexer_page), {1e-4f / 448, 1, 0}},
                   {"fp8_ds_mla_v41", 512, 0, 32, sizeof(ds_mla_v41_page), {1e-4f / 448, 1, 0}}};
    static uint16_t k[preset_tokens][576], back[preset_tokens][576];
    int32_t slot[preset_tokens];
    for (int which = 0; which < (int)LENGTH(presets); which++) {
        const size_t bytes = preset_pages * presets[which].page;
        unsigned char *const cache = allocate(bytes), *const want = allocate(bytes);
        const int n = presets[which].elements;
        kvprim_layout p;
        fill(cache, bytes);
        memcpy(want, cache, bytes);
        const int64_t stride = which == 2 ? (int64_t)presets[which].page : 0; /* its pages are padded */
        CHECK(find_quantised(presets[which].name, cache, preset_rows, 64, stride, &p) == KVPRIM_OK);
        CHECK(p.k_elements == n && p.v_elements == presets[which].copied && p.k_cache.format == &p.k_format);
        p.k_cache.bytes = (int64_t)bytes;
        for (int i = 0; i < preset_tokens; i++) {
            slot[i] = i % 9 == 4 ? -1 : i * 11 % preset_rows;
            for (int e = 0; e < 576; e++) /* a token of zeros, and some that are tiny */
                k[i][e] = (uint16_t)oracle_encode(
                    KVPRIM_BF16,
                    i == 7 ? 0 : (float)oracle_ldexp((double)below(4001) / 2000 - 1, i % 5 == 2 ? -20 : 3));
            if (slot[i] >= 0) {
                const preset_row r = find_preset_row(which, want, slot[i]);
                expect_preset_row(&r, which, presets[which].rule, k[i], presets[which].copied ? k[i] + n : NULL, n,
                                  presets[which].tile);
            }
        }
        const kvprim_format bf16 = plain_format(KVPRIM_BF16);
        kvprim_store_desc d = store_of(p.k_cache, formatted(strided_table(k, preset_tokens, sizeof k[0]), &bf16), n * 2,
                                       slot, preset_tokens);
        if (p.v_elements)
            add_v(&d, p.v_cache, strided_table(&k[0][n], preset_tokens, sizeof k[0]), p.v_elements * 2);
        if (kvprim_store(&d) != KVPRIM_OK)
            fail("%s: %s", presets[which].name, kvprim_last_error());
        if (memcmp(cache, want, bytes) != 0)
            fail("%s: bytes differ", presets[which].name);

        const kvprim_gather_desc g = gather_of(formatted(strided_table(back, preset_tokens, sizeof back[0]), &bf16),
                                               p.k_cache, n, slot, preset_tokens);
        CHECK(kvprim_gather(&g) == KVPRIM_OK);
        for (int i = 0; i < preset_tokens; i++)
            for (int e = 0; e < n; e++) {
                float x = 0;
                if (slot[i] >= 0) {
                    const preset_row r = find_preset_row(which, want, slot[i]);
                    const int t = e / presets[which].tile;
                    x = oracle_multiply((float)oracle_decode(KVPRIM_F8E4M3, r.values[e]),
                                        which == 2 || which == 5
                                            ? (float)oracle_ldexp(1, ((uint8_t *)r.scales)[t] - 127)
                                            : ((float *)r.scales)[t]);
                }
                if (back[i][e] != oracle_encode(KVPRIM_BF16, x))
                    fail("%s: token %d, element %d is %#x", presets[which].name, i, e, back[i][e]);
            }
        free(cache);
        free(want);
    }
    kvprim_layout p;
    char data[8];
    CHECK_ERROR(find_quantised(NULL, data, 1, 1, 0, &p), KVPRIM_ERROR_NULL, "name is NULL");
    CHECK_ERROR(find_quantised("fp8_indexer", data, 1, 1, 0, NULL), KVPRIM_ERROR_NULL, "layout is NULL");
    CHECK_ERROR(find_quantised("fp8_indexer", data, 0, 1, 0, &p), KVPRIM_ERROR_SIZE, "rows is 0, less than 1");
    CHECK_ERROR(find_quantised("fp8_indexer", data, 1, -5, 0, &p), KVPRIM_ERROR_SIZE, "page_rows is -5, less than 1");
    CHECK_ERROR(find_quantised("fp8_indexer", data, 1, 2, 263, &p), KVPRIM_ERROR_SIZE,
                "page_stride is 263, less than a page's bytes, 264");
    CHECK_ERROR(find_quantised("fp8_indexer", data, 1, INT64_MAX / 100, 0, &p), KVPRIM_ERROR_SIZE, "too large");
    CHECK_ERROR(find_quantised("fp8", data, 1, 1, 0, &p), KVPRIM_ERROR_ARGUMENT,
                "'fp8' is neither a name of >>layout nor an order of LBHN2C");
}

/* ---- bad descriptors ---- */

/* A store of bf16 rows of 64 elements into pages of 4 fp8 rows, which their 4 scales each follow, and V beside K. */
typedef struct bad_store {
    _Alignas(16) unsigned char cache[8192], v_cache[8192], outside[8192];
    _Alignas(16) uint16_t k[16][64], v[16][64];
    int64_t slot[16];
    uint32_t rejected, nans, v_nans, spare;
    kvprim_format k_format, v_format, bf16, v_bf16;
    kvprim_store_desc d;
} bad_store;

static void reset_bad_store(bad_store *b)
{
    memset(b, 0, sizeof *b);
    b->k_format = (kvprim_format){.dtype = KVPRIM_F8E4M3,
                                  .scale = KVPRIM_SCALE_TILE,
                                  .tile = 16,
                                  .scale_offset = 256,
                                  .scale_stride = 16,
                                  .nans = &b->nans};
    b->v_format = (kvprim_format){
        .dtype = KVPRIM_INT8, .scale = KVPRIM_SCALE_HEAD, .tile = 32, .scales = b->outside, .nans = &b->v_nans};
    b->bf16 = b->v_bf16 = plain_format(KVPRIM_BF16);
    b->d = (kvprim_store_desc){.k_cache = paged_table(b->cache, 16, 4, 512),
                               .v_cache = paged_table(b->v_cache, 16, 4, 512),
                               .k = table_of(b->k, 16),
                               .v = table_of(b->v, 16),
                               .k_bytes = 128,
                               .v_bytes = 128,
                               .slot = b->slot,
                               .slot_type = KVPRIM_I64,
                               .count = 16,
                               .rejected = &b->rejected};
    b->d.k_cache.format = &b->k_format, b->d.v_cache.format = &b->v_format;
    b->d.k.format = &b->bf16, b->d.v.format = &b->v_bf16;
}

static void test_format_errors(void)
{
    static bad_store b, before;
#define REFUSED(change, status, words)                                                                                 \
    do {                                                                                                               \
        reset_bad_store(&b);                                                                                           \
        change;                                                                                                        \
        memcpy(&before, &b, sizeof b);                                                                                 \
        CHECK_ERROR(kvprim_store(&b.d), KVPRIM_ERROR_##status, words);                                                 \
        CHECK(memcmp(&before, &b, sizeof b) == 0);                                                                     \
    } while (0)
#define TAKEN(change)                                                                                                  \
    do {                                                                                                               \
        reset_bad_store(&b);                                                                                           \
        change;                                                                                                        \
        if (kvprim_store(&b.d) != KVPRIM_OK)                                                                           \
            fail("line %d: %s", __LINE__, kvprim_last_error());                                                        \
    } while (0)
    TAKEN((void)0);
    /* types */
    REFUSED(b.d.k.format = NULL, ARGUMENT, "kvprim_store: k_cache.format is set, but k.format is NULL");
    REFUSED(b.d.v_cache.format = NULL, ARGUMENT, "kvprim_store: v.format is set, but v_cache.format is NULL");
    REFUSED(b.bf16.dtype = (kvprim_dtype)1, ARGUMENT, "k.format.dtype is 1, which is no element type");
    REFUSED(b.k_format.dtype = (kvprim_dtype)29, ARGUMENT, "k_cache.format.dtype is 29, which is no element type");
    REFUSED(b.bf16.dtype = KVPRIM_F64, UNSUPPORTED,
            "from k.format.dtype, which is 20, to k_cache.format.dtype, which is 24");
    REFUSED(b.k_format.dtype = KVPRIM_F8E8M0, UNSUPPORTED, "to k_cache.format.dtype, which is 26");
    REFUSED(b.bf16.dtype = KVPRIM_F8E4M3, UNSUPPORTED, "no conversion from k.format.dtype, which is 24");
    REFUSED(b.d.k_bytes = 127, SIZE, "k_bytes is 127, no multiple of an element's bytes, 2");
    REFUSED(b.d.k_bytes = INT64_MAX - 1, SIZE, "k_bytes is 9223372036854775806, too large for a conversion");
    REFUSED(b.d.k_bytes = 0, SIZE, "k_bytes is 0, less than 1");
    REFUSED(b.d.k_bytes = -128, SIZE, "k_bytes is -128, less than 1");
    /* fields */
    REFUSED(b.k_format.scale_heads = 4, ARGUMENT,
            "k_cache.format.scale_heads is 4, which only tiles of 4 bits with scales of 1 byte have");
    REFUSED(b.k_format.scale_order = 1, ARGUMENT, "k_cache.format.scale_order is 1, but scale_heads is 0");
    REFUSED(b.k_format.scale = (kvprim_scale_kind)4, ARGUMENT, "k_cache.format.scale is 4, no kind of scale");
    REFUSED(b.bf16.scale = KVPRIM_SCALE_TENSOR, ARGUMENT, "k.format.scale is 1, but elements that are not quantised");
    REFUSED(b.k_format.scale_dtype = KVPRIM_F64, ARGUMENT, "scale_dtype is 20, neither KVPRIM_F32 nor KVPRIM_F8E8M0");
    REFUSED(b.k_format.scale_dtype = KVPRIM_F16, ARGUMENT, "scale_dtype is 17, which only tiles of elements of 4 bits");
    REFUSED(b.k_format.tensor_scale = (const float *)&b, ARGUMENT, "but tensor_scale is set, which only tiles of 4");
    REFUSED((b.k_format.dtype = KVPRIM_F4E2M1, b.d.k_bytes = 126), SIZE, "k_bytes is 126, an odd number of elements");
    REFUSED((b.k_format.dtype = KVPRIM_INT4, b.k_format.tile = 1), ARGUMENT, "tile is 1, an odd number of elements");
    REFUSED(b.k_format.scale_power_of_two = 2, ARGUMENT, "scale_power_of_two is 2, neither 0 nor 1");
    REFUSED(b.k_format.scale_inverse = -1, ARGUMENT, "scale_inverse is -1, neither 0 nor 1");
    REFUSED(b.k_format.scale_min = -1, ARGUMENT, "scale_min is -1, neither 0 nor from 2^-126 to 2^127");
    REFUSED(b.k_format.scale_min = 1e-39f, ARGUMENT, "scale_min is 1e-39");
    REFUSED(b.k_format.scale_min = 1.71e38f, ARGUMENT, "scale_min is 1.71e+38");
    REFUSED(b.k_format.scale_min = NAN, ARGUMENT, "scale_min is");
    TAKEN(b.k_format.scale_min = FLT_MIN);
    TAKEN(b.k_format.scale_min = 1.7014118346046923e38f);
    REFUSED(b.v_format.scale_min = 1, ARGUMENT, "v_cache.format.scale_min is set, but has no meaning with scale 2");
    REFUSED(b.v_format.scale_power_of_two = 1, ARGUMENT, "scale_power_of_two is set, but has no meaning with scale 2");
    REFUSED(b.v_format.scale_stride = 4, ARGUMENT, "scale_stride is set, but has no meaning with scale 2");
    REFUSED(b.v_format.scale_page_stride = 4, ARGUMENT, "scale_page_stride is set, but has no meaning with scale 2");
    REFUSED((b.v_format.scale = KVPRIM_SCALE_TENSOR), ARGUMENT, "tile is set, but has no meaning with scale 1");
    REFUSED((b.v_format.scale = (kvprim_scale_kind)0), ARGUMENT, "tile is set, but has no meaning with scale 0");
    REFUSED((b.v_format = plain_format(KVPRIM_INT8), b.v_format.scales = b.outside), ARGUMENT,
            "scales is set, but has no meaning with scale 0");
    REFUSED(b.k_format.scale_layer_stride = 64, ARGUMENT,
            "scale_layer_stride is set, but has no meaning with scale 3 in the table's memory");
    REFUSED(b.v_format.scale_offset = 4, ARGUMENT, "v_cache.format.scale_offset is 4, but scales is set");
    REFUSED(b.k_format.tile = -1, SIZE, "k_cache.format.tile is -1, less than 0");
    REFUSED(b.k_format.tile = 24, SIZE, "k_cache.format.tile is 24, which does not divide the elements of a row, 64");
    REFUSED(b.k_format.tile = 128, SIZE, "tile is 128, which does not divide the elements of a row, 64");
    REFUSED(b.v_format.tile = 0, ARGUMENT, "v_cache.format.tile is 0, and heads is not more than 1");
    TAKEN((b.v_format.tile = 0, b.d.v_cache.heads = 4, b.d.v_cache.head_stride = 16));
    REFUSED(b.k_format.scale_offset = -4, SIZE, "k_cache.format.scale_offset is -4, less than 0");
    REFUSED(b.k_format.scale_stride = -16, SIZE, "k_cache.format.scale_stride is -16, less than 0");
    REFUSED(b.k_format.scale_tile_stride = -4, SIZE, "k_cache.format.scale_tile_stride is -4, less than 0");
    REFUSED(b.k_format.scale_page_stride = INT64_MIN, SIZE, "scale_page_stride is -9223372036854775808, less than 0");
    REFUSED((b.v_format.scale_layer_stride = -2), SIZE, "v_cache.format.scale_layer_stride is -2, less than 0");
    TAKEN((b.v_format.scale_layer_stride = KVPRIM_SCALES_SHARED));
    REFUSED((b.k_format.scale_offset = 0, b.k_format.scales = b.outside + 64,
             b.k_format.scale_layer_stride = KVPRIM_SCALES_SHARED),
            SIZE, "k_cache.format.scale_layer_stride is -1, less than 0");
    REFUSED(b.k_format.scales_bytes = 256, ARGUMENT, "scales_bytes is set, but has no meaning with scale 3 in the tab");
    REFUSED(b.v_format.scales_bytes = -1, SIZE, "v_cache.format.scales_bytes is -1, less than 0");
    REFUSED(b.v_format.scales_bytes = 7, SIZE, "v_cache.format.scales_bytes is 7, but its scales reach 8");
    TAKEN(b.v_format.scales_bytes = 8);
    REFUSED((b.k_format.scales = b.outside + 64, b.k_format.scale_offset = 0, b.k_format.scales_bytes = 16 * 16 - 1),
            SIZE, "k_cache.format.scales_bytes is 255, but its scales reach 256");
    TAKEN((b.k_format.scales = b.outside + 64, b.k_format.scale_offset = 0, b.k_format.scales_bytes = 16 * 16));
    /* alignment */
    REFUSED(b.d.k.data = (char *)b.k + 1, ARGUMENT, "kvprim_store: k.data (");
    REFUSED((b.d.k.rows = 15, b.d.count = 15, b.d.k.stride = 129), SIZE,
            "k.stride is 129, no multiple of the bytes of an element or scale, 2");
    REFUSED((b.d.k.page_rows = 4, b.d.k.page_stride = 513), SIZE, "k.page_stride is 513, no multiple");
    REFUSED((b.d.k.heads = 64, b.d.k.head_stride = 3), SIZE, "k.head_stride is 3, no multiple");
    REFUSED((b.d.k.heads = 128, b.d.k.head_stride = 2), SIZE, "k.heads is 128, which does not divide the elements");
    REFUSED(b.d.k_cache.data = b.cache + 2, ARGUMENT, "k_cache.data (");
    REFUSED(b.k_format.scale_offset = 258, SIZE, "k_cache.format.scale_offset is 258, no multiple");
    REFUSED(b.k_format.scale_stride = 18, SIZE, "k_cache.format.scale_stride is 18, no multiple");
    REFUSED((b.k_format.scale_stride = 0, b.d.k_cache.stride = 81, b.k_format.scale_offset = 64), SIZE,
            "k_cache.format.scale_stride is 81, no multiple");
    REFUSED(b.k_format.scale_tile_stride = 5, SIZE, "k_cache.format.scale_tile_stride is 5, no multiple");
    REFUSED((b.d.k_cache.page_stride = 514), SIZE, "k_cache.format.scale_page_stride is 514, no multiple");
    REFUSED(b.v_format.scales = b.outside + 2, ARGUMENT, "v_cache.format.scales (");
    TAKEN((b.v_format.scales = b.outside + 1, b.v_format.scale_dtype = KVPRIM_F8E8M0));
    REFUSED(b.k_format.nans = (uint32_t *)(void *)((char *)&b.spare + 2), ARGUMENT, "k_cache.format.nans (");
    /* scales that overlap each other, or do not fit */
    REFUSED(b.k_format.scale_stride = 12, SIZE,
            "k_cache.format.scale_stride is 12, but what lies inside that step takes bytes: 16");
    REFUSED(b.k_format.scale_page_stride = 32, SIZE,
            "k_cache.format.scale_page_stride is 32, but what lies inside that step takes bytes: 64");
    REFUSED(b.k_format.scale_stride = INT64_MAX / 8 * 4, SIZE,
            "k_cache.rows is 16, which makes its scales reach further");
    REFUSED(b.k_format.scale_offset = INT64_MAX - 3, SIZE, "k_cache.rows is 16, which makes its scales reach further");
    REFUSED((b.d.k_cache.bytes = 4 * 512 - 192 - 1), SIZE, "k_cache.bytes is 1855, but its scales reach 1856");
    TAKEN((b.d.k_cache.bytes = 4 * 512 - 192));
    REFUSED((b.k_format.tile = 1, b.k_format.scale_tile_stride = INT64_MAX / 4 * 4 - 3), SIZE, "scale_tile_stride is");
    /* scales over rows */
    REFUSED(b.k_format.scale_offset = 252, OVERLAP, "kvprim_store: a scale of k_cache (");
    REFUSED(b.k_format.scale_offset = 4, OVERLAP, ") overlaps a row of k_cache (");
    REFUSED(b.k_format.scale_offset = 0, NULL, "k_cache.format.scales is NULL, and scale_offset is 0");
    REFUSED(b.v_format.scales = NULL, NULL, "v_cache.format.scales is NULL, and scale_offset is 0");
    REFUSED(b.k_format.scale_offset = 452, OVERLAP, "overlaps a row of k_cache (");
    TAKEN(b.k_format.scale_offset = 448);
    TAKEN((b.k_format.scale_offset = 4 * 512));
    TAKEN((b.d.k_cache.stride = 80, b.k_format.scale_stride = 0, b.k_format.scale_offset = 64));
    REFUSED((b.d.k_cache.stride = 80, b.k_format.scale_stride = 0, b.k_format.scale_offset = 60), OVERLAP,
            "overlaps a row of k_cache (");
    REFUSED((b.d.k_cache.stride = 76, b.k_format.scale_stride = 0, b.k_format.scale_offset = 64), OVERLAP,
            "overlaps a row of k_cache (");
    REFUSED(b.k_format.scale_page_stride = 768, OVERLAP, "overlaps a row of k_cache (");
    TAKEN((b.k_format.scales = b.cache + 256, b.k_format.scale_offset = 0, b.k_format.scale_page_stride = 512));
    REFUSED((b.k_format.scales = b.cache + 252, b.k_format.scale_offset = 0, b.k_format.scale_page_stride = 512),
            OVERLAP, "overlaps a row of k_cache (");
    REFUSED((b.v_format.scales = b.v_cache + 64), OVERLAP, "a scale of v_cache (");
    TAKEN((b.v_format.scales = b.v_cache + 256));
    /* K beside V */
    TAKEN((b.d.v_cache.data = b.cache + 4096, b.k_format.scale_offset = 256));
    REFUSED((b.d.v_cache.data = b.cache + 8192 - 4 * 512, b.k_format.scale_offset = 8192 - 4 * 512), OVERLAP,
            "a scale of k_cache (");
    REFUSED((b.d.v_cache.data = b.cache + 252 + 256, b.d.k_cache.page_stride = b.d.v_cache.page_stride = 1024,
             b.k_format.scale_offset = 448 + 4),
            OVERLAP, ") overlaps a row of v_cache (");
    TAKEN((b.d.v_cache.data = b.cache + 512, b.d.k_cache.page_stride = b.d.v_cache.page_stride = 1024,
           b.k_format.scale_offset = 448));
    REFUSED((b.v_format.scales = b.cache + 260), OVERLAP, "a scale of k_cache (");
    REFUSED((b.v_format.scales = b.cache + 4), OVERLAP, ") overlaps a row of k_cache (");
    REFUSED((b.k_format.scales = b.v_cache + 16, b.k_format.scale_offset = 0), OVERLAP, "overlaps a row of v_cache (");
    /* separate scales that are written */
    REFUSED((b.k_format.scales = b.k[3], b.k_format.scale_offset = 0), OVERLAP, "k_cache.format.scales (");
    REFUSED((b.k_format.scales = b.v[3], b.k_format.scale_offset = 0), OVERLAP, "k_cache.format.scales (");
    REFUSED((b.k_format.scales = b.slot, b.k_format.scale_offset = 0), OVERLAP, "overlaps slot (");
    REFUSED((b.k_format.scales = b.outside, b.k_format.scale_offset = 0), OVERLAP, "a scale of v_cache (");
    REFUSED((b.k_format.scales = b.outside + 8, b.k_format.scale_offset = 0, b.d.rejected = (uint32_t *)b.outside + 5),
            OVERLAP, "rejected (");
    TAKEN((b.k_format.scales = b.outside + 8, b.k_format.scale_offset = 0));
    /* scales that are read, of a cache that the store fills with floats */
    REFUSED((b.bf16 = tensor_format(KVPRIM_F8E4M3, (float *)(void *)(b.v_cache + 60)),
             b.k_format = plain_format(KVPRIM_BF16), b.d.k_bytes = 32),
            OVERLAP, "k.format.scales (");
    TAKEN((b.bf16 = tensor_format(KVPRIM_F8E4M3, (float *)(void *)&b.spare), b.k_format = plain_format(KVPRIM_BF16),
           b.d.k_bytes = 32));
    /* counters */
    REFUSED(b.k_format.nans = &b.rejected, OVERLAP, "k_cache.format.nans (");
    REFUSED(b.k_format.nans = (uint32_t *)(void *)b.cache, OVERLAP, "k_cache.format.nans (");
    REFUSED(b.k_format.nans = (uint32_t *)(void *)(b.cache + 300), OVERLAP, "k_cache.format.nans (");
    REFUSED(b.k_format.nans = (uint32_t *)(void *)b.k, OVERLAP, "k_cache.format.nans (");
    REFUSED(b.k_format.nans = (uint32_t *)(void *)(b.slot + 2), OVERLAP, "k_cache.format.nans (");
    REFUSED(b.k_format.nans = (uint32_t *)(void *)b.v, OVERLAP, "k_cache.format.nans (");
    REFUSED(b.k_format.nans = (uint32_t *)(void *)b.outside, OVERLAP, "k_cache.format.nans (");
    REFUSED(b.v_format.nans = (uint32_t *)(void *)(b.cache + 60), OVERLAP, "v_cache.format.nans (");
    REFUSED(b.v_format.nans = (uint32_t *)(void *)(b.outside + 4), OVERLAP, "v_cache.format.nans (");
    REFUSED(b.d.rejected = (uint32_t *)(void *)(b.cache + 256), OVERLAP, "rejected (");
    /* scales that follow the rows of the last page end 192 bytes before the page does */
    REFUSED(b.d.rejected = (uint32_t *)(void *)(b.cache + 4 * 512 - 196), OVERLAP, "rejected (");
    TAKEN(b.d.rejected = (uint32_t *)(void *)(b.cache + 4 * 512 - 192));
    REFUSED(b.k_format.nans = (uint32_t *)(void *)(b.cache + 4 * 512 - 196), OVERLAP, "k_cache.format.nans (");
    TAKEN(b.k_format.nans = (uint32_t *)(void *)(b.cache + 4 * 512 - 192));
    TAKEN(b.v_format.nans = &b.nans);
    /* elements of 4 bits: a row's 32 bytes, 4 scales of a byte after all rows of the page, and the tensor's */
#define FOUR(change) (b.k_format.dtype = KVPRIM_F4E2M1, b.k_format.scale_dtype = KVPRIM_F8E4M3, change)
#define OUTER(at) FOUR(b.k_format.tensor_scale = (const float *)(const void *)(at))
    TAKEN(OUTER(&b.spare));
    TAKEN(OUTER(b.k)); /* both are read */
    TAKEN(OUTER(b.outside));
    TAKEN((OUTER(&b.spare), b.k_format.dtype = KVPRIM_INT4, b.k_format.scale_dtype = KVPRIM_F16));
    TAKEN(FOUR((b.d.k_cache.heads = b.d.k.heads = 32, b.d.k_cache.head_stride = 1, b.d.k.head_stride = 4)));
    REFUSED(FOUR((b.d.k_cache.heads = 64, b.d.k_cache.head_stride = 1)), SIZE,
            "k_cache.heads is 64, which does not divide the bytes of a row, 32");
    REFUSED(FOUR((b.d.k.heads = 64, b.d.k.head_stride = 2)), SIZE, "k.heads is 64, which makes odd pieces");
    REFUSED((OUTER(&b.spare), b.k_format.scale = KVPRIM_SCALE_HEAD), ARGUMENT, "scale_dtype is 24, which only tiles");
    REFUSED((OUTER(&b.spare), b.k_format.scale = KVPRIM_SCALE_HEAD, b.k_format.scale_dtype = KVPRIM_F32), ARGUMENT,
            "scale is 2, but tensor_scale is set, which only tiles of 4 bits have");
    REFUSED(OUTER((char *)&b.spare + 2), ARGUMENT, "k_cache.format.tensor_scale (");
    REFUSED(OUTER(b.cache + 28), OVERLAP, "k_cache.format.tensor_scale (");
    REFUSED(OUTER(b.cache + 268), OVERLAP, "k_cache.format.tensor_scale (");
    REFUSED(OUTER(b.v_cache), OVERLAP, "k_cache.format.tensor_scale (");
    REFUSED((OUTER(b.outside + 72), b.k_format.scales = b.outside + 64, b.k_format.scale_offset = 0), OVERLAP,
            "k_cache.format.tensor_scale (");
    /* the scales of heads: a block of 64 bytes or less after the 128 bytes of each page's rows */
#define HEADS(heads, order) FOUR((b.k_format.scale_heads = (heads), b.k_format.scale_order = (order), SCALES(4)))
#define SCALES(n) (b.k_format.tile = 64 / (n), b.k_format.scale_stride = 0)
    TAKEN(HEADS(1, KVPRIM_SCALES_SWIZZLED));
    TAKEN(HEADS(4, KVPRIM_SCALES_LINEAR));
    TAKEN((HEADS(4, KVPRIM_SCALES_SWIZZLED), SCALES(16)));
    REFUSED(HEADS(-1, 0), SIZE, "k_cache.format.scale_heads is -1, less than 0");
    REFUSED(HEADS(1, 2), ARGUMENT, "k_cache.format.scale_order is 2, no order of scales");
    REFUSED(HEADS(1, -1), ARGUMENT, "k_cache.format.scale_order is -1, no order of scales");
    REFUSED((HEADS(1, 1), b.k_format.scale_dtype = KVPRIM_F16), ARGUMENT,
            "k_cache.format.scale_heads is 1, which only tiles of 4 bits with scales of 1 byte have");
    REFUSED((HEADS(1, 0), b.k_format.scale_stride = 4), ARGUMENT,
            "scale_stride is set, but has no meaning with scale 3: scales of heads are packed");
    REFUSED((HEADS(1, 0), b.k_format.scale_tile_stride = 1), ARGUMENT,
            "scale_tile_stride is set, but has no meaning with scale 3: scales of heads are packed");
    REFUSED(HEADS(3, 0), SIZE, "k_cache.format.scale_heads is 3, which does not divide a row's tiles, 4");
    REFUSED(HEADS(2, 1), SIZE,
            "k_cache.format.scale_heads is 2, which swizzled scales need to divide, by fours, a row's tiles, 4");
    TAKEN((HEADS(1, 0), b.d.k_cache.page_rows = 2));
    REFUSED((HEADS(1, 1), b.d.k_cache.page_rows = 2), SIZE,
            "k_cache.page_rows is 2, and scales are swizzled: no multiple of 4");
    REFUSED((HEADS(1, 1), b.d.k_cache.rows = 17), SIZE,
            "k_cache.rows is 17, and scales are swizzled: no multiple of 4");
    REFUSED((HEADS(1, 1), b.d.k_cache.page_rows = 0, b.d.k_cache.rows = 18), SIZE,
            "k_cache.rows is 18, and scales are swizzled: no multiple of 4");
    REFUSED((HEADS(4, 0), SCALES(16), b.k_format.scale_page_stride = 63), SIZE,
            "k_cache.format.scale_page_stride is 63, but what lies inside that step takes bytes: 64");
    REFUSED((HEADS(4, 1), SCALES(16), b.d.k_cache.bytes = 3 * 512 + 256 + 63), SIZE,
            "k_cache.bytes is 1855, but its scales reach 1856");
    TAKEN((HEADS(4, 1), SCALES(16), b.d.k_cache.bytes = 3 * 512 + 256 + 64));
    REFUSED((HEADS(4, 1), SCALES(16), b.d.rejected = (uint32_t *)(void *)(b.cache + 256 + 60)), OVERLAP, "rejected (");
#undef HEADS
#undef SCALES
    REFUSED((OUTER(&b.nans)), OVERLAP, "k_cache.format.nans (");
    REFUSED((OUTER(&b.rejected)), OVERLAP, "rejected (");
#undef OUTER
#undef FOUR
#undef REFUSED
#undef TAKEN
}

/* What transfers and gathers alone refuse. */
static void test_format_errors_of_transfers(void)
{
    static _Alignas(16) unsigned char cache[3][4096];
    static float rows[3][256];
    static float scales[256];
    void *layers[] = {cache[0], cache[1], cache[2] + 1}, *float_layers[] = {rows[0], (char *)rows[1] + 2, rows[2]};
    const int32_t index[4] = {0, 1, 2, 3};
    kvprim_format f = {.dtype = KVPRIM_F8E4M3, .scale = KVPRIM_SCALE_TENSOR, .scales = scales};
    kvprim_format f32 = plain_format(KVPRIM_F32);
    kvprim_transfer_desc d = transfer_of(formatted(table_of(rows, 4), &f32), formatted(table_of(cache, 4), &f), 16, 4);
    CHECK(kvprim_transfer_check(&d, NULL) == KVPRIM_OK);
    f.scale_inverse = 1;
    CHECK_ERROR(kvprim_transfer(&d), KVPRIM_ERROR_ARGUMENT,
                "src.format.scale_inverse is 1, but only a move to this side multiplies by an inverse");
    f.scale = KVPRIM_SCALE_TILE; /* where a gather ignores it */
    CHECK(kvprim_transfer_check(&d, NULL) == KVPRIM_OK);
    f = tensor_format(KVPRIM_F8E4M3, scales);
    d.same_cache = 1;
    CHECK_ERROR(kvprim_transfer(&d), KVPRIM_ERROR_ARGUMENT, "same_cache is 1, but elements of src become those of dst");
    d.same_cache = 0, d.layers = 3;
    CHECK_ERROR(kvprim_transfer(&d), KVPRIM_ERROR_ARGUMENT,
                "src.format.scale_layer_stride is 0, and there are several layers: set it, or KVPRIM_SCALES_SHARED");
    kvprim_transfer_desc empty = d; /* no scale is read */
    empty.src = formatted(table_of(NULL, 0), &f), empty.src_index = index, empty.index_type = KVPRIM_I32;
    CHECK(kvprim_transfer_check(&empty, NULL) == KVPRIM_OK);
    f.scale_layer_stride = 12, f.scales_bytes = 27;
    CHECK_ERROR(kvprim_transfer(&d), KVPRIM_ERROR_SIZE, "src.format.scales_bytes is 27, but its scales reach 28");
    f.scales_bytes = 28;
    CHECK(kvprim_transfer_check(&d, NULL) == KVPRIM_OK);
    f.scale_layer_stride = KVPRIM_SCALES_SHARED, f.scales_bytes = 4;
    d.dst_layers = float_layers;
    CHECK_ERROR(kvprim_transfer(&d), KVPRIM_ERROR_ARGUMENT, "dst.data of a layer (");
    float_layers[1] = rows[1];
    CHECK(kvprim_transfer_check(&d, NULL) == KVPRIM_OK);
    d.src_layers = layers;
    CHECK(kvprim_transfer_check(&d, NULL) == KVPRIM_OK);
    f.scales = NULL, f.scale_offset = 64, f.scale_layer_stride = f.scales_bytes = 0;
    CHECK_ERROR(kvprim_transfer(&d), KVPRIM_ERROR_ARGUMENT, "src.data of a layer (");
    d.src_layers = NULL, d.src_layer_stride = 66;
    CHECK_ERROR(kvprim_transfer(&d), KVPRIM_ERROR_SIZE, "src_layer_stride is 66, no multiple");
    d.src_layer_stride = 68, d.src.bytes = 3 * 68 - 1;
    CHECK_ERROR(kvprim_transfer(&d), KVPRIM_ERROR_SIZE, "src.bytes is 203, but its scales reach 204");
    d.src.bytes = 0;
    CHECK(kvprim_transfer_check(&d, NULL) == KVPRIM_OK);
    d.dst_layers = NULL, d.dst_layer_stride = 258;
    CHECK_ERROR(kvprim_transfer(&d), KVPRIM_ERROR_SIZE, "dst_layer_stride is 258, no multiple");

    /* scales that are read lie in what is written; layers' scales that overlap are found where they are written */
    d = transfer_of(formatted(table_of(rows, 4), &f32), formatted(table_of(cache, 4), &f), 16, 4);
    f = tensor_format(KVPRIM_F8E4M3, &rows[0][5]);
    CHECK_ERROR(kvprim_transfer(&d), KVPRIM_ERROR_OVERLAP, "src.format.scales (");
    f = (kvprim_format){.dtype = KVPRIM_F8E4M3, .scale = KVPRIM_SCALE_TILE, .scales = scales, .scale_layer_stride = 12};
    d = transfer_of(formatted(table_of(cache, 4), &f), formatted(table_of(rows, 4), &f32), 64, 4);
    d.layers = 3;
    CHECK_ERROR(kvprim_transfer(&d), KVPRIM_ERROR_SIZE,
                "dst.format.scale_layer_stride is 12, but what lies inside that step takes bytes: 16");
    f.scale_layer_stride = 16;
    CHECK(kvprim_transfer_check(&d, NULL) == KVPRIM_OK);
    layers[2] = cache[2], d.dst_layers = layers, f.scales = cache[1] + 60;
    CHECK_ERROR(kvprim_transfer(&d), KVPRIM_ERROR_OVERLAP, "a scale of dst (");
    f.scales = cache[1] + 64;
    CHECK(kvprim_transfer_check(&d, NULL) == KVPRIM_OK);
    d.dst_layers = NULL, f.scales = NULL, f.scale_layer_stride = 0, f.scale_offset = 64, f.scale_stride = 4;
    kvprim_transfer_desc resolved;
    CHECK(kvprim_transfer_check(&d, &resolved) == KVPRIM_OK && resolved.dst_layer_stride == 80);
    d.dst_layer_stride = 76;
    CHECK_ERROR(kvprim_transfer(&d), KVPRIM_ERROR_OVERLAP, "overlaps a row of dst (");
    d.dst_layer_stride = 1024, d.rejected = (uint32_t *)(void *)(cache[0] + 512); /* between layers */
    CHECK(kvprim_transfer_check(&d, NULL) == KVPRIM_OK);
    d.rejected = (uint32_t *)(void *)(cache[0] + 1024 + 76);
    CHECK_ERROR(kvprim_transfer(&d), KVPRIM_ERROR_OVERLAP, "rejected (");
    d.rejected = NULL;
    kvprim_transfer_desc whole = d; /* its layers of scales hold whole pages */
    kvprim_format own = f;
    kvprim_move move;
    own.scales = scales, own.scale_offset = 0, own.scale_page_stride = 4;
    whole.dst.format = &own, whole.dst.page_rows = 8;
    CHECK(kvprim_transfer_moves(&whole, &move) == KVPRIM_OK && move.dst.format.scale_layer_stride == 32);
    d.dst_layer_stride = 0, d.dst.stride = 24; /* scales inside rows, and inside pages, need no room after the last */
    f.scale_offset = 16, f.scale_stride = 0, d.dst.bytes = 3 * 4 * 24;
    CHECK(kvprim_transfer_check(&d, &resolved) == KVPRIM_OK && resolved.dst_layer_stride == 4 * 24);
    d.dst.stride = 0, d.dst.page_rows = 2, d.dst.page_stride = 40, f.scale_offset = 32, f.scale_stride = 4;
    d.dst.bytes = 3 * 2 * 40;
    CHECK(kvprim_transfer_check(&d, &resolved) == KVPRIM_OK && resolved.dst_layer_stride == 2 * 40);
    d.dst.bytes = 0, d.dst.page_rows = 0, d.dst.page_stride = 999, f.scale_offset = 64; /* no pages: it means nothing */
    CHECK(kvprim_transfer_check(&d, &resolved) == KVPRIM_OK && resolved.dst_layer_stride == 80);

    /* a scale behind rows of an odd size, which no layer follows */
    f = (kvprim_format){.dtype = KVPRIM_F8E4M3, .scale = KVPRIM_SCALE_TENSOR, .scale_offset = 16};
    d = transfer_of(formatted(table_of(rows, 5), &f32), formatted(table_of(cache, 5), &f), 3, 5);
    CHECK(kvprim_transfer_check(&d, NULL) == KVPRIM_OK);
    d.layers = 2;
    CHECK(kvprim_transfer_check(&d, &resolved) == KVPRIM_OK && resolved.src_layer_stride == 20);
    d.src_layer_stride = 21;
    CHECK_ERROR(kvprim_transfer(&d), KVPRIM_ERROR_SIZE, "src_layer_stride is 21, no multiple");
    f.scale_offset = 4; /* what is read may overlap */
    d.src_layer_stride = 20;
    CHECK(kvprim_transfer_check(&d, NULL) == KVPRIM_OK);
    f.scale_offset = 0; /* but where the first element lies is no scale */
    CHECK_ERROR(kvprim_transfer(&d), KVPRIM_ERROR_NULL, "src.format.scales is NULL, and scale_offset is 0");

#if UINTPTR_MAX == UINT64_MAX
    /* a row of 2^30 scales of 4 bytes, of which the last is the counter; nothing is at these addresses */
    const uintptr_t far = (uintptr_t)1 << 40;
    f = (kvprim_format){.dtype = KVPRIM_F8E4M3, .scale = KVPRIM_SCALE_TILE, .tile = 1, .scales = (void *)far};
    d = transfer_of(formatted(table_of((void *)(2 * far), 1), &f), formatted(table_of((void *)(3 * far), 1), &f32),
                    (int64_t)1 << 32, 1);
    CHECK(kvprim_transfer_check(&d, NULL) == KVPRIM_OK);
    d.rejected = (uint32_t *)(far + ((uintptr_t)1 << 32) - 4);
    CHECK_ERROR(kvprim_transfer_check(&d, NULL), KVPRIM_ERROR_OVERLAP, "rejected (");

    /* as many layers as there may be, in turn in each row, and their scales between them: found to lie apart. With
       other strides that would take half a minute, and is refused */
    enum { most = KVPRIM_MAX_LAYERS };
    static void *many[most];
    for (int l = 0; l < most; l++)
        many[l] = (void *)(far + (uintptr_t)l * 128);
    f = (kvprim_format){.dtype = KVPRIM_F8E4M3, .scale = KVPRIM_SCALE_TILE, .scale_dtype = KVPRIM_F8E8M0};
    f.scales = (void *)(far + 100), f.scale_stride = most * 128, f.scale_layer_stride = 128;
    d = transfer_of(formatted(table_of(NULL, 60000), &f), formatted(table_of((void *)(far * 8), 60000), &f32), 256,
                    60000);
    d.layers = most, d.dst_layers = many, d.dst.stride = most * 128;
    CHECK(kvprim_transfer_check(&d, NULL) == KVPRIM_OK);
    d.dst.stride = 128, f.scale_stride = 256, f.scale_layer_stride = 256 * 60000;
    CHECK_ERROR(kvprim_transfer_check(&d, NULL), KVPRIM_ERROR_OVERLAP, "a scale of dst (");
#endif

    /* a gather of nothing looks at nothing */
    kvprim_gather_desc g = gather_of(table_of(rows, 4), formatted(table_of(cache, 4), &f), 7, index, 0);
    CHECK(kvprim_gather(&g) == KVPRIM_OK);
    g.count = 1;
    CHECK_ERROR(kvprim_gather(&g), KVPRIM_ERROR_ARGUMENT, "kvprim_gather: src.format is set, but dst.format is NULL");
}

/* Swizzled scales of 2 heads in pages of 8 rows lie where the definition says, and a gather finds them. A row's scales
   are among those of four rows, of which a store uses all. */
static void test_swizzled(void)
{
    enum { rows = 24, page = 8, heads = 2, tiles = 8, of_row = heads * tiles * 16 };
    static uint16_t k[rows][of_row], linear_back[rows][of_row], back[rows][of_row];
    static uint8_t cache[2][rows][of_row / 2], scales[2][rows / page][heads][page][tiles];
    int32_t slot[rows];
    kvprim_format bf16 = plain_format(KVPRIM_BF16);
    kvprim_format f = {.dtype = KVPRIM_F4E2M1, .scale = KVPRIM_SCALE_TILE, .tile = 16, .scale_dtype = KVPRIM_F8E4M3};
    f.scale_heads = heads;
    for (int r = 0; r < rows; r++) {
        slot[r] = (r * 7 + 3) % rows;
        for (int e = 0; e < of_row; e++)
            k[r][e] = (uint16_t)oracle_encode(KVPRIM_BF16, case_scale(below));
    }
    for (int order = 0; order < 2; order++) {
        f.scale_order = order, f.scales = scales[order];
        kvprim_table t = formatted(strided_table(cache[order], rows, of_row / 2), &f);
        t.page_rows = page;
        const kvprim_store_desc store = {.k_cache = t,
                                         .k = formatted(table_of(k, rows), &bf16),
                                         .k_bytes = of_row * 2,
                                         .slot = slot,
                                         .slot_type = KVPRIM_I32,
                                         .count = rows};
        CHECK(kvprim_store(&store) == KVPRIM_OK);
        const kvprim_gather_desc g =
            gather_of(formatted(table_of(order ? back : linear_back, rows), &bf16), t, of_row / 2, slot, rows);
        CHECK(kvprim_gather(&g) == KVPRIM_OK);
    }
    CHECK(memcmp(cache[0], cache[1], sizeof cache[0]) == 0 && memcmp(back, linear_back, sizeof back) == 0);
    for (int p = 0; p < rows / page; p++)
        for (int h = 0; h < heads; h++)
            for (int t = 0; t < page; t++)
                for (int s = 0; s < tiles; s++)
                    CHECK(scales[0][p][h][t][s] ==
                          scales[1][p][h][4 * (t / 4) + s / (tiles / 4)][s % (tiles / 4) * 4 + t % 4]);
    kvprim_transfer_desc d = transfer_of(formatted(strided_table(cache[1], page, of_row / 2), &f),
                                         formatted(table_of(k, 1), &bf16), of_row * 2, 1);
    d.rejected = (uint32_t *)(void *)&scales[1][0][1][3][4]; /* row 0 has the first of these 4 bytes */
    CHECK_ERROR(kvprim_transfer(&d), KVPRIM_ERROR_OVERLAP, "rejected (");
    d.rejected = (uint32_t *)(void *)scales[1][1];
    CHECK(kvprim_transfer_check(&d, NULL) == KVPRIM_OK);
}

/* V that is like K except for one number, or begins elsewhere, is checked as if it were alone. */
static void check_v_beside_k(const kvprim_store_desc *d)
{
    kvprim_move both[2], one[2];
    kvprim_store_desc resolved;
    kvprim_store_desc v = {.k_cache = d->v_cache, .k = d->v, .k_bytes = d->v_bytes, .slot = d->slot, .count = d->count};
    v.slot_type = d->slot_type;
    memset(both, 0xa5, sizeof both);
    memset(one, 0xa5, sizeof one);
    const kvprim_status status = kvprim_store_moves(&v, one);
    CHECK(kvprim_store_moves(d, both) == status && kvprim_store_check(d, &resolved) == status);
    CHECK(status != KVPRIM_OK || (resolved.v_cache.format == d->v_cache.format && resolved.v.format == d->v.format));
    CHECK(status != KVPRIM_OK || (memcmp(&both[1].dst, &one[0].dst, sizeof one[0].dst) == 0 &&
                                  memcmp(&both[1].src, &one[0].src, sizeof one[0].src) == 0));
}

static void test_v_like_k(void)
{
    static bad_store b;
    static const int64_t values[] = {-1, 0, 1, 2, 4, 8, 15, 16, 64, 128, 256, 512, 520, 1024, INT64_MAX};
    int64_t *const numbers[] = {&b.d.v_cache.stride,
                                &b.d.v_cache.page_rows,
                                &b.d.v_cache.page_stride,
                                &b.d.v_cache.head_stride,
                                &b.d.v_cache.bytes,
                                &b.d.v_cache.reserved,
                                &b.d.v.rows,
                                &b.d.v.stride,
                                &b.d.v.page_rows,
                                &b.d.v.page_stride,
                                &b.d.v.bytes,
                                &b.d.v.reserved,
                                &b.d.v_bytes,
                                &b.v_format.tile,
                                &b.v_format.scale_offset,
                                &b.v_format.scale_tile_stride,
                                &b.v_format.scale_stride,
                                &b.v_format.scale_page_stride,
                                &b.v_format.scale_layer_stride,
                                &b.v_format.scales_bytes};
    int32_t *const small[] = {&b.d.v_cache.heads,        &b.d.v_cache.reserved_heads, &b.v_format.scale_power_of_two,
                              &b.v_format.scale_inverse, &b.v_format.scale_order,     &b.v_format.scale_heads};
    const int n = sizeof numbers / sizeof *numbers, m = sizeof small / sizeof *small, more = 9;
    for (int own = 0; own < 2; own++)
        for (int field = 0; field < n + m + more; field++)
            for (size_t k = 0; k < sizeof values / sizeof *values; k++) {
                reset_bad_store(&b);
                if (own)
                    b.k_format.scales = b.outside, b.k_format.scale_offset = 0;
                b.v_format = b.k_format;
                b.v_format.scales = own ? b.outside + 4096 : NULL, b.v_format.nans = &b.v_nans;
                if (field < n)
                    *numbers[field] = values[k];
                else if (field < n + m)
                    *small[field - n] = (int32_t)(values[k] % 1024);
                switch (field - n - m) {
                case 0:
                    b.d.v_cache.data = b.v_cache + k;
                    break;
                case 1:
                    b.d.v.data = (char *)b.v + k;
                    break;
                case 2:
                    b.v_format.scales = own == (k > 0) ? b.outside + 4096 + k : NULL;
                    break;
                case 3:
                    b.d.v_cache.format = NULL;
                    break;
                case 4:
                    b.d.v.format = k % 2 ? &b.bf16 : NULL;
                    break;
                case 5:
                    b.v_format.dtype = (kvprim_dtype)(16 + k);
                    break;
                case 6:
                    b.v_format.scale = (kvprim_scale_kind)(k % 5), b.v_format.tile = k > 4 ? 16 : 0;
                    break;
                case 7:
                    b.v_format.scale_dtype = (kvprim_dtype)(16 + k);
                    break;
                case 8:
                    b.v_format.scale_min = k % 2 ? 1 : 1e-40f;
                    break;
                default:
                    break;
                }
                check_v_beside_k(&b.d);
            }
}

static void test_conversions_for_isa(void)
{
    test_every_value();
    test_edges_of_rounding();
    test_computed_scales();
    test_random_conversions();
    test_store_conversions();
}

static void test_conversions(void)
{
    for_each_isa(test_conversions_for_isa);
}

static void run_conversions(void)
{
    run("conversions: values, scales, layouts", test_conversions);
    run("conversions: moves", test_converting_moves);
    run("conversions: defaults of formats", test_side_format);
    run("conversions: presets", test_presets);
    run("conversions: swizzled scales", test_swizzled);
    run("conversions: V like K", test_v_like_k);
    run("conversions: bad formats", test_format_errors);
    run("conversions: bad formats of transfers", test_format_errors_of_transfers);
}

#endif
