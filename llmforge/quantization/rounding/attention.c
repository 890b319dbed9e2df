/* Causal attention, on the thread that calls. */
#include "attention.h"

#include <stddef.h>

#define EXPORT __attribute__((visibility("default")))

/* Says whether this processor has what `llmforge_attend` needs. */
EXPORT int llmforge_can_attend(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq");
#else
    return 0;
#endif
}

/* Attention, or its gradients where `d_out` is given. Returns 0, or 1 where there is not enough memory. */
EXPORT int llmforge_attend(const Attention *attention) {
#if defined(__x86_64__)
    if (attention->bf16)
        return attention->d_out == NULL ? attend_avx512bf16(attention) : attend_backwards_avx512bf16(attention);
    return attention->d_out == NULL ? attend_avx512(attention) : attend_backwards_avx512(attention);
#else
    (void)attention;
    return 1;
#endif
}
