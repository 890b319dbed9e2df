#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma")
#include <immintrin.h>

#include "bf16.h"
#include "products.h"

#define ROWS 8    /* of a that are multiplied at once: 24 sums, 3 vectors of b, and what is multiplied with them */
#define PAIRS 128 /* of tokens whose panels of b stay in the first cache meanwhile */

static inline __m512i rounded(const float *x, __mmask16 kept) {
    return lower_halves(_mm512_maskz_loadu_ps(kept, x));
}

/* A panel of x [tokens, stride], `width` columns of it, in pairs of tokens: [(tokens + 1) / 2][PANEL]. */
void pack_pairs(const float *x, int64_t tokens, int64_t stride, int64_t width, uint32_t *panel) {
    const __mmask16 kept = (__mmask16)((1u << width) - 1);
    for (int64_t t = 0; t < tokens; t += 2, panel += PANEL) {
        __m512i pair = rounded(x + t * stride, kept);
        if (t + 1 < tokens) pair = _mm512_or_si512(pair, _mm512_slli_epi32(rounded(x + (t + 1) * stride, kept), 16));
        _mm512_storeu_si512(panel, pair);
    }
}

static void add_rows(const TokenProduct *p, const uint32_t *a, const uint32_t *b, int64_t pitch, int64_t pairs, int64_t row,
                     int64_t column) {
    __m512 sum[ROWS][PANELS], made[ROWS][PANELS]; /* a copy: what is indexed by variables has no registers */
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 8
        for (int n = 0; n < PANELS; n++) sum[m][n] = _mm512_setzero_ps();
    for (int64_t t = 0; t < pairs; t++) {
        __m512i of_b[PANELS];
#pragma GCC unroll 8
        for (int n = 0; n < PANELS; n++) of_b[n] = _mm512_loadu_si512(b + n * pitch + t * PANEL);
#pragma GCC unroll 8
        for (int m = 0; m < ROWS; m++) {
            const __m512i of_a = _mm512_set1_epi32((int)a[t * PANEL + m]);
#pragma GCC unroll 8
            for (int n = 0; n < PANELS; n++) sum[m][n] = add_pairs(sum[m][n], of_b[n], of_a);
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 8
        for (int n = 0; n < PANELS; n++) made[m][n] = sum[m][n];
    for (int64_t m = 0; m < ROWS && row + m < p->rows; m++)
        for (int64_t n = 0; n < PANELS && column + n * PANEL < p->columns; n++) {
            const int64_t left = p->columns - column - n * PANEL;
            const __mmask16 kept = left < PANEL ? (__mmask16)((1u << left) - 1) : (__mmask16)0xFFFF;
            float *to = p->total + (row + m) * p->columns + column + n * PANEL;
            _mm512_mask_storeu_ps(to, kept, _mm512_add_ps(_mm512_maskz_loadu_ps(kept, to), made[m][n]));
        }
}

/* Add what makes the columns column … column + PANELS·PANEL - 1 of the total, of packed a and b. */
void add_columns(const TokenProduct *p, const uint32_t *a, const uint32_t *b, int64_t column) {
    const int64_t all = (p->tokens + 1) / 2, pitch = all * PANEL, top = p->lower ? column / ROWS * ROWS : 0;
    b += column / PANEL * pitch;
    for (int64_t start = 0; start < all; start += PAIRS) {
        const int64_t pairs = all - start < PAIRS ? all - start : PAIRS;
        for (int64_t row = top; row < p->rows; row += ROWS)
            add_rows(p, a + row / PANEL * pitch + start * PANEL + row % PANEL, b + start * PANEL, pitch, pairs, row, column);
    }
}
#endif
