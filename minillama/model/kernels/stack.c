/* One token of each sequence through all blocks of a pre-norm Llama, to its logits: one call.
 *
 *   x += o(attention(norm(x)));   x += down(silu(gate(norm(x))) up(norm(x)));   logits = head(norm(x))
 *
 * All threads walk through the layers together and wait for each other where one needs what another
 * made: five times a layer.  Each takes an equal share of every matrix's rows.
 *
 * Activations are (features, width): width is 1 for one sequence, else sequences are lanes, and
 * those beyond the last sequence hold zeros.
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
    wide *keys, *values; /* (B, G, capacity, K) */
} layer_t;

typedef struct { /* as in stack.py */
    const layer_t *layers;
    const wide *final_gain, *head;
    const int64_t *first;   /* of each sequence, as in cached_t; NULL: 0 */
    const wide *cos, *sin;  /* of the new position, (K / 2) or (B, K / 2) */
    const wide *embedded;   /* (B, D): the tokens */
    wide *logits;           /* (B, V) */
    wide *x, *qkv, *y, *h, *gates; /* D, (H + 2G) K, H K, F, 2F features; zeros at first */
    wide *room;             /* room_size for each thread */
    long n_layers, rows, dim, heads, groups, head_dim, inner, vocab, capacity, length, room_size,
        rotation_stride;
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

static inline wide one_over_rms(wide square_sum, long dim, double eps) {
    const wide mean_square = square_sum / (wide)dim + (wide)eps;
    return mean_square == 0 ? 0 : 1 / sqrt(mean_square);
}

static void norm(const wide *x, const wide *gain, wide *y, long dim, long width, double eps) {
    if (width == 1) {
        const wide r = one_over_rms(dot(x, x, dim), dim, eps);
        for (long i = 0; i < dim; i++) y[i] = x[i] * r * gain[i];
        return;
    }
    for (long lane = 0; lane < width; lane += LANES) {
        vec sum = splat(0), r;
        for (long i = 0; i < dim; i++) {
            vec v = load(x + i * width + lane);
            sum += v * v;
        }
        for (long j = 0; j < LANES; j++) r[j] = one_over_rms(sum[j], dim, eps);
        for (long i = 0; i < dim; i++)
            store(y + i * width + lane, load(x + i * width + lane) * r * gain[i]);
    }
}

static void add(wide *x, const wide *sums, long first, long end) {
    for (long i = first; i < end; i++) x[i] += sums[i];
}

/* h = silu(gates) ups */
static void swiglu(const wide *gates, const wide *ups, wide *h, long n) {
    long i = 0;
    for (; i + LANES <= n; i += LANES) {
        vec g = load(gates + i);
        store(h + i, g * sigmoid(g) * load(ups + i));
    }
    if (i < n) {
        vec g = load_some(gates + i, n - i);
        store_some(h + i, g * sigmoid(g) * load_some(ups + i, n - i), n - i);
    }
}

static void embed(const stack_job_t *s, long width, long first, long end) {
    for (long i = first; i < end; i++)
        for (long row = 0; row < s->rows; row++)
            s->x[i * width + row] = s->embedded[row * s->dim + i];
}

/* The new key and value of one sequence's head go into the cache; its queries attend to all. */
static void attend(const stack_job_t *s, const layer_t *layer, long row, long kv, long width,
                   wide *room) {
    const long dim = s->head_dim, group = s->heads / s->groups, place = row * s->groups + kv;
    const wide *qkv = s->qkv + row;
    wide *q = room, *k = q + group * dim, *v = k + dim, *y = v + dim;
    rows_of_lanes(qkv + kv * group * dim * width, q, group * dim, 1, width, 0);
    rows_of_lanes(qkv + (s->heads + kv) * dim * width, k, dim, 1, width, 0);
    rows_of_lanes(qkv + (s->heads + s->groups + kv) * dim * width, v, dim, 1, width, 0);
    cached_t one = {
        .q = q,
        .k = k,
        .v = v,
        .cos = s->cos + row * s->rotation_stride,
        .sin = s->sin + row * s->rotation_stride,
        .keys = layer->keys + place * s->capacity * dim,
        .values = layer->values + place * s->capacity * dim,
        .y = y,
        .heads = group,
        .dim = dim,
        .length = s->length,
        .first = s->first ? s->first[row] : 0,
    };
    attend_cached(&one, y + group * dim);
    for (long i = 0; i < group * dim; i++) s->y[(kv * group * dim + i) * width + row] = y[i];
}

static void all_layers(void *argument) {
    job_t *job = argument;
    const stack_job_t *s = job->s;
    const long me = s->threads > 1 ? openmp_thread() : 0;
    const long of = s->threads > 1 ? openmp_team() : 1; /* may be fewer than asked for */
    const long dim = s->dim, inner = s->inner, width = width_for(s->rows);
    const long q_out = s->heads * s->head_dim, kv_out = s->groups * s->head_dim;
    wide *normed = s->room + me * s->room_size, *sums = normed + dim * width;
    wide *room = sums + dim * width;
#define FIRST(n) ((n) * me / of) /* this thread's share of n */
#define END(n) ((n) * (me + 1) / of)
#define PRODUCT(x, w, y, in, out) product(x, w, y, in, width, FIRST(out), END(out))
    embed(s, width, FIRST(dim), END(dim));
    wait_for_all(job, of);
    for (long l = 0; l < s->n_layers; l++) {
        const layer_t *layer = s->layers + l;
        norm(s->x, layer->attention_gain, normed, dim, width, s->eps);
        PRODUCT(normed, layer->q, s->qkv, dim, q_out);
        PRODUCT(normed, layer->k, s->qkv + q_out * width, dim, kv_out);
        PRODUCT(normed, layer->v, s->qkv + (q_out + kv_out) * width, dim, kv_out);
        wait_for_all(job, of);
        for (long unit = FIRST(s->rows * s->groups); unit < END(s->rows * s->groups); unit++)
            attend(s, layer, unit / s->groups, unit % s->groups, width, room);
        wait_for_all(job, of);
        PRODUCT(s->y, layer->o, sums, q_out, dim);
        add(s->x, sums, FIRST(dim) * width, END(dim) * width);
        wait_for_all(job, of);
        norm(s->x, layer->mlp_gain, normed, dim, width, s->eps);
        wide *gates = s->gates + FIRST(inner) * width, *ups = gates + inner * width;
        PRODUCT(normed, layer->gate, s->gates, dim, inner);
        PRODUCT(normed, layer->up, s->gates + inner * width, dim, inner);
        swiglu(gates, ups, s->h + FIRST(inner) * width, (END(inner) - FIRST(inner)) * width);
        wait_for_all(job, of);
        PRODUCT(s->h, layer->down, sums, inner, dim);
        add(s->x, sums, FIRST(dim) * width, END(dim) * width);
        wait_for_all(job, of);
    }
    norm(s->x, s->final_gain, normed, dim, width, s->eps);
    if (width == 1) {
        PRODUCT(normed, s->head, s->logits, dim, s->vocab);
        return;
    }
    for (long o = FIRST(s->vocab), end = END(s->vocab); o < end; o += LANE_OUTPUTS) {
        const long some = end - o < LANE_OUTPUTS ? end - o : LANE_OUTPUTS;
        product(normed, s->head + o * dim, room, dim, width, 0, some);
        rows_of_lanes(room, s->logits + o, some, s->rows, width, s->vocab);
    }
}

static long greater(long a, long b) { return a > b ? a : b; }

/* How many numbers of `room` each thread needs. */
long stack_room(const stack_job_t *s) {
    const long width = width_for(s->rows), group = s->heads / s->groups;
    const long attention = (2 * group + 2) * s->head_dim + cached_room(s->head_dim, s->capacity);
    return round_up(2 * s->dim * width + greater(attention, LANE_OUTPUTS * width), LANES);
}

long stack_width(long rows) { return width_for(rows); }

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
