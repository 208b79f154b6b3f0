/* The kernels for AMX (tiles of bfloat16) beside AVX-512: matmuls of codes on tiles, the rest as
 * avx512.c has it. */
#include "branchline_native.h"

#if defined(BL_AMX)

#if defined(__clang__)
#pragma clang attribute push(                                                                      \
    __attribute__((                                                                                \
        target("amx-tile,amx-bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))),            \
    apply_to = function)
#else
#pragma GCC target("amx-tile,amx-bf16")
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prefer-vector-width=512")
#endif
#include <immintrin.h>
#include <string.h>

#define BL_KERNELS bl_kernels_amx
#define BL_TILES
#include "avx512.h"

#include "kernels.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif
