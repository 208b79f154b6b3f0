/* bl_activation. */


/* Vectors that silu takes at a time.  Its operations wait for each other: a processor that looks
 * some hundred instructions ahead finds enough to do only if those of several vectors alternate. */
enum { ABREAST = 4 };

#define EACH for (int j = 0; j < ABREAST; j++)

/* 1 + exp(-x) to some units in the last place for -89 <= x <= 80, inf up to -88.73: 2**n times a
 * polynomial on [-ln2 / 2, ln2 / 2], ln2 in two parts, of which the first times n is exact.  2**n
 * is applied as 2**(n - 1) and 2, so that n reaches 128; the product with 2 is exact. */
BL_INLINE void one_plus_exp_minus(vf *x)
{
    /* Adding it leaves n and the exponent bias of 2**(n - 1) in the low bits. */
    const vf to_integer = v_set(0x1.8p23f + 126.0f);
    vf shifted[ABREAST], n[ABREAST], r[ABREAST], p[ABREAST];
    EACH shifted[j] = v_mul_add(x[j], v_set(-0x1.715476p+0f), to_integer);
    EACH n[j] = v_sub(shifted[j], to_integer);
    EACH r[j] = v_mul_add(n[j], v_set(0x1.63p-1f), x[j]);
    EACH r[j] = v_mul_add(n[j], v_set(-0x1.bd0106p-13f), r[j]);
    EACH p[j] = v_mul_add(v_set(-0x1.106250p-7f), r[j], v_set(0x1.572a64p-5f));
    EACH p[j] = v_mul_add(p[j], r[j], v_set(-0x1.5557b0p-3f));
    EACH p[j] = v_mul_add(p[j], r[j], v_set(0x1.fffdfcp-2f));
    EACH p[j] = v_mul_add(p[j], r[j], v_set(-1.0f));
    EACH p[j] = v_mul_add(p[j], r[j], v_set(1.0f));
    EACH p[j] = v_mul(p[j], v_from_bits(vi_shl(v_bits(shifted[j]), 23)));
    EACH x[j] = v_mul_add(p[j], v_set(2.0f), v_set(1.0f));
}

/* x / (1 + exp(-x)).  Above 80 the exponential no longer shows beside 1; at -89 it is inf, which
 * makes the quotient -0.0 there and NaN at -inf, as torch has it. */
BL_INLINE void silu(vf *x)
{
    vf divisor[ABREAST];
    EACH divisor[j] = v_min(v_set(80.0f), x[j]);
    EACH divisor[j] = v_max(v_set(-89.0f), divisor[j]);
    one_plus_exp_minus(divisor);
    EACH x[j] = v_div(x[j], divisor[j]);
}

BL_INLINE vf relu2(vf x)
{
    vf positive = v_max(v_set(0.0f), x);
    return v_mul(positive, positive);
}

/* BL_TABLE with an offset of `up`: a kind of its own, since a sum and a rounding of every element
 * cost tables without one a tenth of their time. */
enum { SHIFTED_TABLE = BL_TABLE + 1 };

/* What a span needs beside the rows. */
struct act_constants {
    vf up_limit, up_offset, inv_scale;
};

/* ABREAST vectors. */
BL_INLINE void activate(int kind, vf *x)
{
    switch (kind) {
    case BL_RELU: EACH x[j] = v_max(v_set(0.0f), x[j]); break;
    case BL_RELU2: EACH x[j] = round_bf16(relu2(x[j])); break;
    case BL_SILU:
        silu(x);
        EACH x[j] = round_bf16(x[j]);
        break;
    default: break; /* already looked up, or the identity */
    }
}

BL_INLINE vf up_side(int kind, const struct act_constants *constants, vf up)
{
    vf negative = v_sub(v_set(0.0f), constants->up_limit);
    up = v_min(constants->up_limit, v_max(negative, up));
    return kind == SHIFTED_TABLE ? round_bf16(v_add(up, constants->up_offset)) : up;
}

BL_INLINE vf times_up(int kind, const struct act_constants *constants, vf value, vf up)
{
    if (kind >= BL_TABLE)
        up = up_side(kind, constants, up);
    return round_bf16(v_mul(value, up));
}

