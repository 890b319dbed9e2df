/* Run something on several threads, this one among them. */
#ifndef LLMFORGE_ROUNDING_THREADS_H
#define LLMFORGE_ROUNDING_THREADS_H

#include <pthread.h>

#define MOST_THREADS 256

static inline void run_on_threads(void *(*run)(void *), void *argument, int threads) {
    pthread_t others[MOST_THREADS];
    int started = 0;
    while (started < threads - 1 && started < MOST_THREADS && pthread_create(&others[started], NULL, run, argument) == 0)
        started++;
    run(argument);
    for (int i = 0; i < started; i++) pthread_join(others[i], NULL);
}

#endif
