/* A loop over units of work that do not depend on each other, shared out among threads. */
#include <stdatomic.h>

typedef struct {
    void (*work)(const void *job, long unit);
    const void *job;
    long units;
    atomic_long next;
} loop_t;

static void loop_body(void *argument) {
    loop_t *loop = argument;
    for (long unit; (unit = atomic_fetch_add(&loop->next, 1)) < loop->units;)
        loop->work(loop->job, unit);
}

/* How many threads for_units takes at most, and, within a unit, which of them this is. */
static inline int threads_of(long units, int threads) {
    return openmp_parallel && threads > 1 && units > 1 ? threads : 1;
}

static inline int thread_of(int threads) { return threads > 1 ? openmp_thread() : 0; }

static void for_units(void (*work)(const void *job, long unit), const void *job, long units,
                      int threads) {
    loop_t loop = {.work = work, .job = job, .units = units};
    atomic_init(&loop.next, 0);
    if (threads_of(units, threads) > 1)
        openmp_parallel(loop_body, &loop, (unsigned)threads, 0);
    else
        loop_body(&loop);
}
