/* Runs the kernels of one instruction set on cases from a file and writes what they give to another, without Python or
 * ONNX Runtime: driver NAME CASES RESULTS. Ends with 3 where this processor cannot run them.
 *
 * A case: its kind, the number of its integers, these, the number of its arrays, and of each its bytes (-1: there is none)
 * and these; numbers are int64. A result: the bytes of each array that a case gives, in front of each how many. Every
 * array ends at a page that nobody may touch, scratch memory too (as far as its alignment lets it), and memory is filled
 * with NaN: what is read beyond an end ends the driver, and what is read but was never written shows. */
#include <sys/mman.h>
#include <unistd.h>

#define scratch operators_scratch
#include "../../llmforge/native/operators.c"
#undef scratch

enum { LINEAR, EMBEDDING, ATTENTION, ROUND, PACK, SLOTS };
enum { MOST = 32 };

/* Memory of the case at hand, filled with bytes 255 (NaN), with a page behind it that nobody may touch. */
static struct { char *start; size_t size; } mapped[4096];
static int mappings;

static void *aligned(size_t size, size_t alignment) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE), whole = (size + alignment + page - 1) / page * page;
    char *start = mmap(NULL, whole + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start == MAP_FAILED || mappings == 4096 || mprotect(start + whole, page, PROT_NONE)) exit(4);
    mapped[mappings].start = start, mapped[mappings++].size = whole + page;
    memset(start, 0xFF, whole);
    return start + (whole - size) / alignment * alignment;
}

static void *allocated(size_t size) { return aligned(size, size % 4 == 0 ? 4 : size % 2 == 0 ? 2 : 1); }

static void release(void) {
    while (mappings--) munmap(mapped[mappings].start, mapped[mappings].size);
    mappings = 0;
}

void *scratch(int slot, size_t size) {
    (void)slot;
    return aligned(size, 64);
}

typedef struct Case {
    int64_t kind, number[MOST], size[MOST];
    void *array[MOST];
} Case;

static int64_t whole(FILE *file) {
    int64_t number;
    if (fread(&number, sizeof number, 1, file) != 1) exit(5);
    return number;
}

static int next_case(FILE *file, Case *c) {
    memset(c, 0, sizeof *c);
    if (fread(&c->kind, sizeof c->kind, 1, file) != 1) return 0;
    const int64_t numbers = whole(file);
    if (numbers > MOST) exit(5);
    for (int64_t i = 0; i < numbers; i++) c->number[i] = whole(file);
    const int64_t arrays = whole(file);
    if (arrays > MOST) exit(5);
    for (int64_t i = 0; i < arrays; i++) {
        c->size[i] = whole(file);
        if (c->size[i] < 0) continue;
        c->array[i] = allocated((size_t)c->size[i]);
        if (fread(c->array[i], 1, (size_t)c->size[i], file) != (size_t)c->size[i]) exit(5);
    }
    return 1;
}

static void give(FILE *file, const void *array, int64_t size) {
    fwrite(&size, sizeof size, 1, file);
    if (size) fwrite(array, 1, (size_t)size, file);
}

static Weights weights_of(const Case *c) {
    const int64_t *n = c->number;
    Weights w = {c->array[0], n[0], n[1], n[2], (int)n[3], (int)n[4], (int)n[5], (int)n[6], (int)n[7]};
    if (c->size[0] != groups_of(&w) * group_size(&w)) exit(6);
    return w;
}

/* Numbers: those of the weights, activation, rows, pieces, terms. Arrays: weights, x, norm, bias, residual, [epsilon,
 * outliers]. */
static void run_linear(const Kernels *k, const Case *c, FILE *out) {
    const Weights w = weights_of(c);
    const int64_t activation = c->number[8], m = c->number[9], pieces = c->number[10], outputs = activation ? w.n / 2 : w.n;
    const size_t of_blocks = (size_t)(m * (w.k / w.block));
    const int terms = (int)c->number[11];
    const float *reals = c->array[5];
    float *space = allocated(16 * (size_t)w.k), *y = allocated(4 * (size_t)(m * outputs));
    const Linear layer = {w, terms, reals[1], (int)activation, c->array[3], c->array[4], y};
    Rows rows[2];
    for (int i = 0; i < 2; i++)
        rows[i] = (Rows){allocated((size_t)(terms * m * w.k)), allocated(4 * terms * of_blocks), allocated(4 * terms * of_blocks),
                         zero_factor(&w), allocated(8 * (size_t)(m * words_of(&w)))};
    for (int64_t i = 0; i < pieces; i++)
        k->quantize(&layer, c->array[1], m, m * i / pieces, m * (i + 1) / pieces, c->array[2], reals[0], rows, space);
    const int64_t step = activation ? 2 : 1, pairs = groups_of(&w) / step;
    for (int64_t i = 0; i < pieces; i++) k->linear(&layer, rows, m, pairs * i / pieces * step, pairs * (i + 1) / pieces * step);
    give(out, y, 4 * m * outputs);
}

