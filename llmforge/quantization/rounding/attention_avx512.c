/* Causal attention of one window in fp32, forwards and backwards: SIDE queries at a time, and the keys up to them. */
#include "attention.h"

#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")
#include <immintrin.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define SIDE 64 /* queries, or channels, that are summed side by side: WIDE vectors */
#define WIDE 4
#define ROWS 6 /* that are summed at once: as many sums, and what is multiplied, as there are registers for */
#define LANES 16
#define LOG2E 1.44269504f

/* A matrix by its strides. */
typedef struct Strided {
    const float *at;
    int64_t row, column;
} Strided;

/* Copy x [rows, width] to [rows][wide], 0 beyond its width. */
static void pack(Strided x, int64_t rows, int64_t width, int64_t wide, float *to) {
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

/* out [ROWS][SIDE] = a·b of b [terms][b_row]; rows of a beyond `rows` are those of the last one again. */
static void multiply(Strided a, int64_t rows, const float *b, int64_t b_row, int64_t terms, float *out) {
    __m512 sum[ROWS][WIDE];
    const float *of_a[ROWS];
    for (int m = 0; m < ROWS; m++) of_a[m] = a.at + (m < rows ? m : rows - 1) * a.row;
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 8
        for (int n = 0; n < WIDE; n++) sum[m][n] = _mm512_setzero_ps();
    for (int64_t t = 0; t < terms; t++) {
        __m512 of_b[WIDE];
#pragma GCC unroll 8
        for (int n = 0; n < WIDE; n++) of_b[n] = _mm512_loadu_ps(b + t * b_row + n * LANES);
#pragma GCC unroll 8
        for (int m = 0; m < ROWS; m++) {
            const __m512 factor = _mm512_set1_ps(of_a[m][t * a.column]);
#pragma GCC unroll 8
            for (int n = 0; n < WIDE; n++) sum[m][n] = _mm512_fmadd_ps(factor, of_b[n], sum[m][n]);
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 8
        for (int n = 0; n < WIDE; n++) _mm512_storeu_ps(out + m * SIDE + n * LANES, sum[m][n]);
}

/* to [rows, width] = or += a·b, b [terms][wide]; where there is a `share` of each row, it is multiplied with that. */
static void put(Strided a, const float *b, int64_t wide, int64_t terms, float *to, int64_t stride, int64_t rows, int64_t width,
                const float *share, int add) {
    float made[ROWS * SIDE] __attribute__((aligned(64)));
    for (int64_t row = 0; row < rows; row += ROWS)
        for (int64_t at = 0; at < width; at += SIDE) {
            const int64_t some = width - at < SIDE ? width - at : SIDE;
            multiply((Strided){a.at + row * a.row, a.row, a.column}, rows - row, b + at, wide, terms, made);
            for (int64_t r = 0; r < ROWS && row + r < rows; r++) {
                float *own = to + (row + r) * stride + at;
                const float *from = made + r * SIDE, times = share == NULL ? 1 : share[row + r];
                if (add)
                    for (int64_t i = 0; i < some; i++) own[i] += from[i];
                else
                    for (int64_t i = 0; i < some; i++) own[i] = from[i] * times;
            }
        }
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

/* What the queries of one block of one head work with. */
typedef struct Work {
    const Attention *of;
    int64_t k_wide, v_wide;     /* channels, padded */
    float *k, *v;               /* [tokens][wide], of one KV head */
    float *q, *d;               /* [SIDE][wide]: queries, and gradients of what they make */
    float *q_turned, *d_turned; /* [channels][SIDE] */
    float *p, *ds;              /* [tokens][SIDE]: scores, then shares of keys; gradients of scores */
} Work;

static int64_t layout(Work *w, char *at) {
    const int64_t k_side = w->k_wide * SIDE, v_side = w->v_wide * SIDE, tokens = (w->of->tokens + ROWS) * SIDE;
    float **places[] = {&w->k, &w->v, &w->q, &w->d, &w->q_turned, &w->d_turned, &w->p, &w->ds};
    const int64_t all = w->of->tokens;
    const int64_t numbers[] = {all * w->k_wide, all * w->v_wide, k_side, v_side, k_side, v_side, tokens, tokens};
    char *start = at;
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) *places[i] = (float *)at, at += numbers[i] * sizeof(float);
    return at - start; /* a multiple of 64, as is each part */
}

/* What is to be freed, or NULL where there is not enough memory. */
static char *begin(Work *w, const Attention *of) {
    *w = (Work){.of = of, .k_wide = (of->width + SIDE - 1) / SIDE * SIDE, .v_wide = (of->v_width + SIDE - 1) / SIDE * SIDE};
    char *held = aligned_alloc(64, (size_t)layout(w, (char *)0));
    if (held != NULL) layout(w, held);
    return held;
}

/* Copy the keys and values of a KV head. */
static void pack_keys(const Work *w, int64_t head) {
    const Attention *of = w->of;
    pack((Strided){of->k + head * of->k_head, of->k_token, 1}, of->tokens, of->width, w->k_wide, w->k);
    pack((Strided){of->v + head * of->v_head, of->v_token, 1}, of->tokens, of->v_width, w->v_wide, w->v);
}

/* Scores [keys][SIDE] of the queries from `first` on, in units of log 2, -inf where a key comes later: w->p. */
static void find_scores(const Work *w, int64_t head, int64_t first, int64_t queries) {
    const Attention *of = w->of;
    const Strided q = {of->q + head * of->q_head + first * of->q_token, of->q_token, 1};
    const int64_t keys = first + queries;
    turn(q, queries, of->width, of->scale * LOG2E, w->q_turned);
    for (int64_t key = 0; key < keys; key += ROWS)
        multiply((Strided){w->k + key * w->k_wide, w->k_wide, 1}, keys - key, w->q_turned, SIDE, of->width, w->p + key * SIDE);
    for (int64_t key = first + 1; key < keys; key++)
        for (int64_t l = 0; l < key - first; l++) w->p[key * SIDE + l] = -INFINITY;
}

/* Softmax of the scores of `queries` over `keys`, not divided, in their place. To `share` what it is multiplied with. */
static void find_shares(const Work *w, int64_t keys, int64_t queries, float *share, float *lse) {
    for (int64_t l = 0; l < queries; l += LANES) {
        __m512 most = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps();
        float sums[LANES], peaks[LANES];
        for (int64_t key = 0; key < keys; key++) most = _mm512_max_ps(most, _mm512_load_ps(w->p + key * SIDE + l));
        for (int64_t key = 0; key < keys; key++) {
            float *score = w->p + key * SIDE + l;
            const __m512 p = power_of_two(_mm512_sub_ps(_mm512_load_ps(score), most));
            sum = _mm512_add_ps(sum, p);
            _mm512_store_ps(score, p);
        }
        _mm512_storeu_ps(sums, sum), _mm512_storeu_ps(peaks, most);
        for (int64_t i = 0; i < LANES && l + i < queries; i++)
            share[l + i] = 1 / sums[i], lse[l + i] = peaks[i] + log2f(sums[i]);
    }
}

int attend(const Attention *of) {
    Work w;
    char *held = begin(&w, of);
    if (held == NULL) return 1;
    for (int64_t head = 0; head < of->heads; head++) {
        if (head % of->group == 0) pack_keys(&w, head / of->group);
        for (int64_t first = 0; first < of->tokens; first += SIDE) {
            const int64_t queries = of->tokens - first < SIDE ? of->tokens - first : SIDE, keys = first + queries;
            float share[SIDE], *out = of->out + head * of->out_head + first * of->out_token;
            find_scores(&w, head, first, queries);
            find_shares(&w, keys, queries, share, of->lse + head * of->tokens + first);
            put((Strided){w.p, 1, SIDE}, w.v, w.v_wide, keys, out, of->out_token, queries, of->v_width, share, 0);
        }
    }
    free(held);
    return 0;
}

/* Gradients of the scores of the queries from `first` on, p·(dO·v - dO·o)·scale: w->ds; and p again: w->p. */
static void find_gradients(const Work *w, int64_t head, int64_t first, int64_t queries) {
    const Attention *of = w->of;
    const Strided d = {of->d_out + head * of->d_head + first * of->d_token, of->d_token, 1};
    const float *out = of->out + head * of->out_head + first * of->out_token;
    const __m512 scale = _mm512_set1_ps(of->scale);
    const int64_t keys = first + queries;
    float inner[SIDE] = {0}, lse[SIDE];
    for (int64_t l = 0; l < SIDE; l++) lse[l] = l < queries ? of->lse[head * of->tokens + first + l] : INFINITY; /* p = 0 */
    for (int64_t l = 0; l < queries; l++)
        for (int64_t i = 0; i < of->v_width; i++) inner[l] += d.at[l * d.row + i] * out[l * of->out_token + i];
    find_scores(w, head, first, queries);
    turn(d, queries, of->v_width, 1, w->d_turned);
    for (int64_t key = 0; key < keys; key += ROWS)
        multiply((Strided){w->v + key * w->v_wide, w->v_wide, 1}, keys - key, w->d_turned, SIDE, of->v_width,
                 w->ds + key * SIDE);
    for (int64_t at = 0; at < keys * SIDE; at += LANES) {
        const __m512 log = _mm512_loadu_ps(lse + at % SIDE), mean = _mm512_loadu_ps(inner + at % SIDE);
        const __m512 p = power_of_two(_mm512_sub_ps(_mm512_load_ps(w->p + at), log));
        const __m512 ds = _mm512_mul_ps(_mm512_sub_ps(_mm512_load_ps(w->ds + at), mean), p);
        _mm512_store_ps(w->p + at, p);
        _mm512_store_ps(w->ds + at, _mm512_mul_ps(ds, scale));
    }
}

int attend_backwards(const Attention *of) {
    Work w;
    char *held = begin(&w, of);
    if (held == NULL) return 1;
    for (int64_t head = 0; head < of->heads; head++) {
        const int64_t kv = head / of->group, width = of->width, v_width = of->v_width;
        if (head % of->group == 0) pack_keys(&w, kv);
        for (int64_t first = 0; first < of->tokens; first += SIDE) {
            const int64_t queries = of->tokens - first < SIDE ? of->tokens - first : SIDE, keys = first + queries;
            const Strided q = {of->q + head * of->q_head + first * of->q_token, of->q_token, 1};
            const Strided d = {of->d_out + head * of->d_head + first * of->d_token, of->d_token, 1};
            float *d_q = of->d_q + (head * of->tokens + first) * width, *d_k = of->d_k + kv * of->tokens * width;
            float *d_v = of->d_v + kv * of->tokens * v_width;
            find_gradients(&w, head, first, queries);
            pack(q, queries, width, w.k_wide, w.q), pack(d, queries, v_width, w.v_wide, w.d);
            put((Strided){w.ds, 1, SIDE}, w.k, w.k_wide, keys, d_q, width, queries, width, NULL, 0);
            put((Strided){w.ds, SIDE, 1}, w.q, w.k_wide, queries, d_k, width, keys, width, NULL, 1);
            put((Strided){w.p, SIDE, 1}, w.d, w.v_wide, queries, d_v, v_width, keys, v_width, NULL, 1);
        }
    }
    free(held);
    return 0;
}
#endif
