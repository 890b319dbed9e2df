#if defined(__x86_64__)
#pragma GCC target("avx2,fma,f16c")
#define KERNELS kernels_avx2
#define KERNELS_NAME "avx2"
#include "impl.inc"
#endif
