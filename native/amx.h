/* Matmuls of codes with codes, and of bfloat16 with bfloat16, on AMX tiles.
 *
 * Every code is a bfloat16, and a product of two of these is not rounded.  A tile instruction
 * adds the products of 32 inputs: those of the even inputs from the left, those of the odd ones from
 * the left, then the two sums, and that to what was there.  So a block sum depends neither on the
 * number of rows nor on how tiles lie, but differs from that of tile.h in its last places.
 *
 * It takes subnormals for zeros, and makes zeros of them.  Of codes there are none (sums are
 * multiples of 2**-18); of bfloat16 they are lost, here alone.
 *
 * Weights in bfloat16 lie in memory as tiles take them.  Those of codes are decoded first, and
 * their totals lie in the order of the tiles until they are finished: in each half of a panel, tile
 * 0 has channels 8 * i to 8 * i + 3, tile 1 the others.
 */
enum {
    TILE_HEIGHT = 16,
    TILE_INPUTS = 32,
    TILE_WORDS = 512,          /* bfloat16 of a tile */
    TILES_ROWS_AT_ONCE = 512,
    TILES_INPUT_BYTES = 1 << 19,
    TILES_PANELS_AT_ONCE = 16,
    SHORT_DEPTH = 128, /* DEPTH for a single tile of rows: leaves room in the nearest cache */
    HALVES_DEPTH = 512, /* TILE_BLOCK of linear/kernels/reference.py: no scale ends it earlier */
    FLAT_ROWS = 64, /* up to so many, weights in bfloat16 are read from memory once */
    FEW = 3,           /* rows for which filling tiles costs more than they bring */
};

struct tile_shapes {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

/* The intrinsics of some compilers do not say that they read memory. */
#define MEMORY_IS_READ() __asm__ volatile("" ::: "memory")

/* Up to `rows` rows in the tiles of sums and of activations, all of those of weights. */
BL_INLINE void shape_tiles(int64_t rows)
{
    struct tile_shapes shapes = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        shapes.row_bytes[i] = 64;
        shapes.rows[i] = (uint8_t)(i < 5 && rows < TILE_HEIGHT ? rows : TILE_HEIGHT);
    }
    MEMORY_IS_READ();
    _tile_loadconfig(&shapes);
}

/* Whether the tiles serve a matmul: a matter of its linear, never of its rows. */
BL_INLINE bool tiles_serve(const struct bl_matmul *spec)
{
    if (spec->weight_kind == BL_WEIGHT_BF16)
        return true;
    return spec->x_kind == BL_INPUT_E4M3 && spec->block % TILE_INPUTS == 0 &&
           SHORT_DEPTH % spec->block == 0;
}

/* --- decoding --- */

/* 32 codes, in the lower (or, `upper`, the higher) byte of each word, as bfloat16; NaN excepted. */
BL_INLINE __m512i half_of_code(__m512i words, bool upper)
{
    const __m512i subnormal = _mm512_set_epi16(
        0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x3C60, 0x3C40,
        0x3C20, 0x3C00, 0x3BC0, 0x3B80, 0x3B00, 0);
    __m512i index = upper ? _mm512_srli_epi16(words, 8) : words;
    __m512i moved = upper ? _mm512_srli_epi16(words, 4) : _mm512_slli_epi16(words, 4);
    __m512i magnitude = _mm512_and_si512(moved, _mm512_set1_epi16(0x07F0));
    __mmask32 small = _mm512_cmplt_epi16_mask(magnitude, _mm512_set1_epi16(0x0080));
    __m512i value = _mm512_add_epi16(magnitude, _mm512_set1_epi16(0x3C00));
    value = _mm512_mask_permutexvar_epi16(value, small, index, subnormal);
    __m512i sign = upper ? words : _mm512_slli_epi16(words, 8);
    return _mm512_ternarylogic_epi32(value, sign, _mm512_set1_epi16((short)0x8000), 0xF8);
}

/* Codes of one row: exact, and NaN stays NaN. */
static void decode_codes(const uint8_t *x, int64_t count, uint16_t *out)
{
    for (int64_t k = 0; k < count; k += TILE_INPUTS) {
        __mmask32 here = count - k < TILE_INPUTS ? (1u << (count - k)) - 1 : 0xFFFFFFFFu;
        __m512i words = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(here, x + k));
        __m512i value = half_of_code(words, false);
        __m512i magnitude = _mm512_and_si512(words, _mm512_set1_epi16(0x7F));
        __mmask32 nan = _mm512_cmpeq_epi16_mask(magnitude, _mm512_set1_epi16(0x7F));
        value = _mm512_mask_mov_epi16(value, nan, _mm512_set1_epi16(0x7FC0));
        _mm512_store_si512(out + k, value);
    }
}

