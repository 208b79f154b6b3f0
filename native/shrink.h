/* Rows times a LoRA's A.
 *
 * Every element of the product is summed in an order that depends on the number of columns and the
 * dtype of the rows only: SUMS sums side by side, over SHRINK_CHUNK columns; the sums of the chunks
 * one after the other; the SUMS at last, halves on halves.  Of bfloat16 rows, sum i takes elements
 * 2 * i and 2 * i + 1 of every SHRINK_STEP; of float32 rows, i and i + SUMS.  How many rows and
 * ranks are multiplied at a time, and how many of the sums a vector holds, decides which of them
 * share a load, and nothing else.
 */
enum { SHRINK_CHUNK = 1024, BLOCK_ROWS = 8, TILE_ROWS = 4, TILE_RANKS = 4, LONE_ROW_RANKS = 8 };
enum { SUMS = 16, PARTS = SUMS / LANES, SHRINK_STEP = 2 * SUMS };

/* Rows that share a slot, `cols` columns each; the row numbers are those of the output. */
struct row_block {
    int64_t count;
    int64_t row[BLOCK_ROWS];
    const void *values[BLOCK_ROWS];
};

/* What is multiplied: `narrow` rows are bfloat16, others float32; of A, a bl_lora_dtype. */
struct factor_kind {
    bool narrow;
    int64_t a;
};

BL_INLINE int64_t lora_size(int64_t dtype) { return dtype == BL_LORA_F32 ? 4 : 2; }

/* LANES elements, in order. */
BL_INLINE vf load_lora(int64_t dtype, const void *p)
{
    if (dtype == BL_LORA_F32)
        return v_load(p);
    if (dtype == BL_LORA_F16)
        return v_load_f16(p);
    return v_from_bits(vi_shl(vi_load_halves(p), 16));
}

/* Both elements of a step that each of LANES sums takes, from sum `part` * LANES on. */
BL_INLINE vpair load_pair(bool narrow, int64_t dtype, const char *p, int part)
{
    int64_t size = lora_size(dtype);
    if (narrow && dtype == BL_LORA_BF16)
        return load_bf16((const uint16_t *)(p + part * STEP * size));
    if (narrow) {
        vf first = load_lora(dtype, p + part * STEP * size);
        vf second = load_lora(dtype, p + (part * STEP + LANES) * size);
        return (vpair){v_evens(first, second), v_odds(first, second)};
    }
    return (vpair){load_lora(dtype, p + part * LANES * size),
                   load_lora(dtype, p + (part * LANES + SUMS) * size)};
}

/* x[i] and a[j] lie at the first of `count` columns.  `rows`, `ranks` and `kind` are constants in
 * every call. */
BL_INLINE void multiply_step(int rows, int ranks, struct factor_kind kind, const char *const *x,
                             const char *const *a, int64_t at, int part, vf *sum)
{
    int64_t x_dtype = kind.narrow ? BL_LORA_BF16 : BL_LORA_F32;
    vpair value[TILE_ROWS];
    for (int i = 0; i < rows; i++)
        value[i] = load_pair(kind.narrow, x_dtype, x[i] + at * lora_size(x_dtype), part);
    for (int j = 0; j < ranks; j++) {
        vpair factor = load_pair(kind.narrow, kind.a, a[j] + at * lora_size(kind.a), part);
        for (int i = 0; i < rows; i++) {
            sum[i * ranks + j] = v_fused(value[i].even, factor.even, sum[i * ranks + j]);
            sum[i * ranks + j] = v_fused(value[i].odd, factor.odd, sum[i * ranks + j]);
        }
    }
}

/* Copies of what is left of the rows, with zeros behind. */
struct shrink_tail {
    float x[TILE_ROWS][SHRINK_STEP], a[LONE_ROW_RANKS][SHRINK_STEP];
    const char *x_row[TILE_ROWS], *a_row[LONE_ROW_RANKS];
};

BL_INLINE void copy_tails(int count, int64_t size, const char *const *rows, int64_t at,
                          int64_t left, float (*copies)[SHRINK_STEP], const char **copied)
{
    memset(copies, 0, (size_t)count * sizeof *copies);
    for (int i = 0; i < count; i++)
        copied[i] = memcpy(copies[i], rows[i] + at * size, (size_t)(left * size));
}

