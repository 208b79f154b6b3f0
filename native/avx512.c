/* The kernels for AVX-512 (F, BW, DQ, VL): vectors of sixteen lanes. */
#include "branchline_native.h"

#if defined(BL_X86)

#if defined(__clang__)
#pragma clang attribute push(                                                                      \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))),                   \
    apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prefer-vector-width=512")
#endif
#include <immintrin.h>
#include <string.h>

#define BL_KERNELS bl_kernels_avx512
#define BL_INLINE static inline __attribute__((always_inline))

enum { LANES = 16 };
typedef __m512 vf;
typedef __m512i vi;
typedef struct {
    __m512d low, high;
} vacc;

BL_INLINE vf v_set(float x) { return _mm512_set1_ps(x); }
BL_INLINE vi vi_set(int32_t x) { return _mm512_set1_epi32(x); }
BL_INLINE vi v_bits(vf x) { return _mm512_castps_si512(x); }
BL_INLINE vf v_from_bits(vi x) { return _mm512_castsi512_ps(x); }

BL_INLINE vi vi_load(const void *p) { return _mm512_loadu_si512(p); }
BL_INLINE void vi_store(void *p, vi x) { _mm512_storeu_si512(p, x); }

BL_INLINE void vi_store_halves(void *p, vi x)
{
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(x));
}

BL_INLINE void v_store(float *p, vf x) { _mm512_storeu_ps(p, x); }

BL_INLINE vi vi_load_bytes(const uint8_t *p)
{
    return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
}

BL_INLINE vf v_add(vf a, vf b) { return _mm512_add_ps(a, b); }
BL_INLINE vf v_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
BL_INLINE vf v_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
BL_INLINE vf v_div(vf a, vf b) { return _mm512_div_ps(a, b); }
BL_INLINE vf v_mul_add(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
BL_INLINE vf v_max(vf a, vf b) { return _mm512_max_ps(a, b); }
BL_INLINE vf v_min(vf a, vf b) { return _mm512_min_ps(a, b); }
BL_INLINE vf v_from_int(vi x) { return _mm512_cvtepi32_ps(x); }
BL_INLINE float v_reduce_max(vf x) { return _mm512_reduce_max_ps(x); }

BL_INLINE vi vi_and(vi a, vi b) { return _mm512_and_si512(a, b); }
BL_INLINE vi vi_or(vi a, vi b) { return _mm512_or_si512(a, b); }
BL_INLINE vi vi_add(vi a, vi b) { return _mm512_add_epi32(a, b); }
BL_INLINE vi vi_and_or(vi a, vi mask, vi c)
{
    return _mm512_ternarylogic_epi32(a, mask, c, 0xEA);
}

BL_INLINE vi vi_min(vi a, vi b) { return _mm512_min_epi32(a, b); }
BL_INLINE vi vi_max(vi a, vi b) { return _mm512_max_epi32(a, b); }

BL_INLINE vi vi_if_gt(vi a, vi b, vi then, vi otherwise)
{
    return _mm512_mask_mov_epi32(otherwise, _mm512_cmpgt_epi32_mask(a, b), then);
}

BL_INLINE vi vi_if_nan(vf x, vi then, vi otherwise)
{
    return _mm512_mask_mov_epi32(otherwise, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), then);
}

#define vi_shl(x, n) _mm512_slli_epi32(x, n)
#define vi_shr(x, n) _mm512_srli_epi32(x, n)

BL_INLINE vacc acc_zero(void)
{
    return (vacc){_mm512_setzero_pd(), _mm512_setzero_pd()};
}

BL_INLINE vacc acc_square(vacc acc, vf x)
{
    vf square = _mm512_mul_ps(x, x);
    __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(square));
    __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(square, 1));
    return (vacc){_mm512_add_pd(low, acc.low), _mm512_add_pd(high, acc.high)};
}

BL_INLINE double acc_sum(vacc acc)
{
    return _mm512_reduce_add_pd(_mm512_add_pd(acc.low, acc.high));
}

#include "kernels.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif
