/* Plain C: for processors without the instruction sets below, and what tests compare those to. */
#define KERNELS kernels_generic
#define KERNELS_NAME "generic"
#include "impl.inc"
