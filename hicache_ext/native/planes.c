/* Pages in another form: the two planes of their numbers (page/transforms/numbers.py, which says which bit goes where),
 * and their rows as codes of 8 bits. That module does the same with numpy, too.
 *
 * Everything may lie at any address. Arithmetic is that of float32, step by step (-ffp-contract=off, no -ffast-math).
 * Input may have any bits. The caller owns the memory, exclusively during the call, and ensures that its parts have the
 * sizes that follow from the other words and do not overlap: this is not checked here. */
#include "core.h"

#define INLINE static inline __attribute__((always_inline))

/* -- planes -------------------------------------------------------------------------------------------------------- */

struct planes {
    uint8_t *page;
    uint8_t *top;  /* `count` bytes. */
    uint8_t *rest; /* What is left of the page: `count` bytes, of 32 bits three times as many. */
    int64_t bits;  /* 8, 16 or 32: of a number. */
    int64_t count;
    int64_t join; /* 0: fill top and rest. 1: fill the page. */
};

INLINE void split(const struct planes *call)
{
    const uint8_t *restrict page = call->page;
    uint8_t *restrict top = call->top, *restrict rest = call->rest;
    const int64_t count = call->count;
    if (call->bits == 8) {
        for (int64_t at = 0; at < count; at++) {
            uint8_t one = page[2 * at], other = page[2 * at + 1];
            top[at] = (uint8_t)((one >> 3 & 0x0F) | (other << 1 & 0xF0));
            rest[at] = (uint8_t)((one & 0x07) | (one >> 4 & 0x08) | (other << 4 & 0x70) | (other & 0x80));
        }
    } else if (call->bits == 16) {
        for (int64_t at = 0; at < count; at++) {
            uint8_t low = page[2 * at], high = page[2 * at + 1];
            top[at] = (uint8_t)(high << 1 | low >> 7);
            rest[at] = (uint8_t)(low << 1 | high >> 7);
        }
    } else {
        for (int64_t at = 0; at < count; at++) {
            uint8_t lowest = page[4 * at], low = page[4 * at + 1], high = page[4 * at + 2], highest = page[4 * at + 3];
            top[at] = (uint8_t)(highest << 1 | high >> 7);
            rest[3 * at] = (uint8_t)(lowest << 1 | highest >> 7);
            rest[3 * at + 1] = (uint8_t)(low << 1 | lowest >> 7);
            rest[3 * at + 2] = (uint8_t)(high << 1 | low >> 7);
        }
    }
}

INLINE void join(const struct planes *call)
{
    const uint8_t *restrict top = call->top, *restrict rest = call->rest;
    uint8_t *restrict page = call->page;
    const int64_t count = call->count;
    if (call->bits == 8) {
        for (int64_t at = 0; at < count; at++) {
            uint8_t high = top[at], low = rest[at];
            page[2 * at] = (uint8_t)((high << 3 & 0x78) | (low & 0x07) | (low << 4 & 0x80));
            page[2 * at + 1] = (uint8_t)((high >> 1 & 0x78) | (low >> 4 & 0x07) | (low & 0x80));
        }
    } else if (call->bits == 16) {
        for (int64_t at = 0; at < count; at++) {
            uint8_t low = rest[at], high = top[at];
            page[2 * at] = (uint8_t)(low >> 1 | high << 7);
            page[2 * at + 1] = (uint8_t)(high >> 1 | low << 7);
        }
    } else {
        for (int64_t at = 0; at < count; at++) {
            uint8_t lowest = rest[3 * at], low = rest[3 * at + 1], high = rest[3 * at + 2], highest = top[at];
            page[4 * at] = (uint8_t)(lowest >> 1 | low << 7);
            page[4 * at + 1] = (uint8_t)(low >> 1 | high << 7);
            page[4 * at + 2] = (uint8_t)(high >> 1 | highest << 7);
            page[4 * at + 3] = (uint8_t)(highest >> 1 | lowest << 7);
        }
    }
}

