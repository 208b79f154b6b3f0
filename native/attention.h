/* bl_attention: rows of one new token each, which look back on keys and values in a paged cache.
 *
 * A row's bytes depend on its own query, keys and values alone: not on other rows, their lengths or
 * the number of threads.  Sums are float32, in an order that depends on the instruction set.
 */

/* Sums that are under way at a time: of queries that share a load, or of keys. */
enum { ABREAST_SUMS = 4, VALUES_WIDE = LANES == 16 ? 4 : 2 };

/* Up to LANES elements, zeros behind the last; all LANES if `whole`, a constant. */
BL_INLINE vf load_some(bool whole, int64_t dtype, const char *p, int64_t left)
{
    if (whole || left >= LANES)
        return load_lora(dtype, p);
    float copy[LANES] = {0.0f};
    for (int64_t i = 0; i < left; i++)
        copy[i] = read_one(dtype, p, i);
    return v_load(copy);
}

BL_INLINE int64_t whole_vectors(int64_t count) { return (count + LANES - 1) / LANES; }

/* exp(x) of x <= 0 to some units in the last place, 0 below -87; NaN stays NaN.  2**n times a
 * polynomial, as one_plus_exp_minus() has it. */
BL_INLINE vf exp_negative(vf x)
{
    const vf to_integer = v_set(0x1.8p23f + 127.0f);
    vf clamped = v_max(v_set(-87.0f), x);
    vf shifted = v_mul_add(clamped, v_set(0x1.715476p+0f), to_integer);
    vf n = v_sub(shifted, to_integer);
    vf r = v_mul_add(n, v_set(-0x1.63p-1f), clamped);
    r = v_mul_add(n, v_set(0x1.bd0106p-13f), r);
    vf p = v_mul_add(v_set(0x1.106250p-7f), r, v_set(0x1.572a64p-5f));
    p = v_mul_add(p, r, v_set(0x1.5557b0p-3f));
    p = v_mul_add(p, r, v_set(0x1.fffdfcp-2f));
    p = v_mul_add(p, r, v_set(1.0f));
    p = v_mul_add(p, r, v_set(1.0f));
    p = v_mul(p, v_from_bits(vi_shl(v_bits(shifted), 23)));
    vi bits = vi_if_gt(v_bits(v_set(0x1p-125f)), v_bits(p), vi_set(0), v_bits(p));
    return v_from_bits(vi_if_nan(x, v_bits(x), bits));
}

/* One row, and the queries that share one head of its keys. */
struct attended {
    const struct bl_attention *spec;
    int64_t row, head, keys; /* the new one among `keys`, as the last */
    float *query;            /* (group, width in whole vectors) */
    float *scores;           /* (group, `stride`), `stride` whole vectors of keys */
    float *factors;          /* by query: what its scores' shares are multiplied with */
    int64_t group, stride;
};

BL_INLINE const char *key_of(const struct attended *one, int64_t at, int64_t size)
{
    const struct bl_attention *spec = one->spec;
    if (at + 1 == one->keys)
        return (const char *)spec->new_key +
               (one->row * spec->new_key_row + one->head * spec->new_key_head) * size;
    int64_t place = spec->read[one->row][at];
    return (const char *)spec->keys + (place * spec->key_place + one->head * spec->key_head) * size;
}

BL_INLINE const char *value_of(const struct attended *one, int64_t at, int64_t size)
{
    const struct bl_attention *spec = one->spec;
    if (at + 1 == one->keys)
        return (const char *)spec->new_value +
               (one->row * spec->new_value_row + one->head * spec->new_value_head) * size;
    int64_t place = spec->read[one->row][at];
    return (const char *)spec->values +
           (place * spec->value_place + one->head * spec->value_head) * size;
}

BL_INLINE void widen_queries(int64_t dtype, const struct attended *one)
{
    const struct bl_attention *spec = one->spec;
    int64_t size = lora_size(dtype), vectors = whole_vectors(spec->width);
    for (int64_t i = 0; i < one->group; i++) {
        int64_t head = one->head * one->group + i;
        const char *from =
            (const char *)spec->query + (one->row * spec->query_row + head * spec->query_head) * size;
        for (int64_t v = 0; v < vectors; v++)
            v_store(one->query + (i * vectors + v) * LANES,
                    load_some(false, dtype, from + v * LANES * size, spec->width - v * LANES));
    }
}

