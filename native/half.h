/* Single bfloat16 and half values: what vectors do, for elements that fill none. */
#ifndef BRANCHLINE_HALF_H
#define BRANCHLINE_HALF_H

#include <math.h>
#include <stdint.h>
#include <string.h>

static inline uint32_t bits_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float from_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline float from_bf16(uint16_t x) { return from_bits((uint32_t)x << 16); }

/* Nearest, ties to even. */
static inline uint16_t to_bf16(float x)
{
    uint32_t bits = bits_of(x);
    return x != x ? 0x7FC0 : (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

static inline float from_f16(uint16_t x)
{
    uint32_t sign = (uint32_t)(x & 0x8000) << 16, magnitude = x & 0x7FFF;
    if (magnitude >= 0x7C00)
        return from_bits(sign | 0x7F800000 | (magnitude & 0x3FF) << 13);
    /* The exponent is put right by a product, which is exact for subnormals too. */
    return from_bits(sign | bits_of(from_bits(magnitude << 13) * 0x1p112f));
}

/* Nearest, ties to even. */
static inline uint16_t to_f16(float x)
{
    uint32_t sign = bits_of(x) >> 16 & 0x8000;
    float magnitude = from_bits(bits_of(x) & 0x7FFFFFFF);
    if (x != x)
        return 0x7E00;
    if (magnitude >= 65520.0f)
        return (uint16_t)(sign | 0x7C00);
    if (magnitude < 0x1p-14f) /* the sum's last place is a half's */
        return (uint16_t)(sign | (bits_of(magnitude + 0.5f) - bits_of(0.5f)));
    uint32_t bits = bits_of(magnitude) - (112u << 23);
    return (uint16_t)(sign | (bits + 0xFFF + (bits >> 13 & 1)) >> 13);
}

#endif
