/* Attention of one new position to itself and to those in the cache, one key/value head. */
#ifndef CACHED_ATTENTION_H
#define CACHED_ATTENTION_H

#include "rope.h"

typedef struct {
    const wide *q, *k, *v;      /* of the new position: the query heads that share this one, before RoPE */
    const wide *cos, *sin;      /* (K / 2) of the new position */
    wide *keys, *values;        /* (capacity, K): the new ones go to position `length` */
    wide *y;                    /* (heads, K) */
    long heads, dim, length, first; /* first: before it the cache holds padding */
} cached_attention_t;

/* The size of `scratch`, in numbers. */
static inline long cached_attention_scratch(long dim, long length) { return dim + round_up(length + 1, LANES); }

static inline void attend_to_cache(const cached_attention_t *a, wide *scratch) {
    const long dim = a->dim, length = a->length, padded = round_up(length + 1, LANES);
    const long first = a->first < length ? a->first : length; /* a padded row sees itself */
    wide *q = scratch, *p = scratch + dim;
    rotate(a->k, a->keys + length * dim, a->cos, a->sin, dim, 1, 1);
    memcpy(a->values + length * dim, a->v, (size_t)dim * sizeof(wide));
    for (long head = 0; head < a->heads; head++) {
        rotate(a->q + head * dim, q, a->cos, a->sin, dim, 1, 1 / sqrt((wide)dim));
        wide top = -INFINITY;
        for (long t = 0; t < padded; t++) p[t] = -INFINITY;
        for (long t = first; t <= length; t++) {
            p[t] = dot(q, a->keys + t * dim, dim);
            top = p[t] > top ? p[t] : top;
        }
        vec sum = splat(0);
        for (long t = 0; t < padded; t += LANES) {
            vec e = vec_exp(load(p + t) - top);
            store(p + t, e);
            sum += e;
        }
        const wide scale = 1 / sum_lanes(sum);
        wide *y = a->y + head * dim;
        long c = 0;
        for (; c + LANES <= dim; c += LANES) {
            vec total = splat(0);
            for (long t = first; t <= length; t++) total += p[t] * load(a->values + t * dim + c);
            store(y + c, total * scale);
        }
        for (; c < dim; c++) {
            wide total = 0;
            for (long t = first; t <= length; t++) total += p[t] * a->values[t * dim + c];
            y[c] = total * scale;
        }
    }
}

#endif
