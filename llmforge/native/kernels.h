/* Arithmetic of the CPU kernels. Each function exists once per instruction set (impl.inc); `kernels_of_this_cpu` picks. */
#ifndef LLMFORGE_KERNELS_H
#define LLMFORGE_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#define LANES 16 /* rows of weights that stand side by side in one group */
#define LARGEST_DIM 1024 /* channels of a head */

/* Weights of one linear layer, quantized in blocks of columns, a multiple of PART or half of one: groups of 16 rows, one after the other. A group holds the
 * codes of all blocks; then the scales of every block, 16 numbers each; then, where there are any, the zero points of
 * every block, or its minima, as scales are; then, where scales are int8, 16 bf16 superscales for every SUPERBLOCK columns
 * (the last may be shorter). Each of these sections ends at a multiple of 64 bytes. Rows beyond `n` pad the last group.
 *
 * A code c of a row stands for (c - zero point)·scale, the zero point being 2^(bits-1) where none are stored, or, with
 * minima, for c·scale + minimum: then scales are fp32 or fp16, and there are neither zero points nor a trellis. Scales are
 * fp32, fp16, or int8 times the superscale (exact in fp32: 7 bits and 8). Zero points are bytes; where codes have 4 bits or fewer, byte
 * i of 8 holds that of row i in its low half and that of row i + 8 in its high half.
 *
 * A trellis code of 4 or 5 bits is (u, i): u its top bit, i the number of a value among eight or sixteen. Which those are is
 * said by u and by those of the two rows before, u' and u'' (0 in front of the first row of a group): TRELLIS4[s][i] or
 * TRELLIS5[s][i] with s = 2·u' + (u ^ u''), times the scale. Values of s and 3 - s are mirrored around 0: that of (3 - s, i)
 * is minus that of s and the largest i less this one. (Trellis-coded quantization, Marcellin and Fischer 1990; the code is
 * Ungerboeck's with four states.)
 *
 * Codes come in parts of 32 columns, each a number of vectors of 64 bytes. Byte 4·lane + j of vector v of a part with 8
 * bits is the code of row `lane` and column 4v + j, for eight v. With fewer bits the same eight vectors are cut into planes
 * of 4, 2 and 1 bits, the lowest bits in the widest plane, and planes stand one after the other, wide ones first:
 *   4 bits: four vectors, the w-th with vector w of the codes in the low half of each byte and vector w + 4 in the high;
 *   2 bits: two vectors, the w-th with vector 4w + v of the codes in bits 2v and 2v + 1;
 *   1 bit: one vector, with vector v of the codes in bit v. */
enum { SCALE_FP32 = 0, SCALE_FP16 = 1, SCALE_INT8 = 2 };
#define PART 32
#define SUPERBLOCK 256 /* columns; blocks of int8 scales divide it */
#define TRELLIS_MIDDLE 128
extern const int8_t TRELLIS4[4][8], TRELLIS5[4][16];
typedef struct Weights {
    const uint8_t *data;
    int64_t n, k, block;
    int bits; /* 3, 4, 5, 6 or 8 */
    int zero_points, scales, trellis, minimums;
} Weights;

static inline int64_t aligned_size(int64_t size) { return (size + 63) / 64 * 64; }
static inline int64_t codes_size(const Weights *w) { return w->k * LANES * w->bits / 8; } /* bytes of a group's codes */
static inline int64_t scale_size(const Weights *w) { /* bytes of a block's scales */
    return w->scales == SCALE_FP32 ? 4 * LANES : w->scales == SCALE_FP16 ? 2 * LANES : LANES;
}
static inline int64_t scales_size(const Weights *w) { return aligned_size(w->k / w->block * scale_size(w)); }
static inline int64_t zeros_size(const Weights *w) {
    return w->zero_points ? aligned_size(w->k / w->block * (w->bits <= 4 ? LANES / 2 : LANES)) : 0;
}
static inline int64_t minimums_size(const Weights *w) { return w->minimums ? scales_size(w) : 0; }
static inline int64_t supers_size(const Weights *w) {
    return w->scales == SCALE_INT8 ? aligned_size((w->k + SUPERBLOCK - 1) / SUPERBLOCK * 2 * LANES) : 0;
}
static inline int64_t group_size(const Weights *w) {
    return codes_size(w) + scales_size(w) + zeros_size(w) + minimums_size(w) + supers_size(w);
}
static inline int64_t middle_of(const Weights *w) { return w->trellis ? TRELLIS_MIDDLE : 1 << (w->bits - 1); }
static inline int32_t zero_factor(const Weights *w) { return w->zero_points ? -1 : -(int32_t)middle_of(w); }
static inline int64_t groups_of(const Weights *w) { return (w->n + LANES - 1) / LANES; }

