/* The custom operators of domain llmforge.cpu, as ONNX Runtime sees them (docs/cpu-kernels.md gives their signatures). */
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

#include "kernels.h"
#include "ort_abi.h"

#define DOMAIN "llmforge.cpu"
#define PARALLEL_UNITS 128      /* that the rounding of rows is cut into at most */
#define REGIONS 64              /* of weights, one for a thread, at most */
#define INLINE_MACS (256 * 1024) /* below that many multiplications, waking a thread costs more than it saves */
#define SHARED_ROWS 2           /* up to that many rows, every thread quantizes them itself: cheaper than a second wake */
#define MAX_RANK 8
#define MOST_RANKS 64
#define MOST_TERMS 2 /* of an activation */

#define TRY(expression)                             \
    do {                                            \
        Status *status_ = (expression);             \
        if (status_) return status_;                \
    } while (0)
#define REFUSE(message) return ort_status(api, STATUS_INVALID_ARGUMENT, DOMAIN "::" message)

/* Levels of a trellis, ascending 0 … 31 or 0 … 63, in the four subsets of every fourth: those that round blocks of 32
 * normal deviates with the least squared error (tests/quantization/test_trellis.py), with 4 bits scaled by their largest,
 * with 5 by what fits them best. */
const int8_t TRELLIS4[4][8] = {
    {-127, -75, -45, -21, 3, 27, 52, 84},
    {-97, -59, -33, -9, 15, 39, 66, 112},
    {-112, -66, -39, -15, 9, 33, 59, 97},
    {-84, -52, -27, -3, 21, 45, 75, 127},
};
const int8_t TRELLIS5[4][16] = {
    {-127, -99, -75, -57, -43, -31, -19, -9, 1, 11, 22, 34, 46, 61, 80, 107},
    {-115, -86, -65, -50, -37, -25, -14, -4, 6, 16, 28, 40, 53, 70, 92, 126},
    {-126, -92, -70, -53, -40, -28, -16, -6, 4, 14, 25, 37, 50, 65, 86, 115},
    {-107, -80, -61, -46, -34, -22, -11, -1, 9, 19, 31, 43, 57, 75, 99, 127},
};

static const Kernels *kernels;

typedef struct Scratch {
    void *memory;
    size_t size;
} Scratch;

/* A thread works for every session that shares its pool, piece by piece: nothing stays in a slot between two pieces. */
static _Thread_local Scratch held[SCRATCH_SLOTS];

static Scratch *grown(int slot, size_t size) {
    Scratch *own = &held[slot];
    if (own->size < size) {
        free(own->memory);
        size = (size + 4095) / 4096 * 4096;
        own->memory = aligned_alloc(64, size);
        own->size = own->memory ? size : 0;
    }
    return own;
}

void *scratch(int slot, size_t size) {
    return grown(slot, size)->memory;
}

/* Memory of the calling thread that pieces of its operator on other threads read as well: its own until `give_back`,
 * even if it runs another operator meanwhile. */
static Scratch take(size_t size) {
    Scratch taken = *grown(SCRATCH_SHARED, size);
    held[SCRATCH_SHARED] = (Scratch){0};
    return taken;
}

static void give_back(Scratch taken) {
    free(held[SCRATCH_SHARED].memory);
    held[SCRATCH_SHARED] = taken;
}

typedef struct Tensor {
    void *data; /* NULL: an optional input that is not given */
    int64_t dims[MAX_RANK];
    size_t rank;
    int64_t count;
} Tensor;

static Status *read_tensor(const Api *api, const Value *value, Tensor *tensor) {
    TypeAndShape *shape;
    TRY(ort_data(api, (Value *)value, &tensor->data));
    TRY(ort_shape(api, value, &shape));
    Status *status = ort_rank(api, shape, &tensor->rank);
    if (!status && tensor->rank > MAX_RANK) status = ort_status(api, STATUS_INVALID_ARGUMENT, "rank above 8");
    if (!status) status = ort_dims(api, shape, tensor->dims, tensor->rank);
    ort_release_shape(api, shape);
    tensor->count = 1;
    for (size_t i = 0; !status && i < tensor->rank; i++) tensor->count *= tensor->dims[i];
    return status;
}

static Status *input(const Api *api, const Context *context, size_t index, Tensor *tensor) {
    const Value *value = NULL;
    memset(tensor, 0, sizeof *tensor);
    TRY(ort_input(api, context, index, &value));
    return value ? read_tensor(api, value, tensor) : NULL;
}

static Status *ort_element_type(const Api *api, const Value *value, int *type) {
    TypeAndShape *shape;
    TRY(ort_shape(api, value, &shape));
    Status *status = ort_shape_type(api, shape, type);
    ort_release_shape(api, shape);
    return status;
}

static Status *output(const Api *api, Context *context, size_t index, const int64_t *dims, size_t rank, void **data) {
    Value *value = NULL;
    TRY(ort_output(api, context, index, dims, rank, &value));
    if (!value) return ort_status(api, STATUS_FAIL, DOMAIN ": an output has no memory");
    return ort_data(api, value, data);
}

/* ---- Linear, Embedding ------------------------------------------------------------------------------------ */

typedef struct LinearKernel {
    const Api *api;
    Weights weights; /* without data */
    int64_t terms, activation;
    float outliers, epsilon;
} LinearKernel;

static Status *keep(const Api *api, const void *made, size_t size, void **kernel) {
    *kernel = malloc(size);
    if (!*kernel) return ort_status(api, STATUS_FAIL, "out of memory");
    memcpy(*kernel, made, size);
    return NULL;
}

static Status *read_weights(const Api *api, const KernelInfo *info, Weights *w) {
    int64_t bits, zero_points, scales, trellis;
    TRY(ort_attribute_int(api, info, "N", &w->n));
    TRY(ort_attribute_int(api, info, "K", &w->k));
    TRY(ort_attribute_int(api, info, "block_size", &w->block));
    TRY(ort_attribute_int(api, info, "bits", &bits));
    TRY(ort_attribute_int(api, info, "zero_points", &zero_points));
    TRY(ort_attribute_int(api, info, "scales", &scales));
    TRY(ort_attribute_int(api, info, "trellis", &trellis));
    const int64_t minimums = ort_attribute_int_or(api, info, "minimums", 0); /* version 5 had none */
    w->bits = (int)bits;
    w->zero_points = (int)zero_points;
    w->scales = (int)scales;
    w->trellis = (int)trellis;
    w->minimums = (int)minimums;
    if (bits < 3 || bits == 7 || bits > 8) REFUSE("Linear, Embedding: bits is 3, 4, 5, 6 or 8");
    if (scales < SCALE_FP32 || scales > SCALE_INT8) REFUSE("Linear, Embedding: scales is 0 … 2");
    if (trellis && ((bits != 4 && bits != 5) || zero_points))
        REFUSE("Linear, Embedding: a trellis has 4 or 5 bits and no zero points");
    if (minimums && (scales == SCALE_INT8 || zero_points || trellis))
        REFUSE("Linear, Embedding: minimums go with fp32 or fp16 scales, and neither with zero points nor with a trellis");
    const int halves = w->block == PART / 2 && w->k % PART == 0;
    if (halves && (zero_points || trellis)) REFUSE("Linear, Embedding: blocks of 16 have no zero points and no trellis");
    if (w->block < PART / 2 || (w->block % PART && !halves) || w->n < 1 || w->k < 1 || w->k % w->block)
        REFUSE("Linear, Embedding: block_size must be a multiple of 32, or 16 where 32 divides K, and divide K");
    if (scales == SCALE_INT8 && SUPERBLOCK % w->block) REFUSE("Linear, Embedding: block_size must divide 256 with int8 scales");
    return NULL;
}

