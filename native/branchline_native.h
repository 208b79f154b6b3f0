/* C kernels of branchline.  Plain C, no Python or torch headers; loaded with ctypes.
 *
 * All activations are bfloat16, rows of `cols` contiguous elements, `*_stride` elements apart.
 * Codes are float8_e4m3fn.  Every kernel equals the eager oracle (core/oracle.py) bit for bit, on
 * each instruction set; tests/core/test_native.py compares all 65,536 encodings.
 *
 * Layers: kernels.h holds the bodies, written once over a small vector vocabulary; scalar.c, avx2.c
 * and avx512.c define that vocabulary and include it; branchline_native.c chooses among the three.
 */
#ifndef BRANCHLINE_NATIVE_H
#define BRANCHLINE_NATIVE_H

#include <stdint.h>

#define BL_ABI_VERSION 1

#if defined(__x86_64__) && defined(__GNUC__)
#define BL_X86 1
#endif

enum bl_isa { BL_SCALAR = 0, BL_AVX2 = 1, BL_AVX512 = 2 };
enum bl_activation { BL_IDENTITY = 0, BL_RELU2 = 1, BL_SILU = 2 };
enum bl_norm_order { BL_NORM_LLAMA = 0, BL_NORM_GEMMA = 1 };

/* codes = e4m3(clamp(round(act(gate)) [* up, rounded] * inv_scale)); `up` may be NULL. */
typedef void bl_act_static_fn(int activation, const uint16_t *gate, int64_t gate_stride,
                              const uint16_t *up, int64_t up_stride, uint8_t *codes,
                              int64_t codes_stride, int64_t rows, int64_t cols, float inv_scale,
                              int threads);

/* RMSNorm, float64 sum of squares.  `codes` or `raw` may be NULL: raw only, codes only, or both. */
typedef void bl_rms_norm_static_fn(int order, const uint16_t *x, int64_t x_stride,
                                   const uint16_t *weight, uint8_t *codes, int64_t codes_stride,
                                   uint16_t *raw, int64_t raw_stride, int64_t rows, int64_t cols,
                                   float eps, float inv_scale, int threads);

/* Dynamic per-token: one float32 scale a row. */
typedef void bl_quantize_token_fn(const uint16_t *x, int64_t x_stride, uint8_t *codes,
                                  int64_t codes_stride, float *scale, int64_t rows, int64_t cols,
                                  int threads);

/* float32 values of codes, no scale applied. */
typedef void bl_fp8_decode_fn(const uint8_t *codes, int64_t codes_stride, float *out,
                              int64_t out_stride, int64_t rows, int64_t cols, int threads);

struct bl_kernels {
    bl_act_static_fn *act_static;
    bl_rms_norm_static_fn *rms_norm_static;
    bl_quantize_token_fn *quantize_token;
    bl_fp8_decode_fn *fp8_decode;
};

extern const struct bl_kernels bl_kernels_scalar;
#if defined(BL_X86)
extern const struct bl_kernels bl_kernels_avx2;
extern const struct bl_kernels bl_kernels_avx512;
#endif

#endif
