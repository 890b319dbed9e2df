/* Vectors of bf16 in words of 32 bits; who includes this has chosen AVX512-BF16 and its intrinsics. */
#ifndef LLMFORGE_BF16_H
#define LLMFORGE_BF16_H

/* Numbers rounded to bf16, each in the lower half of its word. */
static inline __m512i lower_halves(__m512 x) { return _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x)); }

/* Add products of pairs. */
static inline __m512 add_pairs(__m512 sum, __m512i left, __m512i right) {
#if defined(__clang__) /* clang 16 breaks down on the types of the function below */
    __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(left), "v"(right));
    return sum;
#else
    return _mm512_dpbf16_ps(sum, (__m512bh)left, (__m512bh)right);
#endif
}

#endif
