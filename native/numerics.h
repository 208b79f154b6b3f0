/* Rounding and encoding of one vector: core/oracle, operation by operation.
 *
 * Included by kernels.h, which says what the including file defines.
 */
static const float FP8_MAX = 448.0f;
static const float FP4_MAX = 6.0f;

/* --- bfloat16 --- */

/* Two vectors at a time: the even and the odd elements of 2 * LANES neighbours.  Reading a word as
 * two bfloat16 costs one instruction each that way, and nothing has to cross lanes. */
typedef struct {
    vf even, odd;
} vpair;

BL_INLINE vpair load_bf16(const uint16_t *p)
{
    vi words = vi_load(p);
    vi upper = vi_and(words, vi_set((int32_t)0xFFFF0000u));
    return (vpair){v_from_bits(vi_shl(words, 16)), v_from_bits(upper)};
}

/* Nearest bfloat16, ties to even, kept as float32.
 *
 * A NaN must have a payload that fits a bfloat16, as every NaN computed from one has: then the
 * addition does not carry into the exponent, and NaN stays NaN. */
BL_INLINE vf round_bf16(vf x)
{
    vi bits = v_bits(x);
    vi odd = vi_and(vi_shr(bits, 16), vi_set(1));
    vi rounded = vi_add(vi_add(bits, vi_set(0x7FFF)), odd);
    return v_from_bits(vi_and(rounded, vi_set((int32_t)0xFFFF0000u)));
}

BL_INLINE vi canonical_nan(vf x)
{
    return vi_if_nan(x, vi_set(0x7FC00000), v_bits(x));
}

/* Stores what round_bf16 returned. */
BL_INLINE void store_bf16(uint16_t *p, vpair x)
{
    vi_store(p, vi_or(vi_shr(canonical_nan(x.even), 16), canonical_nan(x.odd)));
}

/* --- float8_e4m3fn --- */

/* Nearest e4m3fn code in the low byte of each lane (the rest is undefined); saturating, NaN is
 * 0x7F.
 *
 * With e the exponent of x, at least -6, codes at x are 2**(e - 3) apart: the last place of
 * 2**(e + 20).  Adding that number rounds x and leaves in the low bits how many such steps it has;
 * the code is (e + 6) * 8 more, subnormals (e = -6) included.  The biased exponent gives e * 8 +
 * 127 * 8, and the constant between the two, modulo 256, is added before the rounding: it is even,
 * so that ties go where they should.  `non_negative` promises that only NaN may have a sign. */
BL_INLINE vi encode_e4m3(vf x, bool non_negative)
{
    const int32_t correction = (6 * 8 - 127 * 8) & 0xFF;
    vi bits = v_bits(x);
    vi magnitude = non_negative ? bits : vi_and(bits, vi_set(0x7FFFFFFF));
    vi clamped = vi_min(magnitude, v_bits(v_set(FP8_MAX)));
    vi exponent = vi_max(vi_and(clamped, vi_set(0x7F800000)), v_bits(v_set(0x1p-6f)));
    vi step = vi_add(exponent, vi_set((20 << 23) + correction));
    vi rounded = v_bits(v_add(v_from_bits(clamped), v_from_bits(step)));
    vi code = vi_add(rounded, vi_shr(exponent, 20));
    if (!non_negative)
        code = vi_and_or(vi_shr(bits, 24), vi_set(0x80), code);
    return vi_if_nan(x, vi_set(0x7F), code);
}

BL_INLINE void store_e4m3(uint8_t *p, vpair x, bool non_negative)
{
    vi even = encode_e4m3(x.even, non_negative), odd = encode_e4m3(x.odd, non_negative);
    vi_store_halves(p, vi_and_or(even, vi_set(0xFF), vi_shl(odd, 8)));
}

/* Value of an e4m3fn code: exact. */
BL_INLINE vf decode_e4m3(vi code)
{
    vi magnitude = vi_and(code, vi_set(0x7F));
    vi normal = vi_add(vi_shl(magnitude, 20), vi_set((127 - 7) << 23));
    vi subnormal = v_bits(v_mul(v_from_int(magnitude), v_set(0x1p-9f)));
    vi value = vi_if_gt(vi_set(8), magnitude, subnormal, normal);
    value = vi_if_gt(magnitude, vi_set(0x7E), vi_set(0x7FF00000), value);
    return v_from_bits(vi_and_or(vi_shl(code, 24), vi_set((int32_t)0x80000000u), value));
}

/* --- float4_e2m1fn --- */

/* Nearest e2m1fn code in the low four bits of each lane (the rest is undefined), as encode_e4m3
 * does it: codes at x are 2**(e - 1) apart, and the code is e * 2 more.  Saturating; NaN is the
 * largest positive code. */
BL_INLINE vi encode_e2m1(vf x)
{
    const int32_t correction = (0 * 2 - 127 * 2) & 0x7;
    vi bits = v_bits(x);
    vi clamped = vi_min(vi_and(bits, vi_set(0x7FFFFFFF)), v_bits(v_set(FP4_MAX)));
    vi exponent = vi_max(vi_and(clamped, vi_set(0x7F800000)), v_bits(v_set(1.0f)));
    vi step = vi_add(exponent, vi_set((22 << 23) + correction));
    vi rounded = v_bits(v_add(v_from_bits(clamped), v_from_bits(step)));
    vi code = vi_and(vi_add(rounded, vi_shr(exponent, 22)), vi_set(0x7));
    return vi_or(code, vi_if_nan(x, vi_set(0), vi_and(vi_shr(bits, 28), vi_set(0x8))));
}
