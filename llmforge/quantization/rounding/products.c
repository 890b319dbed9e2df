/* Multiplies and factors matrices on several threads. */
#include "products.h"

#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "threads.h"

#define EXPORT __attribute__((visibility("default")))
#define WORTH_A_THREAD (1 << 19) /* multiplications, which take about as long as starting one */
#define ROWS_EACH 192 /* rows of c that one thread takes at a time, a multiple of what is computed at once */

typedef struct Work {
    const Product *product;
    const Multiplier *by;
    char *packed;
    int64_t size, panels; /* bytes of a number; of a */
    atomic_llong next;
    atomic_int lacking; /* memory */
} Work;

static const Multiplier *multiplier(int64_t size) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq"))
        return size == 4 ? &fp32_avx512 : &fp64_avx512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return size == 4 ? &fp32_avx2 : &fp64_avx2;
#endif
    return size == 4 ? &fp32_generic : &fp64_generic;
}

static void *pack_all(void *argument) {
    Work *work = argument;
    const Product *p = work->product;
    for (int64_t panel; (panel = atomic_fetch_add(&work->next, 1)) < work->panels;)
        work->by->pack(p, panel, work->packed + panel * work->by->rows * p->k * work->size);
    return NULL;
}

static void *multiply_all(void *argument) {
    Work *work = argument;
    const Product *p = work->product;
    const int64_t width = work->by->width, high = (p->m + ROWS_EACH - 1) / ROWS_EACH, wide = (p->n + width - 1) / width;
    void *scratch = aligned_alloc(64, (size_t)(work->by->scratch() + 63) / 64 * 64);
    if (scratch == NULL) {
        atomic_store(&work->lacking, 1);
        return NULL;
    }
    for (int64_t task; (task = atomic_fetch_add(&work->next, 1)) < high * wide;) {
        const int64_t first = task / wide * ROWS_EACH, last = first + ROWS_EACH < p->m ? first + ROWS_EACH : p->m;
        const int64_t column = p->form == UPPER ? wide - 1 - task % wide : task % wide; /* the longest first */
        work->by->columns(p, work->packed, first, last, column * width, scratch);
    }
    free(scratch);
    return NULL;
}

/* How many of the `threads` a product of so many numbers, of `k` terms each, should be made on. */
static int worthwhile(int64_t numbers, int64_t k, int threads) {
    const int64_t most = 1 + numbers * k / WORTH_A_THREAD;
    return threads < most ? threads : (int)most;
}

static int multiply(const Product *p, int64_t size, int threads) {
    Work work = {.product = p, .by = multiplier(size), .size = size};
    if (p->m == 0 || p->n == 0) return 0;
    work.panels = (p->m + work.by->rows - 1) / work.by->rows;
    work.packed = aligned_alloc(64, (size_t)(work.panels * work.by->rows * p->k * size + 63) / 64 * 64);
    if (work.packed == NULL) return 1;
    threads = worthwhile(p->m * p->n, p->k, threads);
    run_on_threads(pack_all, &work, threads < work.panels ? threads : (int)work.panels);
    atomic_store(&work.next, 0);
    run_on_threads(multiply_all, &work, threads);
    free(work.packed);
    return atomic_load(&work.lacking);
}

/* Multiplies numbers of `size` bytes. Returns 0, or 1 where there is not enough memory. */
EXPORT int llmforge_multiply(const Product *product, int size, int threads) { return multiply(product, size, threads); }

/* UᵀU of a block [n, n] on and above its diagonal, in place; 0 where it is not positive. */
static int factor_block(double *a, int64_t n, int64_t stride) {
    for (int64_t i = 0; i < n; i++) {
        double *row = a + i * stride;
        if (!(row[i] > 0) || !isfinite(row[i])) return 0;
        const double inverse = 1 / sqrt(row[i]);
        for (int64_t j = i; j < n; j++) row[j] *= inverse;
        for (int64_t k = i + 1; k < n; k++) {
            double *other = a + k * stride;
            const double factor = row[k];
            for (int64_t j = k; j < n; j++) other[j] -= factor * row[j];
        }
    }
    return 1;
}

/* The inverse [n, n] of what is on and above the diagonal of u; zeros stand below that of x already. */
static void invert_block(const double *u, double *x, int64_t n, int64_t stride) {
    for (int64_t i = n - 1; i >= 0; i--) {
        double *row = x + i * stride;
        const double inverse = 1 / u[i * stride + i];
        for (int64_t k = i + 1; k < n; k++) {
            const double *other = x + k * stride, factor = u[i * stride + k];
            for (int64_t j = k; j < n; j++) row[j] -= factor * other[j];
        }
        for (int64_t j = i + 1; j < n; j++) row[j] *= inverse;
        row[i] = inverse;
    }
}

