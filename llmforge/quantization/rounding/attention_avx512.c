/* Causal attention in fp32. */
#include "attention.h"

#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")
#include <immintrin.h>
#include <string.h>

#define TERMS 1
#define FORWARDS attend_avx512
#define BACKWARDS attend_backwards_avx512
#define down across /* a word is a number */

static void across(Strided x, int64_t rows, int64_t width, int64_t wide, float *to) {
    for (int64_t row = 0; row < rows; row++) {
        memcpy(to + row * wide, x.at + row * x.row, (size_t)width * sizeof *to);
        memset(to + row * wide + width, 0, (size_t)(wide - width) * sizeof *to);
    }
}

/* Multiply x [rows, width], at most SIDE rows, and turn it: [width][SIDE], 0 beyond its rows. */
static void turn(Strided x, int64_t rows, int64_t width, float times, float *to) {
    for (int64_t i = 0; i < width; i++)
        for (int64_t row = 0; row < SIDE; row++) to[i * SIDE + row] = row < rows ? x.at[row * x.row + i] * times : 0;
}

static float dot(const float *a, const float *b, int64_t count) {
    float sum = 0;
    for (int64_t i = 0; i < count; i++) sum += a[i] * b[i];
    return sum;
}

static inline __m512 add_products(__m512 sum, __m512 a, __m512 b) { return _mm512_fmadd_ps(a, b, sum); }

#include "attention.inc"
#endif
