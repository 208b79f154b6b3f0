/* bl_low_rank: what low-rank adapters add to the rows of linears that share an input.
 *
 * An element of the product with B is one chain of fused multiply-adds, rank by rank.  Its bytes,
 * like those of the product with A (shrink.h), are the same on every instruction set, alone and in
 * any batch.
 */
enum { EXPAND_ROWS = 4, EXPAND_PIECE = 512, FEW_REQUESTS = 64 };

struct low_rank_job {
    const struct bl_low_rank *stack;
    const struct bl_low_rank_call *rows;
    int64_t rows_per_request;
    const int64_t *order; /* requests with a slot, those of one slot together */
    const int64_t *start; /* by block: its first row, counted along `order` */
    int64_t blocks;
    int64_t pieces; /* of the channels, for each block */
    float *shrunk;  /* by row along `order`: `width` numbers */
    char *scratch;
    size_t scratch_size, wide_at;
};

/* --- one element, and one vector, of the output --- */

BL_INLINE float read_one(int64_t dtype, const void *p, int64_t i)
{
    if (dtype == BL_LORA_F32)
        return ((const float *)p)[i];
    uint16_t half = ((const uint16_t *)p)[i];
    return dtype == BL_LORA_F16 ? from_f16(half) : from_bf16(half);
}

BL_INLINE void write_one(int64_t dtype, void *p, int64_t i, float x)
{
    if (dtype == BL_LORA_F32)
        ((float *)p)[i] = x;
    else
        ((uint16_t *)p)[i] = dtype == BL_LORA_F16 ? to_f16(x) : to_bf16(x);
}

BL_INLINE void store_rounded(int64_t dtype, char *p, vf x)
{
    if (dtype == BL_LORA_F32)
        v_store((float *)p, x);
    else if (dtype == BL_LORA_F16)
        v_store_f16((uint16_t *)p, v_from_bits(canonical_nan(x)));
    else
        vi_store_halves(p, vi_shr(vi_if_nan(x, vi_set(0x7FC00000), v_bits(round_bf16(x))), 16));
}

/* `rows`, `wide`, `dtype` and `out_dtype` are constants in every call. */
BL_INLINE void expand_tile(int rows, int wide, int64_t dtype, int64_t out_dtype, const char *b,
                           int64_t b_stride, int64_t ranks, const float *const *shrunk,
                           float scaling, char *const *out)
{
    vf sum[EXPAND_ROWS * EXPAND_WIDE];
    for (int i = 0; i < rows * wide; i++)
        sum[i] = v_set(0.0f);
    for (int64_t rank = 0; rank < ranks; rank++, b += b_stride) {
        vf factor[EXPAND_WIDE];
        for (int j = 0; j < wide; j++)
            factor[j] = load_lora(dtype, b + j * LANES * lora_size(dtype));
        for (int i = 0; i < rows; i++) {
            vf value = v_set(shrunk[i][rank]);
            for (int j = 0; j < wide; j++)
                sum[i * wide + j] = v_fused(value, factor[j], sum[i * wide + j]);
        }
    }
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < wide; j++) {
            char *place = out[i] + j * LANES * lora_size(out_dtype);
            vf added = v_mul(sum[i * wide + j], v_set(scaling));
            store_rounded(out_dtype, place, v_add(load_lora(out_dtype, place), added));
        }
}

static void expand_rest(int rows, int64_t dtype, int64_t out_dtype, const char *b,
                        int64_t b_stride, int64_t ranks, const float *const *shrunk,
                        float scaling, char *const *out, int64_t count)
{
    for (int i = 0; i < rows; i++)
        for (int64_t n = 0; n < count; n++) {
            float sum = 0.0f;
            for (int64_t rank = 0; rank < ranks; rank++)
                sum = fmaf(shrunk[i][rank], read_one(dtype, b + rank * b_stride, n), sum);
            float added = sum * scaling;
            write_one(out_dtype, out[i], n, read_one(out_dtype, out[i], n) + added);
        }
}

/* `count` channels of `rows` rows. */
BL_INLINE void expand_rows(int rows, int64_t dtype, int64_t out_dtype, const char *b,
                           int64_t b_stride, int64_t ranks, const float *const *shrunk,
                           float scaling, char *const *given, int64_t count)
{
    int64_t size = lora_size(dtype), out_size = lora_size(out_dtype), n = 0;
    char *out[EXPAND_ROWS];
    for (int i = 0; i < rows; i++)
        out[i] = given[i];
    while (n < count) {
        int64_t done = EXPAND_WIDE * LANES;
        if (n + done <= count) {
            expand_tile(rows, EXPAND_WIDE, dtype, out_dtype, b, b_stride, ranks, shrunk, scaling,
                        out);
        } else if (n + LANES <= count) {
            done = LANES;
            expand_tile(rows, 1, dtype, out_dtype, b, b_stride, ranks, shrunk, scaling, out);
        } else {
            done = count - n;
            expand_rest(rows, dtype, out_dtype, b, b_stride, ranks, shrunk, scaling, out, done);
        }
        n += done;
        b += done * size;
        for (int i = 0; i < rows; i++)
            out[i] += done * out_size;
    }
}

