/* The kernels for AVX2: vectors of eight lanes. */
#include "branchline_native.h"

#if defined(BL_X86)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif
#include <immintrin.h>
#include <string.h>

#define BL_KERNELS bl_kernels_avx2
/* Of 16 registers, 12 are sums. */
#define BL_WIDE 2
#define BL_DIRECT 2
#define BL_INLINE static inline __attribute__((always_inline))

enum { LANES = 8, EXPAND_WIDE = 2 };
typedef __m256 vf;
typedef __m256i vi;
typedef struct {
    __m256d low, high;
} vacc;

BL_INLINE vf v_set(float x) { return _mm256_set1_ps(x); }
BL_INLINE vi vi_set(int32_t x) { return _mm256_set1_epi32(x); }
BL_INLINE vi v_bits(vf x) { return _mm256_castps_si256(x); }
BL_INLINE vf v_from_bits(vi x) { return _mm256_castsi256_ps(x); }

BL_INLINE vi vi_load(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }
BL_INLINE void vi_store(void *p, vi x) { _mm256_storeu_si256((__m256i *)p, x); }

BL_INLINE void vi_store_halves(void *p, vi x)
{
    x = _mm256_and_si256(x, _mm256_set1_epi32(0xFFFF)); /* the packing saturates */
    __m128i low = _mm256_castsi256_si128(x), high = _mm256_extracti128_si256(x, 1);
    _mm_storeu_si128((__m128i *)p, _mm_packus_epi32(low, high));
}

BL_INLINE void vi_store_bytes(uint8_t *p, vi x)
{
    const __m256i low_bytes = _mm256_set1_epi32(0x0C080400);
    x = _mm256_shuffle_epi8(x, low_bytes);
    __m128i low = _mm256_castsi256_si128(x), high = _mm256_extracti128_si256(x, 1);
    _mm_storel_epi64((__m128i *)p, _mm_unpacklo_epi32(low, high));
}

BL_INLINE vf v_load(const float *p) { return _mm256_loadu_ps(p); }
BL_INLINE void v_store(float *p, vf x) { _mm256_storeu_ps(p, x); }

BL_INLINE vi vi_load_bytes(const uint8_t *p)
{
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
}

BL_INLINE vi vi_load_halves(const uint16_t *p)
{
    return _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
}

/* e4m3 in the upper byte of a word, moved one bit down below its sign, is a half with 2**-8 of its
 * value, subnormals included. */
BL_INLINE void decode_group(const uint8_t *p, vf out[4])
{
    const vi mask = _mm256_set1_epi16((short)0xBF80);
    vi words = vi_load(p);
    vi low = _mm256_and_si256(_mm256_srai_epi16(_mm256_slli_epi16(words, 8), 1), mask);
    vi high = _mm256_and_si256(_mm256_srai_epi16(words, 1), mask);
    out[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(low));
    out[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(low, 1));
    out[2] = _mm256_cvtph_ps(_mm256_castsi256_si128(high));
    out[3] = _mm256_cvtph_ps(_mm256_extracti128_si256(high, 1));
}

BL_INLINE vf v_spread_16(const float *p) { return _mm256_set1_ps(*p); }

BL_INLINE vf v_quarters_in_order(vf x)
{
    return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(x), 0xD8));
}

BL_INLINE vf v_evens(vf a, vf b) { return v_quarters_in_order(_mm256_shuffle_ps(a, b, 0x88)); }
BL_INLINE vf v_odds(vf a, vf b) { return v_quarters_in_order(_mm256_shuffle_ps(a, b, 0xDD)); }

