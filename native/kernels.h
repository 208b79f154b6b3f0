/* Kernel bodies, included once per instruction set.
 *
 * The including file defines LANES, the types vf (float32), vi (32-bit integers) and vacc (float64
 * partial sums), the v_*, vi_* and acc_* operations, BL_INLINE, and BL_KERNELS: the table to fill.
 * Where an operand is NaN, v_max(a, b) and v_min(a, b) give b, as the x86 instructions do.
 * vi_min, vi_max and vi_if_gt see non-negative numbers only, or their result does not matter.
 * vi_store_halves writes the low 16 bits of each lane.
 *
 * A tail shorter than a vector goes through the same vector code on a padded copy, so that an
 * element's bytes do not depend on where in its row it stands.
 */
#include <math.h>
#include <stdbool.h>
#include <stddef.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "bfloat16 values are read two to a 32-bit word, the first in its lower half"
#endif

#include "numerics.h"

/* Below ELEMENTS_PER_THREAD a thread costs more than it brings; STEP is what one iteration does. */
enum { ELEMENTS_PER_THREAD = 32768, CHUNK = 8192, STEP = 2 * LANES };

/* For the loop that follows it; nothing where the compiler has no OpenMP.  Guided, since a thread
 * may have to share its processor with others. */
#if defined(_OPENMP)
#define PARALLEL_OVER(team)                                                                        \
    _Pragma("omp parallel for num_threads(team) if (team > 1) schedule(guided)")
#else
#define PARALLEL_OVER(team) (void)(team);
#endif

/* --- activations --- */

BL_INLINE vf act_value(int activation, bool gated, vf gate, vf up)
{
    vf value = activate(activation, gate);
    return gated ? round_bf16(v_mul(value, up)) : value;
}

/* STEP elements. */
BL_INLINE void act_step(int activation, bool gated, const uint16_t *gate, const uint16_t *up,
                        uint8_t *codes, vf inv_scale)
{
    vpair g = load_bf16(gate), u = gated ? load_bf16(up) : g;
    vf even = act_value(activation, gated, g.even, u.even);
    vf odd = act_value(activation, gated, g.odd, u.odd);
    vpair scaled = {v_mul(even, inv_scale), v_mul(odd, inv_scale)};
    store_e4m3(codes, scaled, activation == BL_RELU2 && !gated);
}

/* `activation` and `gated` are constants in every call; `up` is read only if `gated`. */
BL_INLINE void act_span(int activation, bool gated, const uint16_t *gate, const uint16_t *up,
                        uint8_t *restrict codes, int64_t count, vf inv_scale)
{
    int64_t i = 0;
    for (; i + STEP <= count; i += STEP)
        act_step(activation, gated, gate + i, up + i, codes + i, inv_scale);
    if (i < count) {
        uint16_t gate_tail[STEP] = {0}, up_tail[STEP] = {0};
        uint8_t codes_tail[STEP];
        size_t left = (size_t)(count - i);
        memcpy(gate_tail, gate + i, left * sizeof *gate);
        if (gated)
            memcpy(up_tail, up + i, left * sizeof *up);
        act_step(activation, gated, gate_tail, up_tail, codes_tail, inv_scale);
        memcpy(codes + i, codes_tail, left);
    }
}

/* --- splitting work --- */

BL_INLINE int useful_threads(int threads, int64_t rows, int64_t cols)
{
    int64_t useful = rows * cols / ELEMENTS_PER_THREAD;
    return useful < 2 ? 1 : useful < threads ? (int)useful : threads < 1 ? 1 : threads;
}

/* Rows cut into pieces of CHUNK columns, so that one long row feeds every thread. */
struct grid {
    int64_t rows, cols, per_row;
};

/* `contiguous`: no gaps between rows anywhere, so all of them are one long row. */
BL_INLINE struct grid make_grid(int64_t rows, int64_t cols, bool contiguous)
{
    if (contiguous) {
        cols *= rows;
        rows = 1;
    }
    return (struct grid){rows, cols, (cols + CHUNK - 1) / CHUNK};
}