typedef void expand_fn(int rows, const char *b, int64_t b_stride, int64_t ranks,
                       const float *const *shrunk, float scaling, char *const *out, int64_t count);

#define EXPAND(name, dtype, out_dtype)                                                             \
    static void name(int rows, const char *b, int64_t b_stride, int64_t ranks,                     \
                     const float *const *shrunk, float scaling, char *const *out, int64_t count)   \
    {                                                                                              \
        if (rows == EXPAND_ROWS)                                                                   \
            expand_rows(EXPAND_ROWS, dtype, out_dtype, b, b_stride, ranks, shrunk, scaling, out,   \
                        count);                                                                    \
        else                                                                                       \
            for (int i = 0; i < rows; i++)                                                         \
                expand_rows(1, dtype, out_dtype, b, b_stride, ranks, shrunk + i, scaling, out + i, \
                            count);                                                                \
    }

EXPAND(expand_bf16_bf16, BL_LORA_BF16, BL_LORA_BF16)
EXPAND(expand_bf16_f32, BL_LORA_BF16, BL_LORA_F32)
EXPAND(expand_bf16_f16, BL_LORA_BF16, BL_LORA_F16)
EXPAND(expand_f32_bf16, BL_LORA_F32, BL_LORA_BF16)
EXPAND(expand_f32_f32, BL_LORA_F32, BL_LORA_F32)
EXPAND(expand_f32_f16, BL_LORA_F32, BL_LORA_F16)
EXPAND(expand_f16_bf16, BL_LORA_F16, BL_LORA_BF16)
EXPAND(expand_f16_f32, BL_LORA_F16, BL_LORA_F32)
EXPAND(expand_f16_f16, BL_LORA_F16, BL_LORA_F16)

/* By the dtype of B, then of the output, as bl_lora_dtype numbers them. */
static expand_fn *const EXPANDS[3][3] = {
    {expand_bf16_bf16, expand_bf16_f32, expand_bf16_f16},
    {expand_f32_bf16, expand_f32_f32, expand_f32_f16},
    {expand_f16_bf16, expand_f16_f32, expand_f16_f16},
};

/* --- one block of rows that share a slot --- */

BL_INLINE int64_t row_number(const struct low_rank_job *job, int64_t place)
{
    int64_t request = job->order[place / job->rows_per_request];
    return request * job->rows_per_request + place % job->rows_per_request;
}

BL_INLINE int64_t block_slot(const struct low_rank_job *job, int64_t block)
{
    return job->rows->slots[job->order[job->start[block] / job->rows_per_request]];
}

BL_INLINE int64_t slot_rank(const struct low_rank_job *job, int64_t slot)
{
    int64_t held = job->stack->ranks[slot];
    return held < job->stack->width ? held : job->stack->width;
}

static void widen_row(const uint16_t *x, float *out, int64_t count)
{
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        v_store(out + i, v_load_f16(x + i));
    for (; i < count; i++)
        out[i] = from_f16(x[i]);
}

static void low_rank_shrink(const struct low_rank_job *job, int64_t number)
{
    const struct bl_low_rank *stack = job->stack;
    const struct bl_low_rank_call *rows = job->rows;
    char *scratch = job->scratch + (size_t)own_number() * job->scratch_size;
    float *wide = (float *)(scratch + job->wide_at), *out[BLOCK_ROWS];
    int64_t first = job->start[number], slot = block_slot(job, number);
    struct row_block block = {.count = job->start[number + 1] - first};
    for (int64_t i = 0; i < block.count; i++) {
        int64_t at = row_number(job, first + i) * rows->x_stride * lora_size(rows->x_dtype);
        block.values[i] = (const char *)rows->x + at;
        out[i] = rows->product ? rows->product + row_number(job, first + i) * stack->width
                               : job->shrunk + (first + i) * stack->width;
        if (rows->x_dtype == BL_LORA_F16) {
            widen_row(block.values[i], wide + i * stack->columns, stack->columns);
            block.values[i] = wide + i * stack->columns;
        }
    }
    int64_t ranks = slot_rank(job, slot);
    struct factor_kind kind = {rows->x_dtype == BL_LORA_BF16, stack->dtype};
    int64_t a_at = stack->starts[slot] * stack->columns * lora_size(stack->dtype);
    multiply_block(&block, kind, (const char *)stack->a + a_at, stack->columns, ranks,
                   stack->columns, (float *)scratch);
    put_product(&block, ranks, ranks, (float *)scratch, out);
}

static void low_rank_expand(const struct low_rank_job *job, int64_t number, int64_t piece)
{
    const struct bl_low_rank *stack = job->stack;
    const struct bl_low_rank_call *rows = job->rows;
    int64_t each = job->pieces > 1 ? EXPAND_PIECE : stack->channels, at = piece * each;
    int64_t left = stack->channels - at, count = left < each ? left : each;
    int64_t slot = block_slot(job, number), size = lora_size(stack->dtype);
    int64_t b_at = (stack->starts[slot] * stack->channels + at) * size;
    expand_fn *expand = EXPANDS[stack->dtype][rows->out_dtype];
    for (int64_t place = job->start[number]; place < job->start[number + 1];) {
        const float *shrunk[EXPAND_ROWS];
        char *out[EXPAND_ROWS];
        int high = 0;
        for (; high < EXPAND_ROWS && place < job->start[number + 1]; high++, place++) {
            int64_t row = row_number(job, place);
            shrunk[high] = !rows->shrunk ? job->shrunk + place * stack->width
                                   : rows->shrunk + row * stack->width;
            out[high] = (char *)rows->out +
                        (row * rows->out_stride + at) * lora_size(rows->out_dtype);
        }
        expand(high, (const char *)stack->b + b_at, stack->channels * size, slot_rank(job, slot),
               shrunk, stack->scaling[slot], out, count);
    }
}

static void low_rank_task(const struct low_rank_job *job, int64_t task)
{
    if (job->pieces == 1 && !job->rows->shrunk)
        low_rank_shrink(job, task);
    if (!job->rows->product)
        low_rank_expand(job, task / job->pieces, task % job->pieces);
}

/* --- the whole call --- */

static int by_number(const void *a, const void *b)
{
    const int64_t one = *(const int64_t *)a, other = *(const int64_t *)b;
    return one < other ? -1 : one > other;
}

/* Requests with a slot, sorted by slot and then by number; returns how many. */
static int64_t sort_by_slot(const struct bl_low_rank_call *rows, int64_t *order)
{
    int64_t count = 0;
    for (int64_t i = 0; i < rows->requests; i++) {
        if (rows->slots[i] < 0)
            continue;
        int64_t key = (int64_t)rows->slots[i] << 32 | i, at = count++;
        for (; rows->requests <= FEW_REQUESTS && at > 0 && order[at - 1] > key; at--)
            order[at] = order[at - 1];
        order[at] = key;
    }
    if (rows->requests > FEW_REQUESTS)
        qsort(order, (size_t)count, sizeof *order, by_number);
    for (int64_t i = 0; i < count; i++)
        order[i] &= 0xFFFFFFFF;
    return count;
}

static int64_t cut_by_slot(const struct low_rank_job *job, int64_t count, int64_t *start)
{
    int64_t blocks = 0, rows = count * job->rows_per_request, each = job->rows_per_request;
    const int32_t *slots = job->rows->slots;
    for (int64_t at = 0; at < rows; at++) {
        int64_t request = at / each;
        bool changes = at % each == 0 &&
                       (at == 0 || slots[job->order[request]] != slots[job->order[request - 1]]);
        if (changes || at - start[blocks - 1] == BLOCK_ROWS)
            start[blocks++] = at;
    }
    start[blocks] = rows;
    return blocks;
}

/* The job that a number falls to, counted over all of them by `ends`; it becomes the job's own. */
BL_INLINE const struct low_rank_job *find_job(const struct low_rank_job *jobs,
                                              const int64_t *ends, int64_t *number)
{
    int64_t which = 0;
    while (*number >= ends[which])
        which++;
    *number -= which ? ends[which - 1] : 0;
    return &jobs[which];
}

static void shrink_apart(const struct low_rank_job *jobs, const int64_t *ends, int64_t block)
{
    const struct low_rank_job *job = find_job(jobs, ends, &block);
    if (job->pieces > 1 && !job->rows->shrunk)
        low_rank_shrink(job, block);
}

static void run_task(const struct low_rank_job *jobs, const int64_t *ends, int64_t task)
{
    const struct low_rank_job *job = find_job(jobs, ends, &task);
    low_rank_task(job, task);
}

