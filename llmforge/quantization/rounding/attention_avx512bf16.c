/* Causal attention of one window, forwards and backwards: factors are rounded to bf16, sums and softmax are fp32.
 *
 * SIDE queries at a time, and the keys up to them: scores [keys][SIDE], of which no query waits for another. What is
 * multiplied lies in pairs of bf16 of what is summed over. */
#include "attention.h"

#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma")
#include <immintrin.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define SIDE 64 /* queries, or channels, that are summed side by side: WIDE vectors */
#define WIDE 4
#define ROWS 6 /* that are summed at once: as many sums, and what is multiplied, as there are registers for */
#define LANES 16
#define LOG2E 1.44269504f

static inline int64_t padded(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

static inline __m512 add_pairs(__m512 sum, __m512i left, __m512i right) {
#if defined(__clang__) /* as in products_avx512bf16.c */
    __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(left), "v"(right));
    return sum;
#else
    return _mm512_dpbf16_ps(sum, (__m512bh)left, (__m512bh)right);
#endif
}

static inline __m512i rounded(__m512 x) { return _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x)); }

/* Pairs of numbers of two vectors, the first in the lower halves. */
static inline __m512i paired(__m512 first, __m512 second) {
    return _mm512_or_si512(rounded(first), _mm512_slli_epi32(rounded(second), 16));
}

static inline __m512 loaded(const float *x, int64_t left) {
    const __mmask16 kept = left >= LANES ? (__mmask16)0xFFFF : left > 0 ? (__mmask16)((1u << left) - 1) : (__mmask16)0;
    return _mm512_maskz_loadu_ps(kept, x);
}

/* Pairs along x's rows [rows, width]: [padded rows][padded width / 2], 0 beyond them. */
static void pack_rows(const float *x, int64_t stride, int64_t rows, int64_t width, int64_t all, uint32_t *to) {
    const int64_t each = padded(width, 2 * LANES) / 2;
    memset(to, 0, (size_t)(all * each) * sizeof *to);
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < width; i += LANES) {
            const __m256i narrow = (__m256i)_mm512_cvtneps_pbh(loaded(x + row * stride + i, width - i));
            _mm256_storeu_si256((__m256i *)(to + row * each + i / 2), narrow);
        }
}

/* Pairs of x's rows [rows, width], next to each other: [(rows + 1) / 2][padded width]. */
static void pack_pairs_of_rows(const float *x, int64_t stride, int64_t rows, int64_t width, uint32_t *to) {
    const int64_t wide = padded(width, SIDE);
    for (int64_t row = 0; row < rows; row += 2)
        for (int64_t i = 0; i < wide; i += LANES) {
            const int64_t left = width - i;
            const __m512 second = row + 1 < rows ? loaded(x + (row + 1) * stride + i, left) : _mm512_setzero_ps();
            _mm512_storeu_si512(to + row / 2 * wide + i, paired(loaded(x + row * stride + i, left), second));
        }
}

/* Rows of pairs [SIDE][pairs] with columns for rows: [pairs][SIDE]. */
static void turn(const uint32_t *from, int64_t pairs, uint32_t *to) {
    for (int64_t i = 0; i < pairs; i++)
        for (int64_t row = 0; row < SIDE; row++) to[i * SIDE + row] = from[row * pairs + i];
}