/* Where the sections of a group are. */
typedef struct Group {
    const uint8_t *codes, *scales, *zeros, *supers; /* `zeros` NULL: there are none; `supers`: minima, where there are any */
} Group;
static inline Group group_at(const Weights *w, const uint8_t *codes) {
    const uint8_t *scales = codes + codes_size(w), *zeros = scales + scales_size(w);
    return (Group){codes, scales, w->zero_points ? zeros : NULL, zeros + zeros_size(w)};
}
static inline Group group_from(const Weights *w, const Group *g, int64_t b) { /* from block `b` on, codes apart */
    const int64_t supers = w->minimums ? b * scale_size(w) : b * w->block / SUPERBLOCK * 2 * LANES;
    const uint8_t *zeros = g->zeros ? g->zeros + b * (w->bits <= 4 ? LANES / 2 : LANES) : NULL;
    return (Group){NULL, g->scales + b * scale_size(w), zeros, g->supers + supers};
}
static inline int64_t words_of(const Weights *w) { return (w->k / w->block + 63) / 64; } /* with a bit for each block */

typedef struct Linear {
    Weights weights;
    int terms;             /* of an activation: 1 or 2 */
    float outliers;        /* with one term, blocks of a row whose largest magnitude is more than so many times the mean of
                            * those of its blocks have a second; 0: none has */
    int activation;        /* ACTIVATION_* */
    const float *bias;     /* [n] in the order of the rows, or NULL */
    const float *residual; /* [m, outputs], added to the result, or NULL */
    float *y;              /* [m, outputs]; outputs is n, or n/2 with a gated activation */
} Linear;

static inline int has_outliers(const Linear *layer) { return layer->terms == 1 && layer->outliers > 0; }

/* With a gated activation f, groups alternate between gate and up, and an output is f(gate)·up; ACTIVATION_ALONE is added to
 * one that is not gated: an output is f of a row. */
enum { ACTIVATION_NONE = 0, ACTIVATION_SILU = 1, ACTIVATION_GELU_TANH = 2, ACTIVATION_GELU = 3, ACTIVATION_ALONE = 8 };
static inline int is_gated(int64_t activation) { return activation != ACTIVATION_NONE && activation < ACTIVATION_ALONE; }
static inline int is_known(int64_t activation) {
    const int64_t f = activation >= ACTIVATION_ALONE ? activation - ACTIVATION_ALONE : activation;
    return activation == ACTIVATION_NONE || (f >= ACTIVATION_SILU && f <= ACTIVATION_GELU);
}

/* Rows of activations as int8, one scale a block of columns: x ≈ value·scale. Rows stand in tiles, as many as a kernel
 * multiplies at a time, the last tile with what is left; a tile holds four columns of each of its rows in turn, so that
 * they are read in one stream. With two terms, a row of x is two rows here, and the second holds what the first leaves:
 * x ≈ value·scale + value'·scale', to about 2^-16 of the largest of a block; scales of the first then have 16 bits of
 * mantissa, so that what is left is exact. Both stand in one tile: codes of weights are read and unpacked once for both.
 * Where outliers alone have a second term, it stands in a second Rows; of other blocks the scale there is 0. */
typedef struct Rows {
    int8_t *value;  /* tiles of [k/4, rows of the tile, 4] */
    float *scale;   /* tiles of [k/block, rows of the tile] */
    int32_t *sum;   /* as `scale`: sum of the values of a block, times `factor` */
    int32_t factor; /* minus the zero point where all codes have one, else -1 */
    uint64_t *marks; /* [rows, words]: bit b % 64 of word b / 64 says that block b of a row is in this second Rows */
} Rows;

