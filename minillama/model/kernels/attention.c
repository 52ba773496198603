/* Causal attention with rotary positions and grouped queries, for sequences that begin at 0.
 *
 *   forward    q, k turned by RoPE;  S = q k' / sqrt(K),  P = softmax(S),  y = P v
 *   backward   D = dy . y,  dS = P (dy v' - D),  dq = dS k / sqrt(K),  dk = dS' q / sqrt(K),
 *              dv = P' dy,  and dq, dk turned back
 *
 * A unit of work is one key/value head of one sequence, with the queries that read it.  Its keys and
 * values are copied once, turned, to where they stay in the cache, in both orders that the products
 * need.  Queries go through in blocks of ROWS, each against all keys that it may see: S is ROWS x T,
 * never T x T.  The backward pass computes P anew from the log of each row's sum (Dao 2022,
 * FlashAttention, section 3), so only qkv, y and that are kept.
 *
 * qkv is (B, T, H + 2G, K): query heads, key heads, value heads; cos and sin are (T, K / 2).
 */
#include "kernel.h"
#include "rope.h"
#include "units.h"

#define AHEAD 8 /* rows: memory is asked for so early; a row that is not there is not read */

#define ROWS 8
#if MANY_REGISTERS /* they hold ROWS x BLOCK sums and what is added to them */
#define BLOCK 2
#else
#define BLOCK 1
#endif

typedef struct {
    const wide *qkv, *cos, *sin, *y, *dy;
    wide *out, *log_sum, *dqkv; /* log_sum: of exp of each query's row of S, (B, H, T) */
    long heads, groups, length, dim;
    wide *rooms; /* one for each thread, of room_size numbers */
    long room_size;
    int threads;
} job_t;

static inline void copy(const wide *restrict x, wide *restrict y, long dim) {
    long c = 0;
    for (; c + LANES <= dim; c += LANES) store(y + c, load(x + c));
    if (c < dim) memcpy(y + c, x + c, (size_t)(dim - c) * sizeof(wide));
}

/* Heads of one position lie among all others': no hardware foresees where the next row is. */
static inline void ask_for(const wide *row, long dim) {
    for (long c = 0; c < dim; c += LANES) __builtin_prefetch(row + c);
}

/* S[r][j] = sum over c of q[r][c] kt[c][j], for whole vectors of j below `columns`. */
static inline void scores_of(const wide *restrict q, long q_stride, const wide *restrict kt,
                             long kt_stride, wide *restrict s, long s_stride, long dim, int block) {
    vec sum[ROWS][BLOCK];
    for (int r = 0; r < ROWS; r++)
        for (int b = 0; b < block; b++) sum[r][b] = splat(0);
    for (long c = 0; c < dim; c++) {
        vec k[BLOCK];
        for (int b = 0; b < block; b++) k[b] = load(kt + c * kt_stride + b * LANES);
        for (int r = 0; r < ROWS; r++)
            for (int b = 0; b < block; b++) sum[r][b] += q[r * q_stride + c] * k[b];
    }
    for (int r = 0; r < ROWS; r++)
        for (int b = 0; b < block; b++) store(s + r * s_stride + b * LANES, sum[r][b]);
}

static inline void scores(const wide *restrict q, long q_stride, const wide *restrict kt,
                          long kt_stride, wide *restrict s, long s_stride, long dim, long columns) {
    long j = 0;
    for (; j + BLOCK * LANES <= columns; j += BLOCK * LANES)
        scores_of(q, q_stride, kt + j, kt_stride, s + j, s_stride, dim, BLOCK);
    for (; j < columns; j += LANES)
        scores_of(q, q_stride, kt + j, kt_stride, s + j, s_stride, dim, 1);
}

/* y[r][c] = sum over j < rows of p[r][j] v[j][c], c in whole vectors. */
static inline void mix(const wide *restrict p, long p_stride, const wide *restrict v, long v_stride,
                       wide *restrict y, long y_stride, long rows, long dim) {
    for (long c = 0; c < dim; c += LANES) {
        vec sum[ROWS];
        for (int r = 0; r < ROWS; r++) sum[r] = splat(0);
        for (long j = 0; j < rows; j++) {
            vec x = load(v + j * v_stride + c);
            for (int r = 0; r < ROWS; r++) sum[r] += p[r * p_stride + j] * x;
        }
        for (int r = 0; r < ROWS; r++) store(y + r * y_stride + c, sum[r]);
    }
}

