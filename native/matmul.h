/* bl_matmul: FP8 or bfloat16 weights, decoded in registers, times FP8 codes or unquantised
 * activations.  A weight is cut into panels of output channels (tile.h).
 *
 * An output is the sum of block sums, each of which adds its products from the left.  Products with
 * codes are exact, and those of two bfloat16 are not rounded before they are added, so neither
 * vectors nor threads nor the number of rows show in the bytes.
 */
enum {
    ROWS_AT_ONCE = 44 * TILE,
    DEPTH = 256,           /* inputs of a panel that are decoded at once */
    INPUT_BYTES = 1 << 18, /* decoded activations that are kept beside them */
    PANELS_AT_ONCE = 8,
};

struct matmul_job {
    const struct bl_matmul *spec;
    int64_t panels, panels_at_once, row_chunks, rows_at_once, depth;
    int64_t units;
    int64_t scale_groups; /* of a row, that are copied to the scratch memory; 0: none are */
    size_t scratch_size, weights_at, total_at, scale_at;
};

/* --- activations --- */

/* What makes up for the weights' bias. */
BL_INLINE float input_bias(const struct bl_matmul *spec)
{
    return spec->weight_kind == BL_WEIGHT_BF16 ? 1.0f : BL_WEIGHT_BIAS;
}

BL_INLINE vf input_vector(const struct bl_matmul *spec, const char *row, int64_t k)
{
    const vf bias = v_set(input_bias(spec));
    if (spec->x_kind == BL_INPUT_E4M3)
        return v_mul(decode_e4m3(vi_load_bytes((const uint8_t *)row + k)), bias);
    if (spec->x_kind == BL_INPUT_BF16) {
        vi halves = vi_load_halves((const uint16_t *)row + k);
        return v_mul(v_from_bits(vi_shl(halves, 16)), bias);
    }
    return v_mul(v_load((const float *)row + k), bias);
}

/* Inputs of a panel of the weight, with what fills up its last pair. */
BL_INLINE int64_t weight_inputs(const struct bl_matmul *spec)
{
    return spec->weight_kind == BL_WEIGHT_BF16 ? (spec->columns + 1) / 2 * 2 : spec->columns;
}

/* Where an output row's input lies. */
BL_INLINE int64_t input_row(const struct bl_matmul *spec, int64_t row)
{
    return spec->x_rows ? spec->x_rows[row] : row;
}

/* Inputs `first` to `first + count` of one row, times their bias. */
static void decode_input(const struct bl_matmul *spec, int64_t row, int64_t first, int64_t count,
                         float *out)
{
    const int64_t size = spec->x_kind == BL_INPUT_E4M3 ? 1 : spec->x_kind == BL_INPUT_BF16 ? 2 : 4;
    const char *x = (const char *)spec->x + (input_row(spec, row) * spec->x_stride + first) * size;
    int64_t k = 0;
    for (; k + LANES <= count; k += LANES)
        v_store(out + k, input_vector(spec, x, k));
    if (k < count) {
        char copy[LANES * 4] = {0};
        memcpy(copy, x + k * size, (size_t)((count - k) * size));
        v_store(out + k, input_vector(spec, copy, 0));
    }
}

/* --- one part of the output --- */

struct part {
    int64_t row, rows, panel, panels;
    float *x, *weights, *total;
    int64_t x_stride, total_stride;
    const float *scale; /* of its first row; NULL: none */
    int64_t scale_stride;
};

/* Tiles step from a row's scale to the next: where the rows lie anywhere, theirs are gathered. */
static void place_scales(const struct matmul_job *job, struct part *part, float *room)
{
    const struct bl_matmul *spec = job->spec;
    int64_t groups = job->scale_groups;
    if (!groups) {
        part->scale_stride = spec->x_scale_stride;
        part->scale = spec->x_scale ? spec->x_scale + part->row * spec->x_scale_stride : NULL;
        return;
    }
    for (int64_t i = 0; i < part->rows; i++) {
        int64_t row = input_row(spec, part->row + i);
        memcpy(room + i * groups, spec->x_scale + row * spec->x_scale_stride,
               (size_t)groups * sizeof *room);
    }
    part->scale = room;
    part->scale_stride = groups;
}

