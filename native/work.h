/* Splitting work among threads, and their scratch memory. */

/* Below ELEMENTS_PER_THREAD a thread costs more than it brings. */
enum { ELEMENTS_PER_THREAD = 32768, CHUNK = 8192 };

/* For the loop that follows it; nothing where the compiler has no OpenMP.  Guided, since a thread
 * may have to share its processor with others.
 *
 * The loops call plain functions: some compilers drop the target attribute from the outlined body
 * of a loop, and then may not inline vector code into it. */
#if defined(_OPENMP)
#define PARALLEL_OVER(team)                                                                        \
    _Pragma("omp parallel for num_threads(team) if (team > 1) schedule(guided)")
/* The same for iterations of unequal length, each of which takes a while. */
#define PARALLEL_UNITS(team)                                                                       \
    _Pragma("omp parallel for num_threads(team) if (team > 1) schedule(dynamic)")
#else
#define PARALLEL_OVER(team) (void)(team);
#define PARALLEL_UNITS(team) (void)(team);
#endif

BL_INLINE int own_number(void)
{
#if defined(_OPENMP)
    return omp_get_thread_num();
#else
    return 0;
#endif
}

BL_INLINE int useful_threads(int threads, int64_t elements)
{
    int64_t useful = elements / ELEMENTS_PER_THREAD;
    return useful < 2 ? 1 : useful < threads ? (int)useful : threads < 1 ? 1 : threads;
}

/* Rows cut into pieces of CHUNK columns, so that one long row feeds every thread. */
struct grid {
    int64_t rows, cols, per_row;
};

/* `contiguous`: no gaps between rows anywhere, so all of them are one long row. */
BL_INLINE struct grid make_grid(int64_t rows, int64_t cols, bool contiguous)
{
    if (contiguous) {
        cols *= rows;
        rows = 1;
    }
    return (struct grid){rows, cols, (cols + CHUNK - 1) / CHUNK};
}

/* Bytes rounded up to whole cache lines, with room for a vector that reaches beyond the end. */
BL_INLINE size_t padded_size(int64_t bytes)
{
    return ((size_t)bytes + 127) / 64 * 64;
}