/* Numbers: those of the weights. Arrays: weights. Gives every row. */
static void run_embedding(const Kernels *k, const Case *c, FILE *out) {
    const Weights w = weights_of(c);
    float *y = allocated(4 * (size_t)(w.n * w.k));
    for (int64_t row = 0; row < w.n; row++) k->dequantize(&w, row, y + row * w.k);
    give(out, y, 4 * w.n * w.k);
}

/* Numbers: batch, sequence, heads, key/value heads, dim, capacity, int8, rotary, interleaved, per channel, window, tokens of
 * a piece. Arrays: qkv, lengths, key, value, cosine, sine, key scale, value scale, query norm, key norm, sink, [epsilon,
 * scale, softcap]. Gives y and both caches. Of slots, with key slot, value slot, and whether keys and values are turned behind
 * these numbers, y alone, or with one more number that is not 0 the caches alone. */
static void attend(const Kernels *k, const Case *c, FILE *out, int slots) {
    const int64_t *n = c->number, piece = n[11], outputs = n[0] * n[1] * n[2] * n[4];
    void *const *array = c->array;
    const float *constants = array[11];
    float *query = allocated(4 * (size_t)outputs), *y = allocated(4 * (size_t)outputs);
    const Attention a = {
        .batch = n[0], .sequence = n[1], .heads = n[2], .kv_heads = n[3], .dim = n[4], .capacity = n[5], .qkv = array[0],
        .lengths = array[1], .key = array[2], .value = array[3], .int8 = (int)n[6], .cosine = array[4], .sine = array[5],
        .rotary = n[7], .interleaved = (int)n[8], .key_scale = array[6], .value_scale = array[7], .per_channel = (int)n[9],
        .query_norm = array[8], .key_norm = array[9], .epsilon = constants[0], .scale = constants[1],
        .softcap = constants[2], .window = n[10], .sink = array[10], .query = query, .y = y, .slots = slots,
        .key_slot = (int)n[12], .value_slot = (int)n[13], .key_size = slot_size((int)n[12], n[4]),
        .value_size = slot_size((int)n[13], n[4]), .turn_keys = (int)n[14], .turn_values = (int)n[15],
    };
    for (int pass = 0; pass < 2; pass++)
        for (int64_t batch = 0; batch < a.batch; batch++)
            for (int64_t head = 0; head < a.kv_heads; head++)
                for (int64_t at = 0; at < a.sequence; at += piece) {
                    const int64_t last = at + piece < a.sequence ? at + piece : a.sequence;
                    if (!pass) k->attention_prepare(&a, batch, head, at, last);
                    else if (!k->attention(&a, batch, head, at, last)) exit(4);
                }
    if (!slots || !n[16]) give(out, y, 4 * outputs);
    if (slots && !n[16]) return;
    give(out, a.key, c->size[2]);
    give(out, a.value, c->size[3]);
}

static void run_attention(const Kernels *k, const Case *c, FILE *out) { attend(k, c, out, 0); }
static void run_slots(const Kernels *k, const Case *c, FILE *out) { attend(k, c, out, 1); }

/* Numbers: n, k, block, stored, bits, zero points. Arrays: weights. Gives what `round` returns in a byte, codes, scales,
 * zero points. */
static void run_round(const Kernels *k, const Case *c, FILE *out) {
    const int64_t *n = c->number, blocks = (n[1] + n[2] - 1) / n[2];
    Rounding r = {c->array[0], n[0], n[1], n[2], (int)n[3], (int)n[4], allocated((size_t)(n[0] * n[1])),
                  allocated(4 * (size_t)(n[0] * blocks)), n[5] ? allocated((size_t)(n[0] * blocks)) : NULL};
    float *row = allocated(4 * (size_t)n[1]);
    const char finite = (char)k->round(&r, row);
    give(out, &finite, 1);
    give(out, r.codes, finite ? n[0] * n[1] : 0);
    give(out, r.scales, finite ? 4 * n[0] * blocks : 0);
    give(out, r.zero_points, finite && n[5] ? n[0] * blocks : 0);
}

/* Arrays: codes. */
static void run_pack(const Kernels *k, const Case *c, FILE *out) {
    uint8_t *packed = allocated((size_t)(c->size[0] / 2));
    k->pack(c->array[0], c->size[0] / 2, packed);
    give(out, packed, c->size[0] / 2);
}

int main(int count, char **arguments) {
    if (count != 4) return 2;
    if (!llmforge_kernels(arguments[1])) return 3;
    FILE *in = fopen(arguments[2], "rb"), *out = fopen(arguments[3], "wb");
    if (!in || !out) return 5;
    static void (*const run_case[])(const Kernels *, const Case *, FILE *) = {
        [LINEAR] = run_linear, [EMBEDDING] = run_embedding, [ATTENTION] = run_attention, [ROUND] = run_round, [PACK] = run_pack,
        [SLOTS] = run_slots};
    Case c;
    while (next_case(in, &c)) {
        if (c.kind < LINEAR || c.kind > SLOTS) return 5;
        run_case[c.kind](kernels, &c, out);
        release();
    }
    fclose(in);
    return fclose(out) ? 5 : 0;
}
