/* Attention of one new position of each sequence, to itself and to those in its cache.
 *
 * A unit of work is one key/value head of one sequence: the rotated new key and the new value
 * go into the cache, then each query head that reads them attends to all.
 *
 * qkv is (B, 1, H + 2G, K); keys and values are (B, G, capacity, K).
 */
#include "cached_attention.h"
#include "kernels.h"
#include "threads.h"

typedef struct {
    const wide *qkv, *cos, *sin;
    wide *keys, *values, *y;
    const int64_t *first; /* of each sequence; NULL: 0 */
    long heads, groups, dim, capacity, length, rotation_stride;
    atomic_int *failed;
} decode_attention_job;

static void decode_attention_unit(const void *argument, long unit) {
    const decode_attention_job *job = argument;
    const long dim = job->dim, group = job->heads / job->groups;
    const long batch = unit / job->groups, kv = unit % job->groups;
    const wide *qkv = job->qkv + batch * (job->heads + 2 * job->groups) * dim;
    wide *scratch = malloc((size_t)cached_attention_scratch(dim, job->length) * sizeof(wide));
    if (!scratch) {
        atomic_store(job->failed, 1);
        return;
    }
    cached_attention_t one = {
        .q = qkv + kv * group * dim,
        .k = qkv + (job->heads + kv) * dim,
        .v = qkv + (job->heads + job->groups + kv) * dim,
        .cos = job->cos + batch * job->rotation_stride,
        .sin = job->sin + batch * job->rotation_stride,
        .keys = job->keys + unit * job->capacity * dim,
        .values = job->values + unit * job->capacity * dim,
        .y = job->y + (batch * job->heads + kv * group) * dim,
        .heads = group,
        .dim = dim,
        .length = job->length,
        .first = job->first ? job->first[batch] : 0,
    };
    attend_to_cache(&one, scratch);
    free(scratch);
}

int decode_attention(const wide *qkv, const wide *cos, const wide *sin, wide *keys, wide *values,
           const int64_t *first, wide *y, long batch, long heads, long groups, long dim,
           long capacity, long length, long rotation_stride, int threads) {
    atomic_int failed = 0;
    decode_attention_job job = {.qkv = qkv, .cos = cos, .sin = sin, .keys = keys, .values = values, .y = y,
                 .first = first, .heads = heads, .groups = groups, .dim = dim,
                 .capacity = capacity, .length = length, .rotation_stride = rotation_stride,
                 .failed = &failed};
    for_units(decode_attention_unit, &job, batch * groups, threads);
    return -atomic_load(&failed);
}
