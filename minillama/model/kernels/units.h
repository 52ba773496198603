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

static void for_units(void (*work)(const void *job, long unit), const void *job, long units,
                      int threads) {
    loop_t loop = {.work = work, .job = job, .units = units};
    atomic_init(&loop.next, 0);
    if (openmp_parallel && threads > 1 && units > 1)
        openmp_parallel(loop_body, &loop, (unsigned)threads, 0);
    else
        loop_body(&loop);
}