/* out [ROWS][SIDE] = Σ over pairs of a[row·a_row + pair·a_pair] · b[pair·b_pair + column]. */
static void multiply(const uint32_t *a, int64_t a_row, int64_t a_pair, const uint32_t *b, int64_t b_pair, int64_t pairs,
                     float *out) {
    __m512 sum[ROWS][WIDE];
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 8
        for (int n = 0; n < WIDE; n++) sum[m][n] = _mm512_setzero_ps();
    for (int64_t t = 0; t < pairs; t++) {
        __m512i of_b[WIDE];
#pragma GCC unroll 8
        for (int n = 0; n < WIDE; n++) of_b[n] = _mm512_loadu_si512(b + t * b_pair + n * LANES);
#pragma GCC unroll 8
        for (int m = 0; m < ROWS; m++) {
            const __m512i of_a = _mm512_set1_epi32((int)a[m * a_row + t * a_pair]);
#pragma GCC unroll 8
            for (int n = 0; n < WIDE; n++) sum[m][n] = add_pairs(sum[m][n], of_b[n], of_a);
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 8
        for (int n = 0; n < WIDE; n++) _mm512_storeu_ps(out + m * SIDE + n * LANES, sum[m][n]);
}

/* 2^x of x ≤ 0, within 2^-22 of it, 0 below 2^-126: Taylor's polynomial of 2^f, |f| ≤ 1/2. */
static inline __m512 power_of_two(__m512 x) {
    const __mmask16 kept = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126), _CMP_GE_OQ);
    const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 f = _mm512_sub_ps(x, whole);
    __m512 y = _mm512_set1_ps(1.5403530e-4f);
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.3333558e-3f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(9.6181291e-3f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(5.5504109e-2f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(2.4022651e-1f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(6.9314718e-1f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1));
    return _mm512_maskz_scalef_ps(kept, y, whole);
}

/* What one head and one block of queries work with. */
typedef struct Work {
    const Attention *of;
    int64_t keys, k_pairs, v_pairs, k_wide, v_wide; /* keys: padded; pairs of channels; padded channels */
    uint32_t *k_rows, *v_rows;                      /* [keys][pairs] of one KV head */
    uint32_t *k_pairs_of_rows, *v_pairs_of_rows;    /* [keys / 2][wide] */
    uint32_t *some, *q_turned, *d_turned;           /* [SIDE][pairs], [pairs][SIDE]: queries, and gradients of outputs */
    uint32_t *q_rows, *d_rows;                      /* [SIDE / 2][wide]: the same in pairs of queries */
    float *scores;                                  /* [keys][SIDE] */
    uint32_t *p, *ds;                               /* [keys / 2][SIDE]: probabilities and gradients of scores, in pairs of keys */
    uint32_t *p_rows, *ds_rows;                     /* [keys][SIDE / 2]: in pairs of queries */
    float *scaled;                                  /* [SIDE][width]: queries */
} Work;

static char *layout(Work *w, char *at) {
    const int64_t half = SIDE / 2, most = w->k_pairs > w->v_pairs ? w->k_pairs : w->v_pairs;
    struct { void *to; int64_t numbers; } parts[] = {
        {&w->k_rows, w->keys * w->k_pairs}, {&w->v_rows, w->keys * w->v_pairs},
        {&w->k_pairs_of_rows, w->keys / 2 * w->k_wide}, {&w->v_pairs_of_rows, w->keys / 2 * w->v_wide},
        {&w->some, SIDE * most}, {&w->q_turned, SIDE * w->k_pairs}, {&w->d_turned, SIDE * w->v_pairs},
        {&w->q_rows, half * w->k_wide}, {&w->d_rows, half * w->v_wide}, {&w->scores, w->keys * SIDE},
        {&w->p, w->keys / 2 * SIDE}, {&w->ds, w->keys / 2 * SIDE}, {&w->p_rows, w->keys * half},
        {&w->ds_rows, w->keys * half}, {&w->scaled, SIDE * w->k_wide},
    };
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        memcpy(parts[i].to, &at, sizeof at);
        at += padded(parts[i].numbers * 4, 64);
    }
    return at;
}

static char *begin(Work *w, const Attention *of) {
    *w = (Work){.of = of, .keys = padded(of->tokens + SIDE, 2 * ROWS)};
    w->k_pairs = padded(of->width, 2 * LANES) / 2, w->v_pairs = padded(of->v_width, 2 * LANES) / 2;
    w->k_wide = padded(of->width, SIDE), w->v_wide = padded(of->v_width, SIDE);
    const int64_t size = layout(w, (char *)0) - (char *)0;
    char *held = aligned_alloc(64, (size_t)size);
    if (held != NULL) layout(w, held);
    return held;
}

/* Pack the keys and values of a KV head. */
static void of_keys(const Work *w, int64_t head) {
    const Attention *of = w->of;
    const float *k = of->k + head * of->k_head, *v = of->v + head * of->v_head;
    pack_rows(k, of->k_token, of->tokens, of->width, w->keys, w->k_rows);
    pack_rows(v, of->v_token, of->tokens, of->v_width, w->keys, w->v_rows);
    pack_pairs_of_rows(k, of->k_token, of->tokens, of->width, w->k_pairs_of_rows);
    pack_pairs_of_rows(v, of->v_token, of->tokens, of->v_width, w->v_pairs_of_rows);
}

/* scores [keys][SIDE] in units of log 2 of the queries from `first` on, -inf where a key comes later. */
static void find_scores(const Work *w, int64_t head, int64_t first, int64_t queries) {
    const Attention *of = w->of;
    const float *q = of->q + head * of->q_head + first * of->q_token;
    const int64_t keys = first + queries;
    for (int64_t row = 0; row < queries; row++)
        for (int64_t i = 0; i < of->width; i++)
            w->scaled[row * w->k_wide + i] = q[row * of->q_token + i] * (of->scale * LOG2E);
    pack_rows(w->scaled, w->k_wide, queries, of->width, SIDE, w->some);
    turn(w->some, w->k_pairs, w->q_turned);
    for (int64_t key = 0; key < keys; key += ROWS)
        multiply(w->k_rows + key * w->k_pairs, w->k_pairs, 1, w->q_turned, SIDE, w->k_pairs, w->scores + key * SIDE);
    for (int64_t key = first + 1; key < padded(keys, ROWS); key++) {
        const int64_t later = key - first < SIDE ? key - first : SIDE;
        for (int64_t l = 0; l < later; l++) w->scores[key * SIDE + l] = -INFINITY;
    }
}

/* Returns 0, or 1 where there is not enough memory. `lse` becomes log2 Σ 2^score of each query. */
int attend(const Attention *of) {
    Work w;
    char *held = begin(&w, of);
    float made[ROWS * SIDE] __attribute__((aligned(64)));
    if (held == NULL) return 1;
    for (int64_t head = 0; head < of->heads; head++) {
        if (head % of->group == 0) of_keys(&w, head / of->group);
        for (int64_t first = 0; first < of->tokens; first += SIDE) {
            const int64_t queries = of->tokens - first < SIDE ? of->tokens - first : SIDE, keys = first + queries;
            float share[SIDE];
            find_scores(&w, head, first, queries);
            for (int64_t l = 0; l < SIDE; l += LANES) {
                __m512 most = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps();
                for (int64_t key = 0; key < keys; key++) most = _mm512_max_ps(most, _mm512_load_ps(w.scores + key * SIDE + l));
                for (int64_t key = 0; key < keys; key += 2) {
                    const float *score = w.scores + key * SIDE + l;
                    const __m512 one = power_of_two(_mm512_sub_ps(_mm512_load_ps(score), most));
                    const __m512 other = key + 1 < keys ? power_of_two(_mm512_sub_ps(_mm512_load_ps(score + SIDE), most)) : _mm512_setzero_ps();
                    sum = _mm512_add_ps(sum, _mm512_add_ps(one, other));
                    _mm512_store_si512(w.p + key / 2 * SIDE + l, paired(one, other));
                }
                float sums[LANES], peaks[LANES];
                _mm512_storeu_ps(sums, sum), _mm512_storeu_ps(peaks, most);
                for (int64_t i = 0; i < LANES && l + i < queries; i++) {
                    share[l + i] = 1 / sums[i];
                    of->lse[head * of->tokens + first + l + i] = peaks[i] + log2f(sums[i]);
                }
            }
            for (int64_t row = 0; row < queries; row += ROWS)
                for (int64_t at = 0; at < of->v_width; at += SIDE) {
                    multiply(w.p + row, 1, SIDE, w.v_pairs_of_rows + at, w.v_wide, (keys + 1) / 2, made);
                    for (int64_t r = 0; r < ROWS && row + r < queries; r++) {
                        float *to = of->out + head * of->out_head + (first + row + r) * of->out_token + at;
                        for (int64_t i = 0; i < SIDE && at + i < of->v_width; i++) to[i] = made[r * SIDE + i] * share[row + r];
                    }
                }
        }
    }
    free(held);
    return 0;
}

/* to [rows, width] = or += what pairs a and b make. */
static void put(const uint32_t *a, int64_t a_row, int64_t a_pair, const uint32_t *b, int64_t wide, int64_t pairs, float *to,
                int64_t stride, int64_t rows, int64_t width, int add) {
    float made[ROWS * SIDE] __attribute__((aligned(64)));
    for (int64_t row = 0; row < rows; row += ROWS)
        for (int64_t at = 0; at < width; at += SIDE) {
            multiply(a + row * a_row, a_row, a_pair, b + at, wide, pairs, made);
            for (int64_t r = 0; r < ROWS && row + r < rows; r++) {
                float *own = to + (row + r) * stride + at;
                const float *from = made + r * SIDE;
                const int64_t some = width - at < SIDE ? width - at : SIDE;
                if (add)
                    for (int64_t i = 0; i < some; i++) own[i] += from[i];
                else memcpy(own, from, (size_t)some * sizeof *own);
            }
        }
}

/* Gradients of q, k and v, contiguous, from that of the outputs; those of k and v are 0 before. Returns as `attend`. */
int attend_backwards(const Attention *of) {
    Work w;
    char *held = begin(&w, of);
    if (held == NULL) return 1;
    for (int64_t head = 0; head < of->heads; head++) {
        const int64_t kv = head / of->group;
        if (head % of->group == 0) of_keys(&w, kv);
        for (int64_t first = 0; first < of->tokens; first += SIDE) {
            const int64_t queries = of->tokens - first < SIDE ? of->tokens - first : SIDE, keys = first + queries;
            const float *q = of->q + head * of->q_head + first * of->q_token;
            const float *d = of->d_out + head * of->d_head + first * of->d_token;
            const float *out = of->out + head * of->out_head + first * of->out_token;
            float inner[SIDE] = {0}, lse[SIDE];
            for (int64_t l = 0; l < SIDE; l++) lse[l] = l < queries ? of->lse[head * of->tokens + first + l] : INFINITY;
            for (int64_t l = 0; l < queries; l++)
                for (int64_t i = 0; i < of->v_width; i++) inner[l] += d[l * of->d_token + i] * out[l * of->out_token + i];
            find_scores(&w, head, first, queries);
            pack_rows(d, of->d_token, queries, of->v_width, SIDE, w.some);
            turn(w.some, w.v_pairs, w.d_turned);
            pack_pairs_of_rows(q, of->q_token, queries, of->width, w.q_rows);
            pack_pairs_of_rows(d, of->d_token, queries, of->v_width, w.d_rows);
            for (int64_t key = 0; key < padded(keys, 2); key += ROWS) {
                float made[ROWS * SIDE] __attribute__((aligned(64)));
                multiply(w.v_rows + key * w.v_pairs, w.v_pairs, 1, w.d_turned, SIDE, w.v_pairs, made);
                for (int64_t r = 0; r < ROWS; r += 2)
                    for (int64_t l = 0; l < SIDE; l += LANES) {
                        const __m512 log = _mm512_loadu_ps(lse + l), mean = _mm512_loadu_ps(inner + l), scale = _mm512_set1_ps(of->scale);
                        __m512 p[2], ds[2];
                        for (int x = 0; x < 2; x++) {
                            const float *score = w.scores + (key + r + x) * SIDE + l;
                            p[x] = power_of_two(_mm512_sub_ps(_mm512_load_ps(score), log));
                            ds[x] = _mm512_sub_ps(_mm512_load_ps(made + (r + x) * SIDE + l), mean);
                            ds[x] = _mm512_mul_ps(_mm512_mul_ps(ds[x], p[x]), scale);
                            const int64_t at = (key + r + x) * SIDE / 2 + l / 2;
                            _mm256_storeu_si256((__m256i *)(w.p_rows + at), (__m256i)_mm512_cvtneps_pbh(p[x]));
                            _mm256_storeu_si256((__m256i *)(w.ds_rows + at), (__m256i)_mm512_cvtneps_pbh(ds[x]));
                        }
                        _mm512_store_si512(w.ds + (key + r) / 2 * SIDE + l, paired(ds[0], ds[1]));
                    }
            }
            const int64_t pairs = (queries + 1) / 2, half = SIDE / 2;
            put(w.ds, 1, SIDE, w.k_pairs_of_rows, w.k_wide, (keys + 1) / 2, of->d_q + (head * of->tokens + first) * of->width, of->width, queries, of->width, 0);
            put(w.ds_rows, half, 1, w.q_rows, w.k_wide, pairs, of->d_k + kv * of->tokens * of->width, of->width, keys, of->width, 1);
            put(w.p_rows, half, 1, w.d_rows, w.v_wide, pairs, of->d_v + kv * of->tokens * of->v_width, of->v_width, keys, of->v_width, 1);
        }
    }
    free(held);
    return 0;
}
#endif
