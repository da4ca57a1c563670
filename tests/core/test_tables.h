/* SPDX-License-Identifier: MIT */
/* Transfers whose layers only the executing side reads, for test_kvprim.c. */
#ifndef TEST_TABLES_H
#define TEST_TABLES_H

enum { listed_layers = 5, listed_rows = 24, listed_count = 10, listed_bytes = 96, listed_room = 8192 };

/* A side with layers anywhere, in random order, in memory of its own. */
typedef struct listed_side {
    unsigned char memory[listed_layers * listed_room];
    void *layers[listed_layers];
    kvprim_table t; /* with every field given, and layer 0's memory */
    int32_t index[listed_count];
} listed_side;

/* Rows packed; strided; pages of token-major rows; pages of head-major rows; heads alone. */
static kvprim_table listed_table(int n)
{
    kvprim_table t = table_of(NULL, listed_rows);
    t.stride = n == 1 ? 131 : n == 3 ? 33 : n == 4 ? 24 : listed_bytes;
    t.page_rows = n == 2 || n == 3 ? 6 : 0;
    t.heads = n == 3 ? 3 : n == 4 ? 4 : 1;
    t.head_stride = n == 3 ? 6 * 33 : n == 4 ? listed_rows * 24 : listed_bytes;
    t.page_stride = n == 2 ? 6 * listed_bytes + 13 : n == 3 ? 3 * 6 * 33 + 7 : 0;
    return t;
}

static void make_listed_side(listed_side *s, int n, int shift)
{
    fill(s->memory, sizeof s->memory);
    s->t = listed_table(n);
    for (int l = 0; l < listed_layers; l++)
        s->layers[(2 * l + 1) % listed_layers] = s->memory + l * listed_room + (l % 2 ? shift : 16 * l);
    for (int i = 0; i < listed_count; i++)
        s->index[i] = i == 3 ? -1 : i == 7 ? listed_rows : (int)((7 * i + n) % listed_rows); /* 7 i: no row twice */
}

/* What kvprim_transfer is to do: byte by byte. */
static uint32_t expect_listed(listed_side *want, const listed_side *dst, const listed_side *src)
{
    uint32_t past = 0;
    *want = *dst;
    for (int l = 0; l < listed_layers; l++)
        for (int i = 0; i < listed_count; i++) {
            const int32_t to = dst->index[i], from = src->index[i];
            kvprim_table a = dst->t, b = src->t;
            a.data = want->memory + ((unsigned char *)dst->layers[l] - dst->memory), b.data = src->layers[l];
            past += l == 0 && (to >= listed_rows || from >= listed_rows);
            for (int byte = 0; to >= 0 && to < listed_rows && from >= 0 && from < listed_rows && byte < listed_bytes;
                 byte++)
                *at(&a, listed_bytes, to, byte) = *at(&b, listed_bytes, from, byte);
        }
    return past;
}

/* how: bit 0 device layers of dst, bit 1 of src. */
static kvprim_transfer_desc listed_desc(listed_side *dst, listed_side *src, int how, uint32_t *rejected)
{
    kvprim_transfer_desc d = transfer_of(dst->t, src->t, listed_bytes, listed_count);
    d.layers = listed_layers;
    *(how & 1 ? &d.dst_device_layers : &d.dst_layers) = dst->layers;
    *(how & 2 ? &d.src_device_layers : &d.src_layers) = src->layers;
    d.dst_index = dst->index, d.src_index = src->index, d.index_type = KVPRIM_I32;
    d.rejected = rejected;
    return d;
}

