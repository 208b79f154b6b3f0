/* Rounding, encoding and activations on one vector: core/oracle.py, operation by operation.
 *
 * Included by kernels.h, which says what the including file defines.
 */
static const float FP8_MAX = 448.0f;
static const float BF16_MAX = 0x1.fep127f;
static const float AMAX_FLOOR = 0x1p-40f; /* core/oracle.py: AMAX_FLOOR */

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

/* --- activations --- */

/* 1 + exp(-x) to one unit in the last place for -89 <= x <= 80, inf up to -88.73: 2**n times a
 * polynomial on [-ln2 / 2, ln2 / 2], ln2 in two parts, of which the first times n is exact.  2**n
 * is applied as 2**(n - 1) and 2, so that n reaches 128; the product with 2 is exact. */
BL_INLINE vf one_plus_exp_minus(vf x)
{
    /* Adding it leaves n and the exponent bias of 2**(n - 1) in the low bits. */
    const vf to_integer = v_set(0x1.8p23f + 126.0f);
    vf shifted = v_mul_add(x, v_set(-0x1.715476p+0f), to_integer);
    vf n = v_sub(shifted, to_integer);
    vf r = v_mul_add(n, v_set(0x1.63p-1f), x);
    r = v_mul_add(n, v_set(-0x1.bd0106p-13f), r);
    vf p = v_set(-1.9875691500e-4f);
    p = v_mul_add(p, r, v_set(1.3981999507e-3f));
    p = v_mul_add(p, r, v_set(-8.3334519073e-3f));
    p = v_mul_add(p, r, v_set(4.1665795894e-2f));
    p = v_mul_add(p, r, v_set(-1.6666665459e-1f));
    p = v_mul_add(p, r, v_set(5.0000001201e-1f));
    p = v_mul_add(p, r, v_set(-1.0f));
    p = v_mul_add(p, r, v_set(1.0f));
    vf half_power = v_from_bits(vi_shl(v_bits(shifted), 23));
    return v_mul_add(v_mul(p, half_power), v_set(2.0f), v_set(1.0f));
}

/* x / (1 + exp(-x)).  Above 80 the exponential no longer shows beside 1; at -89 it is inf, which
 * makes the quotient -0.0 there and NaN at -inf, as torch has it. */
BL_INLINE vf silu(vf x)
{
    vf clamped = v_max(v_set(-89.0f), v_min(v_set(80.0f), x));
    return v_div(x, one_plus_exp_minus(clamped));
}

BL_INLINE vf relu2(vf x)
{
    vf positive = v_max(v_set(0.0f), x);
    return v_mul(positive, positive);
}

BL_INLINE vf activate(int activation, vf x)
{
    switch (activation) {
    case BL_RELU2: return round_bf16(relu2(x));
    case BL_SILU: return round_bf16(silu(x));
    default: return x; /* already bfloat16 */
    }
}
