/* Rows times a LoRA's A.
 *
 * Every element of the product is summed in an order that depends on the number of columns only:
 * lane by lane over SHRINK_CHUNK columns, even and odd elements in turn; the sums of the chunks one
 * after the other; the lanes at last.  How many rows and ranks are multiplied at a time decides
 * which of them share a load, and nothing else.
 */
enum { SHRINK_CHUNK = 1024, BLOCK_ROWS = 8, TILE_ROWS = 4, TILE_RANKS = 4, LONE_ROW_RANKS = 8 };

/* Rows that share a slot, `cols` columns each; the row numbers are those of the output. */
struct row_block {
    int64_t count;
    int64_t row[BLOCK_ROWS];
    const uint16_t *values[BLOCK_ROWS];
};

/* A float32 or bfloat16 matrix from some element on. */
BL_INLINE vpair load_a(bool wide, const void *p)
{
    if (!wide)
        return load_bf16(p);
    vf first = v_load(p), second = v_load((const float *)p + LANES);
    return (vpair){v_evens(first, second), v_odds(first, second)};
}

/* x[i] and a[j] lie at the first of `count` columns.  `rows`, `ranks` and `wide` are constants in
 * every call. */
BL_INLINE void multiply_step(int rows, int ranks, bool wide, const uint16_t *const *x,
                             const char *const *a, int64_t at, vf *sum)
{
    int64_t a_at = at * (int64_t)(wide ? sizeof(float) : sizeof(uint16_t));
    vpair value[TILE_ROWS];
    for (int i = 0; i < rows; i++)
        value[i] = load_bf16(x[i] + at);
    for (int j = 0; j < ranks; j++) {
        vpair factor = load_a(wide, a[j] + a_at);
        for (int i = 0; i < rows; i++) {
            sum[i * ranks + j] = v_mul_add(value[i].even, factor.even, sum[i * ranks + j]);
            sum[i * ranks + j] = v_mul_add(value[i].odd, factor.odd, sum[i * ranks + j]);
        }
    }
}

BL_INLINE void multiply_tail(int rows, int ranks, bool wide, const uint16_t *const *x,
                             const char *const *a, int64_t at, int64_t left, vf *sum)
{
    size_t size = wide ? sizeof(float) : sizeof(uint16_t);
    uint16_t values[TILE_ROWS][TAIL];
    float factors[LONE_ROW_RANKS][STEP];
    const uint16_t *x_tail[TILE_ROWS];
    const char *a_tail[LONE_ROW_RANKS];
    for (int i = 0; i < rows; i++)
        x_tail[i] = tail_of(x[i] + at, left, values[i]);
    memset(factors, 0, sizeof factors);
    for (int j = 0; j < ranks; j++)
        a_tail[j] = memcpy(factors[j], a[j] + at * (int64_t)size, (size_t)left * size);
    multiply_step(rows, ranks, wide, x_tail, a_tail, 0, sum);
}

/* Adds to, or for the first chunk sets, `rows` * `ranks` vectors at `total`. */
BL_INLINE void multiply_tile(int rows, int ranks, bool wide, const uint16_t *const *x,
                             const char *const *a, int64_t count, bool first, float *total)
{
    vf sum[TILE_ROWS * TILE_RANKS > LONE_ROW_RANKS ? TILE_ROWS * TILE_RANKS : LONE_ROW_RANKS];
    for (int i = 0; i < rows * ranks; i++)
        sum[i] = v_set(0.0f);
    int64_t at = 0;
    for (; at + STEP <= count; at += STEP)
        multiply_step(rows, ranks, wide, x, a, at, sum);
    if (at < count)
        multiply_tail(rows, ranks, wide, x, a, at, count - at, sum);
    for (int i = 0; i < rows * ranks; i++) {
        float *place = total + i * LANES;
        v_store(place, first ? sum[i] : v_add(v_load(place), sum[i]));
    }
}

static void multiply_four(bool wide, const uint16_t *const *x, const char *const *a, int64_t count,
                          bool first, float *total)
{
    if (wide)
        multiply_tile(4, TILE_RANKS, true, x, a, count, first, total);
    else
        multiply_tile(4, TILE_RANKS, false, x, a, count, first, total);
}

static void multiply_two(bool wide, const uint16_t *const *x, const char *const *a, int64_t count,
                         bool first, float *total)
{
    if (wide)
        multiply_tile(2, TILE_RANKS, true, x, a, count, first, total);
    else
        multiply_tile(2, TILE_RANKS, false, x, a, count, first, total);
}

