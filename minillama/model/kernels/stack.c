/* One token of one sequence through all blocks of a pre-norm Llama, to its logits: one call.
 *
 *   x += o(attention(norm(x)));   x += down(silu(gate(norm(x))) up(norm(x)));   logits = head(norm(x))
 *
 * All threads walk through the layers together and wait for each other where one needs what another
 * made: five times a layer.  Each takes an equal share of every matrix's rows.
 */
#include "kernel.h"
#include "rope.h"
#include "rows.h"
#include "cached.h"
#include <sched.h>
#include <stdatomic.h>

#define MAX_THREADS 64
#define SPINS 20000 /* looks before a thread that waits offers its core to others */

typedef struct { /* as in stack.py */
    const wide *attention_gain, *q, *k, *v, *o, *mlp_gain, *gate, *up, *down;
    wide *keys, *values; /* (G, capacity, K) */
} layer_t;

typedef struct { /* as in stack.py */
    const layer_t *layers;
    const wide *cos, *sin, *final_gain, *head; /* cos, sin: of the new position */
    wide *x, *logits;                          /* x: (D), the token's embedding; is changed */
    wide *qkv, *y, *h, *gates;                 /* (H + 2G) K, H K, F, 2F */
    wide *room;                                /* room_size for each thread */
    long n_layers, dim, heads, groups, head_dim, inner, vocab, capacity, length, room_size;
    double eps;
    int threads;
} stack_job_t;

typedef struct {
    const stack_job_t *s;
    atomic_int waiting, round;
} job_t;

static void wait_for_all(job_t *job, long threads) {
    if (threads == 1) return;
    const int round = atomic_load(&job->round);
    if (atomic_fetch_add(&job->waiting, 1) == threads - 1) {
        atomic_store(&job->waiting, 0);
        atomic_store(&job->round, round + 1);
        return;
    }
    for (long spins = 0; atomic_load_explicit(&job->round, memory_order_acquire) == round; spins++)
        if (spins > SPINS) sched_yield();
}

static void norm(const wide *x, const wide *gain, wide *y, long dim, double eps) {
    wide mean_square = dot(x, x, dim) / (wide)dim + (wide)eps;
    wide r = mean_square == 0 ? 0 : 1 / sqrt(mean_square);
    for (long i = 0; i < dim; i++) y[i] = x[i] * r * gain[i];
}

static inline wide silu(wide g) { return g / (1 + exp(-g)); }

static void all_layers(void *argument) {
    job_t *job = argument;
    const stack_job_t *s = job->s;
    const long me = s->threads > 1 ? openmp_thread() : 0;
    const long of = s->threads > 1 ? openmp_team() : 1; /* may be fewer than asked for */
    const long dim = s->dim, k_dim = s->head_dim, inner = s->inner, group = s->heads / s->groups;
    const long q_out = s->heads * k_dim, kv_out = s->groups * k_dim;
    wide *normed = s->room + me * s->room_size, *sums = normed + dim, *room = sums + dim;
#define FIRST(n) ((n) * me / of) /* this thread's share of n */
#define END(n) ((n) * (me + 1) / of)
    for (long l = 0; l < s->n_layers; l++) {
        const layer_t *layer = s->layers + l;
        norm(s->x, layer->attention_gain, normed, dim, s->eps);
        product(normed, layer->q, s->qkv, dim, FIRST(q_out), END(q_out));
        product(normed, layer->k, s->qkv + q_out, dim, FIRST(kv_out), END(kv_out));
        product(normed, layer->v, s->qkv + q_out + kv_out, dim, FIRST(kv_out), END(kv_out));
        wait_for_all(job, of);
        for (long kv = FIRST(s->groups); kv < END(s->groups); kv++) {
            cached_t one = {
                .q = s->qkv + kv * group * k_dim,
                .k = s->qkv + (s->heads + kv) * k_dim,
                .v = s->qkv + (s->heads + s->groups + kv) * k_dim,
                .cos = s->cos,
                .sin = s->sin,
                .keys = layer->keys + kv * s->capacity * k_dim,
                .values = layer->values + kv * s->capacity * k_dim,
                .y = s->y + kv * group * k_dim,
                .heads = group,
                .dim = k_dim,
                .length = s->length,
            };
            attend_cached(&one, room);
        }
        wait_for_all(job, of);
        product(s->y, layer->o, sums, q_out, FIRST(dim), END(dim));
        for (long i = FIRST(dim); i < END(dim); i++) s->x[i] += sums[i];
        wait_for_all(job, of);
        norm(s->x, layer->mlp_gain, normed, dim, s->eps);
        product(normed, layer->gate, s->gates, dim, FIRST(inner), END(inner));
        product(normed, layer->up, s->gates + inner, dim, FIRST(inner), END(inner));
        for (long i = FIRST(inner); i < END(inner); i++)
            s->h[i] = silu(s->gates[i]) * s->gates[inner + i];
        wait_for_all(job, of);
        product(s->h, layer->down, sums, inner, FIRST(dim), END(dim));
        for (long i = FIRST(dim); i < END(dim); i++) s->x[i] += sums[i];
        wait_for_all(job, of);
    }
    norm(s->x, s->final_gain, normed, dim, s->eps);
    product(normed, s->head, s->logits, dim, FIRST(s->vocab), END(s->vocab));
}

/* How many numbers of `room` each thread needs. */
long stack_room(long dim, long head_dim, long capacity) {
    return round_up(2 * dim + cached_room(head_dim, capacity), LANES);
}

void stack(const stack_job_t *s) {
    stack_job_t own = *s;
    if (!openmp_parallel || own.threads < 1) own.threads = 1;
    if (own.threads > MAX_THREADS) own.threads = MAX_THREADS;
    job_t job = {.s = &own};
    if (own.threads > 1)
        openmp_parallel(all_layers, &job, (unsigned)own.threads, 0);
    else
        all_layers(&job);
}