static Status *linear_create(const CustomOp *op, const Api *api, const KernelInfo *info, void **kernel) {
    (void)op;
    LinearKernel made = {.api = api};
    TRY(read_weights(api, info, &made.weights));
    TRY(ort_attribute_int(api, info, "terms", &made.terms));
    TRY(ort_attribute_int(api, info, "activation", &made.activation));
    TRY(ort_attribute_float(api, info, "epsilon", &made.epsilon));
    made.outliers = ort_attribute_float_or(api, info, "outliers", 0.0f); /* version 6 had none */
    const int64_t n = made.weights.n, activation = made.activation;
    if (made.terms < 1 || made.terms > MOST_TERMS) REFUSE("Linear: terms is 1 or 2");
    if (!(made.outliers >= 0)) REFUSE("Linear: outliers is 0 or more");
    if (!is_known(activation) || (activation && n % (is_gated(activation) ? 2 * LANES : LANES)))
        REFUSE("Linear: activation is 0 … 3 or 9 … 11, and N a multiple of 32 with one that is gated, of 16 with another");
    return keep(api, &made, sizeof made, kernel);
}

static Status *embedding_create(const CustomOp *op, const Api *api, const KernelInfo *info, void **kernel) {
    (void)op;
    LinearKernel made = {.api = api};
    TRY(read_weights(api, info, &made.weights));
    return keep(api, &made, sizeof made, kernel);
}

/* Units of weights (groups, or pairs with an activation) that stand side by side, for one thread, so that a core reads one
 * stream: it takes them from the front. Whoever has none left takes half of what another one has, from its end. */
typedef struct Region {
    _Alignas(64) atomic_ullong left; /* first unit, and in the upper half the one behind the last */
    atomic_int taken; /* by a thread as its own */
} Region;

typedef struct LinearWork {
    Linear layer;
    Rows rows[2]; /* shared, and that of outliers; not used where every thread quantizes for itself */
    const float *x, *norm;
    float epsilon;
    int64_t m, units; /* of rounding */
    int shared;
    int count; /* of regions */
    atomic_int came, failed; /* threads that took part, whether one found no memory */
    Region regions[REGIONS];
} LinearWork;

static atomic_int threads = 1; /* that were seen at one Linear, at most */
static _Thread_local int home; /* the region that this thread takes where it is free */

static int64_t one_size(int64_t m, const Linear *layer) { /* bytes of a Rows */
    const int64_t rows = m * layer->terms, k = layer->weights.k, blocks = k / layer->weights.block;
    return aligned_size(rows * k) + aligned_size(rows * blocks * 8) + aligned_size(rows * words_of(&layer->weights) * 8);
}

static size_t rows_size(int64_t m, const Linear *layer) { return (size_t)(one_size(m, layer) * (1 + has_outliers(layer))); }

static void rows_in(char *memory, int64_t m, const Linear *layer, Rows *rows) {
    const int64_t count = m * layer->terms, k = layer->weights.k, blocks = k / layer->weights.block;
    for (int i = 0; i < 1 + has_outliers(layer); i++, memory += one_size(m, layer)) {
        char *scales = memory + aligned_size(count * k), *marks = scales + aligned_size(count * blocks * 8);
        rows[i] = (Rows){(int8_t *)memory, (float *)scales, (int32_t *)(scales + count * blocks * 4),
                         zero_factor(&layer->weights), (uint64_t *)marks};
    }
}

static int quantize_rows(LinearWork *work, const Rows *rows, int64_t first, int64_t last) {
    const Weights *w = &work->layer.weights;
    float *space = scratch(SCRATCH_NORM, (size_t)(4 * w->k) * sizeof(float));
    if (!space) return 0;
    kernels->quantize(&work->layer, work->x, work->m, first, last, work->norm, work->epsilon, rows, space);
    return 1;
}

static void quantize_unit(void *data, size_t unit) {
    LinearWork *work = data;
    int64_t first = work->m * (int64_t)unit / work->units, last = work->m * ((int64_t)unit + 1) / work->units;
    if (!quantize_rows(work, work->rows, first, last)) work->failed = 1;
}

static Region *region_taken(LinearWork *work) { /* NULL: all are */
    for (int i = 0; i < work->count; i++) {
        Region *region = &work->regions[(home + i) % work->count];
        if (!atomic_load(&region->taken) && !atomic_exchange(&region->taken, 1)) return region;
    }
    return NULL;
}

/* Take units from the front of a region, a quarter of what it has, or from its end, half of that; 0: it has none. */
static int units_taken(Region *region, int front, int64_t *first, int64_t *last) {
    unsigned long long left = atomic_load(&region->left);
    for (;;) {
        const int64_t begin = (int64_t)(left & 0xFFFFFFFF), end = (int64_t)(left >> 32), rest = end - begin;
        if (rest <= 0) return 0;
        const int64_t count = front ? (rest + 3) / 4 : (rest + 1) / 2;
        *first = front ? begin : end - count;
        *last = *first + count;
        const int64_t now = front ? *last : begin, until = front ? end : *first;
        if (atomic_compare_exchange_weak(&region->left, &left, (unsigned long long)until << 32 | (unsigned long long)now)) return 1;
    }
}

static Region *region_left(LinearWork *work) { /* the one with most units; NULL: there are none */
    Region *most = NULL;
    int64_t largest = 0;
    for (int i = 0; i < work->count; i++) {
        const unsigned long long left = atomic_load(&work->regions[i].left);
        const int64_t rest = (int64_t)(left >> 32) - (int64_t)(left & 0xFFFFFFFF);
        if (rest > largest) largest = rest, most = &work->regions[i];
    }
    return most;
}

/* One thread's part of a Linear: what it gets until nothing is left. */
static void linear_part(void *data, size_t ticket) {
    (void)ticket;
    LinearWork *work = data;
    const int64_t step = is_gated(work->layer.activation) ? 2 : 1;
    int64_t first, last;
    if (!region_left(work)) return; /* so a thread gets beyond this once in a Linear */
    Rows own[2], *rows = work->rows;
    if (!work->shared) {
        void *memory = scratch(SCRATCH_ROWS, rows_size(work->m, &work->layer));
        if (!memory) { work->failed = 1; return; }
        rows = own;
        rows_in(memory, work->m, &work->layer, rows);
        if (!quantize_rows(work, rows, 0, work->m)) { work->failed = 1; return; }
    }
    atomic_fetch_add(&work->came, 1);
    Region *region = region_taken(work);
    if (region) home = (int)(region - work->regions);
    for (; region; region = region_taken(work))
        while (units_taken(region, 1, &first, &last))
            kernels->linear(&work->layer, rows, work->m, first * step, last * step);
    for (Region *region = region_left(work); region; region = region_left(work))
        if (units_taken(region, 0, &first, &last))
            kernels->linear(&work->layer, rows, work->m, first * step, last * step);
}

