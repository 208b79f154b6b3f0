/* The kernels for AVX-512 (F, BW, DQ, VL): vectors of sixteen lanes. */
#include "branchline_native.h"

#if defined(BL_X86)

#if defined(__clang__)
#pragma clang attribute push(                                                                      \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))),                   \
    apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prefer-vector-width=512")
#endif
#include <immintrin.h>
#include <string.h>

#define BL_KERNELS bl_kernels_avx512
#include "avx512.h"

#include "kernels.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif
