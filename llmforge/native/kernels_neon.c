#include "kernels.h"
#if HAS_NEON
#define NEON
#if defined(__clang__)
#define TARGET "dotprod"
#else
#define TARGET "arch=armv8.2-a+dotprod" /* what GCC's header asks of whoever calls its dot products */
#endif
#define KERNELS kernels_neon
#define KERNELS_NAME "neon"
#include "impl.inc"
#endif
