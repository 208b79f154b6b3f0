/* The operations of kernels.h on vectors of sixteen lanes, for AVX-512 (F, BW, DQ, VL). */
/* Of 32 registers, 24 are sums. */
#define BL_WIDE 4
#define BL_DIRECT 4
#define BL_INLINE static inline __attribute__((always_inline))

enum { LANES = 16, EXPAND_WIDE = 4 };
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

BL_INLINE void vi_store_bytes(uint8_t *p, vi x)
{
    _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8(x));
}

BL_INLINE vf v_load(const float *p) { return _mm512_loadu_ps(p); }
BL_INLINE void v_store(float *p, vf x) { _mm512_storeu_ps(p, x); }

BL_INLINE vi vi_load_bytes(const uint8_t *p)
{
    return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
}

BL_INLINE vi vi_load_halves(const uint16_t *p)
{
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
}

/* e4m3 in the upper byte of a word, moved one bit down below its sign, is a half with 2**-8 of its
 * value, subnormals included. */
BL_INLINE void decode_group(const uint8_t *p, vf out[4])
{
    const vi mask = _mm512_set1_epi16((short)0xBF80);
    vi words = _mm512_loadu_si512(p);
    vi low = _mm512_and_si512(_mm512_srai_epi16(_mm512_slli_epi16(words, 8), 1), mask);
    vi high = _mm512_and_si512(_mm512_srai_epi16(words, 1), mask);
    out[0] = _mm512_cvtph_ps(_mm512_castsi512_si256(low));
    out[1] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(low, 1));
    out[2] = _mm512_cvtph_ps(_mm512_castsi512_si256(high));
    out[3] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(high, 1));
}

BL_INLINE vf v_spread_16(const float *p)
{
    return _mm512_insertf32x8(_mm512_set1_ps(p[0]), _mm256_set1_ps(p[1]), 1);
}

BL_INLINE vf v_evens(vf a, vf b)
{
    const vi index = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    return _mm512_permutex2var_ps(a, index, b);
}

BL_INLINE vf v_odds(vf a, vf b)
{
    const vi index = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    return _mm512_permutex2var_ps(a, index, b);
}

BL_INLINE vf v_add(vf a, vf b) { return _mm512_add_ps(a, b); }
BL_INLINE vf v_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
BL_INLINE vf v_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
BL_INLINE vf v_div(vf a, vf b) { return _mm512_div_ps(a, b); }
BL_INLINE vf v_mul_add(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
BL_INLINE vf v_fused(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
BL_INLINE vf v_fused_bf16(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }

BL_INLINE vf v_load_f16(const uint16_t *p)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}

BL_INLINE void v_store_f16(uint16_t *p, vf x)
{
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

BL_INLINE vf v_max(vf a, vf b) { return _mm512_max_ps(a, b); }
BL_INLINE vf v_min(vf a, vf b) { return _mm512_min_ps(a, b); }
BL_INLINE vf v_from_int(vi x) { return _mm512_cvtepi32_ps(x); }
BL_INLINE float v_reduce_add(vf x) { return _mm512_reduce_add_ps(x); }

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

BL_INLINE vi vh_magnitude(vi x)
{
    x = _mm512_and_si512(x, _mm512_set1_epi16(0x7FFF));
    return _mm512_maskz_mov_epi16(_mm512_cmple_epi16_mask(x, _mm512_set1_epi16(0x7F80)), x);
}

BL_INLINE vi vh_max(vi a, vi b) { return _mm512_max_epu16(a, b); }

BL_INLINE uint32_t max_of_16(__m256i x)
{
    __m128i low = _mm256_castsi256_si128(x), high = _mm256_extracti128_si256(x, 1);
    /* There is a horizontal minimum only. */
    __m128i inverted = _mm_xor_si128(_mm_max_epu16(low, high), _mm_set1_epi32(-1));
    return ~(uint32_t)_mm_cvtsi128_si32(_mm_minpos_epu16(inverted)) & 0xFFFF;
}

BL_INLINE uint32_t vh_reduce_max(vi x)
{
    return max_of_16(_mm256_max_epu16(_mm512_castsi512_si256(x), _mm512_extracti64x4_epi64(x, 1)));
}

BL_INLINE uint32_t max_magnitude_16(const uint16_t *p)
{
    __m256i x = _mm256_loadu_si256((const __m256i *)p);
    x = _mm256_and_si256(x, _mm256_set1_epi16(0x7FFF));
    __mmask16 number = _mm256_cmple_epi16_mask(x, _mm256_set1_epi16(0x7F80));
    return max_of_16(_mm256_maskz_mov_epi16(number, x));
}

BL_INLINE vacc acc_zero(void)
{
    return (vacc){_mm512_setzero_pd(), _mm512_setzero_pd()};
}

BL_INLINE vacc acc_add(vacc acc, vf x)
{
    __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(x));
    __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1));
    return (vacc){_mm512_add_pd(low, acc.low), _mm512_add_pd(high, acc.high)};
}

BL_INLINE vacc acc_square(vacc acc, vf x) { return acc_add(acc, _mm512_mul_ps(x, x)); }

BL_INLINE vacc acc_difference(vacc acc, vf x, double mean)
{
    __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(x));
    __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1));
    low = _mm512_sub_pd(low, _mm512_set1_pd(mean));
    high = _mm512_sub_pd(high, _mm512_set1_pd(mean));
    return (vacc){_mm512_fmadd_pd(low, low, acc.low), _mm512_fmadd_pd(high, high, acc.high)};
}

BL_INLINE double acc_sum(vacc acc)
{
    return _mm512_reduce_add_pd(_mm512_add_pd(acc.low, acc.high));
}
