/* The exported functions: choice of the instruction set, and the kernels of the chosen one. */
#include "branchline_native.h"

#include <stddef.h>

#define BL_EXPORT __attribute__((visibility("default")))

BL_EXPORT int bl_abi_version(void);
BL_EXPORT int bl_best_isa(void);
BL_EXPORT int bl_set_isa(int isa);
BL_EXPORT bl_act_static_fn bl_act_static;
BL_EXPORT bl_rms_norm_static_fn bl_rms_norm_static;
BL_EXPORT bl_quantize_token_fn bl_quantize_token;
BL_EXPORT bl_fp8_decode_fn bl_fp8_decode;

static const struct bl_kernels *chosen = &bl_kernels_scalar;

/* The caller refuses a library whose version it does not know. */
int bl_abi_version(void) { return BL_ABI_VERSION; }

/* The widest instruction set that the processor and the operating system both serve. */
int bl_best_isa(void)
{
#if defined(BL_X86)
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") ||
        !__builtin_cpu_supports("f16c"))
        return BL_SCALAR;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return BL_AVX512;
    return BL_AVX2;
#else
    return BL_SCALAR;
#endif
}

/* Use the kernels of `isa` from now on; not while another thread is inside one.  Returns 0, or -1
 * for an instruction set that this processor lacks. */
int bl_set_isa(int isa)
{
    if (isa < BL_SCALAR || isa > bl_best_isa())
        return -1;
    chosen = &bl_kernels_scalar;
#if defined(BL_X86)
    if (isa == BL_AVX2)
        chosen = &bl_kernels_avx2;
    if (isa == BL_AVX512)
        chosen = &bl_kernels_avx512;
#endif
    return 0;
}

void bl_act_static(int activation, const uint16_t *gate, int64_t gate_stride, const uint16_t *up,
                   int64_t up_stride, uint8_t *codes, int64_t codes_stride, int64_t rows,
                   int64_t cols, float inv_scale, int threads)
{
    chosen->act_static(activation, gate, gate_stride, up, up_stride, codes, codes_stride, rows,
                       cols, inv_scale, threads);
}

void bl_rms_norm_static(int order, const uint16_t *x, int64_t x_stride, const uint16_t *weight,
                        uint8_t *codes, int64_t codes_stride, uint16_t *raw, int64_t raw_stride,
                        int64_t rows, int64_t cols, float eps, float inv_scale, int threads)
{
    chosen->rms_norm_static(order, x, x_stride, weight, codes, codes_stride, raw, raw_stride, rows,
                            cols, eps, inv_scale, threads);
}

void bl_quantize_token(const uint16_t *x, int64_t x_stride, uint8_t *codes, int64_t codes_stride,
                       float *scale, int64_t rows, int64_t cols, int threads)
{
    chosen->quantize_token(x, x_stride, codes, codes_stride, scale, rows, cols, threads);
}

void bl_fp8_decode(const uint8_t *codes, int64_t codes_stride, float *out, int64_t out_stride,
                   int64_t rows, int64_t cols, int threads)
{
    chosen->fp8_decode(codes, codes_stride, out, out_stride, rows, cols, threads);
}
