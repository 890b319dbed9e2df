/* Choosing the codes of a weight with its inputs in view (llmforge/quantization/methods/gptq.py, importance.py). */
#ifndef LLMFORGE_ROUNDING_H
#define LLMFORGE_ROUNDING_H

#include <stdint.h>

#define TILE 32 /* rows of weights that are rounded side by side */
#define LANES 16 /* rows whose codes of a trellis depend on one another (llmforge/native/kernels.h) */
#define BATCH 64 /* columns whose updates of the others are applied at once, as one matrix product */

/* How scales are stored: from INT8 on as codes, INT8 under a bf16 superscale, INT6_FP16 and INT8_FP16 under one in fp16, as
 * minima are, in 6 bits, INT4_FP16 and its minima in 4. UNSTORED: as they are found, before there are superscales. */
enum {
    SCALE_UNSTORED = -1, SCALE_FP32 = 0, SCALE_FP16 = 1, SCALE_BF16 = 2, SCALE_INT8 = 3, SCALE_INT6_FP16 = 4, SCALE_INT8_FP16 = 5,
    SCALE_INT4_FP16 = 6
};

/* A weight [n, k] and what is known of its inputs. `order` is the order in which columns are rounded; H and its factor
 * stand in that order, as do mean and feedback; the rest in the order of the columns. Without H (NULL) errors are fed
 * back by the mean alone, and there are no sweeps. */
typedef struct Rounding {
    int64_t n, k, block, superblock; /* columns that share a scale, and a superscale */
    /* held: scales and zeros, or minima, say the grid to begin with; minima: value = code·scale + minimum, no zero points;
     * codebook: a code stands for a level (quantization/codebook.py) */
    int32_t bits, symmetric, storage, steps, sweeps, held, trellis, minima, codebook;
    const float *target;   /* [n, k]: what is to be matched */
    const int32_t *order;  /* [k] */
    const float *hessian;  /* [k, k], or NULL */
    const float *lower;    /* [k, k]: Rᵀ, RᵀR = H⁻¹, R upper triangular; only what is on and below the diagonal is read */
    const float *mean;     /* [k]: of the inputs, where there is no H */
    const float *feedback; /* [k]: by how much Σ mean·error of the columns before moves a column's target */
    const float *weight;   /* [k]: what an error of a column costs while a grid is searched */
    uint8_t *codes;        /* [n, k] */
    float *scales;         /* [n, blocks] */
    uint8_t *zeros;        /* [n, blocks] */
    float *minimums;       /* [n, blocks], or NULL */
    float *errors;         /* [n, k]: what is left, target - value; NULL: nobody asks */
    /* Made from these before the first tile: the columns of each block by their place in the order, and H of them. */
    const int64_t *columns; /* [blocks, widest], widest = min(block, k) */
    const float *inner;     /* [blocks, widest, widest] */
} Rounding;

typedef struct Rounder {
    int64_t (*scratch_size)(const Rounding *r); /* bytes that a tile needs */
    void (*tile)(const Rounding *r, int64_t first, void *scratch); /* rounds rows first … first + TILE - 1 */
} Rounder;

extern const Rounder rounder_generic;
#if defined(__x86_64__)
extern const Rounder rounder_avx2, rounder_avx512;
#endif

#endif
