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

#define PARTS 16        /* partial sums of a row: enough for a vector, in an order that is fixed */
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

/* In steps of this form compilers keep the lanes in registers. */
static inline wide total(const wide *lane) {
    wide eight[8], four[4];
    for (int j = 0; j < 8; j++) eight[j] = lane[j] + lane[j + 8];
    for (int j = 0; j < 4; j++) four[j] = eight[j] + eight[j + 4];
    return (four[0] + four[2]) + (four[1] + four[3]);
}

static inline void forward_rows(const scalar *restrict x, const wide *restrict gain,
                                scalar *restrict y, wide *restrict r_kept, long rows, long dim,
                                wide eps, int cast_first) {
    for (long row = 0; row < rows; row++, x += dim, y += dim) {
        wide lane[PARTS] = {0}, rest = 0;
        long i = 0;
        for (; i + PARTS <= dim; i += PARTS)
            for (int j = 0; j < PARTS; j++) lane[j] += widen(x[i + j]) * widen(x[i + j]);
        for (; i < dim; i++) rest += widen(x[i]) * widen(x[i]);
        wide mean_square = (total(lane) + rest) / (wide)dim + eps;
        wide r = mean_square == 0 ? 0 : 1 / sqrt(mean_square); /* eps = 0: a row of zeros stays */
        if (r_kept) r_kept[row] = r;
        for (i = 0; i < dim; i++) {
            wide n = widen(x[i]) * r;
            if (cast_first) n = widen(narrow(n));
            y[i] = narrow(n * gain[i]);
        }
    }
}

static inline void backward_rows(const scalar *restrict g, const scalar *restrict x,
                                 const wide *restrict gain, const wide *restrict r_kept,
                                 scalar *restrict dx, wide *restrict dgain, long rows, long dim) {
    for (long row = 0; row < rows; row++, g += dim, x += dim, dx += dim) {
        wide r = r_kept[row], lane[PARTS] = {0}, rest = 0;
        long i = 0;
        for (; i + PARTS <= dim; i += PARTS)
            for (int j = 0; j < PARTS; j++) {
                wide gx = widen(g[i + j]) * widen(x[i + j]);
                dgain[i + j] += gx * r;
                lane[j] += gx * gain[i + j];
            }
        for (; i < dim; i++) {
            wide gx = widen(g[i]) * widen(x[i]);
            dgain[i] += gx * r;
            rest += gx * gain[i];
        }
        /* r mean(g gain n), in an order in which r * r cannot overflow */
        wide r_mean = r * (total(lane) + rest) / (wide)dim * r;
        for (i = 0; i < dim; i++)
            dx[i] = narrow(r * (widen(g[i]) * gain[i] - widen(x[i]) * r_mean));
    }
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
    for (long first, rows; (rows = claim(job, &first));) {
        const scalar *x = job->x + first * job->dim;
        scalar *y = job->y + first * job->dim;
        wide *r = job->r ? job->r + first : NULL;
        if (job->cast_first && sizeof(scalar) < sizeof(wide))
            forward_rows(x, job->gain, y, r, rows, job->dim, job->eps, 1);
        else
            forward_rows(x, job->gain, y, r, rows, job->dim, job->eps, 0);
    }
}

static void backward_chunks(void *argument) {
    job_t *job = argument;
    const long dim = job->dim;
    for (long first, rows; (rows = claim(job, &first));) {
        wide *dgain = job->partials + first / job->chunk_rows * dim;
        memset(dgain, 0, (size_t)dim * sizeof(wide));
        backward_rows(job->grad + first * dim, job->x + first * dim, job->gain, job->r + first,
                      job->dx + first * dim, dgain, rows, dim);
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
