/* Causal attention with rotary positions and grouped queries, for sequences that begin at 0.
 *
 *   forward    q, k rotated (RoPE);  S = q k' / sqrt(K),  P = softmax(S),  y = P v
 *   backward   D = dy . y,  dS = P (dy v' - D),  dq = dS k / sqrt(K),  dk = dS' q / sqrt(K),
 *              dv = P' dy,  and dq, dk rotated back
 *
 * A unit of work is one key/value head of one sequence, with the queries that read it.  Its keys and
 * values are copied once, rotated, into scratch that stays in the cache, in both layouts that the
 * products need.  Queries are processed in blocks of QUERIES, each with all keys up to its own
 * positions: S is QUERIES x T, never T x T.  The backward pass recomputes P from the log of each row's
 * sum (Dao 2022, FlashAttention, section 3), so only qkv, y and that are kept.
 *
 * qkv is (B, T, H + 2G, K): query heads, key heads, value heads; cos and sin are (T, K / 2).
 */
#include "kernels.h"
#include "rope.h"
#include "threads.h"

#define PREFETCH_ROWS 8 /* prefetching beyond the end is harmless */

#define QUERIES 8
#if MANY_REGISTERS /* for QUERIES x KEY_VECS sums and their operands */
#define KEY_VECS 2
#else
#define KEY_VECS 1
#endif

typedef struct {
    const wide *qkv, *cos, *sin, *y, *dy;
    wide *out, *log_sum, *dqkv; /* log_sum: of exp of each query's row of S, (B, H, T) */
    long heads, groups, length, dim;
    wide *scratch; /* scratch_size numbers for each thread */
    long scratch_size;
    int threads;
} attention_job;

static inline void copy_row(const wide *restrict x, wide *restrict y, long dim) {
    long c = 0;
    for (; c + LANES <= dim; c += LANES) store(y + c, load(x + c));
    if (c < dim) memcpy(y + c, x + c, (size_t)(dim - c) * sizeof(wide));
}

/* A head's rows are far apart in memory: hardware does not predict the next. */
static inline void prefetch_row(const wide *row, long dim) {
    for (long c = 0; c < dim; c += LANES) __builtin_prefetch(row + c);
}

/* S[r][j] = sum over c of q[r][c] kt[c][j], for whole vectors of j below `columns`. */
static inline void scores_of(const wide *restrict q, long q_stride, const wide *restrict kt,
                             long kt_stride, wide *restrict s, long s_stride, long dim, int block) {
    vec sum[QUERIES][KEY_VECS];
    for (int r = 0; r < QUERIES; r++)
        for (int b = 0; b < block; b++) sum[r][b] = splat(0);
    for (long c = 0; c < dim; c++) {
        vec k[KEY_VECS];
        for (int b = 0; b < block; b++) k[b] = load(kt + c * kt_stride + b * LANES);
        for (int r = 0; r < QUERIES; r++)
            for (int b = 0; b < block; b++) sum[r][b] += q[r * q_stride + c] * k[b];
    }
    for (int r = 0; r < QUERIES; r++)
        for (int b = 0; b < block; b++) store(s + r * s_stride + b * LANES, sum[r][b]);
}

static inline void scores(const wide *restrict q, long q_stride, const wide *restrict kt,
                          long kt_stride, wide *restrict s, long s_stride, long dim, long columns) {
    long j = 0;
    for (; j + KEY_VECS * LANES <= columns; j += KEY_VECS * LANES)
        scores_of(q, q_stride, kt + j, kt_stride, s + j, s_stride, dim, KEY_VECS);
    for (; j < columns; j += LANES)
        scores_of(q, q_stride, kt + j, kt_stride, s + j, s_stride, dim, 1);
}

/* y[r][c] = sum over j < rows of p[r][j] v[j][c], c in whole vectors. */
static inline void weighted_sum(const wide *restrict p, long p_stride, const wide *restrict v, long v_stride,
                       wide *restrict y, long y_stride, long rows, long dim) {
    for (long c = 0; c < dim; c += LANES) {
        vec sum[QUERIES];
        for (int r = 0; r < QUERIES; r++) sum[r] = splat(0);
        for (long j = 0; j < rows; j++) {
            vec x = load(v + j * v_stride + c);
            for (int r = 0; r < QUERIES; r++) sum[r] += p[r * p_stride + j] * x;
        }
        for (int r = 0; r < QUERIES; r++) store(y + r * y_stride + c, sum[r]);
    }
}

