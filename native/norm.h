/* bl_norm. */

/* Of a row: what is subtracted (nothing for RMSNorm), and what is multiplied with then. */
struct statistics {
    float centre, inverse;
};

/* The square of a bfloat16 is exact in float32, where it may over- or underflow as the model's own
 * does; the float64 sum is, to float32, the same in any order. */
BL_INLINE vacc acc_term(bool squared, vacc acc, vf x)
{
    return squared ? acc_square(acc, x) : acc_add(acc, x);
}

/* The sum of a row, or that of its squares. */
BL_INLINE double row_sum(bool squared, const uint16_t *x, int64_t cols)
{
    vacc even = acc_zero(), odd = acc_zero();
    int64_t i = 0;
    for (; i + STEP <= cols; i += STEP) {
        vpair value = load_bf16(x + i);
        even = acc_term(squared, even, value.even);
        odd = acc_term(squared, odd, value.odd);
    }
    if (i < cols) {
        uint16_t copy[TAIL];
        vpair value = load_bf16(tail_of(x + i, cols - i, copy));
        even = acc_term(squared, even, value.even);
        odd = acc_term(squared, odd, value.odd);
    }
    return acc_sum(even) + acc_sum(odd);
}

/* The sum of squared differences; what pads a tail has none. */
BL_INLINE double row_spread(const uint16_t *x, int64_t cols, double mean)
{
    vacc even = acc_zero(), odd = acc_zero();
    int64_t i = 0;
    for (; i + STEP <= cols; i += STEP) {
        vpair value = load_bf16(x + i);
        even = acc_difference(even, value.even, mean);
        odd = acc_difference(odd, value.odd, mean);
    }
    double rest = 0.0;
    for (; i < cols; i++) {
        uint32_t bits = (uint32_t)x[i] << 16;
        float value;
        memcpy(&value, &bits, sizeof value);
        rest += ((double)value - mean) * ((double)value - mean);
    }
    return acc_sum(even) + acc_sum(odd) + rest;
}

static struct statistics row_statistics(const struct bl_norm_source *source, const uint16_t *x,
                                        int64_t cols)
{
    float eps = (float)source->eps, centre = 0.0f, spread;
    if (source->order == BL_LAYER_NORM || source->order == BL_LAYER_NORM_1P) {
        double mean = row_sum(false, x, cols) / (double)cols;
        centre = (float)mean;
        spread = (float)(row_spread(x, cols, mean) / (double)cols);
    } else {
        spread = (float)row_sum(true, x, cols) / (float)cols;
    }
    return (struct statistics){centre, 1.0f / sqrtf(spread + eps)};
}

BL_INLINE vf norm_value(int order, bool biased, vf x, vf weight, vf bias, vf centre, vf inverse)
{
    if (order == BL_LLAMA)
        return round_bf16(v_mul(weight, round_bf16(v_mul(x, inverse))));
    if (order == BL_GEMMA)
        return round_bf16(v_mul(v_mul(x, inverse), v_add(v_set(1.0f), weight)));
    if (order == BL_LAYER_NORM_1P)
        weight = round_bf16(v_add(v_set(1.0f), weight));
    vf scaled = v_mul(v_mul(v_sub(x, centre), inverse), weight);
    return round_bf16(biased ? v_add(scaled, bias) : scaled);
}

BL_INLINE vpair norm_pair(int order, bool biased, const struct statistics *row, const uint16_t *x,
                          const uint16_t *weight, const uint16_t *bias)
{
    vpair in = load_bf16(x), gain = load_bf16(weight), shift = biased ? load_bf16(bias) : in;
    vf centre = v_set(row->centre), inverse = v_set(row->inverse);
    return (vpair){norm_value(order, biased, in.even, gain.even, shift.even, centre, inverse),
                   norm_value(order, biased, in.odd, gain.odd, shift.odd, centre, inverse)};
}

