/* Everything but static codes alone: rows one by one, or in blocks that share their slots. */

/* Computes a row into whichever of the destination's buffers is not NULL. */
typedef void compute_row_fn(const void *source, int64_t row, int64_t cols,
                            const struct destination *to);

/* A request by its slots; the key only sorts, and may be the same for different slots. */
struct request {
    uint64_t key;
    int64_t number;
};

struct row_job {
    compute_row_fn *compute;
    const void *source;
    const uint16_t *plain; /* the source's own rows, where it changes nothing; else NULL */
    int64_t plain_stride;
    bool always;           /* computing a row has an effect beside its outputs */
    const struct bl_output *output;
    int64_t rows, cols;
    int64_t rows_per_request;
    /* Blocks of rows that share all slots, and the rows in their order; NULL: each row alone. */
    const int64_t *start, *order;
    int64_t blocks;
    char *scratch;
    size_t scratch_size; /* a thread's; the parts begin at: */
    size_t scale_at, inverse_at, byte_at, total_at;
};

BL_INLINE bool dynamic_codes(const struct bl_output *output)
{
    return output->epilogue != BL_NO_CODES && output->epilogue != BL_STATIC;
}

/* Where the raw values of a row go; NULL: nowhere. */
BL_INLINE uint16_t *raw_row(const struct row_job *job, int64_t row)
{
    const struct bl_output *output = job->output;
    if (!output->raw)
        return NULL;
    if (output->raw_map) {
        int64_t place = output->raw_map[row / job->rows_per_request];
        if (place < 0)
            return NULL;
        row = place * job->rows_per_request + row % job->rows_per_request;
    }
    return output->raw + row * output->raw_stride;
}

static bool wants_product(const struct row_job *job, int64_t row)
{
    const struct bl_output *output = job->output;
    for (int64_t i = 0; i < output->shrink_count; i++)
        if (output->shrinks[i].slots[row / job->rows_per_request] >= 0)
            return true;
    return false;
}

/* Codes and raw values of a row.  Returns its values, if `keep` or codes are measured: in the raw
 * output, in `room`, or where the source has them. */
static const uint16_t *run_row(const struct row_job *job, int64_t row, bool keep, uint16_t *room,
                               const struct row_scales *scales)
{
    const struct bl_output *output = job->output;
    bool measured = dynamic_codes(output);
    uint16_t *raw = raw_row(job, row);
    struct destination to = {raw, NULL, (float)output->inv_scale};
    if (output->epilogue == BL_STATIC)
        to.codes = output->codes + row * output->codes_stride;
    if (!raw && !job->plain && (keep || measured))
        to.values = room;
    if (to.values || to.codes || job->always)
        job->compute(job->source, row, job->cols, &to);
    const uint16_t *values = to.values;
    if (!values && job->plain)
        values = job->plain + row * job->plain_stride;
    if (measured)
        measure_row(output, row, values, job->cols, scales);
    return values;
}

static void run_block(const struct row_job *job, int64_t number)
{
    char *scratch = job->scratch + (size_t)own_number() * job->scratch_size;
    struct row_scales scales = {(float *)(scratch + job->scale_at),
                                (float *)(scratch + job->inverse_at),
                                (uint8_t *)(scratch + job->byte_at)};
    if (!job->order) {
        run_row(job, number, false, (uint16_t *)scratch, &scales);
        return;
    }
    struct row_block block = {0};
    const int64_t *row = job->order + job->start[number];
    block.count = job->start[number + 1] - job->start[number];
    bool keep = wants_product(job, row[0]);
    for (int64_t i = 0; i < block.count; i++) {
        uint16_t *room = (uint16_t *)(scratch + (size_t)i * padded_size(job->cols * 2));
        block.row[i] = row[i];
        block.values[i] = run_row(job, row[i], keep, room, &scales);
    }
    for (int64_t i = 0; i < job->output->shrink_count; i++) {
        const struct bl_shrink *shrink = &job->output->shrinks[i];
        shrink_block(shrink, shrink->slots[row[0] / job->rows_per_request], &block, job->cols,
                     (float *)(scratch + job->total_at));
    }
}

/* --- which rows share a block --- */

static bool same_slots(const struct bl_output *output, int64_t a, int64_t b)
{
    for (int64_t i = 0; i < output->shrink_count; i++)
        if (output->shrinks[i].slots[a] != output->shrinks[i].slots[b])
            return false;
    return true;
}

