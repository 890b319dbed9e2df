#define VECTOR_BYTES 16
#define SUMMED 4
#define NUMBER float
#define NAME fp32_generic
#include "products.inc"
#define NUMBER double
#define NAME fp64_generic
#include "products.inc"
