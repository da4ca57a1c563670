/* SPDX-License-Identifier: MIT */
/* Calls of kvprim_all_reduce_norm with tensors of any place, and what they must write: the host's twin says so, and
   norm_oracle.h must agree with it. For tests with and without a GPU; include it after harness.h. */
#ifndef NORM_CASES_H
#define NORM_CASES_H

#include "norm_oracle.h"

/* All tensors of a rank lie in one image, which is copied to the GPU and back: so what must not change is seen, too. */
enum {
    norm_send,
    norm_residual,
    norm_weight,
    norm_sum,
    norm_residual_out,
    norm_out,
    norm_quantised,
    norm_scale,
    norm_tensors,
    norm_period = 23 /* after so many tokens, the values repeat */
};
static const size_t norm_absent = (size_t)-1;

typedef struct norm_case {
    kvprim_norm_desc d;      /* without pointers */
    size_t at[norm_tensors]; /* where in the image, or norm_absent */
    size_t bytes;            /* of the image */
    uint64_t seed;           /* of the values */
    int plain;               /* 1: small integers, whose sum is exact in any order. 0: anything, NaN too */
    int ones;                /* 1: some words of 32 bits, too, are all ones */
    uint16_t integers[16];   /* -5 to 10 */
} norm_case;

static inline int64_t norm_stride(const norm_case *c, int64_t stride)
{
    return stride ? stride : c->d.hidden;
}

/* Places a tensor after those before it, with 0 to 7 times 16 bytes between them. */
static inline size_t norm_place(norm_case *c, uint64_t bytes, uint64_t draw)
{
    const size_t at = (c->bytes + 15) / 16 * 16 + draw % 8 * 16;
    c->bytes = at + (size_t)bytes;
    return at;
}

static inline void norm_place_output(norm_case *c, int tensor, int64_t *stride, uint64_t draw)
{
    const int64_t inputs[] = {c->d.send_stride, c->d.residual_stride};
    const int in_place = (int)(draw >> 8 & 3); /* of send, of residual, apart */
    const int64_t element = tensor == norm_quantised ? 1 : 2;
    const bool may = in_place < 2 && tensor != norm_quantised && (in_place == 0 || tensor != norm_sum) &&
                     c->at[in_place] != norm_absent;
    bool taken = false;
    for (int other = norm_sum; other < tensor; other++)
        taken = taken || (may && c->at[other] == c->at[in_place]);
    if (may && !taken) {
        c->at[tensor] = c->at[in_place], *stride = inputs[in_place];
        return;
    }
    *stride = draw >> 10 & 1 ? c->d.hidden + 8 * (int64_t)(draw >> 12 & 7) : 0;
    c->at[tensor] = norm_place(c, (uint64_t)(c->d.tokens * norm_stride(c, *stride) * element), draw >> 16);
}

/* Words of 32 bits that the scales of a token take. */
static inline int64_t norm_words(const kvprim_norm_desc *d)
{
    const int64_t groups = d->scale_group ? d->hidden / d->scale_group : 1;
    return d->scale_dtype == KVPRIM_F8E8M0 ? (groups + 3) / 4 : groups;
}

static inline int64_t norm_scale_step(const kvprim_norm_desc *d)
{
    return d->scale_stride ? d->scale_stride : norm_words(d);
}

/* Words from the first scale to the last. */
static inline int64_t norm_scales(const kvprim_norm_desc *d)
{
    const int64_t step = d->scale_group_stride ? d->scale_group_stride : 1;
    const int64_t tokens = d->scale_group || d->scale_per_token ? d->tokens : 1;
    return (tokens - 1) * norm_scale_step(d) + (norm_words(d) - 1) * step + 1;
}

/* Scales of groups, in half of the cases that can have them: rows or columns, packed or with gaps. */
static inline void norm_draw_groups(kvprim_norm_desc *d, uint64_t draw, uint64_t own_draw)
{
    if (d->hidden % 128 || draw % 2)
        return;
    d->scale_group = 128, d->scale_per_token = 0;
    d->scale_power_of_two = draw >> 1 & 1;
    d->scale_dtype = draw >> 2 & 1 ? KVPRIM_F8E8M0 : draw >> 3 & 1 ? KVPRIM_F32 : (kvprim_dtype)0;
    if (own_draw & 1)
        d->scale_stride = norm_words(d) + (int64_t)(own_draw >> 2 & 3);
    if (own_draw & 2)
        d->scale_stride = 1, d->scale_group_stride = d->tokens + (int64_t)(own_draw >> 2 & 3);
}