/* bfloat16 of one row, then zeros up to a whole tile. */
BL_INLINE void copy_halves(const uint16_t *x, int64_t count, uint16_t *out)
{
    memcpy(out, x, (size_t)count * sizeof *out);
    memset(out + count, 0, (size_t)(-count & (TILE_INPUTS - 1)) * sizeof *out);
}

/* Two neighbouring inputs of a panel: a row of each of four tiles. */
BL_INLINE void place_inputs(__m512i first, __m512i second, uint16_t *out)
{
    __m512i low = _mm512_unpacklo_epi16(first, second);
    __m512i high = _mm512_unpackhi_epi16(first, second);
    _mm512_store_si512(out, half_of_code(low, false));
    _mm512_store_si512(out + TILE_WORDS, half_of_code(high, false));
    _mm512_store_si512(out + 2 * TILE_WORDS, half_of_code(low, true));
    _mm512_store_si512(out + 3 * TILE_WORDS, half_of_code(high, true));
}

/* `count` inputs of a panel, then zeros up to a whole tile. */
static void place_weights(const uint8_t *weights, int64_t count, uint16_t *out)
{
    const int64_t padded = (count + TILE_INPUTS - 1) / TILE_INPUTS * TILE_INPUTS;
    const __m512i zero = _mm512_setzero_si512();
    for (int64_t k = 0; k < padded; k += 2) {
        const uint8_t *p = weights + k * BL_PANEL;
        uint16_t *to = out + k / TILE_INPUTS * 4 * TILE_WORDS + k % TILE_INPUTS * TILE_HEIGHT;
        __builtin_prefetch(p + AHEAD * BL_PANEL);
        __builtin_prefetch(p + (AHEAD + 1) * BL_PANEL);
        place_inputs(k < count ? vi_load(p) : zero, k + 1 < count ? vi_load(p + BL_PANEL) : zero,
                     to);
    }
}

/* --- block sums --- */

/* A slab: some inputs of one panel. */
struct tile_part {
    const struct bl_matmul *spec;
    const struct part *part;
    const uint16_t *x; /* of the slab's first input */
    int64_t x_stride, panel, k, depth, block; /* elements; the first input; inputs */
    /* Four tiles for every TILE_INPUTS: from one to the next, in elements, and from a row of one to
     * the next, in bytes. */
    const uint16_t *weights;
    int64_t tile_step, line;
};

/* Weights that are decoded tile by tile. */
BL_INLINE void place_slab(struct tile_part *at, uint16_t *room)
{
    const uint8_t *from = at->spec->weight;
    from += (at->panel * at->spec->columns + at->k) * BL_PANEL;
    place_weights(from, at->depth, room);
    at->weights = room;
    at->tile_step = TILE_WORDS;
    at->line = TILE_INPUTS * 2;
}

/* Weights that are tiles already; where the last one is not whole, a copy with zeros behind. */
BL_INLINE void find_slab(struct tile_part *at, uint16_t *room)
{
    const int64_t pairs = (at->depth + 1) / 2, over = -at->depth & (TILE_INPUTS - 1);
    const uint16_t *from = at->spec->weight;
    from += at->panel * weight_inputs(at->spec) * BL_PANEL + at->k * BL_PANEL;
    at->weights = from;
    at->tile_step = TILE_INPUTS;
    at->line = 4 * TILE_INPUTS * 2;
    if (!over)
        return;
    memcpy(room, from, (size_t)(pairs * 2 * BL_PANEL) * sizeof *room);
    memset(room + pairs * 2 * BL_PANEL, 0, (size_t)(over / 2 * 2 * BL_PANEL) * sizeof *room);
    at->weights = room;
}