/* Scores of `keys` keys from `at` on with `queries` queries from `first` on; `queries`, `keys` and
 * `whole` are constants, one of the first two is 1. */
BL_INLINE void score_tile(int queries, int keys, bool whole, int64_t dtype,
                          const struct attended *one, int64_t first, int64_t at)
{
    const struct bl_attention *spec = one->spec;
    int64_t size = lora_size(dtype), vectors = whole_vectors(spec->width);
    const float *query = one->query + first * vectors * LANES;
    const char *key[ABREAST_SUMS];
    vf sum[ABREAST_SUMS];
    for (int j = 0; j < keys; j++)
        key[j] = key_of(one, at + j, size);
    for (int i = 0; i < queries * keys; i++)
        sum[i] = v_set(0.0f);
    for (int64_t v = 0; v < vectors; v++)
        for (int j = 0; j < keys; j++) {
            vf part = load_some(whole, dtype, key[j] + v * LANES * size, spec->width - v * LANES);
            for (int i = 0; i < queries; i++) {
                vf factor = v_load(query + (i * vectors + v) * LANES);
                sum[i * keys + j] = v_mul_add(factor, part, sum[i * keys + j]);
            }
        }
    for (int i = 0; i < queries; i++)
        for (int j = 0; j < keys; j++)
            one->scores[(first + i) * one->stride + at + j] =
                v_reduce_add(sum[i * keys + j]) * (float)spec->scale;
}

BL_INLINE void score(bool whole, int64_t dtype, const struct attended *one)
{
    int64_t query = 0;
    for (; query + ABREAST_SUMS <= one->group; query += ABREAST_SUMS)
        for (int64_t at = 0; at < one->keys; at++)
            score_tile(ABREAST_SUMS, 1, whole, dtype, one, query, at);
    for (; query < one->group; query++) {
        int64_t at = 0;
        for (; at + ABREAST_SUMS <= one->keys; at += ABREAST_SUMS)
            score_tile(1, ABREAST_SUMS, whole, dtype, one, query, at);
        for (; at < one->keys; at++)
            score_tile(1, 1, whole, dtype, one, query, at);
    }
}

/* Scores to shares, up to a factor; returns the factor. */
static float to_shares(const struct attended *one, float *scores)
{
    float cap = (float)one->spec->softcap, largest = -INFINITY;
    if (cap != 0.0f)
        for (int64_t at = 0; at < one->keys; at++)
            scores[at] = cap * tanhf(scores[at] / cap);
    for (int64_t at = 0; at < one->keys; at++)
        largest = scores[at] > largest ? scores[at] : largest;
    for (int64_t at = one->keys; at < one->stride; at++)
        scores[at] = -INFINITY;
    vf sum = v_set(0.0f);
    for (int64_t at = 0; at < one->stride; at += LANES) {
        vf share = exp_negative(v_sub(v_load(scores + at), v_set(largest)));
        v_store(scores + at, share);
        sum = v_add(sum, share);
    }
    return 1.0f / v_reduce_add(sum);
}

/* `wide` vectors of the outputs of `queries` queries, from vector `v` and query `first` on; `queries`,
 * `wide` and `whole` are constants. */
BL_INLINE void value_tile(int queries, int wide, bool whole, int64_t dtype,
                          const struct attended *one, int64_t first, int64_t v)
{
    const struct bl_attention *spec = one->spec;
    int64_t size = lora_size(dtype), from = v * LANES, left = spec->value_width - from;
    const float *shares = one->scores + first * one->stride;
    vf sum[ABREAST_SUMS * VALUES_WIDE];
    for (int i = 0; i < queries * wide; i++)
        sum[i] = v_set(0.0f);
    for (int64_t at = 0; at < one->keys; at++) {
        const char *value = value_of(one, at, size) + from * size;
        vf part[VALUES_WIDE];
        for (int j = 0; j < wide; j++)
            part[j] = load_some(whole, dtype, value + j * LANES * size, left - j * LANES);
        for (int i = 0; i < queries; i++) {
            vf share = v_set(shares[i * one->stride + at]);
            for (int j = 0; j < wide; j++)
                sum[i * wide + j] = v_mul_add(share, part[j], sum[i * wide + j]);
        }
    }
    for (int i = 0; i < queries; i++) {
        int64_t head = one->head * one->group + first + i;
        char *out = (char *)spec->out +
                    ((one->row * spec->heads + head) * spec->value_width + from) * size;
        for (int j = 0; j < wide; j++) {
            vf result = v_mul(sum[i * wide + j], v_set(one->factors[first + i]));
            if (whole) {
                store_rounded(dtype, out + j * LANES * size, result);
                continue;
            }
            float copy[LANES];
            v_store(copy, result);
            for (int64_t n = 0; n < left && n < LANES; n++)
                write_one(dtype, out, n, copy[n]);
        }
    }
}

