/* A few rows times one panel of weights: the inner loops of bl_matmul.
 *
 * A panel of codes holds, for each input in turn, one element for each of BL_PANEL channels, in an
 * order that makes a group of 4 * LANES neighbours four vectors of neighbouring channels: element
 * 2 * i is channel i, element 2 * i + 1 is channel i + BL_PANEL / 2.  A panel in bfloat16 holds, for
 * each two inputs in turn, a word for each channel: the first input's element, then the second's.
 * Behind an odd number of inputs is one of zeros.
 */
enum {
    GROUP = 4 * LANES,
    GROUPS = BL_PANEL / GROUP,
    TILE = 6,           /* rows that share decoded weights in registers */
    WIDE = BL_WIDE,     /* vectors of weights beside them */
    DIRECT = BL_DIRECT, /* up to so many rows, weights are decoded anew for every tile */
    AHEAD = 64,         /* inputs by which reading runs ahead of decoding */
    LINE = 64,          /* bytes of a cache line */
};

/* Some rows, from some input on: where they lie, and where their sums go. */
struct tile {
    const float *x;
    int64_t x_stride;
    float *total; /* of the first channel of the panel */
    int64_t total_stride;
    int64_t count; /* inputs of the block */
    const float *row_scale; /* NULL: 1 */
    int64_t row_scale_stride;
    const float *column_scale; /* one for all channels of the panel, or by channel; NULL: 1 */
    bool each_column;
};

/* Where vector `v` of a group begins: a channel of the panel. */
BL_INLINE int64_t channel_of(int64_t group, int v)
{
    return group * (2 * LANES) + (v & 1) * LANES + (v >> 1) * (BL_PANEL / 2);
}

BL_INLINE void add_block(const struct tile *tile, int rows, int64_t group, int first, int count,
                         vf sums[][4])
{
    for (int i = 0; i < rows; i++) {
        const float *row_scale = tile->row_scale;
        vf row = v_set(row_scale ? row_scale[i * tile->row_scale_stride] : 1.0f);
        for (int v = 0; v < count; v++) {
            int64_t channel = channel_of(group, first + v);
            float *to = tile->total + i * tile->total_stride + channel;
            vf sum = sums[i][v];
            if (tile->column_scale) {
                vf column = tile->each_column ? v_load(tile->column_scale + channel)
                                              : v_set(*tile->column_scale);
                sum = v_mul(sum, v_mul(row, column));
            } else if (row_scale) {
                sum = v_mul(sum, row);
            }
            v_store(to, v_add(v_load(to), sum));
        }
    }
}

/* A group of two inputs in bfloat16. */
BL_INLINE void decode_pair(const uint16_t *p, int64_t group, vf first[4], vf second[4])
{
    for (int v = 0; v < 4; v++) {
        vi words = vi_load(p + channel_of(group, v) * 2);
        first[v] = v_from_bits(vi_shl(words, 16));
        second[v] = v_from_bits(vi_and(words, vi_set((int32_t)0xFFFF0000u)));
    }
}

BL_INLINE vf add_product(vf value, vf weight, vf sum, bool halves)
{
    return halves ? v_fused_bf16(value, weight, sum) : v_mul_add(value, weight, sum);
}

BL_INLINE void add_products(const struct tile *tile, int rows, int64_t k, const vf w[4],
                            vf sums[][4], bool halves)
{
    for (int i = 0; i < rows; i++) {
        vf value = v_set(tile->x[i * tile->x_stride + k]);
        for (int v = 0; v < 4; v++)
            sums[i][v] = add_product(value, w[v], sums[i][v], halves);
    }
}

/* Reads ahead, for the hardware's own prefetching ends with every page. */
BL_INLINE void direct_codes(const struct tile *tile, int rows, int64_t group,
                            const uint8_t *weights, vf sums[][4])
{
    weights += group * GROUP;
    for (int64_t k = 0; k < tile->count; k++) {
        vf w[4];
        for (int64_t at = 0; at < GROUP; at += LINE)
            __builtin_prefetch(weights + (k + AHEAD) * BL_PANEL + at);
        decode_group(weights + k * BL_PANEL, w);
        add_products(tile, rows, k, w, sums, false);
    }
}

BL_INLINE void direct_halves(const struct tile *tile, int rows, int64_t group,
                             const uint16_t *weights, vf sums[][4])
{
    for (int64_t k = 0; k < tile->count; k += 2) {
        vf first[4], second[4];
        for (int v = 0; v < 4; v++)
            if (v * LANES * 4 % LINE == 0)
                __builtin_prefetch(weights + (k + AHEAD) * BL_PANEL + channel_of(group, v) * 2);
        decode_pair(weights + k * BL_PANEL, group, first, second);
        add_products(tile, rows, k, first, sums, true);
        if (k + 1 < tile->count)
            add_products(tile, rows, k + 1, second, sums, true);
    }
}