static Status *run(const Api *api, const Context *context, void (*work)(void *, size_t), int64_t total, void *data, int alone) {
    if (!alone) return ort_parallel(api, context, work, (size_t)total, data);
    for (int64_t i = 0; i < total; i++) work(data, (size_t)i);
    return NULL;
}

/* Cut units into regions of about equal size; returns how many. */
static int spread(Region *regions, int64_t units) {
    int64_t count = atomic_load(&threads);
    if (count > REGIONS) count = REGIONS;
    if (count > units) count = units;
    for (int64_t i = 0; i < count; i++) {
        regions[i].left = (unsigned long long)(units * (i + 1) / count) << 32 | (unsigned long long)(units * i / count);
        regions[i].taken = 0;
    }
    return (int)count;
}

static Status *linear_compute(void *kernel, Context *context) {
    const LinearKernel *self = kernel;
    const Api *api = self->api;
    Tensor x, weights, bias, norm, residual;
    TRY(input(api, context, 0, &x));
    TRY(input(api, context, 1, &weights));
    TRY(input(api, context, 2, &bias));
    TRY(input(api, context, 3, &norm));
    TRY(input(api, context, 4, &residual));
    const Weights *w = &self->weights;
    const int64_t outputs = is_gated(self->activation) ? w->n / 2 : w->n;
    const int64_t groups = groups_of(w), step = is_gated(self->activation) ? 2 : 1;
    LinearWork work;
    if (x.rank < 1 || x.dims[x.rank - 1] != w->k) REFUSE("Linear: X is not [..., K]");
    if (weights.count != groups * group_size(w)) REFUSE("Linear: the weights have another size");
    work.m = x.count / w->k;
    if (bias.data && bias.count != w->n) REFUSE("Linear: bias is not [N]");
    if (norm.data && norm.count != w->k) REFUSE("Linear: norm is not [K]");
    if (residual.data && residual.count != work.m * outputs) REFUSE("Linear: residual has another shape than Y");
    void *y;
    int64_t dims[MAX_RANK];
    memcpy(dims, x.dims, sizeof dims);
    dims[x.rank - 1] = outputs;
    TRY(output(api, context, 0, dims, x.rank, &y));
    if (!work.m) return NULL;
    work.layer = (Linear){*w, (int)self->terms, self->outliers, (int)self->activation, bias.data, residual.data, y};
    work.layer.weights.data = weights.data;
    work.x = x.data;
    work.norm = norm.data;
    work.epsilon = self->epsilon;
    work.count = spread(work.regions, groups / step);
    work.came = work.failed = 0;
    const int alone = work.m * w->n * w->k < INLINE_MACS;
    work.shared = work.m > SHARED_ROWS;
    Scratch taken = {0};
    Status *status = NULL;
    if (work.shared) {
        taken = take(rows_size(work.m, &work.layer));
        if (!taken.memory) return ort_status(api, STATUS_FAIL, "out of memory");
        rows_in(taken.memory, work.m, &work.layer, work.rows);
        work.units = work.m < PARALLEL_UNITS ? work.m : PARALLEL_UNITS;
        status = run(api, context, quantize_unit, work.units, &work, alone);
    }
    if (!status) status = run(api, context, linear_part, alone ? 1 : PIECES, &work, alone);
    if (work.shared) give_back(taken);
    if (work.came > atomic_load(&threads)) atomic_store(&threads, work.came);
    return !status && work.failed ? ort_status(api, STATUS_FAIL, "out of memory") : status;
}

static Status *embedding_compute(void *kernel, Context *context) {
    const LinearKernel *self = kernel;
    const Api *api = self->api;
    Tensor ids, weights;
    TRY(input(api, context, 0, &ids));
    TRY(input(api, context, 1, &weights));
    Weights w = self->weights;
    w.data = weights.data;
    if (weights.count != groups_of(&w) * group_size(&w)) REFUSE("Embedding: the weights have another size");
    if (ids.rank >= MAX_RANK) REFUSE("Embedding: rank above 7");
    ids.dims[ids.rank] = w.k;
    void *y;
    TRY(output(api, context, 0, ids.dims, ids.rank + 1, &y));
    for (int64_t i = 0; i < ids.count; i++) {
        int64_t id = ((const int64_t *)ids.data)[i];
        if (id < 0 || id >= w.n) REFUSE("Embedding: a token id is outside the vocabulary");
        kernels->dequantize(&w, id, (float *)y + i * w.k);
    }
    return NULL;
}

/* ---- LowRankAdapter ----------------------------------------------------------------------------------------------- */

#define MOST_PARTS 64
#define ADAPTER_SUMS 8 /* rows of a that are one piece of work */

typedef struct AdapterKernel {
    const Api *api;
} AdapterKernel;

typedef struct AdapterWork {
    Adapters d;
    int64_t starts[MOST_PARTS + 1], pieces[MOST_PARTS + 1]; /* of columns, before each part */
    int64_t blocks; /* of a batch's row */
    int64_t sums; /* pieces of the rows of a */
} AdapterWork;

static Status *adapter_create(const CustomOp *op, const Api *api, const KernelInfo *info, void **kernel) {
    (void)op, (void)info;
    AdapterKernel made = {.api = api};
    return keep(api, &made, sizeof made, kernel);
}

static void block_of(const AdapterWork *work, int64_t block, int64_t *batch, int64_t *first, int64_t *last) {
    *batch = block / work->blocks;
    *first = block % work->blocks * ADAPTER_ROWS;
    *last = *first + ADAPTER_ROWS < work->d.sequence ? *first + ADAPTER_ROWS : work->d.sequence;
}

static void hidden_unit(void *data, size_t unit) {
    const AdapterWork *work = data;
    int64_t batch, first, last, width = work->d.parts * work->d.rank;
    block_of(work, (int64_t)unit / work->sums, &batch, &first, &last);
    const int64_t from = (int64_t)unit % work->sums * ADAPTER_SUMS, to = from + ADAPTER_SUMS;
    kernels->adapter_hidden(&work->d, batch, first, last, from, to < width ? to : width);
}

static void add_unit(void *data, size_t unit) {
    const AdapterWork *work = data;
    const int64_t pieces = work->pieces[work->d.parts], piece = (int64_t)unit % pieces;
    int64_t batch, first, last, part = 0;
    block_of(work, (int64_t)unit / pieces, &batch, &first, &last);
    while (piece >= work->pieces[part + 1]) part++;
    const int64_t from = work->starts[part] + (piece - work->pieces[part]) * ADAPTER_COLUMNS, end = work->starts[part + 1];
    const int64_t to = from + ADAPTER_COLUMNS < end ? from + ADAPTER_COLUMNS : end;
    kernels->adapter_add(&work->d, batch, first, last, part, from, to);
}