/* ABREAST / 2 steps of elements. */
BL_INLINE void act_steps(int kind, bool gated, int outputs, const struct act_constants *constants,
                         const uint16_t *gate, const uint16_t *up, const struct destination *to,
                         int64_t at)
{
    vf value[ABREAST];
    for (int j = 0; j < ABREAST; j += 2) {
        vpair pair = load_bf16(gate + at + j / 2 * STEP);
        value[j] = pair.even;
        value[j + 1] = pair.odd;
    }
    activate(kind, value);
    for (int j = 0; j < ABREAST; j += 2) {
        vpair pair = {value[j], value[j + 1]};
        if (gated) {
            vpair other = load_bf16(up + at + j / 2 * STEP);
            pair.even = times_up(kind, constants, pair.even, other.even);
            pair.odd = times_up(kind, constants, pair.odd, other.odd);
        }
        put_pair(outputs, to, at + j / 2 * STEP, pair, constants->inv_scale,
                 kind == BL_RELU2 && !gated);
    }
}

/* `kind`, `gated` and `outputs` are constants in every call; `up` is read only if `gated`. */
BL_INLINE void act_span(int kind, bool gated, int outputs, const struct act_constants *constants,
                        const uint16_t *gate, const uint16_t *up, const struct destination *to,
                        int64_t count)
{
    int64_t i = 0;
    for (; i + TAIL <= count; i += TAIL)
        act_steps(kind, gated, outputs, constants, gate, up, to, i);
    if (i < count) {
        uint16_t gate_copy[TAIL], up_copy[TAIL];
        struct tail tail;
        struct destination tail_to = tail_destination(&tail, to);
        act_steps(kind, gated, outputs, constants, tail_of(gate + i, count - i, gate_copy),
                  gated ? tail_of(up + i, count - i, up_copy) : NULL, &tail_to, 0);
        put_tail(outputs, &tail, to, i, count - i);
    }
}

/* --- every combination of the constants --- */

enum { OUTPUT_SETS = 4 };

BL_INLINE int wanted_outputs(const struct destination *to)
{
    return (to->codes ? WANT_CODES : 0) | (to->values ? WANT_VALUES : 0);
}

#define CASE(kind, gated, outputs)                                                                 \
    case (kind * 2 + gated) * OUTPUT_SETS + (outputs):                                             \
        act_span(kind, gated, outputs, &constants, gate, up, to, count);                           \
        break;
#define EACH_OUTPUT(kind, gated)                                                                   \
    CASE(kind, gated, WANT_CODES)                                                                  \
    CASE(kind, gated, WANT_VALUES)                                                                 \
    CASE(kind, gated, WANT_CODES | WANT_VALUES)
#define CASES(kind)                                                                                \
    EACH_OUTPUT(kind, 0)                                                                           \
    EACH_OUTPUT(kind, 1)

static void act_any(const struct bl_activation_source *source, const uint16_t *gate,
                    const uint16_t *up, const struct destination *to, int64_t count)
{
    const struct act_constants constants = {
        v_set((float)source->up_limit), v_set((float)source->up_offset), v_set(to->inv_scale)};
    bool shifted = source->kind == BL_TABLE && up && source->up_offset != 0.0;
    int kind = shifted ? SHIFTED_TABLE : (int)source->kind;
    switch ((kind * 2 + (up != NULL)) * OUTPUT_SETS + wanted_outputs(to)) {
        CASES(BL_IDENTITY)
        CASES(BL_RELU)
        CASES(BL_RELU2)
        CASES(BL_SILU)
        CASES(BL_TABLE)
        EACH_OUTPUT(SHIFTED_TABLE, 1)
    }
}

#undef CASES
#undef EACH_OUTPUT
#undef CASE
#undef EACH

/* Elements that are looked up at a time: they stay in the fastest cache, beside the entries of the
 * table that are in use. */
enum { LOOK_UP = 1024 };

/* One by one: gather instructions are slower, above all where the processor mitigates them.  By
 * fours, since counting costs as much as an element.  Not inlined: a compiler that sees that `out`
 * is apart from the others makes vectors of what it looks up, which takes twice as long. */