/* A case with so many tokens. `shared_draw` says what must be the same on every rank; `own_draw` where this rank's
   tensors lie, and which outputs there are. */
static inline norm_case norm_draw(kvprim_dtype dtype, int64_t tokens, int64_t hidden, int plain, uint64_t shared_draw,
                                  uint64_t own_draw)
{
    static const float eps[] = {1e-6f, 0, 1e-5f, 0.25f}, least[] = {0, 0.001f, 1e-7f, 3};
    const uint64_t a = hash_u64(shared_draw), b = hash_u64(own_draw ^ a), f = hash_u64(b);
    norm_case c;
    memset(&c, 0, sizeof c);
    memset(c.at, 0xff, sizeof c.at);
    c.seed = a, c.plain = plain;
    for (int k = 0; k < 16; k++)
        c.integers[k] = (uint16_t)float_to(format_of(dtype), (float)(k - 5));
    c.d.dtype = dtype, c.d.tokens = tokens, c.d.hidden = hidden, c.d.eps = eps[a & 3];
    c.d.weight_plus_one = (int32_t)(a >> 2 & 1);
    c.d.send_stride = b & 1 ? hidden + 8 * (int64_t)(b >> 1 & 7) : 0;
    c.at[norm_send] = norm_place(&c, (uint64_t)(tokens * norm_stride(&c, c.d.send_stride)) * 2, b >> 4);
    if (a >> 3 & 3) {
        c.d.residual_stride = b >> 7 & 1 ? hidden + 8 * (int64_t)(b >> 8 & 7) : hidden;
        c.at[norm_residual] = norm_place(&c, (uint64_t)(tokens * c.d.residual_stride) * 2, b >> 11);
    }
    c.at[norm_weight] = norm_place(&c, (uint64_t)hidden * 2, b >> 14);
    const int outputs = (int)(b >> 17 & 3); /* of out and quantised: both, both, out, quantised */
    if (b >> 19 & 1)
        norm_place_output(&c, norm_sum, &c.d.sum_stride, hash_u64(f + 1));
    if (b >> 20 & 3)
        norm_place_output(&c, norm_residual_out, &c.d.residual_out_stride, hash_u64(f + 2));
    if (outputs != 3)
        norm_place_output(&c, norm_out, &c.d.out_stride, hash_u64(f + 3));
    if (outputs != 2) {
        norm_place_output(&c, norm_quantised, &c.d.quantised_stride, hash_u64(f + 4));
        c.d.scale_per_token = (int32_t)(a >> 5 & 1);
        c.d.scale_min = least[a >> 6 & 3];
        norm_draw_groups(&c.d, a >> 8, b >> 26);
        c.at[norm_scale] = norm_place(&c, 4 * (uint64_t)norm_scales(&c.d), b >> 22);
    }
    c.bytes = (c.bytes + 31) / 16 * 16; /* at least 16 bytes after the last one */
    return c;
}

/* What engines ask for, which has a kernel of its own: a residual, residual_out, out, and nothing else. */
static inline norm_case norm_draw_usual(kvprim_dtype dtype, int64_t tokens, int64_t hidden, int plain,
                                        uint64_t shared_draw, uint64_t own_draw)
{
    for (;; own_draw++) {
        const norm_case c = norm_draw(dtype, tokens, hidden, plain, shared_draw, own_draw);
        if (c.d.weight_plus_one || c.at[norm_residual] == norm_absent)
            shared_draw++; /* the same for all ranks */
        else if (c.at[norm_sum] == norm_absent && c.at[norm_residual_out] != norm_absent &&
                 c.at[norm_out] != norm_absent && c.at[norm_quantised] == norm_absent)
            return c;
    }
}