static Status *adapter_compute(void *kernel, Context *context) {
    const Api *api = ((const AdapterKernel *)kernel)->api;
    Tensor base, x, ids, a, b, widths;
    Tensor *inputs[] = {&base, &x, &ids, &a, &b, &widths};
    for (size_t i = 0; i < sizeof inputs / sizeof *inputs; i++) TRY(input(api, context, i, inputs[i]));
    if (base.rank != 3 || x.rank != 3 || a.rank != 3 || b.rank != 3 || ids.rank != 1 || memcmp(base.dims, x.dims, 2 * sizeof(int64_t)))
        REFUSE("LowRankAdapter: wanted base [batch, sequence, N], x [batch, sequence, K], ids [batch] and matrices of rank 3");
    AdapterWork work = {.d = {.batch = x.dims[0], .sequence = x.dims[1], .k = x.dims[2], .n = base.dims[2],
                              .rank = b.dims[1], .parts = widths.count, .base = base.data, .x = x.data, .a = a.data,
                              .b = b.data, .ids = ids.data}};
    Adapters *d = &work.d;
    if (d->parts < 1 || d->parts > MOST_PARTS || d->rank < 1) REFUSE("LowRankAdapter: 1 to 64 parts, and a rank of 1 or more");
    if (a.dims[0] != b.dims[0] || a.dims[1] != d->parts * d->rank || a.dims[2] != d->k || b.dims[2] != d->n || ids.count != d->batch)
        REFUSE("LowRankAdapter: shapes of the layer and of the adapters do not agree");
    for (int64_t p = 0; p < d->parts; p++) {
        const int64_t width = ((const int64_t *)widths.data)[p];
        if (width < 1 || width > d->n - work.starts[p]) REFUSE("LowRankAdapter: widths do not add up to N");
        work.starts[p + 1] = work.starts[p] + width;
        work.pieces[p + 1] = work.pieces[p] + (width + ADAPTER_COLUMNS - 1) / ADAPTER_COLUMNS;
    }
    if (work.starts[d->parts] != d->n) REFUSE("LowRankAdapter: widths do not add up to N");
    int64_t chosen = 0;
    for (int64_t i = 0; i < d->batch; i++) {
        if (d->ids[i] < 0 || d->ids[i] >= a.dims[0]) REFUSE("LowRankAdapter: there is no such adapter");
        chosen += d->ids[i] != 0;
    }
    void *y;
    TRY(output(api, context, 0, base.dims, 3, &y));
    if (!base.count) return NULL;
    if (!chosen) {
        if (y != base.data) memcpy(y, base.data, (size_t)base.count * sizeof(float));
        return NULL;
    }
    d->y = y;
    d->starts = work.starts;
    work.blocks = (d->sequence + ADAPTER_ROWS - 1) / ADAPTER_ROWS;
    work.sums = (d->parts * d->rank + ADAPTER_SUMS - 1) / ADAPTER_SUMS;
    const Scratch taken = take((size_t)(d->batch * d->sequence * d->parts * d->rank) * sizeof(float));
    d->hidden = taken.memory;
    if (!d->hidden) return ort_status(api, STATUS_FAIL, "out of memory");
    const int64_t blocks = d->batch * work.blocks;
    const int alone = chosen * d->sequence * d->rank * (d->parts * d->k + d->n) < INLINE_MACS;
    Status *status = run(api, context, hidden_unit, blocks * work.sums, &work, alone);
    if (!status) status = run(api, context, add_unit, blocks * work.pieces[d->parts], &work, alone);
    give_back(taken);
    return status;
}

/* ---- GroupQueryAttention ------------------------------------------------------------------------------------------ */

typedef struct AttentionKernel {
    const Api *api;
    int int8, slots;
    int64_t heads, kv_heads, window, interleaved, per_channel;
    int64_t dim, key_slot, value_slot, turn_keys, turn_values; /* of slots */
    float scale, softcap, epsilon;
} AttentionKernel;

static Status *attention_create(const CustomOp *op, const Api *api, const KernelInfo *info, void **kernel) {
    AttentionKernel made = {.api = api, .slots = strcmp(op->name(op), "GroupQueryAttentionSlots") == 0};
    made.int8 = made.slots || strcmp(op->name(op), "GroupQueryAttentionInt8") == 0;
    TRY(ort_attribute_int(api, info, "num_heads", &made.heads));
    TRY(ort_attribute_int(api, info, "kv_num_heads", &made.kv_heads));
    TRY(ort_attribute_int(api, info, "local_window_size", &made.window));
    TRY(ort_attribute_int(api, info, "rotary_interleaved", &made.interleaved));
    TRY(ort_attribute_int(api, info, "per_channel", &made.per_channel));
    TRY(ort_attribute_float(api, info, "scale", &made.scale));
    TRY(ort_attribute_float(api, info, "softcap", &made.softcap));
    TRY(ort_attribute_float(api, info, "qk_norm_epsilon", &made.epsilon));
    if (made.heads < 1 || made.kv_heads < 1 || made.heads % made.kv_heads)
        REFUSE("GroupQueryAttention: kv_num_heads must divide num_heads");
    if (made.slots) {
        TRY(ort_attribute_int(api, info, "head_dim", &made.dim));
        TRY(ort_attribute_int(api, info, "key_slot", &made.key_slot));
        TRY(ort_attribute_int(api, info, "value_slot", &made.value_slot));
        TRY(ort_attribute_int(api, info, "turn_keys", &made.turn_keys));
        TRY(ort_attribute_int(api, info, "turn_values", &made.turn_values));
        if (made.key_slot < SLOT_STATIC || made.key_slot > SLOT_INT4 || made.value_slot < SLOT_STATIC || made.value_slot > SLOT_INT4)
            REFUSE("GroupQueryAttentionSlots: key_slot and value_slot are 0 … 2");
        if ((made.key_slot == SLOT_INT4 || made.value_slot == SLOT_INT4) && made.dim % 32)
            REFUSE("GroupQueryAttentionSlots: 4 bits need a head_dim that is a multiple of 32");
        if ((made.turn_keys && made.key_slot == SLOT_STATIC) || (made.turn_values && made.value_slot == SLOT_STATIC))
            REFUSE("GroupQueryAttentionSlots: what has static scales is not turned");
    }
    return keep(api, &made, sizeof made, kernel);
}

typedef struct AttentionWork {
    Attention a;
    int64_t pieces; /* of a row's tokens */
    int64_t piece;  /* tokens of one */
    atomic_int failed;
} AttentionWork;

static void split(const AttentionWork *work, size_t unit, int64_t *batch, int64_t *head, int64_t *first, int64_t *last) {
    const int64_t row = (int64_t)unit / work->pieces;
    *batch = row / work->a.kv_heads;
    *head = row % work->a.kv_heads;
    *first = (int64_t)unit % work->pieces * work->piece;
    *last = *first + work->piece < work->a.sequence ? *first + work->piece : work->a.sequence;
}

static void prepare_unit(void *data, size_t unit) {
    int64_t batch, head, first, last;
    split(data, unit, &batch, &head, &first, &last);
    kernels->attention_prepare(&((AttentionWork *)data)->a, batch, head, first, last);
}

static void attention_unit(void *data, size_t unit) {
    int64_t batch, head, first, last;
    AttentionWork *work = data;
    split(work, unit, &batch, &head, &first, &last);
    if (!kernels->attention(&work->a, batch, head, first, last)) work->failed = 1;
}