static void test_device_layers(void)
{
    static listed_side dst, src, want;
    for (int n = 0; n < 5 * 5 * 4; n++) {
        uint32_t rejected = 0;
        make_listed_side(&dst, n % 5, 3);
        make_listed_side(&src, n / 5 % 5, n % 7);
        kvprim_transfer_desc resolved, d = listed_desc(&dst, &src, n / 25, &rejected);
        d.host_index = n % 2; /* the CPU's indices are always the host's */
        kvprim_move m;
        CHECK(kvprim_transfer_check(&d, &resolved) == KVPRIM_OK && kvprim_transfer_check(&resolved, NULL) == KVPRIM_OK);
        uint32_t past = expect_listed(&want, &dst, &src);
        CHECK(kvprim_transfer(&d) == KVPRIM_OK && rejected == past);
        CHECK(memcmp(dst.memory, want.memory, sizeof dst.memory) == 0);
        CHECK(kvprim_transfer_moves(&d, &m) == KVPRIM_OK);
        if (n / 25 & 1)
            CHECK(!kvprim_side_layer(&m.dst, 2));
        void *const first = src.layers[0], *const last = dst.layers[4]; /* a move reads the arrays when it runs */
        src.layers[0] = src.layers[2], src.layers[2] = first;
        dst.layers[4] = dst.layers[1], dst.layers[1] = last;
        past += expect_listed(&want, &dst, &src);
        CHECK(kvprim_cpu_move(&m, 1) == KVPRIM_OK && rejected == past);
        CHECK(memcmp(dst.memory, want.memory, sizeof dst.memory) == 0);
    }
}

/* Copies rows inside one cache. */
static void test_same_device_layers(void)
{
    static listed_side cache, want;
    static const int32_t to[] = {7, 2, 11}, from[] = {0, 0, 5};
    make_listed_side(&cache, 2, 5);
    want = cache;
    for (int l = 0; l < listed_layers; l++)
        for (int i = 0; i < 3; i++)
            for (int byte = 0; byte < listed_bytes; byte++) {
                kvprim_table t = cache.t;
                t.data = want.memory + ((unsigned char *)cache.layers[l] - cache.memory);
                *at(&t, listed_bytes, to[i], byte) = *at(&t, listed_bytes, from[i], byte);
            }
    kvprim_transfer_desc d = listed_desc(&cache, &cache, 3, NULL);
    d.dst_index = to, d.src_index = from, d.count = 3;
    CHECK_ERROR(kvprim_transfer(&d), KVPRIM_ERROR_OVERLAP, "to copy rows inside one cache set same_cache");
    d.same_cache = 1;
    CHECK(kvprim_transfer(&d) == KVPRIM_OK && memcmp(cache.memory, want.memory, sizeof cache.memory) == 0);
    void *other[listed_layers];
    memcpy(other, cache.layers, sizeof other);
    d.src_device_layers = other;
    CHECK_ERROR(kvprim_transfer(&d), KVPRIM_ERROR_ARGUMENT, "same_cache is 1, but dst_device_layers is");
    d.src_device_layers = NULL, d.src_layers = cache.layers;
    CHECK_ERROR(kvprim_transfer(&d), KVPRIM_ERROR_ARGUMENT, "same_cache is 1, but dst_device_layers is");
    CHECK(memcmp(cache.memory, want.memory, sizeof cache.memory) == 0);
}

/* What a table says its memory has is that at each pointer. */
static void test_device_layer_bounds(void)
{
    static listed_side dst, src;
    uint32_t rejected = 0;
    make_listed_side(&dst, 0, 0);
    make_listed_side(&src, 0, 0);
    const kvprim_transfer_desc good = listed_desc(&dst, &src, 3, &rejected);
    kvprim_transfer_desc d = good;
    d.dst.bytes = listed_rows * listed_bytes; /* of the memory at each pointer */
    d.dst.data = d.src.data = &d;             /* ignored */
    CHECK(kvprim_transfer(&d) == KVPRIM_OK && rejected > 0);
    d = good;
    d.layers = 1, d.src_device_layers = src.layers + 1, d.dst_device_layers = NULL, d.dst.data = dst.layers[2];
    d.dst.bytes = d.src.bytes = listed_rows * listed_bytes;
    CHECK(kvprim_transfer(&d) == KVPRIM_OK);
    CHECK(memcmp((char *)dst.layers[2] + dst.index[0] * listed_bytes,
                 (char *)src.layers[1] + src.index[0] * listed_bytes, listed_bytes) == 0);
    d.src.bytes = 0, d.src.rows = (int64_t)1 << 8 * (sizeof(void *) - 2); /* nobody knows where they lie */
    CHECK(kvprim_transfer_check(&d, NULL) == KVPRIM_OK);
}

static void test_tables(void)
{
    test_device_layers();
    test_same_device_layers();
    test_device_layer_bounds();
}

#endif /* TEST_TABLES_H */
