/* What a layer of experts does beside its activation: sorting (token, expert) pairs, one matmul for
 * all experts of a projection, and adding up what a token's experts made of it.
 */

/* --- pairs by expert --- */

/* Experts that are not here, whatever their number, come behind all others. */
BL_INLINE int64_t place_of(const struct bl_pairs *pairs, int64_t pair)
{
    int64_t expert = pairs->index_bytes == 8 ? ((const int64_t *)pairs->index)[pair]
                                             : ((const int32_t *)pairs->index)[pair];
    return expert < 0 || expert >= pairs->experts ? pairs->experts : expert;
}

static int sort_pairs(struct bl_pairs *pairs)
{
    int64_t count = pairs->tokens * pairs->top_k, experts = pairs->experts;
    /* Where each expert's next pair goes. */
    int64_t *next = calloc((size_t)experts + 2, sizeof *next);
    if (!next)
        return -1;
    for (int64_t pair = 0; pair < count; pair++)
        next[place_of(pairs, pair) + 1]++;
    for (int64_t expert = 0; expert <= experts; expert++) {
        next[expert + 1] += next[expert];
        pairs->offsets[expert] = (int32_t)next[expert];
    }
    for (int64_t token = 0, pair = 0; token < pairs->tokens; token++)
        for (int64_t choice = 0; choice < pairs->top_k; choice++, pair++) {
            int64_t expert = place_of(pairs, pair), position = next[expert]++;
            pairs->expert[position] = (int32_t)expert;
            pairs->order[position] = pair;
            pairs->token[position] = token;
            pairs->position[pair] = position;
        }
    pairs->absent = count - pairs->offsets[experts];
    free(next);
    return 0;
}

/* --- the matmul --- */

/* One expert's rows as a matmul of their own. */
static struct bl_matmul matmul_of(const struct bl_grouped_matmul *grouped, int64_t expert)
{
    struct bl_matmul spec = grouped->each;
    int64_t first = grouped->offsets[expert];
    const int64_t x_size =
        spec.x_kind == BL_INPUT_E4M3 ? 1 : spec.x_kind == BL_INPUT_BF16 ? 2 : 4;
    spec.rows = grouped->offsets[expert + 1] - first;
    if (spec.x_rows) {
        spec.x_rows += first;
    } else {
        spec.x = (const char *)spec.x + first * spec.x_stride * x_size;
        if (spec.x_scale)
            spec.x_scale += first * spec.x_scale_stride;
    }
    spec.weight = (const char *)spec.weight + expert * grouped->weight_bytes;
    if (spec.weight_scale)
        spec.weight_scale += expert * grouped->weight_scale_stride;
    if (spec.bias)
        spec.bias += expert * grouped->bias_stride;
    spec.out = (char *)spec.out + first * spec.out_stride * (spec.out_bf16 ? 2 : 4);
    return spec;
}

static int grouped_matmul(const struct bl_grouped_matmul *grouped, int threads)
{
    int64_t active = 0;
    for (int64_t expert = 0; expert < grouped->experts; expert++)
        active += grouped->offsets[expert] < grouped->offsets[expert + 1];
    if (!active)
        return 0;
    struct bl_matmul *specs = malloc((size_t)active * sizeof *specs);
    struct matmul_job *jobs = malloc((size_t)active * sizeof *jobs);
    int failed = -1;
    if (specs && jobs) {
        int team = useful_threads(
            threads, active * grouped->each.out_features * grouped->each.columns);
        int64_t count = 0;
        for (int64_t expert = 0; expert < grouped->experts; expert++)
            if (grouped->offsets[expert] < grouped->offsets[expert + 1]) {
                specs[count] = matmul_of(grouped, expert);
                jobs[count] = plan_matmul(specs + count, team);
                count++;
            }
        failed = compute_units(jobs, count, team);
    }
    free(jobs);
    free(specs);
    return failed;
}

/* --- what a token's experts make of it --- */

BL_INLINE vf load_as_float(int64_t dtype, const char *p)
{
    if (dtype == BL_LORA_F32)
        return v_load((const float *)p);
    if (dtype == BL_LORA_F16)
        return v_load_f16((const uint16_t *)p);
    return v_from_bits(vi_shl(vi_load_halves((const uint16_t *)p), 16));
}

/* `wide` vectors of one token's columns, from `column` on.  Products are rounded before they are
 * added, as the definition has it.  `wide` and `dtype` are constants in every call. */
BL_INLINE void combine_vectors(int wide, int64_t dtype, const struct bl_combine *spec,
                               int64_t token, int64_t column)
{
    const int64_t size = dtype == BL_LORA_F32 ? 4 : 2;
    vf total[EXPAND_WIDE];
    for (int i = 0; i < wide; i++)
        total[i] = v_set(0.0f);
    for (int64_t choice = 0; choice < spec->top_k; choice++) {
        int64_t pair = token * spec->top_k + choice, position = spec->position[pair];
        const char *x = (const char *)spec->x + (position * spec->columns + column) * size;
        vf weight = v_set(read_one(spec->weight_dtype, spec->weight, pair));
        bool here = position < *spec->computed;
        for (int i = 0; i < wide; i++) {
            vf value = here ? load_as_float(dtype, x + i * LANES * size) : v_set(0.0f);
            total[i] = v_add(total[i], v_mul(value, weight));
        }
    }
    for (int i = 0; i < wide; i++)
        v_store(spec->out + token * spec->columns + column + i * LANES, total[i]);
}

static void combine_one(const struct bl_combine *spec, int64_t token, int64_t column)
{
    float total = 0.0f;
    for (int64_t choice = 0; choice < spec->top_k; choice++) {
        int64_t pair = token * spec->top_k + choice, position = spec->position[pair];
        float value = 0.0f;
        if (position < *spec->computed)
            value = read_one(spec->x_dtype, spec->x, position * spec->columns + column);
        total += value * read_one(spec->weight_dtype, spec->weight, pair);
    }
    spec->out[token * spec->columns + column] = total;
}

BL_INLINE void combine_columns(int64_t dtype, const struct bl_combine *spec, int64_t token,
                               int64_t column, int64_t end)
{
    const int64_t step = EXPAND_WIDE * LANES;
    for (; column + step <= end; column += step)
        combine_vectors(EXPAND_WIDE, dtype, spec, token, column);
    for (; column + LANES <= end; column += LANES)
        combine_vectors(1, dtype, spec, token, column);
    for (; column < end; column++)
        combine_one(spec, token, column);
}

static void combine_piece(const struct bl_combine *spec, const struct grid *grid, int64_t piece)
{
    int64_t token = piece / grid->per_row, column = piece % grid->per_row * CHUNK;
    int64_t end = column + CHUNK < grid->cols ? column + CHUNK : grid->cols;
    switch (spec->x_dtype) {
    case BL_LORA_F32: combine_columns(BL_LORA_F32, spec, token, column, end); break;
    case BL_LORA_F16: combine_columns(BL_LORA_F16, spec, token, column, end); break;
    default: combine_columns(BL_LORA_BF16, spec, token, column, end);
    }
}

static void combine(const struct bl_combine *spec, int threads)
{
    struct grid grid = make_grid(spec->tokens, spec->columns, false);
    int team = useful_threads(threads, spec->tokens * spec->top_k * spec->columns);
    PARALLEL_OVER(team)
    for (int64_t piece = 0; piece < grid.rows * grid.per_row; piece++)
        combine_piece(spec, &grid, piece);
}
