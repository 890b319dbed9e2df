/* Causal attention of one window (attention.py). */
#ifndef LLMFORGE_ATTENTION_H
#define LLMFORGE_ATTENTION_H

#include <stdint.h>

/* Queries [heads, tokens, width], keys [heads / group, tokens, width] and values [heads / group, tokens, v_width], fp32;
 * numbers of a head lie next to each other, and strides are those between heads and between tokens. */
typedef struct Attention {
    int64_t heads, group, tokens, width, v_width; /* group: heads that share keys and values */
    int64_t q_head, q_token, k_head, k_token, v_head, v_token, out_head, out_token, d_head, d_token;
    const float *q, *k, *v;
    float *out;         /* [heads, tokens, v_width] */
    float *lse;         /* [heads, tokens]: log2 Σ 2^score, scores in units of log 2 */
    const float *d_out; /* the gradient of out, and those of q, k and v, which are contiguous; NULL forwards */
    float *d_q, *d_k, *d_v;
    float scale;  /* of scores */
    int32_t bf16; /* whether factors of products are rounded to bf16 */
} Attention;

#define SIDE 64 /* queries, or channels, that are summed side by side */
#define LANES 16

/* A matrix by its strides. */
typedef struct Strided {
    const float *at;
    int64_t row, column;
} Strided;

/* Makes words of x [rows, width], 0 beyond its width, up to `wide`: across, of numbers of a row, [rows][wide / TERMS];
 * down, of numbers of a column, [rows / TERMS][wide]. See attention.inc. */
typedef void Pack(Strided x, int64_t rows, int64_t width, int64_t wide, float *to);

#if defined(__x86_64__)
/* All return 0, or 1 where there is not enough memory. Backwards, gradients of k and v are added to what is there. */
int attend_avx512(const Attention *of);
int attend_backwards_avx512(const Attention *of);
int attend_avx512bf16(const Attention *of);
int attend_backwards_avx512bf16(const Attention *of);
#endif

#endif
