/* Rounds the rows of a weight on several threads. Rows are independent: codes do not depend on how many threads there are. */
#include "rounding.h"

#include <stdatomic.h>
#include <stdlib.h>

#include "threads.h"

#define EXPORT __attribute__((visibility("default")))

typedef struct Job {
    const Rounding *rounding;
    const Rounder *rounder;
    atomic_llong next; /* first row of the next tile */
    atomic_int lacking; /* memory */
} Job;

static const Rounder *rounder(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq"))
        return &rounder_avx512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return &rounder_avx2;
#endif
    return &rounder_generic;
}

static void *work(void *argument) {
    Job *job = argument;
    int64_t size = (job->rounder->scratch_size(job->rounding) + 63) / 64 * 64;
    void *scratch = aligned_alloc(64, (size_t)size);
    if (scratch == NULL) {
        atomic_store(&job->lacking, 1);
        return NULL;
    }
    for (;;) {
        int64_t first = atomic_fetch_add(&job->next, TILE);
        if (first >= job->rounding->n) break;
        job->rounder->tile(job->rounding, first, scratch);
    }
    free(scratch);
    return NULL;
}

/* `VERSION` of __init__.py, which tells a library that was compiled from older sources by it. */
EXPORT int llmforge_rounding_version(void) { return 9; }

/* Returns 0, or 1 where there is not enough memory. */
EXPORT int llmforge_round(const Rounding *rounding, int threads) {
    Rounding whole = *rounding;
    Job job = {&whole, rounder(), 0, 0};
    const int64_t k = whole.k, widest = whole.block < k ? whole.block : k, blocks = (k + whole.block - 1) / whole.block;
    const int64_t tiles = (whole.n + TILE - 1) / TILE;
    int64_t *columns = malloc((size_t)(blocks * widest) * sizeof *columns), *filled = calloc((size_t)blocks, sizeof *filled);
    float *inner = malloc((size_t)(whole.hessian != NULL ? blocks * widest * widest : 1) * sizeof *inner);
    whole.columns = columns, whole.inner = inner;
    if (columns == NULL || filled == NULL || inner == NULL) {
        atomic_store(&job.lacking, 1);
    } else {
        for (int64_t j = 0; j < k; j++) {
            const int64_t block = whole.order[j] / whole.block;
            columns[block * widest + filled[block]++] = j;
        }
        for (int64_t b = 0; b < blocks && whole.hessian != NULL; b++)
            for (int64_t i = 0; i < filled[b]; i++)
                for (int64_t j = 0; j < filled[b]; j++)
                    inner[(b * widest + i) * widest + j] = whole.hessian[columns[b * widest + i] * k + columns[b * widest + j]];
        run_on_threads(work, &job, threads < tiles ? threads : (int)tiles);
    }
    free(columns), free(filled), free(inner);
    return atomic_load(&job.lacking);
}