/* Adds to, or for the first chunk sets, `rows` * `ranks` times SUMS numbers at `total`. */
BL_INLINE void multiply_tile(int rows, int ranks, struct factor_kind kind, const char *const *x,
                             const char *const *a, int64_t count, bool first, float *total)
{
    vf sum[TILE_ROWS * TILE_RANKS > LONE_ROW_RANKS ? TILE_ROWS * TILE_RANKS : LONE_ROW_RANKS];
    struct shrink_tail tail;
    int64_t whole = count - count % SHRINK_STEP;
    if (whole < count) {
        copy_tails(rows, kind.narrow ? 2 : 4, x, whole, count - whole, tail.x, tail.x_row);
        copy_tails(ranks, lora_size(kind.a), a, whole, count - whole, tail.a, tail.a_row);
    }
    for (int part = 0; part < PARTS; part++) {
        for (int i = 0; i < rows * ranks; i++)
            sum[i] = v_set(0.0f);
        for (int64_t at = 0; at < whole; at += SHRINK_STEP)
            multiply_step(rows, ranks, kind, x, a, at, part, sum);
        if (whole < count)
            multiply_step(rows, ranks, kind, tail.x_row, tail.a_row, 0, part, sum);
        for (int i = 0; i < rows * ranks; i++) {
            float *place = total + i * SUMS + part * LANES;
            v_store(place, first ? sum[i] : v_add(v_load(place), sum[i]));
        }
    }
}

BL_INLINE float sum_of(const float *total)
{
    if (PARTS == 1)
        return v_reduce_add(v_load(total));
    if (PARTS == 2)
        return v_reduce_add(v_add(v_load(total), v_load(total + LANES)));
    float sum[SUMS];
    memcpy(sum, total, sizeof sum);
    for (int half = SUMS / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++)
            sum[i] += sum[i + half];
    return sum[0];
}

typedef void multiply_fn(int high, const char *const *x, const char *const *a, int64_t count,
                         bool first, float *total);

/* A function for each kind of rows and of A; `high` rows. */
#define MULTIPLY(name, narrow, dtype)                                                              \
    static void name(int high, const char *const *x, const char *const *a, int64_t count,          \
                     bool first, float *total)                                                     \
    {                                                                                              \
        const struct factor_kind kind = {narrow, dtype};                                           \
        if (high == 1)                                                                             \
            multiply_tile(1, LONE_ROW_RANKS, kind, x, a, count, first, total);                     \
        else if (high == 2)                                                                        \
            multiply_tile(2, TILE_RANKS, kind, x, a, count, first, total);                         \
        else                                                                                       \
            multiply_tile(4, TILE_RANKS, kind, x, a, count, first, total);                         \
    }

MULTIPLY(multiply_bf16_bf16, true, BL_LORA_BF16)
MULTIPLY(multiply_bf16_f32, true, BL_LORA_F32)
MULTIPLY(multiply_bf16_f16, true, BL_LORA_F16)
MULTIPLY(multiply_f32_bf16, false, BL_LORA_BF16)
MULTIPLY(multiply_f32_f32, false, BL_LORA_F32)
MULTIPLY(multiply_f32_f16, false, BL_LORA_F16)

BL_INLINE multiply_fn *multiply_of(struct factor_kind kind)
{
    if (kind.a == BL_LORA_BF16)
        return kind.narrow ? multiply_bf16_bf16 : multiply_f32_bf16;
    if (kind.a == BL_LORA_F32)
        return kind.narrow ? multiply_bf16_f32 : multiply_f32_f32;
    return kind.narrow ? multiply_bf16_f16 : multiply_f32_f16;
}

/* Where a tile's sums lie: those of all rows above it come first. */
BL_INLINE float *tile_total(float *total, int64_t padded_ranks, int64_t row, int64_t rank,
                            int64_t high)
{
    return total + (row * padded_ranks + rank * high) * SUMS;
}

/* Rows of the next tile, of which the last may be doubled: what is left of a block. */
BL_INLINE int64_t tile_height(int64_t left)
{
    return left > 2 ? TILE_ROWS : left;
}

