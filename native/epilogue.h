/* Scales that are measured: codes and scales of a row whose bfloat16 values are there. */

/* 2**-40 and the largest bfloat16, as encodings (core/oracle: AMAX_FLOOR). */
enum { AMAX_FLOOR = 0x2B80, AMAX_LIMIT = 0x7F7F };

/* By group: amax, then the scale as float32; what to multiply with; the scale as one byte. */
struct row_scales {
    float *scale, *inverse;
    uint8_t *byte;
};

BL_INLINE int64_t group_size(const struct bl_output *output, int64_t cols)
{
    return output->epilogue == BL_TOKEN ? (cols ? cols : 1) : output->group;
}

BL_INLINE int64_t group_count(const struct bl_output *output, int64_t cols)
{
    if (output->epilogue == BL_TOKEN)
        return 1;
    return (cols + output->group - 1) / output->group;
}

BL_INLINE uint32_t max_magnitude(const uint16_t *values, int64_t count)
{
    vi largest = vi_set(0);
    int64_t i = 0;
    for (; i + STEP <= count; i += STEP)
        largest = vh_max(vh_magnitude(vi_load(values + i)), largest);
    if (i < count) {
        uint16_t copy[TAIL];
        largest = vh_max(vh_magnitude(vi_load(tail_of(values + i, count - i, copy))), largest);
    }
    return vh_reduce_max(largest);
}

BL_INLINE float amax_of(uint32_t magnitude)
{
    if (magnitude < AMAX_FLOOR)
        magnitude = AMAX_FLOOR;
    if (magnitude > AMAX_LIMIT)
        magnitude = AMAX_LIMIT;
    uint32_t bits = magnitude << 16;
    float amax;
    memcpy(&amax, &bits, sizeof amax);
    return amax;
}

/* `size` is a constant in the calls for common sizes. */
BL_INLINE void find_amax(const uint16_t *values, int64_t cols, int64_t size, float *amax)
{
    int64_t group = 0, start = 0;
    for (; start + size <= cols; start += size, group++)
        amax[group] = amax_of(size == 16 ? max_magnitude_16(values + start)
                                         : max_magnitude(values + start, size));
    if (start < cols)
        amax[group] = amax_of(max_magnitude(values + start, cols - start));
}

static void row_amax(const struct bl_output *output, const uint16_t *values, int64_t cols,
                     float *amax)
{
    int64_t size = group_size(output, cols);
    amax[0] = amax_of(0);
    switch (size) {
    case 16: find_amax(values, cols, 16, amax); break;
    case 32: find_amax(values, cols, 32, amax); break;
    case 128: find_amax(values, cols, 128, amax); break;
    default: find_amax(values, cols, size, amax);
    }
}

/* What lies beyond `groups` up to a whole vector becomes scales too, which nobody reads. */
BL_INLINE void fill_up(float *amax, int64_t groups)
{
    for (int64_t i = groups; i % LANES; i++)
        amax[i] = 1.0f;
}

BL_INLINE void finish_scales(bool ue8m0, const struct row_scales *scales, int64_t groups)
{
    for (int64_t i = 0; i < groups; i += LANES) {
        vf scale = v_div(v_load(scales->scale + i), v_set(FP8_MAX));
        if (ue8m0)
            scale = v_from_bits(
                vi_and(vi_add(v_bits(scale), vi_set(0x007FFFFF)), vi_set(0x7F800000)));
        v_store(scales->scale + i, scale);
        v_store(scales->inverse + i, v_div(v_set(1.0f), scale));
        if (ue8m0)
            vi_store_bytes(scales->byte + i, vi_shr(v_bits(scale), 23));
    }
}

BL_INLINE void finish_nvfp4_scales(float global_scale, const struct row_scales *scales,
                                   int64_t groups)
{
    for (int64_t i = 0; i < groups; i += LANES) {
        vf sixth = v_div(v_load(scales->scale + i), v_set(FP4_MAX));
        vf ideal = v_div(sixth, v_set(global_scale));
        vi code = encode_e4m3(v_max(v_set(0x1p-9f), ideal), true);
        vi_store_bytes(scales->byte + i, code);
        vf scale = v_mul(decode_e4m3(vi_and(code, vi_set(0xFF))), v_set(global_scale));
        v_store(scales->inverse + i, v_div(v_set(1.0f), scale));
    }
}

BL_INLINE void encode_groups(const uint16_t *values, uint8_t *codes, int64_t cols, int64_t size,
                             const float *inverse)
{
    int64_t group = 0, start = 0;
    for (; start + size <= cols; start += size, group++)
        encode_span(values + start, codes + start, size, inverse[group]);
    if (start < cols)
        encode_span(values + start, codes + start, cols - start, inverse[group]);
}