/* y[j][c] += sum over r of p[r][j] x[r][c], for j < rows, c in whole vectors; several j at
 * once, so that one sum need not wait for the other. */
#define KEYS_AT_ONCE 4
static inline void add_outer(const wide *restrict p, long p_stride, const wide *restrict x,
                          long x_stride, wide *restrict y, long y_stride, long rows, long dim) {
    for (long c = 0; c < dim; c += LANES) {
        vec kept[QUERIES];
        for (int r = 0; r < QUERIES; r++) kept[r] = load(x + r * x_stride + c);
        for (long j = 0; j < rows; j += KEYS_AT_ONCE) { /* y and p are padded to it */
            vec sum[KEYS_AT_ONCE];
            for (int i = 0; i < KEYS_AT_ONCE; i++) sum[i] = load(y + (j + i) * y_stride + c);
            for (int r = 0; r < QUERIES; r++)
                for (int i = 0; i < KEYS_AT_ONCE; i++) sum[i] += p[r * p_stride + j + i] * kept[r];
            for (int i = 0; i < KEYS_AT_ONCE; i++) store(y + (j + i) * y_stride + c, sum[i]);
        }
    }
}

/* Scratch of one unit: sizes are rounded up to whole vectors, which start as zeros. */
typedef struct {
    wide *kt, *vt, *k, *v, *dk, *dv; /* (dim, columns), (rows, width) */
    wide *q, *dy, *acc, *s, *ds;     /* QUERIES x width, QUERIES x columns */
    long rows, columns, width;
} attention_scratch;

/* Places all arrays from `start` on and returns their size, in numbers. */
static long lay_out_scratch(attention_scratch *m, const attention_job *job, int backward, wide *start) {
    m->rows = round_up(job->length, QUERIES);
    m->columns = round_up(m->rows, LANES);
    m->width = round_up(job->dim, LANES);
    const long t = job->dim * m->columns, n = m->rows * m->width, few = QUERIES * m->width;
    wide *p = start;
    m->kt = p, p += t;
    m->k = p, p += n;
    m->v = p, p += n;
    m->q = p, p += few;
    m->acc = p, p += few;
    m->s = p, p += QUERIES * m->columns;
    if (backward) {
        m->vt = p, p += t;
        m->dk = p, p += n;
        m->dv = m->v; /* v itself is not needed, only vt */
        m->dy = p, p += few;
        m->ds = p, p += QUERIES * m->columns;
    }
    return p - start;
}

static attention_scratch scratch_of_thread(const attention_job *job, int backward) {
    attention_scratch m;
    wide *start = job->scratch + thread_of(job->threads) * job->scratch_size;
    memset(start, 0, (size_t)lay_out_scratch(&m, job, backward, start) * sizeof(wide));
    return m;
}