/* y[j][c] += sum over r of p[r][j] x[r][c], for j < rows, c in whole vectors; PAIR of j at once, so
 * that one sum need not wait for the other. */
#define PAIR 4
static inline void spread(const wide *restrict p, long p_stride, const wide *restrict x,
                          long x_stride, wide *restrict y, long y_stride, long rows, long dim) {
    for (long c = 0; c < dim; c += LANES) {
        vec kept[ROWS];
        for (int r = 0; r < ROWS; r++) kept[r] = load(x + r * x_stride + c);
        for (long j = 0; j < rows; j += PAIR) { /* y and p have room for whole PAIRs */
            vec sum[PAIR];
            for (int i = 0; i < PAIR; i++) sum[i] = load(y + (j + i) * y_stride + c);
            for (int r = 0; r < ROWS; r++)
                for (int i = 0; i < PAIR; i++) sum[i] += p[r * p_stride + j + i] * kept[r];
            for (int i = 0; i < PAIR; i++) store(y + (j + i) * y_stride + c, sum[i]);
        }
    }
}

/* y[c][t] = x[t][c], a few rows at once: what compilers make of more, gathers, is slower */
static inline void transpose(const wide *restrict x, long x_stride, wide *restrict y, long y_stride,
                             long rows, long columns) {
    long t = 0;
    for (; t + FEW <= rows; t += FEW, x += FEW * x_stride)
        for (long c = 0; c < columns; c++) {
            vec16 v;
            for (int i = 0; i < FEW; i++) v[i] = x[i * x_stride + c];
            *(unaligned_vec16 *)(y + c * y_stride + t) = v;
        }
    for (; t < rows; t++, x += x_stride)
        for (long c = 0; c < columns; c++) y[c * y_stride + t] = x[c];
}

/* Memory of one unit: sizes are rounded up to whole vectors, which begin as zeros. */
typedef struct {
    wide *kt, *vt, *k, *v, *dk, *dv; /* (dim, columns), (rows, width) */
    wide *q, *dy, *acc, *s, *ds;     /* ROWS x width, ROWS x columns */
    long rows, columns, width;
} room_t;

/* Lays a room out from `start` on, and tells how many numbers it takes. */
static long lay_out(room_t *m, const job_t *job, int backward, wide *start) {
    m->rows = round_up(job->length, ROWS);
    m->columns = round_up(m->rows, LANES);
    m->width = round_up(job->dim, LANES);
    const long t = job->dim * m->columns, n = m->rows * m->width, few = ROWS * m->width;
    wide *p = start;
    m->kt = p, p += t;
    m->k = p, p += n;
    m->v = p, p += n;
    m->q = p, p += few;
    m->acc = p, p += few;
    m->s = p, p += ROWS * m->columns;
    if (backward) {
        m->vt = p, p += t;
        m->dk = p, p += n;
        m->dv = m->v; /* v itself is not needed, only vt */
        m->dy = p, p += few;
        m->ds = p, p += ROWS * m->columns;
    }
    return p - start;
}

static room_t make_room(const job_t *job, int backward) {
    room_t m;
    wide *start = job->rooms + thread_of(job->threads) * job->room_size;
    memset(start, 0, (size_t)lay_out(&m, job, backward, start) * sizeof(wide));
    return m;
}

