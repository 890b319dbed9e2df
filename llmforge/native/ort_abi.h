/* What the kernels use of ONNX Runtime's C interface: positions in its table of functions, which only ever grows at its
 * end, and the record that describes a custom operator (both: onnxruntime_c_api.h, API version 17 and later). */
#ifndef LLMFORGE_ORT_ABI_H
#define LLMFORGE_ORT_ABI_H

#include <stddef.h>
#include <stdint.h>

#define ORT_API_VERSION 17 /* the first with KernelContext_ParallelFor */

typedef struct Status Status;
typedef struct KernelInfo KernelInfo;
typedef struct Context Context;
typedef struct Value Value;
typedef struct TypeAndShape TypeAndShape;
typedef struct Domain Domain;
typedef struct SessionOptions SessionOptions;

typedef struct Api { void *function[279]; } Api;
typedef struct ApiBase {
    const Api *(*get_api)(uint32_t version);
    const char *(*version_string)(void);
} ApiBase;

enum { STATUS_FAIL = 1, STATUS_INVALID_ARGUMENT = 2 };
enum { TYPE_ANY = 0, TYPE_FLOAT = 1, TYPE_UINT8 = 2, TYPE_INT8 = 3, TYPE_INT32 = 6, TYPE_INT64 = 7 };
enum { TYPE_FLOAT16 = 10, TYPE_BFLOAT16 = 16 };
enum { REQUIRED = 0, OPTIONAL = 1 };

enum { PIECES = 16 }; /* of work that are handed out one by one, so that a thread that was held up delays nobody */

/* Each wrapper calls one entry of the table; a status that is not NULL is an error and is handed on. */
#define CALL(api, position, type) ((type)(api)->function[position])

static inline Status *ort_status(const Api *api, int code, const char *message) {
    return CALL(api, 0, Status * (*)(int, const char *))(code, message);
}
static inline Status *ort_domain(const Api *api, const char *name, Domain **domain) {
    return CALL(api, 26, Status * (*)(const char *, Domain **))(name, domain);
}
static inline Status *ort_domain_add(const Api *api, Domain *domain, const void *op) {
    return CALL(api, 27, Status * (*)(Domain *, const void *))(domain, op);
}
static inline Status *ort_use_domain(const Api *api, SessionOptions *options, Domain *domain) {
    return CALL(api, 28, Status * (*)(SessionOptions *, Domain *))(options, domain);
}
static inline Status *ort_data(const Api *api, Value *value, void **data) {
    return CALL(api, 51, Status * (*)(Value *, void **))(value, data);
}
static inline Status *ort_shape_type(const Api *api, const TypeAndShape *shape, int *type) {
    return CALL(api, 60, Status * (*)(const TypeAndShape *, int *))(shape, type);
}
static inline Status *ort_rank(const Api *api, const TypeAndShape *shape, size_t *rank) {
    return CALL(api, 61, Status * (*)(const TypeAndShape *, size_t *))(shape, rank);
}
static inline Status *ort_dims(const Api *api, const TypeAndShape *shape, int64_t *dims, size_t rank) {
    return CALL(api, 62, Status * (*)(const TypeAndShape *, int64_t *, size_t))(shape, dims, rank);
}
static inline Status *ort_shape(const Api *api, const Value *value, TypeAndShape **shape) {
    return CALL(api, 65, Status * (*)(const Value *, TypeAndShape **))(value, shape);
}
static inline void ort_release_shape(const Api *api, TypeAndShape *shape) {
    CALL(api, 99, void (*)(TypeAndShape *))(shape);
}
static inline Status *ort_attribute_float(const Api *api, const KernelInfo *info, const char *name, float *out) {
    return CALL(api, 85, Status * (*)(const KernelInfo *, const char *, float *))(info, name, out);
}
static inline Status *ort_attribute_int(const Api *api, const KernelInfo *info, const char *name, int64_t *out) {
    return CALL(api, 86, Status * (*)(const KernelInfo *, const char *, int64_t *))(info, name, out);
}
/* The attribute, or `otherwise` where the node has none. */
static inline float ort_attribute_float_or(const Api *api, const KernelInfo *info, const char *name, float otherwise) {
    float found = otherwise;
    Status *status = ort_attribute_float(api, info, name, &found);
    if (!status) return found;
    CALL(api, 93, void (*)(Status *))(status);
    return otherwise;
}
static inline int64_t ort_attribute_int_or(const Api *api, const KernelInfo *info, const char *name, int64_t otherwise) {
    int64_t found = otherwise;
    Status *status = ort_attribute_int(api, info, name, &found);
    if (!status) return found;
    CALL(api, 93, void (*)(Status *))(status);
    return otherwise;
}
static inline Status *ort_input(const Api *api, const Context *context, size_t index, const Value **value) {
    return CALL(api, 90, Status * (*)(const Context *, size_t, const Value **))(context, index, value);
}
static inline Status *ort_output(
    const Api *api, Context *context, size_t index, const int64_t *dims, size_t rank, Value **value) {
    return CALL(api, 91, Status * (*)(Context *, size_t, const int64_t *, size_t, Value **))(
        context, index, dims, rank, value);
}
/* The CUDA stream that the kernel is to use; NULL where the provider has none. */
static inline Status *ort_stream(const Api *api, const Context *context, void **stream) {
    return CALL(api, 193, Status * (*)(const Context *, void **))(context, stream);
}
/* Call `work(data, i)` for every i below `total`, in up to 16 pieces of neighbours that threads take as they get free. */
static inline Status *ort_parallel(
    const Api *api, const Context *context, void (*work)(void *, size_t), size_t total, void *data) {
    return CALL(api, 274, Status * (*)(const Context *, void (*)(void *, size_t), size_t, size_t, void *))(
        context, work, total, total < PIECES ? total : PIECES, data);
}

typedef struct CustomOp {
    uint32_t version;
    void *(*create)(const struct CustomOp *, const Api *, const KernelInfo *);
    const char *(*name)(const struct CustomOp *);
    const char *(*provider)(const struct CustomOp *);
    int (*input_type)(const struct CustomOp *, size_t);
    size_t (*input_count)(const struct CustomOp *);
    int (*output_type)(const struct CustomOp *, size_t);
    size_t (*output_count)(const struct CustomOp *);
    void (*compute)(void *, Context *);
    void (*destroy)(void *);
    int (*input_characteristic)(const struct CustomOp *, size_t);
    int (*output_characteristic)(const struct CustomOp *, size_t);
    int (*input_memory)(const struct CustomOp *, size_t);
    int (*variadic_input_arity)(const struct CustomOp *);
    int (*variadic_input_homogeneity)(const struct CustomOp *);
    int (*variadic_output_arity)(const struct CustomOp *);
    int (*variadic_output_homogeneity)(const struct CustomOp *);
    Status *(*create_v2)(const struct CustomOp *, const Api *, const KernelInfo *, void **);
    Status *(*compute_v2)(void *, Context *);
    Status *(*infer_shape)(const struct CustomOp *, void *);
    int (*start_version)(const struct CustomOp *);
    int (*end_version)(const struct CustomOp *);
} CustomOp;

#endif