/* Returns 0. */
WIDE PUBLIC int64_t hicache_planes(const struct planes *call)
{
    if (call->join)
        join(call);
    else
        split(call);
    return 0;
}

/* -- rows ---------------------------------------------------------------------------------------------------------- */

enum { BFLOAT16, FLOAT16, FLOAT32 }; /* Of a page's numbers. */
enum { INT8, FP8 };                  /* Of the codes. */

/* Bits of float32; most have the same names in numbers.py, which says why. */
#define MAGNITUDE UINT32_C(0x7FFFFFFF)
#define TOO_LARGE UINT32_C(0x71800000)
#define TOO_SMALL UINT32_C(0x0D800000)
#define BIAS_8 (UINT32_C(120) << 23)
#define NORMAL_8 UINT32_C(0x3C800000) /* The smallest normal number of fp8. */
#define BIAS_16 (UINT32_C(112) << 23) /* Exponents of float32 less those of float16. */
#define NORMAL_16 UINT32_C(0x38800000)
#define ROUND 12582912.0f /* 1.5 * 2**23: added to a number, it leaves an integer in the low bits. */

/* At any address. */
typedef uint16_t unaligned_16 __attribute__((aligned(1), may_alias));
typedef uint32_t unaligned_32 __attribute__((aligned(1), may_alias));

INLINE float float_of(uint32_t bits) { return (union { uint32_t bits; float number; }){bits}.number; }
INLINE uint32_t bits_of(float number) { return (union { float number; uint32_t bits; }){number}.bits; }

/* `condition ? yes : no`, which compilers do not vectorize if it computes a number with a fraction. */
INLINE uint32_t chosen(int condition, uint32_t yes, uint32_t no)
{
    uint32_t mask = 0 - (uint32_t)(condition != 0);
    return (yes & mask) | (no & ~mask);
}

/* The number `at` of a page, as bits of float32; infinities and NaNs as something too large. */
INLINE uint32_t widened(const uint8_t *page, int64_t at, int64_t kind)
{
    if (kind == FLOAT32)
        return ((const unaligned_32 *)page)[at];
    uint32_t word = ((const unaligned_16 *)page)[at];
    if (kind == BFLOAT16)
        return word << 16;
    uint32_t size = word & 0x7FFF;
    uint32_t normal = chosen(size >= 0x7C00, TOO_LARGE, (size << 13) + BIAS_16);
    uint32_t small = bits_of((float)(int32_t)size * 0x1p-24f);
    return chosen(size >= 0x0400, normal, small) | (word & 0x8000) << 16;
}

