/* C kernels of branchline.  Plain C, no Python or torch headers; loaded with ctypes.
 *
 * All activations are bfloat16, rows of `cols` contiguous elements, `*_stride` elements apart.
 * Every kernel equals the eager oracle (core/oracle) bit for bit, on each instruction set; matmuls on
 * AMX, of codes and of bfloat16, keep a definition of their own (amx.h).
 *
 * A call is a *source* (what is computed, and from what) and an *output* (what is emitted of it).
 * core/native.py mirrors the structs and enums below; change both, and BL_ABI_VERSION.
 */
#ifndef BRANCHLINE_NATIVE_H
#define BRANCHLINE_NATIVE_H

#include <stdint.h>

#define BL_ABI_VERSION 16

#if defined(__x86_64__) && defined(__GNUC__)
#define BL_X86 1
#endif
/* Older compilers do not know the instructions; only Linux is known how to ask for the tiles. */
#if defined(BL_X86) && defined(__linux__) && defined(__has_include)
#if __has_include(<amxbf16intrin.h>)
#define BL_AMX 1
#endif
#endif

enum bl_isa { BL_SCALAR = 0, BL_AVX2 = 1, BL_AVX512 = 2, BL_ISA_AMX = 3 };

/* BL_TABLE looks the gate's side up: 65,536 bfloat16 values, by the encoding. */
enum bl_activation_kind { BL_IDENTITY = 0, BL_RELU = 1, BL_RELU2 = 2, BL_SILU = 3, BL_TABLE = 4 };
enum bl_norm_order { BL_LLAMA = 0, BL_GEMMA = 1, BL_LAYER_NORM = 2, BL_LAYER_NORM_1P = 3 };
enum bl_epilogue { BL_NO_CODES = 0, BL_STATIC = 1, BL_TOKEN = 2, BL_GROUP = 3, BL_NVFP4 = 4 };
enum bl_scale_dtype { BL_SCALE_F32 = 0, BL_SCALE_E8M0 = 1, BL_SCALE_E4M3 = 2 };
enum bl_lora_dtype { BL_LORA_BF16 = 0, BL_LORA_F32 = 1, BL_LORA_F16 = 2 };

/* round(act(gate)), or, with `up`, round(round(act(gate)) * up); for BL_TABLE `up` is first clamped
 * to -up_limit and up_limit, then round(up + up_offset). */
struct bl_activation_source {
    int64_t kind;
    const uint16_t *gate;
    int64_t gate_stride;
    const uint16_t *up; /* NULL: not gated */
    int64_t up_stride;
    const uint16_t *table; /* for BL_TABLE */
    /* For BL_TABLE and BL_STATIC, not gated: what `table` and `inv_scale` give, as 65,536 codes;
     * NULL: computed from `table`. */
    const uint8_t *code_table;
    double up_limit;  /* for BL_TABLE: a bfloat16 value; inf for none */
    double up_offset; /* for BL_TABLE, in float32; 0 for none */
};

/* The norm of x, or of round(x + residual), which then is written to `new_residual`. */
struct bl_norm_source {
    int64_t order;
    double eps;
    const uint16_t *x;
    int64_t x_stride;
    const uint16_t *residual; /* NULL: none */
    int64_t residual_stride;
    const uint16_t *weight;
    const uint16_t *bias; /* NULL: none */
    uint16_t *new_residual;
    int64_t new_residual_stride;
};

/* The rows times each request's own A.  Rows belong to `requests` requests in turn, rows /
 * requests each. */
struct bl_shrink {
    const void *a; /* rows of `cols`: those of a slot one after the other */
    int64_t a_dtype;
    int64_t row_stride;    /* elements */
    const int32_t *starts; /* by slot: its first row */
    const int32_t *ranks;  /* by slot: how many of its rows count */
    const int32_t *slots;  /* by request; -1: none, the row's output is zeros */
    int64_t width;         /* columns of `out`; those beyond a rank are zeros */
    float *out;
    int64_t out_stride;
};

