/* RMSNorm over contiguous rows, one pass over memory in each direction.
 *
 *   forward    r = 1 / sqrt(mean(x^2) + eps),  y = x r * gain
 *   backward   n = x r,  dx = r (g gain - n mean(g gain n)),  dgain = sum over rows of g n
 *
 * Rows are cut into chunks by the shape alone; each chunk has its own partial sum of dgain, and
 * these are added in order.  So results do not depend on the number of threads, to the bit.  A
 * thread begins with its own share of the chunks, the same in each call, so that its cache may hold
 * them already; then it helps the others.
 */
#include "kernel.h"
#include <stdatomic.h>

#define ROWS FEW        /* side by side, which hides how long a sum and a root take … */
#define SHORT_DIM 600   /* … if they are shorter: all must stay in the nearest cache */
#define MAX_CHUNKS 64   /* bounds the memory of the partial sums of dgain */
#define CHUNK_SIZE 8192 /* numbers in a chunk, at least: taking one must cost nothing beside it */

typedef struct {
    const scalar *x, *grad;
    const wide *gain;
    scalar *y, *dx;
    wide *r;        /* 1 / rms of each row; forward: NULL if it need not be kept */
    wide *partials; /* of dgain, one row for each chunk */
    long rows, dim, chunk_rows, chunks;
    wide eps;
    int cast_first;
    int threads;
    atomic_long next[MAX_CHUNKS]; /* chunk of each thread's share */
} job_t;

/* n numbers of a row, from p on: LANES, or fewer with zeros behind them. */
static inline vec get(const scalar *p, long n) {
    if (n == LANES) return load_scalars(p);
    scalar lane[LANES] = {0};
    memcpy(lane, p, (size_t)n * sizeof(scalar));
    return load_scalars(lane);
}

static inline void put(scalar *p, vec v, long n) {
    if (n == LANES) {
        store_scalars(p, v);
        return;
    }
    scalar lane[LANES];
    store_scalars(lane, v);
    memcpy(p, lane, (size_t)n * sizeof(scalar));
}

static inline vec get_wide(const wide *p, long n) { return n == LANES ? load(p) : load_some(p, n); }

/* total[k] = the sum of lanes[k], for all rows at once */
static inline void sum_rows(const vec *lanes, wide *total, int rows) {
    vec16 column[ROWS];
    for (int j = 0; j < ROWS; j++) column[j] = (vec16){0};
    for (int k = 0; k < rows; k++) {
        vec16 part = folded(lanes[k]);
        for (int j = 0; j < ROWS; j++) column[j][k] = part[j];
    }
    for (int half = ROWS / 2; half; half /= 2)
        for (int j = 0; j < half; j++) column[j] += column[j + half];
    for (int k = 0; k < rows; k++) total[k] = column[0][k];
}

/* In what follows x, g, y and dx are the first of `rows` rows, ROWS or 1, a constant in each call; n is
 * how many of the LANES features from i on there are. */

static inline void add_squares(const job_t *job, const scalar *x, long i, long n, vec *lanes,
                               int rows) {
    for (int k = 0; k < rows; k++) {
        vec v = get(x + k * job->dim + i, n);
        lanes[k] += v * v;
    }
}

static inline void scale(const job_t *job, const scalar *x, scalar *y, long i, long n,
                         const wide *r, int rows, int round) {
    vec gain = get_wide(job->gain + i, n);
    for (int k = 0; k < rows; k++) {
        vec v = get(x + k * job->dim + i, n) * r[k];
        put(y + k * job->dim + i, (round ? rounded(v) : v) * gain, n);
    }
}

static inline void forward_rows(const job_t *job, long first, int rows, int round) {
    const long dim = job->dim, whole = dim / LANES * LANES;
    const scalar *x = job->x + first * dim;
    scalar *y = job->y + first * dim;
    vec lanes[ROWS];
    wide r[ROWS];
    for (int k = 0; k < rows; k++) lanes[k] = splat(0);
    for (long i = 0; i < whole; i += LANES) add_squares(job, x, i, LANES, lanes, rows);
    if (whole < dim) add_squares(job, x, whole, dim - whole, lanes, rows);
    sum_rows(lanes, r, rows);
    for (int k = 0; k < rows; k++) {
        wide mean_square = r[k] / (wide)dim + job->eps;
        r[k] = mean_square == 0 ? 0 : 1 / sqrt(mean_square); /* eps = 0: a row of zeros stays */
        if (job->r) job->r[first + k] = r[k];
    }
    for (long i = 0; i < whole; i += LANES) scale(job, x, y, i, LANES, r, rows, round);
    if (whole < dim) scale(job, x, y, whole, dim - whole, r, rows, round);
}

static inline void add_products(const job_t *job, const scalar *x, const scalar *g, long i, long n,
                                const wide *r, wide *dgain, vec *lanes, int rows) {
    vec gain = get_wide(job->gain + i, n), sum = get_wide(dgain + i, n);
    for (int k = 0; k < rows; k++) {
        vec gx = get(g + k * job->dim + i, n) * get(x + k * job->dim + i, n);
        sum += gx * r[k];
        lanes[k] += gx * gain;
    }
    n == LANES ? store(dgain + i, sum) : store_some(dgain + i, sum, n);
}