static void multiply_lone(bool wide, const uint16_t *const *x, const char *const *a, int64_t count,
                          bool first, float *total)
{
    if (wide)
        multiply_tile(1, LONE_ROW_RANKS, true, x, a, count, first, total);
    else
        multiply_tile(1, LONE_ROW_RANKS, false, x, a, count, first, total);
}

/* Where a tile's sums lie: those of all rows above it come first. */
BL_INLINE float *tile_total(float *total, int64_t padded_ranks, int64_t row, int64_t rank,
                            int64_t high)
{
    return total + (row * padded_ranks + rank * high) * LANES;
}

/* Rows of the next tile, of which the last may be doubled: what is left of a block. */
BL_INLINE int64_t tile_height(int64_t left)
{
    return left > 2 ? TILE_ROWS : left;
}

/* LONE_ROW_RANKS ranks from `rank` on, of which the last may be doubled. */
static void multiply_rows(const struct row_block *block, bool wide, const char *const *a,
                          int64_t at, int64_t count, int64_t rank, int64_t ranks, float *total)
{
    int64_t padded = (ranks + LONE_ROW_RANKS - 1) / LONE_ROW_RANKS * LONE_ROW_RANKS;
    for (int64_t row = 0, high; row < block->count; row += high) {
        const uint16_t *x[TILE_ROWS];
        high = tile_height(block->count - row);
        for (int64_t i = 0; i < high; i++)
            x[i] = block->values[row + i < block->count ? row + i : block->count - 1] + at;
        float *first = tile_total(total, padded, row, rank, high);
        if (high == 1) {
            multiply_lone(wide, x, a, count, at == 0, first);
            continue;
        }
        for (int64_t j = 0; j < LONE_ROW_RANKS && rank + j < ranks; j += TILE_RANKS)
            (high == 2 ? multiply_two : multiply_four)(wide, x, a + j, count, at == 0,
                                                       first + j * high * LANES);
    }
}

static void put_product(const struct bl_shrink *shrink, const struct row_block *block,
                        int64_t ranks, float *total)
{
    int64_t padded = (ranks + LONE_ROW_RANKS - 1) / LONE_ROW_RANKS * LONE_ROW_RANKS;
    for (int64_t row = 0, high; row < block->count; row += high) {
        high = tile_height(block->count - row);
        int64_t wide = high == 1 ? LONE_ROW_RANKS : TILE_RANKS;
        for (int64_t i = 0; i < high && row + i < block->count; i++) {
            float *out = shrink->out + block->row[row + i] * shrink->out_stride;
            for (int64_t j = 0; j < shrink->width; j++) {
                const float *tile = tile_total(total, padded, row, j / wide * wide, high);
                out[j] = j < ranks ? v_reduce_add(v_load(tile + (i * wide + j % wide) * LANES))
                                   : 0.0f;
            }
        }
    }
}

/* `total` has room for BLOCK_ROWS rows of `width`, rounded up to LONE_ROW_RANKS, vectors. */
static void shrink_block(const struct bl_shrink *shrink, int64_t slot,
                         const struct row_block *block, int64_t cols, float *total)
{
    int64_t held = slot < 0 ? 0 : shrink->ranks[slot];
    int64_t ranks = held < shrink->width ? held : shrink->width;
    bool wide = shrink->a_dtype == BL_LORA_F32;
    int64_t size = wide ? (int64_t)sizeof(float) : (int64_t)sizeof(uint16_t);
    for (int64_t at = 0; ranks > 0 && (at < cols || at == 0); at += SHRINK_CHUNK) {
        int64_t left = cols - at, count = left < SHRINK_CHUNK ? left : SHRINK_CHUNK;
        for (int64_t rank = 0; rank < ranks; rank += LONE_ROW_RANKS) {
            const char *a[LONE_ROW_RANKS];
            for (int64_t j = 0; j < LONE_ROW_RANKS; j++) {
                int64_t own = rank + j < ranks ? rank + j : ranks - 1;
                a[j] = (const char *)shrink->a +
                       (slot * shrink->slot_stride + own * shrink->rank_stride + at) * size;
            }
            multiply_rows(block, wide, a, at, count, rank, ranks, total);
        }
    }
    put_product(shrink, block, ranks, total);
}
