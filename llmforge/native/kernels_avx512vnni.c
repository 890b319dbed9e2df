#if defined(__x86_64__)
#define AVX512
#define TARGET "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c"
#define KERNELS kernels_avx512vnni
#define KERNELS_NAME "avx512vnni"
#include "impl.inc"
#endif