/* Factors a [n, n], positive definite, of which what is on and above the diagonal is read, to UᵀU in place, and puts U⁻¹
 * to x [n, n], which is 0. Returns 0, 1 where there is not enough memory, 2 where a is not positive definite. */
EXPORT int llmforge_factor(double *a, double *x, int64_t n, int threads) {
    double *beside = malloc((size_t)(BLOCK * n) * sizeof *beside);
    int failed = beside == NULL;
    for (int64_t at = 0; at < n && !failed; at += BLOCK) {
        const int64_t rows = n - at < BLOCK ? n - at : BLOCK, rest = n - at - rows;
        double *block = a + at * n + at;
        const Product above = {rows, n - at, at, 1, n, n, 1, n, WHOLE, -1, 1, a + at, a + at, block};
        if (at && (failed = multiply(&above, sizeof *a, threads))) break;
        if (!factor_block(block, rows, n)) failed = 2;
        if (failed) break;
        invert_block(block, x + at * n + at, rows, n);
        const Product right = {rows, rest, rows, 1, n, n, 1, rest, WHOLE, 1, 0, x + at * n + at, block + rows, beside};
        failed = multiply(&right, sizeof *a, threads);
        for (int64_t i = 0; i < rows; i++) memcpy(block + i * n + rows, beside + i * rest, (size_t)rest * sizeof *a);
    }
    for (int64_t at = (n - 1) / BLOCK * BLOCK - BLOCK; at >= 0 && !failed; at -= BLOCK) {
        const int64_t next = at + BLOCK, rest = n - next;
        const double *right = a + at * n + next, *below = x + next * n + next, *own = x + at * n + at;
        const Product inner = {BLOCK, rest, rest, n, 1, n, 1, rest, UPPER, 1, 0, right, below, beside};
        const Product outer = {BLOCK, rest, BLOCK, n, 1, rest, 1, n, WHOLE, -1, 0, own, beside, x + at * n + next};
        failed = multiply(&inner, sizeof *a, threads) || multiply(&outer, sizeof *a, threads);
    }
    free(beside);
    return failed;
}

typedef struct TokenWork {
    const TokenProduct *product;
    uint32_t *a, *b; /* packed; one where they are the same */
    int64_t a_panels, b_panels, panel; /* numbers of a panel */
    atomic_llong next;
} TokenWork;

/* Says whether this processor has what `llmforge_add_tokens` needs. */
EXPORT int llmforge_has_bf16(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq");
#else
    return 0;
#endif
}

#if defined(__x86_64__)
static void *pack_tokens(void *argument) {
    TokenWork *work = argument;
    const TokenProduct *p = work->product;
    const int64_t all = work->a_panels + (work->a == work->b ? 0 : work->b_panels);
    for (int64_t task; (task = atomic_fetch_add(&work->next, 1)) < all;) {
        const int of_a = task < work->a_panels;
        const int64_t number = of_a ? task : task - work->a_panels, first = number * PANEL;
        const int64_t left = (of_a ? p->rows : p->columns) - first, width = left < 0 ? 0 : left < PANEL ? left : PANEL;
        const float *from = (of_a ? p->a : p->b) + (width ? first : 0);
        pack_pairs(from, p->tokens, of_a ? p->a_stride : p->b_stride, width, (of_a ? work->a : work->b) + number * work->panel);
    }
    return NULL;
}

static void *add_tokens(void *argument) {
    TokenWork *work = argument;
    const int64_t width = PANELS * PANEL, wide = (work->product->columns + width - 1) / width;
    for (int64_t task; (task = atomic_fetch_add(&work->next, 1)) < wide;)
        add_columns(work->product, work->a, work->b, task * width);
    return NULL;
}
#endif

/* Returns 0, or 1 where there is not enough memory. */
EXPORT int llmforge_add_tokens(const TokenProduct *product, int threads) {
#if defined(__x86_64__)
    TokenWork work = {.product = product, .panel = (product->tokens + 1) / 2 * PANEL};
    work.b_panels = (product->columns + PANELS * PANEL - 1) / (PANELS * PANEL) * PANELS;
    work.a_panels = product->lower ? work.b_panels : (product->rows + PANEL - 1) / PANEL;
    const int64_t panels = work.a_panels + (product->lower ? 0 : work.b_panels);
    if (product->tokens == 0) return 0;
    work.a = aligned_alloc(64, (size_t)(panels * work.panel) * sizeof(uint32_t));
    if (work.a == NULL) return 1;
    work.b = product->lower ? work.a : work.a + work.a_panels * work.panel;
    threads = worthwhile(product->rows * product->columns, product->tokens, threads);
    run_on_threads(pack_tokens, &work, threads);
    atomic_store(&work.next, 0);
    run_on_threads(add_tokens, &work, threads);
    free(work.a);
    return 0;
#else
    (void)product, (void)threads;
    return 1;
#endif
}
