/* One token of each sequence through all blocks of a pre-norm Llama, to its logits: one call.
 *
 *   x += o(attention(normalize(x)));   x += down(silu(gate(normalize(x))) up(normalize(x)));   logits = head(normalize(x))
 *
 * All threads work on the same layer and synchronize where one needs the results of another: five
 * times per layer.  Each takes an equal share of every matrix's rows.
 *
 * Activations are (features, width): width is 1 for one sequence, else sequences are lanes, and
 * those beyond the last sequence hold zeros.
 */
#include "cached_attention.h"
#include "kernels.h"
#include "rms_norm.h"
#include "row_products.h"
#include "swiglu.h"
#include "threads.h"
#include <sched.h>

#define SPINS 20000 /* checks before a waiting thread yields its core */

typedef struct {
    const decoder_t *s;
    atomic_int waiting, round;
} decoder_job;

static void wait_for_all(decoder_job *job, long threads) {
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

static void normalize(const wide *x, const wide *gain, wide *y, long dim, long width, double eps) {
    if (width == 1) {
        rms_norm_row(x, gain, y, dim, (wide)eps, 0);
        return;
    }
    for (long lane = 0; lane < width; lane += LANES) {
        vec sum = splat(0), r;
        for (long i = 0; i < dim; i++) {
            vec v = load(x + i * width + lane);
            sum += v * v;
        }
        for (long j = 0; j < LANES; j++) r[j] = inverse_rms(sum[j], dim, (wide)eps);
        for (long i = 0; i < dim; i++)
            store(y + i * width + lane, load(x + i * width + lane) * r * gain[i]);
    }
}

static void add_to(wide *x, const wide *sums, long first, long end) {
    for (long i = first; i < end; i++) x[i] += sums[i];
}

static void decoder_embed(const decoder_t *s, long width, long first, long end) {
    for (long i = first; i < end; i++)
        for (long row = 0; row < s->rows; row++)
            s->x[i * width + row] = s->embedded[row * s->dim + i];
}

/* The new key and value of one sequence's head go into the cache; its queries attend to all. */
static void decoder_attend(const decoder_t *s, const decoder_layer_t *layer, long row, long kv, long width,
                   wide *scratch) {
    const long dim = s->head_dim, group = s->heads / s->groups, place = row * s->groups + kv;
    const wide *qkv = s->qkv + row;
    wide *q = scratch, *k = q + group * dim, *v = k + dim, *y = v + dim;
    rows_of_lanes(qkv + kv * group * dim * width, q, group * dim, 1, width, 0);
    rows_of_lanes(qkv + (s->heads + kv) * dim * width, k, dim, 1, width, 0);
    rows_of_lanes(qkv + (s->heads + s->groups + kv) * dim * width, v, dim, 1, width, 0);
    cached_attention_t one = {
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
    attend_to_cache(&one, y + group * dim);
    for (long i = 0; i < group * dim; i++) s->y[(kv * group * dim + i) * width + row] = y[i];
}

static void all_layers(void *argument) {
    decoder_job *job = argument;
    const decoder_t *s = job->s;
    const long me = s->threads > 1 ? openmp_thread() : 0;
    const long of = s->threads > 1 ? openmp_team() : 1; /* may be fewer than asked for */
    const long dim = s->dim, inner = s->inner, width = width_for(s->rows);
    const long q_out = s->heads * s->head_dim, kv_out = s->groups * s->head_dim;
    wide *normed = s->scratch + me * s->scratch_size, *sums = normed + dim * width;
    wide *scratch = sums + dim * width;
#define FIRST(n) ((n) * me / of) /* this thread's share of n */
#define END(n) ((n) * (me + 1) / of)
#define PRODUCT(x, w, y, in, out) row_product(x, w, y, in, width, FIRST(out), END(out))
    decoder_embed(s, width, FIRST(dim), END(dim));
    wait_for_all(job, of);
    for (long l = 0; l < s->n_layers; l++) {
        const decoder_layer_t *layer = s->layers + l;
        normalize(s->x, layer->attention_gain, normed, dim, width, s->eps);
        PRODUCT(normed, layer->q, s->qkv, dim, q_out);
        PRODUCT(normed, layer->k, s->qkv + q_out * width, dim, kv_out);
        PRODUCT(normed, layer->v, s->qkv + (q_out + kv_out) * width, dim, kv_out);
        wait_for_all(job, of);
        for (long unit = FIRST(s->rows * s->groups); unit < END(s->rows * s->groups); unit++)
            decoder_attend(s, layer, unit / s->groups, unit % s->groups, width, scratch);
        wait_for_all(job, of);
        PRODUCT(s->y, layer->o, sums, q_out, dim);
        add_to(s->x, sums, FIRST(dim) * width, END(dim) * width);
        wait_for_all(job, of);
        normalize(s->x, layer->mlp_gain, normed, dim, width, s->eps);
        wide *gates = s->gates + FIRST(inner) * width, *ups = gates + inner * width;
        PRODUCT(normed, layer->gate, s->gates, dim, inner);
        PRODUCT(normed, layer->up, s->gates + inner * width, dim, inner);
        swiglu_row(gates, ups, s->h + FIRST(inner) * width, (END(inner) - FIRST(inner)) * width);
        wait_for_all(job, of);
        PRODUCT(s->h, layer->down, sums, inner, dim);
        add_to(s->x, sums, FIRST(dim) * width, END(dim) * width);
        wait_for_all(job, of);
    }
    normalize(s->x, s->final_gain, normed, dim, width, s->eps);
    if (width == 1) {
        PRODUCT(normed, s->head, s->logits, dim, s->vocab);
        return;
    }
    for (long o = FIRST(s->vocab), end = END(s->vocab); o < end; o += LANE_OUTPUTS) {
        const long count = end - o < LANE_OUTPUTS ? end - o : LANE_OUTPUTS;
        row_product(normed, s->head + o * dim, scratch, dim, width, 0, count);
        rows_of_lanes(scratch, s->logits + o, count, s->rows, width, s->vocab);
    }
}

static long max_of(long a, long b) { return a > b ? a : b; }

long decoder_scratch(const decoder_t *s) {
    const long width = width_for(s->rows), group = s->heads / s->groups;
    const long attention = (2 * group + 2) * s->head_dim + cached_attention_scratch(s->head_dim, s->capacity);
    return round_up(2 * s->dim * width + max_of(attention, LANE_OUTPUTS * width), LANES);
}

long decoder_width(long rows) { return width_for(rows); }

void decode(const decoder_t *decoder) {
    decoder_t own = *decoder;
    if (!openmp_parallel || own.threads < 1) own.threads = 1;
    if (own.threads > MAX_THREADS) own.threads = MAX_THREADS;
    decoder_job job = {.s = &own};
    if (own.threads > 1)
        openmp_parallel(all_layers, &job, (unsigned)own.threads, 0);
    else
        all_layers(&job);
}

long decoder_size(void) { return sizeof(decoder_t); }

long decoder_layer_size(void) { return sizeof(decoder_layer_t); }
