/* Rounds the rows of a weight on several threads. Rows are independent: codes do not depend on how many threads there are. */
#include "rounding.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#define EXPORT __attribute__((visibility("default")))
#define MOST_THREADS 256

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

/* Returns 0, or 1 where there is not enough memory. */
EXPORT int llmforge_round(const Rounding *rounding, int threads) {
    Job job = {rounding, rounder(), 0, 0};
    pthread_t others[MOST_THREADS];
    int started = 0;
    while (started < threads - 1 && started < MOST_THREADS && (int64_t)(started + 1) * TILE < rounding->n &&
           pthread_create(&others[started], NULL, work, &job) == 0)
        started++;
    work(&job);
    for (int i = 0; i < started; i++) pthread_join(others[i], NULL);
    return atomic_load(&job.lacking);
}
