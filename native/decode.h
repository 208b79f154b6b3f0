/* bl_fp8_decode. */

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
    int team = useful_threads(threads, rows * cols);
    PARALLEL_OVER(team)
    for (int64_t piece = 0; piece < pieces; piece++)
        decode_piece(&job, piece);
}