struct act_job {
    const uint16_t *gate, *up;
    uint8_t *codes;
    int64_t gate_stride, up_stride, codes_stride;
    struct grid grid;
    float inv_scale;
    int activation;
};

/* The parallel loops call plain functions: some compilers drop the target attribute from the
 * outlined body of a loop, and then may not inline vector code into it. */
static void act_piece(const struct act_job *job, int64_t piece)
{
    int64_t row = piece / job->grid.per_row, start = piece % job->grid.per_row * CHUNK;
    int64_t left = job->grid.cols - start, count = left < CHUNK ? left : CHUNK;
    const uint16_t *gate = job->gate + row * job->gate_stride + start;
    const uint16_t *up = job->up ? job->up + row * job->up_stride + start : gate; /* unread */
    uint8_t *codes = job->codes + row * job->codes_stride + start;
    vf inv_scale = v_set(job->inv_scale);
#define CASE(activation)                                                                           \
    case activation * 2: act_span(activation, false, gate, up, codes, count, inv_scale); break;    \
    case activation * 2 + 1: act_span(activation, true, gate, up, codes, count, inv_scale); break;
    switch (job->activation * 2 + (job->up != NULL)) {
        CASE(BL_IDENTITY)
        CASE(BL_RELU2)
        CASE(BL_SILU)
    }
#undef CASE
}

static void act_static(int activation, const uint16_t *gate, int64_t gate_stride,
                       const uint16_t *up, int64_t up_stride, uint8_t *codes, int64_t codes_stride,
                       int64_t rows, int64_t cols, float inv_scale, int threads)
{
    bool contiguous = gate_stride == cols && codes_stride == cols && (!up || up_stride == cols);
    struct act_job job = {gate,         up,
                          codes,        gate_stride,
                          up_stride,    codes_stride,
                          make_grid(rows, cols, contiguous),
                          inv_scale,    activation};
    int64_t pieces = job.grid.rows * job.grid.per_row;
    int team = useful_threads(threads, rows, cols);
    PARALLEL_OVER(team)
    for (int64_t piece = 0; piece < pieces; piece++)
        act_piece(&job, piece);
}

/* --- RMSNorm --- */

enum { WANT_CODES = 1, WANT_RAW = 2 };

/* The square of a bfloat16 is exact in float32, where it may over- or underflow as the model's own
 * does; the float64 sum is, to float32, the same in any order. */
BL_INLINE double sum_of_squares(const uint16_t *x, int64_t cols)
{
    vacc even = acc_zero(), odd = acc_zero();
    int64_t i = 0;
    for (; i + STEP <= cols; i += STEP) {
        vpair value = load_bf16(x + i);
        even = acc_square(even, value.even);
        odd = acc_square(odd, value.odd);
    }
    if (i < cols) {
        uint16_t tail[STEP] = {0};
        memcpy(tail, x + i, (size_t)(cols - i) * sizeof *x);
        vpair value = load_bf16(tail);
        even = acc_square(even, value.even);
        odd = acc_square(odd, value.odd);
    }
    return acc_sum(even) + acc_sum(odd);
}

BL_INLINE vf norm_value(int order, vf x, vf weight, vf inv_rms)
{
    vf normed = v_mul(x, inv_rms);
    if (order == BL_NORM_GEMMA)
        return round_bf16(v_mul(normed, v_add(v_set(1.0f), weight)));
    return round_bf16(v_mul(weight, round_bf16(normed)));
}