/* How a key or a value of a token and head is stored in a slot of its cache, where slots are bytes:
 *   static: int8 codes [dim], times a scale of the graph, one or one a channel;
 *   int8: int8 codes [dim], then their scale, bf16;
 *   int4: codes 0 … 15, byte i of dim/2 with that of channel i in its low half and that of channel i + dim/2 in its high
 *     half, then a scale and what a code 0 stands for, both bf16: low + code·scale. */
enum { SLOT_STATIC = 0, SLOT_INT8 = 1, SLOT_INT4 = 2 };
static inline int64_t slot_size(int slot, int64_t dim) {
    return slot == SLOT_STATIC ? dim : slot == SLOT_INT8 ? dim + 2 : dim / 2 + 4;
}

/* One layer's attention over its cache. Strides count elements. */
typedef struct Attention {
    int64_t batch, sequence, heads, kv_heads, dim, capacity;
    const float *qkv;          /* [batch, sequence, (heads + 2·kv_heads)·dim] */
    const int32_t *lengths;    /* [batch]: past + sequence - 1 */
    void *key, *value;         /* [batch, kv_heads, capacity, dim], fp32 or int8; or slots [batch, kv_heads, capacity] */
    int int8;                  /* codes are: always so in slots */
    int slots, key_slot, value_slot; /* SLOT_* */
    int64_t key_size, value_size;    /* bytes of a slot */
    int turn_keys, turn_values;      /* by Hadamard matrices, before they are stored */
    const float *cosine, *sine; /* [positions, rotary/2], or NULL */
    int64_t rotary;            /* rotated dimensions of a head */
    int interleaved;           /* pairs are (2i, 2i+1) instead of (i, i + rotary/2) */
    const float *key_scale, *value_scale; /* [1] or [kv_heads·dim] of an int8 cache */
    int per_channel;
    const float *query_norm, *key_norm; /* [dim] of RMSNorm over a head, or NULL */
    float epsilon, scale, softcap;
    int64_t window;            /* a query sees that many keys at most, itself among them; ≤ 0: all */
    const float *sink;         /* [heads], or NULL */
    float *query;              /* scratch [batch, sequence, heads, dim]: rotated, scaled queries */
    float *y;                  /* [batch, sequence, heads·dim] */
} Attention;

/* One layer's attention over latents, of which keys and values of every head are made: row n of `up` and a latent give
 * channel n of a head's key, and rows from `plain` on those of its value. */
typedef struct Latents {
    int64_t batch, sequence, heads, capacity;
    int64_t rank, rotary, plain, values; /* channels of a latent, of what keys share, of the rest of a key, of a value */
    const float *q;          /* [batch, sequence, heads·(plain + rotary)], rotated */
    float *cache;            /* [batch, 1, capacity, rank + rotary], with what the step adds */
    const int32_t *past;     /* [batch] */
    const void *up;          /* [heads·(plain + values), rank], fp32; or int8 codes of that shape */
    const float *up_scale;   /* of codes, [heads·(plain + values), rank/block]; NULL: there are none */
    int64_t block;
    const float *sink;       /* [heads], or NULL */
    float scale, softcap;
    int64_t window;          /* as in Attention */
    float *y;                /* [batch, sequence, heads·values] */
} Latents;

/* One layer's attention of sequences that stand side by side, each to itself. A query sees its own place, `left` keys before it
 * and `right` after it; -1: all of the sequence. */
typedef struct Encoders {
    int64_t sequences, heads, kv_heads, dim, values, left, right;
    const float *q;          /* [tokens, heads·dim] */
    const float *k, *v;      /* [tokens, kv_heads·dim], [tokens, kv_heads·values] */
    int64_t q_pitch, k_pitch, v_pitch; /* from token to token: more where they stand side by side in one tensor */
    const int32_t *starts;   /* [sequences + 1]: where the tokens of each begin, and the last one ends */
    float scale, softcap;
    float *y;                /* [tokens, heads·values] */
} Encoders;