static void encode_row(const uint16_t *values, uint8_t *codes, int64_t cols, int64_t size,
                       const float *inverse)
{
    switch (size) {
    case 32: encode_groups(values, codes, cols, 32, inverse); break;
    case 128: encode_groups(values, codes, cols, 128, inverse); break;
    default: encode_groups(values, codes, cols, size, inverse);
    }
}

/* STEP values as LANES bytes. */
BL_INLINE void put_e2m1(uint8_t *codes, vpair x, vf inverse)
{
    vi even = encode_e2m1(v_mul(x.even, inverse)), odd = encode_e2m1(v_mul(x.odd, inverse));
    vi_store_bytes(codes, vi_or(even, vi_shl(odd, 4)));
}

static void encode_nvfp4_row(const uint16_t *values, uint8_t *codes, int64_t cols,
                             const float *inverse)
{
    int64_t i = 0;
    for (; i + STEP <= cols; i += STEP)
        put_e2m1(codes + i / 2, load_bf16(values + i), v_spread_16(inverse + i / 16));
    if (i < cols) {
        uint16_t copy[TAIL];
        uint8_t tail[LANES];
        put_e2m1(tail, load_bf16(tail_of(values + i, cols - i, copy)),
                 v_spread_16(inverse + i / 16));
        memcpy(codes + i / 2, tail, (size_t)(cols - i + 1) / 2);
    }
    if (cols % 2)
        codes[cols / 2] &= 0x0F;
}

/* --- layouts --- */

BL_INLINE int64_t scale_index(const struct bl_output *output, int64_t row, int64_t group)
{
    if (!output->swizzled)
        return row * output->scale_row_stride + group * output->scale_group_stride;
    int64_t tile = row / 128 * (output->scale_groups / 4) + group / 4;
    return tile * 512 + row % 32 * 16 + row % 128 / 32 * 4 + group % 4;
}

/* `groups` scales of a row; zeros for the rest of it. */
BL_INLINE void put_floats(const struct bl_output *output, int64_t row, const float *scale,
                          int64_t groups)
{
    float *out = output->scale;
    for (int64_t group = 0; group < groups; group++)
        out[scale_index(output, row, group)] = scale[group];
    for (int64_t group = groups; group < output->scale_groups; group++)
        out[scale_index(output, row, group)] = 0.0f;
}

BL_INLINE void put_bytes(const struct bl_output *output, int64_t row, const uint8_t *scale,
                         int64_t groups)
{
    uint8_t *out = output->scale;
    for (int64_t group = 0; group < groups; group++)
        out[scale_index(output, row, group)] = scale[group];
    for (int64_t group = groups; group < output->scale_groups; group++)
        out[scale_index(output, row, group)] = 0;
}

static void put_scales(const struct bl_output *output, int64_t row,
                       const struct row_scales *scales, int64_t groups)
{
    if (output->scale_dtype == BL_SCALE_F32)
        put_floats(output, row, scales->scale, groups);
    else
        put_bytes(output, row, scales->byte, groups);
}

static void measure_row(const struct bl_output *output, int64_t row, const uint16_t *values,
                        int64_t cols, const struct row_scales *scales)
{
    uint8_t *codes = output->codes + row * output->codes_stride;
    int64_t groups = group_count(output, cols);
    row_amax(output, values, cols, scales->scale);
    fill_up(scales->scale, groups);
    if (output->epilogue == BL_NVFP4) {
        finish_nvfp4_scales((float)output->global_scale, scales, groups);
        encode_nvfp4_row(values, codes, cols, scales->inverse);
    } else {
        finish_scales(output->ue8m0 != 0, scales, groups);
        encode_row(values, codes, cols, group_size(output, cols), scales->inverse);
    }
    put_scales(output, row, scales, groups);
}

/* Rows that are padding.  Rows that are not clear their own. */
static void clear_padding(const struct bl_output *output, int64_t rows)
{
    if (output->epilogue == BL_NO_CODES)
        return;
    if (output->code_rows > rows)
        memset(output->codes + rows * output->codes_stride, 0,
               (size_t)((output->code_rows - rows) * output->codes_stride));
    if (output->epilogue == BL_STATIC)
        return;
    const struct row_scales none = {NULL, NULL, NULL};
    for (int64_t row = rows; row < output->scale_rows; row++)
        put_scales(output, row, &none, 0);
}
