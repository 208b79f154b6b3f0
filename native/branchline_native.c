/* The exported functions: choice of the instruction set, and the kernels of the chosen one. */
#define _GNU_SOURCE /* syscall() */
#include "branchline_native.h"

#include <stddef.h>
#if defined(BL_AMX)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define BL_EXPORT __attribute__((visibility("default")))

BL_EXPORT int bl_abi_version(void);
BL_EXPORT int bl_best_isa(void);
BL_EXPORT int bl_set_isa(int isa);
BL_EXPORT void bl_let_workers_go(void);
BL_EXPORT bl_activation_fn bl_activation;
BL_EXPORT bl_norm_fn bl_norm;
BL_EXPORT bl_fp8_decode_fn bl_fp8_decode;
BL_EXPORT bl_matmul_fn bl_matmul;
BL_EXPORT bl_low_rank_fn bl_low_rank;
BL_EXPORT bl_magnitudes_fn bl_magnitudes;
BL_EXPORT bl_grouped_matmul_fn bl_grouped_matmul;
BL_EXPORT bl_pairs_fn bl_pairs;
BL_EXPORT bl_combine_fn bl_combine;
BL_EXPORT bl_attention_fn bl_attention;

static const struct bl_kernels *chosen = &bl_kernels_scalar;

/* The caller refuses a library whose version it does not know. */
int bl_abi_version(void) { return BL_ABI_VERSION; }

#if defined(BL_AMX)
/* Whether the processor multiplies tiles of bfloat16, and the system lends this process their
 * registers: it has to be asked. */
static int amx_is_granted(void)
{
    enum { ASK = 0x1023, TILE_DATA = 18 };
    const unsigned tiles = 1u << 24, bf16 = 1u << 22, saved = 3u << 17;
    unsigned a, b, c, d;
    if (!__get_cpuid_count(1, 0, &a, &b, &c, &d) || !(c & (1u << 27)))
        return 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & (tiles | bf16)) != (tiles | bf16))
        return 0;
    unsigned low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (low & saved) == saved && !syscall(SYS_arch_prctl, ASK, TILE_DATA);
}
#endif

/* The widest instruction set that the processor and the operating system both serve. */
int bl_best_isa(void)
{
#if defined(BL_X86)
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") ||
        !__builtin_cpu_supports("f16c"))
        return BL_SCALAR;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
#if defined(BL_AMX)
        if (amx_is_granted())
            return BL_ISA_AMX;
#endif
        return BL_AVX512;
    }
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
#if defined(BL_AMX)
    if (isa == BL_ISA_AMX)
        chosen = &bl_kernels_amx;
#endif
    return 0;
}

#if defined(_OPENMP) && defined(__GNUC__) && !defined(__clang__)
#define BL_GNU_OPENMP 1
/* Of OpenMP 5.0, which some compilers' headers lack though their libraries have it. */
extern int omp_pause_resource_all(int kind) __attribute__((weak));
#endif

/* End the idle worker threads of the calling thread (core/team.py). */
void bl_let_workers_go(void)
{
#if defined(BL_GNU_OPENMP)
    enum { SOFT = 1 };
    if (omp_pause_resource_all)
        omp_pause_resource_all(SOFT);
#endif
}

int bl_activation(const struct bl_activation_source *source, const struct bl_output *output,
                  int64_t rows, int64_t cols, int threads)
{
    return chosen->activation(source, output, rows, cols, threads);
}

int bl_norm(const struct bl_norm_source *source, const struct bl_output *output, int64_t rows,
            int64_t cols, int threads)
{
    return chosen->norm(source, output, rows, cols, threads);
}

void bl_fp8_decode(const uint8_t *codes, int64_t codes_stride, float *out, int64_t out_stride,
                   int64_t rows, int64_t cols, int threads)
{
    chosen->fp8_decode(codes, codes_stride, out, out_stride, rows, cols, threads);
}

int bl_matmul(const struct bl_matmul *specs, int64_t count, int threads)
{
    return chosen->matmul(specs, count, threads);
}

int bl_low_rank(const struct bl_low_rank_call *calls, int64_t number, int64_t count, int threads)
{
    return chosen->low_rank(calls, number, count, threads);
}

void bl_magnitudes(struct bl_magnitude *tensors, int64_t count)
{
    chosen->magnitudes(tensors, count);
}

int bl_grouped_matmul(const struct bl_grouped_matmul *spec, int threads)
{
    return chosen->grouped_matmul(spec, threads);
}

int bl_pairs(struct bl_pairs *pairs) { return chosen->pairs(pairs); }

void bl_combine(const struct bl_combine *spec, int threads) { chosen->combine(spec, threads); }

int bl_attention(const struct bl_attention *spec, int threads)
{
    return chosen->attention(spec, threads);
}