/* The tile's scales for the block that begins at input `k`. */
BL_INLINE void set_scales(struct tile *tile, const struct bl_matmul *spec, const struct part *part,
                          int64_t row, int64_t panel, int64_t k)
{
    tile->row_scale = NULL;
    tile->column_scale = NULL;
    if (spec->x_group) {
        tile->row_scale = part->scale + row * part->scale_stride + k / spec->x_group;
        tile->row_scale_stride = part->scale_stride;
    }
    if (spec->weight_group) {
        int64_t width = spec->weight_each_channel ? BL_PANEL : 1;
        int64_t groups = (spec->columns + spec->weight_group - 1) / spec->weight_group;
        int64_t index = panel * groups + k / spec->weight_group;
        tile->column_scale = spec->weight_scale + index * width;
        tile->each_column = spec->weight_each_channel;
    }
}

/* Adds inputs `first` to `first + count`, whose activations lie decoded in `part->x`. */
static void multiply_panel(const struct bl_matmul *spec, const struct part *part, int64_t panel,
                           int64_t first, int64_t count)
{
    const bool halves = spec->weight_kind == BL_WEIGHT_BF16;
    const int64_t input = halves ? 2 * BL_PANEL : BL_PANEL; /* bytes */
    const uint8_t *weights = spec->weight;
    const bool direct = part->rows <= DIRECT;
    weights += (panel * weight_inputs(spec) + first) * input;
    for (int64_t done = 0; done < count; done += DEPTH) {
        int64_t depth = count - done < DEPTH ? count - done : DEPTH;
        if (!direct)
            decode_panel(weights + done * input, part->weights, depth, halves);
        for (int64_t row = 0; row < part->rows; row += TILE) {
            int64_t rows = part->rows - row < TILE ? part->rows - row : TILE;
            for (int64_t k = done; k < done + depth; k += spec->block) {
                int64_t left = done + depth - k;
                struct tile tile = {
                    .x = part->x + row * part->x_stride + k,
                    .x_stride = part->x_stride,
                    .total = part->total + row * part->total_stride +
                             (panel - part->panel) * BL_PANEL,
                    .total_stride = part->total_stride,
                    .count = left < spec->block ? left : spec->block,
                };
                set_scales(&tile, spec, part, row, panel, first + k);
                if (direct)
                    direct_panel(&tile, rows, weights + k * input, halves);
                else
                    tile_panel(&tile, rows, part->weights + (k - done) * BL_PANEL, halves);
            }
        }
    }
}

/* Final scales, bias and rounding of one panel's channels of one row. */
static void finish_row(const struct bl_matmul *spec, const struct part *part, int64_t row,
                       int64_t panel, float *total)
{
    int64_t channel = panel * BL_PANEL, left = spec->out_features - channel;
    size_t count = (size_t)(left < BL_PANEL ? left : BL_PANEL);
    uint16_t halves[BL_PANEL];
    bool scaled = part->scale && !spec->x_group;
    bool by_channel = spec->weight_scale && !spec->weight_group;
    vf row_scale = v_set(scaled ? part->scale[row * part->scale_stride] : 1.0f);
    for (int64_t i = 0; i < BL_PANEL; i += LANES) {
        vf scale = row_scale, x = v_load(total + i);
        if (by_channel)
            scale = v_mul(scale, v_load(spec->weight_scale + channel + i));
        x = v_mul(x, scale);
        if (spec->bias)
            x = v_add(x, v_load(spec->bias + channel + i));
        if (spec->out_bf16)
            vi_store_halves(halves + i, vi_shr(canonical_nan(round_bf16(x)), 16));
        else
            v_store(total + i, x);
    }
    int64_t at = (part->row + row) * spec->out_stride + channel;
    if (spec->out_bf16)
        memcpy((uint16_t *)spec->out + at, halves, count * sizeof *halves);
    else
        memcpy((float *)spec->out + at, total, count * sizeof *total);
}

#if defined(BL_TILES)
#include "amx.h"
#endif

static void vector_unit(const struct matmul_job *job, struct part *part)
{
    const struct bl_matmul *spec = job->spec;
    for (int64_t k = 0; k < spec->columns; k += job->depth) {
        int64_t count = spec->columns - k < job->depth ? spec->columns - k : job->depth;
        for (int64_t row = 0; row < part->rows; row++)
            decode_input(spec, part->row + row, k, count, part->x + row * part->x_stride);
        for (int64_t panel = 0; panel < part->panels; panel++)
            multiply_panel(spec, part, part->panel + panel, k, count);
    }
}

static void matmul_unit(const struct matmul_job *job, int64_t unit, char *scratch)
{
    const struct bl_matmul *spec = job->spec;
    struct part part = {
        .row = unit % job->row_chunks * job->rows_at_once,
        .panel = unit / job->row_chunks * job->panels_at_once,
        .x = (float *)scratch,
        .weights = (float *)(scratch + job->weights_at),
        .total = (float *)(scratch + job->total_at),
        .x_stride = job->depth + LANES,
        .total_stride = job->panels_at_once * BL_PANEL,
    };
    int64_t rows = spec->rows - part.row, panels = job->panels - part.panel;
    part.rows = rows < job->rows_at_once ? rows : job->rows_at_once;
    part.panels = panels < job->panels_at_once ? panels : job->panels_at_once;
    place_scales(job, &part, (float *)(scratch + job->scale_at));
    memset(part.total, 0, (size_t)(part.rows * part.total_stride) * sizeof *part.total);
#if defined(BL_TILES)
    if (tiles_serve(spec))
        tiles_unit(job, &part, scratch);
    else
#endif
        vector_unit(job, &part);
    for (int64_t row = 0; row < part.rows; row++)
        for (int64_t panel = 0; panel < part.panels; panel++)
            finish_row(spec, &part, row, part.panel + panel,
                       part.total + row * part.total_stride + panel * BL_PANEL);
}

static struct matmul_job plan_matmul(const struct bl_matmul *spec, int team)
{
    struct matmul_job job = {.spec = spec};
    if (spec->rows <= 0 || spec->out_features <= 0)
        return job;
    const int64_t size = sizeof(float);
    job.panels = (spec->out_features + BL_PANEL - 1) / BL_PANEL;
    job.row_chunks = (spec->rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
    job.rows_at_once = (spec->rows + job.row_chunks - 1) / job.row_chunks;
    /* Several units a thread, since one may be held up. */
    int64_t share = job.panels * job.row_chunks / (4 * team);
    job.panels_at_once = share < 1 ? 1 : share < PANELS_AT_ONCE ? share : PANELS_AT_ONCE;
    int64_t fits = INPUT_BYTES / (job.rows_at_once * size) / DEPTH * DEPTH;
    job.depth = fits < DEPTH ? DEPTH : fits < spec->columns ? fits : spec->columns;
    job.weights_at = padded_size(job.rows_at_once * (job.depth + LANES) * size);
    job.total_at = job.weights_at + padded_size(DEPTH * BL_PANEL * size);
#if defined(BL_TILES)
    if (tiles_serve(spec))
        plan_tiles(&job, team);
#endif
    job.row_chunks = (spec->rows + job.rows_at_once - 1) / job.rows_at_once;
    job.units = job.row_chunks * ((job.panels + job.panels_at_once - 1) / job.panels_at_once);
    job.scale_at =
        job.total_at + padded_size(job.rows_at_once * job.panels_at_once * BL_PANEL * size);
    if (spec->x_rows && spec->x_scale && spec->x_scale_stride)
        job.scale_groups = spec->x_group ? (spec->columns + spec->x_group - 1) / spec->x_group : 1;
    job.scratch_size = job.scale_at + padded_size(job.rows_at_once * job.scale_groups * size);
    return job;
}

static void matmul_unit_of(const struct matmul_job *jobs, int64_t unit, char *scratch)
{
    for (; unit >= jobs->units; jobs++)
        unit -= jobs->units;
    matmul_unit(jobs, unit, scratch);
}

static int compute_units(const struct matmul_job *jobs, int64_t count, int team)
{
    int64_t units = 0;
    size_t size = 0;
    for (int64_t i = 0; i < count; i++) {
        units += jobs[i].units;
        size = jobs[i].scratch_size > size ? jobs[i].scratch_size : size;
    }
    if (!units)
        return 0;
    char *memory = malloc((size_t)team * size + 64);
    if (!memory)
        return -1;
    char *scratch = (char *)(((uintptr_t)memory + 63) & ~(uintptr_t)63);
    PARALLEL_UNITS(team)
    for (int64_t unit = 0; unit < units; unit++)
        matmul_unit_of(jobs, unit, scratch + (size_t)own_number() * size);
    free(memory);
    return 0;
}

static int matmul(const struct bl_matmul *specs, int64_t count, int threads)
{
    struct matmul_job jobs[BL_MATMULS];
    int64_t elements = 0;
    for (int64_t i = 0; i < count; i++)
        elements += specs[i].out_features * specs[i].columns;
    int team = useful_threads(threads, elements);
    for (int64_t i = 0; i < count; i++)
        jobs[i] = plan_matmul(specs + i, team);
    return compute_units(jobs, count, team);
}