#define FEW_TOKENS 8      /* up to so many of a row never expand latents */
#define CHUNK_TOKENS 512 /* of a prompt, that a scheduler reads at a time */

/* Whether a row of the batch makes keys and values of its latents, and does not multiply queries and sums with `up`: what
 * takes fewer multiplications for all tokens up to its last one that are of the same chunk. So the rest of a chunk, behind
 * a beginning that was kept, gets the bits that it gets in the whole chunk. */
static inline int expands(const Latents *a, int64_t batch) {
    if (a->sequence <= FEW_TOKENS) return 0;
    const int64_t total = a->past[batch] + a->sequence, s = total - a->past[batch] / CHUNK_TOKENS * CHUNK_TOKENS;
    const double pairs = (double)s * (double)(total - s / 2), each = (double)a->rank * (double)(a->plain + a->values);
    return (double)total * each + pairs * (double)(a->plain + a->rotary + a->values) <
           (double)s * each + pairs * (double)(2 * a->rank + a->rotary);
}

/* What low-rank adapters add to the rows [batch·sequence, n] that a linear layer made of x [batch·sequence, k]: row b of
 * the batch takes number ids[b] of `a` [count, parts·rank, k] and `b` [count, rank, n], 0 is none. Part p are the columns
 * starts[p] … starts[p + 1] - 1, of rows p·rank … (p + 1)·rank - 1 of a. */
typedef struct Adapters {
    int64_t batch, sequence, k, n, rank, parts;
    const float *base, *x, *a, *b;
    const int64_t *ids, *starts;
    float *hidden; /* scratch [batch·sequence, parts·rank]: x·aᵀ */
    float *y;
} Adapters;
#define ADAPTER_ROWS 4   /* of a batch's row that are computed together */
#define ADAPTER_COLUMNS 1024 /* of a part that are one piece of work */

enum { STORED_FP32 = 0, STORED_FP16 = 1, STORED_BF16 = 2 };

/* A matrix [n, k], row after row, in a dtype of STORED_*, and where its codes go: uint8 [n, k], scales fp32 [n, blocks],
 * zero points uint8 of that shape, NULL where the grid is symmetric. */
typedef struct Rounding {
    const void *weights;
    int64_t n, k, block;
    int stored, bits;
    uint8_t *codes;
    float *scales;
    uint8_t *zero_points;
} Rounding;

#define HEAD 256 /* llmforge/ir/interface.py */

/* How a token is drawn: fields of llmforge.serving.Sampling. Temperature 0 is greedy, of heads alone. */
typedef struct Draw {
    double uniform; /* in [0, 1): decides, and starts what is drawn further */
    double top_p;
    int64_t top_k; /* 0: all */
    float temperature, min_p;
} Draw;

/* Heads of rows of logits (llmforge.ir.interface.TopLogits), and what they decide: `tokens` [rows]; -1, and `chosen` [rows] has
 * the block that the token stands in; or -1 in both. */
typedef struct Heads {
    int64_t rows, width, vocabulary, blocks;
    const float *logits; /* [rows, width] */
    const int32_t *ids;
    const float *masses; /* [rows, blocks] */
    const Draw *draws;   /* [rows] */
    int64_t *tokens, *chosen;
} Heads;

/* A row of logits, summed in blocks of `block`; its head as in Heads, [HEAD] each, and its masses, or NULL. */
typedef struct LogitRow {
    int64_t vocabulary, block;
    const float *logits;
    const float *head_logits;
    const int32_t *head_ids;
    const float *masses;
    Draw draw;
} LogitRow;