struct bl_output {
    int64_t epilogue;
    int64_t group;       /* columns of a block, for BL_GROUP and BL_NVFP4 */
    int64_t ue8m0;       /* scales are powers of two, rounded up */
    int64_t scale_dtype; /* of `scale` */
    double inv_scale;    /* for BL_STATIC: 1 / scale, in float32 */
    double global_scale; /* for BL_NVFP4, in float32 */
    uint8_t *codes;
    int64_t codes_stride; /* bytes */
    int64_t code_rows;    /* rows from `rows` to here are zeros */
    void *scale;
    int64_t scale_row_stride, scale_group_stride; /* elements; not for `swizzled` */
    int64_t scale_rows, scale_groups;             /* what lies beyond rows and groups is zeros */
    int64_t swizzled;                             /* tiles of 128 rows and 4 groups */
    uint16_t *raw;                                /* NULL: none */
    int64_t raw_stride;
    const int32_t *raw_map; /* by request: see linear/outputs.py; NULL: every row in place */
    const struct bl_shrink *shrinks;
    int64_t shrink_count;
    int64_t requests; /* for `raw_map` and `shrinks`; 1 where neither counts them */
};

/* 0, or -1: no memory for a scratch buffer, in which case some outputs are not written. */
typedef int bl_activation_fn(const struct bl_activation_source *source,
                             const struct bl_output *output, int64_t rows, int64_t cols,
                             int threads);
typedef int bl_norm_fn(const struct bl_norm_source *source, const struct bl_output *output,
                       int64_t rows, int64_t cols, int threads);

/* float32 values of codes, no scale applied. */
typedef void bl_fp8_decode_fn(const uint8_t *codes, int64_t codes_stride, float *out,
                              int64_t out_stride, int64_t rows, int64_t cols, int threads);

/* Output channels that a packed weight keeps together. */
#define BL_PANEL 64
/* Decoded codes of weights are this much smaller than their value, activations that they are
 * multiplied with larger. */
#define BL_WEIGHT_BIAS 256.0f

enum bl_input_kind { BL_INPUT_E4M3 = 0, BL_INPUT_BF16 = 1, BL_INPUT_F32 = 2 };
enum bl_weight_kind { BL_WEIGHT_E4M3 = 0, BL_WEIGHT_BF16 = 1 };

/* The rows of x times a packed weight (tile.h), scaled, plus a bias.  Vectors by channel are as
 * long as whole panels.  The bytes of activations in float32 are the same on every instruction set
 * if they have no more bits than a half.  Weights in bfloat16 are multiplied with bfloat16 only. */
struct bl_matmul {
    int64_t rows, columns, out_features;
    const void *x;
    int64_t x_kind, x_stride; /* elements */
    const int64_t *x_rows;    /* by output row: the row of x, and of x_scale; NULL: the same */
    const float *x_scale;     /* NULL for activations that are no codes */
    int64_t x_scale_stride;   /* from row to row; 0: one for all */
    int64_t x_group;          /* columns that share a scale; 0: all */
    const void *weight;       /* panels of `weight_kind` (tile.h) */
    int64_t weight_kind;
    /* By channel; or (panels, groups), or (panels, groups, BL_PANEL); NULL for weights that are no
     * codes. */
    const float *weight_scale;
    int64_t weight_group;     /* columns that share a scale; 0: all */
    int64_t weight_each_channel;
    /* Columns of a block sum: x_group and weight_group are multiples of it.  Bfloat16 weights on AMX
     * have blocks of their own (HALVES_DEPTH). */
    int64_t block;
    const float *bias; /* NULL: none */
    void *out;
    int64_t out_bf16; /* else float32 */
    int64_t out_stride;
};

/* The most of them that one call computes, side by side. */
#define BL_MATMULS 8

/* 0, or -1: no memory for scratch buffers. */
typedef int bl_matmul_fn(const struct bl_matmul *specs, int64_t count, int threads);

/* One projection of `experts` experts.  Expert e multiplies output rows offsets[e] to
 * offsets[e + 1]; what lies beyond the last is not touched. */
struct bl_grouped_matmul {
    struct bl_matmul each; /* of expert 0, as if all rows were its own; `rows` is not read */
    int64_t experts;
    const int32_t *offsets; /* experts + 1 */
    /* From an expert to the next: bytes, then elements. */
    int64_t weight_bytes, weight_scale_stride, bias_stride;
};

/* 0, or -1: no memory for scratch buffers. */
typedef int bl_grouped_matmul_fn(const struct bl_grouped_matmul *spec, int threads);

/* A router's choices, and what sorting them by expert gives (linear/experts/pairs.py). */
struct bl_pairs {
    const void *index;   /* (tokens, top_k), contiguous */
    int64_t index_bytes; /* of an element: 4 or 8 */
    int64_t tokens, top_k, experts;
    int64_t *order, *token; /* by position */
    int64_t *position;      /* by pair */
    int32_t *expert;        /* by position */
    int32_t *offsets;       /* experts + 1 */
    int64_t absent;         /* written: how many choices name no expert here */
};