static int by_key(const void *a, const void *b)
{
    const struct request *one = a, *other = b;
    if (one->key != other->key)
        return one->key < other->key ? -1 : 1;
    return one->number < other->number ? -1 : one->number > other->number;
}

static void sort_requests(const struct bl_output *output, struct request *requests)
{
    for (int64_t number = 0; number < output->requests; number++) {
        uint64_t key = 0;
        for (int64_t i = 0; i < output->shrink_count; i++)
            key = key * 0x9E3779B97F4A7C15u + (uint64_t)(output->shrinks[i].slots[number] + 1);
        requests[number] = (struct request){key, number};
    }
    qsort(requests, (size_t)output->requests, sizeof *requests, by_key);
}

/* Fills `order` and `start`, which have room for every row and one more; returns the number of
 * blocks.  No block has more than `limit` rows. */
static int64_t cut_blocks(const struct row_job *job, const struct request *requests, int64_t limit,
                          int64_t *order, int64_t *start)
{
    const struct bl_output *output = job->output;
    int64_t blocks = 0, at = 0;
    for (int64_t i = 0; i < output->requests; i++) {
        int64_t number = requests[i].number;
        bool joins = i > 0 && same_slots(output, requests[i - 1].number, number);
        for (int64_t t = 0; t < job->rows_per_request; t++, at++) {
            if (!(joins || t > 0) || at - start[blocks - 1] == limit)
                start[blocks++] = at;
            order[at] = number * job->rows_per_request + t;
        }
    }
    start[blocks] = at;
    return blocks;
}

/* --- the whole call --- */

static void lay_out_scratch(struct row_job *job)
{
    const struct bl_output *output = job->output;
    int64_t groups = dynamic_codes(output) ? group_count(output, job->cols) + LANES : 0;
    int64_t rows = output->shrink_count ? BLOCK_ROWS : 1, width = 0;
    for (int64_t i = 0; i < output->shrink_count; i++)
        if (output->shrinks[i].width > width)
            width = output->shrinks[i].width;
    job->scale_at = (size_t)rows * padded_size(job->cols * 2);
    job->inverse_at = job->scale_at + padded_size(groups * 4);
    job->byte_at = job->inverse_at + padded_size(groups * 4);
    job->total_at = job->byte_at + padded_size(groups);
    job->scratch_size =
        job->total_at + padded_size((width + LONE_ROW_RANKS) * BLOCK_ROWS * SUMS * 4);
}

static void run_blocks(struct row_job *job, int team, char *memory)
{
    job->scratch = memory + (64 - (uintptr_t)memory % 64);
    PARALLEL_OVER(team)
    for (int64_t block = 0; block < job->blocks; block++)
        run_block(job, block);
}

static int team_for(const struct row_job *job, int threads)
{
    int64_t products = 0;
    for (int64_t i = 0; i < job->output->shrink_count; i++)
        products += job->output->shrinks[i].width;
    int team = useful_threads(threads, job->rows * job->cols * (1 + products / 4));
    return team < job->rows ? team : (int)job->rows;
}

/* Rows that share slots lie together, so that A is read once for several of them. */
static int run_sorted(struct row_job *job, int team, char *memory)
{
    const struct bl_output *output = job->output;
    int64_t share = (job->rows + team - 1) / team;
    int64_t *order = malloc((size_t)(2 * job->rows + 1) * sizeof *order);
    struct request *requests = malloc((size_t)output->requests * sizeof *requests);
    bool enough = order && requests;
    if (enough) {
        job->order = order;
        job->start = order + job->rows;
        sort_requests(output, requests);
        job->blocks = cut_blocks(job, requests, share < BLOCK_ROWS ? share : BLOCK_ROWS, order,
                                 order + job->rows);
        run_blocks(job, team, memory);
    }
    free(requests);
    free(order);
    return enough ? 0 : -1;
}

static int run_rows(struct row_job *job, int threads)
{
    clear_padding(job->output, job->rows);
    if (job->rows == 0)
        return 0;
    int team = team_for(job, threads), failed = 0;
    lay_out_scratch(job);
    job->rows_per_request = job->rows / job->output->requests;
    job->blocks = job->rows;
    char *memory = malloc((size_t)team * job->scratch_size + 64);
    if (!memory)
        return -1;
    if (job->output->shrink_count)
        failed = run_sorted(job, team, memory);
    else
        run_blocks(job, team, memory);
    free(memory);
    return failed;
}
