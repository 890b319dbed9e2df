#if defined(__x86_64__)
#pragma GCC target("avx2,fma")
#define VECTOR_BYTES 32
#define SUMMED 4
#define NUMBER float
#define NAME fp32_avx2
#include "products.inc"
#define NUMBER double
#define NAME fp64_avx2
#include "products.inc"
#endif
