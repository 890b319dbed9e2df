#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")
#define VECTOR_BYTES 64
#define SUMMED 8
#define NUMBER float
#define NAME fp32_avx512
#include "products.inc"
#define NUMBER double
#define NAME fp64_avx512
#include "products.inc"
#endif
