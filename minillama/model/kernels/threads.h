/* Threads of the OpenMP runtime that torch itself runs on, and a loop over independent units. */
#ifndef THREADS_H
#define THREADS_H

#include <stdatomic.h>
#include <stddef.h>

#define MAX_THREADS 64

/* NULL: no runtime was found, and kernels run on one thread. */
static void (*openmp_parallel)(void (*body)(void *), void *job, unsigned threads, unsigned flags);
static int (*openmp_thread)(void), (*openmp_team)(void);

/* Called once: the addresses of GOMP_parallel, omp_get_thread_num and omp_get_num_threads. */
void share_threads(void *parallel, void *thread, void *team) {
    openmp_parallel = parallel;
    openmp_thread = thread;
    openmp_team = team;
}

typedef struct {
    void (*work)(const void *job, long unit);
    const void *job;
    long units, threads;
    atomic_long next[MAX_THREADS]; /* unit of each thread's share */
} loop_t;

/* How many threads for_units uses, and, within a unit, which of them this is. */
static inline int threads_of(long units, int threads) {
    if (!openmp_parallel || threads <= 1 || units <= 1) return 1;
    return threads < MAX_THREADS ? threads : MAX_THREADS;
}

static inline int thread_of(int threads) { return threads > 1 ? openmp_thread() : 0; }

static long share_start(const loop_t *loop, long thread) {
    return loop->units * thread / loop->threads;
}

static void loop_body(void *argument) {
    loop_t *loop = argument;
    const long me = thread_of((int)loop->threads);
    for (long i = 0; i < loop->threads; i++) {
        const long thread = (me + i) % loop->threads, end = share_start(loop, thread + 1);
        for (long unit; (unit = atomic_fetch_add(&loop->next[thread], 1)) < end;)
            loop->work(loop->job, unit);
    }
}

/* Calls work(job, unit) for each unit.  A thread begins with its own share, the same in each call, so
 * that those units' data may still be in its cache; then it takes units of the others' shares. */
static void for_units(void (*work)(const void *job, long unit), const void *job, long units,
                      int threads) {
    loop_t loop = {.work = work, .job = job, .units = units, .threads = threads_of(units, threads)};
    for (long thread = 0; thread < loop.threads; thread++)
        atomic_init(&loop.next[thread], share_start(&loop, thread));
    if (loop.threads > 1)
        openmp_parallel(loop_body, &loop, (unsigned)loop.threads, 0);
    else
        loop_body(&loop);
}

#endif