/* `order`, `biased` and `outputs` are constants in every call. */
BL_INLINE void norm_span(int order, bool biased, int outputs, const struct statistics *row,
                         const uint16_t *x, const uint16_t *weight, const uint16_t *bias,
                         const struct destination *to, int64_t cols)
{
    vf inv_scale = v_set(to->inv_scale);
    int64_t i = 0;
    for (; i + STEP <= cols; i += STEP) {
        vpair out = norm_pair(order, biased, row, x + i, weight + i, biased ? bias + i : NULL);
        put_pair(outputs, to, i, out, inv_scale, false);
    }
    if (i < cols) {
        uint16_t x_copy[TAIL], weight_copy[TAIL], bias_copy[TAIL];
        struct tail tail;
        struct destination tail_to = tail_destination(&tail, to);
        vpair out = norm_pair(order, biased, row, tail_of(x + i, cols - i, x_copy),
                              tail_of(weight + i, cols - i, weight_copy),
                              biased ? tail_of(bias + i, cols - i, bias_copy) : NULL);
        put_pair(outputs, &tail_to, 0, out, inv_scale, false);
        put_tail(outputs, &tail, to, i, cols - i);
    }
}

/* out = round(x + residual). */
static void add_residual(const uint16_t *x, const uint16_t *residual, uint16_t *restrict out,
                         int64_t cols)
{
    int64_t i = 0;
    for (; i + STEP <= cols; i += STEP) {
        vpair a = load_bf16(x + i), b = load_bf16(residual + i);
        store_bf16(out + i, (vpair){round_bf16(v_add(a.even, b.even)),
                                    round_bf16(v_add(a.odd, b.odd))});
    }
    if (i < cols) {
        uint16_t a_copy[TAIL], b_copy[TAIL], out_copy[STEP];
        vpair a = load_bf16(tail_of(x + i, cols - i, a_copy));
        vpair b = load_bf16(tail_of(residual + i, cols - i, b_copy));
        store_bf16(out_copy, (vpair){round_bf16(v_add(a.even, b.even)),
                                     round_bf16(v_add(a.odd, b.odd))});
        memcpy(out + i, out_copy, (size_t)(cols - i) * sizeof *out);
    }
}

#define CASE(order, biased, outputs)                                                               \
    case (order * 2 + biased) * OUTPUT_SETS + (outputs):                                           \
        norm_span(order, biased, outputs, &of_row, x, source->weight, source->bias, to, cols);     \
        break;
#define CASES(order, biased)                                                                       \
    CASE(order, biased, WANT_CODES)                                                                \
    CASE(order, biased, WANT_VALUES)                                                               \
    CASE(order, biased, WANT_CODES | WANT_VALUES)

static void norm_row(const void *any_source, int64_t row, int64_t cols,
                     const struct destination *to)
{
    const struct bl_norm_source *source = any_source;
    const uint16_t *x = source->x + row * source->x_stride;
    if (source->residual) {
        uint16_t *sum = source->new_residual + row * source->new_residual_stride;
        add_residual(x, source->residual + row * source->residual_stride, sum, cols);
        x = sum;
    }
    const struct statistics of_row = row_statistics(source, x, cols);
    bool centred = source->order == BL_LAYER_NORM || source->order == BL_LAYER_NORM_1P;
    int biased = centred && source->bias;
    switch ((int)(source->order * 2 + biased) * OUTPUT_SETS + wanted_outputs(to)) {
        CASES(BL_LLAMA, 0)
        CASES(BL_GEMMA, 0)
        CASES(BL_LAYER_NORM, 0)
        CASES(BL_LAYER_NORM, 1)
        CASES(BL_LAYER_NORM_1P, 0)
        CASES(BL_LAYER_NORM_1P, 1)
    }
}

#undef CASES
#undef CASE

static int norm(const struct bl_norm_source *source, const struct bl_output *output, int64_t rows,
                int64_t cols, int threads)
{
    struct row_job job = {.compute = norm_row, .source = source, .output = output};
    job.rows = rows;
    job.cols = cols;
    job.always = source->residual != NULL;
    return run_rows(&job, threads);
}