static void whole_unit(void *data, size_t unit) { /* one token a row: no other unit's keys are needed */
    prepare_unit(data, unit);
    attention_unit(data, unit);
}

static Status *attention_compute(void *kernel, Context *context) {
    const AttentionKernel *self = kernel;
    const Api *api = self->api;
    Tensor qkv, key, value, lengths, cosine, sine, key_scale, value_scale, query_norm, key_norm, sink;
    Tensor *inputs[] = {&qkv, &key, &value, &lengths, &cosine, &sine, &key_scale, &value_scale, &query_norm, &key_norm, &sink};
    for (size_t i = 0; i < sizeof inputs / sizeof *inputs; i++) TRY(input(api, context, i, inputs[i]));
    if (qkv.rank != 3 || key.rank != 4 || value.rank != 4 || memcmp(key.dims, value.dims, (self->slots ? 3 : 4) * sizeof(int64_t)))
        REFUSE("GroupQueryAttention: wanted qkv [batch, sequence, width] and equal caches [batch, kv_heads, capacity, dim]");
    AttentionWork work = {.a = {
        .batch = qkv.dims[0], .sequence = qkv.dims[1], .heads = self->heads, .kv_heads = self->kv_heads,
        .dim = self->slots ? self->dim : key.dims[3], .slots = self->slots, .key_slot = (int)self->key_slot,
        .value_slot = (int)self->value_slot, .key_size = key.dims[3], .value_size = value.dims[3],
        .turn_keys = (int)self->turn_keys, .turn_values = (int)self->turn_values, .capacity = key.dims[2], .qkv = qkv.data, .lengths = lengths.data, .int8 = self->int8,
        .cosine = cosine.data, .sine = sine.data, .interleaved = (int)self->interleaved,
        .key_scale = key_scale.data, .value_scale = value_scale.data, .per_channel = (int)self->per_channel,
        .query_norm = query_norm.data, .key_norm = key_norm.data, .epsilon = self->epsilon, .scale = self->scale,
        .softcap = self->softcap, .window = self->window, .sink = sink.data}};
    Attention *a = &work.a;
    if (a->dim < 16 || a->dim % 16 || a->dim > LARGEST_DIM) REFUSE("GroupQueryAttention: head_dim must be a multiple of 16, at most 1024");
    if (qkv.dims[2] != (a->heads + 2 * a->kv_heads) * a->dim || key.dims[0] != a->batch || key.dims[1] != a->kv_heads || lengths.count != a->batch)
        REFUSE("GroupQueryAttention: shapes of qkv, caches and seqlens_k do not agree");
    if (!cosine.data != !sine.data || (cosine.data && (cosine.rank != 2 || sine.count != cosine.count || 2 * cosine.dims[1] > a->dim)))
        REFUSE("GroupQueryAttention: cos_cache and sin_cache are not [positions, at most head_dim/2]");
    if (cosine.data) a->rotary = 2 * cosine.dims[1];
    const int64_t scales = a->per_channel ? a->kv_heads * a->dim : 1;
    const int key_scaled = a->int8 && (!a->slots || a->key_slot == SLOT_STATIC);
    const int value_scaled = a->int8 && (!a->slots || a->value_slot == SLOT_STATIC);
    if ((key_scaled && (key_scale.count != scales || !key_scale.data)) || (value_scaled && (value_scale.count != scales || !value_scale.data)))
        REFUSE("GroupQueryAttention: an int8 cache needs k_scale and v_scale, one number or one a channel");
    if (a->slots && (a->key_size != slot_size(a->key_slot, a->dim) || a->value_size != slot_size(a->value_slot, a->dim)))
        REFUSE("GroupQueryAttentionSlots: the slots of a cache have another size");
    if ((a->query_norm && query_norm.count != a->dim) || (a->key_norm && key_norm.count != a->dim) || (a->sink && sink.count != a->heads))
        REFUSE("GroupQueryAttention: norms are [head_dim], sinks [num_heads]");
    for (int64_t b = 0; b < a->batch; b++) {
        int64_t total = (int64_t)a->lengths[b] + 1;
        if (total < a->sequence || total > a->capacity || (cosine.data && total > cosine.dims[0]))
            REFUSE("GroupQueryAttention: seqlens_k is outside the cache or the rotary tables");
    }
    void *y, *present_key, *present_value;
    int64_t dims[3] = {a->batch, a->sequence, a->heads * a->dim};
    TRY(output(api, context, 0, dims, 3, &y));
    TRY(output(api, context, 1, key.dims, 4, &present_key));
    TRY(output(api, context, 2, value.dims, 4, &present_value));
    const size_t bytes = a->int8 ? 1 : 4; /* of an element */
    if (present_key != key.data) memcpy(present_key, key.data, (size_t)key.count * bytes);
    if (present_value != value.data) memcpy(present_value, value.data, (size_t)value.count * bytes);
    if (!a->batch || !a->sequence) return NULL;
    a->y = y;
    a->key = present_key;
    a->value = present_value;
    const Scratch taken = take((size_t)(a->batch * a->sequence * a->heads * a->dim) * sizeof(float));
    a->query = taken.memory;
    if (!a->query) return ort_status(api, STATUS_FAIL, "out of memory");
    int64_t keys = 0;
    for (int64_t b = 0; b < a->batch; b++) keys += a->lengths[b] + 1;
    /* Norms, rotary embedding and softmax make a head dearer than its multiplications: 40 µs where a layer takes 10. */
    const int alone = keys * a->sequence * a->heads * a->dim * 2 < INLINE_MACS / 8;
    work.piece = a->sequence < 64 ? a->sequence : 64;
    work.pieces = (a->sequence + work.piece - 1) / work.piece;
    const int64_t units = a->batch * a->kv_heads * work.pieces;
    Status *status;
    if (work.pieces == 1) {
        status = run(api, context, whole_unit, units, &work, alone);
    } else {
        status = run(api, context, prepare_unit, units, &work, alone);
        if (!status) status = run(api, context, attention_unit, units, &work, alone);
    }
    give_back(taken);
    return !status && work.failed ? ort_status(api, STATUS_FAIL, "out of memory") : status;
}

/* ---- LatentAttention ---------------------------------------------------------------------------------------------- */

#define HEADS_OF_UNIT 4 /* that a unit reads the cache for: all of them each block, while it is near */

typedef struct LatentKernel {
    const Api *api;
    int int8;
    int64_t heads, window;
    float scale, softcap;
} LatentKernel;

static Status *latents_create(const CustomOp *op, const Api *api, const KernelInfo *info, void **kernel) {
    LatentKernel made = {.api = api, .int8 = strcmp(op->name(op), "LatentAttentionInt8") == 0};
    TRY(ort_attribute_int(api, info, "num_heads", &made.heads));
    TRY(ort_attribute_int(api, info, "window", &made.window));
    TRY(ort_attribute_float(api, info, "scale", &made.scale));
    TRY(ort_attribute_float(api, info, "softcap", &made.softcap));
    if (made.heads < 1) REFUSE("LatentAttention: num_heads must be positive");
    return keep(api, &made, sizeof made, kernel);
}

typedef struct LatentWork {
    Latents a;
    int64_t groups; /* of heads, for rows that do not expand latents; 0: all do */
    atomic_int failed;
} LatentWork;

