#if defined(__x86_64__)
#define AVX2
#define TARGET "avx2,fma,f16c"
#define KERNELS kernels_avx2
#define KERNELS_NAME "avx2"
#include "impl.inc"
#endif