static void attention_forward_unit(const void *argument, long unit) {
    const attention_job *job = argument;
    const long length = job->length, dim = job->dim, group = job->heads / job->groups;
    const long batch = unit / job->groups, kv = unit % job->groups;
    const long stride = (job->heads + 2 * job->groups) * dim; /* of one position */
    const wide *qkv = job->qkv + batch * length * stride;
    const wide scale = 1 / sqrt((wide)dim);
    const attention_scratch m = scratch_of_thread(job, 0);
    for (long t = 0; t < length; t++) {
        const wide *k = qkv + t * stride + (job->heads + kv) * dim;
        prefetch_row(k + PREFETCH_ROWS * stride, dim);
        prefetch_row(k + PREFETCH_ROWS * stride + job->groups * dim, dim);
        rotate(k, m.k + t * m.width, job->cos + t * dim / 2, job->sin + t * dim / 2, dim, 1, 1);
        copy_row(k + job->groups * dim, m.v + t * m.width, dim);
    }
    transpose(m.k, m.width, m.kt, m.columns, length, dim);
    for (long head = kv * group; head < (kv + 1) * group; head++)
        for (long first = 0; first < length; first += QUERIES) {
            long rows = length - first < QUERIES ? length - first : QUERIES;
            for (long r = 0; r < rows; r++) {
                long t = first + r;
                prefetch_row(qkv + (t + PREFETCH_ROWS) * stride + head * dim, dim);
                rotate(qkv + t * stride + head * dim, m.q + r * m.width, job->cos + t * dim / 2,
                     job->sin + t * dim / 2, dim, 1, scale);
            }
            long seen = first + QUERIES, columns = round_up(seen, LANES);
            scores(m.q, m.width, m.kt, m.columns, m.s, m.columns, dim, columns);
            wide sum[QUERIES];
            for (long r = 0; r < rows; r++) {
                wide *s = m.s + r * m.columns;
                for (long j = first + r + 1; j < columns; j++) s[j] = -INFINITY;
                vec highest = load(s), total = splat(0);
                for (long j = LANES; j < columns; j += LANES) highest = vec_max(highest, load(s + j));
                const wide top = max_lanes(highest);
                for (long j = 0; j < columns; j += LANES) {
                    vec p = vec_exp(load(s + j) - top);
                    store(s + j, p);
                    total += p;
                }
                sum[r] = sum_lanes(total);
                if (job->log_sum)
                    job->log_sum[(batch * job->heads + head) * length + first + r] =
                        top + log(sum[r]);
            }
            weighted_sum(m.s, m.columns, m.v, m.width, m.acc, m.width, first + rows, m.width);
            for (long r = 0; r < rows; r++) {
                wide *y = job->out + ((batch * length + first + r) * job->heads + head) * dim;
                const wide *acc = m.acc + r * m.width, over = 1 / sum[r];
                long c = 0;
                for (; c + LANES <= dim; c += LANES) store(y + c, load(acc + c) * over);
                for (; c < dim; c++) y[c] = acc[c] * over;
            }
        }
}