BL_INLINE void direct_block(const struct tile *tile, int rows, int64_t group,
                            const uint8_t *weights, bool halves)
{
    vf sums[DIRECT][4];
    for (int i = 0; i < rows; i++)
        for (int v = 0; v < 4; v++)
            sums[i][v] = v_set(0.0f);
    if (halves)
        direct_halves(tile, rows, group, (const uint16_t *)weights, sums);
    else
        direct_codes(tile, rows, group, weights, sums);
    add_block(tile, rows, group, 0, 4, sums);
}

BL_INLINE void tile_block(const struct tile *tile, int rows, int64_t group, int first,
                          const float *weights, bool halves)
{
    vf sums[TILE][4];
    for (int i = 0; i < rows; i++)
        for (int v = 0; v < WIDE; v++)
            sums[i][v] = v_set(0.0f);
    weights += group * GROUP + first * LANES;
    for (int64_t k = 0; k < tile->count; k++) {
        vf w[WIDE];
        for (int v = 0; v < WIDE; v++)
            w[v] = v_load(weights + k * BL_PANEL + v * LANES);
        for (int i = 0; i < rows; i++) {
            vf value = v_set(tile->x[i * tile->x_stride + k]);
            for (int v = 0; v < WIDE; v++)
                sums[i][v] = add_product(value, w[v], sums[i][v], halves);
        }
    }
    add_block(tile, rows, group, first, WIDE, sums);
}

/* A constant number of rows, so that the sums are registers. */
#define FOR_ROWS(n, call)                                                                          \
    case n: {                                                                                      \
        enum { ROWS = n };                                                                         \
        call;                                                                                      \
        break;                                                                                     \
    }

BL_INLINE void direct_rows(const struct tile *tile, int64_t rows, const uint8_t *weights,
                           bool halves)
{
    for (int64_t group = 0; group < GROUPS; group++)
        switch (rows) {
            FOR_ROWS(1, direct_block(tile, ROWS, group, weights, halves))
#if BL_DIRECT >= 2
            FOR_ROWS(2, direct_block(tile, ROWS, group, weights, halves))
#endif
#if BL_DIRECT >= 4
            FOR_ROWS(3, direct_block(tile, ROWS, group, weights, halves))
            FOR_ROWS(4, direct_block(tile, ROWS, group, weights, halves))
#endif
        }
}

BL_INLINE void tile_rows(const struct tile *tile, int64_t rows, const float *weights, bool halves)
{
    for (int64_t group = 0; group < GROUPS; group++)
        for (int first = 0; first < 4; first += WIDE)
            switch (rows) {
                FOR_ROWS(1, tile_block(tile, ROWS, group, first, weights, halves))
                FOR_ROWS(2, tile_block(tile, ROWS, group, first, weights, halves))
                FOR_ROWS(3, tile_block(tile, ROWS, group, first, weights, halves))
                FOR_ROWS(4, tile_block(tile, ROWS, group, first, weights, halves))
                FOR_ROWS(5, tile_block(tile, ROWS, group, first, weights, halves))
                FOR_ROWS(6, tile_block(tile, ROWS, group, first, weights, halves))
            }
}

#undef FOR_ROWS

/* The kind of the weights as a constant, too. */
static void direct_panel(const struct tile *tile, int64_t rows, const uint8_t *weights, bool halves)
{
    if (halves)
        direct_rows(tile, rows, weights, true);
    else
        direct_rows(tile, rows, weights, false);
}

static void tile_panel(const struct tile *tile, int64_t rows, const float *weights, bool halves)
{
    if (halves)
        tile_rows(tile, rows, weights, true);
    else
        tile_rows(tile, rows, weights, false);
}

static void decode_code_panel(const uint8_t *weights, float *out, int64_t count)
{
    for (int64_t i = 0; i < count * BL_PANEL; i += GROUP) {
        vf w[4];
        decode_group(weights + i, w);
        for (int v = 0; v < 4; v++)
            v_store(out + i + v * LANES, w[v]);
    }
}

static void decode_half_panel(const uint16_t *weights, float *out, int64_t count)
{
    for (int64_t k = 0; k < count; k += 2)
        for (int64_t group = 0; group < GROUPS; group++) {
            vf first[4], second[4];
            decode_pair(weights + k * BL_PANEL, group, first, second);
            for (int v = 0; v < 4; v++) {
                float *to = out + k * BL_PANEL + group * GROUP + v * LANES;
                v_store(to, first[v]);
                if (k + 1 < count)
                    v_store(to + BL_PANEL, second[v]);
            }
        }
}

/* `count` inputs of a panel. */
static void decode_panel(const uint8_t *weights, float *out, int64_t count, bool halves)
{
    if (halves)
        decode_half_panel((const uint16_t *)weights, out, count);
    else
        decode_code_panel(weights, out, count);
}