static inline void combine(const job_t *job, const scalar *x, const scalar *g, scalar *dx, long i,
                           long n, const wide *r, const wide *r_mean, int rows) {
    vec gain = get_wide(job->gain + i, n);
    for (int k = 0; k < rows; k++) {
        vec xv = get(x + k * job->dim + i, n), gv = get(g + k * job->dim + i, n);
        put(dx + k * job->dim + i, r[k] * (gv * gain - xv * r_mean[k]), n);
    }
}

static inline void backward_rows(const job_t *job, long first, wide *dgain, int rows) {
    const long dim = job->dim, whole = dim / LANES * LANES;
    const scalar *x = job->x + first * dim, *g = job->grad + first * dim;
    scalar *dx = job->dx + first * dim;
    vec lanes[ROWS];
    wide r[ROWS], r_mean[ROWS];
    for (int k = 0; k < rows; k++) {
        lanes[k] = splat(0);
        r[k] = job->r[first + k];
    }
    for (long i = 0; i < whole; i += LANES) add_products(job, x, g, i, LANES, r, dgain, lanes, rows);
    if (whole < dim) add_products(job, x, g, whole, dim - whole, r, dgain, lanes, rows);
    sum_rows(lanes, r_mean, rows);
    /* r mean(g gain n), in an order in which r * r cannot overflow */
    for (int k = 0; k < rows; k++) r_mean[k] = r[k] * r_mean[k] / (wide)dim * r[k];
    for (long i = 0; i < whole; i += LANES) combine(job, x, g, dx, i, LANES, r, r_mean, rows);
    if (whole < dim) combine(job, x, g, dx, whole, dim - whole, r, r_mean, rows);
}

static long share(const job_t *job, long thread) { /* the first chunk that is this thread's */
    return job->chunks * thread / job->threads;
}

/* Sets first and returns how many rows of the next chunk there are; 0: all chunks are taken. */
static long claim(job_t *job, long *first) {
    const long me = job->threads > 1 ? openmp_thread() : 0;
    for (long i = 0; i < job->threads; i++) {
        long thread = (me + i) % job->threads;
        long chunk = atomic_fetch_add(&job->next[thread], 1);
        if (chunk < share(job, thread + 1)) {
            *first = chunk * job->chunk_rows;
            long left = job->rows - *first;
            return left < job->chunk_rows ? left : job->chunk_rows;
        }
    }
    return 0;
}

static void forward_chunks(void *argument) {
    job_t *job = argument;
    const long dim = job->dim;
    const int round = job->cast_first && sizeof(scalar) < sizeof(wide);
    for (long row, rows; (rows = claim(job, &row));) {
        const long end = row + rows;
        for (; dim < SHORT_DIM && row + ROWS <= end; row += ROWS)
            round ? forward_rows(job, row, ROWS, 1) : forward_rows(job, row, ROWS, 0);
        for (; row < end; row++) forward_rows(job, row, 1, round);
    }
}

static void backward_chunks(void *argument) {
    job_t *job = argument;
    const long dim = job->dim;
    for (long row, rows; (rows = claim(job, &row));) {
        const long end = row + rows;
        wide *dgain = job->partials + row / job->chunk_rows * dim;
        memset(dgain, 0, (size_t)dim * sizeof(wide));
        for (; dim < SHORT_DIM && row + ROWS <= end; row += ROWS) backward_rows(job, row, dgain, ROWS);
        for (; row < end; row++) backward_rows(job, row, dgain, 1);
    }
}

static void cut(job_t *job) {
    long few_chunks = (job->rows + MAX_CHUNKS - 1) / MAX_CHUNKS;
    long big_chunks = (CHUNK_SIZE + job->dim - 1) / job->dim;
    job->chunk_rows = few_chunks > big_chunks ? few_chunks : big_chunks;
    job->chunks = (job->rows + job->chunk_rows - 1) / job->chunk_rows;
}

static void run(void (*chunks)(void *), job_t *job, int threads) {
    job->threads = !openmp_parallel || threads < 1 ? 1 : threads > MAX_CHUNKS ? MAX_CHUNKS : threads;
    for (long thread = 0; thread < job->threads; thread++)
        atomic_init(&job->next[thread], share(job, thread));
    if (job->threads > 1)
        openmp_parallel(chunks, job, (unsigned)job->threads, 0);
    else
        chunks(job);
}

void rms_norm_forward(const scalar *x, const wide *gain, scalar *y, wide *r, long rows, long dim,
                      double eps, int cast_first, int threads) {
    job_t job = {.x = x, .gain = gain, .y = y, .r = r, .rows = rows, .dim = dim,
                 .eps = (wide)eps, .cast_first = cast_first};
    cut(&job);
    run(forward_chunks, &job, threads);
}

/* Returns 0, or -1 if there is no memory for the partial sums. */
int rms_norm_backward(const scalar *grad, const scalar *x, const wide *gain, const wide *r,
                      scalar *dx, wide *dgain, long rows, long dim, int threads) {
    job_t job = {.x = x, .grad = grad, .gain = gain, .r = (wide *)r, .dx = dx, .rows = rows,
                 .dim = dim};
    cut(&job);
    memset(dgain, 0, (size_t)dim * sizeof(wide));
    if (job.chunks == 0) return 0;
    job.partials = malloc((size_t)(job.chunks * dim) * sizeof(wide));
    if (!job.partials) return -1;
    run(backward_chunks, &job, threads);
    for (long chunk = 0; chunk < job.chunks; chunk++)
        for (long i = 0; i < dim; i++) dgain[i] += job.partials[chunk * dim + i];
    free(job.partials);
    return 0;
}