/* STEP elements; `codes` and `raw` are written only if wanted. */
BL_INLINE void norm_step(int order, int outputs, const uint16_t *x, const uint16_t *weight,
                         uint8_t *codes, uint16_t *raw, vf inv_rms, vf inv_scale)
{
    vpair in = load_bf16(x), gain = load_bf16(weight);
    vpair out = {norm_value(order, in.even, gain.even, inv_rms),
                 norm_value(order, in.odd, gain.odd, inv_rms)};
    if (outputs & WANT_RAW)
        store_bf16(raw, out);
    if (outputs & WANT_CODES) {
        vpair scaled = {v_mul(out.even, inv_scale), v_mul(out.odd, inv_scale)};
        store_e4m3(codes, scaled, false);
    }
}

/* `order` and `outputs` are constants in every call. */
BL_INLINE void norm_span(int order, int outputs, const uint16_t *x, const uint16_t *weight,
                         uint8_t *restrict codes, uint16_t *restrict raw, int64_t cols, vf inv_rms,
                         vf inv_scale)
{
    int64_t i = 0;
    for (; i + STEP <= cols; i += STEP)
        norm_step(order, outputs, x + i, weight + i, outputs & WANT_CODES ? codes + i : NULL,
                  outputs & WANT_RAW ? raw + i : NULL, inv_rms, inv_scale);
    if (i < cols) {
        uint16_t x_tail[STEP] = {0}, weight_tail[STEP] = {0}, raw_tail[STEP];
        uint8_t codes_tail[STEP];
        size_t left = (size_t)(cols - i);
        memcpy(x_tail, x + i, left * sizeof *x);
        memcpy(weight_tail, weight + i, left * sizeof *weight);
        norm_step(order, outputs, x_tail, weight_tail, codes_tail, raw_tail, inv_rms, inv_scale);
        if (outputs & WANT_CODES)
            memcpy(codes + i, codes_tail, left);
        if (outputs & WANT_RAW)
            memcpy(raw + i, raw_tail, left * sizeof *raw);
    }
}

struct norm_job {
    const uint16_t *x, *weight;
    uint8_t *codes;
    uint16_t *raw;
    int64_t x_stride, codes_stride, raw_stride, cols;
    float eps, inv_scale;
    int order;
};

static void norm_row(const struct norm_job *job, int64_t row)
{
    const uint16_t *x = job->x + row * job->x_stride, *weight = job->weight;
    int outputs = (job->codes ? WANT_CODES : 0) | (job->raw ? WANT_RAW : 0);
    uint8_t *codes = job->codes ? job->codes + row * job->codes_stride : NULL;
    uint16_t *raw = job->raw ? job->raw + row * job->raw_stride : NULL;
    float mean = (float)sum_of_squares(x, job->cols) / (float)job->cols;
    vf inv_rms = v_set(1.0f / sqrtf(mean + job->eps)), inv_scale = v_set(job->inv_scale);
#define CASE(order, outputs)                                                                       \
    case order * 4 + (outputs):                                                                    \
        norm_span(order, outputs, x, weight, codes, raw, job->cols, inv_rms, inv_scale);           \
        break;
    switch (job->order * 4 + outputs) {
        CASE(BL_NORM_LLAMA, WANT_CODES)
        CASE(BL_NORM_LLAMA, WANT_RAW)
        CASE(BL_NORM_LLAMA, WANT_CODES | WANT_RAW)
        CASE(BL_NORM_GEMMA, WANT_CODES)
        CASE(BL_NORM_GEMMA, WANT_RAW)
        CASE(BL_NORM_GEMMA, WANT_CODES | WANT_RAW)
    }
#undef CASE
}

static void rms_norm_static(int order, const uint16_t *x, int64_t x_stride, const uint16_t *weight,
                            uint8_t *codes, int64_t codes_stride, uint16_t *raw,
                            int64_t raw_stride, int64_t rows, int64_t cols, float eps,
                            float inv_scale, int threads)
{
    struct norm_job job = {x,          weight, codes, raw,       x_stride, codes_stride,
                           raw_stride, cols,   eps,   inv_scale, order};
    int team = useful_threads(threads, rows, cols);
    PARALLEL_OVER(team)
    for (int64_t row = 0; row < rows; row++)
        norm_row(&job, row);
}

