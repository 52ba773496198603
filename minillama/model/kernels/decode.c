/* Attention of one new position of each sequence, to itself and to those in its cache.
 *
 * A unit of work is one key/value head of one sequence: the new key, turned by RoPE, and the new
 * value go into the cache, then each query head that reads them attends to all from `first` on.
 *
 * qkv is (B, 1, H + 2G, K); keys and values are (B, G, capacity, K).
 */
#include "kernel.h"
#include "rope.h"
#include "units.h"

typedef struct {
    const wide *qkv, *cos, *sin;
    wide *keys, *values, *y;
    const int64_t *first; /* of each sequence: before it the cache holds padding; NULL: 0 */
    long heads, groups, dim, capacity, length, rotation_stride;
    atomic_int *failed;
} job_t;

static inline wide dot(const wide *a, const wide *b, long n) {
    vec sum = splat(0);
    long i = 0;
    for (; i + LANES <= n; i += LANES) sum += load(a + i) * load(b + i);
    wide total = sum_of(sum);
    for (; i < n; i++) total += a[i] * b[i];
    return total;
}

static void unit_of_head(const void *argument, long unit) {
    const job_t *job = argument;
    const long dim = job->dim, group = job->heads / job->groups, length = job->length;
    const long batch = unit / job->groups, kv = unit % job->groups;
    const long padding = job->first ? job->first[batch] : 0, padded = round_up(length + 1, LANES);
    const long first = padding < length ? padding : length; /* padding itself sees itself */
    const wide *qkv = job->qkv + batch * (job->heads + 2 * job->groups) * dim;
    const wide *cos = job->cos + batch * job->rotation_stride;
    const wide *sin = job->sin + batch * job->rotation_stride;
    const wide *new_key = qkv + (job->heads + kv) * dim;
    wide *keys = job->keys + unit * job->capacity * dim;
    wide *values = job->values + unit * job->capacity * dim;
    wide *q = malloc((size_t)(dim + padded) * sizeof(wide)), *p = q + dim;
    if (!q) {
        atomic_store(job->failed, 1);
        return;
    }
    turn(new_key, keys + length * dim, cos, sin, dim, 1, 1);
    memcpy(values + length * dim, new_key + job->groups * dim, (size_t)dim * sizeof(wide));
    for (long head = kv * group; head < (kv + 1) * group; head++) {
        turn(qkv + head * dim, q, cos, sin, dim, 1, 1 / sqrt((wide)dim));
        wide top = -INFINITY;
        for (long t = 0; t < padded; t++) p[t] = -INFINITY;
        for (long t = first; t <= length; t++) {
            p[t] = dot(q, keys + t * dim, dim);
            top = p[t] > top ? p[t] : top;
        }
        vec sum = splat(0);
        for (long t = 0; t < padded; t += LANES) {
            vec e = vec_exp(load(p + t) - top);
            store(p + t, e);
            sum += e;
        }
        const wide scale = 1 / sum_of(sum);
        wide *y = job->y + (batch * job->heads + head) * dim;
        long c = 0;
        for (; c + LANES <= dim; c += LANES) {
            vec total = splat(0);
            for (long t = first; t <= length; t++) total += p[t] * load(values + t * dim + c);
            store(y + c, total * scale);
        }
        for (; c < dim; c++) {
            wide total = 0;
            for (long t = first; t <= length; t++) total += p[t] * values[t * dim + c];
            y[c] = total * scale;
        }
    }
    free(q);
}

/* Returns 0, or -1 if there is no memory. */
int decode(const wide *qkv, const wide *cos, const wide *sin, wide *keys, wide *values,
           const int64_t *first, wide *y, long batch, long heads, long groups, long dim,
           long capacity, long length, long rotation_stride, int threads) {
    atomic_int failed = 0;
    job_t job = {.qkv = qkv, .cos = cos, .sin = sin, .keys = keys, .values = values, .y = y,
                 .first = first, .heads = heads, .groups = groups, .dim = dim,
                 .capacity = capacity, .length = length, .rotation_stride = rotation_stride,
                 .failed = &failed};
    for_units(unit_of_head, &job, batch * groups, threads);
    return -atomic_load(&failed);
}
