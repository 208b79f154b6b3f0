/* A few rows times one panel of weights: the inner loops of bl_matmul.
 *
 * A panel holds, for each input in turn, one element for each of BL_PANEL channels, in an order that
 * makes a group of 4 * LANES neighbours four vectors of neighbouring channels: element 2 * i is
 * channel i, element 2 * i + 1 is channel i + BL_PANEL / 2.
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

BL_INLINE void add_block(const struct tile *tile, int rows, int64_t group, int first, int count,
                         vf sums[][4])
{
    for (int i = 0; i < rows; i++) {
        const float *row_scale = tile->row_scale;
        vf row = v_set(row_scale ? row_scale[i * tile->row_scale_stride] : 1.0f);
        for (int v = 0; v < count; v++) {
            int vector = first + v;
            int64_t channel = group * (2 * LANES) + (vector & 1) * LANES;
            channel += (vector >> 1) * (BL_PANEL / 2);
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

/* A group of weights: codes as 1 / BL_WEIGHT_BIAS of their value, bfloat16, two to a word, as they
 * are. */
BL_INLINE void decode_weights(const uint8_t *p, bool halves, vf out[4])
{
    if (!halves) {
        decode_group(p, out);
        return;
    }
    for (int i = 0; i < 2; i++) {
        vi words = vi_load(p + i * LANES * 4);
        out[i] = v_from_bits(vi_shl(words, 16));
        out[2 + i] = v_from_bits(vi_and(words, vi_set((int32_t)0xFFFF0000u)));
    }
}

BL_INLINE vf add_product(vf value, vf weight, vf sum, bool halves)
{
    return halves ? v_fused_bf16(value, weight, sum) : v_mul_add(value, weight, sum);
}

BL_INLINE void direct_block(const struct tile *tile, int rows, int64_t group,
                            const uint8_t *weights, bool halves)
{
    const int64_t size = halves ? 2 : 1;
    weights += group * GROUP * size;
    vf sums[DIRECT][4];
    for (int i = 0; i < rows; i++)
        for (int v = 0; v < 4; v++)
            sums[i][v] = v_set(0.0f);
    for (int64_t k = 0; k < tile->count; k++) {
        vf w[4];
        /* The hardware's own prefetching ends with every page. */
        for (int64_t at = 0; at < GROUP * size; at += LINE)
            __builtin_prefetch(weights + (k + AHEAD) * BL_PANEL * size + at);
        decode_weights(weights + k * BL_PANEL * size, halves, w);
        for (int i = 0; i < rows; i++) {
            vf value = v_set(tile->x[i * tile->x_stride + k]);
            for (int v = 0; v < 4; v++)
                sums[i][v] = add_product(value, w[v], sums[i][v], halves);
        }
    }
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

BL_INLINE void decode_inputs(const uint8_t *weights, float *out, int64_t count, bool halves)
{
    for (int64_t i = 0; i < count * BL_PANEL; i += GROUP) {
        vf w[4];
        decode_weights(weights + (halves ? 2 * i : i), halves, w);
        for (int v = 0; v < 4; v++)
            v_store(out + i + v * LANES, w[v]);
    }
}

/* `count` inputs of a panel. */
static void decode_panel(const uint8_t *weights, float *out, int64_t count, bool halves)
{
    if (halves)
        decode_inputs(weights, out, count, true);
    else
        decode_inputs(weights, out, count, false);
}