BL_INLINE int64_t padded_rank(int64_t ranks)
{
    return (ranks + LONE_ROW_RANKS - 1) / LONE_ROW_RANKS * LONE_ROW_RANKS;
}

/* LONE_ROW_RANKS ranks from `rank` on, of which the last may be doubled. */
static void multiply_rows(const struct row_block *block, struct factor_kind kind,
                          const char *const *a, int64_t at, int64_t count, int64_t rank,
                          int64_t ranks, float *total)
{
    int64_t padded = padded_rank(ranks), x_size = kind.narrow ? 2 : 4;
    multiply_fn *multiply = multiply_of(kind);
    for (int64_t row = 0, high; row < block->count; row += high) {
        const char *x[TILE_ROWS];
        high = tile_height(block->count - row);
        for (int64_t i = 0; i < high; i++) {
            int64_t own = row + i < block->count ? row + i : block->count - 1;
            x[i] = (const char *)block->values[own] + at * x_size;
        }
        float *first = tile_total(total, padded, row, rank, high);
        if (high == 1) {
            multiply(1, x, a, count, at == 0, first);
            continue;
        }
        for (int64_t j = 0; j < LONE_ROW_RANKS && rank + j < ranks; j += TILE_RANKS)
            multiply((int)high, x, a + j, count, at == 0, first + j * high * SUMS);
    }
}

/* Writes row i of the block to `out` + i * `stride`, `width` columns: zeros from `ranks` on. */
static void put_product(const struct row_block *block, int64_t ranks, int64_t width, float *total,
                        float *const *out)
{
    int64_t padded = padded_rank(ranks);
    for (int64_t row = 0, high; row < block->count; row += high) {
        high = tile_height(block->count - row);
        int64_t wide = high == 1 ? LONE_ROW_RANKS : TILE_RANKS;
        for (int64_t i = 0; i < high && row + i < block->count; i++) {
            for (int64_t j = 0; j < width; j++) {
                const float *tile = tile_total(total, padded, row, j / wide * wide, high);
                out[row + i][j] = j < ranks ? sum_of(tile + (i * wide + j % wide) * SUMS) : 0.0f;
            }
        }
    }
}

/* `a` is the first of `ranks` rows, `a_stride` elements apart.  `total` has room for BLOCK_ROWS
 * rows of padded_rank(ranks) times SUMS numbers. */
static void multiply_block(const struct row_block *block, struct factor_kind kind, const void *a,
                           int64_t a_stride, int64_t ranks, int64_t cols, float *total)
{
    for (int64_t at = 0; ranks > 0 && (at < cols || at == 0); at += SHRINK_CHUNK) {
        int64_t left = cols - at, count = left < SHRINK_CHUNK ? left : SHRINK_CHUNK;
        for (int64_t rank = 0; rank < ranks; rank += LONE_ROW_RANKS) {
            const char *rows[LONE_ROW_RANKS];
            for (int64_t j = 0; j < LONE_ROW_RANKS; j++) {
                int64_t own = rank + j < ranks ? rank + j : ranks - 1;
                rows[j] = (const char *)a + (own * a_stride + at) * lora_size(kind.a);
            }
            multiply_rows(block, kind, rows, at, count, rank, ranks, total);
        }
    }
}

/* For producers: bfloat16 rows.  `total` has room for BLOCK_ROWS rows of `width`, rounded up to
 * LONE_ROW_RANKS, times SUMS numbers. */
static void shrink_block(const struct bl_shrink *shrink, int64_t slot,
                         const struct row_block *block, int64_t cols, float *total)
{
    int64_t held = slot < 0 ? 0 : shrink->ranks[slot];
    int64_t ranks = held < shrink->width ? held : shrink->width;
    struct factor_kind kind = {true, shrink->a_dtype};
    float *out[BLOCK_ROWS];
    for (int64_t i = 0; i < block->count; i++)
        out[i] = shrink->out + block->row[i] * shrink->out_stride;
    if (ranks > 0) {
        int64_t first = shrink->starts[slot] * shrink->row_stride * lora_size(shrink->a_dtype);
        multiply_block(block, kind, (const char *)shrink->a + first, shrink->row_stride, ranks,
                       cols, total);
    }
    put_product(block, ranks, shrink->width, total, out);
}
