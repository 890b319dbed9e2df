#define ROUNDER rounder_generic
#include "rounding.inc"