BL_INLINE vf v_add(vf a, vf b) { return _mm256_add_ps(a, b); }
BL_INLINE vf v_sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
BL_INLINE vf v_mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
BL_INLINE vf v_div(vf a, vf b) { return _mm256_div_ps(a, b); }
BL_INLINE vf v_mul_add(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
BL_INLINE vf v_fused(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
BL_INLINE vf v_fused_bf16(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }

BL_INLINE vf v_load_f16(const uint16_t *p)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}

BL_INLINE void v_store_f16(uint16_t *p, vf x)
{
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

BL_INLINE vf v_max(vf a, vf b) { return _mm256_max_ps(a, b); }
BL_INLINE vf v_min(vf a, vf b) { return _mm256_min_ps(a, b); }
BL_INLINE vf v_from_int(vi x) { return _mm256_cvtepi32_ps(x); }

BL_INLINE float v_reduce_add(vf x)
{
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

BL_INLINE vi vi_and(vi a, vi b) { return _mm256_and_si256(a, b); }
BL_INLINE vi vi_or(vi a, vi b) { return _mm256_or_si256(a, b); }
BL_INLINE vi vi_add(vi a, vi b) { return _mm256_add_epi32(a, b); }
BL_INLINE vi vi_and_or(vi a, vi mask, vi c) { return vi_or(vi_and(a, mask), c); }
BL_INLINE vi vi_min(vi a, vi b) { return _mm256_min_epi32(a, b); }
BL_INLINE vi vi_max(vi a, vi b) { return _mm256_max_epi32(a, b); }

BL_INLINE vi vi_if_gt(vi a, vi b, vi then, vi otherwise)
{
    return _mm256_blendv_epi8(otherwise, then, _mm256_cmpgt_epi32(a, b));
}

BL_INLINE vi vi_if_nan(vf x, vi then, vi otherwise)
{
    vi nan = v_bits(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(otherwise, then, nan);
}

#define vi_shl(x, n) _mm256_slli_epi32(x, n)
#define vi_shr(x, n) _mm256_srli_epi32(x, n)

BL_INLINE vi vh_magnitude(vi x)
{
    x = _mm256_and_si256(x, _mm256_set1_epi16(0x7FFF));
    return _mm256_andnot_si256(_mm256_cmpgt_epi16(x, _mm256_set1_epi16(0x7F80)), x);
}

BL_INLINE vi vh_max(vi a, vi b) { return _mm256_max_epu16(a, b); }

BL_INLINE uint32_t vh_reduce_max(vi x)
{
    __m128i low = _mm256_castsi256_si128(x), high = _mm256_extracti128_si256(x, 1);
    /* There is a horizontal minimum only. */
    __m128i inverted = _mm_xor_si128(_mm_max_epu16(low, high), _mm_set1_epi32(-1));
    return ~(uint32_t)_mm_cvtsi128_si32(_mm_minpos_epu16(inverted)) & 0xFFFF;
}

BL_INLINE uint32_t max_magnitude_16(const uint16_t *p)
{
    return vh_reduce_max(vh_magnitude(vi_load(p)));
}

BL_INLINE vacc acc_zero(void)
{
    return (vacc){_mm256_setzero_pd(), _mm256_setzero_pd()};
}

BL_INLINE vacc acc_add(vacc acc, vf x)
{
    __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(x));
    __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
    return (vacc){_mm256_add_pd(low, acc.low), _mm256_add_pd(high, acc.high)};
}

BL_INLINE vacc acc_square(vacc acc, vf x) { return acc_add(acc, _mm256_mul_ps(x, x)); }

BL_INLINE vacc acc_difference(vacc acc, vf x, double mean)
{
    __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(x));
    __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
    low = _mm256_sub_pd(low, _mm256_set1_pd(mean));
    high = _mm256_sub_pd(high, _mm256_set1_pd(mean));
    return (vacc){_mm256_fmadd_pd(low, low, acc.low), _mm256_fmadd_pd(high, high, acc.high)};
}

BL_INLINE double acc_sum(vacc acc)
{
    double lanes[4];
    _mm256_storeu_pd(lanes, _mm256_add_pd(acc.low, acc.high));
    return (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
}

#include "kernels.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif
