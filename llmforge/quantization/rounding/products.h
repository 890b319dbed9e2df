/* Products of matrices for calibration (products.py): what they add up, and in which order, does not depend on threads. */
#ifndef LLMFORGE_PRODUCTS_H
#define LLMFORGE_PRODUCTS_H

#include <stdint.h>

#define CHUNK 128 /* terms of a sum that are added up before they are added to it: b's then stay in the first cache */
#define BLOCK 128 /* rows of a matrix that are factored at once */
#define PANEL 16  /* features whose pairs of bf16 lie side by side */
#define PANELS 3  /* of b that are multiplied at once */

enum { WHOLE = 0, UPPER = 1, LOWER = 2 }; /* what of b is not 0: all, or what is on and above the diagonal, or below it */

/* c [m, n] = a·b, or c ± a·b, of a [m, k] and b [k, n]; strides are those between rows and between columns. */
typedef struct Product {
    int64_t m, n, k, a_row, a_column, b_row, b_column, c_row;
    int32_t form, sign, add;
    const void *a, *b; /* all are fp32, or all fp64 */
    void *c;
} Product;

/* total [rows, columns] += aᵀ·b of a [tokens, rows] and b [tokens, columns], whose numbers are rounded to bf16. */
typedef struct TokenProduct {
    int64_t tokens, rows, columns, a_stride, b_stride;
    int32_t lower; /* a is b: only what is on and below the diagonal is needed, and some of what is above comes with it */
    const float *a, *b;
    float *total;
} TokenProduct;

/* What an instruction set multiplies with, by the type of the numbers. */
typedef struct Multiplier {
    int rows, width;                                                 /* of c that are computed at once */
    void (*pack)(const Product *p, int64_t panel, void *packed);     /* `rows` rows of a: [k][rows] */
    int64_t (*scratch)(void);                                        /* bytes */
    void (*columns)(const Product *p, const void *packed, int64_t first, int64_t last, int64_t column, void *scratch);
} Multiplier;

extern const Multiplier fp32_generic, fp64_generic;
#if defined(__x86_64__)
extern const Multiplier fp32_avx2, fp64_avx2, fp32_avx512, fp64_avx512;
void pack_pairs(const float *x, int64_t tokens, int64_t stride, int64_t width, uint32_t *panel);
void add_columns(const TokenProduct *p, const uint32_t *a, const uint32_t *b, int64_t column);
#endif

#endif
