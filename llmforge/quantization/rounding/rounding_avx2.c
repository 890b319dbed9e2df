#if defined(__x86_64__)
#pragma GCC target("avx2,fma,f16c")
#define VECTOR 8
#define FEW 8
#define ROUNDER rounder_avx2
#include "rounding.inc"
#endif
