/* Run something on several threads, this one among them. */
#ifndef LLMFORGE_ROUNDING_THREADS_H
#define LLMFORGE_ROUNDING_THREADS_H

#include <pthread.h>
#include <stdlib.h>

#define MOST_THREADS 256

/* What threads share that run one thing. It outlives the call: a thread may begin when all is done. */
typedef struct Crew {
    void *(*run)(void *);
    void *argument;
    pthread_mutex_t lock;
    pthread_cond_t left;
    int inside;  /* threads that run it, but for the one that called */
    int done;    /* nobody shall begin any more */
    int holders; /* of this, the last of which frees it */
} Crew;

/* Lets go of `crew`, whose lock is held. */
static inline void leave_crew(Crew *crew) {
    const int last = --crew->holders == 0;
    pthread_mutex_unlock(&crew->lock);
    if (!last) return;
    pthread_cond_destroy(&crew->left);
    pthread_mutex_destroy(&crew->lock);
    free(crew);
}

static void *join_crew(void *argument) {
    Crew *crew = argument;
    pthread_mutex_lock(&crew->lock);
    if (!crew->done) {
        crew->inside++;
        pthread_mutex_unlock(&crew->lock);
        crew->run(crew->argument);
        pthread_mutex_lock(&crew->lock);
        crew->inside--;
        pthread_cond_signal(&crew->left);
    }
    leave_crew(crew);
    return NULL;
}

/* Calls run(argument) on up to as many `threads`; each takes parts of the work until none is left. It does not wait for
 * threads that have not begun by then: on a machine with other work, a new one may wait longer than all of this takes. */
static inline void run_on_threads(void *(*run)(void *), void *argument, int threads) {
    const int others = (threads < MOST_THREADS ? threads : MOST_THREADS) - 1;
    Crew *crew = others > 0 ? malloc(sizeof *crew) : NULL;
    pthread_attr_t detached;
    if (crew == NULL || pthread_attr_init(&detached) != 0) {
        free(crew);
        run(argument);
        return;
    }
    *crew = (Crew){.run = run, .argument = argument, .holders = 1};
    pthread_mutex_init(&crew->lock, NULL);
    pthread_cond_init(&crew->left, NULL);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    pthread_t other;
    for (int started = 0; started < others; started++) {
        pthread_mutex_lock(&crew->lock);
        crew->holders++;
        pthread_mutex_unlock(&crew->lock);
        if (pthread_create(&other, &detached, join_crew, crew) == 0) continue;
        pthread_mutex_lock(&crew->lock);
        crew->holders--;
        pthread_mutex_unlock(&crew->lock);
        break;
    }
    pthread_attr_destroy(&detached);
    run(argument);
    pthread_mutex_lock(&crew->lock);
    crew->done = 1;
    while (crew->inside) pthread_cond_wait(&crew->left, &crew->lock);
    leave_crew(crew);
}

#endif
