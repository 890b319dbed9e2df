#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
#define ROWS 8
#define VECTOR 16
#define FEW 16
#define ROUNDER rounder_avx512
#include "rounding.inc"
#endif