/* Adds sums of one block to the totals: `vectors` tiles from `first` on. */
BL_INLINE void add_sums(const struct tile_part *at, int64_t row, int64_t rows, int64_t k, int first,
                        int vectors, const float *sums)
{
    const struct part *part = at->part;
    struct tile scales = {0};
    set_scales(&scales, at->spec, part, row, at->panel, k);
    vf column[4];
    for (int v = 0; v < vectors; v++) {
        column[v] = v_set(scales.column_scale ? *scales.column_scale : 1.0f);
        if (scales.column_scale && scales.each_column) {
            const float *p = scales.column_scale + (first + v) / 2 * (BL_PANEL / 2);
            const int j = (first + v) % 2 * 4;
            const vi index = _mm512_add_epi32(
                _mm512_setr_epi32(0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27),
                vi_set(j));
            column[v] = _mm512_permutex2var_ps(v_load(p), index, v_load(p + LANES));
        }
    }
    float *total = part->total + row * part->total_stride +
                   (at->panel - part->panel) * BL_PANEL + first * LANES;
    for (int64_t i = 0; i < rows; i++) {
        vf scale = v_set(scales.row_scale ? scales.row_scale[i * scales.row_scale_stride] : 1.0f);
        for (int v = 0; v < vectors; v++) {
            float *to = total + i * part->total_stride + v * LANES;
            vf sum = v_load(sums + (i * vectors + v) * LANES);
            v_store(to, v_add(v_load(to), v_mul(sum, v_mul(scale, column[v]))));
        }
    }
}

/* 32 rows times two tiles' channels. */
static void square_panel(const struct tile_part *at, int64_t row, int64_t rows, int first)
{
    float sums[2 * TILE_HEIGHT * 2 * LANES] __attribute__((aligned(64)));
    const int64_t stride = at->x_stride * 2, line = 2 * LANES * 4;
    const uint16_t *x = at->x + row * at->x_stride, *lower = x + TILE_HEIGHT * at->x_stride;
    for (int64_t start = 0; start < at->depth; start += at->block) {
        int64_t end = start + at->block;
        end = end < at->depth ? end : at->depth;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        MEMORY_IS_READ();
        for (int64_t k = start; k < end; k += TILE_INPUTS) {
            const uint16_t *w = at->weights + k * BL_PANEL + first * at->tile_step;
            _tile_loadd(4, x + k, stride);
            _tile_loadd(6, w, at->line);
            _tile_loadd(7, w + at->tile_step, at->line);
            _tile_loadd(5, lower + k, stride);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, sums, line);
        _tile_stored(1, sums + LANES, line);
        _tile_stored(2, sums + TILE_HEIGHT * 2 * LANES, line);
        _tile_stored(3, sums + TILE_HEIGHT * 2 * LANES + LANES, line);
        MEMORY_IS_READ();
        add_sums(at, row, rows, at->k + start, first, 2, sums);
    }
}

/* At most 16 rows times a panel. */
static void flat_panel(const struct tile_part *at, int64_t row, int64_t rows)
{
    float sums[TILE_HEIGHT * 4 * LANES] __attribute__((aligned(64)));
    const int64_t stride = at->x_stride * 2, line = 4 * LANES * 4;
    const uint16_t *x = at->x + row * at->x_stride;
    for (int64_t start = 0; start < at->depth; start += at->block) {
        int64_t end = start + at->block;
        end = end < at->depth ? end : at->depth;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        MEMORY_IS_READ();
        for (int64_t k = start; k < end; k += TILE_INPUTS) {
            const uint16_t *w = at->weights + k * BL_PANEL;
            _tile_loadd(4, x + k, stride);
            _tile_loadd(5, w, at->line);
            _tile_loadd(6, w + at->tile_step, at->line);
            _tile_loadd(7, w + 2 * at->tile_step, at->line);
            _tile_dpbf16ps(0, 4, 5);
            _tile_dpbf16ps(1, 4, 6);
            _tile_loadd(5, w + 3 * at->tile_step, at->line);
            _tile_dpbf16ps(2, 4, 7);
            _tile_dpbf16ps(3, 4, 5);
        }
        _tile_stored(0, sums, line);
        _tile_stored(1, sums + LANES, line);
        _tile_stored(2, sums + 2 * LANES, line);
        _tile_stored(3, sums + 3 * LANES, line);
        MEMORY_IS_READ();
        add_sums(at, row, rows, at->k + start, 0, 4, sums);
    }
}

/* --- few rows --- */