static void latents_unit(void *data, size_t unit) {
    LatentWork *work = data;
    const Latents *a = &work->a;
    int64_t left = (int64_t)unit - work->groups;
    int done = 1;
    if (left < 0) {
        const int64_t first = (int64_t)unit * HEADS_OF_UNIT, last = first + HEADS_OF_UNIT;
        done = kernels->latent_heads(a, first, last < a->heads ? last : a->heads);
    } else {
        int64_t batch = 0;
        for (;; batch++)
            if (expands(a, batch) && (left -= a->heads) < 0) break;
        done = kernels->latent_expanded(a, batch, left + a->heads);
    }
    if (!done) work->failed = 1;
}

static Status *latents_compute(void *kernel, Context *context) {
    const LatentKernel *self = kernel;
    const Api *api = self->api;
    Tensor q, latent, up, cache, past, scale, sink;
    Tensor *inputs[] = {&q, &latent, &up, &cache, &past, &scale, &sink};
    for (size_t i = 0; i < sizeof inputs / sizeof *inputs; i++) TRY(input(api, context, i, inputs[i]));
    if (q.rank != 3 || latent.rank != 3 || up.rank != 2 || cache.rank != 4 || cache.dims[1] != 1)
        REFUSE("LatentAttention: wanted q and latent [batch, sequence, width], up [rows, rank], a cache [batch, 1, capacity, width]");
    LatentWork work = {.a = {
        .batch = q.dims[0], .sequence = q.dims[1], .heads = self->heads, .capacity = cache.dims[2], .rank = up.dims[1],
        .rotary = cache.dims[3] - up.dims[1], .q = q.data, .past = past.data, .up = up.data, .sink = sink.data,
        .scale = self->scale, .softcap = self->softcap, .window = self->window}};
    Latents *a = &work.a;
    if (q.dims[2] % a->heads || up.dims[0] % a->heads) REFUSE("LatentAttention: num_heads must divide q and up");
    a->plain = q.dims[2] / a->heads - a->rotary;
    a->values = up.dims[0] / a->heads - a->plain;
    if (a->rank < 1 || a->rotary < 1 || a->plain < 1 || a->values < 1 || a->rank % 16 || a->rotary % 16 || a->plain % 16 || a->values % 16)
        REFUSE("LatentAttention: channels of latents, keys and values must be multiples of 16");
    if (latent.dims[0] != a->batch || latent.dims[1] != a->sequence || latent.dims[2] != cache.dims[3] || cache.dims[0] != a->batch || past.count != a->batch)
        REFUSE("LatentAttention: shapes of q, latent, cache and past_lengths do not agree");
    if (self->int8) {
        if (!scale.data || scale.rank != 2 || scale.dims[0] != up.dims[0] || scale.dims[1] < 1 || a->rank % scale.dims[1] || a->rank / scale.dims[1] % 16)
            REFUSE("LatentAttentionInt8: up_scale is not [rows, blocks], with blocks of a multiple of 16 that divide the rank");
        a->up_scale = scale.data;
        a->block = a->rank / scale.dims[1];
    }
    if (a->sink && sink.count != a->heads) REFUSE("LatentAttention: sinks are [num_heads]");
    for (int64_t b = 0; b < a->batch; b++)
        if (a->past[b] < 0 || a->past[b] + a->sequence > a->capacity) REFUSE("LatentAttention: past_lengths is outside the cache");
    void *y, *present;
    int64_t dims[3] = {a->batch, a->sequence, a->heads * a->values};
    TRY(output(api, context, 0, dims, 3, &y));
    TRY(output(api, context, 1, cache.dims, 4, &present));
    if (present != cache.data) memcpy(present, cache.data, (size_t)cache.count * sizeof(float));
    if (!a->batch || !a->sequence) return NULL;
    a->y = y;
    a->cache = present;
    const int64_t width = a->rank + a->rotary;
    int64_t expanding = 0;
    double work_of = 0; /* multiplications */
    for (int64_t b = 0; b < a->batch; b++) {
        memcpy(a->cache + (b * a->capacity + a->past[b]) * width, (const float *)latent.data + b * a->sequence * width,
               (size_t)(a->sequence * width) * sizeof(float));
        expanding += expands(a, b);
        work_of += (double)a->heads * (double)(a->sequence * width) * (double)(a->past[b] + a->sequence + a->plain + a->values);
    }
    work.groups = expanding < a->batch ? (a->heads + HEADS_OF_UNIT - 1) / HEADS_OF_UNIT : 0;
    Status *status = run(api, context, latents_unit, work.groups + expanding * a->heads, &work, work_of < INLINE_MACS);
    return !status && work.failed ? ort_status(api, STATUS_FAIL, "out of memory") : status;
}

/* ---- EncoderAttention --------------------------------------------------------------------------------------------- */

typedef struct EncoderKernel {
    const Api *api;
    int64_t heads, kv_heads, left, right, packed;
    float scale, softcap;
} EncoderKernel;

static Status *encoder_create(const CustomOp *op, const Api *api, const KernelInfo *info, void **kernel) {
    (void)op;
    EncoderKernel made = {.api = api};
    TRY(ort_attribute_int(api, info, "num_heads", &made.heads));
    TRY(ort_attribute_int(api, info, "kv_num_heads", &made.kv_heads));
    TRY(ort_attribute_int(api, info, "left", &made.left));
    TRY(ort_attribute_int(api, info, "right", &made.right));
    TRY(ort_attribute_float(api, info, "scale", &made.scale));
    TRY(ort_attribute_float(api, info, "softcap", &made.softcap));
    made.packed = ort_attribute_int_or(api, info, "packed", 0); /* version 8 had none */
    if (made.heads < 1 || made.kv_heads < 1 || made.heads % made.kv_heads) REFUSE("EncoderAttention: kv_num_heads must divide num_heads");
    return keep(api, &made, sizeof made, kernel);
}

typedef struct EncoderWork {
    Encoders a;
    atomic_int failed;
} EncoderWork;

static void encoder_unit(void *data, size_t unit) {
    EncoderWork *work = data;
    const int64_t heads = work->a.heads;
    if (!kernels->encoder_head(&work->a, (int64_t)unit / heads, (int64_t)unit % heads)) work->failed = 1;
}