static void forward_unit(const void *argument, long unit) {
    const job_t *job = argument;
    const long length = job->length, dim = job->dim, group = job->heads / job->groups;
    const long batch = unit / job->groups, kv = unit % job->groups;
    const long stride = (job->heads + 2 * job->groups) * dim; /* of one position */
    const wide *qkv = job->qkv + batch * length * stride;
    const wide scale = 1 / sqrt((wide)dim);
    const room_t m = make_room(job, 0);
    for (long t = 0; t < length; t++) {
        const wide *k = qkv + t * stride + (job->heads + kv) * dim;
        ask_for(k + AHEAD * stride, dim);
        ask_for(k + AHEAD * stride + job->groups * dim, dim);
        turn(k, m.k + t * m.width, job->cos + t * dim / 2, job->sin + t * dim / 2, dim, 1, 1);
        copy(k + job->groups * dim, m.v + t * m.width, dim);
    }
    transpose(m.k, m.width, m.kt, m.columns, length, dim);
    for (long head = kv * group; head < (kv + 1) * group; head++)
        for (long first = 0; first < length; first += ROWS) {
            long rows = length - first < ROWS ? length - first : ROWS;
            for (long r = 0; r < rows; r++) {
                long t = first + r;
                ask_for(qkv + (t + AHEAD) * stride + head * dim, dim);
                turn(qkv + t * stride + head * dim, m.q + r * m.width, job->cos + t * dim / 2,
                     job->sin + t * dim / 2, dim, 1, scale);
            }
            long seen = first + ROWS, columns = round_up(seen, LANES);
            scores(m.q, m.width, m.kt, m.columns, m.s, m.columns, dim, columns);
            wide sum[ROWS];
            for (long r = 0; r < rows; r++) {
                wide *s = m.s + r * m.columns;
                for (long j = first + r + 1; j < columns; j++) s[j] = -INFINITY;
                vec highest = load(s), total = splat(0);
                for (long j = LANES; j < columns; j += LANES) highest = vec_max(highest, load(s + j));
                const wide top = max_of(highest);
                for (long j = 0; j < columns; j += LANES) {
                    vec p = vec_exp(load(s + j) - top);
                    store(s + j, p);
                    total += p;
                }
                sum[r] = sum_of(total);
                if (job->log_sum)
                    job->log_sum[(batch * job->heads + head) * length + first + r] =
                        top + log(sum[r]);
            }
            mix(m.s, m.columns, m.v, m.width, m.acc, m.width, first + rows, m.width);
            for (long r = 0; r < rows; r++) {
                wide *y = job->out + ((batch * length + first + r) * job->heads + head) * dim;
                const wide *acc = m.acc + r * m.width, over = 1 / sum[r];
                long c = 0;
                for (; c + LANES <= dim; c += LANES) store(y + c, load(acc + c) * over);
                for (; c < dim; c++) y[c] = acc[c] * over;
            }
        }
}

