/* The kernels for any processor: vectors of one lane. */
#include <string.h>

#include "branchline_native.h"
#include "half.h"

#define BL_KERNELS bl_kernels_scalar
#define BL_WIDE 4
#define BL_DIRECT 1
#define BL_INLINE static inline __attribute__((always_inline))

enum { LANES = 1, EXPAND_WIDE = 4 };
typedef float vf;
typedef uint32_t vi;
typedef double vacc;

BL_INLINE vf v_set(float x) { return x; }
BL_INLINE vi vi_set(int32_t x) { return (vi)x; }

BL_INLINE vi v_bits(vf x)
{
    vi bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

BL_INLINE vf v_from_bits(vi bits)
{
    vf x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

BL_INLINE vi vi_load(const void *p)
{
    vi x;
    memcpy(&x, p, sizeof x);
    return x;
}

BL_INLINE void vi_store(void *p, vi x) { memcpy(p, &x, sizeof x); }

BL_INLINE void vi_store_halves(void *p, vi x)
{
    uint16_t half = (uint16_t)x;
    memcpy(p, &half, sizeof half);
}

BL_INLINE void vi_store_bytes(uint8_t *p, vi x) { *p = (uint8_t)x; }
BL_INLINE vf v_load(const float *p) { return *p; }
BL_INLINE void v_store(float *p, vf x) { *p = x; }
BL_INLINE vi vi_load_bytes(const uint8_t *p) { return *p; }
BL_INLINE vi vi_load_halves(const uint16_t *p) { return *p; }

BL_INLINE vf decode_byte(uint8_t code)
{
    vi magnitude = code & 0x7F;
    vi normal = (magnitude << 20) + ((127 - 7 - 8) << 23);
    vi subnormal = v_bits((float)magnitude * 0x1p-17f);
    vi value = magnitude < 8 ? subnormal : normal;
    return v_from_bits(value | (vi)(code & 0x80) << 24);
}

BL_INLINE void decode_group(const uint8_t *p, vf out[4])
{
    const int order[4] = {0, 2, 1, 3};
    for (int i = 0; i < 4; i++)
        out[i] = decode_byte(p[order[i]]);
}

BL_INLINE vf v_spread_16(const float *p) { return *p; }
BL_INLINE vf v_evens(vf a, vf b) { return (void)b, a; }
BL_INLINE vf v_odds(vf a, vf b) { return (void)a, b; }

BL_INLINE vf v_add(vf a, vf b) { return a + b; }
BL_INLINE vf v_sub(vf a, vf b) { return a - b; }
BL_INLINE vf v_mul(vf a, vf b) { return a * b; }
BL_INLINE vf v_div(vf a, vf b) { return a / b; }
/* Two roundings: fmaf() without the instruction is a slow library call.  exp allows for it. */
BL_INLINE vf v_mul_add(vf a, vf b, vf c) { return a * b + c; }
BL_INLINE vf v_fused(vf a, vf b, vf c) { return fmaf(a, b, c); }

/* The product, of sixteen bits, is exact.  The sum is rounded twice, which gives what once would:
 * where it does not fit a double, its smaller term is too small to reach a tie of float32. */
BL_INLINE vf v_fused_bf16(vf a, vf b, vf c)
{
    return (float)((double)a * (double)b + (double)c);
}

BL_INLINE vf v_load_f16(const uint16_t *p) { return from_f16(*p); }
BL_INLINE void v_store_f16(uint16_t *p, vf x) { *p = to_f16(x); }
BL_INLINE vf v_from_int(vi x) { return (float)(int32_t)x; }
BL_INLINE float v_reduce_add(vf x) { return x; }

BL_INLINE vi vi_and(vi a, vi b) { return a & b; }
BL_INLINE vi vi_or(vi a, vi b) { return a | b; }
BL_INLINE vi vi_add(vi a, vi b) { return a + b; }
BL_INLINE vi vi_and_or(vi a, vi mask, vi c) { return (a & mask) | c; }

/* Masks, for the compiler to make vectors of: branches on random data cost more than the rest. */
BL_INLINE vi vi_select(vi condition, vi then, vi otherwise)
{
    vi mask = 0u - condition;
    return (then & mask) | (otherwise & ~mask);
}

BL_INLINE vi vi_min(vi a, vi b) { return vi_select(a < b, a, b); }
BL_INLINE vi vi_max(vi a, vi b) { return vi_select(a > b, a, b); }
BL_INLINE vf v_max(vf a, vf b) { return v_from_bits(vi_select(a > b, v_bits(a), v_bits(b))); }
BL_INLINE vf v_min(vf a, vf b) { return v_from_bits(vi_select(a < b, v_bits(a), v_bits(b))); }

BL_INLINE vi vi_if_gt(vi a, vi b, vi then, vi otherwise)
{
    return vi_select(a > b, then, otherwise);
}

BL_INLINE vi vi_if_nan(vf x, vi then, vi otherwise) { return vi_select(x != x, then, otherwise); }
#define vi_shl(x, n) ((x) << (n))
#define vi_shr(x, n) ((x) >> (n))

BL_INLINE vi vh_magnitude(vi x)
{
    vi low = x & 0x7FFF, high = x >> 16 & 0x7FFF;
    return vi_select(low > 0x7F80, 0, low) | vi_select(high > 0x7F80, 0, high) << 16;
}

BL_INLINE vi vh_max(vi a, vi b)
{
    return vi_max(a & 0xFFFF, b & 0xFFFF) | vi_max(a >> 16, b >> 16) << 16;
}

BL_INLINE uint32_t vh_reduce_max(vi x) { return vi_max(x & 0xFFFF, x >> 16); }

BL_INLINE uint32_t max_magnitude_16(const uint16_t *p)
{
    vi largest = 0;
    for (int i = 0; i < 16; i += 2)
        largest = vh_max(vh_magnitude(vi_load(p + i)), largest);
    return vh_reduce_max(largest);
}

BL_INLINE vacc acc_zero(void) { return 0.0; }
BL_INLINE vacc acc_add(vacc acc, vf x) { return acc + (double)x; }
BL_INLINE vacc acc_square(vacc acc, vf x) { return acc + (double)(x * x); }
BL_INLINE vacc acc_difference(vacc acc, vf x, double mean)
{
    double difference = (double)x - mean;
    return acc + difference * difference;
}

BL_INLINE double acc_sum(vacc acc) { return acc; }

#include "kernels.h"