/* The description for an image at `base`. */
static inline kvprim_norm_desc norm_desc_at(const norm_case *c, char *base)
{
    kvprim_norm_desc d = c->d;
    void *p[norm_tensors];
    for (int k = 0; k < norm_tensors; k++)
        p[k] = c->at[k] == norm_absent ? NULL : base + c->at[k];
    d.send = p[norm_send], d.residual = p[norm_residual], d.weight = p[norm_weight];
    d.sum = p[norm_sum], d.residual_out = p[norm_residual_out], d.out = p[norm_out];
    d.quantised = p[norm_quantised], d.scale = (float *)p[norm_scale];
    return d;
}

/* Bits of a number of either sign from 2^(power - 4) to 2^(power + 4). */
static inline uint16_t norm_number(kvprim_dtype dtype, uint64_t h, int power)
{
    const int fraction_bits = dtype == KVPRIM_BF16 ? 7 : 10, bias = dtype == KVPRIM_BF16 ? 127 : 15;
    const uint64_t exponent = (uint64_t)(bias + power - 4) + h % 8;
    return (uint16_t)((h >> 8 & 0x8000) | exponent << fraction_bits | (h >> 32 & ((1u << fraction_bits) - 1)));
}

/* An addend's or the residual's (rank -1) element. Most tokens have usual numbers; others zeros of both signs, tiny or
   huge numbers, whose squares bf16 takes out of fp32's range, denormals, or one NaN, of all ones, or infinity among
   them. */
static inline uint16_t norm_value(const norm_case *c, int rank, int64_t token, int64_t i)
{
    const uint64_t of_token = hash_u64(c->seed + (uint64_t)(token % norm_period));
    const uint64_t h = hash_u64(of_token + (uint64_t)(rank + 2) * 0x100000000u + (uint64_t)i);
    const int kind = (int)(of_token % 16), wide = c->d.dtype == KVPRIM_BF16;
    if (c->plain)
        return c->integers[h >> 40 & 15];
    if (c->ones && kind % 4 == 3 && hash_u64(of_token * 31 + (uint64_t)(rank + 2) + (uint64_t)i / 2 * 16) % 64 == 0)
        return 0xffff;
    if (kind == 0)
        return (uint16_t)(h & 0x8000);
    if (kind < 3)
        return norm_number(c->d.dtype, h, kind == 1 ? (wide ? -76 : -9) : (wide ? 66 : 10));
    if (kind < 5 && i == (int64_t)(of_token >> 8) % c->d.hidden && rank == 0)
        return kind == 3 ? 0xffff : (uint16_t)float_to(format_of(c->d.dtype), -(float)INFINITY);
    if (kind == 5)
        return (uint16_t)(h & (wide ? 0x80ff : 0x87ff));
    return norm_number(c->d.dtype, h, 0);
}

static inline void norm_fill_tensor(const norm_case *c, int rank, char *to, int64_t stride)
{
    for (int64_t token = 0; token < c->d.tokens; token++) {
        uint16_t *const row = (uint16_t *)(void *)to + token * norm_stride(c, stride);
        for (int64_t i = 0; i < c->d.hidden && token < norm_period; i++)
            row[i] = norm_value(c, rank, token, i);
        if (token >= norm_period)
            memcpy(row, row - norm_period * norm_stride(c, stride), (size_t)c->d.hidden * 2);
    }
}

/* The image as it is before the call; what is no input is 0xa5. Some weights have any bits: NaN, infinity. */
static inline void norm_fill(const norm_case *c, int rank, char *image)
{
    memset(image, 0xa5, c->bytes);
    norm_fill_tensor(c, rank, image + c->at[norm_send], c->d.send_stride);
    if (c->at[norm_residual] != norm_absent)
        norm_fill_tensor(c, -1, image + c->at[norm_residual], c->d.residual_stride);
    for (int64_t i = 0; i < c->d.hidden; i++) {
        const uint64_t h = hash_u64(c->seed * 3 + (uint64_t)i);
        const uint16_t w = c->seed % 8 == 0 && i % 97 == 3 ? (uint16_t)h : norm_number(c->d.dtype, h, -1);
        memcpy(image + c->at[norm_weight] + i * 2, &w, 2);
    }
    if (c->at[norm_scale] != norm_absent && !c->d.scale_per_token && !c->d.scale_group) {
        /* from 1e-25f on: see kvpn_norm_divide() */
        static const float scales[] = {0.003f, 0.25f, 0.0477f, 1e-6f, 1e-25f,   3e30f,
                                       1e-40f, -0.4f, -700,    0,     INFINITY, NAN};
        const float scale = scales[c->seed / 8 % (sizeof scales / sizeof *scales)];
        memcpy(image + c->at[norm_scale], &scale, 4);
    }
}