INLINE void put_narrowed(uint8_t *page, int64_t at, int64_t kind, uint32_t bits)
{
    if (kind == FLOAT32) {
        ((unaligned_32 *)page)[at] = bits;
    } else if (kind == BFLOAT16) {
        ((unaligned_16 *)page)[at] = (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
    } else {
        uint32_t size = bits & MAGNITUDE;
        uint32_t small = bits_of(float_of(size) * 0x1p24f + ROUND) & 0x7FFF;
        uint32_t normal = (size - BIAS_16 + 0xFFF + (size >> 13 & 1)) >> 13;
        normal = normal < 0x7BFF ? normal : 0x7BFF; /* Never infinite. */
        ((unaligned_16 *)page)[at] = (uint16_t)(chosen(size < NORMAL_16, small, normal) | (bits >> 16 & 0x8000));
    }
}

INLINE uint8_t encoded(uint32_t bits, int64_t code, float inverse)
{
    if (code == INT8)
        return (uint8_t)bits_of(float_of(bits) * inverse + ROUND);
    uint32_t size = bits_of(float_of(bits & MAGNITUDE) * inverse);
    uint32_t small = bits_of(float_of(size) * 0x1p9f + ROUND);
    uint32_t normal = (size - BIAS_8 + 0x7FFFF + (size >> 20 & 1)) >> 20;
    return (uint8_t)(chosen(size < NORMAL_8, small, normal) | (bits >> 24 & 0x80));
}

INLINE uint32_t decoded(uint8_t byte, int64_t code, float scale)
{
    if (code == INT8)
        return bits_of((float)(int8_t)byte * scale);
    uint32_t size = byte & 0x7F;
    uint32_t small = bits_of((float)(int32_t)size * 0x1p-9f);
    return bits_of(float_of(chosen(size >= 8, (size << 20) + BIAS_8, small)) * scale) | (byte & UINT32_C(0x80)) << 24;
}

struct rows {
    uint8_t *page; /* row_count rows of `length` numbers. */
    int64_t kind;  /* BFLOAT16, FLOAT16 or FLOAT32. */
    int64_t code;  /* INT8 or FP8. */
    int64_t length;
    int64_t row_count;
    unaligned_16 *scales; /* A word of 16 bits for each row; to restore a page, each less than 2**100, not negative. */
    uint8_t *codes;       /* A byte for each number. */
    int64_t restore;      /* 0: fill scales and codes. 1: fill the page. */
};

INLINE int64_t quantise(const struct rows *call, int64_t kind, int64_t code)
{
    const int64_t length = call->length;
    const int64_t row_bytes = (kind == FLOAT32 ? 4 : 2) * length;
    for (int64_t row = 0; row < call->row_count; row++) {
        const uint8_t *restrict page = call->page + row * row_bytes;
        uint8_t *restrict codes = call->codes + row * length;
        int32_t top = 0;
        for (int64_t at = 0; at < length; at++) {
            int32_t size = (int32_t)(widened(page, at, kind) & MAGNITUDE);
            top = size > top ? size : top;
        }
        if ((uint32_t)top >= TOO_LARGE)
            return 0;
        if ((uint32_t)top < TOO_SMALL) {
            call->scales[row] = 0;
            memset(codes, 0, (size_t)length);
            continue;
        }
        /* Up, so that the largest number has the largest code at most. */
        uint32_t scale = (bits_of(float_of((uint32_t)top) / (code == FP8 ? 448.0f : 127.0f)) + 0xFFFF) >> 16;
        call->scales[row] = (uint16_t)scale;
        const float inverse = 1.0f / float_of(scale << 16);
        for (int64_t at = 0; at < length; at++)
            codes[at] = encoded(widened(page, at, kind), code, inverse);
    }
    return 1;
}

INLINE int64_t restore(const struct rows *call, int64_t kind, int64_t code)
{
    const int64_t length = call->length;
    const int64_t row_bytes = (kind == FLOAT32 ? 4 : 2) * length;
    for (int64_t row = 0; row < call->row_count; row++) {
        const uint8_t *restrict codes = call->codes + row * length;
        uint8_t *restrict page = call->page + row * row_bytes;
        const float scale = float_of((uint32_t)call->scales[row] << 16);
        for (int64_t at = 0; at < length; at++)
            put_narrowed(page, at, kind, decoded(codes[at], code, scale));
    }
    return 1;
}

INLINE int64_t of_kind(const struct rows *call, int64_t kind, int64_t code)
{
    return call->restore ? restore(call, kind, code) : quantise(call, kind, code);
}

/* Returns 0 if the page has a number that cannot be coded, else 1. */
WIDE PUBLIC int64_t hicache_rows(const struct rows *call)
{
    if (call->kind == BFLOAT16)
        return call->code == INT8 ? of_kind(call, BFLOAT16, INT8) : of_kind(call, BFLOAT16, FP8);
    if (call->kind == FLOAT16)
        return call->code == INT8 ? of_kind(call, FLOAT16, INT8) : of_kind(call, FLOAT16, FP8);
    return call->code == INT8 ? of_kind(call, FLOAT32, INT8) : of_kind(call, FLOAT32, FP8);
}