#define DEFINE_LOOK_UP(name, entry)                                                                \
    __attribute__((noinline)) static void name(const entry *table, const uint16_t *x, entry *out,  \
                                               int64_t count)                                      \
    {                                                                                              \
        int64_t i = 0;                                                                             \
        for (; i + 4 <= count; i += 4) {                                                           \
            out[i] = table[x[i]];                                                                  \
            out[i + 1] = table[x[i + 1]];                                                          \
            out[i + 2] = table[x[i + 2]];                                                          \
            out[i + 3] = table[x[i + 3]];                                                          \
        }                                                                                          \
        for (; i < count; i++)                                                                     \
            out[i] = table[x[i]];                                                                  \
    }

DEFINE_LOOK_UP(look_up, uint16_t)
DEFINE_LOOK_UP(look_up_codes, uint8_t)

#undef DEFINE_LOOK_UP

static void act_looked_up(const struct bl_activation_source *source, const uint16_t *gate,
                          const uint16_t *up, const struct destination *to, int64_t count)
{
    if (source->code_table && !to->values) {
        look_up_codes(source->code_table, gate, to->codes, count);
        return;
    }
    if (!up && !to->codes) {
        look_up(source->table, gate, to->values, count);
        return;
    }
    for (int64_t i = 0; i < count; i += LOOK_UP) {
        uint16_t side[LOOK_UP];
        int64_t part = count - i < LOOK_UP ? count - i : LOOK_UP;
        struct destination part_to = {to->values ? to->values + i : NULL,
                                      to->codes ? to->codes + i : NULL, to->inv_scale};
        look_up(source->table, gate + i, side, part);
        act_any(source, side, up ? up + i : NULL, &part_to, part);
    }
}

/* `count` elements of row `row` from column `start` on. */
static void act_part(const struct bl_activation_source *source, int64_t row, int64_t start,
                     int64_t count, const struct destination *to)
{
    const uint16_t *gate = source->gate + row * source->gate_stride + start;
    const uint16_t *up = source->up ? source->up + row * source->up_stride + start : NULL;
    if (source->kind == BL_TABLE)
        act_looked_up(source, gate, up, to, count);
    else
        act_any(source, gate, up, to, count);
}

static void act_row(const void *source, int64_t row, int64_t cols, const struct destination *to)
{
    act_part(source, row, 0, cols, to);
}

/* --- static codes and nothing else: no row needs to be whole --- */

struct act_job {
    const struct bl_activation_source *source;
    const struct bl_output *output;
    struct grid grid;
};

static void act_piece(const struct act_job *job, int64_t piece)
{
    int64_t row = piece / job->grid.per_row, start = piece % job->grid.per_row * CHUNK;
    int64_t left = job->grid.cols - start;
    struct destination to = {NULL, job->output->codes + row * job->output->codes_stride + start,
                             (float)job->output->inv_scale};
    act_part(job->source, row, start, left < CHUNK ? left : CHUNK, &to);
}

static void act_static(const struct bl_activation_source *source, const struct bl_output *output,
                       int64_t rows, int64_t cols, int threads)
{
    bool contiguous = source->gate_stride == cols && output->codes_stride == cols &&
                      (!source->up || source->up_stride == cols);
    struct act_job job = {source, output, make_grid(rows, cols, contiguous)};
    int64_t pieces = job.grid.rows * job.grid.per_row;
    int team = useful_threads(threads, rows * cols);
    clear_padding(output, rows);
    PARALLEL_OVER(team)
    for (int64_t piece = 0; piece < pieces; piece++)
        act_piece(&job, piece);
}

static int activation(const struct bl_activation_source *source, const struct bl_output *output,
                      int64_t rows, int64_t cols, int threads)
{
    if (output->epilogue == BL_STATIC && !output->raw && !output->shrink_count) {
        act_static(source, output, rows, cols, threads);
        return 0;
    }
    struct row_job job = {.compute = act_row, .source = source, .output = output};
    job.rows = rows;
    job.cols = cols;
    if (source->kind == BL_IDENTITY && !source->up) {
        job.plain = source->gate;
        job.plain_stride = source->gate_stride;
    }
    return run_rows(&job, threads);
}