static void run_low_rank(struct low_rank_job *jobs, int64_t number, int team)
{
    int64_t blocks[BL_MATMULS], tasks[BL_MATMULS], all_blocks = 0, all_tasks = 0;
    bool apart = false;
    for (int64_t i = 0; i < number; i++)
        all_blocks += jobs[i].blocks;
    for (int64_t i = 0, before = 0; i < number; i++) {
        struct low_rank_job *job = &jobs[i];
        /* Where rows are too few for the threads, they share the channels of each. */
        bool cut = team > 1 && all_blocks < 2 * team && !job->rows->product;
        job->pieces = cut ? (job->stack->channels + EXPAND_PIECE - 1) / EXPAND_PIECE : 1;
        apart |= job->pieces > 1 && !job->rows->shrunk;
        blocks[i] = before += job->blocks;
        tasks[i] = all_tasks += job->blocks * job->pieces;
    }
    if (apart) {
        PARALLEL_OVER(team)
        for (int64_t block = 0; block < all_blocks; block++)
            shrink_apart(jobs, blocks, block);
    }
    PARALLEL_OVER(team)
    for (int64_t task = 0; task < all_tasks; task++)
        run_task(jobs, tasks, task);
}

/* Sizes of what one call needs, and then where it lies. */
struct low_rank_room {
    size_t order, shrunk, scratch, wide_at;
};

static struct low_rank_room low_rank_room(const struct bl_low_rank_call *call, int64_t count)
{
    int64_t width = call->stack->width;
    struct low_rank_room room = {.order = padded_size((call->requests + count + 1) * 8)};
    room.shrunk = !call->shrunk && !call->product ? padded_size(count * width * 4) : 0;
    room.wide_at = padded_size(BLOCK_ROWS * padded_rank(width) * SUMS * 4);
    bool widens = call->x_dtype == BL_LORA_F16;
    room.scratch =
        room.wide_at + (widens ? padded_size(BLOCK_ROWS * call->stack->columns * 4) : 0);
    return room;
}

/* `memory` is the call's own, for `order` and `shrunk`; `scratch` is everybody's. */
static struct low_rank_job low_rank_job(const struct bl_low_rank_call *call, int64_t count,
                                        char *memory, char *scratch, size_t scratch_size)
{
    struct low_rank_room room = low_rank_room(call, count);
    int64_t *order = (int64_t *)memory;
    struct low_rank_job job = {.stack = call->stack,
                               .rows = call,
                               .order = order,
                               .start = order + call->requests,
                               .shrunk = (float *)(memory + room.order),
                               .scratch = scratch,
                               .scratch_size = scratch_size,
                               .wide_at = room.wide_at};
    job.rows_per_request = call->requests ? count / call->requests : 0;
    int64_t requests = job.rows_per_request ? sort_by_slot(call, order) : 0;
    job.blocks = cut_by_slot(&job, requests, order + call->requests);
    return job;
}

/* Multiplications of the rows that have an adapter, in units of four. */
static int64_t low_rank_work(const struct bl_low_rank_call *call, int64_t count)
{
    const struct bl_low_rank *stack = call->stack;
    int64_t ranks = 0;
    for (int64_t i = 0; i < call->requests; i++)
        ranks += call->slots[i] < 0 ? 0 : stack->ranks[call->slots[i]];
    int64_t each = call->requests ? count / call->requests : 0;
    return ranks * each * (stack->columns + stack->channels) / 4;
}

static int low_rank(const struct bl_low_rank_call *calls, int64_t number, int64_t count,
                    int threads)
{
    struct low_rank_job jobs[BL_MATMULS];
    size_t own = 0, scratch = 0;
    int64_t work = 0;
    for (int64_t i = 0; i < number; i++) {
        struct low_rank_room room = low_rank_room(&calls[i], count);
        own += room.order + room.shrunk;
        scratch = room.scratch > scratch ? room.scratch : scratch;
        work += low_rank_work(&calls[i], count);
    }
    int team = useful_threads(threads, work);
    char *memory = malloc(own + (size_t)team * scratch + 64);
    if (!memory)
        return -1;
    char *at = memory + (64 - (uintptr_t)memory % 64), *shared = at + own;
    for (int64_t i = 0; i < number; i++) {
        struct low_rank_room room = low_rank_room(&calls[i], count);
        jobs[i] = low_rank_job(&calls[i], count, at, shared, scratch);
        at += room.order + room.shrunk;
    }
    run_low_rank(jobs, number, team);
    free(memory);
    return 0;
}
