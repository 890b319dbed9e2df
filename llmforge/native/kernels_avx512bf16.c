#if defined(__x86_64__)
#define AVX512
#define BF16 1
#define TARGET "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,avx2,fma,f16c"
#define KERNELS kernels_avx512bf16
#define KERNELS_NAME "avx512bf16"
#include "impl.inc"
#endif
