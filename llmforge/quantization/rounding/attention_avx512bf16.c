/* Causal attention of which factors of products are rounded to bf16, and sums are fp32. */
#include "attention.h"

#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma")
#include <immintrin.h>

#include "bf16.h"

#define TERMS 2
#define FORWARDS attend_avx512bf16
#define BACKWARDS attend_backwards_avx512bf16

static inline __m512 load(const float *from, int64_t left) { /* 0 beyond what is left */
    return _mm512_maskz_loadu_ps(left >= LANES ? 0xFFFF : left > 0 ? (__mmask16)((1u << left) - 1) : 0, from);
}

/* The numbers of `first`, then those of `second`. */
static inline __m512i rounded(__m512 first, __m512 second) { return (__m512i)_mm512_cvtne2ps_pbh(second, first); }

static void across(Strided x, int64_t rows, int64_t width, int64_t wide, float *to) {
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < wide; i += TERMS * LANES, to += LANES) {
            const float *from = x.at + row * x.row + i;
            _mm512_storeu_si512(to, rounded(load(from, width - i), load(from + LANES, width - i - LANES)));
        }
}

static void down(Strided x, int64_t rows, int64_t width, int64_t wide, float *to) {
    const __m512i low = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i order = _mm512_or_si512(low, _mm512_slli_epi32(_mm512_add_epi32(low, _mm512_set1_epi32(LANES)), 16));
    for (int64_t row = 0; row < rows; row += TERMS)
        for (int64_t i = 0; i < wide; i += LANES, to += LANES) {
            const float *from = x.at + row * x.row + i;
            const __m512 next = row + 1 < rows ? load(from + x.row, width - i) : _mm512_setzero_ps();
            _mm512_storeu_si512(to, _mm512_permutexvar_epi16(order, rounded(load(from, width - i), next)));
        }
}

/* Multiply x [rows, width], at most SIDE rows, and turn its words across: [width / TERMS][SIDE], 0 beyond its rows. */
static void turn(Strided x, int64_t rows, int64_t width, float times, float *to) {
    const __m512 factor = _mm512_set1_ps(times);
    float made[LANES] __attribute__((aligned(64)));
    for (int64_t row = 0; row < SIDE; row++)
        for (int64_t i = 0; i < width; i += TERMS * LANES) {
            const float *from = x.at + row * x.row + i;
            const int64_t left = row < rows ? width - i : 0;
            const __m512 first = _mm512_mul_ps(load(from, left), factor), second = load(from + LANES, left - LANES);
            _mm512_store_si512(made, rounded(first, _mm512_mul_ps(second, factor)));
            for (int64_t j = 0; j < LANES; j++) to[(i / TERMS + j) * SIDE + row] = made[j];
        }
}

/* In fp32, of a as it is rounded where it is a factor. */
static float dot(const float *a, const float *b, int64_t count) {
    __m512 sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < count; i += LANES) {
        const __m512i of_a = _mm512_slli_epi32(lower_halves(load(a + i, count - i)), 16);
        sum = _mm512_fmadd_ps(_mm512_castsi512_ps(of_a), load(b + i, count - i), sum);
    }
    return _mm512_reduce_add_ps(sum);
}

static inline __m512 add_products(__m512 sum, __m512 a, __m512 b) {
    return add_pairs(sum, _mm512_castps_si512(b), _mm512_castps_si512(a));
}

#include "attention.inc"
#endif
