/* What a source makes of neighbouring elements, and where it puts them.
 *
 * A source computes a pair of vectors; put_pair() writes it as bfloat16 values, as e4m3 codes under
 * one scale, or both.
 */
enum { WANT_CODES = 1, WANT_VALUES = 2 };

/* `outputs` is a constant in every call; what is not wanted is not touched. */
struct destination {
    uint16_t *values;
    uint8_t *codes;
    float inv_scale;
};

BL_INLINE void put_pair(int outputs, const struct destination *to, int64_t i, vpair x, vf inv_scale,
                        bool non_negative)
{
    if (outputs & WANT_VALUES)
        store_bf16(to->values + i, x);
    if (outputs & WANT_CODES) {
        vpair scaled = {v_mul(x.even, inv_scale), v_mul(x.odd, inv_scale)};
        store_e4m3(to->codes + i, scaled, non_negative);
    }
}

/* Room for a tail: what a source writes for one whole step. */
struct tail {
    uint16_t values[TAIL];
    uint8_t codes[TAIL];
};

BL_INLINE struct destination tail_destination(struct tail *tail, const struct destination *to)
{
    return (struct destination){tail->values, tail->codes, to->inv_scale};
}

BL_INLINE void put_tail(int outputs, const struct tail *tail, const struct destination *to,
                        int64_t i, int64_t left)
{
    if (outputs & WANT_VALUES)
        memcpy(to->values + i, tail->values, (size_t)left * sizeof *to->values);
    if (outputs & WANT_CODES)
        memcpy(to->codes + i, tail->codes, (size_t)left);
}

/* A padded copy of the last `left` elements. */
BL_INLINE const uint16_t *tail_of(const uint16_t *x, int64_t left, uint16_t copy[TAIL])
{
    memset(copy, 0, TAIL * sizeof *copy);
    return memcpy(copy, x, (size_t)left * sizeof *x);
}

/* Codes of values that are there already. */
BL_INLINE void encode_span(const uint16_t *values, uint8_t *restrict codes, int64_t count,
                           float scale)
{
    struct destination to = {NULL, codes, scale};
    vf inv_scale = v_set(scale);
    int64_t i = 0;
    for (; i + STEP <= count; i += STEP)
        put_pair(WANT_CODES, &to, i, load_bf16(values + i), inv_scale, false);
    if (i < count) {
        uint16_t copy[TAIL];
        struct tail tail;
        struct destination tail_to = tail_destination(&tail, &to);
        vpair x = load_bf16(tail_of(values + i, count - i, copy));
        put_pair(WANT_CODES, &tail_to, 0, x, inv_scale, false);
        put_tail(WANT_CODES, &tail, &to, i, count - i);
    }
}