/* --- per-token quantisation --- */

BL_INLINE vf larger_magnitude(vf x, vf amax)
{
    return v_max(v_from_bits(vi_and(v_bits(x), vi_set(0x7FFFFFFF))), amax);
}

/* Largest finite magnitude of a row: NaN counts as nothing, inf as the largest bfloat16. */
BL_INLINE float finite_amax(const uint16_t *x, int64_t cols)
{
    vpair amax = {v_set(AMAX_FLOOR), v_set(AMAX_FLOOR)};
    for (int64_t i = 0; i < cols; i += STEP) {
        uint16_t tail[STEP] = {0};
        const uint16_t *source = x + i;
        if (i + STEP > cols)
            source = memcpy(tail, source, (size_t)(cols - i) * sizeof *x);
        vpair value = load_bf16(source);
        amax.even = larger_magnitude(value.even, amax.even);
        amax.odd = larger_magnitude(value.odd, amax.odd);
    }
    float largest = v_reduce_max(v_max(amax.even, amax.odd));
    return largest < BF16_MAX ? largest : BF16_MAX;
}

struct token_job {
    const uint16_t *x;
    uint8_t *codes;
    float *scale;
    int64_t x_stride, codes_stride, cols;
};

static void token_row(const struct token_job *job, int64_t row)
{
    const uint16_t *x = job->x + row * job->x_stride;
    float scale = finite_amax(x, job->cols) / FP8_MAX;
    job->scale[row] = scale;
    act_span(BL_IDENTITY, false, x, x, job->codes + row * job->codes_stride, job->cols,
             v_set(1.0f / scale));
}

static void quantize_token(const uint16_t *x, int64_t x_stride, uint8_t *codes,
                           int64_t codes_stride, float *scale, int64_t rows, int64_t cols,
                           int threads)
{
    struct token_job job = {x, codes, scale, x_stride, codes_stride, cols};
    int team = useful_threads(threads, rows, cols);
    PARALLEL_OVER(team)
    for (int64_t row = 0; row < rows; row++)
        token_row(&job, row);
}

/* --- decoding --- */

struct decode_job {
    const uint8_t *codes;
    float *out;
    int64_t codes_stride, out_stride;
    struct grid grid;
};

static void decode_piece(const struct decode_job *job, int64_t piece)
{
    int64_t row = piece / job->grid.per_row, start = piece % job->grid.per_row * CHUNK;
    int64_t left = job->grid.cols - start, count = left < CHUNK ? left : CHUNK, i = 0;
    const uint8_t *codes = job->codes + row * job->codes_stride + start;
    float *out = job->out + row * job->out_stride + start;
    for (; i + LANES <= count; i += LANES)
        v_store(out + i, decode_e4m3(vi_load_bytes(codes + i)));
    if (i < count) {
        uint8_t codes_tail[LANES] = {0};
        float out_tail[LANES];
        memcpy(codes_tail, codes + i, (size_t)(count - i));
        v_store(out_tail, decode_e4m3(vi_load_bytes(codes_tail)));
        memcpy(out + i, out_tail, (size_t)(count - i) * sizeof *out);
    }
}

static void fp8_decode(const uint8_t *codes, int64_t codes_stride, float *out, int64_t out_stride,
                       int64_t rows, int64_t cols, int threads)
{
    bool contiguous = codes_stride == cols && out_stride == cols;
    struct decode_job job = {codes, out, codes_stride, out_stride,
                             make_grid(rows, cols, contiguous)};
    int64_t pieces = job.grid.rows * job.grid.per_row;
    int team = useful_threads(threads, rows, cols);
    PARALLEL_OVER(team)
    for (int64_t piece = 0; piece < pieces; piece++)
        decode_piece(&job, piece);
}

const struct bl_kernels BL_KERNELS = {act_static, rms_norm_static, quantize_token, fp8_decode};