/* What tiles would give, in registers: products are exact, so that only the order counts. */
BL_INLINE void few_block(const struct tile *tile, int rows, const uint8_t *weights)
{
    vf sums[FEW][4], odd_or_even[2][FEW][4];
    for (int i = 0; i < rows; i++)
        for (int v = 0; v < 4; v++)
            sums[i][v] = v_set(0.0f);
    for (int64_t start = 0; start < tile->count; start += TILE_INPUTS) {
        int64_t end = start + TILE_INPUTS < tile->count ? start + TILE_INPUTS : tile->count;
        for (int i = 0; i < rows; i++)
            for (int v = 0; v < 4; v++)
                odd_or_even[0][i][v] = odd_or_even[1][i][v] = v_set(0.0f);
        int64_t k = start;
        for (; k + 2 <= end; k += 2)
            for (int odd = 0; odd < 2; odd++) {
                vf w[4];
                __builtin_prefetch(weights + (k + odd + AHEAD) * BL_PANEL);
                decode_group(weights + (k + odd) * BL_PANEL, w);
                for (int i = 0; i < rows; i++) {
                    vf value = v_set(tile->x[i * tile->x_stride + k + odd]);
                    for (int v = 0; v < 4; v++)
                        odd_or_even[odd][i][v] = v_fused(value, w[v], odd_or_even[odd][i][v]);
                }
            }
        if (k < end) {
            vf w[4];
            decode_group(weights + k * BL_PANEL, w);
            for (int i = 0; i < rows; i++) {
                vf value = v_set(tile->x[i * tile->x_stride + k]);
                for (int v = 0; v < 4; v++)
                    odd_or_even[0][i][v] = v_fused(value, w[v], odd_or_even[0][i][v]);
            }
        }
        for (int i = 0; i < rows; i++)
            for (int v = 0; v < 4; v++)
                sums[i][v] = v_add(sums[i][v],
                                   v_add(odd_or_even[0][i][v], odd_or_even[1][i][v]));
    }
    add_block(tile, rows, 0, 0, 4, sums);
}

static void few_rows(const struct matmul_job *job, const struct part *part)
{
    const struct bl_matmul *spec = job->spec;
    for (int64_t first = 0; first < spec->columns; first += job->depth) {
        int64_t count = spec->columns - first < job->depth ? spec->columns - first : job->depth;
        for (int64_t row = 0; row < part->rows; row++)
            decode_input(spec, part->row + row, first, count, part->x + row * part->x_stride);
        for (int64_t panel = 0; panel < part->panels; panel++)
            for (int64_t k = 0; k < count; k += spec->block) {
                const uint8_t *weights = spec->weight;
                weights += ((part->panel + panel) * spec->columns + first + k) * BL_PANEL;
                struct tile tile = {
                    .x = part->x + k,
                    .x_stride = part->x_stride,
                    .total = part->total + panel * BL_PANEL,
                    .total_stride = part->total_stride,
                    .count = count - k < spec->block ? count - k : spec->block,
                };
                set_scales(&tile, spec, part, 0, part->panel + panel, first + k);
                switch (part->rows) {
                case 1: few_block(&tile, 1, weights); break;
                case 2: few_block(&tile, 2, weights); break;
                default: few_block(&tile, 3, weights);
                }
            }
    }
}

/* --- one part of the output --- */

static void tiles_of_panel(const struct tile_part *at)
{
    const int64_t rows = at->part->rows;
    const bool flat = at->spec->weight_kind == BL_WEIGHT_BF16 && rows <= FLAT_ROWS;
    const int64_t pairs = flat ? 0 : (rows + TILE_HEIGHT - 1) / (2 * TILE_HEIGHT);
    for (int first = 0; first < 4; first += 2)
        for (int64_t row = 0; row < pairs * 2 * TILE_HEIGHT; row += 2 * TILE_HEIGHT)
            square_panel(at, row, rows - row < 2 * TILE_HEIGHT ? rows - row : 2 * TILE_HEIGHT, first);
    for (int64_t row = pairs * 2 * TILE_HEIGHT; row < rows; row += TILE_HEIGHT)
        flat_panel(at, row, rows - row < TILE_HEIGHT ? rows - row : TILE_HEIGHT);
}

/* A panel's totals of one row in the order of the channels. */
BL_INLINE void order_channels(float *total)
{
    const vi low =
        _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const vi high = _mm512_add_epi32(low, vi_set(8));
    for (int64_t half = 0; half < BL_PANEL; half += BL_PANEL / 2) {
        vf first = v_load(total + half), second = v_load(total + half + LANES);
        v_store(total + half, _mm512_permutex2var_ps(first, low, second));
        v_store(total + half + LANES, _mm512_permutex2var_ps(first, high, second));
    }
}