static void backward_unit(const void *argument, long unit) {
    const job_t *job = argument;
    const long length = job->length, dim = job->dim, group = job->heads / job->groups;
    const long batch = unit / job->groups, kv = unit % job->groups;
    const long stride = (job->heads + 2 * job->groups) * dim;
    const wide *qkv = job->qkv + batch * length * stride;
    wide *dqkv = job->dqkv + batch * length * stride;
    const wide scale = 1 / sqrt((wide)dim);
    const room_t m = make_room(job, 1);
    for (long t = 0; t < length; t++) {
        const wide *k = qkv + t * stride + (job->heads + kv) * dim;
        ask_for(k + AHEAD * stride, dim);
        ask_for(k + AHEAD * stride + job->groups * dim, dim);
        turn(k, m.k + t * m.width, job->cos + t * dim / 2, job->sin + t * dim / 2, dim, 1, 1);
    }
    transpose(m.k, m.width, m.kt, m.columns, length, dim);
    transpose(qkv + (job->heads + job->groups + kv) * dim, stride, m.vt, m.columns, length, dim);
    for (long head = kv * group; head < (kv + 1) * group; head++)
        for (long first = 0; first < length; first += ROWS) {
            long rows = length - first < ROWS ? length - first : ROWS;
            wide log_sum[ROWS] = {0}, dot[ROWS] = {0};
            for (long r = 0; r < ROWS; r++) {
                wide *q = m.q + r * m.width, *dy = m.dy + r * m.width;
                if (r >= rows) { /* beyond the end: adds nothing */
                    memset(q, 0, (size_t)dim * sizeof(wide));
                    memset(dy, 0, (size_t)dim * sizeof(wide));
                    continue;
                }
                long t = first + r, at = ((batch * length + t) * job->heads + head) * dim;
                turn(qkv + t * stride + head * dim, q, job->cos + t * dim / 2,
                     job->sin + t * dim / 2, dim, 1, scale);
                ask_for(qkv + (t + AHEAD) * stride + head * dim, dim);
                ask_for(job->dy + at + AHEAD * job->heads * dim, dim);
                ask_for(job->y + at + AHEAD * job->heads * dim, dim);
                copy(job->dy + at, dy, dim);
                copy(job->y + at, m.acc, dim);
                vec products = splat(0);
                for (long c = 0; c < m.width; c += LANES) products += load(dy + c) * load(m.acc + c);
                dot[r] = sum_of(products);
                log_sum[r] = job->log_sum[(batch * job->heads + head) * length + t];
            }
            long seen = first + ROWS, columns = round_up(seen, LANES);
            scores(m.q, m.width, m.kt, m.columns, m.s, m.columns, dim, columns);
            scores(m.dy, m.width, m.vt, m.columns, m.ds, m.columns, dim, columns);
            for (long r = 0; r < ROWS; r++) {
                wide *s = m.s + r * m.columns, *ds = m.ds + r * m.columns;
                for (long j = first + r + 1; j < columns; j++) s[j] = -INFINITY;
                for (long j = 0; j < columns; j += LANES) {
                    vec p = vec_exp(load(s + j) - log_sum[r]);
                    store(s + j, p);
                    store(ds + j, p * (load(ds + j) - dot[r]));
                }
            }
            long end = first + rows;
            mix(m.ds, m.columns, m.k, m.width, m.acc, m.width, end, m.width);
            spread(m.ds, m.columns, m.q, m.width, m.dk, m.width, end, m.width);
            spread(m.s, m.columns, m.dy, m.width, m.dv, m.width, end, m.width);
            for (long r = 0; r < rows; r++) {
                long t = first + r;
                turn(m.acc + r * m.width, dqkv + t * stride + head * dim, job->cos + t * dim / 2,
                     job->sin + t * dim / 2, dim, -1, scale);
            }
        }
    for (long t = 0; t < length; t++) { /* dk has its scale from q */
        wide *dk = dqkv + t * stride + (job->heads + kv) * dim;
        turn(m.dk + t * m.width, dk, job->cos + t * dim / 2, job->sin + t * dim / 2, dim, -1, 1);
        copy(m.dv + t * m.width, dk + job->groups * dim, dim);
    }
}

/* Returns 0, or -1 if there is no memory. */
static int run(void (*work)(const void *, long), job_t job, long batch, int backward, int threads) {
    const long units = batch * job.groups;
    room_t m;
    job.threads = threads_of(units, threads);
    job.room_size = round_up(lay_out(&m, &job, backward, NULL), LANES);
    wide *memory = malloc((size_t)(job.threads * job.room_size + LANES) * sizeof(wide));
    if (!memory) return -1;
    job.rooms = (wide *)(((uintptr_t)memory + VECTOR_BYTES - 1) / VECTOR_BYTES * VECTOR_BYTES);
    for_units(work, &job, units, threads);
    free(memory);
    return 0;
}

/* log_sum may be NULL. */
int attention_forward(const wide *qkv, const wide *cos, const wide *sin, wide *y, wide *log_sum,
                      long batch, long length, long heads, long groups, long dim, int threads) {
    job_t job = {.qkv = qkv, .cos = cos, .sin = sin, .out = y, .log_sum = log_sum, .heads = heads,
                 .groups = groups, .length = length, .dim = dim};
    return run(forward_unit, job, batch, 0, threads);
}

int attention_backward(const wide *dy, const wide *qkv, const wide *cos, const wide *sin,
                       const wide *y, const wide *log_sum, wide *dqkv, long batch, long length,
                       long heads, long groups, long dim, int threads) {
    job_t job = {.qkv = qkv, .cos = cos, .sin = sin, .y = y, .dy = dy, .log_sum = (wide *)log_sum,
                 .dqkv = dqkv, .heads = heads, .groups = groups, .length = length, .dim = dim};
    return run(backward_unit, job, batch, 1, threads);
}