static void attention_backward_unit(const void *argument, long unit) {
    const attention_job *job = argument;
    const long length = job->length, dim = job->dim, group = job->heads / job->groups;
    const long batch = unit / job->groups, kv = unit % job->groups;
    const long stride = (job->heads + 2 * job->groups) * dim;
    const wide *qkv = job->qkv + batch * length * stride;
    wide *dqkv = job->dqkv + batch * length * stride;
    const wide scale = 1 / sqrt((wide)dim);
    const attention_scratch m = scratch_of_thread(job, 1);
    for (long t = 0; t < length; t++) {
        const wide *k = qkv + t * stride + (job->heads + kv) * dim;
        prefetch_row(k + PREFETCH_ROWS * stride, dim);
        prefetch_row(k + PREFETCH_ROWS * stride + job->groups * dim, dim);
        rotate(k, m.k + t * m.width, job->cos + t * dim / 2, job->sin + t * dim / 2, dim, 1, 1);
    }
    transpose(m.k, m.width, m.kt, m.columns, length, dim);
    transpose(qkv + (job->heads + job->groups + kv) * dim, stride, m.vt, m.columns, length, dim);
    for (long head = kv * group; head < (kv + 1) * group; head++)
        for (long first = 0; first < length; first += QUERIES) {
            long rows = length - first < QUERIES ? length - first : QUERIES;
            wide log_sum[QUERIES] = {0}, dot[QUERIES] = {0};
            for (long r = 0; r < QUERIES; r++) {
                wide *q = m.q + r * m.width, *dy = m.dy + r * m.width;
                if (r >= rows) { /* beyond the end: contributes zeros */
                    memset(q, 0, (size_t)dim * sizeof(wide));
                    memset(dy, 0, (size_t)dim * sizeof(wide));
                    continue;
                }
                long t = first + r, at = ((batch * length + t) * job->heads + head) * dim;
                rotate(qkv + t * stride + head * dim, q, job->cos + t * dim / 2,
                     job->sin + t * dim / 2, dim, 1, scale);
                prefetch_row(qkv + (t + PREFETCH_ROWS) * stride + head * dim, dim);
                prefetch_row(job->dy + at + PREFETCH_ROWS * job->heads * dim, dim);
                prefetch_row(job->y + at + PREFETCH_ROWS * job->heads * dim, dim);
                copy_row(job->dy + at, dy, dim);
                copy_row(job->y + at, m.acc, dim);
                vec products = splat(0);
                for (long c = 0; c < m.width; c += LANES) products += load(dy + c) * load(m.acc + c);
                dot[r] = sum_lanes(products);
                log_sum[r] = job->log_sum[(batch * job->heads + head) * length + t];
            }
            long seen = first + QUERIES, columns = round_up(seen, LANES);
            scores(m.q, m.width, m.kt, m.columns, m.s, m.columns, dim, columns);
            scores(m.dy, m.width, m.vt, m.columns, m.ds, m.columns, dim, columns);
            for (long r = 0; r < QUERIES; r++) {
                wide *s = m.s + r * m.columns, *ds = m.ds + r * m.columns;
                for (long j = first + r + 1; j < columns; j++) s[j] = -INFINITY;
                for (long j = 0; j < columns; j += LANES) {
                    vec p = vec_exp(load(s + j) - log_sum[r]);
                    store(s + j, p);
                    store(ds + j, p * (load(ds + j) - dot[r]));
                }
            }
            long end = first + rows;
            weighted_sum(m.ds, m.columns, m.k, m.width, m.acc, m.width, end, m.width);
            add_outer(m.ds, m.columns, m.q, m.width, m.dk, m.width, end, m.width);
            add_outer(m.s, m.columns, m.dy, m.width, m.dv, m.width, end, m.width);
            for (long r = 0; r < rows; r++) {
                long t = first + r;
                rotate(m.acc + r * m.width, dqkv + t * stride + head * dim, job->cos + t * dim / 2,
                     job->sin + t * dim / 2, dim, -1, scale);
            }
        }
    for (long t = 0; t < length; t++) { /* dk has its scale from q */
        wide *dk = dqkv + t * stride + (job->heads + kv) * dim;
        rotate(m.dk + t * m.width, dk, job->cos + t * dim / 2, job->sin + t * dim / 2, dim, -1, 1);
        copy_row(m.dv + t * m.width, dk + job->groups * dim, dim);
    }
}

static int run_attention(void (*work)(const void *, long), attention_job job, long batch, int backward, int threads) {
    const long units = batch * job.groups;
    attention_scratch m;
    job.threads = threads_of(units, threads);
    job.scratch_size = round_up(lay_out_scratch(&m, &job, backward, NULL), LANES);
    wide *memory = malloc((size_t)(job.threads * job.scratch_size + LANES) * sizeof(wide));
    if (!memory) return -1;
    job.scratch = (wide *)(((uintptr_t)memory + VECTOR_BYTES - 1) / VECTOR_BYTES * VECTOR_BYTES);
    for_units(work, &job, units, threads);
    free(memory);
    return 0;
}

int attention_forward(const wide *qkv, const wide *cos, const wide *sin, wide *y, wide *log_sum,
                      long batch, long length, long heads, long groups, long dim, int threads) {
    attention_job job = {.qkv = qkv, .cos = cos, .sin = sin, .out = y, .log_sum = log_sum, .heads = heads,
                 .groups = groups, .length = length, .dim = dim};
    return run_attention(attention_forward_unit, job, batch, 0, threads);
}

int attention_backward(const wide *dy, const wide *qkv, const wide *cos, const wide *sin,
                       const wide *y, const wide *log_sum, wide *dqkv, long batch, long length,
                       long heads, long groups, long dim, int threads) {
    attention_job job = {.qkv = qkv, .cos = cos, .sin = sin, .y = y, .dy = dy, .log_sum = (wide *)log_sum,
                 .dqkv = dqkv, .heads = heads, .groups = groups, .length = length, .dim = dim};
    return run_attention(attention_backward_unit, job, batch, 1, threads);
}