static Status *encoder_compute(void *kernel, Context *context) {
    const EncoderKernel *self = kernel;
    const Api *api = self->api;
    Tensor q, k, v, starts;
    Tensor *inputs[] = {&q, &k, &v, &starts};
    for (size_t i = 0; i < sizeof inputs / sizeof *inputs; i++) TRY(input(api, context, i, inputs[i]));
    if (q.rank != 3 || k.rank != 3 || v.rank != 3 || starts.rank != 1 || starts.count < 1)
        REFUSE("EncoderAttention: wanted q, k and v [1, tokens, width], sequence_starts [sequences + 1]");
    const int64_t tokens = q.dims[1];
    if (q.dims[0] != 1 || k.dims[0] != 1 || v.dims[0] != 1 || k.dims[1] != tokens || v.dims[1] != tokens)
        REFUSE("EncoderAttention: q, k and v have one row, of as many tokens each");
    EncoderWork work = {.a = {
        .sequences = starts.count - 1, .heads = self->heads, .kv_heads = self->kv_heads, .dim = q.dims[2] / self->heads,
        .values = v.dims[2] / self->kv_heads, .left = self->left, .right = self->right, .q = q.data, .k = k.data,
        .v = v.data, .starts = starts.data, .scale = self->scale, .softcap = self->softcap}};
    Encoders *a = &work.a;
    a->q_pitch = q.dims[2], a->k_pitch = k.dims[2], a->v_pitch = v.dims[2];
    int64_t width = a->heads * a->dim;
    if (self->packed) { /* all three are one tensor, of queries, keys and values */
        a->dim = a->values = q.dims[2] / (a->heads + 2 * a->kv_heads);
        a->k = a->q + a->heads * a->dim, a->v = a->k + a->kv_heads * a->dim;
        width = (a->heads + 2 * a->kv_heads) * a->dim;
    }
    if (a->dim < 1 || a->values < 1 || q.dims[2] != width || k.dims[2] != (self->packed ? width : a->kv_heads * a->dim) ||
        v.dims[2] != (self->packed ? width : a->kv_heads * a->values) || (self->packed && (k.data != q.data || v.data != q.data)))
        REFUSE("EncoderAttention: widths of q, k and v do not agree with the numbers of heads");
    double work_of = 0; /* multiplications */
    for (int64_t s = 0; s < a->sequences; s++) {
        const double n = (double)a->starts[s + 1] - a->starts[s];
        if (n < 0) REFUSE("EncoderAttention: sequence_starts must ascend");
        work_of += n * n * (double)(a->heads * (a->dim + a->values));
    }
    if (a->starts[0] != 0 || a->starts[a->sequences] != tokens) REFUSE("EncoderAttention: sequence_starts must go from 0 to the number of tokens");
    void *y;
    const int64_t dims[3] = {1, tokens, a->heads * a->values};
    TRY(output(api, context, 0, dims, 3, &y));
    a->y = y;
    if (!tokens) return NULL;
    Status *status = run(api, context, encoder_unit, a->sequences * a->heads, &work, work_of < INLINE_MACS);
    return !status && work.failed ? ort_status(api, STATUS_FAIL, "out of memory") : status;
}

/* ---- AllReduce, AllGather --------------------------------------------------------------------------------------- */

typedef struct CollectiveKernel {
    const Api *api;
    int64_t ranks;
    int gather;
} CollectiveKernel;

static Status *collective_create(const Api *api, const KernelInfo *info, void **kernel, int gather) {
    CollectiveKernel made = {.api = api, .gather = gather};
    TRY(ort_attribute_int(api, info, "ranks", &made.ranks));
    if (made.ranks < 2 || made.ranks > MOST_RANKS) REFUSE("AllReduce, AllGather: ranks is 2 … 64");
    return keep(api, &made, sizeof made, kernel);
}

static Status *reduce_create(const CustomOp *op, const Api *api, const KernelInfo *info, void **kernel) {
    (void)op;
    return collective_create(api, info, kernel, 0);
}

static Status *gather_create(const CustomOp *op, const Api *api, const KernelInfo *info, void **kernel) {
    (void)op;
    return collective_create(api, info, kernel, 1);
}

#include "collectives.inc"
#include "nccl.inc"

/* ---- registration ------------------------------------------------------------------------------------------------- */

typedef struct Operator {
    CustomOp op;
    const char *name;
    const int *inputs, *outputs; /* element types; optional inputs are negative */
    size_t input_count, output_count;
} Operator;

static const char *op_name(const CustomOp *op) { return ((const Operator *)op)->name; }
static const char *op_provider(const CustomOp *op) { (void)op; return NULL; }
static int op_input_type(const CustomOp *op, size_t i) { return abs(((const Operator *)op)->inputs[i]); }
static size_t op_input_count(const CustomOp *op) { return ((const Operator *)op)->input_count; }
static int op_output_type(const CustomOp *op, size_t i) { return ((const Operator *)op)->outputs[i]; }
static size_t op_output_count(const CustomOp *op) { return ((const Operator *)op)->output_count; }
static void op_destroy(void *kernel) { free(kernel); }
static int op_input_characteristic(const CustomOp *op, size_t i) { return ((const Operator *)op)->inputs[i] < 0 ? OPTIONAL : REQUIRED; }
static int op_output_characteristic(const CustomOp *op, size_t i) { (void)op; (void)i; return REQUIRED; }
static int op_zero(const CustomOp *op, size_t i) { (void)op; (void)i; return 0; }
static int op_one(const CustomOp *op) { (void)op; return 1; }
static int op_last_version(const CustomOp *op) { (void)op; return INT32_MAX; }

#define OPERATOR(NAME, INPUTS, OUTPUTS, CREATE, COMPUTE) ON_PROVIDER(op_provider, NAME, INPUTS, OUTPUTS, CREATE, COMPUTE)
#define ON_PROVIDER(PROVIDER, NAME, INPUTS, OUTPUTS, CREATE, COMPUTE)                                                 \
    {.op = {.version = ORT_API_VERSION, .name = op_name, .provider = PROVIDER, .input_type = op_input_type,       \
            .input_count = op_input_count, .output_type = op_output_type, .output_count = op_output_count,           \
            .destroy = op_destroy, .input_characteristic = op_input_characteristic,                                  \
            .output_characteristic = op_output_characteristic, .input_memory = op_zero,                              \
            .variadic_input_arity = op_one, .variadic_input_homogeneity = op_one, .variadic_output_arity = op_one,   \
            .variadic_output_homogeneity = op_one, .create_v2 = CREATE, .compute_v2 = COMPUTE,                       \
            .start_version = op_one, .end_version = op_last_version},                                                \
     .name = NAME, .inputs = INPUTS, .outputs = OUTPUTS, .input_count = sizeof INPUTS / sizeof *INPUTS,              \
     .output_count = sizeof OUTPUTS / sizeof *OUTPUTS}

static const int linear_inputs[] = {TYPE_FLOAT, TYPE_UINT8, -TYPE_FLOAT, -TYPE_FLOAT, -TYPE_FLOAT};
static const int linear_outputs[] = {TYPE_FLOAT};
static const int embedding_inputs[] = {TYPE_INT64, TYPE_UINT8};
static const int adapter_inputs[] = {TYPE_FLOAT, TYPE_FLOAT, TYPE_INT64, TYPE_FLOAT, TYPE_FLOAT, TYPE_INT64};
#define ATTENTION_INPUTS(CACHE)                                                                                       \
    {TYPE_FLOAT, CACHE, CACHE, TYPE_INT32, -TYPE_FLOAT, -TYPE_FLOAT, -TYPE_FLOAT, -TYPE_FLOAT, -TYPE_FLOAT,          \
     -TYPE_FLOAT, -TYPE_FLOAT}