/* 0, or -1: no memory for scratch buffers. */
typedef int bl_pairs_fn(struct bl_pairs *pairs);

/* The sum over each token's choices of weight times x, in float32.  Dtypes are those of
 * bl_lora_dtype. */
struct bl_combine {
    int64_t tokens, top_k, columns;
    const void *x; /* by position, rows of `columns` */
    int64_t x_dtype;
    const void *weight; /* (tokens, top_k), contiguous */
    int64_t weight_dtype;
    const int64_t *position; /* by pair */
    const int32_t *computed; /* rows of x from this number on are zeros and not read */
    float *out;              /* (tokens, columns) */
};
typedef void bl_combine_fn(const struct bl_combine *spec, int threads);

/* The low-rank matrices that one linear's adapters hold, and their places in two pools.  Dtypes are
 * those of bl_lora_dtype, for activations too. */
struct bl_low_rank {
    const void *a;         /* (rows of the pool, columns) */
    const void *b;         /* (rows of the pool, channels) */
    int64_t dtype;         /* of both */
    const int32_t *starts; /* by slot: its first row */
    const int32_t *ranks;  /* by slot: how many rows from there on count; at most `width` */
    const float *scaling;  /* by slot */
    int64_t columns, channels, width;
};

/* The rows of one linear, which belong to `requests` requests in turn. */
struct bl_low_rank_call {
    const struct bl_low_rank *stack;
    const void *x;
    int64_t x_dtype, x_stride;
    const float *shrunk;  /* (rows, width), contiguous: taken in the place of x; NULL: computed */
    const int32_t *slots; /* by request; -1: none, the row is not touched */
    int64_t requests;
    float *product; /* (rows, width), contiguous: gets the shrunk rows, and `out` nothing; or NULL */
    void *out;
    int64_t out_dtype, out_stride;
};

/* Adds scaling * (x a) b to `out`, rounded once, for each of `number` linears, at most BL_MATMULS, of
 * `count` rows each.  0, or -1: no memory for scratch buffers, in which case every `out` is as it
 * was. */
typedef int bl_low_rank_fn(const struct bl_low_rank_call *calls, int64_t number, int64_t count,
                           int threads);

/* A contiguous tensor of `count` numbers of 2 or 4 bytes. */
struct bl_magnitude {
    const void *values;
    int64_t bytes, count;
    int64_t largest; /* written: the bits of its largest magnitude, 0 of none */
};
typedef void bl_magnitudes_fn(struct bl_magnitude *tensors, int64_t count);

/* Rows of one new token each, and what they look back on.  Dtypes are those of bl_lora_dtype; strides
 * count elements, and the elements of one head are neighbours. */
struct bl_attention {
    int64_t rows, heads, kv_heads, width, value_width, dtype;
    const void *query;
    int64_t query_row, query_head;
    void *keys, *values; /* the cache, (places, kv_heads, width) */
    int64_t key_place, key_head, value_place, value_head;
    const void *new_key, *new_value; /* of the rows' own tokens */
    int64_t new_key_row, new_key_head, new_value_row, new_value_head;
    const int64_t *const *read; /* by row: the places of the keys before the new one */
    const int64_t *lengths;     /* by row: how many they are */
    const int64_t *write;       /* by row: where the new one goes, after all were read */
    void *out;                  /* (rows, heads, value_width), contiguous */
    double scale, softcap;      /* scores are scale * q k, then softcap * tanh(. / softcap) unless 0 */
};

/* 0, or -1: no memory for scratch buffers, in which case nothing was written. */
typedef int bl_attention_fn(const struct bl_attention *spec, int threads);

struct bl_kernels {
    bl_activation_fn *activation;
    bl_norm_fn *norm;
    bl_fp8_decode_fn *fp8_decode;
    bl_matmul_fn *matmul;
    bl_low_rank_fn *low_rank;
    bl_magnitudes_fn *magnitudes;
    bl_grouped_matmul_fn *grouped_matmul;
    bl_pairs_fn *pairs;
    bl_combine_fn *combine;
    bl_attention_fn *attention;
};

extern const struct bl_kernels bl_kernels_scalar;
#if defined(BL_X86)
extern const struct bl_kernels bl_kernels_avx2;
extern const struct bl_kernels bl_kernels_avx512;
#endif
#if defined(BL_AMX)
extern const struct bl_kernels bl_kernels_amx;
#endif

#endif