/* Decodes inputs `k` to `k + count` of the part's rows; rows that fill up a tile are zeros. */
static void place_rows(const struct matmul_job *job, const struct part *part, int64_t k,
                       int64_t count, uint16_t *x, int64_t stride)
{
    const struct bl_matmul *spec = job->spec;
    for (int64_t row = 0; row < part->rows; row++) {
        int64_t from = input_row(spec, part->row + row) * spec->x_stride + k;
        if (spec->x_kind == BL_INPUT_E4M3)
            decode_codes((const uint8_t *)spec->x + from, count, x + row * stride);
        else
            copy_halves((const uint16_t *)spec->x + from, count, x + row * stride);
    }
    if (part->rows <= TILE_HEIGHT)
        return;
    for (int64_t row = part->rows; row % TILE_HEIGHT; row++)
        memset(x + row * stride, 0, (size_t)stride * sizeof *x);
}

static void fill_tiles(const struct matmul_job *job, struct part *part, char *scratch)
{
    const struct bl_matmul *spec = job->spec;
    const bool halves = spec->weight_kind == BL_WEIGHT_BF16;
    const int64_t slab = halves ? HALVES_DEPTH : part->rows <= TILE_HEIGHT ? SHORT_DEPTH : DEPTH;
    const int64_t stride = job->depth + TILE_INPUTS;
    uint16_t *x = (uint16_t *)scratch, *weights = (uint16_t *)(scratch + job->weights_at);
    shape_tiles(part->rows);
    for (int64_t k = 0; k < spec->columns; k += job->depth) {
        int64_t count = spec->columns - k < job->depth ? spec->columns - k : job->depth;
        place_rows(job, part, k, count, x, stride);
        for (int64_t panel = 0; panel < part->panels; panel++)
            for (int64_t done = 0; done < count; done += slab) {
                struct tile_part at = {
                    .spec = spec,
                    .part = part,
                    .x = x + done,
                    .x_stride = stride,
                    .panel = part->panel + panel,
                    .k = k + done,
                    .depth = count - done < slab ? count - done : slab,
                    .block = halves ? HALVES_DEPTH : spec->block,
                };
                if (halves)
                    find_slab(&at, weights);
                else
                    place_slab(&at, weights);
                tiles_of_panel(&at);
            }
    }
    _tile_release();
    if (halves)
        return;
    for (int64_t row = 0; row < part->rows; row++)
        for (int64_t panel = 0; panel < part->panels; panel++)
            order_channels(part->total + row * part->total_stride + panel * BL_PANEL);
}

static void tiles_unit(const struct matmul_job *job, struct part *part, char *scratch)
{
    if (part->rows <= FEW && job->spec->weight_kind == BL_WEIGHT_E4M3)
        few_rows(job, part);
    else
        fill_tiles(job, part, scratch);
    /* A NaN's sign and payload would tell the two apart. */
    for (int64_t i = 0; i < part->rows * part->total_stride; i += LANES)
        v_store(part->total + i, v_from_bits(canonical_nan(v_load(part->total + i))));
}

/* Sizes of a job that the tiles serve; the rest is as for others. */
static void plan_tiles(struct matmul_job *job, int team)
{
    const struct bl_matmul *spec = job->spec;
    job->row_chunks = (spec->rows + TILES_ROWS_AT_ONCE - 1) / TILES_ROWS_AT_ONCE;
    int64_t rows = (spec->rows + job->row_chunks - 1) / job->row_chunks;
    int64_t padded = (rows + TILE_HEIGHT - 1) / TILE_HEIGHT * TILE_HEIGHT;
    job->rows_at_once = job->row_chunks > 1 ? padded : rows;
    int64_t share = job->panels * job->row_chunks / ((rows < 64 ? 4 : 2) * team);
    job->panels_at_once = share < 1                      ? 1
                          : share < TILES_PANELS_AT_ONCE ? share
                                                         : TILES_PANELS_AT_ONCE;
    int64_t columns = (spec->columns + TILE_INPUTS - 1) / TILE_INPUTS * TILE_INPUTS;
    int64_t depth = spec->weight_kind == BL_WEIGHT_BF16 ? HALVES_DEPTH : DEPTH;
    int64_t fits = TILES_INPUT_BYTES / (padded * 2) / depth * depth;
    job->depth = fits < depth ? depth : fits < columns ? fits : columns;
    job->weights_at = padded_size(padded * (job->depth + TILE_INPUTS) * 2);
    job->total_at = job->weights_at + padded_size(depth * BL_PANEL * 2);
}
