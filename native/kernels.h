/* Kernel bodies, included once per instruction set.
 *
 * The including file defines LANES, the types vf (float32), vi (32-bit integers) and vacc (float64
 * partial sums), the v_*, vi_*, vh_* and acc_* operations, BL_INLINE, and BL_KERNELS: the table to
 * fill.  Where an operand is NaN, v_max(a, b) and v_min(a, b) give b, as the x86 instructions do.
 * vi_min, vi_max and vi_if_gt see non-negative numbers only, or their result does not matter.
 * vi_store_halves and vi_store_bytes write the low 16 and 8 bits of each lane.  vh_* see a vi as
 * 2 * LANES halves; vh_magnitude clears their signs and makes NaN 0.  v_spread_16 gives each lane
 * the number of its group, for groups of 16 elements of which a lane has two.  decode_group decodes
 * 4 * LANES codes, as tile.h has them, to 2**-8 of their value, NaN excepted; BL_WIDE and BL_DIRECT
 * are that file's.  v_fused rounds once everywhere, and v_fused_bf16, whose factors are bfloat16;
 * v_mul_add where that costs nothing.  EXPAND_WIDE and v_*_f16 are low_rank.h's.
 *
 * A tail shorter than a vector goes through the same vector code on a padded copy, so that an
 * element's bytes do not depend on where in its row it stands.
 */
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>
#if defined(_OPENMP)
#include <omp.h>
#endif

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "bfloat16 values are read two to a 32-bit word, the first in its lower half"
#endif

/* Elements of a pair of vectors, and of the longest padded copy. */
enum { STEP = 2 * LANES, TAIL = 2 * STEP };

#include "half.h"
#include "numerics.h"
#include "work.h"
#include "decode.h"
#include "span.h"
#include "epilogue.h"
#include "shrink.h"
#include "rows.h"
#include "low_rank.h"
#include "activation.h"
#include "norm.h"
#include "tile.h"
#include "matmul.h"
#include "experts.h"
#include "magnitude.h"
#include "attention.h"

const struct bl_kernels BL_KERNELS = {activation, norm, fp8_decode, matmul, low_rank,
                                      magnitudes, grouped_matmul, sort_pairs, combine,
                                      attention};