typedef struct Kernels {
    const char *name;
    /* Quantize rows `first` … `last - 1` of x [m, k] for a layer, each after RMSNorm with weights `gamma` where that is not
     * NULL; `space` is a place for 4·k fp32. `rows` has a row for each of the terms, 1 or 2; behind it is one for outliers. */
    void (*quantize)(const Linear *layer, const float *x, int64_t m, int64_t first, int64_t last, const float *gamma,
                     float epsilon, const Rows *rows, float *space);
    /* Compute groups `first` … `last - 1` (pairs stay together) of a layer for `m` rows. */
    void (*linear)(const Linear *layer, const Rows *rows, int64_t m, int64_t first, int64_t last);
    /* Copy row `row` of the weights, dequantized, to y [k]. */
    void (*dequantize)(const Weights *weights, int64_t row, float *y);
    /* Norm and rotate the queries of tokens `first` … `last - 1` of a row and of one key/value head, write its keys and
     * values to the cache. */
    void (*attention_prepare)(const Attention *a, int64_t batch, int64_t kv_head, int64_t first, int64_t last);
    /* Attend for queries `first` … `last - 1` of a row and of one key/value head; 0: out of memory, nothing was written. */
    int (*attention)(const Attention *a, int64_t batch, int64_t kv_head, int64_t first, int64_t last);
    /* Attend for heads `first` … `last - 1` of all rows that do not expand latents; 0: out of memory. */
    int (*latent_heads)(const Latents *a, int64_t first, int64_t last);
    /* Attend for one head of a row that does; 0: out of memory. */
    int (*latent_expanded)(const Latents *a, int64_t batch, int64_t head);
    /* Attend for one head of a sequence; 0: out of memory. */
    int (*encoder_head)(const Encoders *a, int64_t sequence, int64_t head);
    /* Round weights to the nearest point of a grid; `row` is a place for k fp32. 0: one of them is not finite. */
    int (*round)(const Rounding *rounding, float *row);
    /* Pack `count` pairs of codes into bytes, the first of each in the low half. */
    void (*pack)(const uint8_t *codes, int64_t count, uint8_t *packed);
    /* Codes [n, k] of a trellis whose Σ weight·(value - level)² is least in each column of a group of rows (Viterbi), of values
     * and weights of that shape: the bits of quantization/trellis.py. */
    void (*nearest_levels)(const float *values, const float *weights, int64_t n, int64_t k, int bits, uint8_t *codes);
    /* Multiply up to ADAPTER_ROWS rows from `first` on by numbers `from` … `to - 1` of the rows of a; of one batch's row. */
    void (*adapter_hidden)(const Adapters *adapters, int64_t batch, int64_t first, int64_t last, int64_t from, int64_t to);
    /* Add the products with columns `from` … `to - 1` of part `part` of b to these rows. */
    void (*adapter_add)(const Adapters *adapters, int64_t batch, int64_t first, int64_t last, int64_t part, int64_t from,
                        int64_t to);
    /* Draw a token of each of some heads. */
    void (*draw_heads)(const Heads *heads);
    /* Draw one of `count` logits that are at most `least`: its number; -1: one is NaN, or none has any weight. */
    int64_t (*draw_block)(const float *logits, int64_t count, float best, float least, const Draw *draw);
    /* Draw a token of a row, whose logits are finite or -inf, not all of them -inf; -1: out of memory. */
    int64_t (*draw_row)(const LogitRow *row);
    /* Find the `count` largest of x [n], or as many as are above -inf: ids [count], largest first, the lower id among
     * equals. Returns how many; -1: out of memory. */
    int64_t (*largest)(const float *x, int64_t n, int64_t count, int64_t *ids);
    /* Sum e^(x - best) over x [count]; NaN where one is. */
    double (*sum_exponentials)(const float *x, int64_t count, float best);
} Kernels;

extern const Kernels kernels_generic;
#if defined(__x86_64__)
extern const Kernels kernels_avx2, kernels_avx512vnni, kernels_avx512bf16;
#endif
/* clang before 16 has dot products only where all of the library is compiled for them. */
#if defined(__aarch64__) && (!defined(__clang__) || __clang_major__ >= 16 || defined(__ARM_FEATURE_DOTPROD))
#define HAS_NEON 1
extern const Kernels kernels_neon;
#else
#define HAS_NEON 0
#endif

/* Memory of the calling thread, `size` bytes aligned to 64, valid until its next call with the same `slot`; NULL where
 * there is none. */
void *scratch(int slot, size_t size);
enum { SCRATCH_ROWS, SCRATCH_NORM, SCRATCH_SHARED, SCRATCH_SCORES, SCRATCH_KEYS, SCRATCH_VALUES, SCRATCH_CODES, SCRATCH_SLOTS };

#endif