static const int attention_inputs[] = ATTENTION_INPUTS(TYPE_FLOAT), attention8_inputs[] = ATTENTION_INPUTS(TYPE_INT8);
static const int slots_inputs[] = ATTENTION_INPUTS(TYPE_UINT8), slots_outputs[] = {TYPE_FLOAT, TYPE_UINT8, TYPE_UINT8};
#define LATENT_INPUTS(UP) {TYPE_FLOAT, TYPE_FLOAT, UP, TYPE_FLOAT, TYPE_INT32, -TYPE_FLOAT, -TYPE_FLOAT}
static const int latents_inputs[] = LATENT_INPUTS(TYPE_FLOAT), latents8_inputs[] = LATENT_INPUTS(TYPE_INT8);
static const int latents_outputs[] = {TYPE_FLOAT, TYPE_FLOAT};
static const int attention_outputs[] = {TYPE_FLOAT, TYPE_FLOAT, TYPE_FLOAT};
static const int attention8_outputs[] = {TYPE_FLOAT, TYPE_INT8, TYPE_INT8};

static const int encoder_inputs[] = {TYPE_FLOAT, TYPE_FLOAT, TYPE_FLOAT, TYPE_INT32};
static const int collective_inputs[] = {TYPE_FLOAT};

static Operator operators[] = {
#ifdef __linux__
    OPERATOR("AllReduce", collective_inputs, linear_outputs, reduce_create, collective_compute),
    OPERATOR("AllGather", collective_inputs, linear_outputs, gather_create, collective_compute),
#endif
    OPERATOR("Linear", linear_inputs, linear_outputs, linear_create, linear_compute),
    OPERATOR("Embedding", embedding_inputs, linear_outputs, embedding_create, embedding_compute),
    OPERATOR("LowRankAdapter", adapter_inputs, linear_outputs, adapter_create, adapter_compute),
    OPERATOR("GroupQueryAttention", attention_inputs, attention_outputs, attention_create, attention_compute),
    OPERATOR("GroupQueryAttentionInt8", attention8_inputs, attention8_outputs, attention_create, attention_compute),
    OPERATOR("GroupQueryAttentionSlots", slots_inputs, slots_outputs, attention_create, attention_compute),
    OPERATOR("LatentAttention", latents_inputs, latents_outputs, latents_create, latents_compute),
    OPERATOR("EncoderAttention", encoder_inputs, linear_outputs, encoder_create, encoder_compute),
    OPERATOR("LatentAttentionInt8", latents8_inputs, latents_outputs, latents_create, latents_compute),
};

static const int any_type[] = {TYPE_ANY}; /* what is made has the type of what is read */
static Operator cuda_operators[] = {
    ON_PROVIDER(nccl_provider, "AllReduce", any_type, any_type, reduce_create, nccl_compute),
    ON_PROVIDER(nccl_provider, "AllGather", any_type, any_type, gather_create, nccl_compute),
};

#if HAS_NEON
/* Say whether the processor has dot products (FEAT_DotProd). */
static int has_dot_products(void) {
#if defined(__ARM_FEATURE_DOTPROD)
    return 1; /* all of the library needs them: a processor of Apple, or by the compiler's flags */
#elif defined(__linux__)
    return (getauxval(AT_HWCAP) & 1UL << 20) != 0; /* HWCAP_ASIMDDP */
#else
    return 0;
#endif
}
#endif

static const Kernels *supported(const char *name) {
    const Kernels *found = &kernels_generic;
    if (name && !strcmp(name, found->name)) return found;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        found = &kernels_avx2;
        if (name && !strcmp(name, found->name)) return found;
    }
    if (found != &kernels_generic && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni")) {
        found = &kernels_avx512vnni;
        if (name && !strcmp(name, found->name)) return found;
    }
    if (found == &kernels_avx512vnni && __builtin_cpu_supports("avx512bf16")) {
        found = &kernels_avx512bf16;
        if (name && !strcmp(name, found->name)) return found;
    }
#elif HAS_NEON
    if (has_dot_products()) {
        found = &kernels_neon;
        if (name && !strcmp(name, found->name)) return found;
    }
#endif
    return name ? NULL : found;
}

#define EXPORT __attribute__((visibility("default")))

/* `VERSION` of llmforge/native/__init__.py, which tells a library that was compiled from older sources by it. */
EXPORT int64_t llmforge_version(void) { return 10; }

/* Choose the kernels of an instruction set by name, NULL: the best. Returns the name, or NULL where it cannot run here. */
EXPORT const char *llmforge_kernels(const char *name) {
    const Kernels *chosen = supported(name);
    if (chosen) kernels = chosen;
    return chosen ? chosen->name : NULL;
}

/* Round a matrix. Returns 1; 0 where it holds NaN or infinity; -1 where there is no memory. */
EXPORT int llmforge_round(const Rounding *rounding) {
    float *row = malloc((size_t)(rounding->k ? rounding->k : 1) * sizeof *row);
    if (!row) return -1;
    int finite = (kernels ? kernels : supported(NULL))->round(rounding, row);
    free(row);
    return finite;
}

/* Pack `count` pairs of 4-bit codes into bytes, the first of each in the low half. */
EXPORT void llmforge_pack(const uint8_t *codes, int64_t count, uint8_t *packed) {
    (kernels ? kernels : supported(NULL))->pack(codes, count, packed);
}

/* Choose codes of a trellis of 4 or 5 bits; see `Kernels`. */
EXPORT void llmforge_nearest_levels(const float *values, const float *weights, int64_t n, int64_t k, int bits, uint8_t *codes) {
    (kernels ? kernels : supported(NULL))->nearest_levels(values, weights, n, k, bits, codes);
}

/* Sampling; see `Kernels`. */
EXPORT void llmforge_draw_heads(const Heads *heads) { (kernels ? kernels : supported(NULL))->draw_heads(heads); }

EXPORT int64_t llmforge_draw_block(const float *logits, int64_t count, float best, float least, const Draw *draw) {
    return (kernels ? kernels : supported(NULL))->draw_block(logits, count, best, least, draw);
}

EXPORT int64_t llmforge_draw_row(const LogitRow *row) { return (kernels ? kernels : supported(NULL))->draw_row(row); }

EXPORT int64_t llmforge_largest(const float *x, int64_t n, int64_t count, int64_t *ids) {
    return (kernels ? kernels : supported(NULL))->largest(x, n, count, ids);
}

EXPORT double llmforge_sum_exponentials(const float *x, int64_t count, float best) {
    return (kernels ? kernels : supported(NULL))->sum_exponentials(x, count, best);
}

EXPORT Status *RegisterCustomOps(SessionOptions *options, const ApiBase *base) {
    static Domain *domain, *cuda_domain; /* shared by all sessions of the process, and never released */
    const Api *api = base->get_api(ORT_API_VERSION);
    if (!api) abort(); /* older than 1.17: there is no table to report an error with */
    if (!kernels) kernels = supported(NULL);
    if (!domain) {
        TRY(ort_domain(api, DOMAIN, &domain));
        for (size_t i = 0; i < sizeof operators / sizeof *operators; i++) TRY(ort_domain_add(api, domain, &operators[i].op));
    }
    TRY(ort_use_domain(api, options, domain));
    if (!nccl.communicator) return NULL;
    if (!cuda_domain) {
        TRY(ort_domain(api, CUDA_DOMAIN, &cuda_domain));
        for (size_t i = 0; i < sizeof cuda_operators / sizeof *cuda_operators; i++)
            TRY(ort_domain_add(api, cuda_domain, &cuda_operators[i].op));
    }
    return ort_use_domain(api, options, cuda_domain);
}