BL_INLINE void values_of_queries(int queries, int64_t dtype, const struct attended *one,
                                 int64_t first)
{
    int64_t whole = one->spec->value_width / LANES, v = 0;
    for (; v + VALUES_WIDE <= whole; v += VALUES_WIDE)
        value_tile(queries, VALUES_WIDE, true, dtype, one, first, v);
    for (; v < whole; v++)
        value_tile(queries, 1, true, dtype, one, first, v);
    if (v < whole_vectors(one->spec->value_width))
        value_tile(queries, 1, false, dtype, one, first, v);
}

/* What others will read of this token, from the next step on. */
BL_INLINE void keep_new(const struct attended *one, int64_t size)
{
    const struct bl_attention *spec = one->spec;
    int64_t place = spec->write[one->row];
    memcpy((char *)spec->keys + (place * spec->key_place + one->head * spec->key_head) * size,
           key_of(one, one->keys - 1, size), (size_t)(spec->width * size));
    memcpy((char *)spec->values + (place * spec->value_place + one->head * spec->value_head) * size,
           value_of(one, one->keys - 1, size), (size_t)(spec->value_width * size));
}

BL_INLINE void attend_typed(int64_t dtype, const struct attended *one)
{
    int64_t query = 0;
    widen_queries(dtype, one);
    if (one->spec->width % LANES)
        score(false, dtype, one);
    else
        score(true, dtype, one);
    for (; query < one->group; query++)
        one->factors[query] = to_shares(one, one->scores + query * one->stride);
    for (query = 0; query + ABREAST_SUMS <= one->group; query += ABREAST_SUMS)
        values_of_queries(ABREAST_SUMS, dtype, one, query);
    for (; query < one->group; query++)
        values_of_queries(1, dtype, one, query);
    /* Last: in a window's ring it overwrites a key that was read. */
    keep_new(one, lora_size(dtype));
}

static void attend_one(const struct bl_attention *spec, int64_t unit, int64_t longest, float *room)
{
    int64_t group = spec->heads / spec->kv_heads, row = unit / spec->kv_heads;
    int64_t stride = whole_vectors(longest) * LANES;
    struct attended one = {spec, row, unit % spec->kv_heads, spec->lengths[row] + 1, room, NULL,
                           NULL, group, stride};
    one.scores = one.query + group * whole_vectors(spec->width) * LANES;
    one.factors = one.scores + group * stride;
    /* Whole vectors of its own keys alone: others' lengths may not show. */
    one.stride = whole_vectors(one.keys) * LANES;
    if (spec->dtype == BL_LORA_BF16)
        attend_typed(BL_LORA_BF16, &one);
    else if (spec->dtype == BL_LORA_F16)
        attend_typed(BL_LORA_F16, &one);
    else
        attend_typed(BL_LORA_F32, &one);
}

static int attention(const struct bl_attention *spec, int threads)
{
    int64_t longest = 0, work = 0;
    for (int64_t row = 0; row < spec->rows; row++) {
        int64_t keys = spec->lengths[row] + 1;
        longest = keys > longest ? keys : longest;
        work += keys * spec->heads * (spec->width + spec->value_width);
    }
    int64_t group = spec->heads / spec->kv_heads;
    int64_t floats = group * ((whole_vectors(spec->width) + whole_vectors(longest)) * LANES + 1);
    size_t each = padded_size(floats * (int64_t)sizeof(float));
    int team = useful_threads(threads, work);
    char *rooms = malloc(each * (size_t)team);
    if (!rooms)
        return -1;
    PARALLEL_UNITS(team)
    for (int64_t unit = 0; unit < spec->rows * spec->kv_heads; unit++)
        attend_one(spec, unit, longest, (float *)(rooms + each * (size_t)own_number()));
    free(rooms);
    return 0;
}