/* How many bytes the call writes of each token to one of its outputs. *step: from one token to the next. */
static inline size_t norm_written(const norm_case *c, int output, int64_t *step)
{
    const int64_t strides[] = {c->d.sum_stride, c->d.residual_out_stride, c->d.out_stride, c->d.quantised_stride};
    const int64_t element = output < norm_quantised ? 2 : 1;
    *step = output == norm_scale ? 4 : element * norm_stride(c, strides[output - norm_sum]);
    return output == norm_scale ? (c->d.scale_per_token ? 4 : 0) : (size_t)(element * c->d.hidden);
}

/* Copies each output's tokens from number `first` on from one image, `back` tokens before them, to another. */
static inline void norm_copy_outputs(const norm_case *c, char *to, const char *from, int64_t first, int64_t back)
{
    for (int output = norm_sum; output < norm_tensors; output++) {
        int64_t step;
        const size_t bytes = norm_written(c, output, &step);
        for (int64_t token = first; token < c->d.tokens && c->at[output] != norm_absent; token++)
            memcpy(to + c->at[output] + token * step, from + c->at[output] + (token - back) * step, bytes);
    }
    const int64_t step = 4 * norm_scale_step(&c->d), next = c->d.scale_group_stride ? c->d.scale_group_stride : 1;
    for (int64_t token = first; token < c->d.tokens && c->d.scale_group; token++)
        for (int64_t word = 0; word < norm_words(&c->d); word++) {
            const size_t at = c->at[norm_scale] + (size_t)(4 * word * next);
            memcpy(to + at + token * step, from + at + (token - back) * step, 4);
        }
}

/* Turns the image of this rank into what the call must leave, by the host's twin. `judged`: the oracle checks it. */
static inline void norm_expect(const norm_case *c, int rank, int world, char *image, int judged)
{
    const size_t send_bytes = (size_t)(c->d.tokens * norm_stride(c, c->d.send_stride)) * 2;
    char *const before = (char *)allocate(c->bytes), *const others = (char *)allocate(send_bytes * (size_t)world);
    oracle_row *const row = (oracle_row *)allocate(sizeof *row);
    const void **const sends = (const void **)allocate(sizeof *sends * (size_t)world);
    kvprim_norm_desc d = norm_desc_at(c, image), was = norm_desc_at(c, before);
    const int64_t h = c->d.hidden;
    int wrong = 0;
    memcpy(before, image, c->bytes);
    d.tokens = d.tokens < norm_period ? d.tokens : (int64_t)norm_period;
    for (int r = 0; r < world; r++) {
        sends[r] = r == rank ? image + c->at[norm_send] : others + send_bytes * (size_t)r;
        if (r != rank)
            norm_fill_tensor(c, r, others + send_bytes * (size_t)r, c->d.send_stride);
    }
    CHECK(kvprim_all_reduce_norm_host(&d, sends, world) == KVPRIM_OK);
    sends[rank] = before + c->at[norm_send];
    for (int64_t token = 0; token < d.tokens && judged; token++) {
        oracle_token(&was, sends, world, token, row);
        wrong += oracle_wrong(&d, token, row);
    }
    if (wrong)
        fail("%lld tokens x %lld, dtype %d, world %d: %d of the twin's elements are not the oracle's",
             (long long)c->d.tokens, (long long)h, (int)c->d.dtype, world, wrong);
    norm_copy_outputs(c, image, image, norm_period, norm_period);
    free(before), free(others), free(row), free((void *)sends);
}

#endif
